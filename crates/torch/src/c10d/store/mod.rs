//! The key-value store over TCP.
//!
//! libtorch's own store listens on all addresses of its machine and takes whoever connects. This one listens where it is
//! told to, and takes those who know the job's token.

mod bridge;
mod client;
mod server;
mod table;
mod wire;

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use self::client::{Client, NoAnswer};
use self::server::Server;
use self::wire::{Kind, Message};
use super::{Token, milliseconds};
use crate::error::{Error, Result};

pub(super) use bridge::ask;

/// Grace for the server's timeout message to arrive after its timeout.
const GRACE: Duration = Duration::from_secs(2);

/// A key-value store that ranks reach over TCP; one of them serves it.
///
/// A value is a string of bytes. Every call is bounded by a timeout. Clones share a connection, and threads that share it
/// take turns on it, also while one of them waits: a rank that lives in a thread has its own. A call that times out leaves
/// the store in order; what it asked for may still be done.
#[derive(Debug, Clone)]
pub struct TcpStore {
    link: Arc<Link>,
    timeout: Duration,
}

#[derive(Debug)]
enum Link {
    Server(Server),
    Client { address: String, port: u16, client: Mutex<Client> },
}

impl TcpStore {
    /// Serves a store on these addresses of this machine, and on no other, at `port`; port 0 takes any free one. Only who
    /// knows `token` is let in. The store ends for all when this value, its clones and the groups made of it are dropped.
    ///
    /// # Errors
    ///
    /// If the port is taken, or an address is not this machine's.
    pub fn server(addresses: &[IpAddr], port: u16, token: &Token, timeout: Duration) -> Result<Self> {
        if addresses.is_empty() {
            return Err(Error::Argument("a store needs an address to listen on".to_owned()));
        }
        let server = Server::listen(addresses, port, token).map_err(|error| Error::Store {
            address: format!("port {port}"),
            problem: match error.kind() {
                std::io::ErrorKind::AddrInUse => {
                    format!("cannot listen on {error}: another process uses this port; choose another")
                }
                _ => format!("cannot listen on {error}"),
            },
        })?;
        Ok(Self { link: Arc::new(Link::Server(server)), timeout })
    }

    /// Connects to the store at `host` and `port`, waiting up to `timeout` for its server to appear.
    ///
    /// # Errors
    ///
    /// If there is no server within `timeout`; within seconds, if another program listens there; at once, if there is a server
    /// that does not know `token`.
    pub fn client(host: &str, port: u16, token: &Token, timeout: Duration) -> Result<Self> {
        let address = format!("{host}:{port}");
        match Client::connect(host, port, token, end(timeout)) {
            Ok(client) => Ok(Self {
                link: Arc::new(Link::Client { address, port, client: Mutex::new(client) }),
                timeout,
            }),
            Err(problem) => Err(Error::Store { address, problem }),
        }
    }

    /// Returns a handle of the same store with another default timeout. Initially it is the timeout given to
    /// [`server`](Self::server) or [`client`](Self::client).
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// The port that the store is served at.
    #[must_use]
    pub fn port(&self) -> u16 {
        match &*self.link {
            Link::Server(server) => server.port,
            Link::Client { port, .. } => *port,
        }
    }

    /// Sets a key, replacing its value.
    ///
    /// # Errors
    ///
    /// If the value is longer than 16 MiB, or the server is gone or does not answer.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask(&Message::new(Kind::Set, 0, &[key.as_bytes(), value]), None).map(drop)
    }

    /// Waits for a key and returns its value.
    ///
    /// # Errors
    ///
    /// If nobody sets the key within `timeout`, or the server is gone.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let request = Message::new(Kind::Get, milliseconds(timeout), &[key.as_bytes()]);
        let answer = self.ask(&request, Some(timeout))?;
        Ok(answer.parts.into_iter().next().unwrap_or_default())
    }

    /// Adds to a counter, which starts at zero, and returns its new value.
    ///
    /// # Errors
    ///
    /// If the key's value is no number, or the server is gone or does not answer.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        Ok(self.ask(&Message::new(Kind::Add, amount, &[key.as_bytes()]), None)?.number)
    }

    /// Waits until all keys are set.
    ///
    /// # Errors
    ///
    /// If one is not within `timeout`, or the server is gone.
    pub fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
        self.ask(&Message::new(Kind::Wait, milliseconds(timeout), &keys), Some(timeout)).map(drop)
    }

    /// Returns whether all keys are set now.
    ///
    /// # Errors
    ///
    /// If the server is gone or does not answer.
    pub fn check(&self, keys: &[&str]) -> Result<bool> {
        let keys: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
        Ok(self.ask(&Message::new(Kind::Check, 0, &keys), None)?.number == 1)
    }

    /// Deletes a key; tells whether there was one.
    ///
    /// # Errors
    ///
    /// If the server is gone or does not answer.
    pub fn delete(&self, key: &str) -> Result<bool> {
        Ok(self.ask(&Message::new(Kind::Delete, 0, &[key.as_bytes()]), None)?.number == 1)
    }

    /// Sends a request, which may itself wait for `waits`, and returns the store's answer.
    fn ask(&self, request: &Message, waits: Option<Duration>) -> Result<Message> {
        let address = || match &*self.link {
            Link::Server(server) => format!("port {} of this process", server.port),
            Link::Client { address, .. } => address.clone(),
        };
        let failed = |problem: String| Error::Store { address: address(), problem };
        let Some(bytes) = request.encode() else {
            return Err(failed("the value is longer than 16 MiB, the most that it takes".to_owned()));
        };
        let longest = waits.map_or(self.timeout, |waits| waits.saturating_add(GRACE));
        let answer = match &*self.link {
            Link::Server(server) => server.answer(request),
            Link::Client { client, .. } => {
                let mut client = client.lock().unwrap_or_else(PoisonError::into_inner);
                client.ask(&bytes, end(longest)).map_err(|error| {
                    failed(match error {
                        NoAnswer::Late => format!("timeout: no answer within {} s", longest.as_secs_f64()),
                        NoAnswer::Broken(why) => why,
                    })
                })?
            }
        };
        let word = |answer: &Message| {
            String::from_utf8_lossy(answer.parts.first().map_or(&[], Vec::as_slice)).into_owned()
        };
        match answer.kind {
            Kind::Done => Ok(answer),
            Kind::Missing => {
                let seconds = waits.unwrap_or(self.timeout).as_secs_f64();
                Err(failed(format!("timeout: nobody has set `{}` within {seconds} s", word(&answer))))
            }
            _ => Err(failed(word(&answer))),
        }
    }
}

/// So much later; a clock that cannot tell it never comes there.
fn end(timeout: Duration) -> Instant {
    const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    let now = Instant::now();
    now.checked_add(timeout.min(LONGEST)).unwrap_or(now)
}

#[cfg(test)]
mod tests;
