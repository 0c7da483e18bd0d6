//! Connections of the ranks' watchdogs.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use isobar_collectives::flight::Phase;
use isobar_rendezvous::{Proof, Token};
use serde::{Deserialize, Serialize};

use super::frame::{Line, Message};
use crate::flight::{Peer, RankOutcome};

/// A rank, as it presents itself to the others before they connect.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Contact {
    /// Listening address.
    pub(super) address: SocketAddr,
    pub(super) host: String,
    pub(super) pid: u32,
}

impl Contact {
    /// Returns the rank as one of which nothing was heard yet.
    pub(super) fn peer(&self, rank: usize, outcome: RankOutcome) -> Peer {
        let (host, pid) = (self.host.clone(), self.pid);
        Peer { rank, host, pid, phase: Phase::Start, step: 0, last: None, outcome }
    }
}

/// The side channel of a rank.
pub(super) struct Channel {
    pub(super) listener: TcpListener,
    /// Listening address, machine and process of each rank.
    pub(super) contacts: Vec<Contact>,
    pub(super) token: Token,
    /// Silence after which a rank counts as lost.
    pub(super) silence: Duration,
    pub(super) mpi: bool,
    /// Timeout of operations.
    pub(super) deadline: Duration,
}

impl Channel {
    /// The call of MPI that a thread of the program is in.
    pub(super) fn call_under_way(&self) -> Option<u64> {
        #[cfg(feature = "mpi")]
        if self.mpi {
            return isobar_collectives::mpi::call_under_way();
        }
        None
    }
}

/// A connection to the rank `to`, which has answered.
pub(super) fn connect(
    channel: &Channel,
    to: usize,
    rank: usize,
    lost: Option<Peer>,
    end: Instant,
) -> Result<Line, String> {
    let address = channel.contacts.get(to).ok_or("there is no such rank")?.address;
    let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let failed = |error: std::io::Error| format!("{address}: {error}");
    let stream = TcpStream::connect_timeout(&address, left).map_err(failed)?;
    let mut line = Line::new(stream).map_err(failed)?;
    let answer = |line: &mut Line| line.wait(end).ok_or_else(|| format!("{address}: no answer"));
    let foreign = || format!("{address}: not the answer of a watchdog of this job");
    let Message::Challenge { nonce } = answer(&mut line)? else { return Err(foreign()) };
    let own = Token::nonce().map_err(|error| error.to_string())?;
    let nonces = [own, nonce];
    let proof = channel.token.proof(&role(rank, to), &nonces).to_bytes();
    line.send(&Message::Hello { nonce: own, proof, rank, lost });
    let Message::Welcome { proof } = answer(&mut line)? else { return Err(foreign()) };
    match Proof::from_bytes(proof) == channel.token.proof(&role(to, rank), &nonces) {
        true => Ok(line),
        false => Err(foreign()),
    }
}

/// As whom a rank proves to another that it is of this job.
pub(super) fn role(rank: usize, to: usize) -> String {
    format!("watchdog of rank {rank} to rank {to}")
}
