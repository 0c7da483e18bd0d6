//! The sections of a run's configuration that training reads; an application assembles them into one type.

use std::path::PathBuf;

use isobar_torch::guard::Autocast;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

pub use isobar_data::{AugmentConfig, DataConfig, FormatName, FormatTables, Predict, ScalarsAs};

pub use crate::data_parallel::DataParallelConfig;
use crate::error::{Error, Result};
use crate::loss::LossKind;
pub use crate::metrics::MetricsConfig;
use crate::optim::AverageRule;
pub use crate::optim::OptimizerKind;
pub use crate::schedule::ScheduleKind;
pub use crate::weights::WeightsConfig;

/// Bytes that file systems take as a name.
const LONGEST_NAME: usize = 255;

/// `[run]`: its name, its folder, its seed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Name of the run; its files are in the folder of that name under `output`. A plain name: no `/`, no `.` or `..`, no control
    /// characters, at most 255 bytes.
    pub name: String,
    /// Folder of all runs.
    pub output: PathBuf,
    /// Seed of initial weights, sample order, augmentation and dropout.
    pub seed: u64,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self { name: "run".into(), output: "runs".into(), seed: 0 }
    }
}

impl RunConfig {
    /// The run's own folder.
    pub fn folder(&self) -> PathBuf {
        self.output.join(&self.name)
    }

    /// Checks that the name is one of a folder in `output`, not of a place elsewhere.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] otherwise.
    ///
    /// ```
    /// use isobar_train::config::RunConfig;
    ///
    /// let named = |name: &str| RunConfig { name: name.into(), ..RunConfig::default() };
    /// assert!(named("darcy afno, lr=1e-3").check().is_ok());
    /// assert!(named("../x").check().is_err());
    /// ```
    pub fn check(&self) -> Result<()> {
        if self.output.as_os_str().is_empty() {
            return Err(Error::setting("run.output", "\"\"", "a folder", "runs"));
        }
        let name = self.name.as_str();
        let problem = match () {
            () if name.is_empty() => "empty",
            () if name == "." || name == ".." => "no name of a folder of its own",
            () if name.contains('/') => "a path",
            () if name.contains(char::is_control) => "a name with control characters",
            () if name.len() > LONGEST_NAME => "too long",
            () => return Ok(()),
        };
        // Shown in part where it is long.
        let shown: String = name.chars().take(40).collect();
        let dots = if shown.len() < name.len() { "…" } else { "" };
        Err(Error::invalid(
            "run.name",
            format!("{:?}, which is {problem}", format!("{shown}{dots}")),
            format!(
                "a plain name of at most {LONGEST_NAME} bytes without \"/\", as in --set run.name=darcy_2; run.output is the folder \
                 that holds the runs"
            ),
        ))
    }
}

/// `[train]`: the loop.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainConfig {
    /// Passes over the training samples.
    pub epochs: u64,
    /// Samples of a step, over all ranks together.
    #[schemars(range(min = 1))]
    pub batch_size: usize,
    /// Loss, on normalised values. A list of losses, each with a key `weight`, stands for their weighted sum.
    pub loss: LossKind,
    /// Weights of variables, levels, latitudes and lead times in the loss, and of the regularization.
    pub weights: WeightsConfig,
    /// Precision of training.
    pub precision: Precision,
    /// Number of micro-batches per step (gradient accumulation): peak memory is that of one micro-batch, and the update is unchanged,
    /// except with layers that normalise over the batch.
    #[schemars(range(min = 1))]
    pub accumulate: usize,
    /// Largest norm of the gradient of the whole model; larger ones are scaled down to it. Without it none is.
    pub clip_norm: Option<f64>,
    /// Decay of an exponential moving average of the parameters, in [0, 1), such as 0.999; without it there is none. The averages
    /// are validated, kept in checkpoints beside the parameters, and used for predictions.
    pub average_decay: Option<f64>,
    /// Widths of power-function averages of the parameters, relative to the length of the run, such as `[0.05, 0.1]` (Karras et al.,
    /// arXiv:2312.02696). `isobar checkpoint export --width` computes an average of any width from those in all checkpoints;
    /// `checkpoint.keep = 0` keeps all. Without `average_decay` the first is validated and used for predictions.
    pub average_widths: Vec<f64>,
    /// Steps between bitwise comparisons of replicated parameters; 0 for none.
    pub check_replicas_every: u64,
    /// Uses bitwise reproducible kernels only; operators without one are errors.
    pub deterministic: bool,
    /// Epochs between two validations; the last epoch is always followed by one.
    #[schemars(range(min = 1))]
    pub validate_every: u64,
    /// Number by which the best checkpoint is chosen, on the validation samples: `"relative"`, the mean over variables of the
    /// relative L2 errors; the name of a metric of `metrics.report`, the mean over variables; or `"VARIABLE/METRIC"`.
    pub best: String,
    /// Stop after this many steps, whatever `epochs` says; the schedule is that of the whole run.
    pub max_steps: Option<u64>,
}

