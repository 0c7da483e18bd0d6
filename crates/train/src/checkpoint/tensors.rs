//! Tensors to and from safetensors.

use std::borrow::Cow;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, View};
use tch::{Device, Kind, Tensor};

use crate::error::{Context, Error, Result};

/// The file's bytes. They depend on the tensors alone, not on their order.
pub(super) fn encode(tensors: &[(String, Tensor)]) -> Result<Vec<u8>> {
    let views = tensors
        .iter()
        .map(|(name, tensor)| Ok((name.as_str(), HostTensor::copy_of(name, tensor)?)))
        .collect::<Result<Vec<_>>>()?;
    safetensors::serialize(views, None).map_err(|error| {
        Error::invalid("the tensors of a checkpoint", error, "tensors that safetensors can hold")
    })
}

/// The tensors of a file, on the CPU, in the order of their names.
pub(super) fn decode(path: &Path, bytes: &[u8]) -> Result<Vec<(String, Tensor)>> {
    let refused = |reason: String| Error::checkpoint(path, reason);
    let file =
        SafeTensors::deserialize(bytes).map_err(|e| refused(format!("not a safetensors file: {e}")))?;
    let mut tensors = file
        .iter()
        .map(|(name, view)| {
            Ok((name.to_owned(), tensor(&view).map_err(|e| refused(format!("tensor {name:?}: {e}")))?))
        })
        .collect::<Result<Vec<_>>>()?;
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(tensors)
}

fn tensor(view: &TensorView<'_>) -> std::result::Result<Tensor, String> {
    let kind = kind(view.dtype())
        .ok_or_else(|| format!("elements of type {:?} have no tensor kind", view.dtype()))?;
    let shape: Vec<i64> = view.shape().iter().map(|&n| n as i64).collect();
    Tensor::f_from_data_size(view.data(), &shape, kind).map_err(|e| e.to_string())
}

/// A tensor's values in host memory, in row-major order.
struct HostTensor {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl HostTensor {
    fn copy_of(name: &str, tensor: &Tensor) -> Result<Self> {
        let kind = tensor.kind();
        let dtype = dtype(kind).ok_or_else(|| {
            Error::invalid(
                format!("tensor {name:?}"),
                format!("of kind {kind:?}"),
                "a kind that safetensors has",
            )
        })?;
        let elements = tensor.numel();
        let mut data = vec![0; elements * kind.elt_size_in_bytes()];
        tensor
            .f_detach()
            .and_then(|t| t.f_to_device(Device::Cpu))
            .and_then(|t| t.f_contiguous())
            .and_then(|t| t.f_copy_data_u8(&mut data, elements))
            .context(|| format!("copying tensor {name:?} to host memory"))?;
        Ok(Self { dtype, shape: tensor.size().iter().map(|&n| n as usize).collect(), data })
    }
}

impl View for HostTensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}

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

fn dtype(kind: Kind) -> Option<Dtype> {
    KINDS.iter().find(|entry| entry.0 == kind).map(|entry| entry.1)
}

fn kind(dtype: Dtype) -> Option<Kind> {
    KINDS.iter().find(|entry| entry.1 == dtype).map(|entry| entry.0)
}
