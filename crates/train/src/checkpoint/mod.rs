//! Checkpoints: written by all ranks, each its part; loadable on any number of ranks and any layout; torn ones found out.
//!
//! A checkpoint is a folder `step_<number>`: a file of safetensors for each rank that has something to write, and
//! `manifest.json`, which says which boxes of which global tensors are where ([`TensorShard`]), where the run stood ([`RunState`]),
//! and what the BLAKE3 of every file, of every MiB of it, and of the manifest itself is. The manifest comes last, renamed into
//! place with everything synced before: a folder without one is an interrupted write, which the next save removes.
//!
//! A reader takes the byte ranges that it needs, whoever wrote them, and checks the blocks that they lie in. A checkpoint
//! that is torn, damaged or foreign is refused with the reason, and the newest whole one is used.
//!
//! It depends on no model, task or loss.
//!
//! | | |
//! |---|---|
//! | [`Checkpoints`] | writes, finds and loads those of a run |
//! | [`Checkpointed`], [`Contents`] | what is saved and restored, as boxes of global tensors |
//! | [`list`], [`verify`], [`reshard`], [`export`], [`export_average`] | tools for checkpoints on disk |

mod average;
mod background;
mod contents;
mod digest;
mod dtype;
mod folder;
mod manifest;
mod news;
mod plan;
mod read;
mod retention;
mod select;
mod tensor_shard;
mod tools;
mod validation;
mod write;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime};

use isobar_collectives::Group;
use serde::{Deserialize, Serialize};

pub use self::average::{ExportedAverage, export_average};
use self::background::Background;
pub use self::contents::{Checkpointed, Contents};
use self::news::{News, Parts};
use self::plan::{Declared, Plan};
pub use self::read::{CheckpointIndex, ReadRequest, SavedShards, SavedTensor};
pub use self::retention::Keep;
pub use self::select::{CheckpointSelector, Loaded};
pub use self::tensor_shard::{Region, TensorShard};
pub use self::tools::{Exported, Listed, Summary, export, list, reshard, verify};
use self::write::{Job, Lead, Staging};
use crate::agree::agree;
use crate::config::Resume;
use crate::error::{Error, Result};
use crate::loss_scale::LossScale;
use crate::run_folder::Unsaved;

/// Position of a run, apart from its tensors. Random numbers follow from the seed and the step, the order of samples from the
/// seed and the epoch, so these numbers are the state of both.
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
    /// The validation error after this step, where it was measured: the mean over variables of relative errors.
    pub validation_error: Option<f64>,
    /// Metric of `validation_error` and `best`, for several variables. Errors of different metrics are not
    /// compared: earlier versions took one norm over all variables.
    #[serde(default)]
    pub validation_metric: Option<String>,
    /// The lowest validation error so far.
    pub best: Option<f64>,
    /// That of the next step, where losses are scaled.
    #[serde(default)]
    pub loss_scale: Option<LossScale>,
    /// Values that must be the same to resume the run: an object; differences are reported key by key.
    pub identity: serde_json::Value,
    /// Settings that a resumed run may change with a warning: a JSON object.
    #[serde(default)]
    pub settings: serde_json::Value,
    /// The resolved configuration, as TOML.
    pub config: String,
    /// Other values that the program needs to use the model, for instance the normalizer's statistics.
    pub extra: serde_json::Value,
}

/// Writes and finds the checkpoints of a run, in a folder that all ranks share.
///
/// ```
/// use isobar_collectives::Group;
/// use isobar_train::checkpoint::{Checkpoints, Contents, Keep, RunState, CheckpointSelector};
/// use isobar_train::optim::{AdamW, AdamWConfig};
/// use isobar_train::{Parameter, Parameters};
/// use tch::Tensor;
///
/// let folder = tempfile::tempdir()?;
/// let x = Tensor::f_from_slice(&[1.0f32, 2.0])?.f_set_requires_grad(true)?;
/// let params = Parameters::new(vec![Parameter::replicated("x", &x)])?;
/// let mut adamw = AdamW::new(&params, &AdamWConfig::default())?;
/// let mut contents = Contents { params: &params, buffers: &[], optimizer: Some(&mut adamw) };
///
/// let mut checkpoints = Checkpoints::new(folder.path(), Keep { newest: 3, best: 1 }, &Group::single());
/// checkpoints.save(&contents, &RunState { step: 7, ..Default::default() })?;
/// assert_eq!(checkpoints.load(&CheckpointSelector::Newest, &mut contents)?.state.step, 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Checkpoints {
    folder: PathBuf,
    keep: Keep,
    world: Group,
    /// The plan of the last save, and of what the ranks held then.
    plan: Option<(Vec<String>, Arc<Plan>)>,
    staging: Staging,
    background: Background,
    /// True while the ranks have not agreed on the end of a write in the background; the same on all ranks.
    in_flight: bool,
    /// A run that starts from the beginning, until its first checkpoint; only on rank 0.
    unsaved: Option<Arc<Unsaved>>,
    /// Number of consecutive failed writes in the background.
    failures: u32,
}

