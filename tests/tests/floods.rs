//! Outsiders at the ports of a run while its ranks start: floods of connections, and handshakes of real ranks played again.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::VecDeque;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use isobar_harness::{Launch, Outcome, curve::losses, workspace};
use isobar_rendezvous::FreePort;
use rstest::rstest;
use tempfile::tempdir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");

/// Secret of a job.
const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// The first words of a rank at the store.
const MAGIC: &[u8] = b"isobar-store-002";

/// Connections that an outsider holds open at a time.
const HELD: usize = 600;

/// Descriptors that rank 0 may have besides those of a calm run: as many strangers as its store and its watchdog keep.
const STRANGERS: usize = 2 * 256 + 40;

/// Memory that rank 0 may need besides that of a calm run, in KiB.
const MEMORY: u64 = 96 << 10;

/// A run of 12 steps on `ranks` ranks; says of rank 0 how many descriptors and how much memory it had at most.
fn train(ranks: usize, port: u16, token: Option<&str>, output: &Path, script: &str) -> Outcome {
    const WATCHED: &str = r#"
        if [ $RANK = 0 ]; then
            "$@" & pid=$!; echo $pid >"$PID_FILE"; most=0; memory=0
            while kill -0 $pid 2>/dev/null; do
                now=$(ls /proc/$pid/fd 2>/dev/null | wc -l); [ $now -gt $most ] && most=$now
                now=$(sed -n 's/VmHWM:[^0-9]*\([0-9]*\).*/\1/p' /proc/$pid/status 2>/dev/null); memory=${now:-$memory}
                sleep 0.1
            done
            wait $pid; code=$?; echo descriptors $most; echo memory $memory; echo code $code
        else
            "$@"; echo code $?
        fi"#;
    let sets = [
        "data.path=tests/data/darcy_excerpt.h5",
        "data.validation_samples=0",
        "run.name=run",
        &format!("run.output={}", output.display()),
        "train.max_steps=12",
        "train.epochs=100",
        "train.batch_size=4",
        "metrics.every_steps=1",
        "distributed.timeout_s=120",
        "model.embed_dim=16",
        "model.depth=1",
        "model.num_blocks=2",
        "model.patch_size=[8, 8]",
    ];
    let mut launch = Launch::plain(ranks, "sh")
        .current_dir(workspace())
        .deadline(Duration::from_secs(240))
        .env("MASTER_PORT", port.to_string())
        .env("PID_FILE", output.join("pid"))
        .args(["-c", &format!("{script}\n{WATCHED}"), "sh", ISOBAR, "train", "configs/darcy_afno.toml"])
        .args(sets.iter().flat_map(|set| ["--set", set]));
    if let Some(token) = token {
        launch = launch.env("ISOBAR_DISTRIBUTED_TOKEN", token);
    }
    launch.run().unwrap()
}

fn number(outcome: &Outcome, word: &str) -> u64 {
    let lines = outcome.ranks[0].stdout.lines();
    lines
        .filter_map(|line| line.strip_prefix(word)?.trim().parse().ok())
        .next_back()
        .unwrap_or_else(|| panic!("{outcome}"))
}

#[track_caller]
fn ends_well(outcome: &Outcome) {
    for rank in &outcome.ranks {
        assert!(rank.stdout.contains("code 0\n"), "{outcome}");
        for word in ["panicked at", "no watchdog", "timed out", "lost"] {
            assert!(!rank.stderr.contains(word), "{word:?} in {outcome}");
        }
    }
}

/// A port below those that the system gives to connections.
fn free_port() -> u16 {
    FreePort::hold().unwrap().port()
}

/// Bytes that an outsider sends.
#[derive(Debug, Clone, Copy)]
enum Flood {
    /// Nothing; the connections stay open.
    Silence,
    /// Bytes of no protocol.
    Garbage,
    /// Lengths of 4 GiB, and some bytes behind them.
    Lengths,
    /// The first half of a handshake; the connections stay open.
    Half,
    /// One byte after the other, slowly.
    Drip,
    /// Connections that are closed at once.
    Closed,
}

const FLOODS: [Flood; 6] =
    [Flood::Silence, Flood::Garbage, Flood::Lengths, Flood::Half, Flood::Drip, Flood::Closed];

/// Threads that connect to a port all the time, until this is dropped.
struct Outsiders {
    over: Arc<AtomicBool>,
    made: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
}

impl Outsiders {
    /// Starts one thread for each kind, each of which makes up to `rate` connections a second to the address that `target`
    /// gives, once it gives one.
    fn start(
        kinds: &[Flood],
        rate: u32,
        target: impl Fn() -> Vec<SocketAddr> + Send + Clone + 'static,
    ) -> Self {
        let (over, made) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let threads = kinds.iter().map(|&kind| {
            let (over, made, target) = (over.clone(), made.clone(), target.clone());
            thread::spawn(move || flood(kind, rate, &over, &made, target))
        });
        let threads = threads.collect();
        Self { over, made, threads }
    }

