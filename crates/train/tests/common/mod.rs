//! The usual fields, and the usual model and task over them, for struct updates.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;

use isobar_array::{Generator, Window};
use isobar_data::{Augment, Normalizer, Samples};
use isobar_train::loss::Mse;
use isobar_train::metric::Report;
use isobar_train::{FieldModel, FieldTask, Variable, Weights};
use tch::{Device, Kind, Tensor};

/// Fields `[sample, channel, spatial…]` of normally distributed numbers in float64.
pub(crate) fn drawn(seed: u64, shape: &[usize]) -> Tensor {
    let shape: Vec<i64> = shape.iter().map(|&extent| extent as i64).collect();
    Generator::new(seed).normal(&Window::whole(&shape), 0.0, 1.0, (Kind::Double, Device::Cpu)).unwrap()
}

/// A window of fields `[sample, channel, spatial…]`.
pub(crate) fn cut(all: Tensor, window: &[Range<usize>]) -> Tensor {
    window
        .iter()
        .enumerate()
        .fold(all, |x, (dim, range)| x.narrow(2 + dim as i64, range.start as i64, range.len() as i64))
}

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
