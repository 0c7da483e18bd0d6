//! Options of streamed samples.

use std::ops::Range;
use std::sync::Arc;

use tch::{Device, Kind};

use crate::dataset::Dataset;
use crate::steps::TrainSteps;

/// Window, variables and steps of [`Streamed`](super::Streamed) samples, and the tensors that they are handed out as.
#[derive(Debug, Clone)]
pub struct StreamOptions {
    /// This rank's window: points along each spatial dim.
    pub window: Vec<Range<usize>>,
    /// Rows around the window along each spatial dim, which are read with it, as [`HaloWindow`](crate::HaloWindow) reads them; empty
    /// for none. Inputs and targets have them, except for targets of a data set of their own.
    pub halo: Vec<usize>,
    /// Variables of the input.
    pub inputs: Vec<String>,
    /// Of samples without time: variables of the target. Targets of trajectories are their later frames.
    pub targets: Vec<String>,
    /// Of samples without time: the data set of the targets and this rank's window of it, if they are not those of the inputs.
    pub targets_from: Option<TargetWindow>,
    /// Of trajectories: steps of a sample.
    pub steps: TrainSteps,
    /// Of trajectories: frames from the start of a sample to that of the next.
    pub stride: usize,
    /// Dtype and device of batches.
    pub options: (Kind, Device),
    /// Number of samples to take at a time where all are visited.
    pub at_once: usize,
}

impl StreamOptions {
    /// Samples of one step in float32 on the CPU, sixteen at a time.
    pub fn new(window: &[Range<usize>], inputs: &[&str], targets: &[&str]) -> Self {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Self {
            window: window.to_vec(),
            halo: Vec::new(),
            inputs: owned(inputs),
            targets: owned(targets),
            targets_from: None,
            steps: TrainSteps::default(),
            stride: 1,
            options: (Kind::Float, Device::Cpu),
            at_once: 16,
        }
    }
}

/// A rank's window of the targets, in a data set of their own. Sample i of it belongs to sample i of the inputs.
#[derive(Debug, Clone)]
pub struct TargetWindow {
    /// The data set, of samples without time.
    pub data: Arc<dyn Dataset>,
    /// Points along each of its spatial dims.
    pub points: Vec<Range<usize>>,
}
