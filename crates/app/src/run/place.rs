//! This rank's part of the fields of a run, and how it reads them.

use std::ops::Range;
use std::path::Path;

use isobar_manager::config::CheckChoice;
use isobar_train::Signals;
use tch::{Device, Kind};

/// Window that a rank reads of each field, and the number of samples that it reads at a time.
pub(crate) struct Place<'a> {
    /// A range for each spatial dim of the inputs.
    pub(crate) window: &'a [Range<usize>],
    /// A range for each spatial dim of the targets.
    pub(crate) target_window: &'a [Range<usize>],
    /// Dtype and device of the network's inputs.
    pub(crate) options: (Kind, Device),
    /// Most samples that this rank reads at a time.
    pub(crate) own: usize,
    /// Most samples that a task asks for at a time in validation: the same on all ranks.
    pub(crate) at_once: usize,
    /// The folder that keeps the statistics of the training samples for the next start.
    pub(crate) keep: Option<&'a Path>,
    /// Reaction to samples that do not fit into memory.
    pub(crate) checks: CheckChoice,
    /// Requests to stop, which end the reading.
    pub(crate) signals: &'a Signals,
}

#[cfg(test)]
impl<'a> Place<'a> {
    /// A window of inputs and targets in float64 on the CPU, three samples at a time.
    pub(crate) fn of_test(window: &'a [Range<usize>]) -> Self {
        Self {
            window,
            target_window: window,
            options: (Kind::Double, Device::Cpu),
            own: 3,
            at_once: 3,
            keep: None,
            checks: CheckChoice::On,
            signals: Box::leak(Box::default()),
        }
    }
}
