//! The keys of `[distributed]`: what an application embeds for the manager.

use std::path::PathBuf;

use isobar_collectives::Fingerprints;
use isobar_launch::{BackendChoice, Method};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Rendezvous of the ranks, and their mesh.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DistributedConfig {
    /// Transport between ranks.
    pub backend: BackendChoice,
    /// Method by which a process finds its rank. The variable ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD overrides it.
    pub method: MethodChoice,
    /// Address of rank 0, for gloo; by default what the launcher says (MASTER_ADDR, SLURM_LAUNCH_NODE_IPADDR), else
    /// 127.0.0.1 where all ranks are on one host.
    pub addr: Option<String>,
    /// Port of rank 0, for gloo; by default MASTER_PORT, else one derived from the job's number.
    #[schemars(range(min = 1, max = 65535))]
    pub port: Option<u16>,
    /// Network interface of the connections between ranks, of gloo, of the store at which its ranks meet and of the watchdog
    /// (`eth0`); by default GLOO_SOCKET_IFNAME, else that on the way to the other ranks.
    pub interface: Option<String>,
    /// Seconds that any wait for another rank may take.
    #[schemars(range(min = 0.1, max = 1e9))]
    pub timeout_s: f64,
    /// Collectives that ranks compare before they exchange data, so that different calls are an error that names both sides.
    pub fingerprints: FingerprintChoice,
    /// Lets ranks watch each other, so that a killed or stopped rank soon ends the job, with a report.
    pub watchdog: bool,
    /// Seconds without a sign of life after which a rank is taken for lost; at most `timeout_s` counts.
    #[schemars(range(min = 1.0, max = 1e9))]
    pub heartbeat_timeout_s: f64,
    /// Folder of the flight records that ranks write when one is lost, `flight_rank_<rank>.json`; by default `flight` in the
    /// folder of the run, and `isobar-flight` without one.
    pub flight_dir: Option<PathBuf>,
    /// Reaction to problems of the environment before a run: mixed-up launchers, ranks that share a GPU, a folder that not all
    /// ranks see.
    pub checks: CheckChoice,
    /// Number of consecutive ranks that share one model. Creates the groups `model_parallel` and `data_parallel`; short for a
    /// mesh. The variable MODEL_PARALLEL_SIZE overrides it; a mesh that contradicts it is an error.
    #[schemars(range(min = 1))]
    pub model_parallel_size: Option<u32>,
    /// Data parallel broadcasts buffers (running statistics) from rank 0 before each forward pass.
    pub broadcast_buffers: bool,
    /// Parameters that the loss does not use get zero gradients; otherwise they are an error.
    pub find_unused_parameters: bool,
    /// The mesh of all ranks.
    pub mesh: MeshConfig,
    /// Messages to the terminal and to files.
    pub log: LogConfig,
}

impl Default for DistributedConfig {
    fn default() -> Self {
        Self {
            backend: BackendChoice::Auto,
            method: MethodChoice::Auto,
            addr: None,
            port: None,
            interface: None,
            timeout_s: 300.0,
            fingerprints: FingerprintChoice::Sample,
            watchdog: true,
            heartbeat_timeout_s: 10.0,
            flight_dir: None,
            checks: CheckChoice::On,
            model_parallel_size: None,
            broadcast_buffers: false,
            find_unused_parameters: false,
            mesh: MeshConfig::default(),
            log: LogConfig::default(),
        }
    }
}

/// Collectives that ranks compare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum FingerprintChoice {
    /// None.
    Off,
    /// One of every 64 of a group, at negligible cost.
    #[default]
    Sample,
    /// All: for finding a fault.
    Always,
}

impl From<FingerprintChoice> for Fingerprints {
    fn from(choice: FingerprintChoice) -> Self {
        match choice {
            FingerprintChoice::Off => Self::Off,
            FingerprintChoice::Sample => Self::Sample,
            FingerprintChoice::Always => Self::Always,
        }
    }
}

/// Reaction to problems of the environment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CheckChoice {
    /// Problems that would lose results end the run before it starts; the others are warnings.
    #[default]
    On,
    /// All problems are warnings.
    Warn,
    /// No checks.
    Off,
}

/// Method by which a process finds its rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MethodChoice {
    /// The first of env, slurm, openmpi, intelmpi, mpich, pmi and pmix whose variables are set, else single.
    #[default]
    Auto,
    /// RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them.
    Env,
    /// The variables of a step of srun.
    Slurm,
    /// The variables of Open MPI's mpirun.
    OpenMpi,
    /// The variables of a PMIx server.
    Pmix,
    /// The variables of Intel MPI's mpirun.
    IntelMpi,
    /// The variables of MPICH's mpirun.
    Mpich,
    /// The variables of a PMI server.
    Pmi,
    /// One process alone, whatever the environment says.
    Single,
}

impl MethodChoice {
    /// The method that is forced; none for [`MethodChoice::Auto`].
    #[must_use]
    pub fn forced(self) -> Option<Method> {
        match self {
            Self::Auto => None,
            Self::Env => Some(Method::Env),
            Self::Slurm => Some(Method::Slurm),
            Self::OpenMpi => Some(Method::OpenMpi),
            Self::Pmix => Some(Method::Pmix),
            Self::IntelMpi => Some(Method::IntelMpi),
            Self::Mpich => Some(Method::Mpich),
            Self::Pmi => Some(Method::Pmi),
            Self::Single => Some(Method::Single),
        }
    }
}

/// The mesh of all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MeshConfig {
    /// Ranks along each axis, the last axis fastest; one may be -1 and is derived from the number of ranks.
    pub shape: Vec<i64>,
    /// Names of the axes.
    pub names: Vec<String>,
}

impl Default for MeshConfig {
    fn default() -> Self {
        Self { shape: vec![-1], names: vec!["data".to_owned()] }
    }
}

/// Messages to the terminal and to files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Log filter of rank 0's terminal, in the syntax of RUST_LOG, which overrides it: `info`, `isobar_collectives=debug`.
    pub terminal: String,
    /// Log filter of each rank's own file of JSON lines.
    pub file: String,
    /// Folder of the files `rank-<rank>.jsonl`; by default `logs` in the folder of the run, and no files without one.
    pub folder: Option<PathBuf>,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { terminal: "info".to_owned(), file: "debug".to_owned(), folder: None }
    }
}
