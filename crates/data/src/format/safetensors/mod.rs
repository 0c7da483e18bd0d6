//! safetensors files.
//!
//! The format has no names of axes: the configuration gives them, or the metadata of files that Isobar wrote.

mod writer;

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::arrays::{ArrayDataset, ArrayInfo, ArrayOptions, Arrays, Values, components};
use crate::content::UNITS;
use crate::dataset::Dataset;
use crate::dtype::{Dtype, NumberKind};
use crate::registry::{DataSource, Format};
use crate::runs::read_runs;
use crate::{Error, Result, register};

register!(SafeTensors);

impl Format for SafeTensors {
    const NAME: &'static str = "safetensors";
    const SUMMARY: &'static str = "Tensors of a .safetensors file.";
    const EXTENSIONS: &'static [&'static str] = &["safetensors"];
    type Options = ArrayOptions;

    fn open(source: &DataSource<'_>, options: ArrayOptions) -> Result<Box<dyn Dataset>> {
        ArrayDataset::open(Box::new(Self::open(source.path())?), source, options)
    }
}

/// Entry of the header with texts by name.
const METADATA: &str = "__metadata__";
/// Key of the names of a tensor's axes, between blanks.
const AXES: &str = "axes";
/// Key of the coordinates of a periodic dim.
const PERIODIC: &str = "periodic";
/// Key of the coordinates of channels, such as levels.
const CHANNELS: &str = "channels";
/// Key of the calendar of times.
const CALENDAR: &str = "calendar";
/// Key of the names of a tensor's channels, between blanks.
const COMPONENTS: &str = "components";

/// Bytes of the longest header that is read, the format's own limit.
const LONGEST: u64 = 100_000_000;

#[derive(Debug)]
struct SafeTensors {
    path: PathBuf,
    file: File,
    /// Offset of the first number.
    start: u64,
    tensors: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
}

/// A tensor in the header.
#[derive(Debug, Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

impl SafeTensors {
    fn open(path: &Path) -> Result<Self> {
        let failed = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::Missing { path: path.to_owned() },
            _ => Error::io(path, "open it", error),
        };
        let file = isobar_files::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let misfit = |found: String| Error::Layout {
            path: path.to_owned(),
            name: "the header".to_owned(),
            found,
            expected: "that of a complete safetensors file".to_owned(),
        };
        let mut size = [0; 8];
        file.read_exact_at(&mut size, 0).map_err(|_| misfit("cut off".to_owned()))?;
        let size = u64::from_le_bytes(size);
        if size > LONGEST || size > length.saturating_sub(8) {
            return Err(misfit(format!("of {size} bytes in a file of {length}")));
        }
        let mut header = vec![0; size as usize];
        file.read_exact_at(&mut header, 8).map_err(failed)?;
        let mut entries: BTreeMap<String, Value> =
            serde_json::from_slice(&header).map_err(|error| misfit(format!("no JSON: {error}")))?;
        // Metadata that Isobar did not write are ignored.
        let metadata = entries.remove(METADATA).and_then(|texts| serde_json::from_value(texts).ok());
        let metadata = metadata.unwrap_or_default();
        let mut tensors = BTreeMap::new();
        for (name, entry) in entries {
            let entry =
                Entry::deserialize(entry).map_err(|error| misfit(format!("wrong at {name:?}: {error}")))?;
            tensors.insert(name, entry);
        }
        let tensors = Self { path: path.to_owned(), file, start: 8 + size, tensors, metadata };
        tensors.check(length - 8 - size)?;
        Ok(tensors)
    }

    /// Rejects tensors whose bytes are not in the file, or not as many as their shape says.
    fn check(&self, there: u64) -> Result<()> {
        for (name, Entry { dtype, shape, data_offsets: [first, end] }) in &self.tensors {
            let Some(kind) = number_kind(dtype) else { continue };
            let bytes =
                shape.iter().try_fold(kind.size() as u64, |bytes, &extent| bytes.checked_mul(extent as u64));
            let fits = first <= end && *end <= there && bytes == Some(end.saturating_sub(*first));
            if !fits {
                return Err(Error::Layout {
                    path: self.path.clone(),
                    name: name.clone(),
                    found: format!("of {dtype} and shape {shape:?} at the bytes {first} to {end} of {there}"),
                    expected: "as many bytes as its values take, in the file".to_owned(),
                });
            }
        }
        Ok(())
    }

    /// A text of the metadata about a tensor.
    fn text(&self, name: &str, key: &str) -> Option<&str> {
        self.metadata.get(&format!("{name}.{key}")).map(String::as_str)
    }

    /// A tensor of numbers.
    fn tensor(&self, name: &str) -> Result<(&Entry, NumberKind)> {
        let entry = self.tensors.get(name).ok_or_else(|| Error::MissingDataset {
            path: self.path.clone(),
            dataset: name.to_owned(),
            found: self.names(),
        })?;
        let kind = number_kind(&entry.dtype).ok_or_else(|| Error::Layout {
            path: self.path.clone(),
            name: name.to_owned(),
            found: format!("of dtype {}", entry.dtype),
            expected: "real numbers of at least 8 bits, or booleans".to_owned(),
        })?;
        Ok((entry, kind))
    }
}

fn number_kind(name: &str) -> Option<NumberKind> {
    Some(match name {
        "BOOL" => NumberKind::Bool,
        "I8" => NumberKind::I8,
        "U8" => NumberKind::U8,
        "I16" => NumberKind::I16,
        "U16" => NumberKind::U16,
        "I32" => NumberKind::I32,
        "U32" => NumberKind::U32,
        "I64" => NumberKind::I64,
        "U64" => NumberKind::U64,
        "F16" => NumberKind::F16,
        "BF16" => NumberKind::Bf16,
        "F32" => NumberKind::F32,
        "F64" => NumberKind::F64,
        _ => return None,
    })
}

impl Arrays for SafeTensors {
    fn path(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn info(&self, name: &str) -> Result<ArrayInfo> {
        let shape = self.tensor(name)?.0.shape.clone();
        let text = |key| self.text(name, key);
        let axes = text(AXES).map(|axes| components(Some(axes))).filter(|axes| axes.len() == shape.len());
        Ok(ArrayInfo {
            axes,
            unit: text(UNITS).map(str::to_owned),
            calendar: text(CALENDAR).map(str::to_owned),
            periodic: text(PERIODIC).is_some(),
            channels: text(CHANNELS).is_some(),
            components: components(text(COMPONENTS)),
            ..ArrayInfo::of_shape(shape)
        })
    }

    fn read(&self, name: &str, window: &[Range<usize>]) -> Result<Values> {
        let (entry, kind) = self.tensor(name)?;
        let start = self.start + entry.data_offsets[0];
        let bytes = read_runs(&self.file, start, kind.size(), &entry.shape, window);
        let bytes = bytes.map_err(|error| Error::io(&self.path, "read it", error))?;
        Ok(Dtype { kind, big_endian: false }.decode(&bytes))
    }
}
