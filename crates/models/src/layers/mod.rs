//! Parts that several models are made of.

mod per_dim;
mod recompute;

pub use per_dim::PerDim;
pub(crate) use recompute::Recompute;
