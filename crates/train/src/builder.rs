//! A builder over [`fit`]: a program names its model, data and mesh, and the builder makes parameters, groups and the task.

mod program;
mod samples;

use std::ops::{Deref, Range};
use std::path::PathBuf;

use isobar_array::Generator;
use isobar_collectives::Group;
use isobar_data::{Augment, InMemory, Normalizer};
use isobar_manager::{DeviceMesh, DistributedManager};
use isobar_models::{Architecture, Denoiser, FieldSpec, Model, Sharding};
use isobar_shard::{MeshParams, ParallelRegion, ParamStore, Scope, ShardTensor};
use serde_json::{Value, json};
use tch::{Device, Tensor};

use self::program::in_program;
use self::samples::{Part, normalizer, same_samples};
use crate::agree::{agree, same_settings};
use crate::config::{OptimizerKind, Precision, ScheduleKind};
use crate::error::{Context, Error};
use crate::field_model::FieldModel;
use crate::field_task::FieldTask;
use crate::fields::{DATA_AXIS, DOMAIN_AXES, FieldLayout, MODEL_AXIS, SHARD_AXIS, ShardedFields};
use crate::fully_sharded::ShardedParameters;
use crate::loss::LossKind;
use crate::metric::{MetricKind, Report};
use crate::model::Network;
use crate::objective::{self, ObjectiveKind, Setup};
use crate::params::Parameters;
use crate::ranks::Ranks;
use crate::task::BoxError;
use crate::trainer::{FitConfig, Summary, fit};
use crate::variables::Variable;
use crate::weights::{Latitudes, Weights, WeightsConfig};

/// A rank's part of a field: a range of points along each spatial dim.
pub type Window = [Range<usize>];

/// A rank's parts of the fields of inputs and of targets. Derefs to the window of the inputs, which is that of the targets, too, unless
/// [`Trainer::target_extents`] says otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Windows {
    /// Window of the inputs.
    pub inputs: Vec<Range<usize>>,
    /// Window of the targets.
    pub targets: Vec<Range<usize>>,
}

impl Deref for Windows {
    type Target = Window;

    fn deref(&self) -> &Window {
        &self.inputs
    }
}

/// Trains a model on fields that are sharded over a mesh of all ranks, with the same result on any mesh.
///
/// The axes of the mesh say what is split: `data` and `shard` the samples, `domain`, `domain_y` and `domain_z` the first three
/// spatial dims, `shard` also the parameters, `model` the channels of models that support it. The default mesh is `["data"]`.
/// Gradients are summed over the mesh once a step.
///
/// ```
/// use isobar_array::{Array, Conv, Padding};
/// use isobar_data::InMemory;
/// use isobar_models::{Batch, Mode, Model, Result};
/// use isobar_shard::{Init, Params, Placement, Scope};
/// use isobar_train::{Trainer, Window, optim::AdamWConfig};
/// use tch::{Device, Kind, Tensor};
///
/// /// One convolution of three by three points.
/// struct Blur<A>(A);
///
/// impl<A: Array> Blur<A> {
///     fn new(params: &mut Scope<'_, A>) -> isobar_shard::Result<Self> {
///         Ok(Self(params.param("weight", &[1, 1, 3, 3], Init::FanIn(9), Placement::Replicate)?))
///     }
/// }
///
/// impl<A: Array> Model<A> for Blur<A> {
///     fn forward(&self, batch: &Batch<A>, _mode: Mode<'_>) -> Result<Batch<A>> {
///         let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
///         Ok(Batch::of_fields(batch.require("blur", Batch::<A>::FIELDS)?.conv(&self.0, None, &conv)?))
///     }
/// }
///
/// /// This rank's window of 16 samples.
/// fn read(window: &Window) -> isobar_data::Result<InMemory> {
///     let shape = [16, 1, window[0].len() as i64, window[1].len() as i64];
///     let x = Tensor::f_arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu))?.f_sin()?.f_view(shape)?;
///     InMemory::pairs(x.shallow_clone(), x)
/// }
///
/// let folder = tempfile::tempdir()?;
/// let summary = Trainer::new(folder.path().join("blur"))
///     .mesh(&[-1, 1], &["data", "domain"])
///     .optimizer(AdamWConfig { lr: 0.05, ..AdamWConfig::default() })
///     .epochs(20)
///     .fit(&[8, 8], |window| Ok((read(window)?, read(window)?)), Blur::new)?;
/// assert!(summary.validation_error.is_some_and(|error| error < 0.5));
/// # Ok::<(), isobar_train::BoxError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Trainer {
    mesh: (Vec<i64>, Vec<String>),
    config: FitConfig,
    augment: Augment,
    variables: Vec<Variable>,
    latitudes: Option<Latitudes>,
    normalize: bool,
    objective: Option<ObjectiveKind>,
    denoiser: Option<Denoiser>,
    target_extents: Option<Vec<usize>>,
}

