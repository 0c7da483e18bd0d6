//! Commands of the set-up, each shown before it runs.

use std::{ffi::OsStr, path::PathBuf, process::Command, sync::LazyLock};

use anyhow::{Context, Result, ensure};

/// The root of the workspace.
pub(crate) static ROOT: LazyLock<PathBuf> = LazyLock::new(isobar_harness::workspace);

/// The cargo that runs us, in the root of the workspace.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = isobar_harness::cargo();
    command.current_dir(&*ROOT).args(arguments);
    command
}

/// `pip install`, for folders of our own.
pub(crate) fn pip() -> Command {
    let mut command = Command::new("python3");
    command.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--no-compile"]);
    // A folder of our own is safe from the system's, and from being root.
    command.env("PIP_ROOT_USER_ACTION", "ignore");
    command
}

/// Runs `command` with the terminal's input and output.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = line(command);
    eprintln!("$ {line}");
    let status = command.status().with_context(|| format!("failed to start `{line}`"))?;
    ensure!(status.success(), "`{line}` failed ({status})");
    Ok(())
}

/// Runs `command` and returns its output, or an error with its messages.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let line = line(command);
    let output = command.output().with_context(|| format!("failed to start `{line}`"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{line}` failed ({})\n{said}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The command as one would type it.
pub(crate) fn line(command: &Command) -> String {
    let word = |word: &OsStr| {
        let word = word.to_string_lossy();
        if word.contains([' ', '"', '<', '*']) { format!("'{word}'") } else { word.into_owned() }
    };
    let program = PathBuf::from(command.get_program());
    let program = program.file_name().unwrap_or(program.as_os_str());
    std::iter::once(program).chain(command.get_args()).map(word).collect::<Vec<_>>().join(" ")
}
