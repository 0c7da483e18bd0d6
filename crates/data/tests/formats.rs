//! Formats of named arrays, against files of their reference writers (tests/data/formats/make.py), and formats by name.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::single_range_in_vec_init, reason = "the window of a single dim")]

use std::ops::Range;
use std::path::{Path, PathBuf};

use isobar_data::{
    DataConfig, DataSource, DataVariable, Dataset, Dim, Error, Format, PredictionMeta, Result, Window,
};
use rstest::rstest;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::common;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/formats").join(name)
}

fn open(path: &Path, format: &str, fields: &[&str], own: Value) -> Result<Box<dyn Dataset>> {
    let mut config = json!({ "path": path, "format": format, "fields": fields });
    config[format] = own;
    serde_json::from_value::<DataConfig>(config).map_err(|error| Error::Config(error.to_string()))?.open()
}

fn refusal(path: &Path, format: &str, fields: &[&str], own: Value) -> String {
    open(path, format, fields, own).map(|_| ()).unwrap_err().to_string()
}

/// Axes of the arrays in files that store no names of axes.
fn unnamed() -> Value {
    json!({
        "axes": ["sample", "time", "lat", "lon"],
        "variables": { "mask": { "path": "mask", "axes": ["lat", "lon"] } },
    })
}

/// The values that make.py stores: `u`, `v` and `mask`.
fn expected(samples: &[usize], frames: Range<usize>, lat: Range<usize>, lon: Range<usize>) -> Vec<f64> {
    let mut values = Vec::new();
    for &sample in samples {
        for frame in frames.clone() {
            for variable in 0..3 {
                for y in lat.clone() {
                    for x in lon.clone() {
                        let still = (10 * y + x) as f64;
                        let u = (1000 * sample + 100 * frame) as f64 + still;
                        values.push([u, -u / 2.0, still][variable]);
                    }
                }
            }
        }
    }
    values
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

#[rstest]
#[case("stored.npz", "npy", unnamed())]
#[case("deflated.npz", "npy", unnamed())]
#[case("arrays.safetensors", "safetensors", unnamed())]
#[case("plain.h5", "hdf5", json!({
    "axes": ["sample", "time", "lat", "lon"],
    "variables": { "u": "run/u", "v": "/run/v", "mask": { "path": "mask", "axes": ["lat", "lon"] } },
    "coordinates": { "lat": "grid/latitudes" },
}))]
#[case("scales.h5", "hdf5", json!({}))]
#[case("classic.nc", "netcdf", json!({}))]
#[case("offset64.nc", "netcdf", json!({}))]
#[case("data64.nc", "netcdf", json!({}))]
#[case("netcdf4.nc", "netcdf", json!({}))]
#[case("variables_first.nc", "netcdf", json!({}))]
fn every_format_reads_the_same(#[case] file: &str, #[case] format: &str, #[case] own: Value) {
    let names = ["u", "v", "mask"];
    let data = open(&fixture(file), format, &names, own).unwrap();
    assert_eq!((data.samples(), data.times().unwrap().len()), (3, 5));
    let extents: Vec<usize> = data.dims().iter().map(|dim| dim.coordinates.len()).collect();
    assert_eq!(extents, [4, 6]);
    for (samples, frames, lat, lon) in
        [(vec![0, 1, 2], 0..5, 0..4, 0..6), (vec![2, 0], 1..4, 1..3, 2..6), (vec![1, 1, 0], 4..5, 3..4, 0..1)]
    {
        let window = Window { frames: frames.clone(), points: vec![lat.clone(), lon.clone()] };
        let read = data.read(&window, &samples, &names).unwrap();
        let shape = [samples.len(), frames.len(), 3, lat.len(), lon.len()].map(|extent| extent as i64);
        assert_eq!(read.size(), shape);
        assert_eq!(values(&read), expected(&samples, frames, lat, lon));
    }
    let empty = Window { frames: 0..5, points: vec![2..2, 0..6] };
    assert_eq!(data.read(&empty, &[0], &names).unwrap().size(), [1, 5, 3, 0, 6]);
    let beyond = Window { frames: 0..5, points: vec![0..5, 0..6] };
    assert!(matches!(data.read(&beyond, &[0], &names), Err(Error::OutOfRange { .. })));
    assert!(matches!(data.read(&empty, &[3], &names), Err(Error::OutOfRange { .. })));

    let [v, u] = [0, 1].map(|at| data.statistics(&["v", "u"], 1..3).unwrap()[at].unwrap());
    let of_u = Tensor::from_slice(&expected(&[1, 2], 0..5, 0..4, 0..6)).view([10, 3, 4, 6]).select(1, 0);
    let [mean, std] = common::weighted_moments(&*data, &of_u);
    assert!((u.mean - mean).abs() < 1e-9 && (u.std - std).abs() < 1e-9, "{u:?}");
    assert!(u.max == 2435.0 && u.count == 240, "{u:?}");
    assert!((v.mean + u.mean / 2.0).abs() < 1e-9);
    let changes = data.change_statistics(&["u"], 0..2).unwrap()[0].unwrap();
    assert_eq!((changes.mean, changes.std, changes.count), (100.0, 0.0, 192));
}

