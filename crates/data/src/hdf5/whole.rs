//! Is this an HDF5 file, and a whole one? Asked before the HDF5 library opens it, for errors that say what to do.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

use crate::{Error, Result};

/// Rejects what is missing, not HDF5, or cut off; returns the file's length.
pub(crate) fn check(path: &Path) -> Result<u64> {
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(Error::Missing { path: path.to_owned() });
        }
        Err(error) => return Err(Error::io(path, "look at it", error)),
    };
    // HDF5 opens the file by its name and would block on a FIFO.
    let mut file = isobar_files::open(path).map_err(|error| Error::io(path, "open it", error))?;
    check_whole(path, &mut file, metadata.len())?;
    Ok(metadata.len())
}

const SIGNATURE: [u8; 8] = *b"\x89HDF\r\n\x1a\n";
/// As much of a superblock as reaches to the end-of-file address in every version, with 8-byte addresses.
const HEAD: usize = 56;

/// Compares the length with the end-of-file address in the superblock (HDF5 File Format Specification, section II.A).
fn check_whole(path: &Path, file: &mut File, found: u64) -> Result<()> {
    // The superblock stands at the start, or after a user block of 512, 1024, 2048, … bytes.
    let mut offset = 0;
    while offset + SIGNATURE.len() as u64 <= found {
        let head = read_at(file, offset).map_err(|error| Error::io(path, "read it", error))?;
        if head.starts_with(&SIGNATURE) {
            return match end_of_file(&head) {
                Some(expected) if expected > found => {
                    Err(Error::Truncated { path: path.to_owned(), expected, found })
                }
                None if head.len() < HEAD => {
                    Err(Error::Truncated { path: path.to_owned(), expected: offset + HEAD as u64, found })
                }
                // A superblock of a later version: the library judges.
                Some(_) | None => Ok(()),
            };
        }
        offset = if offset == 0 { 512 } else { offset * 2 };
    }
    Err(Error::NotHdf5 { path: path.to_owned() })
}

fn read_at(file: &mut File, offset: u64) -> std::io::Result<Vec<u8>> {
    file.seek(SeekFrom::Start(offset))?;
    let mut head = Vec::with_capacity(HEAD);
    file.take(HEAD as u64).read_to_end(&mut head)?;
    Ok(head)
}

/// The end-of-file address: absolute, whatever the base address is.
fn end_of_file(head: &[u8]) -> Option<u64> {
    let (size_of_offsets, position) = match head.get(8)? {
        // After the base address and the free-space address.
        0 => (*head.get(13)?, 24 + 2 * 8),
        1 => (*head.get(13)?, 28 + 2 * 8),
        // After the base address and the superblock extension's.
        2 | 3 => (*head.get(9)?, 12 + 2 * 8),
        _ => return None,
    };
    if size_of_offsets != 8 {
        return None;
    }
    Some(u64::from_le_bytes(head.get(position..position + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock(version: u8, end: u64) -> Vec<u8> {
        let mut head = vec![0; 96];
        head[..8].copy_from_slice(&SIGNATURE);
        head[8] = version;
        let (size, position) = match version {
            0 => (13, 40),
            1 => (13, 44),
            _ => (9, 28),
        };
        head[size] = 8;
        head[position..position + 8].copy_from_slice(&end.to_le_bytes());
        head
    }

    fn verdict(content: &[u8]) -> Result<u64> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        check(file.path())
    }

    #[rstest::rstest]
    fn lengths_are_compared_in_every_version(
        #[values(0, 1, 2, 3)] version: u8,
        #[values(0, 512, 2048)] user_block: usize,
    ) {
        let file = |end: u64| [vec![0; user_block], superblock(version, end)].concat();
        let whole = (user_block + 96) as u64;
        verdict(&file(whole)).unwrap();
        match verdict(&file(whole + 1)).unwrap_err() {
            Error::Truncated { expected, found, .. } => assert_eq!((expected, found), (whole + 1, whole)),
            other => panic!("{other}"),
        }
    }

    #[test]
    fn what_ends_within_the_superblock_is_truncated() {
        assert!(matches!(verdict(&superblock(0, 96)[..30]), Err(Error::Truncated { .. })));
    }

    #[test]
    fn what_has_no_signature_is_no_hdf5_file() {
        for content in [&b""[..], b"x", &[0; 5000]] {
            assert!(matches!(verdict(content), Err(Error::NotHdf5 { .. })));
        }
    }
}
