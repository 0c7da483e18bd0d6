//! The folder of a data set before it is complete.

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use isobar_files::Partial;

use crate::{Error, Result};

/// Name of the file with the plan of a resumable data set; its lock is held while the data set is written.
const PLAN: &str = "isobar-plan";

/// Temporary folder next to the target. Finishing moves it, or a file in it, to the target; dropping it earlier removes it, unless a
/// later writer can resume it.
#[derive(Debug)]
pub(crate) struct Unfinished {
    path: PathBuf,
    target: PathBuf,
    /// Plan file of a resumable data set; `None` otherwise.
    plan: Option<File>,
    is_kept: bool,
    /// Of a folder that no later writer resumes, for a process that is told to end.
    _partial: Option<Partial>,
}

impl Unfinished {
    /// Makes a folder with a name of its own.
    pub(crate) fn new(target: &Path) -> Result<Self> {
        let failed = |error| Error::io(target, "create it", error);
        let (parent, name) = place(target)?;
        // The default mode of new folders, less the umask, so that others can read results.
        let prefix = format!(".{name}");
        let mut temporary = tempfile::Builder::new();
        let _ = temporary.prefix(&prefix).suffix(".partial").permissions(Permissions::from_mode(0o777));
        let (partial, ()) =
            Partial::created(|| Ok((std::path::absolute(temporary.tempdir_in(parent)?.keep())?, ())))
                .map_err(failed)?;
        let (path, target) = (partial.path().to_owned(), target.to_owned());
        Ok(Self { path, target, plan: None, is_kept: false, _partial: Some(partial) })
    }