#[rstest]
fn coordinates_units_and_periodicity_come_with_the_file(
    #[values("classic.nc", "data64.nc", "netcdf4.nc", "variables_first.nc")] file: &str,
) {
    let data = open(&fixture(file), "netcdf", &["u"], json!({})).unwrap();
    let [lat, lon] = data.dims() else { panic!("{:?}", data.dims()) };
    assert_eq!(
        (lat.name.as_str(), &lat.coordinates[..], lat.periodic),
        ("lat", &[60.0, 20.0, -20.0, -60.0][..], false)
    );
    assert_eq!((lon.unit.as_deref(), lon.periodic), (Some("degrees_east"), true), "around the globe");
    assert_eq!(data.times().unwrap(), [0.0, 6.0, 12.0, 18.0, 24.0]);
    assert_eq!(data.variables()[0].unit.as_deref(), Some("m s-1"));
    // Without a unit nothing says that it goes around; the options do.
    let plain = |own| open(&fixture("scales.h5"), "hdf5", &["u"], own).unwrap();
    assert!(!plain(json!({})).dims()[1].periodic);
    assert!(plain(json!({ "periodic": ["lon"] })).dims()[1].periodic);
}

#[test]
fn a_folder_of_npy_files_and_a_single_one() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("u.npy"), folder.path().join("wind.npy")).unwrap();
    std::fs::write(folder.path().join("README"), "not an array").unwrap();
    for (path, name) in [(folder.path().to_owned(), "wind"), (fixture("u.npy"), "u")] {
        let data = open(&path, "npy", &[name], unnamed()).unwrap();
        let window = Window { frames: 4..5, points: vec![3..4, 5..6] };
        assert_eq!(values(&data.read(&window, &[2], &[name]).unwrap()), [2435.0]);
    }
}

/// Pieces of two steps share the frame at their ends: no step is lost.
#[test]
fn trajectories_are_cut_into_pieces() {
    let data = open(&fixture("classic.nc"), "netcdf", &["u"], json!({ "cut": 2 })).unwrap();
    assert_eq!((data.samples(), data.times().unwrap()), (6, &[0.0, 6.0, 12.0][..]));
    let window = Window { frames: 0..3, points: vec![0..1, 0..1] };
    let read = data.read(&window, &[5, 0, 1], &["u"]).unwrap();
    assert_eq!(values(&read), [2200.0, 2300.0, 2400.0, 0.0, 100.0, 200.0, 200.0, 300.0, 400.0]);
}

/// Another axis as samples or channels: of the 4 latitudes, say, the levels of one field.
#[test]
fn axes_mean_what_the_options_say() {
    let own = json!({ "sample": "time", "time": "sample", "channel": "lat" });
    let data = open(&fixture("classic.nc"), "netcdf", &["u"], own).unwrap();
    assert_eq!((data.samples(), data.times().unwrap(), data.dims().len()), (5, &[0.0, 1.0, 2.0][..], 1));
    assert_eq!(data.variables()[0].channels, ["u_60", "u_20", "u_-20", "u_-60"]);
    assert!(data.variables()[0].has_direction);
    let read = data.read(&Window { frames: 1..2, points: vec![5..6] }, &[4], &["u"]).unwrap();
    assert_eq!(values(&read), [1405.0, 1415.0, 1425.0, 1435.0]);
}

