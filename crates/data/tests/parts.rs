//! Training, validation and test sets: of several files, of ranges of times; levels, missing values and computed fields.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::str::FromStr;

use hdf5_metno::types::VarLenUnicode;
use hdf5_metno::{File, H5Type};
use isobar_data::{
    Computed, DataConfig, Dataset, Error, Normalizer, Part, Parts, PredictionMeta, TimeAxis, Window,
    check_alike,
};
use ndarray::ArrayD;
use rstest::rstest;
use serde_json::{Value, json};
use tch::{Kind, Tensor};
use tempfile::TempDir;

use crate::common;

const LAT: usize = 3;
const LON: usize = 4;
const LEVELS: [f64; 4] = [1000.0, 850.0, 500.0, 250.0];

/// A series like ERA5: `t` on levels, `u`, a mask, latitudes from north to south.
struct Series {
    unit: &'static str,
    calendar: Option<&'static str>,
    times: Vec<f64>,
    latitudes: [f64; LAT],
    /// A time and point at which `u` is missing.
    missing: Option<[usize; 3]>,
}

impl Default for Series {
    fn default() -> Self {
        Self {
            unit: "hours since 2000-01-01",
            calendar: None,
            times: (0..16).map(|frame| 6.0 * f64::from(frame)).collect(),
            latitudes: [60.0, 0.0, -60.0],
            missing: None,
        }
    }
}

/// The value of `u` at a number of hours.
fn u(hours: f64, row: usize, column: usize) -> f32 {
    (hours * 10.0) as f32 + (row * LON + column) as f32
}

impl Series {
    fn write(&self, path: &Path) {
        let file = File::create(path).unwrap();
        let frames = self.times.len();
        let mut time = vec![("units", self.unit)];
        time.extend(self.calendar.map(|calendar| ("calendar", calendar)));
        array(&file, "time", &["time"], &[frames], self.times.clone(), &time);
        array(&file, "level", &["level"], &[4], LEVELS.to_vec(), &[("units", "hPa")]);
        array(
            &file,
            "latitude",
            &["latitude"],
            &[LAT],
            self.latitudes.to_vec(),
            &[("units", "degrees_north")],
        );
        let longitudes: Vec<f64> = (0..LON).map(|column| 90.0 * column as f64).collect();
        array(&file, "longitude", &["longitude"], &[LON], longitudes, &[("units", "degrees_east")]);
        let points = || (0..LAT).flat_map(|row| (0..LON).map(move |column| (row, column)));
        let mut winds = Vec::new();
        let mut temperatures = Vec::new();
        for (frame, hours) in self.times.iter().enumerate() {
            winds.extend(points().map(|(row, column)| match self.missing {
                Some(at) if at == [frame, row, column] => -999.0,
                _ => u(*hours, row, column),
            }));
            for level in LEVELS {
                temperatures.extend(points().map(|_| (level + hours) as f32));
            }
        }
        let surface = ["time", "latitude", "longitude"];
        array(&file, "u", &surface, &[frames, LAT, LON], winds, &[("units", "m s-1")]);
        let dataset = file.dataset("u").unwrap();
        dataset.new_attr::<f32>().create("_FillValue").unwrap().write_scalar(&1e20_f32).unwrap();
        let others = dataset.new_attr::<f32>().shape(2).create("missing_value").unwrap();
        others.write_raw(&[-888_f32, -999.0]).unwrap();
        let axes = ["time", "level", "latitude", "longitude"];
        array(&file, "t", &axes, &[frames, 4, LAT, LON], temperatures, &[("units", "K")]);
        let mask: Vec<f32> = points().map(|(row, _)| row as f32).collect();
        array(&file, "mask", &["latitude", "longitude"], &[LAT, LON], mask, &[]);
    }
}

fn word(text: &str) -> VarLenUnicode {
    VarLenUnicode::from_str(text).unwrap()
}

