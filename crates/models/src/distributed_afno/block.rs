//! One block: a spectral mixing of tokens, then a mixing of channels.

use isobar_array::Array;
use isobar_nn::{Mode, Part};
use isobar_shard::{Init, Parallel, ParallelRegion, Params, Placement, Scope};

use super::filter::Filter;
use super::{BATCH_DIM, CHANNEL_DIM};
use crate::error::Result;
use crate::layers::Recompute;

/// Hidden features per channel.
pub(super) const MLP_RATIO: i64 = 4;
const EPS: f64 = 1e-6;

#[derive(Debug)]
pub(super) struct Block<A> {
    /// Weights and biases `[h, w]` of both norms, replicated.
    norms: [A; 4],
    /// `[channels]`, replicated.
    b2: A,
    split: Recompute<Split<A>>,
}

/// Parameters of a block that are split over the ranks.
#[derive(Debug)]
struct Split<A> {
    filter: Filter<A>,
    /// The rank's part of the hidden features: `[hidden, channels, 1, 1]`, `[hidden]`, `[channels, hidden, 1, 1]`.
    w1: A,
    b1: A,
    w2: A,
    drop_rate: f64,
    drop_path: f64,
}

/// Configuration of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockConfig {
    /// Extents of the grid of tokens.
    pub(super) grid: [i64; 2],
    /// Channels of a token, all ranks' together.
    pub(super) width: i64,
    /// Independent groups of channels in the spectral weights.
    pub(super) groups: i64,
    pub(super) drop_rate: f64,
    pub(super) drop_path: f64,
    pub(super) gradient_checkpointing: bool,
}

/// A block's replicated parameters, as this rank uses them in the region.
pub(super) struct Shared<A> {
    norms: [A; 4],
    /// The part of the rank's channels.
    b2: A,
}

impl<A: Array + Parallel> Shared<A> {
    /// Takes those of all blocks into the region at once, so that backward sums their gradients in one reduction.
    pub(super) fn enter_all(blocks: &[Block<A>], region: &ParallelRegion) -> Result<Vec<Self>> {
        if blocks.is_empty() {
            return Ok(Vec::new());
        }
        let norms: Vec<&A> = blocks.iter().flat_map(|block| &block.norms).collect();
        let mut norms = A::copy_all_to_region(&norms, region)?.into_iter();
        let biases: Vec<&A> = blocks.iter().map(|block| &block.b2).collect();
        let biases =
            A::stack(&biases, 0)?.scatter_to_region(1, None, region)?.split(&vec![1; blocks.len()], 0)?;
        let mut shared = Vec::with_capacity(blocks.len());
        for b2 in biases {
            if let (Some(w1), Some(b1), Some(w2), Some(b2_norm)) =
                (norms.next(), norms.next(), norms.next(), norms.next())
            {
                shared.push(Self { norms: [w1, b1, w2, b2_norm], b2: b2.reshape(&[1, -1, 1])? });
            }
        }
        Ok(shared)
    }
}

impl<A: Array + Parallel> Block<A> {
    pub(super) fn new(name: &str, config: BlockConfig, params: &mut Scope<'_, A>) -> Result<Self> {
        let BlockConfig { grid, width, groups, drop_rate, drop_path, gradient_checkpointing } = config;
        let whole = Placement::Replicate;
        let [norm1_weight, norm1_bias] = norm(&mut params.scope("norm1"), grid)?;
        let filter = Filter::new(grid, width, groups, &mut params.scope("filter"))?;
        let [norm2_weight, norm2_bias] = norm(&mut params.scope("norm2"), grid)?;
        let mlp = &mut params.scope("mlp");
        let hidden = MLP_RATIO * width;
        let small = || Init::TruncNormal { std: 0.02 };
        let zero = || Init::Constant(0.0);
        let split = Split {
            filter,
            w1: mlp.param("w1", &[hidden, width, 1, 1], small(), Placement::Shard(0))?,
            b1: mlp.param("b1", &[hidden], zero(), Placement::Shard(0))?,
            w2: mlp.param("w2", &[width, hidden, 1, 1], small(), Placement::Shard(1))?,
            drop_rate,
            drop_path,
        };
        Ok(Self {
            norms: [norm1_weight, norm1_bias, norm2_weight, norm2_bias],
            b2: mlp.param("b2", &[width], zero(), whole)?,
            split: Recompute::new(name, split, gradient_checkpointing),
        })
    }

