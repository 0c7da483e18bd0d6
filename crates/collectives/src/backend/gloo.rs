//! libtorch's gloo, over TCP, for launches without MPI. Messages between pairs of ranks carry bytes; the TCP store at
//! which the ranks meet carries notices.

use std::net::{IpAddr, UdpSocket};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use isobar_rendezvous::{TcpStore, Token};
use isobar_torch::c10d::{Gloo, GlooOptions, Work};
use tch::{Device, Tensor};

use crate::error::{Error, Result};
use crate::local::memory::nbytes;
use crate::wire::{Backend, BackendKind, Carries, Failure, Notice, Request, Tag, Transfer};

/// Address of the rendezvous, and this process's rank.
#[derive(Debug, Clone)]
pub struct Options {
    /// The host of rank 0, whose process keeps the store.
    pub addr: String,
    /// The store's port there.
    pub port: u16,
    /// The addresses of rank 0's host at which the store listens, `addr` among them or on the way to it. Of rank 0 only.
    pub listen: Vec<IpAddr>,
    /// Shared secret of this job's ranks; the store rejects all other processes.
    pub token: Token,
    /// This process's rank.
    pub rank: usize,
    /// The number of ranks.
    pub size: usize,
    /// Timeout of a call, and of the rendezvous.
    pub deadline: Duration,
    /// The network interface for the connections between ranks (`eth0`); `None`: the one on the way
    /// to `addr`.
    pub interface: Option<String>,
}

/// Connects all ranks. Every rank calls.
pub(crate) fn connect(options: &Options) -> Result<GlooBackend> {
    let Options { addr, port, listen, token, rank, size, deadline, interface } = options;
    let failed = |problem: String| Error::Start { backend: "gloo", problem };
    let lost = |problem: String| Error::LostAtStart { backend: "gloo", problem };
    if rank >= size {
        return Err(failed(format!("rank {rank} is not below the number of ranks, {size}")));
    }
    let store = match rank {
        0 => TcpStore::server(listen, *port, token, *deadline),
        _ => TcpStore::client(addr, *port, token, *deadline),
    };
    let store = store.map_err(|error| {
        let what = if *rank == 0 { "open the store" } else { "reach the store of rank 0" };
        let problem = format!(
            "rank {rank} of {size} could not {what} at {addr}:{port} (MASTER_ADDR, MASTER_PORT): {error}"
        );
        // Rank 0 itself cannot listen there; any other rank that found no store has lost rank 0.
        if *rank > 0 && error.is_timeout() { lost(problem) } else { failed(problem) }
    })?;
    let towards_store = address_towards(addr, *port);
    meet(&store, options, towards_store.as_deref().unwrap_or_default(), lost)?;
    let host = match towards_store {
        _ if interface.is_some() => None,
        Some(own) if is_loopback(&own) => Some(address_towards_others(&store, options).unwrap_or(own)),
        own => own,
    };
    // gloo's clock runs longer than that of waits, which know what they wait for.
    let gloo_options =
        GlooOptions { timeout: deadline.saturating_mul(2), interface: interface.clone(), host };
    let gloo = Gloo::new(&store, "isobar", *rank, *size, &gloo_options);
    let store = store.with_timeout(NOTICE);
    if let Err(error) = store.set(&tried(*rank), &[]) {
        tracing::debug!(%error, "the store does not learn that this rank has tried to connect");
    }
    let gloo = gloo.map_err(|error| {
        let problem = format!("rank {rank} of {size} could not connect to the others");
        // All ranks have joined: a rank that can no longer be reached is lost.
        let known = |name: &String| Path::new("/sys/class/net").join(name).exists();
        if !interface.as_ref().is_none_or(known) {
            return failed(format!("{problem}: {error}"));
        }
        let seconds = ROLL_CALL.as_secs();
        lost(match absent(&store, *size)[..] {
            [] => format!("{problem}: {error}"),
            ref absent => {
                format!("{problem}, and after {seconds} s more still waits for ranks {absent:?}: {error}")
            }
        })
    })?;
    let mailbox = Mailbox { store, read: 0, looked: Instant::now(), notices: Vec::new() };
    Ok(GlooBackend { gloo: Arc::new(gloo), rank: *rank, mailbox: Mutex::new(mailbox) })
}

/// Under which a rank leaves its address at the store.
fn key(rank: usize) -> String {
    format!("isobar/here/{rank}")
}

/// Set once a rank's connections to the others stand, or have failed.
fn tried(rank: usize) -> String {
    format!("isobar/tried/{rank}")
}

