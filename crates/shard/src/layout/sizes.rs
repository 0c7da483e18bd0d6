//! Splits of extents over ranks.

use isobar_collectives::{balanced, chunk};

/// Split of the extents of sharded dims.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Sizes {
    /// As `torch.chunk` and DTensor: equal parts rounded up, then a shorter one, then empty ones.
    #[default]
    Chunk,
    /// Parts that differ by at most one, the longer ones first.
    Balanced,
    /// For each of these dims, the extents of all parts in order: one for each rank along the axis that shards it, or, where
    /// several do, for each combination of their coordinates, the last axis fastest. A dim that no axis shards has one part. At
    /// most one table a dim; other dims as `Chunk`.
    Explicit(Vec<(usize, Vec<i64>)>),
    /// As the ranks' local tensors are: found out by one exchange. Not of a `StridedShard`, whose pieces follow a rule.
    Infer,
}

impl Sizes {
    /// The parts of an extent by the rule, where it is one.
    pub(crate) fn split(&self, extent: i64, parts: usize) -> Vec<i64> {
        match self {
            Self::Balanced => balanced(extent, parts),
            _ => chunk(extent, parts),
        }
    }

    /// The table of a dim.
    pub(crate) fn table(&self, dim: usize) -> Option<&[i64]> {
        match self {
            Self::Explicit(tables) => tables.iter().find(|(of, _)| *of == dim).map(|(_, sizes)| &sizes[..]),
            _ => None,
        }
    }
}
