//! Many files as one data set, in every format.
#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use std::ops::Range;
use std::path::{Path, PathBuf};

use isobar_data::{
    Content, DataConfig, DataVariable, Dataset, Dim, Error, PredictionMeta, Storage, TimeUnit, Window, writer,
};
use rstest::rstest;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use crate::common;
use crate::writers::content;

const SAMPLES: usize = 2;
const FRAMES: usize = 12;

/// Content of a file, before it is written.
struct Part {
    samples: Range<usize>,
    frames: Range<usize>,
    unit: &'static str,
    /// Hours of the first frame from the date of the unit.
    shift: f64,
    latitudes: [f64; 3],
    in_metres: bool,
}

impl Part {
    fn new(samples: Range<usize>, frames: Range<usize>) -> Self {
        Self {
            samples,
            frames,
            unit: "hours since 2000-01-01",
            shift: 0.0,
            latitudes: [-60.0, 0.0, 60.0],
            in_metres: true,
        }
    }

    /// Writes the values that these samples and frames have among all.
    fn write(&self, format: &str, path: &Path) {
        let dim = |name: &str, unit: &str, coordinates: &[f64]| Dim {
            name: name.to_owned(),
            unit: Some(unit.to_owned()),
            coordinates: coordinates.to_vec(),
            periodic: false,
        };
        let unit = if self.in_metres { "m" } else { "km" };
        let content = Content {
            meta: PredictionMeta {
                name: "air".to_owned(),
                variables: vec!["h".to_owned()],
                samples: self.samples.len(),
                times: self.frames.clone().map(|frame| 6.0 * frame as f64 - self.shift).collect(),
                sample_times: Vec::new(),
                sample_numbers: Vec::new(),
                attributes: Vec::new(),
                missing: false,
                left_out: Vec::new(),
            },
            time_unit: Some(TimeUnit { unit: self.unit.to_owned(), calendar: Some("noleap".to_owned()) }),
            dims: vec![
                dim("latitude", "degrees_north", &self.latitudes),
                dim("longitude", "degrees_east", &[0.0, 10.0]),
            ],
            variables: vec![DataVariable { unit: Some(unit.to_owned()), ..DataVariable::scalar("h") }],
            parameters: Vec::new(),
            storage: Storage::default(),
        };
        let mut file = writer(Some(format), path).unwrap().create(path, &content).unwrap();
        for (own, sample) in self.samples.clone().enumerate() {
            let (first, count) = (self.frames.start as i64, self.frames.len() as i64);
            file.write("h", own, 0, &all().get(sample as i64).narrow(0, first, count)).unwrap();
        }
        file.finish().unwrap();
    }
}

/// All values: `[sample, frame, channel, latitude, longitude]`.
fn all() -> Tensor {
    let count = (SAMPLES * FRAMES * 6) as i64;
    Tensor::arange(count, (Kind::Float, Device::Cpu)).sin().view([SAMPLES as i64, FRAMES as i64, 1, 3, 2])
}

