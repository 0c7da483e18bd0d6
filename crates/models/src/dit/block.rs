//! One block: attention among tokens, then a perceptron for each.

use isobar_array::{Array, Unary};
use isobar_nn::{Dropout, LayerNorm, Linear, Mode};
use isobar_shard::{Init, Params, Placement, Scope};

use super::modulation::{Modulation, modulated};
use crate::error::Result;
use crate::layers::{Recompute, Start, TokenAttention, TokenAttentionConfig, batch_dim};

/// Configuration of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockConfig {
    pub(super) attention: TokenAttentionConfig,
    /// Scope of the attention's parameters.
    pub(super) attention_scope: &'static str,
    /// True to replace invalid tokens by a trained token.
    pub(super) mask_token: bool,
    pub(super) hidden: i64,
    pub(super) conditioned: bool,
    pub(super) dit_initialization: bool,
    pub(super) norm_eps: f64,
    pub(super) mlp_drop: f64,
    pub(super) final_mlp_dropout: bool,
    pub(super) drop_path: f64,
}

/// Arrays that all blocks of a forward pass read beside the tokens.
#[derive(Debug)]
pub(super) struct Context<A> {
    /// Vectors of the samples, `[batch, features]`.
    pub(super) c: Option<A>,
    /// Rotary angles.
    pub(super) angles: Option<A>,
    /// 1 at invalid tokens and 0 at others, `[grid…, batch, 1]`.
    pub(super) invalid: Option<A>,
}

impl<A: Array> Context<A> {
    /// Applies a block that may be recomputed, whose inputs are a list of arrays.
    pub(super) fn apply(&self, block: &Recompute<Block<A>>, x: &A, mode: Mode<'_>) -> Result<A> {
        let arrays = [&self.c, &self.angles, &self.invalid];
        let given = arrays.map(Option::is_some);
        let inputs: Vec<&A> = [x].into_iter().chain(arrays.into_iter().flatten()).collect();
        block.forward(&inputs, mode, move |block, inputs, mode| {
            let mut rest = inputs[1..].iter().map(A::shallow_clone);
            let [c, angles, invalid] = given.map(|is_given| if is_given { rest.next() } else { None });
            block.forward(&inputs[0], &Self { c, angles, invalid }, mode)
        })
    }
}

#[derive(Debug)]
pub(super) struct Block<A> {
    modulation: Modulation<A>,
    norm: LayerNorm<A>,
    mask_token: Option<A>,
    attention: TokenAttention<A>,
    layers: [Linear<A>; 2],
    dropout: Dropout,
    final_dropout: bool,
    drop_path: f64,
}

impl<A: Array> Block<A> {
    pub(super) fn new(config: BlockConfig, params: &mut Scope<'_, A>) -> Result<Self> {
        let BlockConfig { attention, hidden, .. } = config;
        let (width, start) = (attention.width, attention.start);
        let of_attention = &mut params.scope(config.attention_scope);
        let mask_token = config.mask_token.then(|| {
            of_attention.param("mask_token", &[1, 1, width], Init::Constant(0.0), Placement::Replicate)
        });
        let mask_token = mask_token.transpose()?;
        let attention = TokenAttention::new(attention, of_attention)?;
        // A module for the dropout takes a number.
        let second = if config.mlp_drop > 0.0 { "linear.layers.3" } else { "linear.layers.2" };
        let layers = [
            Linear::with_options(width, hidden, start.options(), &mut params.scope("linear.layers.0"))?,
            Linear::with_options(hidden, width, start.options(), &mut params.scope(second))?,
        ];
        let start = if config.dit_initialization { Start::Zero } else { start };
        Ok(Self {
            modulation: Modulation::new((width, 6), config.conditioned, start, params)?,
            norm: LayerNorm::without_affine(&[width], config.norm_eps)?,
            mask_token,
            attention,
            layers,
            dropout: Dropout::new(config.mlp_drop)?,
            final_dropout: config.final_mlp_dropout,
            drop_path: config.drop_path,
        })
    }

    /// Applies the block to tokens `[grid…, batch, features]`.
    fn forward(&self, x: &A, context: &Context<A>, mode: Mode<'_>) -> Result<A> {
        let vectors = self.modulation.vectors(context.c.as_ref())?;
        let [shift_a, scale_a, gate_a, shift_m, scale_m, gate_m] = &vectors[..] else {
            return Ok(x.shallow_clone());
        };
        let u = self.masked(&modulated(&self.norm, x, [shift_a, scale_a])?, context.invalid.as_ref())?;
        let attended = self.attention.forward(&u, context.angles.as_ref(), mode)?;
        let x = self.gated(x, gate_a, &attended, mode)?;
        let u = modulated(&self.norm, &x, [shift_m, scale_m])?;
        self.gated(&x, gate_m, &self.mlp(&u, mode)?, mode)
    }

    /// Replaces invalid tokens by the trained one: u (1 − α) + token α, with α = 1 at them and 0 elsewhere. Like the source's, the
    /// sum keeps NaNs.
    fn masked(&self, u: &A, invalid: Option<&A>) -> Result<A> {
        let (Some(token), Some(invalid)) = (&self.mask_token, invalid) else { return Ok(u.shallow_clone()) };
        let (token, alpha) = (token.to_kind(u.kind())?, invalid.to_kind(u.kind())?);
        let kept = u.mul(&alpha.mul_scalar(-1.0)?.add_scalar(1.0)?)?;
        Ok(kept.add(&token.mul(&alpha)?)?)
    }

    /// x + gate · branch, without the branch of samples that are dropped.
    fn gated(&self, x: &A, gate: &A, branch: &A, mode: Mode<'_>) -> Result<A> {
        Ok(x.add(&mode.drop_path(&branch.mul(gate)?, self.drop_path, batch_dim(x))?)?)
    }

    fn mlp(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let [first, second] = &self.layers;
        let hidden = first.forward(x)?.unary(Unary::GeluTanh)?;
        let hidden = self.dropout.forward_parts(&hidden, mode, batch_dim(x), &[])?;
        let y = second.forward(&hidden)?;
        match self.final_dropout {
            true => Ok(self.dropout.forward_parts(&y, mode, batch_dim(x), &[])?),
            false => Ok(y),
        }
    }
}
