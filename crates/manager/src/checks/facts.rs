//! Facts that each rank collects about its process and machine.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use isobar_collectives::{BackendKind, Group};
use isobar_launch::slurm::Step;
use isobar_launch::{Environment, forced_method};
use isobar_torch::cuda;
use serde::{Deserialize, Serialize};
use tch::Device;

use super::{Finding, environment, memory};
use crate::config::DistributedConfig;
use crate::{DistributedManager, Result};

/// Facts about a rank and its machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Facts {
    /// The rank in the world.
    pub rank: usize,
    /// The rank among those of its host.
    pub local_rank: usize,
    /// The name of its host.
    pub host: String,
    /// Method by which it found its rank.
    pub method: String,
    /// Backend that carries host memory between ranks.
    pub backend: String,
    /// True if CUDA tensors go over NCCL.
    pub nccl: bool,
    /// The MPI library, where ranks talk over MPI.
    pub mpi: Option<String>,
    /// True if MPI accepts CUDA pointers; `None` if it does not say.
    pub mpi_takes_cuda: Option<bool>,
    /// True if Open MPI's mpirun started it directly, not through a daemon.
    pub mpirun: bool,
    /// True if a PMIx server started it.
    pub pmix: bool,
    /// Its GPU, by the number that the system gives it; none on the CPU.
    pub gpu: Option<String>,
    /// Number of visible GPUs.
    pub gpus: usize,
    /// The cores on which it may run.
    pub cores: Vec<usize>,
    /// The threads that it computes with.
    pub threads: usize,
    /// Bytes of memory that its host has to give.
    pub memory: Option<u64>,
    /// By how many seconds its clock is ahead of rank 0's, where that was measured.
    pub clock_ahead_s: Option<f64>,
    /// The folder of the run, where there is one.
    pub folder: Option<FolderFacts>,
    /// The step of SLURM that it is in.
    pub step: Option<StepFacts>,
    /// Problems found in its own variables.
    pub own: Vec<Finding>,
}

/// A rank's view of the run's folder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FolderFacts {
    /// Its path, as the rank has it.
    pub path: String,
    /// Reason why it cannot be written to.
    pub problem: Option<String>,
    /// True if this rank sees the files that rank 0 writes.
    pub shared: bool,
    /// Bytes that are free.
    pub free: Option<u64>,
}

/// The step of SLURM that a process is in.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StepFacts {
    /// Its name: job and step.
    pub name: String,
    /// The number of the task.
    pub task: usize,
    /// Number of tasks.
    pub tasks: usize,
}

impl Facts {
    /// Those of this process, but for the folder and the clock. Does not communicate.
    pub(super) fn of_process(manager: &DistributedManager, config: &DistributedConfig) -> Result<Self> {
        let environment = Environment::from_process();
        let forced = forced_method(&environment)?.is_some() || config.method.forced().is_some();
        let mpi = manager.backend() == BackendKind::Mpi;
        Ok(Self {
            rank: manager.rank(),
            local_rank: manager.local_rank(),
            host: crate::address::host().trim().to_owned(),
            method: manager.method().to_string(),
            backend: manager.backend().to_string(),
            nccl: manager.nccl(),
            mpi: mpi.then(mpi_library).flatten(),
            mpi_takes_cuda: mpi.then(mpi_takes_cuda).flatten(),
            mpirun: environment.has("OMPI_COMM_WORLD_SIZE")
                && !by_daemon()
                && !environment.get("PMIX_NAMESPACE").is_some_and(|name| name.starts_with("slurm.")),
            pmix: environment.has("PMIX_RANK") || environment.has("PMIX_NAMESPACE"),
            gpu: gpu(manager.device(), &environment),
            gpus: cuda::device_count(),
            cores: cores(),
            threads: usize::try_from(tch::get_num_threads()).unwrap_or(1),
            memory: memory::available().map(|(free, _)| free),
            clock_ahead_s: None,
            folder: None,
            step: step(&environment),
            own: environment::environment(&environment, manager.method(), forced, manager.world_size()),
        })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        serde_json::from_slice(bytes).unwrap_or_default()
    }
}

#[cfg(feature = "mpi")]
fn mpi_library() -> Option<String> {
    let text = isobar_collectives::mpi::library();
    // `Open MPI v4.1.4, package: ...`, or several lines.
    let name = text.lines().next().and_then(|line| line.split(',').next()).map(str::trim);
    name.filter(|name| !name.is_empty()).map(str::to_owned)
}

#[cfg(feature = "mpi")]
fn mpi_takes_cuda() -> Option<bool> {
    isobar_collectives::mpi::takes_cuda()
}

#[cfg(not(feature = "mpi"))]
fn mpi_library() -> Option<String> {
    None
}

#[cfg(not(feature = "mpi"))]
fn mpi_takes_cuda() -> Option<bool> {
    None
}

/// The number of a GPU on its host, where `CUDA_VISIBLE_DEVICES` hides others.
fn gpu(device: Device, environment: &Environment) -> Option<String> {
    let Device::Cuda(index) = device else { return None };
    let visible = environment.get("CUDA_VISIBLE_DEVICES").and_then(|list| list.split(',').nth(index));
    Some(visible.map_or_else(|| index.to_string(), |name| name.trim().to_owned()))
}

/// The cores on which this process may run, as its launcher or the system's administrator allows.
fn cores() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let cores = list.map(numbers).unwrap_or_default();
    if cores.is_empty() {
        return (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
    }
    cores
}

/// The numbers of a list such as `0-3,8`.
pub(super) fn numbers(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse::<usize>().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

fn step(environment: &Environment) -> Option<StepFacts> {
    let step = Step::of(environment)?;
    let name = format!("{}.{}", environment.get("SLURM_JOB_ID").unwrap_or("?"), step.id.unwrap_or("?"));
    Some(StepFacts { name, task: step.rank?, tasks: step.tasks? })
}

/// Number of rounds in which clocks are compared.
const ROUNDS: usize = 3;

/// By how many seconds this rank's clock is ahead of rank 0's: rank 0's word against the middle of the shortest of some exchanges.
/// All ranks call.
pub(super) fn ahead_of_first(world: &Group) -> Result<f64> {
    world.barrier()?;
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let mut best = (f64::INFINITY, 0.0);
    for _ in 0..ROUNDS {
        // The clock under test may jump meanwhile.
        let (before, began) = (now(), Instant::now());
        let all = world.all_gather_bytes(&before.to_le_bytes())?;
        let took = began.elapsed().as_secs_f64();
        let first = all.into_iter().next().and_then(|bytes| bytes.try_into().ok()).map(f64::from_le_bytes);
        if let Some(first) = first.filter(|_| took < best.0) {
            best = (took, before + took / 2.0 - first);
        }
    }
    Ok(if world.rank() == 0 { 0.0 } else { best.1 })
}
/// Returns whether a daemon of mpirun (one per machine) is an ancestor of this process.
fn by_daemon() -> bool {
    let mut process = nix::unistd::getppid().as_raw();
    for _ in 0..8 {
        let of = |file: &str| std::fs::read_to_string(format!("/proc/{process}/{file}")).unwrap_or_default();
        match of("comm").trim() {
            "orted" | "prted" => return true,
            "mpirun" | "mpiexec" | "orterun" | "prterun" => return false,
            _ => {}
        }
        let status = of("status");
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok());
        match parent {
            Some(parent) if parent > 1 => process = parent,
            _ => return false,
        }
    }
    false
}
