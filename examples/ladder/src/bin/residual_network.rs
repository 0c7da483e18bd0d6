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
    conv: ShardTensor,
    norm: [ShardTensor; 2],
    /// To queries, keys and values, and back.
    mix: [ShardTensor; 2],
}

struct ResidualNetwork {
    lift: ShardTensor,
    blocks: Vec<Block>,
    project: ShardTensor,
}

impl ResidualNetwork {
    fn new(params: &mut Scope<'_, ShardTensor>) -> isobar::shard::Result<Self> {
        let mut param =
            |name: &str, shape: &[i64], init| params.param(name, shape, init, Placement::Replicate);
        let mut block = |index: usize| -> isobar::shard::Result<Block> {
            let name = |part: &str| format!("blocks.{index}.{part}");
            Ok(Block {
                conv: param(&name("conv.weight"), &[CHANNELS, CHANNELS, 3, 3], Init::FanIn(9 * CHANNELS))?,
                norm: [
                    param(&name("norm.weight"), &[CHANNELS], Init::Constant(1.0))?,
                    param(&name("norm.bias"), &[CHANNELS], Init::Constant(0.0))?,
                ],
                mix: [
                    param(&name("qkv.weight"), &[3 * CHANNELS, CHANNELS], Init::FanIn(CHANNELS))?,
                    param(&name("out.weight"), &[CHANNELS, CHANNELS], Init::FanIn(CHANNELS))?,
                ],
            })
        };
        let blocks = (0..2).map(&mut block).collect::<Result<_, _>>()?;
        Ok(Self {
            lift: param("lift.weight", &[CHANNELS, 1, 1, 1], Init::FanIn(1))?,
            blocks,
            project: param("project.weight", &[1, CHANNELS, 1, 1], Init::FanIn(CHANNELS))?,
        })
    }
}

impl Block {
    /// `x` is `[batch, channel, height, width]`.
    fn forward(&self, x: &ShardTensor) -> isobar::shard::Result<ShardTensor> {
        let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
        let x = x.add(&x.conv(&self.conv, None, &conv)?.gelu()?)?;
        let shape = x.shape().to_vec();
        // Points as tokens, [batch, height · width, channel]; the rows stay where they are.
        let tokens = x.permute(&[0, 2, 3, 1])?.reshape(&[shape[0], -1, CHANNELS])?;
        let normed = tokens.layer_norm(&[CHANNELS], Some(&self.norm[0]), Some(&self.norm[1]), 1e-5)?;
        let qkv = normed.linear(&self.mix[0], None)?.unsqueeze(1)?; // one head
        let parts = qkv.split(&[CHANNELS; 3], -1)?;
        let mixed =
            ShardTensor::scaled_dot_product_attention(&parts[0], &parts[1], &parts[2], &Default::default())?;
        let tokens = tokens.add(&mixed.select(1, 0)?.linear(&self.mix[1], None)?)?;
        tokens.reshape(&[shape[0], shape[2], shape[3], CHANNELS])?.permute(&[0, 3, 1, 2])
    }
}

type Fields = Batch<ShardTensor>;

impl Model<ShardTensor> for ResidualNetwork {
    fn forward(&self, batch: &Fields, _mode: Mode<'_>) -> isobar::models::Result<Fields> {
        let pointwise = Conv::default();
        let mut x = batch.require("residual network", Fields::FIELDS)?.conv(&self.lift, None, &pointwise)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        Ok(Batch::of_fields(x.conv(&self.project, None, &pointwise)?))
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
            |window| Ok::<_, BoxError>((waves(0..32, window)?, waves(32..40, window)?)),
            ResidualNetwork::new,
        )?;
    if DistributedManager::get()?.rank() == 0 {
        println!("relative error {:.6}", summary.validation_error.unwrap_or(f64::NAN));
    }
    Ok(())
}
