//! Records as files.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::FlightRecord;
use crate::{Error, Result};

/// A file longer than this is none of ours.
const LONGEST: u64 = 16 << 20;

/// Beginning and end of the name of a rank's record, with the rank between them.
const PREFIX: &str = "flight_rank_";
const SUFFIX: &str = ".json";

/// Returns whether [`read`] takes a file of this name as a rank's record.
///
/// ```
/// use std::path::Path;
///
/// use isobar_manager::flight::is_record;
///
/// assert!(is_record(Path::new("runs/x/flight/flight_rank_00003.json")));
/// assert!(!is_record(Path::new("runs/x/trace.json")));
/// ```
#[must_use]
pub fn is_record(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with(PREFIX) && name.ends_with(SUFFIX)
}

/// The paths in a folder that are [named as records](is_record), in no order.
///
/// # Errors
///
/// A folder that cannot be read.
pub fn record_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let paths = || fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>();
    let mut paths = paths()
        .map_err(|error| Error::FlightRecord { path: folder.to_owned(), problem: error.to_string() })?;
    paths.retain(|path| is_record(path));
    Ok(paths)
}

/// Writes a rank's record into a folder, which is made where it is not there; gives its path. The file is there whole, or
/// not at all.
///
/// # Errors
///
/// An error of the system.
pub fn write(folder: &Path, record: &FlightRecord) -> Result<PathBuf> {
    let path = folder.join(format!("{PREFIX}{:05}{SUFFIX}", record.rank));
    let failed = |problem: String| Error::FlightRecord { path: path.clone(), problem };
    let text = serde_json::to_string_pretty(record).map_err(|error| failed(error.to_string()))?;
    let draft = folder.join(format!(".{PREFIX}{:05}.{}", record.rank, record.pid));
    let written = fs::create_dir_all(folder).and_then(|()| {
        // A link or file that another process has left there is not written through.
        let _ = fs::remove_file(&draft);
        let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&draft)?;
        file.write_all(text.as_bytes())?;
        file.write_all(b"\n")?;
        drop(file);
        fs::rename(&draft, &path)
    });
    if let Err(error) = written {
        let _ = fs::remove_file(&draft);
        return Err(failed(error.to_string()));
    }
    Ok(path)
}

/// The records of a folder.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Records {
    /// Those of the last job, by rank.
    pub records: Vec<FlightRecord>,
    /// Number of records of other jobs.
    pub older: usize,
    /// The files that could not be read, and why: a rank may have been lost while it wrote, and the others' records still say
    /// what happened.
    pub unreadable: Vec<(PathBuf, String)>,
}

/// Reads the records of a folder: those of the job that wrote last.
///
/// # Errors
///
/// A folder that cannot be read or holds no record that can.
pub fn read(folder: &Path) -> Result<Records> {
    let failed = |path: &Path, problem: String| Error::FlightRecord { path: path.to_owned(), problem };
    let (mut all, mut unreadable) = (Vec::new(), Vec::new());
    for path in record_files(folder)? {
        match read_one(&path) {
            Ok(record) => all.push(record),
            Err(problem) => unreadable.push((path, problem)),
        }
    }
    unreadable.sort();
    let last = all.iter().max_by_key(|record| record.time_ns).map(|record| record.job.clone());
    let Some(last) = last else {
        if let Some((path, problem)) = unreadable.first() {
            return Err(failed(path, problem.clone()));
        }
        let problem = "holds no flight record (flight_rank_00000.json); expected the folder that distributed.flight_dir names";
        return Err(failed(folder, problem.to_owned()));
    };
    let count = all.len();
    all.retain(|record| record.job == last);
    all.sort_by_key(|record| record.rank);
    Ok(Records { older: count - all.len(), records: all, unreadable })
}

fn read_one(path: &Path) -> Result<FlightRecord, String> {
    let text = isobar_files::read(path, LONGEST).map_err(|error| error.to_string())?;
    let not_one = |error: serde_json::Error| format!("not a flight record: {error}");
    // The version is checked first, since fields of another version may be missing or have another meaning.
    match serde_json::from_slice::<Versioned>(&text).map_err(not_one)?.version {
        super::VERSION => serde_json::from_slice(&text).map_err(not_one),
        other => Err(format!("a flight record of version {other}, expected {}", super::VERSION)),
    }
}

/// Record of which only the version is read.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}
