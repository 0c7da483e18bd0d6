//! Formats that are written, against the readers.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use hdf5_metno::types::VarLenUnicode;
use isobar_data::{
    Content, DataConfig, DataVariable, Dataset, DatasetWriter, Dim, Error, Levels, PredictionMeta, Result,
    Storage, TimeUnit, Window, WriterEntry, WriterFormat, summarize, writer, writers,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

pub(crate) const SAMPLES: usize = 2;
pub(crate) const FRAMES: usize = 3;

pub(crate) fn noleap() -> TimeUnit {
    TimeUnit { unit: "hours since 2000-01-01".to_owned(), calendar: Some("noleap".to_owned()) }
}

/// A scalar in metres and a vector on 5 latitudes and 4 longitudes.
pub(crate) fn content(storage: Storage) -> Content {
    let dim = |name: &str, unit: &str, coordinates: &[f64], periodic| Dim {
        name: name.to_owned(),
        unit: Some(unit.to_owned()),
        coordinates: coordinates.to_vec(),
        periodic,
    };
    let height = DataVariable { unit: Some("m".to_owned()), ..DataVariable::scalar("h") };
    let channels = vec!["wind_0".to_owned(), "wind_1".to_owned()];
    let wind = DataVariable { channels, has_direction: true, ..DataVariable::scalar("wind") };
    Content {
        meta: PredictionMeta {
            name: "air".to_owned(),
            variables: vec!["h".to_owned(), "wind".to_owned()],
            samples: SAMPLES,
            times: vec![0.0, 6.0, 12.0],
            sample_times: Vec::new(),
            sample_numbers: Vec::new(),
            attributes: vec![("origin".to_owned(), "a test".to_owned())],
            missing: false,
            left_out: Vec::new(),
        },
        time_unit: Some(noleap()),
        dims: vec![
            dim("latitude", "degrees_north", &[-80.0, -40.0, 0.0, 40.0, 80.0], false),
            dim("longitude", "degrees_east", &[0.0, 90.0, 180.0, 270.0], true),
        ],
        variables: vec![height, wind],
        parameters: Vec::new(),
        storage,
    }
}

pub(crate) fn values(channels: i64) -> Tensor {
    let count = SAMPLES as i64 * FRAMES as i64 * channels * 20;
    let shape = [SAMPLES as i64, FRAMES as i64, channels, 5, 4];
    (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.5 - 7.0).view(shape)
}

pub(crate) fn open(path: &Path, format: &str) -> Box<dyn Dataset> {
    let mut table = serde_json::json!({ "path": path, "format": format, "fields": ["h", "wind"] });
    if format == "npy" {
        table["npy"] = serde_json::json!({ "variables": {
            "h": { "path": "h", "axes": ["sample", "time", "latitude", "longitude"] },
            "wind": { "path": "wind", "axes": ["sample", "time", "channel", "latitude", "longitude"] },
        } });
    }
    serde_json::from_value::<DataConfig>(table).unwrap().open().unwrap()
}

pub(crate) fn write(format: &str, path: &Path, storage: Storage, windows: &[[Range<usize>; 2]]) {
    let mut target = writer(Some(format), path).unwrap().create(path, &content(storage)).unwrap();
    assert!(target.takes_windows());
    for sample in 0..SAMPLES {
        for (name, channels) in [("h", 1), ("wind", 2)] {
            let all = values(channels).get(sample as i64);
            for points in windows {
                let [rows, cols] = points.clone().map(|range| (range.start as i64, range.len() as i64));
                let part = all.narrow(2, rows.0, rows.1).narrow(3, cols.0, cols.1);
                target.write_window(name, sample, 0, points, &part.narrow(0, 0, 2)).unwrap();
                target.write_window(name, sample, 2, points, &part.narrow(0, 2, 1)).unwrap();
            }
        }
    }
    target.finish().unwrap();
}

fn chunked() -> Storage {
    let chunks = BTreeMap::from([("time".to_owned(), 2), ("latitude".to_owned(), 3)]);
    Storage { chunks, deflate: Some(3) }
}

/// Names of components are read back, and samples have their numbers as coordinates.
#[rstest]
fn components_and_samples_keep_their_names(#[values("hdf5", "netcdf", "safetensors", "zarr")] format: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(match format {
        "netcdf" => "air.nc",
        "safetensors" => "air.safetensors",
        "zarr" => "air.zarr",
        _ => "air.h5",
    });
    let mut content = content(Storage::default());
    content.variables[1].channels = vec!["east".to_owned(), "north".to_owned()];
    content.meta.sample_numbers = vec![4, 7];
    let mut target = writer(Some(format), &path).unwrap().create(&path, &content).unwrap();
    for (sample, frame) in (0..SAMPLES).flat_map(|sample| (0..FRAMES).map(move |frame| (sample, frame))) {
        for (name, channels) in [("h", 1), ("wind", 2)] {
            let frame_of = values(channels).get(sample as i64).narrow(0, frame as i64, 1);
            target.write(name, sample, frame, &frame_of).unwrap();
        }
    }
    target.finish().unwrap();
    assert_eq!(open(&path, format).variables()[1].channels, ["east", "north"]);
    if format == "netcdf" {
        let file = hdf5_metno::File::open(&path).unwrap();
        assert_eq!(file.dataset("sample").unwrap().read_raw::<f64>().unwrap(), [4.0, 7.0]);
    }
}

