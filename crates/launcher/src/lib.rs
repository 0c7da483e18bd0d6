//! `isobar launch`: starts ranks on this machine, and on others by ssh; reports which failed first, and restarts them.
//!
//! It reads what ranks print and how they end, and takes no part in their communication.

mod attempt;
mod cause;
mod guard;
mod hosts;
mod out_of_memory;
mod output;
mod process;
mod remote;
mod screen;
mod secret;

use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use isobar_manager::launch::{LAUNCH_ATTEMPT, LAUNCH_ID, detect};
use isobar_manager::{Environment, flight};
use isobar_rendezvous::FreePort;
use nix::sys::signal::Signal;
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use self::attempt::Outcome;
use self::cause::{ExitReason, Root};
use self::guard::Guard;
use self::hosts::Place;
use self::output::Outputs;
use self::process::{Event, Recipe};
use self::screen::Stream;
use self::secret::Secret;
use isobar_command::exit::{Because, Exit};
use isobar_command::terminal;

/// Arguments of `isobar launch`.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// Number of ranks; by default as many as the hosts take
    #[arg(short = 'n', long, value_name = "RANKS", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=65536))]
    ranks: Option<u32>,
    /// Hosts and how many ranks each takes, filled in order: `a:2,b:2`
    #[arg(long, value_name = "HOST:RANKS,...", conflicts_with = "hostfile")]
    hosts: Option<String>,
    /// A file with a host a line: `a:2`, or `a slots=2`
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// Number of restarts of all ranks after a failure that may not recur
    #[arg(long, value_name = "TIMES", default_value_t = 0)]
    max_restarts: u32,
    /// Seconds that ranks have to end by themselves when one has failed, and again once they were sent SIGTERM
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    grace: Duration,
    /// Address by which the ranks reach rank 0; by default that of its host
    #[arg(long, value_name = "HOST")]
    master_addr: Option<String>,
    /// Port on which rank 0 listens; by default a free one, another for each attempt
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    master_port: Option<u16>,
    /// Command that runs another on a host: words of a shell, to which host and command are added
    #[arg(long, value_name = "COMMAND", default_value = "ssh -x -o BatchMode=yes -o ServerAliveInterval=10")]
    ssh: String,
    /// A variable for all ranks, those of other hosts too: as it is here, or with this value; may be given several times
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<String>,
    /// Write what ranks print to files in this folder (`rank_0.out`, `rank_0.err`, ...), and to the terminal rank 0's alone
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Print lines without the prefix of their rank (`[rank 2]`)
    #[arg(long)]
    no_prefix: bool,
    /// The program of a rank, and its arguments
    #[arg(value_name = "COMMAND", required = true, num_args = 1.., trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// Variables that ranks on other hosts get from here unasked.
const PASSED: [&str; 6] = ["ISOBAR_", "PHYSICSNEMO_", "NCCL_", "GLOO_", "OMP_", "RUST_"];
const PASSED_WHOLE: [&str; 2] = ["MODEL_PARALLEL_SIZE", "NO_COLOR"];

const THREADS: &str = "OMP_NUM_THREADS";

