//! State dicts: tensors by name.

use std::collections::BTreeMap;
use std::path::Path;

use tch::Tensor;

use crate::error::{Error, Result};

/// Tensors by their state-dict names.
pub type StateDict = BTreeMap<String, Tensor>;

/// Reads all tensors of a safetensors file, on the CPU.
///
/// # Errors
///
/// The file is missing, broken, or holds a dtype that libtorch lacks.
pub fn read_safetensors(path: impl AsRef<Path>) -> Result<StateDict> {
    let path = path.as_ref();
    // The next reads by name and would wait for ever on a FIFO.
    isobar_files::open(path)
        .map_err(|source| Error::File { path: path.display().to_string(), source: source.into() })?;
    let tensors = Tensor::read_safetensors(path)
        .map_err(|source| Error::File { path: path.display().to_string(), source })?;
    Ok(tensors.into_iter().collect())
}
