//! Zarr against stores of zarr-python and xarray (tests/data/formats/zarr/make.py), and what must be refused.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use isobar_data::{DataConfig, Dataset, Error, Result, Window};
use rstest::rstest;
use serde_json::{Value, json};
use tch::Kind;
use tempfile::TempDir;

use super::common;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/formats/zarr").join(name)
}

fn open(path: &Path, fields: &[&str], more: Value) -> Result<Box<dyn Dataset>> {
    let mut config = json!({ "path": path, "format": "zarr", "fields": fields });
    for (key, value) in more.as_object().cloned().unwrap_or_default() {
        config[key] = value;
    }
    serde_json::from_value::<DataConfig>(config).map_err(|error| Error::Config(error.to_string()))?.open()
}

fn read(data: &dyn Dataset, frames: Range<usize>, points: &[Range<usize>], name: &str) -> Result<Vec<f64>> {
    let window = Window { frames, points: points.to_vec() };
    let values = data.read(&window, &[0], &[name])?;
    Ok(Vec::try_from(values.to_kind(Kind::Double).flatten(0, -1)).unwrap())
}

/// Values that make.py stores.
fn expected(frames: Range<usize>, y: Range<usize>, x: Range<usize>) -> Vec<f64> {
    let mut values = Vec::new();
    for t in frames {
        for y in y.clone() {
            values.extend(x.clone().map(|x| (100 * t + 10 * y + x) as f64 + 0.25));
        }
    }
    values
}

