//! Checks of how an HDF5 file stores what it holds: in the file itself, and in chunks that unpack to bounded memory.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use flate2::read::ZlibDecoder;
use hdf5_metno::dataset::Layout;
use hdf5_metno::filters::Filter;
use hdf5_metno::{Dataset, Group, IndexType, IterationOrder, LinkType};

use crate::hdf5::chunks::{self, Packed};
use crate::{Error, Result};

/// Largest size of a chunk that is read, in bytes.
pub(crate) const LARGEST_CHUNK: u64 = 1 << 30;

/// Largest number of bytes that one byte of deflate expands to.
pub(crate) const DEFLATED: u64 = 1032;

/// Largest number of links in a file.
const MOST_LINKS: usize = 1 << 17;

/// Rejects a file with links to other files, since opening their target would open that file. Without such
/// links, soft links stay within the file.
pub(crate) fn check_links(path: &Path, root: &Group) -> Result<()> {
    let mut left = MOST_LINKS;
    let mut seen = HashSet::new();
    let mut groups = vec![(String::new(), root.clone())];
    while let Some((name, group)) = groups.pop() {
        let failed = |error| Error::hdf5(path, format!("list the links of `/{name}`"), error);
        let mut hard = Vec::new();
        for (link, info) in group.links(IndexType::Name, IterationOrder::Native).map_err(failed)? {
            let full = if name.is_empty() { link.clone() } else { format!("{name}/{link}") };
            if info.link_type == LinkType::External {
                let expected =
                    "a dataset or group of the file itself; copy what it leads to into the file (h5copy)";
                return Err(misfit(path, full, "a link to another file", expected));
            }
            // A name with a slash would be looked up as a path.
            if link.is_empty() || link == "." || link.contains('/') {
                return Err(misfit(path, full, "the name of a link", "a name without slashes"));
            }
            left = left.checked_sub(1).ok_or_else(|| {
                misfit(path, "/".to_owned(), format!("of more than {MOST_LINKS} links"), "fewer")
            })?;
            if info.link_type == LinkType::Hard {
                hard.push((link, full));
            }
        }
        for (link, full) in hard {
            let info = group.loc_info_by_name(&link).map_err(failed)?;
            if info.loc_type == hdf5_metno::LocationType::Group && seen.insert(format!("{:?}", info.token)) {
                groups.push((full, group.group(&link).map_err(failed)?));
            }
        }
    }
    Ok(())
}

/// Rejects a dataset whose values are in other files, or compressed by filters with unbounded output. Runs
/// before the shape is read, since HDF5 may open the sources of a virtual dataset for it.
pub(crate) fn check_place(path: &Path, dataset: &Dataset, name: &str) -> Result<()> {
    let failed = |error| Error::hdf5(path, format!("read the properties of dataset `{name}`"), error);
    let properties = dataset.dcpl().map_err(failed)?;
    let inside = "values in the file itself; copy the dataset with h5repack";
    let layout = properties.get_layout().map_err(failed)?;
    if layout == Layout::Virtual {
        let found = "a virtual dataset, whose values lie in others";
        return Err(misfit(path, name.to_owned(), found, inside));
    }
    if let Some(other) = properties.get_external().map_err(failed)?.first() {
        let found = format!("stored in another file, {:?}", other.name);
        return Err(misfit(path, name.to_owned(), found, inside));
    }
    if layout != Layout::Chunked {
        return Ok(());
    }
    // The crate reads 32 parameters of a filter and panics if the file has more.
    let filters = catch_unwind(AssertUnwindSafe(|| properties.get_filters()))
        .unwrap_or_else(|_| Err("a filter has too many parameters".into()))
        .map_err(failed)?;
    let mut packed = false;
    for filter in &filters {
        let bounded = match filter {
            Filter::Shuffle => !packed,
            Filter::Deflate(_) => !std::mem::replace(&mut packed, true),
            Filter::Fletcher32 => true,
            _ => false,
        };
        if !bounded {
            let found = format!("packed by the filters {filters:?}");
            let expected = "shuffle, gzip and Fletcher32 in this order; repack the file (h5repack -f GZIP=6)";
            return Err(misfit(path, name.to_owned(), found, expected));
        }
    }
    Ok(())
}

/// Dataset to read. Its chunks are checked as they are read: before memory is taken for one, it must not
/// unpack to more than its shape.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) dataset: Dataset,
    path: PathBuf,
    name: String,
    chunk: Vec<usize>,
    /// Bytes of an unpacked chunk.
    bytes: u64,
    /// True if any chunk can be large enough to unpack to more than [`LARGEST_CHUNK`].
    suspicious: bool,
    /// Linear indices of the large chunks that were checked: at most one for each MiB of the file.
    checked: Mutex<HashSet<u64>>,
}

impl Stored {
    pub(crate) fn new(path: &Path, dataset: Dataset, name: String) -> Self {
        let chunk = dataset.chunk().unwrap_or_default();
        let width = dataset.dtype().map_or(0, |kind| kind.size());
        let bytes = chunk.iter().fold(width as u64, |bytes, &extent| bytes.saturating_mul(extent as u64));
        let suspicious = !chunk.is_empty() && may_be_bomb(dataset.storage_size());
        let checked = Mutex::default();
        Self { dataset, path: path.to_owned(), name, chunk, bytes, suspicious, checked }
    }

