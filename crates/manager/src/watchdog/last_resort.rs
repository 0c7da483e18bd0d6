//! Ways to end the process that need neither a new thread nor MPI to return.

use std::io::Write;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Error, Result};

/// The exit code of a job that has lost a rank.
pub(super) const LOST: i32 = crate::ExitReason::Lost as i32;

/// Longest normal pause of a watching thread. A longer one means that the process was stopped; it is left out of the silence of others.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// Returns for how long this thread was stopped since `looked`; zero for pauses of at most [`PAUSE`]. That time does not count as the
/// silence of others.
pub(super) fn stopped_since(looked: Instant) -> Duration {
    let pause = looked.elapsed();
    if pause > PAUSE { pause } else { Duration::ZERO }
}

/// Thread that ends the process on request. It is started before anything goes wrong, because a process at
/// its limit of threads could not start one then.
pub(super) struct Reaper(Sender<Duration>);

impl Reaper {
    pub(super) fn start() -> std::io::Result<Self> {
        let (sender, receiver) = channel();
        thread::Builder::new().name("isobar-end".to_owned()).spawn(move || reap(&receiver))?;
        Ok(Self(sender))
    }

    /// Ends the process after this time, whatever blocks it; the earliest of several requests counts.
    pub(super) fn end_within(&self, longest: Duration) {
        // The thread lives as long as the process or this value.
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

/// Least time allowed for the start of MPI: it loads libraries and contacts daemons on a machine that may be
/// busy.
const START: Duration = Duration::from_secs(20);

/// Watchdog for the start of MPI, before ranks can watch each other: an MPI call that takes longer than the
/// deadline ends the process. `MPI_Init` itself waits for all processes without a deadline.
#[derive(Debug)]
pub(crate) struct StartGuard(#[expect(dead_code, reason = "the thread ends when it is dropped")] Sender<()>);

impl StartGuard {
    /// Starts watching until this value is dropped.
    ///
    /// # Errors
    ///
    /// The system cannot start a thread.
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
        let stopped = stopped_since(looked);
        let same = seen.filter(|&(number, _)| Some(number) == call);
        let same = same.map(|(number, since)| (number, since + stopped));
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
