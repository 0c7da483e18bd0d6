//! Causal attention over a sequence that is split over the ranks. Keys and values travel around a ring; no rank holds all of
//! them, and none the matrix of scores.
//!
//! ```sh
//! mpirun -n 4 target/debug/ring-attention
//! ```
#![expect(clippy::print_stdout, reason = "a program talks to its user")]

use isobar::array::AttentionStrategy;
use isobar::prelude::*;
use isobar::shard::{AttentionOptions, CommTrace, Layout, Sizes};

fn main() -> std::process::ExitCode {
    isobar::main(run)
}

fn run() -> Result<(), BoxError> {
    let manager = DistributedManager::initialize()?;
    // [batch, heads, sequence, features]; the shards of 250 tokens are uneven on 4 ranks.
    let shape = [1, 2, 250, 16];
    let layout = Layout::new(&manager.global_mesh(), &[Placement::Shard(2)], &shape, &Sizes::Chunk)?;
    let random = |seed| -> Result<ShardTensor, BoxError> {
        let x = ShardTensor::randn(&layout, Kind::Double, Device::Cpu, &Generator::new(seed))?;
        Ok(x.set_requires_grad(true)?)
    };
    let [query, key, value] = [random(1)?, random(2)?, random(3)?];

    let trace = CommTrace::start(&manager.group(None)?);
    let options =
        AttentionOptions { is_causal: true, strategy: AttentionStrategy::Ring, ..Default::default() };
    let y = ShardTensor::scaled_dot_product_attention(&query, &key, &value, &options)?;
    println!("rank {} sent {} bytes", manager.rank(), trace.sent());

    let loss = y.mul(&y)?.mean()?;
    loss.backward()?;
    let slope = key.grad().ok_or("the keys have no gradient")?;
    let norm = slope.mul(&slope)?.sum()?.full_tensor(None)?.double_value(&[]).sqrt();
    let loss = loss.full_tensor(None)?.double_value(&[]);
    if manager.rank() == 0 {
        println!("loss {loss:.9}, norm of the keys' gradient {norm:.9}");
    }
    Ok(())
}
