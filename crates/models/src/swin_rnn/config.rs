//! Arguments of SwinRNN.

use isobar_array::Array;
use isobar_shard::Scope;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::model::{Geometry, HALVINGS};
use super::{MODEL, SwinRnn};
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::model::{Architecture, LargestArray, Model};
use crate::sharding::Sharding;
use crate::traffic::{Split, Traffic};

/// Arguments of [`SwinRnn`](crate::SwinRnn), by PhysicsNeMo's names.
///
/// ```
/// use isobar_models::SwinRnnConfig;
///
/// let config = SwinRnnConfig::new(6, [64, 128], 3);
/// assert_eq!(config.patch_size, [6, 1, 1]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SwinRnnConfig {
    /// Times, rows and columns of the input; rows and columns are multiples of 8. `isobar train` supports 1 time.
    pub img_size: [usize; 3],
    /// Times, rows and columns of a patch: all times, 1 row and 1 column. (PhysicsNeMo's own default, [2, 4, 4],
    /// fails in PhysicsNeMo.)
    pub patch_size: [usize; 3],
    /// Channels of the input.
    #[serde(default = "chans")]
    pub in_chans: usize,
    /// Channels of the output, which are those of the input.
    #[serde(default = "chans")]
    pub out_chans: usize,
    /// Features of all stages.
    #[serde(default = "embed_dim")]
    pub embed_dim: usize,
    /// Number of groups of the group norms in convolutional blocks; blocks that output channels of the fields have
    /// one group per channel.
    #[serde(default = "num_groups")]
    pub num_groups: usize,
    /// Heads of attention.
    #[serde(default = "num_heads")]
    pub num_heads: usize,
    /// Rows and columns of a window.
    #[serde(default = "window_size")]
    pub window_size: usize,
    /// Recompute the activations of the blocks in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl SwinRnnConfig {
    /// The defaults for so many times of fields with the given rows, columns and channels.
    pub fn new(times: usize, [rows, columns]: [usize; 2], channels: usize) -> Self {
        Self {
            img_size: [times, rows, columns],
            patch_size: [times, 1, 1],
            in_chans: channels,
            out_chans: channels,
            embed_dim: embed_dim(),
            num_groups: num_groups(),
            num_heads: num_heads(),
            window_size: window_size(),
            gradient_checkpointing: false,
        }
    }
}

impl Architecture for SwinRnnConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> =
        Some("SwinRNN: the next state from the last ones, by attention in shifted windows on four grids.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(SwinRnn::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        let [times, rows, columns] = self.img_size;
        let own = &fields.extents;
        Checker(MODEL).ensure(own.len() == 2 && own.iter().all(|n| n.is_multiple_of(1 << HALVINGS)), || {
            let step = 1 << HALVINGS;
            format!(
                "the fields of {} are {own:?}, but the model needs rows and columns that are multiples of {step}; choose other data \
                 or another model.type",
                fields.source
            )
        })?;
        Checker(MODEL).ensure(times == 1 && own[..] == [rows, columns], || {
            format!(
                "model.img_size is {:?}, but the fields of {} are one time of {own:?}; --set 'model.img_size=[1, {}, {}]' --set \
                 'model.patch_size=[1, 1, 1]'",
                self.img_size, fields.source, own[0], own[1]
            )
        })?;
        fields.check_channels(MODEL, ("in_chans", self.in_chans), ("out_chans", self.out_chans))?;
        Geometry::new(self).map(|_| ())
    }

    fn largest_array(&self, _fields: &FieldSpec) -> Option<LargestArray> {
        let elements = Geometry::new(self).ok()?.scores();
        Some(LargestArray { elements, keys: format!("model.window_size = {:?}", self.window_size) })
    }

    fn sharding(&self) -> Sharding {
        let Ok(geometry) = Geometry::new(self) else { return Sharding::new() };
        let [_, rows, columns] = geometry.windows();
        Sharding::new().tokens(&[rows as usize, columns as usize])
    }
}

crate::register!(SwinRnnConfig);

fn chans() -> usize {
    70
}

fn embed_dim() -> usize {
    1536
}

fn num_groups() -> usize {
    32
}

fn num_heads() -> usize {
    8
}

fn window_size() -> usize {
    7
}
