//! Vectors handed to torch without a copy, and back.

use std::ffi::c_void;

use tch::{Kind, Tensor};

use super::{allocator, data_ptr, dense, nbytes};
use crate::element::{Element, scalar_type};
use crate::error::{Error, Result, call, drop_box};
use crate::ffi;
use crate::memory::MemoryFormat;

/// libtorch's vectorised kernels for complex numbers load 16 bytes at once, aligned.
const COMPLEX_ALIGNMENT: usize = 16;

/// A CPU tensor of `shape` over the vector's own memory, in row-major order. The vector is freed with the last tensor
/// that uses its memory.
///
/// (The one case with a copy: complex elements at an address that libtorch cannot take, which the standard allocator
/// of 64-bit systems does not give.)
///
/// # Errors
///
/// If the shape has a negative extent or another number of elements than the vector.
pub fn from_vec<T: Element>(data: Vec<T>, shape: &[i64]) -> Result<Tensor> {
    check_shape(data.len(), shape)?;
    let complex = matches!(T::KIND, Kind::ComplexFloat | Kind::ComplexDouble);
    let aligned = !complex || data.is_empty() || data.as_ptr().addr().is_multiple_of(COMPLEX_ALIGNMENT);
    if aligned { lend(data, shape) } else { copy(&data, shape) }
}

fn check_shape(len: usize, shape: &[i64]) -> Result<()> {
    let elements = shape.iter().try_fold(1usize, |product, &extent| {
        usize::try_from(extent).ok().and_then(|extent| product.checked_mul(extent))
    });
    if elements == Some(len) {
        return Ok(());
    }
    Err(Error::Argument(format!("a vector of {len} elements does not fill the shape {shape:?}")))
}

/// The memory of a tensor, counted like the allocator's own.
struct Lent<T> {
    _data: Vec<T>,
    _counted: allocator::Counted,
}

fn lend<T: Element>(mut data: Vec<T>, shape: &[i64]) -> Result<Tensor> {
    let pointer = data.as_mut_ptr().cast::<c_void>();
    let counted = allocator::Counted::new(size_of_val(data.as_slice()));
    let context = Box::into_raw(Box::new(Lent { _data: data, _counted: counted })).cast();
    let kind = scalar_type(T::KIND);
    // SAFETY: the memory holds the shape's elements (checked by the caller) of this dtype (promised by `Element`), is
    // writable, and lives until the shim drops the context, which it does once in every case.
    let handle = call(|error| unsafe {
        ffi::isobar_from_vec(pointer, shape.as_ptr(), shape.len(), kind, context, drop_box::<Lent<T>>, error)
    })?;
    // SAFETY: a fresh handle that we own; never null on success.
    Ok(unsafe { Tensor::from_ptr(handle) })
}

fn copy<T: Element>(data: &[T], shape: &[i64]) -> Result<Tensor> {
    let tensor = Tensor::f_empty(shape, (T::KIND, tch::Device::Cpu))?;
    // SAFETY: the new tensor has room for the shape's elements, which are as many as the data's.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), data_ptr(&tensor)?.cast(), data.len()) };
    Ok(tensor)
}

