//! Weights and metrics of a run: what they need of the data set, and their tables.

use std::ops::Range;
use std::path::Path;

use anyhow::{Result, bail};
use isobar_array::Array;
use isobar_collectives::Group;
use isobar_data::{Dataset, Dim, Window, check_alike};
use isobar_train::loss::{masked_variable_errors, variable_errors};
use isobar_train::metric::{Forecast, Report, Scores};
use isobar_train::{BoxError, FieldLayout, Latitudes, Variable, VariableError, Weights};
use tch::{Kind, TchError, Tensor};

use super::all_ok;
use super::chart::{self, COLOURS, Chart, Curve, lead_time};
use super::errors::aligned;
use super::roles::as_str;
use super::source::Source;
use crate::config::Config;
use isobar_command::exit::{Because, Exit};

/// Weights of the loss and of metrics, and the metrics.
#[derive(Default)]
pub(crate) struct Scoring {
    pub(crate) weights: Weights,
    pub(crate) report: Report,
    /// True if metrics are weighted by latitude.
    pub(crate) by_latitude: bool,
    /// True if missing values of targets (NaN) have no part in metrics.
    masks: bool,
}

impl Scoring {
    /// Makes the weights of this rank's window of the targets, and reads its window of the climatology if a metric needs one. All ranks call.
    pub(crate) fn new(
        source: &Source,
        config: &Config,
        window: &[Range<usize>],
        world: &Group,
    ) -> Result<Self> {
        let asked = &config.train.weights;
        let latitudes = latitudes(source.targets().dims());
        if asked.latitude && latitudes.is_none() {
            let names: Vec<&str> = source.targets().dims().iter().map(|dim| &*dim.name).collect();
            bail!(Exit::Usage.because(format!(
                "train.weights.latitude is on, but {} has no dim of latitudes, only {names:?}; --set train.weights.latitude=false",
                source.targets().path().display()
            )));
        }
        if asked.latitude && config.data.augment != isobar_train::config::AugmentConfig::None {
            bail!(Exit::Usage.because(
                "data.augment turns fields, and train.weights.latitude weights their points; --set data.augment=none"
            ));
        }
        let weights = Weights::new(asked, &source.variables()?, latitudes.as_ref(), window)?;
        let masks = config.data.masks().is_some();
        if config.metrics.report.is_empty() {
            return Ok(Self { weights, masks, by_latitude: asked.latitude, ..Self::default() });
        }
        // One rank may fail to read.
        let report = Report::new(&config.metrics.report, || climatology(source, config, window));
        let (report, _) = all_ok(world, report.map(|report| (Vec::new(), report)))?;
        Ok(Self { weights, report, masks, by_latitude: asked.latitude })
    }

    /// Computes the errors of forecasts, on physical values, of each sample and variable. All ranks of the layout call, and all get
    /// them.
    pub(crate) fn errors<L: FieldLayout>(
        &self,
        layout: &L,
        prediction: &L::Array,
        target: &L::Array,
    ) -> Result<Vec<Vec<VariableError>>> {
        if !self.masks {
            return Ok(variable_errors(prediction, target)?);
        }
        let present = layout.map(target, |local| Ok(present(local)?)).map_err(anyhow::Error::from_boxed)?;
        Ok(masked_variable_errors(prediction, target, &present)?)
    }

    /// Returns a forecast of `count` samples, as metrics take it; `None` without metrics. All ranks of the layout call.
    pub(crate) fn forecast<L: FieldLayout>(
        &self,
        layout: &L,
        count: usize,
        prediction: &L::Array,
        (target, local): (&L::Array, &Tensor),
    ) -> Result<Option<Forecast<L::Array>>> {
        if self.report.metrics().is_empty() {
            return Ok(None);
        }
        let lay_out = |window: &Tensor| layout.array(window, count);
        let made = || -> Result<Forecast<L::Array>, BoxError> {
            let present = self.masks.then(|| present(local)).transpose()?;
            let weights = self.weights.of_fields(target, local, present.as_ref(), lay_out)?;
            Ok(self.report.forecast(prediction, (target, local), weights, lay_out)?)
        };
        made().map(Some).map_err(anyhow::Error::from_boxed)
    }
}

/// True where a field has a value.
fn present(field: &Tensor) -> Result<Tensor, TchError> {
    field.f_isnan()?.f_logical_not()
}

/// The spatial dim of latitudes.
fn latitudes(dims: &[Dim]) -> Option<Latitudes> {
    let dim = dims.iter().position(Dim::is_latitude)?;
    Some(Latitudes { dim, degrees: dims[dim].coordinates.clone() })
}

/// Elements of a window that are read at a time.
const PORTION: usize = 4 << 20;

