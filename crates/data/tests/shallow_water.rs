//! The shallow-water generator, against the flow that another model solved.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use std::path::Path;

use isobar_data::generate::{ShallowWaterOptions, shallow_water};
use isobar_data::{DataConfig, Dataset, Window};
use rstest::rstest;
use serde_json::json;
use tch::{Kind, Tensor};

use crate::common;

const NAMES: [&str; 3] = ["u", "v", "h"];

fn open(path: &Path, format: &str) -> Box<dyn Dataset> {
    let config = json!({ "path": path, "format": format, "fields": NAMES });
    serde_json::from_value::<DataConfig>(config).unwrap().open().unwrap()
}

/// The first frames, `[frame, variable, latitude, longitude]`.
fn frames(data: &dyn Dataset, count: usize) -> Tensor {
    let points = data.dims().iter().map(|dim| 0..dim.coordinates.len()).collect();
    data.read(&Window { frames: 0..count, points }, &[0], &NAMES).unwrap().get(0)
}

fn small(seed: Option<u64>) -> ShallowWaterOptions {
    ShallowWaterOptions { truncation: 21, frames: 3, hours: 6, latitudes: 12, seed }
}

/// Two frames at the resolution of the shared file, whose winds have 11 bits of mantissa.
#[test]
fn the_flow_is_that_of_another_model() {
    let Some(reference) = common::shared("shallow_water.nc") else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("flow.nc");
    shallow_water(&ShallowWaterOptions { frames: 2, ..ShallowWaterOptions::default() }, &path, |_| {})
        .unwrap();
    let (found, expected) = (open(&path, "netcdf"), open(&reference, "netcdf"));
    assert_eq!(found.dims(), expected.dims());
    assert_eq!(found.variables(), expected.variables());
    assert_eq!(found.time_unit(), expected.time_unit());
    assert_eq!(found.times().unwrap(), &expected.times().unwrap()[..2]);
    let [found, expected] = [&found, &expected].map(|data| frames(&**data, 2).to_kind(Kind::Double));
    let far = (&found - &expected).abs();
    let rounding = expected.narrow(1, 0, 2).abs() * 2.0_f64.powi(-12);
    let winds = (far.narrow(1, 0, 2) - rounding).max().double_value(&[]);
    let depth = far.narrow(1, 2, 1).max().double_value(&[]);
    // Depths near 10 km have a rounding error of 0.0005 m in float32.
    assert!(winds < 1e-5 && depth < 1e-3, "{winds:e} m/s, {depth:e} m");
}

#[test]
fn every_format_has_the_same_flow() {
    let folder = tempfile::tempdir().unwrap();
    let made = |name: &str, format: &str| {
        let path = folder.path().join(name);
        let mut ready = Vec::new();
        shallow_water(&small(None), &path, |frames| ready.push(frames)).unwrap();
        assert_eq!(ready, [1, 2, 3]);
        frames(&*open(&path, format), 3)
    };
    let flow = made("flow.nc", "netcdf");
    assert_eq!(flow.size(), [3, 3, 12, 24]);
    assert!(flow.equal(&made("flow.zarr", "zarr")) && flow.equal(&made("flow.h5", "hdf5")));
}

#[test]
fn seeds_place_the_bumps() {
    let folder = tempfile::tempdir().unwrap();
    let made = |seed| {
        let path = folder.path().join("flow.nc");
        shallow_water(&ShallowWaterOptions { frames: 1, ..small(seed) }, &path, |_| {}).unwrap();
        frames(&*open(&path, "netcdf"), 1)
    };
    assert!(made(Some(1)).equal(&made(Some(1))));
    let [default, first, second] = [None, Some(1), Some(2)].map(made);
    assert!(!first.equal(&second) && !first.equal(&default));
    // The jets are the same.
    assert!(default.narrow(1, 0, 2).equal(&first.narrow(1, 0, 2)));
}

#[rstest]
#[case(ShallowWaterOptions { truncation: 20, ..small(None) }, "the truncation is 20, expected 21 to 255")]
#[case(ShallowWaterOptions { frames: 0, ..small(None) }, "the number of frames is 0, expected 1 to 100000")]
#[case(ShallowWaterOptions { hours: 25, ..small(None) }, "the number of hours between frames is 25, expected 1 to 24")]
#[case(ShallowWaterOptions { latitudes: 3, ..small(None) }, "the number of latitudes is 3, expected 4 to 720")]
fn bad_options_are_refused(#[case] options: ShallowWaterOptions, #[case] words: &str) {
    let folder = tempfile::tempdir().unwrap();
    let made = |name: &str, options: &ShallowWaterOptions| {
        shallow_water(options, folder.path().join(name), |_| {}).unwrap_err().to_string()
    };
    assert_eq!(made("flow.nc", &options), words);
    assert!(made("flow.txt", &small(None)).contains("its extension names no format"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