/// Without an axis of the name that the options have, the unit says which axis is that of times, as longitudes are known by theirs.
#[test]
fn an_axis_of_times_is_known_by_its_unit() {
    let renamed = |axis: &str| {
        json!({
            "variables": { "u": { "path": "u", "axes": [axis, "sample", "lat", "lon"] } },
            "coordinates": { axis: "time" },
        })
    };
    let data = open(&fixture("classic.nc"), "netcdf", &["u"], renamed("valid_time")).unwrap();
    assert_eq!(
        (data.samples(), data.times().unwrap(), data.dims().len()),
        (3, &[0.0, 6.0, 12.0, 18.0, 24.0][..], 2)
    );
    assert_eq!(data.time_unit().unwrap().unit, "hours since 2000-01-01");
    // An axis of samples stays one, whatever its unit.
    let mut samples = renamed("valid_time");
    samples["sample"] = json!("valid_time");
    let data = open(&fixture("classic.nc"), "netcdf", &["u"], samples).unwrap();
    assert_eq!((data.samples(), data.times()), (5, None));
    // An axis that the options name has precedence.
    let named = json!({ "time": "sample", "sample": "lat", "variables": renamed("when")["variables"] });
    let data = open(&fixture("classic.nc"), "netcdf", &["u"], named).unwrap();
    assert_eq!((data.samples(), data.times().unwrap()), (4, &[0.0, 1.0, 2.0][..]));
}

/// A place among the variables serves for coordinates, too, if it has the axis's extent.
#[test]
fn coordinates_are_found_by_the_places_of_variables() {
    let u = json!({ "path": "run/u", "axes": ["sample", "time", "lat", "lon"] });
    let own = json!({ "variables": {
        "u": u, "lon": "mask",
        "lat": { "path": "grid/latitudes", "unit": "degrees_north" },
    } });
    let data = open(&fixture("plain.h5"), "hdf5", &["u"], own).unwrap();
    let [lat, lon] = data.dims() else { panic!("{:?}", data.dims()) };
    assert_eq!(
        (&lat.coordinates[..], lat.unit.as_deref()),
        (&[60.0, 20.0, -20.0, -60.0][..], Some("degrees_north"))
    );
    assert_eq!(lon.coordinates, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
}

#[test]
fn missing_values_are_refused_with_their_index() {
    let data = open(&fixture("missing.nc"), "netcdf", &["v"], json!({})).unwrap();
    let read = |frames| data.read(&Window { frames, points: vec![0..3] }, &[0], &["v"]);
    let _ = read(0..2).unwrap();
    let error = read(1..4).unwrap_err().to_string();
    assert!(
        error.ends_with("`v` has a missing value (its fill value) at index [2, 1]; --set data.missing=fill (or mask) allows missing values"),
        "{error}"
    );
}

#[rstest]
#[case("stored.npz", "npy", &["w"], unnamed(), "there is no field `w`; the file's fields are `mask`, `u`, `v`")]
#[case("stored.npz", "npy", &[], unnamed(), "names no field; ")]
#[case("classic.nc", "netcdf", &[], json!({}), "--set 'data.fields=[\"u\", \"v\"]'")]
#[case("stored.npz", "npy", &["u"], json!({}), "the axes of `u`, of shape [3, 5, 4, 6], have no names; name them, for example --set 'data.npy.axes=[\"sample\", \"time\", \"x\", \"y\"]'")]
#[case("stored.npz", "npy", &["u"], json!({ "axes": ["x", "y"] }), "but its axes are [\"x\", \"y\"]; name 4 axes in data.npy.variables.u")]
#[case("stored.npz", "npy", &["u"], json!({ "axes": ["a", "b", "c", "d"] }), "the spatial dims [\"a\", \"b\", \"c\", \"d\"], expected 1 to 3")]
#[case("stored.npz", "npy", &["u"], json!({ "axes": ["a", "a", "c", "d"] }), "expected axes of different names")]
#[case("stored.npz", "npy", &["u", "mask"], json!({
    "axes": ["sample", "time", "lat", "lon"],
    "variables": { "mask": { "path": "mask", "axes": ["lon", "lat"] } },
}), "`mask` is of 4 points along lon, expected 6 to agree with `u`")]
#[case("classic.nc", "netcdf", &["u"], json!({ "periodic": ["x"] }), "data.netcdf.periodic names \"x\", expected of the spatial dims [\"lat\", \"lon\"]")]
#[case("classic.nc", "netcdf", &["u"], json!({ "cut": 5 }), "data.netcdf.cut is 5, expected 1 to 4")]
#[case("classic.nc", "netcdf", &["u"], json!({ "axis": [] }), "[data.netcdf]: unknown field `axis`")]
#[case("plain.h5", "hdf5", &["u"], json!({ "variables": { "u": { "path": "run/u", "axis": [] } } }), "[data.hdf5]: unknown field `axis`")]
#[case("plain.h5", "hdf5", &["u"], json!({ "variables": { "u": "run/w" } }), "the dataset `run/w` is missing; `run` holds ")]
#[case("classic.nc", "hdf5", &["u"], json!({}), "--set data.format=netcdf")]
#[case("make.py", "npy", &["u"], json!({}), "neither a .npy nor a .npz file")]
fn what_does_not_fit_says_how_to_mend_it(
    #[case] file: &str,
    #[case] format: &str,
    #[case] fields: &[&str],
    #[case] own: Value,
    #[case] words: &str,
) {
    let error = refusal(&fixture(file), format, fields, own);
    assert!(error.contains(words), "{error}");
}

