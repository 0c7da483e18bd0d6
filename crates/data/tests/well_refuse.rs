//! Files of The Well's schema that are refused, and what is refused of them, with an error that names the cause.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use std::path::{Path, PathBuf};

use hdf5_metno::types::VarLenUnicode;
use hdf5_metno::{File, Group, H5Type};
use isobar_data::{Error, WellDim, WellFile, WellMeta, WellWriter};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

fn meta() -> WellMeta {
    let dim = |name: &str, points: i32| WellDim {
        name: name.to_owned(),
        coordinates: (0..points).map(f64::from).collect(),
        periodic: true,
    };
    WellMeta {
        name: "small".to_owned(),
        trajectories: 2,
        times: vec![0.0, 1.0, 2.0],
        dims: vec![dim("x", 4), dim("y", 5)],
        fields: vec![("density".to_owned(), 0), ("velocity".to_owned(), 1)],
        parameters: vec![("viscosity".to_owned(), 0.5)],
        ..WellMeta::default()
    }
}

fn zeros(components: i64) -> Tensor {
    Tensor::zeros([3, components, 4, 5], (Kind::Float, Device::Cpu))
}

/// A small file of the right layout, changed by `change`.
fn changed(change: impl FnOnce(&File)) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed.h5");
    let mut writer = WellWriter::create(&path, &meta()).unwrap();
    for trajectory in 0..2 {
        writer.write("density", trajectory, 0, &zeros(1)).unwrap();
        writer.write("velocity", trajectory, 0, &zeros(2)).unwrap();
    }
    writer.finish().unwrap();
    change(&File::open_rw(&path).unwrap());
    (folder, path)
}

/// Returns the text after the file's name in the error of opening it.
fn refusal(path: &Path) -> String {
    let error = WellFile::open(path).unwrap_err().to_string();
    error.strip_prefix(&format!("{}: ", path.display())).unwrap().to_owned()
}

fn refusal_of(change: impl FnOnce(&File)) -> String {
    let (_folder, path) = changed(change);
    refusal(&path)
}

#[test]
fn files_that_are_not_there_or_not_whole() {
    assert_eq!(refusal(Path::new("no/such/file.h5")), "no such file");
    let (_folder, path) = changed(|_| ());
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() * 6 / 10]).unwrap();
    assert!(matches!(WellFile::open(&path).unwrap_err(), Error::Truncated { .. }));
    std::fs::write(&path, "trajectory,time,x,y").unwrap();
    assert_eq!(refusal(&path), "not an HDF5 file (no HDF5 signature)");
    drop(File::create(&path).unwrap());
    assert_eq!(refusal(&path), "the group `dimensions` is missing; the file holds nothing");
}

#[rstest]
#[case(
    "dimensions",
    "the group `dimensions` is missing; the file holds `boundary_conditions`, `scalars`, `t0_fields`, `t1_fields`, \
     `t2_fields`"
)]
#[case(
    "boundary_conditions",
    "the group `boundary_conditions` is missing; the file holds `dimensions`, `scalars`, `t0_fields`, `t1_fields`, \
     `t2_fields`"
)]
#[case(
    "t1_fields",
    "the group `t1_fields` is missing; the file holds `boundary_conditions`, `dimensions`, `scalars`, `t0_fields`, \
     `t2_fields`"
)]
#[case("dimensions/time", "the dataset `dimensions/time` is missing; `dimensions` holds `x`, `y`")]
#[case("dimensions/y", "the dataset `dimensions/y` is missing; `dimensions` holds `time`, `x`")]
#[case("t1_fields/velocity", "the dataset `t1_fields/velocity` is missing; `t1_fields` holds nothing")]
fn what_is_missing(#[case] name: &str, #[case] expected: &str) {
    assert_eq!(refusal_of(|file| file.unlink(name).unwrap()), expected);
}

#[test]
fn what_may_be_missing() {
    for name in ["t2_fields", "scalars", "boundary_conditions/x_periodic"] {
        let (_folder, path) = changed(|file| file.unlink(name).unwrap());
        let file = WellFile::open(path).unwrap();
        assert_eq!(file.is_periodic(0), !name.starts_with("boundary"));
    }
}