fn array<T: H5Type>(
    file: &File,
    name: &str,
    axes: &[&str],
    shape: &[usize],
    values: Vec<T>,
    texts: &[(&str, &str)],
) {
    let values = ArrayD::from_shape_vec(shape, values).unwrap();
    let dataset = file.new_dataset_builder().with_data(&values).create(name).unwrap();
    let axes: Vec<VarLenUnicode> = axes.iter().map(|axis| word(axis)).collect();
    dataset.new_attr_builder().with_data(&axes).create("axes").unwrap();
    for (attribute, text) in texts {
        let own = dataset.new_attr::<VarLenUnicode>().create(*attribute).unwrap();
        own.write_scalar(&word(text)).unwrap();
    }
}

fn written(series: &Series) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("train.h5");
    series.write(&path);
    (folder, path)
}

fn config(path: &Path, own: Value) -> Result<DataConfig, Error> {
    let mut config =
        json!({ "path": path, "format": "hdf5", "fields": ["u"], "hdf5": { "channel": "level" } });
    config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    serde_json::from_value::<DataConfig>(config).map_err(|error| Error::Config(error.to_string()))
}

fn parts(path: &Path, own: Value) -> Result<Parts, Error> {
    config(path, own)?.parts()
}

fn refusal(path: &Path, own: Value) -> String {
    parts(path, own).unwrap_err().to_string()
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

/// The first value of `u` in each frame.
fn first_values(data: &dyn Dataset) -> Vec<f64> {
    let window = Window { frames: 0..data.times().unwrap().len(), points: vec![0..1, 0..1] };
    numbers(&data.read(&window, &[0], &["u"]).unwrap())
}

#[test]
fn one_series_is_split_by_dates() {
    let (_folder, path) = written(&Series::default());
    let own = json!({
        "train_times": ["2000-01-01", "2000-01-02"],
        "validation_times": ["2000-01-03T00", "2000-01-03T12"],
        "test_times": [72.0, 1e9],
    });
    let Parts { train, validation, test, .. } = parts(&path, own).unwrap();
    assert_eq!((train.samples, validation.samples), (0..1, 0..1));
    let hours = |frames: std::ops::Range<u32>| frames.map(|frame| 6.0 * f64::from(frame)).collect::<Vec<_>>();
    assert_eq!(train.data.times().unwrap(), hours(0..8), "both days, whole");
    assert_eq!(validation.data.times().unwrap(), hours(8..11), "the hour of noon is in it");
    let test = test.unwrap();
    assert_eq!(test.data.times().unwrap(), hours(12..16));
    assert_eq!(first_values(&*validation.data), [480.0, 540.0, 600.0]);
    let window = Window { frames: 2..4, points: vec![1..2, 1..3] };
    assert_eq!(numbers(&test.data.read(&window, &[0], &["u"]).unwrap()), [845.0, 846.0, 905.0, 906.0]);
    // Statistics are those of the part.
    let own = train.data.statistics(&["u"], 0..1).unwrap()[0].unwrap();
    assert_eq!((own.count, own.min, own.max), ((8 * LAT * LON) as u64, 0.0, 431.0));
    let changes = train.data.change_statistics(&["u"], 0..1).unwrap()[0].unwrap();
    assert_eq!(
        (changes.count, changes.mean),
        ((7 * LAT * LON) as u64, 60.0),
        "the pair at the cut is in neither"
    );
}

#[test]
fn without_further_keys_all_parts_are_of_one_data_set() {
    let (_folder, path) = written(&Series::default());
    let Parts { train, validation, test, .. } = parts(&path, json!({ "validation_samples": 0 })).unwrap();
    assert_eq!((train.samples, validation.samples), (0..1, 1..1));
    assert!(test.is_none() && std::sync::Arc::ptr_eq(&train.data, &validation.data));
    let kept =
        parts(&path, json!({ "validation_samples": 1, "times": ["2000-01-02", "2000-01-02"] })).unwrap();
    assert_eq!((kept.train.samples, kept.validation.samples), (0..0, 0..1));
    assert_eq!(kept.train.data.times().unwrap(), [24.0, 30.0, 36.0, 42.0]);
}

#[rstest]
#[case::no_frames(
    json!({ "train_times": ["1990", "1991"], "validation_times": ["2000", "2000"] }),
    "data.train_times = [\"1990\", \"1991\"] selects no frame",
)]
#[case::range_is_named(
    json!({ "train_times": ["1990", "1991"], "validation_times": ["2000", "2000"] }),
    "whose times are 2000-01-01 00:00:00 to 2000-01-04 18:00:00",
)]
#[case::overlap(
    json!({ "train_times": [0, 30], "validation_times": [24, 60] }),
    "data.validation_times and data.train_times select 2 frames",
)]
#[case::overlap_of_histories(
    json!({ "history": 2, "train_times": [0, 30], "validation_times": [18, 60] }),
    "select 3 frames",
)]
#[case::no_validation(json!({ "train_times": [0, 30] }), "without data for validation: set data.validation_times")]
#[case::leak(json!({ "validation_times": [0, 30] }), "training would see the validation frames")]
#[case::no_date(
    json!({ "train_times": ["2000-02-30", "2001"], "validation_times": [0, 1] }),
    "\"2000-02-30\" is no date of the calendar standard",
)]
#[case::key(json!({ "train_time": [0, 30] }), "`train_time` is neither a key of [data]")]
#[case::history(json!({ "history": 0 }), "data.history is 0")]
fn times_that_cannot_be_are_refused(#[case] own: Value, #[case] expected: &str) {
    let (_folder, path) = written(&Series::default());
    let error = refusal(&path, own);
    assert!(error.contains(expected), "{error}");
}

