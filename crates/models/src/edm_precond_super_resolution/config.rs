//! Arguments of the denoiser: its own, and those of its network beside them.

use std::borrow::Cow;

use isobar_array::Array;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::{EdmPrecondSuperResolution, MODEL};
use crate::batch::Batch;
use crate::diffusion::{Denoiser, SigmaData};
use crate::edm_precond::{PrecondNetwork, SongNetwork};
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::layers::PerDim;
use crate::model::{Architecture, Model};
use crate::sharding::Sharding;
use crate::song_unet_pos_embd::keys;
use crate::traffic::{Split, Traffic};

/// Arguments of [`EdmPrecondSuperResolution`](crate::EdmPrecondSuperResolution), by PhysicsNeMo's names. In a configuration table, the
/// network's keys are at the same level as the others.
#[derive(Debug, Clone, PartialEq)]
pub struct EdmPrecondSuperResolutionConfig {
    /// Standard deviation of the data.
    pub sigma_data: f64,
    /// Lowest noise level that the network accepts. Sampling starts and ends within the levels.
    pub sigma_min: f64,
    /// Highest noise level that the network accepts; no upper limit where not given.
    pub sigma_max: Option<f64>,
    /// The network. Its input channels are those of the samples, the condition and the positions, its output channels the samples'.
    pub network: SongNetwork,
}

/// The keys of a table that are not the network's.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
struct Keys {
    /// Height and width of the fields, one number for both or `[height, width]`.
    img_resolution: PerDim,
    /// Channels of the condition, and those that the network adds, such as positions.
    img_in_channels: usize,
    /// Channels of the samples and of the output.
    img_out_channels: usize,
    /// Not supported here: mixed precision is a setting of training.
    #[serde(default)]
    use_fp16: bool,
    /// The network.
    #[serde(default = "model_type")]
    model_type: PrecondNetwork,
    /// Standard deviation of the data.
    #[serde(default = "half")]
    sigma_data: f64,
    /// Lowest noise level that the network accepts. Sampling starts and ends within the levels.
    #[serde(default)]
    sigma_min: f64,
    /// Highest noise level that the network accepts; no upper limit where not given.
    #[serde(default)]
    sigma_max: Option<f64>,
}

/// Keys of the network that follow from the others, or have no use.
const FOLLOWING: [&str; 4] = ["img_resolution", "in_channels", "out_channels", "label_dim"];

impl EdmPrecondSuperResolutionConfig {
    /// A denoiser by a network, whose input channels beyond the samples' are the condition, and positions if it has such.
    pub fn new(network: impl Into<SongNetwork>) -> Self {
        Self { sigma_data: half(), sigma_min: 0.0, sigma_max: None, network: network.into() }
    }

    /// Number of channels of the condition.
    fn condition_channels(&self) -> usize {
        self.network.given_channels().saturating_sub(self.network.unet().out_channels)
    }

    /// Checks the arguments that are not the network's.
    pub(super) fn check_own(&self) -> Result<()> {
        let check = Checker(MODEL);
        SigmaData::All(self.sigma_data).check()?;
        let (unet, further) = (self.network.unet(), self.network.further_channels());
        check.ensure(self.condition_channels() > 0, || {
            let given = unet.in_channels.saturating_sub(unet.out_channels);
            format!(
                "img_in_channels is {given}, expected {} or more: it counts the condition and the {further} that the network adds",
                further + 1
            )
        })?;
        check.ensure(unet.label_dim == 0, || {
            format!("label_dim is {}, expected 0: the network is given no class labels", unet.label_dim)
        })?;
        let (low, high) = (self.sigma_min, self.sigma_max.unwrap_or(f64::INFINITY));
        check.ensure(0.0 <= low && low <= high, || {
            format!("sigma_min is {low} and sigma_max {high}, expected 0 ≤ sigma_min ≤ sigma_max")
        })
    }

