//! Mask of invalid tokens from a mask of invalid points.

use isobar_array::{Array, Comparison, Pool};
use tch::Kind;

use super::MODEL;
use crate::error::{Checker, Error, Result};
use crate::layers::zeros;

/// Mask of the tokens with an invalid point.
#[derive(Debug)]
pub(super) struct InvalidTokens {
    patch: Vec<i64>,
    enabled: bool,
}

impl InvalidTokens {
    /// Makes it for patches of the extents `patch`; `enabled` is `use_nan_mask_tokens`.
    pub(super) fn new(patch: Vec<i64>, enabled: bool) -> Self {
        Self { patch, enabled }
    }

    /// Checks the mask of points of fields of shape `x`: `[batch, extents…]` or `[batch, 1, extents…]`.
    ///
    /// # Errors
    ///
    /// A mask of another shape, or of a model without mask tokens.
    pub(super) fn check<A: Array>(&self, points: &A, x: &[i64]) -> Result<()> {
        Checker(MODEL).ensure(self.enabled, || {
            "the batch has an invalid_mask, but the model has no mask tokens; set use_nan_mask_tokens, or remove the array"
                .into()
        })?;
        let (got, with_channel) = (points.shape(), [&[x[0], 1], &x[2..]].concat());
        if got == with_channel || got == [&x[..1], &x[2..]].concat() {
            return Ok(());
        }
        Err(Error::Input {
            model: MODEL,
            got,
            want: format!("{with_channel:?} for the invalid_mask, or without its channel dim"),
        })
    }

    /// Computes the mask `[grid…, batch, 1]`, 1 at invalid tokens and 0 at others, from a checked mask of points. It has the layout
    /// of the tokens `[grid…, batch, features]`, so that these stay where they are.
    ///
    /// # Errors
    ///
    /// An exchange fails.
    pub(super) fn mask<A: Array>(&self, points: &A, tokens: &A) -> Result<A> {
        let dims = self.patch.len();
        let points = points.detach()?.to_kind(Kind::Float)?;
        let points = if points.shape().len() == dims + 1 { points.unsqueeze(1)? } else { points };
        let (largest, _) = points.max_pool(dims, &Pool::new(&self.patch))?;
        let invalid = largest.compare(Comparison::Gt, &zeros(&[1], &largest)?)?.to_kind(Kind::Float)?;
        let order: Vec<i64> = (2..2 + dims as i64).chain([0, 1]).collect();
        Ok(invalid.permute(&order)?.redistribute_like(&tokens.detach()?.narrow(-1, 0, 1)?)?)
    }
}