/// As many as an input has: no target is in both.
#[rstest]
#[case::frame(json!({ "train_times": [0, 30], "validation_times": [30, 60] }), [6, 6])]
#[case::history(json!({ "history": 2, "train_times": [0, 30], "validation_times": [24, 60] }), [6, 7])]
fn the_frames_of_an_input_at_the_cut_may_be_in_both(#[case] own: Value, #[case] frames: [usize; 2]) {
    let (_folder, path) = written(&Series::default());
    let parts = parts(&path, own).unwrap();
    assert_eq!([&parts.train, &parts.validation].map(|part| part.data.times().unwrap().len()), frames);
}

#[test]
fn a_calendar_without_leap_years_has_no_29_february() {
    let series = Series {
        unit: "days since 2000-02-27",
        calendar: Some("noleap"),
        times: (0..4).map(f64::from).collect(),
        ..Series::default()
    };
    let (_folder, path) = written(&series);
    let own = json!({ "times": ["2000-03-01", "2000-03"], "validation_samples": 0 });
    assert_eq!(parts(&path, own).unwrap().train.data.times().unwrap(), [2.0, 3.0]);
    let error = refusal(&path, json!({ "times": ["2000-02-29", "2000-03"] }));
    assert!(error.contains("\"2000-02-29\" is no date of the calendar noleap"), "{error}");
}

