//! Choice of the operations that ranks compare, and the state of a comparison.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

/// Choice of the operations that ranks compare before they exchange data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Fingerprints {
    /// None: what messages carry must do.
    Off,
    /// One of every 64 of a group, the first included.
    #[default]
    Sample,
    /// All.
    Always,
}

/// Interval between compared operations if only a sample is compared.
const EVERY: u64 = 64;

impl Fingerprints {
    /// Returns its number, for an atomic.
    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    pub(crate) fn of(code: u8) -> Self {
        match code {
            0 => Self::Off,
            2 => Self::Always,
            _ => Self::Sample,
        }
    }

    /// Returns whether the operation with this sequence number is compared.
    pub(crate) fn compares(self, sequence: u64) -> bool {
        match self {
            Self::Off => false,
            Self::Sample => sequence.is_multiple_of(EVERY),
            Self::Always => true,
        }
    }
}

/// State of an operation's comparison.
#[derive(Debug, Default)]
pub(crate) struct Comparison {
    begun: AtomicBool,
    /// The ranks of the group that have not said yet what they call.
    missing: Mutex<Vec<usize>>,
}

impl Comparison {
    /// Returns true for the first caller only.
    pub(crate) fn begin(&self) -> bool {
        !self.begun.swap(true, Ordering::Relaxed)
    }

    /// The ranks of the group that have not said yet what they call.
    pub(crate) fn missing(&self) -> Vec<usize> {
        self.lock().clone()
    }

    /// Sets the ranks of the group whose descriptions are missing.
    pub(crate) fn wait_for(&self, ranks: Vec<usize>) {
        *self.lock() = ranks;
    }

    /// Records that the description of `rank` has arrived.
    pub(crate) fn came(&self, rank: usize) {
        self.lock().retain(|&other| other != rank);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