/// In complete frames, and in windows of four ranks of which one is empty along a dim.
#[rstest]
fn what_is_written_is_read(
    #[values("hdf5", "netcdf", "npy", "safetensors", "the_well")] format: &str,
    #[values(false, true)] in_windows: bool,
    #[values(false, true)] compressed: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(match format {
        "netcdf" => "air.nc",
        "npy" => "air",
        "safetensors" => "air.safetensors",
        _ => "air.h5",
    });
    let windows = if in_windows {
        vec![[0..3, 0..2], [0..3, 2..4], [3..5, 0..4], [5..5, 0..4]]
    } else {
        vec![[0..5, 0..4]]
    };
    let holds_chunks = ["hdf5", "netcdf"].contains(&format);
    if compressed && !holds_chunks {
        let error = writer(Some(format), &path).unwrap().create(&path, &content(chunked())).err().unwrap();
        assert!(error.to_string().contains("write hdf5, netcdf or zarr"), "{error}");
        return;
    }
    write(format, &path, if compressed { chunked() } else { Storage::default() }, &windows);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");

    let data = open(&path, format);
    let expected = content(Storage::default());
    assert_eq!((data.samples(), data.times()), (SAMPLES, Some(&expected.meta.times[..])));
    let read =
        data.read(&Window { frames: 0..FRAMES, points: vec![0..5, 0..4] }, &[0, 1], &["h", "wind"]).unwrap();
    assert_eq!(read, Tensor::cat(&[values(1), values(2)], 2));
    let coordinates = |dims: &[Dim]| dims.iter().map(|dim| dim.coordinates.clone()).collect::<Vec<_>>();
    assert_eq!(coordinates(data.dims()), coordinates(&expected.dims));
    if format != "npy" {
        assert!(data.dims()[1].periodic);
        assert_eq!(data.variables()[0].unit.as_deref(), Some("m"));
    }
    if ["hdf5", "netcdf", "safetensors"].contains(&format) {
        assert_eq!(data.time_unit(), Some(&noleap()));
    }
    if holds_chunks {
        assert_eq!(data.chunk("h"), compressed.then(|| vec![1, 2, 3, 4]));
    }
}

