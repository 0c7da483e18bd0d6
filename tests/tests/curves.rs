//! Loss curves agree on any number of ranks, under every launcher, and across an interruption: to nine digits
//! over all steps in double precision, up to rounding in single precision.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
    time::Duration,
};

use isobar_harness::{
    Launch,
    curve::{SingleRun, assert_same_run},
    output_within, workspace,
};
use isobar_tests::{has_mpi, has_slurm, runs::single_run};
use serde_json::Value;
use tempfile::TempDir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");
const STEPS: usize = 50;

/// The demo's configuration in double precision, smaller, and soon at its full learning rate.
const DOUBLE: &[&str] = &[
    "train.precision=float64",
    "model.embed_dim=32",
    "model.depth=2",
    "model.num_blocks=4",
    "schedule.warmup_epochs=1",
];

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

/// The demo's configuration on one process, and how rounding grows in it.
static SINGLE: LazyLock<SingleRun> = LazyLock::new(|| {
    let go = |output: &Path, more: &[&str]| {
        let _ = train(Launch::plain(1, ISOBAR), output, STEPS, more).run().unwrap().expect_success();
    };
    single_run(ISOBAR, "darcy_afno", go, losses)
});

/// One process in double precision: what every other launch is compared with.
static REFERENCE: LazyLock<Vec<f64>> = LazyLock::new(|| curve(Launch::plain(1, ISOBAR), DOUBLE));

/// The loss of each of the first steps.
fn curve(launch: Launch, sets: &[&str]) -> Vec<f64> {
    let folder = TempDir::new().unwrap();
    let _ = train(launch, folder.path(), STEPS, sets).run().unwrap().expect_success();
    losses(folder.path())
}

/// Compares a curve in double precision with the reference.
#[track_caller]
fn same_curve(launch: Launch, sets: &[&str]) {
    assert_same_run(&curve(launch, &[DOUBLE, sets].concat()), &REFERENCE);
}

fn train(launch: Launch, output: &Path, steps: usize, sets: &[&str]) -> Launch {
    let data = format!("data.path={}", DATA.display());
    let output = format!("run.output={}", output.display());
    let steps = format!("train.max_steps={steps}");
    let own = [&data, &output, "metrics.every_steps=1", &steps];
    launch
        .current_dir(workspace())
        .deadline(Duration::from_secs(600))
        .args(["train", "configs/darcy_afno.toml"])
        .args(own.iter().chain(sets).flat_map(|set| ["--set", set]))
}

/// The loss of each step, by the run's own record.
fn losses(output: &Path) -> Vec<f64> {
    let text = fs::read_to_string(output.join("darcy_afno/metrics.jsonl")).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let losses: Vec<f64> = records.filter_map(|record| record["loss"].as_f64()).collect();
    assert!(losses.iter().all(|loss| loss.is_finite() && *loss > 0.0), "{losses:?}");
    losses
}

#[test]
fn reference_learns() {
    for losses in [&REFERENCE, SINGLE.numbers()] {
        assert_eq!(losses.len(), STEPS);
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        assert!(mean(&losses[STEPS - 10..]) < 0.8 * mean(&losses[..10]), "{losses:?}");
    }
}

/// The demo itself, whose steps differ only as rounding grows.
#[test]
fn single_precision() {
    SINGLE.assert_same(&curve(Launch::plain(3, ISOBAR), &[]));
    if has_mpi() {
        SINGLE.assert_same(&curve(Launch::mpirun(2, ISOBAR), &[]));
    }
}

#[test]
fn mpirun() {
    if has_mpi() {
        for ranks in [1, 2, 4] {
            same_curve(Launch::mpirun(ranks, ISOBAR), &[]);
        }
    }
}

#[test]
fn srun() {
    if has_mpi() && has_slurm() {
        same_curve(Launch::srun(2, "pmix", ISOBAR), &[]);
    }
}

#[test]
fn plain_environment() {
    same_curve(Launch::plain(4, ISOBAR), &[]);
}

#[test]
fn batch_that_the_ranks_do_not_divide() {
    // 8 samples on 3 ranks, and 7 on 3, against one.
    same_curve(Launch::plain(3, ISOBAR), &[]);
    let seven = [DOUBLE, &["train.batch_size=7"]].concat();
    let [three, one] = [3, 1].map(|ranks| curve(Launch::plain(ranks, ISOBAR), &seven));
    assert_same_run(&three, &one);
}

#[test]
fn without_overlap() {
    same_curve(Launch::plain(2, ISOBAR), &["data_parallel.overlap=off"]);
}

#[test]
fn resumed_run_goes_on_as_if_nothing_had_been() {
    let folder = TempDir::new().unwrap();
    let sets = [DOUBLE, &["checkpoint.every_steps=10"]].concat();
    let half = STEPS / 2 - 5;
    let _ = train(Launch::plain(2, ISOBAR), folder.path(), half, &sets).run().unwrap().expect_success();
    assert_eq!(losses(folder.path()).len(), half);
    // On another number of ranks.
    let rest = train(Launch::plain(3, ISOBAR), folder.path(), STEPS, &sets).arg("--resume=must");
    let _ = rest.run().unwrap().expect_success();
    assert_same_run(&losses(folder.path()), &REFERENCE);
}
