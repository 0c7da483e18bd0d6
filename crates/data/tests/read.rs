//! Reading Darcy files, by windows, and their statistics.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use crate::common;
use isobar_data::{DarcyFile, DarcyWriter, InMemory, Normalizer, Statistics};
use proptest::prelude::*;
use tch::{Kind, Tensor};

fn close(got: Statistics, count: u64, [mean, std, min, max]: [f64; 4]) {
    assert_eq!((got.count, got.min, got.max), (count, min, max));
    assert!((got.mean / mean - 1.0).abs() < 1e-12, "mean {} against {mean}", got.mean);
    assert!((got.std / std - 1.0).abs() < 1e-12, "std {} against {std}", got.std);
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.flatten(0, -1)).unwrap()
}

/// Statistics of the excerpt, and of the whole data set where it is, against those that numpy computed.
#[test]
fn statistics_are_those_that_numpy_computed() {
    let excerpt = DarcyFile::open(common::excerpt()).unwrap();
    assert_eq!((excerpt.len(), excerpt.rows(), excerpt.cols(), excerpt.beta()), (8, 64, 64, 1.0));
    assert_eq!((excerpt.x()[0], excerpt.y()[63]), (0.0078125, 0.9921875));
    let statistics = excerpt.statistics(0..8).unwrap();
    close(statistics.nu, 32768, [7.682373046875, 4.496302933719383, 3.0, 12.0]);
    let u = [0.0055810243858174235, 0.0037793026752252984, 1.5066600099089555e-05, 0.01480341050773859];
    close(statistics.u, 32768, u);

    let (Some(whole), Some(reference)) = (common::shared("darcy_64.h5"), common::shared("reference.json"))
    else {
        return;
    };
    let whole = DarcyFile::open(whole).unwrap();
    assert_eq!((whole.len(), whole.rows(), whole.cols(), whole.beta()), (256, 64, 64, 1.0));
    let reference: serde_json::Value = serde_json::from_slice(&std::fs::read(reference).unwrap()).unwrap();
    let variables = &reference["files"]["darcy_64.h5"]["variables"];
    let statistics = whole.statistics(0..256).unwrap();
    for (name, got) in [("nu", statistics.nu), ("tensor", statistics.u)] {
        let figure = |key: &str| variables[name][key].as_f64().unwrap();
        close(got, 256 * 64 * 64, ["mean", "std", "min", "max"].map(figure));
        for entry in variables[name]["values_at"].as_array().unwrap() {
            let index: Vec<usize> =
                entry[0].as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as usize).collect();
            let [sample, .., row, col] = index[..] else { panic!("{index:?}") };
            let window = whole.read(&[sample], row..row + 1, col..col + 1).unwrap();
            let got = if name == "nu" { window.nu } else { window.u };
            assert_eq!(values(&got), [entry[1].as_f64().unwrap() as f32], "{name} {index:?}");
        }
    }
}

#[test]
fn statistics_of_a_part_are_those_of_its_values() {
    let file = DarcyFile::open(common::excerpt()).unwrap();
    let part = InMemory::load(&file, 3..7).unwrap();
    let statistics = file.statistics(3..7).unwrap();
    let direct = Statistics::of(part.targets()).unwrap();
    close(statistics.u, direct.count, [direct.mean, direct.std, direct.min, direct.max]);
}

proptest! {
    // A quarter of the usual number, or of PROPTEST_CASES, since each case reads a file.
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, ..ProptestConfig::default() })]

    /// Samples in any order and number, also repeated, and windows of any size, also empty.
    #[test]
    fn a_window_is_that_part_of_the_whole(
        samples in proptest::collection::vec(0_usize..8, 0..12),
        rows in (0_usize..=64, 0_usize..=64),
        cols in (0_usize..=64, 0_usize..=64),
    ) {
        let file = DarcyFile::open(common::excerpt()).unwrap();
        let whole = file.read(&[0, 1, 2, 3, 4, 5, 6, 7], 0..64, 0..64).unwrap();
        let (rows, cols) = (rows.0.min(rows.1)..rows.0.max(rows.1), cols.0.min(cols.1)..cols.0.max(cols.1));
        let window = file.read(&samples, rows.clone(), cols.clone()).unwrap();
        let index = Tensor::from_slice(&samples.iter().map(|&sample| sample as i64).collect::<Vec<_>>());
        for (got, all) in [(&window.nu, &whole.nu), (&window.u, &whole.u)] {
            let want = all
                .index_select(0, &index)
                .narrow(2, rows.start as i64, rows.len() as i64)
                .narrow(3, cols.start as i64, cols.len() as i64);
            prop_assert_eq!(got.kind(), Kind::Float);
            prop_assert_eq!(got.size(), want.size());
            prop_assert_eq!(got, &want);
        }
    }
}

