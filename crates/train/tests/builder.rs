//! `Trainer`: one answer on every mesh, and one error on all ranks.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_collectives::threads;
use isobar_data::InMemory;
use isobar_manager::DistributedManager;
use isobar_models::{
    Architecture, Batch, EdmPreconditionerConfig, EdmSampler, FnoConfig, GeoTransolverConfig, Mode, Model,
    ModelConfig, PerDim, Pix2PixConfig, SongUNetConfig,
};
use isobar_shard::{Init, Params, Placement, Scope, ShardTensor};
use isobar_train::{BoxError, DiffusionConfig, Error, Precision, Trainer, WeightsConfig, Window, Windows};
use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

/// This rank's window of waves of 12 by 10 points, from another phase on each `first`.
fn waves(window: &Window, samples: i64, first: i64) -> Result<InMemory, BoxError> {
    let line = |part: &std::ops::Range<usize>| {
        Tensor::f_arange_start(part.start as i64, part.end as i64, (Kind::Double, Device::Cpu))
    };
    let (rows, columns) = (line(&window[0])?.f_view([1, 1, -1, 1])?, line(&window[1])?);
    let phases = Tensor::f_arange_start(first, first + samples, (Kind::Double, Device::Cpu))?;
    let x = (rows * 0.5 + columns * 0.7 + phases.f_view([-1, 1, 1, 1])?).f_sin()?;
    Ok(InMemory::pairs(x.shallow_clone(), x.f_square()?)?)
}

fn fno() -> FnoConfig {
    FnoConfig {
        dimension: 2,
        num_fno_modes: PerDim::All(3),
        latent_channels: 4,
        num_fno_layers: 2,
        ..FnoConfig::new(1, 1)
    }
}

/// Losses of a run on so many ranks, or the error of each.
fn train(
    ranks: usize,
    names: &[&str],
    data: impl Fn(usize, &Window) -> Result<(InMemory, InMemory), BoxError> + Sync,
) -> Vec<Result<Vec<f64>, BoxError>> {
    train_with(ranks, names, data, &fno(), |trainer| trainer)
}

/// Losses, and behind them the validation error, of a run of another model with other settings.
fn train_with(
    ranks: usize,
    names: &[&str],
    data: impl Fn(usize, &Window) -> Result<(InMemory, InMemory), BoxError> + Sync,
    model: &impl Architecture,
    set: impl Fn(Trainer) -> Trainer + Sync,
) -> Vec<Result<Vec<f64>, BoxError>> {
    let folder = tempdir().unwrap();
    threads::run(ranks, Duration::from_secs(240), |world| {
        let _rank = DistributedManager::bind_thread(&world);
        let shape: Vec<i64> = names.iter().enumerate().map(|(at, _)| if at == 0 { -1 } else { 2 }).collect();
        let trainer = Trainer::new(folder.path().join("run")).mesh(&shape, names);
        let trainer = trainer.precision(Precision::Float64).epochs(2).batch_size(3).seed(5);
        let summary = set(trainer).fit_architecture(&[12, 10], |window| data(world.rank(), window), model)?;
        Ok(summary.losses.into_iter().chain(summary.validation_error).collect())
    })
}

/// Twice as fine as its inputs.
fn finer() -> Pix2PixConfig {
    Pix2PixConfig {
        conv_layer_size: 4,
        n_downsampling: 1,
        n_upsampling: 2,
        n_blocks: 1,
        ..Pix2PixConfig::new(1, 1, 2)
    }
}