#[test]
fn an_unknown_format_lists_those_that_are_registered() {
    let error = serde_json::from_value::<DataConfig>(json!({ "netcfd": {} })).unwrap_err().to_string();
    assert!(error.contains("`netcfd` is neither a key of [data] nor a data format"), "{error}");
    let error =
        serde_json::from_value::<DataConfig>(json!({ "format": "netcfd" })).unwrap().open().unwrap_err();
    let error = error.to_string();
    let names: Vec<&str> = isobar_data::registered().iter().map(|format| format.name()).collect();
    assert!(names.iter().all(|name| error.contains(name)), "{error}");
    assert!(
        error.starts_with("data.format: no data format is called \"netcfd\"; did you mean \"netcdf\"? "),
        "{error}"
    );
}

/// Cut off or with a byte changed, a file is refused or read: no panic, no endless loop, no memory beyond the file's. Changes each of
/// the first and last 512 bytes and every ninth between; with `--full`, every byte.
#[rstest]
#[case("u.npy", "npy", unnamed())]
#[case("stored.npz", "npy", unnamed())]
#[case("deflated.npz", "npy", unnamed())]
#[case("arrays.safetensors", "safetensors", unnamed())]
#[case("classic.nc", "netcdf", json!({}))]
#[case("data64.nc", "netcdf", json!({}))]
fn damaged_files_are_refused_or_read(#[case] file: &str, #[case] format: &str, #[case] own: Value) {
    let content = std::fs::read(fixture(file)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(file);
    let attempt = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let Ok(data) = open(&path, format, &["u"], own.clone()) else { return };
        let points = data.dims().iter().map(|dim| 0..dim.coordinates.len()).collect();
        let frames = 0..data.times().map_or(1, <[f64]>::len);
        let _ = data.read(&Window { frames, points }, &[0], &["u"]);
    };
    for length in (0..content.len()).step_by(7) {
        attempt(&content[..length]);
    }
    let full = std::env::var_os("XTASK_FULL").is_some();
    let near = |at: usize| at < 512 || at + 512 >= content.len();
    for at in (0..content.len()).filter(|&at| full || near(at) || at.is_multiple_of(9)) {
        for flip in [0x01, 0x80, 0xff] {
            let mut damaged = content.clone();
            damaged[at] ^= flip;
            attempt(&damaged);
        }
    }
}

