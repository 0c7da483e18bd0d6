//! Arguments of the fully connected network.

use isobar_array::Array;
use isobar_nn::{Activation, one_or_many};
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{FullyConnected, MODEL};
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::model::{Architecture, Model};
use crate::signature::Signature;
use crate::size::{built, extrapolate};
use crate::traffic::{Split, Traffic};

/// Arguments of [`FullyConnected`](crate::FullyConnected), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FullyConnectedConfig {
    /// Features of the input.
    pub in_features: usize,
    /// Width of every hidden layer.
    pub layer_size: usize,
    /// Features of the output.
    pub out_features: usize,
    /// Number of hidden layers.
    pub num_layers: usize,
    /// The activation of the hidden layers: a name, or a list whose last entry serves all further layers.
    #[serde(deserialize_with = "one_or_many")]
    #[schemars(with = "OneOrMany")]
    pub activation_fn: Vec<Activation>,
    /// Skip connections: adds the output of the layer two before to every second hidden layer.
    pub skip_connections: bool,
    /// Scale the input of all activations by one trained number.
    pub adaptive_activations: bool,
    /// Split each row of a weight into length and direction (Salimans and Kingma, arXiv:1602.07868).
    pub weight_norm: bool,
    /// Split each row of a weight into a factor and the rest (Wang et al., arXiv:2210.01274).
    pub weight_fact: bool,
}

#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "names the two forms for the configuration's schema")]
enum OneOrMany {
    One(Activation),
    Many(Vec<Activation>),
}

impl Default for FullyConnectedConfig {
    fn default() -> Self {
        Self {
            in_features: 512,
            layer_size: 512,
            out_features: 512,
            num_layers: 6,
            activation_fn: vec![Activation::Silu],
            skip_connections: false,
            adaptive_activations: false,
            weight_norm: false,
            weight_fact: false,
        }
    }
}

impl Architecture for FullyConnectedConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> =
        Some("Linear layers at every point of the field, its channels being the features.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(FullyConnected::new(self, params)?))
    }

    fn signature(&self) -> Signature {
        Signature { moves_channels: true, ..Signature::FEATURES_LAST }
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_channels(MODEL, ("in_features", self.in_features), ("out_features", self.out_features))
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        // The last of the listed activations serves all further layers.
        let same = self.activation_fn.len().max(1);
        extrapolate(self.num_layers, same, |num_layers| {
            built(count, |params| FullyConnected::new(&Self { num_layers, ..self.clone() }, params))
        })
    }
}

crate::register!(FullyConnectedConfig);
