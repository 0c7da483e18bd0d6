//! Every registered task of sharded fields has the loss, the gradients and the predictions of dense fields. Missing values have no
//! part in them.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use isobar_array::{Array, Conv, Generator, Padding, Reduction};
use isobar_collectives::threads;
use isobar_data::{InMemory, Normalizer};
use isobar_manager::{DeviceMesh, DistributedManager};
use isobar_models::{
    Batch, BatchPart, Denoiser, EdmLoss, LossReduction, Mode, Model, Patching, Sharding, SigmaData,
};
use isobar_shard::{Init, ParamStore, Params, Placement, forbid_hidden_communication};
use isobar_train::metric::{MetricKind, Report};
use isobar_train::objective::{Objective, ObjectiveKind, Setup, registered};
use isobar_train::{
    DenseFields, DiffusionConfig, FieldLayout, FieldTask, Forward, Latitudes, Network, PatchConfig,
    Regression, ShardedFields, Step, Task, Weights, WeightsConfig, on_mesh,
};
use rstest::rstest;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::common;

const EXTENTS: [usize; 2] = [10, 7];
const SAMPLES: usize = 3;
const FILL: f64 = 0.25;

/// A convolution of the fields and of what it is given beside them.
struct Blur<A>(A);

impl<A: Array> Blur<A> {
    fn new(params: &mut impl Params<Array = A>) -> Self {
        Self(params.param("weight", &[1, 1, 3, 3], Init::FanIn(9), Placement::Replicate).unwrap())
    }
}

impl<A: Array> Model<A> for Blur<A> {
    fn forward(&self, batch: &Batch<A>, _mode: Mode<'_>) -> isobar_models::Result<Batch<A>> {
        let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
        let mut fields = batch.require("blur", Batch::<A>::FIELDS)?.shallow_clone();
        if let Some(conditions) = batch.get(Batch::<A>::CONDITIONS) {
            fields = fields.add(&conditions.reduce(Reduction::Mean, &[1], true)?.mul_scalar(0.3)?)?;
        }
        Ok(Batch::of_fields(fields.conv(&self.0, None, &conv)?))
    }
}

/// A window of fields `[sample, 1, rows, columns]`; with gaps, values of a corner and of most rows of a sample are missing.
fn fields(seed: i64, window: &[Range<usize>], gaps: bool) -> Tensor {
    let all = common::drawn(seed as u64, &[SAMPLES, 1, EXTENTS[0], EXTENTS[1]]);
    if gaps {
        let _ = all.narrow(2, 0, 3).narrow(3, 4, 3).fill_(f64::NAN);
        let _ = all.get(1).narrow(1, seed, 6).fill_(f64::NAN);
    }
    common::cut(all, window)
}

fn whole() -> [Range<usize>; 2] {
    EXTENTS.map(|extent| 0..extent)
}

fn scale() -> Normalizer {
    Normalizer::new(0.1, 2.0).unwrap()
}

fn store(seed: u64) -> ParamStore {
    ParamStore::new(Generator::new(seed)).with_options(Kind::Double, Device::Cpu)
}

/// Task and data of a test.
#[derive(Clone)]
struct Case {
    task: ObjectiveKind,
    gaps: bool,
    change: bool,
    /// True with a first stage, whose prediction is an input.
    staged: bool,
    /// True if points are weighted by latitude.
    weighted: bool,
}

/// Latitudes of the rows, in degrees.
fn latitudes() -> Vec<f64> {
    (0..EXTENTS[0]).map(|row| -80.0 + 15.0 * row as f64).collect()
}

fn task<L: FieldLayout, F: Forward<L::Array>>(layout: L, forward: F, case: &Case) -> FieldTask<L, F> {
    let window = layout.window(&EXTENTS).unwrap();
    let samples =
        || Box::new(InMemory::pairs(fields(1, &window, case.gaps), fields(2, &window, case.gaps)).unwrap());
    let mut model = common::model(layout, forward, scale(), scale(), "y");
    model.missing = case.gaps.then_some(FILL);
    model.change = case.change.then(|| Normalizer::of_scales(&[0.5]).unwrap());
    let metrics = ["rmse", "crps"].map(|name| serde_json::from_value::<MetricKind>(name.into()).unwrap());
    let report = Report::new(&metrics, || Ok::<_, isobar_train::Error>(Tensor::new())).unwrap();
    let config = WeightsConfig { latitude: case.weighted, ..WeightsConfig::default() };
    let latitudes = Latitudes { dim: 0, degrees: latitudes() };
    let weights = Weights::new(&config, &model.variables, Some(&latitudes), &window).unwrap();
    FieldTask { report, weights, ..common::task(model, samples(), samples()) }
}

