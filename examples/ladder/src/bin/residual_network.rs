//! A residual network with convolutions, layer norm and attention, trained on fields whose rows are split over the ranks.
//!
//! ```sh
//! mpirun -n 4 target/debug/residual-network 4    # 4 ranks share each field; the number must divide the ranks
//! ```
#![expect(clippy::print_stdout, reason = "a program talks to its user")]

use std::ops::Range;

use isobar::prelude::*;

const POINTS: usize = 16;
const CHANNELS: i64 = 8;

/// A convolution, then attention of all points to all points, each added to its input.
struct Block {
    conv: nn::Conv2d<ShardTensor>,
    norm: nn::LayerNorm<ShardTensor>,
    attention: nn::MultiheadAttention<ShardTensor>,
}

struct ResidualNetwork {
    lift: nn::Conv2d<ShardTensor>,
    blocks: Vec<Block>,
    project: nn::Conv2d<ShardTensor>,
}

impl ResidualNetwork {
    fn new(params: &mut Scope<'_, ShardTensor>) -> nn::Result<Self> {
        let pointwise = Conv::default;
        let block = |index| Block::new(&mut params.scope(&format!("blocks.{index}")));
        Ok(Self {
            blocks: (0..2).map(block).collect::<Result<_, _>>()?,
            lift: nn::Conv2d::new(1, CHANNELS, [1, 1], pointwise(), &mut params.scope("lift"))?,
            project: nn::Conv2d::new(CHANNELS, 1, [1, 1], pointwise(), &mut params.scope("project"))?,
        })
    }
}

impl Block {
    fn new(params: &mut Scope<'_, ShardTensor>) -> nn::Result<Self> {
        let same = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
        let options = nn::MultiheadAttentionOptions { batch_first: true, ..Default::default() };
        Ok(Self {
            conv: nn::Conv2d::new(CHANNELS, CHANNELS, [3, 3], same, &mut params.scope("conv"))?,
            norm: nn::LayerNorm::new(&[CHANNELS], &mut params.scope("norm"))?,
            attention: nn::MultiheadAttention::new(CHANNELS, 1, options, &mut params.scope("attention"))?,
        })
    }

    /// `x` is `[batch, channel, height, width]`.
    fn forward(&self, x: &ShardTensor, mode: Mode<'_>) -> nn::Result<ShardTensor> {
        let x = x.add(&self.conv.forward(x)?.gelu()?)?;
        let shape = x.shape().to_vec();
        // Points as tokens, [batch, height · width, channel]; the rows stay where they are.
        let tokens = x.permute(&[0, 2, 3, 1])?.reshape(&[shape[0], -1, CHANNELS])?;
        let normed = self.norm.forward(&tokens)?;
        let tokens = tokens.add(&self.attention.forward(&normed, &normed, &normed, None, false, mode)?)?;
        tokens.reshape(&[shape[0], shape[2], shape[3], CHANNELS])?.permute(&[0, 3, 1, 2])
    }
}

type Fields = Batch<ShardTensor>;

impl Model<ShardTensor> for ResidualNetwork {
    fn forward(&self, batch: &Fields, mode: Mode<'_>) -> isobar::models::Result<Fields> {
        let mut x = self.lift.forward(batch.require("residual network", Fields::FIELDS)?)?;
        for block in &self.blocks {
            x = block.forward(&x, mode)?;
        }
        Ok(Batch::of_fields(self.project.forward(&x)?))
    }
}

/// This rank's window of waves and their squares.
fn waves(samples: Range<usize>, window: &Window) -> Result<InMemory, BoxError> {
    let line = |part: &Range<usize>| {
        Tensor::f_arange_start(part.start as i64, part.end as i64, (Kind::Double, Device::Cpu))
    };
    let (rows, phases) = (line(&window[0])?.f_view([1, 1, -1, 1])?, line(&samples)?.f_view([-1, 1, 1, 1])?);
    let wave = (rows * 0.4 + line(&window[1])? * 0.3 + phases).f_sin()?;
    Ok(InMemory::pairs(wave.shallow_clone(), wave.f_square()?)?)
}

fn main() -> std::process::ExitCode {
    isobar::main(train)
}

fn train() -> Result<(), BoxError> {
    let sharing_a_field: i64 = std::env::args().nth(1).map_or(Ok(1), |ranks| ranks.parse())?;
    let summary = Trainer::new("runs/residual_network")
        .mesh(&[-1, sharing_a_field], &["data", "domain"])
        .precision(Precision::Float64)
        .optimizer(AdamWConfig { lr: 1e-2, ..AdamWConfig::default() })
        .epochs(4)
        .batch_size(8)
        .configure(|config| config.checkpoint.overwrite = true)
        .fit(
            &[POINTS, POINTS],
            |window| Ok((waves(0..32, window)?, waves(32..40, window)?)),
            ResidualNetwork::new,
        )?;
    if DistributedManager::get()?.rank() == 0 {
        println!("relative error {:.6}", summary.validation_error.unwrap_or(f64::NAN));
    }
    Ok(())
}
