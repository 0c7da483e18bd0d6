//! Parts that several models are made of.

mod activation;

pub use activation::Activation;
pub(crate) use activation::{ActivationLayer, one_or_many};
