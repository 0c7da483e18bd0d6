//! Prints one line for each rank: who it is, and the sum of all ranks as MPI, gloo or nobody else counted it.
//!
//! `mpirun -n 4 target/release/examples/whoami`, `srun -n 4 --mpi=pmix …`, or four processes with `RANK`,
//! `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`.
#![expect(clippy::print_stdout, reason = "the example's purpose is to print")]

use std::process::ExitCode;

use isobar_collectives::{ReduceOp, all_reduce};
use isobar_manager::config::{self, DistributedConfig, Sources};
use isobar_manager::{BoxError, DistributedManager, logging};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Tensor;

#[derive(Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
struct Config {
    distributed: DistributedConfig,
}

fn main() -> ExitCode {
    isobar_manager::main(run)
}

fn run() -> Result<(), BoxError> {
    let sources = std::env::args().skip(1).fold(Sources::from_process(), Sources::set);
    let config = config::load::<Config>(&sources)?.value.distributed;
    let manager = DistributedManager::initialize_with(&config)?;
    logging::init(&config.log, manager.rank(), None)?;
    let names: Vec<&str> = config.mesh.names.iter().map(String::as_str).collect();
    let mesh = manager.initialize_mesh(&config.mesh.shape, &names)?;
    let rank = Tensor::from_slice(&[manager.rank() as i64]);
    let sum = all_reduce(&rank, ReduceOp::Sum, &manager.group(None)?)?.f_int64_value(&[0])?;
    println!("{manager}; {mesh} at {:?}; sum of ranks {sum}", mesh.coordinates().unwrap_or_default());
    DistributedManager::cleanup(true)?;
    Ok(())
}