fn network<A: Array + 'static>(model: Blur<A>, first: Option<Blur<A>>, case: &Case) -> Network<A> {
    let first = first
        .map(|first| Regression::new(Network::new(Box::new(first)), [scale(), scale()]).conditioning(true));
    let network = Network::new(Box::new(model)).denoising(Some(SigmaData::All(0.5).into()));
    network.objective(case.task.clone(), 3).after(first)
}

/// The loss of a step with the errors and metrics of all samples, this rank's gradient, and the prediction of all samples.
fn results<L: FieldLayout, F: Forward<L::Array>>(
    task: &FieldTask<L, F>,
    store: &ParamStore,
) -> (Vec<f64>, Tensor, L::Array) {
    let generator = Generator::new(4);
    let step = Step { epoch: 0, offset: 0, total: SAMPLES as i64, generator: &generator };
    let loss = task.loss(step, &[0, 1, 2]).unwrap();
    loss.backward();
    let gradient = store.trainable().next().unwrap().tensor.grad();
    let prediction = task.predict(&*task.validation, &[0, 1, 2]).unwrap().remove(0);
    let mut numbers = vec![loss.double_value(&[])];
    for scored in task.scored_errors(&[0, 1, 2]).unwrap() {
        numbers
            .extend(scored.errors.iter().flat_map(|error| [error.relative, error.rmse]).chain(scored.terms));
    }
    (numbers, gradient, prediction)
}

fn far(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    (a - b).abs().max().double_value(&[])
}

fn same_on_shards(case: &Case) {
    let (mut own, mut of_first) = (store(5), store(6));
    let model = Blur::new(&mut own);
    let first = case.staged.then(|| Blur::new(&mut of_first));
    let (numbers, gradient, prediction) =
        results(&task(DenseFields, network(model, first, case), case), &own);
    assert!(numbers.iter().all(|number| number.is_finite()), "{numbers:?}");
    assert!(prediction.isfinite().all().int64_value(&[]) == 1, "{:?}", case.task);
    for (ranks, shape, names) in [
        (2, &[2][..], &["domain"][..]),
        (3, &[3], &["domain"]),
        (4, &[4], &["domain"]),
        (4, &[2, 2], &["domain", "domain_y"]),
    ] {
        let each = threads::run(ranks, Duration::from_secs(240), |world| {
            let _rank = DistributedManager::bind_thread(&world);
            let mesh = DeviceMesh::new(&world, shape, names).unwrap();
            let (mut own, mut of_first) = (store(5), store(6));
            let first = case.staged.then(|| {
                let (mut params, _) = on_mesh(&mut of_first, &mesh, &world, &Sharding::new(), false).unwrap();
                Blur::new(&mut params)
            });
            let (mut params, _) = on_mesh(&mut own, &mesh, &world, &Sharding::new(), true).unwrap();
            let model = Blur::new(&mut params);
            let layout = ShardedFields::new(&mesh, &EXTENTS).unwrap();
            let _guard = forbid_hidden_communication();
            let task = task(layout, network(model, first, case), case);
            let (numbers, gradient, prediction) = results(&task, &own);
            (numbers, gradient, prediction.full_tensor(None).unwrap())
        });
        let sum = each.iter().fold(gradient.zeros_like(), |sum, (_, part, _)| sum + part);
        assert!(far(&sum, &gradient) < 1e-9, "{:?} {names:?}", case.task);
        for (got, _, predicted) in &each {
            assert_eq!(got.len(), numbers.len());
            for (got, want) in got.iter().zip(&numbers) {
                assert!(
                    (got - want).abs() <= 1e-9 * want.abs().max(1.0),
                    "{:?} {names:?}: {got} {want}",
                    case.task
                );
            }
            assert!(far(predicted, &prediction) < 1e-9, "{:?} {names:?}", case.task);
        }
    }
}

