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
    /// Two units after the manner of ConvNeXt.
    Double,
    Symmetric,
    /// Several symmetric units.
    Multiple,
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

/// Path around the convolutions of a unit.
pub(super) enum SkipPlan {
    Nothing,
    Identity,
    /// A convolution with kernels of 1, from and to so many channels.
    Conv([i64; 2]),
}

/// Convolutions with a path around them: the names of both within the block, channels and kernels.
pub(super) struct UnitPlan {
    pub(super) skip_name: String,
    pub(super) convs_name: String,
    pub(super) skip: SkipPlan,
    pub(super) shapes: Vec<([i64; 2], i64)>,
    /// Number of convolutions with an activation behind them: the first ones.
    pub(super) activated: usize,
}

impl UnitPlan {
    fn new([skip_name, convs_name]: [String; 2], skip: SkipPlan, shapes: Vec<([i64; 2], i64)>) -> Self {
        let activated = shapes.len();
        Self { skip_name, convs_name, skip, shapes, activated }
    }
}

impl BlockPlan {
    /// The units of the block.
    pub(super) fn units(&self) -> Vec<UnitPlan> {
        let Self { kind, inputs, latent, outputs, kernel, wide, layers, .. } = *self;
        let around = |identity: bool, channels: [i64; 2]| match identity {
            true => SkipPlan::Identity,
            false => SkipPlan::Conv(channels),
        };
        let names = |number: &str| [format!("skip_module{number}"), format!("convblock{number}")];
        match kind {
            Kind::Basic => {
                let channels = |layer: usize| {
                    let before = if layer == 0 { inputs } else { latent };
                    [before, if layer + 1 == layers { outputs } else { latent }]
                };
                let shapes = (0..layers).map(|layer| (channels(layer), kernel)).collect();
                vec![UnitPlan::new(names(""), SkipPlan::Nothing, shapes)]
            }
            Kind::ConvNeXt => {
                let shapes = vec![([inputs, wide], kernel), ([wide, wide], kernel), ([wide, outputs], 1)];
                let unit = UnitPlan::new(names(""), around(inputs == outputs, [inputs, outputs]), shapes);
                vec![UnitPlan { activated: 2, ..unit }]
            }
            Kind::Double => {
                let shapes = |[before, after]: [i64; 2]| {
                    vec![([before, latent], kernel), ([latent, wide], 1), ([wide, after], 1)]
                };
                let unit = |number: &str, channels: [i64; 2]| {
                    UnitPlan::new(
                        names(number),
                        around(channels[0] == channels[1], channels),
                        shapes(channels),
                    )
                };
                vec![unit("1", [inputs, latent]), unit("2", [latent, outputs])]
            }
            Kind::Symmetric => vec![self.symmetric(names(""), inputs)],
            Kind::Multiple => (0..layers)
                .map(|layer| {
                    let names = names("").map(|name| format!("blocks.{layer}.{name}"));
                    self.symmetric(names, if layer == 0 { inputs } else { outputs })
                })
                .collect(),
        }
    }

    fn symmetric(&self, names: [String; 2], inputs: i64) -> UnitPlan {
        let Self { latent, outputs, kernel, wide, .. } = *self;
        let shapes = vec![
            ([inputs, latent], kernel),
            ([latent, wide], 1),
            ([wide, latent], 1),
            ([latent, outputs], kernel),
        ];
        let skip = match inputs == latent {
            true => SkipPlan::Identity,
            false => SkipPlan::Conv([inputs, outputs]),
        };
        UnitPlan::new(names, skip, shapes)
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
    let counted = matches!(kind, Kind::Basic | Kind::Multiple);
    CHECK.ensure(!counted || (1..=MOST).contains(&layers), || {
        let what =
            if kind == Kind::Basic { ["basic block", "convolutions"] } else { ["block", "symmetric blocks"] };
        format!("{name}: a {} of {layers} {}, expected 1 to {MOST}; set n_layers", what[0], what[1])
    })?;
    let symmetric = matches!(kind, Kind::Symmetric | Kind::Multiple);
    CHECK.ensure(!symmetric || inputs != latent || latent == outputs, || {
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
    let known = [
        "BasicConvBlock",
        "ConvNeXtBlock",
        "DoubleConvNeXtBlock",
        "SymmetricConvNeXtBlock",
        "Multi_SymmetricConvNeXtBlock",
    ];
    Ok(match class(name, &config.target, &known)? {
        "ConvNeXtBlock" => Kind::ConvNeXt,
        "DoubleConvNeXtBlock" => Kind::Double,
        "Multi_SymmetricConvNeXtBlock" => Kind::Multiple,
        "SymmetricConvNeXtBlock" => Kind::Symmetric,
        _ => Kind::Basic,
    })
}
