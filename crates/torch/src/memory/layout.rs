//! Memory formats of tensors.

use std::ffi::{c_int, c_void};

use tch::Tensor;

use crate::error::{Result, call};
use crate::ffi;

/// The order of dims in dense memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(i32)]
pub enum MemoryFormat {
    /// Row-major: the last dim is innermost.
    #[default]
    Contiguous = 0,
    /// `[batch, channel, height, width]` with the channel innermost.
    ChannelsLast = 1,
    /// `[batch, channel, depth, height, width]` with the channel innermost.
    ChannelsLast3d = 2,
}

impl MemoryFormat {
    fn code(self) -> c_int {
        self as c_int
    }
}

/// The address of the tensor's first element, valid while its memory is: to be read and written by raw
/// communication, in the tensor's strides.
///
/// # Errors
///
/// If the tensor has no plain memory (undefined, sparse), or is a conjugated or negated view, whose memory holds
/// other values than the tensor ([`dense`] resolves it).
pub fn data_ptr(tensor: &Tensor) -> Result<*mut c_void> {
    // SAFETY: the handle is valid during the call.
    call(|error| unsafe { ffi::isobar_data_ptr(tensor.as_ptr(), error) })
}

/// Bytes of the tensor's elements; for a view, of those that it shows.
pub fn nbytes(tensor: &Tensor) -> usize {
    // SAFETY: the handle is valid during the call.
    unsafe { ffi::isobar_nbytes(tensor.as_ptr()) }
}

/// Elements between the start of the storage and the tensor's first element.
///
/// # Errors
///
/// If the tensor has no plain memory.
pub fn storage_offset(tensor: &Tensor) -> Result<i64> {
    // SAFETY: the handle is valid during the call.
    call(|error| unsafe { ffi::isobar_storage_offset(tensor.as_ptr(), error) })
}

/// Returns whether the tensor is contiguous in the order of `format`.
///
/// # Errors
///
/// If the tensor is undefined.
pub fn is_contiguous(tensor: &Tensor, format: MemoryFormat) -> Result<bool> {
    // SAFETY: the handle is valid during the call.
    call(|error| unsafe { ffi::isobar_is_contiguous(tensor.as_ptr(), format.code(), error) })
}

/// The format that the tensor's strides stand for, and that torch's operators keep: channels-last where they say so,
/// else contiguous.
///
/// # Errors
///
/// If the tensor is undefined.
pub fn memory_format(tensor: &Tensor) -> Result<MemoryFormat> {
    // SAFETY: the handle is valid during the call.
    let code = call(|error| unsafe { ffi::isobar_suggest_memory_format(tensor.as_ptr(), error) })?;
    Ok(match code {
        1 => MemoryFormat::ChannelsLast,
        2 => MemoryFormat::ChannelsLast3d,
        _ => MemoryFormat::Contiguous,
    })
}

/// The tensor without gaps in the order of `format`, with pending conjugations and negations carried out: itself
/// where it is so already. Differentiable.
///
/// # Errors
///
/// If the format does not fit the tensor's number of dims, or memory is short.
pub fn dense(tensor: &Tensor, format: MemoryFormat) -> Result<Tensor> {
    // SAFETY: the handle is valid during the call.
    let handle = call(|error| unsafe { ffi::isobar_dense(tensor.as_ptr(), format.code(), error) })?;
    // SAFETY: a fresh handle that we own; never null on success.
    Ok(unsafe { Tensor::from_ptr(handle) })
}

/// An uninitialised tensor of `shape` in `format`, of the dtype and device of `like`.
///
/// # Errors
///
/// If the format does not fit the number of dims, an extent is negative, or memory is short.
pub fn empty_as(like: &Tensor, shape: &[i64], format: MemoryFormat) -> Result<Tensor> {
    // SAFETY: the handle is valid during the call, and the array as long as said.
    let handle = call(|error| unsafe {
        ffi::isobar_empty(shape.as_ptr(), shape.len(), like.as_ptr(), format.code(), error)
    })?;
    // SAFETY: a fresh handle that we own; never null on success.
    Ok(unsafe { Tensor::from_ptr(handle) })
}

/// An uninitialised tensor of the shape, dtype, device and (where dense) strides of `like`.
///
/// # Errors
///
/// If memory is short.
pub fn empty_like(like: &Tensor) -> Result<Tensor> {
    // SAFETY: the handle is valid during the call.
    let handle = call(|error| unsafe { ffi::isobar_empty_like(like.as_ptr(), error) })?;
    // SAFETY: a fresh handle that we own; never null on success.
    Ok(unsafe { Tensor::from_ptr(handle) })
}

/// Copies values into `to` without recording a graph, also into a leaf that requires a gradient. The copy counts as
/// a change in place. With `non_blocking`, a copy between pinned memory and a GPU returns before it is done.
///
/// # Errors
///
/// If the shapes don't fit.
pub fn copy_no_grad(to: &Tensor, from: &Tensor, non_blocking: bool) -> Result<()> {
    // SAFETY: both handles are valid during the call.
    call(|error| unsafe { ffi::isobar_copy(to.as_ptr(), from.as_ptr(), non_blocking, error) })
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn counted(shape: &[i64]) -> Tensor {
        Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu)).reshape(shape)
    }

    #[test]
    fn channels_last_is_found_and_made() {
        let rows = counted(&[2, 3, 4, 5]);
        assert_eq!(memory_format(&rows).unwrap(), MemoryFormat::Contiguous);
        let last = dense(&rows, MemoryFormat::ChannelsLast).unwrap();
        assert_eq!(last.stride(), [60, 1, 15, 3]);
        assert_eq!(memory_format(&last).unwrap(), MemoryFormat::ChannelsLast);
        assert!(is_contiguous(&last, MemoryFormat::ChannelsLast).unwrap());
        assert!(!is_contiguous(&last, MemoryFormat::Contiguous).unwrap());
        assert_eq!(last, rows);
        assert_eq!(empty_like(&last).unwrap().stride(), last.stride());
        let volume = empty_as(&rows, &[1, 2, 3, 4, 5], MemoryFormat::ChannelsLast3d).unwrap();
        assert_eq!(memory_format(&volume).unwrap(), MemoryFormat::ChannelsLast3d);
        assert!(dense(&counted(&[2, 3]), MemoryFormat::ChannelsLast).is_err());
    }

    #[test]
    fn views_know_their_place() {
        let all = counted(&[4, 6]);
        let part = all.narrow(0, 1, 2);
        assert_eq!((storage_offset(&part).unwrap(), nbytes(&part)), (6, 48));
        assert_eq!(data_ptr(&part).unwrap().addr() - data_ptr(&all).unwrap().addr(), 24);
    }

    #[test]
    fn memory_that_holds_other_values_is_not_shown() {
        let z = Tensor::ones([2], (Kind::ComplexFloat, Device::Cpu)).conj();
        assert!(data_ptr(&z).unwrap_err().to_string().contains("conjugated"));
        assert!(data_ptr(&dense(&z, MemoryFormat::Contiguous).unwrap()).is_ok());
        assert!(data_ptr(&Tensor::new()).is_err());
        assert_eq!(nbytes(&Tensor::new()), 0);
    }

    #[test]
    fn a_leaf_can_be_written_without_a_graph() {
        let w = counted(&[3]).set_requires_grad(true);
        copy_no_grad(&w, &counted(&[3]).f_mul_scalar(2.0).unwrap(), false).unwrap();
        assert!(w.is_leaf() && w.requires_grad());
        assert_eq!(w.double_value(&[2]), 4.0);
        assert!(copy_no_grad(&w, &counted(&[4]), false).is_err());
    }
}
