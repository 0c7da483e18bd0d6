//! Constants beside arrays.

use isobar_array::Array;
use isobar_array::kernel::named;
use tch::{Device, Tensor};

use crate::error::Result;

/// Numbers as an array of that shape, replicated on the mesh of `like`, of its dtype.
pub(crate) fn constant<A: Array>(values: &[f64], shape: &[i64], like: &A) -> Result<A> {
    let plain = Tensor::f_from_slice(values).and_then(|v| v.f_reshape(shape)?.f_to_kind(like.kind()));
    Ok(like.constant(&named("constant", &[], plain)?)?)
}

/// Zeros of that shape, replicated on the mesh of `like`, of its dtype.
pub(crate) fn zeros<A: Array>(shape: &[i64], like: &A) -> Result<A> {
    let plain = Tensor::f_zeros(shape, (like.kind(), Device::Cpu));
    Ok(like.constant(&named("zeros", &[], plain)?)?)
}