fn config(path: impl Into<Value>, format: &str, own: Value) -> DataConfig {
    let mut table = json!({ "path": path.into(), "format": format, "fields": ["h"] });
    if format == "npy" {
        table["npy"] = json!({ "axes": ["sample", "time", "latitude", "longitude"] });
    }
    table.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    serde_json::from_value(table).unwrap()
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// One data set of several files: three along time, or two along samples.
pub(crate) fn joined(folder: &Path, format: &str, join: &str) -> Box<dyn Dataset> {
    let parts = match join {
        "time" => [0..5, 5..6, 6..FRAMES].map(|frames| Part::new(0..SAMPLES, frames)).into_iter().collect(),
        _ => [0..1, 1..SAMPLES].map(|samples| Part::new(samples, 0..FRAMES)).into_iter().collect::<Vec<_>>(),
    };
    let write = |(number, part): (usize, &Part)| {
        let path = at(folder, &format!("{join}_{number}"), format);
        part.write(format, &path);
        text(&path)
    };
    let list: Vec<String> = parts.iter().enumerate().map(write).collect();
    config(json!(list), format, json!({ "join": join, "open_files": 1 })).open().unwrap()
}

/// The path of a file of a format.
fn at(folder: &Path, name: &str, format: &str) -> PathBuf {
    folder.join(match format {
        "netcdf" => format!("{name}.nc"),
        "npy" => name.to_owned(),
        _ => format!("{name}.h5"),
    })
}

fn assert_reads(data: &dyn Dataset) {
    assert_eq!((data.samples(), data.times().unwrap().len()), (SAMPLES, FRAMES));
    let whole = vec![0..3, 0..2];
    for (frames, points, samples) in [
        (0..FRAMES, whole.clone(), vec![0, 1]),
        (3..9, vec![1..3, 0..1], vec![1, 0, 1]),
        (5..6, whole.clone(), vec![1]),
        (4..4, whole.clone(), vec![0]),
        (0..FRAMES, vec![2..2, 0..2], vec![0, 1]),
        (0..2, whole, Vec::new()),
    ] {
        let window = Window { frames: frames.clone(), points: points.clone() };
        let found = data.read(&window, &samples, &["h"]).unwrap();
        let rows: Vec<i64> = samples.iter().map(|&sample| sample as i64).collect();
        let mut expected = all().index_select(0, &Tensor::from_slice(&rows));
        for (dim, range) in [(1, &frames), (3, &points[0]), (4, &points[1])] {
            expected = expected.narrow(dim, range.start as i64, range.len() as i64);
        }
        assert_eq!(found, expected, "{frames:?} {points:?} {samples:?}");
    }
}

/// By a list that is not in order, by a pattern, and by the folder; a single file stays open.
#[rstest]
fn files_along_times_are_one_series(#[values("hdf5", "netcdf", "the_well")] format: &str) {
    let folder = TempDir::new().unwrap();
    let cuts = [0..5, 5..6, 6..12];
    let names = ["late_3", "middle", "early_10"];
    for (cut, name) in cuts.into_iter().zip(names) {
        Part::new(0..SAMPLES, cut).write(format, &at(folder.path(), name, format));
    }
    let list: Vec<String> =
        [1, 2, 0].iter().map(|&own| text(&at(folder.path(), names[own], format))).collect();
    let pattern = text(&at(folder.path(), "*", format));
    for path in [json!(list), json!(pattern), json!(folder.path())] {
        let data = config(path, format, json!({ "open_files": 1 })).open().unwrap();
        assert_reads(&*data);
        assert_eq!(
            data.files().iter().map(|file| text(file)).collect::<Vec<_>>(),
            [2, 0, 1].map(|file: usize| list[file].clone())
        );
        let own = data.statistics(&["h"], 0..2).unwrap()[0].unwrap();
        let [mean, std] = common::weighted_moments(&*data, &all());
        assert!((own.mean - mean).abs() < 1e-12 && (own.std - std).abs() < 1e-12);
        let changes = data.change_statistics(&["h"], 0..2).unwrap()[0].unwrap();
        assert_eq!(changes.count, (SAMPLES * (FRAMES - 1) * 6) as u64, "over the cuts, too");
    }
}

#[rstest]
fn files_along_samples_are_one_data_set(#[values("hdf5", "netcdf", "the_well", "npy")] format: &str) {
    let folder = TempDir::new().unwrap();
    let files: Vec<PathBuf> =
        ["part_2", "part_10"].iter().map(|name| at(folder.path(), name, format)).collect();
    for (sample, file) in files.iter().enumerate() {
        Part::new(sample..sample + 1, 0..FRAMES).write(format, file);
    }
    let list: Vec<String> = files.iter().map(|file| text(file)).collect();
    let data = config(json!(list), format, json!({})).open().unwrap();
    assert_reads(&*data);
    // In the order of the list.
    let turned: Vec<&String> = list.iter().rev().collect();
    let turned = config(json!(turned), format, json!({ "join": "sample" })).open().unwrap();
    let window = Window { frames: 0..1, points: vec![0..3, 0..2] };
    assert_eq!(turned.read(&window, &[0], &["h"]).unwrap().get(0).get(0), all().get(1).get(0));
    let pattern = config(text(&at(folder.path(), "part_*", format)), format, json!({})).open().unwrap();
    assert_reads(&*pattern);
}

/// Each file counts hours from its own date, as models write them.
#[test]
fn times_in_other_units_follow_each_other_and_are_split_by_dates() {
    let folder = TempDir::new().unwrap();
    let second = Part { unit: "hours since 2000-01-02", shift: 24.0, ..Part::new(0..2, 4..12) };
    Part::new(0..2, 0..4).write("netcdf", &at(folder.path(), "a", "netcdf"));
    second.write("netcdf", &at(folder.path(), "b", "netcdf"));
    let own = json!({
        "train_times": ["2000-01-01", "2000-01-02T06"], "validation_times": ["2000-01-02T06", "2000"],
    });
    let parts = config(text(folder.path()), "netcdf", own).parts().unwrap();
    assert_eq!(parts.train.data.times().unwrap(), [0.0, 6.0, 12.0, 18.0, 24.0, 30.0]);
    assert_eq!(parts.validation.data.times().unwrap().len(), 7);
    let window = Window { frames: 3..5, points: vec![0..3, 0..2] };
    assert_eq!(parts.train.data.read(&window, &[1], &["h"]).unwrap(), all().narrow(0, 1, 1).narrow(1, 3, 2));
}

/// The Well's folders, and a key that names another one.
#[test]
fn a_folder_of_three_sets_is_all_of_them() {
    let folder = TempDir::new().unwrap();
    for (sets, sample) in [("train", 0), ("valid", 1), ("test", 1)] {
        let own = folder.path().join(sets);
        std::fs::create_dir(&own).unwrap();
        for (name, sample) in [("one.hdf5", sample), ("two.hdf5", 0)] {
            Part::new(sample..sample + 1, 0..FRAMES).write("the_well", &own.join(name));
        }
    }
    let parts = config(text(folder.path()), "the_well", json!({})).parts().unwrap();
    assert_eq!((parts.train.samples, parts.validation.samples), (0..2, 0..2));
    assert_eq!(parts.test.unwrap().data.path(), folder.path().join("test"));
    let valid = text(&folder.path().join("train/one.hdf5"));
    let parts = config(text(folder.path()), "the_well", json!({ "validation_path": valid })).parts().unwrap();
    assert_eq!(parts.validation.samples, 0..1);
    let data = config(text(folder.path()), "the_well", json!({})).open_all().unwrap();
    assert_eq!(data.samples(), 2, "training samples");
}

#[rstest]
#[case::gap(Part::new(0..2, 8..12), "frames are missing between", "12 from the last to the next where a step is 6")]
#[case::overlap(Part::new(0..2, 6..12), "overlap", "data.join=sample")]
#[case::twice(Part::new(0..2, 0..6), "overlap", "data.join=sample")]
#[case::samples(Part::new(0..1, 7..12), "has 1 trajectories, expected 2 as", "b.nc")]
#[case::latitudes(
    Part { latitudes: [-60.0, 5.0, 60.0], ..Part::new(0..2, 7..12) },
    "b.nc has latitude = 5 at index 1, expected latitude = 0 as",
    "data.path"
)]
#[case::unit(Part { in_metres: false, ..Part::new(0..2, 7..12) }, "b.nc has `h` in \"km\"", "data.path")]
fn files_that_do_not_fit_are_refused_by_name(
    #[case] second: Part,
    #[case] expected: &str,
    #[case] also: &str,
) {
    let folder = TempDir::new().unwrap();
    Part::new(0..2, 0..7).write("netcdf", &at(folder.path(), "a", "netcdf"));
    second.write("netcdf", &at(folder.path(), "b", "netcdf"));
    let join = if expected == "overlap" { json!({ "join": "time" }) } else { json!({}) };
    let error = config(text(folder.path()), "netcdf", join).open().unwrap_err().to_string();
    assert!(error.contains(expected) && error.contains(also) && error.contains("b.nc"), "{error}");
}