/// Each rank reads its windows of both grids; a grid that the outputs are not on is an error of all ranks.
#[test]
fn targets_on_a_grid_of_their_own_train_alike_on_every_mesh() {
    let train = |ranks: usize, names: &[&str], targets: [usize; 2]| {
        let folder = tempdir().unwrap();
        threads::run(ranks, Duration::from_secs(240), |world| {
            let _rank = DistributedManager::bind_thread(&world);
            let shape: Vec<i64> =
                names.iter().enumerate().map(|(at, _)| if at == 0 { -1 } else { 2 }).collect();
            let pairs = |windows: &Windows, samples, first| -> Result<InMemory, BoxError> {
                let [from, to] =
                    [waves(&windows.inputs, samples, first)?, waves(&windows.targets, samples, first)?];
                Ok(InMemory::pairs(from.inputs().shallow_clone(), to.inputs().shallow_clone())?)
            };
            let trainer =
                Trainer::new(folder.path().join("run")).mesh(&shape, names).target_extents(&targets);
            let trainer = trainer.precision(Precision::Float64).epochs(2).batch_size(3).seed(5);
            let data = |windows: &Windows| Ok((pairs(windows, 8, 0)?, pairs(windows, 2, 8)?));
            let summary = trainer.fit_architecture(&[12, 10], data, &finer())?;
            Ok::<_, BoxError>(
                summary.losses.into_iter().chain(summary.validation_error).collect::<Vec<f64>>(),
            )
        })
    };
    let whole = train(1, &["data"], [24, 20]).remove(0).unwrap();
    for (ranks, names) in
        [(2, &["domain"][..]), (3, &["domain"]), (4, &["domain", "domain_y"]), (4, &["data", "domain"])]
    {
        for losses in train(ranks, names, [24, 20]) {
            let losses = losses.unwrap();
            assert_eq!(losses.len(), whole.len(), "{names:?}");
            for (got, want) in losses.iter().zip(&whole) {
                assert!((got - want).abs() <= 1e-9 * want.abs(), "{names:?}: {losses:?} {whole:?}");
            }
        }
    }
    for result in train(2, &["domain"], [24, 10]) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("[24, 10]") && error.contains("[24, 20]"), "{error}");
    }
}

/// The noise of training and of sampling is that of the whole batch, and of all validation samples.
fn denoiser() -> EdmPreconditionerConfig {
    let network = SongUNetConfig {
        model_channels: 4,
        channel_mult: vec![1, 2],
        num_blocks: 1,
        attn_resolutions: vec![],
        dropout: 0.0,
        ..SongUNetConfig::new([12, 10], 2, 1)
    };
    EdmPreconditionerConfig::new(ModelConfig::new(network))
}

/// The network of a first stage would not be called.
#[test]
fn a_task_with_a_first_stage_is_refused() {
    let folder = tempdir().unwrap();
    let task = DiffusionConfig { regression: Some("runs/first".into()), ..DiffusionConfig::default() };
    let read = |_: &Windows| Err("no data are read".into());
    let trainer = Trainer::new(folder.path()).objective(task);
    let error = trainer.fit_architecture(&[12, 10], read, &denoiser()).unwrap_err().to_string();
    assert!(error.contains("regression = runs/first") && error.contains("`isobar train`"), "{error}");
}

fn two_steps(trainer: Trainer) -> Trainer {
    drawing(1, trainer)
}

fn drawing(members: usize, trainer: Trainer) -> Trainer {
    let sampler = EdmSampler { num_steps: 2, s_churn: 1.0, ..EdmSampler::default() };
    trainer.objective(DiffusionConfig { members, sampler, ..DiffusionConfig::default() })
}

#[rstest]
fn a_configured_model_trains_alike_on_every_mesh(#[values(false, true)] denoises: bool) {
    let data = |_: usize, window: &Window| Ok((waves(window, 8, 0)?, waves(window, 2, 8)?));
    let train = |ranks: usize, names: &[&str]| match denoises {
        false => train(ranks, names, data),
        true => train_with(ranks, names, data, &denoiser(), two_steps),
    };
    let whole = train(1, &["data"]).remove(0).unwrap();
    assert_eq!(whole.len(), 7, "{whole:?}");
    for (ranks, names) in
        [(2, &["data"][..]), (2, &["domain"]), (3, &["domain"]), (4, &["data", "domain"]), (2, &["shard"])]
    {
        for losses in train(ranks, names) {
            let losses = losses.unwrap();
            assert_eq!(losses.len(), whole.len(), "{names:?}");
            for (got, want) in losses.iter().zip(&whole) {
                assert!((got - want).abs() <= 1e-9 * want.abs(), "{names:?}: {losses:?} {whole:?}");
            }
        }
    }
}