/// The first pause before a restart; each is twice the one before.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Runs the command: to the end of the ranks, and to their exit code.
///
/// # Errors
///
/// Hosts that cannot be read, a launcher inside a launch, a process that cannot be started.
pub fn run(args: &LaunchArgs) -> Result<ExitCode> {
    not_among_others()?;
    let places = places(args)?;
    let recipe = recipe(args, places.len())?;
    let (events, happens) = channel();
    listen(events.clone())?;
    let mut guard = Guard::start(args.grace).context("cannot start sh")?;
    let id =
        format!("{:016x}", RandomState::new().hash_one((std::process::id(), std::time::SystemTime::now())));
    let addr = args.master_addr.clone().unwrap_or_else(|| hosts::master(&places));
    let mut number = 0_u32;
    loop {
        number = number.saturating_add(1);
        let (port, _held) = master_port(args)?;
        let variables = |place: &Place| {
            let mut variables = rank_variables(place, places.len());
            variables.extend([("MASTER_ADDR", addr.clone()), ("MASTER_PORT", port.to_string())]);
            variables.extend([(LAUNCH_ID, id.clone()), (LAUNCH_ATTEMPT, number.to_string())]);
            variables.extend(threads(&recipe, place));
            variables
        };
        let outcome = attempt::run(&recipe, &places, variables, number, &mut guard, (&events, &happens))?;
        let code = cause::code(&outcome.ends);
        let finding = outcome.tails.iter().find_map(|(_, tail)| tail.finding());
        let Some(root) = cause::root(&outcome.ends, finding.as_deref()) else {
            return Ok(ended(&outcome, code).into());
        };
        report(&recipe, &outcome, &root);
        if outcome.stopped.is_some() || args.max_restarts == 0 {
            return Ok(code.into());
        }
        if !root.end.how.may_pass() {
            terminal::complain("isobar launch: not started again, since it would fail again");
            return Ok(code.into());
        }
        if number > args.max_restarts {
            terminal::complain(&format!("isobar launch: no restart is left of {}", args.max_restarts));
            return Ok(code.into());
        }
        let pause = PAUSE.saturating_mul(1 << (number - 1).min(5)).min(LONGEST_PAUSE);
        terminal::complain(&format!(
            "isobar launch: all ranks start again in {} s (restart {number} of {}); a run goes on from its last checkpoint",
            pause.as_secs(),
            args.max_restarts
        ));
        if asked_to_end_within(pause, &happens) {
            return Ok(code.into());
        }
    }
}

/// A launcher that is itself one of several ranks would start as many jobs, which know nothing of each other.
fn not_among_others() -> Result<()> {
    if let Ok(launch) = detect(&Environment::from_process(), None)
        && launch.world_size.is_some_and(|size| size > 1)
    {
        bail!(Exit::Usage.because(format!(
            "isobar launch was itself started as one of several ranks (by the variables of {}); start it once, or start the \
             program itself by that launcher",
            launch.method
        )));
    }
    Ok(())
}

fn places(args: &LaunchArgs) -> Result<Vec<Place>> {
    let hosts = match (&args.hosts, &args.hostfile) {
        (Some(text), _) => hosts::of_list(text)?,
        (None, Some(file)) => hosts::of_file(file)?,
        (None, None) => Vec::new(),
    };
    Ok(hosts::places(&hosts, args.ranks.map(|ranks| ranks as usize))?)
}

fn recipe(args: &LaunchArgs, ranks: usize) -> Result<Recipe> {
    let outputs = Outputs::new(args.log_dir.as_deref(), ranks > 1 && !args.no_prefix)?;
    let passed =
        |name: &str| PASSED.iter().any(|prefix| name.starts_with(prefix)) || PASSED_WHOLE.contains(&name);
    let mut variables: Vec<(OsString, OsString)> =
        std::env::vars_os().filter(|(name, _)| passed(&name.to_string_lossy())).collect();
    for word in &args.env {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, OsString::from(value)),
            None => (
                word.as_str(),
                std::env::var_os(word).ok_or_else(|| wrong_variable(word, "is not set here"))?,
            ),
        };
        let plain = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        if name.is_empty()
            || name.starts_with(|first: char| first.is_ascii_digit())
            || !name.chars().all(plain)
        {
            bail!(wrong_variable(word, "is no name of a variable"));
        }
        variables.push((name.into(), value));
    }
    let secret = Secret::taken_from(&mut variables)?;
    Ok(Recipe {
        command: args.command.clone(),
        dir: std::env::current_dir().context("cannot find the current folder")?.into_os_string(),
        ssh: args.ssh.clone(),
        variables,
        secret,
        grace: args.grace,
        outputs,
    })
}

fn wrong_variable(word: &str, problem: &str) -> isobar_command::exit::Ended {
    Exit::Usage.because(format!("--env {word}: it {problem}; give NAME, or NAME=VALUE"))
}

fn rank_variables(place: &Place, ranks: usize) -> Vec<(&'static str, String)> {
    vec![
        ("RANK", place.rank.to_string()),
        ("WORLD_SIZE", ranks.to_string()),
        ("LOCAL_RANK", place.local_rank.to_string()),
        ("LOCAL_WORLD_SIZE", place.local_size.to_string()),
    ]
}

