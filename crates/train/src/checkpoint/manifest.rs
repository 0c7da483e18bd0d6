//! `manifest.json`: what makes a folder a checkpoint. It says which boxes of which tensors are where, and holds the digests
//! of all files, its own included.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};

use super::RunState;
use super::digest::FileDigest;
use super::tensor_shard::{Region, check_tiling};
use crate::error::{Error, Result};
use crate::folders::{self, MANIFEST, METADATA_OF_OLD};

pub(super) const FORMAT: &str = "isobar-checkpoint";
pub(super) const VERSION: u64 = 3;

/// Bytes of the longest manifest: two million boxes of tensors have about as many.
const LONGEST: u64 = 512 << 20;

/// Start of the file; the digits of its own digest follow.
const PREFIX: &[u8] = br#"{"blake3":""#;
const DIGITS: usize = 64;

/// The contents of the file. `blake3` comes first: it is that of the file's bytes with its own digits replaced by zeros.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub(super) blake3: String,
    pub(super) format: String,
    pub(super) version: u64,
    /// The version of this crate that wrote it.
    pub(super) isobar: String,
    /// The version of libtorch that it was built with.
    #[serde(default)]
    pub(super) libtorch: String,
    /// Drawn anew for each save: tells files of one save from those of another.
    pub(super) nonce: String,
    /// Seconds since 1970.
    pub(super) saved_at: u64,
    /// Number of ranks that wrote it; any number may read it.
    pub(super) world_size: usize,
    pub(super) files: Vec<FileEntry>,
    pub(super) tensors: Vec<TensorEntry>,
    /// Facts saved with the tensors: the optimizer's kind and steps.
    pub(super) facts: serde_json::Value,
    pub(super) state: RunState,
}

/// A file of tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEntry {
    pub(super) name: String,
    pub(super) digest: FileDigest,
}

/// A global tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorEntry {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<i64>,
    pub(super) boxes: Vec<BoxEntry>,
}

/// A box of a tensor: in which file, under which key, at which bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BoxEntry {
    /// Index into the files.
    pub(super) file: usize,
    pub(super) key: String,
    pub(super) region: Region,
    /// The first byte in the file and the one after the last.
    pub(super) bytes: [u64; 2],
}

impl TensorEntry {
    pub(super) fn element_bytes(&self) -> u64 {
        self.dtype.bitsize() as u64 / 8
    }
}

impl Manifest {
    /// Returns the file's bytes with its digest; rejects more than [`Manifest::read`] accepts.
    pub(super) fn encode(&self) -> std::io::Result<Vec<u8>> {
        let unsealed = Self { blake3: "0".repeat(DIGITS), ..self.clone() };
        let mut bytes = serde_json::to_vec(&unsealed)?;
        if bytes.len() as u64 > LONGEST {
            let reason = format!("{} bytes, of at most {LONGEST}; write from fewer ranks", bytes.len());
            return Err(std::io::Error::new(ErrorKind::FileTooLarge, reason));
        }
        let digest = blake3::hash(&bytes).to_hex();
        bytes[PREFIX.len()..PREFIX.len() + DIGITS].copy_from_slice(digest.as_bytes());
        Ok(bytes)
    }