/// The loss includes the entropies of the dropout probabilities, and these are trained. Blocks that are recomputed give their
/// parameters' gradients in a pass of their own, while buckets of others are reduced already.
#[test]
fn trained_dropout_is_regularized_alike_on_every_mesh() {
    let data = |_: usize, window: &Window| Ok((waves(window, 8, 0)?, waves(window, 2, 8)?));
    let model = GeoTransolverConfig {
        geometry_dim: Some(2),
        n_hidden: 8,
        n_head: 2,
        n_layers: 2,
        slice_num: 3,
        concrete_dropout: true,
        ..GeoTransolverConfig::new(1, 1)
    };
    let train = |ranks: usize, names: &[&str], regularization: f64, recomputes: bool, accumulate: usize| {
        let weights = WeightsConfig { regularization, ..WeightsConfig::default() };
        let model = GeoTransolverConfig { gradient_checkpointing: recomputes, ..model.clone() };
        train_with(ranks, names, data, &model, |trainer| {
            trainer.weights(weights.clone(), None).configure(|config| {
                config.train.accumulate = accumulate;
                config.data_parallel.bucket_mb = 1e-9;
            })
        })
    };
    let [without, whole] = [0.0, 0.5].map(|weight| train(1, &["data"], weight, false, 1).remove(0).unwrap());
    // p ln p + (1 − p) ln(1 − p) of each layer, which starts with p = 0.05.
    let entropy = 0.05 * 0.05f64.ln() + 0.95 * 0.95f64.ln();
    let layers = (whole[0] - without[0]) / (0.5 * entropy);
    assert!(layers > 1.5 && (layers - layers.round()).abs() < 1e-5, "{layers}");
    let last = whole.len() - 2;
    let change = whole[last] - without[last] - 0.5 * entropy * layers;
    assert!(change.abs() > 1e-6, "the probabilities do not learn: {whole:?} {without:?}");
    for (ranks, names, recomputes, accumulate) in [
        (1, &["data"][..], false, 3),
        (2, &["data"], false, 1),
        (2, &["data"], true, 2),
        (3, &["domain"], true, 1),
        (4, &["data", "domain"], false, 1),
        (2, &["shard"], true, 2),
        (3, &["shard"], false, 1),
        (4, &["shard"], true, 1),
        (4, &["shard", "domain"], true, 1),
    ] {
        for losses in train(ranks, names, 0.5, recomputes, accumulate) {
            let losses = losses.unwrap();
            assert_eq!(losses.len(), whole.len(), "{names:?}");
            for (got, want) in losses.iter().zip(&whole) {
                assert!((got - want).abs() <= 1e-9 * want.abs(), "{names:?}: {losses:?} {whole:?}");
            }
        }
    }
}

/// The mean of several samples is closer than one, and the same on every mesh.
#[test]
fn a_denoiser_draws_an_ensemble() {
    let data = |_: usize, window: &Window| Ok((waves(window, 8, 0)?, waves(window, 2, 8)?));
    let error = |ranks: usize, names: &[&str], members: usize| {
        let numbers =
            train_with(ranks, names, data, &denoiser(), |trainer| drawing(members, trainer)).remove(0);
        *numbers.unwrap().last().unwrap()
    };
    let (one, several) = (error(1, &["data"], 1), error(1, &["data"], 4));
    assert!(several < one, "{several} of four, {one} of one");
    let split = error(4, &["data", "domain"], 4);
    assert!((split - several).abs() <= 1e-9 * several, "{split} {several}");
}

#[test]
fn ranks_with_other_samples_are_an_error_of_all() {
    // Another number of samples, and as many with other values.
    let fewer = |rank: usize, window: &Window| Ok((waves(window, 8 - rank as i64, 0)?, waves(window, 2, 8)?));
    let others = |rank: usize, window: &Window| Ok((waves(window, 8, rank as i64)?, waves(window, 2, 8)?));
    // One rank of four alone, which shares its window with another.
    let one =
        |rank: usize, window: &Window| Ok((waves(window, 8, i64::from(rank == 2))?, waves(window, 2, 8)?));
    for (results, words) in [
        (train(2, &["domain"], fewer), "7 samples of 1 steps"),
        (train(2, &["data"], others), "but of other values"),
        (train(4, &["data", "domain"], one), "ranks 0 and 2 read different samples"),
    ] {
        for result in results {
            let error = result.unwrap_err();
            assert!(matches!(error.downcast_ref(), Some(Error::SamplesDiffer { .. })), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}

#[test]
fn a_rank_that_cannot_read_fails_all() {
    let data = |rank: usize, window: &Window| match rank {
        1 => Err("the tape is torn".into()),
        _ => Ok((waves(window, 8, 0)?, waves(window, 2, 8)?)),
    };
    for result in train(3, &["domain"], data) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("the tape is torn"), "{error}");
    }
}

#[test]
fn values_that_are_not_finite_are_named() {
    let data = |_: usize, window: &Window| {
        let all = waves(window, 8, 0)?;
        let hole = all.targets().f_mul_scalar(f64::NAN)?;
        Ok((InMemory::pairs(all.inputs().shallow_clone(), hole)?, waves(window, 2, 8)?))
    };
    for result in train(2, &["domain"], data) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("channel 0") && error.contains("finite"), "{error}");
    }
}

