//! Reading: the byte ranges of the boxes that a rank wants, each checked by the digests of the blocks that it lies in.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, Metadata};
use tch::{Kind, Tensor};

use super::digest::{BLOCK, CheckedDigest};
use super::dtype::kind;
use super::manifest::{BoxEntry, Manifest, TensorEntry};
use super::tensor_shard::{Region, TensorShard, runs};
use crate::error::{Context, Error, IoContext, Result};

/// A box that is wanted of a checkpoint's tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadRequest {
    /// The tensor's name in the checkpoint.
    pub name: String,
    /// Box of it to read.
    pub region: Region,
}

/// A tensor of a checkpoint, without its values.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedTensor {
    /// Its name.
    pub name: String,
    /// The kind of its elements.
    pub kind: Kind,
    /// Its shape, whole.
    pub shape: Vec<i64>,
}

/// Contents of a checkpoint, without the tensors' values.
#[derive(Debug)]
pub struct CheckpointIndex {
    /// Path, for messages.
    pub path: PathBuf,
    /// Its tensors.
    pub tensors: Vec<SavedTensor>,
    /// Saved facts, see [`Checkpointed::facts`](super::Checkpointed::facts); `None` for a file of weights.
    pub facts: Option<serde_json::Value>,
}

impl CheckpointIndex {
    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&SavedTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

/// A checkpoint that is open for reading: a folder with a manifest, or a safetensors file of weights.
#[derive(Debug)]
pub(super) struct Opened {
    path: PathBuf,
    files: Vec<(PathBuf, Option<CheckedDigest>)>,
    pub(super) tensors: Vec<TensorEntry>,
    pub(super) manifest: Option<Manifest>,
}

impl Opened {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// A checkpoint's folder. Its files are looked at when they are read.
    pub(super) fn folder(path: &Path) -> Result<Self> {
        let manifest = Manifest::read(path)?;
        let files = manifest.files.iter().map(|file| {
            let digest = file.digest.check().map_err(|problem| Error::checkpoint(path, problem))?;
            Ok((path.join(&file.name), Some(digest)))
        });
        let files = files.collect::<Result<_>>()?;
        Ok(Self { path: path.to_owned(), files, tensors: manifest.tensors.clone(), manifest: Some(manifest) })
    }

    /// A safetensors file, as PyTorch's tools write it: nobody has said what its bytes should be. Its tensors are the
    /// model's, so they get the names that a checkpoint has for them.
    pub(super) fn weights(path: &Path) -> Result<Self> {
        let tensors = tensors_of(path)?;
        Ok(Self { path: path.to_owned(), files: vec![(path.to_owned(), None)], tensors, manifest: None })
    }

    pub(super) fn index(&self) -> Result<CheckpointIndex> {
        let tensors = self.tensors.iter().map(|tensor| {
            let kind = kind(tensor.dtype).ok_or_else(|| {
                let reason = format!(
                    "tensor {:?}: elements of type {:?} have no tensor dtype",
                    tensor.name, tensor.dtype
                );
                Error::checkpoint(&self.path, reason)
            })?;
            Ok(SavedTensor { name: tensor.name.clone(), kind, shape: tensor.shape.clone() })
        });
        Ok(CheckpointIndex {
            path: self.path.clone(),
            tensors: tensors.collect::<Result<_>>()?,
            facts: self.manifest.as_ref().map(|manifest| manifest.facts.clone()),
        })
    }

