//! Arguments of SongUNet with positions.

use std::borrow::Cow;

use isobar_array::Array;
use isobar_shard::{ModelSize, ParamCount, ParameterLayouts, Placement, Scope};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::{MODEL, SongUNetPosEmbd, keys};
use crate::batch::Batch;
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::model::{Architecture, Model};
use crate::sharding::Sharding;
use crate::size::{built, extrapolate};
use crate::song_unet::{EmbeddingType, SongUNetConfig};
use crate::traffic::{Split, Traffic};

/// Keys of the network with lead times. PhysicsNeMo's class rejects them, too, and refers to that network.
const LEAD_TIME_KEYS: [&str; 4] =
    ["lead_time_mode", "lead_time_channels", "lead_time_steps", "prob_channels"];

/// Most channels of positions.
const MOST_CHANNELS: usize = 1024;

/// Arguments of [`SongUNetPosEmbd`](crate::SongUNetPosEmbd), by PhysicsNeMo's names. In a configuration table, the keys of both
/// are at the same level; those of the network that are not given are PhysicsNeMo's for this network: `channel_mult`
/// `[1, 2, 2, 2, 2]`, `attn_resolutions` `[28]` and `dropout` 0.13.
///
/// ```
/// use isobar_models::{GridType, SongUNetPosEmbdConfig};
///
/// let table = r#"{ "img_resolution": 32, "in_channels": 5, "out_channels": 1, "gridtype": "linear", "N_grid_channels": 2 }"#;
/// let config: SongUNetPosEmbdConfig = serde_json::from_str(table)?;
/// assert_eq!(config.positions.gridtype, GridType::Linear);
/// assert_eq!(config.network.channel_mult, [1, 2, 2, 2, 2]);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct SongUNetPosEmbdConfig {
    /// Positions of the points.
    pub positions: GridPositions,
    /// The network. Its `in_channels` count the fields and the positions.
    pub network: SongUNetConfig,
}

/// Positions of the points of the grid, as channels of a network's input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GridPositions {
    /// Functions of the positions.
    #[serde(default)]
    pub gridtype: GridType,
    /// Channels of positions, which `in_channels` counts too: 2 for `linear` and `test`, a multiple of 4 for sines, at most 1024; 0
    /// for none.
    #[serde(default = "four", rename = "N_grid_channels")]
    pub n_grid_channels: usize,
}

/// Functions of the positions of points. Angles x and y run from 0 to 2π along the columns and the rows, both ends included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GridType {
    /// sin fx, sin fy, cos fx, cos fy for n frequencies f from 1 to 2ⁿ, their logarithms evenly spaced; 1 for four channels.
    #[default]
    Sinusoidal,
    /// As `sinusoidal`, for the frequencies 1, 2, 4, ….
    SinusoidalOctave,
    /// A trained number for each point and channel.
    Learnable,
    /// Column and row, scaled to [−1, 1].
    Linear,
    /// Row and column, counted from 0; for tests.
    Test,
}

impl Default for GridPositions {
    fn default() -> Self {
        Self { gridtype: GridType::default(), n_grid_channels: four() }
    }
}

impl GridPositions {
    /// Checks the number of channels.
    pub(crate) fn check(&self, model: &'static str) -> Result<()> {
        let count = self.n_grid_channels;
        let (fits, want) = match self.gridtype {
            GridType::Learnable => (true, "any number"),
            GridType::Linear | GridType::Test => (count == 0 || count == 2, "2"),
            GridType::Sinusoidal | GridType::SinusoidalOctave => (count.is_multiple_of(4), "a multiple of 4"),
        };
        Checker(model).ensure(fits && count <= MOST_CHANNELS, || {
            let name = serde_json::to_value(self.gridtype).unwrap_or_default();
            format!(
                "N_grid_channels is {count}, expected {want} up to {MOST_CHANNELS} for gridtype {name}, or 0"
            )
        })
    }

    /// Number of trained channels.
    pub(crate) fn trained(&self) -> usize {
        match self.gridtype {
            GridType::Learnable => self.n_grid_channels,
            _ => 0,
        }
    }

    /// Adds the split of the trained positions, which lie as the fields do, to the layouts of the network.
    pub(crate) fn layouts(&self, network: &SongUNetConfig) -> ParameterLayouts {
        let layouts = network.sharding().parameter_layouts().clone();
        match self.trained() {
            0 => layouts,
            _ => layouts.with("pos_embd", &[("domain", Placement::Shard(1))]),
        }
    }
}

