//! Missing values of fields: masked losses, errors, metrics and rollouts, dense and sharded.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{Array, Generator};
use isobar_collectives::threads;
use isobar_data::{Augment, InMemory, Normalizer};
use isobar_manager::DeviceMesh;
use isobar_shard::forbid_hidden_communication;
use isobar_train::loss::{Mse, Weighting};
use isobar_train::metric::{Forecast, MetricKind, Report, scores_of};
use isobar_train::{
    BoxError, DenseFields, FieldLayout, FieldModel, FieldTask, Latitudes, Roles, ShardedFields, Step, Task,
    Variable, VariableError, Weights, WeightsConfig, mean_errors,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::one_variable::one_variable;

const EXTENTS: [usize; 2] = [5, 3];
const FILL: f64 = 0.25;

/// Two trajectories of six frames of two variables. The first has no values in a corner at any time, and none at one point of one
/// frame. One frame of the second trajectory has none at all, another only some in the first row. `hidden` is what stands there.
fn frames(hidden: f64) -> Tensor {
    let count = 2 * 6 * 2 * 15;
    let all = (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.37).sin().view([2, 6, 2, 5, 3]);
    let _ = all.select(2, 0).narrow(2, 0, 2).narrow(3, 1, 2).fill_(hidden);
    let _ = all.get(0).get(4).get(0).get(3).get(0).fill_(hidden);
    let _ = all.get(1).get(3).fill_(hidden);
    let _ = all.get(1).get(5).narrow(1, 1, 4).fill_(hidden);
    all
}

/// Network whose every output channel depends on all input channels.
fn forward<A: Array>(x: &A, channels: i64) -> Result<A, BoxError> {
    let sum = x.reduce(isobar_array::Reduction::Mean, &[1], true)?;
    let parts: Vec<A> =
        (0..channels).map(|channel| sum.mul_scalar(0.5 + channel as f64)).collect::<Result<_, _>>()?;
    Ok(A::cat(&parts.iter().collect::<Vec<_>>(), 1)?)
}

/// Errors by variable; −1 where nothing counts.
fn pairs(errors: &[VariableError]) -> impl Iterator<Item = f64> + '_ {
    errors.iter().flat_map(|error| if error.missing { [-1.0; 2] } else { [error.relative, error.rmse] })
}

/// Loss, errors and metrics of single steps and of rollouts, and predictions.
fn numbers<L: FieldLayout>(layout: L, hidden: f64, (history, change): (usize, bool)) -> Vec<f64> {
    let window = layout.window(&EXTENTS).unwrap();
    let all = window.iter().enumerate().fold(frames(hidden), |part, (dim, range)| {
        part.narrow(dim as i64 + 3, range.start as i64, range.len() as i64)
    });
    let rollouts = |steps| InMemory::rollouts(&all, history - 1 + steps, 1).unwrap();
    let metrics = ["rmse", "acc", "vrmse", "bias", "spectrum"];
    let metrics: Vec<MetricKind> =
        metrics.iter().map(|name| serde_json::from_value((*name).into()).unwrap()).collect();
    let climatology = || all.nanmean([0, 1].as_slice(), false, None::<Kind>);
    let normalizer: Normalizer =
        serde_json::from_value(serde_json::json!({ "mean": [0.1, -0.2], "std": [0.8, 1.5] })).unwrap();
    let variables = ["u", "v"].map(Variable::new).to_vec();
    let latitudes = Latitudes { dim: 0, degrees: vec![60.0, 30.0, 0.0, -30.0, -60.0] };
    let config = WeightsConfig { latitude: true, ..WeightsConfig::default() };
    let roles = Roles { history, prognostic: 2, diagnostic: 0, forcing: None, computed: None };
    let task = FieldTask {
        weights: Weights::new(&config, &variables, Some(&latitudes), &window).unwrap(),
        report: Report::new(&metrics, || Ok::<_, isobar_train::Error>(climatology())).unwrap(),
        model: FieldModel {
            forward: |x: &L::Array, _: Option<Step<'_>>| forward(x, 2),
            layout,
            positions: None,
            change: change.then(|| Normalizer::of_scales(&[0.3, 0.1]).unwrap()),
            input: normalizer.clone(),
            target: normalizer,
            variables,
            roles: Some(roles),
            missing: Some(FILL),
        },
        train: rollouts(2).into(),
        validation: rollouts(1).into(),
        rollouts: Some(rollouts(3).into()),
        augment: Augment::None,
        loss: Mse {}.into(),
        seed: 0,
    };
    let samples: Vec<usize> = (0..task.train.len()).collect();
    let generator = Generator::new(0);
    let step = Step { epoch: 0, offset: 0, total: samples.len() as i64, generator: &generator };
    let mut found = vec![task.loss(step, &samples).unwrap().double_value(&[])];
    let samples: Vec<usize> = (0..task.validation.len()).collect();
    for scored in task.scored_errors(&samples).unwrap() {
        found.extend(pairs(&scored.errors));
        found.extend(scored.terms);
    }
    for scored in task.scored_rollouts(&(0..task.rollouts()).collect::<Vec<_>>()).unwrap() {
        found.extend(pairs(&scored.errors.variables));
        found.extend(scored.errors.spectra.iter().map(|error| error.unwrap_or(-1.0)).chain(scored.terms));
    }
    for errors in [task.baseline().unwrap(), task.rollout_baseline().unwrap()] {
        found.extend(pairs(&errors));
    }
    found
}

