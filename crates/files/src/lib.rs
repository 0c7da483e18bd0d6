//! Reading and writing of files that the user names, safe against special files in their place.
//!
//! | | |
//! |---|---|
//! | [`open`], [`read`], [`read_to_string`] | read regular files; refuse FIFOs, devices, sockets and folders without blocking |
//! | [`NewFile`], [`write`](write()) | write a file beside its target and rename it; refuse a target that is not a regular file |
//! | [`Partial`], [`remove_partial`] | remove outputs that are not complete where a process is told to end |
//! | [`is_within`], [`resolve`] | compare places of files, which need not exist |
//! | [`append`] | open a file to append to, made where it is missing; refuse symbolic links and special files |
//!
//! Reading follows symbolic links, since data sets are often links; writing does not. Errors are
//! [`std::io::Error`]s whose text names the kind of file found, but not the path, which the caller adds.

mod partial;
mod place;
mod read;
mod write;

pub use partial::{Partial, remove_partial};
pub use place::{is_url, is_within, resolve};
pub use read::{open, read, read_to_string};
pub use write::{NewFile, append, write};

use std::fs::FileType;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::FileTypeExt;

/// Refuses all but a regular file.
fn check_regular(kind: FileType) -> std::io::Result<()> {
    if kind.is_file() {
        return Ok(());
    }
    let (error, found) = if kind.is_dir() {
        (ErrorKind::IsADirectory, "a directory")
    } else if kind.is_fifo() {
        (ErrorKind::InvalidInput, "a FIFO")
    } else if kind.is_socket() {
        (ErrorKind::InvalidInput, "a socket")
    } else if kind.is_char_device() || kind.is_block_device() {
        (ErrorKind::InvalidInput, "a device")
    } else if kind.is_symlink() {
        (ErrorKind::InvalidInput, "a symbolic link")
    } else {
        (ErrorKind::InvalidInput, "a special file")
    };
    Err(Error::new(error, format!("it is {found}, expected a regular file")))
}
