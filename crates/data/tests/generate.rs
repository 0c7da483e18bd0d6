//! The Darcy generator, against the data set that was solved independently.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use crate::common;
use isobar_data::generate::{DarcyOptions, DarcySolver, darcy};
use isobar_data::{DarcyFile, Error};
use tch::{Kind, Tensor};

fn sample_values(tensor: &Tensor, sample: i64) -> Vec<f64> {
    Vec::try_from(tensor.get(sample).to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

/// Solves again with the stored coefficient; the largest relative L2 difference from the stored solution.
fn solve_again(file: &DarcyFile) -> f64 {
    let n = file.rows();
    let solver = DarcySolver::new(n).unwrap();
    let samples: Vec<usize> = (0..file.len()).collect();
    let batch = file.read(&samples, 0..n, 0..n).unwrap();
    let source = vec![file.beta(); n * n];
    (0..file.len() as i64)
        .map(|sample| {
            let solution = solver.solve(&sample_values(&batch.nu, sample), &source).unwrap();
            let stored = sample_values(&batch.u, sample);
            let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
            let difference = squares(&mut solution.iter().zip(&stored).map(|(a, b)| a - b));
            (difference / squares(&mut stored.iter().copied())).sqrt()
        })
        .fold(0.0, f64::max)
}

/// The data set was solved by another implementation, with sparse LU; ours agrees to float32's rounding.
#[test]
fn the_solver_agrees_with_the_stored_solutions() {
    let paths = [Some(common::excerpt()), common::shared("darcy_64.h5")];
    for path in paths.into_iter().flatten() {
        let worst = solve_again(&DarcyFile::open(path).unwrap());
        assert!(worst < 1e-6, "{worst:e}");
    }
}

#[test]
fn generated_data_is_whole_and_like_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("darcy.h5");
    let options = DarcyOptions { samples: 100, size: 64, seed: 0, threads: 0 };
    let mut ready = Vec::new();
    darcy(&options, &path, |samples| ready.push(samples)).unwrap();
    assert_eq!(ready, (1..=100).collect::<Vec<_>>());

    let file = DarcyFile::open(&path).unwrap();
    assert_eq!((file.len(), file.rows(), file.cols(), file.beta()), (100, 64, 64, 1.0));
    assert!(solve_again(&file) < 1e-6);
    // The reference's figures are 7.498, 4.500, 0.005753 and 0.003825; a sample's means of nu and u deviate by 0.54 and
    // 0.00052, so those of 100 samples by a tenth of that. Four deviations.
    let got = file.statistics(0..100).unwrap();
    assert_eq!((got.nu.min, got.nu.max), (3.0, 12.0));
    assert!((got.nu.mean - 7.4982).abs() < 0.22 && (got.nu.std - 4.5).abs() < 0.02, "{got:?}");
    assert!((got.u.mean - 0.0057529).abs() < 0.00021 && (got.u.std - 0.0038252).abs() < 0.0002, "{got:?}");
    assert!(got.u.min > 0.0 && got.u.max < 0.03, "{got:?}");
}

#[test]
fn samples_depend_on_seed_and_number_only() {
    let folder = tempfile::tempdir().unwrap();
    let generate = |samples, seed, threads| {
        let path = folder.path().join(format!("{samples}_{seed}_{threads}.h5"));
        darcy(&DarcyOptions { samples, size: 16, seed, threads }, &path, |_| {}).unwrap();
        path
    };
    let one = generate(30, 5, 1);
    let several = generate(30, 5, 3);
    assert_eq!(std::fs::read(&one).unwrap(), std::fs::read(&several).unwrap(), "the same bytes");

    let read = |path, samples: &[usize]| DarcyFile::open(path).unwrap().read(samples, 0..16, 0..16).unwrap();
    let all = read(one, &[0, 1, 2]);
    let few = read(generate(3, 5, 2), &[0, 1, 2]);
    assert_eq!((&all.nu, &all.u), (&few.nu, &few.u));
    assert_ne!(read(generate(3, 6, 1), &[0, 1, 2]).nu, few.nu);
    assert_ne!(few.nu.get(0), few.nu.get(1));
}

#[test]
fn bad_options_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("darcy.h5");
    let generate = |samples, size, path| {
        let options = DarcyOptions { samples, size, seed: 0, threads: 1 };
        darcy(&options, path, |_| {}).unwrap_err()
    };
    assert_eq!(generate(0, 8, &path).to_string(), "at least one sample must be generated");
    assert_eq!(generate(1, 1, &path).to_string(), "a random field needs at least 2 x 2 cells, not 1 x 1");
    let missing = folder.path().join("no/such/darcy.h5");
    assert!(
        matches!(generate(1, 2, &missing), Error::Missing { path } if path == folder.path().join("no/such"))
    );
    let error = generate(1, 2, &folder.path().to_owned()).to_string();
    assert!(error.starts_with(&folder.path().display().to_string()), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}
