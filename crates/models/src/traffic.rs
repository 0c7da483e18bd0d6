//! Upper bounds of the bytes that a rank receives in a pass of a model with replicated parameters, from its configuration and the split
//! of its inputs.
//!
//! Each model's folder has a `traffic.rs` that says what its layers exchange: halos, shifts of windows, moved patches, sums over
//! points, the keys and values of attention, and the modes of transforms. A model that gathers a field exceeds its bound;
//! `isobar verify` and the tests measure that.

use crate::diffusion::SigmaData;

/// Split of a batch over the ranks that share it.
#[derive(Debug, Clone, PartialEq)]
pub struct Split {
    ranks: i64,
    sides: Vec<Side>,
    samples: i64,
    /// Elements that a rank receives to redistribute the inputs to one layout.
    moved: f64,
}

/// Split of one dim.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Side {
    extent: i64,
    /// The largest shard.
    shard: i64,
    /// Number of shards.
    shards: i64,
}

impl Side {
    /// Returns the shards of a dim of another extent, with rounded boundaries.
    fn on(self, extent: i64) -> Self {
        let scaled = (self.shard * extent + self.extent - 1) / self.extent.max(1);
        let shard = if self.shards > 1 { (scaled + 1).min(extent) } else { extent };
        Self { extent, shard, shards: self.shards }
    }
}

impl Split {
    /// Declares a batch over `ranks` ranks, with the samples and then each spatial dim as its extent, its largest shard and the number
    /// of shards. `moved` is the number of elements that a rank receives to redistribute the inputs to one layout: 0 if they share it.
    ///
    /// ```
    /// use isobar_models::{Architecture, Split, UNetConfig};
    ///
    /// let config = UNetConfig { dimension: 2, ..UNetConfig::new(3, 3) };
    /// // 2 samples of 64 x 64 points, whose rows are split over 4 ranks.
    /// let split = Split::new(4, &[(2, 2, 1), (64, 16, 4), (64, 64, 1)], 0);
    /// assert!(config.traffic(&split).is_some_and(|traffic| traffic.forward > 0.0));
    /// ```
    pub fn new(ranks: i64, dims: &[(i64, i64, i64)], moved: i64) -> Self {
        let side = |&(extent, shard, shards): &(i64, i64, i64)| Side { extent, shard, shards };
        let samples = dims.first().map_or(0, |&(_, shard, _)| shard);
        Self { ranks, sides: dims.iter().map(side).collect(), samples, moved: moved as f64 }
    }

    /// Sets the largest number of samples on a rank, for inputs of which only some are sharded along the batch.
    #[must_use]
    pub fn with_samples(self, samples: i64) -> Self {
        Self { samples, ..self }
    }

    /// The grid of the fields: the last `dims` spatial dims. Others, such as times or faces, count as samples.
    pub(crate) fn grid(&self, dims: usize) -> Grid {
        let (samples, dims) = self.sides.split_at(self.sides.len().saturating_sub(dims).max(1));
        let shares = samples.iter().map(|side| side.shard as f64).product();
        let [faces, regrouped] = [1, 0].map(|first| samples.iter().skip(first).any(|side| side.shards > 1));
        Grid { ranks: self.ranks, samples: shares, dims: dims.to_vec(), faces, regrouped }
    }

    /// Largest number of samples on a rank; 0 on one rank.
    pub(crate) fn samples(&self) -> f64 {
        match self.ranks {
            1 => 0.0,
            _ => self.samples as f64,
        }
    }

    /// All points of all samples, if ranks share them.
    pub(crate) fn points(&self) -> f64 {
        match self.ranks {
            1 => 0.0,
            _ => self.sides.iter().map(|side| side.extent as f64).product(),
        }
    }

    /// Sums of gradients of `elements` numbers that are made of parameters, besides those of the parameters: in backward alone.
    pub(crate) fn parameter_sums(&self, elements: f64) -> f64 {
        match self.ranks {
            1 => 0.0,
            ranks => elements * (ranks - 1).max(2) as f64 / (1.0 + Traffic::BACKWARD),
        }
    }

    /// The traffic of a model that communicates nothing once its inputs share a layout.
    pub(crate) fn aligned(&self) -> Traffic {
        Traffic { forward: self.moved, parameter_uses: 1 }
    }
}

/// A grid of points over ranks, such as that of a level of a U-Net.
#[derive(Debug, Clone)]
pub(crate) struct Grid {
    ranks: i64,
    samples: f64,
    dims: Vec<Side>,
    /// Dims between the samples and the grid are split, such as faces.
    faces: bool,
    /// These or the samples are.
    regrouped: bool,
}

