//! Training tasks: loss and predictions of a network. Each file registers one task and its settings.
//!
//! An objective depends on no layout, data set or rank. No code outside this folder depends on a particular objective.

mod diffusion;
mod inputs;
mod patches;
mod regression;
mod training;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use isobar_models::{Denoiser, FieldSpec};
use isobar_registry::{Choice, Entry, Family, Holds, Registered};
use isobar_shard::ShardTensor;
use serde::Serialize;
use tch::Tensor;

pub use self::diffusion::DiffusionConfig;
pub use self::inputs::Inputs;
pub(crate) use self::inputs::Surrogate;
pub use self::patches::PatchConfig;
pub use self::regression::RegressionConfig;
pub use self::training::{Target, Training};
use crate::metric::MetricArray;
use crate::task::BoxError;

/// Training task that a TOML file can name: `[task] type = "NAME"` with its settings. It computes the training loss of a network,
/// and its predictions.
///
/// Its name and its keys are those of [`Registered`]. [`register_task!`](crate::register_task) makes it known to every program that
/// is linked with the crate it stands in. It is written once over [`Array`](isobar_array::Array), for dense and for sharded fields.
///
/// ```
/// use isobar_array::Unary;
/// use isobar_train::objective::{Objective, ObjectiveArray, ObjectiveKind, Training};
/// use isobar_train::{BoxError, Registered};
/// use schemars::JsonSchema;
/// use serde::{Deserialize, Serialize};
///
/// /// Regression, with a penalty on large outputs.
/// #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
/// #[serde(deny_unknown_fields)]
/// struct Damped {
///     /// Weight of the mean square of the outputs.
///     weight: f64,
/// }
///
/// impl Registered for Damped {
///     const NAME: &'static str = "damped";
///     const SUMMARY: &'static str = "Regression, with a penalty on large outputs.";
/// }
///
/// impl Objective for Damped {
///     fn loss<A: ObjectiveArray>(&self, training: &Training<'_, A>) -> Result<A, BoxError> {
///         let outputs = training.roll_out()?;
///         let mut loss = training.compare(&outputs)?;
///         for output in &outputs {
///             let penalty = output.unary(Unary::Square)?.mean()?;
///             loss = loss.add(&penalty.mul_scalar(self.weight / outputs.len() as f64)?)?;
///         }
///         Ok(loss)
///     }
/// }
///
/// isobar_train::register_task!(Damped);
///
/// let task: ObjectiveKind = serde_json::from_str(r#"{ "type": "damped", "weight": 0.1 }"#)?;
/// assert_eq!((task.name(), task.members()), ("damped", 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Objective: fmt::Debug + Send + Sync {
    /// Computes the loss of a training step: a scalar on the graph of the parameters. It is a mean over samples, since ranks' losses
    /// are weighted by their numbers of samples. For sharded fields all ranks of their mesh call.
    ///
    /// # Errors
    ///
    /// Whatever the network reports; samples that the task does not take.
    fn loss<A: ObjectiveArray>(&self, training: &Training<'_, A>) -> Result<A, BoxError>;

    /// Computes a prediction of one step: normalised outputs `[sample, channel, spatial…]`, or an ensemble `[sample, member, channel,
    /// spatial…]` of several [members](Self::members). Gradients are off. By default, the network is called once. For sharded fields
    /// all ranks of their mesh call.
    ///
    /// # Errors
    ///
    /// Whatever the network reports.
    fn predict<A: ObjectiveArray>(&self, inputs: Inputs<'_, A>) -> Result<A, BoxError> {
        inputs.call()
    }

    /// Checks the settings, and compares them with the data and the model of a run; by default accepts all. An error names the
    /// `--set` that fixes it.
    ///
    /// # Errors
    ///
    /// A setting out of its range; data or a model that the task does not take.
    fn check(&self, _setup: &Setup) -> Result<(), BoxError> {
        Ok(())
    }

    /// Compares the settings with the fields of the data; by default accepts all. `has_conditions` is true if scalars are
    /// conditions of samples.
    ///
    /// # Errors
    ///
    /// Fields that the task does not take.
    fn check_fields(&self, _fields: &FieldSpec, _has_conditions: bool) -> Result<(), BoxError> {
        Ok(())
    }

    /// Returns the shape of the network's inputs for the fields of the data; by default that of these fields. `reads_patches` is true
    /// if the network [reads the positions of patches](isobar_models::Architecture::reads_patches).
    fn fields_of_network(&self, fields: FieldSpec, _reads_patches: bool) -> FieldSpec {
        fields
    }

    /// Returns the number of samples that the network is given in training for each of the data, such as patches; by default 1.
    fn samples_of_network(&self) -> usize {
        1
    }

    /// Returns the number of predictions that are made for each sample; by default 1.
    fn members(&self) -> usize {
        1
    }

    /// Returns the trained run whose network the task calls before its own; by default none.
    fn first_stage(&self) -> Option<FirstStage> {
        None
    }

    /// Returns whether a run of this task can be the [first stage](Self::first_stage) of another; by default it cannot. The other task
    /// calls the network once on the fields of the data, so this must be true only if a prediction is this call.
    fn can_be_first_stage(&self) -> bool {
        false
    }
}

