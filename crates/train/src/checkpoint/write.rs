//! Writing: each rank its file and a note that it is whole, then rank 0 the manifest, which makes it a checkpoint.
//!
//! Ranks talk through the file system alone, so that all this can go on beside training.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use isobar_torch::memory::copy_no_grad;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::digest::{FileDigest, FileHasher};
use super::dtype::kind;
use super::manifest::{FORMAT, FileEntry, Manifest, VERSION};
use super::news::{News, Parts};
use super::plan::Plan;
use super::retention::{self, Keep};
use super::{RunState, folder};
use crate::error::{Context, Error, IoContext, Result};
use crate::files;
use crate::folders::MANIFEST;
use crate::run_folder::Unsaved;

/// A rank's part of a save.
pub(super) struct Job {
    /// The folder of all checkpoints, and that of this one.
    pub(super) root: PathBuf,
    pub(super) folder: PathBuf,
    pub(super) nonce: String,
    pub(super) suffix: String,
    pub(super) rank: usize,
    /// Boxes that this rank writes, in the order of the file.
    pub(super) items: Vec<Item>,
    /// Additional work of rank 0.
    pub(super) lead: Option<Lead>,
}

/// A box and its values: in host memory if they are written while training goes on, otherwise wherever the tensor is.
pub(super) struct Item {
    pub(super) key: String,
    pub(super) dtype: Dtype,
    pub(super) tensor: Tensor,
}

/// Data that rank 0 needs to write the manifest.
pub(super) struct Lead {
    pub(super) plan: Arc<Plan>,
    pub(super) world_size: usize,
    pub(super) facts: serde_json::Value,
    pub(super) state: RunState,
    pub(super) keep: Keep,
    /// Time for the other ranks' notes to become visible once all ranks have reported that they wrote them.
    pub(super) timeout: Duration,
    /// Reports of the ranks.
    pub(super) news: News,
    /// A run that starts from the beginning, until this checkpoint.
    pub(super) unsaved: Option<Arc<Unsaved>>,
}

/// Time for the other ranks' notes where the run ends with an error.
const ABANDONED: Duration = Duration::from_secs(2);
/// Bytes of the longest note that is read: it holds 67 bytes for each MiB of a rank's file.
const LONGEST_NOTE: u64 = 1 << 30;
/// Between two looks for the other ranks' notes.
const LOOK: Duration = Duration::from_millis(5);

/// A rank's note beside its file: that it is written, or why it is not.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    nonce: String,
    file: String,
    /// Offset of the tensors' bytes in the file.
    data: u64,
    written: std::result::Result<FileDigest, String>,
}

impl Job {
    /// Writes this rank's file and note. A failure is noted too, as far as that is possible.
    pub(super) fn write_part(&self) -> Result<()> {
        if self.items.is_empty() && self.lead.is_none() {
            return Ok(());
        }
        folder::refuse_link(&self.folder)?;
        std::fs::create_dir_all(&self.folder).at("make the folder", &self.folder)?;
        if self.items.is_empty() {
            return Ok(());
        }
        let file = folder::rank_file(self.rank, &self.suffix);
        let note = |data, written| Note { nonce: self.nonce.clone(), file: file.clone(), data, written };
        match write_tensors(&self.folder.join(&file), &self.items) {
            Ok((data, digest)) => self.leave(&note(data, Ok(digest))),
            Err(error) => {
                let told = self.leave(&note(0, Err(error.to_string())));
                if let Err(second) = told {
                    tracing::warn!(
                        "rank 0 is not told that this rank's part of a checkpoint failed: {second}"
                    );
                }
                Err(error)
            }
        }
    }

    fn leave(&self, note: &Note) -> Result<()> {
        let path = self.folder.join(folder::note_file(self.rank));
        let json = serde_json::to_vec(note).map_err(std::io::Error::from).at("encode", &path)?;
        files::write_atomically(&path, &json)
    }

