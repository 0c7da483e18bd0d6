//! Results that several tests of a process are compared with.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Results of runs by name, each computed once in a process, by the first test that asks for it.
///
/// # Examples
///
/// ```
/// use isobar_harness::Memo;
///
/// static SQUARES: Memo<u64> = Memo::new();
///
/// for _ in 0..2 {
///     assert_eq!(SQUARES.with("7".into(), || 7 * 7, |square| *square), 49);
/// }
/// ```
pub struct Memo<T>(Mutex<BTreeMap<String, Result<T>>>);

type Result<T> = Arc<Mutex<Option<T>>>;

impl<T> Memo<T> {
    /// Creates an empty one.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Gives `read` the result of this name, which `run` computes where it is missing. Other tests that need it wait meanwhile.
    pub fn with<R>(&self, name: String, run: impl FnOnce() -> T, read: impl FnOnce(&T) -> R) -> R {
        let result = lock(&self.0).entry(name).or_default().clone();
        let mut result = lock(&result);
        read(result.get_or_insert_with(run))
    }
}

impl<T> Default for Memo<T> {
    fn default() -> Self {
        Self::new()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
