//! One start of all ranks, to the end of the last.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::sys::signal::Signal;

use super::cause::{End, EndRequest, ExitReason};
use super::guard::Guard;
use super::hosts::Place;
use super::out_of_memory::OomCounters;
use super::output::Tail;
use super::process::{Event, Rank, Recipe};
use isobar_command::exit::Exit;

/// Time for a killed process to disappear.
const GONE: Duration = Duration::from_secs(5);

/// Time for the connections to other hosts to close, after the kill request.
const CLOSED: Duration = Duration::from_secs(2);

/// To so many ranks of a host connections are made at once: sshd refuses some of more than ten (`MaxStartups`).
const AT_ONCE: usize = 8;

/// After so long a connection is taken for made, or for one that others need not wait for.
const CONNECTED: Duration = Duration::from_secs(5);

/// Signals that come so soon after the first are the same request, as for the ranks: a service manager tells all processes of a
/// job, and a script around the launcher passes its own on.
const SAME: Duration = Duration::from_secs(2);

/// Interval at which ranks are checked once others have ended.
const LOOK: Duration = Duration::from_millis(500);

/// Outcome of an attempt.
pub(super) struct Outcome {
    pub(super) ends: Vec<End>,
    /// Of each rank that was started, what is kept of its standard error.
    pub(super) tails: Vec<(usize, Tail)>,
    /// The ranks that were not started, since others had failed before, or the launcher was asked to end.
    pub(super) left_out: Vec<usize>,
    /// The signal by which the launcher was asked to end.
    pub(super) stopped: Option<Signal>,
}

/// Stage of the shutdown of the ranks left after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
enum ShutdownStage {
    /// Nothing has failed.
    None,
    /// They have time to end by themselves, as those do that watch each other.
    Time,
    /// They were sent SIGTERM.
    Terminated,
    /// They were sent SIGKILL.
    Killed,
    /// The connections to their hosts were cut, too.
    Cut,
}

/// The ranks of an attempt while it runs.
struct Attempt<'a> {
    recipe: &'a Recipe,
    number: u32,
    /// By their numbers, those that were started.
    ranks: Vec<Option<Rank>>,
    ends: Vec<Option<End>>,
    drained: usize,
    began: Instant,
    stage: ShutdownStage,
    /// Time at which the next stage begins.
    rises: Option<Instant>,
    /// The signals by which the launcher was asked to end.
    stops: Vec<Signal>,
    /// Time of the first of these signals.
    asked: Option<Instant>,
    /// Ranks that are stopped after others have ended, and since when.
    stopped: BTreeMap<usize, Instant>,
    /// The kernel's counters of out-of-memory kills at the start.
    kills: OomCounters,
}

/// Starts all ranks and waits until they have ended, however that may be.
///
/// `variables` gives those of a rank.
pub(super) fn run(
    recipe: &Recipe,
    places: &[Place],
    variables: impl Fn(&Place) -> Vec<(&'static str, String)>,
    number: u32,
    guard: &mut Guard,
    (events, happens): (&Sender<Event>, &Receiver<Event>),
) -> Result<Outcome> {
    let mut attempt = Attempt {
        recipe,
        number,
        ranks: places.iter().map(|_| None).collect(),
        ends: vec![None; places.len()],
        drained: 0,
        began: Instant::now(),
        stage: ShutdownStage::None,
        rises: None,
        stops: Vec::new(),
        asked: None,
        stopped: BTreeMap::new(),
        kills: OomCounters::read(),
    };
    let mut queues = queues(places);
    while let Some(place) = attempt.next_place(&mut queues, happens) {
        match Rank::start(recipe, place, &variables(place), number, guard, events) {
            Ok(rank) => attempt.ranks[place.rank] = Some(rank),
            Err(error) => {
                attempt.press(ShutdownStage::Killed);
                attempt.wait(happens);
                guard.none();
                return Err(error);
            }
        }
    }
    attempt.wait(happens);
    attempt.clear(happens);
    guard.none();
    let tails = attempt.started().map(|rank| (rank.place.rank, rank.tail.clone())).collect();
    let left_out = (0..places.len()).filter(|&rank| attempt.ranks[rank].is_none()).collect();
    let ends = attempt.ends.into_iter().flatten().collect();
    Ok(Outcome { ends, tails, left_out, stopped: attempt.stops.first().copied() })
}

/// The ranks of a host that are still to be started, and those to which connections are being made.
struct Queue<'a> {
    waiting: VecDeque<&'a Place>,
    connecting: Vec<usize>,
}

fn queues(places: &[Place]) -> Vec<Queue<'_>> {
    let mut queues: Vec<Queue<'_>> = Vec::new();
    for place in places {
        // The ranks of a host follow each other.
        match queues.last_mut().filter(|queue| queue.waiting[0].host == place.host) {
            Some(queue) => queue.waiting.push_back(place),
            None => queues.push(Queue { waiting: [place].into(), connecting: Vec::new() }),
        }
    }
    queues
}

