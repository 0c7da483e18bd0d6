//! Parts that several models are made of.

mod activation;
mod conv;
mod norm;
mod recompute;

pub use activation::Activation;
pub(crate) use activation::{ActivationLayer, one_or_many};
pub(crate) use conv::{ConvLayer, ConvTransposeLayer};
pub(crate) use norm::{Affine, BatchNorm};
pub(crate) use recompute::Recompute;