    /// The values of what is wanted. Reads each block of a file that any of them meets once, and no other.
    pub(super) fn read(&self, wanted: &[ReadRequest]) -> Result<Vec<TensorShard>> {
        let tensors = self.find(wanted)?;
        let bytes_of = |(want, tensor): (&ReadRequest, &&TensorEntry)| {
            vec![0u8; want.region.elements() as usize * tensor.element_bytes() as usize]
        };
        let mut targets: Vec<Vec<u8>> = wanted.iter().zip(&tensors).map(bytes_of).collect();
        self.visit(wanted, &tensors, |blocks, at, offset, place| {
            blocks.read(offset, &mut targets[at][place])
        })?;
        let mut shards = Vec::with_capacity(wanted.len());
        for ((want, tensor), bytes) in wanted.iter().zip(tensors).zip(targets) {
            let kind = kind(tensor.dtype).ok_or_else(|| {
                let reason = format!("tensor {:?}: elements of type {:?}", want.name, tensor.dtype);
                Error::checkpoint(&self.path, reason)
            })?;
            let values = Tensor::f_from_data_size(&bytes, &want.region.shape, kind)
                .context(|| format!("reading tensor {:?}", want.name))?;
            shards.push(TensorShard {
                name: want.name.clone(),
                shape: tensor.shape.clone(),
                region: want.region.clone(),
                tensor: values,
            });
        }
        Ok(shards)
    }

    /// Checks that what is wanted is there, with the bytes that were written. Keeps one block in memory.
    pub(super) fn check(&self, wanted: &[ReadRequest]) -> Result<()> {
        let tensors = self.find(wanted)?;
        self.visit(wanted, &tensors, |blocks, _, offset, place| blocks.check(offset, place.len() as u64))
    }

    /// The entries of the tensors that are wanted.
    fn find(&self, wanted: &[ReadRequest]) -> Result<Vec<&TensorEntry>> {
        let index: BTreeMap<&str, &TensorEntry> =
            self.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let refused = |reason: String| Error::checkpoint(&self.path, reason);
        let entry = |want: &ReadRequest| {
            let tensor = index
                .get(want.name.as_str())
                .ok_or_else(|| refused(format!("tensor {:?} is missing", want.name)))?;
            match want.region.is_within(&tensor.shape) {
                true => Ok(*tensor),
                false => Err(refused(format!("tensor {:?} is of shape {:?}", want.name, tensor.shape))),
            }
        };
        wanted.iter().map(entry).collect()
    }

    /// Calls `visit(blocks, number of the request, offset in the file, place in the bytes of the request)` for each run of wanted
    /// bytes, so that each file is read from start to end.
    fn visit(
        &self,
        wanted: &[ReadRequest],
        tensors: &[&TensorEntry],
        mut visit: impl FnMut(&mut Blocks<'_>, usize, u64, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        // Boxes by file and offset.
        let mut boxes: BTreeMap<(usize, u64), Vec<(usize, &BoxEntry)>> = BTreeMap::new();
        for (at, (want, tensor)) in wanted.iter().zip(tensors).enumerate() {
            for part in tensor.boxes.iter().filter(|part| part.region.intersection(&want.region).is_some()) {
                boxes.entry((part.file, part.bytes[0])).or_default().push((at, part));
            }
        }
        let mut open: Option<(usize, Blocks<'_>)> = None;
        for ((file, _), parts) in boxes {
            if open.as_ref().is_none_or(|(current, _)| *current != file) {
                let (path, digest) = &self.files[file];
                open = Some((file, Blocks::open(path, digest.as_ref())?));
            }
            let Some((_, blocks)) = &mut open else { continue };
            for (at, part) in parts {
                let (width, wanted) = (tensors[at].element_bytes() as usize, &wanted[at].region);
                let Some(common) = part.region.intersection(wanted) else { continue };
                runs(&common, &part.region, wanted, |source, to, elements| {
                    let (to, bytes) = (to as usize * width, elements as usize * width);
                    visit(blocks, at, part.bytes[0] + (source as usize * width) as u64, to..to + bytes)
                })?;
            }
        }
        Ok(())
    }

    /// Reads and checks every byte of every file.
    pub(super) fn verify(&self) -> Result<()> {
        for (path, digest) in &self.files {
            let mut blocks = Blocks::open(path, digest.as_ref())?;
            for block in 0..blocks.bytes.div_ceil(BLOCK) {
                blocks.load(block)?;
            }
            // An empty file has no block that could be wrong.
        }
        Ok(())
    }

    /// Checks that all files exist with the written lengths.
    pub(super) fn check_lengths(&self) -> Result<()> {
        for (path, digest) in &self.files {
            Blocks::open(path, digest.as_ref())?;
        }
        Ok(())
    }
}

/// Boxes of a checkpoint that a rank wants. Each is read on request, so that the full state is never in memory twice.
#[derive(Debug)]
pub struct SavedShards<'a> {
    pub(super) opened: &'a Opened,
    pub(super) index: &'a CheckpointIndex,
    pub(super) wanted: &'a [ReadRequest],
}

/// Bytes of small boxes that are read together.
const TOGETHER: i64 = 16 << 20;

impl SavedShards<'_> {
    /// The wanted boxes, in their order.
    pub fn wanted(&self) -> &[ReadRequest] {
        self.wanted
    }

