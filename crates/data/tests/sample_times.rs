//! The time of each sample, of samples without frames.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use hdf5_metno::types::VarLenUnicode;
use isobar_data::{DataConfig, Storage, TimeUnit, Window, writer};
use rstest::rstest;

use crate::writers::{SAMPLES, content, noleap, values};

/// Writes samples without frames at the hours 12 and 6.
fn write_stills(path: &Path, format: &str, unit: &str) {
    let mut content = content(Storage::default());
    content.meta.times.clear();
    content.meta.sample_times = vec![12.0, 6.0];
    content.time_unit = Some(TimeUnit { unit: unit.to_owned(), ..noleap() });
    let mut target = writer(Some(format), path).unwrap().create(path, &content).unwrap();
    for sample in 0..SAMPLES {
        for (name, channels) in [("h", 1), ("wind", 2)] {
            let frame = values(channels).get(sample as i64).narrow(0, 0, 1);
            target.write(name, sample, 0, &frame).unwrap();
        }
    }
    target.finish().unwrap();
}

/// Samples without frames keep their times: a variable of the axis of samples, with unit and calendar.
#[rstest]
fn times_of_samples_are_written(#[values("hdf5", "netcdf", "npy", "safetensors", "zarr")] format: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("air");
    write_stills(&path, format, "hours since 2000-01-01");

    let mut table = serde_json::json!(
        { "path": path, "format": format, "inputs": ["h"], "targets": ["wind"], "scalars": ["time"] }
    );
    if format == "npy" {
        table["npy"] = serde_json::json!({ "variables": {
            "h": { "path": "h", "axes": ["sample", "latitude", "longitude"] },
            "wind": { "path": "wind", "axes": ["sample", "channel", "latitude", "longitude"] },
            "time": { "path": "time", "axes": ["sample"], "unit": "hours since 2000-01-01" },
        } });
    }
    let open = |table: &serde_json::Value| {
        serde_json::from_value::<DataConfig>(table.clone()).unwrap().open().unwrap()
    };
    let data = open(&table);
    assert_eq!((data.samples(), data.times()), (SAMPLES, None));
    let read = data.read(&Window::still(&[0..1, 0..1]), &[0, 1], &["time"]).unwrap();
    assert_eq!(Vec::<f32>::try_from(read.flatten(0, -1)).unwrap(), [12.0, 6.0]);
    let time = data.variables().iter().find(|variable| variable.name == "time").unwrap();
    assert_eq!(time.unit.as_deref(), Some("hours since 2000-01-01"));
    assert_eq!(data.sample_times(), None, "they are a variable");
    table["scalars"] = serde_json::json!([]);
    let data = open(&table);
    assert_eq!(data.sample_times(), Some(vec![12.0, 6.0]));
    assert_eq!(data.time_unit().unwrap().unit, "hours since 2000-01-01");
    match format {
        "zarr" => {
            let text = |name: &str| std::fs::read_to_string(path.join(name)).unwrap();
            assert!(text("time/zarr.json").contains("\"calendar\": \"noleap\""));
            assert!(text("h/zarr.json").contains("\"coordinates\": \"time\""));
        }
        "npy" => (),
        "safetensors" => {
            let bytes = std::fs::read(&path).unwrap();
            assert!(
                String::from_utf8_lossy(&bytes[..2000.min(bytes.len())])
                    .contains("\"time.calendar\":\"noleap\"")
            );
        }
        _ => {
            let time = hdf5_metno::File::open(&path).unwrap().dataset("time").unwrap();
            let calendar: VarLenUnicode = time.attr("calendar").unwrap().read_scalar().unwrap();
            assert_eq!(calendar.as_str(), "noleap");
        }
    }
}

/// Times of samples in other units are converted where files are joined, and do not matter for a validation set.
#[test]
fn times_of_samples_may_have_several_units() {
    let folder = tempfile::tempdir().unwrap();
    let paths = ["a.nc", "b.nc"].map(|name| folder.path().join(name));
    for (path, day) in paths.iter().zip(["01", "02"]) {
        write_stills(path, "netcdf", &format!("hours since 2000-01-{day}"));
    }
    let config = |table: serde_json::Value| serde_json::from_value::<DataConfig>(table).unwrap();
    let both = config(serde_json::json!({ "path": paths, "inputs": ["h"], "targets": ["wind"] }));
    assert_eq!(both.open().unwrap().sample_times(), Some(vec![12.0, 6.0, 36.0, 30.0]));
    let one = config(serde_json::json!({
        "path": paths[0], "validation_path": paths[1], "inputs": ["h"], "targets": ["wind"], "validation_samples": 0
    }));
    let validation = one.parts().unwrap().validation;
    assert_eq!((validation.data.times(), validation.data.samples()), (None, SAMPLES));
}
