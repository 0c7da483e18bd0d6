//! libtorch, from the wheel of PyTorch, in `.libtorch`.

use std::{
    env, fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};

use crate::run::{ROOT, pip, run};

const TORCH: &str = "torch==2.11.0";
/// Packages without which `libtorch_cpu.so` does not load; their versions are those that this PyTorch requires.
const NEEDED_TO_LOAD: [&str; 2] = ["nvidia-cuda-runtime==13.0.96", "nvidia-cuda-cupti==13.0.85"];
/// One wheel serves whatever Python is here, since no Python runs in the end.
const PYTHON: &str = "312";

/// Set of libraries.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Set {
    /// Libraries for CPU ranks.
    Cpu,
    /// The CUDA libraries too, 4.7 GB.
    Cuda,
}

impl Set {
    /// The packages by name; the others of the CUDA set come as what PyTorch requires.
    fn packages(self) -> Vec<&'static str> {
        let mut packages = vec![TORCH];
        if self == Self::Cpu {
            packages.extend(NEEDED_TO_LOAD);
        }
        packages
    }

    /// Returns the stamp of a complete installation.
    fn stamp(self) -> String {
        let set = match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        };
        format!("{TORCH} {set}\n")
    }
}

/// Installs libtorch in `.libtorch`, unless it is there whole, or `LIBTORCH` names another.
pub(crate) fn install(set: Set) -> Result<()> {
    let folder = ROOT.join(".libtorch");
    if let Some(named) = env::var_os("LIBTORCH").map(PathBuf::from)
        && !is_ours(&named)
    {
        ensure!(
            named.join("lib/libtorch_cpu.so").exists(),
            "LIBTORCH names {}, which has no lib/libtorch_cpu.so: unset it, or let it name a libtorch of PyTorch 2.11",
            named.display()
        );
        eprintln!("libtorch: {}, by LIBTORCH", named.display());
        return Ok(());
    }
    if !is_whole(&folder, set) {
        download(&folder, set)?;
    }
    link_nccl(&folder)
}

/// Cargo itself sets the variable for us, by `.cargo/config.toml`.
fn is_ours(libtorch: &Path) -> bool {
    let root = libtorch.ancestors().nth(2).and_then(|root| root.canonicalize().ok());
    libtorch.ends_with(".libtorch/torch") && root.as_ref() == Some(&*ROOT)
}

fn is_whole(folder: &Path, set: Set) -> bool {
    let stamped = fs::read_to_string(stamp(folder)).unwrap_or_default();
    if stamped == set.stamp() || stamped == Set::Cuda.stamp() {
        return true;
    }
    // Installed by hand, or before the stamp was written: as good if every file is there in its size.
    let adopted = set == Set::Cpu
        && folder.join("torch-2.11.0.dist-info").exists()
        && folder.join("nvidia/cu13/lib/libcudart.so.13").exists()
        && folder.join("nvidia/cu13/lib/libcupti.so.13").exists()
        && all_recorded_files_are_there(folder);
    adopted && fs::write(stamp(folder), set.stamp()).is_ok()
}

/// Reads the lists of files that wheels carry: `path,hash,size`.
fn all_recorded_files_are_there(folder: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut records = entries.map(|entry| entry.path().join("RECORD")).filter(|record| record.exists());
    records.all(|record| {
        let text = fs::read_to_string(record).unwrap_or_default();
        !text.is_empty()
            && text.lines().filter_map(|line| line.rsplit_once(',')).all(|(file, size)| {
                let Some((path, _)) = file.rsplit_once(',') else { return false };
                // Scripts land elsewhere, and the list has no size for itself.
                let Ok(size) = size.parse::<u64>() else { return true };
                path.starts_with("..")
                    || fs::metadata(folder.join(path.trim_matches('"'))).is_ok_and(|file| file.len() == size)
            })
    })
}

fn download(folder: &Path, set: Set) -> Result<()> {
    let partial = ROOT.join(".libtorch.partial");
    if partial.exists() {
        fs::remove_dir_all(&partial).context("failed to remove what an interrupted set-up left")?;
    }
    eprintln!("installing libtorch ({})", set.packages().join(", "));
    let mut pip = pip();
    pip.args(["--only-binary=:all:", "--implementation=cp", "--python-version", PYTHON]);
    // Each wheel is named by the oldest C library that it runs on; this PyTorch by 2.28.
    let arch = env::consts::ARCH;
    for version in (17..=28).rev() {
        pip.arg(format!("--platform=manylinux_2_{version}_{arch}"));
    }
    pip.arg(format!("--platform=manylinux2014_{arch}"));
    pip.arg(format!("--platform=linux_{arch}"));
    if set == Set::Cpu {
        pip.arg("--no-deps");
    }
    pip.arg("--target").arg(&partial).args(set.packages());
    run(&mut pip)?;
    ensure!(
        partial.join("torch/lib/libtorch_cpu.so").exists(),
        "the wheel of PyTorch has no libtorch_cpu.so"
    );
    fs::write(stamp(&partial), set.stamp())?;
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::rename(&partial, folder).context("failed to put libtorch in its place")
}

/// Gives NCCL the name under which it is looked for, on the run path of every program.
fn link_nccl(folder: &Path) -> Result<()> {
    let link = folder.join("torch/lib/libnccl.so");
    if !folder.join("nvidia/nccl/lib/libnccl.so.2").exists() || link.exists() {
        return Ok(());
    }
    match symlink("../../nvidia/nccl/lib/libnccl.so.2", &link) {
        Err(error) if !link.exists() => bail!("failed to link {}: {error}", link.display()),
        _ => Ok(()),
    }
}

fn stamp(folder: &Path) -> PathBuf {
    folder.join("isobar-stamp")
}