#[test]
fn other_files_are_validation_and_test_sets() {
    let (folder, path) = written(&Series::default());
    // Its times count from another date; they are given in the unit of the training data.
    let later = Series { unit: "days since 2000-02-01", times: vec![0.0, 0.25, 0.5], ..Series::default() };
    let other = folder.path().join("later.h5");
    later.write(&other);
    let found =
        parts(&path, json!({ "validation_path": other, "test_path": other, "train_samples": 1 })).unwrap();
    assert_eq!((&found.train.samples, &found.validation.samples), (&(0..1), &(0..1)));
    assert_eq!(found.train.data.times().unwrap().len(), 16, "all of it");
    assert_eq!(found.validation.data.times().unwrap(), [744.0, 750.0, 756.0]);
    assert_eq!(found.validation.data.time_unit().unwrap().unit, "hours since 2000-01-01");
    assert_eq!(first_values(&*found.predicted().data), [0.0, 2.5, 5.0]);
    // What it writes has the same dates in its own unit.
    let predicted = &*found.predicted().data;
    let out = folder.path().join("prediction.h5");
    let meta = PredictionMeta {
        name: "prediction".to_owned(),
        variables: vec!["u".to_owned()],
        samples: 1,
        times: predicted.times().unwrap().to_vec(),
        sample_times: Vec::new(),
        sample_numbers: Vec::new(),
        attributes: Vec::new(),
        missing: false,
        left_out: Vec::new(),
    };
    let window = Window { frames: 0..3, points: vec![0..LAT, 0..LON] };
    let mut writer = predicted.create(&out, &meta).unwrap();
    writer.write("u", 0, 0, &predicted.read(&window, &[0], &["u"]).unwrap().select(0, 0)).unwrap();
    writer.finish().unwrap();
    let again = parts(&out, json!({ "validation_samples": 0 })).unwrap().train.data;
    assert_eq!(again.time_unit().unwrap().unit, "days since 2000-02-01");
    assert_eq!(again.times().unwrap(), [0.0, 0.25, 0.5]);
    // Numbers are in its own unit.
    let own = json!({ "validation_path": other, "validation_times": [0.25, 0.25] });
    assert_eq!(parts(&path, own).unwrap().validation.data.times().unwrap(), [750.0]);

    let turned = Series { latitudes: [-60.0, 0.0, 60.0], ..Series::default() };
    let other = folder.path().join("turned.h5");
    turned.write(&other);
    let error = refusal(&path, json!({ "validation_path": other }));
    assert!(
        error.contains("data.validation_path: ") && error.contains("has latitude = -60 at index 0"),
        "{error}"
    );
    let error = refusal(&path, json!({ "test_path": folder.path().join("none.h5") }));
    assert!(error.contains("none.h5: no such file"), "{error}");
    let other = folder.path().join("months.h5");
    Series { calendar: Some("360_day"), ..Series::default() }.write(&other);
    let error = refusal(&path, json!({ "validation_path": other }));
    let words = "its times are in \"hours since 2000-01-01\" of the calendar 360_day, expected";
    assert!(error.contains(words) && error.contains("of the calendar standard"), "{error}");
    // The same dates.
    let other = folder.path().join("proleptic.h5");
    let proleptic = Some("proleptic_gregorian");
    Series {
        unit: "days since 1970-01-01",
        calendar: proleptic,
        times: vec![10957.0, 10957.25],
        ..Series::default()
    }
    .write(&other);
    let joined = parts(&path, json!({ "validation_path": other })).unwrap();
    assert_eq!(joined.validation.data.times().unwrap(), [0.0, 6.0]);
}

#[test]
fn levels_are_channels() {
    let (_folder, path) = written(&Series::default());
    let open = |levels: Value| {
        parts(&path, json!({ "fields": ["t", "u"], "levels": levels, "validation_samples": 0 }))
    };
    let all = open(json!([])).unwrap().train.data;
    assert_eq!(all.variables()[0].channels, ["t_1000", "t_850", "t_500", "t_250"]);
    let some = open(json!([250, 850, 500.0])).unwrap().train.data;
    assert_eq!(some.variables()[0].channels, ["t_250", "t_850", "t_500"]);
    assert_eq!(some.variables()[1].channels, ["u"]);
    let window = Window { frames: 1..3, points: vec![0..1, 2..3] };
    let read = some.read(&window, &[0], &["t", "u"]).unwrap();
    assert_eq!(read.size(), [1, 2, 4, 1, 1]);
    assert_eq!(numbers(&read), [256.0, 856.0, 506.0, 62.0, 262.0, 862.0, 512.0, 122.0]);
    let error = open(json!([500, 700])).unwrap_err().to_string();
    assert!(
        error.contains("data.levels has 700, but the levels of `t`") && error.contains("500.0, 250.0] hPa"),
        "{error}"
    );
    let error = refusal(&path, json!({ "levels": [500, 850] }));
    assert!(error.contains("no variable of") && error.contains("--set data.hdf5.channel=LEVEL"), "{error}");
}

/// Commands on data see the levels and the missing values of the configuration, as training does.
#[test]
fn all_variables_have_the_levels_and_missing_values_of_the_configuration() {
    let (_folder, path) = written(&Series { missing: Some([1, 2, 3]), ..Series::default() });
    let mut table =
        json!({ "path": path, "format": "hdf5", "fields": ["t"], "forcings": ["u", "day_of_year"] });
    table["hdf5"] = json!({ "channel": "level" });
    table["levels"] = json!([250, 850]);
    table["missing"] = json!("fill");
    let config: DataConfig = serde_json::from_value(table).unwrap();
    let data = config.open_all().unwrap();
    let names: Vec<_> = data.variables().iter().map(|variable| variable.name.as_str()).collect();
    assert_eq!(
        (names, &data.variables()[0].channels[..]),
        (vec!["t", "u"], &["t_250".to_owned(), "t_850".to_owned()][..])
    );
    let levels = data.variables()[0].levels.clone().unwrap();
    assert_eq!(
        (levels.name.as_str(), levels.unit.as_deref(), &levels.values[..]),
        ("level", Some("hPa"), &[250.0, 850.0][..])
    );
    let read = data.read(&Window { frames: 1..2, points: vec![2..3, 3..4] }, &[0], &["u"]).unwrap();
    assert!(read.double_value(&[0, 0, 0, 0, 0]).is_nan());
}

