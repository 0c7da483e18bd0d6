//! Noise levels, preconditioning, loss and samplers of diffusion models: Karras et al., *Elucidating the Design Space
//! of Diffusion-Based Generative Models*, arXiv:2206.00364.
//!
//! It takes a denoiser as a function, and depends on no network.

mod loss;
mod patching;
mod precond;
mod sampler;
mod schedule;

pub use loss::{EdmLoss, LossReduction};
pub use patching::Patching;
pub use precond::{Denoiser, EdmPreconditioning, SigmaData};
pub use sampler::{EdmSampler, SamplerKind};
pub use schedule::EdmSchedule;

use isobar_array::{Array, Generator, Window};
use isobar_nn::BatchPart;

use crate::error::Result;

/// Standard normal numbers for an array whose dim 0 is the batch, or a part of the global one: the same on any number of ranks.
fn normal<A: Array>(like: &A, generator: &Generator, batch: Option<BatchPart>) -> Result<A> {
    Ok(like.normal_like(generator, &window(&like.shape(), batch)?)?)
}

/// Part of the global array that an array of that shape is.
fn window(shape: &[i64], batch: Option<BatchPart>) -> Result<Window> {
    let Some((BatchPart { offset, total }, first)) = batch.zip(shape.first()) else {
        return Ok(Window::whole(shape));
    };
    let mut global = shape.to_vec();
    global[0] = total;
    Ok(Window::whole(&global).narrow(0, offset, *first)?)
}
