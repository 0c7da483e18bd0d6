use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use crate::client::after;
use crate::table;
use crate::wire::{self, Kind, LONGEST, Message};
use crate::{TcpStore, Token};

const TIMEOUT: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(200);
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn token() -> Token {
    Token::new(b"the token of this job")
}

fn server() -> TcpStore {
    TcpStore::server(&[HERE], 0, &token(), TIMEOUT).unwrap()
}

fn client(of: &TcpStore) -> TcpStore {
    TcpStore::client("127.0.0.1", of.port(), &token(), TIMEOUT).unwrap()
}

#[test]
fn the_store_keeps_counts_and_forgets() {
    let store = server();
    let other = client(&store);
    store.set("key", b"a\0b").unwrap();
    store.set("empty", b"").unwrap();
    assert_eq!(other.get("key", TIMEOUT).unwrap(), b"a\0b");
    assert_eq!(other.get("empty", TIMEOUT).unwrap(), b"");
    assert_eq!((store.add("n", 2).unwrap(), other.add("n", -5).unwrap()), (2, -3));
    assert!(other.check(&["key", "n"]).unwrap());
    assert!(other.delete("key").unwrap() && !store.delete("key").unwrap());
    assert!(!store.check(&["key", "n"]).unwrap());
    other.wait(&["n", "empty"], TIMEOUT).unwrap();
    let large = vec![7; 3 << 20];
    other.set("large", &large).unwrap();
    assert_eq!(other.get("large", TIMEOUT).unwrap(), large);
    for store in [&store, &other] {
        assert!(store.add("empty", 1).unwrap_err().to_string().contains("no number"));
        assert!(store.set("too large", &vec![0; LONGEST]).unwrap_err().to_string().contains("16 MiB"));
        assert_eq!(store.add("n", 0).unwrap(), -3);
    }
}

#[test]
fn the_store_waits_and_times_out() {
    let store = server();
    let (started, start) = mpsc::channel();
    let late = client(&store);
    let waiting = thread::spawn(move || {
        started.send(()).unwrap();
        late.get("late", TIMEOUT).unwrap()
    });
    start.recv_timeout(TIMEOUT).unwrap();
    store.set("late", b"now").unwrap();
    assert_eq!(waiting.join().unwrap(), b"now");
    for store in [&store, &client(&store)] {
        let error = store.wait(&["late", "never"], SHORT).unwrap_err().to_string();
        assert!(error.contains("timeout: the key `never` was not set within 0.2 s"), "{error}");
        assert!(store.get("never", SHORT).is_err());
        store.set("after", b"an error").unwrap();
    }
}

/// A server that is stopped for a while: calls that gave up do not take the answers of later ones.
#[test]
fn a_late_answer_is_nobody_elses() {
    let listener = std::net::TcpListener::bind((HERE, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let (go_on, stopped) = mpsc::channel::<()>();
    let serving = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let line = wire::Until { stream: &stream, end: after(TIMEOUT) };
        assert_eq!(wire::receive(line, &token()).unwrap(), wire::Met::Friend);
        stopped.recv_timeout(TIMEOUT).unwrap();
        for number in [1, 2] {
            stream.write_all(&Message::new(Kind::Done, number, &[]).encode().unwrap()).unwrap();
        }
        stopped.recv_timeout(TIMEOUT).unwrap();
    });
    let store = TcpStore::client("127.0.0.1", port, &token(), TIMEOUT).unwrap();
    let error = store.clone().with_timeout(SHORT).add("n", 1).unwrap_err().to_string();
    assert!(error.contains("timeout: no answer within 0.2 s"), "{error}");
    go_on.send(()).unwrap();
    assert_eq!(store.add("n", 1).unwrap(), 2);
    go_on.send(()).unwrap();
    serving.join().unwrap();
    assert!(store.add("n", 1).is_err());
}

#[test]
fn a_store_that_is_not_there_is_an_error() {
    let free_port = server().port();
    let error = TcpStore::client("127.0.0.1", free_port, &token(), SHORT).unwrap_err().to_string();
    assert!(error.contains("timeout") && error.contains(&format!("127.0.0.1:{free_port}")), "{error}");
    let taken = server();
    assert!(TcpStore::server(&[HERE], taken.port(), &token(), TIMEOUT).is_err());
    assert!(TcpStore::server(&[], 0, &token(), TIMEOUT).is_err());
    // An address of documentation, which no machine has.
    let error = TcpStore::server(&[[192, 0, 2, 1].into()], 0, &token(), TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("cannot listen on 192.0.2.1:0"), "{error}");
}

