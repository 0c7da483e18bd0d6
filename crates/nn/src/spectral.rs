//! The spectral convolution: the lowest modes, each mixed by its own matrix.

use std::ops::Range;

use isobar_array::{Array, FftNorm, in_full_precision};
use isobar_shard::{Params, Result};
use tch::Kind;

use crate::check::{extent, refuse};
use crate::layer::layers_without_mode;
pub use crate::spectral_weight::Factorization;
use crate::spectral_weight::SpectralWeight;

const OP: &str = "SpectralConv";

/// Options of a [`SpectralConv`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpectralOptions {
    /// Factorization of the weights.
    pub factorization: Factorization,
    /// Parameters of a factorized weight, as a fraction of those of the full one; in (0, 1].
    pub rank: f64,
}

impl Default for SpectralOptions {
    fn default() -> Self {
        Self { factorization: Factorization::None, rank: 1.0 }
    }
}

/// The spectral convolution of Fourier neural operators in one to four dimensions: y = F⁻¹(R · F x), with a complex matrix R
/// of its own for each retained mode; all other modes are 0. Li et al., arXiv:2010.08895.
///
/// F is the real Fourier transform over all spatial dims. Retained are the `modes` lowest frequencies along each dim, of both
/// signs except along the last. Where the two ends of a dim overlap their results are added, as in PhysicsNeMo. Half dtypes are
/// computed in single precision.
///
/// Shapes: input `[batch, in_channels, extents…]`, output `[batch, out_channels, extents…]`. State dict, with PhysicsNeMo's
/// names: `weights1`, `weights2`, … `[in_channels, out_channels, modes…, 2]` for the corners of the spectrum, uniform in
/// [0, 1 / (in_channels · out_channels)) at first, real and imaginary parts last; factorized, `weights{n}.core` and
/// `weights{n}.factors.{i}`.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::{SpectralConv, SpectralOptions};
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let mut params = ParamStore::new(Generator::new(1));
/// let conv = SpectralConv::new(2, 3, &[4, 4], SpectralOptions::default(), &mut params)?;
/// let y = conv.forward(&Tensor::ones([1, 2, 16, 12], (Kind::Float, Device::Cpu)))?;
/// assert_eq!(y.size(), [1, 3, 16, 12]);
/// assert_eq!(params.parameters()[0].tensor.size(), [2, 3, 4, 4, 2]);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct SpectralConv<A> {
    modes: Vec<i64>,
    inputs: i64,
    /// One for each corner, see [`place`].
    weights: Vec<SpectralWeight<A>>,
}

impl<A: Array> SpectralConv<A> {
    /// Makes the layer with so many modes along each spatial dim.
    ///
    /// # Errors
    ///
    /// A size below 1, other than 1 to 4 spatial dims, a rank outside (0, 1], or a parameter that `params` refuses.
    pub fn new(
        in_channels: i64,
        out_channels: i64,
        modes: &[i64],
        options: SpectralOptions,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let inputs = extent(OP, "in_channels", in_channels)?;
        let outputs = extent(OP, "out_channels", out_channels)?;
        if !(1..=4).contains(&modes.len()) {
            return refuse(
                OP,
                format!("modes {modes:?}: expected one number for each of 1 to 4 spatial dims"),
            );
        }
        modes.iter().try_for_each(|&modes| extent(OP, "modes", modes).map(|_| ()))?;
        let SpectralOptions { factorization, rank } = options;
        if !(rank > 0.0 && rank <= 1.0) {
            return refuse(OP, format!("rank is {rank}, expected above 0 and at most 1"));
        }
        let shape = [&[inputs, outputs], modes].concat();
        let scale = (inputs as f64 * outputs as f64).recip();
        let weights = (1..=1 << (modes.len() - 1))
            .map(|n| {
                SpectralWeight::new(&format!("weights{n}"), &shape, scale, (factorization, rank), params)
            })
            .collect::<Result<_>>()?;
        Ok(Self { modes: modes.to_vec(), inputs, weights })
    }

