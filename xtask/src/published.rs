//! `cargo xtask published`: trains models on the data of published results, and prints the published and the reached errors.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::{
    run::{ROOT, output, run as run_command},
    setup,
};

/// neuraloperator's Darcy data.
const DARCY: &str = "../shared/data/darcy_neuralop.npz";

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    setup: setup::Options,
    /// Only these cases, comma-separated; by default all
    #[arg(long, value_delimiter = ',')]
    cases: Vec<String>,
    /// Number of seeds, each a run on one rank
    #[arg(long, default_value_t = 3)]
    seeds: usize,
    /// Numbers of ranks on which the first seed is trained again, its fields split over them
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4])]
    ranks: Vec<usize>,
}

/// A published result, or several of one training.
struct Case {
    name: &'static str,
    source: &'static str,
    /// Returns the commands that write the case's data files into a folder.
    data: fn(&Path) -> Vec<Command>,
    tests: &'static [Test],
}

/// Measurement of a trained model.
struct Test {
    name: &'static str,
    published: f64,
    /// File of the test's data.
    file: &'static str,
    /// Keys of the configuration that name this file instead of that of the training.
    keys: &'static [&'static str],
    /// Further arguments of `isobar predict`.
    arguments: &'static [&'static str],
    /// Computes the published quantity from the error of each step.
    measure: fn(&[f64]) -> f64,
}

const CASES: [Case; 2] = [
    Case {
        name: "darcy_tfno",
        source: "neuraloperator's gallery of 2024-08-26, plot_FNO_darcy: relative L2 at epoch 18, 53 s on CPU",
        data: darcy,
        tests: &[
            Test {
                name: "16 x 16",
                published: 0.0975,
                file: "test_16.h5",
                keys: &["data.path", "data.validation_path"],
                arguments: &[],
                measure: first,
            },
            Test {
                name: "32 x 32, not trained on",
                published: 0.1386,
                file: "test_32.h5",
                keys: &["data.path", "data.validation_path"],
                arguments: &[],
                measure: first,
            },
        ],
    },
    Case {
        name: "advection_conv_net",
        source: "APEBench, benchmark_pytorch_models: geometric mean of the nRMSE of 100 steps, 1 seed (Flax: 0.0669, 0.0645)",
        data: advection,
        tests: &[Test {
            name: "rollout of 100 steps",
            published: 0.1708,
            file: "advection_test.h5",
            keys: &["data.path"],
            arguments: &["--samples", "0-29", "--start", "0", "--steps", "100"],
            measure: geometric_mean,
        }],
    },
];

pub(crate) fn run(options: &Options) -> Result<()> {
    let machine = setup::run(&options.setup)?;
    for name in &options.cases {
        let known: Vec<&str> = CASES.iter().map(|case| case.name).collect();
        ensure!(
            known.contains(&name.as_str()),
            "there is no case `{name}`, expected one of {}",
            known.join(", ")
        );
    }
    ensure!(options.seeds > 0, "--seeds is 0, expected at least 1");
    run_command(&mut machine.cargo(&["build", "--release", "--package", "isobar-cli"]))?;
    let folder = ROOT.join("target/published");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let chosen = CASES
        .iter()
        .filter(|case| options.cases.is_empty() || options.cases.iter().any(|name| case.name == name));
    for case in chosen {
        (case.data)(&folder).iter_mut().try_for_each(run_command)?;
        let seeds =
            (0..options.seeds).map(|seed| Run::new(case, seed, 1, &folder)).collect::<Result<Vec<_>>>()?;
        let others = options
            .ranks
            .iter()
            .map(|&ranks| Run::new(case, 0, ranks, &folder))
            .collect::<Result<Vec<_>>>()?;
        print(case, &seeds, &others);
    }
    Ok(())
}

/// Training run, and the results of its model.
struct Run {
    ranks: usize,
    seconds: f64,
    /// Result of each test.
    reached: Vec<f64>,
}

impl Run {
    /// Trains with a seed on `ranks` ranks, and runs the case's tests.
    fn new(case: &Case, seed: usize, ranks: usize, folder: &Path) -> Result<Self> {
        let name = format!("{}_seed{seed}_ranks{ranks}", case.name);
        let begun = Instant::now();
        let mut train = isobar(ranks);
        train.arg("train").arg(format!("benches/published/{}.toml", case.name)).arg("--overwrite");
        train.args(["--set", &format!("run.name={name}"), "--set", &format!("run.seed={seed}")]);
        run_command(&mut train)?;
        let seconds = begun.elapsed().as_secs_f64();
        let model = folder.join(&name);
        let reached = case.tests.iter().map(|test| test.run(&model, folder)).collect::<Result<_>>()?;
        Ok(Self { ranks, seconds, reached })
    }
}

