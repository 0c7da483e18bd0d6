//! Weights of a trained run, exported under the names of the model's source: a fresh model computes the same with them.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::time::Duration;

use isobar_array::Generator;
use isobar_collectives::threads;
use isobar_data::InMemory;
use isobar_manager::DistributedManager;
use isobar_models::{
    Architecture, Batch, GeoTransolverConfig, Mode, ModelConfig, Normalization, UNetConfig, UNetPadding,
    Upsampling,
};
use isobar_shard::ParamStore;
use isobar_train::checkpoint::export;
use isobar_train::{FitConfig, Precision, Summary, Trainer, Window};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
/// Rows and columns, which no mesh divides.
const EXTENTS: [usize; 2] = [13, 11];

/// A window of waves of another phase for each sample, and of their squares.
fn waves(window: &Window, first: i64, samples: i64) -> [Tensor; 2] {
    let line =
        |range: &std::ops::Range<usize>| Tensor::arange_start(range.start as i64, range.end as i64, DOUBLE);
    let phases = Tensor::arange_start(first, first + samples, DOUBLE).view([-1, 1, 1, 1]);
    let x = (line(&window[0]).view([1, 1, -1, 1]) * 0.5 + line(&window[1]) * 0.7 + phases).sin();
    [x.shallow_clone(), x.square()]
}

fn training(window: &Window) -> [Tensor; 2] {
    waves(window, 0, 6)
}

fn validation(window: &Window) -> [Tensor; 2] {
    waves(window, 6, 2)
}

/// A run on so many ranks.
fn run(
    model: &impl Architecture,
    (shape, names): (&[i64], &[&str]),
    folder: &Path,
    change: impl Fn(&mut FitConfig) + Sync,
) -> Summary {
    let ranks = shape.iter().product::<i64>() as usize;
    let summaries = threads::run(ranks, Duration::from_secs(120), |world| {
        let _rank = DistributedManager::bind_thread(&world);
        let pairs = |[x, y]: [Tensor; 2]| InMemory::pairs(x, y);
        let trainer = Trainer::new(folder).mesh(shape, names).precision(Precision::Float64).normalize(false);
        trainer
            .epochs(2)
            .batch_size(3)
            .seed(5)
            .configure(&change)
            .fit_architecture(
                &EXTENTS,
                |window| Ok((pairs(training(window))?, pairs(validation(window))?)),
                model,
            )
            .unwrap()
    });
    summaries.into_iter().next().unwrap()
}

/// The relative L2 error of a model that is made anew with the weights of a file.
fn error_with(model: &ModelConfig, weights: &Path) -> f64 {
    let mut store = ParamStore::new(Generator::new(99)).with_options(Kind::Double, Device::Cpu);
    let model = model.build(&mut store).unwrap();
    store.load_file(weights).unwrap();
    let [x, y] = validation(&EXTENTS.map(|extent| 0..extent));
    let got = tch::no_grad(|| model.forward(&Batch::of_fields(x), Mode::Eval).unwrap());
    let norm = |x: &Tensor| x.square().sum_dim_intlist([1, 2, 3].as_slice(), false, Kind::Double).sqrt();
    let got = got.require("the test", Batch::<Tensor>::FIELDS).unwrap();
    (norm(&(got - &y)) / norm(&y)).mean(Kind::Double).double_value(&[])
}

/// Parameters without dims.
fn geo_transolver() -> GeoTransolverConfig {
    GeoTransolverConfig {
        geometry_dim: Some(2),
        n_hidden: 8,
        n_head: 2,
        n_layers: 1,
        slice_num: 3,
        concrete_dropout: true,
        ..GeoTransolverConfig::new(1, 1)
    }
}

/// Buffers, and extents that its levels do not divide.
fn unet() -> UNetConfig {
    UNetConfig {
        dimension: 2,
        model_depth: 2,
        feature_map_channels: vec![3, 3, 4, 4],
        padding: UNetPadding::SAME,
        normalization: Normalization::BatchNorm,
        upsampling: Upsampling::Linear,
        ..UNetConfig::new(1, 1)
    }
}

#[rstest]
#[case::scalars(geo_transolver())]
#[case::buffers(unet())]
fn exported_weights_give_the_same_outputs(#[case] model: impl Architecture) {
    let folder = tempfile::tempdir().unwrap();
    let meshes: [(&[i64], &[&str]); 4] =
        [(&[1], &["data"]), (&[3], &["shard"]), (&[2, 2], &["shard", "domain"]), (&[2], &["domain"])];
    for (at, trained_on) in meshes.into_iter().enumerate() {
        let run_folder = folder.path().join(format!("trained_{at}"));
        // The exported weights are those that are validated: the averages.
        let trained = run(&model, trained_on, &run_folder, |config| config.train.average_decay = Some(0.9));
        let weights = folder.path().join(format!("{at}.safetensors"));
        export(&run_folder, &weights).unwrap();
        let want = trained.validation_error.unwrap();
        let close =
            |error: f64| assert!((error - want).abs() < 1e-9 * want, "{trained_on:?}: {error} {want}");
        close(error_with(&ModelConfig::new(model.clone()), &weights));
        // A new run on the mesh after it.
        let started_on = meshes[(at + 1) % meshes.len()];
        let started = run(&model, started_on, &folder.path().join(format!("started_{at}")), |config| {
            config.train.max_steps = Some(0);
            config.checkpoint.init = Some(weights.clone());
        });
        assert_eq!(started.steps, 0);
        close(started.validation_error.unwrap());
    }
}
