//! The vision transformer.

use isobar_array::Array;
use isobar_nn::{AxialRotaryEmbedding, Dropout, LayerNorm, Linear, Mode, PatchEmbed, PositionEmbedding};
use isobar_shard::Params;
use tch::Tensor;

use super::block::{Block, BlockConfig, EPS};
use super::{MODEL, VitConfig, VitPositions};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::layers::{
    Reach, Recompute, Start, TokenAttentionConfig, attention_window, axial_rotary, batch_dim, hidden_width,
    patch_grid, unpatched,
};
use crate::model::Model;

/// A vision transformer from fields to fields: Dosovitskiy et al., *An Image is Worth 16x16 Words*, arXiv:2010.11929, without its
/// class token, and with a head that turns tokens into patches.
///
/// Patches become tokens of D features, plus a trained position (`learned`), or queries and keys are rotated by their rows and columns
/// (`rotary`: Heo et al., arXiv:2403.13298). With layer norms N, each block computes
///
/// ```text
/// x ← x + attention(N₁(x))
/// x ← x + fc2(gelu(fc1(N₂(x))))
/// ```
///
/// and the output is the patches W N(x) + b, channels fastest. Attention is global: on sharded fields, ring attention
/// or an all-to-all from tokens to heads, whichever moves fewer bytes. With `attn_kernel` it is within windows of tokens
/// (neighbourhood attention), and ranks fetch the halo of their tokens. Positions are those of the global grid.
///
/// Weights start truncated normal with standard deviation 0.02, biases with 0, the patch embedding as PyTorch's.
///
/// State dict, of timm's `VisionTransformer` up to the head: `pos_embed`, `patch_embed.proj.{weight,bias}`,
/// `blocks.{i}.{norm1,attn.qkv,attn.proj,norm2,mlp.fc1,mlp.fc2}.{weight,bias}`, `blocks.{i}.attn.{q,k}_norm`,
/// `norm.{weight,bias}`, `head.{weight,bias}`.
///
/// ```
/// use isobar_models::{Mode, PerDim, Vit, VitConfig, VitPositions};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let small = VitConfig { patch_size: PerDim::All(4), embed_dim: 32, depth: 2, num_heads: 4, ..VitConfig::new([16, 24], 3, 2) };
/// let config = VitConfig { pos_embed: VitPositions::Rotary, ..small };
/// let model = Vit::new(&config, &mut ParamStore::new(Generator::new(1)))?;
/// let y = model.forward(&Tensor::ones([2, 3, 16, 24], (Kind::Float, Device::Cpu)), Mode::Eval)?;
/// assert_eq!(y.size(), [2, 2, 16, 24]);
/// # Ok::<(), isobar_models::Error>(())
/// ```
#[derive(Debug)]
pub struct Vit<A = Tensor> {
    fields: Vec<i64>,
    patch: Vec<i64>,
    inputs: i64,
    rotary: Option<AxialRotaryEmbedding>,
    pos_embed: Option<PositionEmbedding<A>>,
    patch_embed: PatchEmbed<A>,
    dropout: Dropout,
    blocks: Vec<Recompute<Block<A>>>,
    norm: LayerNorm<A>,
    head: Linear<A>,
}

