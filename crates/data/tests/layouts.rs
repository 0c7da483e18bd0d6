//! Coordinates, levels, cuts and predictions that are easily taken for others.
#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use std::path::Path;

use hdf5_metno::File;
use isobar_data::{
    Content, DataConfig, DataVariable, Dataset, Levels, PredictionMeta, Result, Storage, TimeAxis, TimeUnit,
    WellDim, WellFile, WellMeta, WellWriter, Window, missing_frames, writer,
};
use ndarray::Array;
use rstest::rstest;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::common::excerpt;
use crate::writers::{FRAMES, SAMPLES, content, values};

fn config(path: impl Into<Value>, format: &str, fields: &[&str], own: Value) -> DataConfig {
    let mut table =
        json!({ "path": path.into(), "format": format, "fields": fields, "validation_samples": 0 });
    table.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    serde_json::from_value(table).unwrap()
}

fn open(path: &Path, format: &str, fields: &[&str], own: Value) -> Result<Box<dyn Dataset>> {
    config(path.to_str().unwrap(), format, fields, json!({ format: own })).open()
}

/// Writes all values of a file of this content.
fn write(path: &Path, content: &Content) {
    let mut target = writer(None, path).unwrap().create(path, content).unwrap();
    for sample in 0..SAMPLES {
        for variable in &content.variables {
            let own = values(variable.channels.len() as i64).get(sample as i64);
            target.write(&variable.name, sample, 0, &own).unwrap();
        }
    }
    target.finish().unwrap();
}

/// A temperature at one level.
fn at_level(level: f64, unit: &str) -> Content {
    let mut content = content(Storage::default());
    let levels = Levels { name: "level".to_owned(), unit: Some(unit.to_owned()), values: vec![level] };
    content.variables = vec![DataVariable { levels: Some(levels), ..DataVariable::scalar("t") }];
    content.meta.variables = vec!["t".to_owned()];
    content
}

/// Writes an array of NumPy.
fn npy(path: &Path, shape: &[usize], values: &[f32]) {
    let extents: String = shape.iter().map(|extent| format!("{extent},")).collect();
    numpy(path, "<f4", &extents, &values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>());
}

fn numpy(path: &Path, dtype: &str, extents: &str, values: &[u8]) {
    let header = format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({extents}), }}");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.bytes());
    bytes.extend(values);
    std::fs::write(path, bytes).unwrap();
}

/// A variable at a single level has the same channels at any level.
#[test]
fn a_single_level_is_compared() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    for (name, level, unit) in [
        ("t_500.nc", 500.0, "hPa"),
        ("t_850.nc", 850.0, "hPa"),
        ("same.nc", 500.0, "hPa"),
        ("pa.nc", 500.0, "Pa"),
    ] {
        write(&path(name), &at_level(level, unit));
    }
    let join = |other: &str| {
        let files = json!([path("t_500.nc"), path(other)]);
        config(files, "netcdf", &["t"], json!({ "join": "sample" })).open()
    };
    assert_eq!(join("same.nc").unwrap().samples(), 2 * SAMPLES);
    let error = join("t_850.nc").unwrap_err().to_string();
    assert!(error.contains("`t` at level [850.0] hPa, expected level [500.0] hPa"), "{error}");
    assert!(join("pa.nc").is_err());
    let own = json!({ "validation_path": path("t_850.nc") });
    let error = config(path("t_500.nc").to_str().unwrap(), "netcdf", &["t"], own).parts().unwrap_err();
    assert!(error.to_string().contains("data.validation_path"), "{error}");
}

#[rstest]
fn longitudes_of_every_spelling_are_periodic(
    #[values("degrees_east", "degrees_E", "degree_E", "degreesE")] unit: &str,
    #[values("air.nc", "air.zarr")] name: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    let mut content = content(Storage::default());
    content.dims[1].unit = Some(unit.to_owned());
    content.dims[1].periodic = false;
    write(&path, &content);
    let data = open(&path, if name == "air.nc" { "netcdf" } else { "zarr" }, &["h"], json!({})).unwrap();
    assert!(data.dims()[1].periodic && data.dims()[1].is_longitude());
    if name == "air.nc" {
        let longitude = File::open(&path).unwrap().dataset("longitude").unwrap();
        assert!(longitude.attr("standard_name").is_ok());
    } else {
        let text = std::fs::read_to_string(path.join("longitude/zarr.json")).unwrap();
        assert!(text.contains("\"longitude\""), "{text}");
    }
}

