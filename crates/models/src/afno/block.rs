//! One block: a spectral mixing of tokens, then a mixing of features.

use isobar_shard::{Array, Init, Params, Placement, Scope};

use super::filter::Filter;
use super::{AfnoConfig, BATCH_DIM};
use crate::error::Result;
use crate::mode::Mode;

const EPS: f64 = 1e-6;

#[derive(Debug)]
pub(super) struct Block<A> {
    norm1: Affine<A>,
    filter: Filter<A>,
    norm2: Affine<A>,
    fc1: Affine<A>,
    fc2: Affine<A>,
    drop_rate: f64,
}

/// A weight and a bias.
#[derive(Debug)]
struct Affine<A> {
    weight: A,
    bias: A,
}

impl<A: Array> Block<A> {
    /// The block of tokens of `width` features on `grid`.
    pub(super) fn new(
        config: &AfnoConfig,
        grid: [i64; 2],
        [width, hidden]: [i64; 2],
        params: &mut Scope<'_, A>,
    ) -> Result<Self> {
        let norm1 = affine(&mut params.scope("norm1"), &[width], Init::Constant(1.0))?;
        let filter = Filter::new(config, grid, width, &mut params.scope("filter"))?;
        let norm2 = affine(&mut params.scope("norm2"), &[width], Init::Constant(1.0))?;
        let small = || Init::TruncNormal { std: 0.02 };
        let fc1 = affine(&mut params.scope("mlp.fc1"), &[hidden, width], small())?;
        let fc2 = affine(&mut params.scope("mlp.fc2"), &[width, hidden], small())?;
        Ok(Self { norm1, filter, norm2, fc1, fc2, drop_rate: config.drop_rate })
    }

    /// For `x` `[h, w, batch, features]`.
    pub(super) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let u = self.norm1.layer_norm(x)?;
        let x = self.filter.forward(&u)?.laid_out_as(&u)?.add(&u)?.add(x)?;
        let hidden = self.fc1.linear(&self.norm2.layer_norm(&x)?)?.gelu()?;
        let hidden = mode.dropout(&hidden, self.drop_rate, BATCH_DIM, &[])?;
        let update = mode.dropout(&self.fc2.linear(&hidden)?, self.drop_rate, BATCH_DIM, &[])?;
        Ok(update.add(&x)?)
    }
}

impl<A: Array> Affine<A> {
    fn layer_norm(&self, x: &A) -> Result<A> {
        Ok(x.layer_norm(&self.weight.shape(), Some(&self.weight), Some(&self.bias), EPS)?)
    }

    fn linear(&self, x: &A) -> Result<A> {
        Ok(x.linear(&self.weight, Some(&self.bias))?)
    }
}

fn affine<A: Array>(params: &mut Scope<'_, A>, shape: &[i64], weight: Init<A>) -> Result<Affine<A>> {
    let weight = params.param("weight", shape, weight, Placement::Replicate)?;
    let bias = params.param("bias", &shape[..1], Init::Constant(0.0), Placement::Replicate)?;
    Ok(Affine { weight, bias })
}
