//! The errors of the manager.

use std::path::PathBuf;

use isobar_launch::LaunchError;

use crate::config::ConfigError;

/// The result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors in setting up ranks, groups and meshes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The manager is asked for before it is set up.
    #[error("the distributed manager is not set up; call DistributedManager::initialize() first")]
    Uninitialized,
    /// It is set up twice.
    #[error("the distributed manager is already set up ({0}); call DistributedManager::cleanup() first")]
    AlreadyInitialized(String),
    /// Ranks that were given other configurations.
    #[error(
        "configurations differ: {differences}; give all ranks the same files, environment and --set options"
    )]
    ConfigurationsDiffer {
        /// Ranks, keys and values.
        differences: String,
    },
    /// A value that is out of range.
    #[error("{name} is {value}, expected {expected}")]
    Value {
        /// Name of the value.
        name: &'static str,
        /// The value.
        value: String,
        /// Expected value.
        expected: &'static str,
    },
    /// Something that changes the whole process, asked for by a rank that is a thread of it.
    #[error("{0} changes the whole process and is not for a rank that is a thread of it")]
    ThreadRank(&'static str),
    /// Messages that cannot be written.
    #[error("cannot write log files to {folder}: {problem}")]
    Log {
        /// The folder.
        folder: String,
        /// Error of the system.
        problem: String,
    },
    /// A filter of messages that cannot be read.
    #[error(
        "{name} is {filter:?}: {problem}; expected a level (off, error, warn, info, debug, trace) or target=level, several with \
         commas between them, as in {}",
        works(name)
    )]
    LogFilter {
        /// The configuration key or the environment variable.
        name: &'static str,
        /// The filter.
        filter: String,
        /// Description of the problem.
        problem: String,
    },
    /// A flight record that cannot be written or read.
    #[error("{}: {problem}", path.display())]
    FlightRecord {
        /// The file or folder.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// A network interface without an address.
    #[error("the network interface \"{name}\" {problem}")]
    Interface {
        /// Its name.
        name: String,
        /// Description of the problem, with the existing names.
        problem: String,
    },
    /// An address at which rank 0 cannot listen.
    #[error(
        "the address of rank 0, {addr}: {problem}; set MASTER_ADDR to an address of rank 0's host (or --set distributed.addr=ADDRESS), or name the interface by which the others reach it (--set distributed.interface=NAME)"
    )]
    Address {
        /// The address.
        addr: String,
        /// Description of the problem.
        problem: String,
    },
    /// A system without random numbers.
    #[error("the system gives no random numbers: {problem}")]
    RandomNumbers {
        /// Text of the variable.
        problem: String,
    },
    /// A limit of open files below the number of connections between ranks.
    #[error(
        "the hard limit of open files is {limit}, and this rank of {ranks} needs {needed} for its connections; raise it \
         (ulimit -Hn, or LimitNOFILE of the service that starts the ranks), or use --set distributed.backend=mpi"
    )]
    OpenFiles {
        /// The hard limit.
        limit: u64,
        /// Number of files and connections.
        needed: u64,
        /// Number of ranks.
        ranks: usize,
    },
    /// The system could not start a thread.
    #[error(
        "cannot start a thread to {purpose}: {problem}; raise the limit of processes (ulimit -u, or pids of the cgroup)"
    )]
    Thread {
        /// The thread's purpose.
        purpose: &'static str,
        /// Error message of the system.
        problem: String,
    },
    /// Signals that cannot be listened for.
    #[error("cannot listen for SIGTERM and SIGINT: {problem}")]
    Signals {
        /// Error message of the system.
        problem: String,
    },
    // The next three are transparent because their texts name the group, the variable or the file.
    /// A mesh or a group of ranks.
    #[error(transparent)]
    Mesh(#[from] isobar_mesh::Error),
    /// Wrong launch variables.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The start of a transport between ranks.
    #[error("{method} launch, rank {rank} of {ranks}: {source}")]
    Start {
        /// Wrong launch variables.
        method: isobar_launch::Method,
        /// Its rank.
        rank: usize,
        /// The number of ranks, in words.
        ranks: String,
        /// Error of the transport.
        source: isobar_collectives::Error,
    },
    /// Communication.
    #[error("communication failed: {0}")]
    Collective(#[from] isobar_collectives::Error),
}

/// A log filter that works.
fn works(name: &str) -> String {
    let set = if name.contains('.') { "--set " } else { "" };
    format!("{set}{name}=info,isobar_collectives=debug")
}
