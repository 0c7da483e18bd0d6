//! A rank that says who it is, and whether it can talk to the others: `whoami [BACKEND [SECONDS]]`.
#![expect(clippy::print_stdout, reason = "a program of tests, read by them")]

use std::process::ExitCode;
use std::{env, time::Duration};

use anyhow::{Context, Result, bail};
use isobar_collectives::{ReduceOp, all_reduce};
use isobar_manager::{
    DistributedManager,
    config::{BackendChoice, DistributedConfig},
};
use serde_json::json;
use tch::Tensor;

fn main() -> ExitCode {
    isobar_manager::main(|| Ok(run()?))
}

fn run() -> Result<()> {
    let backend = match env::args().nth(1).as_deref() {
        None | Some("auto") => BackendChoice::Auto,
        Some("mpi") => BackendChoice::Mpi,
        Some("gloo") => BackendChoice::Gloo,
        Some(other) => bail!("no backend {other}"),
    };
    let seconds = env::args().nth(2).map_or(Ok(60), |seconds| seconds.parse()).context("SECONDS")?;
    let deadline = Duration::from_secs(seconds);
    let config =
        DistributedConfig { backend, timeout_s: deadline.as_secs_f64(), ..DistributedConfig::default() };
    let manager = DistributedManager::initialize_with(&config)?;
    let world = manager.group(None).context("no world")?;
    let own = Tensor::from_slice(&[i64::try_from(manager.rank())? + 1]);
    let sum = i64::try_from(all_reduce(&own, ReduceOp::Sum, &world)?)?;
    println!(
        "{}",
        json!({
            "rank": manager.rank(),
            "world_size": manager.world_size(),
            "local_rank": manager.local_rank(),
            "method": manager.method().name(),
            "backend": manager.backend().name(),
            "sum": sum,
            "model_parallel": manager.group_size(Some("model_parallel")).ok(),
            "caught_signals": caught_signals(),
        })
    );
    DistributedManager::cleanup(true)?;
    Ok(())
}

/// Signals for which this process has a handler, as the bits of a mask.
fn caught_signals() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}
