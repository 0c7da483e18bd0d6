//! The watching thread.

use std::cmp::Reverse;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use isobar_collectives::flight::{FlightEntry, FlightState, Phase};

use super::connect::{Channel, connect};
use super::frame::{Line, Message};
use super::last_resort::{LOST, PAUSE, Reaper, stopped_since};
use super::peers::{PeerState, Peers};
use super::{BEAT, FAREWELL, Shared};
use crate::flight::{self, FlightRecord, Peer, RankOutcome};

/// Polling interval of the connections.
const TICK: Duration = Duration::from_millis(20);

/// So soon a rank says that it does something else, where there are few ranks.
const NEWS: Duration = Duration::from_millis(50);
const FEW: usize = 64;

/// For so long after it was stopped a rank leaves the report to the others.
const TOLD: Duration = Duration::from_secs(5);

/// Time that an error of one rank waits for errors of the others: if all ranks have one, no rank was lost. Longer where another
/// rank has not come further than the failed one, and may find the same error yet.
const OWN_ERRORS: Duration = Duration::from_millis(500);
const SAME_ERROR: Duration = Duration::from_secs(2);

/// Time that ranks which gave up because of others wait for a cause to appear.
const CAUSE: Duration = Duration::from_secs(1);

/// From so long a silence on, a rank is taken for stopped where others gave up.
const SUSPICIOUS: Duration = Duration::from_millis(900);

/// From so long a silence on, a rank is taken for lost once this process was asked to end: launchers leave little time then.
const ASKED: Duration = Duration::from_secs(2);

/// A call of MPI that takes as long as operations may, and at least so long, does not return; where another rank gave up, one
/// that takes so long.
pub(super) const HELD: Duration = Duration::from_secs(2);

/// Time to wait for records.
const RECORDS: Duration = Duration::from_millis(300);

/// Time for a candidate to take over, and to wait for the others.
const TAKE_OVER: Duration = Duration::from_millis(300);

/// Time for a rank to resolve the symbols of its stacks, and to end by itself.
const STACKS: Duration = Duration::from_millis(350);
const OWN_END: Duration = Duration::from_millis(1500);

/// The most operations of a record that is sent; the file has all.
const SENT: usize = 32;

/// Of so many ranks that are not well the others are told.
const TOLD_OF: usize = 24;

/// A process that has begun to end its job ends after so long, whatever holds it up.
const AT_LAST: Duration = Duration::from_secs(4);

pub(super) struct Watch {
    shared: Arc<Shared>,
    channel: Channel,
    reaper: Reaper,
    role: Role,
    peers: Peers,
    /// Ranks that watched before, and were lost.
    gone: Vec<Peer>,
    took_over: Option<Instant>,
    /// Time and content of this rank's last heartbeat.
    beaten: Option<(Instant, (Phase, u64))>,
    looked: Instant,
    /// The call of MPI that the program is in, and since when it was seen there.
    call: Option<(u64, Instant)>,
    /// Time at which the first rank turned out to be unwell.
    trouble: Option<Instant>,
    /// Time at which this rank was last stopped for so long that the others took it for lost.
    stopped: Option<Instant>,
}

/// Returns whether to send a heartbeat: at regular intervals, and in small jobs soon after a change of phase.
fn beats(shared: &Shared, beaten: &mut Option<(Instant, (Phase, u64))>) -> bool {
    let doing = shared.flight.phase();
    let due = beaten.is_none_or(|(at, did)| {
        let news = did != doing && shared.own.ranks <= FEW;
        at.elapsed() >= if news { NEWS } else { BEAT }
    });
    if due {
        *beaten = Some((Instant::now(), doing));
    }
    due
}

enum Role {
    Reporter,
    Follower {
        of: usize,
        reporter: Box<PeerState>,
        goodbye: bool,
    },
    /// The rank that watched has ended in good order: only this rank's own end is waited for.
    Alone,
}

impl Watch {
    pub(super) fn reporter(shared: Arc<Shared>, channel: Channel, reaper: Reaper) -> Self {
        Self::new(shared, channel, reaper, Role::Reporter)
    }

    pub(super) fn follower(shared: Arc<Shared>, channel: Channel, reaper: Reaper, line: Line) -> Self {
        let reporter = Box::new(PeerState::new(line));
        Self::new(shared, channel, reaper, Role::Follower { of: 0, reporter, goodbye: false })
    }

    fn new(shared: Arc<Shared>, channel: Channel, reaper: Reaper, role: Role) -> Self {
        Self {
            shared,
            channel,
            reaper,
            role,
            peers: Peers::default(),
            gone: Vec::new(),
            took_over: None,
            beaten: None,
            looked: Instant::now(),
            call: None,
            trouble: None,
            stopped: None,
        }
    }