impl Test {
    fn run(&self, model: &Path, folder: &Path) -> Result<f64> {
        let out = model.join(format!("on_{}", self.file));
        let data = folder.join(self.file);
        let mut predict = isobar(1);
        predict
            .arg("predict")
            .arg(model)
            .args(["--checkpoint", "latest"])
            .args(self.arguments)
            .arg("--out")
            .arg(&out);
        for key in self.keys {
            predict.arg("--set").arg(format!("{key}={}", data.display()));
        }
        output(&mut predict)?;
        let errors = errors(&out.with_extension("csv"))?;
        Ok((self.measure)(&errors))
    }
}

/// Reads the error of each step from the table next to a prediction.
fn errors(table: &Path) -> Result<Vec<f64>> {
    let text = fs::read_to_string(table).with_context(|| format!("cannot read {}", table.display()))?;
    let mut lines = text.lines();
    let column = lines.next().and_then(|head| head.split(',').position(|name| name == "error"));
    let column = column.with_context(|| format!("{} has no column `error`", table.display()))?;
    let error = |line: &str| line.split(',').nth(column).and_then(|word| word.parse().ok());
    lines
        .map(|line| error(line).with_context(|| format!("{}: no number in {line:?}", table.display())))
        .collect()
}

fn first(errors: &[f64]) -> f64 {
    errors.first().copied().unwrap_or(f64::NAN)
}

fn geometric_mean(errors: &[f64]) -> f64 {
    (errors.iter().map(|error| error.ln()).sum::<f64>() / errors.len() as f64).exp()
}

fn isobar(ranks: usize) -> Command {
    let program: PathBuf = ROOT.join("target/release/isobar");
    let mut command = match ranks {
        1 => Command::new(program),
        _ => {
            let mut command = crate::bench::mpirun(&ranks.to_string());
            command.arg(program);
            command
        }
    };
    command.current_dir(&*ROOT).env("OMP_NUM_THREADS", "1");
    command.env("ISOBAR_DISTRIBUTED__MESH__NAMES", r#"["domain"]"#);
    command
}

fn darcy(folder: &Path) -> Vec<Command> {
    let set = |set: &str| {
        let mut command = isobar(1);
        command
            .args(["data", "convert", DARCY])
            .arg(folder.join(format!("{set}.h5")))
            .args(["--from", "npy"]);
        command.args(["--set", r#"data.npy.axes=["sample", "x", "y"]"#, "--variables", "a,u"]);
        command.args(["--set", &format!(r#"data.npy.variables={{ a = "{set}.x", u = "{set}.y" }}"#)]);
        command
    };
    ["train_16", "test_16", "test_32"].map(set).into()
}

fn advection(folder: &Path) -> Vec<Command> {
    let set = |(name, samples, frames, seed): (&str, usize, usize, usize)| {
        let mut command = isobar(1);
        command.args(["data", "make", "advection", "--out"]).arg(folder.join(format!("advection_{name}.h5")));
        for (key, value) in [("samples", samples), ("frames", frames), ("seed", seed)] {
            command.arg("--set").arg(format!("{key}={value}"));
        }
        command
    };
    [("train", 50, 51, 0), ("test", 30, 201, 773)].map(set).into()
}

/// Prints the published and the reached numbers, and for each number of ranks the relative difference from one rank.
fn print(case: &Case, seeds: &[Run], others: &[Run]) {
    println!("{}: {}", case.name, case.source);
    for (index, test) in case.tests.iter().enumerate() {
        let reached: Vec<f64> = seeds.iter().map(|run| run.reached[index]).collect();
        let (mean, spread) = mean_and_deviation(&reached);
        let each = reached.iter().map(|error| format!("{error:.4}")).collect::<Vec<_>>().join(", ");
        println!(
            "  {:<26} published {:.4}, reached {mean:.4} ± {spread:.4} ({each})",
            test.name, test.published
        );
        for run in others {
            let change = (run.reached[index] / reached[0] - 1.0).abs();
            println!(
                "  {:<26} {:.4}, {change:.1e} from one rank",
                format!("  on {} ranks", run.ranks),
                run.reached[index]
            );
        }
    }
    for run in seeds.iter().chain(others) {
        println!("  {:<26} {:.0} s", format!("on {} rank(s)", run.ranks), run.seconds);
    }
}

fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (count - 1.0).max(1.0)).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_has_its_configuration() {
        for case in &CASES {
            assert!(ROOT.join(format!("benches/published/{}.toml", case.name)).is_file(), "{}", case.name);
        }
    }

    #[test]
    fn spreads_and_means_of_known_numbers() {
        assert_eq!(mean_and_deviation(&[1.0, 2.0, 3.0]), (2.0, 1.0));
        assert_eq!(mean_and_deviation(&[2.0]), (2.0, 0.0));
        assert!((geometric_mean(&[1.0, 4.0]) - 2.0).abs() < 1e-12);
    }
}
