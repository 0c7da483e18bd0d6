//! Wire format of the store: an introduction, then messages with a length prefix.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::token::{Proof, Token};

/// The longest message: who claims more is not listened to.
pub(crate) const LONGEST: usize = 16 << 20;

/// First word of both sides of a connection.
const MAGIC: &[u8; 16] = b"isobar-store-002";

/// Kinds of requests and answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// A key and its value.
    Set = 1,
    /// A key; its value, waited for so many milliseconds.
    Get,
    /// A key and what to add to its number.
    Add,
    /// Keys, waited for so many milliseconds.
    Wait,
    /// Keys: whether all are there.
    Check,
    /// A key to be forgotten.
    Delete,
    /// Number of keys.
    Count,
    /// The answer: a number, and a value where one was asked for.
    Done,
    /// The answer: this key did not come in time.
    Missing,
    /// The answer: why not, in words.
    Refused,
}

impl Kind {
    const ALL: [Self; 10] = [
        Self::Set,
        Self::Get,
        Self::Add,
        Self::Wait,
        Self::Check,
        Self::Delete,
        Self::Count,
        Self::Done,
        Self::Missing,
        Self::Refused,
    ];

    pub(crate) fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as u8 == number)
    }
}

/// A request or its answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Message {
    pub(crate) kind: Kind,
    pub(crate) number: i64,
    pub(crate) parts: Vec<Vec<u8>>,
}

impl Message {
    pub(crate) fn new(kind: Kind, number: i64, parts: &[&[u8]]) -> Self {
        Self { kind, number, parts: parts.iter().map(|part| part.to_vec()).collect() }
    }

    /// The message behind its length; none where it is too long.
    pub(crate) fn encode(&self) -> Option<Vec<u8>> {
        let length = 9 + self.parts.iter().map(|part| 4 + part.len()).sum::<usize>();
        if length > LONGEST {
            return None;
        }
        let mut bytes = Vec::with_capacity(4 + length);
        bytes.extend((length as u32).to_le_bytes());
        bytes.push(self.kind as u8);
        bytes.extend(self.number.to_le_bytes());
        for part in &self.parts {
            bytes.extend((part.len() as u32).to_le_bytes());
            bytes.extend(part);
        }
        Some(bytes)
    }

    /// A message without its length; none where the bytes are no message.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (&kind, rest) = bytes.split_first()?;
        let (number, mut rest) = rest.split_first_chunk::<8>()?;
        let mut parts = Vec::new();
        while !rest.is_empty() {
            let (length, tail) = rest.split_first_chunk::<4>()?;
            let (part, tail) = tail.split_at_checked(u32::from_le_bytes(*length) as usize)?;
            parts.push(part.to_vec());
            rest = tail;
        }
        Some(Self { kind: Kind::of(kind)?, number: i64::from_le_bytes(*number), parts })
    }
}

/// The first whole message of what has come in, if there is one, and is taken out.
pub(crate) fn take(incoming: &mut Vec<u8>) -> io::Result<Option<Message>> {
    let Some((head, rest)) = incoming.split_first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*head) as usize;
    if length > LONGEST {
        return Err(foreign());
    }
    let Some(bytes) = rest.get(..length) else { return Ok(None) };
    let message = Message::decode(bytes).ok_or_else(foreign)?;
    incoming.drain(..4 + length);
    Ok(Some(message))
}

fn foreign() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "what came is no message of a store")
}

/// A stream all of whose reads and writes end at one time.
pub(crate) struct Until<'a> {
    pub(crate) stream: &'a TcpStream,
    pub(crate) end: Instant,
}

impl Until<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.end.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(ErrorKind::TimedOut.into()),
            left => Ok(Some(left)),
        }
    }
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        let mut stream = self.stream;
        stream.read(buffer).map_err(timed_out)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        let mut stream = self.stream;
        stream.write(bytes).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The system calls a timeout by another name.
fn timed_out(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::WouldBlock => ErrorKind::TimedOut.into(),
        _ => error,
    }
}

/// Result of a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Met {
    Friend,
    /// The other side knows another token, or none.
    Stranger,
}

/// Introduces this side to a server. Who connects shows first that it knows the token: so nobody gets a proof to work
/// on by asking for it. An answer of anything but a store is [`ErrorKind::InvalidData`].
pub(crate) fn introduce(mut line: Until<'_>, token: &Token) -> io::Result<Met> {
    let own = Token::nonce().map_err(io::Error::other)?;
    line.write_all(&[MAGIC.as_slice(), own.as_slice()].concat())?;
    let mut magic = [0; MAGIC.len()];
    line.read_exact(&mut magic)?;
    if magic != *MAGIC {
        return Err(foreign());
    }
    let mut theirs = [0; 32];
    line.read_exact(&mut theirs)?;
    let nonces = [own, theirs];
    line.write_all(&token.proof(CLIENT, &nonces).to_bytes())?;
    let mut verdict = [0];
    line.read_exact(&mut verdict)?;
    if verdict == [REFUSED] {
        return Ok(Met::Stranger);
    }
    let mut proof = [0; 32];
    line.read_exact(&mut proof)?;
    match Proof::from_bytes(proof) == token.proof(SERVER, &nonces) {
        true => Ok(Met::Friend),
        false => Ok(Met::Stranger),
    }
}

/// The server's side of [`introduce`].
pub(crate) fn receive(mut line: Until<'_>, token: &Token) -> io::Result<Met> {
    let mut hello = [0; MAGIC.len() + 32];
    line.read_exact(&mut hello)?;
    let Some(theirs) = hello.strip_prefix(MAGIC).and_then(|nonce| nonce.try_into().ok()) else {
        return Ok(Met::Stranger);
    };
    let own = Token::nonce().map_err(io::Error::other)?;
    line.write_all(&[MAGIC.as_slice(), own.as_slice()].concat())?;
    let nonces = [theirs, own];
    let mut proof = [0; 32];
    line.read_exact(&mut proof)?;
    if Proof::from_bytes(proof) != token.proof(CLIENT, &nonces) {
        line.write_all(&[REFUSED])?;
        return Ok(Met::Stranger);
    }
    let mut welcome = vec![WELCOME];
    welcome.extend(token.proof(SERVER, &nonces).to_bytes());
    line.write_all(&welcome)?;
    Ok(Met::Friend)
}

const CLIENT: &str = "client of the store";
const SERVER: &str = "server of the store";
const REFUSED: u8 = 0;
const WELCOME: u8 = 1;