/// Pieces of trajectories that are cut hide neither the steps after the last piece nor gaps in later pieces.
#[test]
fn gaps_of_trajectories_that_are_cut_are_found() {
    let folder = tempfile::tempdir().unwrap();
    npy(&folder.path().join("u.npy"), &[1, 8, 3], &[0.0; 24]);
    let cut = |times: [f32; 8], cut: usize| {
        npy(&folder.path().join("time.npy"), &[8], &times);
        let own = json!({ "axes": ["sample", "time", "x"], "cut": cut });
        open(folder.path(), "npy", &["u"], own).unwrap()
    };
    let whole = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
    let data = cut(whole, 3);
    assert_eq!((data.samples(), data.times().unwrap().len()), (2, 4));
    assert_eq!((data.uncut_times().unwrap().len(), missing_frames(&*data)), (8, None));
    let found = missing_frames(&*cut([0.0, 1.0, 2.0, 3.0, 4.0, 9.0, 10.0, 11.0], 3)).unwrap();
    assert!(found.contains("between 4 and 9"), "{found}");
}

/// Times in another place than the variable's, or of another shape.
#[test]
fn coordinates_of_groups_above_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nested.h5");
    let file = File::create(&path).unwrap();
    let group = file.create_group("run").unwrap().create_group("fields").unwrap();
    let line = |values: &[f64]| Array::from_vec(values.to_vec());
    let field = Array::from_shape_fn((3, 4), |(frame, x)| (frame + x) as f32);
    group.new_dataset_builder().with_data(&field).create("u").unwrap();
    file.new_dataset_builder().with_data(&line(&[9.0, 10.0, 11.0])).create("time").unwrap();
    file.new_dataset_builder().with_data(&line(&[0.0, 1.0, 2.0, 3.0])).create("x").unwrap();
    let run = file.group("run").unwrap();
    run.new_dataset_builder().with_data(&line(&[5.0, 6.0, 7.0])).create("time").unwrap();
    run.new_dataset_builder().with_data(&line(&[1.0, 2.0])).create("other").unwrap();
    drop((run, group, file));
    let own = |more: Value| {
        let mut own = json!({ "axes": ["time", "x"], "variables": { "u": "run/fields/u" } });
        own["variables"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        open(&path, "hdf5", &["u"], own)
    };
    assert_eq!(own(json!({})).unwrap().times().unwrap(), [5.0, 6.0, 7.0], "the nearest");
    assert_eq!(own(json!({ "time": "time" })).unwrap().times().unwrap(), [9.0, 10.0, 11.0]);
    let error = own(json!({ "time": { "path": "run/other", "unit": "s" } })).unwrap_err().to_string();
    assert!(error.contains("`run/other` is of shape [2], expected of shape [3]"), "{error}");
}

/// An array of text does not hide the others.
#[test]
fn arrays_of_text_are_errors_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    npy(&folder.path().join("u.npy"), &[2, 3], &[0.0; 6]);
    numpy(&folder.path().join("names.npy"), "<U4", "2,", &[0; 32]);
    let read = |field: &str| {
        let own = json!({ "axes": ["sample", "x"] });
        config(
            folder.path().to_str().unwrap(),
            "npy",
            &[],
            json!({ "inputs": [field], "targets": ["u"], "npy": own }),
        )
        .open()
    };
    assert_eq!(read("u").unwrap().samples(), 2);
    let error = read("names").unwrap_err().to_string();
    assert!(error.contains("names") && error.contains("real numbers or booleans"), "{error}");
}