#[test]
fn what_is_not_there_is_refused() {
    let file = DarcyFile::open(common::excerpt()).unwrap();
    let message = |samples: &[usize], rows, cols| file.read(samples, rows, cols).unwrap_err().to_string();
    assert_eq!(message(&[0, 8], 0..64, 0..64), "sample 8 is out of range: there are 8");
    assert_eq!(message(&[0], 60..65, 0..64), "row range 60..65 is out of range: there are 64");
    #[expect(clippy::reversed_empty_ranges, reason = "such a range is to be refused")]
    let reversed = 9..8;
    assert_eq!(message(&[0], 0..64, reversed), "column range 9..8 is out of range: there are 64");
    assert_eq!(
        file.statistics(0..9).unwrap_err().to_string(),
        "sample range 0..9 is out of range: there are 8"
    );
    assert_eq!(file.statistics(4..4).unwrap_err().to_string(), "there are no values to take statistics of");
}

#[test]
fn a_normalizer_of_the_training_part_scales_it_and_goes_back() {
    let file = DarcyFile::open(common::excerpt()).unwrap();
    let u = file.read(&[0, 1, 2, 3, 4, 5], 0..64, 0..64).unwrap().u;
    let normalizer = Normalizer::from_statistics(&file.statistics(0..6).unwrap().u).unwrap();
    let scaled = Statistics::of(&normalizer.encode(&u).unwrap()).unwrap();
    assert!(scaled.mean.abs() < 1e-6 && (scaled.std - 1.0).abs() < 1e-6, "{scaled:?}");
    let back = normalizer.decode(&normalizer.encode(&u).unwrap()).unwrap();
    assert!(back.allclose(&u, 1e-5, 1e-9, false));
    let saved: Normalizer = serde_json::from_str(&serde_json::to_string(&normalizer).unwrap()).unwrap();
    assert_eq!(saved, normalizer);
}

/// Ranks in one process, as tests run them, read at the same time.
#[test]
fn several_threads_read_one_file() {
    let whole = DarcyFile::open(common::excerpt()).unwrap().read(&[0, 1, 2, 3], 0..64, 0..64).unwrap().u;
    let parts: Vec<Tensor> = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|rank| {
                scope.spawn(move || {
                    let file = DarcyFile::open(common::excerpt()).unwrap();
                    file.read(&[0, 1, 2, 3], rank * 16..(rank + 1) * 16, 0..64).unwrap().u
                })
            })
            .collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    });
    assert_eq!(Tensor::cat(&parts, 2), whole);
}

#[test]
fn what_is_written_is_read_back_in_any_portions() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("written.h5");
    let (samples, n) = (31, 5);
    let nu: Vec<f32> = (0..samples * n * n).map(|i| i as f32).collect();
    let u: Vec<f32> = nu.iter().map(|value| -value).collect();
    let [x, y] = [[0.0, 0.25, 0.5, 0.75, 1.0], [-2.0, -1.0, 0.0, 1.0, 2.0]];
    let mut writer = DarcyWriter::create(&path, samples, n, 2.5).unwrap().on_points(&x, &y).unwrap();
    for range in [0..2, 2..2, 2..26, 26..31] {
        let range = range.start * n * n..range.end * n * n;
        writer.append(&nu[range.clone()], &u[range]).unwrap();
    }
    assert!(!path.exists(), "nothing is seen before it is whole");
    writer.finish().unwrap();

    let file = DarcyFile::open(&path).unwrap();
    assert_eq!((file.len(), file.rows(), file.cols(), file.beta()), (samples, n, n, 2.5));
    assert_eq!((file.x(), file.y()), (&x[..], &y[..]));
    let all: Vec<usize> = (0..samples).collect();
    let batch = file.read(&all, 0..n, 0..n).unwrap();
    assert_eq!((values(&batch.nu), values(&batch.u)), (nu, u));
}

#[test]
fn an_unfinished_file_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("never.h5");
    let mut writer = DarcyWriter::create(&path, 2, 2, 1.0).unwrap();
    writer.append(&[1.0; 4], &[1.0; 4]).unwrap();
    let error = writer.append(&[1.0; 8], &[1.0; 8]).unwrap_err().to_string();
    assert!(error.contains("1 samples of 2 x 2 are left"), "{error}");
    assert!(writer.append(&[1.0; 3], &[1.0; 3]).is_err() && writer.append(&[1.0; 4], &[1.0; 3]).is_err());
    let error = writer.finish().unwrap_err().to_string();
    assert_eq!(error, "1 of 2 samples were written; add the others first");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