    pub(super) fn run(mut self) {
        loop {
            self.shared.rest(TICK);
            if self.shared.state().closed {
                self.shared.over();
                return;
            }
            if self.looked.elapsed() > self.noticed() {
                self.stopped = Some(Instant::now());
            }
            self.check_transport();
            let own = &self.shared.own;
            let said = self.peers.accept(&self.channel.listener, &self.channel.token, own.rank, own.ranks);
            let over = match &self.role {
                Role::Alone => self.alone_round(),
                Role::Reporter => {
                    self.gone.extend(said.flatten().filter(|peer| self.is_new(peer)));
                    self.report_round()
                }
                // Somebody says that the rank that watches is lost, and means that this one takes over.
                Role::Follower { of, .. } => {
                    let of = *of;
                    match said.flatten().filter(|peer| peer.rank == of) {
                        Some(lost) => {
                            self.take_over(lost);
                            false
                        }
                        None => self.follow_round(),
                    }
                }
            };
            self.looked = Instant::now();
            self.check_exit();
            if over {
                self.shared.over();
                break;
            }
        }
        // The connections close; the way out of the process is watched to its end.
        (self.role, self.peers) = (Role::Alone, Peers::default());
        while self.shared.leaving() == Some(RankOutcome::Ended) && !self.shared.state().closed {
            thread::sleep(BEAT);
            self.check_transport();
            self.looked = Instant::now();
            self.check_exit();
        }
        if let Some(outcome @ RankOutcome::Blocked(_)) = self.shared.leaving() {
            self.report(Some(outcome));
        }
    }

    /// Gives up where the main thread has begun to end the process, and it does not end.
    fn check_exit(&self) {
        let exiting = self.shared.state().exiting;
        // Rank 0 goes on by itself once it has waited for the others so long.
        let waits = self.shared.longest_exit().saturating_add(FAREWELL);
        if exiting.is_some_and(|since| since.elapsed() > waits) {
            let text = format!(
                "isobar: rank {} has done its work, and its process has not ended for {} s (distributed.timeout_s)\n",
                self.shared.own.rank,
                waits.as_secs_f64()
            );
            let _ = std::io::stderr().lock().write_all(text.as_bytes());
            signal_hook::low_level::exit(LOST);
        }
    }

    /// For how long this rank may be stopped before the others take it for lost: they count from its last beat.
    fn noticed(&self) -> Duration {
        let silence = self.channel.silence;
        silence.saturating_sub(2 * BEAT).max(silence.min(PAUSE))
    }

    /// Gives up for the program where MPI does not return to it.
    fn check_transport(&mut self) {
        let call = self.channel.call_under_way();
        let stopped = stopped_since(self.looked);
        let same = self.call.filter(|&(seen, _)| Some(seen) == call);
        let seen = same.map(|(call, since)| (call, since + stopped));
        self.call = seen.or(call.map(|call| (call, Instant::now())));
        // The end of MPI may not return either.
        if matches!(self.shared.leaving(), None | Some(RankOutcome::Ended))
            && let Some(outcome) = self.held_for(self.channel.deadline.max(HELD))
        {
            self.shared.state().leaving = Some(outcome);
            if let Role::Follower { goodbye, .. } = &mut self.role {
                *goodbye = false;
            }
        }
    }

    /// That the program has been in one call of MPI for so long.
    fn held_for(&self, longest: Duration) -> Option<RankOutcome> {
        self.call.filter(|(_, since)| since.elapsed() > longest)?;
        let record = self.record("", &[], usize::MAX, false);
        let called = record.entries.iter().rev().find(|entry| entry.state == FlightState::Called);
        let operation =
            called.or(record.stuck()).map_or_else(|| "a call of MPI".to_owned(), FlightEntry::call);
        Some(RankOutcome::Blocked(flight::plain(&operation)))
    }

