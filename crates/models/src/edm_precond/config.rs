//! Arguments of the denoiser: its own, and those of its network beside them.

use std::borrow::Cow;

use isobar_array::Array;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::network::{PrecondNetwork, SongNetwork};
use super::{EdmPrecond, MODEL};
use crate::batch::Batch;
use crate::diffusion::{Denoiser, EdmPreconditioning, SigmaData};
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::layers::PerDim;
use crate::model::{Architecture, Model};
use crate::sharding::Sharding;
use crate::traffic::{Split, Traffic};

/// Arguments of [`EdmPrecond`](crate::EdmPrecond), by PhysicsNeMo's names. In a configuration table, the network's
/// keys are at the same level as the others.
#[derive(Debug, Clone, PartialEq)]
pub struct EdmPrecondConfig {
    /// Channels of the samples.
    pub img_channels: usize,
    /// Channels of the network's input, conditions included; those of the samples where not given.
    pub img_in_channels: Option<usize>,
    /// Lowest noise level that the network accepts. Sampling starts and ends within the levels.
    pub sigma_min: f64,
    /// Highest noise level that the network accepts; no upper limit where not given.
    pub sigma_max: Option<f64>,
    /// Standard deviation of the data.
    pub sigma_data: SigmaData,
    /// The network: `in_channels` and `out_channels` follow from the channels above.
    pub network: SongNetwork,
}

/// The keys of a table that are not the network's.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
struct Keys {
    /// Height and width of the fields, one number for both or `[height, width]`.
    img_resolution: PerDim,
    /// Channels of the samples.
    img_channels: usize,
    /// Features of the class labels; 0 for none.
    #[serde(default)]
    label_dim: usize,
    /// Not supported here: mixed precision is a setting of training.
    #[serde(default)]
    use_fp16: bool,
    /// Lowest noise level that the network accepts. Sampling starts and ends within the levels.
    #[serde(default)]
    sigma_min: f64,
    /// Highest noise level that the network accepts; no upper limit where not given.
    #[serde(default)]
    sigma_max: Option<f64>,
    /// Standard deviation of the data, one number or one for each channel.
    #[serde(default)]
    sigma_data: SigmaData,
    /// The network.
    #[serde(default = "model_type")]
    model_type: PrecondNetwork,
    /// Channels of the network's input, conditions included; `img_channels` where not given.
    #[serde(default)]
    img_in_channels: Option<usize>,
    /// Channels of the samples and of the network's output; by default `img_channels`.
    #[serde(default)]
    img_out_channels: Option<usize>,
}

/// Names of [`Keys`].
const OWN: [&str; 10] = [
    "img_resolution",
    "img_channels",
    "label_dim",
    "use_fp16",
    "sigma_min",
    "sigma_max",
    "sigma_data",
    "model_type",
    "img_in_channels",
    "img_out_channels",
];

/// Keys of the network that follow from the others.
const FOLLOWING: [&str; 4] = ["img_resolution", "in_channels", "out_channels", "label_dim"];

impl EdmPrecondConfig {
    /// A denoiser of samples with `img_channels` channels by a network, whose further input channels are conditions, and positions if it
    /// has such.
    pub fn new(img_channels: usize, network: impl Into<SongNetwork>) -> Self {
        let network = network.into();
        Self {
            img_channels,
            img_in_channels: Some(network.unet().in_channels),
            sigma_min: 0.0,
            sigma_max: None,
            sigma_data: SigmaData::default(),
            network,
        }
    }

    /// Checks the arguments that are not the network's.
    pub(super) fn check_own(&self) -> Result<()> {
        let check = Checker(MODEL);
        let top = i32::MAX as usize;
        check.extent("img_channels", self.img_channels)?;
        let inputs = self.img_in_channels.unwrap_or(self.img_channels);
        let least = self.img_channels.saturating_add(self.network.further_channels());
        check.ensure((least..=top).contains(&inputs), || {
            format!("img_in_channels is {inputs}, expected {least} or more: it counts the samples' channels, conditions and positions")
        })?;
        let [given_in, given_out] = [self.network.unet().in_channels, self.network.unet().out_channels];
        check.ensure(given_in == inputs && given_out == self.img_channels, || {
            format!(
                "the network has {given_in} input and {given_out} output channels, expected {inputs} and {}",
                self.img_channels
            )
        })?;
        let (low, high) = (self.sigma_min, self.sigma_max.unwrap_or(f64::INFINITY));
        check.ensure(0.0 <= low && low <= high, || {
            format!("sigma_min is {low} and sigma_max {high}, expected 0 ≤ sigma_min ≤ sigma_max")
        })
    }

