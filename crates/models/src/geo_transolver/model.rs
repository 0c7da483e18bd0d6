//! GeoTransolver.

use isobar_array::Array;
use isobar_nn::{Activation, Mode};
use isobar_shard::Params;
use tch::Tensor;

use super::context::Context;
use super::{GeoTransolverConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Checker, Result};
use crate::layers::Recompute;
use crate::model::Model;
use crate::point_attention::{Block, Grid, Head, PointMlp, Start};

/// *GeoTransolver: Learning Physics on Irregular Domains using Multi-scale Geometry Aware Physics
/// Attention Transformer*, arXiv:2512.20399, as PhysicsNeMo builds it, without features of neighbours.
///
/// The context is computed once. The points of the geometry and the global embedding are averaged into slices as in
/// [`Transolver`](crate::Transolver), each with its own projections, and concatenated along the features, the
/// geometry first: `[batch, heads, slices, features · sources]`. With x the features of a point, LN a layer norm, σ
/// the activation,
///
/// ```text
/// h = W₂ σ(W₁ x)
/// h ← h + attention(LN(h), context);  h ← h + W₄ σ(W₃ LN(h))           n_layers times
/// y = W LN(h)
/// ```
///
/// With `GALE`, attention is Transolver's, and its slices also attend to the context; their queries are the slices
/// before they attend to each other. With `GALE_FA`, attention is [`Flare`](crate::Flare)'s, and its points also
/// attend to the context. The result s of self-attention and c of attention to the context are mixed as
///
/// ```text
/// g s + (1 − g) c,  g = sigmoid(state_mixing)                           weighted
/// gelu(W [s, c] + b)                                                    concat_project
/// ```
///
/// before the output projection. Only `GALE` divides products by √features. Weights start as PyTorch's, those of
/// `in_project_slice` of the blocks orthogonal, `state_mixing` 0.
///
/// Points and geometry may be sharded in any way, independently of each other. Communication is that of Transolver or
/// FLARE.
///
/// Inputs: `local_embedding` `[batch, points, functional_dim]`, with `structured_shape` also `[batch, extents…, functional_dim]`, or
/// `fields` `[batch, functional_dim, extents…]`; `geometry` `[batch, points of the geometry, geometry_dim]`, where points on a grid
/// have their coordinates in [0, 1] if it is not given; `global_embedding` `[batch, tokens, global_dim]`. Without any context, blocks
/// attend to the points alone. The output `fields` has the form of the input. `local_positions` are not read.
///
/// State dict: that of PhysicsNeMo's `GeoTransolver` with `use_te=False`: `preprocess.0`, `context_builder.geometry_tokenizer`,
/// `context_builder.global_tokenizer`, `blocks.{i}.{ln_1,Attn,ln_mlp1}` and `ln_mlp_out.0.{0,1}`. Layers for a context that the
/// configuration does not name are buffers.
///
/// ```
/// use isobar_models::{Batch, GeoTransolver, GeoTransolverConfig, Mode};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let config = GeoTransolverConfig { geometry_dim: Some(3), n_hidden: 16, n_head: 4, slice_num: 5, ..GeoTransolverConfig::new(2, 1) };
/// let model = GeoTransolver::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let points = |count: i64, features: i64| Tensor::zeros([1, count, features], (Kind::Float, Device::Cpu));
/// let batch = Batch::default().with("local_embedding", points(100, 2)).with("geometry", points(30, 3));
/// let y = model.forward(&batch, Mode::Eval)?;
/// assert_eq!(y.get("fields").map(Tensor::size), Some(vec![1, 100, 1]));
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct GeoTransolver<A = Tensor> {
    grid: Grid,
    features: i64,
    context: Context<A>,
    preprocess: PointMlp<A>,
    blocks: Vec<Recompute<Block<A>>>,
    head: Head<A>,
}

impl<A: Array> GeoTransolver<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0; `n_head` does not divide `n_hidden`; `structured_shape` has other than two or three extents; several streams;
    /// `use_te`, `plus`, `time_input`, `include_local_features` or `concrete_dropout`; the activation `stan`; or `params` refuses a
    /// parameter.
    pub fn new(config: &GeoTransolverConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let check = Checker(MODEL);
        let [inputs, outputs] = config.channels()?;
        let features = check.extent("functional_dim", inputs)?;
        let outputs = check.extent("out_dim", outputs)?;
        let spec = config.attention()?;
        check.extent("n_layers", config.n_layers)?;
        let ratio = check.extent("mlp_ratio", config.mlp_ratio)?;
        check
            .ensure(config.act != Activation::Stan, || "act is stan, which is for single features".into())?;
        let grid = Grid::new(MODEL, config.structured_shape.as_deref())?;

        let context = Context::new(config, &spec, params)?;
        let sizes = [features, 2 * spec.width, spec.width];
        let preprocess = PointMlp::new(sizes, config.act, Start::Default, &mut params.scope("preprocess.0"))?;
        let mut blocks = Vec::new();
        for i in 0..config.n_layers {
            let name = format!("blocks.{i}");
            let block = Block::new(&name, &spec, (config.act, ratio), params)?;
            blocks.push(Recompute::new(&name, block, config.gradient_checkpointing));
        }
        let channels = [spec.width, outputs];
        let head = Head::new(channels, Start::Default, &mut params.scope("ln_mlp_out.0"))?;
        Ok(Self { grid, features, context, preprocess, blocks, head })
    }

    /// Computes `fields`, in the form of the input: see [`GeoTransolver`].
    ///
    /// # Errors
    ///
    /// An array is missing or has another shape, or an operator fails.
    pub fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let (x, form) = match batch.get("local_embedding") {
            Some(points) => self.grid.points(points, self.features)?,
            None => self.grid.fields(batch.require(MODEL, Batch::<A>::FIELDS)?, self.features)?,
        };
        let context = self.context.forward(batch, (&x, form), &self.grid, mode)?;
        let mut x = self.preprocess.forward(&x)?;
        for block in &self.blocks {
            let inputs: Vec<&A> = [&x].into_iter().chain(&context).collect();
            x = block.forward(&inputs, mode, |block, inputs, mode| {
                block.forward(&inputs[0], inputs.get(1), mode)
            })?;
        }
        Ok(Batch::of_fields(self.grid.output(&self.head.forward(&x)?, form)?))
    }
}

impl<A: Array> Model<A> for GeoTransolver<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        GeoTransolver::forward(self, batch, mode)
    }
}
