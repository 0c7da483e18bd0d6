//! Placement of a tensor along one axis of a mesh.

use std::fmt;

use isobar_collectives::ReduceOp;

/// Placement of a tensor along one axis of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Placement {
    /// Whole on every rank, and the same.
    Replicate,
    /// Each rank has its part along this dim. Where several axes shard one dim, a later axis splits the parts of an
    /// earlier one.
    Shard(usize),
    /// Each rank has a tensor of the whole's shape; combined in this way, they are the whole.
    Partial(ReduceOp),
    /// The dim is cut into `split_factor` × ranks pieces, as `torch.chunk` does, of which rank r has numbers r, r + ranks,
    /// r + 2 · ranks, …: what sharding a dim gives that a later axis of `split_factor` ranks had sharded first.
    StridedShard {
        /// The dim.
        dim: usize,
        /// Pieces for each rank.
        split_factor: usize,
    },
}

impl Placement {
    /// The dim that it splits.
    ///
    /// ```
    /// use isobar_shard::Placement;
    ///
    /// assert_eq!(Placement::Shard(2).dim(), Some(2));
    /// assert_eq!(Placement::Replicate.dim(), None);
    /// ```
    pub fn dim(self) -> Option<usize> {
        match self {
            Self::Shard(dim) | Self::StridedShard { dim, .. } => Some(dim),
            Self::Replicate | Self::Partial(_) => None,
        }
    }

    /// Returns whether a reduction is pending.
    pub fn is_partial(self) -> bool {
        matches!(self, Self::Partial(_))
    }

    /// Returns `Replicate` for a partial placement, else the placement itself: that of the gradient.
    pub fn without_partial(self) -> Self {
        if self.is_partial() { Self::Replicate } else { self }
    }

    /// Renumbers the sharded dim.
    pub(crate) fn with_dim(self, to: usize) -> Self {
        match self {
            Self::Shard(_) => Self::Shard(to),
            Self::StridedShard { split_factor, .. } => Self::StridedShard { dim: to, split_factor },
            other => other,
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicate => f.write_str("Replicate"),
            Self::Shard(dim) => write!(f, "Shard({dim})"),
            Self::Partial(op) => write!(f, "Partial({})", format!("{op:?}").to_lowercase()),
            Self::StridedShard { dim, split_factor } => write!(f, "StridedShard({dim}, {split_factor})"),
        }
    }
}
