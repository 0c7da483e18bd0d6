//! Arguments of SongUNet with positions and lead times.

use std::borrow::Cow;

use isobar_array::Array;
use isobar_shard::{ModelSize, ParamCount, ParameterLayouts, Placement, Scope};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::model::LEAD_TIME_LABEL;
use super::{MODEL, SongUNetPosLtEmbd};
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::model::{Architecture, Model};
use crate::sharding::Sharding;
use crate::size::{built, extrapolate};
use crate::song_unet::SongUNetConfig;
use crate::song_unet_pos_embd::{GridPositions, check_fields, check_inputs, keys};
use crate::traffic::{Split, Traffic};

/// Arguments of [`SongUNetPosLtEmbd`](crate::SongUNetPosLtEmbd), by PhysicsNeMo's names, in a table as those of
/// [`SongUNetPosEmbdConfig`](crate::SongUNetPosEmbdConfig).
#[derive(Debug, Clone, PartialEq)]
pub struct SongUNetPosLtEmbdConfig {
    /// Fields of lead times, and channels that are probabilities.
    pub lead_times: LeadTimes,
    /// Positions of the points.
    pub positions: GridPositions,
    /// The network. Its `in_channels` count the fields, the positions and the channels of the lead time.
    pub network: SongUNetConfig,
}

/// Trained fields of lead times, and outputs that are probabilities.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LeadTimes {
    /// Channels of the lead time, which `in_channels` counts too.
    pub lead_time_channels: usize,
    /// Number of lead times.
    #[serde(default = "steps")]
    pub lead_time_steps: usize,
    /// Channels of the output that are probabilities of classes: evaluation gives their softmax, training logits.
    #[serde(default)]
    pub prob_channels: Vec<usize>,
    /// Must be true: PhysicsNeMo's flag that enables lead times.
    #[serde(default = "on", skip_serializing_if = "is_on")]
    #[schemars(extend("default" = true))]
    pub lead_time_mode: bool,
}

impl LeadTimes {
    /// `lead_time_channels` channels of nine lead times; `in_channels` of the network counts them.
    pub fn new(lead_time_channels: usize) -> Self {
        Self { lead_time_channels, lead_time_steps: steps(), prob_channels: Vec::new(), lead_time_mode: on() }
    }
}

impl SongUNetPosLtEmbdConfig {
    /// Four channels of sines and cosines and `lead_time_channels` of lead times beside the fields; `in_channels` of `network` counts
    /// them.
    pub fn new(lead_time_channels: usize, network: SongUNetConfig) -> Self {
        Self { lead_times: LeadTimes::new(lead_time_channels), positions: GridPositions::default(), network }
    }

    /// Number of input channels that the model makes itself.
    pub(crate) fn further(&self) -> usize {
        self.positions.n_grid_channels.saturating_add(self.lead_times.lead_time_channels)
    }

    pub(super) fn check_own(&self) -> Result<()> {
        let check = Checker(MODEL);
        self.positions.check(MODEL)?;
        let LeadTimes { lead_time_channels, lead_time_steps, prob_channels, lead_time_mode } =
            &self.lead_times;
        check.ensure(*lead_time_mode, || {
            "lead_time_mode is false, expected true; without lead times, the model is song_unet_pos_embd"
                .into()
        })?;
        check.extent("lead_time_channels", *lead_time_channels)?;
        check.extent("lead_time_steps", *lead_time_steps)?;
        let outputs = self.network.out_channels;
        let fits =
            |(at, channel): (usize, &usize)| *channel < outputs && !prob_channels[..at].contains(channel);
        check.ensure(prob_channels.iter().enumerate().all(fits), || {
            format!("prob_channels is {prob_channels:?}, expected different channels of the output, below {outputs}")
        })?;
        check_inputs(MODEL, &self.network, self.further())
    }

    fn read(mut table: Map<String, Value>) -> serde_json::Result<Self> {
        Ok(Self {
            lead_times: keys::take(&mut table)?,
            positions: keys::take(&mut table)?,
            network: keys::network(table)?,
        })
    }

    fn table(&self) -> serde_json::Result<Map<String, Value>> {
        let network = serde_json::to_value(&self.network)?;
        keys::joined([
            network,
            serde_json::to_value(&self.positions)?,
            serde_json::to_value(&self.lead_times)?,
        ])
    }
}

impl Serialize for SongUNetPosLtEmbdConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.table().map_err(<S::Error as serde::ser::Error>::custom)?.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for SongUNetPosLtEmbdConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        Self::read(Map::deserialize(deserializer)?).map_err(<D::Error as serde::de::Error>::custom)
    }
}

impl JsonSchema for SongUNetPosLtEmbdConfig {
    fn schema_name() -> Cow<'static, str> {
        "SongUNetPosLtEmbdConfig".into()
    }

    /// The keys of all three.
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let own = [GridPositions::json_schema(generator), LeadTimes::json_schema(generator)];
        keys::joined_schema(generator, &own)
    }
}

impl Architecture for SongUNetPosLtEmbdConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some(
        "SongUNet with positions on the grid and trained fields of the lead time as further channels; outputs may be probabilities.",
    );

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(SongUNetPosLtEmbd::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        self.check_own()?;
        fields.check_array(MODEL, LEAD_TIME_LABEL)?;
        check_fields(MODEL, &self.network, self.further(), fields)
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.network.num_blocks, 1, |num_blocks| {
            let network = SongUNetConfig { num_blocks, ..self.network.clone() };
            built(count, |params| SongUNetPosLtEmbd::new(&Self { network, ..self.clone() }, params))
        })
    }

    fn unread(&self) -> Vec<String> {
        self.network.unread()
    }

    fn reads_patches(&self) -> bool {
        true
    }

    fn sharding(&self) -> Sharding {
        let layouts: ParameterLayouts = self.positions.layouts(&self.network);
        Sharding::new().parameters(layouts.with("lt_embd", &[("domain", Placement::Shard(2))]))
    }
}

crate::register!(SongUNetPosLtEmbdConfig);

fn steps() -> usize {
    9
}

fn on() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_on(given: &bool) -> bool {
    *given
}