/// On 1, 2, 3 and 2 x 2 ranks, of which some have no missing value, the numbers are those of dense fields.
#[rstest]
fn sharded_masks_are_dense_ones(#[values(1, 2)] history: usize, #[values(false, true)] change: bool) {
    let dense = numbers(DenseFields, f64::NAN, (history, change));
    assert!(dense.iter().all(|number| number.is_finite()), "{dense:?}");
    for shape in [&[1][..], &[2], &[3], &[2, 2]] {
        threads::run(shape.iter().product::<i64>() as usize, Duration::from_secs(240), |world| {
            let mesh = DeviceMesh::new(&world, shape, &["domain", "domain_y"][..shape.len()]).unwrap();
            let _guard = forbid_hidden_communication();
            let layout = ShardedFields::new(&mesh, &EXTENTS).unwrap();
            let own = numbers(layout, f64::NAN, (history, change));
            assert_eq!(own.len(), dense.len());
            for (own, dense) in own.iter().zip(&dense) {
                assert!((own - dense).abs() < 1e-10 * dense.abs().max(1.0), "{own} {dense}");
            }
        });
    }
}

/// Metrics of samples of which one is missing everywhere are those of the others; of a variable that is missing in all there are none.
#[test]
fn samples_without_a_value_have_no_metrics() {
    let names =
        ["rmse", "mae", "bias", "nrmse", "vrmse", "acc", "spectrum", "crps", "spread", "spread_skill"];
    let metrics: Vec<MetricKind> =
        names.iter().map(|name| serde_json::from_value((*name).into()).unwrap()).collect();
    let wave =
        |shift: f64| (Tensor::arange(24, (Kind::Double, Device::Cpu)) * 0.7 + shift).sin().view([2, 2, 6]);
    let (prediction, target, climatology) = (wave(0.3), wave(0.0), wave(0.9) * 0.1);
    let _ = target.get(0).get(0).fill_(f64::NAN);
    let _ = target.select(1, 1).fill_(f64::NAN);
    let scores = |first: i64| {
        let part = |fields: &Tensor| fields.narrow(0, first, 2 - first);
        let weights = Weighting::default().with_mask(part(&target).isnan().logical_not());
        let forecast = Forecast::new(&part(&prediction), &part(&target)).unwrap().weighted(weights).unwrap();
        let scores = scores_of(&metrics, &forecast.with_climatology(&part(&climatology)).unwrap()).unwrap();
        assert!(scores.iter().all(|of| of[1].is_nan()), "{scores:?}");
        scores.iter().map(|of| of[0]).collect::<Vec<f64>>()
    };
    let (all, last) = (scores(0), scores(1));
    assert!(all.iter().all(|score| score.is_finite()) && all == last, "{all:?} {last:?}");
}

