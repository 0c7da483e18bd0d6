//! Errors of training.

use std::path::{Path, PathBuf};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error, with the rank, parameter or file concerned, and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A communication failed.
    #[error(transparent)]
    Collectives(#[from] isobar_collectives::Error),
    /// The shim failed: a hook or a backward pass.
    #[error(transparent)]
    Torch(#[from] isobar_torch::Error),
    /// A layer below (parameters, generators, arrays) failed.
    #[error(transparent)]
    Shard(#[from] isobar_shard::Error),
    /// libtorch refused an operation.
    #[error("libtorch refused {context}: {source}")]
    Tensor {
        /// Action that failed.
        context: String,
        /// Error of libtorch.
        source: tch::TchError,
    },
    /// A file or folder could not be read or written.
    #[error("could not {action} {}: {source}", path.display())]
    Io {
        /// Action that failed, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// Two parameters have one name, so that a checkpoint could not tell them apart.
    #[error("parameter {name:?} is given twice; give every parameter a name of its own")]
    DuplicateParameter {
        /// The name.
        name: String,
    },
    /// The ranks of a group hold different parameters.
    #[error(
        "parameters differ between ranks of group {group:?}: rank 0 has {expected}, rank {rank} has {found}; \
         build the same model on every rank"
    )]
    ParametersDiffer {
        /// The group that compared.
        group: String,
        /// The rank, within the group, that differs from rank 0.
        rank: usize,
        /// Value of rank 0 at the first difference.
        expected: String,
        /// Value of this rank.
        found: String,
    },
    /// The ranks of a group have different settings.
    #[error(
        "settings differ between ranks of group {group:?}: {key} is {found} on rank {rank}, and {expected} on rank 0; give \
         every rank the same configuration"
    )]
    SettingsDiffer {
        /// The group that compared.
        group: String,
        /// The rank, within the group, that differs from rank 0.
        rank: usize,
        /// The first key that differs.
        key: String,
        /// Value of rank 0.
        expected: String,
        /// Value of this rank.
        found: String,
    },
    /// Two ranks read different samples.
    #[error(
        "ranks {rank} and {other} read different samples: {difference}; give all ranks the same data in the same order"
    )]
    SamplesDiffer {
        /// The first rank.
        rank: usize,
        /// Another rank, which differs from it.
        other: usize,
        /// The samples of both.
        difference: String,
    },
    /// A program's own model could not be built.
    #[error("the model could not be built: {source}")]
    Model {
        /// Its error.
        source: crate::BoxError,
    },
    /// A program's own reader of samples failed.
    #[error("the samples could not be read: {source}")]
    Samples {
        /// Its error.
        source: crate::BoxError,
    },
    /// Parameters, ranks and fields of a run do not fit each other, so that gradients would be wrong.
    #[error("gradients would not be those of the loss: {problem}; {call}")]
    WrongGradients {
        /// Description of the misfit.
        problem: String,
        /// The correct call.
        call: String,
    },
    /// A parameter took no part in the loss.
    #[error(
        "parameter {name:?} got no gradient in this backward pass on rank {rank} of group {group:?}; \
         use it in the loss, or count such gradients as zeros: --set distributed.find_unused_parameters=true"
    )]
    MissingGradient {
        /// The parameter.
        name: String,
        /// The first rank, within the group, where it happened.
        rank: usize,
        /// The data-parallel group.
        group: String,
    },
    /// A gradient holds NaN or infinity.
    #[error(
        "gradient of parameter {name:?} is not finite on rank {rank} of group {group:?}; \
         lower the learning rate or look for a division by zero in the loss"
    )]
    NonFiniteGradient {
        /// The first such parameter.
        name: String,
        /// The rank, within the group, that holds it.
        rank: usize,
        /// The group over which the norm is taken.
        group: String,
    },
    /// The loss is NaN or infinite.
    #[error("loss is {value} at step {step}; {advice}")]
    NonFiniteLoss {
        /// The loss.
        value: f64,
        /// The step, from 0.
        step: u64,
        /// Settings that may be the cause, each with a value to try.
        advice: String,
    },
    /// A value of a step is NaN or infinite, and what made it was found.
    #[error("{}{what}. The step computed again shows where: {origin}", at_step(*step, what))]
    NonFinite {
        /// The step, from 0.
        step: u64,
        /// First error.
        what: Box<Error>,
        /// Operators that made such values, with their ranks and parameters.
        origin: String,
    },
    /// Gradients overflow half precision whatever the loss is scaled by.
    #[error(
        "gradients of step {step} overflow half precision however small the loss scale is; --set train.precision=bf16-mixed or \
         --set train.precision=float32, or look for NaN in the data"
    )]
    Overflow {
        /// The step, from 0.
        step: u64,
    },
    /// Ranks that should hold the same parameters do not.
    #[error(
        "parameter {name:?} of ranks {ranks:?} of group {group:?} is not that of the first rank with a copy, to the last bit; go \
         on from the last checkpoint, and look for code that treats ranks differently, kernels that do not repeat \
         (--set train.deterministic=true), or faulty memory"
    )]
    ReplicasDiffer {
        /// The first such parameter.
        name: String,
        /// The ranks, within the group, that differ from the first with the same part.
        ranks: Vec<usize>,
        /// The group that compared.
        group: String,
    },
    /// There is no memory left.
    #[error(
        "rank {rank} has no memory left: {source}. The largest of its tensors: {held}. Use more ranks along a domain or shard \
         axis (distributed.mesh), or --set model.gradient_checkpointing=true, more micro-batches (as in --set train.accumulate=2), or \
         a smaller train.batch_size (as in --set train.batch_size=1)"
    )]
    OutOfMemory {
        /// The rank.
        rank: usize,
        /// The largest tensors and sums.
        held: String,
        /// Failed allocation.
        source: Box<Error>,
    },
    /// The disk of a run's folder cannot hold one checkpoint.
    #[error("{text}")]
    DiskSpace {
        /// Free space, required space, and how to fix it.
        text: String,
    },
    /// The hosts of the ranks lack memory for gradients and the optimizer's state.
    #[error("{text}")]
    HostMemory {
        /// Required memory, free memory, and how to fix it.
        text: String,
    },
    /// An argument or a setting is out of its range.
    #[error("{what} is {found}, expected {expected}")]
    Invalid {
        /// The argument or the configuration key.
        what: String,
        /// Its value.
        found: String,
        /// Allowed values.
        expected: String,
    },
    /// A checkpoint is torn, damaged or foreign.
    #[error("checkpoint {} is refused: {reason}", path.display())]
    Checkpoint {
        /// The file or folder.
        path: PathBuf,
        /// Reason, and what would be accepted.
        reason: String,
    },
    /// A checkpoint is whole, but of another model or run.
    #[error("checkpoint {} is refused: {reason}", path.display())]
    CheckpointUnfit {
        /// The file or folder.
        path: PathBuf,
        /// The difference.
        reason: String,
    },
    /// The ranks of a run see different checkpoints.
    #[error(
        "ranks 0 and {rank} of group {group:?} found different checkpoints; keep them in a folder that all ranks share, and \
         give all ranks the same folder (--set run.output=FOLDER)"
    )]
    CheckpointsDiffer {
        /// The group of all ranks.
        group: String,
        /// The first rank that differs from rank 0.
        rank: usize,
    },
    /// This rank was told to stop, and others have died.
    #[error(
        "told to stop while other ranks are lost, so that no checkpoint can be written; go on from the newest one"
    )]
    PeersLost,
    /// Another process uses the run's folder.
    #[error(
        "run folder {} is in use by {holder}; wait until that run has ended, end it, or choose another name (--set run.name=NAME)",
        path.display()
    )]
    RunLocked {
        /// The folder.
        path: PathBuf,
        /// The process, its host, and when it locked the folder.
        holder: String,
    },
    /// The run's folder holds results of another run.
    #[error(
        "run folder {} holds {found} of an earlier run; resume it (--resume, or --set checkpoint.resume=auto), choose another \
         name (--set run.name=NAME), or replace its results (--overwrite, or --set checkpoint.overwrite=true)",
        path.display()
    )]
    HoldsResults {
        /// The folder.
        path: PathBuf,
        /// Results in it.
        found: String,
    },
    /// The run's folder holds results without a complete checkpoint, of a run that had one.
    #[error(
        "run folder {} holds {found} of an earlier run, but no complete checkpoint to resume from; put its checkpoints back, choose \
         another name (--set run.name=NAME), or replace its results (--overwrite, or --set checkpoint.overwrite=true)",
        path.display()
    )]
    NothingToResume {
        /// The folder.
        path: PathBuf,
        /// Results in it.
        found: String,
    },
    /// The run's folder no longer exists.
    #[error(
        "run folder {} was removed or replaced while the run used it: what was written there is lost; start again, and leave the \
         folder and its run.lock where they are",
        path.display()
    )]
    FolderGone {
        /// The folder.
        path: PathBuf,
    },
    /// There is nothing to resume from.
    #[error("{}", no_checkpoint(path, *key))]
    NoCheckpoint {
        /// The folder that was searched.
        path: PathBuf,
        /// The configuration key that names it.
        key: Option<&'static str>,
    },
    /// Saved optimizer state does not fit.
    #[error("optimizer state is refused: {reason}")]
    OptimizerState {
        /// Reason.
        reason: String,
    },
    /// A metric was logged that was not declared.
    #[error(
        "metric {name:?} is not among the declared columns {columns:?}; declare it when the sink is opened"
    )]
    UnknownMetric {
        /// The metric.
        name: String,
        /// Declared columns.
        columns: Vec<String>,
    },
    /// A metrics file to append to is not one.
    #[error(
        "metrics file {} cannot be continued: {reason}; move it away, so that the run starts a new one, or choose another name \
         (--set run.name=NAME)",
        path.display()
    )]
    MetricsFile {
        /// The file.
        path: PathBuf,
        /// Description of the problem.
        reason: String,
    },
    /// Another rank failed in a step that all take together.
    #[error("rank {rank} of group {group:?} failed: {reason}")]
    OtherRank {
        /// The rank, within the group.
        rank: usize,
        /// The group.
        group: String,
        /// Error of that rank.
        reason: String,
    },
    /// Another rank could not read or write its files in a collective step.
    #[error("rank {rank} of group {group:?} failed: {reason}")]
    OtherRankFile {
        /// The rank, within the group.
        rank: usize,
        /// The group.
        group: String,
        /// Message of that rank.
        reason: String,
    },
    /// Code supplied by the caller (a model, a data source) failed.
    #[error("{context} failed: {source}")]
    Task {
        /// Action that failed.
        context: &'static str,
        /// Error of the caller's code.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl From<isobar_array::Error> for Error {
    fn from(error: isobar_array::Error) -> Self {
        Self::Shard(error.into())
    }
}

