//! Whether a run that is started again goes on from what it has saved.

use std::path::Path;
use std::time::UNIX_EPOCH;

use anyhow::Result;
use isobar_collectives::Group;
use isobar_manager::Environment;
use isobar_manager::launch::{Attempt, attempt};
use isobar_train::Error;
use isobar_train::checkpoint::list;
use isobar_train::config::Resume;
use serde::{Deserialize, Serialize};

use crate::exit::Exit;

/// The file in a run's folder that says which job began it.
const FILE: &str = "launch.json";

/// A checkpoint: its folder's name, and when it was saved, in seconds since 1970.
type Saved = (String, u64);

/// What a job found when it began a run anew.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Begun {
    /// The job.
    id: String,
    /// The checkpoints of earlier runs, which it removes.
    earlier: Vec<Saved>,
}

/// What a run does about checkpoints: as it was `told`, but for one that begins anew and is started again by its launcher: that goes
/// on from what its own job has saved. Checkpoints of an earlier run, which its first start did not come to remove, are none of
/// its own.
///
/// All ranks call.
pub(crate) fn resume(world: &Group, folder: &Path, told: Resume) -> Result<Resume> {
    let Some(attempt) = attempt(&Environment::from_process())? else { return Ok(told) };
    if told != Resume::Never {
        return Ok(told);
    }
    let own = if world.rank() == 0 { decide(folder, &attempt) } else { Ok(false) };
    let (_, said) = super::alike(world, own.map(|goes_on| (vec![u8::from(goes_on)], ())))?;
    let goes_on = said.first().is_some_and(|said| said == &[1]);
    if goes_on && world.rank() == 0 {
        tracing::info!("start {} of this job: the run goes on from its last checkpoint", attempt.number);
    }
    Ok(if goes_on { Resume::Auto } else { Resume::Never })
}

/// Whether the run goes on; notes that it begins where it does not.
fn decide(folder: &Path, attempt: &Attempt) -> Result<bool> {
    let there = saved(folder)?;
    let file = folder.join(FILE);
    let refused = |error: &dyn std::fmt::Display| {
        Exit::Data.because(format!(
            "cannot read {}, which says whose checkpoints these are: {error}; remove it to begin anew",
            file.display()
        ))
    };
    let begun: Option<Begun> = match std::fs::read(&file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(refused(&error).into()),
        // Of another job it does not matter what is in it.
        Ok(bytes) if attempt.number == 1 => serde_json::from_slice(&bytes).ok(),
        Ok(bytes) => Some(serde_json::from_slice(&bytes).map_err(|error| refused(&error))?),
    };
    if let Some(begun) = begun.filter(|begun| begun.id == attempt.id && attempt.number > 1) {
        return Ok(!there.iter().any(|saved| begun.earlier.contains(saved)));
    }
    let begun = serde_json::to_vec(&Begun { id: attempt.id.clone(), earlier: there })?;
    let part = folder.join(format!("{FILE}.part"));
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&part, begun))
        .and_then(|()| std::fs::rename(&part, &file));
    written.map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", file.display())))?;
    Ok(false)
}

/// The checkpoints of a run.
fn saved(folder: &Path) -> Result<Vec<Saved>> {
    let listed = match list(folder) {
        Err(Error::NoCheckpoint { .. }) => return Ok(Vec::new()),
        listed => listed?,
    };
    let saved = listed.into_iter().filter_map(|listed| {
        let name = listed.path.file_name()?.to_string_lossy().into_owned();
        // One that cannot be read is nobody's.
        let at = listed.found.ok()?.saved_at.duration_since(UNIX_EPOCH).ok()?;
        Some((name, at.as_secs()))
    });
    Ok(saved.collect())
}