/// This rank's window, `[channel, spatial…]`, of the mean of the targets over the training samples, or of the fields of the
/// configured file.
fn climatology(source: &Source, config: &Config, window: &[Range<usize>]) -> Result<Tensor> {
    let Some(path) = &config.metrics.climatology else {
        let train = &source.parts.train;
        return mean(source, &**train.targets(), train.samples.clone(), window);
    };
    const KEY: &str = "metrics.climatology";
    let opened = config.data.open_like_targets(path.clone().into());
    let other = opened.map_err(|error| Exit::Data.because(format!("{KEY}: {error}")))?;
    check_alike(&**source.targets(), &*other, &as_str(&source.targets), KEY)?;
    mean(source, &*other, 0..other.samples(), window)
}

/// The mean over samples and frames of a window of the targets, a portion of frames at a time.
fn mean(
    source: &Source,
    data: &dyn Dataset,
    samples: Range<usize>,
    window: &[Range<usize>],
) -> Result<Tensor> {
    let frames = data.times().map_or(1, <[f64]>::len);
    let channels = source.variables()?.len();
    let points: usize = window.iter().map(ExactSizeIterator::len).product();
    let at_once = (PORTION / (channels * points).max(1)).clamp(1, frames.max(1));
    let names = as_str(&source.targets);
    let mut all: Option<(Tensor, Tensor)> = None;
    for sample in samples {
        for first in (0..frames).step_by(at_once) {
            let part = Window { frames: first..frames.min(first + at_once), points: window.to_vec() };
            let fields = data.read(&part, &[sample], &names)?.f_select(0, 0)?.f_to_kind(Kind::Double)?;
            // Missing values, if they are masked, have no part.
            let counts = fields.f_isnan()?.f_logical_not()?.f_to_kind(Kind::Double)?;
            let fields = fields.f_nan_to_num(0.0, f64::INFINITY, f64::NEG_INFINITY)?;
            let own = fields.f_sum_dim_intlist([0].as_slice(), false, None)?;
            let counts = counts.f_sum_dim_intlist([0].as_slice(), false, None)?;
            all = Some(match all {
                None => (own, counts),
                Some((sum, count)) => (sum.f_add(&own)?, count.f_add(&counts)?),
            });
        }
    }
    let Some((sum, count)) = all else {
        bail!(Exit::Data.because(format!("{} has no samples for a climatology", data.path().display())));
    };
    Ok(sum.f_div(&count)?)
}

/// The lines of a table of metrics at the first and the last of these lead times; none without metrics. `weighted` is true if they
/// are weighted by latitude, which tells `rmse` from the RMSE of the errors.
pub(crate) fn table(
    scores: &[Scores],
    report: &Report,
    variables: &[Variable],
    weighted: bool,
) -> Vec<String> {
    let mut lines = aligned(&Scores::table(scores, report.metrics(), variables));
    if weighted && !lines.is_empty() {
        lines.push("metrics are weighted by latitude; the errors and RMSEs above are not".to_owned());
    }
    lines
}

/// Draws the metrics against the lead time; returns false if there are fewer than two lead times. `times` are those of the start and
/// of each step.
pub(crate) fn draw(
    path: &Path,
    scores: &[Scores],
    report: &Report,
    variables: &[Variable],
    times: &[f64],
) -> Result<bool> {
    if scores.len() < 2 {
        return Ok(false);
    }
    chart::save(&charts(scores, report, variables, times), path)?;
    Ok(true)
}

/// Makes a chart of each metric, with a curve for each variable, whose colour is the same in all charts; several charts if variables
/// differ in the unit of the metric, or are more than colours.
fn charts(scores: &[Scores], report: &Report, variables: &[Variable], times: &[f64]) -> Vec<Chart> {
    let mut charts = Vec::new();
    for (at, metric) in report.metrics().iter().enumerate() {
        for (unit, own) in by_unit(variables, metric.has_unit()) {
            let unit = unit.map(|unit| format!(" in {unit}")).unwrap_or_default();
            charts.push(Chart {
                title: format!("{}{unit}", metric.name()),
                axis: "lead time".to_owned(),
                places: scores.iter().map(|scores| lead_time(times, scores.step)).collect(),
                curves: own.into_iter().map(|variable| curve(scores, at, (variable, variables))).collect(),
                include_zero: true,
            });
        }
    }
    charts
}

/// Makes the curve of a metric for a variable, both by their places.
fn curve(scores: &[Scores], metric: usize, (variable, variables): (usize, &[Variable])) -> Curve {
    Curve {
        name: variables[variable].name.clone(),
        colour: COLOURS[variable % COLOURS.len()],
        values: scores.iter().map(|scores| scores.get(metric, variable)).collect(),
    }
}

/// Groups the places of variables by unit, if `has_unit`, with no more in a group than there are colours.
fn by_unit(variables: &[Variable], has_unit: bool) -> Vec<(Option<&str>, Vec<usize>)> {
    let mut groups: Vec<(Option<&str>, Vec<usize>)> = Vec::new();
    for (place, variable) in variables.iter().enumerate() {
        let unit = variable.unit.as_deref().filter(|_| has_unit);
        let has_room = |own: &[usize]| own.iter().all(|other| other / COLOURS.len() == place / COLOURS.len());
        match groups.iter_mut().find(|(known, own)| *known == unit && has_room(own)) {
            Some((_, own)) => own.push(place),
            None => groups.push((unit, vec![place])),
        }
    }
    groups
}