    fn read(mut table: Map<String, Value>) -> serde_json::Result<Self> {
        let own: Keys = keys::take(&mut table)?;
        if let Some(key) = FOLLOWING.iter().find(|key| table.contains_key(**key)) {
            return Err(serde_json::Error::custom(format!("unknown field `{key}`")));
        }
        if own.use_fp16 {
            let reason = "use_fp16 is not supported, expected false; the precision is a setting of training";
            return Err(serde_json::Error::custom(reason));
        }
        let inputs = own.img_in_channels.saturating_add(own.img_out_channels);
        table.insert("img_resolution".to_owned(), serde_json::to_value(&own.img_resolution)?);
        table.insert("in_channels".to_owned(), inputs.into());
        table.insert("out_channels".to_owned(), own.img_out_channels.into());
        Ok(Self {
            sigma_data: own.sigma_data,
            sigma_min: own.sigma_min,
            sigma_max: own.sigma_max,
            network: SongNetwork::read(own.model_type, table)?,
        })
    }

    fn table(&self) -> serde_json::Result<Map<String, Value>> {
        let unet = self.network.unet();
        let own = Keys {
            img_resolution: unet.img_resolution.clone(),
            img_in_channels: unet.in_channels.saturating_sub(unet.out_channels),
            img_out_channels: unet.out_channels,
            use_fp16: false,
            model_type: self.network.kind(),
            sigma_data: self.sigma_data,
            sigma_min: self.sigma_min,
            sigma_max: self.sigma_max,
        };
        let mut table = keys::joined([self.network.keys()?, serde_json::to_value(own)?])?;
        for key in ["in_channels", "out_channels", "label_dim"] {
            table.remove(key);
        }
        Ok(table)
    }
}

impl Serialize for EdmPrecondSuperResolutionConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.table().map_err(<S::Error as serde::ser::Error>::custom)?.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for EdmPrecondSuperResolutionConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        Self::read(Map::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl JsonSchema for EdmPrecondSuperResolutionConfig {
    fn schema_name() -> Cow<'static, str> {
        "EdmPrecondSuperResolutionConfig".into()
    }

    /// The keys of both, but those of the network that follow from the others.
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let own = Keys::json_schema(generator);
        SongNetwork::schema_with(own, model_type(), &FOLLOWING, generator)
    }
}

impl Architecture for EdmPrecondSuperResolutionConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some(
        "Denoiser of diffusion models (EDM) for super-resolution by SongUNet, with or without positions, given coarse fields.",
    );

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(EdmPrecondSuperResolution::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        self.check_own()?;
        let unet = self.network.unet();
        fields.check_extents(MODEL, "img_resolution", &unet.img_resolution.list(2))?;
        unet.check_patches(MODEL, fields)?;
        fields.check_array(MODEL, Batch::<()>::SIGMA)?;
        self.network.check_arrays(MODEL, fields)?;
        fields.check_array(MODEL, Batch::<()>::CONDITIONS)?;
        let channels = ("img_out_channels", unet.out_channels);
        fields.check_channels(MODEL, channels, channels)?;
        let further = self.network.further_channels();
        let (given, wanted) = (self.condition_channels() + further, fields.condition_channels + further);
        Checker(MODEL).ensure(given == wanted, || {
            format!(
                "img_in_channels is {given}, but the conditions of {} have {} channels, and the network adds {further}; --set \
                 model.img_in_channels={wanted}",
                fields.source, fields.condition_channels
            )
        })
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        self.check_own()?;
        self.network.count(count)
    }

    fn unread(&self) -> Vec<String> {
        self.network.unet().unread()
    }

    fn denoises(&self) -> Option<Denoiser> {
        let sigma_max = self.sigma_max.unwrap_or(f64::INFINITY);
        Some(Denoiser { sigma_data: SigmaData::All(self.sigma_data), sigma_min: self.sigma_min, sigma_max })
    }

    fn reads_patches(&self) -> bool {
        matches!(self.network, SongNetwork::Positions(_) | SongNetwork::LeadTimes(_))
    }

    fn sharding(&self) -> Sharding {
        Sharding::new().parameters(self.network.layouts().prefixed("model"))
    }
}

crate::register!(EdmPrecondSuperResolutionConfig);

fn model_type() -> PrecondNetwork {
    PrecondNetwork::SongUNetPosEmbd
}

fn half() -> f64 {
    0.5
}