impl Grid {
    /// The grid with other extents, split as this one.
    pub(crate) fn on(&self, extents: &[i64]) -> Self {
        let dims = self.dims.iter().zip(extents).map(|(side, &extent)| side.on(extent)).collect();
        Self { dims, ..self.clone() }
    }

    /// The grid with extents divided by `factor`, rounded up.
    pub(crate) fn coarser(&self, factor: i64) -> Self {
        let extents = self.dims.iter().map(|side| (side.extent + factor - 1) / factor.max(1));
        self.on(&extents.collect::<Vec<_>>())
    }

    /// The grid with extents multiplied by `factor`.
    pub(crate) fn finer(&self, factor: i64) -> Self {
        self.on(&self.dims.iter().map(|side| side.extent * factor).collect::<Vec<_>>())
    }

    /// Returns the number of split dims.
    pub(crate) fn split_dims(&self) -> u32 {
        self.dims.iter().filter(|side| side.shards > 1).count() as u32
    }

    pub(crate) fn is_split(&self) -> bool {
        self.faces || self.dims.iter().any(|side| side.shards > 1)
    }

    /// The grid with points added along each dim.
    pub(crate) fn padded(&self, points: &[i64]) -> Self {
        let extents = self.dims.iter().zip(points).map(|(side, points)| side.extent + points);
        self.on(&extents.collect::<Vec<_>>())
    }

    /// Points of `rows` rows beside the largest shard, along each split dim, on both sides together.
    pub(crate) fn halo(&self, rows: i64) -> f64 {
        self.halo_each(&vec![rows; self.dims.len()])
    }

    /// Points of so many rows beside the largest shard along each dim that is split.
    pub(crate) fn halo_each(&self, rows: &[i64]) -> f64 {
        let reach = |(side, rows): (&Side, &i64)| if side.shards > 1 { (*rows).min(side.extent) } else { 0 };
        let reaches: Vec<i64> = self.dims.iter().zip(rows).map(reach).collect();
        let windows = self.dims.iter().zip(&reaches);
        let windows: Vec<i64> = windows.map(|(side, reach)| (side.shard + reach).min(side.extent)).collect();
        let along = |dim: usize| {
            let others = windows.iter().enumerate().filter(|(other, _)| *other != dim);
            reaches[dim] as f64 * others.map(|(_, &window)| window as f64).product::<f64>()
        };
        self.samples * (0..self.dims.len()).map(along).sum::<f64>()
    }

    /// Number of shards that windows of so many points reach over, along the split dim where it is largest.
    pub(crate) fn spans(&self, windows: &[i64]) -> f64 {
        let split = self.dims.iter().zip(windows).filter(|(side, _)| side.shards > 1);
        let over =
            |(side, window): (&Side, &i64)| (window * side.shards + side.extent - 1) / side.extent.max(1);
        split.map(over).max().unwrap_or(1).max(1) as f64
    }

    /// Returns the grid with the dims in `whole` replicated, and the number of points that a rank receives for it.
    pub(crate) fn gathered_along(&self, whole: &[bool]) -> (Self, f64) {
        let splits = self.dims.iter().zip(whole).any(|(side, whole)| *whole && side.shards > 1);
        let side = |(side, whole): (&Side, &bool)| match whole {
            true => Side { shard: side.extent, shards: 1, ..*side },
            false => *side,
        };
        let grid = Self { dims: self.dims.iter().zip(whole).map(side).collect(), ..self.clone() };
        let points = grid.dims.iter().map(|side| side.shard as f64).product::<f64>();
        let gathered = if splits { self.samples * points } else { 0.0 };
        (grid, gathered)
    }

    /// Points of the largest shard after its boundaries move to those of windows, if some dim is split.
    pub(crate) fn with_windows(&self, windows: &[i64]) -> f64 {
        let side = |(side, window): (&Side, &i64)| match side.shards {
            1 => side.extent,
            _ => (side.shard + window).min(side.extent),
        };
        let points: f64 = self.dims.iter().zip(windows).map(|of| side(of) as f64).product();
        if self.is_split() { self.samples * points } else { 0.0 }
    }

    /// Points of the largest shard, if they may move to other ranks.
    pub(crate) fn moved(&self) -> f64 {
        match self.is_split() {
            true => self.samples * self.dims.iter().map(|side| side.shard as f64).product::<f64>(),
            false => 0.0,
        }
    }

    /// Points of the strips of that width around the shards of faces, `means` sources for those at corners.
    pub(crate) fn strips(&self, width: i64, means: i64) -> f64 {
        let &[rows, columns] = self.dims.as_slice() else { return 0.0 };
        match self.is_split() {
            true => self.samples * (2 * width * (rows.shard + means * (columns.shard + 2 * width))) as f64,
            false => 0.0,
        }
    }