/// Writes an object a line for each lead time and variable, with a key for each metric.
pub(crate) fn write(path: &Path, scores: &[Scores], variables: &[Variable], times: &[f64]) -> Result<()> {
    let mut text = String::new();
    for scores in scores {
        for (at, variable) in variables.iter().enumerate() {
            let mut line = serde_json::json!({ "step": scores.step, "variable": variable.name });
            if let Some(time) = times.get(scores.step) {
                line["time"] = (*time).into();
            }
            if let Some(unit) = &variable.unit {
                line["unit"] = unit.as_str().into();
            }
            for (name, values) in &scores.metrics {
                line[*name] = values.get(at).copied().flatten().into();
            }
            text += &format!("{line}\n");
        }
    }
    isobar_files::write(path, text)
        .map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", path.display())).into())
}

/// The forecast itself, or the mean of an ensemble, of a network whose inputs have `dims` dims.
pub(crate) fn single<A: Array>(prediction: &A, dims: usize) -> Result<A> {
    match prediction.shape().len() > dims {
        true => Ok(isobar_train::loss::ensemble_mean(prediction)?),
        false => Ok(prediction.shallow_clone()),
    }
}

#[cfg(test)]
mod tests {
    use isobar_train::metric::{Bias, Vrmse};

    use super::*;

    /// Variables share a chart of a metric if they share its unit, and charts are drawn for two lead times and more.
    #[test]
    fn metrics_are_drawn_against_the_lead_time() {
        let of =
            |name: &str, unit: Option<&str>| Variable { unit: unit.map(Into::into), ..Variable::new(name) };
        let variables = [of("u", Some("m s-1")), of("h", Some("m")), of("v", Some("m s-1"))];
        let climatology = || -> Result<Tensor> { unreachable!("no metric needs it") };
        let report = Report::new(&[Bias {}.into(), Vrmse {}.into()], climatology).unwrap();
        let scores = |step: usize| Scores {
            step,
            metrics: vec![("bias", vec![Some(-1.0), Some(step as f64), None]), ("vrmse", vec![Some(0.5); 3])],
        };
        let (scores, times) = ([1, 2].map(scores), [6.0, 12.0, 18.0]);
        let charts = charts(&scores, &report, &variables, &times);
        let titles: Vec<&str> = charts.iter().map(|chart| &*chart.title).collect();
        assert_eq!(titles, ["bias in m s-1", "bias in m", "vrmse"]);
        let names = |chart: &Chart| chart.curves.iter().map(|curve| curve.name.clone()).collect::<Vec<_>>();
        assert_eq!([names(&charts[0]), names(&charts[1])], [vec!["u", "v"], vec!["h"]]);
        assert_eq!(
            (&charts[1].places, &charts[1].curves[0].values),
            (&vec![6.0, 12.0], &vec![Some(1.0), Some(2.0)])
        );

        let many: Vec<Variable> = (0..10).map(|_| Variable::new("z")).collect();
        let groups: Vec<usize> = by_unit(&many, true).iter().map(|(_, own)| own.len()).collect();
        assert_eq!(groups, [8, 2], "no colour twice in a chart");

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("prediction.metrics.png");
        let drawn = |scores: &[Scores]| draw(&path, scores, &report, &variables, &times).unwrap();
        assert!(!drawn(&scores[..1]) && !path.exists(), "one lead time");
        assert!(drawn(&scores));
        let file = std::io::BufReader::new(std::fs::File::open(&path).unwrap());
        let mut reader = png::Decoder::new(file).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        for colour in &COLOURS[..3] {
            assert!(pixels.as_chunks::<3>().0.contains(colour), "a curve of the colour {colour:?}");
        }
    }

    /// Only with weights of latitudes does `rmse` differ from the RMSE of the errors.
    #[test]
    fn a_table_says_that_metrics_are_weighted() {
        let report = Report::new(&[Vrmse {}.into()], || -> Result<Tensor> { unreachable!() }).unwrap();
        let scores = [Scores { step: 1, metrics: vec![("vrmse", vec![Some(0.5)])] }];
        let lines =
            |scores: &[Scores], weighted| table(scores, &report, &[Variable::new("u")], weighted).len();
        assert_eq!([lines(&scores, false), lines(&scores, true), lines(&[], true)], [2, 3, 0]);
    }

    #[test]
    fn latitudes_are_known_by_name_or_unit() {
        let dim = |name: &str, unit: Option<&str>| Dim {
            name: name.into(),
            unit: unit.map(Into::into),
            coordinates: vec![45.0, -45.0],
            periodic: false,
        };
        let found = |dims: &[Dim]| latitudes(dims).map(|found| found.dim);
        assert_eq!(found(&[dim("level", None), dim("Latitude", None)]), Some(1));
        assert_eq!(found(&[dim("y", Some("degrees_north")), dim("x", Some("degrees_east"))]), Some(0));
        assert_eq!(found(&[dim("x", None), dim("y", Some("m"))]), None);
    }
}
