//! The ranks that a watching rank hears of.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use isobar_collectives::flight::Phase;

use super::frame::{Line, Message};
use crate::flight::{Fate, FlightRecord, Peer};

/// How long a stranger may take to say who it is.
const INTRODUCTION: Duration = Duration::from_secs(2);

/// More connections than so many beyond the ranks are not taken.
const STRANGERS: usize = 16;

/// A rank, as another hears of it.
pub(super) struct Known {
    pub(super) line: Line,
    pub(super) heard: Instant,
    /// What it said last of itself; its fate where it has one.
    pub(super) last: Option<Peer>,
    pub(super) fate: Option<Fate>,
    pub(super) record: Option<FlightRecord>,
    /// Whether it was asked for its record.
    pub(super) asked: bool,
}

impl Known {
    pub(super) fn new(line: Line) -> Self {
        Self { line, heard: Instant::now(), last: None, fate: None, record: None, asked: false }
    }

    /// Takes in what the rank has said of itself; gives the rest.
    pub(super) fn listen(&mut self, rank: usize) -> Vec<Message> {
        let mut rest = Vec::new();
        for message in self.line.receive() {
            self.heard = Instant::now();
            match message {
                Message::Beat(peer) if peer.rank == rank => self.last = Some(peer),
                Message::Goodbye(peer) if peer.rank == rank => {
                    self.fate.get_or_insert(peer.fate.clone());
                    self.last = Some(peer);
                }
                Message::Record(record) if record.rank == rank => self.record = Some(*record),
                other => rest.push(other),
            }
        }
        if !self.line.is_open() && self.fate.is_none() {
            self.fate = Some(Fate::Closed);
        }
        rest
    }

    /// A rank that has been silent for so long is lost.
    pub(super) fn is_silent(&mut self, longest: Duration) {
        let silent = self.heard.elapsed();
        if silent > longest && self.fate.is_none() {
            self.fate = Some(Fate::Silent(silent.as_secs_f64()));
        }
    }

    /// The rank, with what became of it.
    pub(super) fn peer(&self, rank: usize, fate: Fate) -> Peer {
        let unheard = || Peer {
            rank,
            host: "a machine not heard of".to_owned(),
            pid: 0,
            phase: Phase::Start,
            step: 0,
            last: None,
            fate: fate.clone(),
        };
        Peer { fate: fate.clone(), ..self.last.clone().unwrap_or_else(unheard) }
    }
}

/// All of them.
#[derive(Default)]
pub(super) struct Peers {
    pub(super) known: BTreeMap<usize, Known>,
    strangers: Vec<(Line, Instant)>,
}

impl Peers {
    /// Takes in who has connected; gives what they say of the rank that watched before.
    pub(super) fn accept(
        &mut self,
        listener: &TcpListener,
        token: &str,
        own: usize,
        ranks: usize,
    ) -> Option<Option<Peer>> {
        while self.strangers.len() < STRANGERS + ranks {
            let Ok((stream, _)) = listener.accept() else { break };
            let Ok(line) = Line::new(stream) else { continue };
            self.strangers.push((line, Instant::now()));
        }
        let mut said = None;
        for (mut line, since) in std::mem::take(&mut self.strangers) {
            match line.next() {
                Some(Message::Hello { token: theirs, rank, lost })
                    if same(&theirs, token) && rank < ranks && rank != own =>
                {
                    line.send(&Message::Welcome);
                    self.known.insert(rank, Known::new(line));
                    said = Some(said.flatten().or(lost));
                }
                None if line.is_open() && since.elapsed() < INTRODUCTION => {
                    self.strangers.push((line, since))
                }
                _ => {}
            }
        }
        said
    }

    pub(super) fn send(&mut self, message: &Message) {
        self.known.values_mut().for_each(|known| known.line.send(message));
    }

    pub(super) fn flush(&mut self) {
        self.known.values_mut().for_each(|known| known.line.flush());
    }
}

/// Whether two tokens are the same, in a time that does not tell where they differ.
fn same(one: &str, other: &str) -> bool {
    let different = one.bytes().zip(other.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b));
    one.len() == other.len() && different == 0
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    const RANKS: usize = 3;

    /// What becomes of somebody who introduces itself so to rank 0: whether it is known, and whether it is answered.
    fn introduced(token: &str, rank: usize) -> (bool, bool) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut stranger = Line::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap();
        stranger.send(&Message::Hello { token: token.to_owned(), rank, lost: None });
        let mut peers = Peers::default();
        let end = Instant::now() + Duration::from_secs(20);
        let mut answer = None;
        while stranger.is_open() && answer.is_none() && Instant::now() < end {
            peers.accept(&listener, "the token", 0, RANKS);
            answer = stranger.wait(Instant::now() + Duration::from_millis(10));
        }
        (peers.known.contains_key(&rank), answer == Some(Message::Welcome))
    }

    #[test]
    fn who_knows_the_token_gets_in() {
        assert_eq!(introduced("the token", 2), (true, true));
    }

    #[test]
    fn who_does_not_is_turned_away() {
        for token in ["the tokem", "the token ", "the toke", ""] {
            assert_eq!(introduced(token, 2), (false, false), "{token:?}");
        }
        // The own rank, and one that there is not.
        assert_eq!(introduced("the token", 0), (false, false));
        assert_eq!(introduced("the token", RANKS), (false, false));
    }

    #[test]
    fn what_a_rank_says_of_another_is_not_believed() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut rank = Line::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap();
        let mut known = Known::new(Line::new(listener.accept().unwrap().0).unwrap());
        let goodbye = |of: usize| Message::Goodbye(known_peer(of));
        rank.send(&goodbye(2));
        rank.send(&Message::Welcome);
        let end = Instant::now() + Duration::from_secs(20);
        let mut rest = Vec::new();
        while rest.len() < 2 && Instant::now() < end {
            rest.extend(known.listen(1));
        }
        assert_eq!((rest.len(), known.fate.clone()), (2, None));
        rank.send(&goodbye(1));
        drop(rank);
        while known.line.is_open() && Instant::now() < end {
            known.listen(1);
        }
        // Who has said goodbye is not lost.
        assert_eq!(known.fate, Some(Fate::Failed("no such file".to_owned())));
    }

    fn known_peer(rank: usize) -> Peer {
        let fate = Fate::Failed("no such file".to_owned());
        Peer { rank, host: "here".to_owned(), pid: 1, phase: Phase::Data, step: 3, last: None, fate }
    }
}