#[test]
fn trajectories_of_other_times_are_no_samples() {
    let folder = TempDir::new().unwrap();
    Part::new(0..1, 0..6).write("netcdf", &at(folder.path(), "a", "netcdf"));
    Part::new(1..2, 6..12).write("netcdf", &at(folder.path(), "b", "netcdf"));
    let error = config(text(folder.path()), "netcdf", json!({ "join": "sample" })).open().unwrap_err();
    let error = error.to_string();
    assert!(error.contains("b.nc has 2000-01-02 12:00:00 to"), "{error}");
    assert!(error.contains("a.nc; trajectories of one data set have the same times"), "{error}");
}

/// One file a month, one frame each: months have other lengths, and a missing one is a gap.
#[test]
fn files_of_a_frame_each_follow_each_other() {
    let folder = TempDir::new().unwrap();
    for frame in [0, 1, 2, 3, 4, 6] {
        let name = format!("step_{frame}");
        Part::new(0..2, frame..frame + 1).write("netcdf", &at(folder.path(), &name, "netcdf"));
    }
    let error = config(text(folder.path()), "netcdf", json!({})).open().unwrap_err().to_string();
    assert!(error.contains("step_4.nc") && error.contains("step_6.nc"), "{error}");
    std::fs::remove_file(at(folder.path(), "step_6", "netcdf")).unwrap();
    let data = config(text(folder.path()), "netcdf", json!({})).open().unwrap();
    assert_eq!(data.times().unwrap(), [0.0, 6.0, 12.0, 18.0, 24.0]);
}

