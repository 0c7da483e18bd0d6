//! Helpers of the tests that run across crates and ranks, over [`isobar_harness`].

pub mod runs;
pub mod suite;

use std::{env, path::PathBuf};

use isobar_harness::{Launch, on_path, skip, workspace};
use serde_json::Value;

/// The public golden cases.
#[must_use]
pub fn golden() -> PathBuf {
    workspace().join("tests/golden")
}

/// Returns whether the longer form of a test was asked for, by `cargo xtask test --full`.
#[must_use]
pub fn full() -> bool {
    env::var_os("XTASK_FULL").is_some()
}

/// Returns whether `mpirun` can start ranks that find each other; notes the calling test as skipped otherwise.
#[must_use]
pub fn has_mpi() -> bool {
    let has = cfg!(feature = "mpi") && on_path("mpirun").is_some();
    if !has {
        skip(if cfg!(feature = "mpi") { "no mpirun" } else { "built without MPI" });
    }
    has
}

/// Returns whether `srun` can start ranks here; notes the calling test as skipped otherwise.
#[must_use]
pub fn has_slurm() -> bool {
    let has = ["munged", "slurmctld", "slurmd", "srun"].into_iter().all(|name| on_path(name).is_some());
    if !has {
        skip("no SLURM");
    }
    has
}

/// Runs `launch`, which must succeed, and reads the JSON that each rank printed as its last line.
///
/// # Panics
///
/// When the launch fails, or a rank printed no JSON.
#[must_use]
pub fn json_of_ranks(launch: &Launch) -> Vec<Value> {
    let outcome = match launch.run() {
        Ok(outcome) => outcome.expect_success(),
        Err(error) => panic!("failed to run `{launch}`: {error:#}"),
    };
    let read = |output: &isobar_harness::RankOutput| {
        let last = output.stdout.lines().last().unwrap_or_default();
        match serde_json::from_str(last) {
            Ok(value) => value,
            Err(error) => panic!("not JSON ({error}): {last}\n{outcome}"),
        }
    };
    outcome.ranks.iter().map(read).collect()
}

/// The program of the readme, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;

/// The program of the page on sharded tensors, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../docs/sharded-tensors.md")]
pub struct ShardedTensors;

/// The model of the page on adding a model, compiled and registered.
#[cfg(doctest)]
#[doc = include_str!("../../docs/add-a-model.md")]
pub struct AddAModel;