    /// Returns the dtype of a wanted tensor's values.
    pub fn kind(&self, want: &ReadRequest) -> Option<Kind> {
        self.index.tensor(&want.name).map(|tensor| tensor.kind)
    }

    /// Reads the wanted boxes with these numbers, in their order, and calls `take(number, box)` for each.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, or that has changed since the checkpoint was chosen; those of `take`.
    pub fn read(
        &self,
        numbers: Range<usize>,
        mut take: impl FnMut(usize, TensorShard) -> Result<()>,
    ) -> Result<()> {
        let mut next = numbers.start;
        while next < numbers.end {
            let end = self.together(next..numbers.end);
            let shards = self.opened.read(&self.wanted[next..end])?;
            (next..end).zip(shards).try_for_each(|(number, shard)| take(number, shard))?;
            next = end;
        }
        Ok(())
    }

    /// Returns the end of the boxes that are read together: the first, and small ones after it.
    fn together(&self, numbers: Range<usize>) -> usize {
        let mut bytes = 0;
        let fits = |number: &usize| {
            let want = &self.wanted[*number];
            let width = self.kind(want).map_or(1, Kind::elt_size_in_bytes);
            bytes += want.region.elements() * width as i64;
            *number == numbers.start || bytes <= TOGETHER
        };
        numbers.start + numbers.clone().take_while(fits).count()
    }
}

/// A file that is read block by block, each block checked where its digest is known. Remembers the block read last.
struct Blocks<'a> {
    path: &'a Path,
    file: File,
    bytes: u64,
    digest: Option<&'a CheckedDigest>,
    current: Option<u64>,
    buffer: Vec<u8>,
}

impl<'a> Blocks<'a> {
    fn open(path: &'a Path, digest: Option<&'a CheckedDigest>) -> Result<Self> {
        let file = isobar_files::open(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::checkpoint(path, "torn: it is not there"),
            _ => Error::Io { action: "open", path: path.to_owned(), source: error },
        })?;
        let bytes = file.metadata().at("look at", path)?.len();
        if let Some(digest) = digest
            && digest.bytes != bytes
        {
            let reason = format!("torn: it has {bytes} bytes, {} were written", digest.bytes);
            return Err(Error::checkpoint(path, reason));
        }
        Ok(Self { path, file, bytes, digest, current: None, buffer: Vec::new() })
    }

    /// The bytes from `offset` on.
    fn read(&mut self, mut offset: u64, mut target: &mut [u8]) -> Result<()> {
        while !target.is_empty() {
            let block = offset / BLOCK;
            if self.current != Some(block) {
                self.load(block)?;
            }
            let within = (offset % BLOCK) as usize;
            let here = target.len().min(self.buffer.len().saturating_sub(within));
            if here == 0 {
                return Err(Error::checkpoint(self.path, format!("torn: it ends at byte {}", self.bytes)));
            }
            let (now, later) = target.split_at_mut(here);
            now.copy_from_slice(&self.buffer[within..within + here]);
            (offset, target) = (offset + here as u64, later);
        }
        Ok(())
    }

    /// Reads and checks the blocks that hold `bytes` bytes from `offset` on.
    fn check(&mut self, offset: u64, bytes: u64) -> Result<()> {
        let end = offset + bytes;
        if end > self.bytes {
            return Err(Error::checkpoint(self.path, format!("torn: it ends at byte {}", self.bytes)));
        }
        for block in offset / BLOCK..end.div_ceil(BLOCK) {
            if self.current != Some(block) {
                self.load(block)?;
            }
        }
        Ok(())
    }

    fn load(&mut self, block: u64) -> Result<()> {
        self.current = None;
        let begin = block * BLOCK;
        self.buffer.resize(self.bytes.saturating_sub(begin).min(BLOCK) as usize, 0);
        self.file.read_exact_at(&mut self.buffer, begin).at("read", self.path)?;
        if let Some(digest) = self.digest
            && !digest.holds(block, &self.buffer)
        {
            let last = begin + self.buffer.len() as u64;
            let reason =
                format!("damaged: the BLAKE3 of bytes {begin} to {last} is not that of what was written");
            return Err(Error::checkpoint(self.path, reason));
        }
        self.current = Some(block);
        Ok(())
    }
}

