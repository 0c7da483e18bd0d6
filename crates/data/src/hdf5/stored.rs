//! A dataset to read: this module unpacks windows of chunks with filters, and the HDF5 library reads others.
//!
//! HDF5 1.10 reads beyond its memory if a chunk unpacks to fewer bytes than its shape, and runs one thread at a time. Here each
//! chunk must unpack to its shape, and threads unpack in parallel.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hdf5_metno::dataset::ChunkOpts;
use hdf5_metno::filters::Filter;
use hdf5_metno::{Dataset, Datatype};

use super::chunks::PackedChunks;
use super::storage::{filters, misfit};
use super::unpack::{Step, unpack};
use crate::boxes::{copy, extents, indices, shared, touched};
use crate::dtype::{Dtype, NumberKind, Values};
use crate::spare::{buffer, keep};
use crate::{Error, Result};

/// Capacity in bytes of a dataset's cache of unpacked chunks: that of HDF5 2.0.
const KEPT: usize = 8 << 20;
/// Bytes that a chunk of the cache takes besides its values, about.
const ENTRY: usize = 256;

/// Dataset to read, whose place and size are checked.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) dataset: Dataset,
    path: PathBuf,
    name: String,
    shape: Vec<usize>,
    /// Extents of a chunk; empty if there are none.
    chunk: Vec<usize>,
    /// Chunks with filters, and the filters in the order in which writers apply them.
    packed: Option<(PackedChunks, Vec<Step>)>,
    /// True if chunks that reach beyond the shape have no filters.
    plain_edges: bool,
    /// Bytes of a value.
    width: usize,
    /// Dtype of the values, if this module decodes it: the library converts others.
    dtype: Option<Dtype>,
    /// True if chunks without filters have another size than their shape.
    uneven: bool,
    /// Indices of the chunks that were checked before the library reads them.
    checked: Mutex<HashSet<Vec<usize>>>,
    kept: Mutex<Kept>,
}

/// Cache of the chunks that were unpacked last, by index.
#[derive(Debug, Default)]
struct Kept {
    chunks: BTreeMap<Vec<usize>, Arc<Vec<u8>>>,
    /// Indices of the chunks, the oldest first.
    order: VecDeque<Vec<usize>>,
    bytes: usize,
}

impl Stored {
    /// Prepares a dataset that `check_place` accepts.
    pub(crate) fn new(path: &Path, dataset: Dataset, name: String) -> Self {
        let (shape, chunk) = (dataset.shape(), dataset.chunk().unwrap_or_default());
        let kind = dataset.dtype().ok();
        let width = kind.as_ref().map_or(0, Datatype::size);
        let properties = dataset.dcpl().ok();
        let steps = properties.as_ref().and_then(|of| filters(of).ok()).unwrap_or_default();
        let packed = PackedChunks::new(&dataset).map(|of| (of, steps.iter().filter_map(step).collect()));
        let options = properties.and_then(|of| of.chunk_opts()).unwrap_or(ChunkOpts::empty());
        let plain_edges = options.contains(ChunkOpts::DONT_FILTER_PARTIAL_CHUNKS);
        let dtype = kind.as_ref().and_then(native);
        let mut new = Self {
            dataset,
            path: path.to_owned(),
            name,
            shape,
            chunk,
            packed,
            plain_edges,
            width,
            dtype,
            uneven: false,
            checked: Mutex::default(),
            kept: Mutex::default(),
        };
        if !new.chunk.is_empty() && new.packed.is_none() {
            let even = |count: usize| (count as u64).saturating_mul(new.bytes() as u64);
            new.uneven = new.dataset.num_chunks().map(even) != Some(new.dataset.storage_size());
        }
        new
    }

    /// Shape of its chunks, where it has any.
    pub(crate) fn chunk(&self) -> Option<&[usize]> {
        (!self.chunk.is_empty()).then_some(&self.chunk)
    }

    /// Reads a window of chunks that are unpacked here; returns `None` if the library must read it: datasets without filters,
    /// types that are not native, chunks that were never written.
    pub(crate) fn read(&self, window: &[Range<usize>]) -> Result<Option<Values>> {
        let inside =
            |(range, &extent): (&Range<usize>, &usize)| range.start < range.end && range.end <= extent;
        let fits = window.len() == self.chunk.len() && window.iter().zip(&self.shape).all(inside);
        let Some(dtype) = self.dtype.filter(|_| fits && self.packed.is_some()) else { return Ok(None) };
        let cut = extents(window);
        let failed = |error| Error::io(&self.path, "take memory for what is read of it", error);
        let mut out = buffer(cut.iter().product::<usize>() * self.width).map_err(failed)?;
        for index in indices(&touched(window, &self.chunk)) {
            let Some(chunk) = self.kept(&index)? else { return Ok(None) };
            let (inside, outside) = shared(window, &self.chunk, &index);
            copy(self.width, (&chunk, &self.chunk, &inside), (&mut out, &cut, &outside));
        }
        let values = dtype.decode(&out);
        keep(out);
        Ok(Some(values))
    }

