//! The models that a configuration can name, from this crate and from all others that are linked into the program.
//!
//! A model registers in its own folder, with one line: `register!(MyConfig)`. The entries are collected at link time
//! (`inventory`), so that there is no list to keep, and a model of a user's crate is on the same footing as a built-in one.

mod config;

use isobar_array::Array;
use isobar_registry::{Entries, Named};
use isobar_shard::{ModelSize, Parallel, ParamCount, Scope, ShardTensor};
use schemars::{Schema, SchemaGenerator};
use serde_json::Value;
use tch::Tensor;

pub use self::config::ModelConfig;
use crate::diffusion::SigmaData;
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::model::{Architecture, LargestArray, Model};
use crate::sharding::Sharding;
use crate::traffic::{Split, Traffic};

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

/// An [`Architecture`] of any type.
pub(crate) trait AnyArchitecture: std::fmt::Debug + Send + Sync {
    fn name(&self) -> &'static str;
    fn model_parallel(&self) -> bool;
    fn table(&self) -> serde_json::Result<Value>;
    fn copied(&self) -> Box<dyn AnyArchitecture>;
    fn build_dense(&self, params: &mut Scope<'_, Tensor>) -> Result<Box<dyn Model<Tensor>>>;
    fn build_sharded(&self, params: &mut Scope<'_, ShardTensor>) -> Result<Box<dyn Model<ShardTensor>>>;
    fn check(&self, fields: &FieldSpec) -> Result<()>;
    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize>;
    fn largest_array(&self, fields: &FieldSpec) -> Option<LargestArray>;
    fn traffic(&self, split: &Split) -> Option<Traffic>;
    fn sharding(&self) -> Sharding;
    fn refinement(&self) -> usize;
    fn denoises(&self) -> Option<SigmaData>;
}

impl<C: Architecture> AnyArchitecture for C {
    fn name(&self) -> &'static str {
        C::NAME
    }

    fn model_parallel(&self) -> bool {
        C::MODEL_PARALLEL
    }

    fn table(&self) -> serde_json::Result<Value> {
        serde_json::to_value(self)
    }

    fn copied(&self) -> Box<dyn AnyArchitecture> {
        Box::new(self.clone())
    }

    fn build_dense(&self, params: &mut Scope<'_, Tensor>) -> Result<Box<dyn Model<Tensor>>> {
        Architecture::build(self, params)
    }

    fn build_sharded(&self, params: &mut Scope<'_, ShardTensor>) -> Result<Box<dyn Model<ShardTensor>>> {
        Architecture::build(self, params)
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        Architecture::check(self, fields)
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        Architecture::count(self, count)
    }

    fn largest_array(&self, fields: &FieldSpec) -> Option<LargestArray> {
        Architecture::largest_array(self, fields)
    }

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        Architecture::traffic(self, split)
    }

    fn sharding(&self) -> Sharding {
        Architecture::sharding(self)
    }

    fn refinement(&self) -> usize {
        Architecture::refinement(self)
    }

    fn denoises(&self) -> Option<SigmaData> {
        Architecture::denoises(self)
    }
}

/// Arrays that registered models are built for: `tch::Tensor` and `ShardTensor`.
pub trait ModelArray: Array + Parallel + sealed::Build {}

impl ModelArray for Tensor {}
impl ModelArray for ShardTensor {}

mod sealed {
    use super::*;

    pub trait Build: Array {
        #[expect(private_interfaces, reason = "no one outside this crate calls it")]
        fn build(config: &dyn AnyArchitecture, params: &mut Scope<'_, Self>) -> Result<Box<dyn Model<Self>>>;
    }

    #[expect(private_interfaces, reason = "no one outside this crate calls it")]
    impl Build for Tensor {
        fn build(config: &dyn AnyArchitecture, params: &mut Scope<'_, Self>) -> Result<Box<dyn Model<Self>>> {
            config.build_dense(params)
        }
    }

    #[expect(private_interfaces, reason = "no one outside this crate calls it")]
    impl Build for ShardTensor {
        fn build(config: &dyn AnyArchitecture, params: &mut Scope<'_, Self>) -> Result<Box<dyn Model<Self>>> {
            config.build_sharded(params)
        }
    }
}