    /// The manifest of a folder, found whole and of this version.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(MANIFEST);
        if !path.exists() && folder.join(METADATA_OF_OLD).exists() {
            let reason = format!(
                "it is of an earlier version, this program reads {VERSION}; use the version that wrote it"
            );
            return Err(Error::checkpoint(folder, reason));
        }
        let bytes = isobar_files::read(&path, LONGEST).map_err(|error| match error.kind() {
            ErrorKind::FileTooLarge => Error::checkpoint(&path, error.to_string()),
            _ => Error::Io { action: "read", path: path.clone(), source: error },
        })?;
        let manifest = Self::decode(&path, &bytes)?;
        let step = manifest.state.step;
        match folders::step_of(folder).filter(|&named| named != step) {
            None => Ok(manifest),
            Some(_) => {
                let expected = folders::step_folder(step);
                Err(Error::checkpoint(folder, format!("it is of step {step}; expected the name {expected}")))
            }
        }
    }

    pub(super) fn decode(path: &Path, bytes: &[u8]) -> Result<Self> {
        let refused = |reason: String| Error::checkpoint(path, reason);
        let digits = PREFIX.len()..PREFIX.len() + DIGITS;
        if !bytes.starts_with(PREFIX) || bytes.len() < digits.end {
            return Err(refused(foreign(bytes)));
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(PREFIX).update(&[b'0'; DIGITS]).update(&bytes[digits.end..]);
        if hasher.finalize().to_hex().as_bytes() != &bytes[digits] {
            return Err(refused("torn or damaged: its BLAKE3 is not that of what was written".to_owned()));
        }
        let head: Head = serde_json::from_slice(bytes).map_err(|e| refused(format!("foreign: {e}")))?;
        if head.format != FORMAT {
            return Err(refused(format!("foreign: its format is {:?}, expected {FORMAT:?}", head.format)));
        }
        if head.version != VERSION {
            return Err(refused(format!("its version is {}, this program reads {VERSION}", head.version)));
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(|e| refused(format!("foreign: {e}")))?;
        manifest.check().map_err(|reason| refused(format!("it contradicts itself: {reason}")))?;
        Ok(manifest)
    }

    /// Checks that its contents are consistent, so that readers may rely on them: a digest does not prove that.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        let mut names = HashSet::new();
        for file in &self.files {
            if !is_plain(&file.name) || !names.insert(&file.name) {
                return Err(format!("file {:?} is no name of its own in the folder", file.name));
            }
            file.digest.check().map_err(|problem| format!("file {:?} {problem}", file.name))?;
        }
        let mut ranges = vec![Vec::new(); self.files.len()];
        let mut tensors = HashSet::new();
        for tensor in &self.tensors {
            let wrong = |problem: String| format!("tensor {:?}: {problem}", tensor.name);
            if !tensors.insert(&tensor.name) {
                return Err(wrong("it is listed twice".to_owned()));
            }
            check_size(tensor).map_err(wrong)?;
            for part in &tensor.boxes {
                self.check_box(tensor, part).map_err(wrong)?;
                ranges[part.file].push(part.bytes);
            }
            let regions: Vec<&Region> = tensor.boxes.iter().map(|part| &part.region).collect();
            check_tiling(&tensor.shape, &regions).map_err(wrong)?;
        }
        for (file, ranges) in self.files.iter().zip(&mut ranges) {
            ranges.sort_unstable();
            if let Some(pair) = ranges.windows(2).find(|pair| pair[0][1] > pair[1][0]) {
                return Err(format!("bytes {:?} and {:?} of file {:?} overlap", pair[0], pair[1], file.name));
            }
        }
        Ok(())
    }

    fn check_box(&self, tensor: &TensorEntry, part: &BoxEntry) -> std::result::Result<(), String> {
        if !part.region.is_within(&tensor.shape) {
            return Err(format!("its box {:?} is not within its shape {:?}", part.region, tensor.shape));
        }
        let Some(file) = self.files.get(part.file) else {
            return Err(format!("its box is in file {}, of {} files", part.file, self.files.len()));
        };
        let [begin, end] = part.bytes;
        let expected = part.region.elements() as u64 * tensor.element_bytes();
        if begin > end || end > file.digest.bytes || end - begin != expected {
            return Err(format!(
                "its box is at bytes {begin} to {end} of a file of {}, expected {expected} bytes",
                file.digest.bytes
            ));
        }
        Ok(())
    }
}

/// Fields that are checked before the others.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u64,
}

fn foreign(bytes: &[u8]) -> String {
    match serde_json::from_slice::<serde_json::Value>(bytes) {
        Err(error) => format!("torn or foreign: {error}"),
        Ok(value) => {
            let found = value.get("format").map_or("missing".to_owned(), ToString::to_string);
            format!("foreign: its format is {found}, expected {FORMAT:?}")
        }
    }
}

/// A name of a file in the folder itself: nothing that leads elsewhere.
fn is_plain(name: &str) -> bool {
    let path = PathBuf::from(name);
    path.file_name().is_some_and(|last| last == path.as_os_str()) && name != MANIFEST
}

fn check_size(tensor: &TensorEntry) -> std::result::Result<(), String> {
    if !tensor.dtype.bitsize().is_multiple_of(8) {
        return Err(format!("its elements of type {:?} are no whole bytes", tensor.dtype));
    }
    let elements = tensor
        .shape
        .iter()
        .try_fold(1i64, |product, &extent| if extent < 0 { None } else { product.checked_mul(extent) });
    match elements.and_then(|n| n.checked_mul(tensor.element_bytes() as i64)) {
        Some(_) => Ok(()),
        None => Err(format!("its shape {:?} is none", tensor.shape)),
    }
}
