//! One field of a file of The Well's schema.

use std::ops::Range;
use std::path::Path;

use isobar_torch::memory::from_vec;
use tch::Tensor;

use crate::dataset::blocks;
use crate::hdf5::layout::{portion, read_finite};
use crate::hdf5::stored::Stored;
use crate::stats::Accumulator;
use crate::{Result, Statistics};

/// A field of a [`WellFile`](super::WellFile).
#[derive(Debug)]
pub struct WellField {
    pub(super) name: String,
    pub(super) order: usize,
    pub(super) components: usize,
    /// Of the trajectories, the times and the spatial dims.
    pub(super) varying: Vec<bool>,
    /// The dataset's attribute `units`.
    pub(super) unit: Option<String>,
    pub(super) dataset: Stored,
    /// The dataset's path from the root.
    pub(super) place: String,
}

impl WellField {
    /// Returns the name of the field.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// 0 for a scalar, 1 for a vector, 2 for a tensor.
    pub fn order(&self) -> usize {
        self.order
    }

    /// Numbers at a point: 1, d or d², with d spatial dims.
    pub fn components(&self) -> usize {
        self.components
    }

    /// Unit of its values, from the dataset's attribute `units`, if there is one.
    pub fn unit(&self) -> Option<&str> {
        self.unit.as_deref()
    }

    /// Names of its components, in the order of channels: those of a vector or tensor end in their dims, as
    /// `velocity_x` and `stress_xy`.
    pub(super) fn component_names(&self, dims: &[String]) -> Vec<String> {
        let mut ends = vec![String::new()];
        for _ in 0..self.order {
            ends = ends.iter().flat_map(|end| dims.iter().map(move |dim| format!("{end}{dim}"))).collect();
        }
        let name =
            |end: &String| if end.is_empty() { self.name.clone() } else { format!("{}_{end}", self.name) };
        ends.iter().map(name).collect()
    }

    /// Returns whether it is the same in all trajectories and at all times.
    pub(super) fn is_constant(&self) -> bool {
        self.leading() == 0
    }

    /// Of trajectories, times and spatial dims, those that the dataset has; and its components.
    fn stored(&self, axes: &[Range<usize>]) -> Vec<Range<usize>> {
        let dims = axes.len() - 2;
        let varying = axes.iter().zip(&self.varying).filter(|(_, varying)| **varying);
        varying.map(|(range, _)| range.clone()).chain((0..self.order).map(|_| 0..dims)).collect()
    }

    /// Stored dims before the spatial ones.
    fn leading(&self) -> usize {
        self.varying[..2].iter().filter(|varying| **varying).count()
    }

    /// `[frame, component, x, …]` of one trajectory; `axes` are ranges of trajectories, frames and points, none empty,
    /// and `extents` the lengths of the latter two.
    pub(super) fn read(&self, path: &Path, axes: &[Range<usize>], extents: &[i64]) -> Result<Tensor> {
        let values = read_finite(path, &self.dataset, &self.place, &self.stored(axes))?;
        // A scalar has a last dim of length 1, as components are to become the second dim.
        let components = self.components as i64;
        let varying = extents.iter().zip(&self.varying[1..]);
        let mut shape: Vec<i64> =
            varying.map(|(&extent, &varying)| if varying { extent } else { 1 }).collect();
        shape.push(components);
        let last = extents.len() as i64;
        let order: Vec<i64> = [0, last].into_iter().chain(1..last).collect();
        Ok(from_vec(values, &shape)?
            .f_expand([extents, &[components]].concat(), false)?
            .f_permute(order)?
            .f_contiguous()?)
    }

    /// Statistics of each component over ranges of trajectories, frames and points.
    pub(super) fn statistics(&self, path: &Path, whole: &[Range<usize>]) -> Result<Vec<Statistics>> {
        let mut accumulators: Vec<Accumulator> =
            (0..self.components).map(|_| Accumulator::default()).collect();
        let (trajectories_at_once, frames_at_once) = self.at_once(whole);
        // Constant values are read once, and counted for each sample and frame.
        let once =
            |axis: usize| if self.varying[axis] { whole[axis].clone() } else { 0..whole[axis].len().min(1) };
        for trajectories in portions(once(0), trajectories_at_once) {
            for frames in portions(once(1), frames_at_once) {
                for points in self.blocks(&whole[2..], trajectories.len() * frames.len()) {
                    let axes = [&[trajectories.clone(), frames.clone()], &points[..]].concat();
                    let values = read_finite(path, &self.dataset, &self.place, &self.stored(&axes))?;
                    for (component, accumulator) in accumulators.iter_mut().enumerate() {
                        let of_component = values.iter().skip(component).step_by(self.components);
                        accumulator.push(of_component.map(|&value| f64::from(value)));
                    }
                }
            }
        }
        let count = whole.iter().map(|range| range.len() as u64).product();
        accumulators
            .into_iter()
            .map(|accumulator| Ok(Statistics { count, weight: count as f64, ..accumulator.finish()? }))
            .collect()
    }
}