/// Writes a store of version 2 with times of this dtype.
fn store(path: &Path, dtype: &str, times: &[u8]) {
    let array = |name: &str, shape: &[usize], dtype: &str, axes: &[&str], values: &[u8]| {
        let folder = path.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let array = json!({
            "zarr_format": 2, "shape": shape, "chunks": shape, "dtype": dtype, "compressor": null, "filters": null,
            "order": "C", "fill_value": null,
        });
        std::fs::write(folder.join(".zarray"), array.to_string()).unwrap();
        std::fs::write(folder.join(".zattrs"), json!({ "_ARRAY_DIMENSIONS": axes }).to_string()).unwrap();
        std::fs::write(folder.join(vec!["0"; shape.len()].join(".")), values).unwrap();
    };
    std::fs::create_dir_all(path).unwrap();
    std::fs::write(path.join(".zgroup"), json!({ "zarr_format": 2 }).to_string()).unwrap();
    array("u", &[2, 3], "<f4", &["time", "x"], &[0; 24]);
    array("time", &[2], dtype, &["time"], times);
}

#[test]
fn times_of_numpy_are_dates_and_others_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = |times: [i64; 2]| times.iter().flat_map(|time| time.to_le_bytes()).collect::<Vec<u8>>();
    let second = 1_577_836_800_i64;
    for (name, dtype, times) in [
        ("ns", "<M8[ns]", [second * 1_000_000_000, (second + 21_600) * 1_000_000_000]),
        ("s", "<M8[s]", [second, second + 21_600]),
        ("h", "<M8[6h]", [second / 21_600, second / 21_600 + 1]),
    ] {
        let path = folder.path().join(name);
        store(&path, dtype, &bytes(times));
        let data = open(&path, "zarr", &["u"], json!({})).unwrap();
        let axis = TimeAxis::new(data.time_unit().unwrap()).unwrap();
        let dates: Vec<String> = data.times().unwrap().iter().map(|&time| axis.text(time)).collect();
        assert_eq!(dates, ["2020-01-01 00:00:00", "2020-01-01 06:00:00"], "{dtype}");
    }
    for dtype in ["<U19", "<M8[M]"] {
        let path = folder.path().join(dtype);
        store(&path, dtype, &bytes([0, 1]));
        let error = open(&path, "zarr", &["u"], json!({})).unwrap_err().to_string();
        assert!(error.contains("`time` is of dtype") && error.contains(dtype), "{error}");
    }
}

/// Only axes of channels have names that variables cannot have.
#[rstest]
fn variables_may_be_named_like_channels(#[values("flow.nc", "flow.zarr")] name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    let mut content = content(Storage::default());
    content.variables[0].name = "channel_depth".to_owned();
    content.meta.variables[0] = "channel_depth".to_owned();
    write(&path, &content);
    content.variables[0].name = "channel".to_owned();
    assert!(writer(None, &path).unwrap().create(&folder.path().join("b").join(name), &content).is_err());
}

/// Times with a unit have the digits of float64.
#[test]
fn dates_in_the_wells_schema_are_compared_as_they_are_stored() {
    let folder = tempfile::tempdir().unwrap();
    let x = WellDim { name: "x".to_owned(), coordinates: vec![0.0, 0.5], periodic: true };
    let meta = |unit: bool| WellMeta {
        name: "late".to_owned(),
        trajectories: 1,
        times: vec![1e9, 1e9 + 1.0],
        dims: vec![x.clone()],
        fields: vec![("u".to_owned(), 0)],
        coordinate_units: unit
            .then(|| ("time".to_owned(), "seconds since 1990-01-01".to_owned()))
            .into_iter()
            .collect(),
        ..WellMeta::default()
    };
    let path = folder.path().join("late.h5");
    let mut target = WellWriter::create(&path, &meta(true)).unwrap();
    target.write("u", 0, 0, &Tensor::zeros([2, 1, 2], (Kind::Float, Device::Cpu))).unwrap();
    target.finish().unwrap();
    assert_eq!(WellFile::open(&path).unwrap().times(), [1e9, 1e9 + 1.0]);
    let error = WellWriter::create(&path, &meta(false)).unwrap_err().to_string();
    assert!(error.contains("ascending in float32"), "{error}");
}

