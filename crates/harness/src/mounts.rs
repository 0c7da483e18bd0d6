//! File systems that only a test sees: a mount namespace, held by a process of its own.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::process::{on_path, output_within};

/// Time limit of one command in the namespace.
const STEP: Duration = Duration::from_secs(60);

/// A mount namespace with a file system of its own at [`folder`](Self::folder). It ends with its last process, at the latest
/// when this is dropped and the programs started in it have ended. Needs root, and `unshare` and `nsenter` of util-linux.
///
/// # Examples
///
/// ```
/// use isobar_harness::Mounts;
///
/// // Where namespaces may be made.
/// if let Ok(mounts) = Mounts::new("mount -t tmpfs -o size=1m none \"$1\"") {
///     let written = mounts.run("echo 3 >\"$1/three\"")?;
///     assert!(written.status.success() && mounts.seen().join("three").exists());
///     assert!(!mounts.folder().join("three").exists());
/// }
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug)]
pub struct Mounts {
    holder: Child,
    folder: TempDir,
}

impl Mounts {
    /// Makes a namespace and runs `script` in it, a line for a shell that mounts something at `$1`; `$2` is a folder for its
    /// own files.
    ///
    /// # Errors
    ///
    /// The user lacks the permission, or the script fails; a test is skipped then.
    pub fn new(script: &str) -> Result<Self> {
        for program in ["unshare", "nsenter"] {
            on_path(program).with_context(|| format!("no `{program}`"))?;
        }
        let folder = tempfile::tempdir().context("failed to make a folder to mount at")?;
        std::fs::create_dir(folder.path().join("mount"))?;
        let line = format!("mount --make-rprivate / && {{ {script}; }} && echo mounted && exec sleep 3600");
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &line, "sh"]).arg(folder.path().join("mount")).arg(folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let holder = command.spawn().context("failed to start `unshare`")?;
        let mut mounts = Self { holder, folder };
        let mut said = String::new();
        if let Some(stdout) = mounts.holder.stdout.take() {
            BufReader::new(stdout).read_line(&mut said)?;
        }
        if said != "mounted\n" {
            let mut problem = String::new();
            if let Some(mut stderr) = mounts.holder.stderr.take() {
                stderr.read_to_string(&mut problem)?;
            }
            bail!("failed to mount in a namespace: {}", problem.trim());
        }
        Ok(mounts)
    }

    /// Mount point of the file system, for programs in the namespace.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        self.folder.path().join("mount")
    }

    /// Path of the mount point as seen from outside.
    #[must_use]
    pub fn seen(&self) -> PathBuf {
        let inside = self.folder();
        Path::new("/proc")
            .join(self.holder.id().to_string())
            .join("root")
            .join(inside.strip_prefix("/").unwrap_or(&inside))
    }

    /// Words before a command that start it in the namespace, in the folder `at`.
    #[must_use]
    pub fn words(&self, at: &Path) -> Vec<String> {
        const IN: &str = "cd \"$1\" && shift && exec \"$@\"";
        let holder = self.holder.id().to_string();
        let words = ["nsenter", "-t", &holder, "-m", "--", "sh", "-c", IN, "sh"];
        words.map(str::to_owned).into_iter().chain([at.display().to_string()]).collect()
    }

    /// Runs a line for a shell in the namespace, with the arguments of [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// If it cannot be started, or does not end within a minute.
    pub fn run(&self, script: &str) -> Result<Output> {
        let words = self.words(Path::new("/"));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(["sh", "-c", script, "sh"]).arg(self.folder()).arg(self.folder.path());
        output_within(&mut command, STEP)?.with_context(|| format!("did not end: {script}"))
    }
}

impl Drop for Mounts {
    fn drop(&mut self) {
        // The mounts go with the last process.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
