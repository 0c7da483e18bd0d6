//! Training over ranks: gradients, optimizers, schedules, metrics, checkpoints, and an engine made of them.
//!
//! | | |
//! |---|---|
//! | [`Parameters`] | names, tensors, and what each is over the model-parallel group |
//! | [`DataParallel`] | gradients of the mean loss over the global batch, reduced while backward goes on |
//! | [`optim`] | Adam, AdamW, Lion, Muon and SGD with readable state; averages of parameters |
//! | [`schedule`] | the learning rate over time |
//! | [`clip_grad_norm`] | clipping by the norm of the whole model's gradient |
//! | [`check_replicas`] | whether ranks that should hold the same parameters do, to the last bit |
//! | [`FullySharded`] | parameters, gradients and optimizer state in parts |
//! | [`wrap_for_fsdp`] | a sharded model among plain tensors |
//! | [`checkpoint`] | written by all ranks, whole or not at all; loadable on any number of ranks and any layout |
//! | [`RunFolder`] | a run's folder, locked while in use; results of another run are never lost by mistake |
//! | [`Signals`] | asks a run from outside for a checkpoint, or to stop after one |
//! | [`metrics`], [`Progress`] | JSON lines, CSV, TensorBoard; a progress bar |
//! | [`loss`] | losses, and the error of a prediction |
//! | [`objective`] | tasks that a network is trained for, such as regression and diffusion |
//! | [`metric`], [`Weights`] | metrics of forecasts per variable and lead time; weights of variables, latitudes and lead times |
//! | [`Trainer`] | a builder over [`fit`]: model, data, mesh, and nothing else |
//! | [`Task`], [`FieldModel`], [`FieldTask`], [`fit`] | the engine: epochs, validation, resumption |
//! | [`DenseFields`], [`ShardedFields`] | fields that are whole on a rank, or split over a mesh |
//! | [`config`] | sections of a configuration file |
//!
//! Losses are means over samples and ranks are weighted by their sample counts, so that a run gives the same loss curve on
//! 1 and N ranks with the same global batch. This crate reads no environment variable and no configuration file.
//!
//! [`fit`] is one way to put the parts together. A loop of one's own, the same on 1 rank or N:
//!
//! ```
//! use isobar_collectives::Group;
//! use isobar_data::{Sampler, part};
//! use isobar_models::{FullyConnected, FullyConnectedConfig};
//! use isobar_array::Generator;
//! use isobar_shard::ParamStore;
//! use isobar_train::optim::{AdamW, AdamWConfig, Optimizer};
//! use isobar_train::schedule::{Schedule, ScheduleKind};
//! use isobar_train::loss::{LossKind, Mse};
//! use isobar_train::{DataParallel, DataParallelConfig, Parameters, clip_grad_norm};
//! use tch::{Kind, Tensor};
//!
//! fn train(group: &Group) -> Result<f64, Box<dyn std::error::Error>> {
//!     let mut store = ParamStore::new(Generator::new(0));
//!     let sizes = FullyConnectedConfig { in_features: 1, out_features: 1, layer_size: 16, num_layers: 1, ..Default::default() };
//!     let model = FullyConnected::new(&sizes, &mut store)?;
//!     let (params, buffers) = Parameters::of(&store)?;
//!     let parallel = DataParallel::new(&params, &buffers, group, &DataParallelConfig::default())?;
//!     let mut adamw = AdamW::new(&params, &AdamWConfig::default())?;
//!     let sampler = Sampler::new(64, 10, 0, true)?;
//!     let schedule = Schedule::new(ScheduleKind::default(), 1e-2, sampler.batches_per_epoch() as u64, 20)?;
//!     let (mut step, mut last) = (0, f64::INFINITY);
//!     for epoch in 0..20 {
//!         for batch in sampler.epoch(epoch) {
//!             let own: Vec<f32> = part(&batch, group.rank(), group.size()).iter().map(|&i| i as f32 / 64.0).collect();
//!             let x = Tensor::f_from_slice(&own)?.f_view([-1, 1])?;
//!             parallel.zero_grad()?;
//!             let loss = LossKind::from(Mse {}).of(&model.forward(&x)?, &x.f_square()?)?;
//!             let loss = (!own.is_empty()).then_some(loss); // a rank without samples joins all the same
//!             parallel.backward(loss.as_ref(), own.len() as u64, batch.len() as u64)?;
//!             clip_grad_norm(&params, 1.0)?;
//!             adamw.step(schedule.lr(step))?;
//!             step += 1;
//!             last = loss.map_or(Ok(last), |loss| loss.f_double_value(&[]))?;
//!         }
//!     }
//!     Ok(last)
//! }
//!
//! assert!(train(&Group::single())? < 0.05);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod agree;
mod anomaly;
mod bucket;
mod builder;
pub mod checkpoint;
mod clip;
pub mod config;
mod data_parallel;
mod difference;
mod error;
mod exit_reason;
mod field_model;
mod field_task;
mod fields;
mod files;
mod folders;
mod fsdp_wrap;
mod fully_sharded;
mod gradient;
mod gradients;
pub mod loss;
mod loss_scale;
pub mod metric;
pub mod metrics;
mod model;
pub mod objective;
pub mod optim;
mod out_of_memory;
mod parallel;
mod params;
mod progress;
mod ranks;
mod replicas;
mod rollout;
mod run_check;
mod run_folder;
mod samples;
pub mod schedule;
mod stragglers;
mod task;
mod trainer;
mod triggers;
mod variables;
mod weights;

#[doc(hidden)]
pub use inventory;
pub use isobar_registry::Registered;

pub use self::builder::{Trainer, Window, Windows, on_mesh};
pub use self::clip::{clip_grad_norm, grad_norm};
pub use self::config::Precision;
pub use self::data_parallel::{DataParallel, DataParallelConfig, Overlap};
pub use self::difference::{Difference, differences, identity_differences};
pub use self::error::{Error, Result};
pub use self::exit_reason::{exit_reason, main};
pub use self::field_model::FieldModel;
pub use self::field_task::FieldTask;
pub use self::fields::{
    DATA_AXIS, DOMAIN_AXES, DenseFields, FieldLayout, MODEL_AXIS, SHARD_AXIS, ShardedFields, idle_ranks,
};
pub use self::fsdp_wrap::{distribute_over_domain_for_fsdp, wrap_for_fsdp};
pub use self::fully_sharded::{FullySharded, ShardedParameters};
pub use self::loss_scale::LossScale;
pub use self::model::{Conditions, Forward, Network, Regression};
pub use self::objective::{DiffusionConfig, PatchConfig, RegressionConfig};
pub use self::params::{ParamPlacement, Parameter, Parameters};
pub use self::progress::{Bar, Progress, ProgressMode, ProgressPlan, ProgressRecord};
pub use self::ranks::Ranks;
pub use self::replicas::check_replicas;
pub use self::rollout::{Roles, Sample, Start};
pub use self::run_folder::RunFolder;
pub use self::samples::SampleFingerprint;
pub use self::stragglers::Straggler;
pub use self::task::{BoxError, Coming, RolloutError, Scored, Step, Task};
pub use self::trainer::{FitConfig, StepPlan, Summary, fit, plan_step};
pub use self::triggers::{Signals, Stop};
pub use self::variables::{
    Variable, VariableError, checkpoint_error, errors_line, mean_errors, mean_relative, mean_spectrum,
    no_better_than, percent, significant, spectra_line, unique_names,
};
pub use self::weights::{Latitudes, Lead, Weights, WeightsConfig};
pub use isobar_collectives::reduce_loss;
