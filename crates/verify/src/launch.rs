//! Starts the ranks of a world: as threads, under mpirun, or as plain processes that meet over TCP.

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;
use isobar_collectives::threads;
use isobar_launch::concerns_ranks;
use isobar_manager::DistributedManager;
use isobar_manager::config::{BackendChoice, DistributedConfig};
use isobar_rendezvous::FreePort;

use super::worker::{self, Event, Job};
use isobar_command::exit::{Because, Exit};

/// Transport between the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    /// Ranks are threads of this process
    Threads,
    /// Ranks are processes under mpirun
    Mpi,
    /// Ranks are processes that meet over TCP, without MPI
    Gloo,
}

impl Backend {
    /// The name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::Mpi => "mpi",
            Self::Gloo => "gloo",
        }
    }

    /// Runs a job on a fresh world of `ranks` ranks and tells its events to `sink`.
    ///
    /// # Errors
    ///
    /// The ranks cannot be started, or ended badly; `sink` was told where, unless they ended without a word.
    pub(crate) fn run(
        self,
        ranks: usize,
        deadline: Duration,
        job: &Job,
        sink: &mut (dyn FnMut(Event) -> Result<()> + Send),
    ) -> Result<()> {
        if self == Self::Threads {
            return run_threads(ranks, deadline, job, sink);
        }
        let folder = tempfile::tempdir().context("cannot make a folder for the job")?;
        fs::write(folder.path().join(JOB), serde_json::to_vec(job)?)?;
        let status = match self {
            Self::Mpi => run_mpi(ranks, deadline, folder.path()),
            _ => run_gloo(ranks, deadline, folder.path()),
        };
        let events = fs::File::open(folder.path().join(EVENTS));
        for line in events.map(BufReader::new).into_iter().flat_map(BufRead::lines) {
            sink(serde_json::from_str(&line?)?)?;
        }
        status
    }
}

/// The file of the job in the folder that a process's ranks share, and that of the events.
const JOB: &str = "job.json";
const EVENTS: &str = "events.jsonl";

/// Runs a rank as its own process, in a world described by the launcher's variables.
///
/// # Errors
///
/// The world does not start, or a case ended it.
pub(crate) fn serve(backend: Backend, deadline: Duration, folder: &Path) -> Result<()> {
    tch::set_num_threads(1);
    let world = join(backend, deadline)?;
    let job: Job = serde_json::from_slice(&fs::read(folder.join(JOB))?)?;
    let mut events = (world.rank() == 0).then(|| fs::File::create(folder.join(EVENTS))).transpose()?;
    let mut write = |event: Event| {
        if let Some(file) = &mut events {
            file.write_all(format!("{}\n", serde_json::to_string(&event)?).as_bytes())?;
        }
        Ok(())
    };
    worker::run(&world, &job, &mut write)
}

/// The world that the launcher's variables describe.
fn join(backend: Backend, deadline: Duration) -> Result<isobar_collectives::Group> {
    let backend = match backend {
        Backend::Mpi => BackendChoice::Mpi,
        Backend::Gloo => BackendChoice::Gloo,
        Backend::Threads => bail!(Exit::Usage.because("ranks that are threads have no process of their own")),
    };
    let config =
        DistributedConfig { backend, timeout_s: deadline.as_secs_f64(), ..DistributedConfig::default() };
    Ok(DistributedManager::initialize_with(&config)?.group(None)?)
}

fn run_threads(
    ranks: usize,
    deadline: Duration,
    job: &Job,
    sink: &mut (dyn FnMut(Event) -> Result<()> + Send),
) -> Result<()> {
    let sink = Mutex::new(sink);
    let run = || {
        threads::run(ranks, deadline, |world| {
            let mut tell = |event| (sink.lock().unwrap_or_else(PoisonError::into_inner))(event);
            worker::run(&world, job, &mut tell)
        })
    };
    let results = catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
        anyhow!("a rank panicked: {}", text.unwrap_or_default())
    })?;
    results.into_iter().collect()
}

fn run_mpi(ranks: usize, deadline: Duration, folder: &Path) -> Result<()> {
    if !cfg!(feature = "mpi") {
        bail!(Exit::Usage.because("this program was built without MPI; choose the backend threads or gloo"));
    }
    let mut command = rank_command("mpirun".into(), &[]);
    let version = Command::new("mpirun").arg("--version").output();
    let version = version.map_err(|error| {
        Exit::Usage.because(format!(
            "cannot start mpirun: {error}; install MPI, or choose the backend threads or gloo"
        ))
    })?;
    if String::from_utf8_lossy(&version.stdout).contains("Open MPI") {
        // More ranks than cores, and as root where that is who runs this: both are refused otherwise.
        command.args(["--oversubscribe", "--bind-to", "none"]);
        // Ranks that are left when one has died have time to write their records.
        command.args(["--mca", "odls_base_sigkill_timeout", "5"]);
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    }
    command.args(["-n", &ranks.to_string()]).arg(executable()?).args(worker_args(
        Backend::Mpi,
        deadline,
        folder,
    ));
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("cannot start mpirun")?;
    ended("mpirun", child.wait()?)
}

fn run_gloo(ranks: usize, deadline: Duration, folder: &Path) -> Result<()> {
    let held = FreePort::hold().context("no free port")?;
    let port = held.port().to_string();
    let program = executable()?;
    let mut processes = Processes(Vec::new());
    for rank in 0..ranks {
        let (rank, ranks) = (rank.to_string(), ranks.to_string());
        let mut command = rank_command(program.clone(), &worker_args(Backend::Gloo, deadline, folder));
        command.envs([
            ("RANK", &rank),
            ("LOCAL_RANK", &rank),
            ("WORLD_SIZE", &ranks),
            ("MASTER_PORT", &port),
        ]);
        command.env("MASTER_ADDR", "127.0.0.1").stdin(Stdio::null()).stdout(Stdio::null());
        processes.0.push(command.spawn().context("cannot start a rank")?);
    }
    let mut first = Ok(());
    for (rank, child) in processes.0.iter_mut().enumerate() {
        first = first.and(ended(&format!("rank {rank}"), child.wait()?));
    }
    first
}

/// Ranks of this program; those that are left are ended with it.
struct Processes(Vec<Child>);

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // A process that has ended already is no error.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A command that knows of no launcher above this program, and computes with one thread a rank.
fn rank_command(program: OsString, args: &[OsString]) -> Command {
    let mut command = Command::new(program);
    command.args(args);
    for (key, _) in std::env::vars_os() {
        if concerns_ranks(&key.to_string_lossy()) {
            command.env_remove(&key);
        }
    }
    if std::env::var_os(super::THREADS).is_none() {
        command.env(super::THREADS, "1");
    }
    command
}

fn executable() -> Result<OsString> {
    Ok(std::env::current_exe().context("cannot find this program's file")?.into_os_string())
}

fn worker_args(backend: Backend, deadline: Duration, folder: &Path) -> Vec<OsString> {
    let seconds = deadline.as_secs_f64().to_string();
    let mut args: Vec<OsString> =
        ["verify-rank", "--backend", backend.name(), "--timeout", &seconds].map(OsString::from).into();
    args.push(folder.into());
    args
}

fn ended(who: &str, status: ExitStatus) -> Result<()> {
    if !status.success() {
        bail!("{who} ended with {status}");
    }
    Ok(())
}
