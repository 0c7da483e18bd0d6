//! Setup of the watchdog's connections.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use isobar_collectives::{BackendKind, Group};
use isobar_rendezvous::Token;

use super::connect::{Channel, Contact, connect};
use super::last_resort::Reaper;
use super::watch::Watch;
use super::{Shared, State, Watchdog, replace};
use crate::flight::Own;
use crate::{Error, Result, address, logging};

/// Options of the watchdog.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// Silence after which a rank counts as lost.
    pub(crate) heartbeat_timeout: Duration,
    /// Folder of flight records.
    pub(crate) folder: PathBuf,
    /// The network interface to listen on.
    pub(crate) interface: Option<String>,
    /// The host of rank 0, where the launcher told it.
    pub(crate) addr: Option<String>,
}

/// Timeout of a rank's connection to rank 0.
const CONNECT: Duration = Duration::from_secs(5);

/// Starts the watchdog; nothing where there is nobody to watch: on ranks that are alone or threads. Where the ranks do not
/// reach each other, it warns and gives nothing: they may train all the same.
///
/// All ranks call.
pub(crate) fn start(world: &Group, options: &Options) -> Result<Option<Watchdog>> {
    // The watch of an earlier manager ends with the first call that the ranks make together again.
    replace(None);
    let processes = matches!(world.backend(), BackendKind::Mpi | BackendKind::Gloo);
    if !processes || world.size() == 1 {
        return Ok(None);
    }
    // Errors of single ranks are shared at the end, so that all ranks decide alike.
    let machine = address::machine();
    let machines = world.all_gather_bytes(machine.as_bytes())?;
    let machines: Vec<String> =
        machines.into_iter().map(|name| String::from_utf8_lossy(&name).into_owned()).collect();
    let secret = world.broadcast_bytes(&if world.rank() == 0 { draw()? } else { Vec::new() }, 0)?;
    // The job's name is no secret; the token is.
    let (job, secret) = secret.split_at_checked(NAME).unwrap_or_default();
    let listening = listen(&machines, world.rank(), options);
    let (host, pid) = (address::host().trim().to_owned(), std::process::id());
    let contact =
        listening.as_ref().map(|(_, address)| Contact { address: *address, host: host.clone(), pid });
    let own = serde_json::to_vec(&contact).expect("texts and numbers");
    let all = world.all_gather_bytes(&own)?;
    let contacts: Vec<Result<Contact, String>> = all
        .iter()
        .map(|text| serde_json::from_slice(text).unwrap_or_else(|error| Err(error.to_string())))
        .collect();
    if let Some((rank, problem)) =
        contacts.iter().enumerate().find_map(|(rank, contact)| Some((rank, contact.as_ref().err()?)))
    {
        logging::warn_early(format!(
            "no watchdog: rank {rank} cannot be reached: {problem}; --set distributed.interface=NAME"
        ));
        return Ok(None);
    }
    let contacts: Vec<Contact> = contacts.into_iter().flatten().collect();
    let Ok((listener, _)) = listening else { return Ok(None) };
    let shared = Arc::new(Shared {
        own: Own {
            job: job.iter().map(|byte| format!("{byte:02x}")).collect(),
            rank: world.rank(),
            ranks: world.size(),
            host,
            pid,
        },
        flight: world.flight(),
        deadline: world.deadline(),
        folder: Mutex::new(options.folder.clone()),
        lost: AtomicBool::new(false),
        asked: AtomicBool::new(false),
        state: Mutex::new(State::default()),
        changed: Condvar::new(),
    });
    let channel = Channel {
        listener,
        contacts,
        token: Token::new(secret),
        silence: options.heartbeat_timeout,
        mpi: world.backend() == BackendKind::Mpi,
        deadline: world.deadline(),
    };
    let watchdog = Watchdog(shared.clone());
    let no_thread = |error: std::io::Error| {
        format!(
            "cannot start a thread for it: {error}; raise the limit of processes (ulimit -u, or pids of the cgroup)"
        )
    };
    let connected = Reaper::start().map_err(no_thread).and_then(|reaper| match world.rank() {
        0 => spawn(Watch::reporter(shared, channel, reaper)).map_err(no_thread),
        rank => {
            let end = Instant::now() + CONNECT.min(world.deadline());
            let line = connect(&channel, 0, rank, None, end).map_err(|problem| {
                format!("cannot reach rank 0: {problem}; --set distributed.interface=NAME")
            })?;
            spawn(Watch::follower(shared, channel, reaper, line)).map_err(no_thread)
        }
    });
    let mine = connected.as_ref().err().map(String::as_str).unwrap_or_default();
    // Others may have their watchdog already, and would take the end of this process for a loss.
    let problems = world.all_gather_bytes(mine.as_bytes()).inspect_err(|error| {
        if connected.is_ok() {
            let _ = watchdog.fail(&error.to_string(), false);
        }
    })?;
    if let Some(rank) = problems.iter().position(|problem| !problem.is_empty()) {
        let problem = String::from_utf8_lossy(&problems[rank]).into_owned();
        logging::warn_early(format!("no watchdog: rank {rank} {problem}"));
        watchdog.close();
        return Ok(None);
    }
    replace(Some(watchdog.clone()));
    Ok(Some(watchdog))
}

fn spawn(watch: Watch) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name("isobar-watchdog".to_owned());
    thread.spawn(move || watch.run()).map(drop)
}

/// A name of the job, and the bytes that tell its ranks from strangers, from the system's own source of random numbers.
fn draw() -> Result<Vec<u8>> {
    let mut bytes = vec![0; NAME + 32];
    getrandom::fill(&mut bytes).map_err(|error| Error::RandomNumbers { problem: error.to_string() })?;
    Ok(bytes)
}

/// Bytes of the job's name.
const NAME: usize = 4;

fn listen(machines: &[String], rank: usize, options: &Options) -> Result<(TcpListener, SocketAddr), String> {
    let own = &machines[rank];
    let address: IpAddr = match &options.interface {
        Some(name) => address::of_interface(name).map_err(|error| error.to_string())?[0],
        None => {
            let names = machines.iter().filter(|other| *other != own);
            let names: Vec<&str> =
                names.map(|name| name.split_once(' ').map_or(name.as_str(), |(host, _)| host)).collect();
            let hosts = options.addr.as_deref().into_iter().chain(names.iter().copied());
            address::towards(names.is_empty(), hosts)
                .ok_or("this machine does not find the others by their names")?
        }
    };
    let listener = TcpListener::bind((address, 0)).map_err(|error| format!("{address}: {error}"))?;
    let bound = listener.local_addr().map_err(|error| error.to_string())?;
    listener.set_nonblocking(true).map_err(|error| error.to_string())?;
    Ok((listener, bound))
}
