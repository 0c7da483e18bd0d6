//! Products with weights, and normalisation.

use tch::Tensor;

use super::by_name::{one, with};
use super::{Array, Windowed, argument, named};
use crate::dtypes::{Dtype, check_dtypes};
use crate::error::Result;
use crate::precision::{as_full, full};
use crate::windowed::{Conv, Padding};

/// Options of a two-dimensional convolution, for `[height, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conv2d {
    /// Step between outputs.
    pub stride: [i64; 2],
    /// Zeros before and after.
    pub padding: [i64; 2],
    /// Step between the kernel's elements.
    pub dilation: [i64; 2],
    /// Number of independent groups of channels.
    pub groups: i64,
}

impl Default for Conv2d {
    fn default() -> Self {
        Self { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1 }
    }
}

/// Products and normalisation.
///
/// # Errors
///
/// All methods fail alike: shapes that do not fit, dtypes that differ;
/// on sharded arrays also an exchange that fails.
#[expect(clippy::missing_errors_doc, reason = "all fail alike: shapes that do not fit, kinds that differ")]
pub trait Linear: Sized {
    /// x Wᵀ + b over the last dim: `weight` `[out, in]`, `bias` `[out]`.
    ///
    /// ```
    /// use isobar_array::Linear;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 2.0]]);
    /// let weight = Tensor::from_slice2(&[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]);
    /// let y = Linear::linear(&x, &weight, Some(&Tensor::from_slice(&[10.0, 20.0, 30.0])))?;
    /// assert_eq!(y, Tensor::from_slice2(&[[11.0, 22.0, 33.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn linear(&self, weight: &Self, bias: Option<&Self>) -> Result<Self>
    where
        Self: Array,
    {
        one("linear", &with(&[self, weight], &[bias]), args!())
    }

    /// The matrix product of the last two dims; dims before them are broadcast.
    ///
    /// ```
    /// use isobar_array::Linear;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let a = Tensor::ones([5, 1, 2, 3], (Kind::Float, Device::Cpu));
    /// let b = Tensor::ones([4, 3, 6], (Kind::Float, Device::Cpu));
    /// assert_eq!(Linear::matmul(&a, &b)?.size(), [5, 4, 2, 6]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn matmul(&self, other: &Self) -> Result<Self>;

    /// The product of two batches of matrices, `[n, i, j]` and `[n, j, k]`, plus `bias`, broadcast to `[n, i, k]`.
    ///
    /// ```
    /// use isobar_array::Linear;
    /// use tch::Tensor;
    ///
    /// let a = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).view([2, 1, 2]);
    /// let b = Tensor::from_slice(&[1.0, 1.0, 2.0, 2.0]).view([2, 2, 1]);
    /// let y = Linear::bmm(&a, &b, Some(&Tensor::from_slice(&[0.5])))?;
    /// assert_eq!(y, Tensor::from_slice(&[3.5, 14.5]).view([2, 1, 1]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn bmm(&self, other: &Self, bias: Option<&Self>) -> Result<Self>
    where
        Self: Array,
    {
        one("bmm", &with(&[self, other], &[bias]), args!())
    }

    /// Another name of [`bmm`](Self::bmm).
    fn batched_matmul(&self, other: &Self, bias: Option<&Self>) -> Result<Self>
    where
        Self: Array,
    {
        self.bmm(other, bias)
    }

    /// Two-dimensional convolution of `[batch, channel, height, width]` with `weight`
    /// `[out, channel / groups, kernel height, kernel width]`.
    ///
    /// ```
    /// use isobar_array::{Conv2d, Linear};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let x = Tensor::zeros([1, 3, 8, 16], (Kind::Float, Device::Cpu));
    /// let weight = Tensor::zeros([6, 3, 3, 3], (Kind::Float, Device::Cpu));
    /// let halved = Conv2d { stride: [2, 2], padding: [1, 1], ..Conv2d::default() };
    /// assert_eq!(Linear::conv2d(&x, &weight, None, &halved)?.size(), [1, 6, 4, 8]);
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn conv2d(&self, weight: &Self, bias: Option<&Self>, conv: &Conv2d) -> Result<Self>
    where
        Self: Array,
    {
        let shape = self.shape();
        if shape.len() != 4 {
            return Err(argument(
                "conv2d",
                format!("input {shape:?} is not [batch, channel, height, width]"),
            ));
        }
        let Conv2d { stride, padding, dilation, groups } = *conv;
        let conv = Conv {
            stride: stride.to_vec(),
            padding: Padding::Each(padding.to_vec()),
            dilation: dilation.to_vec(),
            groups,
            ..Conv::default()
        };
        Windowed::conv(self, weight, bias, &conv)
    }

