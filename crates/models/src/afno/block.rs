//! One block: a spectral mixing of tokens, then a mixing of features.

use isobar_array::Array;
use isobar_nn::{LayerNorm, Mlp, MlpOptions, Mode};
use isobar_shard::{Params, Scope};

use super::BATCH_DIM;
use super::filter::{Filter, FilterConfig};
use super::scale_shift::{ScaleShift, ScaleShiftMode};
use crate::error::Result;

const EPS: f64 = 1e-6;

#[derive(Debug)]
pub(crate) struct Block<A> {
    norm1: LayerNorm<A>,
    filter: Filter<A>,
    norm2: LayerNorm<A>,
    mlp: Mlp<A>,
    scale_shift: Option<ScaleShift<A>>,
}

/// Configuration of a block.
#[derive(Debug)]
pub(crate) struct BlockConfig {
    pub(crate) filter: FilterConfig,
    /// Features between the mixings.
    pub(crate) hidden: i64,
    pub(crate) drop_rate: f64,
    pub(crate) modulation: Modulated,
}

/// Layers that a modulation acts on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Modulated {
    /// Features of the modulation.
    pub(crate) inputs: i64,
    /// The filter, and how.
    pub(crate) filter: Option<ScaleShiftMode>,
    /// The mixing of features.
    pub(crate) mlp: bool,
}

impl<A: Array> Block<A> {
    pub(crate) fn new(config: BlockConfig, params: &mut Scope<'_, A>) -> Result<Self> {
        let BlockConfig { filter, hidden, drop_rate, modulation } = config;
        let Modulated { inputs, filter: of_filter, mlp: of_mlp } = modulation;
        let width = filter.width;
        let norm1 = LayerNorm::with_eps(&[width], EPS, &mut params.scope("norm1"))?;
        let filter = Filter::new(filter, &mut params.scope("filter"), |params| {
            let made = of_filter.map(|mode| {
                let complex = mode == ScaleShiftMode::Complex;
                ScaleShift::new(inputs, width, complex, params)
            });
            made.transpose()
        })?;
        let norm2 = LayerNorm::with_eps(&[width], EPS, &mut params.scope("norm2"))?;
        let options = MlpOptions { drop: drop_rate, init_std: Some(0.02), ..MlpOptions::default() };
        let mlp = Mlp::new([width, hidden, width], options, &mut params.scope("mlp"))?;
        let scale_shift = match of_mlp {
            true => Some(ScaleShift::new(inputs, hidden, false, &mut params.scope("mlp.scale_shift"))?),
            false => None,
        };
        Ok(Self { norm1, filter, norm2, mlp, scale_shift })
    }

    /// For `x` `[h, w, batch, features]`, modulated by `modulation` `[batch, features]`.
    pub(crate) fn forward(&self, x: &A, modulation: Option<&A>, mode: Mode<'_>) -> Result<A> {
        let u = self.norm1.forward(x)?;
        let x = self.filter.forward(&u, modulation)?.add(&u)?.add(x)?;
        let modulate = |hidden: A| match (&self.scale_shift, modulation) {
            (Some(scale_shift), Some(modulation)) => scale_shift.apply(&hidden, modulation),
            _ => Ok(hidden),
        };
        let update = self.mlp.forward_modulated(&self.norm2.forward(&x)?, mode, BATCH_DIM, modulate)?;
        Ok(update.add(&x)?)
    }
}
