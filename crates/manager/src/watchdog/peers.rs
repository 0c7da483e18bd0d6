//! The ranks that a watching rank hears of.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use isobar_rendezvous::{Nonce, Proof, Token};

use super::connect::{Contact, role};
use super::frame::{Line, Message};
use crate::flight::{FlightRecord, Peer, RankOutcome};

/// Timeout of an unknown peer's introduction.
const INTRODUCTION: Duration = Duration::from_secs(2);

/// Largest number of connections, beyond one for each rank, that have not introduced themselves. One more
/// closes the oldest, so that a flood of silent connections does not keep ranks out.
const STRANGERS: usize = 256;

/// Largest number of connections that are accepted at a time, so that a flood does not hold up the watch.
const AT_ONCE: usize = 64;

/// A rank, as another hears of it.
pub(super) struct PeerState {
    pub(super) line: Line,
    pub(super) heard: Instant,
    /// Its last message about itself; its outcome, if it has ended.
    pub(super) last: Option<Peer>,
    pub(super) outcome: Option<RankOutcome>,
    pub(super) record: Option<FlightRecord>,
    /// True if it was asked for its record.
    pub(super) asked: bool,
}

impl PeerState {
    pub(super) fn new(line: Line) -> Self {
        Self { line, heard: Instant::now(), last: None, outcome: None, record: None, asked: false }
    }

    /// Takes in what the rank has said of itself; gives the rest.
    pub(super) fn listen(&mut self, rank: usize) -> Vec<Message> {
        let mut rest = Vec::new();
        for message in self.line.receive() {
            self.heard = Instant::now();
            match message {
                Message::Beat(peer) if peer.rank == rank => self.last = Some(peer),
                Message::Goodbye(peer) if peer.rank == rank => {
                    // A rank that has ended normally may still fail during its exit.
                    if matches!(self.outcome, None | Some(RankOutcome::Ended)) {
                        self.outcome = Some(peer.outcome.clone());
                    }
                    self.last = Some(peer);
                }
                Message::Record(record) if record.rank == rank => self.record = Some(*record),
                other => rest.push(other),
            }
        }
        if !self.line.is_open() && self.outcome.is_none() {
            self.outcome = Some(RankOutcome::Closed);
        }
        rest
    }

    /// Excludes the time for which this process was stopped from the rank's silence. On an overloaded machine a silent rank is therefore
    /// detected late, not never.
    pub(super) fn discount(&mut self, stopped: Duration) {
        self.heard = (self.heard + stopped).min(Instant::now());
    }

    /// A rank silent for this long is lost, even after its goodbye, as long as its process has not exited.
    pub(super) fn is_silent(&mut self, longest: Duration) {
        let silent = self.heard.elapsed();
        let watched = matches!(self.outcome, None | Some(RankOutcome::Ended)) && self.line.is_open();
        if silent > longest && watched {
            self.outcome = Some(RankOutcome::Silent(silent.as_secs_f64()));
        }
    }

    /// The rank, with what became of it.
    pub(super) fn peer(&self, rank: usize, contact: &Contact, outcome: RankOutcome) -> Peer {
        match self.last.clone() {
            Some(last) => Peer { outcome, ..last },
            None => contact.peer(rank, outcome),
        }
    }
}

/// All of them.
#[derive(Default)]
pub(super) struct Peers {
    pub(super) known: BTreeMap<usize, PeerState>,
    strangers: Vec<Stranger>,
}

/// Connection that has not introduced itself yet.
struct Stranger {
    line: Line,
    since: Instant,
    /// Challenge that it was sent.
    nonce: Nonce,
}