#[rstest]
fn tasks_are_the_same_on_shards(#[values(false, true)] gaps: bool, #[values(false, true)] weighted: bool) {
    assert!(registered().len() >= 2);
    for name in registered() {
        let task = serde_json::from_value(json!({ "type": name })).unwrap();
        same_on_shards(&Case { task, gaps, change: false, staged: false, weighted });
    }
}

/// Patches of which some have no value.
fn patches() -> PatchConfig {
    PatchConfig {
        patch_shape: [4, 4],
        patch_num: 3,
        overlap_pix: 1,
        boundary_pix: 0,
        condition_on_input: true,
    }
}

#[rstest]
#[case::changes(None, true, false, 1)]
#[case::residuals(None, false, true, 1)]
#[case::ensembles_of_residuals_on_weighted_patches(Some(patches()), false, true, 2)]
fn denoisers_are_the_same_on_shards_where_values_are_missing(
    #[case] patches: Option<PatchConfig>,
    #[case] change: bool,
    #[case] staged: bool,
    #[case] members: usize,
) {
    let weighted = patches.is_some();
    let task = DiffusionConfig { patches, members, ..DiffusionConfig::default() }.into();
    same_on_shards(&Case { task, gaps: true, change, staged, weighted });
}

/// A factor at each point.
struct Factors(Tensor);

impl Model<Tensor> for Factors {
    fn forward(&self, batch: &Batch<Tensor>, _mode: Mode<'_>) -> isobar_models::Result<Batch<Tensor>> {
        Ok(Batch::of_fields(batch.require("factors", Batch::<Tensor>::FIELDS)? * &self.0))
    }
}

/// The loss of a step with all samples, dense.
fn loss_of(network: Network<Tensor>, gaps: bool, weighted: bool) -> Tensor {
    let case = Case { task: ObjectiveKind::default(), gaps, change: false, staged: false, weighted };
    let generator = Generator::new(4);
    let step = Step { epoch: 0, offset: 0, total: SAMPLES as i64, generator: &generator };
    task(DenseFields, network, &case).loss(step, &[0, 1, 2]).unwrap()
}

/// The loss of a denoiser is the mean over the values that are there, and no gradient reaches the others.
#[test]
fn missing_values_have_no_part_in_the_loss_of_a_denoiser() {
    let shape = [1, 1, EXTENTS[0] as i64, EXTENTS[1] as i64];
    let factors = Tensor::full(shape, 0.7, (Kind::Double, Device::Cpu)).set_requires_grad(true);
    let model = Network::new(Box::new(Factors(factors.shallow_clone())));
    let model = model.denoising(Some(SigmaData::All(0.5).into())).objective(DiffusionConfig::default(), 3);
    let loss = loss_of(model, true, false);
    loss.backward();

    let targets = fields(2, &whole(), true);
    let present = targets.isnan().logical_not();
    let clean = scale().encode(&targets).unwrap().nan_to_num(0.0, None::<f64>, None::<f64>);
    let each =
        EdmLoss { sigma_data: SigmaData::All(0.5), reduction: LossReduction::None, ..EdmLoss::default() }
            .draw(&clean, &Generator::new(4), None, |noisy, _| Ok(noisy * 0.7))
            .unwrap();
    let means =
        (0..SAMPLES as i64).map(|sample| each.get(sample).masked_select(&present.get(sample)).mean(None));
    let want = means.map(|mean| mean.double_value(&[])).sum::<f64>() / SAMPLES as f64;
    assert!((loss.double_value(&[]) - want).abs() < 1e-12 * want, "{loss:?} {want}");
    let anywhere = present.any_dim(0, true);
    let gradient = factors.grad();
    assert_eq!(
        gradient.masked_select(&anywhere.logical_not()).abs().sum(Kind::Double).double_value(&[]),
        0.0
    );
    assert!(gradient.masked_select(&anywhere).abs().min().double_value(&[]) > 0.0);
}

