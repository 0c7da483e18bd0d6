//! System packages, by apt.

use std::{fmt, process::Command};

use anyhow::{Result, bail};
use isobar_harness::on_path;

use crate::run::run;

/// Purpose of a package.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Build,
    Mpi,
    Hdf5,
    Test,
}

/// Packages of Debian and Ubuntu, each with what can't be done without it.
const PACKAGES: [(&str, Use); 11] = [
    ("g++", Use::Build),
    ("pkg-config", Use::Build),
    ("python3", Use::Build),
    ("python3-pip", Use::Build),
    ("libopenmpi-dev", Use::Mpi),
    ("openmpi-bin", Use::Mpi),
    ("libclang-dev", Use::Mpi),
    ("libhdf5-dev", Use::Hdf5),
    ("slurm-wlm", Use::Test),
    ("iproute2", Use::Test),
    ("python3-venv", Use::Test),
];

/// Optional parts that the machine has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Available {
    /// Open MPI and what its binding needs to be built.
    pub(crate) mpi: bool,
    /// The system's HDF5; otherwise it is built in.
    pub(crate) hdf5: bool,
}

/// Packages that nothing builds without are missing, and can't be installed by us.
#[derive(Debug)]
pub(crate) struct Missing(Vec<&'static str>);

/// Installs what is missing, as root or through sudo.
///
/// Without either, or without `may_install`, it goes on where only the parts that can be left out are missing, and says so.
pub(crate) fn install(may_install: bool) -> Result<Available> {
    let missing: Vec<_> = PACKAGES.into_iter().filter(|&(package, _)| !installed(package)).collect();
    let names: Vec<_> = missing.iter().map(|&(package, _)| package).collect();
    if missing.is_empty() {
        return Ok(Available { mpi: true, hdf5: true });
    }
    if let (true, Some(prefix)) = (may_install, root_prefix()) {
        eprintln!("installing {}", names.join(", "));
        run(apt(prefix).arg("update").arg("-q"))?;
        run(apt(prefix).args(["install", "-q", "-y", "--no-install-recommends"]).args(&names))?;
        return Ok(Available { mpi: true, hdf5: true });
    }
    let lacks = |part: Use| missing.iter().any(|&(_, needed_for)| needed_for == part);
    if lacks(Use::Build) {
        return Err(Missing(names).into());
    }
    eprintln!("not installed: {}. {}", names.join(", "), advice(&names));
    if lacks(Use::Mpi) {
        eprintln!("going on without MPI: ranks talk over gloo.");
    }
    if lacks(Use::Hdf5) {
        eprintln!("going on without the system's HDF5: it is built in, which takes some minutes once.");
    }
    if lacks(Use::Test) {
        eprintln!("going on: the tests and benchmarks that need what is missing are skipped.");
    }
    Ok(Available { mpi: !lacks(Use::Mpi), hdf5: !lacks(Use::Hdf5) })
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "not installed: {}, and this user may not install them. {}",
            self.0.join(", "),
            advice(&self.0)
        )
    }
}

impl std::error::Error for Missing {}

fn advice(names: &[&str]) -> String {
    if on_path("apt-get").is_some() {
        format!("To install them, run as root: apt-get update && apt-get install -y {}", names.join(" "))
    } else {
        "These are their names on Debian and Ubuntu; install what this system calls them".to_owned()
    }
}

fn installed(package: &str) -> bool {
    if on_path("dpkg-query").is_some() {
        let asked = Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status}", package]).output();
        if asked.is_ok_and(|output| output.stdout == b"installed") {
            return true;
        }
    }
    // A machine may have these without a package of that name: built by hand, or another distribution.
    let finds = |program: &str, args: &[&str]| {
        Command::new(program).args(args).output().is_ok_and(|output| output.status.success())
    };
    match package {
        "g++" => on_path("c++").is_some(),
        "pkg-config" | "python3" => on_path(package).is_some(),
        "python3-pip" => finds("python3", &["-m", "pip", "--version"]),
        "libopenmpi-dev" => on_path("mpicc").is_some(),
        "openmpi-bin" => on_path("mpirun").is_some(),
        "libclang-dev" => std::env::var_os("LIBCLANG_PATH").is_some(),
        "libhdf5-dev" => finds("pkg-config", &["--exists", "hdf5"]),
        "slurm-wlm" => {
            ["munged", "slurmctld", "slurmd", "srun"].into_iter().all(|name| on_path(name).is_some())
        }
        "iproute2" => on_path("ip").is_some(),
        "python3-venv" => finds("python3", &["-c", "import venv, ensurepip"]),
        _ => false,
    }
}

/// The words before apt-get with which this user may run it, if any.
fn root_prefix() -> Option<&'static [&'static str]> {
    on_path("apt-get")?;
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    let sudo =
        || Command::new("sudo").args(["-n", "true"]).output().is_ok_and(|output| output.status.success());
    match () {
        () if is_root => Some(&[]),
        () if sudo() => Some(&["sudo", "-n"]),
        () => None,
    }
}

/// Installs packages that only a comparison needs.
///
/// # Errors
///
/// This user cannot, or apt fails.
pub(crate) fn install_for_comparison(names: &[&str]) -> Result<()> {
    let Some(prefix) = root_prefix() else {
        bail!("the comparison needs {}; install them as root", names.join(", "))
    };
    run(apt(prefix).arg("update").arg("-q"))?;
    run(apt(prefix).args(["install", "-q", "-y", "--no-install-recommends"]).args(names))
}

fn apt(prefix: &[&str]) -> Command {
    // `env`, so that the variable reaches apt through sudo.
    let mut words = prefix.iter().copied().chain(["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"]);
    let mut command = Command::new(words.next().unwrap_or("env"));
    command.args(words);
    command
}