    /// Computes `[batch, out_channels, extents…]` from `x` `[batch, in_channels, extents…]`.
    ///
    /// # Errors
    ///
    /// Another number of channels or dims, extents n that lack the modes m (m ≤ n, and m ≤ n / 2 + 1 for the last), or an
    /// exchange that fails.
    pub fn forward(&self, x: &A) -> Result<A> {
        let count = self.modes.len() as i64;
        if x.shape().len() as i64 != count + 2 {
            return self.misfit(&x.shape());
        }
        let last: Vec<i64> = (2..2 + count).chain([0, 1]).collect();
        let first: Vec<i64> = [count, count + 1].into_iter().chain(0..count).collect();
        Ok(self.forward_channels_last(&x.permute(&last)?)?.permute(&first)?)
    }

    /// Computes `[extents…, batch, out_channels]` from `x` `[extents…, batch, in_channels]`: the order in which the transforms
    /// and the products over channels are plain matrix products.
    ///
    /// # Errors
    ///
    /// See [`forward`](Self::forward).
    pub fn forward_channels_last(&self, x: &A) -> Result<A> {
        let (shape, count) = (x.shape(), self.modes.len());
        let fits = |(dim, (&modes, &extent)): (usize, (&i64, &i64))| {
            modes <= if dim + 1 == count { extent / 2 + 1 } else { extent }
        };
        if shape.len() != count + 2
            || shape[count + 1] != self.inputs
            || !self.modes.iter().zip(&shape).enumerate().all(fits)
        {
            return self.misfit(&shape);
        }
        in_full_precision(x.device(), || self.convolve(x))
    }

    fn misfit<T>(&self, shape: &[i64]) -> Result<T> {
        let (modes, channels) = (&self.modes, self.inputs);
        refuse(
            OP,
            format!(
                "input of shape {shape:?}, expected {channels} channels, and {} extents with the modes {modes:?}",
                modes.len()
            ),
        )
    }

    fn convolve(&self, x: &A) -> Result<A> {
        let count = self.modes.len();
        let shape = x.shape();
        let extents = &shape[..count];
        let dims: Vec<i64> = (0..count as i64).collect();
        let kept: Vec<Vec<Range<i64>>> = self
            .modes
            .iter()
            .zip(extents)
            .enumerate()
            .map(|(dim, (&modes, &extent))| {
                let low = 0..modes;
                if dim + 1 == count { vec![low] } else { vec![low, extent - modes..extent] }
            })
            .collect();

        let kind = x.kind();
        let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
        let spectrum = x.to_kind(wide)?.rfftn_modes(&dims, &kept, FftNorm::Backward)?;
        let mixed = self.mixed(&spectrum, 0, 0, wide)?;
        let outputs = mixed.extent(-1)?;
        let back = if outputs == self.inputs {
            mixed.irfftn_modes_as(x, &dims, &kept, FftNorm::Backward)?
        } else {
            // A field of the outputs' shape, laid out as the input.
            let mut wide = shape.clone();
            wide[count + 1] = outputs;
            let like = x.detach()?.narrow(-1, 0, 1)?.expand(&wide)?;
            mixed.irfftn_modes_as(&like, &dims, &kept, FftNorm::Backward)?
        };
        Ok(back.to_kind(kind)?)
    }

    /// Multiplies each of `modes` `[modes…, batch, in]` by its matrix: those of the corners whose dims before `dim` hold the high modes
    /// where `high` has a bit. Corner by corner, since weights are larger than modes: so these are joined, and of a weight
    /// nothing is touched but what meets modes.
    fn mixed(&self, modes: &A, dim: usize, high: usize, kind: Kind) -> Result<A> {
        let count = self.modes.len();
        if dim + 1 == count {
            let order: Vec<i64> = (2..2 + count as i64).chain([0, 1]).collect();
            let weight = self.weights[place(count, high)].complex(kind)?.permute(&order)?;
            return Ok(modes.matmul(&weight)?);
        }
        let half = self.modes[dim];
        let ends = [
            self.mixed(&modes.narrow(dim as i64, 0, half)?, dim + 1, high, kind)?,
            self.mixed(&modes.narrow(dim as i64, half, half)?, dim + 1, high | 1 << dim, kind)?,
        ];
        Ok(A::cat(&[&ends[0], &ends[1]], dim as i64)?)
    }
}

/// The place of a corner among PhysicsNeMo's weights: they are counted with the first dim fastest, but in four dimensions those
/// with one high dim come before those with two.
fn place(dims: usize, high: usize) -> usize {
    match (dims, high) {
        (4, 0b011) => 4,
        (4, 0b100) => 3,
        _ => high,
    }
}

layers_without_mode!(SpectralConv);