#[rstest]
fn gaps_and_misfits_are_errors(#[values("hdf5", "netcdf", "npy", "safetensors", "the_well")] format: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("air");
    let create = || writer(Some(format), &path).unwrap().create(&path, &content(Storage::default())).unwrap();
    let mut target = create();
    let frame = Tensor::ones([1, 1, 5, 4], (Kind::Float, Device::Cpu));
    let mut refused = |name: &str, sample, first, points: &[Range<usize>], values: &Tensor| {
        target.write_window(name, sample, first, points, values).unwrap_err().to_string()
    };
    assert!(refused("q", 0, 0, &[0..5, 0..4], &frame).contains('q'));
    assert!(refused("h", 9, 0, &[0..5, 0..4], &frame).contains("out of range"));
    assert!(refused("h", 0, 3, &[0..5, 0..4], &frame).contains("out of range"));
    assert!(refused("h", 0, usize::MAX, &[0..5, 0..4], &frame).contains("out of range"));
    assert!(refused("h", 0, 0, &[1..6, 0..4], &frame).contains("out of range"));
    assert!(refused("h", 0, 0, &[0..5, 0..4, 0..1], &frame).contains("shape"));
    assert!(refused("wind", 0, 0, &[0..5, 0..4], &frame).contains("shape"));
    assert!(refused("h", 0, 0, &[0..5, 0..4], &(&frame * f64::NAN)).contains("not finite"));
    target.write("h", 0, 0, &frame).unwrap();
    let error = target.finish().unwrap_err().to_string();
    assert!(error.contains("frame 1 of"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left behind");
}

/// Path of a file or folder of a format.
fn path_of(folder: &tempfile::TempDir, format: &str) -> PathBuf {
    folder.path().join(match format {
        "netcdf" => "air.nc",
        "zarr" => "air.zarr",
        "npy" => "air",
        "safetensors" => "air.safetensors",
        _ => "air.h5",
    })
}

/// Levels keep their coordinates, unit and the name of their axis, which needs no key to be read as that of channels; also next to
/// a vector, and where one level is left.
#[rstest]
fn levels_are_written_and_read(
    #[values("hdf5", "netcdf", "npy", "zarr")] format: &str,
    #[values(&[850.0, 500.0, 250.0], &[500.0])] levels: &[f64],
) {
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(&folder, format);
    let mut content = content(Storage::default());
    let own = Levels { name: "level".to_owned(), unit: Some("hPa".to_owned()), values: levels.to_vec() };
    let channels = levels.iter().map(|level| format!("t_{level}")).collect();
    content.variables.push(DataVariable { channels, levels: Some(own.clone()), ..DataVariable::scalar("t") });
    content.meta.variables.push("t".to_owned());
    let mut target = writer(Some(format), &path).unwrap().create(&path, &content).unwrap();
    let counts = [("h", 1), ("wind", 2), ("t", levels.len() as i64)];
    for sample in 0..SAMPLES {
        for (name, channels) in counts {
            target.write(name, sample, 0, &values(channels).get(sample as i64)).unwrap();
        }
    }
    target.finish().unwrap();

    let mut table = serde_json::json!({ "path": path, "format": format, "fields": ["h", "wind", "t"] });
    if format == "npy" {
        table["npy"] = serde_json::json!({ "channel": "level", "variables": {
            "h": { "path": "h", "axes": ["sample", "time", "latitude", "longitude"] },
            "t": { "path": "t", "axes": ["sample", "time", "level", "latitude", "longitude"] },
        } });
        table["fields"] = serde_json::json!(["h", "t"]);
    }
    let open = |table: &serde_json::Value| {
        serde_json::from_value::<DataConfig>(table.clone()).unwrap().open().unwrap()
    };
    let data = open(&table);
    let found = data.variables().last().unwrap();
    let unit = own.unit.clone().filter(|_| format != "npy");
    assert_eq!(found.levels, Some(Levels { unit, ..own }));
    assert_eq!(data.dims().len(), 2);
    check_axes(&path, format);
    if format != "npy" {
        assert_eq!(data.variables()[1].levels, None, "numbers of components are no levels");
        assert_eq!(data.variables()[1].channels, ["wind_0", "wind_1"]);
    }
    table["fields"] = serde_json::json!(["t"]);
    table["levels"] = serde_json::json!([500]);
    let data = open(&table);
    assert_eq!(data.variables()[0].channels, ["t_500"]);
    let read = data.read(&Window { frames: 0..FRAMES, points: vec![0..5, 0..4] }, &[0, 1], &["t"]).unwrap();
    let at = levels.iter().position(|level| *level == 500.0).unwrap() as i64;
    assert_eq!(read, values(levels.len() as i64).narrow(2, at, 1));
}

/// CF's attributes of the axes, as tools find them.
fn check_axes(path: &Path, format: &str) {
    let attribute = |array: &str, name: &str| -> Option<String> {
        if format == "zarr" {
            let text = std::fs::read(path.join(array).join("zarr.json")).unwrap();
            let node: serde_json::Value = serde_json::from_slice(&text).unwrap();
            return node["attributes"][name].as_str().map(str::to_owned);
        }
        let dataset = hdf5_metno::File::open(path).unwrap().dataset(array).unwrap();
        let text = dataset.attr(name).ok()?.read_scalar::<VarLenUnicode>().unwrap();
        Some(text.to_string())
    };
    if format == "npy" {
        return;
    }
    for (array, axis) in [("level", "Z"), ("latitude", "Y"), ("longitude", "X"), ("time", "T")] {
        assert_eq!(attribute(array, "axis").as_deref(), Some(axis), "{array}");
        let is_level = array == "level";
        assert_eq!(attribute(array, "positive").as_deref(), is_level.then_some("down"), "{array}");
        assert_eq!(attribute(array, "standard_name").as_deref(), (!is_level).then_some(array));
    }
}

/// A mask is stored without samples and times, and a number of each sample without points; both are read as such. Fields of The Well
/// may be masks.
#[rstest]
fn static_and_uniform_variables_are_written_once(
    #[values("hdf5", "netcdf", "zarr", "the_well")] format: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(&folder, format);
    let mut content = content(Storage::default());
    let mask = DataVariable { is_static: true, ..DataVariable::scalar("mask") };
    let number = DataVariable { uniform: true, ..DataVariable::scalar("number") };
    content.variables = vec![DataVariable::scalar("h"), mask, number];
    if format == "the_well" {
        let error = writer(Some(format), &path).unwrap().create(&path, &content).err().unwrap().to_string();
        assert!(error.contains("`number` has no spatial dims") && error.contains("--variables"), "{error}");
        let _ = content.variables.pop();
    }
    let names: Vec<String> = content.variables.iter().map(|variable| variable.name.clone()).collect();
    content.meta.variables.clone_from(&names);
    let mut target = writer(Some(format), &path).unwrap().create(&path, &content).unwrap();
    let still = Tensor::arange(20, (Kind::Float, Device::Cpu)).view([1, 1, 5, 4]);
    target.write("mask", 0, 0, &still).unwrap();
    let error = target.write("mask", 1, 0, &still).unwrap_err().to_string();
    assert!(error.contains("out of range"), "{error}");
    for sample in 0..SAMPLES {
        target.write("h", sample, 0, &values(1).get(sample as i64)).unwrap();
        if format != "the_well" {
            let own = Tensor::arange(3, (Kind::Float, Device::Cpu)).view([3, 1, 1, 1]) + sample as f64;
            target.write("number", sample, 0, &own).unwrap();
        }
    }
    target.finish().unwrap();

    let table = serde_json::json!({ "path": path, "format": format, "fields": names });
    let data = serde_json::from_value::<DataConfig>(table).unwrap().open().unwrap();
    let flags = data.variables().iter().map(|variable| (variable.is_static, variable.uniform));
    let expected = [(false, false), (true, false), (false, true)];
    assert_eq!(flags.collect::<Vec<_>>(), &expected[..names.len()]);
    let window = Window { frames: 0..FRAMES, points: vec![0..5, 0..4] };
    let read = data.read(&window, &[0, 1], &["mask"]).unwrap();
    assert_eq!(read, still.expand([2, 3, 1, 5, 4], false));
    let summary = summarize(&*data, &["mask"], 0..SAMPLES, |_, _| ()).unwrap();
    assert_eq!((summary[0].values.unwrap().count, summary[0].changes), (20, None));
    if format != "the_well" {
        let read = data.read(&window, &[1], &["number"]).unwrap();
        assert_eq!(read.select(4, 3).select(3, 2).flatten(0, -1), Tensor::from_slice(&[1.0_f32, 2.0, 3.0]));
    }
}

/// Units of times and dims, and the calendar, are there after a file of The Well's schema; dates keep digits that float32 lacks.
#[test]
fn the_well_keeps_units_of_coordinates() {
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(&folder, "the_well");
    let mut content = content(Storage::default());
    content.meta.times = vec![1_000_000.0, 1_000_000.1, 1_000_000.2];
    let mut target = writer(Some("the_well"), &path).unwrap().create(&path, &content).unwrap();
    for sample in 0..SAMPLES {
        target.write("h", sample, 0, &values(1).get(sample as i64)).unwrap();
        target.write("wind", sample, 0, &values(2).get(sample as i64)).unwrap();
    }
    target.finish().unwrap();
    let data = open(&path, "the_well");
    assert_eq!((data.time_unit(), data.dims()), (Some(&noleap()), &content.dims[..]));
    assert_eq!(data.times().unwrap(), content.meta.times);
    // Predictions are files like it.
    let predicted = folder.path().join("predicted.h5");
    let mut target =
        data.create(&predicted, &PredictionMeta { times: vec![0.0], ..content.meta.clone() }).unwrap();
    for sample in 0..SAMPLES {
        target.write("h", sample, 0, &values(1).get(sample as i64).narrow(0, 0, 1)).unwrap();
        target.write("wind", sample, 0, &values(2).get(sample as i64).narrow(0, 0, 1)).unwrap();
    }
    target.finish().unwrap();
    assert_eq!(open(&predicted, "the_well").time_unit(), Some(&noleap()));
}

/// Missing values are written as NaN, and are read as such if they are allowed; otherwise the error names the key that does.
#[rstest]
fn missing_values_are_written_and_read(
    #[values("hdf5", "netcdf", "npy", "safetensors", "zarr")] format: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(&folder, format);
    let mut content = content(Storage::default());
    content.meta.missing = true;
    let mut target = writer(Some(format), &path).unwrap().create(&path, &content).unwrap();
    let air = values(1);
    let _ = air.get(1).get(2).get(0).get(3).narrow(0, 1, 1).fill_(f64::NAN);
    for sample in 0..SAMPLES {
        target.write("h", sample, 0, &air.get(sample as i64)).unwrap();
        target.write("wind", sample, 0, &values(2).get(sample as i64)).unwrap();
    }
    target.finish().unwrap();
    if format == "netcdf" {
        let attribute =
            hdf5_metno::File::open(&path).unwrap().dataset("h").unwrap().attr("_FillValue").unwrap();
        assert!(attribute.read_scalar::<f32>().unwrap().is_nan());
    }
    let mut table = serde_json::json!({ "path": path, "format": format, "fields": ["h"], "missing": "mask" });
    if format == "npy" {
        table["npy"] = serde_json::json!({ "axes": ["sample", "time", "latitude", "longitude"] });
    }
    let window = Window { frames: 0..FRAMES, points: vec![0..5, 0..4] };
    let open = |table: &serde_json::Value| {
        serde_json::from_value::<DataConfig>(table.clone()).unwrap().open_all().unwrap()
    };
    let data = open(&table);
    let read = data.read(&window, &[0, 1], &["h"]).unwrap();
    assert!(read.allclose(&air, 0.0, 0.0, true), "NaN in the same place");
    let found = summarize(&*data, &["h"], 0..SAMPLES, |_, _| ()).unwrap()[0].values.unwrap();
    assert_eq!(found.count as usize, air.numel() - 1);
    table["missing"] = "error".into();
    let error = open(&table).read(&window, &[0, 1], &["h"]).unwrap_err();
    assert!(matches!(error, Error::MissingValue { .. }), "{error}");
    assert!(error.to_string().contains("(NaN) at index [1, 2, 3, 1]; --set data.missing=fill"), "{error}");
}

/// By the extension; of HDF5, by the layout, whatever variables are named.
#[rstest]
#[case::hdf5("hdf5", "air.h5")]
#[case::the_well("the_well", "air.h5")]
#[case::netcdf("netcdf", "air.nc")]
#[case::zarr("zarr", "air.zarr")]
#[case::zarr_of_another_name("zarr", "air")]
#[case::npy("npy", "air")]
fn a_format_that_is_not_named_is_detected(#[case] format: &str, #[case] name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    write(format, &path, Storage::default(), &[[0..5, 0..4]]);
    let config = |table: serde_json::Value| serde_json::from_value::<DataConfig>(table).unwrap();
    let detected = config(serde_json::json!({ "path": path, "fields": ["h"] }));
    assert_eq!(detected.format_name(), format);
    if format != "npy" {
        assert_eq!(detected.open().unwrap().variables().len(), if format == "the_well" { 2 } else { 1 });
    }
    // A table of a format that does not read the file changes nothing.
    let named = config(serde_json::json!({ "path": path, "pdebench": {}, "hdf5": { "cut": 1 } }));
    assert_eq!(named.format_name(), format);
    // Configurations of earlier versions.
    let former = config(serde_json::json!({ "path": path, "format": "darcy" }));
    assert_eq!(former.format_name(), if format == "zarr" { "zarr" } else { "darcy" });
}

#[test]
fn a_file_that_no_format_reads_is_an_error_that_lists_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("air.grib");
    let open = || DataConfig { path: path.clone().into(), ..DataConfig::default() }.open().unwrap_err();
    assert!(matches!(open(), Error::Missing { .. }));
    std::fs::write(&path, "").unwrap();
    let error = open().to_string();
    assert!(error.contains("--set data.format=NAME") && error.contains("netcdf, npy"), "{error}");
}

#[test]
fn writers_are_found_by_name_and_extension() {
    let names: Vec<&str> = writers().iter().map(|writer| writer.name()).collect();
    assert!(
        ["hdf5", "netcdf", "npy", "safetensors", "the_well"].iter().all(|name| names.contains(name)),
        "{names:?}"
    );
    assert_eq!(writer(None, Path::new("a.NC")).unwrap().name(), "netcdf");
    let error = writer(None, Path::new("a.grib")).unwrap_err().to_string();
    assert!(error.contains("name one of") && error.contains("netcdf"), "{error}");
    let error = writer(Some("netcfd"), Path::new("a")).unwrap_err().to_string();
    assert!(error.contains("did you mean \"netcdf\"? the registered output formats are darcy, "), "{error}");
    let none = Storage { chunks: BTreeMap::from([("x".to_owned(), 0)]), deflate: None };
    assert!(none.chunk(&["x"], &[4]).unwrap_err().to_string().contains("extent 0"));
    assert!(Storage { deflate: Some(10), ..Storage::default() }.chunk(&["x"], &[4]).is_err());
}

/// Chunks of Zarr stay below what its reader takes: along axes without a given extent they become smaller, others are an error.
#[test]
fn chunks_of_zarr_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let create = |name: &str, chunks: &[(&str, usize)]| {
        let chunks = chunks.iter().map(|(axis, extent)| ((*axis).to_owned(), *extent)).collect();
        let mut content = content(Storage { chunks, deflate: None });
        let line = |count: usize| (0..count).map(|at| at as f64 * 1e-3).collect();
        (content.dims[0].coordinates, content.dims[1].coordinates) = (line(16_384), line(20_000));
        writer(Some("zarr"), Path::new("x")).unwrap().create(&folder.path().join(name), &content)
    };
    assert_eq!(create("a", &[]).unwrap().tile(), Some(vec![16_384, 10_000]));
    assert_eq!(create("b", &[("longitude", 20_000)]).unwrap().tile(), Some(vec![8_192, 20_000]));
    let error = create("c", &[("latitude", 16_384), ("longitude", 20_000)]).err().unwrap().to_string();
    assert!(error.contains("expected at most") && error.contains("--chunk"), "{error}");
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        0,
        "nothing is left of what is not finished"
    );
}