#[test]
fn the_end_of_a_store_is_told_and_frees_its_port() {
    let store = server();
    let (port, other) = (store.port(), client(&store));
    let waiting = thread::spawn(move || other.get("never", TIMEOUT).unwrap_err().to_string());
    thread::sleep(SHORT);
    drop(store);
    let error = waiting.join().unwrap();
    assert!(error.contains("closed") || error.contains("gone"), "{error}");
    TcpStore::server(&[HERE], port, &token(), TIMEOUT).unwrap();
}

#[test]
fn a_server_that_comes_late_is_waited_for() {
    let port = server().port();
    let waiting = thread::spawn(move || TcpStore::client("127.0.0.1", port, &token(), TIMEOUT));
    thread::sleep(SHORT);
    let store = TcpStore::server(&[HERE], port, &token(), TIMEOUT).unwrap();
    waiting.join().unwrap().unwrap().set("here", b"").unwrap();
    assert!(store.check(&["here"]).unwrap());
}

#[test]
fn only_the_addresses_asked_for_listen() {
    let store = server();
    let other = Ipv4Addr::new(127, 0, 0, 2);
    assert!(TcpStream::connect((other, store.port())).is_err());
    let both = TcpStore::server(&[HERE, other.into()], 0, &token(), TIMEOUT).unwrap();
    for address in ["127.0.0.1", "127.0.0.2"] {
        TcpStore::client(address, both.port(), &token(), TIMEOUT).unwrap().set(address, b"").unwrap();
    }
    assert!(both.check(&["127.0.0.1", "127.0.0.2"]).unwrap());
}

#[test]
fn who_does_not_know_the_token_is_turned_away_at_once() {
    let store = server();
    for wrong in [Token::new(b"the token of that job"), Token::none()] {
        let begun = Instant::now();
        let error =
            TcpStore::client("127.0.0.1", store.port(), &wrong, 10 * TIMEOUT).unwrap_err().to_string();
        assert!(error.contains("does not know this rank's token"), "{error}");
        assert!(begun.elapsed() < 5 * TIMEOUT, "it was turned away after {:?}", begun.elapsed());
    }
    // A server that does not know it is told nothing, and is not believed.
    let open = TcpStore::server(&[HERE], 0, &Token::none(), TIMEOUT).unwrap();
    assert!(TcpStore::client("127.0.0.1", open.port(), &token(), TIMEOUT).is_err());
    assert!(!format!("{:?}", token()).contains("job"));
}

/// A recorded handshake cannot be replayed.
#[test]
fn a_meeting_cannot_be_played_again() {
    let store = server();
    let stream = TcpStream::connect((HERE, store.port())).unwrap();
    let mut heard = b"isobar-store-002".to_vec();
    let own = Token::nonce().unwrap();
    heard.extend(own);
    let mut line = wire::Until { stream: &stream, end: after(TIMEOUT) };
    line.write_all(&heard).unwrap();
    let mut answer = [0; 48];
    line.read_exact(&mut answer).unwrap();
    let theirs: [u8; 32] = answer.strip_prefix(b"isobar-store-002").unwrap().try_into().unwrap();
    let proof = token().proof("client of the store", &[own, theirs]).to_bytes();
    line.write_all(&proof).unwrap();
    let mut verdict = [0];
    line.read_exact(&mut verdict).unwrap();
    assert_eq!(verdict, [1]);
    let again = TcpStream::connect((HERE, store.port())).unwrap();
    let mut line = wire::Until { stream: &again, end: after(TIMEOUT) };
    line.write_all(&heard).unwrap();
    line.read_exact(&mut answer).unwrap();
    line.write_all(&proof).unwrap();
    let mut rest = Vec::new();
    line.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, [0]);
}

