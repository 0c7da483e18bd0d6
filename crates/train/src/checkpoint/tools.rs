//! Checkpoints on disk, apart from any run: to look at, to check, to cut anew, to give away.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use isobar_collectives::balanced;
use isobar_files::NewFile;
use tch::Tensor;

use super::contents::{MODEL, average_of, state_dict_name};
use super::folder;
use super::manifest::{BoxEntry, FileEntry, Manifest, TensorEntry};
use super::read::{Opened, ReadRequest};
use super::tensor_shard::Region;
use super::write::{TensorWriter, write_manifest};
use crate::error::{Error, IoContext, Result};
use crate::files;

/// A checkpoint of a folder.
#[derive(Debug, Clone, PartialEq)]
pub struct Listed {
    /// Its folder.
    pub path: PathBuf,
    /// Summary of its manifest, or the reason for which it cannot be used, as far as that is visible without reading all of it.
    pub found: std::result::Result<Summary, String>,
}

/// Summary of a checkpoint's manifest.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Steps taken.
    pub step: u64,
    /// Time at which it was saved.
    pub saved_at: SystemTime,
    /// Bytes of its files of tensors.
    pub bytes: u64,
    /// Number of ranks that saved it.
    pub ranks: usize,
    /// The validation error, where it was measured after this step: the cost of the metric, if another one was named.
    pub validation_error: Option<f64>,
    /// Name of its metric; see [`RunState::validation_metric`](super::RunState::validation_metric).
    pub validation_metric: Option<String>,
}

impl Summary {
    fn of(manifest: &Manifest) -> Self {
        Self {
            step: manifest.state.step,
            saved_at: SystemTime::UNIX_EPOCH
                .checked_add(Duration::from_secs(manifest.saved_at))
                .unwrap_or(SystemTime::UNIX_EPOCH),
            bytes: manifest.files.iter().map(|file| file.digest.bytes).fold(0, u64::saturating_add),
            ranks: manifest.world_size,
            validation_error: manifest.state.validation_error,
            validation_metric: manifest.state.validation_metric.clone(),
        }
    }
}

/// The checkpoints of a folder, or the one that the folder is, newest first. Reads the manifests and looks at the lengths of
/// the files; [`verify`] reads all.
///
/// # Errors
///
/// [`Error::NoCheckpoint`] where there is none; a folder that cannot be read.
pub fn list(path: &Path) -> Result<Vec<Listed>> {
    let paths = match folder::is_checkpoint(path) {
        true => vec![path.to_owned()],
        false => folder::checkpoints(&folder::root_of(path))?,
    };
    if paths.is_empty() {
        return Err(Error::no_checkpoint(path));
    }
    let look = |path: PathBuf| {
        let opened = Opened::folder(&path).and_then(|opened| opened.check_lengths().map(|()| opened));
        let found = opened.map_err(|error| error.to_string()).and_then(|opened| {
            opened.manifest.as_ref().map(Summary::of).ok_or_else(|| "it has no manifest".to_owned())
        });
        Listed { path, found }
    };
    Ok(paths.into_iter().map(look).collect())
}

/// Reads every byte of a checkpoint and compares it with the digests.
///
/// # Errors
///
/// [`Error::Checkpoint`] with the file and the bytes that are not what was written.
///
/// ```no_run
/// let summary = isobar_train::checkpoint::verify("runs/run/checkpoints/step_00000040".as_ref())?;
/// assert_eq!(summary.step, 40);
/// # Ok::<(), isobar_train::Error>(())
/// ```
pub fn verify(path: &Path) -> Result<Summary> {
    let (opened, manifest) = open(path)?;
    opened.verify()?;
    Ok(Summary::of(&manifest))
}

