//! Records by which rank 0 hands its progress to a launcher that draws the bar.

use std::io::Write;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Begins a record: ASCII's record separator, which no other line begins with.
const SEPARATOR: char = '\u{1e}';

/// The time between two records, at least.
const PAUSE: Duration = Duration::from_millis(250);

/// Progress of a run as one line of standard error, for a launcher that draws the bar on the terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgressRecord {
    /// Steps taken.
    pub done: u64,
    /// Steps of the whole run; 0 at the end of the run, where the bar goes.
    pub total: u64,
    /// Text behind the bar.
    pub text: String,
}

impl ProgressRecord {
    /// Parses a line of a rank's standard error; `None` if it is no record.
    ///
    /// ```
    /// use isobar_train::ProgressRecord;
    ///
    /// let record = ProgressRecord { done: 3, total: 8, text: "epoch 1/2".into() };
    /// assert_eq!(ProgressRecord::parse(record.line().as_bytes()), Some(record));
    /// assert_eq!(ProgressRecord::parse(b"epoch 1/2"), None);
    /// ```
    pub fn parse(line: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(line).ok()?.strip_prefix(SEPARATOR)?;
        serde_json::from_str(text.trim_end()).ok()
    }

    /// The record as a line with its end.
    pub fn line(&self) -> String {
        format!("{SEPARATOR}{}\n", serde_json::to_string(self).unwrap_or_default())
    }
}

/// Writes records to standard error, a few a second.
#[derive(Debug, Default)]
pub(super) struct Records {
    last: Option<Instant>,
}

impl Records {
    pub(super) fn set(&mut self, done: u64, total: u64, text: impl FnOnce() -> String) {
        let now = Instant::now();
        if done < total && self.last.is_some_and(|last| now - last < PAUSE) {
            return;
        }
        self.last = Some(now);
        write(&ProgressRecord { done, total, text: text() }.line());
    }

    /// Writes the record that removes the bar.
    pub(super) fn finish(&self) {
        write(&ProgressRecord { done: 0, total: 0, text: String::new() }.line());
    }
}

/// Writes to standard error; a launcher that is gone is no error of the run.
pub(super) fn write(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}
