//! Operators of a program that run on this thread: while one does, its name stands for the built-in operator.

use std::cell::RefCell;

thread_local! {
    static NAMES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// An operator that runs until this is dropped.
pub(super) struct Running;

impl Running {
    pub(super) fn new(name: &str) -> Self {
        NAMES.with_borrow_mut(|names| names.push(name.to_owned()));
        Self
    }

    /// Returns whether an operator of that name runs.
    pub(super) fn is(name: &str) -> bool {
        NAMES.with_borrow(|names| names.iter().any(|running| running == name))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        NAMES.with_borrow_mut(|names| names.pop());
    }
}
