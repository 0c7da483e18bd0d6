//! Arrays of a store.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;
use zarrs::array::{Array, ArrayMetadata};

use super::attributes::{describe, of_store};
use super::codecs::{Failure, Numbers, Place, Plan, quietly};
use super::nodes::{Node, Version, nodes};
use super::options::MissingChunks;
use super::store::Store;
use crate::arrays::{ArrayInfo, Arrays, Values};
use crate::attributes::TextAttributes;
use crate::boxes::{copy, extents, indices, shared, touched};
use crate::dtype::{Dtype, NumberKind};
use crate::spare::{buffer, keep};
use crate::{Error, Result};

/// Most axes of an array.
const MOST_AXES: usize = 32;
/// Largest extent of an array or of a shard.
const LARGEST_EXTENT: u64 = 1 << 40;
/// Windows of more bytes are read only after a look whether their chunks are there.
const LARGE: usize = 64 << 20;

/// The arrays of a store.
#[derive(Debug)]
pub(super) struct ZarrArrays {
    path: PathBuf,
    store: Box<dyn Store>,
    nodes: BTreeMap<String, Node>,
    attributes: TextAttributes,
    fills: bool,
    opened: Mutex<BTreeMap<String, Arc<Opened>>>,
}

/// An array whose metadata were checked.
#[derive(Debug)]
struct Opened {
    shape: Vec<usize>,
    /// Extents of a chunk, or of a shard.
    chunk: Vec<usize>,
    kind: NumberKind,
    values: Numbers,
    plan: Plan,
    /// Knows the keys of chunks.
    array: Array<()>,
}

impl ZarrArrays {
    pub(super) fn open(path: &Path, store: Box<dyn Store>, missing: MissingChunks) -> Result<Self> {
        let (mut nodes, attributes) = nodes(path, &*store)?;
        if let Some(root) = nodes.remove("") {
            let name = path.file_stem().map_or("data".into(), |stem| stem.to_string_lossy());
            let _ = nodes.insert(format!("/{name}"), root);
        }
        let nodes = nodes.into_iter().map(|(name, node)| (name, node.with_integer_times())).collect();
        let (attributes, fills) = (of_store(&attributes), missing == MissingChunks::Fill);
        Ok(Self { path: path.to_owned(), store, nodes, attributes, fills, opened: Mutex::default() })
    }

    fn node(&self, name: &str) -> Result<(&str, &Node)> {
        let own = name.trim_start_matches('/');
        let found = self.nodes.get_key_value(own).or_else(|| self.nodes.get_key_value(&format!("/{own}")));
        let found = found.map(|(name, node)| (name.as_str(), node));
        found.ok_or_else(|| Error::MissingDataset {
            path: self.path.clone(),
            dataset: name.to_owned(),
            found: self.names(),
        })
    }

    fn misfit(&self, name: &str, found: impl Into<String>, expected: impl Into<String>) -> Error {
        let (path, name) = (self.path.clone(), name.to_owned());
        Error::Layout { path, name, found: found.into(), expected: expected.into() }
    }

    fn opened(&self, name: &str) -> Result<Arc<Opened>> {
        let (name, node) = self.node(name)?;
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = opened.get(name) {
            return Ok(Arc::clone(known));
        }
        let kind = kind(node).ok_or_else(|| {
            let dtype = node.array.get("data_type").or_else(|| node.array.get("dtype"));
            let dtype = dtype.map(Value::to_string).unwrap_or_default();
            self.misfit(name, format!("of dtype {dtype}"), "real numbers of at least 8 bits, or booleans")
        })?;
        let new = quietly(|| check(name, node, kind, self.fills)).map_err(|failure| match failure {
            Failure::Wrong(found) => self.misfit(name, found, "an array of a kind that is read"),
            _ => self.misfit(name, "damaged", "metadata of Zarr"),
        })?;
        let new = Arc::new(new);
        opened.insert(name.to_owned(), Arc::clone(&new));
        Ok(new)
    }

    /// Reads the part of a chunk that a window has.
    fn chunk(&self, name: &str, of: &Opened, index: &[usize], inside: &[Range<usize>]) -> Result<Vec<u8>> {
        let numbers: Vec<u64> = index.iter().map(|&at| at as u64).collect();
        let key = of.array.chunk_key(&numbers);
        let place = Place { store: &*self.store, key: key.as_str(), values: &of.values };
        let values = match of.plan.read(&place, inside) {
            Err(Failure::Missing) => place.filled(&extents(inside)),
            values => values,
        };
        values.map_err(|failure| match failure {
            Failure::Missing => self.misfit(
                name,
                format!("incomplete: its chunk {} is missing", key.as_str()),
                "all chunks; copy the store again, or if its writer leaves out chunks of fill values, --set \
                 data.zarr.missing_chunks=fill",
            ),
            Failure::Io(error) => Error::io(&self.path.join(key.as_str()), "read it", error),
            Failure::Wrong(found) => {
                let expected = "a chunk that its metadata describe";
                self.misfit(name, format!("damaged: its chunk {} is {found}", key.as_str()), expected)
            }
        })
    }
}

