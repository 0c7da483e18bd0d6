//! The optimizers that a configuration can name, from this crate and from all others that are linked into the program.

use std::fmt;
use std::sync::Arc;

use isobar_registry::{Choice, Entry, Family, Holds, Registered};

use super::{AdamWConfig, Optimizer};
use crate::error::Result;
use crate::params::Parameters;

/// Settings of an optimizer that a TOML file can name: `[optimizer] type = "NAME"`, the other keys being the fields of the type.
///
/// Its name and its keys are those of [`Registered`]. [`register_optimizer!`](crate::register_optimizer) makes it known to every program that is linked with the crate it stands in.
///
/// ```
/// use isobar_train::optim::{Optimizer, OptimizerConfig, OptimizerKind, OptimizerState};
/// use isobar_train::{Parameters, Registered, Result};
/// use schemars::JsonSchema;
/// use serde::{Deserialize, Serialize};
///
/// /// Settings of an optimizer that does nothing.
/// #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
/// #[serde(deny_unknown_fields)]
/// struct RestConfig {
///     /// Learning rate at its highest.
///     lr: f64,
/// }
///
/// struct Rest;
///
/// impl Optimizer for Rest {
///     fn step(&mut self, _lr: f64) -> Result<()> {
///         Ok(())
///     }
///     fn state(&self) -> OptimizerState {
///         OptimizerState::default()
///     }
///     fn load_state(&mut self, _state: &OptimizerState) -> Result<()> {
///         Ok(())
///     }
/// }
///
/// impl Registered for RestConfig {
///     const NAME: &'static str = "rest";
///     const SUMMARY: &'static str = "Leaves parameters as they are.";
/// }
///
/// impl OptimizerConfig for RestConfig {
///     fn lr(&self) -> f64 {
///         self.lr
///     }
///     fn moments(&self) -> u64 {
///         0
///     }
///     fn build(&self, _params: &Parameters) -> Result<Box<dyn Optimizer>> {
///         Ok(Box::new(Rest))
///     }
/// }
///
/// isobar_train::register_optimizer!(RestConfig);
///
/// let kind: OptimizerKind = serde_json::from_str(r#"{ "type": "rest", "lr": 0.5 }"#)?;
/// assert_eq!((kind.name(), kind.lr()), ("rest", 0.5));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait OptimizerConfig: fmt::Debug + Send + Sync {
    /// Returns the learning rate at its highest.
    fn lr(&self) -> f64;

    /// Checks that settings are in their ranges. Does not communicate.
    ///
    /// # Errors
    ///
    /// A setting out of its range.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the largest number of state elements per parameter element.
    fn moments(&self) -> u64;

    /// Makes the optimizer for these parameters. All ranks of their group call.
    ///
    /// # Errors
    ///
    /// Settings out of their ranges, state that cannot be allocated, the errors of the communication.
    fn build(&self, params: &Parameters) -> Result<Box<dyn Optimizer>>;
}

/// Registers a configuration type as an optimizer: see [`OptimizerConfig`](crate::optim::OptimizerConfig).
#[macro_export]
macro_rules! register_optimizer {
    ($config:ty) => {
        $crate::inventory::submit! { $crate::optim::OptimizerEntry::of::<$config>() }
    };
}

isobar_registry::collected! {
    /// Entry of the registry of optimizers.
    pub struct OptimizerEntry(Optimizers);
}

/// The family of the optimizers.
#[derive(Debug)]
pub struct Optimizers;

impl Family for Optimizers {
    const NOUN: &'static str = "optimizer";
    const SUMMARY: &'static str = "The optimizer of a run.";
    type Member = dyn OptimizerConfig;

    fn entries() -> Vec<Entry<Self>> {
        entries()
    }

    fn standard() -> Choice<Self> {
        AdamWConfig::default().into()
    }
}

impl<C: OptimizerConfig + Registered> Holds<C> for Optimizers {
    fn hold(config: C) -> Arc<dyn OptimizerConfig> {
        Arc::new(config)
    }
}

/// The optimizer of a run: the settings of any registered one. By default AdamW.
///
/// ```
/// use isobar_train::optim::{LionConfig, OptimizerKind};
///
/// let lion = OptimizerKind::from(LionConfig { lr: 3e-4, ..LionConfig::default() });
/// assert_eq!((lion.name(), lion.lr(), lion.moments()), ("lion", 3e-4, 1));
/// assert_eq!(OptimizerKind::default().name(), "adamw");
/// assert!(isobar_train::optim::registered().contains(&"sgd"));
/// ```
pub type OptimizerKind = Choice<Optimizers>;