/// Predictions from files with other parameters do not have those of the first.
#[test]
fn parameters_that_files_differ_in_are_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, viscosity: f64| {
        let path = folder.path().join(name);
        let x = WellDim { name: "x".to_owned(), coordinates: vec![0.0, 0.5], periodic: true };
        let meta = WellMeta {
            name: "flow".to_owned(),
            trajectories: 1,
            times: vec![0.0, 1.0],
            dims: vec![x],
            fields: vec![("u".to_owned(), 0)],
            parameters: vec![("gravity".to_owned(), 9.5), ("viscosity".to_owned(), viscosity)],
            ..WellMeta::default()
        };
        let mut target = WellWriter::create(&path, &meta).unwrap();
        target.write("u", 0, 0, &Tensor::zeros([2, 1, 2], (Kind::Float, Device::Cpu))).unwrap();
        target.finish().unwrap();
        path
    };
    let files = [file("a.h5", 0.5), file("b.h5", 0.25)];
    let predicted = |paths: Value| {
        let data = config(paths, "the_well", &["u"], json!({})).open().unwrap();
        let path = folder.path().join("prediction.h5");
        let meta = PredictionMeta {
            name: "flow".to_owned(),
            variables: vec!["u".to_owned()],
            samples: 1,
            times: vec![0.0],
            sample_times: Vec::new(),
            sample_numbers: Vec::new(),
            attributes: Vec::new(),
            missing: false,
            left_out: Vec::new(),
        };
        let mut target = data.create(&path, &meta).unwrap();
        target.write("u", 0, 0, &Tensor::zeros([1, 1, 2], (Kind::Float, Device::Cpu))).unwrap();
        target.finish().unwrap();
        WellFile::open(&path).unwrap().meta().parameters
    };
    assert_eq!(predicted(json!(files)), [("gravity".to_owned(), 9.5)]);
    assert_eq!(predicted(json!(files[1])).len(), 2);
}

/// A prediction of Darcy flow without the coefficient, as of targets in a data set of their own, is plain HDF5.
#[test]
fn a_solution_of_darcy_flow_alone_is_plain() {
    let folder = tempfile::tempdir().unwrap();
    let data = DataConfig { path: excerpt().into(), ..DataConfig::default() }.open().unwrap();
    let meta = PredictionMeta {
        name: "darcy".to_owned(),
        variables: vec!["u".to_owned()],
        samples: 1,
        times: Vec::new(),
        sample_times: Vec::new(),
        sample_numbers: vec![3],
        attributes: Vec::new(),
        missing: false,
        left_out: Vec::new(),
    };
    let points: Vec<_> = data.dims().iter().map(|dim| 0..dim.coordinates.len()).collect();
    let window = Window::still(&points);
    let field = data.read(&window, &[3], &["u"]).unwrap();
    let path = folder.path().join("prediction.h5");
    let mut target = data.create(&path, &meta).unwrap();
    target.write("u", 0, 0, &field.select(0, 0)).unwrap();
    target.finish().unwrap();
    let written = config(path.to_str().unwrap(), "hdf5", &[], json!({ "inputs": ["u"], "targets": ["u"] }));
    assert_eq!(written.open().unwrap().read(&window, &[0], &["u"]).unwrap(), field);
    // In its own layout, values that are not finite are errors as they are elsewhere.
    let both = PredictionMeta { variables: vec!["nu".to_owned(), "u".to_owned()], ..meta };
    let mut target = data.create(&folder.path().join("both.h5"), &both).unwrap();
    let error = target.write("u", 0, 0, &(field.select(0, 0) * f64::NAN)).unwrap_err().to_string();
    assert!(error.contains("not finite"), "{error}");
}

/// Each file of a joined data set begins at a sample, or at a frame.
#[test]
fn files_begin_at_samples_or_frames() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, first: f64| {
        let path = folder.path().join(name);
        let mut content = content(Storage::default());
        content.time_unit =
            Some(TimeUnit { unit: "hours since 2000-01-01".to_owned(), calendar: Some("noleap".to_owned()) });
        content.meta.times = (0..FRAMES).map(|frame| first + 6.0 * frame as f64).collect();
        write(&path, &content);
        path
    };
    let paths = [file("a.nc", 0.0), file("b.nc", 18.0), file("c.nc", 0.0)];
    let starts =
        |files: Value, own: Value| config(files, "netcdf", &["h"], own).open().unwrap().file_starts();
    assert_eq!(starts(json!(paths[..2]), json!({})), [(0, 0), (0, FRAMES)]);
    assert_eq!(starts(json!([paths[0], paths[2]]), json!({})), [(0, 0), (SAMPLES, 0)]);
    assert_eq!(starts(json!(paths[0]), json!({})), [(0, 0)]);
}
