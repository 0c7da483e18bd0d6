//! `isobar checkpoint`: looks at checkpoints, checks them, cuts them anew, and gives their weights away.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Subcommand;
use isobar_manager::format_bytes;
use isobar_train::checkpoint::{self, Listed, Summary};
use isobar_train::{Error, checkpoint_error};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::config::{is_run, runs_in};
use isobar_command::exit::{Because, Exit};
use isobar_command::{outputs, terminal};

/// Commands of `isobar checkpoint`.
#[derive(Debug, Subcommand)]
pub(crate) enum CheckpointCommand {
    /// List checkpoints, newest first: step, time, size, ranks that wrote it, validation error, and what is wrong with it
    ///
    /// Looks at the manifests and at the lengths of files; `verify` reads every byte.
    Ls {
        /// A folder of checkpoints, or that of a run
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Read every byte of a checkpoint, or of all in a folder, and compare it with the digests; exit code 3 if one is incomplete or damaged
    Verify {
        /// A checkpoint's folder, a folder of checkpoints, or that of a run
        path: PathBuf,
    },
    /// Rewrite a checkpoint for N ranks, so that each rank reads one file
    ///
    /// Any number of ranks reads any checkpoint; this saves them reading many files.
    Reshard {
        /// Folder of a checkpoint, of checkpoints or of a run; of several checkpoints the newest valid one is
        /// used
        path: PathBuf,
        /// The new checkpoint's folder, which must be empty or not there
        out: PathBuf,
        /// The number of ranks
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=99_999))]
        ranks: u32,
    },
    /// Export full parameters and buffers to one safetensors file, which PyTorch loads
    Export {
        /// Folder of a checkpoint, of checkpoints or of a run; of several checkpoints the newest valid one is
        /// used
        path: PathBuf,
        /// The file to write
        #[arg(value_name = "OUT.safetensors")]
        out: PathBuf,
        /// Write the average with this width, relative to the length of the run (such as 0.08), computed from the averages of
        /// `train.average_widths` in all checkpoints of the folder
        #[arg(long)]
        width: Option<f64>,
    },
}

/// Runs the command.
pub(crate) fn run(command: &CheckpointCommand) -> Result<Exit> {
    match command {
        CheckpointCommand::Ls { folder } => {
            let listed = listed(folder)?;
            terminal::line(HEAD);
            listed.iter().for_each(|one| terminal::line(&line(one)));
        }
        CheckpointCommand::Verify { path } => return verify(path),
        CheckpointCommand::Reshard { path, out, ranks } => {
            checkpoint::reshard(path, out, *ranks as usize).map_err(|error| explained(error, path))?;
            terminal::line(&format!("checkpoint  {}", out.display()));
        }
        CheckpointCommand::Export { path, out, width: Some(width) } => {
            check_export(out)?;
            let made =
                checkpoint::export_average(path, out, *width).map_err(|error| explained(error, path))?;
            terminal::line(&format!(
                "{} tensors  {}  of {} saved averages, whose profile is off by {:.2} %",
                made.tensors,
                out.display(),
                made.averages,
                100.0 * made.profile_error
            ));
        }
        CheckpointCommand::Export { path, out, width: None } => {
            check_export(out)?;
            let made = checkpoint::export(path, out).map_err(|error| explained(error, path))?;
            terminal::line(&format!(
                "{} tensors  {}  {} of {}",
                made.tensors,
                out.display(),
                if made.averaged { "averages" } else { "parameters" },
                made.checkpoint.display()
            ));
        }
    }
    Ok(Exit::Good)
}

/// Rejects a file of a run or checkpoint, and an existing file without the extension `.safetensors`; makes the target's folder.
fn check_export(out: &Path) -> Result<()> {
    // The checkpoint that is read is known by its folder.
    outputs::check("OUT.safetensors", &[out], &[])?;
    outputs::check_extension("OUT.safetensors", out, "safetensors")?;
    outputs::make_parent(out)
}

