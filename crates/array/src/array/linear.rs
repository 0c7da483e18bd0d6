//! Products with weights, and normalisation.

use tch::Tensor;

use super::{argument, named};
use crate::error::Result;
use crate::precision::full;

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
#[expect(clippy::missing_errors_doc, reason = "all fail alike: shapes that do not fit, kinds that differ")]
pub trait Linear: Sized {
    /// x Wᵀ + b over the last dim: `weight` `[out, in]`, `bias` `[out]`.
    fn linear(&self, weight: &Self, bias: Option<&Self>) -> Result<Self>;

    /// The matrix product of the last two dims; dims before them are broadcast.
    fn matmul(&self, other: &Self) -> Result<Self>;

    /// The product of two batches of matrices, `[n, i, j]` and `[n, j, k]`, plus `bias`, broadcast to `[n, i, k]`.
    fn bmm(&self, other: &Self, bias: Option<&Self>) -> Result<Self>;

    /// Another name of [`bmm`](Self::bmm).
    fn batched_matmul(&self, other: &Self, bias: Option<&Self>) -> Result<Self> {
        self.bmm(other, bias)
    }

    /// Two-dimensional convolution of `[batch, channel, height, width]` with `weight`
    /// `[out, channel / groups, kernel height, kernel width]`.
    fn conv2d(&self, weight: &Self, bias: Option<&Self>, conv: &Conv2d) -> Result<Self>;

    /// (x − mean) / √(variance + `eps`) over the trailing dims `normalized`, times `weight` plus `bias` of that shape.
    fn layer_norm(
        &self,
        normalized: &[i64],
        weight: Option<&Self>,
        bias: Option<&Self>,
        eps: f64,
    ) -> Result<Self>;

    /// eˣ / Σ eˣ along `dim`.
    fn softmax(&self, dim: i64) -> Result<Self>;

    /// x − ln Σ eˣ along `dim`.
    fn log_softmax(&self, dim: i64) -> Result<Self>;

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
    fn einsum(equation: &str, arrays: &[&Self]) -> Result<Self>;
}

impl Linear for Tensor {
    fn linear(&self, weight: &Self, bias: Option<&Self>) -> Result<Self> {
        named("linear", &[self, weight], self.f_linear(weight, bias))
    }

    fn matmul(&self, other: &Self) -> Result<Self> {
        named("matmul", &[self, other], self.f_matmul(other))
    }

    fn bmm(&self, other: &Self, bias: Option<&Self>) -> Result<Self> {
        let result = match bias {
            Some(bias) => bias.f_baddbmm(self, other, 1.0, 1.0),
            None => self.f_bmm(other),
        };
        named("bmm", &[self, other], result)
    }

    fn conv2d(&self, weight: &Self, bias: Option<&Self>, conv: &Conv2d) -> Result<Self> {
        if self.dim() != 4 {
            return Err(argument(
                "conv2d",
                format!("input {:?} is not [batch, channel, height, width]", self.size()),
            ));
        }
        let result = self.f_conv2d(weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups);
        named("conv2d", &[self, weight], result)
    }

    fn layer_norm(
        &self,
        normalized: &[i64],
        weight: Option<&Self>,
        bias: Option<&Self>,
        eps: f64,
    ) -> Result<Self> {
        let y = full(self).and_then(|x| x.f_layer_norm(normalized, weight, bias, eps, true));
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
