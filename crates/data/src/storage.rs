//! Checks of how an HDF5 file stores what it holds: in the file itself, and in chunks that unpack to bounded memory.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use flate2::read::ZlibDecoder;
use hdf5_metno::dataset::{ChunkInfo, Layout};
use hdf5_metno::filters::Filter;
use hdf5_metno::{Dataset, Group, IndexType, IterationOrder, LinkType};

use crate::layout::misfit;
use crate::{Error, Result};

/// Largest size of a chunk that is read, in bytes.
pub(crate) const LARGEST_CHUNK: u64 = 1 << 30;

/// Largest number of bytes that one byte of deflate expands to.
pub(crate) const DEFLATED: u64 = 1032;

/// Largest number of links in a file.
const MOST_LINKS: usize = 1 << 17;

/// Largest number of chunks of a dataset that are checked one by one: HDF5 1.10 searches linearly for each.
const MOST_CHUNKS: usize = 4096;

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

/// Dataset to read, with those of its chunks that might expand to more than their shape.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) dataset: Dataset,
    path: PathBuf,
    name: String,
    chunk: Vec<usize>,
    /// Bytes of an unpacked chunk.
    bytes: u64,
    /// Chunks that have not been checked.
    suspects: Mutex<Vec<ChunkInfo>>,
}

impl Stored {
    /// Lists the chunks that are packed and large enough to unpack to more than [`LARGEST_CHUNK`].
    pub(crate) fn new(path: &Path, dataset: Dataset, name: String) -> Self {
        let chunk = dataset.chunk().unwrap_or_default();
        let width = dataset.dtype().map_or(0, |kind| kind.size());
        let bytes = chunk.iter().fold(width as u64, |bytes, &extent| bytes.saturating_mul(extent as u64));
        let stored = dataset.storage_size();
        let chunks = match chunk.is_empty() || stored.saturating_mul(DEFLATED) <= LARGEST_CHUNK {
            true => 0,
            false => dataset.num_chunks().unwrap_or(0),
        };
        let suspect = |info: &ChunkInfo| info.size.saturating_mul(DEFLATED) > LARGEST_CHUNK;
        let listed =
            (0..chunks).take_while(|_| chunks <= MOST_CHUNKS).filter_map(|at| dataset.chunk_info(at));
        let suspects = Mutex::new(listed.filter(suspect).collect());
        Self { dataset, path: path.to_owned(), name, chunk, bytes, suspects }
    }

    /// Shape of its chunks, where it has any.
    pub(crate) fn chunk(&self) -> Option<&[usize]> {
        (!self.chunk.is_empty()).then_some(&self.chunk)
    }

    /// Rejects a window that overlaps a chunk which expands to more than its shape. HDF5 would decompress all
    /// of it.
    pub(crate) fn check(&self, window: &[Range<usize>]) -> Result<()> {
        let mut suspects = self.suspects.lock().unwrap_or_else(PoisonError::into_inner);
        if suspects.is_empty() {
            return Ok(());
        }
        let mut file = isobar_files::open(&self.path).map_err(|error| self.unreadable(error))?;
        let meets = |info: &ChunkInfo| {
            window.iter().zip(&self.chunk).zip(&info.offset).all(|((range, &extent), &offset)| {
                range.start < (offset as usize).saturating_add(extent) && offset < range.end as u64
            })
        };
        let (now, later): (Vec<_>, Vec<_>) = suspects.drain(..).partition(meets);
        *suspects = later;
        for info in now {
            self.count(&mut file, &info).inspect_err(|_| suspects.push(info.clone()))?;
        }
        Ok(())
    }

    /// Decompresses a chunk without storing the result.
    fn count(&self, file: &mut File, info: &ChunkInfo) -> Result<()> {
        // Addresses count from the end of the user block, which the library's answer may or may not include.
        let base = self.dataset.file().map_or(0, |file| file.userblock());
        for address in [Some(info.addr), Some(info.addr.saturating_add(base)).filter(|_| base > 0)] {
            let Some(address) = address else { continue };
            file.seek(SeekFrom::Start(address)).map_err(|error| self.unreadable(error))?;
            let packed = Read::by_ref(file).take(info.size);
            // Checksums before compression take 4 bytes. The library rejects invalid compressed data.
            let most = self.bytes.saturating_add(4);
            let mut unpacked = ZlibDecoder::new(packed).take(most.saturating_add(1));
            let count = count_bytes(&mut unpacked);
            if count > most {
                return Err(misfit(
                    &self.path,
                    self.name.clone(),
                    format!(
                        "in a chunk at {:?} that unpacks to more than its {} bytes",
                        info.offset, self.bytes
                    ),
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
