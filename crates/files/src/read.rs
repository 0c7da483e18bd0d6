//! Reading of regular files.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::check_regular;

/// Opens a regular file for reading. Never blocks on a FIFO without a writer, and never opens a device.
///
/// ```
/// let error = isobar_files::open("/dev/zero").unwrap_err();
/// assert_eq!(error.to_string(), "it is a device, expected a regular file");
/// ```
///
/// # Errors
///
/// The path is missing or may not be read, or leads to something other than a regular file.
pub fn open(path: impl AsRef<Path>) -> Result<File> {
    let path = path.as_ref();
    // First by name, since opening a device may change its state.
    check_regular(std::fs::metadata(path)?.file_type())?;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    // The handle is checked again, since another file may have taken the name.
    check_regular(file.metadata()?.file_type())?;
    Ok(file)
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
///
/// Those of [`open`] and of reading; [`ErrorKind::FileTooLarge`] for a longer file, before memory is allocated for it.
pub fn read(path: impl AsRef<Path>, limit: u64) -> Result<Vec<u8>> {
    let file = open(path)?;
    let length = file.metadata()?.len();
    let too_long = |length: u64| {
        let reason = format!("it has {length} bytes, expected at most {limit}");
        Error::new(ErrorKind::FileTooLarge, reason)
    };
    if length > limit {
        return Err(too_long(length));
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length as usize).map_err(|_| Error::from(ErrorKind::OutOfMemory))?;
    // The file may have grown, or be a kernel file (such as in `/proc`), whose length is 0.
    let read = file.take(limit.saturating_add(1)).read_to_end(&mut bytes)? as u64;
    if read > limit { Err(too_long(read)) } else { Ok(bytes) }
}

/// Reads a regular file of at most `limit` bytes as UTF-8.
///
/// # Errors
///
/// Those of [`read`]; [`ErrorKind::InvalidData`] for bytes that are not UTF-8.
pub fn read_to_string(path: impl AsRef<Path>, limit: u64) -> Result<String> {
    String::from_utf8(read(path, limit)?)
        .map_err(|_| Error::new(ErrorKind::InvalidData, "stream did not contain valid UTF-8"))
}