    /// On rank 0, once all parts are written: makes the folder a checkpoint, and removes the others that need not stay.
    pub(super) fn commit(&self) -> Result<()> {
        let Some(lead) = &self.lead else { return Ok(()) };
        // Failing to remove old files is no reason to lose this checkpoint.
        let swept = |what: &str, result: Result<()>| {
            if let Err(error) = result {
                tracing::warn!("{what}: {error}");
            }
        };
        swept("an interrupted checkpoint stays", folder::sweep(&self.root, Some(&self.folder)));
        let notes = self.notes(lead)?;
        let mut entries = Vec::new();
        let mut data = BTreeMap::new();
        for (rank, note) in notes {
            let digest = note.written.map_err(|reason| self.failed_rank(rank, reason))?;
            data.insert(rank, (entries.len(), note.data));
            entries.push(FileEntry { name: note.file, digest });
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let manifest = Manifest {
            blake3: String::new(),
            format: FORMAT.to_owned(),
            version: VERSION,
            isobar: env!("CARGO_PKG_VERSION").to_owned(),
            libtorch: isobar_torch::libtorch_version(),
            nonce: self.nonce.clone(),
            saved_at: now.as_secs(),
            world_size: lead.world_size,
            files: entries,
            tensors: lead.plan.entries(&data),
            facts: lead.facts.clone(),
            state: lead.state.clone(),
        };
        write_manifest(&self.folder, &manifest)?;
        files::sync_folders(&self.root)?;
        if let Some(unsaved) = &lead.unsaved {
            swept("results of an earlier run stay", unsaved.end());
        }
        swept("files of an earlier save stay", folder::tidy(&self.folder, &manifest));
        swept("a checkpoint that need not stay does", retention::prune(&self.root, lead.keep, &self.folder));
        Ok(())
    }

    /// The writing ranks' notes of this save, in rank order; waits for them.
    fn notes(&self, lead: &Lead) -> Result<Vec<(usize, Note)>> {
        let mut notes = Vec::new();
        for rank in lead.plan.writers() {
            let path = self.folder.join(folder::note_file(rank));
            let note = loop {
                // Read before looking, so that a note written before the report is seen.
                let news = lead.news.get();
                // A file of an earlier save, or none yet, is not what is waited for.
                let read = isobar_files::read(&path, LONGEST_NOTE).ok();
                let read = read.and_then(|json| serde_json::from_slice::<Note>(&json).ok());
                if let Some(note) = read.filter(|note| note.nonce == self.nonce) {
                    break note;
                }
                self.still_expected(rank, &news, lead.timeout)?;
                std::thread::sleep(LOOK);
            };
            notes.push((rank, note));
        }
        Ok(notes)
    }

    /// Returns whether a rank's note may still come, given the ranks' reports.
    fn still_expected(&self, rank: usize, news: &Parts, timeout: Duration) -> Result<()> {
        match news {
            Parts::Failed { rank, reason } => Err(self.failed_rank(*rank, reason.clone())),
            Parts::Written(since) if since.elapsed() > timeout => Err(self.failed_rank(
                rank,
                format!(
                    "it has written its part, which rank 0 does not see in {} after {timeout:?}; checkpoints must be in a folder \
                     that all ranks share",
                    self.folder.display()
                ),
            )),
            Parts::Abandoned(since) if since.elapsed() > ABANDONED => {
                Err(self.failed_rank(rank, "the run ended before its part was written".to_owned()))
            }
            _ => Ok(()),
        }
    }

    fn failed_rank(&self, rank: usize, reason: String) -> Error {
        if rank == self.rank {
            return Error::checkpoint(&self.folder, reason);
        }
        Error::OtherRankFile { rank, group: "world".to_owned(), reason }
    }
}

/// Puts the manifest in its place: from now on the folder is a checkpoint.
pub(super) fn write_manifest(folder: &Path, manifest: &Manifest) -> Result<()> {
    let path = folder.join(MANIFEST);
    let bytes = manifest.encode().at("encode", &path)?;
    // The entries of the tensors' files, before that of the manifest.
    files::sync_folder(folder)?;
    files::write_atomically(&path, &bytes)
}

/// Writes a safetensors file and waits until it is on disk; where its data begin, and its digest.
pub(super) fn write_tensors(path: &Path, items: &[Item]) -> Result<(u64, FileDigest)> {
    let shapes: Vec<(&str, Dtype, Vec<i64>)> =
        items.iter().map(|item| (item.key.as_str(), item.dtype, item.tensor.size())).collect();
    let mut writer = TensorWriter::create(path, &shapes)?;
    for item in items {
        // One at a time: host memory holds a copy of one tensor at most.
        writer.tensor(&item.key, &in_host_memory(&item.key, &item.tensor)?)?;
    }
    writer.finish()
}

/// A safetensors file that is written tensor by tensor, its digest computed on the way.
pub(super) struct TensorWriter {
    path: PathBuf,
    file: BufWriter<File>,
    hasher: FileHasher,
    data: u64,
    buffer: Vec<u8>,
}

impl TensorWriter {
    /// Begins a file of tensors of these names, types and shapes, which must come in this order.
    pub(super) fn create(path: &Path, tensors: &[(&str, Dtype, Vec<i64>)]) -> Result<Self> {
        let header = header(tensors)
            .map_err(|reason| Error::invalid("the tensors of a file", reason, "what safetensors can hold"))?;
        let file = BufWriter::with_capacity(CHUNK, files::create(path)?);
        let hasher = FileHasher::new();
        let data = header.len() as u64;
        let mut writer = Self { path: path.to_owned(), file, hasher, data, buffer: Vec::new() };
        writer.bytes(&header)?;
        Ok(writer)
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.hasher.update(bytes);
        self.file.write_all(bytes).at("write", &self.path)
    }

