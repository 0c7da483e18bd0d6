//! Trains a model of your own, with generated data, on fields sharded over ranks: decay of waves on a periodic square.
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

use isobar::prelude::*;

const POINTS: usize = 48;

/// The model, as for one device: convolutions around the square, each added to what it gets.
struct Cooler<A> {
    weights: Vec<A>,
    conv: Conv,
}

impl<A: Array> Cooler<A> {
    fn new(channels: &[i64], params: &mut Scope<'_, A>) -> isobar::shard::Result<Self> {
        let layer = |(index, pair): (usize, &[i64])| {
            let (shape, fan) = ([pair[1], pair[0], 5, 5], pair[0] * 25);
            params.param(&format!("weight.{index}"), &shape, Init::FanIn(fan), Placement::Replicate)
        };
        let weights = channels.windows(2).enumerate().map(layer).collect::<Result<_, _>>()?;
        let padding = Padding::Each(vec![2]);
        Ok(Self { weights, conv: Conv { padding, padding_mode: PadMode::Circular, ..Conv::default() } })
    }
}

impl<A: Array> Model<A> for Cooler<A> {
    fn forward(&self, batch: &Batch<A>, _mode: Mode<'_>) -> isobar::models::Result<Batch<A>> {
        let field = batch.require("cooler", Batch::<A>::FIELDS)?;
        let mut x = field.shallow_clone();
        for (index, weight) in self.weights.iter().enumerate() {
            x = x.conv(weight, None, &self.conv)?;
            x = if index + 1 < self.weights.len() { x.gelu()? } else { x };
        }
        Ok(Batch::of_fields(field.add(&x)?))
    }
}

/// The data: this rank's window of waves, hot and cooled. A wave of wave number k keeps exp(−|k|² / 50) of its height.
fn waves(samples: Range<u64>, window: &Window) -> Result<InMemory, BoxError> {
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
    isobar::main(train) // prints an error once for all ranks; its cause decides the exit code
}

fn train() -> Result<(), BoxError> {
    let sharing_samples: i64 = std::env::args().nth(1).map_or(Ok(1), |ranks| ranks.parse())?;
    let manager = DistributedManager::initialize()?; // mpirun, srun, torchrun, or alone
    let summary = Trainer::new("runs/heat")
        .mesh(&[sharing_samples, -1], &["data", "domain"])
        .precision(Precision::Float64)
        .optimizer(AdamWConfig { lr: 3e-3, ..AdamWConfig::default() })
        .epochs(8)
        .batch_size(8)
        .seed(7)
        .normalize(false)
        .variables([Variable::new("height")])
        .configure(|config| config.checkpoint.overwrite = true) // run again, it replaces its results
        .fit(
            &[POINTS, POINTS],
            |window| Ok((waves(0..96, window)?, waves(96..120, window)?)),
            |params| Cooler::new(&[1, 8, 8, 1], params),
        )?;
    if manager.rank() == 0 {
        println!("relative error {:.2} %", summary.validation_error.unwrap_or(f64::NAN) * 100.0);
    }
    Ok(())
}
