//! Normalisations with their weights.

use isobar_array::{Array, RunningStats, is_recomputing};
use isobar_shard::{Init, Params, Placement};

use crate::error::Result;
use crate::mode::Mode;

const EPS: f64 = 1e-5;
/// What part of a batch's statistics goes into the running ones.
const MOMENTUM: f64 = 0.1;

/// A weight and a bias for each channel, 1 and 0 at first.
#[derive(Debug)]
pub(crate) struct Affine<A> {
    weight: A,
    bias: A,
}

impl<A: Array> Affine<A> {
    pub(crate) fn new(channels: i64, params: &mut impl Params<Array = A>) -> Result<Self> {
        let weight = params.param("weight", &[channels], Init::Constant(1.0), Placement::Replicate)?;
        let bias = params.param("bias", &[channels], Init::Constant(0.0), Placement::Replicate)?;
        Ok(Self { weight, bias })
    }

    /// Group norm of `[batch, channel, extent…]`.
    pub(crate) fn group_norm(&self, x: &A, groups: i64, eps: f64) -> Result<A> {
        Ok(x.group_norm(groups, Some(&self.weight), Some(&self.bias), eps)?)
    }

    /// Layer norm over the channels of `[batch, channel, extent…]` at each point.
    pub(crate) fn layer_norm(&self, x: &A) -> Result<A> {
        let dims = x.shape().len() as i64;
        let last: Vec<i64> = [0].into_iter().chain(2..dims).chain([1]).collect();
        let back: Vec<i64> = [0, dims - 1].into_iter().chain(1..dims - 1).collect();
        let points = x.permute(&last)?;
        let y = points.layer_norm(&self.weight.shape(), Some(&self.weight), Some(&self.bias), EPS)?;
        Ok(y.permute(&back)?)
    }
}

/// Batch norm with its running statistics.
#[derive(Debug)]
pub(crate) struct BatchNorm<A> {
    affine: Affine<A>,
    mean: A,
    var: A,
}

impl<A: Array> BatchNorm<A> {
    pub(crate) fn new(channels: i64, params: &mut impl Params<Array = A>) -> Result<Self> {
        let affine = Affine::new(channels, params)?;
        let mut running =
            |name, value| params.buffer(name, &[channels], Init::Constant(value), Placement::Replicate);
        let mean = running("running_mean", 0.0)?;
        let var = running("running_var", 1.0)?;
        Ok(Self { affine, mean, var })
    }

    /// Training takes the batch's statistics, and moves the running ones towards them.
    pub(crate) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let Affine { weight, bias } = &self.affine;
        let running = RunningStats { mean: &self.mean, var: &self.var, momentum: MOMENTUM };
        let training = mode.is_training();
        // A batch counts once.
        let running = (!training || !is_recomputing()).then_some(running);
        Ok(x.batch_norm(Some(weight), Some(bias), running, training, EPS)?)
    }
}