    /// Looks at all others, as the rank that watches. Says whether the watch is over: once all others have ended, too.
    fn report_round(&mut self) -> bool {
        let (stopped, silence) = (stopped_since(self.looked), self.silence());
        for (&rank, known) in &mut self.peers.known {
            known.discount(stopped);
            known.listen(rank);
            known.is_silent(silence);
        }
        if beats(&self.shared, &mut self.beaten) {
            let beat = Message::Beat(self.shared.peer(RankOutcome::Ended));
            self.peers.send(&beat);
        }
        self.peers.flush();
        let own = self.shared.leaving();
        let unwell = self.unwell(own.clone());
        if unwell.is_empty() {
            let Some(outcome) = own else { return false };
            if !self.shared.state().done {
                let goodbye = Message::Goodbye(self.shared.peer(outcome));
                self.peers.send(&goodbye);
                self.shared.done();
            }
            return self.peers.known.values().all(|known| !known.line.is_open());
        }
        self.shared.lost.store(true, Ordering::Relaxed);
        let since = self.trouble.get_or_insert_with(Instant::now).elapsed();
        let ended = self.peers.known.values().filter(|known| known.outcome.is_some()).count();
        let all = ended + self.gone.len() + usize::from(own.is_some()) == self.shared.own.ranks;
        let heard = self.peers.known.len() + self.gone.len() + 1 == self.shared.own.ranks;
        if self.took_over.is_some_and(|at| at.elapsed() < TAKE_OVER) && !heard {
            return false;
        }
        let is = |wanted: fn(&RankOutcome) -> bool| unwell.iter().any(|peer| wanted(&peer.outcome));
        let failed = is(|outcome| matches!(outcome, RankOutcome::Failed(_)));
        let gave_up = is(|outcome| matches!(outcome, RankOutcome::GaveUp(_) | RankOutcome::Blocked(_)));
        if is(|outcome| {
            matches!(outcome, RankOutcome::Closed | RankOutcome::Silent(_) | RankOutcome::Panicked(_))
        }) {
            self.report(own);
        } else if failed && all && !gave_up {
            // Each rank has an error of its own, which it prints where it is not this rank's.
            if let Some(text) = own.as_ref().and_then(RankOutcome::text) {
                self.peers.send(&Message::Printed { text: text.to_owned() });
            }
            self.peers.send(&Message::Release);
            return true;
        } else {
            let patience = match (failed, failed && self.may_fail_too(&unwell, own.is_some())) {
                (true, true) => SAME_ERROR,
                (true, false) => OWN_ERRORS,
                (false, _) => CAUSE,
            };
            if all || since > patience {
                self.report(own);
            }
        }
        false
    }

    /// Returns whether a rank that has not ended is still at, or just behind, the last operation of one that failed.
    fn may_fail_too(&self, unwell: &[Peer], ending: bool) -> bool {
        let own = (!ending).then(|| self.shared.peer(RankOutcome::Ended));
        let others = self.peers.known.values().filter(|known| known.outcome.is_none());
        let going = others.filter_map(|known| known.last.clone()).chain(own);
        let last: Vec<_> = going.filter_map(|peer| peer.last).collect();
        let failed = unwell.iter().filter(|peer| matches!(peer.outcome, RankOutcome::Failed(_)));
        failed.filter_map(|peer| peer.last.as_ref()).any(|of_failed| {
            last.iter()
                .any(|entry| entry.context == of_failed.context && entry.sequence <= of_failed.sequence)
        })
    }

    /// Silence after which a rank counts as lost.
    fn silence(&self) -> Duration {
        match self.shared.asked.load(Ordering::Relaxed) {
            true => self.channel.silence.min(ASKED),
            false => self.channel.silence,
        }
    }

    /// Whom something befell, this rank included.
    fn unwell(&self, own: Option<RankOutcome>) -> Vec<Peer> {
        let known = self.peers.known.iter();
        let contacts = &self.channel.contacts;
        let others = known
            .filter_map(|(&rank, known)| Some(known.peer(rank, &contacts[rank], known.outcome.clone()?)));
        let own = own.map(|outcome| self.shared.peer(outcome));
        let all = self.gone.iter().cloned().chain(others).chain(own);
        let mut unwell: Vec<Peer> = all.filter(|peer| peer.outcome != RankOutcome::Ended).collect();
        // The causes first.
        unwell.sort_by_key(|peer| Reverse(peer.outcome.weight()));
        if unwell.len() > TOLD_OF {
            // A message holds so many.
            unwell.truncate(TOLD_OF);
        }
        unwell
    }

    /// The ranks that never connected; none where this rank took over, and not all have come to it.
    fn absent(&self) -> Vec<Peer> {
        if self.took_over.is_some() {
            return Vec::new();
        }
        let contacts = self.channel.contacts.iter().enumerate();
        let peers = contacts.map(|(rank, contact)| contact.peer(rank, RankOutcome::Absent));
        peers.filter(|peer| !self.peers.known.contains_key(&peer.rank) && self.is_new(peer)).collect()
    }

    fn is_new(&self, peer: &Peer) -> bool {
        self.gone.iter().all(|gone| gone.rank != peer.rank) && peer.rank != self.shared.own.rank
    }

