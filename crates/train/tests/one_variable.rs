//! A model of one variable on one rank, for tests of tasks.

use isobar_data::Normalizer;
use isobar_train::{DenseFields, FieldModel, Variable};

/// The model that computes `forward`, with `scales` for inputs and targets.
pub(crate) fn one_variable<F>(
    forward: F,
    scales: Normalizer,
    missing: Option<f64>,
) -> FieldModel<DenseFields, F> {
    FieldModel {
        forward,
        layout: DenseFields,
        positions: None,
        change: None,
        input: scales.clone(),
        target: scales,
        variables: vec![Variable::new("u")],
        roles: None,
        missing,
    }
}
