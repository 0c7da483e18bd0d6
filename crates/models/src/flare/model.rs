//! FLARE.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::FlareConfig;
use crate::batch::Batch;
use crate::error::Result;
use crate::model::Model;
use crate::point_attention::Trunk;

/// FLARE: Puri et al., *FLARE: Fast Low-rank Attention Routing Engine*, arXiv:2508.12594, in the network of
/// [`Transolver`](crate::Transolver), as PhysicsNeMo builds it.
///
/// Trained queries gₛ replace Transolver's attention. For each head, with `xₙ` a linear projection of point n,
///
/// ```text
/// kₙ = W xₙ + b;  vₙ = W′ xₙ + b′                                       one W and W′ for all heads
/// zₛ = Σₙ softmaxₙ(gₛ · kₙ) vₙ                                          over all points
/// attention(n) = W″ [Σₛ softmaxₛ(kₙ · gₛ) zₛ of all heads] + b″
/// ```
///
/// The products are not divided by √features. On a grid, too, projections are linear. Queries start normal, linear layers truncated
/// normal with a standard deviation of 0.02.
///
/// Points may be sharded in any way. For the first softmax, each block reduces a maximum `[batch, heads, slice_num]`
/// per tile and one sum `[batch, heads, slice_num, features of a head + 1]` over the ranks, whatever the number of
/// points.
///
/// Inputs and output: those of [`Transolver`](crate::Transolver). State dict: that of PhysicsNeMo's `FLARE`:
/// `blocks.{i}.Attn.{q_global,in_project_x,self_k,self_v,out_linear}`, the other names as there.
///
/// ```
/// use isobar_models::{Batch, Flare, FlareConfig, Mode};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = FlareConfig { embedding_dim: Some(2), n_hidden: 16, n_head: 4, slice_num: 5, ..FlareConfig::new(3, 1) };
/// let model = Flare::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// // The embedding of fields is their coordinates.
/// let fields = Tensor::zeros([1, 3, 10, 8], (Kind::Float, Device::Cpu));
/// let y = model.forward(&Batch::of_fields(fields), Mode::Eval)?;
/// assert_eq!(y.get("fields").map(Tensor::size), Some(vec![1, 1, 10, 8]));
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Flare<A = Tensor>(Trunk<A>);

impl<A: Array> Flare<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0; `n_head` does not divide `n_hidden`; `structured_shape` has other than two or three extents; `unified_pos` without a
    /// grid of two dims; an odd `n_hidden` with `time_input`; `use_te`; the activation `stan`; or `params` refuses a parameter.
    pub fn new(config: &FlareConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        Ok(Self(Trunk::new(&config.spec()?, params)?))
    }

    /// Computes `fields`, in the form of the input: see [`Flare`].
    ///
    /// # Errors
    ///
    /// An array is missing or has another shape, or an operator fails.
    pub fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        self.0.forward(batch, mode)
    }
}

impl<A: Array> Model<A> for Flare<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        self.0.forward(batch, mode)
    }
}