/// Headers that promise more than the file holds are refused before memory is taken for it.
#[test]
fn promises_larger_than_the_file_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bomb.npy");
    let mut bomb = b"\x93NUMPY\x01\x00".to_vec();
    let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 1000000, 1000, 1000), }\n";
    bomb.extend((header.len() as u16).to_le_bytes());
    bomb.extend(header.as_bytes());
    bomb.extend([0; 64]);
    std::fs::write(&path, &bomb).unwrap();
    let error = refusal(&path, "npy", &["bomb"], unnamed());
    assert!(
        error.ends_with("expected no more values than there are bytes; copy or download the file again"),
        "{error}"
    );

    let path = folder.path().join("bomb.safetensors");
    let header = r#"{"u":{"dtype":"F32","shape":[3,5,4,6],"data_offsets":[0,99999999]}}"#;
    let bomb = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 64]].concat();
    std::fs::write(&path, bomb).unwrap();
    let error = refusal(&path, "safetensors", &["u"], unnamed());
    assert!(error.ends_with("expected as many bytes as its values take, in the file"), "{error}");

    // A member that says that it unpacks to more than deflate can.
    let path = folder.path().join("bomb.npz");
    let mut content = std::fs::read(fixture("deflated.npz")).unwrap();
    let entry = content.windows(4).position(|window| window == b"PK\x01\x02").unwrap();
    content[entry + 24..entry + 28].copy_from_slice(&0x7000_0000_u32.to_le_bytes());
    std::fs::write(&path, content).unwrap();
    let error = refusal(&path, "npy", &["u"], unnamed());
    assert!(error.contains("of 1879048192 bytes in "), "{error}");
}

/// A FIFO would block, and a device never ends.
#[rstest]
fn special_files_are_refused(#[values("npy", "netcdf", "hdf5", "safetensors")] format: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pipe");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for path in [path.as_path(), Path::new("/dev/zero")] {
        let error = refusal(path, format, &["u"], json!({}));
        assert!(error.starts_with(&format!("{}: ", path.display())), "{error}");
    }
    let error = refusal(&folder.path().join("none"), format, &["u"], json!({}));
    assert!(error.ends_with("no such file"), "{error}");
}

/// Datasets that no run names may be of any type and compression.
#[test]
fn other_datasets_of_a_file_do_not_matter() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mixed.h5");
    std::fs::copy(fixture("plain.h5"), &path).unwrap();
    let file = hdf5_metno::File::open_rw(&path).unwrap();
    let text: hdf5_metno::types::VarLenUnicode = "a note".parse().unwrap();
    file.new_dataset::<hdf5_metno::types::VarLenUnicode>()
        .create("note")
        .unwrap()
        .write_scalar(&text)
        .unwrap();
    file.new_dataset::<f32>()
        .shape((64, 64))
        .chunk((8, 8))
        .scale_offset(hdf5_metno::filters::ScaleOffset::FloatDScale(2))
        .create("odd")
        .unwrap();
    drop(file);
    let own = json!({ "axes": ["sample", "time", "lat", "lon"], "variables": { "u": "run/u" } });
    open(&path, "hdf5", &["u"], own.clone()).unwrap();
    let mut named = own;
    named["variables"] = json!({ "odd": { "path": "odd", "axes": ["x", "y"] } });
    let error = refusal(&path, "hdf5", &["odd"], named.clone());
    assert!(error.contains("`odd` is packed by the filters"), "{error}");
    named["variables"] = json!({ "note": { "path": "note", "axes": [] } });
    assert!(open(&path, "hdf5", &["note"], named).is_err());
}

