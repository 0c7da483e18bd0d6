//! The usual model and task over fields, for struct updates.

use isobar_data::{Augment, Normalizer, Samples};
use isobar_train::loss::Mse;
use isobar_train::metric::Report;
use isobar_train::{FieldModel, FieldTask, Variable, Weights};

/// A model of one variable, whose inputs and outputs have these scales.
pub(crate) fn model<L, F>(
    layout: L,
    forward: F,
    input: Normalizer,
    target: Normalizer,
    name: &str,
) -> FieldModel<L, F> {
    FieldModel {
        forward,
        layout,
        positions: None,
        change: None,
        input,
        target,
        variables: vec![Variable::new(name)],
        roles: None,
        missing: None,
    }
}

/// Training by the mean squared error, without augmentation, weights or further metrics.
pub(crate) fn task<L, F>(
    model: FieldModel<L, F>,
    train: Box<dyn Samples>,
    validation: Box<dyn Samples>,
) -> FieldTask<L, F> {
    FieldTask {
        model,
        train,
        validation,
        rollouts: None,
        augment: Augment::None,
        loss: Mse {}.into(),
        weights: Weights::default(),
        report: Report::default(),
        seed: 1,
    }
}
