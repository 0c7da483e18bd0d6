//! The Adaptive Fourier Neural Operator with its channels split over ranks.

use isobar_array::Array;
use isobar_nn::{Mode, Part};
use isobar_shard::{Init, Parallel, ParallelRegion, Params, Placement};
use tch::Tensor;

use super::block::{Block, BlockConfig, MLP_RATIO, Shared};
use super::{BATCH_DIM, CHANNEL_DIM, DistributedAfnoConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::model::Model;

/// PhysicsNeMo's channel-parallel Adaptive Fourier Neural Operator (Guibas et al., arXiv:2111.13587).
///
/// The blocks are those of [`Afno`](crate::Afno), but the norms are over *space*, for each channel: not the same function,
/// and the weights of one do not fit the other. Of each tensor `[batch, channel, h, w]` a rank of the region holds its part
/// of the channels, the whole grid of tokens; so the transforms need no communication. Inside the layers between the mixings
/// the hidden features are split:
///
/// ```text
/// u = all_gather(norm(x))                    all channels on each rank
/// x ← x + reduce_scatter(W₂ gelu(W₁ u + b₁)) + b₂
/// ```
///
/// with backwards of the same cost. Every rank of the `model_parallel` region calls, on the same samples, and every rank
/// calls backward. Gradients of parameters that the ranks share (norms, `b2`, head) come out whole and bitwise equal.
///
/// Over [`ShardTensor`](isobar_shard::ShardTensor)s the fields may be split at the same time: with
/// [`MeshParams::along`](isobar_shard::MeshParams::along) the parameters are split along one axis of the mesh, the fields along
/// others. The region then has one rank, `x` and the result are global tensors, and the operators
/// communicate by their own rules.
///
/// State dict, under `_impl`: `pos_embed`, `patch_embed.proj.{weight,bias}`, `blocks.{i}.{norm1,norm2}.{weight,bias}`,
/// `blocks.{i}.{filter,mlp}.{w1,b1,w2,b2}`, `head.weight`. Split are: `proj`, the filter's and `mlp.w1`, `mlp.b1` along dim 0,
/// `pos_embed` and `mlp.w2` along dim 1.
#[derive(Debug)]
pub struct DistributedAfno<A = Tensor> {
    fields: [i64; 2],
    patch: i64,
    channels: [i64; 2],
    parallel_inputs: bool,
    parallel_outputs: bool,
    drop_rate: f64,
    region: ParallelRegion,
    pos_embed: A,
    proj_weight: A,
    proj_bias: A,
    blocks: Vec<Block<A>>,
    head: A,
}

impl<A: Array + Parallel> DistributedAfno<A> {
    /// Makes the model over the region of `params`. Every rank of it calls.
    ///
    /// # Errors
    ///
    /// On all ranks, before any communication: `inp_shape` is not divisible by `patch_size`, or `embed_dim` by
    /// `num_blocks`; `embed_dim` or `num_blocks` is not divisible by the number of ranks, nor `in_channels` with
    /// `channel_parallel_inputs` or `out_channels` with `channel_parallel_outputs`; a size is 0, a rate outside [0, 1); or
    /// `params` rejects a parameter.
    pub fn new(config: &DistributedAfnoConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let check = Checker(MODEL);
        let region = params.region().clone();
        let ranks = ("the number of model-parallel ranks", region.size() as i64);
        let patch = check.extent("patch_size", config.patch_size)?;
        let mut fields = [0; 2];
        for (dim, name) in ["height", "width"].into_iter().enumerate() {
            fields[dim] = check.extent(&format!("{name} of inp_shape"), config.inp_shape[dim])?;
            check.divisible((&format!("{name} of inp_shape"), fields[dim]), ("patch_size", patch))?;
        }
        let inputs = check.extent("in_channels", config.in_channels)?;
        let outputs = check.extent("out_channels", config.out_channels.unwrap_or(config.in_channels))?;
        let width = check.extent("embed_dim", config.embed_dim)?;
        let groups = check.extent("num_blocks", config.num_blocks)?;
        check.divisible(("embed_dim", width), ("num_blocks", groups))?;
        check.divisible(("embed_dim", width), ranks)?;
        check.divisible(("num_blocks", groups), ranks)?;
        // Follows from the above, and is what the hidden layers ask.
        check.divisible(("hidden features", MLP_RATIO * width), ranks)?;
        if config.channel_parallel_inputs {
            check.divisible(("in_channels", inputs), ranks)?;
        }
        if config.channel_parallel_outputs {
            check.divisible(("out_channels", outputs), ranks)?;
        }
        check.probability("drop_rate", config.drop_rate)?;
        check.probability("drop_path_rate", config.drop_path_rate)?;

        let params = &mut params.scope("_impl");
        let grid = [fields[0] / patch, fields[1] / patch];
        let small = || Init::TruncNormal { std: 0.02 };
        let pos_shape = [1, width, grid[0] * grid[1]];
        let pos_embed = params.param("pos_embed", &pos_shape, small(), Placement::Shard(1))?;
        let proj_shape = [width, inputs, patch, patch];
        let proj_weight =
            params.param("patch_embed.proj.weight", &proj_shape, small(), Placement::Shard(0))?;
        let proj_bias =
            params.param("patch_embed.proj.bias", &[width], Init::Constant(0.0), Placement::Shard(0))?;
        let last = config.depth.saturating_sub(1).max(1) as f64;
        let blocks = (0..config.depth)
            .map(|i| {
                let block = BlockConfig {
                    grid,
                    width,
                    groups,
                    drop_rate: config.drop_rate,
                    drop_path: config.drop_path_rate * i as f64 / last,
                    gradient_checkpointing: config.gradient_checkpointing,
                };
                let name = format!("blocks.{i}");
                Block::new(&name, block, &mut params.scope(&name))
            })
            .collect::<Result<_>>()?;
        let head_shape = [outputs.saturating_mul(patch * patch), width, 1, 1];
        let head = params.param("head.weight", &head_shape, small(), Placement::Replicate)?;
        Ok(Self {
            fields,
            patch,
            channels: [inputs, outputs],
            parallel_inputs: config.channel_parallel_inputs,
            parallel_outputs: config.channel_parallel_outputs,
            drop_rate: config.drop_rate,
            region,
            pos_embed,
            proj_weight,
            proj_bias,
            blocks,
            head,
        })
    }

    /// The fields `[batch, out_channels, height, width]` for `x` `[batch, in_channels, height, width]`, replicated; with
    /// `channel_parallel_inputs` or `channel_parallel_outputs` the rank's equal part of these channels instead.
    ///
    /// # Errors
    ///
    /// `x` has another shape, or an operator or the communication fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let own_inputs = self.channels[0] / if self.parallel_inputs { self.region.size() as i64 } else { 1 };
        let [height, width] = self.fields;
        let shape = x.shape();
        if shape.len() != 4 || shape[1..] != [own_inputs, height, width] {
            let want = format!("[batch, {own_inputs}, {height}, {width}]");
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        let x = if self.parallel_inputs {
            x.all_gather(CHANNEL_DIM as i64, None, &self.region)?
        } else {
            x.copy_to_region(&self.region)?
        };
        let mut x = self.embed(&x, mode)?;
        let shared = Shared::enter_all(&self.blocks, &self.region)?;
        for (block, shared) in self.blocks.iter().zip(&shared) {
            x = block.forward(&x, shared, &self.region, mode)?;
        }
        let whole = x.all_gather(CHANNEL_DIM as i64, None, &self.region)?;
        self.unpatch(&whole)
    }

    /// From fields `[batch, inputs, height, width]` to the rank's channels of the tokens `[batch, channels, h, w]`.
    fn embed(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let (batch, [h, w], p) = (x.extent(0)?, self.grid(), self.patch);
        let inputs = self.channels[0] * p * p;
        let patches = x.reshape(&[batch, self.channels[0], h, p, w, p])?.permute(&[0, 2, 4, 1, 3, 5])?;
        let patches = patches.reshape(&[batch, h * w, inputs])?.transpose(1, 2)?;
        let own = self.proj_bias.extent(0)?;
        let weight = self.proj_weight.reshape(&[1, own, inputs])?.expand(&[batch, own, inputs])?;
        let offset = self.pos_embed.add(&self.proj_bias.unsqueeze(1)?)?;
        let tokens = weight.batched_matmul(&patches, Some(&offset))?.reshape(&[batch, own, h, w])?;
        let total = own * self.region.size() as i64;
        let part = Part { dim: CHANNEL_DIM, offset: own * self.region.rank() as i64, total };
        Ok(mode.dropout(&tokens, self.drop_rate, BATCH_DIM, &[part])?)
    }

    /// From all channels of the tokens to the output. Each rank makes its part of the output's channels.
    fn unpatch(&self, tokens: &A) -> Result<A> {
        let (batch, [h, w], p) = (tokens.extent(0)?, self.grid(), self.patch);
        let (features, outputs) = (tokens.extent(1)?, self.channels[1]);
        let sizes = self.region.sizes(outputs);
        let own = sizes[self.region.rank()];
        let weight = self.head.reshape(&[p * p, outputs, features])?;
        let weight = weight.scatter_to_region(1, Some(&sizes), &self.region)?;
        let weight = weight.permute(&[2, 1, 0])?.reshape(&[1, features, own * p * p])?;
        let weight = weight.expand(&[batch, features, own * p * p])?;
        let tokens = tokens.reshape(&[batch, features, h * w])?.transpose(1, 2)?;
        let patches = tokens.batched_matmul(&weight, None)?.reshape(&[batch, h, w, own, p, p])?;
        let fields = patches.permute(&[0, 3, 1, 4, 2, 5])?.reshape(&[batch, own, h * p, w * p])?;
        if self.parallel_outputs {
            return Ok(fields);
        }
        Ok(fields.gather_from_region(CHANNEL_DIM as i64, Some(&sizes), &self.region)?)
    }

    fn grid(&self) -> [i64; 2] {
        self.fields.map(|extent| extent / self.patch)
    }
}

impl<A: Array + Parallel> Model<A> for DistributedAfno<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.forward(x, mode)?))
    }
}
