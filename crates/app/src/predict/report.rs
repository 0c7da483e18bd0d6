//! The report of a prediction: lines to print, and files beside it.

use anyhow::Result;
use isobar_train::metric::Scores;
use isobar_train::{Variable, VariableError};

use super::fields::Prediction;
use super::files::Files;
use super::outcome::Outcome;
use super::spectra;
use super::trained::Trained;
use crate::run::{Scoring, scoring};

/// A finished prediction.
pub(super) struct Report<'a> {
    prediction: &'a Prediction<'a>,
    outcome: &'a Outcome,
    scoring: &'a Scoring,
    scores: Vec<Scores>,
    variables: &'a [Variable],
    /// Validation errors of the mean field, for samples without time.
    mean_field: &'a [VariableError],
    errors: Vec<String>,
    /// Variables that are predicted no better than by the baseline.
    warning: Option<String>,
}

impl<'a> Report<'a> {
    /// Describes an outcome.
    pub(super) fn new<L, F>(
        trained: &'a Trained<L, F>,
        prediction: &'a Prediction<'a>,
        outcome: &'a Outcome,
        scoring: &'a Scoring,
    ) -> Self {
        let (variables, has_steps) = (&trained.model.variables[..], prediction.source.has_steps());
        let mean_field = if has_steps { &[] } else { &trained.baseline[..] };
        let (errors, warning) = match has_steps {
            true => outcome.forecast(variables),
            false => outcome.mapping(variables, mean_field),
        };
        let mut scores = outcome.board.scores();
        for scores in scores.iter_mut().filter(|scores| !outcome.is_finite(scores.step)) {
            scores.metrics.iter_mut().for_each(|(_, values)| values.fill(None));
        }
        Self { prediction, outcome, scoring, scores, variables, mean_field, errors, warning }
    }

    /// Formats errors and metrics as lines, up to the last step after which all samples are finite.
    pub(super) fn lines(&self) -> Vec<String> {
        let finite = self.scores.iter().take_while(|scores| self.outcome.is_finite(scores.step)).count();
        let Scoring { report, by_latitude, .. } = self.scoring;
        let table = scoring::table(&self.scores[..finite], report, self.variables, *by_latitude);
        [&self.errors[..], &table].concat()
    }

    /// Warns of variables that are predicted no better than by the baseline.
    pub(super) fn warn(&self) {
        self.warning.iter().for_each(|warning| tracing::warn!("{warning}"));
    }

    /// Writes the files beside the prediction, and returns a line for each file. One rank calls.
    pub(super) fn write(&self, files: &Files) -> Result<Vec<String>> {
        let Self { prediction, outcome, variables, .. } = self;
        let Files { out, errors, curves, metrics, metric_curves, picture, .. } = files;
        let (source, times) = (prediction.source, prediction.times());
        let mut said = vec![format!("prediction  {}", out.display())];
        outcome.write_csv(errors, variables, &times, self.mean_field)?;
        said.push(format!("errors      {}", errors.display()));
        if source.has_steps() && outcome.draw_errors(curves, variables, &times)? {
            said.push(format!("curves      {}", curves.display()));
        }
        if !self.scores.is_empty() {
            scoring::write(metrics, &self.scores, variables, &times)?;
            said.push(format!("metrics     {}", metrics.display()));
        }
        let report = &self.scoring.report;
        if source.has_steps() && scoring::draw(metric_curves, &self.scores, report, variables, &times)? {
            said.push(format!("curves      {}", metric_curves.display()));
        }
        if let Some(found) = &outcome.spectra {
            let mut all = found.means();
            let diverged = all.iter_mut().filter(|spectra| !outcome.is_finite(spectra.step));
            diverged.for_each(|spectra| spectra.forecast.fill(f64::NAN));
            said.extend(spectra::write(files, &all, variables, &times)?);
        }
        if let Some(shown) = &outcome.first {
            shown.draw(source.has_steps(), &prediction.legend.titles, picture)?;
            said.push(format!("picture     {}", picture.display()));
        }
        Ok(said)
    }
}
