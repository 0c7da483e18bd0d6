//! State of a parameter's gradient: its content after backward, and whether it has been summed over ranks since.

use isobar_shard::{GradientSource, GradientState};

/// State of a parameter's gradient, shared by all handles to the parameter.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gradient {
    source: GradientSource,
    pub(crate) state: GradientState,
}

/// The gradient is not summed over ranks.
pub(crate) const FREE: u8 = 0;
/// A `DataParallel` sums the gradient over ranks, and has summed everything accumulated so far.
pub(crate) const SUMMED: u8 = 1;
/// A `DataParallel` sums the gradient over ranks, and more has been accumulated since its last sum.
pub(crate) const UNSUMMED: u8 = 2;
/// A `FullySharded` owns shards of the parameter and of its gradient.
pub(crate) const PARTED: u8 = 3;

impl Gradient {
    pub(crate) fn new(source: GradientSource, state: GradientState) -> Self {
        Self { source, state }
    }

    pub(crate) fn with_source(&self, source: GradientSource) -> Self {
        Self { source, state: self.state.clone() }
    }

    pub(crate) fn source(&self) -> &GradientSource {
        &self.source
    }

    /// Registers a `DataParallel` that sums the gradient.
    pub(crate) fn take(&self) {
        self.state.set(SUMMED);
    }

    /// Records that its `DataParallel` was dropped.
    pub(crate) fn release(&self) {
        self.state.set(FREE);
    }

    /// Records that this rank accumulated a gradient.
    pub(crate) fn arrived(&self) {
        self.state.set(UNSUMMED);
    }

    /// Records that the gradient has been summed over ranks, or is zero.
    pub(crate) fn summed(&self) {
        self.state.change(UNSUMMED, SUMMED);
    }

    /// Records that a `FullySharded` owns shards of the parameter.
    pub(crate) fn part(&self) {
        self.state.set(PARTED);
    }
}