/// The format `hdf5` reads predictions without options.
#[test]
fn predictions_are_plain_hdf5_that_describes_itself() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prediction.h5");
    let data = open(&fixture("classic.nc"), "netcdf", &["u", "mask"], json!({})).unwrap();
    let meta = PredictionMeta {
        name: "weather by test".to_owned(),
        variables: vec!["u".to_owned()],
        samples: 2,
        times: vec![6.0, 12.0, 18.0],
        sample_times: Vec::new(),
        sample_numbers: Vec::new(),
        attributes: vec![("isobar_data".to_owned(), "classic.nc".to_owned())],
        missing: false,
        left_out: Vec::new(),
    };
    let window = Window { frames: 1..4, points: vec![0..4, 0..6] };
    let mut writer = data.create(&path, &meta).unwrap();
    for sample in 0..2 {
        let frames = data.read(&window, &[sample], &["u"]).unwrap().select(0, 0);
        writer.write("u", sample, 0, &frames).unwrap();
    }
    assert!(writer.write("v", 0, 0, &Tensor::zeros([1, 1, 4, 6], (Kind::Float, Device::Cpu))).is_err());
    assert!(writer.write("u", 2, 0, &Tensor::zeros([1, 1, 4, 6], (Kind::Float, Device::Cpu))).is_err());
    assert!(writer.write("u", 0, 0, &Tensor::zeros([1, 1, 4, 5], (Kind::Float, Device::Cpu))).is_err());
    writer.finish().unwrap();
    let written = open(&path, "hdf5", &["u"], json!({})).unwrap();
    assert_eq!((written.samples(), written.times().unwrap()), (2, &[6.0, 12.0, 18.0][..]));
    assert_eq!(written.dims(), data.dims());
    assert_eq!(written.variables(), &data.variables()[..1]);
    let all = Window { frames: 0..3, points: window.points.clone() };
    let (read, truth) =
        (written.read(&all, &[0, 1], &["u"]).unwrap(), data.read(&window, &[0, 1], &["u"]).unwrap());
    assert_eq!(values(&read), values(&truth));
    // Frames that were not written are no prediction.
    let writer = data.create(&folder.path().join("half.h5"), &meta).unwrap();
    assert!(writer.finish().unwrap_err().to_string().contains("was not written"));
    assert!(!folder.path().join("half.h5").exists());
}

/// Predictions of Darcy flow are in its own layout, whichever field comes first.
#[test]
fn predictions_of_darcy_flow_are_in_its_layout() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prediction.h5");
    let excerpt = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/darcy_excerpt.h5");
    let data = open(&excerpt, "darcy", &[], json!({})).unwrap();
    let meta = |variables: &[&str]| PredictionMeta {
        name: "darcy".to_owned(),
        variables: variables.iter().map(|&name| name.to_owned()).collect(),
        samples: 2,
        times: Vec::new(),
        sample_times: Vec::new(),
        sample_numbers: Vec::new(),
        attributes: Vec::new(),
        missing: false,
        left_out: Vec::new(),
    };
    let points: Vec<Range<usize>> = data.dims().iter().map(|dim| 0..dim.coordinates.len()).collect();
    let window = Window::still(&points);
    let mut writer = data.create(&path, &meta(&["u", "nu"])).unwrap();
    for (at, sample) in [2, 1].into_iter().enumerate() {
        for variable in ["u", "nu"] {
            let field = data.read(&window, &[sample], &[variable]).unwrap().select(0, 0);
            writer.write(variable, at, 0, &field).unwrap();
            assert!(
                writer.write("w", at, 0, &field).is_err() && writer.write("u", at + 2, 0, &field).is_err()
            );
        }
    }
    writer.finish().unwrap();
    let names = ["nu", "u"];
    let written = open(&path, "darcy", &[], json!({})).unwrap().read(&window, &[0, 1], &names).unwrap();
    assert_eq!(values(&written), values(&data.read(&window, &[2, 1], &names).unwrap()));
}

