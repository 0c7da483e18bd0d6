//! The works of a process that are under way, whatever their results.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A work under way.
pub(super) trait Advance: Send {
    /// Moves on; says whether it is done.
    fn advance(&mut self) -> bool;

    fn is_done(&self) -> bool;
}

/// Moves on a work that nobody waits for any more, but that other ranks may; says whether it is over.
type Dropped = Box<dyn FnMut() -> bool + Send>;

/// The works of a process that are under way.
#[derive(Default)]
pub(crate) struct Outstanding {
    held: Mutex<Vec<Weak<Mutex<dyn Advance>>>>,
    dropped: Mutex<Vec<Dropped>>,
}

impl Outstanding {
    pub(super) fn add(&self, work: &Arc<Mutex<dyn Advance>>) {
        let mut works = lock(&self.held);
        works.retain(|work| work.strong_count() > 0);
        works.push(Arc::downgrade(work));
    }

    /// Takes over a work that its owner has dropped.
    pub(super) fn adopt(&self, work: Dropped) {
        lock(&self.dropped).push(work);
    }

    /// Moves all on. One that another thread moves is left to it.
    pub(super) fn advance(&self) {
        let held: Vec<_> = lock(&self.held).iter().filter_map(Weak::upgrade).collect();
        for work in held {
            if let Ok(mut work) = work.try_lock() {
                work.advance();
            }
        }
        let mut dropped = std::mem::take(&mut *lock(&self.dropped));
        dropped.retain_mut(|work| !work());
        lock(&self.dropped).append(&mut dropped);
    }
}

pub(super) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
