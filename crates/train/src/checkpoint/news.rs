//! State of the other ranks' parts of a save, as known to rank 0.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// State of the other ranks' parts of a save, as known to rank 0.
#[derive(Debug, Clone, Default)]
pub(super) enum Parts {
    /// They may still be written.
    #[default]
    Pending,
    /// All ranks reported at this time that they have written theirs.
    Written(Instant),
    /// A rank reported that it could not.
    Failed {
        /// The rank.
        rank: usize,
        /// Its error message.
        reason: String,
    },
    /// The run ends with an error: ranks that have not written yet will not report.
    Abandoned(Instant),
}

/// [`Parts`], as sent to the thread that waits for them.
#[derive(Debug, Clone, Default)]
pub(super) struct News(Arc<Mutex<Parts>>);

impl News {
    pub(super) fn tell(&self, parts: Parts) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = parts;
    }

    pub(super) fn get(&self) -> Parts {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