/// Files of other projects, where they are there.
#[test]
fn files_of_others() {
    if let Some(path) = common::shared("shallow_water.nc") {
        let data = open(&path, "netcdf", &["u", "v", "h"], json!({ "cut": 17 })).unwrap();
        let names = [&data.dims()[0].name, &data.dims()[1].name];
        assert_eq!((names, data.samples()), ([&"latitude".to_owned(), &"longitude".to_owned()], 7));
        assert!(data.dims()[1].periodic && data.dims()[0].coordinates[0] == 88.125);
        assert_eq!(data.variables()[2].unit.as_deref(), Some("m"));
        // Frame 60 is frame 9 of piece 3.
        let window = Window { frames: 9..10, points: vec![12..13, 70..71] };
        let read = data.read(&window, &[3], &["u", "v", "h"]).unwrap();
        let truth = [42.421875, -48.890625, 9928.17188];
        assert!(values(&read).iter().zip(truth).all(|(read, truth)| (read - truth).abs() < 1e-4), "{read:?}");
        let data = open(&path, "netcdf", &["h"], json!({})).unwrap();
        let extents = data.dims().iter().map(|dim| 0..dim.coordinates.len()).collect();
        let window = Window { frames: 0..data.times().unwrap().len(), points: extents };
        let h = data.read(&window, &[0], &["h"]).unwrap().to_kind(Kind::Double);
        let plain = [h.mean(Kind::Double), h.std(false)].map(|of| of.double_value(&[]));
        assert!((plain[0] - 9800.25623979).abs() < 1e-6 && (plain[1] - 470.879651115).abs() < 1e-6);
        let whole = data.statistics(&["h"], 0..1).unwrap()[0].unwrap();
        let [mean, std] = common::weighted_moments(&*data, &h);
        assert!((whole.mean - mean).abs() < 1e-8 && (whole.std - std).abs() < 1e-8, "{whole:?}");
    }
    if let Some(path) = common::shared("bad/nan_values.nc") {
        let data = open(&path, "netcdf", &["v"], json!({})).unwrap();
        let error = data.statistics(&["v"], 0..1).unwrap_err().to_string();
        assert!(error.ends_with("`v` has a missing value (NaN) at index [2, 10, 40]; --set data.missing=fill (or mask) allows missing values"), "{error}");
    }
    if let Some(path) = common::shared("darcy_neuralop.npz") {
        let own = json!({
            "axes": ["sample", "x", "y"],
            "variables": { "a": "train_16.x", "u": "train_16.y" },
        });
        let data = open(&path, "npy", &["a", "u"], own).unwrap();
        assert_eq!((data.samples(), data.times()), (1000, None));
        let read = data.read(&Window::still(&[0..16, 0..16]), &[999], &["a"]).unwrap();
        assert!(values(&read).iter().all(|value| [0.0, 1.0].contains(value)));
    }
}

/// A format outside the crate: registered where it stands, opened by its name.
#[derive(Debug)]
struct Ramp {
    path: PathBuf,
    dims: Vec<Dim>,
    variables: Vec<DataVariable>,
    times: Vec<f64>,
    slope: f64,
}

#[derive(Default, serde::Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct RampOptions {
    /// Change from one time to the next.
    slope: f64,
}

isobar_data::register!(Ramp);

impl Format for Ramp {
    const NAME: &'static str = "ramp";
    const SUMMARY: &'static str = "A ramp that rises in time.";
    type Options = RampOptions;

    fn open(source: &DataSource<'_>, options: RampOptions) -> Result<Box<dyn Dataset>> {
        let x = Dim { name: "x".to_owned(), unit: None, coordinates: vec![0.0, 1.0, 2.0], periodic: false };
        Ok(Box::new(Self {
            path: source.path().to_owned(),
            dims: vec![x],
            variables: vec![DataVariable::scalar("height")],
            times: vec![0.0, 1.0, 2.0, 3.0],
            slope: options.slope,
        }))
    }
}

impl Dataset for Ramp {
    fn path(&self) -> &Path {
        &self.path
    }

    fn samples(&self) -> usize {
        2
    }

    fn dims(&self) -> &[Dim] {
        &self.dims
    }

    fn times(&self) -> Option<&[f64]> {
        Some(&self.times)
    }

    fn variables(&self) -> &[DataVariable] {
        &self.variables
    }

    fn read(&self, window: &Window, samples: &[usize], variables: &[&str]) -> Result<Tensor> {
        isobar_data::choose(self, variables)?;
        isobar_data::check_window(self, window, samples)?;
        let mut values = Vec::new();
        for &sample in samples {
            for frame in window.frames.clone() {
                let rows =
                    window.points[0].clone().map(|x| (10 * sample + x) as f64 + self.slope * frame as f64);
                values.extend(rows.map(|value| value as f32));
            }
        }
        let shape =
            [samples.len(), window.frames.len(), 1, window.points[0].len()].map(|extent| extent as i64);
        Ok(Tensor::from_slice(&values).view(shape))
    }
}