    /// As one of those that are watched. Says whether the watch is over.
    fn follow_round(&mut self) -> bool {
        let (leaving, silence, stopped) = (self.shared.leaving(), self.silence(), stopped_since(self.looked));
        let Role::Follower { of, reporter, .. } = &mut self.role else { return false };
        let of = *of;
        reporter.discount(stopped);
        let said = reporter.listen(of);
        reporter.is_silent(silence);
        for message in said {
            match message {
                Message::Gather { reason, peers } => {
                    self.gather(&reason, &peers);
                    return true;
                }
                Message::Printed { text } => self.shared.state().said = Some(text),
                Message::Release => return true,
                // Unexpected messages are ignored.
                _ => {}
            }
        }
        let Role::Follower { reporter, goodbye, .. } = &mut self.role else { return false };
        match reporter.outcome.clone() {
            Some(outcome @ (RankOutcome::Closed | RankOutcome::Silent(_))) => {
                let lost = reporter.peer(of, &self.channel.contacts[of], outcome);
                self.take_over(lost);
                return false;
            }
            // It has ended; until then it is watched, whatever it has said.
            Some(RankOutcome::Ended) if !reporter.line.is_open() => {
                self.role = Role::Alone;
                return false;
            }
            _ => {}
        }
        if let Some(outcome) = leaving.filter(|_| !*goodbye) {
            *goodbye = true;
            if outcome == RankOutcome::Ended {
                self.shared.done();
            }
            reporter.line.send(&Message::Goodbye(self.shared.peer(outcome)));
            return false;
        }
        if beats(&self.shared, &mut self.beaten) {
            reporter.line.send(&Message::Beat(self.shared.peer(RankOutcome::Ended)));
        }
        reporter.line.flush();
        false
    }

    /// As one that nobody watches any more. Says whether the watch is over.
    fn alone_round(&mut self) -> bool {
        match self.shared.leaving() {
            Some(outcome @ RankOutcome::Blocked(_)) => {
                self.report(Some(outcome));
                false
            }
            leaving => leaving.is_some(),
        }
    }

    /// The rank that watched is lost: the lowest one that answers takes over.
    fn take_over(&mut self, lost: Peer) {
        self.shared.lost.store(true, Ordering::Relaxed);
        let own = self.shared.own.rank;
        for candidate in lost.rank + 1..own {
            let end = Instant::now() + TAKE_OVER;
            if let Ok(line) = connect(&self.channel, candidate, own, Some(lost.clone()), end) {
                let reporter = Box::new(PeerState::new(line));
                self.role = Role::Follower { of: candidate, reporter, goodbye: false };
                self.beaten = None;
                return;
            }
        }
        if self.is_new(&lost) {
            self.gone.push(lost);
        }
        self.role = Role::Reporter;
        self.took_over = Some(Instant::now());
    }

    /// Asks all for their records, prints the report, and ends the process.
    fn report(&mut self, own: Option<RankOutcome>) {
        self.reaper.end_within(AT_LAST);
        let own = own.or_else(|| self.held_for(HELD));
        let unwell = self.unwell(own.clone());
        let reason = unwell.first().map(|peer| flight::plain(&peer.to_string())).unwrap_or_default();
        let ask = Message::Gather { reason: reason.clone(), peers: unwell.clone() };
        self.ask(&ask);
        self.write(&reason, &unwell);
        let end = Instant::now() + RECORDS;
        loop {
            // Some may come only now, where the rank that watched was lost.
            self.ask(&ask);
            let mut missing = false;
            for (&rank, known) in &mut self.peers.known {
                known.listen(rank);
                known.line.flush();
                let answers = !matches!(known.outcome, Some(RankOutcome::Closed | RankOutcome::Silent(_)));
                missing |= known.record.is_none() && answers;
            }
            if !missing || Instant::now() >= end {
                break;
            }
            thread::sleep(Duration::from_millis(5));
        }
        for known in self.peers.known.values_mut().filter(|known| known.record.is_none()) {
            known.is_silent(SUSPICIOUS);
        }
        self.gone.extend(self.absent());
        let unwell = self.unwell(own.clone());
        let others = self.peers.known.values_mut().filter_map(|known| known.record.take());
        let mut records: Vec<FlightRecord> = others.collect();
        records.push(self.record(&reason, &unwell, SENT, false));
        records.sort_by_key(|record| record.rank);
        let text = flight::report(&flight::diagnose(&records), &self.folder());
        // The others have ended because of this rank, and have said so.
        let told = self.stopped.is_some_and(|at| at.elapsed() < TOLD);
        let stacks = self.write_with_stacks(&reason, &unwell);
        // A blocked reader does not delay the end: see [`Reaper`].
        let stopped =
            self.peers.known.values().any(|known| matches!(known.outcome, Some(RankOutcome::Silent(_))))
                || self.gone.iter().any(|peer| matches!(peer.outcome, RankOutcome::Silent(_)));
        if !told {
            let _ = std::io::stderr().lock().write_all(text.as_bytes());
        }
        tracing::debug!("{text}");
        self.peers.send(&Message::Release);
        self.end(&stacks, stopped);
    }