/// Every rank has an error that says what is wrong with the samples of `data`, wherever it is wrong.
#[test]
fn samples_that_do_not_fit_are_refused() {
    type Change = fn(usize, InMemory) -> Result<InMemory, BoxError>;
    let cases: [(Change, &[&str]); 6] = [
        (
            |_, _| waves(&[0..12, 0..10], 8, 0),
            &["the shape of the training inputs is [8, 1, 12, 10]", "`Windows`"],
        ),
        (
            |rank, own| if rank == 1 { waves(&[0..12, 0..10], 8, 0) } else { Ok(own) },
            &["the shape of the training inputs is [8, 1, 12, 10]", "[sample, channel, 6, 10]"],
        ),
        (
            |_, own| Ok(InMemory::pairs(own.inputs().f_squeeze_dim(1)?, own.targets().f_squeeze_dim(1)?)?),
            &["is [8, 6, 10], expected [sample, channel, 6, 10]"],
        ),
        (
            |_, own| Ok(InMemory::pairs(own.inputs().f_narrow(0, 0, 0)?, own.targets().f_narrow(0, 0, 0)?)?),
            &["the number of training samples"],
        ),
        (
            |_, own| Ok(InMemory::pairs(own.inputs().f_zeros_like()?, own.targets().shallow_clone())?),
            &["channel 0 of the training inputs is 0", "Trainer::normalize(false)"],
        ),
        (
            |rank, own| match rank {
                1 => Ok(InMemory::pairs(
                    own.inputs().f_mul_scalar(f64::INFINITY)?,
                    own.targets().shallow_clone(),
                )?),
                _ => Ok(own),
            },
            &["channel 0 of the training inputs is not finite"],
        ),
    ];
    for (change, words) in cases {
        let data =
            |rank: usize, window: &Window| Ok((change(rank, waves(window, 8, 0)?)?, waves(window, 2, 8)?));
        for result in train(2, &["domain"], data) {
            let error = result.unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}

#[test]
fn settings_are_refused_before_any_data_are_read() {
    let data = |_: usize, _: &Window| Err("no data are read".into());
    let refused = |names: &[&str], set: fn(Trainer) -> Trainer| {
        let mut results = train_with(2, names, data, &fno(), set);
        results.remove(0).unwrap_err().to_string()
    };
    let text = refused(&["domain"], |trainer| trainer.batch_size(0));
    assert!(text.contains("train.batch_size is 0") && text.ends_with("`Trainer::batch_size`"), "{text}");
    let text = refused(&["domain"], |trainer| trainer.target_extents(&[0, 10]));
    assert!(text.contains("[0, 10]"), "{text}");
}

/// A model that reads no axis `model` is replicated along it; gradients need another axis.
#[test]
fn a_mesh_of_the_axis_model_alone_is_refused() {
    struct Scaled<A>(A);
    impl<A: isobar_array::Array> Model<A> for Scaled<A> {
        fn forward(&self, batch: &Batch<A>, _mode: Mode<'_>) -> isobar_models::Result<Batch<A>> {
            Ok(Batch::of_fields(batch.require("scaled", Batch::<A>::FIELDS)?.mul(&self.0)?))
        }
    }
    let run = |shape: &'static [i64], names: &'static [&'static str]| {
        let folder = tempdir().unwrap();
        threads::run(2, Duration::from_secs(60), |world| {
            let _rank = DistributedManager::bind_thread(&world);
            let trainer = Trainer::new(folder.path().join("run")).mesh(shape, names).epochs(1);
            let data = |windows: &Windows| Ok((waves(windows, 4, 0)?, waves(windows, 2, 4)?));
            let build = |params: &mut Scope<'_, ShardTensor>| {
                Ok::<_, isobar_shard::Error>(Scaled(params.param(
                    "factor",
                    &[1],
                    Init::Constant(1.0),
                    Placement::Replicate,
                )?))
            };
            trainer.fit(&[12, 10], data, build).map(drop)
        })
    };
    for result in run(&[-1], &["model"]) {
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("the axis \"model\" alone") && error.contains("[\"data\", \"model\"]"),
            "{error}"
        );
    }
    for result in run(&[1, -1], &["data", "model"]) {
        result.unwrap();
    }
}