/// So many writes that fail in a row are an error: a run whose state is never saved is not worth its time.
const FAILURES: u32 = 2;

impl Checkpoints {
    /// Checkpoints in `folder`, which the first save makes. `world` is the group of all ranks of the run.
    pub fn new(folder: &Path, keep: Keep, world: &Group) -> Self {
        Self {
            folder: folder.to_owned(),
            keep,
            world: world.clone(),
            plan: None,
            staging: Staging::default(),
            background: Background::default(),
            in_flight: false,
            unsaved: None,
            failures: 0,
        }
    }

    /// The first checkpoint ends this state of the run's folder.
    pub(crate) fn begin(&mut self, unsaved: Option<Arc<Unsaved>>) {
        self.unsaved = unsaved;
    }

    /// Writes a checkpoint and returns its folder when it is on disk. Every rank calls, and writes its part; what several hold
    /// one of them writes. One of the same step is replaced. Waits for a write in the background first.
    ///
    /// # Errors
    ///
    /// On every rank where any failed: the disk is full, a tensor's dtype has no place in safetensors, the ranks together do not
    /// hold all of a tensor, the folder is not shared, a rank is lost. That a write in the background before failed is warned of.
    pub fn save(&mut self, contents: &dyn Checkpointed, state: &RunState) -> Result<PathBuf> {
        let job = self.job(contents, state, false);
        let job = agree(&self.world, job)?;
        agree(&self.world, job.write_part())?;
        if let Some(lead) = &job.lead {
            lead.news.tell(Parts::Written(Instant::now()));
        }
        agree(&self.world, job.commit())?;
        Ok(job.folder)
    }

    /// Copies what is to be saved and writes it while the caller goes on; returns the folder that will be the checkpoint's.
    /// Every rank calls. Waits for a write that is still under way first.
    ///
    /// # Errors
    ///
    /// Those of [`Checkpoints::save`] before anything is written; and on every rank where the last two writes in the background
    /// have failed. What goes wrong with this one is warned of when [`Checkpoints::poll`] sees it, or by the next save, and is
    /// the error of [`Checkpoints::finish`].
    pub fn save_in_background(&mut self, contents: &dyn Checkpointed, state: &RunState) -> Result<PathBuf> {
        let job = self.job(contents, state, true)?;
        let folder = job.folder.clone();
        self.background.start(job)?;
        self.in_flight = true;
        Ok(folder)
    }

    /// Warns of a write in the background that has failed. Does not wait, and is for this rank alone.
    pub fn poll(&mut self) {
        let _ = self.background.poll();
    }

    /// Waits for the write in the background. Every rank calls.
    ///
    /// # Errors
    ///
    /// On every rank where the write failed on any.
    pub fn finish(&mut self) -> Result<()> {
        let failed = self.settle()?;
        let unwritten = self.background.wait();
        if let Some((rank, reason)) = failed {
            return Err(Error::OtherRankFile { rank, group: self.world.name().to_owned(), reason });
        }
        let ended = match unwritten {
            None => Ok(()),
            Some(reason) => Err(Error::checkpoint(&self.folder, reason)),
        };
        agree(&self.world, ended)
    }

    /// Exchanges the results of the background write, and returns the first part that could not be written.
    /// The ranks use a collective and not only files, since a rank whose disk is full cannot leave a note.
    /// Every rank calls.
    fn settle(&mut self) -> Result<Option<(usize, String)>> {
        if !std::mem::take(&mut self.in_flight) {
            return Ok(None);
        }
        let own = self.background.part().unwrap_or_default();
        let all = self.world.all_gather_bytes(own.as_bytes())?;
        let failed = all.iter().enumerate().find(|(_, reason)| !reason.is_empty());
        let failed = failed.map(|(rank, reason)| (rank, String::from_utf8_lossy(reason).into_owned()));
        self.background.tell(match failed.clone() {
            None => Parts::Written(Instant::now()),
            Some((rank, reason)) => Parts::Failed { rank, reason },
        });
        Ok(failed)
    }

    /// Puts a checkpoint back into what it was made of, whatever number of ranks wrote it. Every rank calls, and reads what it
    /// needs for itself. Where the first choice is torn or damaged, says so and takes the next one.
    ///
    /// # Errors
    ///
    /// On every rank where any failed: [`Error::NoCheckpoint`]; [`Error::Checkpoint`] where none is whole;
    /// [`Error::CheckpointUnfit`] for one of a model whose names, shapes or dtypes differ (the reason lists them);
    /// [`Error::CheckpointsDiffer`] where the ranks do not read the same. Nothing is changed on a rank that fails.
    pub fn load(&self, which: &CheckpointSelector, contents: &mut dyn Checkpointed) -> Result<Loaded> {
        select::load(&self.folder, which, contents, &self.world)
    }

