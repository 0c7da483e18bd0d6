//! Arguments of Aurora.

use isobar_array::Array;
use isobar_shard::Scope;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::geometry::Geometry;
use super::{Aurora, MODEL};
use crate::batch::Batch;
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::model::{Architecture, LargestArray, Model};
use crate::sharding::Sharding;
use crate::traffic::{Split, Traffic};

/// Arguments of [`Aurora`](crate::Aurora), by the names of its source.
///
/// ```
/// use isobar_models::AuroraConfig;
///
/// let config = AuroraConfig { img_size: [180, 360], ..AuroraConfig::default() };
/// // Two frames of 4 variables at the surface and 5 on 13 levels, and 3 static fields.
/// assert_eq!((config.in_channels(), config.out_channels()), (2 * 69 + 3, 69));
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AuroraConfig {
    /// Latitudes and longitudes of the fields, multiples of the patch's.
    pub img_size: [usize; 2],
    /// First and last latitude in degrees. They are evenly spaced.
    pub latitudes: [f64; 2],
    /// First and last longitude in degrees, from 0 to 360. They are evenly spaced.
    pub longitudes: [f64; 2],
    /// Names of the variables at the surface.
    pub surf_vars: Vec<String>,
    /// Names of the static fields, which are inputs only.
    pub static_vars: Vec<String>,
    /// Names of the variables on pressure levels.
    pub atmos_vars: Vec<String>,
    /// Pressure levels in hPa.
    pub atmos_levels: Vec<f64>,
    /// Frames of the history.
    pub max_history_size: usize,
    /// Hours from the last frame to the prediction.
    pub lead_time: f64,
    /// Rows and columns of a patch.
    pub patch_size: usize,
    /// Features of the first stage; each further one has twice as many.
    pub embed_dim: usize,
    /// Latent levels, the surface among them; a multiple of the window's.
    pub latent_levels: usize,
    /// Heads of the attention between levels.
    pub num_heads: usize,
    /// Layers of the attention between levels in the encoder.
    pub enc_depth: usize,
    /// Layers of the attention between levels in the decoder.
    pub dec_depth: usize,
    /// Features of hidden layers, as a multiple of the width.
    pub mlp_ratio: f64,
    /// Features of the decoder's hidden layers, as a multiple of the width.
    pub dec_mlp_ratio: f64,
    /// Levels, rows and columns of a window, in patches.
    pub window_size: [usize; 3],
    /// Blocks of each stage of the encoder, from the finest grid to the coarsest.
    pub encoder_depths: Vec<usize>,
    /// Heads of attention of each stage of the encoder.
    pub encoder_num_heads: Vec<usize>,
    /// Blocks of each stage of the decoder, from the coarsest grid to the finest.
    pub decoder_depths: Vec<usize>,
    /// Heads of attention of each stage of the decoder.
    pub decoder_num_heads: Vec<usize>,
    /// Probability of the last block to be dropped in training; that of the others grows to it.
    pub drop_path: f64,
    /// Recompute the activations of the blocks in backward: less memory, about a third more time, the same numbers.
    pub gradient_checkpointing: bool,
}

impl Default for AuroraConfig {
    fn default() -> Self {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Self {
            img_size: [720, 1440],
            latitudes: [90.0, -89.75],
            longitudes: [0.0, 359.75],
            surf_vars: names(&["2t", "10u", "10v", "msl"]),
            static_vars: names(&["lsm", "z", "slt"]),
            atmos_vars: names(&["z", "u", "v", "t", "q"]),
            atmos_levels: [50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000]
                .map(f64::from)
                .into(),
            max_history_size: 2,
            lead_time: 6.0,
            patch_size: 4,
            embed_dim: 512,
            latent_levels: 4,
            num_heads: 16,
            enc_depth: 1,
            dec_depth: 1,
            mlp_ratio: 4.0,
            dec_mlp_ratio: 2.0,
            window_size: [2, 6, 12],
            encoder_depths: vec![6, 10, 8],
            encoder_num_heads: vec![8, 16, 32],
            decoder_depths: vec![8, 10, 6],
            decoder_num_heads: vec![32, 16, 8],
            drop_path: 0.0,
            gradient_checkpointing: false,
        }
    }
}

impl AuroraConfig {
    /// Returns the number of channels of the output: those at the surface, then each variable on all levels.
    pub fn out_channels(&self) -> usize {
        self.atmos_vars.len().saturating_mul(self.atmos_levels.len()).saturating_add(self.surf_vars.len())
    }

    /// Returns the number of channels of the input: those of the output for each frame, the oldest first, then the static fields.
    pub fn in_channels(&self) -> usize {
        self.out_channels().saturating_mul(self.max_history_size).saturating_add(self.static_vars.len())
    }
}

impl Architecture for AuroraConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> = Some(
        "Aurora: attention over pressure levels, and a U-Net of shifted windows over levels, latitudes and longitudes.",
    );
    const TIME_UNIT: Option<&'static str> = Some("hours since 1970-01-01");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(Aurora::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_extents(MODEL, "img_size", &self.img_size)?;
        Geometry::new(self)?;
        fields.check_array(MODEL, Batch::<tch::Tensor>::TIME)?;
        let (inputs, outputs) = (fields.in_channels + fields.position_channels, fields.out_channels);
        Checker(MODEL).ensure(inputs == self.in_channels() && outputs == self.out_channels(), || {
            format!(
                "max_history_size = {} frames of {} surf_vars and {} atmos_vars on {} atmos_levels, with {} static_vars, are {} input \
                 and {} output channels, but the inputs of {} have {inputs} channels, and the targets {outputs}; set these keys of \
                 [model] to what [data] selects",
                self.max_history_size,
                self.surf_vars.len(),
                self.atmos_vars.len(),
                self.atmos_levels.len(),
                self.static_vars.len(),
                self.in_channels(),
                self.out_channels(),
                fields.source,
            )
        })
    }

    fn largest_array(&self, _fields: &FieldSpec) -> Option<LargestArray> {
        let elements = Geometry::new(self).ok()?.scores();
        Some(LargestArray { elements, keys: format!("model.window_size = {:?}", self.window_size) })
    }

    fn sharding(&self) -> Sharding {
        let Ok(geometry) = Geometry::new(self) else { return Sharding::new() };
        let [_, rows, columns] = geometry.coarsest_windows();
        Sharding::new().tokens(&[rows as usize, columns as usize])
    }
}

crate::register!(AuroraConfig);
