//! Commands that run until a deadline, and what they print.

use std::{
    io::{self, BufRead, BufReader, PipeReader, Write},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use isobar_harness::wait_within;

use crate::run::{ROOT, line};

/// Time that processes that a command left behind have to close its output.
const DRAIN: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Runs `command` with the output of this process. Returns true if it succeeded before `end`.
pub(super) fn finish(command: &mut Command, end: Instant) -> Result<bool> {
    let words = line(command);
    let child = start(command, &words)?;
    succeeded(wait(child, end), &words)
}

/// Runs `command`, and gives each line of its standard output to `read`. Returns true if it succeeded before `end`.
pub(super) fn read_output(mut command: Command, end: Instant, mut read: impl FnMut(&str)) -> Result<bool> {
    let words = line(&command);
    let (output, writer) = io::pipe().context("failed to make a pipe")?;
    let child = start(command.stdout(writer), &words)?;
    // It holds the other end of the pipe.
    drop(command);
    let waited = wait(child, end);
    for_each_line(&lines(output), &waited, |line| read(&line.text));
    succeeded(waited, &words)
}

/// A command that runs, and whose output waits to be read.
pub(super) struct Running {
    words: String,
    output: Receiver<Line>,
    waited: Waited,
}

impl Running {
    /// Starts `command`, to be ended at `end`.
    pub(super) fn start(mut command: Command, end: Instant) -> Result<Self> {
        let words = line(&command);
        let (output, writer) = io::pipe().context("failed to make a pipe")?;
        let errors = writer.try_clone().context("failed to make a pipe")?;
        let child = start(command.stdout(writer).stderr(errors), &words)?;
        Ok(Self { words, output: lines(output), waited: wait(child, end) })
    }

    /// Shows all that the command prints, and gives each line to `read` with the time at which it came: those of standard
    /// output and standard error in the order in which they were written. Returns true if it succeeded before its end.
    pub(super) fn show_and_read(self, mut read: impl FnMut(&str, Instant)) -> Result<bool> {
        let mut terminal = io::stdout();
        for_each_line(&self.output, &self.waited, |line| {
            // A reader of our output that went away is no reason to leave tests behind.
            writeln!(terminal, "{}", line.text).unwrap_or(());
            read(&line.text, line.came);
        });
        succeeded(self.waited, &self.words)
    }
}

type Waited = JoinHandle<io::Result<Option<ExitStatus>>>;

fn start(command: &mut Command, words: &str) -> Result<Child> {
    eprintln!("$ {words}");
    command.current_dir(&*ROOT).stdin(Stdio::null());
    command.spawn().with_context(|| format!("failed to start `{words}`"))
}

/// Waits in another thread, which ends the command at the deadline.
fn wait(mut child: Child, end: Instant) -> Waited {
    thread::spawn(move || wait_within(&mut child, end.saturating_duration_since(Instant::now())))
}

fn succeeded(waited: Waited, words: &str) -> Result<bool> {
    let status = waited.join().ok().context("failed to wait for a command")??;
    if status.is_none() {
        println!("`{words}` was ended at the deadline; --minutes sets another");
    }
    Ok(status.is_some_and(|status| status.success()))
}

/// A line of output.
struct Line {
    text: String,
    came: Instant,
}

/// Reads lines in another thread, until all writers have closed the pipe.
fn lines(output: PipeReader) -> Receiver<Line> {
    let (send, receive) = channel();
    thread::spawn(move || {
        for bytes in BufReader::new(output).split(b'\n').map_while(io::Result::ok) {
            let line = Line { text: String::from_utf8_lossy(&bytes).into_owned(), came: Instant::now() };
            if send.send(line).is_err() {
                return;
            }
        }
    });
    receive
}

/// Reads to the end of the output, or until the command has ended and only processes that it left still hold the pipe.
fn for_each_line(lines: &Receiver<Line>, waited: &Waited, mut read: impl FnMut(&Line)) {
    let mut ended: Option<Instant> = None;
    loop {
        match lines.recv_timeout(LOOK_EVERY) {
            Ok(line) => read(&line),
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                if ended.is_none() && waited.is_finished() {
                    ended = Some(Instant::now());
                }
                if ended.is_some_and(|at| at.elapsed() > DRAIN) {
                    println!("processes that a command started still hold its output");
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn output_and_errors_come_in_order() {
        let mut read = Vec::new();
        let script = "echo a; echo b >&2; echo c; exit 3";
        let running = Running::start(shell(script), soon()).unwrap();
        assert!(!running.show_and_read(|text, _| read.push(text.to_owned())).unwrap());
        assert_eq!(read, ["a", "b", "c"]);
    }

    /// A line that is read late has the time at which it came.
    #[test]
    fn commands_run_side_by_side() {
        let scripts = ["sleep 2; echo a", "echo b"];
        let running = scripts.map(|script| Running::start(shell(script), soon()).unwrap());
        let mut came = Vec::new();
        for running in running {
            assert!(running.show_and_read(|text, at| came.push((text.to_owned(), at))).unwrap());
        }
        assert_eq!(came.iter().map(|(text, _)| text.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert!(came[1].1 < came[0].1);
    }

    #[test]
    fn a_process_left_behind_does_not_hold_the_run() {
        let mut read = Vec::new();
        assert!(
            read_output(shell("echo a; sleep 50 & exit 0"), soon(), |text| read.push(text.to_owned()))
                .unwrap()
        );
        assert_eq!(read, ["a"]);
    }

    #[test]
    fn the_deadline_ends_a_command() {
        let begun = Instant::now();
        assert!(!finish(&mut shell("exec sleep 50"), begun + Duration::from_millis(10)).unwrap());
        assert!(begun.elapsed() < Duration::from_secs(45));
    }
}
