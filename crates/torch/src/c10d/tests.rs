use std::net::Ipv4Addr;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use isobar_rendezvous::{TcpStore, Token};
use tch::{Device, Kind, Tensor};

use super::*;
use crate::memory;

const TIMEOUT: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(200);

fn server() -> TcpStore {
    TcpStore::server(&[Ipv4Addr::LOCALHOST.into()], 0, &Token::none(), TIMEOUT).unwrap()
}

fn bytes(data: &[u8]) -> Tensor {
    memory::from_vec(data.to_vec(), &[data.len() as i64]).unwrap()
}

/// One of `size` ranks, which meet at the store of that port.
fn connected(port: u16, rank: usize, size: usize, timeout: Duration) -> Gloo {
    let store = TcpStore::client("127.0.0.1", port, &Token::none(), TIMEOUT).unwrap();
    Gloo::new(&store, "world", rank, size, &GlooOptions::host("127.0.0.1", timeout)).unwrap()
}

/// Runs `body` as each rank of a gloo group, in threads with their own connections.
fn ranks(size: usize, body: impl Fn(&Gloo) + Sync) {
    let store = server();
    let port = store.port();
    thread::scope(|scope| {
        for rank in 0..size {
            let body = &body;
            scope.spawn(move || {
                let gloo = connected(port, rank, size, TIMEOUT);
                assert_eq!((gloo.rank(), gloo.size()), (rank, size));
                body(&gloo);
                gloo.barrier().unwrap().wait(TIMEOUT).unwrap();
            });
        }
    });
}

#[test]
fn bytes_go_from_rank_to_rank() {
    for size in [2, 3] {
        ranks(size, |gloo| {
            let (next, last) = ((gloo.rank() + 1) % size, (gloo.rank() + size - 1) % size);
            for len in [0, 1, 100_000] {
                let sent = bytes(&vec![gloo.rank() as u8; len]);
                let received = bytes(&vec![255; len]);
                let mut recv = gloo.recv(&received, last, 7).unwrap();
                let mut send = gloo.send(&sent, next, 7).unwrap();
                if gloo.rank() == 0 {
                    while !recv.is_completed().unwrap() {
                        thread::yield_now();
                    }
                }
                recv.wait(TIMEOUT).unwrap();
                send.wait(TIMEOUT).unwrap();
                assert!(recv.is_completed().unwrap());
                assert_eq!(memory::to_vec::<u8>(&received).unwrap(), vec![last as u8; len]);
            }
        });
    }
}

#[test]
fn uneven_and_empty_parts_are_exchanged() {
    ranks(3, |gloo| {
        // Rank i sends i·j bytes to rank j, so that rank 0 sends and receives nothing.
        let counts: Vec<i64> = (0..3).map(|peer| (gloo.rank() * peer) as i64).collect();
        let total = counts.iter().sum::<i64>();
        let output = bytes(&vec![255; total as usize]);
        let input = bytes(&vec![gloo.rank() as u8; total as usize]);
        let mut work = gloo.all_to_all(&output, &input, &counts, &counts).unwrap();
        while !work.is_completed().unwrap() {
            thread::yield_now();
        }
        work.wait(TIMEOUT).unwrap();
        let expected: Vec<u8> = (0..3u8).flat_map(|peer| vec![peer; gloo.rank() * peer as usize]).collect();
        assert_eq!(memory::to_vec::<u8>(&output).unwrap(), expected);
    });
}

#[test]
fn reductions() {
    ranks(3, |gloo| {
        let own = gloo.rank() as f64 + 1.0;
        let expected =
            [(ReduceOp::Sum, 6.0), (ReduceOp::Product, 6.0), (ReduceOp::Min, 1.0), (ReduceOp::Max, 3.0)];
        for (op, value) in expected {
            let t = Tensor::full([5], own, (Kind::Float, Device::Cpu));
            gloo.all_reduce(&t, op).unwrap().wait(TIMEOUT).unwrap();
            assert_eq!(memory::to_vec::<f32>(&t).unwrap(), [value as f32; 5]);
        }
    });
}

