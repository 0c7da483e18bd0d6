//! Messages of the side channel: JSON behind its length, over TCP, without waiting. What comes in is another process's word:
//! its length is bounded, and what cannot be read closes the connection.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use isobar_rendezvous::Nonce;
use serde::{Deserialize, Serialize};

use crate::flight::{FlightRecord, Peer};

/// The longest message.
const LONGEST: usize = 256 << 10;

/// Longest message of a peer that has not proved who it is: many of them must fit into memory.
const LONGEST_INTRODUCTION: usize = 16 << 10;

/// Reads of 16 KiB at one look: who sends without end is not listened to without end.
const AT_ONCE: usize = 64;

/// So many bytes that a peer does not take mean that it does not read.
const BACKLOG: usize = 4 << 20;

/// Messages between ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Message {
    /// The first word, to who connects.
    Challenge { nonce: Nonce },
    /// The answer to it: a proof that the job's token is known, the rank, and, where the rank that watched before was lost,
    /// how.
    Hello { nonce: Nonce, proof: [u8; 32], rank: usize, lost: Option<Peer> },
    /// The answer to that, with the same proof of the other side.
    Welcome { proof: [u8; 32] },
    /// All is well; what the rank is doing.
    Beat(Peer),
    /// The rank ends, as its outcome says.
    Goodbye(Peer),
    /// The job ends: write your record, and send it.
    Gather { reason: String, peers: Vec<Peer> },
    /// A record.
    Record(Box<FlightRecord>),
    /// The error that the rank that watches has printed of itself.
    Printed { text: String },
    /// The report was printed, or none is needed: end.
    Release,
}

/// A connection.
pub(super) struct Line {
    stream: TcpStream,
    incoming: Vec<u8>,
    outgoing: Vec<u8>,
    /// Received messages that were not read yet.
    messages: VecDeque<Message>,
    open: bool,
    /// Largest length of an incoming message, in bytes.
    longest: usize,
    /// True if the other side still accepts messages; messages that it sent before it left are read in any case.
    takes: bool,
}

