//! Networks that the older denoisers build themselves.

use std::borrow::Cow;

use isobar_array::Array;
use isobar_shard::{ModelSize, ParamCount, ParameterLayouts, Params};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::dhariwal_unet::DhariwalUNetConfig;
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::model::{Architecture, Model};
use crate::song_unet::SongUNetConfig;
use crate::song_unet_pos_embd::SongUNetPosEmbdConfig;
use crate::song_unet_pos_lt_embd::{LEAD_TIME_LABEL, SongUNetPosLtEmbdConfig};
use crate::traffic::{Split, Traffic};

/// Network of a denoiser, by the name of PhysicsNeMo's class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PrecondNetwork {
    /// The U-Net of DDPM++ and NCSN++.
    SongUNet,
    /// SongUNet with positions on the grid.
    SongUNetPosEmbd,
    /// SongUNet with positions and lead times.
    SongUNetPosLtEmbd,
    /// The U-Net of ADM.
    DhariwalUNet,
}

/// A network of a denoiser with its arguments.
#[derive(Debug, Clone, PartialEq)]
pub enum SongNetwork {
    /// The U-Net of DDPM++ and NCSN++.
    Plain(SongUNetConfig),
    /// SongUNet with positions on the grid.
    Positions(SongUNetPosEmbdConfig),
    /// SongUNet with positions and lead times.
    LeadTimes(SongUNetPosLtEmbdConfig),
    /// The U-Net of ADM.
    Adm(DhariwalUNetConfig),
}

impl From<SongUNetConfig> for SongNetwork {
    fn from(config: SongUNetConfig) -> Self {
        Self::Plain(config)
    }
}

impl From<SongUNetPosEmbdConfig> for SongNetwork {
    fn from(config: SongUNetPosEmbdConfig) -> Self {
        Self::Positions(config)
    }
}

impl From<SongUNetPosLtEmbdConfig> for SongNetwork {
    fn from(config: SongUNetPosLtEmbdConfig) -> Self {
        Self::LeadTimes(config)
    }
}

impl From<DhariwalUNetConfig> for SongNetwork {
    fn from(config: DhariwalUNetConfig) -> Self {
        Self::Adm(config)
    }
}

