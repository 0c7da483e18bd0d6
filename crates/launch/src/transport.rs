//! Choice of the transport for a launch.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Launch, LaunchError, Method};

/// PhysicsNeMo's and torch's habit; used only where neither the environment nor the configuration names a port and the
/// launcher gives no number of the job to derive one from.
const DEFAULT_PORT: u16 = 12355;

/// Transport between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BackendChoice {
    /// MPI where an MPI launcher started the ranks, gloo elsewhere, none for a single process.
    #[default]
    Auto,
    /// MPI.
    Mpi,
    /// libtorch's gloo, over TCP, without MPI.
    Gloo,
    /// NCCL for CUDA tensors, with a GPU for each rank.
    Nccl,
    /// One process alone.
    Single,
}

/// The means by which ranks reach each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transport {
    /// No other ranks.
    Single,
    /// MPI's own start-up.
    Mpi,
    /// gloo over a TCP store that rank 0 serves.
    Gloo {
        /// Address of rank 0.
        addr: String,
        /// Port of rank 0.
        port: u16,
    },
}

/// Transport options of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransportOptions {
    /// The backend asked for.
    pub backend: BackendChoice,
    /// Address of rank 0, above what the launcher says.
    pub addr: Option<String>,
    /// Port of rank 0, above what the launcher says.
    pub port: Option<u16>,
    /// The network interface that gloo's connections use.
    pub interface: Option<String>,
}

/// Transports available in this build and on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Available {
    /// Built with the feature `mpi`.
    pub mpi: bool,
}

/// Chooses the transport for a launch.
///
/// `auto` takes MPI where this build has it and mpirun or srun started the ranks, gloo elsewhere. `nccl` needs a
/// transport for its start-up and for CPU tensors, chosen as for `auto`.
///
/// # Errors
///
/// A backend that this launch cannot serve: MPI that is not built in or whose process manager is not there (srun
/// without a PMIx plugin, with `auto` too: gloo in its place would be slower, and nobody asked for it), `single` with
/// several ranks, gloo without an address.
pub fn transport(
    launch: &Launch,
    options: &TransportOptions,
    available: Available,
) -> Result<Transport, LaunchError> {
    let several = launch.world_size != Some(1);
    match options.backend {
        BackendChoice::Single if several => Err(refuse(
            "single",
            launch,
            "each would train alone",
            "--set distributed.backend=auto, or --set distributed.method=single",
        )),
        BackendChoice::Single => Ok(Transport::Single),
        BackendChoice::Mpi => mpi(launch, available),
        BackendChoice::Gloo => gloo(launch, options),
        BackendChoice::Auto | BackendChoice::Nccl => match launch.method {
            Method::Single => Ok(Transport::Single),
            _ if launch.process_manager && available.mpi => Ok(Transport::Mpi),
            _ if !several => Ok(Transport::Single),
            Method::Slurm if available.mpi => mpi(launch, available),
            _ => gloo(launch, options),
        },
    }
}

/// Returns the remedy if MPI and the launcher disagree on the number of ranks.
#[must_use]
pub fn mpi_mend(method: Method, mpi_size: usize) -> &'static str {
    match method {
        Method::Slurm => {
            "start with a process manager that MPI knows, `srun --mpi=pmix` (see `srun --mpi=list`), or --set distributed.backend=gloo"
        }
        Method::Mpich | Method::IntelMpi | Method::Pmi if mpi_size == 1 => {
            "this program is linked with another MPI than the launcher's: use that one's mpirun, or --set distributed.backend=gloo"
        }
        _ => {
            "start all ranks by one `mpirun -n RANKS program` of the MPI that this program is linked with, or --set distributed.backend=gloo"
        }
    }
}

fn mpi(launch: &Launch, available: Available) -> Result<Transport, LaunchError> {
    let several = launch.world_size != Some(1);
    if !available.mpi {
        let mend = "build with the feature `mpi`, or --set distributed.backend=gloo";
        return Err(refuse("mpi", launch, "this program was built without MPI", mend));
    }
    if several && !launch.process_manager {
        let (why, mend) = match launch.method {
            Method::Slurm => (
                "srun started no PMIx server (no PMIX_ variables are set), and every rank would think it is alone",
                "start with `srun --mpi=pmix` (see `srun --mpi=list`), or --set distributed.backend=gloo",
            ),
            _ => (
                "no MPI process manager started it, and every rank would think it is alone",
                "start the ranks by `mpirun -n RANKS program`, or --set distributed.backend=gloo",
            ),
        };
        return Err(refuse("mpi", launch, why, mend));
    }
    Ok(Transport::Mpi)
}

fn gloo(launch: &Launch, options: &TransportOptions) -> Result<Transport, LaunchError> {
    let Some(size) = launch.world_size else {
        let mend = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each rank";
        return Err(refuse("gloo", launch, "PMIx does not say how many ranks there are", mend));
    };
    let addr = options.addr.as_ref().or(launch.addr.as_ref()).cloned();
    let Some(addr) = addr.or_else(|| (size == 1).then(|| "127.0.0.1".to_owned())) else {
        let mend = "set MASTER_ADDR to the host of rank 0, or --set distributed.addr=HOST";
        return Err(refuse("gloo", launch, "the address of rank 0 is not known", mend));
    };
    let port = options.port.or(launch.port).unwrap_or(DEFAULT_PORT);
    Ok(Transport::Gloo { addr, port })
}

fn refuse(backend: &'static str, launch: &Launch, why: &str, mend: &str) -> LaunchError {
    let ranks = launch.world_size.map_or_else(
        || "an unknown number of ranks".to_owned(),
        |size| {
            if size == 1 { "1 rank".to_owned() } else { format!("{size} ranks") }
        },
    );
    LaunchError::Backend { backend, method: launch.method, ranks, why: why.to_owned(), mend: mend.to_owned() }
}
