//! The number by which checkpoints are compared: `train.best`.

use super::FitConfig;
use crate::error::{Error, Result};
use crate::metric::{MetricKind, Scores};
use crate::variables::{Variable, VariableError};

/// Value of `train.best` for the mean of relative errors.
pub(super) const RELATIVE: &str = "relative";

/// A metric of validation samples: of one variable, or its mean over variables.
#[derive(Debug, Clone, Copy)]
pub(super) struct Best {
    metric: usize,
    variable: Option<usize>,
}

/// Splits `VARIABLE/METRIC`; a variable's name may have a slash.
fn parts(best: &str) -> (Option<&str>, &str) {
    match best.rsplit_once('/') {
        Some((variable, metric)) => (Some(variable), metric),
        None => (None, best),
    }
}

/// Checks that the metric is one that is reported, that no two have one name, and the settings of each.
pub(super) fn check(config: &FitConfig) -> Result<()> {
    let metrics = &config.metrics.report;
    let names: Vec<&str> = metrics.iter().map(|metric| metric.name()).collect();
    for (at, metric) in metrics.iter().enumerate() {
        metric.check()?;
        if names[..at].contains(&metric.name()) {
            let found = format!("{names:?}, with {:?} twice", metric.name());
            return Err(Error::invalid("metrics.report", found, "a metric once; take one away"));
        }
    }
    let best = config.train.best.as_str();
    let (_, metric) = parts(best);
    if best == RELATIVE || names.contains(&metric) {
        return Ok(());
    }
    let all: Vec<&str> = names.iter().copied().chain([metric]).collect();
    let expected = format!(
        "\"{RELATIVE}\", or a metric of metrics.report, which has {names:?}; --set train.best={RELATIVE}, or --set \
         'metrics.report={all:?}' where there is such a metric"
    );
    Err(Error::invalid("train.best", format!("{best:?}"), expected))
}

impl Best {
    /// Finds metric and variable; `None` for the mean of relative errors.
    pub(super) fn find(best: &str, metrics: &[MetricKind], variables: &[Variable]) -> Result<Option<Self>> {
        if best == RELATIVE {
            return Ok(None);
        }
        let (variable, name) = parts(best);
        let works = format!("--set train.best={RELATIVE}");
        let Some(metric) = metrics.iter().position(|metric| metric.name() == name) else {
            let names: Vec<&str> = metrics.iter().map(|metric| metric.name()).collect();
            let expected = format!("a metric that the task reports: {names:?}; {works}");
            return Err(Error::invalid("train.best", format!("{best:?}"), expected));
        };
        let names: Vec<&str> = variables.iter().map(|variable| &*variable.name).collect();
        let Some(variable) = variable else {
            let mixes = metrics[metric].has_unit() && variables.len() > 1;
            if mixes {
                let expected = format!(
                    "one variable's, as a mean over variables would mix their units, such as --set train.best={}/{name}",
                    names.first().copied().unwrap_or_default()
                );
                return Err(Error::invalid("train.best", format!("{best:?}"), expected));
            }
            return Ok(Some(Self { metric, variable: None }));
        };
        match names.iter().position(|own| *own == variable) {
            Some(variable) => Ok(Some(Self { metric, variable: Some(variable) })),
            None => {
                let expected = format!("one of the variables {names:?} before the slash; {works}");
                Err(Error::invalid("train.best", format!("{best:?}"), expected))
            }
        }
    }

    /// The lower the better; NaN where no point counts. Variables without a point that counts are left out of a mean.
    pub(super) fn cost(self, metrics: &[MetricKind], scores: &Scores) -> f64 {
        let Some(kind) = metrics.get(self.metric) else { return f64::NAN };
        let cost =
            |variable: usize| scores.get(self.metric, variable).map_or(f64::NAN, |value| kind.cost(value));
        if let Some(variable) = self.variable {
            return cost(variable);
        }
        let values = scores.metrics.get(self.metric).map_or(&[][..], |(_, values)| values);
        let costs: Vec<f64> = values.iter().flatten().map(|&value| kind.cost(value)).collect();
        costs.iter().sum::<f64>() / costs.len() as f64
    }
}

