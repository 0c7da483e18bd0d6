//! The models that a configuration can name, from this crate and from all others that are linked into the program.
//!
//! A model registers in its own folder, with one line: `register!(MyConfig)`. The entries are collected at link time
//! (`inventory`), so that there is no list to keep, and a model of a user's crate is on the same footing as a built-in one.

mod config;

use isobar_registry::{Entries, Named};
use schemars::{Schema, SchemaGenerator};
use serde_json::Value;

pub use self::config::ModelConfig;
use crate::model::{AnyArchitecture, Architecture};

/// Registers a configuration type as a model: see [`Architecture`].
#[macro_export]
macro_rules! register {
    ($config:ty) => {
        $crate::inventory::submit! { $crate::Entry::of::<$config>() }
    };
}

/// Entry of the registry.
#[derive(Clone, Copy)]
pub struct Entry {
    name: &'static str,
    summary: Option<&'static str>,
    type_name: fn() -> &'static str,
    model_parallel: bool,
    schema: fn(&mut SchemaGenerator) -> Schema,
    read: fn(Value) -> serde_json::Result<Box<dyn AnyArchitecture>>,
}

inventory::collect!(Entry);

/// Models that were registered while the program runs.
static ADDED: Entries<Entry> = Entries::new();

impl Named for Entry {
    fn name(&self) -> &'static str {
        self.name
    }

    fn type_name(&self) -> &'static str {
        (self.type_name)()
    }
}

impl Entry {
    /// Makes the entry of a configuration type.
    pub const fn of<C: Architecture>() -> Self {
        Self {
            name: C::NAME,
            summary: C::SUMMARY,
            type_name: std::any::type_name::<C>,
            model_parallel: C::MODEL_PARALLEL,
            schema: C::json_schema,
            read: |table| Ok(Box::new(serde_json::from_value::<C>(table)?)),
        }
    }

    /// Value of `model.type`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns whether the model's channels can be split over the axis `model`.
    pub fn model_parallel(&self) -> bool {
        self.model_parallel
    }
}

/// Registers a model at run time, before a configuration is read: for programs that name their models in `main` instead of
/// with [`register!`](macro@crate::register). The same type may be registered twice.
pub fn register<C: Architecture>() {
    ADDED.add(inventory::iter::<Entry>().copied(), Entry::of::<C>());
}

/// Returns all registered models, sorted by name.
///
/// ```
/// let names: Vec<&str> = isobar_models::registered().iter().map(|entry| entry.name()).collect();
/// assert!(names.contains(&"afno") && names.contains(&"sr_res_net"));
/// ```
pub fn registered() -> Vec<Entry> {
    ADDED.all(inventory::iter::<Entry>().copied())
}