/// Outputs keep their missing values, which are the mask; inputs that are no outputs are filled.
#[test]
fn missing_values_of_outputs_stay_where_they_are_masked() {
    let (_folder, path) = written(&Series { missing: Some([1, 2, 3]), ..Series::default() });
    let own = json!({
        "train_times": [0, 18], "validation_times": [24, 60], "missing": "mask", "fill": 0.5, "validation_steps": 2,
    });
    let window = Window { frames: 1..2, points: vec![2..3, 2..4] };
    let data = parts(&path, own.clone()).unwrap().train.data;
    let read = numbers(&data.read(&window, &[0], &["u"]).unwrap());
    assert_eq!(read[0], 70.0);
    assert!(read[1].is_nan(), "{read:?}");
    let statistics = data.statistics(&["u"], 0..1).unwrap()[0].unwrap();
    assert_eq!(statistics.count, (4 * LAT * LON - 1) as u64);
    let mut as_forcing = own;
    as_forcing["fields"] = json!(["t"]);
    as_forcing["forcings"] = json!(["u"]);
    let data = parts(&path, as_forcing).unwrap().train.data;
    let read = numbers(&data.read(&window, &[0], &["u"]).unwrap());
    assert_eq!(read[1], (statistics.mean + 0.5 * statistics.std) as f32 as f64);
}

#[test]
fn missing_values_are_errors_or_filled() {
    let (_folder, path) = written(&Series { missing: Some([1, 2, 3]), ..Series::default() });
    let own = json!({ "train_times": [0, 18], "validation_times": [24, 60] });
    let data = parts(&path, own.clone()).unwrap().train.data;
    let window = Window { frames: 0..4, points: vec![0..LAT, 0..LON] };
    let error = data.read(&window, &[0], &["u"]).unwrap_err().to_string();
    assert!(error.contains("`u` has a missing value") && error.contains("at index [1, 2, 3]"), "{error}");
    assert!(error.contains("--set data.missing=fill"), "{error}");

    let with = |fill: f64| {
        let mut own = own.clone();
        own["missing"] = "fill".into();
        own["fill"] = fill.into();
        parts(&path, own).unwrap()
    };
    let Parts { train, validation, .. } = with(1.5);
    let statistics = [train.data.statistics(&["u"], 0..1).unwrap()[0].unwrap()];
    let value = |at: usize| match at == LAT * LON + 11 {
        true => f64::NAN,
        false => f64::from(u(6.0 * (at / (LAT * LON)) as f64, at % (LAT * LON) / LON, at % LON)),
    };
    let known: Vec<f64> = (0..4 * LAT * LON).map(value).collect();
    let known = Tensor::from_slice(&known).view([4, LAT as i64, LON as i64]);
    let [mean, std] = common::weighted_moments(&*train.data, &known);
    assert_eq!(statistics[0].count, (4 * LAT * LON - 1) as u64);
    assert!((statistics[0].mean - mean).abs() < 1e-9 && (statistics[0].std - std).abs() < 1e-9);
    // After normalisation it is `fill`.
    let read = train.data.read(&window, &[0], &["u"]).unwrap();
    let scaled =
        Normalizer::of_channels(&statistics).unwrap().encode(&read.flatten(0, 1).to_kind(Kind::Double));
    let scaled = numbers(&scaled.unwrap());
    assert!((scaled[LAT * LON + 11] - 1.5).abs() < 1e-6, "{}", scaled[LAT * LON + 11]);
    let frame = Window { frames: 1..2, points: vec![2..3, 3..4] };
    assert_eq!(
        numbers(&train.data.read(&frame, &[0], &["u"]).unwrap())[0],
        (mean + 1.5 * statistics[0].std) as f32 as f64
    );
    // Other parts have the training statistics, and what is not missing stays.
    assert_eq!(first_values(&*validation.data)[0], 240.0);
    // A change from or to a missing value is none.
    assert_eq!(
        train.data.change_statistics(&["u"], 0..1).unwrap()[0].unwrap().count,
        (3 * LAT * LON - 2) as u64
    );
}

