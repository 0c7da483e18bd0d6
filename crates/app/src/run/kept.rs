//! Statistics of the training samples beside a run, which its next start reuses if the data are the same.

use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use anyhow::Result;
use isobar_data::{Dataset, Part, area_weights, remote_stamp};
use isobar_train::config::DataConfig;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::portion::Portion;
use super::roles::channel_names;
use super::source::Source;

/// The file in a run's folder.
const FILE: &str = "statistics.json";
/// Largest size of it, in bytes.
const LONGEST: u64 = 64 << 20;
/// Most files below folders of data that are looked at.
const MOST_FILES: usize = 100_000;

/// Content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    /// Description of the data that the statistics are of.
    of: Value,
    statistics: Portion,
}

/// Describes the data that statistics are of: files with their sizes and times, a digest of some values, the options of
/// formats, the variables by role, and the weights of latitudes.
/// Of a store at a URL, the root metadata stand for its chunks.
/// `None` if nothing says when the data change.
pub(super) fn description(
    source: &Source,
    train: &Part,
    config: &DataConfig,
    (digest, change): (u64, bool),
) -> Result<Option<Value>> {
    let Some((files, stores)) = stamps(&*train.data) else { return Ok(None) };
    let data = &*train.data;
    let mut description = json!({
        "files": files,
        "stores": stores,
        "digest": digest,
        "format": config.format_name(),
        "options": config.own,
        "samples": [train.samples.start, train.samples.end],
        "times": train.data.times().map(|times| (times.len(), times.first(), times.last())),
        "inputs": channel_names(data, &source.inputs)?,
        "others": channel_names(&**train.targets(), source.others())?,
        "forcings": channel_names(data, &source.names.forcings)?,
        "changes": change,
        // Earlier versions kept statistics without weights.
        "weights": area_weights(train.data.dims()),
    });
    if let Some(target) = &train.target {
        let Some((files, stores)) = stamps(&**target) else { return Ok(None) };
        description["target"] = json!({
            "files": files,
            "stores": stores,
            "config": config.target,
            "weights": area_weights(target.dims()),
        });
    }
    Ok(Some(description))
}

/// Path, size and time of files, and stamps of stores at URLs.
pub(crate) type Stamps = (Vec<(PathBuf, u64, u64)>, Vec<(PathBuf, String)>);

/// Returns the stamps of a data set's files; `None` if one cannot be looked at.
pub(crate) fn stamps(data: &dyn Dataset) -> Option<Stamps> {
    let (mut files, mut stores) = (Vec::new(), Vec::new());
    for file in data.files() {
        match remote_stamp(&file) {
            Some(stamp) => stores.push((file, stamp)),
            None if look(&file, &mut files) => (),
            None => return None,
        }
    }
    Some((files, stores))
}

/// Adds path, size and time of a file, or of those below a folder; false if one cannot be looked at, or there are too many.
fn look(path: &Path, files: &mut Vec<(PathBuf, u64, u64)>) -> bool {
    let time = |about: &Metadata| {
        let since = about.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        u64::try_from(since.as_nanos()).ok()
    };
    let Ok(about) = std::fs::metadata(path) else { return false };
    if about.is_dir() {
        let Ok(entries) = std::fs::read_dir(path) else { return false };
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        return paths.iter().all(|path| look(path, files));
    }
    match time(&about) {
        Some(time) if files.len() < MOST_FILES => {
            files.push((path.to_owned(), about.len(), time));
            true
        }
        _ => false,
    }
}

/// Returns the statistics in a run's folder, if they are of these data. A damaged file counts as none.
pub(super) fn read(folder: &Path, of: &Value) -> Option<Portion> {
    let bytes = isobar_files::read(folder.join(FILE), LONGEST).ok()?;
    let kept: Kept = serde_json::from_slice(&bytes).ok()?;
    let channels = |role: &str| -> usize {
        let lists = of[role].as_array().into_iter().flatten();
        lists.map(|channels| channels.as_array().map_or(0, Vec::len)).sum()
    };
    let expected = ["inputs", "others", "forcings"].map(channels);
    let changes = of["changes"] == true;
    (kept.of == *of && kept.statistics.fits(expected, changes)).then_some(kept.statistics)
}

/// Keeps statistics in a run's folder. A file that cannot be written is a warning: the next start reads the data again.
pub(super) fn write(folder: &Path, of: Value, statistics: &Portion) {
    let kept = Kept { of, statistics: statistics.clone() };
    let path = folder.join(FILE);
    let written = serde_json::to_vec(&kept).map_err(std::io::Error::other);
    if let Err(error) = written.and_then(|bytes| isobar_files::write(&path, bytes)) {
        tracing::warn!(
            "{} cannot be written: {error}; the next start computes the statistics again",
            path.display()
        );
    }
}