    /// (x − mean) / √(variance + `eps`) over the trailing dims `normalized`, times `weight` plus `bias` of that shape.
    ///
    /// ```
    /// use isobar_array::Linear;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 3.0], [10.0, 30.0]]);
    /// let y = Linear::layer_norm(&x, &[2], None, None, 0.0)?;
    /// assert!(y.allclose(&Tensor::from_slice2(&[[-1.0, 1.0], [-1.0, 1.0]]), 1e-9, 1e-9, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn layer_norm(
        &self,
        normalized: &[i64],
        weight: Option<&Self>,
        bias: Option<&Self>,
        eps: f64,
    ) -> Result<Self>
    where
        Self: Array,
    {
        let given = (weight.is_some(), bias.is_some());
        let attrs =
            args!("has_weight": given.0, "has_bias": given.1, "normalized_shape": normalized, "eps": eps);
        one("layer_norm", &with(&[self], &[weight, bias]), attrs)
    }

    /// eˣ / Σ eˣ along `dim`.
    ///
    /// ```
    /// use isobar_array::Linear;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice(&[0.0, 3.0_f64.ln()]);
    /// let y = Linear::softmax(&x, 0)?;
    /// assert!(y.allclose(&Tensor::from_slice(&[0.25, 0.75]), 1e-12, 1e-12, false));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn softmax(&self, dim: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("softmax", &[self], args!("dim": dim))
    }

    /// x − ln Σ eˣ along `dim`.
    ///
    /// ```
    /// use isobar_array::Linear;
    /// use tch::Tensor;
    ///
    /// // Finite where the logarithm of a softmax is not.
    /// let y = Linear::log_softmax(&Tensor::from_slice(&[0.0, 1000.0]), 0)?;
    /// assert_eq!(y, Tensor::from_slice(&[-1000.0, 0.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn log_softmax(&self, dim: i64) -> Result<Self>
    where
        Self: Array,
    {
        one("log_softmax", &[self], args!("dim": dim))
    }

    /// Einstein's summation, such as `"bhqd,bhkd->bhqk"`: dims of one letter are multiplied, and those that the result does not
    /// name are summed over. Each operand names each of its dims by another letter.
    ///
    /// ```
    /// use isobar_array::Linear;
    /// use tch::Tensor;
    ///
    /// let x = Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]);
    /// assert_eq!(Linear::einsum("ij,ij->i", &[&x, &x])?, Tensor::from_slice(&[5.0, 25.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn einsum(equation: &str, arrays: &[&Self]) -> Result<Self>
    where
        Self: Array,
    {
        one("einsum", arrays, args!("equation": equation))
    }
}

impl Linear for Tensor {
    fn linear(&self, weight: &Self, bias: Option<&Self>) -> Result<Self> {
        named("linear", &[self, weight], self.f_linear(weight, bias))
    }

    fn matmul(&self, other: &Self) -> Result<Self> {
        named("matmul", &[self, other], self.f_matmul(other))
    }

    fn bmm(&self, other: &Self, bias: Option<&Self>) -> Result<Self> {
        let Some(bias) = bias else { return named("bmm", &[self, other], self.f_bmm(other)) };
        // tch panics if a call with a scalar argument fails, so dtypes and shapes that do not fit must fail first.
        let operand = |name, x: &Self| (name, x.kind(), Dtype::Operand);
        let tensors =
            [("input", self.kind(), Dtype::NotBool), operand("other", other), operand("bias", bias)];
        check_dtypes("bmm", tensors, Tensor::device(self))?;
        let (&[n, i, k], &[batch, depth, j]) = (&self.size()[..], &other.size()[..]) else {
            return Err(argument("bmm", "expected [n, i, k] and [n, k, j]"));
        };
        if (n, k) != (batch, depth) {
            let shapes = format!("{:?} and {:?}", self.size(), other.size());
            return Err(argument("bmm", format!("{shapes}; expected [n, i, k] and [n, k, j]")));
        }
        let bias = named("bmm", &[bias], bias.f_expand([n, i, j], true))?;
        named("bmm", &[self, other], bias.f_baddbmm(self, other, 1.0, 1.0))
    }

    fn layer_norm(
        &self,
        normalized: &[i64],
        weight: Option<&Self>,
        bias: Option<&Self>,
        eps: f64,
    ) -> Result<Self> {
        let y =
            full(self).and_then(|x| x.f_layer_norm(normalized, as_full(weight)?, as_full(bias)?, eps, true));
        named("layer_norm", &[self], y)
    }

    fn softmax(&self, dim: i64) -> Result<Self> {
        named("softmax", &[self], full(self).and_then(|x| x.f_softmax(dim, None)))
    }

    fn log_softmax(&self, dim: i64) -> Result<Self> {
        named("log_softmax", &[self], full(self).and_then(|x| x.f_log_softmax(dim, None)))
    }

    fn einsum(equation: &str, arrays: &[&Self]) -> Result<Self> {
        named("einsum", arrays, Tensor::f_einsum(equation, arrays, None::<i64>))
    }
}
