//! Ranks whose messages an operation lacks when its deadline has passed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Ranks that an operation's requests wait for. Requests add them only when asked, at their next poll: until the deadline nobody needs
/// them.
#[derive(Debug, Default)]
pub(crate) struct Awaited {
    asked: AtomicBool,
    ranks: Mutex<Vec<usize>>,
}

impl Awaited {
    /// Asks for the ranks.
    pub(crate) fn ask(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// Adds the ranks of the world that a request waits for.
    pub(crate) fn add(&self, ranks: &[usize]) {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner).extend(ranks);
    }

    /// Returns the ranks in order, each once.
    pub(crate) fn ranks(&self) -> Vec<usize> {
        let mut ranks = self.ranks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}
