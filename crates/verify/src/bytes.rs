//! Tensors to and from the bytes of safetensors files.

use anyhow::{Context, Result, bail};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use std::collections::{BTreeMap, HashMap};
use tch::{Kind, Tensor};

/// The bytes of a file that holds `tensors`; complex ones with a trailing dim of (re, im).
pub(crate) fn pack(tensors: &[(&str, &Tensor)], metadata: Option<(&str, &str)>) -> Result<Vec<u8>> {
    let parts = tensors.iter().map(|(name, tensor)| Ok((*name, elements(tensor)?)));
    let parts: Vec<(&str, Elements)> = parts.collect::<Result<_>>()?;
    let views =
        parts.iter().map(|(name, e)| Ok((*name, TensorView::new(e.dtype, e.shape.clone(), &e.data)?)));
    let views: Vec<(&str, TensorView<'_>)> = views.collect::<Result<_>>()?;
    let metadata = metadata.map(|(key, text)| HashMap::from([(key.to_owned(), text.to_owned())]));
    Ok(serialize(views, metadata)?)
}

/// The tensors of a file; those named in `complex` as such.
pub(crate) fn unpack(file: &[u8], complex: &[String]) -> Result<BTreeMap<String, Tensor>> {
    let mut tensors = BTreeMap::new();
    for (name, view) in SafeTensors::deserialize(file)?.iter() {
        let complex = complex.iter().any(|other| other == name);
        let tensor = tensor(&view, complex).with_context(|| format!("failed to read the tensor {name}"))?;
        tensors.insert(name.to_owned(), tensor);
    }
    Ok(tensors)
}

/// The elements of a tensor in order.
struct Elements {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

const KINDS: [(Kind, Dtype); 10] = [
    (Kind::Double, Dtype::F64),
    (Kind::Float, Dtype::F32),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Int64, Dtype::I64),
    (Kind::Int, Dtype::I32),
    (Kind::Int16, Dtype::I16),
    (Kind::Int8, Dtype::I8),
    (Kind::Uint8, Dtype::U8),
    (Kind::Bool, Dtype::BOOL),
];

fn elements(tensor: &Tensor) -> Result<Elements> {
    let tensor = tensor.f_detach()?;
    let real = match tensor.kind() {
        Kind::ComplexFloat | Kind::ComplexDouble => tensor.f_resolve_conj()?.f_view_as_real()?,
        _ => tensor,
    };
    let dense = real.f_contiguous()?;
    let kind = dense.kind();
    let Some(&(_, dtype)) = KINDS.iter().find(|(known, _)| *known == kind) else {
        bail!("elements of dtype {kind:?} have no place in a safetensors file");
    };
    let mut data = vec![0; dense.numel() * kind.elt_size_in_bytes()];
    dense.f_copy_data_u8(&mut data, dense.numel())?;
    Ok(Elements { dtype, shape: dense.size().iter().map(|&extent| extent as usize).collect(), data })
}

/// A copy: a file's memory is aligned to 8 bytes, and complex arithmetic crashes below 16.
fn tensor(view: &TensorView<'_>, complex: bool) -> Result<Tensor> {
    let Some(&(kind, _)) = KINDS.iter().find(|(_, known)| *known == view.dtype()) else {
        bail!("elements of type {:?} are not known", view.dtype());
    };
    let shape: Vec<i64> = view.shape().iter().map(|&extent| extent as i64).collect();
    let tensor = Tensor::f_from_data_size(view.data(), &shape, kind)?;
    Ok(if complex { tensor.f_view_as_complex()? } else { tensor })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    #[test]
    fn tensors_come_back() {
        let x = Tensor::arange(6, (Kind::BFloat16, Device::Cpu)).view([2, 3]);
        let z = Tensor::complex(&Tensor::from_slice(&[1.0, 2.0]), &Tensor::from_slice(&[3.0, 4.0])).conj();
        let empty = Tensor::zeros([0, 3], (Kind::Int64, Device::Cpu));
        let file = pack(&[("x", &x.tr()), ("z", &z), ("empty", &empty)], Some(("case", "{}"))).unwrap();
        let back = unpack(&file, &["z".to_owned()]).unwrap();
        assert_eq!(back["x"], x.tr());
        assert_eq!(back["z"], z.resolve_conj());
        assert_eq!(back["empty"].size(), [0, 3]);
    }
}