/// The header of a safetensors file may have so many bytes, as in the format's own library.
const LONGEST_HEADER: u64 = 100_000_000;

/// The tensors of a safetensors file. Reads its header only, and no more than the file has.
pub(super) fn tensors_of(path: &Path) -> Result<Vec<TensorEntry>> {
    let refused = |reason: String| Error::checkpoint(path, format!("not a safetensors file: {reason}"));
    let file = isobar_files::open(path).at("open", path)?;
    let bytes = file.metadata().at("look at", path)?.len();
    let mut length = [0; 8];
    if bytes < 8 {
        return Err(refused(format!("it has {bytes} bytes")));
    }
    file.read_exact_at(&mut length, 0).at("read", path)?;
    let length = u64::from_le_bytes(length);
    if length > (bytes - 8).min(LONGEST_HEADER) {
        return Err(refused(format!("its header would have {length} bytes, of {bytes}")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact_at(&mut header, 8).at("read", path)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| refused(error.to_string()))?;
    let data = 8 + length;
    if metadata.data_len() as u64 != bytes - data {
        return Err(refused(format!(
            "its header tells of {} bytes of data, it has {}",
            metadata.data_len(),
            bytes - data
        )));
    }
    let entry = |name: String| -> Option<TensorEntry> {
        let info = metadata.info(&name)?;
        let shape: Vec<i64> =
            info.shape.iter().map(|&extent| i64::try_from(extent).ok()).collect::<Option<_>>()?;
        let (begin, end) = info.data_offsets;
        let part = BoxEntry {
            file: 0,
            key: name.clone(),
            region: Region::whole(&shape),
            bytes: [data + begin as u64, data + end as u64],
        };
        let dtype: Dtype = info.dtype;
        let boxes = if begin == end { Vec::new() } else { vec![part] };
        Some(TensorEntry { name, dtype, shape, boxes })
    };
    Ok(metadata.offset_keys().into_iter().filter_map(entry).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tensor alone if it is large, else with its neighbours: so much of a checkpoint is in memory beside the state.
    #[test]
    fn boxes_are_read_a_few_at_a_time() {
        let opened = Opened { path: PathBuf::new(), files: Vec::new(), tensors: Vec::new(), manifest: None };
        let mebibytes = [40, 1, 2, 13, 1, 0, 15, 1];
        let tensors = mebibytes.iter().enumerate().map(|(at, size)| SavedTensor {
            name: at.to_string(),
            kind: Kind::Float,
            shape: vec![size << 18],
        });
        let index = CheckpointIndex { path: PathBuf::new(), tensors: tensors.collect(), facts: None };
        let want = |tensor: &SavedTensor| ReadRequest {
            name: tensor.name.clone(),
            region: Region::whole(&tensor.shape),
        };
        let wanted: Vec<ReadRequest> = index.tensors.iter().map(want).collect();
        let saved = SavedShards { opened: &opened, index: &index, wanted: &wanted };
        let (mut next, mut ends) = (0, Vec::new());
        while next < wanted.len() {
            next = saved.together(next..wanted.len());
            ends.push(next);
        }
        assert_eq!(ends, [1, 4, 7, 8]);
    }
}