/// The kind of an array's numbers, if it has some.
fn kind(node: &Node) -> Option<NumberKind> {
    if node.version == Version::V3 {
        return Some(match node.array.get("data_type")?.as_str()? {
            "bool" => NumberKind::Bool,
            "int8" => NumberKind::I8,
            "uint8" => NumberKind::U8,
            "int16" => NumberKind::I16,
            "uint16" => NumberKind::U16,
            "int32" => NumberKind::I32,
            "uint32" => NumberKind::U32,
            "int64" => NumberKind::I64,
            "uint64" => NumberKind::U64,
            "float16" => NumberKind::F16,
            "bfloat16" => NumberKind::Bf16,
            "float32" => NumberKind::F32,
            "float64" => NumberKind::F64,
            _ => return None,
        });
    }
    let text = node.array.get("dtype")?.as_str()?;
    Some(match text.strip_prefix(['<', '>', '|'])? {
        "b1" => NumberKind::Bool,
        "i1" => NumberKind::I8,
        "u1" => NumberKind::U8,
        "i2" => NumberKind::I16,
        "u2" => NumberKind::U16,
        "i4" => NumberKind::I32,
        "u4" => NumberKind::U32,
        "i8" => NumberKind::I64,
        "u8" => NumberKind::U64,
        "f2" => NumberKind::F16,
        "f4" => NumberKind::F32,
        "f8" => NumberKind::F64,
        _ => return None,
    })
}

/// Checks the metadata of an array.
fn check(name: &str, node: &Node, kind: NumberKind, fills: bool) -> Result<Opened, String> {
    let list = |list: Option<&Value>, least: u64| -> Option<Vec<usize>> {
        let one = |extent: &Value| {
            let extent = extent.as_u64().filter(|extent| (least..=LARGEST_EXTENT).contains(extent))?;
            usize::try_from(extent).ok()
        };
        list?.as_array()?.iter().map(one).collect()
    };
    let shape = list(node.array.get("shape"), 0).ok_or("without a shape, or of one too large")?;
    let chunk = match node.version {
        Version::V2 => list(node.array.get("chunks"), 1),
        Version::V3 => {
            let grid = node.array.get("chunk_grid");
            let name = grid.and_then(|grid| grid.get("name")).and_then(Value::as_str);
            let regular = grid.filter(|_| name == Some("regular"));
            list(regular.and_then(|grid| grid.get("configuration")?.get("chunk_shape")), 1)
        }
    };
    let chunk = chunk.ok_or("not in chunks of one shape, of at least 1 along each axis")?;
    if shape.len() != chunk.len() || shape.len() > MOST_AXES {
        let (axes, of_chunks) = (shape.len(), chunk.len());
        return Err(format!("of {axes} axes and chunks of {of_chunks}, of at most {MOST_AXES}"));
    }
    let size = kind.size();
    for extents in [&shape, &chunk] {
        let bytes = extents.iter().try_fold(size, |bytes, &extent| bytes.checked_mul(extent));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(format!("of shape {extents:?}, which is too large"));
        }
    }
    let other = node.array.get("storage_transformers").and_then(Value::as_array);
    if other.is_some_and(|transformers| !transformers.is_empty()) {
        return Err("behind storage transformers".to_owned());
    }
    let wrong = |error: serde_json::Error| format!("described by metadata that are wrong: {error}");
    let metadata = match node.version {
        Version::V3 => ArrayMetadata::V3(serde_json::from_value(node.array.clone()).map_err(wrong)?),
        Version::V2 => ArrayMetadata::V2(serde_json::from_value(node.array.clone()).map_err(wrong)?),
    };
    let path = if name.starts_with('/') { "/".to_owned() } else { format!("/{name}") };
    let array = Array::new_with_metadata(Arc::new(()), &path, metadata);
    let array = array.map_err(|error| format!("described by metadata that are not read: {error}"))?;
    // The library says the same of the shape of chunks as was checked here.
    let zeros = vec![0; shape.len()];
    if !shape.contains(&0) {
        let own: Vec<u64> = array
            .chunk_shape(&zeros)
            .map_err(|error| error.to_string())?
            .iter()
            .map(|extent| extent.get())
            .collect();
        if own.iter().zip(&chunk).any(|(own, chunk)| *own != *chunk as u64) {
            return Err(format!("in chunks of shape {own:?} and {chunk:?}"));
        }
    }
    let plan = Plan::new(&array.codecs(), &chunk, size)?;
    let (kind_, fill) = (array.data_type().clone(), array.fill_value().clone());
    let values = Numbers { kind: kind_, fill, size, fills };
    Ok(Opened { shape, chunk, kind, values, plan, array })
}

