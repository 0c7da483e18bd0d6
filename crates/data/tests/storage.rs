//! Files that lead to other files, or unpack to more than they say.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::ZlibEncoder;
use hdf5_metno::{Dataset, File, Selection};
use isobar_data::{DarcyFile, DarcyWriter, Error, WellFile};
use nix::sys::stat::Mode;
use rstest::rstest;
use tempfile::{TempDir, tempdir};

/// A file of two samples of 3 × 3 cells.
fn small(path: &Path) {
    let mut writer = DarcyWriter::create(path, 2, 3, 1.0).unwrap();
    writer.append(&[3.0; 18], &[0.5; 18]).unwrap();
    writer.finish().unwrap();
}

/// Such a file, changed by `change`, beside the file `secret.txt` and the data set `other.h5`.
fn changed(change: impl FnOnce(&File, &Path)) -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("data.h5");
    std::fs::write(folder.path().join("secret.txt"), [7; 72]).unwrap();
    small(&folder.path().join("other.h5"));
    small(&path);
    change(&File::open_rw(&path).unwrap(), folder.path());
    (folder, path)
}

#[track_caller]
fn refused(path: &Path, words: &[&str]) {
    let error = DarcyFile::open(path).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Layout { .. }), "{text}");
    assert!(text.starts_with(&path.display().to_string()), "{text}");
    assert!(words.iter().all(|words| text.contains(words)), "{text}");
}

#[test]
fn external_storage_is_refused() {
    let (_folder, path) = changed(|file, folder| {
        file.unlink("tensor").unwrap();
        let secret = folder.join("secret.txt").display().to_string();
        let builder = file.new_dataset::<f32>().shape([2, 1, 3, 3]).external(&secret, 0, 72);
        builder.create("tensor").unwrap();
    });
    refused(
        &path,
        &["`tensor` is stored in another file", "secret.txt", "expected values in the file itself"],
    );
}

#[test]
fn external_storage_in_a_fifo_is_refused() {
    let (_folder, path) = changed(|file, folder| {
        let fifo = folder.join("fifo");
        nix::unistd::mkfifo(&fifo, Mode::from_bits_truncate(0o600)).unwrap();
        file.unlink("x-coordinate").unwrap();
        let fifo = fifo.display().to_string();
        let builder = file.new_dataset::<f32>().shape(3).external(&fifo, 0, 12);
        builder.create("x-coordinate").unwrap();
    });
    refused(&path, &["`x-coordinate` is stored in another file"]);
}

#[rstest]
#[case::other_file("other.h5")]
#[case::fifo("fifo")]
#[case::missing("none.h5")]
fn external_links_are_refused(#[case] target: &str, #[values("tensor", "group/tensor")] name: &str) {
    let (_folder, path) = changed(|file, folder| {
        nix::unistd::mkfifo(&folder.join("fifo"), Mode::from_bits_truncate(0o600)).unwrap();
        let target = folder.join(target).display().to_string();
        file.unlink("tensor").unwrap();
        if let Some((group, link)) = name.split_once('/') {
            file.create_group(group).unwrap().link_external(&target, "tensor", link).unwrap();
            // A link within the file that leads to one out of it.
            file.link_soft(name, "tensor").unwrap();
        } else {
            file.link_external(&target, "tensor", name).unwrap();
        }
    });
    refused(&path, &[&format!("`{name}` is a link to another file")]);
    assert!(WellFile::open(&path).unwrap_err().to_string().contains("a link to another file"));
}

#[test]
fn virtual_datasets_are_refused() {
    let (_folder, path) = changed(|file, folder| {
        file.unlink("nu").unwrap();
        let (source, shape) = (folder.join("other.h5").display().to_string(), (2, 3, 3));
        let builder = file.new_dataset::<f32>().shape(shape);
        builder
            .virtual_map(&source, "nu", shape, Selection::All, shape, Selection::All)
            .create("nu")
            .unwrap();
    });
    refused(&path, &["`nu` is a virtual dataset", "expected values in the file itself"]);
}