/// A copy of a store, to damage.
fn copied(from: &Path) -> (TempDir, PathBuf) {
    fn all(from: &Path, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            let to = to.join(entry.file_name());
            match entry.file_type().unwrap().is_dir() {
                true => all(&entry.path(), &to),
                false => drop(fs::copy(entry.path(), to).unwrap()),
            }
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("copy.zarr");
    all(from, &to);
    (folder, to)
}

/// Each codec, byte order, order of axes and version, through windows in one chunk, over several, and of single points.
#[rstest]
#[case("v2.zarr", "big")]
#[case("v2.zarr", "big_blosc")]
#[case("v2.zarr", "zlib")]
#[case("v2.zarr", "gzip")]
#[case("v2.zarr", "zstd")]
#[case("v2.zarr", "blosc")]
#[case("v3.zarr", "raw")]
#[case("v3.zarr", "big")]
#[case("v3.zarr", "blosc")]
#[case("v3.zarr", "gzip_crc")]
#[case("v3.zarr", "transposed")]
#[case("v3.zarr", "deep/er/zstd")]
#[case("v3.zarr", "sharded")]
#[case("v3.zarr", "sharded_raw")]
#[case("v3.zarr", "sharded_blosc")]
#[case("xarray_v2.zarr", "u")]
#[case("xarray_v3.zarr", "u")]
fn windows_equal_what_was_stored(#[case] store: &str, #[case] name: &str) {
    let data = open(&fixture(store), &[name], json!({})).unwrap();
    assert_eq!(data.dims().iter().map(|dim| dim.name.as_str()).collect::<Vec<_>>(), ["y", "x"]);
    assert_eq!(data.times().unwrap().len(), 5);
    for frames in [0..5, 0..1, 2..4, 3..5] {
        for y in [0..6, 0..4, 1..3, 3..5, 5..6] {
            for x in [0..7, 0..4, 3..5, 6..7, 4..7] {
                let found = read(&*data, frames.clone(), &[y.clone(), x.clone()], name).unwrap();
                assert_eq!(found, expected(frames.clone(), y.clone(), x.clone()), "{frames:?} {y:?} {x:?}");
            }
        }
    }
}

#[rstest]
#[case("xarray_v2.zarr")]
#[case("xarray_v3.zarr")]
fn conventions_of_xarray(#[case] store: &str) {
    let data = open(&fixture(store), &["packed", "u"], json!({ "missing": "fill" })).unwrap();
    let unit = data.time_unit().unwrap();
    assert_eq!(
        (unit.unit.as_str(), data.times().unwrap()),
        ("hours since 2000-01-01", &[0.0, 6.0, 12.0, 18.0, 24.0][..])
    );
    let units: Vec<_> = data.variables().iter().map(|variable| variable.unit.clone().unwrap()).collect();
    assert_eq!(units, ["K", "m s-1"]);
    assert_eq!(data.dims()[0].unit.as_deref(), Some("degrees_north"));
    assert!(data.dims()[1].periodic && data.dims()[0].coordinates[0] == 75.0);
    assert_eq!(data.chunk("packed"), Some(vec![3, 6, 7]));
    assert_eq!(read(&*data, 3..4, &[2..4, 1..3], "packed").unwrap(), [321.0, 322.0, 331.0, 332.0]);
    let error = open(&fixture(store), &["packed"], json!({})).unwrap();
    let error = read(&*error, 0..1, &[0..6, 0..7], "packed").unwrap_err().to_string();
    assert!(error.contains("`packed` has a missing value") && error.contains("[0, 0, 6]"), "{error}");
}

/// The Zarr store of the shared data, and the NetCDF file of the same numbers.
#[test]
fn shallow_water_equals_its_netcdf_file_and_its_reference() {
    let names = ["u", "v", "h"];
    let Some(folder) =
        common::shared("shallow_water.zarr").and_then(|path| path.parent().map(Path::to_owned))
    else {
        return;
    };
    let zarr = open(&folder.join("shallow_water.zarr"), &names, json!({})).unwrap();
    let config = json!({ "path": folder.join("shallow_water.nc"), "format": "netcdf", "fields": names });
    let netcdf = serde_json::from_value::<DataConfig>(config).unwrap().open().unwrap();
    assert_eq!(
        (zarr.dims(), zarr.times(), zarr.time_unit()),
        (netcdf.dims(), netcdf.times(), netcdf.time_unit())
    );
    assert_eq!(zarr.variables(), netcdf.variables());
    let cuts =
        |ends: &[usize]| -> Vec<Range<usize>> { ends.windows(2).map(|pair| pair[0]..pair[1]).collect() };
    let mut windows = vec![(0..120, 0..48, 0..96), (60..62, 16..18, 49..51), (119..120, 47..48, 95..96)];
    for latitude in cuts(&[0, 13, 31, 48]) {
        for longitude in cuts(&[0, 50, 51, 96]) {
            windows.push((55..65, latitude.clone(), longitude));
        }
    }
    for (frames, latitude, longitude) in windows {
        let window = Window { frames, points: vec![latitude, longitude] };
        let [one, other] = [&zarr, &netcdf].map(|data| data.read(&window, &[0], &names).unwrap());
        assert!(one.equal(&other), "{window:?}");
    }
    let reference: Value = serde_json::from_slice(&fs::read(folder.join("reference.json")).unwrap()).unwrap();
    let text = reference.to_string();
    assert!(text.contains("shallow_water"), "the reference is of these data");
    for (index, u, v, h) in [
        ([0, 0, 0], 0.139831543, 0.0, 9186.47754),
        ([60, 12, 70], 42.421875, -48.890625, 9928.17188),
        ([69, 19, 55], -7.77539062, 0.118774414, 10292.125),
        ([119, 47, 95], -1.26953125, 1.76367188, 9441.90137),
    ] {
        let [t, y, x] = index.map(|at: usize| at..at + 1);
        for (name, expected) in names.iter().zip([u, v, h]) {
            let found = read(&*zarr, t.clone(), &[y.clone(), x.clone()], name).unwrap()[0];
            assert!((found - expected).abs() <= 1e-8 * f64::abs(expected), "{name} {index:?}: {found}");
        }
    }
}

#[test]
fn missing_chunks_are_named_or_filled() {
    if let Some(path) = common::shared("bad/missing_chunk.zarr") {
        let data = open(&path, &["u", "v"], json!({})).unwrap();
        let points = [0..48, 0..96];
        assert_eq!(read(&*data, 0..3, &points, "u").unwrap().len(), 3 * 48 * 96);
        let error = read(&*data, 0..3, &points, "v").unwrap_err().to_string();
        assert!(
            error.contains("missing_chunk.zarr") && error.contains("chunk v/c/0/1/0 is missing"),
            "{error}"
        );
        let _ = read(&*data, 0..3, &[0..1, 0..96], "v").unwrap();
    }

    for name in ["plain", "sharded"] {
        let sparse = open(&fixture("sparse.zarr"), &[name], json!({})).unwrap();
        let error = read(&*sparse, 0..5, &[0..6, 0..7], name).unwrap_err().to_string();
        assert!(error.contains("is missing") && error.contains("data.zarr.missing_chunks=fill"), "{error}");
        let own = json!({ "zarr": { "missing_chunks": "fill" } });
        let sparse = open(&fixture("sparse.zarr"), &[name], own).unwrap();
        let mut all = vec![0.0; 3 * 42];
        all.extend(expected(3..5, 0..6, 0..7));
        assert_eq!(read(&*sparse, 0..5, &[0..6, 0..7], name).unwrap(), all);
    }
    let error =
        open(&fixture("sparse.zarr"), &["plain"], json!({ "zarr": { "missing_chunk": 1 } })).unwrap_err();
    assert!(error.to_string().contains("missing_chunk"), "{error}");
}

/// Only the chunks of a window are read: all others may be gone.
#[rstest]
#[case("raw", 1)]
#[case("blosc", 1)]
#[case("raw", 2)]
fn only_the_chunks_of_a_window_are_read(#[case] name: &str, #[case] chunks: usize) {
    let (_folder, store) = copied(&fixture("v3.zarr"));
    for t in 0..2 {
        for y in 0..2 {
            for x in 0..2 {
                let keep = t == 1 && y == 0 && x < chunks;
                let file = store.join(format!("{name}/c/{t}/{y}/{x}"));
                if !keep {
                    fs::remove_file(file).unwrap();
                }
            }
        }
    }
    let data = open(&store, &[name], json!({})).unwrap();
    let x = 1..if chunks == 1 { 4 } else { 6 };
    assert_eq!(read(&*data, 3..5, &[0..3, x.clone()], name).unwrap(), expected(3..5, 0..3, x));
    let _ = read(&*data, 2..5, &[0..3, 0..3], name).unwrap_err();
}

/// Links out of the store, special files and files in the place of folders are refused at once.
#[test]
fn nothing_outside_of_the_store_is_read() {
    let (folder, store) = copied(&fixture("v3.zarr"));
    let chunk = store.join("raw/c/0/0/0");
    let outside = folder.path().join("outside");
    fs::rename(&chunk, &outside).unwrap();
    std::os::unix::fs::symlink(&outside, &chunk).unwrap();
    let refusal = || {
        let data = open(&store, &["raw"], json!({})).unwrap();
        read(&*data, 0..1, &[0..2, 0..2], "raw").unwrap_err().to_string()
    };
    assert!(refusal().contains("leads out of the store"), "{}", refusal());
    fs::remove_file(&chunk).unwrap();
    nix::unistd::mkfifo(&chunk, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(refusal().contains("it is a FIFO"), "{}", refusal());
    fs::remove_file(&chunk).unwrap();
    std::os::unix::fs::symlink("../../1/0/0", &chunk).unwrap();
    assert!(
        open(&store, &["raw"], json!({})).is_ok_and(|data| read(&*data, 0..1, &[0..2, 0..2], "raw").is_ok()),
        "a link in it"
    );
    fs::remove_file(&chunk).unwrap();
    fs::create_dir(&chunk).unwrap();
    assert!(refusal().contains("a directory"), "{}", refusal());
    for (path, expected) in [("/dev/zero", "it is a device"), ("/nowhere.zarr", "no such file")] {
        let error = open(Path::new(path), &["u"], json!({})).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let empty = folder.path().join("empty.zarr");
    fs::create_dir(&empty).unwrap();
    let error = open(&empty, &["u"], json!({})).unwrap_err().to_string();
    assert!(error.contains("neither zarr.json, .zmetadata, .zgroup nor .zarray"), "{error}");
    let consolidated = folder.path().join("hostile.zarr");
    fs::create_dir(&consolidated).unwrap();
    let text = r#"{"metadata": {"../copy.zarr/raw/.zarray": {}}}"#;
    fs::write(consolidated.join(".zmetadata"), text).unwrap();
    let error = open(&consolidated, &["u"], json!({})).unwrap_err().to_string();
    assert!(error.contains("expected names in the store"), "{error}");
}

/// Chunks that unpack to more than their shape, and metadata that promise more than there can be.
#[test]
fn bombs_are_refused() {
    let (_folder, store) = copied(&fixture("v3.zarr"));
    let zeros = vec![0; 1 << 24];
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    std::io::Write::write_all(&mut gzip, &zeros).unwrap();
    let gzip = gzip.finish().unwrap();
    let zstd = zstd::bulk::compress(&zeros, 3).unwrap();
    let mut stream = zstd::stream::write::Encoder::new(Vec::new(), 3).unwrap();
    std::io::Write::write_all(&mut stream, &zeros).unwrap();
    let stream = stream.finish().unwrap();
    let gzip_store = copied(&fixture("v2.zarr"));
    for (store, name, chunk, bytes) in [
        (&gzip_store.1, "gzip", "0.0.0", &gzip),
        (&store, "deep/er/zstd", "c/0/0/0", &zstd),
        (&store, "deep/er/zstd", "c/0/0/0", &stream),
    ] {
        fs::write(store.join(name).join(chunk), bytes).unwrap();
        let data = open(store, &[name], json!({})).unwrap();
        let error = read(&*data, 0..1, &[0..2, 0..2], name).unwrap_err().to_string();
        assert!(error.contains("of more than 192 bytes, unpacked") && error.contains(chunk), "{error}");
    }
    let mut blosc = fs::read(store.join("blosc/c/0/0/0")).unwrap();
    blosc[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    fs::write(store.join("blosc/c/0/0/0"), blosc).unwrap();
    let data = open(&store, &["blosc"], json!({})).unwrap();
    let error = read(&*data, 0..1, &[0..2, 0..2], "blosc").unwrap_err().to_string();
    assert!(error.contains("of more than 192 bytes, unpacked"), "{error}");

    let json = store.join("raw/zarr.json");
    let known: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    for (pointer, value, expected) in [
        (
            "/chunk_grid/configuration/chunk_shape",
            json!([1 << 20, 1 << 10, 4]),
            "larger than 1073741824 bytes",
        ),
        ("/chunk_grid/configuration/chunk_shape", json!([0, 4, 4]), "at least 1 along each axis"),
        ("/shape", json!([1_u64 << 39, 1_u64 << 39, 7]), "too large"),
        ("/shape", json!([5, -6, 7]), "without a shape"),
        (
            "/codecs",
            json!([{ "name": "bytes", "configuration": { "endian": "little" } }, { "name": "nothing" }]),
            "not read",
        ),
        ("/codecs", json!([]), "not read"),
        ("/data_type", json!("string"), "of dtype"),
        ("/storage_transformers", json!([{ "name": "x" }]), "storage transformers"),
    ] {
        let mut own = known.clone();
        *own.pointer_mut(pointer).unwrap() = value;
        fs::write(&json, own.to_string()).unwrap();
        let error = open(&store, &["raw"], json!({})).unwrap_err().to_string();
        assert!(error.contains(expected) || error.contains("no field"), "{pointer}: {error}");
    }
    let file = fs::File::create(&json).unwrap();
    file.set_len((64 << 20) + 1).unwrap();
    let error = open(&store, &["raw"], json!({})).unwrap_err().to_string();
    assert!(error.contains("expected at most"), "{error}");
}

/// Stores with changed bytes are read or refused: nothing panics, hangs or takes much memory.
#[test]
fn damaged_stores_are_errors() {
    let cases = if std::env::var_os("XTASK_FULL").is_some() { 3000 } else { 150 };
    let cases = std::env::var("ZARR_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(cases);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below.max(1) as u64) as usize
    };
    let stores = [
        ("v2.zarr", vec!["big_blosc", "zlib", "gzip", "zstd", "blosc"]),
        (
            "v3.zarr",
            vec![
                "raw",
                "blosc",
                "gzip_crc",
                "transposed",
                "deep/er/zstd",
                "sharded",
                "sharded_raw",
                "sharded_blosc",
            ],
        ),
    ];
    let copies = stores.map(|(store, names)| (copied(&fixture(store)), names));
    let mut refused = 0;
    for case in 0..cases {
        let ((_folder, store), names) = &copies[case % 2];
        let name = names[random(names.len())];
        let is_v2 = case % 2 == 0;
        let file = match (random(2), is_v2) {
            (0, true) => store.join(name).join(".zarray"),
            (0, false) => store.join(name).join("zarr.json"),
            (_, true) => store.join(name).join("0.0.0"),
            (_, false) => store.join(name).join("c/0/0/0"),
        };
        let known = fs::read(&file).unwrap();
        let mut bytes = known.clone();
        for _ in 0..1 + random(4) {
            let at = random(bytes.len());
            match random(5) {
                0 => bytes.truncate(at),
                1 if !bytes.is_empty() => bytes[at] = b"0123456789[]{}\",:-eE"[random(20)],
                2 => bytes.insert(at.min(bytes.len()), b"0123456789"[random(10)]),
                3 if !bytes.is_empty() => bytes[at] = u8::MAX,
                _ if !bytes.is_empty() => bytes[at] ^= 1 << random(8),
                _ => (),
            }
        }
        fs::write(&file, &bytes).unwrap();
        let outcome = open(store, &[name], json!({})).and_then(|data| {
            let points: Vec<Range<usize>> =
                data.dims().iter().map(|dim| 0..dim.coordinates.len().min(9)).collect();
            data.read(
                &Window { frames: 0..data.times().map_or(1, <[f64]>::len).min(5), points },
                &[0],
                &[name],
            )
        });
        refused += usize::from(outcome.is_err());
        fs::write(&file, known).unwrap();
    }
    assert!(refused * 3 > cases, "{refused} of {cases} were refused");
    println!("{refused} of {cases} damaged stores were refused");
}

/// Two ranks write one store, each its own boxes; the reader finds what they wrote, and its names, units and times.
#[test]
fn ranks_write_their_own_chunks() {
    use isobar_data::{Content, DataVariable, Dim, PredictionMeta, Storage, TimeUnit, writer};
    use tch::{Device, Tensor};

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.zarr");
    let dim = |name: &str, unit: &str, count: usize| Dim {
        name: name.to_owned(),
        unit: Some(unit.to_owned()),
        coordinates: (0..count).map(|at| at as f64).collect(),
        periodic: false,
    };
    let wind = DataVariable {
        channels: vec!["wind_0".into(), "wind_1".into()],
        has_direction: true,
        ..DataVariable::scalar("wind")
    };
    let content = Content {
        meta: PredictionMeta {
            name: "air".to_owned(),
            variables: vec!["h".to_owned(), "wind".to_owned()],
            samples: 2,
            times: vec![0.0, 6.0, 12.0],
            sample_times: Vec::new(),
            sample_numbers: Vec::new(),
            attributes: vec![("origin".to_owned(), "a test".to_owned())],
            missing: false,
            left_out: Vec::new(),
        },
        time_unit: Some(TimeUnit {
            unit: "hours since 2000-01-01".to_owned(),
            calendar: Some("noleap".to_owned()),
        }),
        dims: vec![dim("latitude", "degrees_north", 5), dim("longitude", "degrees_east", 4)],
        variables: vec![DataVariable { unit: Some("m".to_owned()), ..DataVariable::scalar("h") }, wind],
        parameters: Vec::new(),
        storage: Storage {
            chunks: [("latitude".to_owned(), 3), ("time".to_owned(), 2)].into(),
            deflate: None,
        },
    };
    let format = writer(None, &path).unwrap();
    assert!(format.by_rank() && format.name() == "zarr");
    let value = |channels: i64| {
        let shape = [2, 3, channels, 5, 4];
        Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu)).view(shape) * 0.5
    };
    for whole in [false, true] {
        let mut first = format.create(&path, &content).unwrap();
        assert_eq!(first.tile(), Some(vec![3, 4]));
        let mut second = format.join(&path, &content, first.unfinished().unwrap()).unwrap();
        for sample in 0..2 {
            for frame in 0..3 {
                for (name, channels) in [("h", 1), ("wind", 2)] {
                    let all = value(channels).get(sample as i64).narrow(0, frame, 1);
                    for (writer, rows) in [(&mut first, 0..3), (&mut second, 3..5)] {
                        let part = all.narrow(2, rows.start as i64, rows.len() as i64);
                        if whole || frame < 2 || rows.start == 0 {
                            writer.write_window(name, sample, frame as usize, &[rows, 0..4], &part).unwrap();
                        }
                    }
                }
            }
        }
        let _ = second.finish();
        let outcome = first.finish();
        if !whole {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("were not all written"), "{error}");
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
            continue;
        }
        outcome.unwrap();
    }
    let error = format.create(&path, &content).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("requires a new target"), "{error}");
    let data = open(&path, &["h", "wind"], json!({})).unwrap();
    assert_eq!(
        (data.samples(), data.times(), data.time_unit()),
        (2, Some(&[0.0, 6.0, 12.0][..]), content.time_unit.as_ref())
    );
    assert_eq!(data.dims(), content.dims);
    assert_eq!(data.variables()[0], content.variables[0]);
    let window = Window { frames: 0..3, points: vec![0..5, 0..4] };
    let both = data.read(&window, &[1, 0], &["h", "wind"]).unwrap();
    let expected = Tensor::cat(&[value(1), value(2)], 2).flip([0]);
    assert!(both.equal(&expected));
    if let Some(kept) = std::env::var_os("ZARR_KEEP") {
        fs::rename(&path, kept).unwrap();
    }
}
