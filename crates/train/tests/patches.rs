//! Diffusion on patches: its meaning, and over meshes against one rank.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;
use std::time::Duration;

use isobar_array::{Array, Generator};
use isobar_collectives::threads;
use isobar_data::{InMemory, Normalizer};
use isobar_manager::{DeviceMesh, DistributedManager};
use isobar_models::{
    Batch, BatchPart, EdmLoss, EdmPreconditionerConfig, EdmSampler, FnoConfig, GridPositions, GridType, Mode,
    Model, ModelConfig, Patching, PerDim, Sharding, SigmaData, SongUNetConfig, SongUNetPosEmbdConfig,
};
use isobar_shard::{ParamStore, forbid_hidden_communication};
use isobar_train::objective::{Objective, Setup};
use isobar_train::{
    Conditions, DenseFields, DiffusionConfig, FieldLayout, FieldTask, Forward, Network, PatchConfig,
    Regression, ShardedFields, Step, Task, on_mesh,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common;

const EXTENTS: [usize; 2] = [14, 12];
const SAMPLES: usize = 3;
const INPUTS: i64 = 2;
/// Output channels.
const OUTPUTS: i64 = 1;

fn patches(condition_on_input: bool) -> PatchConfig {
    PatchConfig { patch_shape: [8, 6], patch_num: 2, overlap_pix: 2, boundary_pix: 1, condition_on_input }
}

fn sampler() -> EdmSampler {
    EdmSampler { num_steps: 2, s_churn: 1.0, ..EdmSampler::default() }
}

fn store() -> ParamStore {
    ParamStore::new(Generator::new(3)).with_options(Kind::Double, Device::Cpu)
}

/// A window of fields `[sample, channel, rows, columns]`.
fn fields(seed: u64, channels: i64, window: &[Range<usize>]) -> Tensor {
    common::cut(common::drawn(seed, &[SAMPLES, channels as usize, EXTENTS[0], EXTENTS[1]]), window)
}

fn whole() -> [Range<usize>; 2] {
    EXTENTS.map(|extent| 0..extent)
}

/// The denoiser: one channel of noise, conditions, and four channels of positions.
fn denoiser(conditions: i64, gridtype: GridType) -> ModelConfig {
    let network = SongUNetConfig {
        model_channels: 4,
        channel_mult: vec![1, 2],
        num_blocks: 1,
        attn_resolutions: vec![],
        dropout: 0.3,
        ..SongUNetConfig::new(EXTENTS, (OUTPUTS + conditions) as usize + 4, OUTPUTS as usize)
    };
    let config = SongUNetPosEmbdConfig { positions: GridPositions { gridtype, n_grid_channels: 4 }, network };
    ModelConfig::new(EdmPreconditionerConfig::new(ModelConfig::new(config)))
}

/// Moves the parameters that start at 0, so that outputs depend on all inputs. Trained positions are drawn already.
fn perturb(store: &ParamStore) {
    let _no_grad = tch::no_grad_guard();
    for parameter in store.trainable().filter(|parameter| !parameter.name.ends_with("pos_embd")) {
        let mut tensor = parameter.tensor.shallow_clone();
        let count = tensor.numel() as i64;
        let wave = (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.37).sin() * 0.1;
        let _ = tensor.f_add_(&wave.view_as(&tensor)).unwrap();
    }
}

fn dense(config: &ModelConfig) -> Box<dyn Model<Tensor>> {
    let mut store = store();
    let model = config.build::<Tensor>(&mut store).unwrap();
    perturb(&store);
    model
}

/// The network of a denoiser that is trained on patches.
fn denoising<A: Array>(members: usize, patches: PatchConfig, model: Box<dyn Model<A>>) -> Network<A> {
    let config =
        DiffusionConfig { members, sampler: sampler(), patches: Some(patches), ..DiffusionConfig::default() };
    Network::new(model).denoising(Some(SigmaData::All(0.5).into())).objective(config, 3)
}

fn task<L: FieldLayout, F: Forward<L::Array>>(layout: L, forward: F) -> FieldTask<L, F> {
    let window = layout.window(&EXTENTS).unwrap();
    let samples =
        || Box::new(InMemory::pairs(fields(1, INPUTS, &window), fields(2, OUTPUTS, &window)).unwrap());
    let scale = || Normalizer::new(0.0, 1.0).unwrap();
    common::task(common::model(layout, forward, scale(), scale(), "y"), samples(), samples())
}

/// The loss of a step, computed in parts of the batch, and the prediction of all samples.
fn results<L: FieldLayout, F: Forward<L::Array>>(
    task: &FieldTask<L, F>,
    parts: &[&[usize]],
) -> (Tensor, L::Array) {
    let mut loss = Tensor::from(0.0f64);
    for samples in parts {
        let generator = Generator::new(4);
        let step = Step { epoch: 0, offset: samples[0] as i64, total: SAMPLES as i64, generator: &generator };
        loss += task.loss(step, samples).unwrap() * (samples.len() as f64 / SAMPLES as f64);
    }
    let prediction = task.predict(&*task.validation, &[0, 1, 2]).unwrap().remove(0);
    (loss, prediction)
}

/// Patches of a sample at these corners, cut by slices.
fn cut(x: &Tensor, corners: &[[i64; 2]]) -> Tensor {
    let each = |sample: i64| corners.iter().map(move |&[row, column]| (sample, row, column));
    let parts: Vec<Tensor> = (0..x.size()[0])
        .flat_map(each)
        .map(|(sample, row, column)| x.narrow(0, sample, 1).narrow(2, row, 8).narrow(3, column, 6))
        .collect();
    Tensor::cat(&parts, 0)
}

fn places(corners: &[[i64; 2]]) -> Tensor {
    let line = |start: i64, count: i64| Tensor::arange(count, (Kind::Int64, Device::Cpu)) + start;
    let each = corners.iter().map(|&[row, column]| {
        let rows = line(row, 8).view([8, 1]).expand([8, 6], false);
        let columns = line(column, 6).view([1, 6]).expand([8, 6], false);
        Tensor::stack(&[rows, columns], 0)
    });
    Tensor::stack(&each.collect::<Vec<_>>(), 0)
}

/// The whole input at the points of a patch, once for each patch.
fn interpolated(x: &Tensor, count: i64) -> Tensor {
    x.upsample_bilinear2d([8, 6], false, None, None).repeat_interleave_self_int(count, 0, None)
}

/// The loss of the denoiser on random patches, written out.
#[rstest]
fn the_loss_is_that_of_random_patches(#[values(false, true)] condition_on_input: bool) {
    let conditions = if condition_on_input { 2 * INPUTS } else { INPUTS };
    let config = denoiser(conditions, GridType::Sinusoidal);
    let network = denoising(1, patches(condition_on_input), dense(&config));
    let (loss, _) = results(&task(DenseFields, network), &[&[0, 1, 2]]);

    let generator = Generator::new(4);
    let drawn = Patching::random([14, 12], [8, 6], 2, &generator).unwrap();
    let (x, y) = (fields(1, INPUTS, &whole()), fields(2, OUTPUTS, &whole()));
    let mut given = cut(&x, drawn.corners());
    if condition_on_input {
        given = Tensor::cat(&[given, interpolated(&x, 2)], 1);
    }
    let model = dense(&config);
    let part = BatchPart { offset: 0, total: 6 };
    let want = EdmLoss { sigma_data: SigmaData::All(0.5), ..EdmLoss::default() }
        .draw(&cut(&y, drawn.corners()), &generator, Some(part), |noisy, sigma| {
            let batch = Batch::of_fields(noisy.shallow_clone())
                .with("sigma", sigma.shallow_clone())
                .with("conditions", given.shallow_clone())
                .with("global_index", places(drawn.corners()));
            let mode = Mode::train_part(&generator, 0, 6);
            Ok(model.forward(&batch, mode)?.take("fields").unwrap())
        })
        .unwrap();
    let (got, want) = (loss.double_value(&[]), want.double_value(&[]));
    assert!((got - want).abs() <= 1e-12 * want, "{got} {want}");
}

/// A prediction by overlapping patches, written out: patches of 8 × 6 points every 5 rows and 3 columns, from one point before the
/// fields.
#[rstest]
fn predictions_are_the_means_of_overlapping_patches(#[values(false, true)] condition_on_input: bool) {
    let conditions = if condition_on_input { 2 * INPUTS } else { INPUTS };
    let config = denoiser(conditions, GridType::Sinusoidal);
    let network = denoising(1, patches(condition_on_input), dense(&config));
    let (_, prediction) = results(&task(DenseFields, network), &[&[0, 1, 2]]);

    let _no_grad = tch::no_grad_guard();
    let corners: Vec<[i64; 2]> =
        [-1, 2, 5, 8].iter().flat_map(|&column| [-1, 4, 9].map(|row| [row, column])).collect();
    let padded = |x: &Tensor| x.reflection_pad2d([1, 2, 1, 3]);
    let shifted: Vec<[i64; 2]> = corners.iter().map(|&[row, column]| [row + 1, column + 1]).collect();
    let x = fields(1, INPUTS, &whole());
    let mut given = cut(&padded(&x), &shifted);
    if condition_on_input {
        given = Tensor::cat(&[given, interpolated(&x, 12)], 1);
    }
    // Places of the points outside the fields are those of their reflections.
    let line = |count: i64| Tensor::arange(count, (Kind::Double, Device::Cpu));
    let grid = Tensor::stack(
        &[line(14).view([14, 1]).expand([14, 12], false), line(12).view([1, 12]).expand([14, 12], false)],
        0,
    );
    let index = cut(&padded(&grid.unsqueeze(0)), &shifted).to_kind(Kind::Int64);
    let model = dense(&config);
    let like = Tensor::zeros([3, OUTPUTS, 14, 12], (Kind::Double, Device::Cpu));
    let want = sampler()
        .sample(&like, &Generator::new(3), None, |noisy, sigma| {
            let batch = Batch::of_fields(cut(&padded(noisy), &shifted))
                .with("sigma", Tensor::from_slice(&[sigma]))
                .with("conditions", given.shallow_clone())
                .with("global_index", index.shallow_clone());
            let denoised = model.forward(&batch, Mode::Eval)?.take("fields").unwrap();
            let (sum, count) = (padded(noisy).zeros_like(), padded(noisy).zeros_like());
            for sample in 0..3 {
                for (number, &[row, column]) in (0..).zip(&shifted) {
                    let at = |x: &Tensor| x.select(0, sample).narrow(1, row, 8).narrow(2, column, 6);
                    let _ = at(&sum).f_add_(&denoised.select(0, sample * 12 + number)).unwrap();
                    let _ = at(&count).f_add_scalar_(1.0).unwrap();
                }
            }
            Ok((sum / count).narrow(2, 1, 14).narrow(3, 1, 12))
        })
        .unwrap();
    let far = (prediction - want).abs().max().double_value(&[]);
    assert!(far < 1e-10, "{far}");
}

/// Patches belong to the step, and noise and dropout to a sample's place in the batch.
#[test]
fn parts_of_a_batch_give_the_loss_of_all() {
    let network = || {
        let model = dense(&denoiser(2 * INPUTS, GridType::Sinusoidal));
        denoising(1, patches(true), model)
    };
    let (want, _) = results(&task(DenseFields, network()), &[&[0, 1, 2]]);
    let (got, _) = results(&task(DenseFields, network()), &[&[0], &[1, 2]]);
    assert!((got - &want).abs().double_value(&[]) <= 1e-12 * want.double_value(&[]));
}

/// The loss and an ensemble: after a regression whose prediction is a condition.
#[rstest]
#[case::given_positions(GridType::Sinusoidal, true)]
#[case::trained_positions(GridType::Learnable, false)]
fn patches_are_the_same_on_every_mesh(#[case] gridtype: GridType, #[case] condition_on_input: bool) {
    let conditions = OUTPUTS + if condition_on_input { 2 * INPUTS } else { INPUTS };
    let run = |ranks: usize, shape: &[i64], names: &[&str]| {
        threads::run(ranks, Duration::from_secs(120), |world| {
            let _rank = DistributedManager::bind_thread(&world);
            let mesh = DeviceMesh::new(&world, shape, names).unwrap();
            let (mut of_first, mut of_second) = (store(), store());
            let (mut params, _) = on_mesh(&mut of_first, &mesh, &world, &Sharding::new(), false).unwrap();
            let fno = FnoConfig {
                dimension: 2,
                num_fno_modes: PerDim::All(2),
                latent_channels: 4,
                num_fno_layers: 1,
                ..FnoConfig::new(INPUTS as usize, OUTPUTS as usize)
            };
            let regression = Network::new(ModelConfig::new(fno).build(&mut params).unwrap());
            let scales = [Normalizer::new(0.0, 1.0).unwrap(), Normalizer::new(0.0, 1.0).unwrap()];
            let regression = Regression::new(regression, scales).conditioning(true);
            let config = denoiser(conditions, gridtype);
            let (mut params, _) = on_mesh(&mut of_second, &mesh, &world, &config.sharding(), true).unwrap();
            let network = config.build(&mut params).unwrap();
            perturb(&of_second);
            let forward = denoising(2, patches(condition_on_input), network).after(Some(regression));
            let layout = ShardedFields::new(&mesh, &EXTENTS).unwrap();
            let _guard = forbid_hidden_communication();
            let (loss, prediction) = results(&task(layout, forward), &[&[0, 1, 2]]);
            (loss.double_value(&[]), prediction.full_tensor(None).unwrap())
        })
    };
    let (loss, prediction) = run(1, &[1], &["domain"]).remove(0);
    assert!(prediction.abs().max().double_value(&[]) > 0.1);
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

#[test]
fn conditions_of_samples_beside_the_whole_input_are_refused() {
    let network = denoising(1, patches(true), dense(&denoiser(2 * INPUTS, GridType::Sinusoidal)))
        .conditioned(Some(Conditions { count: 1, behind: 0 }));
    let task = task(DenseFields, network);
    let error = task.predict(&*task.validation, &[0]).unwrap_err();
    let error = text(&*error);
    assert!(error.contains("does not support conditions of samples"), "{error}");
}

/// An error and its causes.
fn text(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

#[test]
fn patches_without_points_are_refused() {
    let refused = |patches| {
        let config = DiffusionConfig { patches: Some(patches), ..DiffusionConfig::default() };
        let setup = Setup { denoiser: Some(SigmaData::All(0.5).into()), ..Setup::default() };
        config.check(&setup).unwrap_err().to_string()
    };
    let none = PatchConfig { patch_shape: [0, 4], ..patches(true) };
    let error = refused(none);
    let expected = "task.patches.patch_shape is [0, 4], expected 1 row and 1 column at least; --set task.patches.patch_shape=[16,16]";
    assert_eq!(error, expected);
    for patch_num in [0, usize::MAX] {
        let wrong = PatchConfig { patch_num, ..patches(true) };
        let error = refused(wrong);
        assert!(error.contains(&format!("patch_num is {patch_num}, expected 1 to 65536")), "{error}");
    }
    let error = patches(true).check_extents(&[8, 8, 8]).unwrap_err().to_string();
    assert!(error.contains("task.patches needs fields of two dims"), "{error}");
    let error = patches(true).check_extents(&[1, 1]).unwrap_err().to_string();
    assert!(error.ends_with("those of the grid; --set task.patches.patch_shape=[1,1]"), "{error}");
}

/// Each error names its key, and a value that works.
#[rstest]
#[case(|c: &mut DiffusionConfig| c.p_mean = 1e10, "task.p_mean is 10000000000.0 with p_std 1.2", "--set task.p_mean=-1.2")]
#[case(|c: &mut DiffusionConfig| c.p_std = -1.0, "task.p_std is -1.0", "--set task.p_std=1.2")]
#[case(|c: &mut DiffusionConfig| c.sampler.sigma_min = 0.0, "task.sampler.sigma_min is 0", "--set task.sampler.sigma_min=0.002")]
#[case(|c: &mut DiffusionConfig| c.sampler.s_churn = 1e300, "task.sampler.S_churn is 1e300, expected a number from 0 to 1000000", "--set task.sampler.S_churn=0.0")]
#[case(
    |c: &mut DiffusionConfig| (c.sampler.s_min, c.sampler.s_max) = (5.0, Some(1.0)),
    "task.sampler.S_max is 1, expected at least S_min = 5",
    "leave it out for no upper limit"
)]
#[case(|c: &mut DiffusionConfig| c.regression = Some("".into()), "task.regression is \"\"", "--set task.regression=runs/NAME")]
fn settings_of_diffusion_are_named(
    #[case] change: fn(&mut DiffusionConfig),
    #[case] starts: &str,
    #[case] ends: &str,
) {
    let setup = Setup { denoiser: Some(SigmaData::All(0.5).into()), train_steps: 1, ..Setup::default() };
    let mut config = DiffusionConfig::default();
    config.check(&setup).unwrap();
    change(&mut config);
    let error = config.check(&setup).unwrap_err().to_string();
    assert!(error.starts_with(starts) && error.ends_with(ends), "{error}");
}