#[test]
fn a_format_of_ones_own_is_opened_by_its_name() {
    let data = open(Path::new("anywhere"), "ramp", &["height"], json!({ "slope": 0.5 })).unwrap();
    let window = Window { frames: 1..3, points: vec![2..3] };
    assert_eq!(values(&data.read(&window, &[1], &["height"]).unwrap()), [12.5, 13.0]);
    let statistics = data.statistics(&["height"], 0..2).unwrap()[0].unwrap();
    assert_eq!((statistics.mean, statistics.count), (6.75, 24));
    assert_eq!(data.change_statistics(&["height"], 0..1).unwrap()[0].unwrap().mean, 0.5);
    let error = refusal(Path::new("anywhere"), "ramp", &["height"], json!({ "slop": 1 }));
    assert!(error.starts_with("[data.ramp]: unknown field `slop`"), "{error}");
    let error = refusal(Path::new("anywhere"), "darcy", &[], json!({ "slope": 1 }));
    assert!(error.starts_with("[data.darcy]: unknown field `slope`"), "{error}");
    isobar_data::register::<Ramp>();
    assert_eq!(isobar_data::registered().iter().filter(|entry| entry.name() == "ramp").count(), 1);
}

/// Without names, all arrays on the grid are variables; others are named with their axes.
#[test]
fn arrays_on_the_grid_are_variables_and_others_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("air.h5");
    let file = hdf5_metno::File::create(&path).unwrap();
    for (name, axes) in [
        ("z", &["time", "level", "lat", "lon"][..]),
        ("t2", &["time", "lat", "lon"]),
        ("lsm", &["lat", "lon"]),
        ("bounds", &["time", "edge"]),
        ("time", &["time"]),
        ("level", &["level"]),
    ] {
        let extent = |axis: &&str| match *axis {
            "time" => 3,
            "lat" => 4,
            "lon" => 5,
            _ => 2,
        };
        let shape: Vec<usize> = axes.iter().map(extent).collect();
        let values: Vec<f32> = (0..shape.iter().product()).map(|at: usize| at as f32).collect();
        let dataset = file.new_dataset::<f32>().shape(shape).create(name).unwrap();
        dataset.write_raw(&values).unwrap();
        let texts: Vec<hdf5_metno::types::VarLenUnicode> =
            axes.iter().map(|axis| axis.parse().unwrap()).collect();
        let attribute = dataset.new_attr::<hdf5_metno::types::VarLenUnicode>().shape(axes.len());
        attribute.create("axes").unwrap().write_raw(&texts).unwrap();
    }
    drop(file);
    let open = |table: Value, fields: &[&str]| {
        let config = json!({ "path": path, "format": "hdf5", "hdf5": table, "fields": fields });
        serde_json::from_value::<DataConfig>(config).unwrap().open_all().unwrap()
    };
    let named = |data: &dyn Dataset| -> Vec<String> {
        data.variables().iter().map(|variable| variable.name.clone()).collect()
    };
    let data = open(json!({ "channel": "level" }), &[]);
    assert_eq!(named(&*data), ["z", "lsm", "t2"]);
    assert_eq!(data.left_out(), ["bounds [time, edge]"]);
    assert!(data.variables()[1].is_static && !data.variables()[2].is_static);
    let data = open(json!({}), &[]);
    assert_eq!(named(&*data), ["z"], "`level` may be a spatial dim");
    assert_eq!(data.left_out(), ["bounds [time, edge]", "lsm [lat, lon]", "t2 [time, lat, lon]"]);
    // The mask alone is of a file with times.
    let data = open(json!({ "channel": "level" }), &["lsm"]);
    assert_eq!((data.times().unwrap().len(), data.variables()[0].is_static), (3, true));
    assert_eq!(data.left_out().len(), 0);
}
