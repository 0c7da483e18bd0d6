//! `[model]`: the configuration of any registered model.

use std::fmt;

use isobar_shard::{ModelSize, ParamCount, Params, Scope};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::{Entry, registered};
use crate::diffusion::Denoiser;
use crate::error::{Error, Result};
use crate::fields::FieldSpec;
use crate::model::{AnyArchitecture, LargestArray, Model, ModelArray};
use crate::sharding::Sharding;
use crate::signature::Signature;
use crate::traffic::{Split, Traffic};

/// The name of the configurations of models in errors.
const TABLE: &str = "model";

/// The model of a run: a table with the key `type`, and the keys of the model that it names.
///
/// ```
/// use isobar_models::{Batch, Mode, ModelConfig};
/// use isobar_array::Generator;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let table = r#"{ "type": "fno", "in_channels": 1, "out_channels": 2, "num_fno_modes": 4, "latent_channels": 4 }"#;
/// let config: ModelConfig = serde_json::from_str(table)?;
/// let model = config.build::<Tensor>(&mut ParamStore::new(Generator::new(1)))?;
/// let x = Tensor::zeros([2, 1, 8, 8], (Kind::Float, Device::Cpu));
/// let y = model.forward(&Batch::of_fields(x), Mode::Eval)?;
/// assert_eq!(y.get("fields").map(Tensor::size), Some(vec![2, 2, 8, 8]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ModelConfig(Box<dyn AnyArchitecture>);

impl ModelConfig {
    /// Wraps a model's own configuration.
    pub fn new(config: impl crate::Architecture) -> Self {
        Self(Box::new(config))
    }

    /// Reads the keys of the registered model `name`.
    ///
    /// # Errors
    ///
    /// A name that is not registered, with all that are; keys that the model does not have, or values of another type.
    pub fn named(name: &str, table: Value) -> Result<Self> {
        let entry = isobar_registry::find("model", name, &registered()).map_err(unknown)?;
        let read = (entry.read)(table);
        Ok(Self(read.map_err(|error| Error::Config { model: entry.name, reason: error.to_string() })?))
    }

    /// Value of `type`.
    pub fn name(&self) -> &'static str {
        self.0.name()
    }

    /// Makes the model; its parameters come from `params`: a [`ParamStore`](isobar_shard::ParamStore), whose region is the
    /// model-parallel group, or [`MeshParams`](isobar_shard::MeshParams) for a model over sharded fields. All ranks call.
    ///
    /// # Errors
    ///
    /// Sizes that do not fit together, or a parameter that cannot be made.
    pub fn build<A: ModelArray>(&self, params: &mut impl Params<Array = A>) -> Result<Box<dyn Model<A>>> {
        A::build(&*self.0, &mut Scope::new(params, ""))
    }

    /// Checks that the model accepts the fields of a data set, without building it.
    ///
    /// # Errors
    ///
    /// A key that does not fit, with the `--set` that mends it.
    pub fn check(&self, fields: &FieldSpec) -> Result<()> {
        self.0.check(fields)?;
        let targets = fields.target_extents.as_ref().unwrap_or(&fields.extents);
        let inputs: Vec<usize> =
            fields.extents.iter().map(|extent| extent / self.coarsening(fields).max(1)).collect();
        // Some models have compared it, and named their key.
        fields.check_outputs(self.name(), (&inputs, &self.output_extents(&inputs)), targets, || {
            "choose a model whose outputs are on the targets' grid (`Architecture::output_extents`; on finer ones model.type = \
             \"pix2pix\" or \"sr_res_net\"), or interpolate the inputs to the targets' grid beforehand and remove [data.target]"
                .to_owned()
        })
    }

    /// Extents of the outputs for inputs of these extents: see [`Architecture::output_extents`](crate::Architecture::output_extents).
    pub fn output_extents(&self, extents: &[usize]) -> Vec<usize> {
        self.0.output_extents(extents)
    }

    /// Keys that are set and not read: see [`Architecture::unread`](crate::Architecture::unread).
    pub fn unread(&self) -> Vec<String> {
        self.0.unread()
    }

    /// Counts the parameters and buffers of one rank: see [`Architecture::count`](crate::Architecture::count).
    ///
    /// # Errors
    ///
    /// Invalid arguments of the model.
    pub fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        self.0.count(count)
    }

    /// Returns the largest array that the model makes of one sample: see
    /// [`Architecture::largest_array`](crate::Architecture::largest_array).
    pub fn largest_array(&self, fields: &FieldSpec) -> Option<LargestArray> {
        self.0.largest_array(fields)
    }

    /// Returns an upper bound of what a rank receives in a pass: see [`Architecture::traffic`](crate::Architecture::traffic).
    pub fn traffic(&self, split: &Split) -> Option<Traffic> {
        self.0.traffic(split)
    }

    /// The declaration of how parameters and inputs are split.
    pub fn sharding(&self) -> Sharding {
        self.0.sharding()
    }

    /// Returns the mapping from the original model's forward function to the arrays of a batch.
    pub fn signature(&self) -> Signature {
        self.0.signature()
    }

    /// Factor by which the grid of the outputs is finer than that of the inputs.
    pub fn refinement(&self) -> usize {
        self.0.refinement().max(1)
    }

    /// Factor by which given fields are coarsened for the model: [`refinement`](Self::refinement), if the targets are on the grid of
    /// the given fields, otherwise 1.
    pub fn coarsening(&self, fields: &FieldSpec) -> usize {
        if fields.target_extents.is_some() { 1 } else { self.refinement() }
    }

    /// Standard deviation of the data of a denoiser; `None` for other models. See
    /// [`Architecture::denoises`](crate::Architecture::denoises).
    pub fn denoises(&self) -> Option<Denoiser> {
        self.0.denoises()
    }

    /// Returns whether the model computes on patches of the fields that it is built for. See
    /// [`Architecture::reads_patches`](crate::Architecture::reads_patches).
    pub fn reads_patches(&self) -> bool {
        self.0.reads_patches()
    }

    /// Returns whether the model's channels can be split over the axis `model`.
    pub fn model_parallel(&self) -> bool {
        self.0.model_parallel()
    }

    /// Returns the unit of `time` that the model needs, whatever that of the data is. See
    /// [`Architecture::TIME_UNIT`](crate::Architecture::TIME_UNIT).
    pub fn time_unit(&self) -> Option<&'static str> {
        self.0.time_unit()
    }

    fn table(&self) -> serde_json::Result<Map<String, Value>> {
        isobar_registry::tagged(self.name(), self.0.table()?)
    }
}

fn unknown(problem: String) -> Error {
    let reason = format!("{problem}. A model of your own is registered by `isobar_models::register!`");
    Error::Config { model: TABLE, reason }
}

impl Clone for ModelConfig {
    fn clone(&self) -> Self {
        Self(self.0.copied())
    }
}

impl fmt::Debug for ModelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for ModelConfig {
    fn eq(&self, other: &Self) -> bool {
        matches!((self.table(), other.table()), (Ok(own), Ok(other)) if own == other)
    }
}

impl Serialize for ModelConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.table().map_err(<S::Error as serde::ser::Error>::custom)?.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ModelConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let (name, keys) = isobar_registry::read(deserializer)?;
        Self::named(&name, keys).map_err(D::Error::custom)
    }
}

impl JsonSchema for ModelConfig {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ModelConfig".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let form =
            |entry: &Entry| isobar_registry::schema_of(entry.name, entry.summary, entry.schema, generator);
        isobar_registry::one_of("The network of a run.", registered().iter().map(form).collect())
    }
}