/// Run and settings that an [`Objective`] is [checked](Objective::check) against.
#[derive(Debug, Clone, PartialEq)]
pub struct Setup {
    /// Name of the model.
    pub model: String,
    /// Data and noise levels of a denoiser; `None` for other models.
    pub denoiser: Option<Denoiser>,
    /// Largest number of steps of a training sample.
    pub train_steps: usize,
    /// Number of steps of a validation rollout.
    pub validation_steps: usize,
    /// True if the network predicts changes.
    pub changes: bool,
    /// True if missing values are masked.
    pub masks: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            model: String::new(),
            denoiser: None,
            train_steps: 1,
            validation_steps: 1,
            changes: false,
            masks: false,
        }
    }
}

/// Trained run whose network a task calls before its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirstStage {
    /// Key of the table `[task]` that names the folder.
    pub key: &'static str,
    /// Folder of the run.
    pub folder: PathBuf,
    /// True if its prediction is also an input of the second network, as channels before the others.
    pub is_input: bool,
}

/// Registers a type as a training task: see [`Objective`](crate::objective::Objective).
#[macro_export]
macro_rules! register_task {
    ($task:ty) => {
        $crate::inventory::submit! { $crate::objective::ObjectiveEntry::of::<$task>() }
    };
}

isobar_registry::collected! {
    /// Entry of the registry of training tasks.
    pub struct ObjectiveEntry(Objectives);
}

/// The family of the training tasks.
#[derive(Debug)]
pub struct Objectives;

impl Family for Objectives {
    const NOUN: &'static str = "task";
    const SUMMARY: &'static str = "Training task: loss and predictions of the network.";
    type Member = dyn AnyObjective;

    fn entries() -> Vec<Entry<Self>> {
        entries()
    }

    fn standard() -> Choice<Self> {
        RegressionConfig {}.into()
    }
}

impl<O: Objective + Registered> Holds<O> for Objectives {
    fn hold(objective: O) -> Arc<dyn AnyObjective> {
        Arc::new(objective)
    }
}

/// The task of a run: any registered one, by default [`RegressionConfig`].
pub type ObjectiveKind = Choice<Objectives>;

/// Returns the task of a model for which none is given.
pub(crate) fn standard(denoiser: Option<&Denoiser>) -> ObjectiveKind {
    match denoiser {
        None => ObjectiveKind::default(),
        Some(_) => DiffusionConfig::default().into(),
    }
}

