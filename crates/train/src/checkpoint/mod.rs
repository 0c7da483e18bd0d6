//! Checkpoints: parameters and optimizer state as safetensors, the rest as JSON, loadable on any number of ranks.
//!
//! A checkpoint is a folder `step_<number>` of three files: `model.safetensors` (the state dict), `optimizer.safetensors`
//! (tensors named `<slot>.<parameter>`) and `metadata.json` (format, versions, [`RunState`], and the length and CRC-32C
//! of the other two, by which a torn copy is found out). It is written under another name, synced and renamed; the files
//! `latest` and `best` beside it hold the name of a folder and are replaced in the same way. Tensors are always whole:
//! parts over a model-parallel group are gathered before writing and cut again after reading.

mod read;
mod tensors;
mod write;

use std::path::{Path, PathBuf};

use isobar_collectives::Group;
use serde::{Deserialize, Serialize};
use tch::Tensor;

pub use self::read::{load_state_dict, read_run_state};
use crate::agree::agree;
use crate::config::Resume;
use crate::error::{IoContext, Result};
use crate::files;
use crate::optim::Optimizer;
use crate::params::Parameters;

/// Where a run stands, apart from its tensors.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// Optimizer steps taken.
    pub step: u64,
    /// Whole epochs taken.
    pub epoch: u64,
    /// Batches of the epoch under way that have been taken.
    pub batch: u64,
    /// The seed of the run.
    pub seed: u64,
    /// Number of training samples, which with the batch size says what `step` and `batch` count.
    pub samples: u64,
    /// Samples of a step, over all ranks together.
    pub batch_size: u64,
    /// Sum of the losses of the samples of the epoch under way, and their number.
    pub loss_sum: f64,
    /// See `loss_sum`.
    pub loss_samples: u64,
    /// The lowest validation error so far.
    pub best: Option<f64>,
    /// The resolved configuration, as TOML.
    pub config: String,
    /// What else the program needs to use the model, for instance the normalizer's statistics.
    pub extra: serde_json::Value,
}

/// What a checkpoint saves and restores; the run's own objects.
pub struct Contents<'a> {
    /// The parameters.
    pub params: &'a Parameters,
    /// Tensors that are no parameters but belong to the state dict (running statistics), by name; the same on all ranks.
    pub buffers: &'a [(String, Tensor)],
    /// The optimizer.
    pub optimizer: &'a mut dyn Optimizer,
}

/// Writes and finds the checkpoints of a run.
///
/// ```
/// use isobar_collectives::Group;
/// use isobar_train::checkpoint::{Checkpoints, Contents, RunState};
/// use isobar_train::optim::{AdamW, AdamWConfig};
/// use isobar_train::{Parameter, Parameters};
/// use tch::Tensor;
///
/// let folder = tempfile::tempdir()?;
/// let x = Tensor::f_from_slice(&[1.0f32, 2.0])?.f_set_requires_grad(true)?;
/// let params = Parameters::new(vec![Parameter::replicated("x", &x)])?;
/// let mut adamw = AdamW::new(&params, &AdamWConfig::default())?;
/// let mut contents = Contents { params: &params, buffers: &[], optimizer: &mut adamw };
///
/// let checkpoints = Checkpoints::new(folder.path(), 3, &Group::single());
/// checkpoints.save(&mut contents, &RunState { step: 7, ..Default::default() }, false)?;
/// let path = checkpoints.latest()?;
/// assert_eq!(checkpoints.load(&path, &mut contents)?.step, 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
    world: Group,
}

impl Checkpoints {
    /// Checkpoints in `folder`, which the first save makes, of which the newest `keep` and the best stay (0 keeps all).
    /// `world` is the group of all ranks of the run.
    pub fn new(folder: &Path, keep: usize, world: &Group) -> Self {
        Self { folder: folder.to_owned(), keep, world: world.clone() }
    }

    /// Writes a checkpoint and makes it the latest, and with `best` the best too. Rank 0 writes; every rank calls, and
    /// the call returns when the files are on disk.
    ///
    /// # Errors
    ///
    /// On every rank where any failed: the disk is full, a tensor's kind has no place in safetensors, a rank is lost.
    pub fn save(&self, contents: &mut Contents<'_>, state: &RunState, best: bool) -> Result<PathBuf> {
        let path = self.folder.join(format!("step_{:08}", state.step));
        let gathered = agree(&self.world, write::gather(contents, &self.world))?;
        let written = match gathered {
            Some(gathered) => self.write(&path, &gathered, state, best),
            None => Ok(()),
        };
        agree(&self.world, written)?;
        Ok(path)
    }

    /// The newest checkpoint's folder.
    ///
    /// # Errors
    ///
    /// [`crate::Error::NoCheckpoint`] where there is none; where `latest` names one that is gone.
    pub fn latest(&self) -> Result<PathBuf> {
        read::pointed_to(&self.folder, LATEST)
    }

