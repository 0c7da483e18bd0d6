//! Kinds of tensors and their names in safetensors.

use safetensors::tensor::Dtype;
use tch::Kind;

use crate::error::{Error, Result};

const KINDS: [(Kind, Dtype); 11] = [
    (Kind::Bool, Dtype::BOOL),
    (Kind::Uint8, Dtype::U8),
    (Kind::Int8, Dtype::I8),
    (Kind::Int16, Dtype::I16),
    (Kind::Int, Dtype::I32),
    (Kind::Int64, Dtype::I64),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Float, Dtype::F32),
    (Kind::Double, Dtype::F64),
    (Kind::ComplexFloat, Dtype::C64),
];

/// The type of a tensor's elements in a file.
pub(super) fn dtype(name: &str, kind: Kind) -> Result<Dtype> {
    let found = KINDS.iter().find(|entry| entry.0 == kind).map(|entry| entry.1);
    found.ok_or_else(|| {
        Error::invalid(
            format!("tensor {name:?}"),
            format!("of dtype {kind:?}"),
            "a dtype that safetensors has",
        )
    })
}

/// The kind of tensor that a file's elements make, where there is one.
pub(super) fn kind(dtype: Dtype) -> Option<Kind> {
    KINDS.iter().find(|entry| entry.1 == dtype).map(|entry| entry.0)
}