#[test]
fn wrong_arguments_are_errors() {
    ranks(2, |gloo| {
        let t = Tensor::zeros([4, 4], (Kind::Uint8, Device::Cpu));
        assert!(gloo.send(&t.tr(), 1 - gloo.rank(), 0).unwrap_err().to_string().contains("contiguous"));
        assert!(gloo.send(&t, gloo.rank(), 0).unwrap_err().to_string().contains("no peer"));
        assert!(gloo.recv(&t, 2, 0).is_err());
        assert!(gloo.recv(&t, 1 - gloo.rank(), u32::MAX).is_err());
        assert!(gloo.all_to_all(&t, &t, &[4], &[4]).is_err());
        assert!(gloo.all_to_all(&t, &t, &[1, 1], &[2, 2]).is_err());
    });
    let options = GlooOptions { timeout: SHORT, interface: Some("no-such-interface".into()), host: None };
    assert!(Gloo::new(&server(), "a", 0, 1, &options).is_err());
    assert!(Gloo::new(&server(), "a", 1, 1, &options).unwrap_err().to_string().contains("rank 1"));
}

#[test]
fn a_rank_that_does_not_come_is_an_error() {
    let store = server();
    let error = Gloo::new(&store, "a", 0, 2, &GlooOptions::host("127.0.0.1", SHORT));
    assert!(error.is_err());
}

#[test]
fn a_wait_ends_at_its_timeout() {
    ranks(2, |gloo| {
        if gloo.rank() == 0 {
            let mut work = gloo.recv(&bytes(&[0; 8]), 1, 3).unwrap();
            assert!(!work.is_completed().unwrap());
            let error = work.wait(SHORT).unwrap_err().to_string();
            assert!(error.contains("timed out"), "{error}");
            // Another rank may be asked again later: the operation still waits.
            assert!(!work.is_completed().unwrap());
            gloo.send(&bytes(&[1]), 1, 4).unwrap().wait(TIMEOUT).unwrap();
            work.wait(TIMEOUT).unwrap();
        } else {
            gloo.recv(&bytes(&[0]), 0, 4).unwrap().wait(TIMEOUT).unwrap();
            gloo.send(&bytes(&[9; 8]), 0, 3).unwrap().wait(TIMEOUT).unwrap();
        }
    });
}

#[test]
fn a_rank_that_leaves_is_an_error_of_those_that_wait() {
    let (store, both_connected) = (server(), &Barrier::new(2));
    let port = store.port();
    thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || {
                let gloo = connected(port, rank, 2, TIMEOUT);
                // A rank that left earlier would be lost while the other one connects.
                both_connected.wait();
                if rank == 0 {
                    assert!(gloo.recv(&bytes(&[0; 8]), 1, 3).unwrap().wait(TIMEOUT).is_err());
                }
            });
        }
    });
}

/// The timeout of the group is not that of its messages: connections stay open however long a message waits.
#[test]
fn a_message_that_never_comes_leaves_the_connections_open() {
    let timeout = Duration::from_secs(5);
    let store = server();
    let port = store.port();
    thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || {
                let gloo = connected(port, rank, 2, timeout);
                let [waiting, abandoned] = [3, 5].map(|tag| {
                    let mut work = gloo.recv(&bytes(&[0; 8]), 1 - rank, tag).unwrap();
                    assert!(!work.is_completed().unwrap());
                    work
                });
                abandoned.abandon();
                let mut sent = gloo.send(&bytes(&[1; 8]), 1 - rank, 7).unwrap();
                assert!(sent.is_completed().is_ok());
                sent.abandon();
                thread::sleep(timeout + Duration::from_secs(1));
                // One message that still comes for what was abandoned, and one on another tag.
                for tag in [5, 4] {
                    let mut send = gloo.send(&bytes(&[9; 8]), 1 - rank, tag).unwrap();
                    if tag == 4 {
                        let received = bytes(&[0; 8]);
                        gloo.recv(&received, 1 - rank, tag).unwrap().wait(TIMEOUT).unwrap();
                        assert_eq!(memory::to_vec::<u8>(&received).unwrap(), [9; 8]);
                    }
                    send.wait(TIMEOUT).unwrap();
                }
                let mut send = gloo.send(&bytes(&[9; 8]), 1 - rank, 3).unwrap();
                let mut waiting = waiting;
                waiting.wait(TIMEOUT).unwrap();
                send.wait(TIMEOUT).unwrap();
                gloo.barrier().unwrap().wait(TIMEOUT).unwrap();
            });
        }
    });
}
