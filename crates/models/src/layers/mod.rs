//! Parts that several models are made of.

mod activation;
mod conv;
mod norm;
mod per_dim;
mod recompute;

pub use activation::Activation;
pub(crate) use activation::{ActivationLayer, Functional, one_or_many};
pub(crate) use conv::{ConvLayer, ConvTransposeLayer};
pub(crate) use norm::{Affine, BatchNorm};
pub use per_dim::PerDim;
pub(crate) use recompute::Recompute;
