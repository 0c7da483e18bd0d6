//! The errors of the manager.

use std::path::PathBuf;

use crate::config::ConfigError;
use crate::launch::LaunchError;

/// The result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong when ranks, groups and meshes are set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The manager is asked for before it is set up.
    #[error("the distributed manager is not set up; call DistributedManager::initialize() first")]
    Uninitialized,
    /// It is set up twice.
    #[error("the distributed manager is already set up ({0}); call DistributedManager::cleanup() first")]
    AlreadyInitialized(String),
    /// A name that no group has.
    #[error("there is no group \"{name}\"; {}", known(known_names))]
    UndefinedGroup {
        /// The name.
        name: String,
        /// The groups that there are.
        known_names: Vec<String>,
    },
    /// A name that a group has already.
    #[error("there is already a group \"{name}\"; choose another name")]
    GroupExists {
        /// The name.
        name: String,
    },
    /// A group of a size that does not divide its parent.
    #[error(
        "groups \"{name}\" of {size} ranks cannot be cut from {parent} of {parent_size} ranks; the size must divide it"
    )]
    GroupSize {
        /// The group's name.
        name: String,
        /// Its size.
        size: i64,
        /// The parent, in words.
        parent: String,
        /// The parent's size.
        parent_size: usize,
    },
    /// A tree of groups that does not hold together.
    #[error("group tree: {0}")]
    GroupTree(String),
    /// Ranks that make different calls where all must make the same.
    #[error("{operation}: ranks do not agree: {differences}; all ranks must make the same call")]
    Disagreement {
        /// The call.
        operation: &'static str,
        /// Who said what.
        differences: String,
    },
    /// Ranks that were given other configurations.
    #[error(
        "configurations differ: {differences}; give all ranks the same files, environment and --set options"
    )]
    ConfigurationsDiffer {
        /// Ranks, keys and values.
        differences: String,
    },
    /// A mesh that cannot be.
    #[error("mesh of shape {shape:?} with axes {names:?}: {problem}")]
    Mesh {
        /// The shape asked for.
        shape: Vec<i64>,
        /// The axes' names.
        names: Vec<String>,
        /// What is wrong.
        problem: String,
    },
    /// An axis that a mesh does not have.
    #[error("{mesh} has no axis \"{axis}\"")]
    UnknownAxis {
        /// The mesh.
        mesh: String,
        /// The axis.
        axis: String,
    },
    /// A rank outside a mesh that asks for a group of it.
    #[error("rank {rank} is not in {mesh}, so that it has no group along its axis \"{axis}\"")]
    NotInMesh {
        /// The rank in the world.
        rank: usize,
        /// The mesh.
        mesh: String,
        /// The axis.
        axis: String,
    },
    /// A value that is out of range.
    #[error("{name} is {value}, expected {expected}")]
    Value {
        /// What it is of.
        name: &'static str,
        /// The value.
        value: String,
        /// What was expected.
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
        /// What the system said.
        problem: String,
    },
    /// A filter of messages that cannot be read.
    #[error("log filter \"{filter}\" is not of the form level,target=level: {problem}")]
    LogFilter {
        /// The filter.
        filter: String,
        /// What is wrong.
        problem: String,
    },
    /// A flight record that cannot be written or read.
    #[error("{}: {problem}", path.display())]
    FlightRecord {
        /// The file or folder.
        path: PathBuf,
        /// What was wrong.
        problem: String,
    },
    /// A network interface without an address.
    #[error("the network interface \"{name}\" {problem}")]
    Interface {
        /// Its name.
        name: String,
        /// What was wrong, and which there are.
        problem: String,
    },
    /// An address at which rank 0 cannot listen.
    #[error(
        "the address of rank 0, {addr}: {problem}; set MASTER_ADDR (or distributed.addr) to an address of rank 0's host, or distributed.interface to the interface by which the others reach it"
    )]
    Address {
        /// The address.
        addr: String,
        /// What was wrong.
        problem: String,
    },
    /// A system without random numbers.
    #[error("the system gives no random numbers: {problem}")]
    RandomNumbers {
        /// What it says.
        problem: String,
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
    /// How the process was started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The start of a transport between ranks.
    #[error("{method} launch, rank {rank} of {ranks}: {source}")]
    Start {
        /// How the process was started.
        method: crate::launch::Method,
        /// Its rank.
        rank: usize,
        /// The number of ranks, in words.
        ranks: String,
        /// What the transport said.
        source: isobar_collectives::Error,
    },
    /// Communication.
    #[error("communication failed: {0}")]
    Collective(#[from] isobar_collectives::Error),
}

fn known(names: &[String]) -> String {
    if names.is_empty() {
        return "none was created".to_owned();
    }
    format!("expected one of {}", names.join(", "))
}
