//! Ends of the process that depend on nothing else: not on memory for another thread, nor on MPI to return.

use std::io::Write;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::watch::{LOST, PAUSE};
use crate::{Error, Result};

/// A thread that ends the process once it is asked to. It is there before anything has gone wrong: a process that has come to
/// its limit of threads gets no other then.
pub(super) struct Reaper(Sender<Duration>);

impl Reaper {
    pub(super) fn start() -> std::io::Result<Self> {
        let (sender, receiver) = channel();
        thread::Builder::new().name("isobar-end".to_owned()).spawn(move || reap(&receiver))?;
        Ok(Self(sender))
    }

    /// Ends the process after so long, whatever holds it up; the earliest of several ends counts.
    pub(super) fn end_within(&self, longest: Duration) {
        // The thread ends with the process only, or with this value.
        let _ = self.0.send(longest);
    }
}

fn reap(asked: &Receiver<Duration>) {
    let Ok(first) = asked.recv() else { return };
    let mut end = Instant::now() + first;
    loop {
        match asked.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(longest) => end = end.min(Instant::now() + longest),
            Err(RecvTimeoutError::Disconnected) => {
                thread::sleep(end.saturating_duration_since(Instant::now()));
                break;
            }
            Err(RecvTimeoutError::Timeout) => break,
        }
    }
    signal_hook::low_level::exit(LOST);
}

/// The start of MPI may take so long in any case: it loads libraries and talks to daemons, on a machine that may be busy.
const START: Duration = Duration::from_secs(20);

/// Watches the start of MPI, before ranks can watch each other: a call of MPI that takes longer than the deadline ends the
/// process. `MPI_Init` itself waits for all processes without one.
#[derive(Debug)]
pub(crate) struct StartGuard(#[expect(dead_code, reason = "the thread ends when it is dropped")] Sender<()>);

impl StartGuard {
    /// Begins to watch, until this is dropped.
    ///
    /// # Errors
    ///
    /// A system that starts no thread.
    pub(crate) fn start(rank: usize, deadline: Duration) -> Result<Self> {
        let (sender, receiver) = channel();
        let thread = thread::Builder::new().name("isobar-start".to_owned());
        let watch = move || watch_start(rank, deadline.max(START), &receiver);
        let spawned = thread.spawn(watch);
        spawned.map_err(|error| Error::Thread {
            purpose: "watch the start of MPI",
            problem: error.to_string(),
        })?;
        Ok(Self(sender))
    }
}

fn watch_start(rank: usize, longest: Duration, ended: &Receiver<()>) {
    let mut seen: Option<(u64, Instant)> = None;
    let mut looked = Instant::now();
    while ended.recv_timeout(Duration::from_millis(50)) == Err(RecvTimeoutError::Timeout) {
        let call = call_under_way();
        // A process that was stopped itself has not seen how long the call took.
        let same = seen.filter(|&(number, _)| Some(number) == call && looked.elapsed() <= PAUSE);
        seen = same.or(call.map(|call| (call, Instant::now())));
        looked = Instant::now();
        if seen.is_some_and(|(_, since)| since.elapsed() > longest) {
            let text = format!(
                "isobar: the job ends\n  rank {rank} (process {}) waits in the start of MPI, which has not returned for {} s: \
                 another process of this job was lost, is stopped, or has not started (the deadline is set by \
                 distributed.timeout_s, and is at least {} s at the start)\n",
                std::process::id(),
                longest.as_secs_f64(),
                START.as_secs_f64()
            );
            let _ = std::io::stderr().lock().write_all(text.as_bytes());
            signal_hook::low_level::exit(LOST);
        }
    }
}

fn call_under_way() -> Option<u64> {
    #[cfg(feature = "mpi")]
    return isobar_collectives::mpi::call_under_way();
    #[cfg(not(feature = "mpi"))]
    None
}