/// Returns a warning if no validation sample has a value of the variables that `train.best` is about: there is nothing to compare
/// checkpoints by then.
pub(super) fn nothing_counts(
    (setting, best): (&str, Option<Best>),
    variables: &[Variable],
    errors: &[VariableError],
    scores: Option<&Scores>,
) -> Option<String> {
    let missing: Vec<bool> = match (best, scores) {
        (None, _) => errors.iter().map(|error| error.missing).collect(),
        (Some(_), None) => Vec::new(),
        (Some(Best { metric, variable }), Some(scores)) => {
            let all = variable.map_or(0..variables.len(), |variable| variable..variable + 1);
            all.map(|variable| scores.get(metric, variable).is_none()).collect()
        }
    };
    if missing.is_empty() || missing.contains(&false) {
        return None;
    }
    let about = match best.and_then(|best| best.variable) {
        Some(variable) => variables.get(variable..=variable).unwrap_or_default(),
        None => variables,
    };
    let about = match about {
        [one] if one.name.is_empty() => "the variable".to_owned(),
        [one] => one.name.clone(),
        several => format!("any of the {} variables", several.len()),
    };
    let mend = match setting {
        RELATIVE => String::new(),
        _ => format!("; name another variable, or --set train.best={RELATIVE}"),
    };
    Some(format!(
        "train.best is {setting:?}, but no validation sample has a value of {about} that counts: no checkpoint is the best{mend}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metric::{Acc, Rmse};

    #[test]
    fn a_metric_of_a_variable_or_of_all() {
        let metrics = [Rmse {}.into(), Acc {}.into()];
        let variables = ["u", "h"].map(Variable::new);
        let scores = Scores {
            step: 1,
            metrics: vec![("rmse", vec![Some(3.0), Some(200.0)]), ("acc", vec![Some(0.5), Some(1.0)])],
        };
        let cost = |best: &str| {
            let best = Best::find(best, &metrics, &variables).unwrap();
            best.map(|best| best.cost(&metrics, &scores))
        };
        assert_eq!(cost("relative"), None);
        assert_eq!((cost("h/rmse"), cost("u/acc"), cost("acc")), (Some(200.0), Some(0.5), Some(0.25)));
        let gap = Scores {
            step: 1,
            metrics: vec![("rmse", vec![None, Some(2.0)]), ("acc", vec![None, Some(0.5)])],
        };
        let best = |best: &str| Best::find(best, &metrics, &variables).unwrap().unwrap().cost(&metrics, &gap);
        assert!(best("acc") == 0.5 && best("u/rmse").is_nan(), "a variable that is missing everywhere");
        let nothing = |best: &str, missing: &[bool]| {
            let errors: Vec<VariableError> = missing
                .iter()
                .map(|missing| if *missing { VariableError::MISSING } else { VariableError::new(0.5, 1.0) })
                .collect();
            let found = Best::find(best, &metrics, &variables).unwrap();
            nothing_counts((best, found), &variables, &errors, Some(&gap))
        };
        let said = nothing("u/rmse", &[true, false]).unwrap();
        assert!(
            said.contains("a value of u that counts") && said.contains("--set train.best=relative"),
            "{said}"
        );
        assert!(nothing("relative", &[true, true]).unwrap().contains("any of the 2 variables that counts"));
        for (best, missing) in
            [("acc", [true, false]), ("h/rmse", [true, false]), ("relative", [true, false])]
        {
            assert_eq!(nothing(best, &missing), None);
        }
        let error = |best: &str| Best::find(best, &metrics, &variables).unwrap_err().to_string();
        assert!(error("rmse").contains("--set train.best=u/rmse"), "{}", error("rmse"));
        assert!(error("w/acc").contains("[\"u\", \"h\"]"), "{}", error("w/acc"));
        assert!(error("crps").contains("[\"rmse\", \"acc\"]"), "{}", error("crps"));
    }

    #[test]
    fn the_metric_must_be_reported() {
        let mut config = FitConfig::default();
        config.train.best = "h/acc".into();
        let error = check(&config).unwrap_err().to_string();
        assert!(error.contains("--set 'metrics.report=[\"acc\"]'"), "{error}");
        config.metrics.report = vec![Acc {}.into()];
        check(&config).unwrap();
        config.metrics.report.push(Acc {}.into());
        assert!(check(&config).unwrap_err().to_string().contains("\"acc\" twice"));
    }
}
