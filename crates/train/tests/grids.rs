//! Networks from one grid to another: over meshes against one rank.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use isobar_array::{Array, Conv, Generator, Local, Padding};
use isobar_collectives::{Group, threads};
use isobar_data::{InMemory, Normalizer};
use isobar_manager::{DeviceMesh, DistributedManager};
use isobar_models::{
    Architecture, Batch, FieldSpec, Mode, Model, ModelArray, ModelConfig, Pix2PixConfig, Result,
    SrResNetConfig,
};
use isobar_shard::{Init, ParamStore, Params as _, Placement, Scope, forbid_hidden_communication};
use isobar_train::config::{MetricsConfig, TrainConfig};
use isobar_train::metric::{MetricKind, Report};
use isobar_train::{
    DenseFields, FieldLayout, FieldTask, FitConfig, Forward, Latitudes, Network, Parameters, Ranks,
    ShardedFields, Weights, WeightsConfig, fit, on_mesh,
};
use rstest::rstest;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

use crate::common;

const SAMPLES: i64 = 6;

/// A network, and the grids of its inputs and outputs.
struct Case {
    model: ModelConfig,
    from: &'static [usize],
    to: &'static [usize],
}

/// Four times as fine in two dims; 10 rows divide unevenly on 3 and 4 ranks.
fn plane() -> Case {
    let config = Pix2PixConfig {
        conv_layer_size: 4,
        n_downsampling: 1,
        n_upsampling: 3,
        n_blocks: 1,
        ..Pix2PixConfig::new(2, 1, 2)
    };
    Case { model: ModelConfig::new(config), from: &[10, 8], to: &[40, 32] }
}

/// Twice as fine in three dims.
fn volume() -> Case {
    let config = SrResNetConfig {
        conv_layer_size: 4,
        n_resid_blocks: 1,
        scaling_factor: 2,
        large_kernel_size: 3,
        ..SrResNetConfig::new(2, 1)
    };
    Case { model: ModelConfig::new(config), from: &[7, 4, 3], to: &[14, 8, 6] }
}

/// A model of one's own, whose outputs are on any grid: one convolution, and means over cells.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
struct OnGridConfig {
    /// Points along each spatial dim of the outputs.
    outputs: Vec<usize>,
}

struct OnGrid<A> {
    weight: A,
    outputs: Vec<i64>,
}

impl<A: Array> Model<A> for OnGrid<A> {
    fn forward(&self, batch: &Batch<A>, _mode: Mode<'_>) -> Result<Batch<A>> {
        let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
        let fields =
            batch.require(OnGridConfig::NAME, Batch::<A>::FIELDS)?.conv(&self.weight, None, &conv)?;
        Ok(Batch::of_fields(fields.adaptive_avg_pool(&self.outputs)?))
    }
}

impl Architecture for OnGridConfig {
    const NAME: &'static str = "on_grid";

    fn build<A: ModelArray>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        let weight = params.param("weight", &[1, 2, 3, 3], Init::FanIn(18), Placement::Replicate)?;
        Ok(Box::new(OnGrid { weight, outputs: self.outputs.iter().map(|&extent| extent as i64).collect() }))
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        fields.check_channels(Self::NAME, ("channels", 2), ("channels", 1))
    }

    fn output_extents(&self, _extents: &[usize]) -> Vec<usize> {
        self.outputs.clone()
    }
}

/// Coarser by factors that are not integers.
fn coarser() -> Case {
    Case { model: ModelConfig::new(OnGridConfig { outputs: vec![7, 5] }), from: &[10, 8], to: &[7, 5] }
}

/// Finer along one dim and coarser along the other.
fn other() -> Case {
    Case { model: ModelConfig::new(OnGridConfig { outputs: vec![13, 3] }), from: &[10, 8], to: &[13, 3] }
}

/// A window of fields `[sample, channel, spatial…]`.
fn fields(seed: u64, channels: i64, extents: &[usize], window: &[Range<usize>]) -> Tensor {
    let shape = [&[SAMPLES as usize, channels as usize], extents].concat();
    common::cut(common::drawn(seed, &shape), window).contiguous()
}

/// Numbers that a run reports, and a prediction.
struct Found {
    numbers: Vec<f64>,
    prediction: Tensor,
}

fn kinds(names: &[&str]) -> Vec<MetricKind> {
    names.iter().map(|name| serde_json::from_value((*name).into()).unwrap()).collect()
}

