//! Launch of this process: its rank, the number of ranks, and their transport.
//!
//! [`detect`] is a pure function of the environment. The first of these methods whose variables are set is taken: env, SLURM,
//! Open MPI, Intel MPI, MPICH, PMI, PMIx. If its variables are incomplete or contradictory, `detect` returns an error with a fix; it does
//! not try the next method.
//!
//! Two launchers may have left their variables at once:
//!
//! - **torchrun under mpirun or srun**: torchrun's `RANK` and `WORLD_SIZE` count (`TORCHELASTIC_RUN_ID` marks them).
//!   Without that mark, a `WORLD_SIZE` that is not Open MPI's or srun's is an error: it was left by something else, and
//!   every rank would otherwise think it is rank 0.
//! - **mpirun within a SLURM job**: a batch shell has `SLURM_PROCID=0` and perhaps `SLURM_NPROCS`, and mpirun starts its
//!   daemons on other nodes by srun, so that `SLURM_PROCID` is the daemon's number. Where Open MPI's variables are
//!   there and say otherwise they count, unless SLURM's PMIx server (`PMIX_NAMESPACE=slurm.pmix.…`) started this process.
//! - **a plain process in a SLURM job** (`sbatch` or `salloc` shell, no srun): a single process. A step of srun is known by
//!   `SLURM_LAUNCH_NODE_IPADDR` or a `SLURM_STEP_ID` that is not the batch or interactive step's.

mod attempt;
mod detect;
mod environment;
mod error;
mod progress;
mod reporter;
pub mod slurm;
#[cfg(test)]
mod tests;
mod token;
mod transport;

use std::fmt;
use std::str::FromStr;

pub use attempt::{Attempt, LAUNCH_ATTEMPT, LAUNCH_ID, attempt};
pub use detect::{detect, forced_method};
pub use environment::{Environment, concerns_ranks};
pub use error::LaunchError;
pub use progress::{LAUNCH_PROGRESS, draws_progress, identity as pipe_identity};
pub use reporter::reports;
pub use slurm::in_slurm_step;
pub use token::{TOKEN, token};
pub use transport::{Available, BackendChoice, Transport, TransportOptions, mpi_mend, transport};

/// Methods by which a process finds its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Method {
    /// `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`, as torchrun sets them.
    Env,
    /// A step of srun.
    Slurm,
    /// Open MPI's mpirun.
    OpenMpi,
    /// A PMIx server; the number of ranks is known to MPI only.
    Pmix,
    /// Intel MPI's mpirun.
    IntelMpi,
    /// MPICH's mpirun.
    Mpich,
    /// A PMI server.
    Pmi,
    /// Nothing started several ranks.
    Single,
    /// Given by the program through `setup`.
    Explicit,
    /// A rank that is a thread of one process.
    Threads,
}

impl Method {
    /// The methods that can be forced.
    pub const FORCEABLE: [Self; 8] = [
        Self::Env,
        Self::Slurm,
        Self::OpenMpi,
        Self::Pmix,
        Self::IntelMpi,
        Self::Mpich,
        Self::Pmi,
        Self::Single,
    ];

    /// The name as in `ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Env => "ENV",
            Self::Slurm => "SLURM",
            Self::OpenMpi => "OPENMPI",
            Self::Pmix => "PMIX",
            Self::IntelMpi => "INTELMPI",
            Self::Mpich => "MPICH",
            Self::Pmi => "PMI",
            Self::Single => "SINGLE",
            Self::Explicit => "EXPLICIT",
            Self::Threads => "THREADS",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Method {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::FORCEABLE.into_iter().find(|method| method.name().eq_ignore_ascii_case(text)).ok_or(())
    }
}

/// Description of this process by its launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Method by which it was found.
    pub method: Method,
    /// This process's rank.
    pub rank: usize,
    /// The number of ranks; none where only MPI knows it ([`Method::Pmix`]).
    pub world_size: Option<usize>,
    /// This process's rank among those of its host; none where the launcher does not say.
    pub local_rank: Option<usize>,
    /// The address of rank 0, where it is known.
    pub addr: Option<String>,
    /// The port on which rank 0 may listen, where it is known.
    pub port: Option<u16>,
    /// True if a process manager that MPI can talk to started this process.
    pub process_manager: bool,
}

impl Launch {
    /// A process alone.
    #[must_use]
    pub fn single() -> Self {
        Self {
            method: Method::Single,
            rank: 0,
            world_size: Some(1),
            local_rank: Some(0),
            addr: None,
            port: None,
            process_manager: false,
        }
    }
}
