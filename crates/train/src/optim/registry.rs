//! The optimizers that a configuration can name, from this crate and from all others that are linked into the program.

use std::fmt;

use isobar_registry::{Entries, Named};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::{AdamWConfig, Optimizer};
use crate::error::Result;
use crate::params::Parameters;

/// Settings of an optimizer that a TOML file can name: `[optimizer] type = "NAME"`, the other keys being the fields of the type.
///
/// [`register_optimizer!`](crate::register_optimizer) makes it known to every program that is linked with the crate it stands in.
/// Keys, defaults and their meanings in `reference.toml` come from the type's schema and doc comments.
///
/// ```
/// use isobar_train::optim::{Optimizer, OptimizerConfig, OptimizerKind, OptimizerState};
/// use isobar_train::{Parameters, Result};
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
/// impl OptimizerConfig for RestConfig {
///     const NAME: &'static str = "rest";
///     const SUMMARY: &'static str = "Leaves parameters as they are.";
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
pub trait OptimizerConfig:
    Clone + PartialEq + fmt::Debug + Serialize + DeserializeOwned + JsonSchema + Send + Sync + 'static
{
    /// Value of `optimizer.type`.
    const NAME: &'static str;

    /// One sentence on the optimizer in `reference.toml`.
    const SUMMARY: &'static str;

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

/// Entry of the registry.
#[derive(Debug, Clone, Copy)]
pub struct OptimizerEntry {
    name: &'static str,
    summary: &'static str,
    schema: fn(&mut SchemaGenerator) -> Schema,
    read: fn(Value) -> serde_json::Result<OptimizerKind>,
}

inventory::collect!(OptimizerEntry);

/// Optimizers that were registered while the program runs.
static ADDED: Entries<OptimizerEntry> = Entries::new();

impl OptimizerEntry {
    /// Makes the entry of a configuration type.
    pub const fn of<C: OptimizerConfig>() -> Self {
        Self {
            name: C::NAME,
            summary: C::SUMMARY,
            schema: C::json_schema,
            read: |table| Ok(OptimizerKind::from(serde_json::from_value::<C>(table)?)),
        }
    }
}

impl Named for OptimizerEntry {
    fn name(&self) -> &'static str {
        self.name
    }
}

/// Registers an optimizer at run time, before a configuration is read. One that is registered already stays.
pub fn register<C: OptimizerConfig>() {
    ADDED.add(inventory::iter::<OptimizerEntry>().copied(), OptimizerEntry::of::<C>());
}

/// Returns the names of all registered optimizers, sorted.
///
/// ```
/// assert!(isobar_train::optim::registered().contains(&"adamw"));
/// ```
pub fn registered() -> Vec<&'static str> {
    entries().iter().map(Named::name).collect()
}

fn entries() -> Vec<OptimizerEntry> {
    ADDED.all(inventory::iter::<OptimizerEntry>().copied())
}

/// An [`OptimizerConfig`] of any type.
trait AnyConfig: fmt::Debug + Send + Sync {
    fn name(&self) -> &'static str;
    fn table(&self) -> serde_json::Result<Value>;
    fn copied(&self) -> Box<dyn AnyConfig>;
    fn lr(&self) -> f64;
    fn check(&self) -> Result<()>;
    fn moments(&self) -> u64;
    fn build(&self, params: &Parameters) -> Result<Box<dyn Optimizer>>;
}

impl<C: OptimizerConfig> AnyConfig for C {
    fn name(&self) -> &'static str {
        C::NAME
    }

    fn table(&self) -> serde_json::Result<Value> {
        serde_json::to_value(self)
    }

    fn copied(&self) -> Box<dyn AnyConfig> {
        Box::new(self.clone())
    }

    fn lr(&self) -> f64 {
        OptimizerConfig::lr(self)
    }

    fn check(&self) -> Result<()> {
        OptimizerConfig::check(self)
    }

    fn moments(&self) -> u64 {
        OptimizerConfig::moments(self)
    }

    fn build(&self, params: &Parameters) -> Result<Box<dyn Optimizer>> {
        OptimizerConfig::build(self, params)
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
/// ```
pub struct OptimizerKind(Box<dyn AnyConfig>);

impl OptimizerKind {
    /// Returns the value of `optimizer.type`.
    pub fn name(&self) -> &'static str {
        self.0.name()
    }

    /// Returns the learning rate at its highest.
    pub fn lr(&self) -> f64 {
        self.0.lr()
    }

    /// Checks that settings are in their ranges.
    pub(crate) fn check(&self) -> Result<()> {
        self.0.check()
    }

    /// Returns the largest number of state elements per parameter element.
    pub fn moments(&self) -> u64 {
        self.0.moments()
    }

    /// Makes the optimizer for these parameters. All ranks of their group call.
    ///
    /// # Errors
    ///
    /// A setting out of its range, or state that cannot be allocated; the errors of the communication.
    pub fn build(&self, params: &Parameters) -> Result<Box<dyn Optimizer>> {
        self.0.build(params)
    }
}

impl<C: OptimizerConfig> From<C> for OptimizerKind {
    fn from(config: C) -> Self {
        Self(Box::new(config))
    }
}

impl Default for OptimizerKind {
    fn default() -> Self {
        AdamWConfig::default().into()
    }
}

impl Clone for OptimizerKind {
    fn clone(&self) -> Self {
        Self(self.0.copied())
    }
}

impl fmt::Debug for OptimizerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for OptimizerKind {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
            && matches!((self.0.table(), other.0.table()), (Ok(own), Ok(other)) if own == other)
    }
}

impl Serialize for OptimizerKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let table = self.0.table().and_then(|keys| isobar_registry::tagged(self.name(), keys));
        table.map_err(<S::Error as serde::ser::Error>::custom)?.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for OptimizerKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let (name, keys) = isobar_registry::read(deserializer)?;
        let all = entries();
        match all.iter().find(|entry| entry.name == name) {
            Some(entry) => (entry.read)(keys).map_err(D::Error::custom),
            None => Err(D::Error::custom(isobar_registry::unknown("optimizer", &name, &registered()))),
        }
    }
}

impl JsonSchema for OptimizerKind {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "OptimizerKind".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let form = |entry: &OptimizerEntry| {
            isobar_registry::schema_of(entry.name, Some(entry.summary), entry.schema, generator)
        };
        isobar_registry::one_of("The optimizer of a run.", entries().iter().map(form).collect())
    }
}
