//! Rotary embedding of positions on a grid.

use isobar_array::{Array, Unary};
use isobar_shard::Result;
use tch::Kind;

use crate::check::refuse;

const OP: &str = "AxialRotaryEmbedding";

/// Rotary embedding of queries and keys by their positions on a two-dimensional grid: Heo et al., *Rotary Position Embedding for
/// Vision Transformer*, arXiv:2403.13298. Products of rotated queries and keys depend on the differences of their rows and columns
/// only.
///
/// Features 2j and 2j + 1 of a token are rotated as a pair. Pair k of the first half of the features turns by row ·
/// base^(−4k / dim), pair k of the second half by column · base^(−4k / dim), k = 0, …, dim / 4 − 1. Positions are
/// those of the global grid.
///
/// Shapes: input and output `[h, w, …, dim]`. No parameters.
///
/// ```
/// use isobar_nn::AxialRotaryEmbedding;
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::ones([3, 5, 2, 8], (Kind::Double, Device::Cpu));
/// let rotary = AxialRotaryEmbedding::new(8)?;
/// let y = rotary.forward(&x, &rotary.angles(&x)?)?;
/// // A rotation keeps lengths, and row 0 of column 0 is not rotated.
/// assert!((y.norm() - x.norm()).abs().double_value(&[]) < 1e-12);
/// assert_eq!(y.get(0).get(0), x.get(0).get(0));
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AxialRotaryEmbedding {
    dim: i64,
    base: f64,
}

impl AxialRotaryEmbedding {
    /// Makes the embedding of heads of `dim` features with base 10000.
    ///
    /// # Errors
    ///
    /// `dim` is not a multiple of 4, or below 4.
    pub fn new(dim: i64) -> Result<Self> {
        Self::with_base(dim, 10_000.0)
    }

    /// Makes the embedding with another base of the frequencies.
    ///
    /// # Errors
    ///
    /// `dim` is not a multiple of 4, or below 4; `base` is not above 0.
    pub fn with_base(dim: i64, base: f64) -> Result<Self> {
        if !(base.is_finite() && base > 0.0) {
            return refuse(OP, format!("base is {base}, expected a finite number above 0"));
        }
        if dim < 4 || dim % 4 != 0 {
            return refuse(
                OP,
                format!("dim is {dim}, expected a multiple of 4: pairs for rows and for columns"),
            );
        }
        Ok(Self { dim, base })
    }

    /// Returns the angles `[h, w, dim / 2]` of a grid `[h, w, …]`, laid out as its first two dims, in single precision at least. They
    /// serve all layers of a network.
    ///
    /// # Errors
    ///
    /// Fewer than two dims.
    pub fn angles<A: Array>(&self, grid: &A) -> Result<A> {
        let &[h, w, ..] = &grid.shape()[..] else {
            return refuse(OP, format!("input of shape {:?}, expected [h, w, …]", grid.shape()));
        };
        let wide = if grid.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        let grid = grid.detach()?.to_kind(wide)?;
        let quarter = self.dim / 4;
        let frequency = |pair: i64| self.base.powf(-4.0 * pair as f64 / self.dim as f64);
        // Zero for the pairs of the other half.
        let half = |first: i64| -> Result<A> {
            let own = |pair: i64| (0..quarter).contains(&(pair - first)).then(|| frequency(pair - first));
            let values: Vec<f64> = (0..2 * quarter).map(|pair| own(pair).unwrap_or(0.0)).collect();
            let values = tch::Tensor::f_from_slice(&values).and_then(|all| all.f_to_kind(wide));
            Ok(grid.constant(&isobar_array::kernel::named(OP, &[], values)?)?)
        };
        let along = |dim: i64, extent: i64| grid.linspace_along(dim, 0.0, (extent - 1).max(0) as f64);
        let rows = along(0, h)?.reshape(&[h, 1, 1])?.mul(&half(0)?)?;
        let columns = along(1, w)?.reshape(&[1, w, 1])?.mul(&half(quarter)?)?;
        Ok(rows.add(&columns)?)
    }

    /// Rotates queries or keys `[h, w, …, dim]` by [`angles`](Self::angles). Half dtypes are rotated in single precision.
    ///
    /// # Errors
    ///
    /// Another last extent, or another grid than that of the angles.
    pub fn forward<A: Array>(&self, x: &A, angles: &A) -> Result<A> {
        let shape = x.shape();
        if shape.len() < 3 || shape.last() != Some(&self.dim) {
            return refuse(OP, format!("input of shape {shape:?}, expected [h, w, …, {}]", self.dim));
        }
        let pairs = self.dim / 2;
        let between = &shape[2..shape.len() - 1];
        let wide = [&shape[..2], &vec![1; between.len()], &[pairs, 1]].concat();
        let (cos, sin) =
            (angles.unary(Unary::Cos)?.reshape(&wide)?, angles.unary(Unary::Sin)?.reshape(&wide)?);
        let y = x.to_kind(angles.kind())?.reshape(&[&shape[..2], between, &[pairs, 2]].concat())?;
        let (a, b) = (y.narrow(-1, 0, 1)?, y.narrow(-1, 1, 1)?);
        let turned = [a.mul(&cos)?.sub(&b.mul(&sin)?)?, a.mul(&sin)?.add(&b.mul(&cos)?)?];
        Ok(A::cat(&[&turned[0], &turned[1]], -1)?.reshape(&shape)?.to_kind(x.kind())?)
    }
}