    /// Ends them, and returns the number of connections that were made.
    fn end(self) -> usize {
        self.over.store(true, Ordering::SeqCst);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        self.made.load(Ordering::SeqCst)
    }
}

fn flood(
    kind: Flood,
    rate: u32,
    over: &AtomicBool,
    made: &AtomicUsize,
    target: impl Fn() -> Vec<SocketAddr>,
) {
    let mut held: VecDeque<TcpStream> = VecDeque::new();
    let mut targets = Vec::new();
    let mut looked: Option<Instant> = None;
    while !over.load(Ordering::SeqCst) {
        if looked.is_none_or(|at| at.elapsed() > Duration::from_millis(50)) {
            targets = target();
            looked = Some(Instant::now());
        }
        for address in &targets {
            let Ok(mut stream) = TcpStream::connect_timeout(address, Duration::from_millis(200)) else {
                continue;
            };
            made.fetch_add(1, Ordering::SeqCst);
            let _ = stream.set_write_timeout(Some(Duration::from_millis(50)));
            let first: Vec<u8> = match kind {
                Flood::Silence | Flood::Closed => Vec::new(),
                Flood::Garbage => {
                    (0..200_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
                }
                Flood::Lengths => [&[255; 4][..], &[b'{'; 4000]].concat(),
                Flood::Half => [MAGIC, &[7; 32]].concat(),
                Flood::Drip => MAGIC[..1].to_vec(),
            };
            // It may have been closed already.
            let _ = stream.write_all(&first);
            if !matches!(kind, Flood::Closed) {
                held.push_back(stream);
            }
        }
        if matches!(kind, Flood::Drip) {
            held.iter_mut().for_each(|stream| drop(stream.write(b"i")));
        }
        while held.len() > HELD / FLOODS.len() {
            held.pop_front();
        }
        thread::sleep(Duration::from_secs(1) / rate);
    }
}

/// Ranks meet at the store, and train to the same losses, while outsiders make hundreds of connections a second to it.
#[rstest]
#[case::silence(&[Flood::Silence; 4], 200)]
#[case::garbage(&[Flood::Garbage; 2], 200)]
#[case::lengths(&[Flood::Lengths; 2], 200)]
#[case::half_a_handshake(&[Flood::Half; 4], 200)]
#[case::everything(&FLOODS, 100)]
fn a_flood_of_the_store_keeps_no_rank_out(
    #[case] kinds: &[Flood],
    #[case] rate: u32,
    #[values(false, true)] token: bool,
) {
    let folder = tempdir().unwrap();
    let [calm, flooded] = ["calm", "flooded"].map(|name| folder.path().join(name));
    [&calm, &flooded].into_iter().for_each(|folder| fs::create_dir(folder).unwrap());
    let token = token.then_some(TOKEN);
    let before = train(3, free_port(), token, &calm, "");
    ends_well(&before);
    let port = free_port();
    let outsiders = Outsiders::start(kinds, rate, move || vec![([127, 0, 0, 1], port).into()]);
    // The outsiders are there before rank 0 is, and the other ranks come into the flood.
    let outcome = train(3, port, token, &flooded, "[ $RANK = 0 ] || sleep 1");
    let made = outsiders.end();
    ends_well(&outcome);
    assert_eq!(losses(&flooded.join("run")), losses(&calm.join("run")));
    assert!(made > 200, "{made} connections in {:?}", outcome.wall);
    stays_small(&before, &outcome);
}

/// The descriptors and memory of rank 0 are bounded.
#[track_caller]
fn stays_small(calm: &Outcome, flooded: &Outcome) {
    let [before, during] = [calm, flooded].map(|outcome| number(outcome, "descriptors"));
    assert!(during <= before + STRANGERS as u64, "{during} descriptors, and {before} in a calm run");
    let [before, during] = [calm, flooded].map(|outcome| number(outcome, "memory"));
    assert!(during <= before + MEMORY, "{during} KiB, and {before} in a calm run");
}

/// The ports that a process listens at.
fn listens_at(pid: u32) -> Vec<SocketAddr> {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let sockets: Vec<String> = links
        .filter_map(|link| {
            let target = fs::read_link(link.path()).ok()?;
            Some(target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
        })
        .collect();
    let table = fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap_or_default();
    let ports = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let listens = fields.get(3) == Some(&"0A")
            && sockets.iter().any(|inode| fields.get(9) == Some(&inode.as_str()));
        let port = fields.get(1)?.rsplit_once(':')?.1;
        listens.then(|| u16::from_str_radix(port, 16).ok())?
    });
    ports.map(|port| ([127, 0, 0, 1], port).into()).collect()
}

