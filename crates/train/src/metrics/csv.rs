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
    /// Opens the file. To continue, removes the records after `resume_at`, and appends this run's new columns
    /// behind the existing ones.
    pub(super) fn open(path: &Path, columns: &[String], resume_at: Option<u64>) -> Result<Self> {
        let (columns, start) = match resume_at {
            Some(step) if path.exists() => kept(path, columns, step)?,
            _ => (columns.to_vec(), header(columns)),
        };
        let file = files::replace_and_append(path, start.as_bytes())?;
        Ok(Self { path: path.to_owned(), columns, file: BufWriter::new(file) })
    }
}

fn header(columns: &[String]) -> String {
    format!("{FIRST}{}\n", columns.join(","))
}

/// Begins every header.
const FIRST: &str = "step,epoch,";

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

/// Returns whether the file holds more than a header.
pub(super) fn has_records(path: &Path) -> std::io::Result<bool> {
    let mut lines = BufReader::new(isobar_files::open(path)?).split(b'\n');
    lines.next().transpose()?;
    Ok(lines.next().transpose()?.is_some())
}

fn kept(path: &Path, columns: &[String], last_step: u64) -> Result<(Vec<String>, String)> {
    let text = super::read_text(path)?;
    let refused = |reason: String| Error::MetricsFile { path: path.to_owned(), reason };
    let mut lines = text.split_inclusive('\n');
    let found = lines.next().unwrap_or_default();
    let Some(names) = found.strip_suffix('\n').and_then(|line| line.strip_prefix(FIRST)) else {
        return Err(refused(format!("its header is {:?}, expected \"{FIRST}…\"", found.trim_end())));
    };
    let mut all: Vec<String> = names.split(',').map(str::to_owned).collect();
    let new: Vec<String> = columns.iter().filter(|column| !all.contains(column)).cloned().collect();
    let empty = ",".repeat(new.len());
    all.extend(new);
    let mut kept = header(&all);
    for (number, line) in lines.enumerate() {
        let Some(line) = line.strip_suffix('\n') else { break }; // cut off by an interruption
        let step = line.split(',').next().and_then(|s| s.parse::<u64>().ok());
        let step = step.ok_or_else(|| refused(format!("line {} does not begin with a step", number + 2)))?;
        if step <= last_step {
            kept.push_str(line);
            kept.push_str(&empty);
            kept.push('\n');
        }
    }
    Ok((all, kept))
}
