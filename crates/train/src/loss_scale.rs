//! Loss scaling: gradients of 16-bit floats that would round to zero.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// By what the loss is multiplied before backward, and the gradients divided after it, so that small gradients are not lost in
/// half precision (Micikevicius et al., "Mixed Precision Training", 2018). It doubles after 2000 steps without overflow; a step
/// whose gradients overflow is left out, and halves it: PyTorch's `GradScaler`.
///
/// ```
/// use isobar_train::LossScale;
///
/// let mut scale = LossScale::default();
/// assert_eq!(scale.factor(), 65536.0);
/// scale.overflowed(12)?;
/// assert_eq!(scale.factor(), 32768.0);
/// # Ok::<(), isobar_train::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScale {
    factor: f64,
    /// Steps since it changed.
    steps: u64,
}

const FIRST: f64 = 65536.0;
/// Less would lose the loss itself.
const LEAST: f64 = 1.0 / 65536.0;
/// More is of no use: single precision holds the gradients that are summed.
const MOST: f64 = 1.6e7;
const STEPS: u64 = 2000;

impl Default for LossScale {
    fn default() -> Self {
        Self { factor: FIRST, steps: 0 }
    }
}

impl LossScale {
    /// The factor of the next step.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// Returns whether a run can have reached this state.
    pub(crate) fn is_possible(&self) -> bool {
        self.factor >= LEAST && self.factor <= MOST && self.steps < STEPS
    }

    /// After a step whose gradients are finite.
    pub fn stepped(&mut self) {
        self.steps += 1;
        if self.steps == STEPS && self.factor * 2.0 < MOST {
            *self = Self { factor: self.factor * 2.0, steps: 0 };
        }
        self.steps %= STEPS;
    }

    /// After `step`, whose gradients are not finite.
    ///
    /// # Errors
    ///
    /// [`Error::Overflow`] where no factor helps.
    pub fn overflowed(&mut self, step: u64) -> Result<()> {
        *self = Self { factor: self.factor / 2.0, steps: 0 };
        match self.factor < LEAST {
            true => Err(Error::Overflow { step }),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_slowly_and_falls_at_once() {
        let mut scale = LossScale::default();
        (0..STEPS - 1).for_each(|_| scale.stepped());
        assert_eq!(scale.factor(), FIRST);
        scale.stepped();
        assert_eq!(scale.factor(), FIRST * 2.0);
        (0..STEPS * 20).for_each(|_| scale.stepped());
        assert!(scale.factor() <= MOST);
        let mut overflows = 0;
        while scale.overflowed(7).is_ok() {
            overflows += 1;
        }
        assert!((30..50).contains(&overflows), "{overflows}");
        assert!(scale.overflowed(7).unwrap_err().to_string().contains("step 7"));
    }
}
