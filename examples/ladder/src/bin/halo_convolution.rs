//! A convolution over a field whose rows are split over the ranks. Each rank fetches the rows next to its own, the halo.
//!
//! ```sh
//! mpirun -n 4 target/debug/halo-convolution
//! ```
#![expect(clippy::print_stdout, reason = "a program talks to its user")]

use isobar::prelude::*;
use isobar::shard::{CommTrace, Layout, Sizes};

fn main() -> std::process::ExitCode {
    isobar::main(run)
}

fn run() -> Result<(), BoxError> {
    let manager = DistributedManager::initialize()?;
    let mesh = manager.global_mesh();
    let random = |seed, shape: &[i64], placement| -> Result<ShardTensor, BoxError> {
        let layout = Layout::new(&mesh, &[placement], shape, &Sizes::Chunk)?;
        // Numbers of the global tensor: the same on any number of ranks.
        Ok(ShardTensor::randn(&layout, Kind::Double, Device::Cpu, &Generator::new(seed))?)
    };
    let field = random(1, &[1, 3, 61, 40], Placement::Shard(2))?; // [batch, channel, height, width]
    let weight = random(2, &[3, 3, 5, 5], Placement::Replicate)?;

    // Periodic: the last row is next to the first.
    let conv = Conv { padding: Padding::Each(vec![2]), padding_mode: PadMode::Circular, ..Conv::default() };
    let trace = CommTrace::start(&manager.group(None)?);
    let y = field.conv(&weight, None, &conv)?;
    println!("rank {} of {} sent {} bytes", manager.rank(), manager.world_size(), trace.sent());

    let square = y.mul(&y)?.mean()?.full_tensor(None)?.double_value(&[]);
    if manager.rank() == 0 {
        println!("mean square {square:.9}");
    }
    Ok(())
}