/// Points of a denoiser's loss count by the area of their cells: on patches, by that of their places on the grid.
#[rstest]
fn weights_of_latitudes_are_part_of_the_loss_of_a_denoiser(
    #[values(None, Some(patches()))] patches: Option<PatchConfig>,
) {
    let factors = Tensor::full([1], 0.7, (Kind::Double, Device::Cpu)).set_requires_grad(true);
    let model = Network::new(Box::new(Factors(factors))).denoising(Some(SigmaData::All(0.5).into()));
    let config = DiffusionConfig { patches: patches.clone(), ..DiffusionConfig::default() };
    let loss = loss_of(model.objective(config, 3), false, true);

    let rows = EXTENTS[0] as i64;
    let area = (Tensor::from_slice(&latitudes()).view([1, 1, rows, 1]) * std::f64::consts::PI / 180.0).cos();
    let area = (&area / area.mean(None)).expand([SAMPLES as i64, 1, rows, EXTENTS[1] as i64], false);
    let clean = scale().encode(&fields(2, &whole(), false)).unwrap();
    let generator = Generator::new(4);
    let (clean, area, part) = match patches {
        None => (clean, area, None),
        Some(PatchConfig { patch_num, .. }) => {
            let extents = EXTENTS.map(|extent| extent as i64);
            let patches = Patching::random(extents, [4, 4], patch_num, &generator).unwrap();
            let total = (SAMPLES * patch_num) as i64;
            let cut = |x: &Tensor| patches.apply(x).unwrap();
            (cut(&clean), cut(&area), Some(BatchPart { offset: 0, total }))
        }
    };
    let of_points =
        EdmLoss { sigma_data: SigmaData::All(0.5), reduction: LossReduction::None, ..EdmLoss::default() };
    let each = of_points.draw(&clean, &generator, part, |noisy, _| Ok(noisy * 0.7)).unwrap();
    let want = (each * area).mean(None).double_value(&[]);
    assert!((loss.double_value(&[]) - want).abs() < 1e-12 * want, "{loss:?} {want}");
}

/// Keeps the noise levels that it is given.
#[derive(Clone, Default)]
struct Levels(Arc<Mutex<Vec<f64>>>);

impl Model<Tensor> for Levels {
    fn forward(&self, batch: &Batch<Tensor>, _mode: Mode<'_>) -> isobar_models::Result<Batch<Tensor>> {
        let sigma = batch.require("levels", Batch::<Tensor>::SIGMA)?;
        self.0.lock().unwrap().push(sigma.max().double_value(&[]));
        Ok(Batch::of_fields(batch.require("levels", Batch::<Tensor>::FIELDS)? * 0.5))
    }
}

/// The sampler's own are from 80 down to 0.002.
#[test]
fn samples_start_and_end_within_the_noise_levels_of_the_denoiser() {
    let levels = Levels::default();
    let denoiser = Denoiser { sigma_data: SigmaData::All(0.5), sigma_min: 0.1, sigma_max: 5.0 };
    let network = Network::new(Box::new(levels.clone())).denoising(Some(denoiser.clone()));
    let network = network.objective(DiffusionConfig::default(), 3);
    let case =
        Case { task: ObjectiveKind::default(), gaps: false, change: false, staged: false, weighted: false };
    let task = task(DenseFields, network, &case);
    let _ = task.predict(&*task.validation, &[0]).unwrap();
    let seen = levels.0.lock().unwrap();
    let ends = [seen.iter().copied().fold(f64::INFINITY, f64::min), seen.iter().copied().fold(0.0, f64::max)];
    assert!((ends[0] - 0.1).abs() < 1e-9 && (ends[1] - 5.0).abs() < 1e-9, "{ends:?}");

    // No level of the sampler's is one of this denoiser's.
    let above = Denoiser { sigma_min: 100.0, sigma_max: 200.0, ..denoiser };
    let setup = Setup { denoiser: Some(above), train_steps: 1, ..Setup::default() };
    let error = DiffusionConfig::default().check(&setup).unwrap_err().to_string();
    assert!(error.contains("sigma_min is 100 and sigma_max 80"), "{error}");
}
