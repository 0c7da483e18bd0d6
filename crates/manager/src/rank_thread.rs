//! Threads that are ranks of their own.

use std::cell::Cell;
use std::marker::PhantomData;

thread_local! {
    /// Number of live bindings of this thread.
    static BINDINGS: Cell<usize> = const { Cell::new(0) };
}

/// Guard that marks the calling thread as a rank of its own while it lives. Not `Send`: it belongs to its thread.
#[derive(Debug)]
pub(crate) struct RankThread(PhantomData<*const ()>);

impl RankThread {
    pub(crate) fn begin() -> Self {
        BINDINGS.with(|bindings| bindings.set(bindings.get() + 1));
        Self(PhantomData)
    }
}

impl Drop for RankThread {
    fn drop(&mut self) {
        let _ = BINDINGS.try_with(|bindings| bindings.set(bindings.get().saturating_sub(1)));
    }
}

/// Returns whether the calling thread is a rank of its own.
pub(crate) fn thread_is_rank() -> bool {
    BINDINGS.try_with(Cell::get).is_ok_and(|bindings| bindings > 0)
}
