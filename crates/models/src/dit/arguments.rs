//! Checks of DiT's arguments.

use super::block::BlockConfig;
use super::kwargs::{AttentionBackend, DetokenizerKind};
use super::{DitConfig, MODEL};
use crate::error::{Checker, Result};
use crate::layers::{
    QkNorm, Reach, Start, TokenAttentionConfig, attention_window, axial_rotary, hidden_width,
};

/// Refuses arguments that need other parameters or devices than there are here, and those of another choice.
pub(super) fn check(config: &DitConfig) -> Result<()> {
    check_rates(config)?;
    let check = Checker(MODEL);
    check.ensure(config.attention_backend != AttentionBackend::TransformerEngine, || {
        "attention_backend \"transformer_engine\" is not supported: its state dict holds queries, keys and values apart; expected \
         \"timm\", which computes the same attention. Concatenate attn_op.qkv.{query,key,value}_weight to attn_op.qkv.weight, and \
         the biases, and leave _extra_state out"
            .into()
    })?;
    check.ensure(!config.use_nan_mask_tokens || has_windows(config), || {
        "use_nan_mask_tokens is for attention in windows; set attention_backend to \"natten2d\", \"natten2d_rope\" or \
         \"natten3d\", or remove it"
            .into()
    })?;
    let kwargs = &config.detokenizer_kwargs;
    let of_convs = kwargs.conv_layers.or(kwargs.conv_hidden).or(kwargs.conv_kernel).is_some();
    check.ensure(config.detokenizer == DetokenizerKind::ProjReshape2dConv || !of_convs, || {
        "detokenizer_kwargs are those of the detokenizer \"proj_reshape_2d_conv\"; set detokenizer to it, or remove them".into()
    })
}

/// Returns whether tokens attend to windows.
fn has_windows(config: &DitConfig) -> bool {
    !matches!(config.attention_backend, AttentionBackend::Timm | AttentionBackend::TransformerEngine)
}

/// Checks the number of rates.
pub(super) fn check_rates(config: &DitConfig) -> Result<()> {
    let check = Checker(MODEL);
    let Some(rates) = &config.drop_path_rates else { return Ok(()) };
    check.ensure(rates.len() == config.depth, || {
        format!(
            "drop_path_rates has {} numbers, expected depth = {}: one for each block",
            rates.len(),
            config.depth
        )
    })?;
    rates.iter().try_for_each(|&rate| check.probability("a number of drop_path_rates", rate))
}

/// Checks the arguments of the attention on a grid of tokens.
pub(super) fn attention(config: &DitConfig, grid: &[i64]) -> Result<TokenAttentionConfig> {
    let check = Checker(MODEL);
    let width = check.extent("hidden_size", config.hidden_size)?;
    let heads = check.extent("num_heads", config.num_heads)?;
    check.divisible(("hidden_size", width), ("num_heads", heads))?;
    let (kwargs, block) = (&config.attn_kwargs, &config.block_kwargs);
    check_attn_kwargs(config)?;
    check.probability("attn_drop_rate of block_kwargs", block.attn_drop_rate)?;
    check.probability("proj_drop_rate of block_kwargs", block.proj_drop_rate)?;
    let start = if config.dit_initialization { Start::Xavier } else { Start::Torch };
    let common = TokenAttentionConfig {
        width,
        heads,
        reach: Reach::Global { causal: kwargs.is_causal.unwrap_or(false) },
        qkv_bias: true,
        proj_bias: kwargs.proj_bias.unwrap_or(true),
        qk_norm: None,
        start,
        attn_drop: block.attn_drop_rate,
        proj_drop: block.proj_drop_rate,
        rotary: None,
    };
    if config.attention_backend == AttentionBackend::Timm {
        let affine = kwargs.qk_norm_affine.unwrap_or(true);
        let qk_norm = kwargs.qk_norm_type.map(|norm| (norm, affine, norm.eps()));
        return Ok(TokenAttentionConfig { qk_norm, ..common });
    }
    let kernel = kernel(config, grid)?;
    let rotary = match config.attention_backend {
        AttentionBackend::Natten2dRope => {
            let base = kwargs.rope_theta.unwrap_or(10_000.0);
            Some(axial_rotary(MODEL, ("rope_theta of attn_kwargs", base), width / heads)?)
        }
        _ => None,
    };
    Ok(TokenAttentionConfig {
        reach: Reach::Window(kernel),
        qkv_bias: kwargs.qkv_bias.unwrap_or(true),
        qk_norm: kwargs.qk_norm.unwrap_or(false).then_some((QkNorm::LayerNorm, false, 1e-6)),
        rotary,
        ..common
    })
}

