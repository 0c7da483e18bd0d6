//! Arguments of FengWu.

use isobar_array::Array;
use isobar_shard::Scope;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::layers::Geometry;
use super::{Fengwu, MODEL};
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::model::{Architecture, LargestArray, Model};
use crate::sharding::Sharding;
use crate::signature::Signature;
use crate::traffic::{Split, Traffic};

/// Arguments of [`Fengwu`](crate::Fengwu), by PhysicsNeMo's names.
///
/// ```
/// use isobar_models::FengwuConfig;
///
/// let config = FengwuConfig { pressure_level: 13, ..FengwuConfig::default() };
/// assert_eq!(config.channels(), 69);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FengwuConfig {
    /// Latitudes and longitudes of the fields.
    #[serde(default = "img_size")]
    pub img_size: [usize; 2],
    /// Pressure levels of each of the five variables above the surface.
    #[serde(default = "pressure_level")]
    pub pressure_level: usize,
    /// Features of the outer blocks; the inner ones have twice as many.
    #[serde(default = "embed_dim")]
    pub embed_dim: usize,
    /// Latitudes and longitudes of a patch.
    #[serde(default = "patch_size")]
    pub patch_size: [usize; 2],
    /// Heads of attention: the first of the outer blocks, the second of the inner ones. The others are not used.
    #[serde(default = "num_heads")]
    pub num_heads: [usize; 4],
    /// Variables, latitudes and longitudes of a window, in patches. Blocks of a single variable use the last two.
    #[serde(default = "window_size")]
    pub window_size: [usize; 3],
    /// Recompute the activations of the blocks in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl Default for FengwuConfig {
    fn default() -> Self {
        Self {
            img_size: img_size(),
            pressure_level: pressure_level(),
            embed_dim: embed_dim(),
            patch_size: patch_size(),
            num_heads: num_heads(),
            window_size: window_size(),
            gradient_checkpointing: false,
        }
    }
}

impl FengwuConfig {
    /// Returns the number of channels of inputs and outputs: four at the surface, and five variables on all levels.
    pub fn channels(&self) -> usize {
        self.pressure_level.saturating_mul(5).saturating_add(4)
    }
}

impl Architecture for FengwuConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some(
        "FengWu: attention in shifted windows for each variable, fused by attention over all variables.",
    );

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(Fengwu::new(self, params)?))
    }

    fn signature(&self) -> Signature {
        Signature { outputs: &Fengwu::<tch::Tensor>::OUTPUTS, ..Signature::default() }
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_extents(MODEL, "img_size", &self.img_size)?;
        Geometry::new(self)?;
        let channels = [self.channels(); 2];
        fields.check_fixed_channels(MODEL, channels, "choose other data or another model.type")
    }

    fn largest_array(&self, _fields: &FieldSpec) -> Option<LargestArray> {
        let elements = Geometry::new(self).ok()?.scores();
        Some(LargestArray { elements, keys: format!("model.window_size = {:?}", self.window_size) })
    }

    fn sharding(&self) -> Sharding {
        let Ok(geometry) = Geometry::new(self) else { return Sharding::new() };
        let [_, rows, columns] = geometry.inner(1, &[]).window_counts();
        Sharding::new().tokens(&[rows as usize, columns as usize])
    }
}

crate::register!(FengwuConfig);

fn img_size() -> [usize; 2] {
    [721, 1440]
}

fn pressure_level() -> usize {
    37
}

fn embed_dim() -> usize {
    192
}

fn patch_size() -> [usize; 2] {
    [4, 4]
}

fn num_heads() -> [usize; 4] {
    [6, 12, 12, 6]
}

fn window_size() -> [usize; 3] {
    [2, 6, 12]
}