/// Bytes of a file, or of all files below a folder, by path.
fn bytes(path: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let (mut found, mut left) = (BTreeMap::new(), vec![path.to_owned()]);
    while let Some(at) = left.pop() {
        if at.is_dir() {
            left.extend(std::fs::read_dir(&at).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            let _ = found.insert(at.strip_prefix(path).unwrap().to_owned(), std::fs::read(&at).unwrap());
        }
    }
    found
}

/// Writes the blocks that are not there, and returns how many there were; after `most` it ends as a process that is killed does.
fn resume(format: &str, path: &Path, storage: &Storage, plan: &str, most: usize) -> usize {
    let content = content(storage.clone());
    let mut target =
        writer(Some(format), path).unwrap().create_or_resume(path, &content, plan, |_| None).unwrap();
    let (mut there, mut written) = (0, 0);
    for sample in 0..SAMPLES {
        for (name, channels) in [("h", 1), ("wind", 2)] {
            for (first, frames) in [(0, 2), (2, 1)] {
                if target.is_written(name, sample, first..first + frames) {
                    there += 1;
                    continue;
                }
                if written == most {
                    return there;
                }
                let values = values(channels).get(sample as i64).narrow(0, first as i64, frames as i64);
                target.write(name, sample, first, &values).unwrap();
                written += 1;
            }
        }
    }
    target.finish().unwrap();
    there
}

/// A file that was written by several processes has the bytes of one that was written at once, also if the log of the values is damaged.
#[rstest]
#[case::hdf5("hdf5", false)]
#[case::packed_hdf5("hdf5", true)]
#[case::netcdf("netcdf", false)]
#[case::packed_netcdf("netcdf", true)]
#[case::npy("npy", false)]
#[case::the_well("the_well", false)]
fn an_interrupted_writer_resumes(#[case] format: &str, #[case] is_packed: bool) {
    let storage = if is_packed { chunked() } else { Storage::default() };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let resume = |plan: &str, most| resume(format, &path("air"), &storage, plan, most);
    assert_eq!(self::resume(format, &path("once"), &storage, "plan", usize::MAX), 0);
    let log = path(".air.partial/values");
    let change = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = std::fs::read(&log).unwrap();
        change(&mut bytes);
        std::fs::write(&log, bytes).unwrap();
    };

    assert_eq!(resume("plan", 3), 0);
    // The third block is incomplete.
    change(&|log| log.truncate(log.len() - 1));
    assert_eq!(resume("plan", 2), 2);
    // A value of the fourth block is another one.
    change(&|log| *log.last_mut().unwrap() ^= 1);
    assert_eq!(resume("plan", 4), 3);
    // The log of another plan is not used, even if its folder were.
    let old = std::fs::read(&log).unwrap();
    assert_eq!(resume("another plan", 2), 0);
    change(&|log| log.clone_from(&old));
    assert_eq!(resume("another plan", 2), 0);
    assert!(!path("air").exists());
    assert_eq!(resume("another plan", usize::MAX), 2);
    assert_eq!(bytes(&path("air")), bytes(&path("once")));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
}

