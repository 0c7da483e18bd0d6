//! libtorch's gloo, over TCP, for launches without MPI. Messages between pairs of ranks carry bytes; the TCP store at
//! which the ranks meet carries notices.

use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use isobar_torch::c10d::{Gloo, GlooOptions, TcpStore, Work};
use tch::{Device, Tensor};

use super::{Backend, BackendKind, Carries, Failure, Notice, Request, Tag, Transfer};
use crate::{Error, Group, Result};

/// Where the ranks meet, and who this one is.
#[derive(Debug, Clone)]
pub struct Options {
    /// The host of rank 0, whose process keeps the store.
    pub addr: String,
    /// The store's port there.
    pub port: u16,
    /// This process's rank.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// How long a call may take, and meeting.
    pub deadline: Duration,
    /// The network interface for the connections between ranks (`eth0`); `None`: that of the machine's own name, or the
    /// loopback interface where `addr` is one of it.
    pub interface: Option<String>,
}

/// The group of all ranks. Every rank calls.
///
/// # Errors
///
/// A port that is taken, a rank that does not come by the deadline, or an interface that there is not.
pub fn world(options: &Options) -> Result<Group> {
    let Options { addr, port, rank, size, deadline, interface } = options;
    let failed = |problem: String| Error::Start { backend: "gloo", problem };
    if rank >= size {
        return Err(failed(format!("rank {rank} is not below the number of ranks, {size}")));
    }
    let store = match rank {
        0 => TcpStore::server(addr, *port, *deadline),
        _ => TcpStore::client(addr, *port, *deadline),
    };
    let store = store.map_err(|error| {
        failed(format!(
            "rank {rank} of {size} could not reach the store of rank 0 at {addr}:{port} (MASTER_ADDR, MASTER_PORT): {error}"
        ))
    })?;
    let is_loopback = addr == "localhost" || addr.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    let host = (interface.is_none() && is_loopback).then(|| "127.0.0.1".to_owned());
    let gloo_options = GlooOptions { timeout: *deadline, interface: interface.clone(), host };
    let gloo = Gloo::new(&store, "isobar", *rank, *size, &gloo_options)
        .map_err(|error| failed(format!("rank {rank} of {size} could not connect to the others: {error}")))?;
    let mailbox = Mailbox { store, read: 0, looked: Instant::now(), notices: Vec::new() };
    let backend = GlooBackend { gloo, rank: *rank, mailbox: Mutex::new(mailbox) };
    Ok(Group::world(Box::new(backend), *rank, *size, *deadline))
}

/// gloo's tags are 32 bits; those of c10d are positive.
const TAG_BITS: u32 = 31;

/// How often a waiting rank asks the store for notices.
const LOOK_EVERY: Duration = Duration::from_millis(50);

struct GlooBackend {
    gloo: Gloo,
    rank: usize,
    mailbox: Mutex<Mailbox>,
}

/// The notices to this rank, numbered in the store.
struct Mailbox {
    store: TcpStore,
    read: i64,
    looked: Instant,
    notices: Vec<Notice>,
}

impl Mailbox {
    fn look(&mut self, rank: usize) -> isobar_torch::Result<()> {
        let written = self.store.add(&format!("isobar/notices/{rank}"), 0)?;
        while self.read < written {
            self.read += 1;
            let bytes =
                self.store.get(&format!("isobar/notice/{rank}/{}", self.read), Duration::from_secs(1))?;
            self.notices.extend(Notice::from_bytes(&bytes));
        }
        Ok(())
    }

    fn post(&self, peer: usize, bytes: &[u8]) -> isobar_torch::Result<()> {
        // The number is given out after the text is there: `add` makes it visible.
        let number = self.store.add(&format!("isobar/drafts/{peer}"), 1)?;
        self.store.set(&format!("isobar/notice/{peer}/{number}"), bytes)?;
        self.store.add(&format!("isobar/notices/{peer}"), 1).map(drop)
    }
}

impl Backend for GlooBackend {
    fn kind(&self) -> BackendKind {
        BackendKind::Gloo
    }

    fn carries(&self) -> Carries {
        Carries::Whole
    }

    fn start(
        &self,
        tag: Tag,
        sends: Vec<Transfer>,
        receives: Vec<Transfer>,
    ) -> Result<Box<dyn Request>, Failure> {
        if sends.iter().chain(&receives).any(|t| t.tensor.device() != Device::Cpu) {
            return Err(Failure("gloo carries CPU tensors only".into()));
        }
        let tag = tag.pack(TAG_BITS) as u32;
        let failed = |error: isobar_torch::Error| Failure(error.to_string());
        let mut pending = Pending { works: Vec::new(), done: 0 };
        for Transfer { peer, tensor, .. } in receives {
            let work = self.gloo.recv(&tensor, peer, tag).map_err(failed)?;
            pending.works.push((work, tensor));
        }
        for Transfer { peer, tensor, .. } in sends {
            let work = self.gloo.send(&tensor, peer, tag).map_err(failed)?;
            pending.works.push((work, tensor));
        }
        Ok(Box::new(pending))
    }

    fn notify(&self, peers: &[usize], notice: &Notice) {
        let mailbox = self.mailbox.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = notice.to_bytes();
        for &peer in peers {
            if let Err(error) = mailbox.post(peer, &bytes) {
                tracing::debug!(%error, peer, "a notice could not be left");
            }
        }
    }

    fn notice(&self, context: u32, sequence: u64) -> Option<Notice> {
        let mut mailbox = self.mailbox.lock().unwrap_or_else(PoisonError::into_inner);
        if mailbox.looked.elapsed() >= LOOK_EVERY {
            mailbox.looked = Instant::now();
            if let Err(error) = mailbox.look(self.rank) {
                tracing::debug!(%error, "the store did not answer");
            }
        }
        mailbox.notices.iter().find(|notice| notice.concerns(context, sequence)).cloned()
    }
}

struct Pending {
    works: Vec<(Work, Tensor)>,
    done: usize,
}

impl Request for Pending {
    fn poll(&mut self) -> Result<bool, Failure> {
        while let Some((work, _)) = self.works.get_mut(self.done) {
            let failed = |error: isobar_torch::Error| Failure(error.to_string());
            if !work.is_completed().map_err(failed)? {
                return Ok(false);
            }
            // Done already: this only asks how it ended.
            work.wait(Duration::from_secs(1)).map_err(failed)?;
            self.done += 1;
        }
        Ok(true)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        // Giving an unfinished message up would break the connection, which other operations may use still.
        self.works.drain(self.done.min(self.works.len())..).for_each(std::mem::forget);
    }
}
