//! The U-Net of DLWP-HEALPix: convolutions on the twelve faces of a HEALPix mesh.
//!
//! It depends on no rank, data set or training.

mod activation;
mod block;
mod checks;
mod config;
mod model;
mod net;
mod parts;
mod plan;
mod recurrence;
mod shape;
mod traffic;
mod unread;

pub use config::HealpixUNetConfig;
pub use model::HealpixUNet;
pub use parts::{
    HealpixBlock, HealpixCoupled, HealpixCoupling, HealpixDecoder, HealpixEncoder, HealpixFunction,
    HealpixPooling, HealpixRecurrence, HealpixUpsampling,
};

const MODEL: &str = "healpix_unet";
