//! Reading: the byte ranges of the boxes that a rank wants, each checked by the digests of the blocks that it lies in.

use std::collections::BTreeMap;
use std::fs::File;
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
        let index: BTreeMap<&str, &TensorEntry> =
            self.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let mut targets = Vec::with_capacity(wanted.len());
        // Copies by file and offset, so that a file is read from start to end.
        let mut copies: BTreeMap<(usize, u64), Vec<(usize, &BoxEntry)>> = BTreeMap::new();
        for (at, want) in wanted.iter().enumerate() {
            let refused = |reason: String| Error::checkpoint(&self.path, reason);
            let tensor = index
                .get(want.name.as_str())
                .ok_or_else(|| refused(format!("tensor {:?} is missing", want.name)))?;
            if !want.region.is_within(&tensor.shape) {
                return Err(refused(format!("tensor {:?} is of shape {:?}", want.name, tensor.shape)));
            }
            for part in &tensor.boxes {
                if part.region.intersection(&want.region).is_some() {
                    copies.entry((part.file, part.bytes[0])).or_default().push((at, part));
                }
            }
            let bytes = want.region.elements() as u64 * tensor.element_bytes();
            targets.push((*tensor, vec![0u8; bytes as usize]));
        }
        let mut open: Option<(usize, Blocks<'_>)> = None;
        for ((file, _), parts) in copies {
            if open.as_ref().is_none_or(|(current, _)| *current != file) {
                let (path, digest) = &self.files[file];
                open = Some((file, Blocks::open(path, digest.as_ref())?));
            }
            let Some((_, blocks)) = &mut open else { continue };
            for (at, part) in parts {
                let (tensor, target) = &mut targets[at];
                let (width, wanted) = (tensor.element_bytes() as usize, &wanted[at].region);
                let Some(common) = part.region.intersection(wanted) else { continue };
                runs(&common, &part.region, wanted, |source, to, elements| {
                    let to = to as usize * width;
                    let target = &mut target[to..to + elements as usize * width];
                    blocks.read(part.bytes[0] + (source as usize * width) as u64, target)
                })?;
            }
        }
        let mut shards = Vec::with_capacity(wanted.len());
        for (want, (tensor, bytes)) in wanted.iter().zip(targets) {
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
