//! A connection to the store.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::wire::{self, Message, Met, Until};
use crate::c10d::token::Token;

/// Timeout of one attempt to connect: a machine that is starting may not answer at all.
const TRY: Duration = Duration::from_secs(3);

/// Timeout of the server's answer to an introduction.
const INTRODUCTION: Duration = Duration::from_secs(10);

/// First and longest pause between attempts.
const PAUSE: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(500)];

#[derive(Debug)]
pub(super) struct Client {
    stream: TcpStream,
    incoming: Vec<u8>,
    /// Answers still to come that nobody waits for any more.
    owed: usize,
    /// Why the connection is of no more use.
    broken: Option<String>,
}

/// Why there is no answer.
pub(super) enum NoAnswer {
    /// None yet. The connection goes on: the answer is passed over when it comes.
    Late,
    /// There will be none.
    Broken(String),
}

impl Client {
    /// Connects, waiting until `end` for a server to appear.
    pub(super) fn connect(host: &str, port: u16, token: &Token, end: Instant) -> Result<Self, String> {
        let mut pause = PAUSE[0];
        loop {
            let problem = match Self::try_all(host, port, token, end) {
                Ok(Some(client)) => return Ok(client),
                Ok(None) => return Err(REFUSED.to_owned()),
                Err(problem) => problem,
            };
            let left = end.saturating_duration_since(Instant::now());
            if left <= pause {
                return Err(format!("timeout: {problem}"));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSE[1]);
        }
    }

    /// One try at each address of the host; none where a server does not know the token.
    fn try_all(host: &str, port: u16, token: &Token, end: Instant) -> Result<Option<Self>, String> {
        let addresses = (host, port).to_socket_addrs().map_err(|error| error.to_string())?;
        let mut problem = "the host has no address".to_owned();
        for address in addresses {
            match Self::try_one(&address, token, end) {
                Ok(client) => return Ok(client),
                Err(error) => problem = format!("{address}: {error}"),
            }
        }
        Err(problem)
    }

    fn try_one(address: &SocketAddr, token: &Token, end: Instant) -> std::io::Result<Option<Self>> {
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let stream = TcpStream::connect_timeout(address, left.min(TRY))?;
        // A connection of this machine to a port that nobody listens at may be one to itself.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        stream.set_nodelay(true)?;
        let line = Until { stream: &stream, end: end.min(Instant::now() + INTRODUCTION) };
        Ok(match wire::introduce(line, token)? {
            Met::Friend => Some(Self { stream, incoming: Vec::new(), owed: 0, broken: None }),
            Met::Stranger => None,
        })
    }

    /// Sends a request, and waits for its answer until `end`.
    pub(super) fn ask(&mut self, request: &[u8], end: Instant) -> Result<Message, NoAnswer> {
        if let Some(why) = &self.broken {
            return Err(NoAnswer::Broken(why.clone()));
        }
        if let Err(error) = (Until { stream: &self.stream, end }).write_all(request) {
            // Part of it may have gone.
            return Err(self.give_up(error.to_string()));
        }
        loop {
            match wire::take(&mut self.incoming) {
                Ok(Some(_)) if self.owed > 0 => self.owed -= 1,
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) => {
                    if let Some(problem) = self.read(end)? {
                        return Err(self.give_up(problem));
                    }
                }
                Err(error) => return Err(self.give_up(error.to_string())),
            }
        }
    }

    /// Takes in what has come; tells where nothing more will.
    fn read(&mut self, end: Instant) -> Result<Option<String>, NoAnswer> {
        let mut buffer = [0; 16 << 10];
        let read = (Until { stream: &self.stream, end }).read(&mut buffer);
        Ok(match read {
            Ok(0) => Some("its server is gone".to_owned()),
            Ok(length) => {
                self.incoming.extend(&buffer[..length]);
                None
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => None,
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                self.owed += 1;
                return Err(NoAnswer::Late);
            }
            Err(error) => Some(format!("its server is gone: {error}")),
        })
    }

    fn give_up(&mut self, why: String) -> NoAnswer {
        self.broken = Some(why.clone());
        NoAnswer::Broken(why)
    }
}

const REFUSED: &str =
    "it does not know this rank's token; give all ranks of a job the same ISOBAR_DISTRIBUTED_TOKEN";
