//! `metrics.jsonl`: an object a line.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::{Record, Writer};
use crate::error::{Error, IoContext, Result};
use crate::files;

#[derive(Debug)]
pub(super) struct JsonLines {
    path: PathBuf,
    file: BufWriter<File>,
}

impl JsonLines {
    pub(super) fn open(path: &Path, resume_at: Option<u64>) -> Result<Self> {
        let kept = match resume_at {
            Some(step) if path.exists() => kept(path, step)?,
            _ => String::new(),
        };
        let file = files::replace_and_append(path, kept.as_bytes())?;
        Ok(Self { path: path.to_owned(), file: BufWriter::new(file) })
    }
}

impl Writer for JsonLines {
    fn write(&mut self, record: &Record<'_>) -> Result<()> {
        let mut object = Map::new();
        object.insert("step".into(), record.step.into());
        object.insert("epoch".into(), record.epoch.into());
        for (name, value) in record.values {
            // JSON has no NaN or infinity; they become null.
            object.insert((*name).to_owned(), Value::from(*value));
        }
        writeln!(self.file, "{}", Value::Object(object)).at("write", &self.path)
    }

    fn flush(&mut self) -> Result<()> {
        self.file.flush().at("write", &self.path)
    }
}

/// Returns whether the file holds anything.
pub(super) fn has_records(path: &Path) -> std::io::Result<bool> {
    Ok(std::fs::metadata(path)?.len() > 0)
}

fn kept(path: &Path, last_step: u64) -> Result<String> {
    let text = super::read_text(path)?;
    let refused = |number: usize, reason: String| Error::MetricsFile {
        path: path.to_owned(),
        reason: format!("line {}: {reason}", number + 1),
    };
    let mut kept = String::new();
    let ends_whole = text.ends_with('\n');
    let count = text.lines().count();
    for (number, line) in text.lines().enumerate() {
        if number + 1 == count && !ends_whole {
            break; // cut off by an interruption
        }
        let value: Value = serde_json::from_str(line).map_err(|e| refused(number, e.to_string()))?;
        let step = value.get("step").and_then(Value::as_u64);
        let step =
            step.ok_or_else(|| refused(number, "an object with a whole-number \"step\" expected".into()))?;
        if step <= last_step {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    Ok(kept)
}