impl Line {
    pub(super) fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            incoming: Vec::new(),
            outgoing: Vec::new(),
            messages: VecDeque::new(),
            open: true,
            longest: LONGEST,
            takes: true,
        })
    }

    /// A connection whose other side has not proved who it is: long messages close it.
    pub(super) fn of_stranger(stream: TcpStream) -> std::io::Result<Self> {
        Ok(Self { longest: LONGEST_INTRODUCTION, ..Self::new(stream)? })
    }

    /// Accepts messages of any kind from now on: the other side has proved who it is.
    pub(super) fn trust(&mut self) {
        self.longest = LONGEST;
    }

    pub(super) fn is_open(&self) -> bool {
        self.open
    }

    /// Sends as much as can be sent now; the rest goes with the next call.
    pub(super) fn send(&mut self, message: &Message) {
        match serde_json::to_vec(message) {
            Ok(text) if text.len() <= LONGEST => {
                self.outgoing.extend((text.len() as u32).to_le_bytes());
                self.outgoing.extend(text);
            }
            Ok(text) => tracing::debug!(bytes = text.len(), "a message of the watchdog is too long"),
            Err(error) => tracing::debug!(%error, "a message of the watchdog cannot be written"),
        }
        self.flush();
    }

    pub(super) fn flush(&mut self) {
        while self.open && self.takes && !self.outgoing.is_empty() {
            match self.stream.write(&self.outgoing) {
                Ok(0) => self.takes = false,
                Ok(sent) => drop(self.outgoing.drain(..sent)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.takes = false,
            }
        }
        if !self.takes {
            self.outgoing.clear();
        }
        if self.outgoing.len() > BACKLOG {
            self.open = false;
        }
    }

    /// All that has come in. What came before the end of a connection is still given.
    pub(super) fn receive(&mut self) -> Vec<Message> {
        self.read();
        self.messages.drain(..).collect()
    }

    /// The next of what has come in.
    pub(super) fn next(&mut self) -> Option<Message> {
        self.read();
        self.messages.pop_front()
    }

    fn read(&mut self) {
        let mut buffer = [0_u8; 16 << 10];
        let mut left = AT_ONCE;
        while self.open && left > 0 && self.incoming.len() <= self.longest + 4 {
            left -= 1;
            match self.stream.read(&mut buffer) {
                Ok(0) => self.open = false,
                Ok(length) => self.incoming.extend(&buffer[..length]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.open = false,
            }
            if !self.take() {
                self.open = false;
            }
        }
    }

    /// Whole messages of what has come in; false where it is none of ours.
    fn take(&mut self) -> bool {
        loop {
            let Some((head, rest)) = self.incoming.split_first_chunk::<4>() else { return true };
            let length = u32::from_le_bytes(*head) as usize;
            if length > self.longest {
                return false;
            }
            let Some(text) = rest.get(..length) else { return true };
            let Ok(message) = serde_json::from_slice(text) else { return false };
            self.messages.push_back(message);
            self.incoming.drain(..4 + length);
        }
    }

    /// The next message, waited for until `end`.
    pub(super) fn wait(&mut self, end: Instant) -> Option<Message> {
        loop {
            self.flush();
            if let Some(message) = self.next() {
                return Some(message);
            }
            if !self.open || Instant::now() >= end {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use proptest::prelude::*;

    use super::*;

    fn pair() -> (Line, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Line::new(listener.accept().unwrap().0).unwrap(), other)
    }

    fn end() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn messages_arrive_whole_and_in_order() {
        let (mut line, other) = pair();
        let mut other = Line::new(other).unwrap();
        let gather = Message::Gather { reason: "x".repeat(40_000), peers: Vec::new() };
        other.send(&gather);
        assert_eq!(line.wait(end()), Some(gather));
        other.send(&Message::Release);
        drop(other);
        assert_eq!(line.wait(end()), Some(Message::Release));
        assert_eq!((line.wait(end()), line.is_open()), (None, false));
    }

    #[test]
    fn what_is_no_message_closes_the_connection() {
        for bytes in
            [&[255_u8; 4][..], b"\x02\0\0\0{}", b"\x04\0\0\0\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"]
        {
            let (mut line, mut other) = pair();
            other.write_all(bytes).unwrap();
            assert_eq!((line.wait(end()), line.is_open()), (None, false), "{bytes:?}");
        }
    }

    #[test]
    fn a_message_that_stays_away_does_not_hold_anybody() {
        let (mut line, mut other) = pair();
        other.write_all(&[100, 0, 0, 0, b'{']).unwrap();
        assert_eq!(line.wait(Instant::now() + Duration::from_millis(50)), None);
        assert!(line.is_open());
    }

    #[test]
    fn a_peer_that_does_not_read_is_given_up() {
        let (mut line, _other) = pair();
        let message = Message::Gather { reason: "x".repeat(200_000), peers: Vec::new() };
        let end = end();
        while line.is_open() && Instant::now() < end {
            line.send(&message);
        }
        assert!(!line.is_open());
    }

    fn message() -> impl Strategy<Value = Vec<u8>> {
        let json = prop::sample::select(vec![
            r#"{"challenge":{"nonce":[0,1,2]}}"#,
            r#"{"hello":{"nonce":[],"proof":[],"rank":18446744073709551616,"lost":null}}"#,
            r#"{"gather":{"reason":"\ud800","peers":[]}}"#,
            r#"{"record":null}"#,
            r#""release""#,
            r#"{"release":null}"#,
        ]);
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..40),
            json.prop_map(|text| text.as_bytes().to_vec()),
            // A text of JSON with a byte of it changed.
            (any::<prop::sample::Index>(), any::<u8>()).prop_map(|(at, byte)| {
                let peers = Vec::new();
                let mut text =
                    serde_json::to_vec(&Message::Gather { reason: "why".to_owned(), peers }).unwrap();
                let at = at.index(text.len());
                text[at] = byte;
                text
            }),
        ]
    }

    proptest! {
        /// Whatever comes in, in pieces: messages or the end of the connection, and no more memory than what came.
        #[test]
        fn no_bytes_make_a_line_panic(messages in prop::collection::vec((message(), -1_i64..2), 0..6)) {
            let (mut line, mut other) = pair();
            for (text, error) in &messages {
                // A length that is right, or is not.
                let length = (text.len() as i64 + error).clamp(0, u32::MAX.into()) as u32;
                let sent = other.write_all(&length.to_le_bytes()).and_then(|()| other.write_all(text));
                line.receive();
                prop_assert!(line.incoming.capacity() <= 64 << 10);
                if sent.is_err() {
                    break;
                }
            }
            drop(other);
            while line.wait(end()).is_some() {}
            prop_assert!(!line.is_open());
        }
    }

    /// Lists within lists would need as much stack as they are deep.
    #[test]
    fn what_is_nested_without_end_closes_the_connection() {
        let (mut line, mut other) = pair();
        let text = [br#"{"gather":{"reason":"","peers":"#.to_vec(), vec![b'['; LONGEST / 2]].concat();
        other.write_all(&(text.len() as u32).to_le_bytes()).unwrap();
        let writing = std::thread::spawn(move || other.write_all(&text));
        assert_eq!((line.wait(end()), line.is_open()), (None, false));
        drop(line);
        let _ = writing.join().unwrap();
    }
}