/// The ranks that have neither connected nor failed to: they were lost on the way, or hang. Ranks that fail at about the
/// same time as this one are waited for.
fn absent(store: &TcpStore, size: usize) -> Vec<usize> {
    let end = Instant::now() + ROLL_CALL;
    let mut absent = Vec::new();
    loop {
        let untried = (0..size).filter_map(|rank| {
            store.check(&[&tried(rank)]).map(|tried| (!tried).then_some(rank)).transpose()
        });
        match untried.collect::<isobar_rendezvous::Result<_>>() {
            Ok(untried) => absent = untried,
            // Rank 0 has waited long enough and has gone, and the store with it: what was known last holds.
            Err(_) => return absent,
        }
        if absent.is_empty() || Instant::now() > end {
            return absent;
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Waits at the store until all ranks have come, and have left their addresses.
fn meet(
    store: &TcpStore,
    Options { rank, size, deadline, .. }: &Options,
    own: &str,
    lost: impl Fn(String) -> Error,
) -> Result<()> {
    let left = |error: isobar_rendezvous::Error| {
        lost(format!("rank {rank} of {size} lost rank 0, which keeps the store where ranks meet: {error}"))
    };
    store.set(&key(*rank), own.as_bytes()).map_err(left)?;
    if store.add("isobar/come", 1).map_err(left)? == *size as i64 {
        store.set("isobar/all", &[]).map_err(left)?;
    }
    let Err(error) = store.wait(&["isobar/all"], *deadline) else { return Ok(()) };
    let missing: Vec<usize> =
        (0..*size).filter(|&rank| store.check(&[&key(rank)]).is_ok_and(|here| !here)).collect();
    match missing.is_empty() {
        true => Err(left(error)),
        false => Err(Error::Absent { backend: "gloo", rank: *rank, size: *size, missing, after: *deadline }),
    }
}

/// This machine's address on the way to a rank of another host, where there is one: rank 0's host may know itself by a
/// loopback address only.
fn address_towards_others(store: &TcpStore, options: &Options) -> Option<String> {
    let others = (0..options.size).filter(|&rank| rank != options.rank);
    let mut addresses = others.filter_map(|rank| {
        let address = store.get(&key(rank), options.deadline).ok()?;
        String::from_utf8(address).ok().filter(|address| !address.is_empty() && !is_loopback(address))
    });
    address_towards(&addresses.next()?, options.port)
}

fn is_loopback(address: &str) -> bool {
    address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// This machine's address on the way to a host. The machine's own name, which gloo would look up, is often that of a
/// loopback interface, or of none.
fn address_towards(host: &str, port: u16) -> Option<String> {
    // Connecting a datagram socket sends nothing: it only chooses the route.
    let route = |local: &str| {
        let socket = UdpSocket::bind((local, 0)).ok()?;
        socket.connect((host, port)).ok()?;
        Some(socket.local_addr().ok()?.ip().to_string())
    };
    route("0.0.0.0").or_else(|| route("::"))
}

/// gloo's tags are 32 bits; those of c10d are positive; one bit tells lengths from bodies.
const TAG_BITS: u32 = 30;

/// Interval at which a waiting rank polls the store for notices.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// For how long a rank that could not connect waits for word of the others.
const ROLL_CALL: Duration = Duration::from_secs(5);

/// Timeout of a query for notices, short because the rank is already waiting for others.
const NOTICE: Duration = Duration::from_millis(200);

/// For how many rounds a wait stays ready to go on at once.
const SPIN_ROUNDS: u32 = 64;

pub(crate) struct GlooBackend {
    gloo: Arc<Gloo>,
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
    fn look(&mut self, rank: usize) -> isobar_rendezvous::Result<()> {
        let written = self.store.add(&format!("isobar/notices/{rank}"), 0)?;
        while self.read < written {
            let next = format!("isobar/notice/{rank}/{}", self.read + 1);
            let bytes = self.store.get(&next, Duration::from_secs(1))?;
            self.read += 1;
            self.notices.extend(Notice::from_bytes(&bytes));
        }
        Ok(())
    }

    fn post(&self, peer: usize, bytes: &[u8]) -> isobar_rendezvous::Result<()> {
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
        let tags = Tags::of(tag);
        let mut pending = Pending { gloo: self.gloo.clone(), tags, sends: Vec::new(), receives: Vec::new() };
        for transfer in receives {
            let head = Tensor::f_from_slice(&[0_i64, 0]).map_err(failed)?;
            let work = self.gloo.recv(&head, transfer.peer, tags.head).map_err(failed)?;
            pending.receives.push(Receive { transfer, stage: Stage::Head(work, head) });
        }
        for Transfer { peer, tensor, label, .. } in sends {
            let head =
                Tensor::f_from_slice(&[nbytes(&tensor) as i64, label.cast_signed()]).map_err(failed)?;
            for (tensor, tag) in [(head, tags.head), (tensor, tags.body)] {
                let work = self.gloo.send(&tensor, peer, tag).map_err(failed)?;
                pending.sends.push((work, tensor));
            }
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

    fn idle(&self, round: u32) {
        // gloo's own threads move the data, and want the processor for it.
        match round < SPIN_ROUNDS {
            true => thread::yield_now(),
            false => thread::sleep(Duration::from_micros(20)),
        }
    }
}

/// A message's length and label go before it: gloo ends the process where a message is longer than the place for it, and
/// says nothing where it is shorter.
#[derive(Clone, Copy)]
struct Tags {
    head: u32,
    body: u32,
}

impl Tags {
    fn of(tag: Tag) -> Self {
        let tag = (tag.pack(TAG_BITS) as u32) << 1;
        Self { head: tag | 1, body: tag }
    }
}

struct Pending {
    gloo: Arc<Gloo>,
    tags: Tags,
    sends: Vec<(Work, Tensor)>,
    receives: Vec<Receive>,
}

struct Receive {
    transfer: Transfer,
    stage: Stage,
}

enum Stage {
    Head(Work, Tensor),
    Body(Work),
    Done,
}

impl Request for Pending {
    fn poll(&mut self) -> Result<bool, Failure> {
        let mut waiting = Vec::new();
        for Receive { transfer, stage } in &mut self.receives {
            let peer = transfer.peer;
            if let Stage::Head(work, head) = stage {
                // Messages of a peer with the same tag are received in order.
                if waiting.contains(&peer) || !is_done(work)? {
                    waiting.push(peer);
                    continue;
                }
                let word = |i| head.f_int64_value(&[i]).map(i64::cast_unsigned).map_err(failed);
                if (word(0)?, word(1)?) != (nbytes(&transfer.tensor) as u64, transfer.label) {
                    return Err(transfer.foreign(word(0)?));
                }
                let body = self.gloo.recv(&transfer.tensor, peer, self.tags.body);
                *stage = Stage::Body(body.map_err(failed)?);
            }
            if let Stage::Body(work) = stage {
                match is_done(work)? {
                    true => *stage = Stage::Done,
                    false => waiting.push(peer),
                }
            }
        }
        while let Some((work, _)) = self.sends.last_mut() {
            if !is_done(work)? {
                return Ok(false);
            }
            self.sends.pop();
        }
        Ok(waiting.is_empty())
    }

    fn awaited(&mut self) -> Vec<usize> {
        let lacking = self.receives.iter().filter(|receive| !matches!(receive.stage, Stage::Done));
        lacking.map(|receive| receive.transfer.peer).collect()
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        // Giving an unfinished message up would break the connection, which other operations may use still.
        self.sends.drain(..).for_each(std::mem::forget);
        self.receives.drain(..).filter(|r| !matches!(r.stage, Stage::Done)).for_each(std::mem::forget);
    }
}

fn is_done(work: &mut Work) -> Result<bool, Failure> {
    if !work.is_completed().map_err(failed)? {
        return Ok(false);
    }
    // Done already: this only asks how it ended.
    work.wait(Duration::from_secs(1)).map_err(failed)?;
    Ok(true)
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure(error.to_string())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    fn options(port: u16, rank: usize) -> Options {
        Options {
            addr: "127.0.0.1".to_owned(),
            port,
            listen: vec![Ipv4Addr::LOCALHOST.into()],
            token: Token::new(b"a test"),
            rank,
            size: 3,
            deadline: Duration::from_secs(1),
            interface: None,
        }
    }

    /// It meets the others, and goes before it connects to them: no watchdog has seen it yet.
    #[test]
    fn a_rank_lost_between_the_rendezvous_and_the_connections_is_named() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let told: Vec<String> = thread::scope(|scope| {
            let others = [0, 2].map(|rank| scope.spawn(move || connect(&options(port, rank)).err()));
            let lost = options(port, 1);
            let store = TcpStore::client(&lost.addr, port, &lost.token, Duration::from_secs(20)).unwrap();
            meet(&store, &lost, "127.0.0.1", |problem| Error::LostAtStart { backend: "gloo", problem })
                .unwrap();
            drop(store);
            others.map(|rank| rank.join().unwrap().unwrap().to_string()).to_vec()
        });
        for error in told {
            assert!(error.contains("after 5 s more still waits for ranks [1]"), "{error}");
        }
    }
}
