//! Resumption of a run that its launcher restarts.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Result;
use isobar_collectives::Group;
use isobar_manager::Environment;
use isobar_manager::launch::{Attempt, attempt};
use isobar_train::checkpoint::list;
use isobar_train::config::{CheckpointConfig, Resume};
use isobar_train::{Error, RunFolder};
use serde::{Deserialize, Serialize};

use isobar_command::exit::{Because, Exit};

/// The file in a run's folder that says which job began it.
const FILE: &str = "launch.json";

/// Time that a restart waits for the lock of the previous start, whose host may have been lost.
const GRACE: Duration = Duration::from_secs(30);

/// Largest size of `launch.json`, in bytes.
const LONGEST: u64 = 16 << 20;

/// A checkpoint: its folder's name, and when it was saved, in seconds since 1970.
type Saved = (String, u64);

/// State of the folder when a job began a run.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Begun {
    /// The job.
    id: String,
    /// The checkpoints of earlier runs, which its own first checkpoint replaces.
    earlier: Vec<Saved>,
}

/// Locks the run's folder, and rejects one that holds results of another run. Returns the settings for this
/// start: those given, except that a run restarted by its launcher resumes from the checkpoints of its own
/// job. Checkpoints of an earlier run that the job is to overwrite do not count as its own.
///
/// All ranks call.
pub(crate) fn claim(
    world: &Group,
    folder: &Path,
    config: &CheckpointConfig,
) -> Result<(RunFolder, CheckpointConfig)> {
    let environment = Environment::from_process();
    let attempt = attempt(&environment)?.or_else(|| of_slurm(&environment));
    let again = attempt.as_ref().is_some_and(|attempt| attempt.number > 1);
    let claimed = RunFolder::claim(folder, world, if again { GRACE } else { Duration::ZERO })?;
    let mut config = config.clone();
    if let Some(attempt) = &attempt
        && config.resume == Resume::Never
    {
        let own = if world.rank() == 0 { resumes(folder, attempt) } else { Ok(false) };
        let (_, said) = super::all_ok(world, own.map(|resumes| (vec![u8::from(resumes)], ())))?;
        if said.first().is_some_and(|said| said == &[1]) {
            config.resume = Resume::Auto;
        }
    }
    claimed.check(&config, world)?;
    let noted = match (&attempt, config.resume) {
        (Some(attempt), Resume::Never) if world.rank() == 0 => note(&claimed, attempt),
        _ => Ok(()),
    };
    super::all_ok(world, noted.map(|()| (Vec::new(), ())))?;
    Ok((claimed, config))
}

/// Returns the start of a SLURM job, which SLURM requeues on request or after the loss of a host.
fn of_slurm(environment: &Environment) -> Option<Attempt> {
    let job = environment.get("SLURM_JOB_ID")?;
    let restarts: u32 = environment.get("SLURM_RESTART_COUNT").unwrap_or("0").parse().ok()?;
    Some(Attempt { id: format!("slurm-{job}"), number: restarts.saturating_add(1) })
}

/// Returns whether the folder's contents are from earlier starts of the same job.
fn resumes(folder: &Path, attempt: &Attempt) -> Result<bool> {
    if attempt.number == 1 {
        return Ok(false);
    }
    let file = folder.join(FILE);
    let refused = |error: &dyn std::fmt::Display| {
        Exit::Data.because(format!(
            "cannot read {}, which says whose checkpoints these are: {error}; remove it to start from the beginning",
            file.display()
        ))
    };
    let begun: Begun = match isobar_files::read(&file, LONGEST) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(refused(&error).into()),
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| refused(&error))?,
    };
    let there = saved(folder)?;
    Ok(begun.id == attempt.id && !there.iter().any(|saved| begun.earlier.contains(saved)))
}

/// Records that a job begins a run in this folder.
fn note(folder: &RunFolder, attempt: &Attempt) -> Result<()> {
    let begun = Begun { id: attempt.id.clone(), earlier: saved(folder.path())? };
    Ok(folder.write(FILE, &serde_json::to_vec(&begun)?)?)
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
