//! libtorch's gloo, over TCP, for launches without MPI. Messages between pairs of ranks carry bytes; the TCP store at
//! which the ranks meet carries notices.

use std::net::{IpAddr, UdpSocket};
use std::path::Path;
use std::sync::mpsc::channel;
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
    /// Name of this process in errors, such as its number and host.
    pub process: String,
    /// Timeout of a call, of the rendezvous, and of the connections that follow it.
    pub deadline: Duration,
    /// The network interface for the connections between ranks (`eth0`); `None`: the one on the way
    /// to `addr`.
    pub interface: Option<String>,
}

/// Connects all ranks. Every rank calls.
pub(crate) fn connect(options: &Options) -> Result<GlooBackend> {
    let Options { addr, port, listen, token, rank, size, deadline, interface, .. } = options;
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
    meet(&store, options, towards_store.as_deref().unwrap_or_default())?;
    let host = match towards_store {
        _ if interface.is_some() => None,
        Some(own) if is_loopback(&own) => Some(address_towards_others(&store, options).unwrap_or(own)),
        own => own,
    };
    let gloo = connect_to_all(&store, options, host).map_err(|error| {
        let problem = format!("rank {rank} of {size} could not connect to the others");
        // All ranks have joined: a rank that can no longer be reached is lost.
        let known = |name: &String| Path::new("/sys/class/net").join(name).exists();
        if !interface.as_ref().is_none_or(known) {
            return failed(format!("{problem}: {error}"));
        }
        let seconds = ROLL_CALL.as_secs();
        lost(match absent(&store, options).as_deref() {
            None => format!("{problem}, and rank 0, which keeps the store, no longer answers: {error}"),
            Some([]) => format!("{problem}: {error}"),
            Some(absent) => {
                format!("{problem}, and after {seconds} s more still waits for ranks {absent:?}: {error}")
            }
        })
    })?;
    let store = store.with_timeout(NOTICE);
    if let Err(error) = store.set(&tried(*rank), &[]) {
        tracing::debug!(%error, "the store does not learn that this rank has connected");
    }
    Ok(GlooBackend { gloo: Arc::new(gloo), rank: *rank, mailbox: Mutex::new(Mailbox::new(store)) })
}