impl Error {
    /// Returns whether every rank of the group reports the error, so that no rank must be notified.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(
            self,
            Self::Collectives(_)
                | Self::ParametersDiffer { .. }
                | Self::SettingsDiffer { .. }
                | Self::SamplesDiffer { .. }
                | Self::WrongGradients { .. }
                | Self::MissingGradient { .. }
                | Self::ReplicasDiffer { .. }
                | Self::NonFiniteGradient { .. }
                | Self::NonFiniteLoss { .. }
                | Self::NonFinite { .. }
                | Self::Overflow { .. }
                | Self::CheckpointsDiffer { .. }
                | Self::DiskSpace { .. }
                | Self::HostMemory { .. }
                | Self::OtherRank { .. }
                | Self::OtherRankFile { .. }
                | Self::RunLocked { .. }
                | Self::HoldsResults { .. }
                | Self::NothingToResume { .. }
        )
    }

    /// Returns whether files are the cause: they cannot be read or written, or have the wrong content.
    pub(crate) fn is_of_files(&self) -> bool {
        matches!(
            self,
            Self::Io { .. }
                | Self::Checkpoint { .. }
                | Self::CheckpointUnfit { .. }
                | Self::NoCheckpoint { .. }
                | Self::FolderGone { .. }
                | Self::MetricsFile { .. }
                | Self::OtherRankFile { .. }
        )
    }

    /// Error of a configuration key, with a value that works.
    pub(crate) fn setting(
        key: &str,
        found: impl std::fmt::Display,
        expected: &str,
        works: impl std::fmt::Display,
    ) -> Self {
        Self::invalid(key, found, format!("{expected}; --set {key}={works}"))
    }

    pub(crate) fn invalid(
        what: impl Into<String>,
        found: impl std::fmt::Display,
        expected: impl Into<String>,
    ) -> Self {
        let found = found.to_string();
        // Rust writes 1e300 with 300 digits.
        let number = found.parse::<f64>().ok().filter(|_| found.len() > MOST_DIGITS);
        let found = number.map_or(found, |number| format!("{number:e}"));
        Self::Invalid { what: what.into(), found, expected: expected.into() }
    }

    pub(crate) fn no_checkpoint(path: &Path) -> Self {
        Self::NoCheckpoint { path: path.to_owned(), key: None }
    }

    /// Names the configuration key that asked for a checkpoint, if there is none.
    pub(crate) fn asked_by(self, key: &'static str) -> Self {
        match self {
            Self::NoCheckpoint { path, .. } => Self::NoCheckpoint { path, key: Some(key) },
            other => other,
        }
    }

    pub(crate) fn checkpoint(path: &Path, reason: impl Into<String>) -> Self {
        Self::Checkpoint { path: path.to_owned(), reason: reason.into() }
    }
}