/// An [`Objective`] of any type.
pub trait AnyObjective: fmt::Debug + Send + Sync {
    /// Computes the loss of dense fields.
    ///
    /// # Errors
    ///
    /// Those of [`Objective::loss`].
    fn dense_loss(&self, training: &Training<'_, Tensor>) -> Result<Tensor, BoxError>;

    /// Computes the loss of sharded fields. All ranks of their mesh call.
    ///
    /// # Errors
    ///
    /// Those of [`Objective::loss`].
    fn sharded_loss(&self, training: &Training<'_, ShardTensor>) -> Result<ShardTensor, BoxError>;

    /// Computes a prediction of dense fields.
    ///
    /// # Errors
    ///
    /// Those of [`Objective::predict`].
    fn dense_prediction(&self, inputs: Inputs<'_, Tensor>) -> Result<Tensor, BoxError>;

    /// Computes a prediction of sharded fields. All ranks of their mesh call.
    ///
    /// # Errors
    ///
    /// Those of [`Objective::predict`].
    fn sharded_prediction(&self, inputs: Inputs<'_, ShardTensor>) -> Result<ShardTensor, BoxError>;

    /// Does [`Objective::check`].
    ///
    /// # Errors
    ///
    /// Those of [`Objective::check`].
    fn check(&self, setup: &Setup) -> Result<(), BoxError>;

    /// Does [`Objective::check_fields`].
    ///
    /// # Errors
    ///
    /// Those of [`Objective::check_fields`].
    fn check_fields(&self, fields: &FieldSpec, has_conditions: bool) -> Result<(), BoxError>;

    /// Returns [`Objective::fields_of_network`].
    fn fields_of_network(&self, fields: FieldSpec, reads_patches: bool) -> FieldSpec;

    /// Returns [`Objective::samples_of_network`].
    fn samples_of_network(&self) -> usize;

    /// Returns [`Objective::members`].
    fn members(&self) -> usize;

    /// Returns [`Objective::first_stage`].
    fn first_stage(&self) -> Option<FirstStage>;

    /// Returns [`Objective::can_be_first_stage`].
    fn can_be_first_stage(&self) -> bool;
}

impl<O: Objective> AnyObjective for O {
    fn dense_loss(&self, training: &Training<'_, Tensor>) -> Result<Tensor, BoxError> {
        self.loss(training)
    }

    fn sharded_loss(&self, training: &Training<'_, ShardTensor>) -> Result<ShardTensor, BoxError> {
        self.loss(training)
    }

    fn dense_prediction(&self, inputs: Inputs<'_, Tensor>) -> Result<Tensor, BoxError> {
        self.predict(inputs)
    }

    fn sharded_prediction(&self, inputs: Inputs<'_, ShardTensor>) -> Result<ShardTensor, BoxError> {
        self.predict(inputs)
    }

    fn check(&self, setup: &Setup) -> Result<(), BoxError> {
        Objective::check(self, setup)
    }

    fn check_fields(&self, fields: &FieldSpec, has_conditions: bool) -> Result<(), BoxError> {
        Objective::check_fields(self, fields, has_conditions)
    }

    fn fields_of_network(&self, fields: FieldSpec, reads_patches: bool) -> FieldSpec {
        Objective::fields_of_network(self, fields, reads_patches)
    }

    fn samples_of_network(&self) -> usize {
        Objective::samples_of_network(self)
    }

    fn members(&self) -> usize {
        Objective::members(self)
    }

    fn first_stage(&self) -> Option<FirstStage> {
        Objective::first_stage(self)
    }

    fn can_be_first_stage(&self) -> bool {
        Objective::can_be_first_stage(self)
    }
}

/// Arrays that registered tasks are computed of: `tch::Tensor` and `ShardTensor`.
pub trait ObjectiveArray: MetricArray {
    /// Computes the loss of `objective`.
    ///
    /// # Errors
    ///
    /// Those of [`Objective::loss`].
    fn loss_of(objective: &dyn AnyObjective, training: &Training<'_, Self>) -> Result<Self, BoxError>;

    /// Computes a prediction of `objective`.
    ///
    /// # Errors
    ///
    /// Those of [`Objective::predict`].
    fn prediction_of(objective: &dyn AnyObjective, inputs: Inputs<'_, Self>) -> Result<Self, BoxError>;
}

impl ObjectiveArray for Tensor {
    fn loss_of(objective: &dyn AnyObjective, training: &Training<'_, Self>) -> Result<Self, BoxError> {
        objective.dense_loss(training)
    }

    fn prediction_of(objective: &dyn AnyObjective, inputs: Inputs<'_, Self>) -> Result<Self, BoxError> {
        objective.dense_prediction(inputs)
    }
}

impl ObjectiveArray for ShardTensor {
    fn loss_of(objective: &dyn AnyObjective, training: &Training<'_, Self>) -> Result<Self, BoxError> {
        objective.sharded_loss(training)
    }

    fn prediction_of(objective: &dyn AnyObjective, inputs: Inputs<'_, Self>) -> Result<Self, BoxError> {
        objective.sharded_prediction(inputs)
    }
}

/// Names the configuration key that an error of a model's settings is about, with its default as a value that works. `defaults` are
/// those of `table`; errors about other values are unchanged.
fn settings(
    table: &str,
    defaults: &impl Serialize,
    checked: isobar_models::Result<()>,
) -> Result<(), BoxError> {
    checked.map_err(|error| {
        let isobar_models::Error::Config { reason, .. } = &error else { return error.into() };
        let key = reason.split([' ', '[']).next().unwrap_or_default();
        let defaults = serde_json::to_value(defaults).unwrap_or_default();
        match defaults.get(key) {
            None => error.into(),
            Some(serde_json::Value::Null) => format!("{table}.{reason}").into(),
            Some(works) => format!("{table}.{reason}; --set {table}.{key}={works}").into(),
        }
    })
}
