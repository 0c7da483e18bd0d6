//! Choice of the checkpoint to load: the first in order that is whole on all ranks.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use isobar_collectives::Group;
use serde::{Deserialize, Serialize};

use super::contents::Checkpointed;
use super::manifest::Manifest;
use super::read::{CheckpointIndex, Opened, ReadRequest, SavedShards};
use super::retention::{best_first, comparable};
use super::{RunState, folder};
use crate::error::{Error, IoContext, Result};

/// Choice of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckpointSelector {
    /// The newest in the run's folder that is whole.
    Newest,
    /// The one in the run's folder with the lowest validation error, of those that are whole.
    Best,
    /// A checkpoint's folder, or a folder of checkpoints, of which the newest that is whole; or a safetensors file with a
    /// model's weights, as PyTorch's tools write it.
    At(PathBuf),
}

/// A checkpoint that was loaded.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// Its folder.
    pub path: PathBuf,
    /// State of its run; the default for a file of weights.
    pub state: RunState,
    /// Digest of its manifest, which holds those of its files; of the list of tensors for a file of weights.
    pub digest: String,
}

/// Loads the first checkpoint that is whole on all ranks, and warns of those that are not. All ranks call.
pub(super) fn load(
    root: &Path,
    which: &CheckpointSelector,
    contents: &mut dyn Checkpointed,
    world: &Group,
) -> Result<Loaded> {
    let (root, candidates) = candidates(root, which, world)?;
    let mut refusals = Vec::new();
    for path in &candidates {
        let own = read(path, contents);
        match settle(world, own)? {
            Verdict::Take(read) => {
                let Read { digest, state, opened, index, wanted, .. } = *read;
                let saved = SavedShards { opened: &opened, index: &index, wanted: &wanted };
                let restored = contents.restore(index.facts.as_ref(), &saved);
                crate::agree::agree(world, restored.map_err(|error| unfit(error, path)))?;
                if world.rank() == 0 {
                    refusals.iter().for_each(|reason| {
                        tracing::warn!("{reason}; {} is loaded in its place", path.display());
                    });
                }
                return Ok(Loaded { path: path.clone(), state, digest });
            }
            Verdict::Refuse(own) if candidates.len() == 1 => return Err(own),
            Verdict::Refuse(own) => refusals.push(own.to_string()),
        }
    }
    match refusals.is_empty() {
        true => Err(Error::no_checkpoint(&root)),
        false => Err(Error::checkpoint(&root, format!("none in it is whole: {}", refusals.join("; ")))),
    }
}

/// Names the checkpoint whose optimizer state does not fit.
fn unfit(error: Error, path: &Path) -> Error {
    match error {
        Error::OptimizerState { reason } => {
            let path = path.to_owned();
            let reason = format!(
                "its optimizer state does not fit: {reason}; or start a new run from its weights (--set run.name=NAME --set \
                 checkpoint.init={})",
                path.display()
            );
            Error::CheckpointUnfit { path, reason }
        }
        other => other,
    }
}

/// Returns rank 0's candidates on all ranks, in the order in which they are tried. All ranks must call.
pub(super) fn candidates(
    root: &Path,
    which: &CheckpointSelector,
    world: &Group,
) -> Result<(PathBuf, Vec<PathBuf>)> {
    let root = match which {
        CheckpointSelector::At(path) => folder::root_of(path),
        CheckpointSelector::Newest | CheckpointSelector::Best => folder::root_or_earlier(root),
    };
    // Names within the folder, which ranks may see at other places; nothing for the place itself.
    let found = if world.rank() == 0 { names(&root, which).map_err(|e| e.to_string()) } else { Ok(None) };
    let bytes = world.broadcast_bytes(&serde_json::to_vec(&found).unwrap_or_default(), 0)?;
    let told: std::result::Result<Option<Vec<String>>, String> = serde_json::from_slice(&bytes)
        .map_err(|error| Error::invalid("rank 0's list of checkpoints", error, "this program's words"))?;
    let names =
        told.map_err(|reason| Error::OtherRank { rank: 0, group: world.name().to_owned(), reason })?;
    let paths = match names {
        None => vec![root.clone()],
        Some(names) => names.iter().map(|name| root.join(name)).collect(),
    };
    Ok((root, paths))
}

fn names(root: &Path, which: &CheckpointSelector) -> Result<Option<Vec<String>>> {
    if matches!(which, CheckpointSelector::At(_)) && (root.is_file() || folder::is_checkpoint(root)) {
        return Ok(None);
    }
    let mut found = folder::checkpoints(root)?;
    if *which == CheckpointSelector::Best {
        let states: Vec<Option<RunState>> =
            found.iter().map(|path| Some(Manifest::read(path).ok()?.state)).collect();
        let errors = comparable(states.iter().map(Option::as_ref));
        found = best_first(&errors).into_iter().map(|at| found[at].clone()).collect();
    }
    let name = |path: &PathBuf| Some(path.file_name()?.to_string_lossy().into_owned());
    Ok(Some(found.iter().filter_map(name).collect()))
}

