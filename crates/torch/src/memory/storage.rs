//! The memory of a tensor, apart from its shape, its history and the handles to it.

use tch::Tensor;

use crate::error::{Result, call};
use crate::ffi;

/// Gives a contiguous tensor's memory back; shape, dtype, history and all handles stay, those that a graph has saved too, which
/// see the new memory after [`restore`].
///
/// For parameters that are brought before they are used and dropped after it. Until it is restored nobody may read or write
/// the tensor or a view of it: its address is null.
///
/// # Errors
///
/// A tensor without plain memory.
///
/// ```
/// use isobar_torch::memory::{release, restore};
/// use tch::{Device, Kind, Tensor};
///
/// let weight = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let y = weight.f_square()?; // saves the weight for backward
/// release(&weight)?;
/// restore(&weight)?;
/// weight.f_data()?.f_copy_(&Tensor::ones([2, 2], (Kind::Float, Device::Cpu)))?;
/// y.sum(Kind::Float).backward();
/// assert_eq!(weight.grad(), Tensor::full([2, 2], 2.0, (Kind::Float, Device::Cpu)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn release(tensor: &Tensor) -> Result<()> {
    // SAFETY: the handle is valid during the call.
    call(|error| unsafe { ffi::isobar_storage_release(tensor.as_ptr(), error) })
}

/// Gives a [`release`]d tensor memory again, of any content. Fill it through `f_data`, which leaves the version that a graph has
/// noted as it is.
///
/// # Errors
///
/// A tensor without plain memory; not enough of it.
pub fn restore(tensor: &Tensor) -> Result<()> {
    // SAFETY: the handle is valid during the call.
    call(|error| unsafe { ffi::isobar_storage_restore(tensor.as_ptr(), error) })
}

/// Returns whether both are views of the same memory.
///
/// # Errors
///
/// A tensor without plain memory.
pub fn shares_storage(one: &Tensor, other: &Tensor) -> Result<bool> {
    // SAFETY: the handles are valid during the call.
    call(|error| unsafe { ffi::isobar_shares_storage(one.as_ptr(), other.as_ptr(), error) })
}
