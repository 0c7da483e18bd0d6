//! Who tells a dead or stuck rank from a slow one: a thread in each process, on connections of its own beside those of the
//! backend, so that it works when the backend does not.
//!
//! All ranks send what they are doing to one of them, rank 0, every quarter of a second, and it to them. A connection that
//! closes without a goodbye is a rank that was killed or crashed; one that is silent for `distributed.heartbeat_timeout_s`
//! a rank that is stopped. A rank that ends with an error says so first. Then the watching rank asks all others for their
//! records, finds out who was at fault ([`crate::flight::diagnose`]), prints one report, and all end. Where the watching rank
//! itself is lost, the others connect to the lowest rank that answers, which takes over.
//!
//! A call of MPI that does not return keeps the program from looking at its deadline: then this thread gives up for it.
//!
//! A rank that moves on, however slowly, is never at fault.

mod frame;
mod peers;
mod start;
mod watch;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use isobar_collectives::flight::Flight;

use crate::flight::{Fate, Own, Peer};

pub(crate) use start::{Options, start};

/// How often ranks tell that they are well.
const BEAT: Duration = Duration::from_millis(250);

/// How long a rank that ends with an error waits for the report to be printed.
const FAREWELL: Duration = Duration::from_millis(2500);

/// How long a rank that ends in good order waits for its goodbye to be sent.
const GOODBYE: Duration = Duration::from_secs(1);

/// The watchdog of this process.
#[derive(Clone)]
pub(crate) struct Watchdog(Arc<Shared>);

/// What the program and the watching thread share.
struct Shared {
    own: Own,
    flight: Flight,
    folder: Mutex<PathBuf>,
    /// Whether a rank was lost, or has ended with an error.
    lost: AtomicBool,
    /// Whether this process was asked to end, and does not know yet why.
    asked: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// How this rank ends, once it does.
    leaving: Option<Fate>,
    /// Whether the watching thread has done what there was to do.
    done: bool,
}

impl Watchdog {
    /// Whether no rank was lost.
    pub(crate) fn peers_alive(&self) -> bool {
        !self.0.lost.load(Ordering::Relaxed)
    }

    /// This process was asked to end: by somebody outside, or by a launcher that knows of a loss before the ranks do. Until it
    /// is known, less silence than otherwise means a loss.
    pub(crate) fn set_asked(&self, asked: bool) {
        self.0.asked.store(asked, Ordering::Relaxed);
    }

    /// Where records go.
    pub(crate) fn set_folder(&self, folder: PathBuf) {
        *self.0.folder.lock().unwrap_or_else(PoisonError::into_inner) = folder;
    }

    /// This rank ends because of an error or a panic: the others are told, and it returns when the report was printed, or
    /// none is needed, in bounded time.
    pub(crate) fn fail(&self, why: &str, panicked: bool) {
        let why = crate::flight::plain(why);
        let fate = match (panicked, self.0.flight.trouble()) {
            (true, _) => Fate::Panicked(why),
            (false, Some(_)) => Fate::GaveUp(why),
            (false, None) => Fate::Failed(why),
        };
        self.leave(fate, FAREWELL);
    }

    /// This rank ends in good order.
    pub(crate) fn stop(&self) {
        self.leave(Fate::Ended, GOODBYE);
    }

    fn leave(&self, fate: Fate, longest: Duration) {
        let end = Instant::now() + longest;
        let mut state = self.0.state();
        state.leaving.get_or_insert(fate);
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

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leaving(&self) -> Option<Fate> {
        self.state().leaving.clone()
    }

    /// Sleeps a little, or until the program says that it leaves.
    fn rest(&self, longest: Duration) {
        let state = self.state();
        if state.leaving.is_none() && !state.done {
            drop(self.changed.wait_timeout(state, longest));
        } else {
            drop(state);
            std::thread::sleep(longest.min(Duration::from_millis(10)));
        }
    }

    /// There is nothing left to do; whoever waits in [`Watchdog::leave`] goes on.
    fn done(&self) {
        self.state().done = true;
        self.changed.notify_all();
    }

    /// What this rank is doing.
    fn peer(&self, fate: Fate) -> Peer {
        let (phase, step) = self.flight.phase();
        Peer {
            rank: self.own.rank,
            host: self.own.host.clone(),
            pid: self.own.pid,
            phase,
            step,
            last: self.flight.entries(1, false).pop(),
            fate,
        }
    }
}

impl std::fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "watchdog of rank {} of {}", self.0.own.rank, self.0.own.ranks)
    }
}