/// A checkpoint whose boxes for this rank are complete and undamaged.
struct Read {
    /// By which ranks see that they read the same.
    digest: String,
    /// A file of weights, which tells less of itself than a manifest: its tensors alone are in the digest.
    weights: Option<Weights>,
    state: RunState,
    opened: Opened,
    index: CheckpointIndex,
    wanted: Vec<ReadRequest>,
}

/// A file of weights.
struct Weights {
    path: PathBuf,
    /// Identity of a file, the same on all hosts that see it, and different for different files.
    identity: [i64; 4],
}

impl Weights {
    fn of(path: &Path) -> Result<Self> {
        let about = fs::metadata(path).at("look at", path)?;
        let identity =
            [about.ino().cast_signed(), about.size().cast_signed(), about.mtime(), about.mtime_nsec()];
        Ok(Self { path: path.to_owned(), identity })
    }

    /// Returns the digest of all its bytes.
    fn digest(&self) -> Result<String> {
        let file = isobar_files::open(&self.path).at("open", &self.path)?;
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(file).at("read", &self.path)?;
        Ok(hasher.finalize().to_hex().to_string())
    }
}

fn read(path: &Path, contents: &dyn Checkpointed) -> Result<Read> {
    let opened = if path.is_file() { Opened::weights(path)? } else { Opened::folder(path)? };
    opened.check_lengths()?;
    let index = opened.index()?;
    let wanted = contents.wanted(&index)?;
    // Before any rank changes anything.
    opened.check(&wanted)?;
    let (digest, weights, state) = match &opened.manifest {
        Some(manifest) => (manifest.blake3.clone(), None, manifest.state.clone()),
        None => {
            let tensors = serde_json::to_vec(&opened.tensors).unwrap_or_default();
            let digest = blake3::hash(&tensors).to_hex().to_string();
            (digest, Some(Weights::of(path)?), RunState::default())
        }
    };
    Ok(Read { digest, weights, state, opened, index, wanted })
}

/// Verdict of a rank on a checkpoint.
#[derive(Debug, Serialize, Deserialize)]
enum RankVerdict {
    /// It is whole as far as this rank needs it; its digest, and which file of weights it is.
    Whole(String, Option<[i64; 4]>),
    /// It is torn or damaged: another one may do.
    Torn(String),
    /// No other one would do.
    Failed(String),
}

enum Verdict {
    Take(Box<Read>),
    /// With this rank's reason, or another's.
    Refuse(Error),
}

/// Combines the ranks' verdicts. All ranks must call.
fn settle(world: &Group, own: Result<Read>) -> Result<Verdict> {
    let said = match &own {
        Ok(read) => {
            RankVerdict::Whole(read.digest.clone(), read.weights.as_ref().map(|weights| weights.identity))
        }
        // A file that is missing; one that cannot be read may be whole, and an older checkpoint would not do.
        Err(error @ Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
            RankVerdict::Torn(error.to_string())
        }
        Err(error @ Error::Checkpoint { .. }) => RankVerdict::Torn(error.to_string()),
        Err(error) => RankVerdict::Failed(error.to_string()),
    };
    let all = world.all_gather_bytes(&serde_json::to_vec(&said).unwrap_or_default())?;
    let mut reason = None;
    let mut found = Vec::new();
    for (rank, bytes) in all.iter().enumerate() {
        let said: RankVerdict = serde_json::from_slice(bytes)
            .map_err(|error| Error::invalid("another rank's checkpoint", error, "this program's words"))?;
        match said {
            RankVerdict::Whole(digest, identity) => found.push((digest, identity)),
            RankVerdict::Torn(why) => reason = reason.or(Some((rank, why))),
            RankVerdict::Failed(why) => {
                own?;
                return Err(Error::OtherRank { rank, group: world.name().to_owned(), reason: why });
            }
        }
    }
    if let Some((rank, reason)) = reason {
        let group = world.name().to_owned();
        return Ok(Verdict::Refuse(own.err().unwrap_or(Error::OtherRank { rank, group, reason })));
    }
    let own = own?;
    let differs = |rank| Error::CheckpointsDiffer { group: world.name().to_owned(), rank };
    if let Some(rank) = found.iter().position(|(digest, _)| *digest != found[0].0) {
        return Err(differs(rank));
    }
    if let Some(weights) = own.weights.as_ref().filter(|_| found.iter().any(|one| *one != found[0])) {
        // Several files, of which each host may have its own: they must be copies.
        let digest = weights.digest();
        let all = world.all_gather_bytes(digest.as_deref().unwrap_or_default().as_bytes())?;
        digest?;
        if let Some(rank) = all.iter().position(|digest| *digest != all[0]) {
            return Err(differs(rank));
        }
    }
    Ok(Verdict::Take(Box::new(own)))
}
