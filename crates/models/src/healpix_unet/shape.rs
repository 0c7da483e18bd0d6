//! Blocks of convolutions: their arguments, checked and resolved.

use super::activation::Function;
use super::checks::{CHECK, MOST, class, whole};
use super::parts::HealpixBlock;
use crate::error::Result;

/// Kind of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Basic,
    ConvNeXt,
    Symmetric,
}

/// A block of convolutions.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct BlockPlan {
    pub(super) kind: Kind,
    pub(super) inputs: i64,
    pub(super) latent: i64,
    pub(super) outputs: i64,
    pub(super) kernel: i64,
    pub(super) dilation: i64,
    pub(super) layers: usize,
    /// Channels inside of a ConvNeXt block.
    pub(super) wide: i64,
    pub(super) activation: Option<Function>,
}

impl BlockPlan {
    /// Elements of neighbouring faces that the kernels reach.
    pub(super) fn padding(&self) -> i64 {
        (self.kernel - 1) / 2 * self.dilation
    }
}

/// Numbers of a block that its grid determines.
pub(super) struct Part {
    pub(super) channels: [i64; 3],
    pub(super) layers: usize,
    pub(super) dilation: i64,
}

/// The block that makes the output.
pub(super) fn output_layer(
    config: &HealpixBlock,
    [inputs, outputs]: [i64; 2],
    dilation: i64,
) -> Result<BlockPlan> {
    const NAME: &str = "decoder.output_layer";
    let latent = match (config.latent_channels, kind(NAME, config)?) {
        (Some(latent), _) => CHECK.extent("decoder.output_layer.latent_channels", latent)?,
        (None, Kind::Basic) => inputs.max(outputs),
        (None, _) => 1,
    };
    let layers = config.n_layers.unwrap_or(1);
    block(NAME, config, Part { channels: [inputs, latent, outputs], layers, dilation })
}

/// Checks the arguments of a block.
pub(super) fn block(name: &str, config: &HealpixBlock, part: Part) -> Result<BlockPlan> {
    let kind = kind(name, config)?;
    let Part { channels: [inputs, latent, outputs], layers, dilation } = part;
    let kernel = CHECK.extent(&format!("{name}.kernel_size"), config.kernel_size)?;
    CHECK.ensure(kernel % 2 == 1, || {
        format!("{name}.kernel_size is {kernel}, expected an odd number: an even one would change the faces' extents")
    })?;
    CHECK.ensure(kind != Kind::Basic || (1..=MOST).contains(&layers), || {
        format!("{name}: a basic block of {layers} convolutions, expected 1 to {MOST}; set n_layers")
    })?;
    CHECK.ensure(kind != Kind::Symmetric || inputs != latent || latent == outputs, || {
        format!(
            "{name}: a symmetric block adds its {inputs} input channels, as many as n_channels, to {outputs} output channels; make \
             neighbouring entries of n_channels equal, or take another block"
        )
    })?;
    let factor = CHECK.extent(&format!("{name}.upscale_factor"), config.upscale_factor.unwrap_or(4))?;
    let wide = match kind {
        Kind::Basic => latent,
        _ => whole(&format!("{name}.upscale_factor · channels"), || latent.checked_mul(factor))?,
    };
    let activation = config.activation.as_ref().map(|f| Function::new(name, f)).transpose()?;
    Ok(BlockPlan { kind, inputs, latent, outputs, kernel, dilation, layers, wide, activation })
}

fn kind(name: &str, config: &HealpixBlock) -> Result<Kind> {
    let known = ["BasicConvBlock", "ConvNeXtBlock", "SymmetricConvNeXtBlock"];
    Ok(match class(name, &config.target, &known)? {
        "ConvNeXtBlock" => Kind::ConvNeXt,
        "SymmetricConvNeXtBlock" => Kind::Symmetric,
        _ => Kind::Basic,
    })
}
