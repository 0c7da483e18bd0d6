//! Metrics of a run, written by rank 0 as JSON lines, CSV and TensorBoard events.
//!
//! It writes values and computes none.

mod csv;
mod json_lines;
mod tensorboard;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use self::csv::CsvFile;
use self::json_lines::JsonLines;
use self::tensorboard::EventFile;
pub(crate) use self::tensorboard::is_event_file;
use crate::error::{Error, IoContext, Result};
use crate::metric::MetricKind;

/// Files that metrics are written to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsConfig {
    /// Write `metrics.jsonl`, an object a line.
    pub json_lines: bool,
    /// Write `metrics.csv`, a column for each metric.
    pub csv: bool,
    /// Write an event file for TensorBoard into `tensorboard/`.
    pub tensorboard: bool,
    /// Steps between two records of training metrics; 0 records at the end of epochs only.
    pub every_steps: u64,
    /// Metrics of forecasts that are reported besides the errors, for each variable and lead time, on physical values: names, such
    /// as `["rmse", "acc"]`, or tables with the key `type`. Weighted by latitude if `train.weights.latitude` is on.
    pub report: Vec<MetricKind>,
    /// Data file of the format of the data, whose mean over samples and frames at each point is the climatology of metrics that
    /// need one (`acc`). By default it is the mean over the training samples.
    pub climatology: Option<PathBuf>,
}

impl Default for MetricsConfig {
    fn default() -> Self {
        Self {
            json_lines: true,
            csv: true,
            tensorboard: true,
            every_steps: 10,
            report: Vec::new(),
            climatology: None,
        }
    }
}

/// Writer of metrics. Rank 0 opens one with files; the others use [`MetricSink::none`], which drops all records, so that
/// callers need not check their rank.
///
/// ```
/// use isobar_train::metrics::{MetricSink, MetricsConfig};
///
/// let folder = tempfile::tempdir()?;
/// let mut sink = MetricSink::open(folder.path(), &MetricsConfig::default(), &["loss", "lr"], None)?;
/// sink.log(1, 0, &[("loss", 0.5)])?;
/// assert!(std::fs::read_to_string(folder.path().join("metrics.jsonl"))?.contains(r#""loss":0.5"#));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct MetricSink {
    columns: Vec<String>,
    writers: Vec<Box<dyn Writer>>,
    /// Time of the last flush.
    flushed: Option<Instant>,
}

/// Shortest time between flushes after a record: readers of the files see records at once, and a run of many short steps does
/// not wait for the system at each.
const FLUSH_EVERY: Duration = Duration::from_millis(200);

/// One value a column at a step.
pub(crate) struct Record<'a> {
    step: u64,
    epoch: u64,
    values: &'a [(&'a str, f64)],
}

/// A file format.
trait Writer: std::fmt::Debug + Send {
    fn write(&mut self, record: &Record<'_>) -> Result<()>;
    fn flush(&mut self) -> Result<()>;
}

impl MetricSink {
    /// A sink that drops everything: for ranks other than 0.
    pub fn none() -> Self {
        Self::default()
    }

    /// Opens the files of `config` in `folder`, which is made where it is missing. `columns` names every metric that
    /// will be logged. With `resume_at`, a step, existing files are continued: records after that step are dropped
    /// first, so that none occurs twice. Without it, the folder must hold no records of an earlier run. New
    /// columns of a CSV file are appended behind the existing ones.
    ///
    /// # Errors
    ///
    /// A file cannot be written, or a file to continue is not a metrics file; without `resume_at`,
    /// [`Error::HoldsResults`] if there are records, which stay.
    pub fn open(
        folder: &Path,
        config: &MetricsConfig,
        columns: &[impl AsRef<str>],
        resume_at: Option<u64>,
    ) -> Result<Self> {
        std::fs::create_dir_all(folder).at("make the folder", folder)?;
        if resume_at.is_none() && any_in(folder)? {
            return Err(Error::HoldsResults { path: folder.to_owned(), found: "metrics".to_owned() });
        }
        let columns: Vec<String> = columns.iter().map(|c| c.as_ref().to_owned()).collect();
        let mut writers: Vec<Box<dyn Writer>> = Vec::new();
        if config.json_lines {
            writers.push(Box::new(JsonLines::open(&folder.join("metrics.jsonl"), resume_at)?));
        }
        if config.csv {
            writers.push(Box::new(CsvFile::open(&folder.join("metrics.csv"), &columns, resume_at)?));
        }
        if config.tensorboard {
            writers.push(Box::new(EventFile::open(&folder.join("tensorboard"), resume_at)?));
        }
        Ok(Self { columns, writers, flushed: None })
    }

    /// Records values at `step`, the number of steps taken, in `epoch`, from 0. The record is flushed at once unless the last flush is
    /// less than 200 ms old.
    ///
    /// # Errors
    ///
    /// A name was not declared, or a file cannot be written.
    pub fn log(&mut self, step: u64, epoch: u64, values: &[(&str, f64)]) -> Result<()> {
        if self.writers.is_empty() {
            return Ok(());
        }
        if let Some((name, _)) = values.iter().find(|(name, _)| !self.columns.iter().any(|c| c == name)) {
            return Err(Error::UnknownMetric { name: (*name).to_owned(), columns: self.columns.clone() });
        }
        let record = Record { step, epoch, values };
        self.writers.iter_mut().try_for_each(|writer| writer.write(&record))?;
        match self.flushed.is_some_and(|flushed| flushed.elapsed() < FLUSH_EVERY) {
            true => Ok(()),
            false => self.flush(),
        }
    }

    /// Hands everything to the system.
    ///
    /// # Errors
    ///
    /// A file cannot be written.
    pub fn flush(&mut self) -> Result<()> {
        self.flushed = Some(Instant::now());
        self.writers.iter_mut().try_for_each(|writer| writer.flush())
    }
}

/// Returns whether metrics files in a folder hold records. Files that a failed start has opened hold none.
pub(crate) fn any_in(folder: &Path) -> Result<bool> {
    let found = [
        json_lines::has_records(&folder.join("metrics.jsonl")),
        csv::has_records(&folder.join("metrics.csv")),
        tensorboard::has_records(&folder.join("tensorboard")),
    ];
    for found in found {
        match found {
            Ok(false) => {}
            // For example a folder in the place of a file, which this run must not replace.
            Ok(true) => return Ok(true),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
            Err(error) => return Err(error).at("look for metrics in", folder),
        }
    }
    Ok(false)
}

/// Reads a file of text to continue.
fn read_text(path: &Path) -> Result<String> {
    match isobar_files::read_to_string(path, u64::MAX) {
        Err(error) if error.kind() == ErrorKind::InvalidData => {
            Err(Error::MetricsFile { path: path.to_owned(), reason: "it is not UTF-8 text".to_owned() })
        }
        text => text.at("read", path),
    }
}

impl Drop for MetricSink {
    fn drop(&mut self) {
        if let Err(error) = self.flush() {
            tracing::warn!(%error, "the last metrics could not be written");
        }
    }
}

#[cfg(test)]
mod tests;
