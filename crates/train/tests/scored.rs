//! Weights and metrics in a task: rollouts, the best checkpoint, and models that return an ensemble.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::time::Duration;

use isobar_array::{Array, Elementwise, Generator, Shape};
use isobar_collectives::{Group, threads};
use isobar_data::{Augment, InMemory, Normalizer};
use isobar_manager::DeviceMesh;
use isobar_shard::forbid_hidden_communication;
use isobar_train::config::{MetricsConfig, TrainConfig};
use isobar_train::loss::{Crps, LossKind, Mse};
use isobar_train::metric::{MetricKind, Report};
use isobar_train::{
    BoxError, DenseFields, FieldLayout, FieldModel, FieldTask, FitConfig, Latitudes, Lead, Parameter,
    Parameters, Ranks, ShardedFields, Step, Summary, Task, Variable, Weights, WeightsConfig, fit,
};
use tch::{Device, Kind, Tensor};

use crate::change::Paper;
use crate::one_variable::one_variable;

fn kinds(names: &[&str]) -> Vec<MetricKind> {
    names.iter().map(|name| serde_json::from_value((*name).into()).unwrap()).collect()
}

/// Two trajectories of three frames of one variable on two points: 1, 2 and 4, and 2, 3 and 5.
fn frames() -> Tensor {
    let frames = Tensor::from_slice(&[1.0, 2.0, 4.0, 2.0, 3.0, 5.0]).view([2, 3, 1, 1, 1]);
    frames.expand([2, 3, 1, 2, 1], false).contiguous()
}

