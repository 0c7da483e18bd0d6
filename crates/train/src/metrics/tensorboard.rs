//! TensorBoard's event files: records of TFRecord framing that hold `Event` protocol buffers.
//!
//! A record is the length (u64), the masked CRC-32C of the length, the data, and the masked CRC-32C of the data, all
//! little-endian (tensorflow/core/lib/io/record_writer.h). The messages are from tensorflow/core/util/event.proto and
//! tensorflow/core/framework/summary.proto; four fields are all that scalars need.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::{Record, Writer};
use crate::error::{Error, IoContext, Result};
use crate::files;

#[derive(Debug)]
pub(super) struct EventFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl EventFile {
    /// Opens an event file in `folder`: to continue, the newest one there without its events after `resume_at`.
    pub(super) fn open(folder: &Path, resume_at: Option<u64>) -> Result<Self> {
        std::fs::create_dir_all(folder).at("make the folder", folder)?;
        let existing = event_files(folder)?;
        let (path, start) = match (resume_at, existing.last()) {
            (Some(step), Some(path)) => (path.clone(), kept(path, step)?),
            _ => {
                // Those of starts that failed, which hold no curves.
                for path in &existing {
                    std::fs::remove_file(path).at("remove", path)?;
                }
                (folder.join(format!("events.out.tfevents.{:010}.isobar", now() as u64)), frame(&version()))
            }
        };
        let file = files::replace_and_append(&path, &start)?;
        Ok(Self { path, file: BufWriter::new(file) })
    }
}

impl Writer for EventFile {
    fn write(&mut self, record: &Record<'_>) -> Result<()> {
        let event = scalars(now(), record.step, record.values);
        self.file.write_all(&frame(&event)).at("write", &self.path)
    }

    fn flush(&mut self) -> Result<()> {
        self.file.flush().at("write", &self.path)
    }
}

/// Returns whether an event file in the folder holds more than its header record.
pub(super) fn has_records(folder: &Path) -> std::io::Result<bool> {
    let empty = frame(&version()).len() as u64;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if is_event_file(&entry.file_name().to_string_lossy()) && entry.metadata()?.len() > empty {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns whether a name is that of an event file.
pub(crate) fn is_event_file(name: &str) -> bool {
    name.starts_with("events.out.tfevents.")
}

fn event_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).at("list", folder)? {
        let path = entry.at("list", folder)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if is_event_file(&name) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The bytes of all whole events up to `last_step`.
fn kept(path: &Path, last_step: u64) -> Result<Vec<u8>> {
    let bytes = isobar_files::read(path, u64::MAX).at("read", path)?;
    let mut kept = Vec::new();
    let mut rest = bytes.as_slice();
    while let Some((record, data, after)) = next_record(rest) {
        let step = event_step(data).ok_or_else(|| Error::MetricsFile {
            path: path.to_owned(),
            reason: format!("the record at byte {} is no event", bytes.len() - rest.len()),
        })?;
        if step <= last_step {
            kept.extend_from_slice(record);
        }
        rest = after;
    }
    if kept.is_empty() {
        let reason = "it does not begin with a whole record of TensorBoard's framing".to_owned();
        return Err(Error::MetricsFile { path: path.to_owned(), reason });
    }
    Ok(kept)
}

/// The first record of `bytes`, its data, and what comes after; `None` at the end or where a record is cut or damaged.
fn next_record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let length = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    let length_crc = u32::from_le_bytes(bytes.get(8..12)?.try_into().ok()?);
    if masked_crc(&bytes[..8]) != length_crc {
        return None;
    }
    let end = usize::try_from(length).ok()?.checked_add(12)?;
    let data = bytes.get(12..end)?;
    let data_crc = u32::from_le_bytes(bytes.get(end..end + 4)?.try_into().ok()?);
    (masked_crc(data) == data_crc).then(|| (&bytes[..end + 4], data, &bytes[end + 4..]))
}

pub(super) fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = length.to_vec();
    record.extend(masked_crc(&length).to_le_bytes());
    record.extend(data);
    record.extend(masked_crc(data).to_le_bytes());
    record
}

fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// `Event { wall_time = 1, file_version = 3 }`, the first of a file.
fn version() -> Vec<u8> {
    let mut event = Message::default();
    event.double(1, now());
    event.bytes(3, b"brain.Event:2");
    event.0
}

/// `Event { wall_time = 1, step = 2, summary = 5 { value = 1 { tag = 1, simple_value = 2 } } }`.
fn scalars(wall_time: f64, step: u64, values: &[(&str, f64)]) -> Vec<u8> {
    let mut summary = Message::default();
    for (tag, scalar) in values {
        let mut value = Message::default();
        value.bytes(1, tag.as_bytes());
        value.float(2, *scalar as f32);
        summary.bytes(1, &value.0);
    }
    let mut event = Message::default();
    event.double(1, wall_time);
    event.varint(2, step);
    event.bytes(5, &summary.0);
    event.0
}

/// The step of an event, 0 where it has none; `None` where the bytes are no message.
fn event_step(mut bytes: &[u8]) -> Option<u64> {
    let mut step = 0;
    while !bytes.is_empty() {
        let key = take_varint(&mut bytes)?;
        match (key >> 3, key & 7) {
            (2, 0) => step = take_varint(&mut bytes)?,
            (_, 0) => drop(take_varint(&mut bytes)?),
            (_, 1) => bytes = bytes.get(8..)?,
            (_, 2) => {
                let length = usize::try_from(take_varint(&mut bytes)?).ok()?;
                bytes = bytes.get(length..)?;
            }
            (_, 5) => bytes = bytes.get(4..)?,
            _ => return None,
        }
    }
    Some(step)
}

fn take_varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// A protocol buffer being written.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, field: u64, value: u64) {
        self.raw_varint(field << 3);
        self.raw_varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.raw_varint(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
    }

    fn float(&mut self, field: u64, value: f32) {
        self.raw_varint(field << 3 | 5);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.raw_varint(field << 3 | 2);
        self.raw_varint(value.len() as u64);
        self.0.extend(value);
    }

    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}