    /// The values of a tensor in host memory, row by row.
    pub(super) fn tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let context = || format!("writing tensor {name:?}");
        let width = tensor.kind().elt_size_in_bytes();
        let (flat, chunk) = (tensor.f_reshape([-1]).context(context)?, (CHUNK / width) as i64);
        let elements = flat.numel() as i64;
        let mut buffer = std::mem::take(&mut self.buffer);
        for start in (0..elements).step_by(chunk as usize) {
            let part = flat.f_narrow(0, start, chunk.min(elements - start)).context(context)?;
            buffer.resize(part.numel() * width, 0);
            part.f_copy_data_u8(&mut buffer, part.numel()).context(context)?;
            self.bytes(&buffer)?;
        }
        self.buffer = buffer;
        Ok(())
    }

    /// Waits until the file is on disk.
    pub(super) fn finish(self) -> Result<(u64, FileDigest)> {
        let file =
            self.file.into_inner().map_err(std::io::IntoInnerError::into_error).at("write", &self.path)?;
        file.sync_all().at("sync", &self.path)?;
        Ok((self.data, self.hasher.finish()))
    }
}

/// Bytes that are copied, hashed and written at a time: so few that they stay in the cache.
const CHUNK: usize = 1 << 18;

/// Length and header of a safetensors file, padded so that the data are aligned.
fn header(tensors: &[(&str, Dtype, Vec<i64>)]) -> std::result::Result<Vec<u8>, String> {
    let mut end = 0;
    let infos = tensors.iter().map(|(name, dtype, shape)| {
        let shape: Vec<usize> = shape.iter().map(|&extent| extent as usize).collect();
        let begin = end;
        end += shape.iter().product::<usize>() * (dtype.bitsize() / 8);
        ((*name).to_owned(), TensorInfo { dtype: *dtype, shape, data_offsets: (begin, end) })
    });
    let metadata = Metadata::new(None, infos.collect()).map_err(|error| error.to_string())?;
    let mut json = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}

/// Host memory that a save copies tensors to, kept for the next one.
#[derive(Default)]
pub(super) struct Staging(Vec<Tensor>);

impl Staging {
    /// Copies of tensors, each of the dtype and shape of the one before in its place, if possible into its memory. Memory for
    /// tensors of a GPU is pinned.
    pub(super) fn copy(&mut self, tensors: &[(String, Tensor)]) -> Result<Vec<Tensor>> {
        self.0.truncate(tensors.len());
        for (at, (name, source)) in tensors.iter().enumerate() {
            let context = || format!("copying {name:?} to host memory");
            let fits = |old: &Tensor| (old.kind(), old.size()) == (source.kind(), source.size());
            if !self.0.get(at).is_some_and(fits) {
                let fresh = Tensor::f_empty(source.size(), (source.kind(), Device::Cpu)).context(context)?;
                let fresh = match source.device() {
                    Device::Cpu => fresh,
                    device => fresh.f_pin_memory(device).context(context)?,
                };
                self.0.truncate(at);
                self.0.push(fresh);
            }
            copy_no_grad(&self.0[at], source, false)?;
        }
        Ok(self.0.iter().map(Tensor::shallow_clone).collect())
    }
}

/// A tensor's values in host memory, row by row; the tensor itself where they lie so.
fn in_host_memory(name: &str, tensor: &Tensor) -> Result<Tensor> {
    let host = tensor
        .f_detach()
        .and_then(|tensor| tensor.f_to_device(Device::Cpu))
        .and_then(|tensor| tensor.f_resolve_conj())
        .and_then(|tensor| tensor.f_contiguous());
    host.context(|| format!("copying {name:?} to host memory"))
}

/// An item of a box, whose values have the dtype of the plan.
pub(super) fn item(key: String, dtype: Dtype, tensor: Tensor) -> Result<Item> {
    let expected: Option<Kind> = kind(dtype);
    match expected == Some(tensor.kind()) {
        true => Ok(Item { key, dtype, tensor }),
        false => Err(Error::invalid(
            format!("tensor {key:?}"),
            format!("{:?}", tensor.kind()),
            format!("{dtype:?}"),
        )),
    }
}
