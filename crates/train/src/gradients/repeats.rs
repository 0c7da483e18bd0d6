//! Gradients that come several times in one backward pass.

use std::collections::BTreeSet;

use isobar_array::recomputed_calls;

/// Tracks whether parameters get several gradients in one backward pass.
///
/// With activation checkpointing they may: each recomputed part gives its parameters a gradient, so a rollout gives one per step. A
/// pass without repeats lets later passes with the same number of recomputed parts overlap their reductions.
#[derive(Debug, Default)]
pub(crate) struct Repeats {
    /// Calls of `recompute` up to the end of the last pass.
    recorded: u64,
    /// Recomputed parts of this pass.
    parts: u64,
    /// Numbers of recomputed parts of the passes without repeats.
    once: BTreeSet<u64>,
    repeated: bool,
}

impl Repeats {
    /// Begins a pass.
    pub(crate) fn begin(&mut self) {
        self.parts = recomputed_calls().saturating_sub(self.recorded);
        self.repeated = false;
    }

    /// Records a second gradient of a parameter.
    pub(crate) fn repeated(&mut self) {
        self.repeated = true;
    }

    /// Returns whether each parameter is known to get one gradient in this pass.
    pub(crate) fn are_none(&self) -> bool {
        self.parts == 0 || self.once.contains(&self.parts)
    }

    /// Ends a pass.
    pub(crate) fn end(&mut self) {
        if self.repeated {
            self.once.remove(&self.parts);
        } else {
            self.once.insert(self.parts);
        }
    }

    /// Forgets the recomputed parts so far: their backward pass is over, with those that they recorded themselves.
    pub(crate) fn forget(&mut self) {
        self.recorded = recomputed_calls();
    }
}

#[cfg(test)]
mod tests {
    use isobar_array::{Elementwise, Error, recompute};
    use tch::Tensor;

    use super::*;

    #[test]
    fn passes_without_repeats_tell_for_those_with_as_many_parts() -> Result<(), Error> {
        let x = Tensor::from_slice(&[2.0]).set_requires_grad(true);
        let mut repeats = Repeats::default();
        let mut pass = |parts: usize, repeated: bool| -> Result<bool, Error> {
            for _ in 0..parts {
                let _ = recompute(&[&x], None, (), |inputs, _| inputs[0].mul(&inputs[0]))?;
            }
            repeats.begin();
            let are_none = repeats.are_none();
            if repeated {
                repeats.repeated();
            }
            repeats.end();
            repeats.forget();
            Ok(are_none)
        };
        let calls =
            [(0, false), (2, false), (2, false), (4, true), (4, true), (2, false), (2, true), (2, false)];
        let found = calls
            .into_iter()
            .map(|(parts, repeated)| pass(parts, repeated))
            .collect::<Result<Vec<_>, _>>()?;
        assert_eq!(found, [true, false, true, false, false, true, true, false]);
        Ok(())
    }
}
