//! A denoiser of what a regression lacks of the targets: its meaning, and over meshes against one rank.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;
use std::time::Duration;

use isobar_array::Generator;
use isobar_collectives::threads;
use isobar_data::{InMemory, Normalizer};
use isobar_manager::{DeviceMesh, DistributedManager};
use isobar_models::{
    EdmPreconditionerConfig, EdmSampler, FnoConfig, ModelArray, ModelConfig, PerDim, Sharding, SigmaData,
    SongUNetConfig,
};
use isobar_shard::{ParamStore, Params};
use isobar_train::{
    DenseFields, DiffusionConfig, FieldLayout, FieldTask, Forward, Network, Regression, ShardedFields, Step,
    Task, on_mesh,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common;

const EXTENTS: [usize; 2] = [12, 10];
const SAMPLES: usize = 3;

fn store() -> ParamStore {
    ParamStore::new(Generator::new(3)).with_options(Kind::Double, Device::Cpu)
}

fn scales() -> [Normalizer; 2] {
    [Normalizer::new(0.5, 2.0).unwrap(), Normalizer::new(-1.0, 3.0).unwrap()]
}

/// A window of inputs or targets `[sample, 1, rows, columns]`.
fn fields(seed: u64, window: &[Range<usize>]) -> Tensor {
    common::cut(common::drawn(seed, &[SAMPLES, 1, EXTENTS[0], EXTENTS[1]]), window)
}

fn whole() -> [Range<usize>; 2] {
    EXTENTS.map(|extent| 0..extent)
}

/// The network of the first stage.
fn first<A: ModelArray>(params: &mut impl Params<Array = A>) -> Network<A> {
    let fno = FnoConfig {
        dimension: 2,
        num_fno_modes: PerDim::All(2),
        latent_channels: 4,
        num_fno_layers: 1,
        ..FnoConfig::new(1, 1)
    };
    Network::new(ModelConfig::new(fno).build(params).unwrap())
}

/// The denoiser, of as many members in a prediction.
fn second<A: ModelArray>(
    conditions: bool,
    members: usize,
    params: &mut impl Params<Array = A>,
) -> Network<A> {
    let unet = SongUNetConfig {
        model_channels: 4,
        channel_mult: vec![1, 2],
        num_blocks: 1,
        attn_resolutions: vec![],
        dropout: 0.0,
        ..SongUNetConfig::new(EXTENTS, 2 + usize::from(conditions), 1)
    };
    let denoiser = ModelConfig::new(EdmPreconditionerConfig::new(ModelConfig::new(unet)));
    let sampler = EdmSampler { num_steps: 2, s_churn: 1.0, ..EdmSampler::default() };
    let config = DiffusionConfig { members, sampler, ..DiffusionConfig::default() };
    let network = Network::new(denoiser.build(params).unwrap());
    network.denoising(Some(SigmaData::All(0.5).into())).objective(config, 3)
}

fn task<L: FieldLayout, F: Forward<L::Array>>(layout: L, forward: F, targets: &Tensor) -> FieldTask<L, F> {
    let window = layout.window(&EXTENTS).unwrap();
    let [input, target] = scales();
    let samples = || Box::new(InMemory::pairs(fields(1, &window), targets.shallow_clone()).unwrap());
    common::task(common::model(layout, forward, input, target, "y"), samples(), samples())
}

/// The loss of a step and the prediction of all samples.
fn results<L: FieldLayout, F: Forward<L::Array>>(task: &FieldTask<L, F>) -> (f64, L::Array) {
    let generator = Generator::new(4);
    let step = Step { epoch: 0, offset: 0, total: SAMPLES as i64, generator: &generator };
    let loss = task.loss(step, &[0, 1, 2]).unwrap().double_value(&[]);
    let prediction = task.predict(&*task.validation, &[0, 1, 2]).unwrap().remove(0);
    (loss, prediction)
}

/// The loss is that of a denoiser of y − R(x), and a prediction is R(x) more than that denoiser's.
#[rstest]
fn the_denoiser_is_of_the_residual(#[values(1, 3)] members: usize) {
    let (input, target) = (fields(1, &whole()), fields(2, &whole()));
    let [of_inputs, of_targets] = scales();
    let mean = {
        let _no_grad = tch::no_grad_guard();
        let batch = isobar_models::Batch::of_fields(of_inputs.encode(&input).unwrap());
        first(&mut store()).forward(batch, None).unwrap() * of_targets.std()[0]
    };
    assert!(mean.abs().max().double_value(&[]) > 0.01);
    let alone = task(DenseFields, second(false, members, &mut store()), &(&target - &mean));
    let regression = Regression::new(first(&mut store()), scales());
    let both = task(DenseFields, second(false, members, &mut store()).after(Some(regression)), &target);
    let ((loss, prediction), (want, drawn)) = (results(&both), results(&alone));
    assert!((loss - want).abs() <= 1e-12 * want, "{loss} {want}");
    assert!((prediction - drawn - mean).abs().max().double_value(&[]) < 1e-10);
}

/// A network of other scales is not the first stage of these data.
#[test]
fn other_scales_are_refused() {
    let [input, _] = scales();
    let regression = Regression::new(first(&mut store()), [input.clone(), input]);
    let both =
        task(DenseFields, second(false, 1, &mut store()).after(Some(regression)), &fields(2, &whole()));
    let error = both.predict(&*both.validation, &[0]).unwrap_err().to_string();
    assert!(error.contains("the regression was trained with targets of mean [0.5]"), "{error}");
}

#[rstest]
fn two_stages_are_the_same_on_every_mesh(#[values(false, true)] conditions: bool) {
    let run = |ranks: usize, shape: &[i64], names: &[&str]| {
        threads::run(ranks, Duration::from_secs(240), |world| {
            let _rank = DistributedManager::bind_thread(&world);
            let mesh = DeviceMesh::new(&world, shape, names).unwrap();
            let (mut of_first, mut of_second) = (store(), store());
            let (mut params, _) = on_mesh(&mut of_first, &mesh, &world, &Sharding::new(), false).unwrap();
            let regression = Regression::new(first(&mut params), scales()).conditioning(conditions);
            let (mut params, _) = on_mesh(&mut of_second, &mesh, &world, &Sharding::new(), true).unwrap();
            let forward = second(conditions, 2, &mut params).after(Some(regression));
            let layout = ShardedFields::new(&mesh, &EXTENTS).unwrap();
            let targets = fields(2, &layout.window(&EXTENTS).unwrap());
            let (loss, prediction) = results(&task(layout, forward, &targets));
            (loss, prediction.full_tensor(None).unwrap())
        })
    };
    let (loss, prediction) = run(1, &[1], &["domain"]).remove(0);
    for (ranks, shape, names) in [
        (2, &[2][..], &["domain"][..]),
        (3, &[3], &["domain"]),
        (4, &[4], &["domain"]),
        (4, &[2, 2], &["domain", "domain_y"]),
    ] {
        let each = run(ranks, shape, names);
        let mean: f64 = each.iter().map(|(loss, _)| loss).sum::<f64>() / ranks as f64;
        assert!((mean - loss).abs() <= 1e-10 * loss, "{names:?}: {mean} {loss}");
        for (_, got) in &each {
            assert!((got - &prediction).abs().max().double_value(&[]) < 1e-10, "{names:?}");
        }
    }
}
