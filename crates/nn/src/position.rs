//! Embeddings of positions.

use isobar_array::{Array, Unary};
use isobar_shard::{Init, Params, Placement, Result};
use tch::Kind;

use crate::check::{extent, refuse};
use crate::layer::layers_without_mode;

/// A trained vector for each position, added to the tokens: the `pos_embed` of vision transformers.
///
/// Shapes: input and output `[batch, tokens, features]`. The parameter is `[1, tokens, features]` under the given name, as in
/// PyTorch's models, which keep it without a module of its own; it starts truncated normal with standard deviation 0.02.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::PositionEmbedding;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let mut params = ParamStore::new(Generator::new(1));
/// let positions = PositionEmbedding::new("pos_embed", 6, 8, &mut params)?;
/// let y = positions.forward(&Tensor::zeros([2, 6, 8], (Kind::Float, Device::Cpu)))?;
/// assert_eq!(y.get(0), y.get(1));
/// assert_eq!(params.parameters()[0].name, "pos_embed");
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct PositionEmbedding<A> {
    weight: A,
}

impl<A: Array> PositionEmbedding<A> {
    /// Makes the vectors of `tokens` positions.
    ///
    /// # Errors
    ///
    /// A size below 1, or a parameter that `params` refuses.
    pub fn new(name: &str, tokens: i64, features: i64, params: &mut impl Params<Array = A>) -> Result<Self> {
        Self::with_init(name, [tokens, features], Init::TruncNormal { std: 0.02 }, params)
    }

    /// Makes the vectors for `[tokens, features]` with other initial values.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub fn with_init(
        name: &str,
        [tokens, features]: [i64; 2],
        init: Init<A>,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        const OP: &str = "PositionEmbedding";
        let shape = [1, extent(OP, "tokens", tokens)?, extent(OP, "features", features)?];
        Ok(Self { weight: params.param(name, &shape, init, Placement::Replicate)? })
    }

    /// Adds the vectors to tokens `[batch, tokens, features]`.
    ///
    /// # Errors
    ///
    /// Another number of tokens or features, or an exchange that fails.
    pub fn forward(&self, x: &A) -> Result<A> {
        Ok(x.add(&self.weight)?)
    }

    /// Adds the vectors to tokens on their grid, `[grid…, batch, features]`.
    ///
    /// # Errors
    ///
    /// See [`forward`](Self::forward).
    pub fn forward_grid(&self, x: &A) -> Result<A> {
        let mut shape = x.shape();
        let Some(batch_dim) = shape.len().checked_sub(2).filter(|&dims| dims > 0) else {
            let reason = format!("input of shape {shape:?}, expected [grid…, batch, features]");
            return refuse("PositionEmbedding", reason);
        };
        shape[batch_dim] = 1;
        Ok(x.add(&self.weight.reshape(&shape)?)?)
    }
}

/// Sines and cosines of positions at geometrically spaced frequencies: Vaswani et al., *Attention Is All You Need*,
/// arXiv:1706.03762.
///
/// Feature 2k of position t is sin(t · ωₖ), feature 2k + 1 is cos(t · ωₖ), with ωₖ = 10000^(−2k / dim).
///
/// Shapes: input and output `[batch, tokens, dim]`. No parameters.
///
/// ```
/// use isobar_nn::SinusoidalEmbedding;
/// use tch::{Device, Kind, Tensor};
///
/// let y = SinusoidalEmbedding::new(4)?.forward(&Tensor::zeros([1, 3, 4], (Kind::Double, Device::Cpu)))?;
/// assert!((y.double_value(&[0, 2, 0]) - 2f64.sin()).abs() < 1e-12);
/// assert!((y.double_value(&[0, 2, 3]) - 0.02f64.cos()).abs() < 1e-12);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SinusoidalEmbedding {
    dim: i64,
}

impl SinusoidalEmbedding {
    /// Makes the embedding of `dim` features.
    ///
    /// # Errors
    ///
    /// `dim` is odd or below 2.
    pub fn new(dim: i64) -> Result<Self> {
        Ok(Self { dim: even("SinusoidalEmbedding", dim)? })
    }

    /// Adds the embedding of positions 0, 1, … to tokens `[batch, tokens, dim]`.
    ///
    /// # Errors
    ///
    /// Another last extent, or an exchange that fails.
    pub fn forward<A: Array>(&self, x: &A) -> Result<A> {
        let angles = angles("SinusoidalEmbedding", x, (x.shape().len() as i64 - 2, self.dim), 10_000.0)?;
        let [tokens, half] = angles.shape()[..] else { return Ok(angles) };
        let pairs = [angles.unary(Unary::Sin)?.unsqueeze(2)?, angles.unary(Unary::Cos)?.unsqueeze(2)?];
        let table = A::cat(&[&pairs[0], &pairs[1]], 2)?.reshape(&[tokens, 2 * half])?;
        Ok(x.add(&table.to_kind(x.kind())?)?)
    }
}