impl SongNetwork {
    /// Returns the arguments of the U-Net; of ADM's, as far as SongUNet has them.
    pub fn unet(&self) -> Cow<'_, SongUNetConfig> {
        match self {
            Self::Plain(config) => Cow::Borrowed(config),
            Self::Positions(config) => Cow::Borrowed(&config.network),
            Self::LeadTimes(config) => Cow::Borrowed(&config.network),
            Self::Adm(config) => Cow::Owned(config.network()),
        }
    }

    /// Returns the number of input channels that the network adds.
    pub fn further_channels(&self) -> usize {
        match self {
            Self::Plain(_) | Self::Adm(_) => 0,
            Self::Positions(config) => config.positions.n_grid_channels,
            Self::LeadTimes(config) => config.further(),
        }
    }

    /// Checks that the samples have what the network reads besides fields.
    pub(crate) fn check_arrays(&self, model: &'static str, fields: &FieldSpec) -> Result<()> {
        match self {
            Self::Plain(_) | Self::Positions(_) | Self::Adm(_) => Ok(()),
            Self::LeadTimes(_) => fields.check_array(model, LEAD_TIME_LABEL),
        }
    }

    /// Returns the number of input channels that the network is given.
    pub(crate) fn given_channels(&self) -> usize {
        self.unet().in_channels.saturating_sub(self.further_channels())
    }

    pub(crate) fn kind(&self) -> PrecondNetwork {
        match self {
            Self::Plain(_) => PrecondNetwork::SongUNet,
            Self::Positions(_) => PrecondNetwork::SongUNetPosEmbd,
            Self::LeadTimes(_) => PrecondNetwork::SongUNetPosLtEmbd,
            Self::Adm(_) => PrecondNetwork::DhariwalUNet,
        }
    }

    pub(crate) fn read(kind: PrecondNetwork, keys: Map<String, Value>) -> serde_json::Result<Self> {
        let keys = Value::Object(keys);
        Ok(match kind {
            PrecondNetwork::SongUNet => Self::Plain(serde_json::from_value(keys)?),
            PrecondNetwork::SongUNetPosEmbd => Self::Positions(serde_json::from_value(keys)?),
            PrecondNetwork::SongUNetPosLtEmbd => Self::LeadTimes(serde_json::from_value(keys)?),
            PrecondNetwork::DhariwalUNet => Self::Adm(serde_json::from_value(keys)?),
        })
    }

    pub(crate) fn keys(&self) -> serde_json::Result<Value> {
        match self {
            Self::Plain(config) => serde_json::to_value(config),
            Self::Positions(config) => serde_json::to_value(config),
            Self::LeadTimes(config) => serde_json::to_value(config),
            Self::Adm(config) => serde_json::to_value(config),
        }
    }

    /// Returns the schema of a denoiser's `own` keys, and of those of any of its networks but the keys `following` from its own. Defaults
    /// are those of the network `first`; descriptions name those of other networks.
    pub(crate) fn schema_with(
        own: Schema,
        first: PrecondNetwork,
        following: &[&str],
        generator: &mut SchemaGenerator,
    ) -> Schema {
        let mut schema = own.to_value();
        let mut networks = [
            (PrecondNetwork::SongUNet, SongUNetConfig::json_schema(generator).to_value()),
            (PrecondNetwork::SongUNetPosEmbd, SongUNetPosEmbdConfig::json_schema(generator).to_value()),
            (PrecondNetwork::SongUNetPosLtEmbd, SongUNetPosLtEmbdConfig::json_schema(generator).to_value()),
            (PrecondNetwork::DhariwalUNet, DhariwalUNetConfig::json_schema(generator).to_value()),
        ];
        // The sort is stable: the others keep their order.
        networks.sort_by_key(|(network, _)| *network != first);
        let mut keys = Map::new();
        for (key, value) in networks.iter().filter_map(|(_, of)| of["properties"].as_object()).flatten() {
            if !following.contains(&key.as_str()) {
                keys.entry(key.clone()).or_insert_with(|| value.clone());
            }
        }
        for (key, shown) in &mut keys {
            note_others(key, shown, &networks);
        }
        if let Some(own) = schema["properties"].as_object_mut() {
            for (key, value) in keys {
                own.entry(key).or_insert(value);
            }
        }
        schema["additionalProperties"] = false.into();
        Schema::try_from(schema).unwrap_or_default()
    }

    pub(crate) fn build<A: Array>(&self, params: &mut impl Params<Array = A>) -> Result<Box<dyn Model<A>>> {
        Ok(match self {
            Self::Plain(config) => Box::new(crate::SongUNet::new(config, params)?),
            Self::Positions(config) => Box::new(crate::SongUNetPosEmbd::new(config, params)?),
            Self::LeadTimes(config) => Box::new(crate::SongUNetPosLtEmbd::new(config, params)?),
            Self::Adm(config) => Box::new(crate::DhariwalUNet::new(config, params)?),
        })
    }

    pub(crate) fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        match self {
            Self::Plain(config) => config.count(count),
            Self::Positions(config) => config.count(count),
            Self::LeadTimes(config) => config.count(count),
            Self::Adm(config) => config.count(count),
        }
    }

    pub(crate) fn traffic(&self, split: &Split) -> Option<Traffic> {
        match self {
            Self::Plain(config) => config.traffic(split),
            Self::Positions(config) => config.traffic(split),
            Self::LeadTimes(config) => config.traffic(split),
            Self::Adm(config) => config.traffic(split),
        }
    }

    pub(crate) fn layouts(&self) -> ParameterLayouts {
        let sharding = match self {
            Self::Plain(config) => config.sharding(),
            Self::Positions(config) => config.sharding(),
            Self::LeadTimes(config) => config.sharding(),
            Self::Adm(config) => config.sharding(),
        };
        sharding.parameter_layouts().clone()
    }
}

/// Adds to the description of a key which networks need it, and their defaults where they are not the one that is shown.
fn note_others(key: &str, shown: &mut Value, networks: &[(PrecondNetwork, Value)]) {
    let mut notes: Vec<(String, Vec<String>)> = Vec::new();
    for (network, schema) in networks {
        let default =
            schema["properties"][key].get("default").filter(|default| Some(*default) != shown.get("default"));
        let needed =
            schema["required"].as_array().is_some_and(|keys| keys.iter().any(|needed| needed == key));
        let note = match default {
            Some(default) => format!("By default `{}`", default.to_string().replace(',', ", ")),
            None if needed => "Needed".to_owned(),
            None => continue,
        };
        let name = format!("`{network:?}`");
        match notes.iter_mut().find(|(known, _)| *known == note) {
            Some((_, names)) => names.push(name),
            None => notes.push((note, vec![name])),
        }
    }
    let own = shown.get("description").and_then(Value::as_str).unwrap_or_default().to_owned();
    let notes = notes.iter().map(|(note, names)| format!("{note} with {}.", names.join(" and ")));
    let all: Vec<String> = std::iter::once(own).chain(notes).filter(|part| !part.is_empty()).collect();
    if all.len() > 1 {
        shown["description"] = all.join(" ").into();
    }
}
