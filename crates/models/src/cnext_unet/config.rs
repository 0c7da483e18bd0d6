//! Arguments of the CNextU-net.

use isobar_array::Array;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{CNextUNet, MODEL};
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::model::{Architecture, Model};
use crate::size::{built, extrapolate};
use crate::traffic::{Split, Traffic};

/// Arguments of [`CNextUNet`](crate::CNextUNet), by The Well's names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CNextUNetConfig {
    /// Channels of the input.
    pub dim_in: usize,
    /// Channels of the output.
    pub dim_out: usize,
    /// Number of spatial dims, 1 to 3.
    #[schemars(range(min = 1, max = 3))]
    pub n_spatial_dims: usize,
    /// Extents of the fields; 2^`stages` divides them.
    pub spatial_resolution: Vec<usize>,
    /// Number of times that the extents are halved on the way down, and doubled on the way up; at most 16.
    #[serde(default = "stages")]
    pub stages: usize,
    /// Blocks of each stage.
    #[serde(default = "one")]
    pub blocks_per_stage: usize,
    /// Blocks on the coarsest grid.
    #[serde(default = "one")]
    pub blocks_at_neck: usize,
    /// Channels on the finest grid; each coarser grid has twice as many.
    #[serde(default = "init_features")]
    pub init_features: usize,
    /// Recomputes the activations of the blocks in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl CNextUNetConfig {
    /// The defaults for fields with the given channels and extents.
    pub fn new(dim_in: usize, dim_out: usize, spatial_resolution: &[usize]) -> Self {
        Self {
            dim_in,
            dim_out,
            n_spatial_dims: spatial_resolution.len(),
            spatial_resolution: spatial_resolution.to_vec(),
            stages: stages(),
            blocks_per_stage: one(),
            blocks_at_neck: one(),
            init_features: init_features(),
            gradient_checkpointing: false,
        }
    }
}

impl Architecture for CNextUNetConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some("CNextU-net of The Well: a U-Net of ConvNeXt blocks.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(CNextUNet::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        Checker(MODEL).ensure(self.n_spatial_dims == fields.extents.len(), || {
            let dims = fields.extents.len();
            format!(
                "model.n_spatial_dims is {}, but the fields of {} have {dims}; --set model.n_spatial_dims={dims}",
                self.n_spatial_dims, fields.source
            )
        })?;
        fields.check_extents(MODEL, "spatial_resolution", &self.spatial_resolution)?;
        fields.check_channels(MODEL, ("dim_in", self.dim_in), ("dim_out", self.dim_out))
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.blocks_per_stage, 1, |blocks_per_stage| {
            extrapolate(self.blocks_at_neck, 1, |blocks_at_neck| {
                let few = Self { blocks_per_stage, blocks_at_neck, ..self.clone() };
                built(count, |params| CNextUNet::new(&few, params))
            })
        })
    }
}

crate::register!(CNextUNetConfig);

fn stages() -> usize {
    4
}

fn one() -> usize {
    1
}

fn init_features() -> usize {
    32
}
