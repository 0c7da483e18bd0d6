//! A connection to the store.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;
use crate::token::Token;
use crate::wire::{self, Message, Met, Until};

/// Timeout of one attempt to connect: a machine that is starting may not answer at all.
const TRY: Duration = Duration::from_secs(3);

/// Timeout of the server's answer to an introduction.
const INTRODUCTION: Duration = Duration::from_secs(10);

/// Time for which a port may give wrong answers: another program may be about to leave it.
const WRONG_ANSWER: Duration = Duration::from_secs(5);

/// Time for which a port may accept connections without an answer: the server may be under load, or have too many connections.
const NO_ANSWER: Duration = Duration::from_secs(20);

/// First and longest pause between attempts.
const PAUSE: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(500)];

#[derive(Debug)]
pub(crate) struct Client {
    stream: TcpStream,
    incoming: Vec<u8>,
    /// Answers still to come that nobody waits for any more.
    owed: usize,
    /// Reason why the connection can no longer be used.
    broken: Option<String>,
}

/// Outcome of one try to connect.
enum Attempt {
    Connected(Client),
    /// The server does not know the token.
    Refused,
    /// The listener is not a store, or is a store that hangs; attempts go on for `patience`.
    Foreign {
        problem: String,
        patience: Duration,
    },
    /// Nothing listens, so that the server may still come.
    Absent(String),
}

/// Reason for a missing answer, with a description.
pub(crate) enum NoAnswer {
    /// No answer in time. The connection stays usable: a late answer is dropped.
    Late(String),
    /// There will be none.
    Broken(String),
}

impl NoAnswer {
    /// Converts to an error of the store at `address`.
    pub(crate) fn at(self, address: String) -> Error {
        match self {
            Self::Late(problem) => Error::Timeout { address, problem },
            Self::Broken(problem) => Error::Store { address, problem },
        }
    }
}

impl Client {
    /// Connects, waiting until `end` for a server to appear. Gives up earlier where another program keeps the port.
    pub(crate) fn connect(host: &str, port: u16, token: &Token, end: Instant) -> Result<Self, NoAnswer> {
        let mut pause = PAUSE[0];
        let mut foreign_since = None;
        loop {
            let begun = Instant::now();
            let problem = match Self::try_all(host, port, token, end) {
                Attempt::Connected(client) => return Ok(client),
                Attempt::Refused => return Err(NoAnswer::Broken(REFUSED.to_owned())),
                Attempt::Foreign { problem, patience } => {
                    let since = *foreign_since.get_or_insert(begun);
                    if since.elapsed() >= patience {
                        return Err(match patience {
                            NO_ANSWER => {
                                NoAnswer::Late(format!("{problem}; its process hangs, or {FOREIGN}"))
                            }
                            _ => NoAnswer::Broken(format!("{problem}; {FOREIGN}")),
                        });
                    }
                    problem
                }
                Attempt::Absent(problem) => {
                    foreign_since = None;
                    problem
                }
            };
            let left = end.saturating_duration_since(Instant::now());
            if left <= pause {
                let hint = foreign_since.map_or_else(String::new, |_| format!("; {FOREIGN}"));
                return Err(NoAnswer::Late(format!("{problem}{hint}")));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSE[1]);
        }
    }

    /// Tries each address of the host once. The server listens at all of them, so a foreign program at one of them keeps it
    /// from starting.
    fn try_all(host: &str, port: u16, token: &Token, end: Instant) -> Attempt {
        let addresses = match (host, port).to_socket_addrs() {
            Ok(addresses) => addresses,
            Err(error) => return Attempt::Absent(error.to_string()),
        };
        let mut worst = Attempt::Absent("the host has no address".to_owned());
        for address in addresses {
            let attempt = Self::try_one(&address, token, end);
            match (&attempt, &worst) {
                (Attempt::Connected(_), _) => return attempt,
                (Attempt::Absent(_), Attempt::Absent(_)) | (Attempt::Refused, _) => worst = attempt,
                (Attempt::Foreign { .. }, Attempt::Absent(_)) => worst = attempt,
                _ => {}
            }
        }
        worst
    }

    fn try_one(address: &SocketAddr, token: &Token, end: Instant) -> Attempt {
        let absent = |error: std::io::Error| Attempt::Absent(format!("{address}: {error}"));
        let stream = match Self::dial(address, end) {
            Ok(stream) => stream,
            Err(error) => return absent(error),
        };
        let line = Until { stream: &stream, end: end.min(Instant::now() + INTRODUCTION) };
        let foreign = |what: &str, patience| Attempt::Foreign {
            problem: format!("{address} is open, but {what}"),
            patience,
        };
        match wire::introduce(line, token) {
            Ok(Met::Friend) => {
                Attempt::Connected(Self { stream, incoming: Vec::new(), owed: 0, broken: None })
            }
            Ok(Met::Stranger) => Attempt::Refused,
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                foreign("what answers there is no store of Isobar", WRONG_ANSWER)
            }
            Err(error) if error.kind() == ErrorKind::TimedOut => foreign("nothing answers there", NO_ANSWER),
            Err(error) => foreign(&format!("the connection ends at once ({error})"), NO_ANSWER),
        }
    }

    fn dial(address: &SocketAddr, end: Instant) -> std::io::Result<TcpStream> {
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let stream = TcpStream::connect_timeout(address, left.min(TRY))?;
        // A connection of this machine to a port that nobody listens at may be one to itself.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Sends a request and waits at most `longest` for its answer.
    pub(crate) fn ask(&mut self, request: &[u8], longest: Duration) -> Result<Message, NoAnswer> {
        let end = after(longest);
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
                    if let Some(problem) = self.read(end, longest)? {
                        return Err(self.give_up(problem));
                    }
                }
                Err(error) => return Err(self.give_up(error.to_string())),
            }
        }
    }

    /// Takes in what has come; tells where nothing more will.
    fn read(&mut self, end: Instant, longest: Duration) -> Result<Option<String>, NoAnswer> {
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
                return Err(NoAnswer::Late(format!("no answer within {} s", longest.as_secs_f64())));
            }
            Err(error) => Some(format!("its server is gone: {error}")),
        })
    }

    fn give_up(&mut self, why: String) -> NoAnswer {
        self.broken = Some(why.clone());
        NoAnswer::Broken(why)
    }
}

/// Returns the instant `timeout` from now, or 100 years from now if that is sooner.
pub(crate) fn after(timeout: Duration) -> Instant {
    const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    let now = Instant::now();
    now.checked_add(timeout.min(LONGEST)).unwrap_or(now)
}

const REFUSED: &str =
    "it does not know this rank's token; give all ranks of a job the same ISOBAR_DISTRIBUTED_TOKEN";

const FOREIGN: &str = "another program seems to use this port: choose another port for the store";
