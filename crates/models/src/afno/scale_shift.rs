//! Modulation: a scale and a shift of features, made from a vector by a small network.

use isobar_array::Array;
use isobar_nn::{Linear, LinearOptions};
use isobar_shard::{Init, Params, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::Kind;

use crate::error::Result;

/// Modulation of complex numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScaleShiftMode {
    /// By a complex factor and a complex shift.
    #[default]
    Complex,
    /// By a real factor, and the same shift of real and imaginary part.
    Real,
}

/// A network from a modulation to a scale, 1 plus its first half, and a shift, its second.
#[derive(Debug)]
pub(crate) struct ScaleShift<A> {
    layers: [Linear<A>; 2],
    complex: bool,
}

impl<A: Array> ScaleShift<A> {
    /// For `width` numbers, from a modulation of `inputs` features.
    pub(crate) fn new(inputs: i64, width: i64, complex: bool, params: &mut Scope<'_, A>) -> Result<Self> {
        let numbers = if complex { 4 * width } else { 2 * width };
        let mut layer = |name, inputs| -> Result<Linear<A>> {
            let options = LinearOptions {
                weight_init: Some(Init::TruncNormal { std: 0.02 }),
                bias_init: Some(Init::Constant(0.0)),
                ..LinearOptions::default()
            };
            Ok(Linear::with_options(inputs, numbers, options, &mut params.scope(name))?)
        };
        Ok(Self { layers: [layer("net.layers.0", inputs)?, layer("net.layers.2", numbers)?], complex })
    }

    /// Scale and shift, each `[batch, width]`, or twice that, real parts first, for `modulation` `[batch, features]`.
    fn of(&self, modulation: &A) -> Result<[A; 2]> {
        let [first, second] = &self.layers;
        let both = second.forward(&first.forward(modulation)?.gelu()?)?;
        let half = both.extent(-1)? / 2;
        Ok([both.narrow(-1, 0, half)?.add_scalar(1.0)?, both.narrow(-1, half, half)?])
    }

    /// x · scale + shift for `x` `[…, batch, width]`.
    pub(crate) fn apply(&self, x: &A, modulation: &A) -> Result<A> {
        let [scale, shift] = self.of(modulation)?;
        Ok(x.mul(&scale)?.add(&shift)?)
    }

    /// Folds a scale and shift of the output into a complex layer's weight `[groups, in, out]` and bias `[groups, out]`, for each
    /// sample: `[groups, batch, in, out]` and `[groups, batch, out]`, of the given dtype.
    pub(crate) fn of_layer(
        &self,
        modulation: &A,
        [weight, bias]: [[A; 2]; 2],
        groups: i64,
        kind: Kind,
    ) -> Result<[[A; 2]; 2]> {
        let batch = modulation.extent(0)?;
        let [scale, shift] = self.of(modulation)?;
        let count = if self.complex { 2 } else { 1 };
        // To [part, groups, batch, size].
        let by_group = |vector: &A| -> Result<Vec<A>> {
            let size = vector.extent(1)? / (count * groups);
            let parts =
                vector.to_kind(kind)?.reshape(&[batch, count, groups, size])?.permute(&[1, 2, 0, 3])?;
            (0..count).map(|part| Ok(parts.select(0, part)?)).collect()
        };
        let (scale, shift) = (by_group(&scale)?, by_group(&shift)?);
        let scaled = |[re, im]: &[A; 2], scale: &[A]| -> Result<[A; 2]> {
            Ok(match scale {
                [real, imaginary] => {
                    [re.mul(real)?.sub(&im.mul(imaginary)?)?, re.mul(imaginary)?.add(&im.mul(real)?)?]
                }
                _ => [re.mul(&scale[0])?, im.mul(&scale[0])?],
            })
        };
        let rows = scale.iter().map(|part| Ok(part.unsqueeze(2)?)).collect::<Result<Vec<A>>>()?;
        let weight = scaled(&[weight[0].unsqueeze(1)?, weight[1].unsqueeze(1)?], &rows)?;
        let [re, im] = scaled(&[bias[0].unsqueeze(1)?, bias[1].unsqueeze(1)?], &scale)?;
        let last = shift.len() - 1;
        Ok([weight, [re.add(&shift[0])?, im.add(&shift[last])?]])
    }
}