/// Scales that are given say what replaces missing values, whatever the data are.
#[test]
fn missing_values_follow_the_scales_that_are_given() {
    let (_folder, path) = written(&Series { missing: Some([1, 2, 3]), ..Series::default() });
    let own = json!({ "train_times": [0, 18], "validation_times": [24, 60], "missing": "fill", "fill": 1.5 });
    let parts = parts(&path, own).unwrap();
    let other = Normalizer::new(40.0, 8.0).unwrap();
    parts.set_scales(&["u"], &other).unwrap();
    let gap = Window { frames: 1..2, points: vec![2..3, 3..4] };
    let read = |part: &Part| part.data.read(&gap, &[0], &["u"]).unwrap();
    assert_eq!(numbers(&read(&parts.train)), [52.0]);
    assert_eq!(numbers(&other.encode(&read(&parts.train)).unwrap()), [1.5]);
    assert!(numbers(&read(parts.stored()))[0].is_nan());
    let two = Normalizer::of_scales(&[1.0, 2.0]).unwrap();
    let error = parts.set_scales(&["u"], &two).unwrap_err().to_string();
    assert!(error.contains("scales of 2 channels for the 1"), "{error}");
    assert!(parts.set_target_scales(&["v"], &other).is_err());
}

/// A file whose variables lie on two grids: all variables on the first, and an error where both are named.
#[test]
fn variables_of_staggered_grids_are_not_spread_over_both() {
    let (_folder, path) = written(&Series::default());
    let file = File::open_rw(&path).unwrap();
    let edges = vec![0.0_f32; 16 * LAT * (LON + 1)];
    let axes = ["time", "latitude", "longitude_u"];
    array(&file, "v", &axes, &[16, LAT, LON + 1], edges, &[]);
    drop(file);
    let open = |fields: Value| {
        let levels = json!({ "channel": "level" });
        let table = json!({ "path": path, "format": "hdf5", "fields": fields, "hdf5": levels });
        serde_json::from_value::<DataConfig>(table).unwrap()
    };
    let data = open(json!([])).open_all().unwrap();
    assert_eq!(data.dims().len(), 2);
    assert!(data.left_out().iter().any(|left| left.starts_with("v [")), "{:?}", data.left_out());
    let error = open(json!(["u", "v"])).open().unwrap_err().to_string();
    assert!(
        error.contains("are on different grids") && error.contains("`v` has [\"latitude\", \"longitude_u\"]"),
        "{error}"
    );
}

/// Other data, such as a climatology, have the grid, channels and units of the named variables.
#[test]
fn data_that_are_used_beside_others_are_alike() {
    let (folder, path) = written(&Series::default());
    let open = |path: &Path| {
        let table = json!({ "path": path, "format": "hdf5", "fields": ["u"], "forcings": ["mask"], "validation_samples": 0 });
        let config: DataConfig = serde_json::from_value(table).unwrap();
        (config.open().unwrap(), config.open_like_targets(path.to_owned().into()).unwrap())
    };
    let (whole, targets) = open(&path);
    let names: Vec<_> = targets.variables().iter().map(|variable| variable.name.as_str()).collect();
    assert_eq!(names, ["u"], "a climatology has outputs alone");
    check_alike(&*whole, &*targets, &["u"], "metrics.climatology").unwrap();
    let turned = folder.path().join("turned.h5");
    Series { latitudes: [-60.0, 0.0, 60.0], ..Series::default() }.write(&turned);
    let error = check_alike(&*whole, &*open(&turned).1, &["u"], "metrics.climatology").unwrap_err();
    assert!(
        error.to_string().contains("metrics.climatology: ") && error.to_string().contains("latitude = -60")
    );
    // Inputs and targets are paired point by point.
    let target = json!({ "path": turned, "format": "hdf5" });
    let table = json!({
        "path": path, "format": "hdf5", "inputs": ["u"], "targets": ["mask"], "target": target,
    });
    let config: DataConfig = serde_json::from_value(table).unwrap();
    let error = config.parts().unwrap_err().to_string();
    assert!(error.contains("opposite directions") && error.contains("latitude from 60 to -60"), "{error}");
}

