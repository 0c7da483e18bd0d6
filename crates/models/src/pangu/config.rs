//! Arguments of Pangu.

use isobar_array::Array;
use isobar_shard::Scope;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::model::Geometry;
use super::{MODEL, Pangu};
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::model::{Architecture, LargestArray, Model};
use crate::sharding::Sharding;
use crate::signature::Signature;
use crate::traffic::{Split, Traffic};

/// Arguments of [`Pangu`](crate::Pangu), by PhysicsNeMo's names.
///
/// ```
/// use isobar_models::PanguConfig;
///
/// let config = PanguConfig { img_size: [181, 360], ..PanguConfig::default() };
/// assert_eq!(config.window_size, [2, 6, 12]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PanguConfig {
    /// Latitudes and longitudes of the fields. The number of latitudes is odd or a multiple of the patch's.
    #[serde(default = "img_size")]
    pub img_size: [usize; 2],
    /// Levels, latitudes and longitudes of a patch; 2 levels.
    #[serde(default = "patch_size")]
    pub patch_size: [usize; 3],
    /// Features of the first and the last stage; the two between have twice as many.
    #[serde(default = "embed_dim")]
    pub embed_dim: usize,
    /// Heads of attention of each of the four stages.
    #[serde(default = "num_heads")]
    pub num_heads: [usize; 4],
    /// Levels, latitudes and longitudes of a window, in patches.
    #[serde(default = "window_size")]
    pub window_size: [usize; 3],
    /// Variables at the surface: the first channels of input and output.
    #[serde(default = "surface_variables")]
    pub surface_variables: usize,
    /// Channels at the surface that are inputs only, after those of the surface's variables and before the levels: masks, static
    /// fields. `isobar train` appends static fields to all variables: with levels, set it to 0.
    #[serde(default = "surface_masks")]
    pub surface_masks: usize,
    /// Variables above the surface, each with `pressure_levels` channels.
    #[serde(default = "upper_air_variables")]
    pub upper_air_variables: usize,
    /// Pressure levels of each variable above the surface; 0 for fields at the surface only, whose windows have one level.
    #[serde(default = "pressure_levels")]
    pub pressure_levels: usize,
    /// Recompute the activations of the blocks in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl Default for PanguConfig {
    fn default() -> Self {
        Self {
            img_size: img_size(),
            patch_size: patch_size(),
            embed_dim: embed_dim(),
            num_heads: num_heads(),
            window_size: window_size(),
            surface_variables: surface_variables(),
            surface_masks: surface_masks(),
            upper_air_variables: upper_air_variables(),
            pressure_levels: pressure_levels(),
            gradient_checkpointing: false,
        }
    }
}

impl Architecture for PanguConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> =
        Some("Pangu-Weather: attention in shifted windows over levels, latitudes and longitudes.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(Pangu::new(self, params)?))
    }

    fn signature(&self) -> Signature {
        Signature { outputs: &Pangu::<tch::Tensor>::OUTPUTS, ..Signature::default() }
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_extents(MODEL, "img_size", &self.img_size)?;
        let channels = Geometry::new(self)?.channels;
        let numbers = [channels.inputs() as usize, channels.outputs() as usize];
        let mend = "set model.surface_variables and model.surface_masks, and model.upper_air_variables and model.pressure_levels";
        fields.check_fixed_channels(MODEL, numbers, mend)
    }

    fn largest_array(&self, _fields: &FieldSpec) -> Option<LargestArray> {
        let elements = Geometry::new(self).ok()?.scores();
        Some(LargestArray { elements, keys: format!("model.window_size = {:?}", self.window_size) })
    }

    fn sharding(&self) -> Sharding {
        let Ok(geometry) = Geometry::new(self) else { return Sharding::new() };
        let [_, rows, columns] = geometry.inner_windows();
        Sharding::new().tokens(&[rows as usize, columns as usize])
    }
}

crate::register!(PanguConfig);

fn img_size() -> [usize; 2] {
    [721, 1440]
}

fn patch_size() -> [usize; 3] {
    [2, 4, 4]
}

fn embed_dim() -> usize {
    192
}

fn num_heads() -> [usize; 4] {
    [6, 12, 12, 6]
}

fn window_size() -> [usize; 3] {
    [2, 6, 12]
}

fn surface_variables() -> usize {
    4
}

fn surface_masks() -> usize {
    3
}

fn upper_air_variables() -> usize {
    5
}

fn pressure_levels() -> usize {
    13
}