    /// Loads the newest complete checkpoint if `resume` asks for it. To start from the beginning, the folder
    /// must not hold any. Every rank calls.
    ///
    /// # Errors
    ///
    /// Those of [`Checkpoints::load`]; [`Error::NoCheckpoint`] if one is required and missing;
    /// [`Error::HoldsResults`] if there must not be any. Nothing is removed.
    pub fn resume(&self, resume: Resume, contents: &mut dyn Checkpointed) -> Result<Option<Loaded>> {
        let (_, found) = select::candidates(&self.folder, &CheckpointSelector::Newest, &self.world)?;
        match resume {
            Resume::Never if !found.is_empty() => {
                Err(Error::HoldsResults { path: self.folder.clone(), found: "checkpoints".to_owned() })
            }
            Resume::Never => Ok(None),
            Resume::Auto if found.is_empty() => Ok(None),
            Resume::Auto | Resume::Must => {
                self.load(&CheckpointSelector::Newest, contents).map(Some).map_err(without_resuming)
            }
        }
    }

    /// Returns this rank's part of the write. Every rank must call.
    fn job(&mut self, contents: &dyn Checkpointed, state: &RunState, copies: bool) -> Result<Job> {
        let failed = self.settle()?;
        let unwritten = self.background.wait();
        let unwritten = match failed {
            None => unwritten,
            // The rank reports it itself; rank 0 need not repeat it.
            Some((rank, reason)) => (rank == self.world.rank()).then_some(reason),
        };
        let shards = contents.shards();
        let (shards, declared) = match shards {
            Ok(shards) => {
                let declared = Declared::all(&shards);
                (shards, declared)
            }
            Err(error) => (Vec::new(), Err(error)),
        };
        let target = self.folder.join(folder::step_folder(state.step));
        let nonce = nonce();
        // A folder that cannot be looked at may hold a checkpoint, too.
        let replaces = folder::has_manifest(&target).unwrap_or(true);
        let suffix = if replaces { format!(".{nonce}") } else { String::new() };
        let agreed = plan::open(&self.world, &declared, unwritten, (nonce, suffix))?;
        self.failures = if agreed.unwritten.is_some() { self.failures + 1 } else { 0 };
        if let Some((rank, reason)) = &agreed.unwritten {
            if copies && self.failures >= FAILURES {
                let reason = format!("{reason}; {FAILURES} checkpoints in a row could not be written");
                return Err(Error::OtherRankFile {
                    rank: *rank,
                    group: self.world.name().to_owned(),
                    reason,
                });
            }
            if self.world.rank() == 0 {
                tracing::warn!(
                    "rank {rank} has not written the last checkpoint: {reason}; the next one is tried"
                );
            }
        }
        let plan = match self.plan.take() {
            Some((digests, plan)) if digests == agreed.digests => plan,
            _ => Arc::new(plan::exchange(&self.world, &declared?)?),
        };
        self.plan = Some((agreed.digests, plan.clone()));
        let rank = self.world.rank();
        let held: HashMap<_, _> =
            shards.iter().map(|shard| ((shard.name.as_str(), &shard.region), &shard.tensor)).collect();
        let own = plan.of_rank(rank).into_iter().filter_map(|(tensor, part)| {
            let values = held.get(&(tensor.name.as_str(), &part.region))?;
            Some(((part.key.clone(), values.shallow_clone()), tensor.dtype))
        });
        let (own, dtypes): (Vec<_>, Vec<_>) = own.unzip();
        let values = match copies {
            true => self.staging.copy(&own)?,
            false => own.iter().map(|(_, values)| values.shallow_clone()).collect(),
        };
        let items = own.into_iter().zip(dtypes).zip(values);
        let items = items.map(|(((key, _), dtype), tensor)| write::item(key, dtype, tensor));
        let lead = (rank == 0).then(|| -> Result<Lead> {
            Ok(Lead {
                plan: plan.clone(),
                world_size: self.world.size(),
                facts: contents.facts()?,
                state: state.clone(),
                keep: self.keep,
                timeout: self.world.deadline(),
                news: News::default(),
                unsaved: self.unsaved.clone(),
            })
        });
        Ok(Job {
            root: self.folder.clone(),
            folder: target,
            nonce: agreed.nonce,
            suffix: agreed.suffix,
            rank,
            items: items.collect::<Result<_>>()?,
            lead: lead.transpose()?,
        })
    }
}

/// Reads the run's state from a checkpoint, without its tensors. `path` is a checkpoint's folder, or a folder of checkpoints, of
/// which the newest is read.
///
/// # Errors
///
/// [`Error::NoCheckpoint`] where there is none, [`Error::Checkpoint`] where its manifest is torn or foreign.
pub fn read_run_state(path: &Path) -> Result<RunState> {
    Ok(manifest::Manifest::read(&folder::newest(path)?)?.state)
}

/// Adds how a run whose checkpoints are damaged starts all the same.
fn without_resuming(error: Error) -> Error {
    match error {
        Error::Checkpoint { path, reason } => Error::Checkpoint {
            path,
            reason: format!(
                "{reason}; restore the files, choose another name (--set run.name=NAME), or start from the beginning in its place \
                 (--overwrite)"
            ),
        },
        other => other,
    }
}

/// A word that no other save has.
fn nonce() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let words =
        format!("{} {} {}", now.as_nanos(), std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    blake3::hash(words.as_bytes()).to_hex()[..16].to_owned()
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod special;
#[cfg(test)]
mod tests;
