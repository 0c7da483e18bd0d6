//! `Trainer`: one answer on every mesh, and one error on all ranks.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_collectives::threads;
use isobar_data::InMemory;
use isobar_manager::DistributedManager;
use isobar_models::{FnoConfig, PerDim};
use isobar_train::{BoxError, Error, Precision, Trainer, Window};
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
    let folder = tempdir().unwrap();
    threads::run(ranks, Duration::from_secs(60), |world| {
        let _rank = DistributedManager::bind_thread(&world);
        let shape: Vec<i64> = names.iter().enumerate().map(|(at, _)| if at == 0 { -1 } else { 2 }).collect();
        let trainer = Trainer::new(folder.path().join("run")).mesh(&shape, names);
        let trainer = trainer.precision(Precision::Float64).epochs(2).batch_size(3).seed(5);
        let summary = trainer.fit_architecture(&[12, 10], |window| data(world.rank(), window), &fno())?;
        Ok(summary.losses)
    })
}

#[test]
fn a_configured_model_trains_alike_on_every_mesh() {
    let data = |_: usize, window: &Window| Ok((waves(window, 8, 0)?, waves(window, 2, 8)?));
    let whole = train(1, &["data"], data).remove(0).unwrap();
    assert!(whole.len() == 4 || whole.len() == 6, "{whole:?}");
    for (ranks, names) in
        [(2, &["data"][..]), (2, &["domain"]), (3, &["domain"]), (4, &["data", "domain"]), (2, &["shard"])]
    {
        for losses in train(ranks, names, data) {
            let losses = losses.unwrap();
            assert_eq!(losses.len(), whole.len(), "{names:?}");
            for (got, want) in losses.iter().zip(&whole) {
                assert!((got - want).abs() <= 1e-9 * want.abs(), "{names:?}: {losses:?} {whole:?}");
            }
        }
    }
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
