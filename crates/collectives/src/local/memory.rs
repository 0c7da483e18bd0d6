//! Memory of tensors: copies, lengths, and outputs in the memory format of an input.

use tch::{Device, Kind, Tensor};

use crate::error::Result;

/// Copies without recording it for autograd, whatever the mode.
pub(crate) fn copy(to: &Tensor, from: &Tensor) -> Result<()> {
    let _guard = isobar_torch::guard::NoGrad::new();
    to.detach().f_copy_(&from.detach())?;
    Ok(())
}

/// The tensor without history, and with its memory holding its values: views that are yet to be conjugated or negated
/// are copied.
pub(crate) fn plain(tensor: &Tensor) -> Result<Tensor> {
    let _guard = isobar_torch::guard::NoGrad::new();
    Ok(tensor.detach().f_resolve_conj()?.f_resolve_neg()?)
}

/// The length of a tensor's elements in bytes.
pub(crate) fn nbytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// An output of `shape`, to be filled, in the memory format of `tensor`: channels-last stays so.
pub(crate) fn output_like(tensor: &Tensor, shape: &[i64]) -> Result<Tensor> {
    let dims = shape.len();
    if !is_channels_last(tensor) {
        return empty(shape, tensor.kind(), tensor.device());
    }
    let mut in_memory = shape.to_vec();
    let channels = in_memory.remove(1);
    in_memory.push(channels);
    let mut back: Vec<i64> = (0..dims as i64 - 1).collect();
    back.insert(1, dims as i64 - 1);
    Ok(empty(&in_memory, tensor.kind(), tensor.device())?.f_permute(back)?)
}

/// Returns whether a tensor of 4 or 5 dims is stored channels-last (dim 1 innermost), and not contiguous too.
pub(crate) fn is_channels_last(tensor: &Tensor) -> bool {
    let (shape, strides) = (tensor.size(), tensor.stride());
    if !(4..=5).contains(&shape.len()) || tensor.is_contiguous() {
        return false;
    }
    let order = std::iter::once(1).chain((2..shape.len()).rev()).chain(std::iter::once(0));
    let mut run = 1;
    for dim in order {
        if shape[dim] != 1 && strides[dim] != run {
            return false;
        }
        run *= shape[dim];
    }
    true
}

/// An output to be filled.
pub(crate) fn empty(shape: &[i64], kind: Kind, device: Device) -> Result<Tensor> {
    Ok(Tensor::f_empty(shape, (kind, device))?)
}
