//! `metrics.csv`: a column for each metric, empty where a record has no value of it.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::{Record, Writer};
use crate::error::{Error, IoContext, Result};
use crate::files;

#[derive(Debug)]
pub(super) struct CsvFile {
    path: PathBuf,
    columns: Vec<String>,
    file: BufWriter<File>,
}

impl CsvFile {
    pub(super) fn open(path: &Path, columns: &[String], resume_at: Option<u64>) -> Result<Self> {
        let header = format!("step,epoch,{}\n", columns.join(","));
        let start = match resume_at {
            Some(step) if path.exists() => kept(path, &header, step)?,
            _ => header,
        };
        let file = files::replace_and_append(path, start.as_bytes())?;
        Ok(Self { path: path.to_owned(), columns: columns.to_vec(), file: BufWriter::new(file) })
    }
}

impl Writer for CsvFile {
    fn write(&mut self, record: &Record<'_>) -> Result<()> {
        let mut line = format!("{},{}", record.step, record.epoch);
        for column in &self.columns {
            line.push(',');
            if let Some((_, value)) = record.values.iter().find(|(name, _)| name == column) {
                line.push_str(&value.to_string());
            }
        }
        writeln!(self.file, "{line}").at("write", &self.path)
    }

    fn flush(&mut self) -> Result<()> {
        self.file.flush().at("write", &self.path)
    }
}

/// Whether the file holds more than a header.
pub(super) fn has_records(path: &Path) -> std::io::Result<bool> {
    let mut lines = BufReader::new(File::open(path)?).split(b'\n');
    lines.next().transpose()?;
    Ok(lines.next().transpose()?.is_some())
}

fn kept(path: &Path, header: &str, last_step: u64) -> Result<String> {
    let text = isobar_files::read_to_string(path, u64::MAX).at("read", path)?;
    let refused = |reason: String| Error::MetricsFile { path: path.to_owned(), reason };
    let mut lines = text.split_inclusive('\n');
    let found = lines.next().unwrap_or_default();
    if found != header {
        return Err(refused(format!(
            "its header is {:?}, expected {:?}",
            found.trim_end(),
            header.trim_end()
        )));
    }
    let mut kept = header.to_owned();
    for (number, line) in lines.enumerate() {
        if !line.ends_with('\n') {
            break; // cut off by an interruption
        }
        let step = line.split(',').next().and_then(|s| s.parse::<u64>().ok());
        let step = step.ok_or_else(|| refused(format!("line {} does not begin with a step", number + 2)))?;
        if step <= last_step {
            kept.push_str(line);
        }
    }
    Ok(kept)
}