    /// Rejects a window that overlaps a chunk which does not unpack to its shape, before the library unpacks it.
    pub(crate) fn check(&self, window: &[Range<usize>]) -> Result<()> {
        if self.uneven {
            let found = "in chunks of other sizes than their shape";
            return Err(self.misfit(found, "chunks that fill their shape; the file is damaged"));
        }
        if self.packed.is_none() || window.iter().any(Range::is_empty) || window.len() != self.chunk.len() {
            return Ok(());
        }
        for index in indices(&touched(window, &self.chunk)) {
            if lock(&self.checked).contains(&index) {
                continue;
            }
            self.unpacked(&index)?;
            lock(&self.checked).insert(index);
        }
        Ok(())
    }

    /// Bytes of an unpacked chunk.
    fn bytes(&self) -> usize {
        self.chunk.iter().fold(self.width, |bytes, &extent| bytes.saturating_mul(extent))
    }

    /// Returns an unpacked chunk, and keeps it for the next windows.
    fn kept(&self, index: &[usize]) -> Result<Option<Arc<Vec<u8>>>> {
        let known = lock(&self.kept).chunks.get(index).map(Arc::clone);
        if known.is_some() {
            return Ok(known);
        }
        let Some(chunk) = self.unpacked(index)? else { return Ok(None) };
        let chunk = Arc::new(fitted(chunk));
        let mut kept = lock(&self.kept);
        // Another thread may have unpacked it, too.
        if chunk.len() <= KEPT && kept.chunks.insert(index.to_vec(), Arc::clone(&chunk)).is_none() {
            kept.bytes += chunk.len() + ENTRY;
            kept.order.push_back(index.to_vec());
        }
        while kept.bytes > KEPT {
            let Some(at) = kept.order.pop_front() else { break };
            let Some(oldest) = kept.chunks.remove(&at) else { continue };
            kept.bytes -= oldest.len() + ENTRY;
            if let Some(oldest) = Arc::into_inner(oldest) {
                keep(oldest);
            }
        }
        Ok(Some(chunk))
    }

    /// Reads and unpacks a chunk; `None` if it was never written.
    fn unpacked(&self, index: &[usize]) -> Result<Option<Vec<u8>>> {
        let Some((chunks, steps)) = &self.packed else { return Ok(None) };
        let bytes = self.bytes();
        let offset: Vec<u64> =
            index.iter().zip(&self.chunk).map(|(&at, &extent)| (at * extent) as u64).collect();
        let failed = |error| Error::hdf5(&self.path, format!("read a chunk of `{}`", self.name), error);
        let size = chunks.size(&offset).map_err(failed)?;
        if size == 0 {
            return Ok(None);
        }
        if size > largest_packed(bytes as u64) {
            let found =
                format!("in a chunk at {offset:?} of {size} packed bytes, more than its {bytes} bytes");
            let expected = "chunks that are not larger packed; the file is damaged or made to exhaust memory";
            return Err(self.misfit(found, expected));
        }
        let (packed, mut skipped) = chunks.read(&offset, size).map_err(failed)?;
        let beyond = |((&at, &extent), &size): ((&usize, &usize), &usize)| (at + 1) * extent > size;
        if self.plain_edges && index.iter().zip(&self.chunk).zip(&self.shape).any(beyond) {
            skipped = u32::MAX;
        }
        unpack(steps, skipped, packed, self.width, bytes).map(Some).map_err(|problem| {
            let expected = "chunks that unpack to their shape; the file is damaged or made to exhaust memory";
            self.misfit(format!("in a chunk at {offset:?} that {problem}"), expected)
        })
    }

    fn misfit(&self, found: impl Into<String>, expected: &str) -> Error {
        misfit(&self.path, self.name.clone(), found, expected)
    }
}

/// Returns a chunk in memory of about its size: buffers that are used again may be much larger.
fn fitted(chunk: Vec<u8>) -> Vec<u8> {
    if chunk.capacity() <= 2 * chunk.len() {
        return chunk;
    }
    let own = chunk.as_slice().to_vec();
    keep(chunk);
    own
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn step(filter: &Filter) -> Option<Step> {
    match filter {
        Filter::Shuffle => Some(Step::Shuffle),
        Filter::Deflate(_) => Some(Step::Deflate),
        Filter::Fletcher32 => Some(Step::Fletcher32),
        _ => None,
    }
}

/// Returns the dtype of numbers in this machine's format; `None` for other types. Booleans are numbers of one byte.
fn native(kind: &Datatype) -> Option<Dtype> {
    let kinds = [
        (NumberKind::F32, kind.is::<f32>()),
        (NumberKind::F64, kind.is::<f64>()),
        (NumberKind::I8, kind.is::<i8>() || kind.is::<bool>()),
        (NumberKind::U8, kind.is::<u8>()),
        (NumberKind::I16, kind.is::<i16>()),
        (NumberKind::U16, kind.is::<u16>()),
        (NumberKind::I32, kind.is::<i32>()),
        (NumberKind::U32, kind.is::<u32>()),
        (NumberKind::I64, kind.is::<i64>()),
        (NumberKind::U64, kind.is::<u64>()),
    ];
    let (kind, _) = kinds.into_iter().find(|(_, is)| *is)?;
    Some(Dtype { kind, big_endian: cfg!(target_endian = "big") })
}

/// Returns the largest packed size of a chunk of `bytes` bytes: deflate adds at most a thousandth and a header, and two
/// checksums take 8 bytes.
fn largest_packed(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / 512).saturating_add(1024)
}