/// Returns the window of attention on a grid of tokens. Grids with fewer than three dims use the last extents.
fn kernel(config: &DitConfig, grid: &[i64]) -> Result<[i64; 3]> {
    const NAME: &str = "attn_kernel of attn_kwargs";
    let (check, dims) = (Checker(MODEL), grid.len());
    let (backend, own) = match config.attention_backend {
        AttentionBackend::Natten3d => ("natten3d", 3),
        _ => ("natten2d", 2),
    };
    check.ensure(dims == own, || {
        format!("the attention_backend \"{backend}\" is for {own} dims, but input_size has {dims} numbers")
    })?;
    let list =
        config.attn_kwargs.attn_kernel.as_ref().map_or_else(|| vec![3; dims], |given| given.list(dims));
    attention_window(&check, NAME, &list, grid)
}

/// Refuses arguments of another attention.
fn check_attn_kwargs(config: &DitConfig) -> Result<()> {
    let kwargs = &config.attn_kwargs;
    let of_timm = [
        ("qk_norm_type", kwargs.qk_norm_type.is_some()),
        ("qk_norm_affine", kwargs.qk_norm_affine.is_some()),
        ("is_causal", kwargs.is_causal.is_some()),
        ("proj_bias", kwargs.proj_bias.is_some()),
    ];
    let of_windows = [
        ("attn_kernel", kwargs.attn_kernel.is_some()),
        ("qkv_bias", kwargs.qkv_bias.is_some()),
        ("qk_norm", kwargs.qk_norm.is_some()),
        ("norm_layer", kwargs.norm_layer.is_some()),
    ];
    let of_rotary = [("rope_theta", kwargs.rope_theta.is_some())];
    let (name, foreign) = match config.attention_backend {
        AttentionBackend::Timm | AttentionBackend::TransformerEngine => {
            ("timm", [&of_windows[..], &of_rotary].concat())
        }
        AttentionBackend::Natten2d => ("natten2d", [&of_timm[..], &of_rotary].concat()),
        AttentionBackend::Natten3d => ("natten3d", [&of_timm[..], &of_rotary].concat()),
        AttentionBackend::Natten2dRope => ("natten2d_rope", of_timm.to_vec()),
    };
    let given: Vec<&str> = foreign.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
    Checker(MODEL).ensure(given.is_empty(), || {
        format!("the attention_backend \"{name}\" has no {} in attn_kwargs; remove it", given.join(", "))
    })
}

/// Checks the arguments of the blocks.
pub(super) fn block(config: &DitConfig, attention: TokenAttentionConfig) -> Result<BlockConfig> {
    let check = Checker(MODEL);
    let options = &config.block_kwargs;
    check.probability("mlp_drop_rate of block_kwargs", options.mlp_drop_rate)?;
    check.ensure(options.norm_eps.is_finite() && options.norm_eps >= 0.0, || {
        format!("norm_eps of block_kwargs is {}, expected 0 or more", options.norm_eps)
    })?;
    Ok(BlockConfig {
        attention,
        attention_scope: if has_windows(config) { "attention" } else { "attention.attn_op" },
        mask_token: config.use_nan_mask_tokens,
        hidden: hidden_width(&check, attention.width, config.mlp_ratio)?,
        conditioned: true,
        dit_initialization: config.dit_initialization,
        norm_eps: options.norm_eps,
        mlp_drop: options.mlp_drop_rate,
        final_mlp_dropout: options.final_mlp_dropout,
        drop_path: 0.0,
    })
}