#[test]
fn damaged_and_missing_files_are_named() {
    let folder = TempDir::new().unwrap();
    Part::new(0..2, 0..7).write("netcdf", &at(folder.path(), "a", "netcdf"));
    std::fs::write(at(folder.path(), "b", "netcdf"), "nothing").unwrap();
    let error = config(text(folder.path()), "netcdf", json!({})).open().unwrap_err();
    assert!(matches!(&error, Error::NotHdf5 { path } if path.ends_with("b.nc")), "{error}");
    let list = json!([at(folder.path(), "a", "netcdf"), at(folder.path(), "c", "netcdf")]);
    let error = config(list, "netcdf", json!({})).open().unwrap_err();
    assert!(matches!(&error, Error::Missing { path } if path.ends_with("c.nc")), "{error}");
    let wrong = json!({ "path": 3 });
    let error = serde_json::from_value::<DataConfig>(wrong).unwrap_err().to_string();
    assert!(error.contains("expected a path, a pattern"), "{error}");
}

/// Each file of samples has a static field of its own.
#[test]
fn static_fields_of_joined_samples_stay_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = |number: usize| folder.path().join(format!("{number}.nc"));
    for number in 0..2 {
        let mut content = content(Storage::default());
        content.meta.samples = 1;
        content.variables.truncate(1);
        content.variables.push(DataVariable { is_static: true, ..DataVariable::scalar("mask") });
        let mut file = writer(None, &path(number)).unwrap().create(&path(number), &content).unwrap();
        let options = (Kind::Float, Device::Cpu);
        file.write("h", 0, 0, &Tensor::zeros([3, 1, 5, 4], options)).unwrap();
        file.write("mask", 0, 0, &Tensor::full([1, 1, 5, 4], number as f64, options)).unwrap();
        file.finish().unwrap();
    }
    let table =
        json!({ "path": [path(0), path(1)], "format": "netcdf", "join": "sample", "fields": ["h", "mask"] });
    let data = serde_json::from_value::<DataConfig>(table).unwrap().open().unwrap();
    assert!(data.samples() == 2 && !data.variables()[1].is_static);
    let window = Window { frames: 1..2, points: vec![0..1, 0..1] };
    let read = data.read(&window, &[0, 1], &["mask"]).unwrap();
    assert_eq!(Vec::<f32>::try_from(&read.flatten(0, -1)).unwrap(), [0.0, 1.0]);
}
