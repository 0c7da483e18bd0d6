//! xarray and its readers of Zarr and NetCDF, in `.tools/xarray`: a test opens predictions with it.

use std::{fs, process::Command};

use anyhow::Result;

use crate::run::{self as command, ROOT};

/// Wheels of the newest versions that the machine's Python has.
const PACKAGES: [&str; 3] = ["xarray>=2024.10", "zarr>=3", "netCDF4>=1.7"];

/// Installs it, unless it is there for this Python. Where that fails, only its test cannot run.
pub(crate) fn install() {
    if let Err(error) = installed() {
        eprintln!("going on without xarray, whose test is skipped, or fails in CI: {error:#}");
    }
}

fn installed() -> Result<()> {
    let folder = ROOT.join(".tools/xarray");
    let python = command::output(Command::new("python3").arg("--version"))?;
    let stamp = format!("{} for {python}", PACKAGES.join(" "));
    // The name of the file that says that all is there; the test looks for it, too.
    let file = "isobar-stamp";
    if fs::read_to_string(folder.join(file)).is_ok_and(|found| found == stamp) {
        return Ok(());
    }
    let partial = ROOT.join(".tools/xarray.partial");
    for old in [&folder, &partial] {
        if old.exists() {
            fs::remove_dir_all(old)?;
        }
    }
    command::run(command::pip().arg("--only-binary=:all:").arg("--target").arg(&partial).args(PACKAGES))?;
    fs::write(partial.join(file), stamp)?;
    Ok(fs::rename(&partial, &folder)?)
}