/// The checkpoints of a folder.
fn listed(folder: &Path) -> Result<Vec<Listed>> {
    checkpoint::list(folder).map_err(|error| explained(error, folder))
}

/// Describes a folder without checkpoints.
pub(crate) fn explained(error: Error, folder: &Path) -> anyhow::Error {
    let Error::NoCheckpoint { .. } = error else { return error.into() };
    let shown = folder.display();
    let runs = runs_in(folder);
    let why = if !folder.exists() {
        format!(
            "{shown} does not exist; expected a checkpoint's folder, a folder of checkpoints, or that of a run"
        )
    } else if !runs.is_empty() {
        let names: Vec<String> = runs.iter().map(|run| run.display().to_string()).collect();
        format!("{shown} holds runs, not checkpoints; give the folder of one: {}", names.join(", "))
    } else if is_run(folder) {
        format!("the run in {shown} has left no checkpoint so far")
    } else {
        format!(
            "{shown} holds no checkpoint; expected a checkpoint's folder, a folder of checkpoints, or that of a run"
        )
    };
    Exit::Data.because(why).into()
}

const HEAD: &str = "    step  saved                       size  ranks  validation  state";

fn verify(path: &Path) -> Result<Exit> {
    let mut exit = Exit::Good;
    for Listed { path, .. } in listed(path)? {
        match checkpoint::verify(&path) {
            Ok(_) => terminal::line(&format!("whole       {}", path.display())),
            Err(error) => {
                exit = Exit::Data;
                terminal::line(&format!("not whole   {}: {error}", path.display()));
            }
        }
    }
    Ok(exit)
}

fn line(listed: &Listed) -> String {
    match &listed.found {
        Ok(Summary { step, saved_at, bytes, ranks, validation_error, validation_metric }) => {
            let when = OffsetDateTime::from(*saved_at).format(&Rfc3339).unwrap_or_default();
            let text = |error| checkpoint_error(error, validation_metric.as_deref());
            let error = validation_error.map_or_else(|| "-".to_owned(), text);
            format!("{step:>8}  {when:20}  {:>10}  {ranks:>5}  {error:>10}  whole", format_bytes(*bytes))
        }
        Err(reason) => {
            let name = listed.path.file_name().unwrap_or_default().to_string_lossy();
            format!("{:>8}  not usable: {reason}", name.trim_start_matches("step_").trim_start_matches('0'))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    /// Weights replace no file of a run and no data set; a folder that is missing is made.
    #[test]
    fn weights_replace_weights_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(path("run/checkpoints/step_00000005")).unwrap();
        for name in
            ["run/run.lock", "run/checkpoints/step_00000005/manifest.json", "data.h5", "old.safetensors"]
        {
            std::fs::write(path(name), "").unwrap();
        }
        for (name, words) in [
            ("run/config.toml", "is a file of the run or checkpoint in "),
            (
                "run/checkpoints/step_00000005/rank_00000.safetensors",
                "is a file of the run or checkpoint in ",
            ),
            ("run/checkpoints/new.safetensors", "is a file of the run or checkpoint in "),
            ("data.h5", "exists without the extension .safetensors"),
        ] {
            let error = check_export(&path(name)).unwrap_err();
            assert!(error.to_string().contains(words), "{name}: {error}");
            assert_eq!(isobar_command::exit::of(&error), Exit::Usage);
        }
        for name in ["old.safetensors", "run/weights.safetensors", "p/new/weights.st"] {
            check_export(&path(name)).unwrap();
        }
        assert!(path("p/new").is_dir());
    }

    #[test]
    fn lines_fit_the_head() {
        let summary = Summary {
            step: 40,
            saved_at: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000),
            bytes: 3 << 20,
            ranks: 4,
            validation_error: Some(0.0321),
            validation_metric: None,
        };
        let listed = Listed { path: "step_00000040".into(), found: Ok(summary) };
        let line = line(&listed);
        assert_eq!(line, "      40  2023-11-14T22:13:20Z     3.0 MiB      4      3.21 %  whole");
        assert_eq!(line.find("whole"), HEAD.find("state"));
    }
}
