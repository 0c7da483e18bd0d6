//! The traits of models that training programs use.
//!
//! They depend on no model and not on the registry.

mod any;

use std::fmt::Debug;

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) use self::any::AnyArchitecture;
pub use self::any::ModelArray;
use crate::batch::Batch;
use crate::diffusion::Denoiser;
use crate::error::Result;
use crate::fields::FieldSpec;
use crate::sharding::Sharding;
use crate::signature::Signature;
use crate::traffic::{Split, Traffic};

/// A model with its parameters, ready to run.
pub trait Model<A: Array> {
    /// Computes the outputs for a batch, each array `[batch, …]`. The fields of the result may have other channels than those of the
    /// input, and be on another grid. On sharded arrays, and with parameters of a model-parallel group or of a mesh, all ranks that
    /// share the arrays or the parameters call, with the same `mode`: operators communicate.
    ///
    /// # Errors
    ///
    /// A missing array, one of another shape than the configuration says, or an operator that fails.
    fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>>;

    /// Computes the regularization term of the loss, a tensor without dims, such as the negative entropies of trained dropout
    /// probabilities; `None` if the model has none. `isobar train` and `Trainer` add it, times `train.weights.regularization`. All
    /// ranks that call [`forward`](Self::forward) call.
    ///
    /// # Errors
    ///
    /// An operator fails.
    fn regularization(&self) -> Result<Option<A>> {
        Ok(None)
    }
}

/// Largest array that a model makes of one sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LargestArray {
    /// Number of its elements, over all ranks that share the sample.
    pub elements: u128,
    /// Keys and values that its size follows from, such as `model.padding = 8`.
    pub keys: String,
}

