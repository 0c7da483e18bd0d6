//! One block: a spectral mixing of tokens, then a mixing of features.

use isobar_array::Array;
use isobar_shard::{Init, Params, Placement, Scope};

use super::BATCH_DIM;
use super::filter::{Filter, FilterConfig};
use super::scale_shift::{ScaleShift, ScaleShiftMode};
use crate::error::Result;
use crate::mode::Mode;

const EPS: f64 = 1e-6;

#[derive(Debug)]
pub(crate) struct Block<A> {
    norm1: Affine<A>,
    filter: Filter<A>,
    norm2: Affine<A>,
    fc1: Affine<A>,
    fc2: Affine<A>,
    scale_shift: Option<ScaleShift<A>>,
    drop_rate: f64,
}

/// What a block is made from.
#[derive(Debug)]
pub(crate) struct BlockConfig {
    pub(crate) filter: FilterConfig,
    /// Features between the mixings.
    pub(crate) hidden: i64,
    pub(crate) drop_rate: f64,
    pub(crate) modulation: Modulated,
}

/// Which layers a modulation acts on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Modulated {
    /// Features of the modulation.
    pub(crate) inputs: i64,
    /// The filter, and how.
    pub(crate) filter: Option<ScaleShiftMode>,
    /// The mixing of features.
    pub(crate) mlp: bool,
}

/// A weight and a bias.
#[derive(Debug)]
pub(crate) struct Affine<A> {
    weight: A,
    bias: A,
}

impl<A: Array> Block<A> {
    pub(crate) fn new(config: BlockConfig, params: &mut Scope<'_, A>) -> Result<Self> {
        let BlockConfig { filter, hidden, drop_rate, modulation } = config;
        let Modulated { inputs, filter: of_filter, mlp: of_mlp } = modulation;
        let width = filter.width;
        let norm1 = affine(&mut params.scope("norm1"), &[width], Init::Constant(1.0))?;
        let filter = Filter::new(filter, &mut params.scope("filter"), |params| {
            let made = of_filter.map(|mode| {
                let complex = mode == ScaleShiftMode::Complex;
                ScaleShift::new(inputs, width, complex, params)
            });
            made.transpose()
        })?;
        let norm2 = affine(&mut params.scope("norm2"), &[width], Init::Constant(1.0))?;
        let small = || Init::TruncNormal { std: 0.02 };
        let fc1 = affine(&mut params.scope("mlp.fc1"), &[hidden, width], small())?;
        let fc2 = affine(&mut params.scope("mlp.fc2"), &[width, hidden], small())?;
        let scale_shift = match of_mlp {
            true => Some(ScaleShift::new(inputs, hidden, false, &mut params.scope("mlp.scale_shift"))?),
            false => None,
        };
        Ok(Self { norm1, filter, norm2, fc1, fc2, scale_shift, drop_rate })
    }

    /// For `x` `[h, w, batch, features]`, modulated by `modulation` `[batch, features]`.
    pub(crate) fn forward(&self, x: &A, modulation: Option<&A>, mode: Mode<'_>) -> Result<A> {
        let u = self.norm1.layer_norm(x)?;
        let x = self.filter.forward(&u, modulation)?.add(&u)?.add(x)?;
        let hidden = self.fc1.linear(&self.norm2.layer_norm(&x)?)?;
        let hidden = match (&self.scale_shift, modulation) {
            (Some(scale_shift), Some(modulation)) => scale_shift.apply(&hidden, modulation)?,
            _ => hidden,
        };
        let hidden = mode.dropout(&hidden.gelu()?, self.drop_rate, BATCH_DIM, &[])?;
        let update = mode.dropout(&self.fc2.linear(&hidden)?, self.drop_rate, BATCH_DIM, &[])?;
        Ok(update.add(&x)?)
    }
}

impl<A: Array> Affine<A> {
    fn layer_norm(&self, x: &A) -> Result<A> {
        Ok(x.layer_norm(&self.weight.shape(), Some(&self.weight), Some(&self.bias), EPS)?)
    }

    pub(crate) fn linear(&self, x: &A) -> Result<A> {
        Ok(x.linear(&self.weight, Some(&self.bias))?)
    }
}

/// A weight that starts with `weight`, and a bias that starts with 0.
pub(crate) fn affine<A: Array>(
    params: &mut Scope<'_, A>,
    shape: &[i64],
    weight: Init<A>,
) -> Result<Affine<A>> {
    affine_with(params, shape, weight, Init::Constant(0.0))
}

/// A weight and a bias.
pub(crate) fn affine_with<A: Array>(
    params: &mut Scope<'_, A>,
    shape: &[i64],
    weight: Init<A>,
    bias: Init<A>,
) -> Result<Affine<A>> {
    let weight = params.param("weight", shape, weight, Placement::Replicate)?;
    let bias = params.param("bias", &shape[..1], bias, Placement::Replicate)?;
    Ok(Affine { weight, bias })
}
