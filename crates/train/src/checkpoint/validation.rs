//! Comparability of the validation errors of a run's checkpoints.

use super::RunState;
use crate::variables::VariableError;

/// Relative difference of two baselines of one data set: their sums may be in another order.
const ROUNDING: f64 = 1e-5;

impl RunState {
    /// Returns whether both states validate on the same data, as far as the errors of their baselines tell.
    pub(crate) fn same_validation_data(&self, other: &Self) -> bool {
        let near = |a: f64, b: f64| {
            a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= ROUNDING * a.abs().max(b.abs())
        };
        let Some((own, others)) = self.baseline().zip(other.baseline()) else { return true };
        let same =
            |(a, b): (&VariableError, &VariableError)| near(a.relative, b.relative) && near(a.rmse, b.rmse);
        own.len() == others.len() && own.iter().zip(&others).all(same)
    }

    /// Errors of a prediction without a network, if the program recorded them.
    fn baseline(&self) -> Option<Vec<VariableError>> {
        serde_json::from_value(self.extra.get("baseline")?.clone()).ok()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn other_data_have_another_baseline() {
        let state = |extra: Value| RunState { extra, ..RunState::default() };
        let of = |relative: Value| state(json!({ "baseline": [{ "relative": relative, "rmse": 2.0 }] }));
        assert!(of(0.5.into()).same_validation_data(&of((0.5 + 1e-9).into())));
        assert!(!of(0.5.into()).same_validation_data(&of(0.6.into())));
        assert!(!of(0.5.into()).same_validation_data(&state(json!({ "baseline": [] }))));
        // Not finite.
        assert!(of(Value::Null).same_validation_data(&of(Value::Null)));
        assert!(state(Value::Null).same_validation_data(&of(0.6.into())));
    }
}
