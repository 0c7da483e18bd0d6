//! Arguments of DLWP.

use isobar_array::Array;
use isobar_nn::Activation;
use isobar_shard::Scope;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Dlwp, MODEL};
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::model::{Architecture, Model};
use crate::size::MOST_HALVINGS;
use crate::traffic::{Split, Traffic};

/// Arguments of [`Dlwp`](crate::Dlwp), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DlwpConfig {
    /// Channels of the input.
    pub nr_input_channels: usize,
    /// Channels of the output.
    pub nr_output_channels: usize,
    /// Channels on the finest grid; each coarser one has twice as many.
    #[serde(default = "nr_initial_channels")]
    pub nr_initial_channels: usize,
    /// Activation after every convolution but the last; any but `stan`. One activation is shared by all.
    #[serde(default = "activation_fn")]
    pub activation_fn: Activation,
    /// Number of coarser grids, each with half the extents; 1 to 16.
    #[serde(default = "depth")]
    #[schemars(range(min = 1, max = 16))]
    pub depth: usize,
    /// Lower and upper bound to which activations are clamped. `"none"` (in JSON also `null`) means no bound.
    #[serde(default = "clamp_activation", deserialize_with = "read_bounds", serialize_with = "write_bounds")]
    #[schemars(with = "[Bound; 2]")]
    pub clamp_activation: [f64; 2],
    /// Recompute the activations of each pair of convolutions in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl DlwpConfig {
    /// The defaults for fields with the given channels.
    pub fn new(nr_input_channels: usize, nr_output_channels: usize) -> Self {
        Self {
            nr_input_channels,
            nr_output_channels,
            nr_initial_channels: nr_initial_channels(),
            activation_fn: activation_fn(),
            depth: depth(),
            clamp_activation: clamp_activation(),
            gradient_checkpointing: false,
        }
    }

    /// Rejects a number of grids that no face has, and bounds without values between them.
    pub(super) fn check_values(&self) -> Result<()> {
        let check = Checker(MODEL);
        let (depth, [min, max]) = (self.depth, self.clamp_activation);
        check.ensure((1..=MOST_HALVINGS).contains(&depth), || {
            format!("depth is {depth}, expected 1 to {MOST_HALVINGS}; --set model.depth=2")
        })?;
        check.ensure(min <= max, || {
            format!("clamp_activation is [{min}, {max}], expected [min, max] with min ≤ max")
        })?;
        check.ensure(self.activation_fn != Activation::Stan, || {
            "activation_fn is stan, which is for single features; choose another one".into()
        })
    }
}

impl Architecture for DlwpConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> =
        Some("DLWP: a U-Net on the six faces of a cubed sphere, padded with their neighbours.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(Dlwp::new(self, params)?))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        self.check_values()?;
        let fits = |depth: usize| {
            let &[faces, height, width] = fields.extents.as_slice() else { return false };
            faces == 6 && height == width && height > 0 && height.is_multiple_of(1 << depth)
        };
        Checker(MODEL).ensure(fits(self.depth), || {
            let mend = match (1..self.depth).rev().find(|&depth| fits(depth)) {
                Some(depth) => format!("--set model.depth={depth}"),
                None => "choose data on a cubed sphere, or another model.type".to_owned(),
            };
            format!(
                "the fields of {} are {:?}, but depth = {} needs [6, n, n]: six square faces with n a multiple of {}; {mend}",
                fields.source,
                fields.extents,
                self.depth,
                1 << self.depth
            )
        })?;
        let inputs = ("nr_input_channels", self.nr_input_channels);
        fields.check_channels(MODEL, inputs, ("nr_output_channels", self.nr_output_channels))
    }
}

crate::register!(DlwpConfig);

/// A bound as it is written.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected a number or \"none\"")]
enum Bound {
    Value(f64),
    Open(Option<Open>),
}

#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Open {
    None,
}

fn read_bounds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[f64; 2], D::Error> {
    let [min, max] = <[Bound; 2]>::deserialize(deserializer)?;
    let value = |bound: Bound, open: f64| match bound {
        Bound::Value(value) => value,
        Bound::Open(_) => open,
    };
    Ok([value(min, f64::NEG_INFINITY), value(max, f64::INFINITY)])
}

fn write_bounds<S: Serializer>(bounds: &[f64; 2], serializer: S) -> Result<S::Ok, S::Error> {
    let bound = |&value: &f64| match value.is_infinite() {
        true => Bound::Open(Some(Open::None)),
        false => Bound::Value(value),
    };
    [bound(&bounds[0]), bound(&bounds[1])].serialize(serializer)
}

fn nr_initial_channels() -> usize {
    64
}

fn activation_fn() -> Activation {
    Activation::LeakyRelu
}

fn depth() -> usize {
    2
}

fn clamp_activation() -> [f64; 2] {
    [f64::NEG_INFINITY, 10.0]
}
