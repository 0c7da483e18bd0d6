//! Arguments of the denoiser.

use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::{EdmPreconditioner, MODEL};
use crate::batch::Batch;
use crate::diffusion::{Denoiser, SigmaData};
use crate::error::{Error, Result};
use crate::fields::FieldSpec;
use crate::model::{Architecture, LargestArray, Model, ModelArray};
use crate::registry::ModelConfig;
use crate::sharding::Sharding;
use crate::signature::Signature;
use crate::traffic::{Split, Traffic};

/// Arguments of [`EdmPreconditioner`](crate::EdmPreconditioner), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EdmPreconditionerConfig {
    /// The network: a table like this one, with its `type` and keys.
    pub model: Network,
    /// Standard deviation of the data, one number or one for each channel.
    #[serde(default)]
    pub sigma_data: SigmaData,
}

/// A network inside another model: any registered one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Network(pub ModelConfig);

impl JsonSchema for Network {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Network".into()
    }

    /// Any table: the schema of models would contain itself.
    fn json_schema(_generator: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "object", "additionalProperties": true, "description": "A network: the key `type` and the keys of that model." })
    }
}

impl EdmPreconditionerConfig {
    /// A denoiser around a network, for data of standard deviation 0.5.
    pub fn new(model: ModelConfig) -> Self {
        Self { model: Network(model), sigma_data: SigmaData::default() }
    }
}

impl Architecture for EdmPreconditionerConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some(
        "Denoiser of diffusion models (EDM): any network, its input and output scaled by the noise level.",
    );

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: ModelArray>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(EdmPreconditioner::new(self, params)?))
    }

    fn signature(&self) -> Signature {
        Signature { arguments: &[("t", "sigma")], ..Signature::default() }
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_array(MODEL, Batch::<()>::SIGMA)?;
        // The network gets the noise level as its time.
        let mut of_network = fields.clone();
        of_network.arrays.push(Batch::<()>::TIME.to_owned());
        // Fields as conditions are further channels of its input; it is given the labels of samples by their name.
        let on_grid = std::mem::take(&mut of_network.condition_channels);
        of_network.in_channels += on_grid;
        if on_grid > 0 && !fields.arrays.iter().any(|name| name == Batch::<()>::CLASS_LABELS) {
            of_network.arrays.retain(|name| name != Batch::<()>::CONDITIONS);
        }
        self.model.0.check(&of_network).map_err(|error| match error {
            // The keys of the network are those of a table further in.
            Error::Config { model, reason } => {
                Error::Config { model, reason: reason.replace("model.", "model.model.") }
            }
            other => other,
        })
    }

    fn largest_array(&self, fields: &FieldSpec) -> Option<LargestArray> {
        self.model.0.largest_array(fields)
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        let network = self.model.0.count(count)?;
        Ok(network
            + crate::size::built(count, |params| crate::EdmPreconditioning::new(&self.sigma_data, params))?)
    }

    fn unread(&self) -> Vec<String> {
        self.model.0.unread().iter().map(|key| format!("model.{key}")).collect()
    }

    fn denoises(&self) -> Option<Denoiser> {
        Some(self.sigma_data.clone().into())
    }

    fn reads_patches(&self) -> bool {
        self.model.0.reads_patches()
    }

    fn sharding(&self) -> Sharding {
        let network = self.model.0.sharding();
        let layouts = network.parameter_layouts().clone().prefixed("model");
        network.parameters(layouts)
    }

    fn refinement(&self) -> usize {
        self.model.0.refinement()
    }

    fn output_extents(&self, extents: &[usize]) -> Vec<usize> {
        self.model.0.output_extents(extents)
    }
}

crate::register!(EdmPreconditionerConfig);
