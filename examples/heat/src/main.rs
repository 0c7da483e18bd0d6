//! A model and data of one's own, trained on fields that are split over ranks: how waves on a periodic square cool down.
//!
//! ```sh
//! cargo build --release -p isobar-heat
//! mpirun -n 4 target/release/isobar-heat 2    # of 4 ranks 2 share the samples, and 2 the height of each
//! ```
//!
//! It computes in double precision, so that the loss and the error are the same on any number of ranks, and on any mesh of them,
//! to nine digits and more.
#![expect(clippy::print_stdout, reason = "a program talks to its user")]

use std::f64::consts::TAU;
use std::ops::Range;
use std::process::ExitCode;

use isobar_array::{Array, Conv, Generator, PadMode, Padding};
use isobar_data::{Augment, InMemory, Normalizer};
use isobar_manager::DistributedManager;
use isobar_shard::{Init, MeshParams};
use isobar_shard::{ParamStore, Params, Placement, ShardTensor};
use isobar_train::config::{CheckpointConfig, OptimizerKind, TrainConfig};
use isobar_train::{BoxError, FieldLayout, FieldModel, FieldTask, FitConfig, Parameters, Ranks};
use isobar_train::{ShardedFields, Step, Variable, fit, loss::Loss, optim::AdamWConfig};
use tch::{Device, Kind, Tensor};

const POINTS: usize = 48;

/// The model, as for one device: convolutions around the square, each added to what it gets.
struct Cooler<A> {
    weights: Vec<A>,
    conv: Conv,
}

impl<A: Array> Cooler<A> {
    fn new(channels: &[i64], params: &mut impl Params<Array = A>) -> isobar_shard::Result<Self> {
        let layer = |(index, pair): (usize, &[i64])| {
            let (shape, fan) = ([pair[1], pair[0], 5, 5], pair[0] * 25);
            params.param(&format!("weight.{index}"), &shape, Init::FanIn(fan), Placement::Replicate)
        };
        let weights = channels.windows(2).enumerate().map(layer).collect::<Result<_, _>>()?;
        let padding = Padding::Each(vec![2]);
        Ok(Self { weights, conv: Conv { padding, padding_mode: PadMode::Circular, ..Conv::default() } })
    }

    fn forward(&self, field: &A) -> isobar_array::Result<A> {
        let mut x = field.shallow_clone();
        for (index, weight) in self.weights.iter().enumerate() {
            x = x.conv(weight, None, &self.conv)?;
            x = if index + 1 < self.weights.len() { x.gelu()? } else { x };
        }
        field.add(&x)
    }
}

/// The data: this rank's window of waves, hot and cooled. A wave of wave number k keeps exp(−|k|² / 50) of its height.
fn waves(samples: Range<u64>, window: &[Range<usize>]) -> Result<InMemory, BoxError> {
    let line = |part: &Range<usize>| part.clone().map(|point| TAU * point as f64 / POINTS as f64).collect();
    let (x, y): (Vec<f64>, Vec<f64>) = (line(&window[0]), line(&window[1]));
    let shape = [(samples.end - samples.start) as i64, 1, x.len() as i64, y.len() as i64];
    let (mut hot, mut cool) = (Vec::new(), Vec::new());
    for sample in samples {
        // By the sample's number, so that every rank sees the same wave.
        let draws = Generator::new(sample).permutation(64);
        let (k, l, phase) = ((draws[0] % 5) as f64, (draws[1] % 5 + 1) as f64, draws[2] as f64);
        let left = (-(k * k + l * l) / 50.0).exp();
        for x in &x {
            for y in &y {
                let height = (k * x + l * y + phase).sin();
                hot.push(height);
                cool.push(height * left);
            }
        }
    }
    let field = |values: &[f64]| Tensor::f_from_slice(values)?.f_reshape(shape);
    Ok(InMemory::pairs(field(&hot)?, field(&cool)?)?)
}

fn main() -> ExitCode {
    isobar_train::main(train) // prints an error once for all ranks; its cause decides the exit code
}

fn train() -> Result<(), BoxError> {
    let manager = DistributedManager::initialize()?; // mpirun, srun, torchrun, or alone
    let sharing_samples: i64 = std::env::args().nth(1).map_or(Ok(1), |ranks| ranks.parse())?;
    let mesh = manager.initialize_mesh(&[sharing_samples, -1], &["data", "domain"])?;
    let layout = ShardedFields::new(&mesh, &[POINTS, POINTS])?;
    let window = layout.window(&[POINTS, POINTS])?;

    let mut store = ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu);
    let network = Cooler::new(&[1, 8, 8, 1], &mut MeshParams::new(&mut store, &mesh).pending())?;
    let (params, buffers) = Parameters::of(&store)?;
    let same = Normalizer::new(0.0, 1.0)?;
    let forward = |x: &ShardTensor, _: Option<Step<'_>>| -> Result<_, BoxError> { Ok(network.forward(x)?) };
    let task = FieldTask {
        model: FieldModel {
            forward,
            layout,
            positions: None,
            change: None,
            input: same.clone(),
            target: same,
            variables: vec![Variable::new("height")],
        },
        train: waves(0..96, &window)?,
        validation: waves(96..120, &window)?,
        rollouts: None,
        augment: Augment::None,
        loss: Loss::Mse,
        seed: 7,
    };
    let config = FitConfig {
        folder: "runs/heat".into(),
        train: TrainConfig { epochs: 8, batch_size: 8, ..TrainConfig::default() },
        optimizer: OptimizerKind::AdamW(AdamWConfig { lr: 3e-3, ..AdamWConfig::default() }),
        checkpoint: CheckpointConfig { overwrite: true, ..CheckpointConfig::default() }, // run again, it replaces its results
        ..FitConfig::default()
    };
    let ranks = Ranks::sharded(&manager.group(None)?, &mesh)?;
    let summary = fit(&task, &params, &buffers, &ranks, &config)?;
    if manager.rank() == 0 {
        println!("relative error {:.2} %", summary.validation_error.unwrap_or(f64::NAN) * 100.0);
    }
    Ok(DistributedManager::cleanup(true)?)
}
