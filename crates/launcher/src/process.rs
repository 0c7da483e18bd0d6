//! Ranks as processes: started here or by ssh, signalled with all that they have started, and never left behind.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use isobar_manager::launch::{LAUNCH_PROGRESS, TOKEN, pipe_identity};
use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::cause::ExitReason;
use super::guard::Guard;
use super::hosts::Place;
use super::output::{Outputs, Tail};
use super::remote;
use super::screen::Stream;
use super::secret::Secret;
use isobar_command::exit::{Because, Exit};

/// Recipe to start ranks.
#[derive(Debug)]
pub(super) struct Recipe {
    pub(super) command: Vec<OsString>,
    /// The folder in which ranks of other hosts start; those of this one start where the launcher is.
    pub(super) dir: OsString,
    /// Words of a shell, before the host.
    pub(super) ssh: String,
    /// Variables for all ranks, those of other hosts too.
    pub(super) variables: Vec<(OsString, OsString)>,
    /// And the one that nobody else may see.
    pub(super) secret: Secret,
    pub(super) grace: Duration,
    pub(super) outputs: Outputs,
}

/// Events of ranks and of the launcher.
#[derive(Debug)]
pub(super) enum Event {
    /// The host of a rank of an attempt was reached.
    Connected { attempt: u32, rank: usize },
    /// A rank of an attempt has ended.
    Ended { attempt: u32, rank: usize, how: ExitReason },
    /// All that it wrote, and all that its children wrote, has been passed on.
    Drained { attempt: u32 },
    /// The launcher was sent a signal.
    Signal(Signal),
}

/// A rank that was started.
pub(super) struct Rank {
    pub(super) place: Place,
    pub(super) pid: u32,
    pub(super) tail: Tail,
    /// True once its host was reached.
    pub(super) connected: bool,
    pub(super) began: Instant,
    /// Channel to the keeper of a rank on another host.
    control: Option<ChildStdin>,
}