    /// Asks those for their records that were not asked yet.
    fn ask(&mut self, ask: &Message) {
        let own = &self.shared.own;
        self.peers.accept(&self.channel.listener, &self.channel.token, own.rank, own.ranks);
        for known in self.peers.known.values_mut().filter(|known| !known.asked) {
            known.asked = true;
            known.line.send(ask);
        }
    }

    /// Writes this rank's record, sends it to who asked, and ends the process.
    fn gather(&mut self, reason: &str, peers: &[Peer]) {
        self.shared.lost.store(true, Ordering::Relaxed);
        self.reaper.end_within(AT_LAST);
        if let Role::Follower { of, .. } = &self.role {
            let reporter = peers.iter().find(|peer| peer.rank == *of);
            let mut state = self.shared.state();
            state.said = reporter.and_then(|peer| peer.outcome.text()).map(str::to_owned);
            state.reported = true;
        }
        // Another rank has given up first: this one says why it could not do its part.
        let held = self.held_for(HELD).map(|outcome| self.shared.peer(outcome));
        let peers = &peers.iter().cloned().chain(held).collect::<Vec<_>>()[..];
        self.write(reason, peers);
        let record = self.record(reason, peers, SENT, false);
        let stacks = self.write_with_stacks(reason, peers);
        if let Role::Follower { reporter, .. } = &mut self.role {
            reporter.line.send(&Message::Record(Box::new(record)));
            // Launchers end a job at once when the first rank has ended badly.
            reporter.line.wait(Instant::now() + 2 * RECORDS);
        }
        self.end(&stacks, false);
    }

    fn record(&self, reason: &str, peers: &[Peer], most: usize, stacks: bool) -> FlightRecord {
        flight::record(&self.shared.own, &self.shared.flight, reason, peers, most, stacks)
    }

    fn folder(&self) -> PathBuf {
        self.shared.folder.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes this rank's record; that the disk is full does not keep the job from its end.
    fn write(&self, reason: &str, peers: &[Peer]) {
        let record = self.record(reason, peers, usize::MAX, false);
        if let Err(error) = flight::write(&self.folder(), &record) {
            tracing::warn!("{error}");
        }
    }

    /// Writes the record with the stacks of waiting threads. Runs on its own thread, since resolving symbols takes a while.
    fn write_with_stacks(&self, reason: &str, peers: &[Peer]) -> Receiver<()> {
        let (own, recorder, folder) = (self.shared.own.clone(), self.shared.flight.clone(), self.folder());
        let (reason, peers) = (reason.to_owned(), peers.to_vec());
        let (sender, receiver) = channel();
        let thread = thread::Builder::new().name("isobar-stacks".to_owned());
        // Without a thread the record stays as it is.
        let _ = thread.spawn(move || {
            let record = flight::record(&own, &recorder, &reason, &peers, usize::MAX, true);
            // The record without them is there already.
            let _ = flight::write(&folder, &record);
            drop(sender);
        });
        receiver
    }

    /// Ends the process: by itself where the program is about to, else with the code of a job that has lost a rank. Over MPI
    /// a rank that is stopped ends only if MPI ends the whole job.
    fn end(&self, stacks: &Receiver<()>, abort: bool) {
        let leaves = self.shared.leaving().is_some_and(|outcome| !matches!(outcome, RankOutcome::Blocked(_)));
        let last = if leaves { OWN_END + STACKS } else { 2 * STACKS };
        self.reaper.end_within(last);
        let _ = stacks.recv_timeout(STACKS);
        self.shared.done();
        if leaves && !abort {
            thread::sleep(OWN_END);
        }
        crate::logging::flush();
        #[cfg(feature = "mpi")]
        if abort && self.channel.mpi {
            isobar_collectives::mpi::abort(LOST);
        }
        #[cfg(not(feature = "mpi"))]
        let _ = (abort, self.channel.mpi);
        signal_hook::low_level::exit(LOST);
    }
}
