//! From a launch to the group of all ranks.

use std::net::IpAddr;
use std::time::Duration;

use isobar_collectives::{Group, gloo, nccl};
use isobar_launch::{Available, Launch, LaunchError, TOKEN, Transport, TransportOptions};
use isobar_rendezvous::Token;
use isobar_torch::cuda;
use tch::Device;

use crate::config::BackendChoice;
use crate::watchdog::StartGuard;
use crate::{Error, Result, address, descriptors, logging};

/// Transports available in this build.
pub(crate) const AVAILABLE: Available = Available { mpi: cfg!(feature = "mpi") };

/// Watches the start of the transport, where that may wait for other processes without a deadline of its own.
pub(crate) fn guard(
    launch: &Launch,
    options: &TransportOptions,
    deadline: Duration,
) -> Result<Option<StartGuard>> {
    let waits = matches!(isobar_launch::transport(launch, options, AVAILABLE), Ok(Transport::Mpi));
    waits.then(|| StartGuard::start(launch.rank, deadline)).transpose()
}

/// The group of all ranks of a launch, and this rank's place on its host.
pub(crate) fn start(
    launch: &Launch,
    options: &TransportOptions,
    token: Option<&Token>,
    deadline: Duration,
) -> Result<(Group, usize)> {
    let transport = isobar_launch::transport(launch, options, AVAILABLE)?;
    let listen = match &transport {
        Transport::Gloo { addr, .. } if launch.rank == 0 => {
            address::of_rank_zero(addr, options.interface.as_deref())?
        }
        _ => Vec::new(),
    };
    if token.is_none() && listen.iter().any(|address| !address.is_loopback()) {
        let listen = listen.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(", ");
        logging::warn_early(format!(
            "whoever reaches {listen} may join this job: give all its ranks the same secret by {TOKEN}"
        ));
    }
    if let Transport::Gloo { .. } = transport {
        descriptors::reserve(launch.rank, launch.world_size.unwrap_or(1))?;
    }
    let token = token.cloned().unwrap_or_else(Token::none);
    let world =
        connect(launch, &transport, options, deadline, listen, token).map_err(|source| Error::Start {
            method: launch.method,
            rank: launch.rank,
            ranks: launch.world_size.map_or_else(|| "an unknown number".to_owned(), |size| size.to_string()),
            source,
        })?;
    check_against_launch(launch, &world)?;
    let local_rank = local_rank(&world, launch.local_rank)?;
    Ok((world, local_rank))
}

/// The GPU of a rank, in turn over those of its host; the CPU where there is none.
pub(crate) fn device(local_rank: usize) -> Device {
    if let Err(error) = cuda::load() {
        tracing::warn!("the GPUs are not used: {error}");
    }
    match cuda::device_count() {
        0 => Device::Cpu,
        gpus => Device::Cuda(local_rank % gpus),
    }
}

/// Gives the world NCCL beside its transport, for CUDA tensors, and says whether it has it. `auto` takes it where every
/// rank has a GPU of its own; `nccl` insists.
///
/// All ranks call, with the same `backend`.
pub(crate) fn attach_nccl(world: &Group, device: Device, backend: BackendChoice) -> Result<bool> {
    let index = match device {
        Device::Cuda(index) => Some(index),
        _ => None,
    };
    let wanted = match backend {
        BackendChoice::Nccl => true,
        BackendChoice::Auto => all_have_own_gpus(world, index)?,
        BackendChoice::Mpi | BackendChoice::Gloo | BackendChoice::Single => false,
    };
    if !wanted {
        return Ok(false);
    }
    match nccl::attach(world, index.unwrap_or(0)) {
        Ok(()) => Ok(true),
        Err(error) if backend == BackendChoice::Auto => {
            tracing::warn!("CUDA tensors go through host memory, since NCCL cannot be used: {error}");
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}

fn all_have_own_gpus(world: &Group, index: Option<usize>) -> Result<bool> {
    if world.size() == 1 {
        return Ok(false);
    }
    let own = index.map_or_else(String::new, |index| format!("{index} of {}", address::host()));
    let mut all = world.all_gather_bytes(own.as_bytes())?;
    all.sort_unstable();
    Ok(all.iter().all(|gpu| !gpu.is_empty()) && all.windows(2).all(|pair| pair[0] != pair[1]))
}

fn connect(
    launch: &Launch,
    transport: &Transport,
    options: &TransportOptions,
    deadline: Duration,
    listen: Vec<IpAddr>,
    token: Token,
) -> isobar_collectives::Result<Group> {
    match transport {
        Transport::Single => Ok(Group::single_with(deadline)),
        Transport::Mpi => mpi_world(deadline),
        Transport::Gloo { addr, port } => gloo::world(&gloo::Options {
            addr: addr.clone(),
            port: *port,
            listen,
            token,
            rank: launch.rank,
            size: launch.world_size.unwrap_or(1),
            process: format!("process {} on {}", std::process::id(), address::host().trim()),
            deadline,
            interface: options.interface.clone(),
        }),
    }
}

#[cfg(feature = "mpi")]
fn mpi_world(deadline: Duration) -> isobar_collectives::Result<Group> {
    use isobar_collectives::mpi;
    mpi::world(mpi::Options { deadline, ..mpi::Options::default() })
}

#[cfg(not(feature = "mpi"))]
fn mpi_world(_deadline: Duration) -> isobar_collectives::Result<Group> {
    let problem = "this program was built without MPI; build with the feature `mpi`".to_owned();
    Err(isobar_collectives::Error::Start { backend: "mpi", problem })
}

/// MPI that counts other ranks than the launcher would train several models that know nothing of each other.
fn check_against_launch(launch: &Launch, world: &Group) -> Result<()> {
    let known = launch.world_size.is_some_and(|size| (world.rank(), world.size()) != (launch.rank, size));
    let alone = launch.world_size.is_none() && launch.rank > 0 && world.size() == 1;
    if !known && !alone {
        return Ok(());
    }
    Err(Error::Launch(LaunchError::WorldSize {
        method: launch.method,
        launched: match launch.world_size {
            Some(size) => format!("rank {} of {size}", launch.rank),
            None => format!("rank {}", launch.rank),
        },
        mpi_rank: world.rank(),
        mpi: world.size(),
        mend: isobar_launch::mpi_mend(launch.method, world.size()).to_owned(),
    }))
}

/// The place among the ranks of this host: as the launcher said, where it told all of them, else by comparing host names.
fn local_rank(world: &Group, told: Option<usize>) -> Result<usize> {
    let own = address::host();
    let all = world.all_gather_bytes(&[&[u8::from(told.is_some())], own.as_bytes()].concat())?;
    if let Some(told) = told
        && all.iter().all(|rank| rank.first() == Some(&1))
    {
        return Ok(told);
    }
    Ok(all[..world.rank()].iter().filter(|rank| rank.get(1..) == Some(own.as_bytes())).count())
}
