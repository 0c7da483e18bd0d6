//! Output of ranks: to the terminal, line by line, and to files; the last lines are kept for the report.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use isobar_train::ProgressRecord;

use super::screen::{Screen, Stream};
use isobar_command::exit::{Because, Exit};

/// Number of a rank's last lines in the report.
const LINES: usize = 12;

/// Longer lines are cut in two.
const LONGEST: u64 = 64 << 10;

/// Words of the watchdog before the folder of the records.
const RECORDS: &str = "flight records: ";

/// First words of the watchdog's report, before its finding.
const REPORT: &str = "isobar: the job ends";

/// Destinations of the lines of all ranks.
#[derive(Debug, Clone)]
pub(super) struct Outputs {
    pub(super) folder: Option<PathBuf>,
    /// True if lines on the terminal begin with their rank.
    pub(super) prefix: bool,
    /// The terminal.
    pub(super) screen: Screen,
}

/// Last lines of a rank's standard error.
#[derive(Debug, Clone, Default)]
pub(super) struct Tail(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    lines: VecDeque<String>,
    records: Option<String>,
    /// First finding of the watchdog; empty if it is on the next line.
    finding: Option<String>,
}

impl Outputs {
    /// The folder is made.
    pub(super) fn new(folder: Option<&Path>, prefix: bool) -> Result<Self> {
        if let Some(folder) = folder {
            let made = std::fs::create_dir_all(folder);
            made.map_err(|error| Exit::Usage.because(format!("--log-dir {}: {error}", folder.display())))?;
        }
        Ok(Self { folder: folder.map(Path::to_owned), prefix, screen: Screen::new() })
    }

    /// The file of a rank's stream, where there are files.
    pub(super) fn file(&self, rank: usize, stream: Stream) -> Option<PathBuf> {
        let ending = match stream {
            Stream::Out => "out",
            Stream::Err => "err",
        };
        self.folder.as_ref().map(|folder| folder.join(format!("rank_{rank}.{ending}")))
    }

    /// Returns the destination of one rank's stream. Files are appended to: the output of earlier attempts stays.
    pub(super) fn sink(&self, rank: usize, stream: Stream, tail: &Tail) -> Result<Sink> {
        let open = |path: PathBuf| {
            isobar_files::append(&path)
                .map_err(|error| Exit::Usage.because(format!("--log-dir: {}: {error}", path.display())))
        };
        let file = self.file(rank, stream).map(open).transpose()?;
        let terminal = file.is_none() || rank == 0;
        let prefix = if self.prefix && file.is_none() { format!("[rank {rank}] ") } else { String::new() };
        let (prefix, tail) = (prefix.into_bytes(), tail.clone());
        // The bar is that of rank 0.
        let progress = rank == 0 && stream == Stream::Err && self.screen.draws();
        Ok(Sink {
            stream,
            terminal,
            prefix,
            file,
            tail,
            greeting: None,
            screen: self.screen.clone(),
            progress,
        })
    }
}

/// Takes the lines of one rank's stream.
pub(super) struct Sink {
    stream: Stream,
    terminal: bool,
    prefix: Vec<u8>,
    file: Option<File>,
    tail: Tail,
    greeting: Option<Greeting>,
    screen: Screen,
    /// True if records of progress are drawn.
    progress: bool,
}

/// A line that is not passed on, and what is done when it comes.
struct Greeting {
    line: &'static str,
    then: Box<dyn FnOnce() + Send>,
}

impl Sink {
    /// Does something when that line comes for the first time, which is not passed on.
    pub(super) fn greeted(mut self, line: &'static str, then: impl FnOnce() + Send + 'static) -> Self {
        self.greeting = Some(Greeting { line, then: Box::new(then) });
        self
    }

