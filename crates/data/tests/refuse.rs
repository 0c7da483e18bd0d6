//! Files that are refused, with an error that names the file and the cause.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use crate::common;
use std::path::{Path, PathBuf};

use hdf5_metno::File;
use isobar_data::{DarcyFile, DarcyWriter, Error};
use rstest::rstest;

/// The error of opening a file: it must name the file.
fn refusal(path: &Path) -> Error {
    let error = DarcyFile::open(path).unwrap_err();
    assert!(error.to_string().starts_with(&path.display().to_string()), "{error}");
    error
}

/// A file in a folder of its own, made by `write`.
fn made(name: &str, write: impl FnOnce(&Path)) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    write(&path);
    (folder, path)
}

/// A small file of the right layout, changed by `change`.
fn changed(change: impl FnOnce(&File)) -> (tempfile::TempDir, PathBuf) {
    made("changed.h5", |path| {
        let mut writer = DarcyWriter::create(path, 2, 3, 1.0).unwrap();
        writer.append(&[3.0; 18], &[0.5; 18]).unwrap();
        writer.finish().unwrap();
        change(&File::open_rw(path).unwrap());
    })
}

#[test]
fn a_missing_file() {
    assert!(matches!(refusal(Path::new("no/such/file.h5")), Error::Missing { .. }));
    // Missing comes before unsupported: a mistyped path is the likelier cause.
    assert!(matches!(refusal(Path::new("no/such/file.nc")), Error::Missing { .. }));
}

#[test]
fn a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let error = refusal(folder.path()).to_string();
    assert!(error.contains("directory"), "{error}");
}

#[test]
fn not_hdf5() {
    let (_folder, path) = made("not_hdf5.h5", |path| std::fs::write(path, "sample,x,y\n").unwrap());
    let paths = [Some(path), common::shared("bad/not_hdf5.h5")];
    for path in paths.into_iter().flatten() {
        let error = refusal(&path);
        assert!(matches!(error, Error::NotHdf5 { .. }), "{error}");
        assert!(error.to_string().ends_with("not an HDF5 file (no HDF5 signature)"), "{error}");
    }
}

#[test]
fn truncated() {
    let (_folder, path) = made("truncated.h5", |path| {
        let whole = std::fs::read(common::excerpt()).unwrap();
        std::fs::write(path, &whole[..whole.len() * 6 / 10]).unwrap();
    });
    let paths = [Some(path), common::shared("bad/truncated.h5")];
    for path in paths.into_iter().flatten() {
        let length = std::fs::metadata(&path).unwrap().len();
        match refusal(&path) {
            Error::Truncated { expected, found, .. } => assert!(found == length && expected > length),
            other => panic!("{other}"),
        }
    }
    let text = |path: PathBuf| refusal(&path).to_string();
    if let Some(path) = common::shared("bad/truncated.h5") {
        let error = text(path);
        assert!(error.contains("its superblock says 74256 bytes, but there are 44553"), "{error}");
    }
}

#[rstest]
#[case("nu")]
#[case("tensor")]
#[case("x-coordinate")]
#[case("y-coordinate")]
fn a_missing_dataset(#[case] name: &str) {
    let (_folder, path) = changed(|file| file.unlink(name).unwrap());
    let mut paths = vec![path];
    if name == "tensor" {
        paths.extend(common::shared("bad/missing_dataset.h5"));
    }
    for path in paths {
        let error = refusal(&path).to_string();
        assert!(error.contains(&format!("the dataset `{name}` is missing; the file holds `")), "{error}");
    }
}

#[test]
fn a_missing_attribute() {
    let (_folder, path) = changed(|file| file.delete_attr("beta").unwrap());
    let error = refusal(&path).to_string();
    assert!(error.ends_with("the root attribute `beta` is missing"), "{error}");
}

/// Puts a dataset of zeros, of another shape or kind, in the place of one that is right.
fn replaced<T: hdf5_metno::H5Type>(name: &str, shape: &[usize]) -> (tempfile::TempDir, PathBuf) {
    changed(|file| {
        file.unlink(name).unwrap();
        file.new_dataset::<T>().shape(shape).create(name).unwrap();
    })
}

