//! Arguments of the network, checked and resolved.

use super::HealpixUNetConfig;
use super::activation::Function;
use super::checks::{CHECK, MOST, class, whole};
use super::shape::{BlockPlan, Part, block, output_layer};
use crate::error::Result;
use crate::size::MOST_HALVINGS;

/// The network.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Plan {
    /// Blocks on the way down, the finest first.
    pub(super) down: Vec<BlockPlan>,
    pub(super) max_pooling: bool,
    /// Factor between the grids.
    pub(super) factor: i64,
    /// Blocks on the way up, the coarsest first.
    pub(super) up: Vec<BlockPlan>,
    pub(super) upsampling: Option<Function>,
    pub(super) last: BlockPlan,
    /// Extent of the kernels of recurrent blocks, if there are such.
    pub(super) recurrence: Option<i64>,
    /// Times and channels of the input, of the prescribed inputs, and of the output of a step.
    pub(super) times: i64,
    pub(super) channels: i64,
    pub(super) prescribed: i64,
    pub(super) constants: i64,
    /// Channels from other models.
    pub(super) coupled: i64,
    pub(super) output_times: i64,
    pub(super) output_channels: i64,
    /// Number of steps.
    pub(super) steps: i64,
}

impl Plan {
    /// Checks the arguments.
    pub(super) fn new(config: &HealpixUNetConfig) -> Result<Self> {
        class("encoder", &config.encoder.target, &["UNetEncoder"])?;
        class("decoder", &config.decoder.target, &["UNetDecoder"])?;
        let small = |name: &str, value: usize| {
            if value == 0 { Ok(0) } else { CHECK.extent(name, value) }
        };
        let times = CHECK.extent("input_time_dim", config.input_time_dim)?;
        let channels = CHECK.extent("input_channels", config.input_channels)?;
        let prescribed = small("decoder_input_channels", config.decoder_input_channels)?;
        let constants = small("n_constants", config.n_constants)?;
        let coupled = coupled(config)?;
        let output_channels = CHECK.extent("output_channels", config.output_channels)?;
        let (steps, output_times) = steps(config)?;
        let inputs = whole(
            "input_time_dim · (input_channels + decoder_input_channels) + n_constants + couplings",
            || {
                let own = times.checked_mul(channels.checked_add(prescribed)?)?;
                own.checked_add(constants)?.checked_add(coupled)
            },
        )?;
        let outputs =
            whole("output_channels over the times of a step", || output_times.checked_mul(output_channels))?;

        let down = down(config, inputs)?;
        let up = up(config)?;
        let pooling = class(
            "encoder.down_sampling_block",
            &config.encoder.down_sampling_block.target,
            &["HEALPixAvgPool", "AvgPool", "HEALPixMaxPool", "MaxPool"],
        )?;
        class(
            "decoder.up_sampling_block",
            &config.decoder.up_sampling_block.target,
            &["TransposedConvUpsample"],
        )?;
        let factor = CHECK
            .extent("encoder.down_sampling_block.pooling", config.encoder.down_sampling_block.pooling)?;
        let upsampling = &config.decoder.up_sampling_block;
        CHECK.ensure(upsampling.upsampling as i64 == factor || up.len() == 1, || {
            format!(
                "decoder.up_sampling_block.upsampling is {}, expected {factor}, the encoder's pooling",
                upsampling.upsampling
            )
        })?;
        CHECK.ensure(factor.checked_pow(up.len() as u32 - 1).is_some(), || {
            format!("{} poolings by {factor} are too many for any face", up.len() - 1)
        })?;
        let last = config.decoder.n_channels.last().copied().unwrap_or_default() as i64;
        let dilation =
            config.decoder.dilations.as_ref().and_then(|all| all.last().copied()).unwrap_or(1) as i64;
        let last = output_layer(&config.decoder.output_layer, [last, outputs], dilation)?;
        let upsampling = upsampling
            .activation
            .as_ref()
            .map(|f| Function::new("decoder.up_sampling_block", f))
            .transpose()?;
        Ok(Self {
            down,
            max_pooling: pooling.ends_with("MaxPool"),
            factor,
            up,
            upsampling,
            last,
            recurrence: recurrence(config)?,
            times,
            channels,
            prescribed,
            constants,
            coupled,
            output_times,
            output_channels,
            steps,
        })
    }

    /// Channels of the network's input.
    pub(super) fn inputs(&self) -> i64 {
        self.down.first().map_or(0, |block| block.inputs)
    }

    /// Number by which n of faces of n × n points is divided on the way down.
    fn divisor(&self) -> i64 {
        self.factor.pow(self.down.len() as u32 - 1)
    }

    /// Returns whether the network takes faces of n × n points.
    pub(super) fn fits(&self, n: i64) -> bool {
        if n < 1 || n % self.divisor() != 0 {
            return false;
        }
        let coarser = |level: usize| n / self.factor.pow(level as u32);
        let levels = self.down.len();
        let down = self.down.iter().enumerate().map(|(level, block)| (coarser(level), block));
        let up = self.up.iter().enumerate().map(|(level, block)| (coarser(levels - 1 - level), block));
        let gates = self.recurrence.is_none_or(|kernel| (kernel - 1) / 2 <= n / self.divisor());
        gates && down.chain(up).chain([(n, &self.last)]).all(|(n, block)| block.padding() <= n)
    }

    /// The faces that the network takes, in words.
    pub(super) fn extents(&self) -> String {
        let reach = self.down.iter().chain(&self.up).chain([&self.last]).map(BlockPlan::padding).max();
        format!(
            "n a multiple of {} and, on each grid, n at least the reach of its kernels (at most {})",
            self.divisor(),
            reach.unwrap_or_default()
        )
    }
}

