//! The dot product of two vectors that are split over the ranks, and its gradient.
//!
//! ```sh
//! mpirun -n 4 target/debug/dot-product
//! ```
#![expect(clippy::print_stdout, reason = "a program talks to its user")]

use isobar::prelude::*;

fn main() -> std::process::ExitCode {
    isobar::main(run)
}

fn run() -> Result<(), BoxError> {
    let manager = DistributedManager::initialize()?;
    let mesh = manager.global_mesh();
    let split = |vector: &Tensor| ShardTensor::distribute(vector, &mesh, &[Placement::Shard(0)]);
    let line = Tensor::f_linspace(0.0, 1.0, 101, (Kind::Double, Device::Cpu))?;
    let a = split(&line)?.set_requires_grad(true)?;
    let b = split(&line.f_square()?)?;

    let product = a.mul(&b)?.sum()?; // partial: each rank has the sum of its own terms
    let value = product.full_tensor(None)?.double_value(&[]); // an all-reduce
    product.backward()?;
    let gradient = a.grad().ok_or("the vector has no gradient")?; // in the layout of `a`
    let difference = gradient.sub(&b)?;
    let error = difference.mul(&difference)?.sum()?.full_tensor(None)?.double_value(&[]).sqrt();
    if manager.rank() == 0 {
        println!("a · b = {value:.9}, and its gradient differs from b by {error:.1}");
    }
    Ok(())
}
