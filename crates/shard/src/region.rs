//! The ranks that compute one model together.

use isobar_collectives::{Group, balanced};

/// A set of ranks over which a model's channels, heads or features are split: the face of a communication group that
/// models see. Every rank of the region runs the same model on the same samples.
///
/// ```
/// use isobar_shard::{Parallel, ParallelRegion};
/// use tch::{Kind, Tensor};
///
/// let region = ParallelRegion::single();
/// let x = Tensor::ones([2, 6], (Kind::Float, tch::Device::Cpu));
/// let sizes = region.sizes(6);
/// let part = x.scatter_to_region(1, Some(&sizes), &region)?;
/// let hidden = part.all_gather(1, Some(&sizes), &region)?.f_mul_scalar(2.0).unwrap();
/// let y = hidden.reduce_scatter(1, Some(&sizes), &region)?;
/// assert_eq!(y.size(), [2, sizes[region.rank()]]);
/// # Ok::<(), isobar_shard::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ParallelRegion {
    group: Group,
}

impl ParallelRegion {
    /// The region of a group's ranks.
    pub fn new(group: Group) -> Self {
        Self { group }
    }

    /// A region of one rank, in which a model is whole.
    pub fn single() -> Self {
        Self::new(Group::single())
    }

    /// This rank's place in the region, from 0.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// The ranks' parts of `extent`: as equal as can be, the longer ones first.
    pub fn sizes(&self, extent: i64) -> Vec<i64> {
        balanced(extent, self.size())
    }

    /// First index and extent of this rank's part of `extent`.
    ///
    /// ```
    /// use isobar_collectives::threads;
    /// use isobar_shard::ParallelRegion;
    ///
    /// threads::run(2, std::time::Duration::from_secs(30), |group| {
    ///     // 5 attention heads over 2 ranks.
    ///     let region = ParallelRegion::new(group);
    ///     assert_eq!(region.sizes(5), [3, 2]);
    ///     assert_eq!(region.part(5), [(0, 3), (3, 2)][region.rank()]);
    /// });
    /// ```
    pub fn part(&self, extent: i64) -> (i64, i64) {
        let sizes = self.sizes(extent);
        (sizes[..self.rank()].iter().sum(), sizes[self.rank()])
    }

    /// The group of its ranks.
    pub fn group(&self) -> &Group {
        &self.group
    }
}