    /// Shape of its chunks, where it has any.
    pub(crate) fn chunk(&self) -> Option<&[usize]> {
        (!self.chunk.is_empty()).then_some(&self.chunk)
    }

    /// Rejects a window that overlaps a chunk which expands to more than its shape. HDF5 would decompress all
    /// of it.
    pub(crate) fn check(&self, window: &[Range<usize>]) -> Result<()> {
        if !self.suspicious || window.iter().any(Range::is_empty) || window.len() != self.chunk.len() {
            return Ok(());
        }
        let shape = self.dataset.shape();
        let chunks: Vec<Range<usize>> = window
            .iter()
            .zip(&self.chunk)
            .map(|(range, &extent)| range.start / extent..range.end.div_ceil(extent))
            .collect();
        let mut at: Vec<usize> = chunks.iter().map(|range| range.start).collect();
        loop {
            let index =
                at.iter().zip(&shape).zip(&self.chunk).fold(0_u64, |index, ((&at, &size), &extent)| {
                    index.saturating_mul(size.div_ceil(extent) as u64).saturating_add(at as u64)
                });
            let offset: Vec<u64> =
                at.iter().zip(&self.chunk).map(|(&at, &extent)| (at * extent) as u64).collect();
            self.check_chunk(index, &offset)?;
            // The next chunk, the last dim first.
            let Some(dim) = (0..at.len()).rev().find(|&dim| at[dim] + 1 < chunks[dim].end) else {
                return Ok(());
            };
            at[dim] += 1;
            (dim + 1..at.len()).for_each(|dim| at[dim] = chunks[dim].start);
        }
    }

    /// Checks one chunk. HDF5 finds the size of a chunk by its index (a tree), but its address by a linear
    /// search, which only large chunks need.
    fn check_chunk(&self, index: u64, offset: &[u64]) -> Result<()> {
        let failed = |error| Error::hdf5(&self.path, format!("look up a chunk of `{}`", self.name), error);
        let size = chunks::stored_size(&self.dataset, offset).map_err(failed)?;
        if !may_be_bomb(size) {
            return Ok(());
        }
        if size > largest_packed(self.bytes) {
            let found = format!(
                "in a chunk at {offset:?} of {size} packed bytes, more than its {} bytes",
                self.bytes
            );
            let expected = "chunks that are not larger packed; the file is damaged or made to exhaust memory";
            return Err(misfit(&self.path, self.name.clone(), found, expected));
        }
        let known = |checked: &HashSet<u64>| checked.contains(&index);
        if known(&self.checked.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(());
        }
        let packed = chunks::find(&self.dataset, offset).map_err(failed)?;
        let mut file = isobar_files::open(&self.path).map_err(|error| self.unreadable(error))?;
        self.count(&mut file, &packed, offset)?;
        self.checked.lock().unwrap_or_else(PoisonError::into_inner).insert(index);
        Ok(())
    }

    /// Decompresses a chunk without storing the result.
    fn count(&self, file: &mut File, chunk: &Packed, offset: &[u64]) -> Result<()> {
        // Addresses count from the end of the user block, which the library's answer may or may not include.
        let base = self.dataset.file().map_or(0, |file| file.userblock());
        for address in [Some(chunk.address), Some(chunk.address.saturating_add(base)).filter(|_| base > 0)] {
            let Some(address) = address else { continue };
            file.seek(SeekFrom::Start(address)).map_err(|error| self.unreadable(error))?;
            let packed = Read::by_ref(file).take(chunk.size);
            // Checksums before compression take 4 bytes. The library rejects invalid compressed data.
            let most = self.bytes.saturating_add(4);
            let mut unpacked = ZlibDecoder::new(packed).take(most.saturating_add(1));
            let count = count_bytes(&mut unpacked);
            if count > most {
                return Err(misfit(
                    &self.path,
                    self.name.clone(),
                    format!("in a chunk at {offset:?} that unpacks to more than its {} bytes", self.bytes),
                    "chunks that unpack to their shape; the file is damaged or made to exhaust memory",
                ));
            }
        }
        Ok(())
    }

    fn unreadable(&self, error: std::io::Error) -> Error {
        Error::io(&self.path, "read a chunk of it", error)
    }
}

/// Returns whether so many packed bytes may unpack to more than [`LARGEST_CHUNK`].
fn may_be_bomb(packed: u64) -> bool {
    packed.saturating_mul(DEFLATED) > LARGEST_CHUNK
}

/// Returns the largest size of a packed chunk of so many bytes: deflate adds at most a thousandth and a header, and two
/// checksums take 8 bytes.
fn largest_packed(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / 512).saturating_add(1024)
}

/// Bytes up to the end or the first error.
fn count_bytes(reader: &mut impl Read) -> u64 {
    let mut buffer = [0; 1 << 16];
    let mut count = 0;
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return count,
            Ok(read) => count += read as u64,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return count,
        }
    }
}

/// Returns the error of a file with another layout.
pub(crate) fn misfit(
    path: &Path,
    name: String,
    found: impl Into<String>,
    expected: impl Into<String>,
) -> Error {
    Error::Layout { path: path.to_owned(), name, found: found.into(), expected: expected.into() }
}