/// The cores of this machine are shared among its ranks, unless the number of threads is given. On other hosts the keeper does so.
fn threads(recipe: &Recipe, place: &Place) -> Option<(&'static str, String)> {
    let given = std::env::var_os(THREADS).is_some_and(|value| !value.is_empty())
        || recipe.variables.iter().any(|(name, _)| name == THREADS);
    if given || !place.here {
        return None;
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    Some((THREADS, (cores / place.local_size).max(1).to_string()))
}

/// Returns the port of rank 0, and its reservation on this host unless the user gave the port.
fn master_port(args: &LaunchArgs) -> Result<(u16, Option<FreePort>)> {
    if let Some(port) = args.master_port {
        return Ok((port, None));
    }
    let held = FreePort::hold().context("no free port from 15000 to 29999; give one with --master-port")?;
    Ok((held.port(), Some(held)))
}

/// Signals to this process become events.
fn listen(events: Sender<Event>) -> Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGUSR1]).context("cannot listen for signals")?;
    let thread = thread::Builder::new().name("isobar-signals".to_owned());
    let spawned = thread.spawn(move || {
        let known = signals.forever().filter_map(|signal| Signal::try_from(signal).ok());
        known.for_each(|signal| drop(events.send(Event::Signal(signal))));
    });
    spawned.map(drop).context("cannot start a thread to listen for signals")
}

/// The code of an attempt in which no rank failed: a job of which a part was never started has not ended well.
fn ended(outcome: &Outcome, code: u8) -> u8 {
    let Some(signal) = outcome.stopped else { return code };
    if outcome.left_out.is_empty() {
        // Ranks that save say so themselves.
        if code == ExitReason::Signal(signal as i32).code() {
            terminal::complain(&format!("isobar launch: {signal} was passed on, and has ended the ranks"));
        }
        return code;
    }
    let (ranks, were) = flight::ranks(&outcome.left_out, "was", "were");
    terminal::complain(&format!("isobar launch: asked to end by {signal}; {ranks} {were} not started"));
    if code == Exit::Good as u8 { ExitReason::Signal(signal as i32).code() } else { code }
}

fn report(recipe: &Recipe, outcome: &Outcome, root: &Root<'_>) {
    let of = |rank: usize| outcome.tails.iter().find(|(of, _)| *of == rank);
    let tail = |rank: usize| of(rank).map(|(_, tail)| tail.lines()).unwrap_or_default();
    let records = outcome.tails.iter().find_map(|(_, tail)| tail.records());
    let file = recipe.outputs.file(root.end.place.rank, Stream::Err).map(|file| file.display().to_string());
    terminal::complain(&cause::report(
        root,
        &outcome.ends,
        &outcome.left_out,
        tail,
        file.as_deref(),
        records.as_deref(),
    ));
}

/// Waits before a restart; whether the launcher was asked to end meanwhile.
fn asked_to_end_within(pause: Duration, happens: &Receiver<Event>) -> bool {
    let end = Instant::now() + pause;
    while let Ok(event) = happens.recv_timeout(end.saturating_duration_since(Instant::now())) {
        if matches!(event, Event::Signal(signal) if signal != Signal::SIGUSR1) {
            return true;
        }
    }
    false
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let seconds = seconds.filter(|seconds| *seconds <= Duration::from_secs(86400));
    seconds.ok_or_else(|| "expected a number of seconds from 0 to 86400".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_never_started_has_not_ended_well() {
        let of = |left_out: &[usize], stopped| {
            let outcome =
                Outcome { ends: Vec::new(), tails: Vec::new(), left_out: left_out.to_vec(), stopped };
            [0, 6].map(|code| ended(&outcome, code))
        };
        assert_eq!(of(&[], None), [0, 6]);
        assert_eq!(of(&[], Some(Signal::SIGTERM)), [0, 6]);
        assert_eq!(of(&[3, 4], Some(Signal::SIGTERM)), [143, 6]);
    }
}
