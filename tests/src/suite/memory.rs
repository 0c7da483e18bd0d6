//! What a step of a sharded model needs of memory, beside the dense one.

use isobar_collectives::Group;
use isobar_manager::DeviceMesh;
use isobar_shard::{Conv, Elementwise, Padding, Placement, ShardTensor};
use isobar_torch::memory;
use tch::{Device, Kind, Tensor};

type Failure = Box<dyn std::error::Error>;

/// Of the peak of a dense step, what a rank of four may have.
const LIMIT: f64 = 0.3;

/// Compares the peak of bytes live in libtorch's allocator in the third step of three convolutions: dense, and sharded along the
/// height over all ranks. Weights and inputs count.
///
/// # Errors
///
/// More than is allowed on four ranks; what an operator or the exchange refuses.
pub fn run(group: &Group) -> Result<String, String> {
    memory::install_caching_allocator();
    let compare = || -> Result<String, Failure> {
        let dense = peak(&Group::single())?;
        let sharded = peak(group)?;
        let ratio = sharded as f64 / dense as f64;
        if group.size() == 4 && ratio > LIMIT {
            return Err(format!("{sharded} bytes of {dense} are {ratio:.3}, more than {LIMIT}").into());
        }
        Ok(format!("{ratio:.3} of the dense peak of {dense} bytes"))
    };
    compare().map_err(|failure| failure.to_string())
}

/// The peak of the third step on these ranks.
fn peak(group: &Group) -> Result<u64, Failure> {
    let mesh = DeviceMesh::new(group, &[group.size() as i64], &["domain"])?;
    let options = (Kind::Float, Device::Cpu);
    let input = {
        let whole = Tensor::f_ones([1, 16, 256, 256], options)?;
        let part = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(2)])?;
        let own = part.local().f_contiguous()?.f_detach_copy()?;
        ShardTensor::from_parts(&own, part.layout())?
    };
    let weight = || -> Result<ShardTensor, Failure> {
        let whole = Tensor::f_full([16, 16, 3, 3], 0.01, options)?;
        Ok(ShardTensor::distribute(&whole, &mesh, &[Placement::Replicate])?.set_requires_grad(true)?)
    };
    let mut weights = [weight()?, weight()?, weight()?];
    let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
    for step in 0..3 {
        if step == 2 {
            memory::reset_peak();
        }
        weights.iter_mut().for_each(ShardTensor::zero_grad);
        let first = input.conv(&weights[0], None, &conv)?.gelu()?;
        let second = first.conv(&weights[1], None, &conv)?.gelu()?;
        second.conv(&weights[2], None, &conv)?.mean()?.backward()?;
    }
    Ok(memory::peak_bytes())
}