/// Without room for the target and a log of its values, an interrupted writer starts again.
#[test]
fn values_are_logged_if_there_is_room() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("air.h5");
    let log = folder.path().join(".air.h5.partial/values");
    let content = content(Storage::default());
    let needed = 2 * content.bytes();
    let create = |free: u64| {
        let format = writer(Some("hdf5"), &path).unwrap();
        let mut target = format.create_or_resume(&path, &content, "plan", |_| Some(free)).unwrap();
        let there = target.is_written("h", 0, 0..3);
        target.write("h", 0, 0, &values(1).get(0)).unwrap();
        (there, target.is_resumable(), std::fs::metadata(&log).unwrap().len())
    };
    let (there, resumes, logged) = create(needed);
    assert!(!there && resumes && logged > 0, "{logged}");
    // The log has its room.
    assert_eq!(create(needed - logged), (true, true, 2 * logged));
    assert_eq!(create(needed - 2 * logged - 1), (false, false, 0));
}

/// A writer of another format does not continue the unfinished folder of the first.
#[rstest]
#[case("npy", "zarr")]
#[case("zarr", "npy")]
#[case("hdf5", "netcdf")]
fn another_format_starts_again(#[case] first: &str, #[case] second: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let resume =
        |format: &str, name: &str, most| self::resume(format, &path(name), &Storage::default(), "plan", most);
    assert_eq!(resume(first, "air", 3), 0);
    assert_eq!(resume(second, "air", usize::MAX), 0);
    assert_eq!(resume(second, "once", usize::MAX), 0);
    assert_eq!(bytes(&path("air")), bytes(&path("once")));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
}

