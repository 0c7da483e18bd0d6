//! Transolver.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;
use tch::Tensor;

use super::TransolverConfig;
use crate::batch::Batch;
use crate::error::Result;
use crate::model::Model;
use crate::point_attention::Trunk;

/// Transolver: Wu et al., *Transolver: A Fast Transformer Solver for PDEs on General Geometries*, arXiv:2402.02366, as PhysicsNeMo
/// builds it.
///
/// With x the features of a point, e its embedding, t the time, LN a layer norm, σ the activation,
///
/// ```text
/// h = W₂ σ(W₁ [e, x])                       (+ the embedding of t, on all points)
/// h ← h + attention(LN(h));  h ← h + W₄ σ(W₃ LN(h))                    n_layers times
/// y = W LN(h)
/// ```
///
/// For each head, `xₙ` and `fₙ` are projections of point n: linear layers, or with `structured_shape` convolutions
/// with kernels of 3 and zero padding. Attention computes
///
/// ```text
/// wₙₛ = softmaxₛ((W xₙ + b) / clamp(τ, 0.5, 5))                         the weight of point n in slice s
/// zₛ = Σₙ wₙₛ fₙ / (Σₙ wₙₛ + 0.01)
/// z′ = softmax(q kᵀ / √features) v,  [q, k, v] = W z                    among the slices; one W for all heads
/// attention(n) = W [Σₛ wₙₛ z′ₛ of all heads] + b
/// ```
///
/// With `plus` (Luo et al., *Transolver++*, arXiv:2502.02414), f is x, and
///
/// ```text
/// wₙₛ = softmaxₛ((W xₙ + b + gₙₛ) / max(τ + gelu(W₂ gelu(W₁ xₙ)), 0.01)),  g = −ln(−ln u),  u ~ U(0, 1)
/// ```
///
/// where g is drawn in training, the same on every mesh. PhysicsNeMo draws it in evaluation, too; here g is 0 in evaluation, so
/// that results depend on the input alone. The published Transolver++ adds 10⁻⁵ instead of 0.01 to the sums.
///
/// τ starts at 0.5, its lower bound, where it has a gradient; below it has none. Linear layers start truncated normal with a standard
/// deviation of 0.02, convolutions as PyTorch's.
///
/// Points may be sharded in any way. Each block reduces one sum `[batch, heads, slices, features of a head + 1]` over
/// the ranks, whatever the number of points; convolutions also exchange a halo of one point. Where it takes fewer
/// multiplications, the last W is applied to the slices instead of the points (Transolver-3, arXiv:2602.04940).
/// `tiles` bounds the memory of w.
///
/// Inputs: `fx` `[batch, points, functional_dim]`, with `structured_shape` also `[batch, extents…, functional_dim]`, and `embedding`
/// `[batch, points, embedding_dim]` in either form; or `fields` `[batch, functional_dim, extents…]`. Where the points lie on a grid, an
/// embedding that is not given is the coordinates in [0, 1], or with `unified_pos` the distances from a reference grid. `time` `[batch]`
/// or `[batch, 1]`, with `time_input`. The output `fields` has the form of the input.
///
/// State dict: that of PhysicsNeMo's `Transolver` with `use_te=False`: `preprocess.layers.{0,2}`, `time_embed.freqs` and
/// `time_fc.{0,2}`, `embedding` with `unified_pos`, `blocks.{i}.{ln_1,ln_mlp1.0}`, `blocks.{i}.ln_mlp1.1.layers.{0,2}`,
/// `blocks.{i}.Attn.{temperature,in_project_x,in_project_fx,in_project_slice,qkv_project,out_linear}` (with `plus`,
/// `proj_temperature.{0,2}` in place of `in_project_fx`), and `ln_mlp2.{0,1}` of the last block. The activation's parameters are
/// under `layers.1`.
///
/// ```
/// use isobar_models::{Batch, Mode, Transolver, TransolverConfig};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = TransolverConfig { embedding_dim: Some(3), n_hidden: 16, n_head: 4, slice_num: 5, ..TransolverConfig::new(2, 1) };
/// let model = Transolver::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let points = |features: i64| Tensor::zeros([1, 100, features], (Kind::Float, Device::Cpu));
/// let batch = Batch::default().with("fx", points(2)).with("embedding", points(3));
/// let y = model.forward(&batch, Mode::Eval)?;
/// assert_eq!(y.get("fields").map(Tensor::size), Some(vec![1, 100, 1]));
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Transolver<A = Tensor>(Trunk<A>);

impl<A: Array> Transolver<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0; `n_head` does not divide `n_hidden`; `structured_shape` has other than two or three extents; `unified_pos` without a
    /// grid of two dims; an odd `n_hidden` with `time_input`; `use_te`; the activation `stan`; or `params` refuses a parameter.
    pub fn new(config: &TransolverConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        Ok(Self(Trunk::new(&config.spec()?, params)?))
    }

    /// Computes `fields`, in the form of the input: see [`Transolver`].
    ///
    /// # Errors
    ///
    /// An array is missing or has another shape, or an operator fails.
    pub fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        self.0.forward(batch, mode)
    }
}

impl<A: Array> Model<A> for Transolver<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        self.0.forward(batch, mode)
    }
}
