//! Windows of every format: those of any split make up the whole read, and what ranks read of an epoch is its permutation.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;
use std::path::Path;

use isobar_data::{DataConfig, Dataset, Sampler, WellDim, WellMeta, WellWriter, Window, part};
use ndarray::{Array1, Array4};
use proptest::prelude::*;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::common::excerpt;
use crate::joined::joined;

fn open(path: &Path, format: &str, fields: &[&str], own: Value) -> Box<dyn Dataset> {
    let mut config = json!({ "path": path, "format": format, "fields": fields });
    config[format] = own;
    serde_json::from_value::<DataConfig>(config).unwrap().open_all().unwrap()
}

/// Three trajectories with a scalar, a vector, and a field that does not vary in time.
fn well(path: &Path) {
    let dim = |name: &str, points: i32| WellDim {
        name: name.to_owned(),
        coordinates: (0..points).map(f64::from).collect(),
        periodic: false,
    };
    let meta = WellMeta {
        name: "flow".to_owned(),
        trajectories: 3,
        times: vec![0.0, 1.0, 2.0, 3.0],
        dims: vec![dim("x", 5), dim("y", 4)],
        fields: vec![("density".to_owned(), 0), ("velocity".to_owned(), 1)],
        ..WellMeta::default()
    };
    let mut writer = WellWriter::create(path, &meta).unwrap();
    for trajectory in 0..3 {
        for (field, components) in [("density", 1), ("velocity", 2)] {
            let values = Tensor::randn([4, components, 5, 4], (Kind::Float, Device::Cpu));
            writer.write(field, trajectory, 0, &values).unwrap();
        }
    }
    writer.finish().unwrap();
}

/// Compressible flow in PDEBench's layout, in packed chunks that reach beyond the shape.
fn pdebench(path: &Path) {
    let file = hdf5_metno::File::create(path).unwrap();
    for (name, shift) in [("density", 0), ("Vx", 1000)] {
        let values = Array4::from_shape_fn((3, 4, 5, 4), |(sample, frame, x, y)| {
            (shift + ((sample * 4 + frame) * 5 + x) * 4 + y) as f32
        });
        let builder = file.new_dataset_builder().chunk((2, 3, 3, 3)).shuffle().deflate(4);
        let _ = builder.with_data(&values).create(name).unwrap();
    }
    for (name, points) in [("x-coordinate", 5), ("y-coordinate", 4), ("t-coordinate", 5)] {
        let _ = file
            .new_dataset_builder()
            .with_data(&Array1::from_iter((0..points).map(f64::from)))
            .create(name)
            .unwrap();
    }
}

/// A data set, its variables, and all its values.
struct Case {
    name: String,
    data: Box<dyn Dataset>,
    variables: Vec<String>,
    all: Tensor,
}

impl Case {
    fn new(name: &str, data: Box<dyn Dataset>) -> Self {
        let variables: Vec<String> = data.variables().iter().map(|variable| variable.name.clone()).collect();
        let names: Vec<&str> = variables.iter().map(String::as_str).collect();
        let samples: Vec<usize> = (0..data.samples()).collect();
        let points = data.dims().iter().map(|dim| 0..dim.coordinates.len()).collect();
        let window = Window { frames: 0..data.times().map_or(1, <[f64]>::len), points };
        let all = data.read(&window, &samples, &names).unwrap();
        Self { name: name.to_owned(), data, variables, all }
    }

    fn read(&self, frames: &Range<usize>, points: &[Range<usize>], samples: &[usize]) -> Tensor {
        let names: Vec<&str> = self.variables.iter().map(String::as_str).collect();
        let window = Window { frames: frames.clone(), points: points.to_vec() };
        self.data.read(&window, samples, &names).unwrap()
    }

    /// Cuts the window out of all values.
    fn expected(&self, frames: &Range<usize>, points: &[Range<usize>], samples: &[usize]) -> Tensor {
        let rows: Vec<i64> = samples.iter().map(|&sample| sample as i64).collect();
        let cut = |values: Tensor, dim: usize, range: &Range<usize>| {
            values.narrow(dim as i64, range.start as i64, range.len() as i64)
        };
        let values = cut(self.all.index_select(0, &Tensor::from_slice(&rows)), 1, frames);
        points.iter().enumerate().fold(values, |values, (dim, range)| cut(values, dim + 3, range))
    }
}