#[rstest]
#[case("/", "dataset_name", "the root attribute `dataset_name` is missing")]
#[case("/", "grid_type", "the root attribute `grid_type` is missing")]
#[case("/", "n_spatial_dims", "the root attribute `n_spatial_dims` is missing")]
#[case("/", "n_trajectories", "the root attribute `n_trajectories` is missing")]
#[case("/", "simulation_parameters", "the root attribute `simulation_parameters` is missing")]
#[case("/", "viscosity", "the root attribute `viscosity` is missing")]
#[case("dimensions", "spatial_dims", "the attribute `dimensions@spatial_dims` is missing")]
#[case("t0_fields", "field_names", "the attribute `t0_fields@field_names` is missing")]
#[case(
    "boundary_conditions/x_periodic",
    "bc_type",
    "the attribute `boundary_conditions/x_periodic@bc_type` is missing"
)]
fn an_attribute_that_is_missing(#[case] group: &str, #[case] name: &str, #[case] expected: &str) {
    let got = refusal_of(|file| file.group(group).unwrap().delete_attr(name).unwrap());
    assert_eq!(got, expected);
}

#[rstest]
#[case("dimensions/time", "sample_varying")]
#[case("dimensions/x", "time_varying")]
#[case("t0_fields/density", "dim_varying")]
fn a_flag_that_is_missing(#[case] dataset: &str, #[case] name: &str) {
    let got = refusal_of(|file| file.dataset(dataset).unwrap().delete_attr(name).unwrap());
    assert_eq!(got, format!("the attribute `{dataset}@{name}` is missing"));
}

fn attribute<T: H5Type>(group: &Group, name: &str, values: &[T]) {
    group.delete_attr(name).unwrap();
    group.new_attr::<T>().shape(values.len()).create(name).unwrap().write_raw(values).unwrap();
}

fn text(value: &str) -> VarLenUnicode {
    value.parse().unwrap()
}

#[test]
fn attributes_that_make_no_sense() {
    let got = refusal_of(|file| attribute(file, "n_spatial_dims", &[4_i64]));
    assert_eq!(got, "`n_spatial_dims` is 4, expected a whole number from 1 to 3");
    let got = refusal_of(|file| attribute(file, "n_trajectories", &[0_i64]));
    assert_eq!(got, "`n_trajectories` is 0, expected a whole number from 1 on");
    let got = refusal_of(|file| attribute(file, "n_trajectories", &[1.5]));
    assert_eq!(got, "`n_trajectories` is 1.5, expected a whole number from 1 on");
    let got = refusal_of(|file| attribute(file, "dataset_name", &[1_i32]));
    assert_eq!(got, "`dataset_name` is of dtype int32, expected strings");
    let got = refusal_of(|file| attribute(file, "grid_type", &[text("a"), text("b")]));
    assert_eq!(got, "`grid_type` is 2 strings, expected one string");
    let dimensions = |names: &[&str]| {
        let names: Vec<VarLenUnicode> = names.iter().map(|name| text(name)).collect();
        refusal_of(|file| attribute(&file.group("dimensions").unwrap(), "spatial_dims", &names))
    };
    assert_eq!(
        dimensions(&["x"]),
        "`dimensions@spatial_dims` is [\"x\"], expected 2 different names to agree with `n_spatial_dims`"
    );
    assert_eq!(
        dimensions(&["x", "x"]),
        "`dimensions@spatial_dims` is [\"x\", \"x\"], expected 2 different names to agree with `n_spatial_dims`"
    );
    let got = refusal_of(|file| {
        attribute(&file.group("boundary_conditions/x_periodic").unwrap(), "associated_dims", &[text("z")]);
    });
    assert_eq!(got, "`boundary_conditions/x_periodic@associated_dims` is `z`, expected of x, y");
    let got = refusal_of(|file| {
        for (group, _) in [("t0_fields", "density"), ("t1_fields", "velocity")] {
            attribute::<VarLenUnicode>(&file.group(group).unwrap(), "field_names", &[]);
        }
    });
    assert_eq!(got, "`t0_fields@field_names` is an empty list, expected at least one field");
}

#[test]
fn flags_that_do_not_fit() {
    let flag = |dataset: &str, name: &str, values: &[i8]| {
        refusal_of(|file| {
            let dataset = file.dataset(dataset).unwrap();
            dataset.delete_attr(name).unwrap();
            dataset.new_attr::<i8>().shape(values.len()).create(name).unwrap().write_raw(values).unwrap();
        })
    };
    assert_eq!(
        flag("dimensions/time", "sample_varying", &[1]),
        "`dimensions/time@sample_varying` is true, expected false: varying coordinates are unsupported for now"
    );
    assert_eq!(
        flag("dimensions/x", "time_varying", &[1]),
        "`dimensions/x@time_varying` is true, expected false: varying coordinates are unsupported for now"
    );
    assert_eq!(
        flag("t0_fields/density", "time_varying", &[2]),
        "`t0_fields/density@time_varying` is 2, expected FALSE (0) or TRUE (1)"
    );
    assert_eq!(
        flag("t0_fields/density", "time_varying", &[1, 1]),
        "`t0_fields/density@time_varying` is 2 booleans, expected one boolean"
    );
    assert_eq!(
        flag("t0_fields/density", "dim_varying", &[1]),
        "`t0_fields/density@dim_varying` is 1 booleans, expected 2, one a spatial dim"
    );
    assert_eq!(
        flag("t1_fields/velocity", "dim_varying", &[1, 0]),
        "`t1_fields/velocity` is of shape [2, 3, 4, 5, 2], expected of shape [2, 3, 4, 2] to agree with `dimensions` \
         and `n_trajectories`"
    );
}

