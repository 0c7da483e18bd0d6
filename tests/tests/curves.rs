//! The same loss curve on any number of ranks, under every launcher, and across an interruption.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
    time::Duration,
};

use isobar_harness::{Launch, output_within, workspace};
use isobar_tests::{has_mpi, has_slurm};
use serde_json::Value;
use tempfile::TempDir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");
const STEPS: usize = 50;
const TOLERANCE: f64 = 1e-4;

/// The data set beside the project where it is there, else one that is solved once.
static DATA: LazyLock<PathBuf> = LazyLock::new(|| {
    let shared = workspace().join("../shared/data/darcy_64.h5");
    if shared.exists() {
        return shared;
    }
    let own = Path::new(env!("CARGO_TARGET_TMPDIR")).join("darcy_64.h5");
    if !own.exists() {
        let mut solve = std::process::Command::new(ISOBAR);
        solve.args(["data", "darcy", "--samples", "96", "--out"]).arg(&own);
        let solved = output_within(&mut solve, Duration::from_secs(300)).unwrap().expect("did not end");
        assert!(solved.status.success(), "{solved:?}");
    }
    own
});

/// The demo's configuration on one process: what every other launch is compared with.
static REFERENCE: LazyLock<Vec<f64>> = LazyLock::new(|| curve(Launch::plain(1, ISOBAR), &[]));

/// The loss of each of the first steps of the demo's configuration.
fn curve(launch: Launch, arguments: &[&str]) -> Vec<f64> {
    let folder = TempDir::new().unwrap();
    let launch = train(launch, folder.path(), STEPS).args(arguments);
    let _ = launch.run().unwrap().expect_success();
    losses(folder.path())
}

fn train(launch: Launch, output: &Path, steps: usize) -> Launch {
    let set = |key: &str, value: &str| ["--set".to_owned(), format!("{key}={value}")];
    launch
        .current_dir(workspace())
        .deadline(Duration::from_secs(600))
        .args(["train", "configs/darcy_afno.toml"])
        .args(set("data.path", &DATA.to_string_lossy()))
        .args(set("run.output", &output.to_string_lossy()))
        .args(set("metrics.every_steps", "1"))
        .args(set("train.max_steps", &steps.to_string()))
}

/// The loss of each step, by the run's own record.
fn losses(output: &Path) -> Vec<f64> {
    let text = fs::read_to_string(output.join("darcy_afno/metrics.jsonl")).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let losses: Vec<f64> = records.filter_map(|record| record["loss"].as_f64()).collect();
    assert!(losses.iter().all(|loss| loss.is_finite() && *loss > 0.0), "{losses:?}");
    losses
}

#[track_caller]
fn same_curve(got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (step, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= TOLERANCE * want.abs(), "step {step}: {got} against {want}");
    }
}

#[test]
fn reference_learns() {
    assert_eq!(REFERENCE.len(), STEPS);
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(mean(&REFERENCE[STEPS - 10..]) < 0.8 * mean(&REFERENCE[..10]), "{:?}", *REFERENCE);
}

#[test]
fn mpirun() {
    if has_mpi() {
        for ranks in [1, 2, 4] {
            same_curve(&curve(Launch::mpirun(ranks, ISOBAR), &[]), &REFERENCE);
        }
    }
}

#[test]
fn srun() {
    if has_mpi() && has_slurm() {
        same_curve(&curve(Launch::srun(2, "pmix", ISOBAR), &[]), &REFERENCE);
    }
}

#[test]
fn plain_environment() {
    same_curve(&curve(Launch::plain(4, ISOBAR), &[]), &REFERENCE);
}

#[test]
fn batch_that_the_ranks_do_not_divide() {
    // 8 samples on 3 ranks, and 7 on 3, against one.
    same_curve(&curve(Launch::plain(3, ISOBAR), &[]), &REFERENCE);
    let seven = ["--set", "train.batch_size=7"];
    same_curve(&curve(Launch::plain(3, ISOBAR), &seven), &curve(Launch::plain(1, ISOBAR), &seven));
}

#[test]
fn without_overlap() {
    let off = ["--set", "data_parallel.overlap=off"];
    same_curve(&curve(Launch::plain(2, ISOBAR), &off), &REFERENCE);
}

#[test]
fn resumed_run_goes_on_as_if_nothing_had_been() {
    let folder = TempDir::new().unwrap();
    let every = ["--set", "checkpoint.every_steps=10"];
    let half = STEPS / 2 - 5;
    let _ = train(Launch::plain(2, ISOBAR), folder.path(), half).args(every).run().unwrap().expect_success();
    assert_eq!(losses(folder.path()).len(), half);
    // On another number of ranks.
    let rest = train(Launch::plain(3, ISOBAR), folder.path(), STEPS).args(every).arg("--resume=must");
    let _ = rest.run().unwrap().expect_success();
    same_curve(&losses(folder.path()), &REFERENCE);
}