impl TrainConfig {
    /// Returns the rules of the averages of the parameters; the first is that to validate and to predict with.
    pub fn averages(&self) -> Vec<AverageRule> {
        let widths = self.average_widths.iter().copied().map(AverageRule::Width);
        self.average_decay.map(AverageRule::Decay).into_iter().chain(widths).collect()
    }
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            epochs: 60,
            batch_size: 16,
            loss: LossKind::default(),
            weights: WeightsConfig::default(),
            precision: Precision::default(),
            accumulate: 1,
            clip_norm: Some(1.0),
            average_decay: None,
            average_widths: Vec::new(),
            check_replicas_every: 0,
            deterministic: false,
            validate_every: 1,
            best: "relative".into(),
            max_steps: None,
        }
    }
}

/// The kinds of numbers that a network computes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum Precision {
    /// Single precision throughout.
    #[default]
    #[serde(rename = "float32")]
    Float32,
    /// Double precision throughout: parameters, gradients, optimizer state and activations. Twice the memory.
    #[serde(rename = "float64")]
    Float64,
    /// Matrix products and convolutions in bfloat16; parameters, gradients, transforms, norms and the loss in single precision.
    #[serde(rename = "bf16-mixed")]
    Bf16Mixed,
    /// Like `bf16-mixed` in half precision, with a loss scale, for devices without bfloat16.
    #[serde(rename = "fp16-mixed")]
    Fp16Mixed,
}

impl Precision {
    /// The dtype of parameters, and of the data that the network sees.
    ///
    /// ```
    /// use isobar_train::Precision;
    /// use tch::Kind;
    ///
    /// assert_eq!(Precision::Bf16Mixed.kind(), Kind::Float);
    /// assert_eq!(Precision::Float64.kind(), Kind::Double);
    /// ```
    pub fn kind(self) -> Kind {
        match self {
            Self::Float32 | Self::Bf16Mixed | Self::Fp16Mixed => Kind::Float,
            Self::Float64 => Kind::Double,
        }
    }

    /// Mixed precision of the calling thread, while the guard lives; none in single and double precision.
    ///
    /// # Errors
    ///
    /// A device without it.
    ///
    /// ```
    /// use isobar_train::Precision;
    /// use tch::Device;
    ///
    /// assert!(Precision::Float32.enter(Device::Cpu)?.is_none());
    /// assert!(Precision::Bf16Mixed.enter(Device::Cpu)?.is_some());
    /// # Ok::<(), isobar_torch::Error>(())
    /// ```
    pub fn enter(self, device: Device) -> isobar_torch::Result<Option<Autocast>> {
        match self {
            Self::Float32 | Self::Float64 => Ok(None),
            Self::Bf16Mixed => Autocast::new(device, Kind::BFloat16).map(Some),
            Self::Fp16Mixed => Autocast::new(device, Kind::Half).map(Some),
        }
    }
}

/// `[checkpoint]`: when to save, what stays, and whether to go on from what was saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Epochs between two checkpoints; 0 for none but the last and, where some of the best stay, those that are better than all
    /// before.
    pub every_epochs: u64,
    /// Steps between two checkpoints, besides those of epochs; 0 for none.
    pub every_steps: u64,
    /// Minutes between two checkpoints, besides those of epochs and steps; 0 for none.
    #[schemars(range(min = 0.0))]
    pub every_minutes: f64,
    /// Number of the newest checkpoints kept; 0 keeps all.
    pub keep: usize,
    /// Number of checkpoints kept besides: those with the best values of `train.best`.
    pub keep_best: usize,
    /// Synchronous or asynchronous writing of checkpoints.
    pub mode: SaveMode,
    /// Action if the run's folder holds checkpoints.
    pub resume: Resume,
    /// Lets a run that starts from the beginning replace the results of an earlier run in its folder. They are kept aside,
    /// and removed once the new run has a checkpoint. Without it such a folder is an error.
    pub overwrite: bool,
    /// Initial weights of a run that does not resume: a checkpoint's folder, or a safetensors file with the model's parameter names
    /// and shapes, as PyTorch's tools write it. Weights are converted between float32 and float64.
    pub init: Option<PathBuf>,
    /// Requeue the SLURM job on SIGUSR1 (`sbatch --signal=USR1@120`), after a checkpoint. If false, SIGUSR1 only writes a checkpoint.
    pub requeue: bool,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self {
            every_epochs: 10,
            every_steps: 0,
            every_minutes: 0.0,
            keep: 2,
            keep_best: 1,
            mode: SaveMode::Sync,
            resume: Resume::Never,
            overwrite: false,
            init: None,
            requeue: false,
        }
    }
}

/// Synchronous or asynchronous writing of checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SaveMode {
    /// It waits.
    #[default]
    Sync,
    /// It goes on once parameters and optimizer state are copied to host memory, which needs as much of it.
    Async,
}

/// Action if a run's folder holds checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Resume {
    /// Start from the beginning: results in the folder are an error, unless `checkpoint.overwrite` lets the run replace them.
    #[default]
    Never,
    /// Resume from the newest complete one; start from the beginning where there is none.
    Auto,
    /// Resume from the newest complete one; fail where there is none.
    Must,
}
