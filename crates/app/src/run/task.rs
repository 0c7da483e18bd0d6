//! The task of a training run: its network with its samples, loss and metrics.

use std::sync::Arc;

use anyhow::Result;
use isobar_data::{Normalizer, Reader};
use isobar_train::{FieldLayout, FieldModel, FieldTask, Forward, Parameters, Ranks};
use tch::Tensor;

use super::{Fields, Run, Scoring, Source, Used, check_beside};
use crate::config::Config;

/// A run with its samples.
pub(crate) struct TaskRun<L, F> {
    pub(crate) task: FieldTask<L, F>,
    pub(crate) source: Source,
    pub(crate) params: Parameters,
    pub(crate) buffers: Vec<(String, Tensor)>,
    pub(crate) regression: Option<Used>,
    pub(crate) ranks: Ranks,
    /// Normalisation of stored forcings.
    pub(crate) forcing: Option<Normalizer>,
    /// Normalisation of stored static fields.
    pub(crate) fixed: Option<Normalizer>,
    /// Reader of streamed samples; `None` if they are in memory.
    pub(crate) reader: Option<Arc<Reader>>,
}

impl<L, F> Run<L, F>
where
    L: FieldLayout,
    F: Forward<L::Array>,
{
    /// Adds the samples, the loss and the metrics.
    pub(crate) fn with_samples(
        self,
        fields: Fields,
        scoring: Scoring,
        config: &Config,
    ) -> Result<TaskRun<L, F>> {
        let Self {
            source,
            layout,
            window,
            positions,
            statics,
            forward,
            params,
            buffers,
            regression,
            ranks,
            device,
            ..
        } = self;
        let Fields { train, validation, rollouts, input, target, change, forcing, statics: fixed, reader } =
            fields;
        let (variables, options) = (source.variables()?, (config.train.precision.kind(), device));
        check_beside(&forward, [forcing.as_ref(), fixed.as_ref()])?;
        let positions = statics.behind(positions, fixed.as_ref(), options)?;
        let roles = source.names.roles(&*source.data, &config.data, &window, forcing.clone())?;
        let missing = config.data.masks();
        let task = FieldTask {
            model: FieldModel {
                forward,
                layout,
                positions,
                change,
                input,
                target,
                variables,
                roles,
                missing,
            },
            train,
            validation,
            rollouts,
            augment: config.data.augment.into(),
            loss: config.train.loss.clone(),
            weights: scoring.weights,
            report: scoring.report,
            seed: config.run.seed,
        };
        Ok(TaskRun { task, source, params, buffers, regression, ranks, forcing, fixed, reader })
    }
}
