//! The Adaptive Fourier Neural Operator with its channels split over ranks.
//!
//! It depends on no rank, data set or training.

mod block;
mod config;
mod filter;
mod model;
mod sharding;

pub use config::DistributedAfnoConfig;
pub use model::DistributedAfno;

const MODEL: &str = "distributed_afno";
const BATCH_DIM: usize = 0;
const CHANNEL_DIM: usize = 1;