/// Puts another dataset in the place of coordinates.
fn coordinates<T: H5Type>(name: &str, shape: &[usize], values: &[T]) -> String {
    refusal_of(|file| {
        file.unlink(name).unwrap();
        let dataset = file.new_dataset::<T>().shape(shape).create(name).unwrap();
        dataset.write_raw(values).unwrap();
        for flag in ["sample_varying", "time_varying"] {
            dataset.new_attr::<bool>().create(flag).unwrap().write_scalar(&false).unwrap();
        }
    })
}

#[test]
fn coordinates_that_make_no_sense() {
    assert_eq!(
        coordinates("dimensions/x", &[4], &[0.0, 1.0, 1.0, 2.0]),
        "`dimensions/x` is 1 at index 1 and 1 at the next, expected ascending"
    );
    assert_eq!(
        coordinates("dimensions/time", &[3], &[0.0, f64::NAN, 2.0]),
        "`dimensions/time` holds a value that is not finite: NaN at index [1]"
    );
    assert_eq!(
        coordinates("dimensions/y", &[5, 1], &[0.0; 5]),
        "`dimensions/y` is of shape [5, 1], expected a list of at least one point"
    );
    assert_eq!(
        coordinates::<f32>("dimensions/time", &[0], &[]),
        "`dimensions/time` is of shape [0], expected a list of at least one point"
    );
    assert_eq!(
        coordinates("dimensions/time", &[3], &[0_i32, 1, 2]),
        "`dimensions/time` is of dtype int32, expected floating-point numbers"
    );
    assert_eq!(
        coordinates("dimensions/y", &[3], &[0.0_f32, 1.0, 2.0]),
        "`t0_fields/density` is of shape [2, 3, 4, 5], expected of shape [2, 3, 4, 3] to agree with `dimensions` and \
         `n_trajectories`"
    );
}

#[test]
fn a_field_of_another_kind() {
    let got = refusal_of(|file| {
        file.unlink("t0_fields/density").unwrap();
        file.new_dataset::<f64>().shape((2, 3, 4, 5)).create("t0_fields/density").unwrap();
    });
    assert_eq!(got, "`t0_fields/density` is of dtype float64, expected float32");
}

#[test]
fn parameters_that_are_no_numbers_are_left_out() {
    let (_folder, path) = changed(|file| attribute(file, "viscosity", &[text("low")]));
    assert_eq!(WellFile::open(path).unwrap().parameters(), []);
}

#[test]
fn values_that_are_not_finite() {
    let (_folder, path) = changed(|file| {
        let velocity = file.dataset("t1_fields/velocity").unwrap();
        velocity.write_slice(&ndarray::arr1(&[f32::INFINITY]), ndarray::s![1, 2, 3, 4, 0..1]).unwrap();
    });
    let file = WellFile::open(&path).unwrap();
    let expected = format!(
        "{}: `t1_fields/velocity` holds a value that is not finite: inf at index [1, 2, 3, 4, 0]",
        path.display()
    );
    let text = |error: Error| error.to_string();
    assert_eq!(text(file.read(&["velocity"], 1, 1..3, &[2..4, 4..5]).unwrap_err()), expected);
    assert_eq!(text(file.statistics(&["density", "velocity"], 0..2).unwrap_err()), expected);
    // Reads that do not touch it succeed.
    assert_eq!(file.read(&["velocity"], 1, 0..3, &[0..4, 0..4]).unwrap().size(), [3, 2, 4, 4]);
    file.statistics(&["velocity"], 0..1).unwrap();
}

