//! Special files in the place of regular ones, and limits.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use isobar_files::{NewFile, append, open, read, read_to_string, write};
use nix::sys::stat::Mode;
use rstest::rstest;
use tempfile::{TempDir, tempdir};

fn fifo(path: &Path) {
    nix::unistd::mkfifo(path, Mode::from_bits_truncate(0o600)).unwrap();
}

fn socket(path: &Path) {
    drop(UnixListener::bind(path).unwrap());
}

fn folder(path: &Path) {
    std::fs::create_dir(path).unwrap();
}

fn device(path: &Path) {
    symlink("/dev/zero", path).unwrap();
}

fn made(make: fn(&Path)) -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("special");
    make(&path);
    (folder, path)
}

#[rstest]
#[case(fifo, "a FIFO")]
#[case(socket, "a socket")]
#[case(folder, "a directory")]
#[case(device, "a device")]
fn special_files_are_not_read(#[case] make: fn(&Path), #[case] kind: &str) {
    let (_folder, path) = made(make);
    for error in [open(&path).map(drop), read(&path, 10).map(drop), read_to_string(&path, 10).map(drop)] {
        assert_eq!(error.unwrap_err().to_string(), format!("it is {kind}, expected a regular file"));
    }
}

#[rstest]
#[case(fifo, "a FIFO")]
#[case(socket, "a socket")]
#[case(folder, "a directory")]
#[case(device, "a symbolic link")]
fn special_files_are_not_replaced(#[case] make: fn(&Path), #[case] kind: &str) {
    let (folder, path) = made(make);
    let before = std::fs::symlink_metadata(&path).unwrap().file_type();
    for error in [write(&path, "text").unwrap_err(), append(&path).unwrap_err()] {
        assert_eq!(error.to_string(), format!("it is {kind}, expected a regular file"));
    }
    assert_eq!(std::fs::symlink_metadata(&path).unwrap().file_type(), before);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);

    // Nor is one that takes the name while the file is written.
    let target = folder.path().join("later");
    let new = NewFile::create(&target).unwrap();
    make(&target);
    assert!(new.finish().unwrap_err().to_string().contains(kind));
    assert_eq!(std::fs::symlink_metadata(&target).unwrap().file_type(), before);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn the_device_of_full_disks_stays_one() {
    let error = NewFile::create("/dev/full").unwrap_err().to_string();
    assert!(error.contains("it is a device"), "{error}");
    assert!(std::fs::symlink_metadata("/dev/full").unwrap().file_type().is_char_device());
}

#[test]
fn regular_files_are_written_and_replaced() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("file");
    for text in ["one", "two"] {
        write(&path, text).unwrap();
        assert_eq!(read_to_string(&path, 3).unwrap(), text);
    }
    drop(NewFile::create(&path).unwrap());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    assert_eq!(read(folder.path().join("none"), 1).unwrap_err().kind(), ErrorKind::NotFound);
}

/// A sparse file of a terabyte is refused by its length.
#[test]
fn longer_files_are_refused_before_they_are_read() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
    let error = read(&path, 1 << 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::FileTooLarge);
    assert_eq!(error.to_string(), "it has 1099511627776 bytes, expected at most 1048576");
    // A file of the kernel's says that it is empty.
    assert_eq!(read("/proc/self/status", 10).unwrap_err().kind(), ErrorKind::FileTooLarge);
    assert!(!read("/proc/self/status", 1 << 20).unwrap().is_empty());
}
