//! Watchdog: tells a dead or stuck rank from a slow one. It is a thread in each process with its own connections, so it
//! works when the backend does not.
//!
//! All ranks send what they are doing to one of them, rank 0, every quarter of a second, and it to them. A connection that
//! closes without a goodbye is a rank that was killed or crashed; one that is silent for `distributed.heartbeat_timeout_s`
//! a rank that is stopped. A rank that ends with an error says so first. Then the watching rank asks all others for their
//! records, finds out who was at fault ([`crate::flight::diagnose`]), prints one report, and all end. Where the watching rank
//! itself is lost, the others connect to the lowest rank that answers, which takes over.
//!
//! A call of MPI that does not return keeps the program from looking at its deadline: then this thread gives up for it.
//!
//! The watchdog runs as long as the process. A rank that ends normally announces it, and keeps sending
//! heartbeats until its process exits and its connection closes, so that a process stopped during its exit is
//! noticed too. Rank 0 ends last, once all other connections have closed.
//!
//! A rank that moves on, however slowly, is never at fault.

mod connect;
mod frame;
mod last_resort;
mod peers;
mod start;
mod watch;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use isobar_collectives::flight::Flight;

use crate::flight::{Own, Peer, RankOutcome};

pub(crate) use last_resort::StartGuard;
pub(crate) use start::{Options, start};

/// Interval of heartbeats.
const BEAT: Duration = Duration::from_millis(250);

/// Time that a rank which ends with an error waits for the report to be printed.
const FAREWELL: Duration = Duration::from_secs(4);

/// Time that a rank which ends normally waits for its goodbye to be sent.
const GOODBYE: Duration = Duration::from_secs(1);

/// The watchdog of this process.
#[derive(Clone)]
pub(crate) struct Watchdog(Arc<Shared>);

/// State shared by the program and the watchdog thread.
struct Shared {
    own: Own,
    flight: Flight,
    /// Time that an operation, or the exit of the process, may take.
    deadline: Duration,
    folder: Mutex<PathBuf>,
    /// True if a rank was lost, or has ended with an error.
    lost: AtomicBool,
    /// True if this process was asked to end, for a reason that it does not know yet.
    asked: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Fate of this rank, once it ends.
    leaving: Option<RankOutcome>,
    /// True if [`Watchdog::leave`] may return: the report is printed, or none is needed.
    done: bool,
    /// True once all ranks that this one watches have ended.
    over: bool,
    /// True if another watchdog has replaced this one in the process, or the ranks have none.
    closed: bool,
    /// Time at which the main thread began to end the process.
    exiting: Option<Instant>,
    /// The error that the rank that watches ended with, once it is known.
    said: Option<String>,
    /// True if that rank prints a report.
    reported: bool,
}

impl Watchdog {
    /// Returns whether no rank was lost.
    pub(crate) fn peers_alive(&self) -> bool {
        !self.0.lost.load(Ordering::Relaxed)
    }

    /// This process was asked to end: by somebody outside, or by a launcher that knows of a loss before the ranks do. Until it
    /// is known, less silence than otherwise means a loss.
    pub(crate) fn set_asked(&self, asked: bool) {
        self.0.asked.store(asked, Ordering::Relaxed);
    }

    /// Folder of flight records.
    pub(crate) fn set_folder(&self, folder: PathBuf) {
        *self.0.folder.lock().unwrap_or_else(PoisonError::into_inner) = folder;
    }

    /// This rank ends because of an error or a panic: the others are told, and it returns when the report was printed, or
    /// none is needed, in bounded time. Returns whether another rank has printed the same error, or a report that says why
    /// this one gave up.
    pub(crate) fn fail(&self, why: &str, panicked: bool) -> bool {
        let why = crate::flight::plain(why);
        let outcome = match (panicked, self.0.flight.trouble()) {
            (true, _) => RankOutcome::Panicked(why),
            (false, Some(_)) => RankOutcome::GaveUp(why),
            (false, None) => RankOutcome::Failed(why),
        };
        let gave_up = matches!(outcome, RankOutcome::GaveUp(_));
        let own = outcome.text().map(str::to_owned);
        self.leave(outcome, FAREWELL);
        let state = self.0.state();
        let same = own.is_some() && state.said == own;
        same || (gave_up && state.reported)
    }

