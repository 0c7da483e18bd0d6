//! Attributes of CF and NetCDF about values: `_Unsigned`, `valid_range` and the like, default fill values, in both formats of NetCDF
//! and in Zarr.
#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]
#![expect(clippy::single_range_in_vec_init, reason = "the window of a single dim")]

use std::path::Path;
use std::str::FromStr;

use hdf5_metno::File;
use hdf5_metno::types::{FixedAscii, VarLenUnicode};
use isobar_data::{DataConfig, Dataset, Error, Window};
use ndarray::Array1;
use rstest::rstest;
use serde_json::{Value, json};
use tch::Kind;

/// Numbers of an attribute, or a text.
enum Attribute {
    Text(&'static str),
    Shorts(&'static [i16]),
    Doubles(&'static [f64]),
}

use Attribute::{Doubles, Shorts, Text};

/// Numbers of the variable `u` along `x`.
#[derive(Clone, Copy)]
enum Numbers {
    Bytes([i8; 4]),
    Shorts([i16; 4]),
    Floats([f32; 4]),
}

/// NetCDF-4, as far as a reader sees it.
fn write_hdf5(path: &Path, numbers: Numbers, attributes: &[(&str, Attribute)]) {
    let file = File::create(path).unwrap();
    let builder = file.new_dataset_builder();
    let dataset = match numbers {
        Numbers::Bytes(values) => builder.with_data(&Array1::from_vec(values.to_vec())).create("u"),
        Numbers::Shorts(values) => builder.with_data(&Array1::from_vec(values.to_vec())).create("u"),
        Numbers::Floats(values) => builder.with_data(&Array1::from_vec(values.to_vec())).create("u"),
    };
    let dataset = dataset.unwrap();
    let axes = [VarLenUnicode::from_str("x").unwrap()];
    dataset.new_attr_builder().with_data(&axes).create("axes").unwrap();
    for (name, attribute) in attributes {
        match attribute {
            Text(text) => {
                let own = dataset.new_attr::<VarLenUnicode>().create(*name).unwrap();
                own.write_scalar(&VarLenUnicode::from_str(text).unwrap()).unwrap();
            }
            Shorts(values) => {
                let own = dataset.new_attr::<i16>().shape(values.len()).create(*name).unwrap();
                own.write_raw(values).unwrap();
            }
            Doubles(values) => {
                let own = dataset.new_attr::<f64>().shape(values.len()).create(*name).unwrap();
                own.write_raw(values).unwrap();
            }
        }
    }
}

/// Zarr version 2, as xarray writes it: the fill value is that of the array, NetCDF's default unless the attributes have one.
fn write_zarr(path: &Path, numbers: Numbers, attributes: &[(&str, Attribute)]) {
    let mut all = json!({ "_ARRAY_DIMENSIONS": ["x"] });
    for (name, attribute) in attributes {
        all[*name] = match attribute {
            Text(text) => json!(text),
            Shorts([one]) => json!(one),
            Shorts(several) => json!(several),
            Doubles([one]) => json!(one),
            Doubles(several) => json!(several),
        };
    }
    let (dtype, default, values): (&str, Value, Vec<u8>) = match numbers {
        Numbers::Bytes(values) => {
            ("|i1", Value::Null, values.iter().flat_map(|value| value.to_le_bytes()).collect())
        }
        Numbers::Shorts(values) => {
            ("<i2", json!(-32767), values.iter().flat_map(|value| value.to_le_bytes()).collect())
        }
        Numbers::Floats(values) => {
            ("<f4", json!(FILL), values.iter().flat_map(|value| value.to_le_bytes()).collect())
        }
    };
    let array = json!({
        "zarr_format": 2, "shape": [4], "chunks": [4], "dtype": dtype, "compressor": null, "filters": null, "order": "C",
        "fill_value": all.get("_FillValue").unwrap_or(&default),
    });
    let folder = path.join("u");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(path.join(".zgroup"), json!({ "zarr_format": 2 }).to_string()).unwrap();
    std::fs::write(folder.join(".zarray"), array.to_string()).unwrap();
    std::fs::write(folder.join(".zattrs"), all.to_string()).unwrap();
    std::fs::write(folder.join("0"), values).unwrap();
}

/// CDF-1, by its specification: a dimension, a variable, numbers.
fn write_classic(path: &Path, numbers: Numbers, attributes: &[(&str, Attribute)]) {
    fn word(bytes: &mut Vec<u8>, number: usize) {
        bytes.extend((number as u32).to_be_bytes());
    }
    fn padded(bytes: &mut Vec<u8>, text: &[u8]) {
        bytes.extend(text);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    fn name(bytes: &mut Vec<u8>, text: &str) {
        word(bytes, text.len());
        padded(bytes, text.as_bytes());
    }
    let mut bytes = b"CDF\x01".to_vec();
    // No records; one dimension; no attributes of the file.
    [0, 10, 1].into_iter().for_each(|number| word(&mut bytes, number));
    name(&mut bytes, "x");
    [4, 0, 0, 11, 1].into_iter().for_each(|number| word(&mut bytes, number));
    name(&mut bytes, "u");
    [1, 0, if attributes.is_empty() { 0 } else { 12 }, attributes.len()]
        .into_iter()
        .for_each(|number| word(&mut bytes, number));
    for (own, attribute) in attributes {
        name(&mut bytes, own);
        match attribute {
            Text(text) => {
                [2, text.len()].into_iter().for_each(|number| word(&mut bytes, number));
                padded(&mut bytes, text.as_bytes());
            }
            Shorts(values) => {
                [3, values.len()].into_iter().for_each(|number| word(&mut bytes, number));
                let values: Vec<u8> = values.iter().flat_map(|value| value.to_be_bytes()).collect();
                padded(&mut bytes, &values);
            }
            Doubles(values) => {
                [6, values.len()].into_iter().for_each(|number| word(&mut bytes, number));
                bytes.extend(values.iter().flat_map(|value| value.to_be_bytes()));
            }
        }
    }
    let (kind, values): (usize, Vec<u8>) = match numbers {
        Numbers::Bytes(values) => (1, values.iter().flat_map(|value| value.to_be_bytes()).collect()),
        Numbers::Shorts(values) => (3, values.iter().flat_map(|value| value.to_be_bytes()).collect()),
        Numbers::Floats(values) => (5, values.iter().flat_map(|value| value.to_be_bytes()).collect()),
    };
    [kind, values.len(), bytes.len() + 12].into_iter().for_each(|number| word(&mut bytes, number));
    bytes.extend(values);
    std::fs::write(path, bytes).unwrap();
}

fn open(path: &Path, format: &str, missing: &str) -> Result<Box<dyn Dataset>, Error> {
    let table = json!({ "path": path, "format": format, "inputs": ["u"], "missing": missing });
    serde_json::from_value::<DataConfig>(table).unwrap().open()
}

/// Names and units of variables, and a text of more than the 256 bytes that lists of strings may have.
#[rstest]
fn texts_about_variables_are_read(#[values("classic", "netcdf", "zarr")] format: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("u");
    let long: &str = Box::leak("long ".repeat(100).into_boxed_str());
    let texts = [
        ("standard_name", "air_temperature"),
        ("cell_methods", "time: mean"),
        ("comment", long),
        ("other", "x"),
    ];
    let write = match format {
        "classic" => write_classic,
        "netcdf" => write_hdf5,
        _ => write_zarr,
    };
    write(&path, Numbers::Floats([1.0; 4]), &texts.map(|(name, text)| (name, Text(text))));
    let data = open(&path, if format == "zarr" { format } else { "netcdf" }, "error").unwrap();
    let found: Vec<_> = data.variables()[0].attributes.iter().collect();
    assert_eq!(found, texts.map(|(name, text)| (name, text.trim()))[..3]);
}

/// netCDF writes texts as strings of fixed length.
#[test]
fn a_long_history_of_fixed_length_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("u.nc");
    write_hdf5(&path, Numbers::Floats([1.0; 4]), &[]);
    let file = File::open_rw(&path).unwrap();
    let text = FixedAscii::<600>::from_ascii(&"2020 made\n".repeat(60)).unwrap();
    file.new_attr::<FixedAscii<600>>().create("history").unwrap().write_scalar(&text).unwrap();
    drop(file);
    let history = open(&path, "netcdf", "error").unwrap().attributes();
    assert_eq!(history.get("history").map(|text| text.lines().count()), Some(60));
}

const FILL: f32 = 9.969_21e36;

/// Values that are read, with NaN for missing values; and the index of the first of these, which is an error by default.
#[rstest]
#[case::unsigned(
    Numbers::Bytes([1, -1, 127, -128]),
    &[("_Unsigned", Text("true"))],
    [1.0, 255.0, 127.0, 128.0],
    None,
)]
#[case::signed(Numbers::Bytes([1, -1, 127, -127]), &[], [1.0, -1.0, 127.0, -127.0], None)]
#[case::unsigned_fill(
    Numbers::Shorts([1, -1, 3, -2]),
    &[("_Unsigned", Text("true")), ("_FillValue", Shorts(&[-1]))],
    [1.0, f64::NAN, 3.0, 65534.0],
    Some(1),
)]
#[case::range(Numbers::Shorts([1, 5, 9, 0]), &[("valid_range", Shorts(&[1, 8]))], [1.0, 5.0, f64::NAN, f64::NAN], Some(2))]
#[case::least(Numbers::Shorts([3, 5, 2, 8]), &[("valid_min", Shorts(&[3]))], [3.0, 5.0, f64::NAN, 8.0], Some(2))]
#[case::greatest(Numbers::Shorts([9, 5, 2, 8]), &[("valid_max", Shorts(&[8]))], [f64::NAN, 5.0, 2.0, 8.0], Some(0))]
#[case::packed(
    Numbers::Shorts([1, 5, 9, 0]),
    &[("valid_range", Shorts(&[0, 8])), ("scale_factor", Shorts(&[10])), ("add_offset", Shorts(&[3]))],
    [13.0, 53.0, f64::NAN, 3.0],
    Some(2),
)]
#[case::default_fill(Numbers::Floats([1.0, FILL, 2.0, 3.0]), &[], [1.0, f64::NAN, 2.0, 3.0], Some(1))]
#[case::default_short(Numbers::Shorts([1, -32767, 2, 3]), &[], [1.0, f64::NAN, 2.0, 3.0], Some(1))]
#[case::own_fill(
    Numbers::Shorts([1, -32767, 2, 3]),
    &[("_FillValue", Shorts(&[2]))],
    [1.0, -32767.0, f64::NAN, 3.0],
    Some(2),
)]
#[case::fill_of_doubles(
    Numbers::Floats([1.0, 1e20, 2.0, 3.0]),
    &[("_FillValue", Doubles(&[1e20]))],
    [1.0, f64::NAN, 2.0, 3.0],
    Some(1),
)]
#[case::greatest_of_doubles(
    Numbers::Floats([0.1, 0.5, 0.25, 0.0]),
    &[("valid_max", Doubles(&[0.1]))],
    [0.1_f32 as f64, f64::NAN, f64::NAN, 0.0],
    Some(1),
)]
fn values_are_what_attributes_say(
    #[case] numbers: Numbers,
    #[case] attributes: &[(&str, Attribute)],
    #[case] expected: [f64; 4],
    #[case] missing: Option<usize>,
    #[values("classic", "netcdf", "zarr")] format: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("u");
    let write = match format {
        "classic" => write_classic,
        "netcdf" => write_hdf5,
        _ => write_zarr,
    };
    write(&path, numbers, attributes);
    let format = if format == "zarr" { format } else { "netcdf" };
    let window = Window::still(&[0..4]);
    let read = open(&path, format, "mask").unwrap().read(&window, &[0], &["u"]).unwrap();
    let found = Vec::<f64>::try_from(read.to_kind(Kind::Double).flatten(0, -1)).unwrap();
    let same = |(found, expected): (&f64, &f64)| found == expected || (found.is_nan() && expected.is_nan());
    assert!(found.iter().zip(&expected).all(same), "{found:?}");
    let read = open(&path, format, "error").unwrap().read(&window, &[0], &["u"]);
    match (missing, read) {
        (None, Ok(_)) => (),
        (Some(at), Err(Error::MissingValue { index, .. })) => assert_eq!(index, [at]),
        (missing, read) => panic!("{missing:?}: {read:?}"),
    }
}
