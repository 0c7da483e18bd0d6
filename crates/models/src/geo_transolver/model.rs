//! GeoTransolver.

use isobar_array::Array;
use isobar_nn::{Activation, Mode};
use isobar_shard::{Init, Params, Placement};
use tch::Tensor;

use super::context::Context;
use super::streams::Stream;
use super::{GeoTransolverConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Checker, Result};
use crate::layers::{Recompute, Start};
use crate::model::Model;
use crate::point_attention::{Block, Grid, Head, PointMlp};

/// *GeoTransolver: Learning Physics on Irregular Domains using Multi-scale Geometry Aware Physics
/// Attention Transformer*, arXiv:2512.20399, as PhysicsNeMo builds it.
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
/// Several streams of points, such as surface and volume, have separate projections W₁, W₂ and W; the blocks are applied
/// to each with the same weights and context.
///
/// With `include_local_features`, each radius has a multilayer perceptron
///
/// ```text
/// l(p) = tanh(W₃ gelu(W₂ gelu(W₁ p)))
/// ```
///
/// of the coordinates p of the nearest points within the radius, the nearest first, and zeros where there are fewer. With the
/// points of the geometry near each point of the stream, l is appended to h; with the points of the stream near each point of
/// the geometry, l is averaged into slices, which come first in the context. (In PhysicsNeMo, the order of neighbours depends
/// on the implementation of its search; the `torch` implementation has this order.)
///
/// Points and geometry may be sharded in any way, independently of each other. Communication is that of Transolver or
/// FLARE; the search for neighbours passes the coordinates around a ring.
///
/// Inputs: `local_embedding` `[batch, points, functional_dim]`, with `structured_shape` also `[batch, extents…, functional_dim]`, or
/// `fields` `[batch, functional_dim, extents…]`; `geometry` `[batch, points of the geometry, geometry_dim]`, where points on a grid
/// have their coordinates in [0, 1] if it is not given; `global_embedding` `[batch, tokens, global_dim]`; with
/// `include_local_features`, `local_positions` `[batch, points, 3]`. Without any context, blocks attend to the points alone. The
/// output `fields` has the form of the input. Several streams are `local_embedding.0`, `local_embedding.1` … with
/// `local_positions.0` … and the outputs `fields.0` ….
///
/// State dict: that of PhysicsNeMo's `GeoTransolver` with `use_te=False`: `preprocess.{stream}`,
/// `context_builder.local_extractors.{stream}.{processors,tokenizers}.{radius}`, `context_builder.geometry_tokenizer`,
/// `context_builder.global_tokenizer`, `blocks.{i}.{ln_1,Attn,ln_mlp1}` and `ln_mlp_out.{stream}.{0,1}`; with `concrete_dropout`
/// also `p_logit` under `blocks.{i}.{Attn.out_dropout,attn_dropout,ffn_dropout}` and under `output_dropout` of the tokenizers. Layers for
/// a context that the configuration does not name, and `time_fc` with `time_input`, are buffers.
///
/// With `concrete_dropout`, `isobar train` and `Trainer` add [`regularization`](Self::regularization), times a weight, to the loss, as
/// PhysicsNeMo's users add `collect_concrete_dropout_losses(model)`.
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
    /// Features of the points of each stream.
    features: Vec<i64>,
    context: Context<A>,
    preprocess: Vec<PointMlp<A>>,
    blocks: Vec<Recompute<Block<A>>>,
    heads: Vec<Head<A>>,
}