#[rstest]
#[case("nu", &[2, 9], "`nu` is of shape [2, 9], expected of shape [sample, x, y]")]
#[case("nu", &[0, 3, 3], "`nu` is of shape [0, 3, 3], expected at least one sample, row and column")]
#[case("nu", &[3, 3, 3], "`tensor` is of shape [2, 1, 3, 3], expected of shape [3, 1, 3, 3] to agree with `nu`")]
#[case("tensor", &[2, 3, 3], "`tensor` is of shape [2, 3, 3], expected of shape [2, 1, 3, 3] to agree with `nu`")]
#[case("tensor", &[2, 2, 3, 3], "`tensor` is of shape [2, 2, 3, 3], expected of shape [2, 1, 3, 3] to agree with `nu`")]
#[case("x-coordinate", &[4], "`x-coordinate` is of shape [4], expected of shape [3] to agree with `nu`")]
#[case("y-coordinate", &[3], "`y-coordinate` is 0 at index 0 and 0 at the next, expected ascending")]
fn a_wrong_shape(#[case] name: &str, #[case] shape: &[usize], #[case] expected: &str) {
    let (_folder, path) = replaced::<f32>(name, shape);
    let error = refusal(&path).to_string();
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn a_wrong_kind() {
    let (_folder, path) = replaced::<f64>("nu", &[2, 3, 3]);
    assert!(refusal(&path).to_string().ends_with("`nu` is of dtype float64, expected float32"));
    let (_folder, path) = replaced::<i32>("tensor", &[2, 1, 3, 3]);
    assert!(refusal(&path).to_string().ends_with("`tensor` is of dtype int32, expected float32"));
    let (_folder, path) = replaced::<u8>("x-coordinate", &[3]);
    let error = refusal(&path).to_string();
    assert!(error.ends_with("`x-coordinate` is of dtype uint8, expected floating-point numbers"), "{error}");
    let (_folder, path) = changed(|file| {
        file.unlink("nu").unwrap();
        file.create_group("nu").unwrap();
    });
    let error = refusal(&path).to_string();
    assert!(error.contains("could not open dataset `nu`"), "{error}");
}

#[test]
fn a_source_that_is_not_one_number() {
    let with_beta = |write: fn(&File)| {
        changed(|file| {
            file.delete_attr("beta").unwrap();
            write(file);
        })
    };
    let (_folder, path) = with_beta(|file| {
        file.new_attr::<f64>().create("beta").unwrap().write_scalar(&f64::NAN).unwrap();
    });
    assert!(refusal(&path).to_string().ends_with("`beta` is NaN, expected a finite number"));
    let (_folder, path) = with_beta(|file| {
        file.new_attr::<f64>().shape(2).create("beta").unwrap();
    });
    assert!(refusal(&path).to_string().ends_with("`beta` is 2 numbers, expected one number"));
    let (_folder, path) = with_beta(|file| {
        file.new_attr::<i32>().shape(1).create("beta").unwrap().write_raw(&[3]).unwrap();
    });
    assert_eq!(DarcyFile::open(path).unwrap().beta(), 3.0);
}

#[rstest]
#[case(f32::NAN, "NaN")]
#[case(f32::NEG_INFINITY, "-inf")]
fn values_that_are_not_finite(#[case] value: f32, #[case] text: &str) {
    let (_folder, path) = made("bad_values.h5", |path| {
        let (nu, mut u) = ([3.0; 18], [0.5; 18]);
        // Sample 1, x 2, y 0; and a later one, which is not the first.
        (u[15], u[17]) = (value, f32::NAN);
        let mut writer = DarcyWriter::create(path, 2, 3, 1.0).unwrap();
        writer.append(&nu, &u).unwrap();
        writer.finish().unwrap();
    });
    let file = DarcyFile::open(&path).unwrap();
    let expected = format!(
        "{}: `tensor` holds a value that is not finite: {text} at index [1, 0, 2, 0]",
        path.display()
    );
    assert_eq!(file.read(&[1, 0], 0..3, 0..3).unwrap_err().to_string(), expected);
    assert_eq!(file.read(&[1], 1..3, 0..1).unwrap_err().to_string(), expected);
    assert_eq!(file.statistics(0..2).unwrap_err().to_string(), expected);
    // Reads that do not touch it succeed.
    file.read(&[0], 0..3, 0..3).unwrap();
    file.read(&[1], 0..2, 0..3).unwrap();
}

/// Files whose names are those of another registered format: the error names it.
#[rstest]
#[case("npy", "npy")]
#[case("NPZ", "npy")]
fn other_formats(#[case] extension: &str, #[case] format: &str) {
    let (_folder, path) = made(&format!("data.{extension}"), |path| std::fs::write(path, "").unwrap());
    let error = refusal(&path).to_string();
    assert!(error.ends_with(&format!("--set data.format={format}")), "{error}");
}

/// An HDF5 file of something else says what it holds.
#[test]
fn another_data_set() {
    let (_folder, path) = made("other.h5", |path| {
        File::create(path).unwrap().new_dataset::<f32>().shape(3).create("vorticity").unwrap();
    });
    let error = refusal(&path).to_string();
    assert!(error.ends_with("the dataset `nu` is missing; the file holds `vorticity`"), "{error}");
    let (_folder, path) = made("empty.h5", |path| drop(File::create(path).unwrap()));
    let error = refusal(&path).to_string();
    assert!(error.ends_with("the dataset `nu` is missing; the file holds nothing"), "{error}");
}

/// Bytes that are damaged inside a file of the right length must not crash, and never give made-up values: a compressed
/// chunk that no longer inflates is an error of the dataset.
#[test]
fn a_damaged_chunk() {
    let (_folder, path) = changed(|_| ());
    let mut content = std::fs::read(&path).unwrap();
    // The only zlib header: the solution's bytes are all alike.
    let chunk = content.windows(2).rposition(|pair| pair == [0x78, 0x9c]).unwrap();
    content[chunk..chunk + 2].fill(0xff);
    std::fs::write(&path, content).unwrap();
    let error = DarcyFile::open(&path).unwrap().statistics(0..2).unwrap_err().to_string();
    assert!(error.contains("`nu` is in a chunk at [0, 0, 0] that cannot be inflated"), "{error}");
}