/// Configuration of a model that a TOML file can name: `[model] type = "NAME"`, the other keys being the fields of the type.
///
/// [`register!`](macro@crate::register) makes it known to every program that is linked with the crate it stands in. Keys, defaults
/// and their meanings in `reference.toml` come from the type's schema and doc comments.
///
/// ```
/// use isobar_models::{Architecture, Batch, FieldSpec, Mode, Model, ModelConfig, Result};
/// use isobar_array::Array;
/// use isobar_shard::{Init, Params, Placement, Scope};
/// use schemars::JsonSchema;
/// use serde::{Deserialize, Serialize};
///
/// /// One factor for each channel.
/// #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
/// #[serde(deny_unknown_fields)]
/// struct GainConfig {
///     /// Channels of the fields.
///     channels: usize,
/// }
///
/// struct Gain<A>(A);
///
/// impl<A: Array> Model<A> for Gain<A> {
///     fn forward(&self, batch: &Batch<A>, _mode: Mode<'_>) -> Result<Batch<A>> {
///         let x = batch.require(GainConfig::NAME, Batch::<A>::FIELDS)?;
///         Ok(Batch::of_fields(x.mul(&self.0)?))
///     }
/// }
///
/// impl Architecture for GainConfig {
///     const NAME: &'static str = "gain";
///
///     fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
///         let shape = [self.channels as i64, 1, 1];
///         Ok(Box::new(Gain(params.param("weight", &shape, Init::Constant(1.0), Placement::Replicate)?)))
///     }
///
///     fn check(&self, fields: &FieldSpec) -> Result<()> {
///         fields.check_channels(Self::NAME, ("channels", self.channels), ("channels", self.channels))
///     }
/// }
///
/// isobar_models::register!(GainConfig);
///
/// let config: ModelConfig = serde_json::from_str(r#"{ "type": "gain", "channels": 3 }"#)?;
/// assert_eq!((config.name(), config.count(&Default::default)?.trained), ("gain", 3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Architecture:
    Clone + PartialEq + Debug + Serialize + DeserializeOwned + JsonSchema + Send + Sync + 'static
{
    /// Value of `model.type`.
    const NAME: &'static str;

    /// One sentence on the model in `reference.toml`; by default the doc comment of the type.
    const SUMMARY: Option<&'static str> = None;

    /// True if the model's channels can be split over the ranks of the mesh's axis `model`.
    const MODEL_PARALLEL: bool = false;

    /// Unit of `time` that the model needs, as in CF: the program converts times of data in another unit since a date. `None` for
    /// the unit of the data.
    const TIME_UNIT: Option<&'static str> = None;

    /// Makes the model; its parameters come from `params`. All ranks call.
    ///
    /// # Errors
    ///
    /// Sizes that do not fit together, or a parameter that cannot be made.
    fn build<A: ModelArray>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>>;

    /// Checks that the model accepts the fields of a data set, without building it.
    ///
    /// # Errors
    ///
    /// A key that does not fit, with the `--set` that mends it.
    fn check(&self, fields: &FieldSpec) -> Result<()>;

    /// Returns the keys without effect that are not at their default, by their paths below `model`, such as
    /// `encoder.conv_block.enable_nhwc`. They are accepted for configurations of the original model; `isobar train` warns of
    /// them.
    fn unread(&self) -> Vec<String> {
        Vec::new()
    }

    /// Counts the parameters and buffers of one rank. `count` makes an empty counter for the ranks that share the model.
    /// By default the model is built from such a counter. Does not communicate.
    ///
    /// # Errors
    ///
    /// Invalid arguments of the model.
    ///
    /// ```
    /// use isobar_models::{Architecture, FnoConfig, PerDim};
    /// use isobar_shard::ParamCount;
    ///
    /// let config = FnoConfig { num_fno_modes: PerDim::All(100_000), ..FnoConfig::new(1, 1) };
    /// let size = config.count(&ParamCount::default)?;
    /// assert!(size.trained > 80_000_000_000_000); // and none of them was made
    /// # Ok::<(), isobar_models::Error>(())
    /// ```
    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        crate::size::built(count, |params| self.build(&mut Scope::new(params, "")))
    }

    /// Returns the largest array that the model makes of one sample, if that can be much larger than the fields and the
    /// parameters. Training compares it with the memory of the machines before anything is allocated.
    fn largest_array(&self, _fields: &FieldSpec) -> Option<LargestArray> {
        None
    }

    /// Data and noise levels of the model, if it is a denoiser: it reads noisy `fields`, their noise levels `sigma`, and
    /// `conditions`, as [`EdmPreconditioner`](crate::EdmPreconditioner) does. Training then draws noise, and evaluation samples.
    fn denoises(&self) -> Option<Denoiser> {
        None
    }

    /// Returns true if the model is built for the full fields but can also compute on patches: it reads the positions of a patch from
    /// the array `global_index`. For diffusion on patches, other models are built for the extents of a patch.
    fn reads_patches(&self) -> bool {
        false
    }

    /// Returns an upper bound of what a rank receives in a pass over a batch that is split as `split`; `None` if the model declares
    /// none. `isobar verify` compares it with what is received.
    fn traffic(&self, _split: &Split) -> Option<Traffic> {
        None
    }

    /// Declares how parameters and inputs are split over the axes of a mesh.
    fn sharding(&self) -> Sharding {
        Sharding::new()
    }

    /// Returns the mapping from the original model's forward function to the arrays of a batch.
    fn signature(&self) -> Signature {
        Signature::default()
    }

    /// Factor by which the grid of the outputs is finer than that of the inputs, along every spatial dim. Training gives such
    /// a model the means of the data's fields over cells of so many points.
    fn refinement(&self) -> usize {
        1
    }

    /// Extents of the outputs for inputs of these extents, with `[data.target]`: any grid that the model computes, coarser ones and
    /// those of other shapes included. By default [`refinement`](Self::refinement) times those of the inputs.
    fn output_extents(&self, extents: &[usize]) -> Vec<usize> {
        extents.iter().map(|extent| extent.saturating_mul(self.refinement().max(1))).collect()
    }
}