impl<A: Array> GeoTransolver<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0; `n_head` does not divide `n_hidden` (plus the local features, if any); `structured_shape` has other than two or
    /// three extents; `out_dim` and `functional_dim` have different numbers of streams; `include_local_features` without a
    /// `geometry_dim` of 3 or with a grid; `use_te`; the activation `stan`; or `params` refuses a parameter.
    pub fn new(config: &GeoTransolverConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let check = Checker(MODEL);
        let channels = config.channels()?;
        let extents = |name: &'static str, side: usize| {
            channels.iter().map(|sizes| check.extent(name, sizes[side])).collect::<Result<Vec<i64>>>()
        };
        let (features, outputs) = (extents("functional_dim", 0)?, extents("out_dim", 1)?);
        let [spec, of_context] = config.attention()?;
        check.extent("n_layers", config.n_layers)?;
        let ratio = check.extent("mlp_ratio", config.mlp_ratio)?;
        check
            .ensure(config.act != Activation::Stan, || "act is stan, which is for single features".into())?;
        let grid = Grid::new(MODEL, config.structured_shape.as_deref())?;

        let context = Context::new(config, &of_context, params)?;
        let mut preprocess = Vec::new();
        for (i, &features) in features.iter().enumerate() {
            let sizes = [features, 2 * of_context.width, of_context.width];
            let mut params = params.scope(&format!("preprocess.{i}"));
            preprocess.push(PointMlp::new(sizes, config.act, Start::Torch, &mut params)?);
        }
        let mut blocks = Vec::new();
        for i in 0..config.n_layers {
            let name = format!("blocks.{i}");
            let block = Block::new(&name, &spec, (config.act, ratio), params)?;
            blocks.push(Recompute::new(&name, block, config.gradient_checkpointing));
        }
        let mut heads = Vec::new();
        for (i, &outputs) in outputs.iter().enumerate() {
            let mut params = params.scope(&format!("ln_mlp_out.{i}"));
            heads.push(Head::new([spec.width, outputs], Start::Torch, &mut params)?);
        }
        if config.time_input {
            unused_time(of_context.width, params)?;
        }
        Ok(Self { grid, features, context, preprocess, blocks, heads })
    }

    /// Computes `fields`, in the form of the input: see [`GeoTransolver`].
    ///
    /// # Errors
    ///
    /// An array is missing or has another shape, or an operator fails.
    pub fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let mut streams = Stream::read(batch, &self.features, &self.grid)?;
        let context = self.context.forward(batch, &mut streams, &self.grid, mode)?;
        let mut outputs = Batch::default();
        for (stream, (preprocess, head)) in streams.iter().zip(self.preprocess.iter().zip(&self.heads)) {
            let mut x = preprocess.forward(&stream.x)?;
            if let Some(local) = &stream.local {
                x = A::cat(&[&x, local], -1)?;
            }
            for block in &self.blocks {
                let inputs: Vec<&A> = [&x].into_iter().chain(&context).collect();
                x = block.forward(&inputs, mode, |block, inputs, mode| {
                    block.forward(&inputs[0], inputs.get(1), mode)
                })?;
            }
            outputs = outputs.with(&stream.output(), self.grid.output(&head.forward(&x)?, stream.form)?);
        }
        Ok(outputs)
    }

    /// Computes the sum of what each trained probability of dropout adds to the loss, without dims; `None` without
    /// `concrete_dropout`.
    ///
    /// # Errors
    ///
    /// An operator fails.
    pub fn regularization(&self) -> Result<Option<A>> {
        let mut terms = self.context.regularization()?;
        for block in &self.blocks {
            terms.extend(block.with(Block::regularization)?);
        }
        let sum = terms.into_iter().map(Ok).reduce(|sum: Result<A>, term| Ok(sum?.add(&term?)?));
        sum.transpose()
    }
}

/// Makes PhysicsNeMo's layers `time_fc`, which are never used, as buffers.
fn unused_time<A: Array>(width: i64, params: &mut impl Params<Array = A>) -> Result<()> {
    for name in ["time_fc.0", "time_fc.2"] {
        let mut params = params.scope(name);
        params.buffer("weight", &[width, width], Init::FanIn(width), Placement::Replicate)?;
        params.buffer("bias", &[width], Init::FanIn(width), Placement::Replicate)?;
    }
    Ok(())
}

impl<A: Array> Model<A> for GeoTransolver<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        GeoTransolver::forward(self, batch, mode)
    }

    fn regularization(&self) -> Result<Option<A>> {
        GeoTransolver::regularization(self)
    }
}