impl Arrays for ZarrArrays {
    fn path(&self) -> &Path {
        &self.path
    }

    fn names(&self) -> Vec<String> {
        let numbers = self.nodes.iter().filter(|(_, node)| kind(node).is_some());
        numbers.map(|(name, _)| name.trim_start_matches('/').to_owned()).collect()
    }

    fn all_names(&self) -> Vec<String> {
        self.nodes.keys().map(|name| name.trim_start_matches('/').to_owned()).collect()
    }

    fn info(&self, name: &str) -> Result<ArrayInfo> {
        let (_, node) = self.node(name)?;
        let opened = self.opened(name)?;
        let chunk = Some(opened.plan.piece().to_vec());
        Ok(ArrayInfo { chunk, ..describe(node, opened.kind, opened.shape.clone()) })
    }

    fn attributes(&self) -> Result<TextAttributes> {
        Ok(self.attributes.clone())
    }

    fn read(&self, name: &str, window: &[Range<usize>]) -> Result<Values> {
        let of = self.opened(name)?;
        let inside = window.len() == of.shape.len()
            && window
                .iter()
                .zip(&of.shape)
                .all(|(range, &extent)| range.start < range.end && range.end <= extent);
        if !inside {
            return Err(self.misfit(
                name,
                format!("of shape {:?}", of.shape),
                format!("one that has {window:?}"),
            ));
        }
        let (size, cut) = (of.values.size, extents(window));
        let chunks = touched(window, &of.chunk);
        let bytes =
            cut.iter().try_fold(size, |bytes, &extent| bytes.checked_mul(extent)).unwrap_or(usize::MAX);
        if bytes > LARGE && !self.fills && self.store.together() == 1 {
            for index in indices(&chunks) {
                let numbers: Vec<u64> = index.iter().map(|&at| at as u64).collect();
                let key = of.array.chunk_key(&numbers);
                let failed = |error| Error::io(&self.path.join(key.as_str()), "read it", error);
                if self.store.length(key.as_str()).map_err(failed)?.is_none() {
                    // The error of a chunk that is missing.
                    let (part, _) = shared(window, &of.chunk, &index);
                    self.chunk(name, &of, &index, &part)?;
                }
            }
        }
        let failed = |error| Error::io(&self.path, "take memory for what is read of it", error);
        let mut out = buffer(bytes).map_err(failed)?;
        let one = |index: &[usize]| -> Result<_> {
            let (inside, outside) = shared(window, &of.chunk, index);
            Ok((self.chunk(name, &of, index, &inside)?, outside))
        };
        let put = |out: &mut [u8], (values, outside): (Vec<u8>, Vec<Range<usize>>)| {
            let part = extents(&outside);
            let all: Vec<Range<usize>> = part.iter().map(|&extent| 0..extent).collect();
            copy(size, (&values, &part, &all), (out, &cut, &outside));
            keep(values);
        };
        let count = chunks.iter().map(Range::len).fold(1_usize, usize::saturating_mul);
        let threads = self.store.together().min(count);
        if threads <= 1 {
            for index in indices(&chunks) {
                let part = one(&index)?;
                if count == 1 {
                    out = part.0;
                } else {
                    put(&mut out, part);
                }
            }
        } else {
            let next = Mutex::new(indices(&chunks));
            let out = Mutex::new(&mut out[..]);
            let work = || -> Result<()> {
                loop {
                    let index = next.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some(index) = index else { return Ok(()) };
                    let part = one(&index)?;
                    put(&mut out.lock().unwrap_or_else(PoisonError::into_inner), part);
                }
            };
            std::thread::scope(|scope| {
                let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
                workers.into_iter().try_for_each(|worker| {
                    worker
                        .join()
                        .unwrap_or_else(|_| Err(Error::Invalid("a thread that reads ended".to_owned())))
                })
            })?;
        }
        let values = Dtype { kind: of.kind, big_endian: cfg!(target_endian = "big") }.decode(&out);
        keep(out);
        Ok(values)
    }
}