    fn read(table: Map<String, Value>) -> serde_json::Result<Self> {
        let (own, mut network): (Map<_, _>, Map<_, _>) =
            table.into_iter().partition(|(key, _)| OWN.contains(&key.as_str()));
        if let Some(key) = FOLLOWING.iter().find(|key| network.contains_key(**key)) {
            return Err(refused(format!("unknown field `{key}`, expected `img_{key}`")));
        }
        let keys: Keys = serde_json::from_value(own.into())?;
        if keys.use_fp16 {
            return Err(refused(
                "use_fp16 is not supported, expected false; the precision is a setting of training".into(),
            ));
        }
        // The samples have the channels of the output, to which they are added.
        let outputs = keys.img_out_channels.unwrap_or(keys.img_channels);
        let inputs = keys.img_in_channels.unwrap_or(keys.img_channels);
        network.insert("img_resolution".to_owned(), serde_json::to_value(&keys.img_resolution)?);
        network.insert("in_channels".to_owned(), inputs.into());
        network.insert("out_channels".to_owned(), outputs.into());
        network.insert("label_dim".to_owned(), keys.label_dim.into());
        Ok(Self {
            img_channels: outputs,
            img_in_channels: keys.img_in_channels.or(keys.img_out_channels.map(|_| inputs)),
            sigma_min: keys.sigma_min,
            sigma_max: keys.sigma_max,
            sigma_data: keys.sigma_data,
            network: SongNetwork::read(keys.model_type, network)?,
        })
    }

    fn table(&self) -> serde_json::Result<Map<String, Value>> {
        let keys = Keys {
            img_resolution: self.network.unet().img_resolution.clone(),
            img_channels: self.img_channels,
            label_dim: self.network.unet().label_dim,
            use_fp16: false,
            sigma_min: self.sigma_min,
            sigma_max: self.sigma_max,
            sigma_data: self.sigma_data.clone(),
            model_type: self.network.kind(),
            img_in_channels: self.img_in_channels,
            img_out_channels: None,
        };
        let mut table = Map::new();
        for part in [self.network.keys()?, serde_json::to_value(&keys)?] {
            if let Value::Object(part) = part {
                table.extend(part);
            }
        }
        table.remove("in_channels");
        table.remove("out_channels");
        Ok(table)
    }
}

fn refused(reason: String) -> serde_json::Error {
    serde_json::Error::custom(reason)
}

impl Serialize for EdmPrecondConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.table().map_err(<S::Error as serde::ser::Error>::custom)?.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for EdmPrecondConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        Self::read(Map::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl JsonSchema for EdmPrecondConfig {
    fn schema_name() -> Cow<'static, str> {
        "EdmPrecondConfig".into()
    }

    /// The keys of both, but those of the network that follow from the others.
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let own = Keys::json_schema(generator);
        SongNetwork::schema_with(own, PrecondNetwork::SongUNet, &FOLLOWING, generator)
    }
}

impl Architecture for EdmPrecondConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some(
        "Denoiser of diffusion models (EDM) by SongUNet, whose input may have further channels as conditions.",
    );

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(EdmPrecond::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        self.check_own()?;
        fields.check_extents(MODEL, "img_resolution", &self.network.unet().img_resolution.list(2))?;
        self.network.unet().check_patches(MODEL, fields)?;
        fields.check_array(MODEL, Batch::<()>::SIGMA)?;
        self.network.check_arrays(MODEL, fields)?;
        if self.network.given_channels() > self.img_channels {
            fields.check_array(MODEL, Batch::<()>::CONDITIONS)?;
        }
        let channels = ("img_channels", self.img_channels);
        fields.check_channels(MODEL, channels, channels)?;
        let given = self.network.unet().in_channels;
        let further = self.network.further_channels();
        let wanted = self.img_channels + fields.condition_channels + further;
        Checker(MODEL).ensure(given == wanted, || {
            let positions = if further > 0 { format!(", and the network adds {further}") } else { String::new() };
            format!(
                "img_in_channels is {given}, but the samples of {} have {} channels and the conditions {}{positions}; --set \
                 model.img_in_channels={wanted}",
                fields.source, self.img_channels, fields.condition_channels
            )
        })
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        self.check_own()?;
        let own = crate::size::built(count, |params| EdmPreconditioning::new(&self.sigma_data, params))?;
        Ok(own + self.network.count(count)?)
    }

    fn unread(&self) -> Vec<String> {
        self.network.unet().unread()
    }

    fn denoises(&self) -> Option<Denoiser> {
        let sigma_max = self.sigma_max.unwrap_or(f64::INFINITY);
        Some(Denoiser { sigma_data: self.sigma_data.clone(), sigma_min: self.sigma_min, sigma_max })
    }

    fn reads_patches(&self) -> bool {
        matches!(self.network, SongNetwork::Positions(_) | SongNetwork::LeadTimes(_))
    }

    fn sharding(&self) -> Sharding {
        Sharding::new().parameters(self.network.layouts().prefixed("model"))
    }
}

crate::register!(EdmPrecondConfig);

fn model_type() -> PrecondNetwork {
    PrecondNetwork::DhariwalUNet
}