#[test]
fn links_within_the_file_are_followed() {
    let (_folder, path) = changed(|file, _| {
        let group = file.create_group("group").unwrap();
        group.link_hard("/", "back").unwrap();
        file.relink("tensor", "group/tensor").unwrap();
        file.link_soft("/group/back/group/tensor", "tensor").unwrap();
        file.link_hard("nu", "group/nu").unwrap();
    });
    let fields = DarcyFile::open(&path).unwrap().read(&[1], 0..3, 0..3).unwrap();
    assert_eq!(fields.u.double_value(&[0, 0, 2, 2]), 0.5);
}

#[test]
fn a_fifo_is_refused() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("data.h5");
    nix::unistd::mkfifo(&path, Mode::from_bits_truncate(0o600)).unwrap();
    for error in [DarcyFile::open(&path).unwrap_err(), WellFile::open(&path).unwrap_err()] {
        let expected =
            format!("{}: could not open it: it is a FIFO, expected a regular file", path.display());
        assert_eq!(error.to_string(), expected);
    }
    let error = DarcyWriter::create(&path, 2, 3, 1.0).unwrap_err().to_string();
    assert!(error.contains("it is a FIFO, expected a regular file"), "{error}");
}

/// Values of which no four bytes are alike, and so do not pack well.
fn noise(count: usize) -> Vec<f32> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from_bits(0x3f80_0000 | (state >> 9))
    };
    (0..count).map(|_| next()).collect()
}

/// A chunk of 2.6 MB whose packed bytes are replaced by others, which unpack to more.
#[test]
fn a_chunk_that_unpacks_to_more_than_its_shape_is_refused() {
    const SIDE: usize = 800;
    let folder = tempdir().unwrap();
    let path = folder.path().join("bomb.h5");
    let mut writer = DarcyWriter::create(&path, 1, SIDE, 1.0).unwrap();
    let values = noise(SIDE * SIDE);
    writer.append(&values, &values).unwrap();
    writer.finish().unwrap();
    DarcyFile::open(&path).unwrap().read(&[0], 0..SIDE, 0..SIDE).unwrap();

    let chunk = File::open(&path).unwrap().dataset("nu").unwrap().chunk_info(0).unwrap();
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(&vec![0; 64 << 20]).unwrap();
    let bomb = encoder.finish().unwrap();
    assert!(bomb.len() < chunk.size as usize);
    std::fs::File::options().write(true).open(&path).unwrap().write_all_at(&bomb, chunk.addr).unwrap();

    let file = DarcyFile::open(&path).unwrap();
    for _ in 0..2 {
        let error = file.read(&[0], 0..1, 0..1).unwrap_err().to_string();
        assert!(
            error.contains("`nu` is in a chunk at [0, 0, 0] that unpacks to more than its 2560000 bytes"),
            "{error}"
        );
    }
    assert!(file.statistics(0..1).is_err());
}

/// The values of one chunk, none of them written.
fn in_one_chunk(file: &File, name: &str, shape: &[usize]) -> Dataset {
    file.new_dataset::<f32>().shape(shape).chunk(shape.to_vec()).deflate(1).create(name).unwrap()
}

#[test]
fn chunks_that_are_too_large_are_refused() {
    let (_folder, path) = changed(|file, _| {
        file.unlink("nu").unwrap();
        in_one_chunk(file, "nu", &[300, 1000, 1000]);
    });
    // So long that it could hold them.
    std::fs::File::options().write(true).open(&path).unwrap().set_len(7 << 20).unwrap();
    refused(&path, &["`nu` is in chunks of 1200000000 bytes, expected chunks of at most 1073741824 bytes"]);
}

#[test]
fn filters_without_a_bound_are_refused() {
    let (_folder, path) = changed(|file, _| {
        file.unlink("nu").unwrap();
        let builder = file.new_dataset::<f32>().shape([2, 3, 3]).chunk((2, 3, 3)).nbit();
        builder.create("nu").unwrap();
    });
    refused(&path, &["`nu` is packed by the filters nbit, expected shuffle, gzip and Fletcher32"]);
}

#[test]
fn attributes_of_many_values_are_refused() {
    let (_folder, path) = changed(|file, _| {
        file.delete_attr("beta").unwrap();
        file.new_attr::<f64>().shape(5000).create("beta").unwrap();
    });
    refused(&path, &["`beta` is of shape [5000], expected at most 1024 values"]);
}