impl<A: Array> Vit<A> {
    /// Makes the model, its parameters from `params`.
    ///
    /// # Errors
    ///
    /// A size is 0, `inp_shape` is not divisible by `patch_size`, `embed_dim` not by `num_heads`; an `attn_kernel` is even or larger than
    /// the grid of tokens; a dropout is outside [0, 1);
    /// rotary positions with heads of other than a multiple of 4 features; or `params` refuses a parameter.
    pub fn new(config: &VitConfig, params: &mut impl Params<Array = A>) -> Result<Self> {
        let check = Checker(MODEL);
        let [fields, patch] =
            patch_grid(&check, 2, ("inp_shape", &config.inp_shape), ("patch_size", &config.patch_size))?;
        let inputs = check.extent("in_channels", config.in_channels)?;
        let outputs = check.extent("out_channels", config.out_channels)?;
        let grid = [fields[0] / patch[0], fields[1] / patch[1]];
        let attention = attention(config, grid)?;
        let width = attention.width;
        let hidden = hidden_width(&check, width, config.mlp_ratio)?;
        check.probability("drop_rate", config.drop_rate)?;
        check.probability("drop_path_rate", config.drop_path_rate)?;

        let pos_embed = match config.pos_embed {
            VitPositions::Learned => {
                Some(PositionEmbedding::new("pos_embed", grid[0] * grid[1], width, params)?)
            }
            VitPositions::Rotary | VitPositions::None => None,
        };
        let patch_embed = PatchEmbed::new(patch.clone(), inputs, width, &mut params.scope("patch_embed"))?;
        let last = config.depth.saturating_sub(1).max(1);
        let blocks = (0..config.depth)
            .map(|i| {
                let name = format!("blocks.{i}");
                let drop_path = config.drop_path_rate * i as f64 / last as f64;
                let block = BlockConfig { attention, hidden, drop_rate: config.drop_rate, drop_path };
                let block = Block::new(block, &mut params.scope(&name))?;
                Ok(Recompute::new(&name, block, config.gradient_checkpointing))
            })
            .collect::<Result<_>>()?;
        let norm = LayerNorm::with_eps(&[width], EPS, &mut params.scope("norm"))?;
        let features = patch.iter().fold(outputs, |all, &extent| all.saturating_mul(extent));
        let head = Linear::with_options(width, features, Start::Small.options(), &mut params.scope("head"))?;
        let (rotary, dropout) = (attention.rotary, Dropout::new(config.drop_rate)?);
        Ok(Self { fields, patch, inputs, rotary, pos_embed, patch_embed, dropout, blocks, norm, head })
    }

    /// Computes `[batch, out_channels, height, width]` from `x` `[batch, in_channels, height, width]`.
    ///
    /// # Errors
    ///
    /// `x` has another shape, or an operator fails.
    pub fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let shape = x.shape();
        if shape.len() != 4 || shape[1] != self.inputs || shape[2..] != self.fields {
            let want = format!("[batch, {}, {}, {}]", self.inputs, self.fields[0], self.fields[1]);
            return Err(Error::Input { model: MODEL, got: shape, want });
        }
        let mut tokens = self.patch_embed.forward_grid(x)?;
        if let Some(positions) = &self.pos_embed {
            tokens = positions.forward_grid(&tokens)?;
        }
        tokens = self.dropout.forward_parts(&tokens, mode, batch_dim(&tokens), &[])?;
        let angles = self.rotary.map(|rotary| rotary.angles(&tokens)).transpose()?;
        for block in &self.blocks {
            let inputs: Vec<&A> = [&tokens].into_iter().chain(&angles).collect();
            tokens = block.forward(&inputs, mode, |block, inputs, mode| {
                block.forward(&inputs[0], inputs.get(1), mode)
            })?;
        }
        unpatched(&self.head.forward(&self.norm.forward(&tokens)?)?, &self.patch)
    }
}

impl<A: Array> Model<A> for Vit<A> {
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let x = batch.require(MODEL, Batch::<A>::FIELDS)?;
        Ok(Batch::of_fields(self.forward(x, mode)?))
    }
}

/// Checks the arguments of the attention over a grid of tokens.
fn attention(config: &VitConfig, grid: [i64; 2]) -> Result<TokenAttentionConfig> {
    let check = Checker(MODEL);
    let width = check.extent("embed_dim", config.embed_dim)?;
    let heads = check.extent("num_heads", config.num_heads)?;
    check.divisible(("embed_dim", width), ("num_heads", heads))?;
    check.probability("attn_drop_rate", config.attn_drop_rate)?;
    check.probability("proj_drop_rate", config.proj_drop_rate)?;
    let rotary = match config.pos_embed {
        VitPositions::Rotary => Some(axial_rotary(MODEL, ("rope_theta", config.rope_theta), width / heads)?),
        VitPositions::Learned | VitPositions::None => None,
    };
    let reach = match &config.attn_kernel {
        None => Reach::Global { causal: false },
        Some(kernel) => Reach::Window(attention_window(&check, "attn_kernel", &kernel.list(2), &grid)?),
    };
    Ok(TokenAttentionConfig {
        width,
        heads,
        reach,
        qkv_bias: config.qkv_bias,
        proj_bias: true,
        qk_norm: config.qk_norm.map(|norm| (norm, true, norm.eps())),
        start: Start::Small,
        attn_drop: config.attn_drop_rate,
        proj_drop: config.proj_drop_rate,
        rotary,
    })
}
