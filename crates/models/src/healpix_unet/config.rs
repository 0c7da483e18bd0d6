//! Arguments of the U-Net of DLWP-HEALPix.

use isobar_array::Array;
use isobar_shard::Scope;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::parts::{HealpixCoupling, HealpixDecoder, HealpixEncoder};
use super::plan::Plan;
use super::{HealpixUNet, MODEL};
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::model::{Architecture, Model};
use crate::signature::Signature;
use crate::traffic::{Split, Traffic};

/// Arguments of [`HealpixUNet`](crate::HealpixUNet), by PhysicsNeMo's names. Parts are tables in Hydra's form:
/// `_target_` names a class, and its module path is ignored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HealpixUNetConfig {
    /// Encoder, from the finest grid to the coarsest.
    pub encoder: HealpixEncoder,
    /// Decoder, from the coarsest grid to the finest.
    pub decoder: HealpixDecoder,
    /// Channels of the input per time step.
    pub input_channels: usize,
    /// Channels of the output per time step.
    pub output_channels: usize,
    /// Number of constant channels.
    #[serde(default)]
    pub n_constants: usize,
    /// Prescribed channels per time step, such as insolation.
    #[serde(default)]
    pub decoder_input_channels: usize,
    /// Number of times of the input.
    pub input_time_dim: usize,
    /// Number of output time steps: 1, or a multiple of `input_time_dim`, computed in several passes of the network.
    pub output_time_dim: usize,
    /// Warm-up steps of recurrent networks; no effect here.
    #[serde(default)]
    pub presteps: usize,
    /// Memory format of convolutions in PyTorch; no effect here.
    #[serde(default)]
    pub enable_nhwc: bool,
    /// Kernel of the padding in PyTorch; no effect here.
    #[serde(default)]
    pub enable_healpixpad: bool,
    /// Fields of other models that are inputs too, in each step; constants and decoder inputs are needed then.
    #[serde(default)]
    pub couplings: Vec<HealpixCoupling>,
    /// Recompute the activations of each block in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl Architecture for HealpixUNetConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> =
        Some("U-Net of DLWP-HEALPix, on the twelve faces of a HEALPix mesh, padded with their neighbours.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(HealpixUNet::new(self, params)?))
    }

    fn unread(&self) -> Vec<String> {
        super::unread::keys(self)
    }

    /// Prognostic fields `[batch, face, time, channel, row, column]`, and constants without samples and times.
    fn signature(&self) -> Signature {
        let domain = |dims: usize| match dims {
            6 => vec![0, 1, 4, 5],
            4 => vec![0, 2, 3],
            dims => (Signature::default().domain)(dims),
        };
        Signature { domain, ..Signature::default() }
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        let plan = Plan::new(self)?;
        let check = Checker(MODEL);
        check.ensure(self.n_constants == 0 && self.decoder_input_channels == 0, || {
            "batches of fields have no constants and no decoder inputs; --set model.n_constants=0 --set model.decoder_input_channels=0"
                .to_owned()
        })?;
        let fits = |least| match *fields.extents.as_slice() {
            [12, height, width] => height == width && i64::try_from(height).is_ok_and(least),
            _ => false,
        };
        check.ensure(fits(|n| plan.fits(n)), || {
            format!(
                "the fields of {} are {:?}, but the model needs [12, n, n]: twelve square faces with {}; choose data on a HEALPix mesh, \
                 or other model.encoder.n_channels",
                fields.source,
                fields.extents,
                plan.extents()
            )
        })?;
        let inputs = self.input_channels * self.input_time_dim;
        let outputs = self.output_channels * self.output_time_dim;
        let names = ["input_channels · input_time_dim", "output_channels · output_time_dim"];
        let wanted = [fields.in_channels + fields.position_channels, fields.out_channels];
        check.ensure([inputs, outputs] == wanted, || {
            format!(
                "{} is {inputs} and {} is {outputs}, but the inputs of {} have {} channels, and the targets {}; --set \
                 model.input_channels and model.output_channels to fit",
                names[0], names[1], fields.source, wanted[0], wanted[1]
            )
        })
    }
}

crate::register!(HealpixUNetConfig);