/// Channels from other models.
fn coupled(config: &HealpixUNetConfig) -> Result<i64> {
    let all = config.couplings.iter().map(|coupling| &coupling.params);
    let channels = all.map(|fields| fields.variables.len().saturating_mul(fields.input_times.len()));
    let channels = channels.fold(0, usize::saturating_add);
    if channels == 0 {
        return Ok(0);
    }
    CHECK.ensure(config.n_constants > 0 && config.decoder_input_channels > 0, || {
        format!(
            "couplings need constants and decoder inputs, but n_constants is {} and decoder_input_channels {}",
            config.n_constants, config.decoder_input_channels
        )
    })?;
    CHECK.extent("the number of variables and times of couplings", channels)
}

/// Extent of the kernels of recurrent blocks.
fn recurrence(config: &HealpixUNetConfig) -> Result<Option<i64>> {
    const NAME: &str = "decoder.recurrent_block";
    let Some(block) = &config.decoder.recurrent_block else { return Ok(None) };
    class(NAME, &block.target, &["ConvGRUBlock"])?;
    let kernel = CHECK.extent(&format!("{NAME}.kernel_size"), block.kernel_size)?;
    CHECK.ensure(kernel % 2 == 1, || {
        format!("{NAME}.kernel_size is {kernel}, expected an odd number: an even one would change the faces' extents")
    })?;
    Ok(Some(kernel))
}

/// Number of steps, and the times of each.
fn steps(config: &HealpixUNetConfig) -> Result<(i64, i64)> {
    let (given, wanted) = (config.input_time_dim, config.output_time_dim);
    if wanted == 1 {
        return Ok((1, 1));
    }
    CHECK.ensure(wanted > 0 && wanted.is_multiple_of(given), || {
        format!("output_time_dim is {wanted}, expected 1 or a multiple of input_time_dim {given}")
    })?;
    let steps = wanted / given;
    CHECK.ensure(steps <= MOST, || {
        format!("output_time_dim is {wanted}, {steps} times input_time_dim, expected at most {MOST} times")
    })?;
    CHECK.ensure(steps == 1 || config.input_channels == config.output_channels, || {
        format!(
            "output_channels is {}, but {steps} steps feed the output back as an input of {} channels; make them equal, or \
             output_time_dim {given}",
            config.output_channels, config.input_channels
        )
    })?;
    Ok((steps as i64, given as i64))
}

/// The blocks of the encoder.
fn down(config: &HealpixUNetConfig, mut inputs: i64) -> Result<Vec<BlockPlan>> {
    let encoder = &config.encoder;
    let levels =
        Levels::new("encoder", &encoder.n_channels, &encoder.n_layers, encoder.dilations.as_deref())?;
    let mut blocks = Vec::with_capacity(levels.channels.len());
    for (level, &channels) in levels.channels.iter().enumerate() {
        let part = levels.part(level, [inputs, channels, channels]);
        blocks.push(block("encoder.conv_block", &encoder.conv_block, part)?);
        inputs = channels;
    }
    Ok(blocks)
}

/// The blocks of the decoder.
fn up(config: &HealpixUNetConfig) -> Result<Vec<BlockPlan>> {
    let decoder = &config.decoder;
    let mirrored: Vec<usize> = config.encoder.n_channels.iter().rev().copied().collect();
    CHECK.ensure(decoder.n_channels == mirrored, || {
        format!(
            "decoder.n_channels is {:?}, expected {mirrored:?}: encoder.n_channels, reversed",
            decoder.n_channels
        )
    })?;
    let levels =
        Levels::new("decoder", &decoder.n_channels, &decoder.n_layers, decoder.dilations.as_deref())?;
    let mut blocks = Vec::with_capacity(levels.channels.len());
    for (level, &channels) in levels.channels.iter().enumerate() {
        let next = levels.channels.get(level + 1).copied().unwrap_or(channels);
        let inputs = if level == 0 { channels } else { 2 * channels };
        let part = levels.part(level, [inputs, channels, next]);
        blocks.push(block("decoder.conv_block", &decoder.conv_block, part)?);
    }
    Ok(blocks)
}

/// Lists with an entry for each grid.
struct Levels {
    channels: Vec<i64>,
    layers: Vec<usize>,
    dilations: Vec<i64>,
}

impl Levels {
    fn new(name: &str, channels: &[usize], layers: &[usize], dilations: Option<&[usize]>) -> Result<Self> {
        let count = channels.len();
        CHECK.ensure((1..=MOST_HALVINGS + 1).contains(&count), || {
            format!("{name}.n_channels has {count} entries, expected 1 to {}", MOST_HALVINGS + 1)
        })?;
        let long_enough = |list: &str, entries: usize| {
            CHECK.ensure(entries >= count, || {
                format!("{name}.{list} has {entries} entries, expected {count}, as {name}.n_channels")
            })
        };
        long_enough("n_layers", layers.len())?;
        long_enough("dilations", dilations.map_or(count, <[usize]>::len))?;
        let extents = |list: &str, values: &[usize]| -> Result<Vec<i64>> {
            values.iter().map(|&value| CHECK.extent(&format!("{name}.{list}"), value)).collect()
        };
        let dilations = match dilations {
            Some(dilations) => extents("dilations", dilations)?,
            None => vec![1; count],
        };
        Ok(Self { channels: extents("n_channels", channels)?, layers: layers.to_vec(), dilations })
    }

    fn part(&self, level: usize, channels: [i64; 3]) -> Part {
        Part { channels, layers: self.layers[level], dilation: self.dilations[level] }
    }
}