/// Most digits of a number in an error: those of an integer of 64 bits with its sign, and of a float64.
const MOST_DIGITS: usize = 24;

/// The step of an error that does not name it itself.
fn at_step(step: u64, what: &Error) -> String {
    match what {
        Error::NonFiniteLoss { .. } => String::new(),
        _ => format!("step {step}: "),
    }
}

fn no_checkpoint(path: &Path, key: Option<&str>) -> String {
    let shown = path.display();
    let Some(key) = key else {
        return format!(
            "no checkpoint in {shown}; start without resuming, or name the folder that holds `step_<number>`"
        );
    };
    let problem = if path.exists() { "has no checkpoint" } else { "does not exist" };
    format!(
        "{key} is {shown}, which {problem}; expected the folder of a checkpoint or of a run, or a safetensors file, as in --set \
         {key}=runs/NAME"
    )
}

/// Adds what was being done to an error of libtorch or of the system.
pub(crate) trait Context<T> {
    fn context(self, context: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for std::result::Result<T, tch::TchError> {
    fn context(self, context: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Tensor { context: context(), source })
    }
}

pub(crate) trait IoContext<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T>;
}

impl<T> IoContext<T> for std::io::Result<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T> {
        self.map_err(|source| Error::Io { action, path: path.to_owned(), source })
    }
}