impl Attempt<'_> {
    /// The rank to be started next, once its host takes one more connection; none where all are started, or something failed.
    fn next_place<'a>(
        &mut self,
        queues: &mut Vec<Queue<'a>>,
        happens: &Receiver<Event>,
    ) -> Option<&'a Place> {
        loop {
            while let Ok(event) = happens.try_recv() {
                self.take(event);
            }
            if self.stage != ShutdownStage::None || !self.stops.is_empty() {
                return None;
            }
            queues.retain(|queue| !queue.waiting.is_empty());
            let mut soonest: Option<Instant> = None;
            for queue in &mut *queues {
                queue.connecting.retain(|&rank| self.connecting_since(rank).is_some());
                let first = queue.connecting.first().filter(|_| queue.connecting.len() >= AT_ONCE);
                match first.and_then(|&rank| self.connecting_since(rank)) {
                    Some(since) => soonest = Some(soonest.map_or(since, |soonest| soonest.min(since))),
                    None => {
                        let place = queue.waiting.pop_front()?;
                        queue.connecting.push(place.rank);
                        return Some(place);
                    }
                }
            }
            // When none is pending any more, all are started.
            if let Some(event) = self.next(happens, Some(soonest? + CONNECTED)) {
                self.take(event);
            }
        }
    }

    /// Since when a connection to a rank's host is being made, where one is.
    fn connecting_since(&self, rank: usize) -> Option<Instant> {
        let (rank, end) = (self.ranks[rank].as_ref()?, &self.ends[rank]);
        let connecting = !rank.connected && end.is_none() && rank.began.elapsed() < CONNECTED;
        connecting.then_some(rank.began)
    }

    fn started(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.iter().flatten()
    }

    fn started_mut(&mut self) -> impl Iterator<Item = &mut Rank> {
        self.ranks.iter_mut().flatten()
    }

    /// Until all ranks have ended, or there is nothing more that could end them.
    fn wait(&mut self, happens: &Receiver<Event>) {
        while self.ranks.iter().zip(&self.ends).any(|(rank, end)| rank.is_some() && end.is_none()) {
            let rises = self.rises.or_else(|| self.look_for_stopped());
            match self.next(happens, rises) {
                Some(event) => self.take(event),
                None if self.rises.is_none() => {}
                None => match self.stage {
                    ShutdownStage::None | ShutdownStage::Time => {
                        self.note_stopped();
                        self.press(ShutdownStage::Terminated);
                    }
                    ShutdownStage::Terminated => self.press(ShutdownStage::Killed),
                    ShutdownStage::Killed => self.press(ShutdownStage::Cut),
                    ShutdownStage::Cut => {
                        for index in 0..self.ranks.len() {
                            self.ended(index, ExitReason::Never);
                        }
                    }
                },
            }
        }
    }

    /// Records the ranks of this machine that are stopped when the grace period is over. Ranks that were stopped before
    /// the others could watch them are named by nobody else: where all others have only lost a rank, these are the cause.
    fn note_stopped(&mut self) {
        let lost = ExitReason::Code(Exit::Lost as u8);
        if self.ends.iter().flatten().all(|end| end.how.is_good() || end.how == lost) {
            for rank in self.stopped_ranks() {
                self.stopped.entry(rank).or_insert_with(Instant::now);
            }
        }
    }

    /// Returns the running ranks of this machine that are stopped.
    fn stopped_ranks(&self) -> Vec<usize> {
        let left = self.started().filter(|rank| self.ends[rank.place.rank].is_none());
        left.filter(|rank| rank.place.here && is_stopped(rank.pid)).map(|rank| rank.place.rank).collect()
    }

    /// Ends a rank of this machine that is stopped (SIGSTOP) after others have succeeded, once the grace
    /// period is over: no other process may notice that it never exits. Returns the time of the next check.
    fn look_for_stopped(&mut self) -> Option<Instant> {
        if !self.ends.iter().flatten().any(|end| end.how.is_good()) {
            return None;
        }
        let stopped = self.stopped_ranks();
        self.stopped.retain(|rank, _| stopped.contains(rank));
        for rank in stopped {
            self.stopped.entry(rank).or_insert_with(Instant::now);
        }
        if self.stopped.values().any(|since| since.elapsed() >= self.recipe.grace) {
            self.press(ShutdownStage::Terminated);
            return self.rises;
        }
        Some(Instant::now() + LOOK)
    }

    /// Ends what ranks that have ended themselves have started and left, and waits until all that was written is passed on.
    fn clear(&mut self, happens: &Receiver<Event>) {
        let good = self.ends.iter().flatten().all(|end| end.how.is_good());
        // The readers of a rank's output, for instance, may need a little more time.
        let patience = if good { self.recipe.grace } else { CLOSED.min(self.recipe.grace) };
        self.settle(happens, Instant::now() + patience);
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            if self.is_clear() {
                break;
            }
            self.started_mut().filter(|rank| rank.has_left()).for_each(|rank| rank.signal(signal));
            self.settle(happens, Instant::now() + CLOSED);
        }
        self.started_mut().for_each(Rank::let_go);
        let end = Instant::now() + CLOSED;
        while self.drained < self.started().count() {
            match self.next(happens, Some(end)) {
                Some(event) => self.take(event),
                None => break,
            }
        }
    }

    fn settle(&mut self, happens: &Receiver<Event>, end: Instant) {
        while !self.is_clear() && Instant::now() < end {
            // Groups do not tell when they are empty.
            let soon = Instant::now() + Duration::from_millis(20);
            if let Some(event) = self.next(happens, Some(soon.min(end))) {
                self.take(event);
            }
        }
    }

    fn is_clear(&self) -> bool {
        self.drained == self.started().count() && !self.started().any(Rank::has_left)
    }

    /// Returns the next event; `None` at the deadline.
    fn next(&self, happens: &Receiver<Event>, until: Option<Instant>) -> Option<Event> {
        let Some(until) = until else { return happens.recv().ok() };
        // The launcher itself keeps a sender, so that an error is the end of the time.
        happens.recv_timeout(until.saturating_duration_since(Instant::now())).ok()
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Ended { attempt, rank, how } if attempt == self.number => {
                self.ended(rank, how);
                if !how.is_good() && self.stage == ShutdownStage::None {
                    self.press(ShutdownStage::Time);
                }
            }
            Event::Drained { attempt } if attempt == self.number => self.drained += 1,
            Event::Connected { attempt, rank } if attempt == self.number => {
                if let Some(Some(rank)) = self.ranks.get_mut(rank) {
                    rank.connected = true;
                }
            }
            // Of an attempt whose ranks could not be ended.
            Event::Connected { .. } | Event::Ended { .. } | Event::Drained { .. } => {}
            Event::Signal(signal) => self.pass_on(signal),
        }
    }

    fn ended(&mut self, rank: usize, how: ExitReason) {
        let (Some(end), Some(Some(started))) = (self.ends.get_mut(rank), self.ranks.get(rank)) else {
            return;
        };
        if end.is_some() {
            return;
        }
        let place = started.place.clone();
        let pid = place.here.then_some(started.pid);
        // So does ssh end when all on its other end is killed.
        let killed = self.stage >= ShutdownStage::Killed && how == ExitReason::Unreachable;
        let how = if killed { ExitReason::Signal(Signal::SIGKILL as i32) } else { how };
        let passed_on = |by: i32| self.stops.iter().any(|signal| *signal as i32 == by);
        let request = match how {
            ExitReason::Signal(by) if passed_on(by) => EndRequest::PassedOn,
            _ if self.stage >= ShutdownStage::Terminated && self.stopped.contains_key(&rank) => {
                EndRequest::Stopped
            }
            _ if self.stage >= ShutdownStage::Terminated => EndRequest::Pressed,
            _ => EndRequest::No,
        };
        let killed = place.here && request == EndRequest::No && how.is_kill();
        let oom = if killed { self.kills.kill_since() } else { None };
        *end = Some(End { place, pid, how, after: self.began.elapsed(), request, oom });
    }

    /// Signals to the launcher are for all ranks. The first that asks for the end leaves them all the time that they need, a
    /// second one does not, unless it comes with the first.
    fn pass_on(&mut self, signal: Signal) {
        self.signal(signal);
        if signal != Signal::SIGUSR1 {
            let asked = *self.asked.get_or_insert_with(Instant::now);
            let again = !self.stops.is_empty() && asked.elapsed() > SAME;
            self.stops.push(signal);
            if again && self.stage == ShutdownStage::None {
                self.press(ShutdownStage::Time);
            }
        }
    }

    fn press(&mut self, stage: ShutdownStage) {
        let wait = match stage {
            ShutdownStage::None | ShutdownStage::Time | ShutdownStage::Terminated => self.recipe.grace,
            ShutdownStage::Killed => CLOSED,
            ShutdownStage::Cut => GONE,
        };
        match stage {
            ShutdownStage::None | ShutdownStage::Time => {}
            ShutdownStage::Terminated => self.signal(Signal::SIGTERM),
            ShutdownStage::Killed => self.signal(Signal::SIGKILL),
            ShutdownStage::Cut => self.started_mut().for_each(Rank::let_go),
        }
        self.stage = stage;
        self.rises = Some(Instant::now() + wait);
    }

    /// Sends a signal to all ranks that have not ended.
    fn signal(&mut self, signal: Signal) {
        for (rank, end) in self.ranks.iter_mut().zip(&self.ends) {
            if let (Some(rank), None) = (rank, end) {
                rank.signal(signal);
            }
        }
    }
}

/// Returns whether a signal has stopped a process of a rank's group.
fn is_stopped(group: u32) -> bool {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers =
        processes.filter(|entry| entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit));
    numbers.filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok()).any(|stat| {
        // The name, in parentheses, may hold anything; state, parent and group follow it.
        let fields = stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace());
        let mut fields = fields.into_iter().flatten();
        fields.next() == Some("T") && fields.nth(1).and_then(|number| number.parse().ok()) == Some(group)
    })
}