/// An error at the end keeps the values that were written.
#[rstest]
fn a_writer_that_cannot_finish_resumes(#[values("hdf5", "npy", "zarr")] format: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("air");
    let (content, format_of) = (content(Storage::default()), writer(Some(format), &path).unwrap());
    let mut target = format_of.create_or_resume(&path, &content, "plan", |_| None).unwrap();
    target.write("h", 0, 0, &values(1).get(0)).unwrap();
    assert!(target.is_resumable());
    assert!(target.finish().unwrap_err().to_string().contains("written"));
    assert_eq!(resume(format, &path, &Storage::default(), "plan", usize::MAX), 2);
    assert!(!format_of.create(&folder.path().join("other"), &content).unwrap().is_resumable());
}

/// A format that checks nothing.
struct Unchecked(PathBuf);

impl WriterFormat for Unchecked {
    const NAME: &'static str = "unchecked";
    const SUMMARY: &'static str = "An empty file.";

    fn create(path: &Path, _content: &Content) -> Result<Box<dyn DatasetWriter>> {
        Ok(Box::new(Self(path.to_owned())))
    }
}

impl DatasetWriter for Unchecked {
    fn write(&mut self, _variable: &str, _sample: usize, _first: usize, _values: &Tensor) -> Result<()> {
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        std::fs::write(self.0, "").unwrap();
        Ok(())
    }
}