impl Rank {
    /// Starts it; what becomes of it is told to `events`.
    pub(super) fn start(
        recipe: &Recipe,
        place: &Place,
        variables: &[(&str, String)],
        attempt: u32,
        guard: &Guard,
        events: &Sender<Event>,
    ) -> Result<Self> {
        let tail = Tail::default();
        let (rank, connected) = (place.rank, events.clone());
        let out = recipe.outputs.sink(rank, Stream::Out, &tail)?.greeted(remote::HERE, move || {
            // The launcher is there as long as its ranks; if not, nobody wants to know.
            let _ = connected.send(Event::Connected { attempt, rank });
        });
        let err = recipe.outputs.sink(place.rank, Stream::Err, &tail)?;
        let mut command = match place.here {
            true => here(recipe, variables),
            false => elsewhere(recipe, place, variables),
        };
        // A process group of its own: a signal to it reaches all that the rank has started.
        command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
        if place.here {
            guard.watch(&mut command)?;
        }
        let progress = if rank == 0 && place.here && recipe.outputs.screen.draws() {
            Some(progress_pipe(&mut command)?)
        } else {
            None
        };
        let mut child = command.spawn().map_err(|error| {
            let program = recipe.command.first().map(|word| word.display().to_string()).unwrap_or_default();
            Exit::Usage.because(format!("cannot start {program}: {error}"))
        })?;
        let (pid, mut control) = (child.id(), child.stdin.take());
        if let Some(control) = &mut control {
            // If ssh has ended at once, its exit event reports it.
            let _ = control.write_all(&[recipe.secret.value().as_bytes(), b"\n"].concat());
        }
        // The command holds the pipe open for writing.
        drop(command);
        let stdout = child.stdout.take();
        let stderr: Option<Box<dyn Read + Send>> = match (progress, child.stderr.take()) {
            (Some(pipe), _) => Some(Box::new(pipe)),
            (None, stderr) => stderr.map(|stderr| Box::new(stderr) as _),
        };
        let (here, events) = (place.here, events.clone());
        let started = || -> io::Result<()> {
            let readers = [
                stdout.map(|stdout| thread::Builder::new().spawn(move || out.take(stdout))).transpose()?,
                stderr.map(|stderr| thread::Builder::new().spawn(move || err.take(stderr))).transpose()?,
            ];
            let waits = move || {
                let how = wait(&mut child, here);
                let _ = events.send(Event::Ended { attempt, rank, how });
                readers.into_iter().flatten().for_each(|reader| drop(reader.join()));
                let _ = events.send(Event::Drained { attempt });
            };
            thread::Builder::new().spawn(waits).map(drop)
        };
        if let Err(error) = started() {
            // Nobody would notice the end of the rank.
            let _ = killpg(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
            bail!("rank {rank} is not started, since no thread can be made to watch it: {error}");
        }
        Ok(Self { place: place.clone(), pid, tail, connected: place.here, began: Instant::now(), control })
    }

    /// Sends a signal to the rank and to all that it has started.
    pub(super) fn signal(&mut self, signal: Signal) {
        match &mut self.control {
            // A process that has ended cannot be signalled.
            None => killpg(self.group(), signal).unwrap_or(()),
            Some(control) => {
                let name = signal.as_str().trim_start_matches("SIG");
                // If ssh has ended, there is no one to notify.
                let _ = control.write_all(format!("{name}\n").as_bytes());
            }
        }
    }

    /// Lets the keeper of a rank on another host, which has ended or is not reached, end all that is left there; ends ssh.
    pub(super) fn let_go(&mut self) {
        if self.control.take().is_some() {
            killpg(self.group(), Signal::SIGKILL).unwrap_or(());
        }
    }

    /// Returns whether processes that the rank has started are left, after its own end.
    pub(super) fn has_left(&self) -> bool {
        self.place.here && killpg(self.group(), None) != Err(Errno::ESRCH)
    }

    fn group(&self) -> Pid {
        Pid::from_raw(self.pid.cast_signed())
    }
}

/// Makes a pipe the command's standard error and passes its identity on; progress records from it
/// are drawn.
fn progress_pipe(command: &mut Command) -> Result<PipeReader> {
    let (reader, writer) = std::io::pipe()?;
    let writer = File::from(OwnedFd::from(writer));
    command.env(LAUNCH_PROGRESS, pipe_identity(&writer.metadata()?)).stderr(writer);
    Ok(reader)
}

fn here(recipe: &Recipe, variables: &[(&str, String)]) -> Command {
    let mut words = recipe.command.iter();
    let mut command = Command::new(words.next().map_or(OsStr::new(""), OsString::as_os_str));
    command.args(words).stdin(Stdio::null());
    command.envs(recipe.variables.iter().map(|(name, value)| (name, value)));
    command.env(TOKEN, recipe.secret.value());
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    command
}

/// ssh, by a shell, since it may be several words.
fn elsewhere(recipe: &Recipe, place: &Place, variables: &[(&str, String)]) -> Command {
    let own = variables.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
    let all: Vec<(OsString, OsString)> = recipe.variables.iter().cloned().chain(own).collect();
    let line =
        remote::command_line(&recipe.dir, &all, recipe.grace.as_secs_f64().ceil() as u64, &recipe.command);
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("exec {} \"$@\"", recipe.ssh)).args(["ssh", &place.host]).arg(line);
    command.stdin(Stdio::piped());
    command
}

fn wait(child: &mut Child, here: bool) -> ExitReason {
    let of = |status: ExitStatus| match (status.code(), status.signal()) {
        (Some(code), _) if here => ExitReason::Code(code as u8),
        (Some(code), _) => ExitReason::of_shell(code as u8),
        (None, Some(signal)) => ExitReason::Signal(signal),
        (None, None) => ExitReason::Never,
    };
    child.wait().map_or(ExitReason::Never, of)
}
