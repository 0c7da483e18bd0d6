//! The Adaptive Fourier Neural Operator.
//!
//! It depends on no rank, data set or training.

pub(crate) mod block;
mod config;
pub(crate) mod filter;
mod model;
mod scale_shift;
mod sharding;
pub(crate) mod tokens;
pub(crate) mod traffic;

pub use config::AfnoConfig;
pub use model::Afno;
pub use scale_shift::ScaleShiftMode;
pub(crate) use sharding::positions;

const MODEL: &str = "afno";
/// The dim of the batch between the tokens and the features.
const BATCH_DIM: usize = 2;