/// Trains a network whose output is a parameter, at a rate that changes nothing.
fn trained(folder: &Path, best: &str, lead: Option<Lead>) -> (Summary, Vec<serde_json::Value>) {
    let summary = trained_on(&frames(), None, folder, (best, 1), lead, &Group::single());
    let lines = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    (summary, lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

fn trained_on(
    frames: &Tensor,
    missing: Option<f64>,
    folder: &Path,
    (best, epochs): (&str, u64),
    lead: Option<Lead>,
    world: &Group,
) -> Summary {
    let weight = Tensor::from(3.0).to_kind(Kind::Double).set_requires_grad(true);
    let params = Parameters::new(vec![Parameter::replicated("output", &weight)]).unwrap();
    let same = Normalizer::new(0.0, 1.0).unwrap();
    let config = WeightsConfig { lead, ..WeightsConfig::default() };
    let rollouts = |steps| InMemory::rollouts(frames, steps, steps).unwrap();
    let task = FieldTask {
        model: one_variable(
            |x: &Tensor, _: Option<Step<'_>>| Ok::<_, BoxError>(x.zeros_like() + &weight),
            same,
            missing,
        ),
        train: rollouts(2).into(),
        validation: InMemory::rollouts(frames, 1, 1).unwrap().into(),
        rollouts: Some(rollouts(2).into()),
        augment: Augment::None,
        loss: Mse {}.into(),
        weights: Weights::new(&config, &[Variable::new("u")], None, &[0..2, 0..1]).unwrap(),
        report: Report::new(&kinds(&["rmse", "bias"]), || Err("no metric needs a climatology")).unwrap(),
        seed: 0,
    };
    let adamw = isobar_train::optim::AdamWConfig { lr: 1e-12, ..Default::default() };
    let config = FitConfig {
        folder: folder.to_owned(),
        optimizer: adamw.into(),
        train: TrainConfig { epochs, batch_size: 2, best: best.into(), ..TrainConfig::default() },
        metrics: MetricsConfig { report: kinds(&["rmse", "bias"]), ..MetricsConfig::default() },
        ..FitConfig::default()
    };
    fit(&task, &params, &[], &Ranks::data_parallel(world), &config).unwrap()
}

/// A frame without any value counts in no error and no metric, on any rank that has it.
#[test]
fn a_frame_without_values_does_not_count() {
    for ranks in [1, 2, 4] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        let _ = threads::run(ranks, Duration::from_secs(240), move |world| {
            let frames = frames();
            let _ = frames.get(0).get(1).fill_(f64::NAN);
            let summary = trained_on(&frames, Some(0.0), &path, ("u/rmse", 1), None, &world);
            let near = |got: f64, want: f64| assert!((got - want).abs() < 1e-9, "{got} {want}");
            // Errors of 3 against nothing, 4, 3 and 5; after one step of rollouts against nothing and 3, after two against 4 and 5.
            near(summary.scores.unwrap().get(0, 0).unwrap(), (5.0_f64 / 3.0).sqrt());
            near(summary.best_error.unwrap(), (5.0_f64 / 3.0).sqrt());
            near(summary.variable_errors[0].rmse, (5.0_f64 / 3.0).sqrt());
            near(summary.variable_errors[0].relative, (1.0 / 4.0 + 2.0 / 5.0) / 3.0);
            near(summary.rollout_scores[0].get(1, 0).unwrap(), 0.0);
            near(summary.rollout_scores[1].get(0, 0).unwrap(), 2.5_f64.sqrt());
        });
    }
}

/// If the metric of `train.best` has no value, no checkpoint is the best; the run warns once.
#[test]
fn nothing_to_compare_checkpoints_by_is_a_warning() {
    for (best, words) in [
        ("u/rmse", "train.best is \"u/rmse\", but no validation sample has a value of u"),
        ("bias", "train.best is \"bias\", but no validation sample has a value of u"),
        ("relative", "train.best is \"relative\", but no validation sample has a value of u"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (paper, _messages) = Paper::collect();
        let nothing = frames().full_like(f64::NAN);
        let summary = trained_on(&nothing, Some(0.0), folder.path(), (best, 2), None, &Group::single());
        let text = paper.text();
        assert_eq!(text.matches(words).count(), 1, "{text}");
        assert_eq!(summary.best_error, None);
        let (paper, _messages) = Paper::collect();
        let _ = trained_on(
            &frames(),
            None,
            tempfile::tempdir().unwrap().path(),
            (best, 1),
            None,
            &Group::single(),
        );
        assert!(!paper.text().contains("train.best"), "{}", paper.text());
    }
}

#[test]
fn metrics_of_lead_times_are_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let (summary, lines) = trained(folder.path(), "u/bias", Some(Lead::Steps(vec![3.0, 1.0])));
    // Errors of 3 against 2 and 3 after a step, against 4 and 5 after two; of all pairs against 2, 4, 3 and 5.
    let last = lines.last().unwrap();
    let near = |key: &str, want: f64| {
        let got = last[key].as_f64().unwrap();
        assert!((got - want).abs() < 1e-9, "{key}: {got} {want}");
    };
    near("rollout/step_1/rmse/u", 0.5_f64.sqrt());
    near("rollout/step_2/rmse/u", 2.5_f64.sqrt());
    near("rollout/step_2/bias/u", -1.5);
    near("validation/rmse/u", 1.5_f64.sqrt());
    near("validation/bias/u", -0.5);
    assert!((summary.best_error.unwrap() - 0.5).abs() < 1e-9, "{summary:?}");
    assert_eq!((summary.rollout_scores.len(), summary.rollout_scores[1].step), (2, 2));
    // (3 · (1 + 0) / 2 + (1 + 4) / 2) / 4.
    assert!((summary.losses[0] - 1.0).abs() < 1e-9, "{:?}", summary.losses);
    let state = std::fs::read_to_string(summary.checkpoint.unwrap().join("manifest.json")).unwrap();
    assert!(state.contains("\"u/bias\""), "{state}");
}

/// By default the best is the mean of relative errors, as ever.
#[test]
fn the_best_is_the_relative_error() {
    let folder = tempfile::tempdir().unwrap();
    let (summary, _) = trained(folder.path(), "relative", None);
    let relative = (1.0 / 2.0 + 0.25 + 0.0 + 2.0 / 5.0) / 4.0;
    assert!((summary.best_error.unwrap() - relative).abs() < 1e-9);
    assert!((summary.losses[0] - (0.5 + 2.5) / 2.0).abs() < 1e-9);
}

const EXTENTS: [usize; 2] = [3, 4];

/// The loss, and the errors and terms of samples, of a model whose ensemble is around its inputs.
fn ensemble<L: FieldLayout>(layout: L) -> (f64, Vec<Vec<f64>>) {
    let window = layout.window(&EXTENTS).unwrap();
    let at = Tensor::arange(5 * 12, (Kind::Double, Device::Cpu)).view([5, 1, 3, 4]);
    let part = |field: Tensor| {
        window.iter().enumerate().fold(field, |part, (dim, range)| {
            part.narrow(dim as i64 + 2, range.start as i64, range.len() as i64)
        })
    };
    let data = || InMemory::pairs(part((&at * 1.3).sin()), part((&at * 0.7).cos() + 0.5)).unwrap();
    let forward = |x: &L::Array, _: Option<Step<'_>>| {
        let members = [0.5, 1.0, 1.7].map(|factor| x.mul_scalar(factor).and_then(|x| x.add_scalar(factor)));
        let members = members.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok::<_, BoxError>(L::Array::stack(&members.iter().collect::<Vec<_>>(), 1)?)
    };
    let variables = vec![Variable::new("u")];
    let latitudes = Latitudes { dim: 0, degrees: vec![60.0, 0.0, -60.0] };
    let config = WeightsConfig { latitude: true, ..WeightsConfig::default() };
    let metrics = kinds(&["crps", "spread", "spread_skill", "rmse", "acc"]);
    let loss: LossKind = Crps::default().into();
    let task = FieldTask {
        weights: Weights::new(&config, &variables, Some(&latitudes), &window).unwrap(),
        report: Report::new(&metrics, || data().targets().f_mean_dim(0, false, None)).unwrap(),
        model: FieldModel {
            forward,
            layout,
            positions: None,
            change: None,
            input: Normalizer::new(0.1, 0.8).unwrap(),
            target: Normalizer::new(0.4, 1.3).unwrap(),
            variables,
            roles: None,
            missing: None,
        },
        train: data().into(),
        validation: data().into(),
        rollouts: None,
        augment: Augment::None,
        loss,
        seed: 0,
    };
    let generator = Generator::new(0);
    let step = Step { epoch: 0, offset: 0, total: 5, generator: &generator };
    let loss = task.loss(step, &[0, 1, 2, 3, 4]).unwrap().double_value(&[]);
    let scored = task.scored_errors(&[0, 1, 2, 3, 4]).unwrap();
    let predicted = task.predict(&*task.validation, &[1]).unwrap();
    assert_eq!(predicted[0].shape(), [1, 1, 3, 4], "the mean of the members");
    let numbers = |scored: &isobar_train::Scored<Vec<isobar_train::VariableError>>| {
        let errors = scored.errors.iter().flat_map(|error| [error.relative, error.rmse]);
        errors.chain(scored.terms.iter().copied()).collect()
    };
    (loss, scored.iter().map(numbers).collect())
}

#[test]
fn models_may_return_an_ensemble() {
    let (loss, samples) = ensemble(DenseFields);
    assert_eq!((samples.len(), samples[0].len()), (5, 2 + 6 + 5));
    assert!(samples.iter().flatten().all(|number| number.is_finite()));
    for shape in [&[2][..], &[3], &[5], &[2, 2]] {
        let checked =
            threads::run(shape.iter().product::<i64>() as usize, Duration::from_secs(240), |world| {
                let mesh = DeviceMesh::new(&world, shape, &["domain", "domain_y"][..shape.len()]).unwrap();
                let _guard = forbid_hidden_communication();
                let layout = ShardedFields::new(&mesh, &EXTENTS).unwrap();
                let (split, own) = ensemble(layout);
                assert!((split - loss).abs() < 1e-12, "{split} {loss}");
                for (own, dense) in own.iter().flatten().zip(samples.iter().flatten()) {
                    assert!((own - dense).abs() < 1e-10, "{own} {dense}");
                }
            });
        assert!(!checked.is_empty());
    }
}