    /// Announces that this rank ends normally. It watches and is watched until its process has exited.
    pub(crate) fn stop(&self) {
        self.leave(RankOutcome::Ended, GOODBYE);
    }

    /// Stops the watchdog at once.
    fn close(&self) {
        self.0.state().closed = true;
        self.0.changed.notify_all();
    }

    /// Prepares the end of the process. Rank 0 waits until all others have exited, for at most twice the
    /// deadline: no other process would notice a rank that is stopped during its exit.
    fn see_out(&self) {
        let shared = &self.0;
        let mut state = shared.state();
        if state.closed || state.leaving != Some(RankOutcome::Ended) {
            return;
        }
        let now = Instant::now();
        state.exiting = Some(now);
        while shared.own.rank == 0 && !state.over && !state.closed {
            // If a rank is lost, the watching thread ends the process itself.
            let left = shared.longest_exit().saturating_sub(now.elapsed());
            if left.is_zero() {
                break;
            }
            let left = left.min(FAREWELL);
            state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn leave(&self, outcome: RankOutcome, longest: Duration) {
        let end = Instant::now() + longest;
        let mut state = self.0.state();
        state.leaving.get_or_insert(outcome);
        self.0.changed.notify_all();
        while !state.done {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.0.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The watchdog that this process has, or had last.
static LAST: Mutex<Option<Watchdog>> = Mutex::new(None);

/// Gives the process this watchdog, in the place of one whose watch has ended.
fn replace(watchdog: Option<Watchdog>) {
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(last) = std::mem::replace(&mut *last, watchdog) {
        last.close();
    }
}

/// Runs when the main thread is about to end the process, after the ranks' last messages.
pub(crate) fn at_exit() {
    let last = LAST.lock().unwrap_or_else(PoisonError::into_inner).clone();
    last.iter().for_each(Watchdog::see_out);
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leaving(&self) -> Option<RankOutcome> {
        self.state().leaving.clone()
    }

    /// Sleeps a little, or until the program says that it leaves.
    fn rest(&self, longest: Duration) {
        let state = self.state();
        let (leaving, done) = (state.leaving.is_some(), state.done);
        if !leaving && !done {
            drop(self.changed.wait_timeout(state, longest));
        } else {
            drop(state);
            std::thread::sleep(if done { longest } else { longest.min(Duration::from_millis(10)) });
        }
    }

    /// There is nothing left to do; whoever waits in [`Watchdog::leave`] goes on.
    fn done(&self) {
        self.state().done = true;
        self.changed.notify_all();
    }

    /// Returns the time limit of the end of the process. Rank 0 waits for others that may need as long, or be lost.
    fn longest_exit(&self) -> Duration {
        let longest = self.deadline.max(Duration::from_secs(2));
        if self.own.rank == 0 { longest.saturating_mul(2).saturating_add(FAREWELL * 2) } else { longest }
    }

    /// All that this rank watches has ended.
    fn over(&self) {
        let mut state = self.state();
        (state.done, state.over) = (true, true);
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the state of this rank.
    fn peer(&self, outcome: RankOutcome) -> Peer {
        let (phase, step) = self.flight.phase();
        Peer {
            rank: self.own.rank,
            host: self.own.host.clone(),
            pid: self.own.pid,
            phase,
            step,
            last: self.flight.entries(1, false).pop(),
            outcome,
        }
    }
}

impl std::fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "watchdog of rank {} of {}", self.0.own.rank, self.0.own.ranks)
    }
}
