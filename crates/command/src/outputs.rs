//! Check of the files that a command is to write.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use isobar_files::is_url;
use isobar_train::RunFolder;

use crate::exit::{Because, Exit};

/// Rejects outputs that would replace an input of the command, be written into an input folder, or replace a file that a run or a
/// checkpoint keeps in its folder, and URLs: object stores are read only. `name` is the option or argument that names the outputs. Inputs are files or folders; those that
/// do not exist are no inputs.
///
/// ```
/// use isobar_command::outputs;
///
/// let folder = tempfile::tempdir()?;
/// let data = folder.path().join("data.h5");
/// std::fs::write(&data, "")?;
/// assert!(outputs::check("--out", &[folder.path().join("new.h5")], &[data.clone()]).is_ok());
/// let error = outputs::check("--out", &[&data], &[data.clone()]).unwrap_err();
/// assert!(error.to_string().contains("an input of this command"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Exit::Usage`] with the path and what it would replace.
pub fn check(name: &str, outputs: &[impl AsRef<Path>], inputs: &[PathBuf]) -> Result<()> {
    for output in outputs.iter().map(AsRef::as_ref) {
        let shown = output.display();
        // As a path, a URL would be a local folder named `s3:`.
        if is_url(output) {
            bail!(Exit::Usage.because(format!(
                "{name}: {shown} is a URL, but object stores are only read; name a local file or folder, then copy it to the store"
            )));
        }
        if isobar_files::is_within(output, inputs) {
            bail!(Exit::Usage.because(format!(
                "{name}: {shown} is an input of this command, or a file in one; name another file"
            )));
        }
        if let Some(owner) = RunFolder::owner_of(output) {
            bail!(Exit::Usage.because(format!(
                "{name}: {shown} is a file of the run or checkpoint in {}; name another file",
                owner.display()
            )));
        }
    }
    Ok(())
}

/// Rejects an existing file without this extension, since the command did not write it. `name` is the option or argument
/// that names the output.
///
/// # Errors
///
/// [`Exit::Usage`] with the path.
pub fn check_extension(name: &str, output: &Path, extension: &str) -> Result<()> {
    if output.is_file() && output.extension().is_none_or(|found| found != extension) {
        bail!(Exit::Usage.because(format!(
            "{name}: {} exists without the extension .{extension}; remove it, or name another file",
            output.display()
        )));
    }
    Ok(())
}

/// Makes the folder of a file to write.
///
/// # Errors
///
/// [`Exit::Data`] with the folder that cannot be made.
pub fn make_parent(path: &Path) -> Result<()> {
    let Some(folder) = path.parent() else { return Ok(()) };
    std::fs::create_dir_all(folder).map_err(|error| {
        Exit::Data.because(format!("cannot make the folder {}: {error}", folder.display())).into()
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::exit;

    #[test]
    fn a_url_is_no_output() {
        for url in ["s3://bucket/new.zarr", "gs://bucket/new.zarr", "https://host/new.nc"] {
            let error = check("TARGET", &[url], &[]).unwrap_err();
            let text = error.to_string();
            assert!(
                text.starts_with(&format!("TARGET: {url} is a URL")) && text.contains("copy it"),
                "{text}"
            );
            assert_eq!(exit::of(&error), Exit::Usage);
        }
        check("TARGET", &["s3:/new.zarr", "new.nc"], &[]).unwrap();
    }

    /// However their paths are written, inputs and files of a run stay.
    #[test]
    fn inputs_and_files_of_a_run_are_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["run/checkpoints", "data.zarr"] {
            fs::create_dir_all(path(name)).unwrap();
        }
        for name in ["run/run.lock", "data.h5"] {
            fs::write(path(name), "").unwrap();
        }
        std::os::unix::fs::symlink(path("data.h5"), path("link.h5")).unwrap();
        let inputs = ["data.h5", "data.zarr", "missing.h5"].map(path);
        for (name, words) in [
            ("data.h5", "an input of this command"),
            ("link.h5", "an input of this command"),
            ("new/../data.h5", "an input of this command"),
            ("data.zarr/u", "a file in one"),
            ("run/metrics.csv", "is a file of the run or checkpoint in "),
            ("run/checkpoints/step_1/x", "is a file of the run or checkpoint in "),
        ] {
            let error = check("--out", &[path("new.h5"), path(name)], &inputs).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(words) && text.contains(name) && text.contains("name another"), "{text}");
            assert_eq!(exit::of(&error), Exit::Usage);
        }
        check("--out", &["new.h5", "run/prediction.h5", "run/prediction.png"].map(path), &inputs).unwrap();
    }
}
