//! Gradients that come several times in one backward pass.

use isobar_array::recomputed_calls;

/// Finds out whether a parameter's gradient is complete when it comes.
///
/// It is, except with activation checkpointing: each part that is computed again gives its parameters a gradient of its own, so that
/// those of a rollout get one for each step. A pass tells for later ones with as many recomputed parts. Ranks find the same.
#[derive(Debug, Default)]
pub(crate) struct Repeats {
    /// Calls of `recompute` up to this pass.
    recorded: u64,
    /// Those that this pass runs again.
    parts: u64,
    /// Parts of passes in which each gradient came once.
    once: Option<u64>,
    /// True if a gradient has come twice in this pass.
    repeated: bool,
}

impl Repeats {
    /// Begins a pass.
    pub(crate) fn begin(&mut self) {
        let recorded = recomputed_calls();
        self.parts = recorded.saturating_sub(self.recorded);
        self.recorded = recorded;
        self.repeated = false;
    }

    /// Tells that a gradient came twice.
    pub(crate) fn repeated(&mut self) {
        self.repeated = true;
    }

    /// Returns whether gradients are known to come once in this pass.
    pub(crate) fn are_none(&self) -> bool {
        self.parts == 0 || self.once == Some(self.parts)
    }

    /// Ends a pass.
    pub(crate) fn end(&mut self) {
        if self.parts > 0 && !self.repeated {
            self.once = Some(self.parts);
        }
    }
}
