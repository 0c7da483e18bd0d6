//! The store.
//!
//! libtorch's own store listens on all addresses of its machine and takes whoever connects. This one listens where it is
//! told to, and takes those who know the job's token.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::client::{Client, NoAnswer, after};
use crate::server::Server;
use crate::wire::{Kind, Message};
use crate::{Error, Result, Token};

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
            return Err(Error::NoAddress);
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
        match Client::connect(host, port, token, after(timeout)) {
            Ok(client) => Ok(Self {
                link: Arc::new(Link::Client { address, port, client: Mutex::new(client) }),
                timeout,
            }),
            Err(none) => Err(none.at(address)),
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

    /// Answers a request given in wire format, for bindings from other languages: returns the number of the answer, and the
    /// value if the request asks for one. `kind` is 1 for set, 2 for get, 3 for add, 4 for wait, 5 for check, 6 for delete,
    /// 7 for the number of keys; `number` is the summand, or the milliseconds to wait; `parts` are the key or keys, and the value
    /// to set.
    ///
    /// # Errors
    ///
    /// An unknown kind of request, and the errors of the methods.
    pub fn request(&self, kind: u8, number: i64, parts: Vec<Vec<u8>>) -> Result<(i64, Option<Vec<u8>>)> {
        let kind = Kind::of(kind).ok_or_else(|| {
            NoAnswer::Broken(format!("there is no request of kind {kind}")).at(self.address())
        })?;
        let waits = matches!(kind, Kind::Get | Kind::Wait);
        let timeout = Duration::from_millis(number.try_into().unwrap_or_default());
        let answer = self.ask(&Message { kind, number, parts }, waits.then_some(timeout))?;
        Ok((answer.number, answer.parts.into_iter().next()))
    }

    fn address(&self) -> String {
        match &*self.link {
            Link::Server(server) => format!("port {} of this process", server.port),
            Link::Client { address, .. } => address.clone(),
        }
    }

    /// Sends a request, which may itself wait for `waits`, and returns the store's answer.
    fn ask(&self, request: &Message, waits: Option<Duration>) -> Result<Message> {
        let failed = |problem: String| NoAnswer::Broken(problem).at(self.address());
        let Some(bytes) = request.encode() else {
            return Err(failed("the value is longer than 16 MiB, the most that it takes".to_owned()));
        };
        let longest = waits.map_or(self.timeout, |waits| waits.saturating_add(GRACE));
        let answer = match &*self.link {
            Link::Server(server) => server.answer(request),
            Link::Client { client, .. } => {
                let mut client = client.lock().unwrap_or_else(PoisonError::into_inner);
                client.ask(&bytes, longest).map_err(|none| none.at(self.address()))?
            }
        };
        let word = |answer: &Message| {
            String::from_utf8_lossy(answer.parts.first().map_or(&[], Vec::as_slice)).into_owned()
        };
        match answer.kind {
            Kind::Done => Ok(answer),
            Kind::Missing => {
                let seconds = waits.unwrap_or(self.timeout).as_secs_f64();
                let problem = format!(
                    "the key `{}` was not set within {seconds} s, expected another process to set it; check whether all ranks \
                     have started and whether one has failed, or give a longer timeout",
                    word(&answer)
                );
                Err(NoAnswer::Late(problem).at(self.address()))
            }
            _ => Err(failed(word(&answer))),
        }
    }
}

/// Returns the milliseconds, at least one: zero would not wait at all.
fn milliseconds(timeout: Duration) -> i64 {
    timeout.as_millis().clamp(1, i64::MAX as u128) as i64
}