/// Values that the content does not have are errors, also if the format does not check them.
#[test]
fn logged_values_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("air");
    let content = content(Storage::default());
    let create =
        || WriterEntry::of::<Unchecked>().create_or_resume(&path, &content, "plan", |_| None).unwrap();
    let mut target = create();
    let frames = values(1).get(0).narrow(0, 0, 2);
    for (name, sample, first, values, problem) in [
        ("v", 0, 0, frames.shallow_clone(), "there is no field `v`"),
        ("h", 2, 0, frames.shallow_clone(), "sample range 2..3 is out of range: there are 2"),
        ("h", 0, 2, frames.shallow_clone(), "frame range 2..4 is out of range: there are 3"),
        ("h", usize::MAX, usize::MAX, frames.shallow_clone(), "out of range"),
        ("wind", 0, 0, frames.shallow_clone(), "expected [2, 2, 5, 4]"),
        ("h", 0, 0, frames.get(0), "expected [1, 1, 5, 4]"),
        ("h", 0, 0, frames.mean(Kind::Float), "expected [0, 1, 5, 4]"),
    ] {
        let error = target.write(name, sample, first, &values).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
    target.write("h", 1, 1, &frames).unwrap();
    drop(target);
    let target = create();
    assert!(target.is_written("h", 1, 1..3) && !target.is_written("h", 1, 0..3));
    assert!(!target.is_written("h", 0, 4..6), "frames of the next sample");
    target.finish().unwrap();
    assert!(path.is_file());
}

/// Content that a format cannot hold is an error before a folder is made.
#[test]
fn content_that_a_format_cannot_hold_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("air");
    let mut content = content(Storage::default());
    content.variables[0].name = "latitude".to_owned();
    for format in ["hdf5", "npy"] {
        let error =
            writer(Some(format), &path).unwrap().create_or_resume(&path, &content, "plan", |_| None).err();
        assert!(error.unwrap().to_string().contains("cannot be the name"));
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