/// Checks that channels are left for the fields beside the `further` ones that a model adds to its input.
pub(crate) fn check_inputs(model: &'static str, network: &SongUNetConfig, further: usize) -> Result<()> {
    let inputs = network.in_channels;
    Checker(model).ensure(inputs > further, || {
        format!(
            "in_channels is {inputs}, expected more than {further}: it counts the channels of the fields and the {further} that the \
             model adds"
        )
    })
}

/// Checks the data of a SongUNet that adds `further` channels to its input.
pub(crate) fn check_fields(
    model: &'static str,
    network: &SongUNetConfig,
    further: usize,
    fields: &FieldSpec,
) -> Result<()> {
    fields.check_extents(model, "img_resolution", &network.img_resolution.list(2))?;
    network.check_patches(model, fields)?;
    if network.embedding_type != EmbeddingType::Zero {
        fields.check_array(model, Batch::<()>::TIME)?;
        if network.label_dim > 0 {
            fields.check_array(model, crate::song_unet::CLASS_LABELS)?;
        }
    }
    let given = fields.in_channels + fields.position_channels;
    let wanted = given + further;
    Checker(model).ensure(network.in_channels == wanted, || {
        format!(
            "model.in_channels is {}, but the inputs of {} have {given} channels, and the model adds {further}; --set \
             model.in_channels={wanted}",
            network.in_channels, fields.source
        )
    })?;
    let outputs = fields.out_channels;
    Checker(model).ensure(network.out_channels == outputs, || {
        format!(
            "model.out_channels is {}, but the targets of {} have {outputs} channels; --set model.out_channels={outputs}",
            network.out_channels, fields.source
        )
    })
}

impl SongUNetPosEmbdConfig {
    /// Four channels of sines and cosines beside the fields; `in_channels` of `network` counts them.
    pub fn new(network: SongUNetConfig) -> Self {
        Self { positions: GridPositions::default(), network }
    }

    pub(super) fn check_own(&self) -> Result<()> {
        self.positions.check(MODEL)?;
        check_inputs(MODEL, &self.network, self.positions.n_grid_channels)
    }

    fn read(mut table: Map<String, Value>) -> serde_json::Result<Self> {
        if let Some(key) = LEAD_TIME_KEYS.into_iter().find(|key| table.contains_key(*key)) {
            return Err(serde_json::Error::custom(format!(
                "{key} is a key of the network with lead times; use song_unet_pos_lt_embd (SongUNetPosLtEmbd), or remove {key}"
            )));
        }
        Ok(Self { positions: keys::take(&mut table)?, network: keys::network(table)? })
    }

    fn table(&self) -> serde_json::Result<Map<String, Value>> {
        keys::joined([serde_json::to_value(&self.network)?, serde_json::to_value(&self.positions)?])
    }
}

impl Serialize for SongUNetPosEmbdConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.table().map_err(<S::Error as serde::ser::Error>::custom)?.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for SongUNetPosEmbdConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        Self::read(Map::deserialize(deserializer)?).map_err(<D::Error as serde::de::Error>::custom)
    }
}

impl JsonSchema for SongUNetPosEmbdConfig {
    fn schema_name() -> Cow<'static, str> {
        "SongUNetPosEmbdConfig".into()
    }

    /// The keys of both.
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let own = GridPositions::json_schema(generator);
        keys::joined_schema(generator, &[own])
    }
}

impl Architecture for SongUNetPosEmbdConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some(
        "SongUNet with positions on the grid as further channels of its input, for regression and diffusion, also on patches of a grid.",
    );

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(SongUNetPosEmbd::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        self.check_own()?;
        check_fields(MODEL, &self.network, self.positions.n_grid_channels, fields)
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.network.num_blocks, 1, |num_blocks| {
            let network = SongUNetConfig { num_blocks, ..self.network.clone() };
            built(count, |params| SongUNetPosEmbd::new(&Self { network, ..self.clone() }, params))
        })
    }

    fn unread(&self) -> Vec<String> {
        self.network.unread()
    }

    fn reads_patches(&self) -> bool {
        true
    }

    fn sharding(&self) -> Sharding {
        Sharding::new().parameters(self.positions.layouts(&self.network))
    }
}

crate::register!(SongUNetPosEmbdConfig);

fn four() -> usize {
    4
}