/// The dates stay, whatever unit a model needs.
#[test]
fn times_are_converted_to_the_unit_of_a_model() {
    let (_folder, path) = written(&Series::default());
    let own = json!({ "train_times": [0, 18], "validation_times": [24, 60] });
    let before = parts(&path, own.clone()).unwrap();
    let after = config(&path, own).unwrap().parts_in_unit("hours since 1970-01-01").unwrap();
    for (before, after) in [(&before.train, &after.train), (&before.validation, &after.validation)] {
        let [from, to] = [before, after].map(|part| TimeAxis::new(part.data.time_unit().unwrap()).unwrap());
        let times = [before, after].map(|part| part.data.times().unwrap().to_vec());
        assert_eq!(times[0].len(), times[1].len());
        assert_ne!(times[0], times[1]);
        for (own, converted) in times[0].iter().zip(&times[1]) {
            assert_eq!(from.instant(*own), to.instant(*converted));
        }
        assert_eq!(after.data.time_unit().unwrap().unit, "hours since 1970-01-01");
    }
    // Missing values stay out of the statistics.
    let (_folder, path) = written(&Series { missing: Some([1, 2, 3]), ..Series::default() });
    let filled = config(&path, json!({ "missing": "fill", "fill": 9.0, "validation_samples": 0 })).unwrap();
    let [before, after] = [filled.parts(), filled.parts_in_unit("hours since 1970-01-01")]
        .map(|parts| parts.unwrap().train.data.statistics(&["u"], 0..1).unwrap()[0].unwrap());
    assert_eq!(before.count, after.count);
    assert!((before.mean - after.mean).abs() < 1e-9 && (before.std - after.std).abs() < 1e-9);
}

#[test]
fn fields_are_computed_from_times_and_places() {
    let series = Series { times: vec![0.0, 12.0, 8784.0 / 4.0], ..Series::default() };
    let (_folder, path) = written(&series);
    let data = parts(&path, json!({ "validation_samples": 0 })).unwrap().train.data;
    let names = ["day_of_year", "time_of_day", "latitude", "longitude", "toa_radiation"].map(str::to_owned);
    assert_eq!(Computed::channels(&names).len(), 8);
    let whole = [0..LAT, 0..LON];
    let fields = Computed::new(&names, &*data, &whole).unwrap().at(data.times().unwrap()).unwrap();
    assert_eq!((fields.size(), fields.kind()), (vec![3, 8, LAT as i64, LON as i64], Kind::Double));
    let value =
        |time: i64, channel: i64, row: i64, column: i64| fields.double_value(&[time, channel, row, column]);
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
    // A quarter of the leap year 2000 has passed.
    near(value(2, 0, 1, 1), 1.0);
    near(value(2, 1, 1, 1), 0.0);
    // At noon UTC it is noon at longitude 0, and 18 h at 90 degrees east.
    near(value(1, 3, 0, 0), -1.0);
    near(value(1, 2, 0, 1), -1.0);
    near(value(1, 4, 0, 0), 60_f64.to_radians().sin());
    near(value(1, 5, 2, 1), 1.0);
    near(value(1, 6, 2, 2), -1.0);
    // The sun is below the horizon at midnight, and over the south at noon in January.
    near(value(0, 7, 1, 0), 0.0);
    assert!(value(1, 7, 2, 0) > value(1, 7, 0, 0) && value(1, 7, 1, 0) > 0.9);
    // By hand: 2000-01-01 12 h, day 0.5 of 366.
    let angle = std::f64::consts::TAU * 0.5 / 366.0;
    let declination = 0.006_918 - 0.399_912 * angle.cos() + 0.070_257 * angle.sin()
        - 0.006_758 * (2.0 * angle).cos()
        + 0.000_907 * (2.0 * angle).sin()
        - 0.002_697 * (3.0 * angle).cos()
        + 0.001_48 * (3.0 * angle).sin();
    let equation = 0.000_075 + 0.001_868 * angle.cos()
        - 0.032_077 * angle.sin()
        - 0.014_615 * (2.0 * angle).cos()
        - 0.040_849 * (2.0 * angle).sin();
    let distance = 1.000_11
        + 0.034_221 * angle.cos()
        + 0.001_28 * angle.sin()
        + 0.000_719 * (2.0 * angle).cos()
        + 0.000_077 * (2.0 * angle).sin();
    let north = 60_f64.to_radians();
    let zenith = north.sin() * declination.sin() + north.cos() * declination.cos() * equation.cos();
    near(value(1, 7, 0, 0), zenith.max(0.0) * distance);
    // A window is the window of the whole; an empty one has no points.
    let part = Computed::new(&names, &*data, &[1..3, 2..4]).unwrap().at(&[0.0, 12.0]).unwrap();
    assert!(part.equal(&fields.narrow(0, 0, 2).narrow(2, 1, 2).narrow(3, 2, 2)));
    let empty = Computed::new(&names, &*data, &[1..1, 2..4]).unwrap().at(&[0.0, 12.0]).unwrap();
    assert_eq!(empty.size(), [2, 8, 0, 2]);
}