#[test]
fn what_is_not_there_can_not_be_read() {
    let (_folder, path) = changed(|_| ());
    let file = WellFile::open(&path).unwrap();
    let window = [0..4, 0..5];
    let text = |error: Error| error.to_string();
    assert_eq!(
        text(file.read(&["density", "pressure"], 0, 0..1, &window).unwrap_err()),
        format!(
            "{}: there is no field `pressure`; the file's fields are `density`, `velocity`",
            path.display()
        )
    );
    assert_eq!(text(file.read(&[], 0, 0..1, &window).unwrap_err()), "at least one field must be asked for");
    let read = |trajectory, frames, window: &[std::ops::Range<usize>]| {
        text(file.read(&["density"], trajectory, frames, window).unwrap_err())
    };
    assert_eq!(read(2, 0..1, &window), "trajectory 2 is out of range: there are 2");
    assert_eq!(read(0, 2..4, &window), "frame range 2..4 is out of range: there are 3");
    assert_eq!(read(0, 0..1, &[0..4, 1..6]), "y range 1..6 is out of range: there are 5");
    assert_eq!(
        read(0, 0..1, &window[..1]),
        "a window of 1 ranges was asked for where there are 2 spatial dims: x, y"
    );
    assert_eq!(
        text(file.statistics(&["density"], 0..3).unwrap_err()),
        "trajectory range 0..3 is out of range: there are 2"
    );
    assert_eq!(
        text(file.statistics(&["density"], 1..1).unwrap_err()),
        "there are no values to take statistics of"
    );
}

#[test]
fn what_can_not_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("never.h5");
    let mut writer = WellWriter::create(&path, &meta()).unwrap();
    let mut write = |field, trajectory, first, values: &Tensor| {
        writer.write(field, trajectory, first, values).unwrap_err().to_string()
    };
    assert!(write("pressure", 0, 0, &zeros(1)).ends_with("the file's fields are `density`, `velocity`"));
    assert_eq!(write("density", 2, 0, &zeros(1)), "trajectory 2 is out of range: there are 2");
    assert_eq!(write("density", 0, 1, &zeros(1)), "frame range 1..4 is out of range: there are 3");
    assert_eq!(
        write("velocity", 0, 0, &zeros(1)),
        "values of shape [3, 1, 4, 5] were given for `velocity`: expected [frame, 2, 4, 5]"
    );
    let large = zeros(2).to_kind(Kind::Double) + 1e40;
    assert_eq!(
        write("velocity", 1, 0, &large),
        format!(
            "{}: `t1_fields/velocity` holds a value that is not finite: inf at index [1, 0, 0, 0, 0]",
            path.display()
        )
    );
    writer.write("density", 0, 0, &zeros(1)).unwrap();
    writer.write("density", 1, 0, &zeros(1).narrow(0, 0, 2)).unwrap();
    assert_eq!(
        writer.finish().unwrap_err().to_string(),
        "frame 2 of trajectory 1 of `density` was not written; add it first"
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn a_file_that_could_not_be_read_is_not_made() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("never.h5");
    let refusal = |change: fn(&mut WellMeta)| {
        let mut meta = meta();
        change(&mut meta);
        WellWriter::create(&path, &meta).unwrap_err().to_string()
    };
    assert_eq!(
        refusal(|meta| meta.trajectories = 0),
        "a file of 0 trajectories, 2 fields and 2 spatial dims can't be written: expected at least one trajectory and \
         field, and 1 to 3 dims"
    );
    assert_eq!(
        refusal(|meta| meta.fields[0].1 = 3),
        "the field `density` is of order 3: expected 0 for a scalar, 1 for a vector, 2 for a tensor"
    );
    assert_eq!(
        refusal(|meta| meta.fields[0].0 = "velocity".to_owned()),
        "`velocity` can't be the name of a field: it is taken"
    );
    assert_eq!(refusal(|meta| meta.fields[0].0 = "a/b".to_owned()), "\"a/b\" can't be the name of a field");
    assert_eq!(
        refusal(|meta| meta.dims[0].name = "time".to_owned()),
        "`time` can't be the name of a spatial dim: it is taken"
    );
    assert_eq!(
        refusal(|meta| meta.parameters[0].0 = "grid_type".to_owned()),
        "`grid_type` can't be the name of a parameter: it is taken"
    );
    assert_eq!(
        refusal(|meta| meta.parameters[0].1 = f64::NAN),
        "the parameter `viscosity` is NaN: expected a finite number"
    );
    assert_eq!(
        refusal(|meta| meta.times[1] = 1e-50),
        "the points of `time` must be finite and ascending in float32, at least one"
    );
    let missing = folder.path().join("no/such/never.h5");
    assert!(matches!(WellWriter::create(missing, &meta()).unwrap_err(), Error::Missing { .. }));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}
