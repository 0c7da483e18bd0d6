//! Picking rows out of a tensor and adding rows up in one: what libtorch does row by row through its iterators, done
//! on memory where that is contiguous.
#![expect(
    unsafe_code,
    reason = "works on the memory of contiguous CPU tensors; each block says why it is sound"
)]

use isobar_torch::guard::NoGrad;
use tch::{Device, Kind, Tensor};

use super::memory::{copy, empty, is_channels_last, output_like, plain};
use super::reduce::accumulator;
use crate::error::Result;

/// The first index that is not below `extent`, or is negative.
pub(crate) fn out_of_range(index: &Tensor, extent: i64) -> Result<Option<i64>> {
    if index.numel() == 0 {
        return Ok(None);
    }
    let index = index.detach();
    let bounds = [index.f_min()?.f_int64_value(&[])?, index.f_max()?.f_int64_value(&[])?];
    Ok(bounds.into_iter().find(|i| !(0..extent).contains(i)))
}

/// The rows of `tensor` along `dim` that `index` names.
pub(crate) fn select(tensor: &Tensor, dim: usize, index: &Tensor) -> Result<Tensor> {
    let mut shape = tensor.size();
    shape[dim] = index.size()[0];
    let picked = output_like(tensor, &shape)?;
    select_into(&picked, tensor, dim, index)?;
    Ok(picked)
}

/// Writes them to `target`. The indices are in range.
pub(crate) fn select_into(target: &Tensor, tensor: &Tensor, dim: usize, index: &Tensor) -> Result<()> {
    let _guard = NoGrad::new();
    let tensor = &plain(tensor)?;
    let on_host = [target, tensor, index].iter().all(|t| t.device() == Device::Cpu && t.is_contiguous());
    if !on_host || tensor.kind() != target.kind() {
        copy(target, &tensor.f_index_select(dim as i64, index)?)?;
        return Ok(());
    }
    let shape = tensor.size();
    let extent = shape[dim] as usize;
    let count = index.size()[0] as usize;
    let outer: i64 = shape[..dim].iter().product();
    let width = shape[dim + 1..].iter().product::<i64>() as usize * tensor.kind().elt_size_in_bytes();
    if count == 0 || width == 0 {
        return Ok(());
    }
    // SAFETY: the tensor is contiguous, in host memory and of dtype Int64 (checked by the caller), with `count` elements.
    let index = unsafe { std::slice::from_raw_parts(index.data_ptr() as *const i64, count) };
    let (from, to) = (tensor.data_ptr() as *const u8, target.data_ptr() as *mut u8);
    for o in 0..outer as usize {
        for (k, &i) in index.iter().enumerate() {
            // SAFETY: both tensors are contiguous with rows of `width` bytes; `i` is below `extent`, `k` below
            // `count`, `o` below `outer`; `target` is an output of this call, which nothing else overlaps.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    from.add((o * extent + i as usize) * width),
                    to.add((o * count + k) * width),
                    width,
                );
            }
        }
    }
    Ok(())
}

/// Zeros of `shape`, with each block of `blocks` added to the rows along `dim` that its index names: blocks in order,
/// rows in order, in the memory format of `like`. 16-bit floats are added in fp32 where asked for.
pub(crate) fn add_up(
    like: &Tensor,
    shape: &[i64],
    dim: usize,
    indices: &[Tensor],
    blocks: &[Tensor],
    use_fp32: bool,
) -> Result<Tensor> {
    let _guard = NoGrad::new();
    let Some(first) = blocks.first() else { return empty(shape, Kind::Float, Device::Cpu) };
    let kind = accumulator(first.kind(), use_fp32);
    let mut sum = Tensor::f_zeros(shape, (kind, first.device()))?;
    for (index, block) in indices.iter().zip(blocks) {
        if block.numel() == 0 {
            continue;
        }
        let block = plain(block)?.f_to_kind(kind)?;
        match (kind, [first.device(), index.device()]) {
            (Kind::Float, [Device::Cpu, Device::Cpu]) => {
                add_rows::<f32>(&sum, dim, &index.f_contiguous()?, &block.f_contiguous()?)
            }
            (Kind::Double, [Device::Cpu, Device::Cpu]) => {
                add_rows::<f64>(&sum, dim, &index.f_contiguous()?, &block.f_contiguous()?)
            }
            _ => drop(sum.f_index_add_(dim as i64, index, &block)?),
        }
    }
    if !is_channels_last(like) {
        return Ok(sum.f_to_kind(first.kind())?);
    }
    let output = output_like(like, shape)?;
    copy(&output, &sum)?;
    Ok(output)
}

/// `sum[…, index[k], …] += block[…, k, …]` on contiguous host tensors of element `T`, with indices in range.
fn add_rows<T: Copy + std::ops::AddAssign>(sum: &Tensor, dim: usize, index: &Tensor, block: &Tensor) {
    let shape = sum.size();
    let (extent, count) = (shape[dim] as usize, index.size()[0] as usize);
    let outer = shape[..dim].iter().product::<i64>() as usize;
    let width = shape[dim + 1..].iter().product::<i64>() as usize;
    // SAFETY: all three tensors are contiguous and in host memory, `sum` and `block` of element `T`; `sum` is this
    // module's own and overlaps neither.
    let (index, sum, block) = unsafe {
        (
            std::slice::from_raw_parts(index.data_ptr() as *const i64, count),
            std::slice::from_raw_parts_mut(sum.data_ptr() as *mut T, outer * extent * width),
            std::slice::from_raw_parts(block.data_ptr() as *const T, outer * count * width),
        )
    };
    for o in 0..outer {
        for (k, &i) in index.iter().enumerate() {
            let to = (o * extent + i as usize) * width;
            let from = (o * count + k) * width;
            for (to, from) in sum[to..to + width].iter_mut().zip(&block[from..from + width]) {
                *to += *from;
            }
        }
    }
}