/// Data sets of every format, of one file and of several; some are written into the folder.
fn cases(folder: &Path) -> Vec<Case> {
    let [flow, compressible] = ["well.h5", "2D_CFD.hdf5"].map(|name| folder.join(name));
    well(&flow);
    pdebench(&compressible);
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/formats");
    let unnamed = json!({
        "axes": ["sample", "time", "lat", "lon"],
        "variables": { "mask": { "path": "mask", "axes": ["lat", "lon"] } },
    });
    let plain = json!({
        "axes": ["sample", "time", "lat", "lon"],
        "variables": { "u": "run/u", "v": "/run/v", "mask": { "path": "mask", "axes": ["lat", "lon"] } },
    });
    let all = ["u", "v", "mask"];
    let of = |file: &str, format: &str, fields: &[&str], own: &Value| {
        Case::new(file, open(&fixtures.join(file), format, fields, own.clone()))
    };
    let none = json!({});
    let mut cases = vec![
        of("u.npy", "npy", &["u"], &unnamed),
        of("stored.npz", "npy", &all, &unnamed),
        of("deflated.npz", "npy", &all, &unnamed),
        of("arrays.safetensors", "safetensors", &all, &unnamed),
        of("plain.h5", "hdf5", &all, &plain),
        of("scales.h5", "hdf5", &all, &none),
        of("zarr/xarray_v2.zarr", "zarr", &["u"], &none),
        of("zarr/xarray_v3.zarr", "zarr", &["u"], &none),
        Case::new("darcy", open(&excerpt(), "darcy", &[], none.clone())),
        Case::new("the_well", open(&flow, "the_well", &["velocity", "density"], none.clone())),
        Case::new("pdebench", open(&compressible, "pdebench", &["density", "Vx"], none.clone())),
        Case::new("netcdf along time", joined(folder, "netcdf", "time")),
        Case::new("hdf5 along time", joined(folder, "hdf5", "time")),
        Case::new("the_well along samples", joined(folder, "the_well", "sample")),
        Case::new("npy along samples", joined(folder, "npy", "sample")),
    ];
    let netcdf = ["classic.nc", "offset64.nc", "data64.nc", "netcdf4.nc"];
    cases.extend(netcdf.map(|file| of(file, "netcdf", &all, &none)));
    cases
}

/// A range cut at shares of its length, in ascending order: parts may be empty.
fn split(extent: usize, shares: &[f64]) -> Vec<Range<usize>> {
    let mut cuts: Vec<usize> = shares.iter().map(|share| (share * (extent + 1) as f64) as usize).collect();
    cuts.extend([0, extent]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_split_equals_the_whole_read(
        frames in proptest::collection::vec(0.0..1.0, 0..3),
        rows in proptest::collection::vec(0.0..1.0, 0..4),
        columns in proptest::collection::vec(0.0..1.0, 0..3),
        samples in proptest::collection::vec(any::<prop::sample::Index>(), 1..5),
    ) {
        let folder = tempfile::tempdir().unwrap();
        for case in cases(folder.path()) {
            let samples: Vec<usize> = samples.iter().map(|index| index.index(case.data.samples())).collect();
            let extents: Vec<usize> = case.data.dims().iter().map(|dim| dim.coordinates.len()).collect();
            prop_assert_eq!(extents.len(), 2);
            let mut parts = Vec::new();
            for frames in split(case.data.times().map_or(1, <[f64]>::len), &frames) {
                let mut strips = Vec::new();
                for rows in split(extents[0], &rows) {
                    let of_columns = |columns| {
                        let points = [rows.clone(), columns];
                        let read = case.read(&frames, &points, &samples);
                        assert!(read.equal(&case.expected(&frames, &points, &samples)), "{}", case.name);
                        read
                    };
                    let read: Vec<Tensor> = split(extents[1], &columns).into_iter().map(of_columns).collect();
                    strips.push(Tensor::cat(&read, 4));
                }
                parts.push(Tensor::cat(&strips, 3));
            }
            let rows: Vec<i64> = samples.iter().map(|&sample| sample as i64).collect();
            let whole = case.all.index_select(0, &Tensor::from_slice(&rows));
            prop_assert!(Tensor::cat(&parts, 1).equal(&whole), "{}", case.name);
        }
    }

    #[test]
    fn what_ranks_read_of_an_epoch_is_its_permutation(
        (seed, epoch, batch) in (any::<u64>(), 0_u64..9, 1_usize..6),
        (ranks, domain) in (1_usize..5, 1_usize..4),
    ) {
        let folder = tempfile::tempdir().unwrap();
        for case in cases(folder.path()) {
            let sampler = Sampler::new(case.data.samples(), batch, seed, true).unwrap();
            let order: Vec<i64> = sampler.epoch(epoch).concat().iter().map(|&sample| sample as i64).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..case.data.samples() as i64).collect::<Vec<_>>());
            let extents: Vec<usize> = case.data.dims().iter().map(|dim| dim.coordinates.len()).collect();
            let frames = 0..case.data.times().map_or(1, <[f64]>::len);
            let of_batch = |batch: &Vec<usize>| {
                let of_rank = |rank: usize| {
                    let own = part(batch, rank, ranks);
                    let of_domain = |at: usize| {
                        let rows = extents[0] * at / domain..extents[0] * (at + 1) / domain;
                        case.read(&frames, &[rows, 0..extents[1]], own)
                    };
                    Tensor::cat(&(0..domain).map(of_domain).collect::<Vec<_>>(), 3)
                };
                Tensor::cat(&(0..ranks).map(of_rank).collect::<Vec<_>>(), 0)
            };
            let read: Vec<Tensor> = sampler.epoch(epoch).iter().map(of_batch).collect();
            let expected = case.all.index_select(0, &Tensor::from_slice(&order));
            prop_assert!(Tensor::cat(&read, 0).equal(&expected), "{}", case.name);
        }
    }
}