/// A truth that is zero everywhere has a finite spectrum error.
#[test]
fn a_truth_without_energy_has_a_spectrum_error() {
    let spectrum: [MetricKind; 1] = [serde_json::from_value("spectrum".into()).unwrap()];
    let wave = (Tensor::arange(8, (Kind::Float, Device::Cpu)) * 0.7).sin().view([1, 1, 8]);
    let nothing = wave.zeros_like();
    let score = |prediction: &[&Tensor], target: &[&Tensor]| {
        let forecast = Forecast::new(&Tensor::cat(prediction, 0), &Tensor::cat(target, 0)).unwrap();
        scores_of(&spectrum, &forecast).unwrap()[0][0]
    };
    assert_eq!(score(&[&nothing], &[&nothing]), 0.0);
    assert_eq!(score(&[&wave], &[&nothing]), 1.0);
    let both = score(&[&wave, &(&wave * 2.0)], &[&nothing, &wave]);
    assert!((both - (1.0 + 3.0) / 2.0).abs() < 1e-5, "{both}");
}

/// Points without a climatology have no part in the ACC, with and without a mask.
#[test]
fn points_without_a_climatology_do_not_count() {
    let acc: [MetricKind; 1] = [serde_json::from_value("acc".into()).unwrap()];
    let line = |values: &[f64]| Tensor::from_slice(values).view([1, 1, -1]);
    let (prediction, target) = (line(&[1.0, 2.0, 9.0, 4.0]), line(&[1.5, 1.0, -9.0, 2.0]));
    let climatology = line(&[0.1, 0.2, f64::NAN, 0.4]);
    let without = |fields: &Tensor| Tensor::cat(&[fields.narrow(2, 0, 2), fields.narrow(2, 3, 1)], 2);
    let of = |forecast: Forecast<Tensor>, climatology: &Tensor| {
        scores_of(&acc, &forecast.with_climatology(climatology).unwrap()).unwrap()[0][0]
    };
    let expected =
        of(Forecast::new(&without(&prediction), &without(&target)).unwrap(), &without(&climatology));
    let found = of(Forecast::new(&prediction, &target).unwrap(), &climatology);
    assert!((found - expected).abs() < 1e-12, "{found} {expected}");
    let mask = Tensor::from_slice(&[true, true, true, true]).view([1, 1, 4]);
    let masked = Forecast::new(&prediction, &target).unwrap().weighted(Weighting::default().with_mask(mask));
    assert!((of(masked.unwrap(), &climatology) - expected).abs() < 1e-12);
    let nowhere = Forecast::new(&prediction, &target).unwrap();
    assert!(of(nowhere, &climatology.full_like(f64::NAN)).is_nan(), "nothing to correlate with");
}

/// Points that a mask leaves out are zero in the climatology, too, in whatever order the two are given.
#[test]
fn masked_points_are_zero_in_all_fields() {
    let line = |values: &[f64]| Tensor::from_slice(values).view([1, 1, -1]);
    let (prediction, target) = (line(&[1.0, 2.0, 3.0]), line(&[1.5, f64::NAN, 1.0]));
    let climatology = line(&[0.5, f64::NAN, 1.0]);
    let mask = || Weighting::default().with_mask(target.isnan().logical_not());
    let forecast = || Forecast::new(&prediction, &target).unwrap();
    for forecast in [
        forecast().weighted(mask()).unwrap().with_climatology(&climatology).unwrap(),
        forecast().with_climatology(&climatology).unwrap().weighted(mask()).unwrap(),
    ] {
        let anomaly = forecast.prediction() - forecast.climatology().unwrap();
        assert_eq!(forecast.mean(&anomaly).unwrap().double_value(&[0, 0]), (0.5 + 2.0) / 2.0);
    }
}