    /// For the rank's channels of `x` `[batch, channels, h, w]`.
    pub(super) fn forward(
        &self,
        x: &A,
        shared: &Shared<A>,
        region: &ParallelRegion,
        mode: Mode<'_>,
    ) -> Result<A> {
        let [weight1, bias1, weight2, bias2] = &shared.norms;
        let region = region.clone();
        let inputs = [x, weight1, bias1, weight2, bias2, &shared.b2];
        self.split.forward(&inputs, mode, move |split, inputs, mode| {
            let norms = [[&inputs[1], &inputs[2]], [&inputs[3], &inputs[4]]];
            split.forward(&inputs[0], norms, &inputs[5], &region, mode)
        })
    }
}

impl<A: Array + Parallel> Split<A> {
    /// `norms` are the weight and the bias of each, `b2` the part of the rank's channels.
    fn forward(
        &self,
        x: &A,
        norms: [[&A; 2]; 2],
        b2: &A,
        region: &ParallelRegion,
        mode: Mode<'_>,
    ) -> Result<A> {
        let norm = |x: &A, [weight, bias]: [&A; 2]| -> Result<A> {
            Ok(x.layer_norm(&weight.shape(), Some(weight), Some(bias), EPS)?)
        };
        let u = norm(x, norms[0])?;
        let x = self.filter.forward(&u)?.add(&u)?.add(x)?;
        let update = self.mix_channels(&norm(&x, norms[1])?, b2, region, mode)?;
        Ok(mode.drop_path(&update, self.drop_path, BATCH_DIM)?.add(&x)?)
    }

    fn mix_channels(&self, u: &A, b2: &A, region: &ParallelRegion, mode: Mode<'_>) -> Result<A> {
        let shape = u.shape();
        let (batch, own, points) = (shape[0], shape[1], shape[2] * shape[3]);
        let (ranks, rank) = (region.size() as i64, region.rank() as i64);
        let hidden = self.b1.extent(0)?;
        let part = |dim, extent| Part { dim, offset: extent * rank, total: extent * ranks };

        // Between the products the tokens stand before the features: products that give few long columns run a tenth
        // faster than those that give long rows.
        let whole = u.reshape(&[batch, own, points])?.all_gather(CHANNEL_DIM as i64, None, region)?;
        let w1 = self.w1.reshape(&[1, hidden, own * ranks])?.transpose(1, 2)?;
        let w1 = w1.expand(&[batch, own * ranks, hidden])?;
        let x = whole.transpose(1, 2)?.batched_matmul(&w1, Some(&self.b1))?.gelu()?;
        let x = mode.dropout(&x, self.drop_rate, BATCH_DIM, &[part(2, hidden)])?;
        let w2 = self.w2.reshape(&[1, own * ranks, hidden])?.transpose(1, 2)?;
        let w2 = w2.expand(&[batch, hidden, own * ranks])?;
        let x = x.batched_matmul(&w2, None)?.transpose(1, 2)?;
        let x = x.reduce_scatter(CHANNEL_DIM as i64, None, region)?.add(b2)?;
        Ok(mode.dropout(&x, self.drop_rate, BATCH_DIM, &[part(CHANNEL_DIM, own)])?.reshape(&shape)?)
    }
}

fn norm<A: Array>(params: &mut Scope<'_, A>, grid: [i64; 2]) -> Result<[A; 2]> {
    let weight = params.param("weight", &grid, Init::Constant(1.0), Placement::Replicate)?;
    let bias = params.param("bias", &grid, Init::Constant(0.0), Placement::Replicate)?;
    Ok([weight, bias])
}