    /// Creates the folder for `plan`, or reopens the one of an interrupted writer with the same plan; the flag is true if it was
    /// reopened. Removes the contents of a writer with another plan.
    pub(crate) fn of_plan(target: &Path, plan: &str) -> Result<(Self, bool)> {
        let (parent, name) = place(target)?;
        let path = parent.join(format!(".{name}.partial"));
        let failed = |error| Error::io(&path, "use it for the unfinished data set", error);
        let is_new = match fs::create_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            made => made.map(|()| true).map_err(failed)?,
        };
        // A link is no folder; another folder may be anybody's.
        let is_folder = fs::symlink_metadata(&path).map_err(failed)?.is_dir();
        let is_of_others = || {
            let is_empty = fs::read_dir(&path).is_ok_and(|mut entries| entries.next().is_none());
            !is_new && !is_empty && !path.join(PLAN).is_file()
        };
        if !is_folder || is_of_others() {
            return Err(Error::Invalid(format!(
                "{} is in the way: the data set is written there until it is complete; remove it",
                path.display()
            )));
        }
        let mut options = OpenOptions::new();
        let _ = options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(path.join(PLAN)).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => (),
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Invalid(format!(
                    "another process is writing {}; wait for it, or name another target",
                    target.display()
                )));
            }
            // Some file systems of clusters have no locks.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => (),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
        }
        let mut found = Vec::new();
        file.read_to_end(&mut found).map_err(failed)?;
        let resumes = found == plan.as_bytes();
        if !resumes {
            clear(&path).map_err(failed)?;
            let written = file.set_len(0).and_then(|()| io::Seek::rewind(&mut file));
            written.and_then(|()| file.write_all(plan.as_bytes())).map_err(failed)?;
        }
        let path = std::path::absolute(&path).map_err(failed)?;
        let target = target.to_owned();
        Ok((Self { path, target, plan: Some(file), is_kept: false, _partial: None }, resumes))
    }

    /// Path of the folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Path of the complete data set.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// Returns whether a later writer can resume it.
    pub(crate) fn is_resumable(&self) -> bool {
        self.plan.is_some()
    }

    /// Gives the folder the target's name. If that fails, the folder stays.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.move_to_target(&self.path.clone())?;
        // A plan that stays does no harm.
        let _ = self.plan.take().map(|_| fs::remove_file(self.target.join(PLAN)));
        Ok(())
    }

    /// Gives `made`, a file or folder in the folder, the target's name, and removes the folder. If the first fails, the folder stays.
    pub(crate) fn finish_with(mut self, made: &Path) -> Result<()> {
        self.move_to_target(made)?;
        // The plan is removed after all else, since later writers reject a folder of files without a plan. A folder that stays with
        // its plan does no harm.
        let _ = clear(&self.path)
            .and_then(|()| fs::remove_file(self.path.join(PLAN)))
            .and_then(|()| fs::remove_dir(&self.path));
        Ok(())
    }

    fn move_to_target(&mut self, made: &Path) -> Result<()> {
        self.is_kept = true;
        fs::rename(made, &self.target).map_err(|error| {
            Error::Invalid(format!(
                "{} cannot be made ({error}); the data are complete in {}: move them",
                self.target.display(),
                made.display()
            ))
        })
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.is_kept && !self.is_resumable() {
            // Nothing else can be done about what cannot be removed.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Removes all entries of an unfinished folder but its plan.
fn clear(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path())?,
            false if entry.file_name() == PLAN => (),
            false => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

/// Rejects a target that exists: a data set in a folder never replaces one.
pub(crate) fn check_absent(target: &Path) -> Result<()> {
    match fs::symlink_metadata(target) {
        Ok(_) => Err(Error::Invalid(format!(
            "{} exists, but a data set in a folder requires a new target; remove it, or name another target",
            target.display()
        ))),
        Err(_) => Ok(()),
    }
}

/// The folder of a path, and its name.
fn place(target: &Path) -> Result<(&Path, String)> {
    let name = target.file_name();
    let name = name.ok_or_else(|| Error::io(target, "create it", io::ErrorKind::InvalidInput.into()))?;
    let parent = target.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((parent, name.to_string_lossy().into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only what an earlier writer left is taken over or removed, and by one process at a time.
    #[test]
    fn a_folder_of_others_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (target, partial) = (folder.path().join("a.zarr"), folder.path().join(".a.zarr.partial"));
        let refused = || Unfinished::of_plan(&target, "plan").map(drop).unwrap_err().to_string();
        fs::create_dir(&partial).unwrap();
        fs::write(partial.join("thesis"), "").unwrap();
        assert!(refused().contains("is in the way"));
        fs::rename(&partial, folder.path().join("b")).unwrap();
        fs::write(folder.path().join("b").join(PLAN), "plan").unwrap();
        std::os::unix::fs::symlink(folder.path().join("b"), &partial).unwrap();
        assert!(refused().contains("is in the way"), "a link");
        assert!(folder.path().join("b/thesis").exists());
        fs::remove_file(&partial).unwrap();

        let (first, resumes) = Unfinished::of_plan(&target, "plan").unwrap();
        assert!(!resumes && refused().contains("another process is writing"));
        fs::write(first.path().join("chunk"), "").unwrap();
        // After an error.
        drop(first);
        let (second, resumes) = Unfinished::of_plan(&target, "plan").unwrap();
        assert!(resumes && second.path().join("chunk").exists());
        drop(second);
        let (other, resumes) = Unfinished::of_plan(&target, "another plan").unwrap();
        assert!(!resumes && !other.path().join("chunk").exists());
        other.finish().unwrap();
        assert!(target.is_dir() && !target.join(PLAN).exists() && !partial.exists());
        let refused = check_absent(&target).unwrap_err().to_string();
        assert!(refused.contains("a.zarr exists") && refused.contains("remove it, or name another target"));

        // A file in the folder takes the name of a file that exists.
        let (target, again) = (folder.path().join("a.h5"), folder.path().join(".a.h5.partial"));
        fs::write(&target, "old").unwrap();
        let (folder, _) = Unfinished::of_plan(&target, "plan").unwrap();
        let made = folder.path().join("made");
        fs::write(&made, "new").unwrap();
        folder.finish_with(&made).unwrap();
        assert!(fs::read(&target).unwrap() == b"new" && !again.exists());
    }

    /// A process that is killed while it removes the folder leaves one that the next writer takes over.
    #[test]
    fn a_folder_that_is_removed_in_part_is_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let (target, partial) = (folder.path().join("a.h5"), folder.path().join(".a.h5.partial"));
        let (first, _) = Unfinished::of_plan(&target, "plan").unwrap();
        for name in ["result", "more"] {
            fs::create_dir(partial.join(name)).unwrap();
            fs::write(partial.join(name).join("file"), "").unwrap();
        }
        fs::write(partial.join("values"), "").unwrap();
        clear(first.path()).unwrap();
        let left: Vec<_> = fs::read_dir(&partial).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [PLAN]);
        drop(first);
        drop(Unfinished::of_plan(&target, "another plan").unwrap());
        fs::remove_file(partial.join(PLAN)).unwrap();
        drop(Unfinished::of_plan(&target, "plan").unwrap());
    }
}