/// Trains three epochs of two steps, with weights of latitudes and metrics on the grid of the targets.
fn train<L: FieldLayout, F: Forward<L::Array>>(
    case: &Case,
    (layout, forward): (L, F),
    (parameters, buffers): (&Parameters, &[(String, Tensor)]),
    ranks: &Ranks,
    folder: &Path,
) -> Found {
    let window = layout.window(case.from).unwrap();
    let targets = layout.targets().window(case.to).unwrap();
    let samples = |seed| {
        let (x, y) = (fields(seed, 2, case.from, &window), fields(seed + 1, 1, case.to, &targets));
        Box::new(InMemory::pairs(x, y).unwrap())
    };
    let degrees = (0..case.to[0]).map(|row| -60.0 + 120.0 * row as f64 / case.to[0] as f64).collect();
    let weights = WeightsConfig { latitude: true, ..WeightsConfig::default() };
    let latitudes = Latitudes { dim: 0, degrees };
    let report = kinds(&["rmse", "bias"]);
    let scales = [(0.1, 1.2), (-0.2, 0.9)].map(|(mean, std)| Normalizer::new(mean, std).unwrap());
    let [input, target] = scales;
    let model = common::model(layout, forward, input, target, "y");
    let task = FieldTask {
        weights: Weights::new(&weights, &model.variables, Some(&latitudes), &targets).unwrap(),
        report: Report::new(&report, || Err("no metric needs a climatology")).unwrap(),
        ..common::task(model, samples(1), samples(5))
    };
    let config = FitConfig {
        folder: folder.to_owned(),
        train: TrainConfig { epochs: 3, batch_size: 3, ..TrainConfig::default() },
        metrics: MetricsConfig { report, ..MetricsConfig::default() },
        ..FitConfig::default()
    };
    let baseline = task.baseline().unwrap();
    let summary = fit(&task, parameters, buffers, ranks, &config).unwrap();
    let prediction = task.predict(&*task.validation, &[0, 1]).unwrap().remove(0).full_tensor().unwrap();
    let errors = summary.variable_errors.iter().chain(&baseline).map(|error| error.relative);
    let scores = summary.scores.iter().flat_map(|scores| scores.metrics.iter());
    let scores = scores.flat_map(|(_, values)| values.iter().flatten().copied());
    let numbers = summary.losses.iter().copied().chain(errors).chain(scores).collect();
    Found { numbers, prediction }
}

fn store() -> ParamStore {
    ParamStore::new(Generator::new(3)).with_options(Kind::Double, Device::Cpu)
}

fn dense(case: &Case) -> Found {
    let folder = tempdir().unwrap();
    let mut store = store();
    let network = Network::new(case.model.build::<Tensor>(&mut store).unwrap());
    let (parameters, buffers) = Parameters::of(&store).unwrap();
    let ranks = Ranks::data_parallel(&Group::single());
    train(case, (DenseFields, network), (&parameters, &buffers), &ranks, folder.path())
}

/// Losses over several steps, errors, metrics, the baseline and predictions.
#[rstest]
#[case(&[2], &["domain"])]
#[case(&[3], &["domain"])]
#[case(&[4], &["domain"])]
#[case(&[2, 2], &["domain", "domain_y"])]
#[case(&[2, 2], &["data", "domain"])]
fn grids_train_alike_on_every_mesh(
    #[case] shape: &[i64],
    #[case] names: &[&str],
    #[values(plane, volume, coarser, other)] case: fn() -> Case,
) {
    let want = dense(&case());
    assert!(want.numbers.len() >= 10 && want.prediction.abs().max().double_value(&[]) > 1e-3);
    let folder = tempdir().unwrap();
    let ranks = shape.iter().product::<i64>() as usize;
    let all = threads::run(ranks, Duration::from_secs(120), |world| {
        let case = case();
        let _rank = DistributedManager::bind_thread(&world);
        let mesh = DeviceMesh::new(&world, shape, names).unwrap();
        let mut store = store();
        let (mut params, ranks) = on_mesh(&mut store, &mesh, &world, &case.model.sharding(), true).unwrap();
        let network = Network::new(case.model.build(&mut params).unwrap());
        let (parameters, buffers) = Parameters::on_mesh(&store, &mesh).unwrap();
        let layout = ShardedFields::new(&mesh, case.from).unwrap().with_targets(case.to).unwrap();
        let _guard = forbid_hidden_communication();
        train(&case, (layout, network), (&parameters, &buffers), &ranks, folder.path())
    });
    for found in all {
        assert_eq!(found.numbers.len(), want.numbers.len());
        for (got, want) in found.numbers.iter().zip(&want.numbers) {
            assert!((got - want).abs() <= 1e-9 * want.abs().max(1.0), "{got} {want}");
        }
        assert!((&found.prediction - &want.prediction).abs().max().double_value(&[]) < 1e-9);
    }
}

/// A rank's part of a finer grid is that of its part of the coarse one; other grids are split evenly.
#[test]
fn targets_are_split_as_outputs() {
    let windows = threads::run(3, Duration::from_secs(240), |world| {
        let mesh = DeviceMesh::new(&world, &[3], &["domain"]).unwrap();
        let fields = ShardedFields::new(&mesh, &[10, 8]).unwrap();
        let error = fields.clone().with_targets(&[40]).unwrap_err().to_string();
        assert!(error.contains("expected 2 extents"), "{error}");
        [[40, 32], [10, 16], [12, 4]]
            .map(|to| fields.clone().with_targets(&to).unwrap().targets().window(&to).unwrap()[0].clone())
    });
    assert_eq!(windows, [[0..16, 0..4, 0..4], [16..32, 4..8, 4..8], [32..40, 8..10, 8..12]]);
}

/// A grid of targets that the model's outputs are not on is an error before data are read.
#[test]
fn outputs_on_another_grid_are_refused() {
    let model = ModelConfig::new(OnGridConfig { outputs: vec![7, 5] });
    let fields = |targets: Option<&[usize]>| FieldSpec {
        source: "air.nc".to_owned(),
        extents: vec![10, 8],
        target_extents: targets.map(<[usize]>::to_vec),
        in_channels: 2,
        out_channels: 1,
        ..FieldSpec::default()
    };
    model.check(&fields(Some(&[7, 5]))).unwrap();
    for targets in [None, Some(&[7, 6][..])] {
        let error = model.check(&fields(targets)).unwrap_err().to_string();
        assert!(
            error.contains("the model's outputs have [7, 5]") && error.contains("output_extents"),
            "{error}"
        );
    }
}
