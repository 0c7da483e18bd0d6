//! `isobar trace`: the operations that ranks recorded.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Subcommand;
use isobar_collectives::flight::FlightEntry;
use isobar_manager::flight::{self, FlightRecord, Records};

use crate::config::is_run;
use isobar_command::exit::{Because, Exit};
use isobar_command::{outputs, terminal};

const WHY_EXAMPLES: &str = "\
Examples:
  After a job of several ranks ended with exit code 4:
    isobar trace why runs/darcy_afno

Exit codes: 0 the records were read, or the run has lost no rank; 2 wrong command line; 3 there are none, or they cannot be
read.";

const EXPORT_EXAMPLES: &str = "\
Examples:
  The last operations of all ranks, to open in https://ui.perfetto.dev or chrome://tracing:
    isobar trace export runs/darcy_afno trace.json

Exit codes: 0 the trace was written; 2 wrong command line, or OUT.json is a file that is not replaced or has the name of a record;
3 there are no records, they cannot be read, or the trace cannot be written.";

/// Commands of `isobar trace`.
#[derive(Debug, Subcommand)]
pub(crate) enum TraceCommand {
    /// Say why a job ended, from the flight records of its ranks
    ///
    /// When a rank is lost, every rank that is left writes its last operations into a folder, which the report at the end of
    /// the job names (`distributed.flight_dir`). This reads them together: which rank was at fault, what the others waited
    /// for, how far each had come, and who waited, as a stack.
    #[command(after_long_help = WHY_EXAMPLES)]
    Why {
        /// The folder of a run, or of the records: `flight_rank_00000.json` and so on
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Export the last operations of all ranks to a Chrome trace, which Perfetto shows
    ///
    /// Reads the records that ranks leave when one of them is lost, as `why` does. The trace has a process for each rank and in it a
    /// row for each group; each operation has its call, module, phase, step and state. Times are those of each host's clock.
    #[command(after_long_help = EXPORT_EXAMPLES)]
    Export {
        /// The folder of a run, or of the records: `flight_rank_00000.json` and so on
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// The file to write
        #[arg(value_name = "OUT.json")]
        out: PathBuf,
    },
}

const NO_RECORDS: &str = "no rank was lost in this run: it has left no records";

/// Runs the command.
pub(crate) fn run(command: &TraceCommand) -> Result<Exit> {
    match command {
        TraceCommand::Why { folder } => match records(folder) {
            Some(folder) => terminal::line(&why(&flight::read(&folder)?)),
            None => terminal::line(NO_RECORDS),
        },
        TraceCommand::Export { folder, out } => {
            let Some(records) = records(folder) else {
                bail!(Exit::Data.because(format!("{}: {NO_RECORDS}", folder.display())));
            };
            export(&records, out)?;
        }
    }
    Ok(Exit::Good)
}

/// Finds the folder of records, given that folder or that of a run; `None` for a run without records.
fn records(folder: &Path) -> Option<PathBuf> {
    let inner = folder.join("flight");
    if inner.is_dir() {
        return Some(inner);
    }
    let of_run = is_run(folder) && !has_records(folder);
    let missing = !folder.exists() && folder.file_name().is_some_and(|name| name == "flight");
    let of_parent = missing && folder.parent().is_some_and(is_run);
    (!of_run && !of_parent).then(|| folder.to_owned())
}

fn has_records(folder: &Path) -> bool {
    flight::record_files(folder).is_ok_and(|files| !files.is_empty())
}

/// Writes the trace of the records in a folder.
fn export(folder: &Path, out: &Path) -> Result<()> {
    outputs::check_extension("OUT.json", out, "json")?;
    outputs::check("OUT.json", &[out], &flight::record_files(folder)?)?;
    if flight::is_record(out) {
        bail!(Exit::Usage.because(format!(
            "OUT.json: {} has the name of a flight record; name another file",
            out.display()
        )));
    }
    let records = flight::read(folder)?;
    let operations: usize = records.records.iter().map(|record| record.entries.len()).sum();
    if operations == 0 {
        bail!(Exit::Data.because(format!("the records in {} hold no operations", folder.display())));
    }
    let text = flight::chrome_trace(&records.records).to_string() + "\n";
    outputs::make_parent(out)?;
    let failed = |error| Exit::Data.because(format!("cannot write {}: {error}", out.display()));
    isobar_files::write(out, text).map_err(failed)?;
    terminal::line(&format!("{}\n{operations} operations  {}", summary(&records), out.display()));
    Ok(())
}

/// Summarises the records that were found, and those that cannot be read.
fn summary(Records { records, older, unreadable, .. }: &Records) -> String {
    let of = records.first().map_or(0, |record| record.ranks);
    let mut text = format!("{} of {of} ranks have left a record", records.len());
    if *older > 0 {
        text += &format!("; {older} records of earlier jobs are ignored");
    }
    for (path, problem) in unreadable {
        text += &format!("\n{} cannot be read: {}", clean(&path.display().to_string()), clean(problem));
    }
    text
}

fn why(found: &Records) -> String {
    let records = &found.records;
    let mut text =
        format!("{}\n\nwhat happened:\n{}\n\n{}", summary(found), flight::diagnose(records), table(records));
    for (record, entry) in records.iter().filter_map(|record| Some((record, record.stuck()?))) {
        if !entry.stack.is_empty() {
            text += &format!("\n\nrank {} waits in {} here:", record.rank, clean(&entry.operation));
            entry.stack.iter().for_each(|frame| text += &format!("\n  {}", clean(frame)));
        }
    }
    text
}

/// A line a rank: where it was.
fn table(records: &[FlightRecord]) -> String {
    let operation = |entry: Option<&FlightEntry>| {
        entry.map_or_else(
            || "-".to_owned(),
            |entry| format!("{} #{} of {}", entry.operation, entry.sequence, entry.group),
        )
    };
    let head = ["rank", "machine", "process", "phase", "step", "finished last", "in"].map(str::to_owned);
    let row = |record: &FlightRecord| {
        [
            record.rank.to_string(),
            record.host.clone(),
            record.pid.to_string(),
            record.phase.to_string(),
            record.step.to_string(),
            operation(record.finished()),
            operation(record.stuck()),
        ]
        .map(|cell| clean(&cell))
    };
    let rows: Vec<[String; 7]> = std::iter::once(head).chain(records.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: Vec<usize> = (0..7).map(width).collect();
    let line = |row: &[String; 7]| {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Files are not trusted to leave the terminal alone.
fn clean(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}