    /// Points of the largest shard, if samples or faces are split and are grouped otherwise.
    pub(crate) fn regrouped(&self) -> f64 {
        match self.regrouped {
            true => self.samples * self.dims.iter().map(|side| side.shard as f64).product::<f64>(),
            false => 0.0,
        }
    }

    /// All points of the samples that a rank has a shard of, if they are split: keys and values of attention.
    pub(crate) fn all_gathered(&self) -> f64 {
        match self.is_split() {
            true => self.samples * self.dims.iter().map(|side| side.extent as f64).product::<f64>(),
            false => 0.0,
        }
    }

    /// A sum over the points of `elements` numbers a sample.
    pub(crate) fn summed(&self, elements: i64) -> f64 {
        if self.is_split() { self.samples * (elements * self.ranks) as f64 } else { 0.0 }
    }

    /// A sum over samples and points of `elements` numbers, as of batch norms.
    pub(crate) fn batch_summed(&self, elements: i64) -> f64 {
        if self.ranks > 1 { (elements * self.ranks) as f64 } else { 0.0 }
    }

    /// Convolution of `channels` inputs by a kernel of that extent and a stride. Boundaries of strided shards are rounded, so that up
    /// to a stride more rows are needed.
    pub(crate) fn convolved(&self, channels: i64, kernel: i64, stride: i64) -> f64 {
        let rows = kernel - 1 + if stride > 1 { stride } else { 0 };
        channels as f64 * self.halo(rows)
    }
}

/// Elements that an attention of `width` features over a grid of tokens receives: keys and values of all tokens (a ring), or each
/// rank's share of queries, keys, values and results (an all-to-all), whichever is chosen. Within windows of `kernel` tokens along
/// each dim: the keys and values of the rows next to a shard, once for each row that attends to them; with further split dims,
/// times `kernel` copies for each.
pub(crate) fn attention(tokens: &Grid, width: i64, kernel: Option<i64>) -> f64 {
    match kernel {
        Some(kernel) => {
            let copies = kernel.pow(tokens.split_dims().saturating_sub(1));
            (2 * width * copies) as f64 * tokens.halo((kernel * kernel - 1) / 2)
        }
        None => 2.0 * width as f64 * (tokens.all_gathered() + tokens.moved()),
    }
}

/// Elements of the three factors by which a denoiser scales each sample: for each, as many as `sigma_data` has numbers. They are
/// redistributed to the layout of the samples.
pub(crate) fn preconditioning(sigma_data: &SigmaData, split: &Split) -> f64 {
    let numbers = match sigma_data {
        SigmaData::All(_) => 1,
        SigmaData::Each(each) => each.len(),
    };
    3.0 * numbers as f64 * split.samples()
}

/// Upper bound of what a rank receives.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Traffic {
    /// Elements in a forward pass. Backward receives at most [twice](Traffic::BACKWARD) as many, besides the gradients of
    /// parameters: an adjoint sends each halo back to where it came from, and a row may be in the halo of several ranks.
    pub forward: f64,
    /// Number of times a parameter is used, each of which sums its gradient over the ranks.
    pub parameter_uses: u64,
}

impl Traffic {
    /// Most elements that backward receives for each one of forward.
    pub const BACKWARD: f64 = 2.0;

    /// Adds elements that the layers of the model receive.
    #[must_use]
    pub(crate) fn and(self, elements: f64) -> Self {
        Self { forward: self.forward + elements, ..self }
    }

    /// Sets how often parameters are used.
    #[must_use]
    pub(crate) fn uses(self, parameter_uses: u64) -> Self {
        Self { parameter_uses, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halos_grow_with_the_surface_and_not_with_the_volume() {
        let rows = |n: i64| Split::new(4, &[(2, 2, 1), (n, n / 4, 4), (n, n, 1)], 0).grid(2);
        assert_eq!(rows(64).halo(2), 2.0 * 2.0 * 64.0);
        assert_eq!(rows(128).convolved(3, 3, 1), 2.0 * rows(64).convolved(3, 3, 1));
        assert_eq!(rows(64).coarser(2).halo(2), 2.0 * 2.0 * 32.0);
        assert_eq!(rows(64).all_gathered(), 2.0 * 64.0 * 64.0);
    }

    #[test]
    fn inputs_that_are_split_alike_do_not_move() {
        let moved = |moved: i64| Split::new(4, &[(2, 2, 1), (8, 2, 4)], moved).aligned().forward;
        assert_eq!([moved(0), moved(7)], [0.0, 7.0]);
    }

    #[test]
    fn what_is_not_split_receives_nothing() {
        let grid = Split::new(4, &[(8, 2, 4), (16, 16, 1)], 0).grid(1);
        assert_eq!([grid.halo(3), grid.moved(), grid.all_gathered(), grid.summed(5)], [0.0; 4]);
    }
}