impl WellField {
    /// Statistics of each component's changes from frame to frame, over ranges of trajectories, frames and points.
    pub(super) fn change_statistics(&self, path: &Path, whole: &[Range<usize>]) -> Result<Vec<Statistics>> {
        let count = |frames: usize| -> u64 {
            let points: u64 = whole[2..].iter().map(|range| range.len() as u64).product();
            whole[0].len() as u64 * frames as u64 * points
        };
        let count = count(whole[1].len().saturating_sub(1));
        if !self.varying[1] {
            let none = Statistics { count, weight: count as f64, mean: 0.0, std: 0.0, min: 0.0, max: 0.0 };
            return Ok(vec![none; self.components]);
        }
        let mut accumulators: Vec<Accumulator> =
            (0..self.components).map(|_| Accumulator::default()).collect();
        let all = if self.varying[0] { whole[0].clone() } else { 0..whole[0].len().min(1) };
        let (trajectories_at_once, frames_at_once) = self.at_once(whole);
        let blocks = self.blocks(&whole[2..], trajectories_at_once * frames_at_once);
        let parts = portions(all, trajectories_at_once);
        for (trajectories, points) in
            parts.flat_map(|part| blocks.iter().map(move |block| (part.clone(), block)))
        {
            let mut last: Vec<Vec<f32>> = vec![Vec::new(); trajectories.len()];
            for frames in portions(whole[1].clone(), frames_at_once) {
                let axes = [&[trajectories.clone(), frames.clone()], &points[..]].concat();
                let values = read_finite(path, &self.dataset, &self.place, &self.stored(&axes))?;
                let frame = (values.len() / (trajectories.len() * frames.len())).max(1);
                for (last, own) in last.iter_mut().zip(values.chunks(frame * frames.len())) {
                    for now in own.chunks(frame) {
                        for (component, accumulator) in accumulators.iter_mut().enumerate() {
                            let pairs = now.iter().zip(&*last).skip(component).step_by(self.components);
                            accumulator.push(pairs.map(|(&now, &last)| f64::from(now) - f64::from(last)));
                        }
                        last.clear();
                        last.extend_from_slice(now);
                    }
                }
            }
        }
        accumulators
            .into_iter()
            .map(|accumulator| Ok(Statistics { count, weight: count as f64, ..accumulator.finish()? }))
            .collect()
    }

    /// Returns the blocks of points to read at a time for statistics of `frames` frames: all points, unless they take much memory. A dim along
    /// which the field does not vary is not cut.
    fn blocks(&self, points: &[Range<usize>], frames: usize) -> Vec<Vec<Range<usize>>> {
        match self.varying.get(2) {
            Some(true) => blocks(points, self.components * frames),
            _ => vec![points.to_vec()],
        }
    }

    /// Numbers of trajectories and frames to read at a time for statistics: full chunks, so that none is decompressed twice, unless
    /// frames are cut into blocks.
    fn at_once(&self, whole: &[Range<usize>]) -> (usize, usize) {
        let chunk = self.dataset.chunk();
        let step = |axis: usize, otherwise: usize| {
            let stored = self.varying[..axis].iter().filter(|varying| **varying).count();
            chunk.and_then(|chunk| chunk.get(stored)).map_or(otherwise, |&length| length)
        };
        let frame: usize = self.stored(whole).iter().skip(self.leading()).map(Range::len).product();
        let frame = frame * size_of::<f32>();
        let frames = portion(step(1, STATISTICS_FRAMES), frame);
        (portion(step(0, 1), frame.saturating_mul(frames)), frames)
    }
}

/// Frames read at a time for statistics of a dataset that is not chunked.
const STATISTICS_FRAMES: usize = 8;

/// A range in portions that end at multiples of a step.
fn portions(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let mut start = range.start;
    std::iter::from_fn(move || {
        let portion = start..((start / step + 1) * step).min(range.end);
        start = portion.end;
        (!portion.is_empty()).then_some(portion)
    })
}