/// A climatology without dims that the fields have is that of all samples, and of all channels.
#[test]
fn a_climatology_broadcasts() {
    let acc: [MetricKind; 1] = [serde_json::from_value("acc".into()).unwrap()];
    let wave = |count: i64, factor: f64| (Tensor::arange(count, (Kind::Double, Device::Cpu)) * factor).sin();
    let (prediction, target) = (wave(24, 0.7).view([2, 2, 6]), wave(24, 0.9).view([2, 2, 6]));
    let climatology = wave(12, 0.4).view([2, 6]) * 0.1;
    let _ = climatology.get(1).get(2).fill_(f64::NAN);
    let mask = Tensor::ones([2, 2, 6], (Kind::Bool, Device::Cpu));
    let _ = mask.get(0).get(0).get(4).fill_(false as i64);
    for mask in [None, Some(mask)] {
        let of = |climatology: &Tensor| {
            let weights = Weighting::default();
            let weights = match &mask {
                Some(mask) => weights.with_mask(mask.shallow_clone()),
                None => weights,
            };
            let forecast = Forecast::new(&prediction, &target).unwrap().weighted(weights).unwrap();
            scores_of(&acc, &forecast.with_climatology(climatology)?)
        };
        for climatology in [climatology.shallow_clone(), climatology.narrow(1, 0, 1), climatology.get(0)] {
            let full = of(&climatology.expand([2, 2, 6], false).contiguous()).unwrap();
            let found = of(&climatology).unwrap();
            assert!(full.iter().flatten().all(|score| score.is_finite()));
            for (found, full) in found.iter().flatten().zip(full.iter().flatten()) {
                assert!((found - full).abs() < 1e-12, "{found} {full}");
            }
        }
        assert!(of(&wave(24, 0.1).view([1, 2, 2, 6])).unwrap_err().to_string().contains("climatology"));
    }
}

/// A network that predicts no change is as good as the baseline that does, over rollouts with and without gaps.
#[test]
fn persistence_is_its_own_baseline() {
    let gap = f64::NAN;
    let frames = Tensor::from_slice(&[2.0, gap, 4.0, 2.0, 1.0, 8.0]).view([2, 3, 1, 1]);
    let frames = frames.expand([2, 3, 1, 4], false).contiguous();
    let data = |steps| InMemory::rollouts(&frames, steps, steps).unwrap();
    let same = Normalizer::new(1.0, 2.0).unwrap();
    let task = FieldTask {
        model: one_variable(
            |x: &Tensor, _: Option<Step<'_>>| Ok::<_, BoxError>(x.shallow_clone()),
            same,
            Some(FILL),
        ),
        train: data(1).into(),
        validation: data(1).into(),
        rollouts: Some(data(2).into()),
        augment: Augment::None,
        loss: Mse {}.into(),
        weights: Weights::default(),
        report: Report::default(),
        seed: 0,
    };
    let near = |found: VariableError, expected: VariableError| {
        let pairs = [(found.relative, expected.relative), (found.rmse, expected.rmse)];
        assert!(
            pairs.iter().all(|(found, expected)| (found - expected).abs() < 1e-12),
            "{found:?} {expected:?}"
        );
    };
    let of_rollouts: Vec<_> =
        task.rollout_errors(&[0, 1]).unwrap().into_iter().map(|errors| errors.variables).collect();
    let network = mean_errors(&of_rollouts)[0];
    // Of the first 0.5 after two steps, of the second 1 and 0.75; squares of 4, and of 1 and 36.
    near(network, VariableError::new((0.5 + 0.875) / 2.0, ((4.0_f64 + 18.5) / 2.0).sqrt()));
    near(task.rollout_baseline().unwrap()[0], network);
    let of_samples = task.errors(&(0..task.validation.len()).collect::<Vec<_>>()).unwrap();
    near(task.baseline().unwrap()[0], mean_errors(&of_samples)[0]);
}

