//! Adds two vectors that are split over the ranks. No rank ever holds a full one.
//!
//! ```sh
//! mpirun -n 4 target/debug/vector-sum
//! ```
#![expect(clippy::print_stdout, reason = "a program talks to its user")]

use isobar::prelude::*;
use isobar::shard::{Layout, Sizes};

const LENGTH: i64 = 1001; // shards may be uneven

fn main() -> std::process::ExitCode {
    isobar::main(run)
}

fn run() -> Result<(), BoxError> {
    let manager = DistributedManager::initialize()?;
    let layout = Layout::new(&manager.global_mesh(), &[Placement::Shard(0)], &[LENGTH], &Sizes::Balanced)?;
    let a = ShardTensor::arange(&layout, 0.0, 1.0, Kind::Double, Device::Cpu)?;
    let b = ShardTensor::arange(&layout, 0.0, 2.0, Kind::Double, Device::Cpu)?;

    let sum = a.add(&b)?; // local: both have the same layout
    println!("rank {} holds {} of {LENGTH} elements", manager.rank(), sum.local().numel());

    let total = sum.sum()?.full_tensor(None)?.double_value(&[]); // one all-reduce
    if manager.rank() == 0 {
        println!("total {total}");
    }
    Ok(())
}