/// Writes a checkpoint anew into the folder `out`, as `ranks` equal ranks would: of each tensor the rank's part is in the rank's
/// own file, cut along the dim that was cut before, or the first. Parts are [`balanced`], as those of parameters are.
/// `path` may be a folder of checkpoints, of which the newest whole one is meant.
///
/// # Errors
///
/// [`Error::Checkpoint`] for a checkpoint that is torn or damaged; [`Error::Invalid`] for no ranks, or a folder that is not
/// empty.
pub fn reshard(path: &Path, out: &Path, ranks: usize) -> Result<()> {
    if ranks == 0 {
        return Err(Error::invalid("the number of ranks", 0, "1 or more"));
    }
    let (opened, manifest) = open_newest(path)?;
    let step = manifest.state.step;
    if let Some(named) = folder::step_of(out).filter(|&named| named != step) {
        let expected = format!("step {step}; call it {}", folder::step_folder(step));
        return Err(Error::invalid(
            format!("the name of {}", out.display()),
            format!("step {named}"),
            expected,
        ));
    }
    if out.exists() && std::fs::read_dir(out).at("list", out)?.next().is_some() {
        return Err(Error::invalid(format!("the folder {}", out.display()), "not empty", "one of its own"));
    }
    std::fs::create_dir_all(out).at("make the folder", out)?;
    let written = cut(&opened, manifest, out, ranks);
    if written.is_err() {
        // Nothing of half of it.
        let _ = std::fs::remove_dir_all(out);
    }
    written
}

/// Writes the files of a checkpoint as `ranks` ranks would.
fn cut(opened: &Opened, manifest: Manifest, out: &Path, ranks: usize) -> Result<()> {
    let mut order: Vec<usize> = (0..manifest.tensors.len()).collect();
    order.sort_by_key(|&at| std::cmp::Reverse(manifest.tensors[at].element_bytes()));
    let mut files = Vec::new();
    let mut tensors: Vec<TensorEntry> =
        manifest.tensors.iter().map(|tensor| TensorEntry { boxes: Vec::new(), ..tensor.clone() }).collect();
    for rank in 0..ranks {
        let own: Vec<(usize, Region)> =
            order.iter().filter_map(|&at| Some((at, part(&manifest.tensors[at], rank, ranks)?))).collect();
        if own.is_empty() {
            continue;
        }
        let name = folder::rank_file(rank, "");
        let shapes: Vec<_> = own
            .iter()
            .map(|(at, region)| (tensors[*at].name.as_str(), tensors[*at].dtype, region.shape.clone()))
            .collect();
        let mut writer = TensorWriter::create(&out.join(&name), &shapes)?;
        for (at, region) in &own {
            copy(opened, &tensors[*at].name, region, &mut writer)?;
        }
        let (mut begin, digest) = writer.finish()?;
        for (at, region) in own {
            let end = begin + region.elements() as u64 * tensors[at].element_bytes();
            let key = tensors[at].name.clone();
            tensors[at].boxes.push(BoxEntry { file: files.len(), key, region, bytes: [begin, end] });
            begin = end;
        }
        files.push(FileEntry { name, digest });
    }
    write_manifest(out, &Manifest { world_size: ranks, files, tensors, ..manifest })?;
    files::sync_folders(out)
}

/// Writes the full parameters of a checkpoint, or their first averages if it has any, and its buffers to one safetensors file under
/// their state-dict names; PyTorch's tools load it. If `path` is a folder of checkpoints, the newest complete one is used.
///
/// # Errors
///
/// [`Error::Checkpoint`] for a checkpoint that is torn or damaged; a file that cannot be written.
pub fn export(path: &Path, out: &Path) -> Result<Exported> {
    let (opened, manifest) = open_newest(path)?;
    let averaged = manifest.tensors.iter().any(|tensor| {
        let average = tensor.name.strip_prefix(MODEL).map(average_of);
        average.is_some_and(|average| manifest.tensors.iter().any(|other| other.name == average))
    });
    let tensors = write_file(out, &manifest, |tensor| {
        let average = tensor.name.strip_prefix(MODEL).map(average_of);
        let averaged = average.filter(|average| manifest.tensors.iter().any(|other| other.name == *average));
        whole(&opened, averaged.as_ref().unwrap_or(&tensor.name), tensor)
    })?;
    Ok(Exported { tensors, checkpoint: opened.path().to_owned(), averaged })
}

/// Result of [`export`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// Number of tensors.
    pub tensors: usize,
    /// The checkpoint that they are of.
    pub checkpoint: PathBuf,
    /// True if parameters are averages over steps (`train.average_decay`, `train.average_widths`).
    pub averaged: bool,
}

