//! The members of a `.npz` file, which is a ZIP archive.
//!
//! Read by hand: what is needed of ZIP is its list of members, and a member's bytes by window without unpacking the others.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::{Error, Result};

/// A member of an archive.
#[derive(Debug, PartialEq)]
pub(super) struct Member {
    pub(super) name: String,
    /// Offset of its first byte.
    pub(super) start: u64,
    /// Bytes in the archive.
    pub(super) packed: u64,
    /// Bytes after unpacking.
    pub(super) unpacked: u64,
    pub(super) deflated: bool,
}

/// Most members of an archive.
const MOST_MEMBERS: usize = 1 << 16;
/// Longest directory of members, in bytes.
const LONGEST_DIRECTORY: u64 = 64 << 20;
/// Largest number of bytes that one byte of deflate expands to.
const DEFLATED: u64 = 1032;

const END: &[u8] = b"PK\x05\x06";
const END_64: &[u8] = b"PK\x06\x06";
const END_64_LOCATOR: &[u8] = b"PK\x06\x07";
const ENTRY: &[u8] = b"PK\x01\x02";
const LOCAL: &[u8] = b"PK\x03\x04";
/// Bytes of the end record, without its comment.
const END_LENGTH: usize = 22;

/// Lists the members of an archive.
pub(super) fn members(path: &Path, file: &File) -> Result<Vec<Member>> {
    let length = file.metadata().map_err(|error| Error::io(path, "look at it", error))?.len();
    let damaged = |problem: &str| Error::Layout {
        path: path.to_owned(),
        name: "the archive".to_owned(),
        found: problem.to_owned(),
        expected: "a complete .npz file, stored or deflated; copy or download it again".to_owned(),
    };
    let read = |offset: u64, count: u64| -> Result<Vec<u8>> {
        if offset.checked_add(count).is_none_or(|end| end > length) {
            return Err(damaged("cut off"));
        }
        let mut bytes = vec![0; count as usize];
        file.read_exact_at(&mut bytes, offset).map_err(|error| Error::io(path, "read it", error))?;
        Ok(bytes)
    };
    let (count, offset, size) =
        directory(length, &read).ok_or_else(|| damaged("without its list of members"))?;
    if count as usize > MOST_MEMBERS || size > LONGEST_DIRECTORY {
        return Err(damaged("of too many members"));
    }
    let listed = read(offset, size)?;
    let mut members = Vec::new();
    let mut rest = &listed[..];
    for _ in 0..count {
        let (entry, after) = entry(rest).ok_or_else(|| damaged("damaged in its list of members"))?;
        rest = after;
        let (name, method, flags, packed, unpacked, local) = entry;
        if flags & 1 != 0 || !matches!(method, 0 | 8) {
            return Err(damaged(&format!(
                "of a member {name:?} that is encrypted or of compression {method}"
            )));
        }
        let header = read(local, 30)?;
        if !header.starts_with(LOCAL) {
            return Err(damaged(&format!("damaged at its member {name:?}")));
        }
        let start = local + 30 + u64::from(u16_at(&header, 26)) + u64::from(u16_at(&header, 28));
        let fits = start.checked_add(packed).is_some_and(|end| end <= length);
        let deflated = method == 8;
        let bounded = if deflated { unpacked <= packed.saturating_mul(DEFLATED) } else { unpacked == packed };
        if !fits || !bounded {
            return Err(damaged(&format!("of a member {name:?} of {unpacked} bytes in {packed}")));
        }
        members.push(Member { name, start, packed, unpacked, deflated });
    }
    Ok(members)
}

/// Number of members, and place and length of their list.
fn directory(length: u64, read: &impl Fn(u64, u64) -> Result<Vec<u8>>) -> Option<(u64, u64, u64)> {
    let tail = length.min(END_LENGTH as u64 + u64::from(u16::MAX));
    let from = length - tail;
    let bytes = read(from, tail).ok()?;
    let at = (0..=bytes.len().checked_sub(END_LENGTH)?).rev().find(|&at| bytes[at..].starts_with(END))?;
    let end = &bytes[at..];
    let (count, size, offset) =
        (u64::from(u16_at(end, 10)), u64::from(u32_at(end, 12)), u64::from(u32_at(end, 16)));
    let wide = count == u64::from(u16::MAX) || size == u64::from(u32::MAX) || offset == u64::from(u32::MAX);
    let locator = (from + at as u64).checked_sub(20).and_then(|at| read(at, 20).ok());
    let Some(locator) = locator.filter(|bytes| wide && bytes.starts_with(END_64_LOCATOR)) else {
        return Some((count, offset, size));
    };
    let end = read(u64_at(&locator, 8), 56).ok().filter(|bytes| bytes.starts_with(END_64))?;
    Some((u64_at(&end, 32), u64_at(&end, 48), u64_at(&end, 40)))
}

/// Name, compression, flags, bytes packed and unpacked, and place of the local header.
type Entry = (String, u16, u16, u64, u64, u64);

/// The first entry of a list of members, and what follows it.
fn entry(bytes: &[u8]) -> Option<(Entry, &[u8])> {
    let fixed = bytes.get(..46).filter(|bytes| bytes.starts_with(ENTRY))?;
    let [name, extra, comment] = [28, 30, 32].map(|at| usize::from(u16_at(fixed, at)));
    let (flags, method) = (u16_at(fixed, 8), u16_at(fixed, 10));
    let text = String::from_utf8_lossy(bytes.get(46..46 + name)?).into_owned();
    let mut wide = bytes.get(46 + name..46 + name + extra)?;
    let rest = bytes.get(46 + name + extra + comment..)?;
    let mut sizes = [24, 20, 42].map(|at| u64::from(u32_at(fixed, at)));
    while wide.len() >= 4 {
        let (id, length) = (u16_at(wide, 0), usize::from(u16_at(wide, 2)));
        let mut field = wide.get(4..4 + length)?;
        if id == 1 {
            for size in sizes.iter_mut().filter(|size| **size == u64::from(u32::MAX)) {
                *size = u64_at(field.get(..8)?, 0);
                field = &field[8..];
            }
        }
        wide = &wide[4 + length..];
    }
    let [unpacked, packed, local] = sizes;
    Some(((text, method, flags, packed, unpacked, local), rest))
}

/// Numbers at a place that the caller has checked to be there.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