/// Every port of rank 0 from the moment that it listens: the store's, the watchdog's, and those of gloo.
#[test]
fn a_flood_of_every_port_of_rank_0_changes_nothing() {
    let folder = tempdir().unwrap();
    let [calm, flooded] = ["calm", "flooded"].map(|name| folder.path().join(name));
    [&calm, &flooded].into_iter().for_each(|folder| fs::create_dir(folder).unwrap());
    let before = train(3, free_port(), None, &calm, "");
    ends_well(&before);
    let file = flooded.join("pid");
    let target = move || {
        let pid = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
        pid.map(listens_at).unwrap_or_default()
    };
    let outsiders = Outsiders::start(&[Flood::Silence, Flood::Garbage, Flood::Lengths], 100, target);
    let outcome = train(3, free_port(), None, &flooded, "");
    let made = outsiders.end();
    ends_well(&outcome);
    assert_eq!(losses(&flooded.join("run")), losses(&calm.join("run")));
    assert!(made > 100, "{made} connections in {:?}", outcome.wall);
}

/// A proxy before the store, which records what a rank says to it.
struct Recorder {
    port: u16,
    said: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Recorder {
    fn start(store: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let said: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        let all = said.clone();
        thread::spawn(move || {
            for rank in listener.incoming().map_while(Result::ok) {
                // Without a server the rank comes again.
                let Ok(server) = TcpStream::connect(("127.0.0.1", store)) else { continue };
                let at = {
                    let mut all = all.lock().unwrap();
                    all.push(Vec::new());
                    all.len() - 1
                };
                let (mut back, mut to_rank) = (server.try_clone().unwrap(), rank.try_clone().unwrap());
                thread::spawn(move || {
                    let _ = std::io::copy(&mut back, &mut to_rank);
                    let _ = to_rank.shutdown(Shutdown::Both);
                });
                let (all, mut rank, mut server) = (all.clone(), rank, server);
                thread::spawn(move || {
                    let mut buffer = [0; 4096];
                    while let Ok(length @ 1..) = rank.read(&mut buffer) {
                        all.lock().unwrap()[at].extend(&buffer[..length]);
                        if server.write_all(&buffer[..length]).is_err() {
                            break;
                        }
                    }
                    let _ = server.shutdown(Shutdown::Both);
                });
            }
        });
        Self { port, said }
    }

    /// Bytes of the connections that got beyond the handshake.
    fn recorded(&self) -> Vec<Vec<u8>> {
        let beyond = MAGIC.len() + 32 + 32;
        self.said.lock().unwrap().iter().filter(|said| said.len() > beyond).cloned().collect()
    }
}

/// Plays recorded bytes to the store again and again; counts how often it was turned away, and let in.
fn replay(port: u16, recorded: impl Fn() -> Vec<Vec<u8>>, over: &AtomicBool) -> (usize, usize) {
    let (mut refused, mut let_in) = (0, 0);
    while !over.load(Ordering::SeqCst) {
        for said in recorded() {
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { continue };
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            // The store says the same word first, then its challenge.
            let mut challenge = [0; MAGIC.len() + 32];
            let (hello, rest) = said.split_at(MAGIC.len() + 32);
            if stream.write_all(hello).is_err() || stream.read_exact(&mut challenge).is_err() {
                continue;
            }
            // The proof, and all that the rank asked for.
            let mut verdict = [9];
            if stream.write_all(rest).is_ok() && stream.read_exact(&mut verdict).is_ok() {
                match verdict {
                    [0] => refused += 1,
                    _ => let_in += 1,
                }
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
    (refused, let_in)
}

/// A recorded handshake of a real rank is rejected when it is replayed: to the store of a later job before its ranks
/// have come, and to that of the same job afterwards.
#[rstest]
fn a_recorded_handshake_is_rejected(#[values(false, true)] token: bool) {
    let folder = tempdir().unwrap();
    let token = token.then_some(TOKEN);
    let ports = [free_port(), free_port()];
    let mut curves = Vec::new();
    let mut earlier: Vec<Vec<u8>> = Vec::new();
    for (run, port) in ports.into_iter().enumerate() {
        let output = folder.path().join(run.to_string());
        fs::create_dir(&output).unwrap();
        let recorder = Arc::new(Recorder::start(port));
        let over = Arc::new(AtomicBool::new(false));
        let (source, ends, known) = (recorder.clone(), over.clone(), earlier.clone());
        let replaying = thread::spawn(move || {
            replay(port, || known.iter().cloned().chain(source.recorded()).collect(), &ends)
        });
        let script =
            format!("[ $RANK = 0 ] || export MASTER_PORT={}; [ $RANK = 0 ] || sleep {run}", recorder.port);
        let outcome = train(3, port, token, &output, &script);
        over.store(true, Ordering::SeqCst);
        let (refused, let_in) = replaying.join().unwrap();
        ends_well(&outcome);
        earlier = recorder.recorded();
        assert!(earlier.len() >= 2, "{} connections of ranks were recorded", earlier.len());
        assert_eq!(let_in, 0, "of {refused} and {let_in}");
        assert!(refused > 20, "{refused} handshakes were played again in {:?}", outcome.wall);
        curves.push(losses(&output.join("run")));
    }
    assert_eq!(curves[0], curves[1]);
}