/// Facts about a model that is trained.
struct Parts<'a> {
    /// Its configuration; null if it has none. A run that resumes must have the same.
    model: Value,
    sharding: &'a Sharding,
    /// Factor by which its outputs are finer than its inputs.
    finer: usize,
}

impl Trainer {
    /// Makes a trainer whose metrics and checkpoints go into `folder`.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            mesh: (vec![-1], vec![DATA_AXIS.to_owned()]),
            config: FitConfig { folder: folder.into(), ..FitConfig::default() },
            augment: Augment::None,
            variables: Vec::new(),
            latitudes: None,
            normalize: true,
            objective: None,
            denoiser: None,
            target_extents: None,
        }
    }

    /// Sets the mesh of all ranks. One extent may be -1.
    #[must_use]
    pub fn mesh(self, shape: &[i64], names: &[&str]) -> Self {
        Self { mesh: (shape.to_vec(), names.iter().map(|&name| name.to_owned()).collect()), ..self }
    }

    /// Puts the targets on a grid of their own, of these spatial extents; the model's outputs must be on it. Weights and metrics are
    /// those of this grid. `data` then reads two windows of each sample ([`Windows`]).
    ///
    /// ```
    /// use isobar_array::Array;
    /// use isobar_data::InMemory;
    /// use isobar_models::{Batch, Mode, Model, Result};
    /// use isobar_shard::{Init, Params, Placement, Scope};
    /// use isobar_train::{Trainer, Window, Windows};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// /// Means over the cells of a grid of 6 by 4 points, times a factor.
    /// struct Coarsen<A>(A);
    ///
    /// impl<A: Array> Model<A> for Coarsen<A> {
    ///     fn forward(&self, batch: &Batch<A>, _mode: Mode<'_>) -> Result<Batch<A>> {
    ///         let fields = batch.require("coarsen", Batch::<A>::FIELDS)?;
    ///         Ok(Batch::of_fields(fields.adaptive_avg_pool(&[6, 4])?.mul(&self.0)?))
    ///     }
    /// }
    ///
    /// /// This rank's windows of 4 samples.
    /// fn read(windows: &Windows) -> isobar_data::Result<InMemory> {
    ///     let field = |window: &Window| {
    ///         let shape = [4, 1, window[0].len() as i64, window[1].len() as i64];
    ///         Tensor::f_arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu))?.f_sin()?.f_view(shape)
    ///     };
    ///     InMemory::pairs(field(&windows.inputs)?, field(&windows.targets)?)
    /// }
    ///
    /// let folder = tempfile::tempdir()?;
    /// let summary = Trainer::new(folder.path().join("coarsen")).target_extents(&[6, 4]).epochs(1).fit(
    ///     &[9, 8],
    ///     |windows| Ok((read(windows)?, read(windows)?)),
    ///     |params| Ok::<_, isobar_shard::Error>(Coarsen(params.param("factor", &[], Init::Constant(1.0), Placement::Replicate)?)),
    /// )?;
    /// assert!(summary.losses.iter().all(|loss| loss.is_finite()));
    /// # Ok::<(), isobar_train::BoxError>(())
    /// ```
    #[must_use]
    pub fn target_extents(self, extents: &[usize]) -> Self {
        Self { target_extents: Some(extents.to_vec()), ..self }
    }

    /// Sets the passes over the training samples.
    #[must_use]
    pub fn epochs(self, epochs: u64) -> Self {
        self.configure(|config| config.train.epochs = epochs)
    }

    /// Sets the number of samples of a step, over all ranks together.
    #[must_use]
    pub fn batch_size(self, samples: usize) -> Self {
        self.configure(|config| config.train.batch_size = samples)
    }

    /// Sets the precision of the computation.
    #[must_use]
    pub fn precision(self, precision: Precision) -> Self {
        self.configure(|config| config.train.precision = precision)
    }

    /// Sets the loss, on normalized values.
    #[must_use]
    pub fn loss(self, loss: impl Into<LossKind>) -> Self {
        self.configure(|config| config.train.loss = loss.into())
    }

    /// Sets the task that the model is trained for, by default regression, or diffusion for a denoiser.
    #[must_use]
    pub fn objective(self, objective: impl Into<ObjectiveKind>) -> Self {
        Self { objective: Some(objective.into()), ..self }
    }

    /// Says that the model is a denoiser, with its data and noise levels, for [`fit`](Self::fit);
    /// [`fit_architecture`](Self::fit_architecture) asks the model's configuration.
    #[must_use]
    pub fn denoising(self, denoiser: impl Into<Denoiser>) -> Self {
        Self { denoiser: Some(denoiser.into()), ..self }
    }

    /// Sets the optimizer.
    #[must_use]
    pub fn optimizer(self, optimizer: impl Into<OptimizerKind>) -> Self {
        self.configure(|config| config.optimizer = optimizer.into())
    }

    /// Sets the learning rate schedule.
    #[must_use]
    pub fn schedule(self, schedule: impl Into<ScheduleKind>) -> Self {
        self.configure(|config| config.schedule = schedule.into())
    }

    /// Sets the seed of initial weights, sample order, augmentation and dropout.
    #[must_use]
    pub fn seed(self, seed: u64) -> Self {
        self.configure(|config| config.seed = seed)
    }

    /// Sets the augmentation of training samples.
    #[must_use]
    pub fn augment(self, augment: Augment) -> Self {
        Self { augment, ..self }
    }

    /// Names the channels of the targets, for reports of errors per variable.
    #[must_use]
    pub fn variables(self, variables: impl IntoIterator<Item = Variable>) -> Self {
        Self { variables: variables.into_iter().collect(), ..self }
    }

    /// Sets the weights of variables, latitudes, lead times and the regularization in the loss. `latitudes` are those of the full
    /// targets, if the weights need them; see [`Weights`].
    #[must_use]
    pub fn weights(self, weights: WeightsConfig, latitudes: Option<Latitudes>) -> Self {
        Self { latitudes, ..self }.configure(|config| config.train.weights = weights)
    }

    /// Sets the metrics that are reported besides the errors.
    #[must_use]
    pub fn report(self, metrics: impl IntoIterator<Item = MetricKind>) -> Self {
        self.configure(|config| config.metrics.report = metrics.into_iter().collect())
    }

    /// Sets whether the model gets each channel with zero mean and unit deviation over the training samples (the default), or the
    /// values as they are.
    #[must_use]
    pub fn normalize(self, normalize: bool) -> Self {
        Self { normalize, ..self }
    }

    /// Changes any other setting of [`fit`].
    #[must_use]
    pub fn configure(mut self, change: impl FnOnce(&mut FitConfig)) -> Self {
        change(&mut self.config);
        self
    }

    /// Trains the model that `build` makes, on fields with the spatial extents `extents`. `data` returns the training and
    /// validation samples, of which it reads this rank's windows only.
    ///
    /// Every rank calls. [`DistributedManager::initialize`] is called if the program has not.
    ///
    /// # Errors
    ///
    /// A mesh that does not fit the ranks or the fields, the errors of `data` and `build`, samples of other shapes than this rank's
    /// windows, no samples, values that are not finite, a channel that is constant and can't be normalized, ranks with other samples
    /// than rank 0, and the errors of [`fit`].
    pub fn fit<M, E>(
        self,
        extents: &[usize],
        data: impl FnOnce(&Windows) -> Result<(InMemory, InMemory), BoxError>,
        build: impl FnOnce(&mut Scope<'_, ShardTensor>) -> Result<M, E>,
    ) -> Result<Summary, BoxError>
    where
        M: Model<ShardTensor> + 'static,
        E: Into<BoxError>,
    {
        let build = |params: &mut Scope<'_, ShardTensor>| match build(params) {
            Ok(model) => Ok(Box::new(model) as Box<dyn Model<ShardTensor>>),
            Err(error) => Err(error.into()),
        };
        let parts = Parts { model: Value::Null, sharding: &Sharding::new(), finer: 1 };
        self.run("of the program", extents, data, build, parts)
    }

    /// Does the same as [`fit`](Self::fit) for a model with a configuration, such as those of `isobar_models`: its parameters are
    /// split as [`Architecture::sharding`] declares. A denoiser is trained as one.
    ///
    /// # Errors
    ///
    /// Those of [`fit`](Self::fit); a mesh over which the model cannot be split.
    pub fn fit_architecture<C: Architecture>(
        self,
        extents: &[usize],
        data: impl FnOnce(&Windows) -> Result<(InMemory, InMemory), BoxError>,
        config: &C,
    ) -> Result<Summary, BoxError> {
        let names = &self.mesh.1;
        let splits = |axes: &[&str]| names.iter().any(|name| axes.contains(&name.as_str()));
        if (splits(&[MODEL_AXIS]) && !C::MODEL_PARALLEL)
            || (splits(&DOMAIN_AXES) && !config.sharding().splits_fields())
        {
            let found = format!("axes {names:?}");
            let expected = format!("axes over which the model {:?} can be split", C::NAME);
            return Err(Error::invalid("the mesh", found, expected).into());
        }
        let sharding = config.sharding();
        let finer = match &self.target_extents {
            None => config.refinement(),
            Some(_) => 1,
        };
        let targets = self.target_extents.as_deref().unwrap_or(extents);
        let given: Vec<usize> = extents.iter().map(|extent| extent / finer.max(1)).collect();
        let outputs = config.output_extents(&given);
        if outputs != targets {
            let found = format!("{targets:?}");
            let expected = format!("those of the outputs of {:?}, {outputs:?}", C::NAME);
            return Err(Error::invalid("the extents of targets", found, expected).into());
        }
        let denoiser = self.denoiser.clone().or_else(|| config.denoises());
        let named = Self { denoiser, ..self };
        let mut model = serde_json::to_value(config)?;
        if let Some(keys) = model.as_object_mut() {
            keys.insert("type".to_owned(), C::NAME.into());
        }
        let parts = Parts { model, sharding: &sharding, finer };
        named.run(C::NAME, extents, data, |params| Ok(config.build(params)?), parts)
    }

    fn run(
        self,
        name: &str,
        extents: &[usize],
        data: impl FnOnce(&Windows) -> Result<(InMemory, InMemory), BoxError>,
        build: impl FnOnce(&mut Scope<'_, ShardTensor>) -> Result<Box<dyn Model<ShardTensor>>, BoxError>,
        parts: Parts<'_>,
    ) -> Result<Summary, BoxError> {
        let Parts { model, sharding, finer } = parts;
        let manager = DistributedManager::get().or_else(|_| DistributedManager::initialize())?;
        let world = manager.group(None)?;
        let objective = self.checked_objective(name, extents);
        let told =
            objective.as_ref().map(|_| ()).map_err(|error| Error::invalid("the task", error, "a valid one"));
        let agreed = agree(&world, told);
        let objective = objective?;
        agreed?;
        agree(&world, self.config.check().map_err(in_program))?;
        same_settings(&world, &self.shared(extents))?;
        let names: Vec<&str> = self.mesh.1.iter().map(String::as_str).collect();
        let mesh = manager.initialize_mesh(&self.mesh.0, &names)?;
        let target_extents = self.target_extents.as_deref().unwrap_or(extents);
        let layout = ShardedFields::new(&mesh, extents)?.with_targets(target_extents)?;
        let windows =
            Windows { inputs: layout.window(extents)?, targets: layout.targets().window(target_extents)? };

        let Built { network, parameters, buffers, ranks } =
            self.build(build, sharding, (&mesh, &world), manager.device())?;
        let forward = Network::new(network).refining(finer).denoising(self.denoiser.clone());
        let forward = forward.objective(objective.clone(), self.config.seed);

        let (train, validation) = read_samples(data, &windows, &world)?;
        let (input, target) = self.normalizers(&train, &world)?;
        let variables = named(self.variables.clone(), channels_of(train.targets()).unwrap_or(1));
        let mut config = self.config.clone();
        config.task = json!(objective);
        config.data_parallel.broadcast_buffers |= manager.broadcast_buffers();
        config.data_parallel.find_unused_parameters |= manager.find_unused_parameters();
        self.describe(&mut config, extents, model, &train);
        if config.extra.is_null() {
            // The map from the network's numbers to physical values.
            config.extra = json!({ "input": input, "target": target, "variables": variables });
        }

        let (kind, device) = (config.train.precision.kind(), manager.device());
        let moved = train.to(device, kind).and_then(|train| Ok((train, validation.to(device, kind)?)));
        let (train, validation) = agree(&world, moved.map_err(data_error))?;
        let weights =
            Weights::new(&config.train.weights, &variables, self.latitudes.as_ref(), &windows.targets);
        let weights = agree(&world, weights)?;
        let climatology =
            || train.targets().f_mean_dim(0, false, None).context(|| "the mean field".to_owned());
        let report = agree(&world, Report::new(&config.metrics.report, climatology))?;
        let task = FieldTask {
            model: FieldModel {
                forward,
                layout,
                positions: None,
                change: None,
                input,
                target,
                variables,
                roles: None,
                missing: None,
            },
            train: train.into(),
            validation: validation.into(),
            rollouts: None,
            augment: self.augment,
            loss: config.train.loss.clone(),
            weights,
            report,
            seed: config.seed,
        };
        Ok(fit(&task, &parameters, &buffers, &ranks, &config)?)
    }

    /// Returns the task, if it fits the model and the fields. Does not communicate.
    fn checked_objective(&self, name: &str, extents: &[usize]) -> Result<ObjectiveKind, BoxError> {
        let standard = || objective::standard(self.denoiser.as_ref());
        let objective = self.objective.clone().unwrap_or_else(standard);
        let setup = Setup { model: name.to_owned(), denoiser: self.denoiser.clone(), ..Setup::default() };
        objective.check(&setup)?;
        if let Some(stage) = objective.first_stage() {
            let found =
                format!("{} = {}, a run that the task starts from", stage.key, stage.folder.display());
            let expected = "a task without a first stage; `isobar train` runs such tasks";
            return Err(Error::invalid("the task", found, expected).into());
        }
        let fields = FieldSpec {
            source: "the program".to_owned(),
            extents: extents.to_vec(),
            target_extents: self.target_extents.clone().filter(|targets| targets != extents),
            ..FieldSpec::default()
        };
        objective.check_fields(&fields, false)?;
        for (what, extents) in [
            ("the extents of fields", Some(extents)),
            ("the extents of targets", self.target_extents.as_deref()),
        ] {
            if let Some(extents) = extents.filter(|extents| extents.contains(&0)) {
                return Err(
                    Error::invalid(what, format!("{extents:?}"), "1 point or more along each dim").into()
                );
            }
        }
        Ok(objective)
    }

    /// Returns the settings that all ranks must share before they make a mesh and read data.
    fn shared(&self, extents: &[usize]) -> Value {
        let mut shared = self.config.shared();
        shared["mesh"] = json!(self.mesh);
        shared["extents"] = json!(extents);
        shared["target_extents"] = json!(self.target_extents);
        shared["normalize"] = self.normalize.into();
        shared
    }

    /// Makes the model and its parameters on the mesh. All ranks call.
    fn build(
        &self,
        build: impl FnOnce(&mut Scope<'_, ShardTensor>) -> Result<Box<dyn Model<ShardTensor>>, BoxError>,
        sharding: &Sharding,
        (mesh, world): (&DeviceMesh, &Group),
        device: Device,
    ) -> Result<Built, BoxError> {
        let kind = self.config.train.precision.kind();
        let mut store = ParamStore::new(Generator::new(self.config.seed)).with_options(kind, device);
        if mesh.names().contains(&MODEL_AXIS) {
            store = store.with_region(ParallelRegion::new(mesh.group(MODEL_AXIS)?));
        }
        let (mut params, ranks) = on_mesh(&mut store, mesh, world, sharding, true)?;
        let network = build(&mut Scope::new(&mut params, "")).map_err(|error| Error::Model { source: error });
        let network = agree(world, network)?;
        if let Some(pattern) = params.unmatched().first() {
            return Err(unmatched(pattern).into());
        }
        let (parameters, buffers) = Parameters::on_mesh(&store, mesh)?;
        Ok(Built { network, parameters, buffers, ranks })
    }

    /// Normalizers of the inputs and the targets, by the training samples of all ranks. All ranks call.
    fn normalizers(&self, train: &InMemory, world: &Group) -> Result<(Normalizer, Normalizer), BoxError> {
        match self.normalize {
            true => Ok((
                normalizer("inputs", train.inputs(), world)?,
                normalizer("targets", train.targets(), world)?,
            )),
            false => Ok((Normalizer::new(0.0, 1.0)?, Normalizer::new(0.0, 1.0)?)),
        }
    }

    /// Adds the augmentation and the identity, which a run that resumes must share, unless the program has set them.
    fn describe(&self, config: &mut FitConfig, extents: &[usize], model: Value, train: &InMemory) {
        if config.data.is_null() && self.augment != Augment::None {
            config.data = json!({ "augment": self.augment });
        }
        if !config.identity.is_null() {
            return;
        }
        let channels = (channels_of(train.inputs()), channels_of(train.targets()).unwrap_or(1));
        config.identity = json!({ "extents": extents, "channels": channels, "normalize": self.normalize });
        if let Some(targets) = &self.target_extents {
            config.identity["target_extents"] = json!(targets);
        }
        if !model.is_null() {
            config.identity["model"] = model;
        }
    }
}

/// A model on the mesh.
struct Built {
    network: Box<dyn Model<ShardTensor>>,
    parameters: Parameters,
    buffers: Vec<(String, Tensor)>,
    ranks: Ranks,
}

/// Reads this rank's windows of the training and validation samples, and compares them with those of the other ranks. All ranks call.
fn read_samples(
    data: impl FnOnce(&Windows) -> Result<(InMemory, InMemory), BoxError>,
    windows: &Windows,
    world: &Group,
) -> Result<(InMemory, InMemory), BoxError> {
    let read = data(windows).map_err(|error| Error::Samples { source: error });
    let (train, validation) = agree(world, read)?;
    let checked = Part::Training.check(&train, windows);
    let checked = checked.and_then(|()| Part::Validation.check(&validation, windows));
    agree(world, checked)?;
    same_samples(&train, &validation, windows, world)?;
    Ok((train, validation))
}

/// Number of channels of fields `[sample, channel, spatial…]`.
fn channels_of(fields: &Tensor) -> Option<i64> {
    fields.size().get(1).copied()
}

/// Supplies a model's parameters over a mesh of all ranks, with the ranks that [`fit`] needs: gradients are left pending,
/// parameters are split as `sharding` declares, or over the axis `shard` if the mesh has it; what the store's region splits is
/// split along the axis `model`. With `trains` false, for evaluation, parameters are not split over the axis `shard`. Does not
/// communicate.
///
/// # Errors
///
/// A rank outside the mesh; a region of the store with other ranks than the axis `model`.
///
/// ```
/// use isobar_collectives::Group;
/// use isobar_manager::DeviceMesh;
/// use isobar_models::Sharding;
/// use isobar_array::Generator;
/// use isobar_shard::{Init, ParamStore, Params, Placement};
///
/// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
/// let mut store = ParamStore::new(Generator::new(1));
/// let (mut params, _ranks) = isobar_train::on_mesh(&mut store, &mesh, &Group::single(), &Sharding::new(), true)?;
/// let weight = params.param("weight", &[3, 2], Init::XavierUniform, Placement::Replicate)?;
/// assert_eq!(weight.shape(), [3, 2]);
/// # Ok::<(), isobar_train::BoxError>(())
/// ```
pub fn on_mesh<'a>(
    store: &'a mut ParamStore,
    mesh: &DeviceMesh,
    world: &Group,
    sharding: &Sharding,
    trains: bool,
) -> crate::Result<(MeshParams<'a>, Ranks)> {
    let names = mesh.names();
    let mut params = MeshParams::new(store, mesh);
    if names.contains(&MODEL_AXIS) {
        params = params.along(MODEL_AXIS)?;
    }
    let params = params.pending();
    if !names.contains(&SHARD_AXIS) {
        return Ok((params.laid_out(sharding.parameter_layouts()), Ranks::sharded(world, mesh)?));
    }
    if !trains {
        return Ok((params, Ranks::sharded(world, mesh)?));
    }
    let sharded = ShardedParameters::default();
    Ok((params.watched(sharded.watch()), Ranks::fully_sharded(world, mesh, &sharded)?))
}

/// A declared layout of a parameter that the model does not have.
fn unmatched(pattern: &str) -> Error {
    let found = format!("parameters {pattern:?}, which the model does not have");
    Error::invalid("the sharding of the model", found, "names of its parameters (`Architecture::sharding`)")
}

/// The variables; channels without a name are numbered where there are several.
fn named(mut variables: Vec<Variable>, channels: i64) -> Vec<Variable> {
    for channel in variables.len()..usize::try_from(channels).unwrap_or(0) {
        let name = if channels == 1 { String::new() } else { format!("channel_{channel}") };
        variables.push(Variable::new(name));
    }
    variables
}

fn data_error(error: isobar_data::Error) -> Error {
    Error::Samples { source: error.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_without_a_name_are_numbered() {
        let names = |given: &[&str], channels| {
            let variables = named(given.iter().map(|&name| Variable::new(name)).collect(), channels);
            variables.into_iter().map(|variable| variable.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&[], 1), [""]);
        assert_eq!(names(&["u"], 3), ["u", "channel_1", "channel_2"]);
        assert_eq!(names(&["u", "v"], 1), ["u", "v"]);
    }
}
