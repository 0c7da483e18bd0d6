//! Phase of a rank, packed into one word.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

/// A part of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Phase {
    /// Before the first step.
    #[default]
    Start,
    /// Reading a batch.
    Data,
    /// The forward pass.
    Forward,
    /// The backward pass and the reduction of gradients.
    Backward,
    /// The optimizer's step, clipping included.
    Optimizer,
    /// Saving.
    Checkpoint,
    /// Validation.
    Validation,
}

impl Phase {
    /// All phases, in the order in which a run comes to them.
    pub const ALL: [Self; 7] = [
        Self::Start,
        Self::Data,
        Self::Forward,
        Self::Backward,
        Self::Optimizer,
        Self::Checkpoint,
        Self::Validation,
    ];

    /// The name in reports and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Data => "data",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
            Self::Checkpoint => "checkpoint",
            Self::Validation => "validation",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

type Hook = Box<dyn Fn(Phase, u64) + Send + Sync>;

static HOOK: OnceLock<Hook> = OnceLock::new();

/// Calls `hook` with phase and step whenever a rank of this process enters a phase, on the rank's own thread, for
/// profilers and for tests that make a rank fail in a certain phase. Says whether it is the hook now: the first that is given
/// stays.
pub fn on_phase(hook: impl Fn(Phase, u64) + Send + Sync + 'static) -> bool {
    HOOK.set(Box::new(hook)).is_ok()
}

/// The phase and the step in one word, so that both are read together.
#[derive(Default)]
pub(super) struct Marker(AtomicU64);

/// The bits of the step.
const STEP_BITS: u32 = 56;

impl Marker {
    pub(super) fn set(&self, phase: Phase, step: u64) {
        let step_bits = step & ((1 << STEP_BITS) - 1);
        self.0.store(((phase as u64) << STEP_BITS) | step_bits, Ordering::Relaxed);
        if let Some(hook) = HOOK.get() {
            hook(phase, step);
        }
    }

    pub(super) fn word(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Unpacks phase and step.
pub(super) fn read(word: u64) -> (Phase, u64) {
    let phase = Phase::ALL.get((word >> STEP_BITS) as usize).copied().unwrap_or_default();
    (phase, word & ((1 << STEP_BITS) - 1))
}