    /// Passes on all that comes, to its end.
    pub(super) fn take(mut self, from: impl Read) {
        let mut from = BufReader::with_capacity(LONGEST as usize, from);
        let mut line = Vec::new();
        loop {
            line.clear();
            match from.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => break,
                Ok(_) if self.drawn(&line) => {}
                Ok(_) => match self.before_greeting(&line) {
                    None => self.line(&line),
                    Some(before) => {
                        self.greeting.take().into_iter().for_each(|greeting| (greeting.then)());
                        if before > 0 {
                            line.truncate(before);
                            line.push(b'\n');
                            self.line(&line);
                        }
                    }
                },
            }
        }
        if self.progress {
            self.screen.clear();
        }
    }

    /// Draws what is a record of progress.
    fn drawn(&self, line: &[u8]) -> bool {
        let record = if self.progress { ProgressRecord::parse(line) } else { None };
        record.map(|record| self.screen.record(record)).is_some()
    }

    /// Returns the length of the text before the greeting, if the line ends in it: a shell may have printed without a newline.
    fn before_greeting(&self, line: &[u8]) -> Option<usize> {
        let greeting = self.greeting.as_ref()?;
        line.trim_ascii_end().strip_suffix(greeting.line.as_bytes()).map(<[u8]>::len)
    }

    /// Passes on a line.
    fn line(&mut self, line: &[u8]) {
        if let Some(file) = &mut self.file {
            let _ = file.write_all(line);
        }
        if self.stream == Stream::Err {
            self.tail.keep(&String::from_utf8_lossy(line));
        }
        if !self.terminal {
            return;
        }
        let mut whole = Vec::with_capacity(self.prefix.len() + line.len() + 1);
        whole.extend_from_slice(&self.prefix);
        whole.extend_from_slice(line);
        if !self.prefix.is_empty() && !line.ends_with(b"\n") {
            // Else the next rank's line would begin on this one's.
            whole.push(b'\n');
        }
        self.screen.write(self.stream, &whole);
    }
}

impl Tail {
    /// The last lines, the oldest first.
    pub(super) fn lines(&self) -> Vec<String> {
        self.kept().lines.iter().cloned().collect()
    }

    /// The folder of the ranks' flight records, if the rank has named one.
    pub(super) fn records(&self) -> Option<String> {
        self.kept().records.clone()
    }

    /// Returns the first finding of the ranks' own report, if this rank has printed it.
    pub(super) fn finding(&self) -> Option<String> {
        self.kept().finding.clone().filter(|finding| !finding.is_empty())
    }

    fn keep(&self, line: &str) {
        let mut kept = self.kept();
        let line: String =
            line.trim_end().chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
        if let Some(records) = line.strip_prefix(RECORDS) {
            kept.records = Some(records.to_owned());
        }
        match &kept.finding {
            None if line == REPORT => kept.finding = Some(String::new()),
            Some(finding) if finding.is_empty() => kept.finding = Some(line.trim_start().to_owned()),
            _ => {}
        }
        if kept.lines.len() == LINES {
            kept.lines.pop_front();
        }
        kept.lines.push_back(line);
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_finding_of_a_report_is_kept() {
        let tail = Tail::default();
        tail.keep("  rank 3 is no finding");
        assert_eq!(tail.finding(), None);
        tail.keep("isobar: the job ends\n");
        assert_eq!(tail.finding(), None);
        ["  rank 1 (here) is stopped\n", "  rank 0 waits\n", "isobar: the job ends\n", "  rank 0\n"]
            .iter()
            .for_each(|line| tail.keep(line));
        assert_eq!(tail.finding().as_deref(), Some("rank 1 (here) is stopped"));
    }

    #[test]
    fn files_are_continued_and_the_last_lines_kept() {
        let folder = tempfile::tempdir().unwrap();
        let logs = folder.path().join("a/b");
        let outputs = Outputs::new(Some(&logs), true).unwrap();
        let tail = Tail::default();
        for _ in 0..2 {
            let text: String = (0..9).map(|line| format!("line {line}\n")).collect();
            outputs.sink(3, Stream::Err, &tail).unwrap().take(text.as_bytes());
        }
        let more = "flight records: runs/x/flight (isobar trace why runs/x/flight)\nno end";
        outputs.sink(3, Stream::Err, &tail).unwrap().take(more.as_bytes());
        let written = std::fs::read_to_string(logs.join("rank_3.err")).unwrap();
        assert_eq!(written.lines().count(), 20);
        assert!(written.ends_with("\nno end"));
        assert_eq!(tail.lines().len(), LINES);
        assert_eq!(tail.lines().last().unwrap(), "no end");
        assert_eq!(tail.records().unwrap(), "runs/x/flight (isobar trace why runs/x/flight)");
    }
}