/// The mean of the radiation over a day and over all latitudes is a quarter of the solar constant.
#[test]
fn the_earth_receives_a_quarter_of_the_solar_constant() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("globe.h5");
    let file = File::create(&path).unwrap();
    let (rows, columns) = (180, 24);
    let latitudes: Vec<f64> = (0..rows).map(|row| f64::from(row) - 89.5).collect();
    let longitudes: Vec<f64> = (0..columns).map(|column| 15.0 * f64::from(column)).collect();
    let weights: Vec<f64> = latitudes.iter().map(|latitude| latitude.to_radians().cos()).collect();
    array(&file, "time", &["time"], &[2], vec![0.0, 6.0], &[("units", "hours since 2021-03-05")]);
    array(&file, "lat", &["lat"], &[180], latitudes, &[("units", "degrees_north")]);
    array(&file, "lon", &["lon"], &[24], longitudes, &[("units", "degrees_east")]);
    array(&file, "u", &["time", "lat", "lon"], &[2, 180, 24], vec![0_f32; 2 * 180 * 24], &[]);
    drop(file);
    let data = parts(&path, json!({ "validation_samples": 0 })).unwrap().train.data;
    let name = ["toa_radiation".to_owned()];
    // Longitudes go around, so that one time has all hours of the day.
    let field = Computed::new(&name, &*data, &[0..180, 0..24]).unwrap().at(&[0.0]).unwrap();
    let weights = Tensor::from_slice(&weights).view([180, 1]);
    let mean = (field.squeeze_dim(0) * &weights).sum(Kind::Double) / (weights.sum(Kind::Double) * 24.0);
    // In early March the earth is 0.992 of its mean distance away.
    let distance = mean.double_value(&[]) * 4.0;
    assert!((distance - 0.992_f64.powi(-2)).abs() < 2e-3, "{distance}");
}

#[test]
fn fields_that_cannot_be_computed_are_refused() {
    let (_folder, path) = written(&Series { unit: "K", ..Series::default() });
    let data = parts(&path, json!({ "validation_samples": 0 })).unwrap().train.data;
    let refused = |name: &str| {
        Computed::new(&[name.to_owned()], &*data, &[0..LAT, 0..LON]).map(|_| ()).unwrap_err().to_string()
    };
    assert!(refused("time_of_day").contains("the unit of time is \"K\""), "{}", refused("time_of_day"));
    assert!(refused("moon").contains("\"moon\" is no computed field, expected one of [\"day_of_year\""));
    let error = refusal(&path, json!({ "times": ["2000", "2001"] }));
    assert!(error.contains("the unit of time is \"K\""), "{error}");
    // The options may say it.
    let time = json!({ "time": { "path": "time", "unit": "days since 2000-01-01" } });
    let own =
        json!({ "times": ["2000-01-07", "2000-01-13"], "hdf5": { "channel": "level", "variables": time } });
    assert_eq!(parts(&path, own).unwrap().validation.data.times().unwrap(), [6.0, 12.0]);
}