/// A frame, the next with a gap, and one step: by hand.
#[test]
fn missing_values_count_in_nothing() {
    let frames = Tensor::from_slice(&[2.0, f64::NAN, 4.0, 1.0, 7.0, f64::NAN]).view([1, 2, 1, 3]);
    let weight = Tensor::from(1.5).to_kind(Kind::Double).set_requires_grad(true);
    let data = || InMemory::rollouts(&frames, 1, 1).unwrap();
    let same = Normalizer::new(1.0, 2.0).unwrap();
    let mut task = FieldTask {
        model: one_variable(
            |x: &Tensor, _: Option<Step<'_>>| Ok::<_, BoxError>(x * &weight),
            same,
            Some(FILL),
        ),
        train: data().into(),
        validation: data().into(),
        rollouts: None,
        augment: Augment::None,
        loss: Mse {}.into(),
        weights: Weights::default(),
        report: Report::default(),
        seed: 0,
    };
    let generator = Generator::new(0);
    let step = || Step { epoch: 0, offset: 0, total: 1, generator: &generator };
    // Inputs 0.5, 0.25 (filled) and 1.5; targets 0, 3 and none.
    let loss = task.loss(step(), &[0]).unwrap();
    let expected = (0.75_f64.powi(2) + (0.375_f64 - 3.0).powi(2)) / 2.0;
    assert!((loss.double_value(&[]) - expected).abs() < 1e-12);
    loss.backward();
    let gradient = 2.0 * (0.75 * 0.5 + (0.375 - 3.0) * 0.25) / 2.0;
    assert!((weight.grad().double_value(&[]) - gradient).abs() < 1e-12);
    let errors = task.errors(&[0]).unwrap();
    let (one, two): (f64, f64) = (2.5 - 1.0, 1.75 - 7.0);
    assert!((errors[0][0].rmse - ((one * one + two * two) / 2.0).sqrt()).abs() < 1e-12);
    // No change: 2 and, filled, 1.5, against 1 and 7.
    let baseline = task.baseline().unwrap();
    assert!((baseline[0].rmse - ((1.0 + 5.5_f64.powi(2)) / 2.0).sqrt()).abs() < 1e-12);
    // A change is known where both fields are.
    task.model.change = Some(Normalizer::of_scales(&[2.0]).unwrap());
    let loss = task.loss(step(), &[0]).unwrap().double_value(&[]);
    assert!((loss - (0.5 + 0.75_f64).powi(2)).abs() < 1e-12, "{loss}");
}

/// In a rollout the network sees the fill at missing points after each step.
#[test]
fn missing_points_stay_missing_in_a_rollout() {
    let frame = Tensor::from_slice(&[2.0, f64::NAN]).view([1, 1, 2]);
    let same = Normalizer::new(0.0, 1.0).unwrap();
    let model = FieldModel {
        forward: |x: &Tensor, _: Option<Step<'_>>| Ok::<_, BoxError>(x * 3.0 + 1.0),
        layout: DenseFields,
        positions: None,
        change: None,
        input: same.clone(),
        target: same,
        variables: vec![Variable::new("u")],
        roles: None,
        missing: Some(FILL),
    };
    let steps = model.roll_out(&frame, 1, 3).unwrap();
    let found: Vec<f64> = steps.iter().flat_map(|step| Vec::try_from(step.flatten(0, -1)).unwrap()).collect();
    let (first, filled) = (7.0, 3.0 * FILL + 1.0);
    assert_eq!(found, [first, filled, 3.0 * first + 1.0, filled, 9.0 * first + 4.0, filled]);
}