impl<A: Array> crate::Layer<A> for SinusoidalEmbedding {
    fn apply(&self, x: &A, _mode: crate::Mode<'_>) -> Result<A> {
        self.forward(x)
    }
}

/// Rotary embedding of queries and keys: Su et al., *RoFormer*, arXiv:2104.09864. Products of rotated queries and keys depend
/// on the difference of their positions only.
///
/// Features k and k + dim / 2 of position t are rotated by the angle t · base^(−2k / dim), the order of GPT-NeoX and Llama.
///
/// Shapes: input and output `[…, tokens, dim]`. No parameters.
///
/// ```
/// use isobar_nn::RotaryEmbedding;
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::ones([1, 2, 5, 8], (Kind::Double, Device::Cpu));
/// let y = RotaryEmbedding::new(8)?.forward(&x)?;
/// // A rotation keeps lengths, and position 0 is not rotated.
/// assert!((y.norm() - x.norm()).abs().double_value(&[]) < 1e-12);
/// assert_eq!(y.narrow(2, 0, 1), x.narrow(2, 0, 1));
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryEmbedding {
    dim: i64,
    base: f64,
}

impl RotaryEmbedding {
    /// Makes the embedding of heads of `dim` features with base 10000.
    ///
    /// # Errors
    ///
    /// `dim` is odd or below 2.
    pub fn new(dim: i64) -> Result<Self> {
        Self::with_base(dim, 10_000.0)
    }

    /// Makes the embedding with another base of the frequencies.
    ///
    /// # Errors
    ///
    /// `dim` is odd or below 2; `base` is not above 0.
    pub fn with_base(dim: i64, base: f64) -> Result<Self> {
        if !(base.is_finite() && base > 0.0) {
            return refuse("RotaryEmbedding", format!("base is {base}, expected a finite number above 0"));
        }
        Ok(Self { dim: even("RotaryEmbedding", dim)?, base })
    }

    /// Rotates queries or keys `[…, tokens, dim]` of the positions 0, 1, ….
    ///
    /// # Errors
    ///
    /// Another last extent, or an exchange that fails.
    pub fn forward<A: Array>(&self, x: &A) -> Result<A> {
        let angles = angles("RotaryEmbedding", x, (x.shape().len() as i64 - 2, self.dim), self.base)?;
        let [cos, sin] = [angles.unary(Unary::Cos)?, angles.unary(Unary::Sin)?];
        let [cos, sin] = [cos.to_kind(x.kind())?, sin.to_kind(x.kind())?];
        let half = self.dim / 2;
        let [low, high] = [x.narrow(-1, 0, half)?, x.narrow(-1, half, half)?];
        let rotated = [low.mul(&cos)?.sub(&high.mul(&sin)?)?, high.mul(&cos)?.add(&low.mul(&sin)?)?];
        Ok(A::cat(&[&rotated[0], &rotated[1]], -1)?)
    }
}

impl<A: Array> crate::Layer<A> for RotaryEmbedding {
    fn apply(&self, x: &A, _mode: crate::Mode<'_>) -> Result<A> {
        self.forward(x)
    }
}

fn even(layer: &'static str, dim: i64) -> Result<i64> {
    match dim {
        2.. if dim % 2 == 0 => Ok(dim),
        _ => refuse(layer, format!("dim is {dim}, expected an even number of 2 or more")),
    }
}

/// Returns the angles t · base^(−2k / dim) `[tokens, dim / 2]` of the positions along dim `at` of `x`, laid out as it, in single
/// precision at least.
fn angles<A: Array>(layer: &'static str, x: &A, (at, dim): (i64, i64), base: f64) -> Result<A> {
    let shape = x.shape();
    if at < 0 || shape.last() != Some(&dim) {
        return refuse(layer, format!("input of shape {shape:?}, expected […, tokens, {dim}]"));
    }
    let wide = if x.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let tokens = shape[at as usize];
    let positions = x.detach()?.to_kind(wide)?.linspace_along(at, 0.0, (tokens - 1).max(0) as f64)?;
    let frequencies: Vec<f64> = (0..dim / 2).map(|k| base.powf(-2.0 * k as f64 / dim as f64)).collect();
    let frequencies = tch::Tensor::f_from_slice(&frequencies).and_then(|all| all.f_to_kind(wide));
    let frequencies = isobar_array::kernel::named(layer, &[], frequencies)?;
    let frequencies = x.constant(&frequencies)?;
    Ok(positions.reshape(&[tokens, 1])?.mul(&frequencies)?)
}

layers_without_mode!(PositionEmbedding);