/// The elements of a tensor in row-major order, whatever its strides and device.
///
/// # Errors
///
/// If the tensor's dtype is not that of `T`, or it has no plain memory (sparse tensors).
pub fn to_vec<T: Element>(tensor: &Tensor) -> Result<Vec<T>> {
    let kind = tensor.f_kind()?;
    if kind != T::KIND {
        let asked = T::KIND;
        return Err(Error::Argument(format!(
            "elements of dtype {asked:?} were requested from a tensor of {kind:?}"
        )));
    }
    let tensor = dense(&tensor.f_detach()?.f_to(tch::Device::Cpu)?, MemoryFormat::Contiguous)?;
    let bytes = nbytes(&tensor);
    let len = bytes / size_of::<T>();
    let mut data = Vec::<T>::with_capacity(len);
    if len > 0 {
        let source = data_ptr(&tensor)?.cast::<u8>();
        let target = data.as_mut_ptr().cast::<u8>();
        // SAFETY: `source` is dense memory of `bytes` bytes, `target` has room for as many, and they are apart.
        unsafe { std::ptr::copy_nonoverlapping(source, target, bytes) };
        if T::KIND == Kind::Bool {
            // SAFETY: the bytes were just written. A byte other than 0 and 1 means true to torch, and nothing to Rust.
            unsafe { std::slice::from_raw_parts_mut(target, bytes) }
                .iter_mut()
                .for_each(|byte| *byte = (*byte != 0).into());
        }
    }
    // SAFETY: `len` elements were written, of valid bits (`Element`, and for bool the line above).
    unsafe { data.set_len(len) };
    Ok(data)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::{Complex32, Complex64};

    fn round_trip<T: Element + PartialEq + std::fmt::Debug>(values: [T; 6]) {
        let data = values.to_vec();
        let address = data.as_ptr().addr();
        let tensor = from_vec(data, &[2, 3]).unwrap();
        assert_eq!(tensor.kind(), T::KIND);
        assert_eq!(data_ptr(&tensor).unwrap().addr(), address, "no copy");
        assert_eq!(to_vec::<T>(&tensor).unwrap(), values);
        let transposed = to_vec::<T>(&tensor.f_tr().unwrap()).unwrap();
        assert_eq!(transposed, [0, 3, 1, 4, 2, 5].map(|i| values[i]), "row-major, whatever the strides");
    }

    #[test]
    fn every_element_goes_and_comes_back() {
        round_trip([1u8, 2, 3, 4, 5, 255]);
        round_trip([1i8, -2, 3, 4, 5, 6]);
        round_trip([1i16, -2, 3, 4, 5, 6]);
        round_trip([1i32, -2, 3, 4, 5, 6]);
        round_trip([1i64, -2, 3, 4, 5, i64::MAX]);
        round_trip([true, false, true, true, false, false]);
        round_trip([1.0f32, -2.5, 3.0, 4.0, 5.0, 6.0]);
        round_trip([1.0f64, -2.5, 3.0, 4.0, 5.0, 6.0]);
        round_trip([1.0, -2.5, 3.0, 4.0, 5.0, 6.0].map(f16::from_f32));
        round_trip([1.0, -2.5, 3.0, 4.0, 5.0, 6.0].map(bf16::from_f32));
        round_trip([1.0, -2.5, 3.0, 4.0, 5.0, 6.0].map(|x| Complex32::new(x, 1.0 - x)));
        round_trip([1.0, -2.5, 3.0, 4.0, 5.0, 6.0].map(|x| Complex64::new(x, 1.0 - x)));
    }

    #[test]
    fn memory_that_cannot_be_lent_is_copied() {
        let values = [1.0, 2.0].map(|x| Complex64::new(x, -x));
        assert_eq!(to_vec::<Complex64>(&copy(&values, &[2]).unwrap()).unwrap(), values);
    }

    #[test]
    fn bfloat16_has_its_value_in_torch() {
        let tensor = from_vec(vec![bf16::from_f32(1.5)], &[1]).unwrap();
        assert_eq!(tensor.double_value(&[0]), 1.5);
    }

    #[test]
    fn empty_and_scalar_shapes() {
        assert_eq!(from_vec(Vec::<f32>::new(), &[0, 3]).unwrap().size(), [0, 3]);
        assert_eq!(to_vec::<f32>(&from_vec(vec![7.0f32], &[]).unwrap()).unwrap(), [7.0]);
    }

    #[test]
    fn wrong_shapes_and_kinds_are_errors() {
        assert!(from_vec(vec![1.0f32; 5], &[2, 3]).unwrap_err().to_string().contains("5 elements"));
        assert!(from_vec(vec![1.0f32; 6], &[-2, -3]).is_err());
        assert!(from_vec(vec![1u8; 4], &[1 << 32, 1 << 32]).is_err());
        let tensor = from_vec(vec![1.0f32; 6], &[6]).unwrap();
        assert!(to_vec::<f64>(&tensor).unwrap_err().to_string().contains("Double"));
    }

    #[test]
    fn bytes_read_as_bool_are_zero_or_one() {
        let bytes = from_vec(vec![0u8, 1, 2, 255], &[4]).unwrap();
        let flags = bytes.f_view_dtype(Kind::Bool).unwrap();
        assert_eq!(to_vec::<bool>(&flags).unwrap(), [false, true, true, true]);
    }
}