/// Writes the tensors of a model's state dict, as `read` gives them, into one safetensors file. Returns their number.
pub(super) fn write_file(
    out: &Path,
    manifest: &Manifest,
    read: impl Fn(&TensorEntry) -> Result<Tensor>,
) -> Result<usize> {
    let mut own: Vec<(&str, &TensorEntry)> =
        manifest.tensors.iter().filter_map(|tensor| Some((state_dict_name(&tensor.name)?, tensor))).collect();
    own.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.element_bytes()));
    let shapes: Vec<_> =
        own.iter().map(|(name, tensor)| (*name, tensor.dtype, tensor.shape.clone())).collect();
    let new = NewFile::create(out).at("create", out)?;
    let mut writer = TensorWriter::create(new.path(), &shapes)?;
    for (name, tensor) in &own {
        writer.tensor(name, &read(tensor)?)?;
    }
    writer.finish()?;
    new.finish().at("rename a new file to", out)?;
    Ok(own.len())
}

/// Reads the full tensor `name`, which has the shape of `like`.
pub(super) fn whole(opened: &Opened, name: &str, like: &TensorEntry) -> Result<Tensor> {
    let wanted = ReadRequest { name: name.to_owned(), region: Region::whole(&like.shape) };
    let shard = opened.read(&[wanted])?.pop();
    shard.map(|shard| shard.tensor).ok_or_else(|| Error::invalid("the tensor", name, "one in the checkpoint"))
}

/// Opens all complete checkpoints of a folder, newest first, or the folder itself if it is a checkpoint; skips others with a warning.
pub(super) fn open_all(path: &Path) -> Result<Vec<(Opened, Manifest)>> {
    if folder::is_checkpoint(path) {
        return Ok(vec![open(path)?]);
    }
    let mut found = Vec::new();
    for path in folder::checkpoints(&folder::root_of(path))? {
        match open(&path) {
            Ok(whole) => found.push(whole),
            Err(error) => tracing::warn!("{error}; it is left out"),
        }
    }
    match found.is_empty() {
        true => Err(Error::no_checkpoint(path)),
        false => Ok(found),
    }
}

/// A checkpoint, or the newest whole one of a folder of them.
fn open_newest(path: &Path) -> Result<(Opened, Manifest)> {
    if folder::is_checkpoint(path) {
        return open(path);
    }
    let mut refused = None;
    for path in folder::checkpoints(&folder::root_of(path))? {
        match open(&path) {
            Ok(found) => return Ok(found),
            Err(error) => {
                tracing::warn!("{error}; the one before it is taken");
                refused.get_or_insert(error);
            }
        }
    }
    Err(refused.unwrap_or_else(|| Error::no_checkpoint(path)))
}

fn open(path: &Path) -> Result<(Opened, Manifest)> {
    let mut opened = Opened::folder(path)?;
    opened.check_lengths()?;
    match opened.manifest.take() {
        Some(manifest) => Ok((opened, manifest)),
        None => Err(Error::no_checkpoint(path)),
    }
}

fn copy(opened: &Opened, name: &str, region: &Region, writer: &mut TensorWriter) -> Result<()> {
    let wanted = ReadRequest { name: name.to_owned(), region: region.clone() };
    opened.read(&[wanted])?.iter().try_for_each(|shard| writer.tensor(name, &shard.tensor))
}

/// A rank's part of a tensor; nothing where it is empty.
fn part(tensor: &TensorEntry, rank: usize, ranks: usize) -> Option<Region> {
    if tensor.shape.is_empty() {
        return (rank == 0).then(|| Region::whole(&[]));
    }
    let starts = |dim: usize| tensor.boxes.iter().map(|part| part.region.start[dim]).collect::<BTreeSet<_>>();
    // Of equals the first dim.
    let dim = (0..tensor.shape.len()).rev().max_by_key(|&dim| starts(dim).len()).unwrap_or(0);
    let sizes = balanced(tensor.shape[dim], ranks);
    let region = Region::along(&tensor.shape, dim, sizes[..rank].iter().sum(), sizes[rank]);
    (region.elements() > 0).then_some(region)
}