impl Peers {
    /// Takes in who has connected; gives what they say of the rank that watched before.
    pub(super) fn accept(
        &mut self,
        listener: &TcpListener,
        token: &Token,
        own: usize,
        ranks: usize,
    ) -> Option<Option<Peer>> {
        for _ in 0..AT_ONCE.max(ranks) {
            let Ok((stream, _)) = listener.accept() else { break };
            let (Ok(mut line), Ok(nonce)) = (Line::of_stranger(stream), Token::nonce()) else { continue };
            line.send(&Message::Challenge { nonce });
            self.strangers.push(Stranger { line, since: Instant::now(), nonce });
        }
        let mut said = None;
        for mut stranger in std::mem::take(&mut self.strangers) {
            stranger.line.flush();
            match stranger.line.next() {
                Some(Message::Hello { nonce, proof, rank, lost }) if rank < ranks && rank != own => {
                    let nonces = [nonce, stranger.nonce];
                    if Proof::from_bytes(proof) != token.proof(&role(rank, own), &nonces) {
                        continue;
                    }
                    let proof = token.proof(&role(own, rank), &nonces).to_bytes();
                    stranger.line.send(&Message::Welcome { proof });
                    stranger.line.trust();
                    self.known.insert(rank, PeerState::new(stranger.line));
                    said = Some(said.flatten().or(lost));
                }
                None if stranger.line.is_open() && stranger.since.elapsed() < INTRODUCTION => {
                    self.strangers.push(stranger);
                }
                _ => {}
            }
        }
        let surplus = self.strangers.len().saturating_sub(STRANGERS + ranks);
        drop(self.strangers.drain(..surplus));
        said
    }

    pub(super) fn send(&mut self, message: &Message) {
        self.known.values_mut().for_each(|known| known.line.send(message));
    }

    pub(super) fn flush(&mut self) {
        self.known.values_mut().for_each(|known| known.line.flush());
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;

    use isobar_collectives::flight::Phase;

    use super::*;

    const RANKS: usize = 3;

    const TOKEN: &[u8] = b"the token";

    /// Connects to rank 0 and answers its challenge with `hello`; returns whether the peer was accepted, and whether it got
    /// a reply.
    fn introduced(rank: usize, hello: impl Fn(Nonce) -> Message) -> (bool, bool) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut stranger = Line::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap();
        let mut peers = Peers::default();
        let end = Instant::now() + Duration::from_secs(20);
        let mut welcome = false;
        while stranger.is_open() && !welcome && Instant::now() < end {
            peers.accept(&listener, &Token::new(TOKEN), 0, RANKS);
            match stranger.wait(Instant::now() + Duration::from_millis(10)) {
                Some(Message::Challenge { nonce }) => stranger.send(&hello(nonce)),
                answer => welcome = matches!(answer, Some(Message::Welcome { .. })),
            }
        }
        (peers.known.contains_key(&rank), welcome)
    }

    fn hello(token: &[u8], rank: usize, role: &str) -> impl Fn(Nonce) -> Message {
        let (token, role) = (Token::new(token), role.to_owned());
        move |theirs| {
            let nonce = [7; 32];
            let proof = token.proof(&role, &[nonce, theirs]).to_bytes();
            Message::Hello { nonce, proof, rank, lost: None }
        }
    }

    #[test]
    fn who_knows_the_token_gets_in() {
        assert_eq!(introduced(2, hello(TOKEN, 2, &role(2, 0))), (true, true));
    }

    #[test]
    fn who_does_not_is_turned_away() {
        for token in [&b"the tokem"[..], b"the token ", b""] {
            assert_eq!(introduced(2, hello(token, 2, &role(2, 0))), (false, false), "{token:?}");
        }
        // This rank itself, a rank outside the world, and the proof of another rank.
        assert_eq!(introduced(0, hello(TOKEN, 0, &role(0, 0))), (false, false));
        assert_eq!(introduced(RANKS, hello(TOKEN, RANKS, &role(RANKS, 0))), (false, false));
        assert_eq!(introduced(2, hello(TOKEN, 2, &role(1, 0))), (false, false));
        // A proof that was heard elsewhere.
        let heard = hello(TOKEN, 2, &role(2, 0))([1; 32]);
        assert_eq!(introduced(2, |_| heard.clone()), (false, false));
    }