/// Connects gloo within the deadline. gloo waits up to five times its timeout for one rank, so it runs on a helper thread, which
/// may outlive this call if a rank does not answer.
fn connect_to_all(store: &TcpStore, options: &Options, host: Option<String>) -> Result<Gloo, String> {
    let Options { rank, size, deadline, interface, .. } = options;
    let gloo_options = GlooOptions { timeout: *deadline, interface: interface.clone(), host };
    let (store, rank, size) = (store.clone(), *rank, *size);
    let (sender, receiver) = channel();
    let thread = thread::Builder::new().name("isobar-gloo".to_owned());
    let spawned = thread.spawn(move || {
        let gloo = Gloo::new(&store, "isobar", rank, size, &gloo_options);
        // If the receiver is gone, the connections end here.
        drop(sender.send(gloo));
    });
    spawned.map_err(|error| format!("cannot start a thread to connect the ranks: {error}"))?;
    match receiver.recv_timeout(*deadline) {
        Ok(gloo) => gloo.map_err(|error| error.to_string()),
        Err(_) => {
            let seconds = deadline.as_secs_f64();
            Err(format!("timed out after {seconds} s (the deadline is set by distributed.timeout_s)"))
        }
    }
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
/// same time as this one are waited for. `None` if the store does not answer.
fn absent(store: &TcpStore, options: &Options) -> Option<Vec<usize>> {
    // A connection of its own, since gloo may still wait on the other one.
    let store = match options.rank {
        0 => store.clone(),
        _ => TcpStore::client(&options.addr, options.port, &options.token, RECONNECT).ok()?,
    };
    let store = store.with_timeout(RECONNECT);
    store.set(&tried(options.rank), &[]).ok()?;
    let end = Instant::now() + ROLL_CALL;
    let mut absent = None;
    loop {
        let untried = (0..options.size).filter_map(|rank| {
            store.check(&[&tried(rank)]).map(|tried| (!tried).then_some(rank)).transpose()
        });
        match untried.collect::<isobar_rendezvous::Result<Vec<_>>>() {
            Ok(untried) if untried.is_empty() || Instant::now() > end => return Some(untried),
            Ok(untried) => absent = Some(untried),
            // Rank 0 has waited long enough and has gone, and the store with it: what was known last holds.
            Err(_) => return absent,
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Key that is set once all ranks have joined. Its value is empty, or the reason for ending the start.
const ALL: &str = "isobar/all";

/// Key of the number of ranks that have joined.
const COME: &str = "isobar/come";

/// Waits at the store until all ranks have come, and have left their addresses.
fn meet(store: &TcpStore, options: &Options, own: &str) -> Result<()> {
    let Options { rank, size, deadline, .. } = options;
    let left = |error: isobar_rendezvous::Error| {
        let problem =
            format!("rank {rank} of {size} lost rank 0, which keeps the store where ranks meet: {error}");
        Error::LostAtStart { backend: "gloo", problem }
    };
    check_alone(store, options, left)?;
    store.set(&key(*rank), own.as_bytes()).map_err(left)?;
    if store.add(COME, 1).map_err(left)? == *size as i64 && !store.check(&[ALL]).map_err(left)? {
        store.set(ALL, &[]).map_err(left)?;
    }
    let error = match store.get(ALL, *deadline) {
        Ok(problem) if problem.is_empty() => return Ok(()),
        Ok(problem) => {
            wait_until_told(store, options, *size);
            let problem = String::from_utf8_lossy(&problem).into_owned();
            return Err(Error::Start { backend: "gloo", problem });
        }
        Err(error) => error,
    };
    let missing: Vec<usize> =
        (0..*size).filter(|&rank| store.check(&[&key(rank)]).is_ok_and(|here| !here)).collect();
    wait_until_told(store, options, size - missing.len());
    match missing.is_empty() {
        true => Err(left(error)),
        false => Err(Error::Absent { backend: "gloo", rank: *rank, size: *size, missing, after: *deadline }),
    }
}

/// Rejects a second process with this rank. If not all ranks have joined yet, the start fails on all of them.
fn check_alone(
    store: &TcpStore,
    Options { rank, size, process, .. }: &Options,
    left: impl Fn(isobar_rendezvous::Error) -> Error + Copy,
) -> Result<()> {
    let key = |number: i64| format!("isobar/process/{rank}/{number}");
    let number = store.add(&format!("isobar/processes/{rank}"), 1).map_err(left)?;
    store.set(&key(number), process.as_bytes()).map_err(left)?;
    if number == 1 {
        return Ok(());
    }
    let first = store.get(&key(1), RECONNECT).map_err(left)?;
    let problem = format!(
        "two processes say that they are rank {rank} of {size}: {} and {process}; start each rank once",
        String::from_utf8_lossy(&first)
    );
    if store.add(COME, 0).map_err(left)? < *size as i64 {
        store.set(ALL, problem.as_bytes()).map_err(left)?;
    }
    Err(Error::Start { backend: "gloo", problem })
}

/// Keeps rank 0's store for up to [`ROLL_CALL`], until `ranks` ranks have read the reason.
fn wait_until_told(store: &TcpStore, options: &Options, ranks: usize) {
    let end = Instant::now() + ROLL_CALL;
    let mut told = store.add("isobar/told", 1);
    while options.rank == 0 && Instant::now() < end && told.as_ref().is_ok_and(|&told| told < ranks as i64) {
        thread::sleep(LOOK_EVERY);
        told = store.add("isobar/told", 0);
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

/// Timeout of a notice whose number is taken but whose text is missing, because its sender was lost.
const LOST_NOTICE: Duration = Duration::from_secs(2);

/// Longest time for which a rank leaves notices at a store that does not answer.
const NOTIFY: Duration = Duration::from_secs(2);

/// Timeout of a query of a rank that could not start.
const RECONNECT: Duration = Duration::from_secs(2);

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
    /// Numbers that were read, or given up.
    read: i64,
    /// Instant since which the next notice is missing: its number is taken, its text is not there.
    missing: Option<Instant>,
    looked: Instant,
    notices: Vec<Notice>,
}

impl Mailbox {
    fn new(store: TcpStore) -> Self {
        Self { store, read: 0, missing: None, looked: Instant::now(), notices: Vec::new() }
    }

    fn look(&mut self, rank: usize) -> isobar_rendezvous::Result<()> {
        let given_out = self.store.add(&format!("isobar/notices/{rank}"), 0)?;
        while self.read < given_out {
            let next = format!("isobar/notice/{rank}/{}", self.read + 1);
            if self.store.check(&[&next])? {
                let bytes = self.store.get(&next, NOTICE)?;
                self.notices.extend(Notice::from_bytes(&bytes));
            } else if self.missing.get_or_insert_with(Instant::now).elapsed() < LOST_NOTICE {
                return Ok(());
            }
            self.missing = None;
            self.read += 1;
        }
        Ok(())
    }

    fn post(&self, peer: usize, bytes: &[u8]) -> isobar_rendezvous::Result<()> {
        let number = self.store.add(&format!("isobar/notices/{peer}"), 1)?;
        self.store.set(&format!("isobar/notice/{peer}/{number}"), bytes)
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
        let end = Instant::now() + NOTIFY;
        for &peer in peers {
            if let Err(error) = mailbox.post(peer, &bytes) {
                tracing::debug!(%error, peer, "a notice could not be left");
                if Instant::now() > end {
                    return;
                }
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
        // Dropping an unfinished message would break the connection, which other operations may use still.
        self.sends.drain(..).for_each(|(work, _)| work.abandon());
        for receive in self.receives.drain(..) {
            match receive.stage {
                Stage::Head(work, _) | Stage::Body(work) => work.abandon(),
                Stage::Done => {}
            }
        }
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
            process: format!("process {rank} on a host"),
            deadline: Duration::from_secs(5),
            interface: None,
        }
    }

    fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    /// It meets the others, and goes before it connects to them: no watchdog has seen it yet.
    #[test]
    fn a_rank_lost_between_the_rendezvous_and_the_connections_is_named() {
        let port = free_port();
        let told: Vec<String> = thread::scope(|scope| {
            let others = [0, 2].map(|rank| scope.spawn(move || connect(&options(port, rank)).err()));
            let lost = options(port, 1);
            let store = TcpStore::client(&lost.addr, port, &lost.token, Duration::from_secs(20)).unwrap();
            meet(&store, &lost, "127.0.0.1").unwrap();
            drop(store);
            others.map(|rank| rank.join().unwrap().unwrap().to_string()).to_vec()
        });
        for error in told {
            assert!(error.contains("after 5 s more still waits for ranks [1]"), "{error}");
        }
    }

    /// It has said where it listens, and accepts no connection.
    #[test]
    fn a_rank_that_hangs_while_the_others_connect_is_named_by_the_deadline() {
        let (port, deadline) = (free_port(), Duration::from_secs(10));
        let options = |rank| Options { size: 2, deadline, ..options(port, rank) };
        // The rank is at a store of its own, so that it never learns of rank 0.
        let elsewhere = TcpStore::server(&options(0).listen, 0, &Token::none(), deadline).unwrap();
        let own = elsewhere.clone();
        // gloo's rank of the lower address waits for the other one.
        let hangs = thread::spawn(move || {
            drop(Gloo::new(&own, "isobar", 1, 2, &GlooOptions::host("127.0.0.2", Duration::from_secs(5))));
        });
        let address = elsewhere.get("isobar/0/1", Duration::from_secs(60)).unwrap();
        thread::scope(|scope| {
            let waits = scope.spawn(|| connect(&options(0)).err());
            let hanging = options(1);
            let store =
                TcpStore::client(&hanging.addr, port, &hanging.token, Duration::from_secs(20)).unwrap();
            store.set("isobar/0/1", &address).unwrap();
            meet(&store, &hanging, "127.0.0.2").unwrap();
            let begun = Instant::now();
            let error = waits.join().unwrap().unwrap().to_string();
            assert!(
                begun.elapsed() < deadline + ROLL_CALL + Duration::from_secs(10),
                "{:?}",
                begun.elapsed()
            );
            assert!(error.contains("still waits for ranks [1]: timed out after 10 s"), "{error}");
        });
        hangs.join().unwrap();
    }

    #[test]
    fn two_processes_of_one_rank_are_named_on_all_ranks() {
        let (port, deadline) = (free_port(), Duration::from_secs(60));
        let options =
            |rank, process: &str| Options { process: process.to_owned(), deadline, ..options(port, rank) };
        let begun = Instant::now();
        let told: Vec<String> = thread::scope(|scope| {
            let ranks = [(0, "process 5 on a"), (1, "process 6 on a"), (1, "process 7 on b")];
            let ranks = ranks.map(|(rank, process)| {
                let options = options(rank, process);
                scope.spawn(move || connect(&options).err())
            });
            ranks.map(|rank| rank.join().unwrap().unwrap().to_string()).to_vec()
        });
        assert!(begun.elapsed() < deadline, "{:?}", begun.elapsed());
        for error in told {
            for part in ["two processes say that they are rank 1 of 3", "process 6 on a", "process 7 on b"] {
                assert!(error.contains(part), "{error}");
            }
        }
    }

    /// The receives of the refused call are never met.
    #[test]
    fn a_group_stays_usable_long_after_a_call_that_one_rank_refused() {
        let (port, deadline) = (free_port(), Duration::from_secs(5));
        thread::scope(|scope| {
            for rank in 0..2 {
                scope.spawn(move || {
                    let options = Options { size: 2, deadline, ..options(port, rank) };
                    let group = crate::gloo::world(&options).unwrap();
                    let ranks = if rank == 0 { [0, 1] } else { [1, 1] };
                    let error = group.subgroup("pair", &ranks).unwrap_err().to_string();
                    assert!(error.contains("[1, 1]"), "{error}");
                    thread::sleep(2 * deadline + Duration::from_secs(1));
                    let all = group.all_gather_bytes(&[rank as u8]).unwrap();
                    assert_eq!(all, [[0], [1]]);
                });
            }
        });
    }

    /// A rank may end between its two requests, or the first may time out.
    #[test]
    fn a_notice_that_was_lost_does_not_hold_up_later_ones() {
        let store = TcpStore::server(&[Ipv4Addr::LOCALHOST.into()], 0, &Token::none(), NOTICE).unwrap();
        let mut mailbox = Mailbox::new(store);
        mailbox.store.add("isobar/notices/1", 1).unwrap();
        let (context, sequence) = Notice::ALL;
        let (problem, since) = ("a file is missing".to_owned(), Instant::now());
        let notice = Notice { context, sequence, from: 2, begun: Vec::new(), problem, since };
        mailbox.post(1, &notice.to_bytes()).unwrap();
        let end = Instant::now() + Duration::from_secs(30);
        while mailbox.notices.is_empty() && Instant::now() < end {
            mailbox.look(1).unwrap();
            thread::sleep(LOOK_EVERY);
        }
        assert_eq!(mailbox.notices[0].problem, notice.problem);
        mailbox.post(1, &notice.to_bytes()).unwrap();
        mailbox.look(1).unwrap();
        assert_eq!(mailbox.notices.len(), 2);
    }
}