/// A port that another program keeps ends the wait long before the timeout.
#[test]
fn a_port_of_another_program_is_an_error() {
    type Answer = fn(&mut TcpStream);
    let answers: [(Answer, &str); 3] = [
        (|_| {}, "nothing answers there"),
        (
            |stream| drop(stream.write_all(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")),
            "what answers there is no store of Isobar",
        ),
        (|stream| drop(stream.shutdown(Shutdown::Both)), "the connection ends at once"),
    ];
    let waiting = answers.map(|(answer, words)| {
        let listener = std::net::TcpListener::bind((HERE, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            let mut kept = Vec::new();
            while let Ok((mut stream, _)) = listener.accept() {
                answer(&mut stream);
                kept.push(stream);
            }
        });
        thread::spawn(move || {
            let begun = Instant::now();
            let error = TcpStore::client("127.0.0.1", port, &token(), 10 * TIMEOUT).unwrap_err().to_string();
            let parts = [words, "another program seems to use this port", &format!("127.0.0.1:{port}")];
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
            // Where nothing answers, the store itself may hang: that is a lost rank, as any timeout.
            assert_eq!(
                error.contains("timeout"),
                words != "what answers there is no store of Isobar",
                "{error}"
            );
            assert!(begun.elapsed() < 5 * TIMEOUT, "it ended after {:?}", begun.elapsed());
        })
    });
    for waiting in waiting {
        waiting.join().unwrap();
    }
}

#[test]
fn strangers_who_say_nothing_hold_nobody_up() {
    let store = server();
    let strangers: Vec<_> = (0..20).map(|_| TcpStream::connect((HERE, store.port())).unwrap()).collect();
    let begun = Instant::now();
    client(&store).set("key", b"value").unwrap();
    // One after the other they would hold it up for twenty times the time of an introduction.
    assert!(begun.elapsed() < Duration::from_secs(50), "a friend waited {:?}", begun.elapsed());
    // After a while they are sent away.
    for stranger in strangers {
        let mut line = wire::Until { stream: &stranger, end: after(TIMEOUT) };
        assert_eq!(line.read(&mut [0]).unwrap_or_default(), 0);
    }
}

/// More of them than the server keeps, all open, and more while a friend comes.
#[test]
fn a_flood_of_strangers_keeps_no_friend_out() {
    let store = server();
    let address = (HERE, store.port());
    let mut flood: Vec<_> = (0..600).map(|_| TcpStream::connect(address).unwrap()).collect();
    let (done, goes_on) = mpsc::channel::<()>();
    let flooding = thread::spawn(move || {
        while goes_on.recv_timeout(Duration::from_millis(2)) == Err(mpsc::RecvTimeoutError::Timeout) {
            flood.extend(TcpStream::connect(address));
        }
    });
    for _ in 0..20 {
        client(&store).set("key", b"value").unwrap();
    }
    done.send(()).unwrap();
    flooding.join().unwrap();
}

#[test]
fn what_is_no_request_ends_its_connection_alone() {
    let store = server();
    let bytes: [&[u8]; 4] =
        [b"GET / HTTP/1.1\r\n\r\n", &[0; 200], &[255; 200], b"isobar-store-001 and more of it ............."];
    for bytes in bytes {
        let mut stranger = TcpStream::connect((HERE, store.port())).unwrap();
        stranger.write_all(bytes).unwrap();
        // The store may have ended the connection already.
        let _ = stranger.shutdown(Shutdown::Write);
        let mut line = wire::Until { stream: &stranger, end: after(TIMEOUT) };
        let _ = line.read_to_end(&mut Vec::new());
    }
    // A friend whose messages are none: too long, of an unknown kind, cut off in a part.
    for bytes in [
        &[255; 4][..],
        &[9, 0, 0, 0, 77, 0, 0, 0, 0, 0, 0, 0, 0],
        &[10, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 9],
    ] {
        let stream = TcpStream::connect((HERE, store.port())).unwrap();
        let introduced = wire::introduce(wire::Until { stream: &stream, end: after(TIMEOUT) }, &token());
        assert_eq!(introduced.unwrap(), wire::Met::Friend);
        let mut line = wire::Until { stream: &stream, end: after(TIMEOUT) };
        line.write_all(bytes).unwrap();
        assert_eq!(line.read(&mut [0]).unwrap_or_default(), 0);
    }
    client(&store).set("key", b"value").unwrap();
}

proptest! {
    #[test]
    fn messages_are_read_as_they_were_written(
        kind in 1u8..11, number: i64, parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..4), cut in 0usize..60,
    ) {
        let message = Message { kind: Kind::of(kind).unwrap(), number, parts };
        let bytes = message.encode().unwrap();
        let cut = cut.min(bytes.len() - 1);
        let mut incoming = bytes[..cut].to_vec();
        prop_assert_eq!(wire::take(&mut incoming).unwrap(), None);
        incoming.extend(&bytes[cut..]);
        incoming.push(1);
        prop_assert_eq!(wire::take(&mut incoming).unwrap(), Some(message));
        prop_assert_eq!(incoming, [1]);
    }

    /// Whatever a request holds: an answer, and no panic. (No waits: they would take as long as they say.)
    #[test]
    fn no_bytes_make_the_store_panic(bytes in prop::collection::vec(any::<u8>(), 0..60), kind in 0u8..12, number: i64) {
        let mut incoming = bytes.clone();
        let _ = wire::take(&mut incoming);
        let mut all = vec![kind];
        all.extend(number.to_le_bytes());
        all.extend(&bytes);
        if let Some(mut request) = Message::decode(&all) {
            if matches!(request.kind, Kind::Get | Kind::Wait) {
                request.number = request.number.min(0);
            }
            let table = table::Table::default();
            for _ in 0..2 {
                prop_assert!(matches!(table.answer(&request).kind, Kind::Done | Kind::Missing | Kind::Refused));
            }
        }
    }
}