    /// A flood of connections that say nothing, or announce much and send it slowly.
    #[test]
    fn a_flood_of_strangers_keeps_no_rank_out() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (mut peers, token) = (Peers::default(), Token::new(TOKEN));
        let mut flood = Vec::new();
        let mut connect = |peers: &mut Peers, count: usize| {
            for at in 0..count {
                let mut stream = TcpStream::connect(address).unwrap();
                if at % 2 == 0 {
                    stream.write_all(&[0, 0, 1, 0, b'{']).unwrap();
                }
                flood.push(stream);
                peers.accept(&listener, &token, 0, RANKS);
            }
        };
        connect(&mut peers, 2 * STRANGERS);
        assert!(peers.strangers.len() <= STRANGERS + RANKS);
        let mut rank = Line::new(TcpStream::connect(address).unwrap()).unwrap();
        let of_rank = role(2, 0);
        let hello = hello(TOKEN, 2, &of_rank);
        let end = Instant::now() + Duration::from_secs(20);
        while !peers.known.contains_key(&2) && rank.is_open() && Instant::now() < end {
            connect(&mut peers, 20);
            if let Some(Message::Challenge { nonce }) = rank.next() {
                rank.send(&hello(nonce));
            }
        }
        assert!(peers.known.contains_key(&2));
        assert!(peers.strangers.len() <= STRANGERS + RANKS);
    }

    #[test]
    fn what_a_rank_says_of_another_is_not_believed() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut rank = Line::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap();
        let mut known = PeerState::new(Line::new(listener.accept().unwrap().0).unwrap());
        let goodbye = |of: usize| Message::Goodbye(known_peer(of));
        rank.send(&goodbye(2));
        rank.send(&Message::Release);
        let end = Instant::now() + Duration::from_secs(20);
        let mut rest = Vec::new();
        while rest.len() < 2 && Instant::now() < end {
            rest.extend(known.listen(1));
        }
        assert_eq!((rest.len(), known.outcome.clone()), (2, None));
        rank.send(&goodbye(1));
        drop(rank);
        while known.line.is_open() && Instant::now() < end {
            known.listen(1);
        }
        // A rank that has said goodbye is not lost.
        assert_eq!(known.outcome, Some(RankOutcome::Failed("no such file".to_owned())));
    }

    /// A rank whose connection is listened to until it has said `goodbye`.
    fn heard(goodbye: &[RankOutcome]) -> (PeerState, Line) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut rank = Line::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap();
        let mut known = PeerState::new(Line::new(listener.accept().unwrap().0).unwrap());
        for outcome in goodbye {
            rank.send(&Message::Goodbye(Peer { outcome: outcome.clone(), ..known_peer(1) }));
        }
        let end = Instant::now() + Duration::from_secs(20);
        while known.outcome.as_ref() != goodbye.last() && Instant::now() < end {
            known.listen(1);
        }
        (known, rank)
    }

    /// A process that is stopped again and again notices silence late, but does.
    #[test]
    fn silence_counts_but_for_the_time_in_which_the_listener_was_stopped() {
        let (mut known, _rank) = heard(&[]);
        for _ in 0..5 {
            known.heard -= Duration::from_secs(3);
            known.discount(Duration::from_secs(2));
        }
        known.is_silent(Duration::from_secs(60));
        assert_eq!(known.outcome, None);
        known.is_silent(Duration::from_secs(4));
        assert!(matches!(known.outcome, Some(RankOutcome::Silent(_))), "{:?}", known.outcome);
        known.discount(Duration::from_secs(60));
        assert!(known.heard <= Instant::now());
    }

    #[test]
    fn a_rank_that_has_said_goodbye_is_watched_until_its_connection_closes() {
        let (mut known, _rank) = heard(&[RankOutcome::Ended]);
        known.is_silent(Duration::from_secs(60));
        assert_eq!(known.outcome, Some(RankOutcome::Ended));
        known.is_silent(Duration::ZERO);
        assert!(matches!(known.outcome, Some(RankOutcome::Silent(_))), "{:?}", known.outcome);

        let (mut known, rank) = heard(&[RankOutcome::Ended]);
        drop(rank);
        let end = Instant::now() + Duration::from_secs(20);
        while known.line.is_open() && Instant::now() < end {
            known.listen(1);
        }
        known.is_silent(Duration::ZERO);
        assert_eq!(known.outcome, Some(RankOutcome::Ended));
    }

    #[test]
    fn a_rank_that_has_ended_well_may_come_to_grief_on_its_way_out() {
        let held = RankOutcome::Blocked("a call of MPI".to_owned());
        assert_eq!(heard(&[RankOutcome::Ended, held.clone()]).0.outcome, Some(held));
        let failed = known_peer(1).outcome;
        assert_eq!(heard(std::slice::from_ref(&failed)).0.outcome, Some(failed));
    }

    fn known_peer(rank: usize) -> Peer {
        let outcome = RankOutcome::Failed("no such file".to_owned());
        Peer { rank, host: "here".to_owned(), pid: 1, phase: Phase::Data, step: 3, last: None, outcome }
    }
}