    /// The folder of the checkpoint with the lowest validation error.
    ///
    /// # Errors
    ///
    /// As [`Checkpoints::latest`].
    pub fn best(&self) -> Result<PathBuf> {
        read::pointed_to(&self.folder, BEST)
    }

    /// Puts a checkpoint back into parameters, buffers and optimizer, whatever number of ranks wrote it. `path` is a
    /// checkpoint's folder, or one with `latest` in it. Every rank calls, and reads the files for itself.
    ///
    /// # Errors
    ///
    /// On every rank where any failed: [`crate::Error::Checkpoint`] for files that are torn, foreign, or of a model whose names,
    /// shapes or kinds differ (the reason lists them). Nothing is changed on a rank that fails.
    pub fn load(&self, path: &Path, contents: &mut Contents<'_>) -> Result<RunState> {
        agree(&self.world, read::load(path, contents))
    }

    /// Loads the latest checkpoint where `resume` says so; removes them all where it says to start anew. Every rank calls.
    ///
    /// # Errors
    ///
    /// As [`Checkpoints::load`]; [`crate::Error::NoCheckpoint`] where there must be one and is none.
    pub fn resume(&self, resume: Resume, contents: &mut Contents<'_>) -> Result<Option<RunState>> {
        // Rank 0 looks, so that all ranks do the same.
        let there = self.world.rank() == 0 && self.folder.join(LATEST).exists();
        let there = self.world.broadcast_bytes(&[u8::from(there)], 0)? == [1];
        match resume {
            Resume::Never if there => {
                let removed = if self.world.rank() == 0 { self.clear() } else { Ok(()) };
                agree(&self.world, removed).map(|()| None)
            }
            Resume::Never => Ok(None),
            Resume::Auto if !there => Ok(None),
            Resume::Auto | Resume::Must => self.load(&self.folder, contents).map(Some),
        }
    }

    /// Removes all checkpoints.
    fn clear(&self) -> Result<()> {
        tracing::warn!("checkpoints of an earlier run in {} are removed", self.folder.display());
        for pointer in [LATEST, BEST] {
            let path = self.folder.join(pointer);
            if path.exists() {
                std::fs::remove_file(&path).at("remove", &path)?;
            }
        }
        for (_, path) in self.steps()? {
            std::fs::remove_dir_all(&path).at("remove", &path)?;
        }
        Ok(())
    }

    fn write(&self, path: &Path, gathered: &write::Gathered, state: &RunState, best: bool) -> Result<()> {
        std::fs::create_dir_all(&self.folder).at("make the folder", &self.folder)?;
        write::write_folder(path, gathered, state, self.world.size())?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        files::write_atomically(&self.folder.join(LATEST), name.as_bytes())?;
        if best {
            files::write_atomically(&self.folder.join(BEST), name.as_bytes())?;
        }
        self.prune()
    }

    /// The folders of all checkpoints in rising order; removes what interrupted writes have left.
    fn steps(&self) -> Result<Vec<(u64, PathBuf)>> {
        let mut steps = Vec::new();
        for entry in std::fs::read_dir(&self.folder).at("list", &self.folder)? {
            let path = entry.at("list", &self.folder)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with(".step_") {
                std::fs::remove_dir_all(&path).at("remove", &path)?;
            } else if let Some(step) = name.strip_prefix("step_").and_then(|s| s.parse::<u64>().ok()) {
                steps.push((step, path));
            }
        }
        steps.sort();
        Ok(steps)
    }

    /// Removes all but the newest and the best.
    fn prune(&self) -> Result<()> {
        let best = self.best().ok();
        let mut steps = self.steps()?;
        if self.keep == 0 {
            return Ok(());
        }
        let latest = self.latest()?;
        steps.reverse();
        for (_, path) in steps.into_iter().skip(self.keep) {
            if Some(&path) != best.as_ref() && path != latest {
                std::fs::remove_dir_all(&path).at("remove", &path)?;
            }
        }
        Ok(())
    }
}

const LATEST: &str = "latest";
const BEST: &str = "best";
const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const METADATA: &str = "metadata.json";
const FORMAT: &str = "isobar-checkpoint";
const VERSION: u64 = 2;

/// `metadata.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Metadata {
    format: String,
    version: u64,
    /// The version of this crate that wrote it.
    isobar: String,
    /// How many ranks wrote it; any number may read it.
    world_size: usize,
    model_parallel_size: usize,
    model: FileRecord,
    optimizer: FileRecord,
    optimizer_kind: String,
    optimizer_steps: std::collections::BTreeMap<String, u64>,
    state: RunState,
}

/// By which a torn or changed file is found out.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct FileRecord {
    bytes: u64,
    crc32c: u32,
}

impl FileRecord {
    fn of(bytes: &[u8]) -> Self {
        Self { bytes: bytes.len() as u64, crc32c: crc32c::crc32c(bytes) }
    }
}

#[cfg(test)]
mod tests;
