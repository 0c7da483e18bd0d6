//! Triggers of a checkpoint, or of a stop after one: signals, another part of the program, the clock.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use isobar_collectives::Group;
use isobar_manager::Termination;
use signal_hook::consts::SIGUSR1;

use crate::error::{Error, Result};

/// Reason why a run ended before its last step; a checkpoint was written first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// It was asked to stop.
    Requested,
    /// It was asked for a checkpoint, to be started again by the batch system.
    Requeue,
}

/// Requests to a run from outside: one rank that is asked is enough. They are looked at once a step, in the exchange that
/// makes the global mean loss, so that all ranks act on them after the same step.
///
/// ```
/// use isobar_train::Signals;
///
/// let signals = Signals::install()?; // SIGUSR1: a checkpoint; SIGTERM, SIGINT: a checkpoint, and stop
/// let asks = signals.clone(); // another part of the program may ask too
/// asks.ask_to_stop();
/// # Ok::<(), isobar_train::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Signals {
    save: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    termination: Option<Arc<Termination>>,
    requeue: bool,
    peers_alive: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
}

impl fmt::Debug for Signals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signals")
            .field("save", &self.save)
            .field("stop", &self.stop_requested())
            .field("requeue", &self.requeue)
            .finish_non_exhaustive()
    }
}

impl Signals {
    /// Handles SIGUSR1, which requests a checkpoint, and SIGTERM and SIGINT (Ctrl-C), which request a
    /// checkpoint and a stop, through [`Termination`]. The handlers stay until the process ends, so call it
    /// once.
    ///
    /// # Errors
    ///
    /// An error of the system.
    pub fn install() -> Result<Self> {
        let signals = Self::default();
        fn refused(error: impl fmt::Display) -> Error {
            Error::invalid("a signal", error, "one that can be handled")
        }
        signal_hook::flag::register(SIGUSR1, signals.save.clone()).map_err(refused)?;
        let termination = Arc::new(Termination::watch().map_err(refused)?);
        // The signal does not end the process in the run's last moments either.
        std::mem::forget(termination.clone());
        Ok(Self { termination: Some(termination), ..signals })
    }

    /// Sets whether a requested checkpoint also ends the run ([`Stop::Requeue`]), so that the batch system can start it
    /// again.
    #[must_use]
    pub fn requeue(self, requeue: bool) -> Self {
        Self { requeue, ..self }
    }

    /// Sets the test of whether all other ranks still run. Launchers send SIGTERM also when a rank has died: no checkpoint can be
    /// written then, and the run ends with an error at once. Without the test they count as alive.
    #[must_use]
    pub fn peers_alive(self, alive: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self { peers_alive: Some(Arc::new(alive)), ..self }
    }

    /// Asks for a checkpoint after the step under way.
    pub fn ask_to_save(&self) {
        self.save.store(true, Ordering::Relaxed);
    }

    /// Asks to stop after the step under way, with a checkpoint.
    pub fn ask_to_stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Returns whether this rank was asked to stop. Others may not have been: ranks that act on it must agree.
    #[must_use]
    pub fn stop_requested(&self) -> bool {
        let told = self.termination.as_ref().is_some_and(|termination| termination.requested());
        told || self.stop.load(Ordering::Relaxed)
    }

    /// Takes the current requests to this rank. A checkpoint is requested once.
    fn take(&self) -> Result<Requests> {
        let stop = self.stop_requested();
        if stop && self.peers_alive.as_ref().is_some_and(|alive| !alive()) {
            return Err(Error::PeersLost);
        }
        let mut asked = Requests::default();
        if self.save.swap(false, Ordering::Relaxed) {
            asked = asked.and(if self.requeue { Requests::REQUEUE } else { Requests::SAVE });
        }
        if stop {
            asked = asked.and(Requests::STOP);
        }
        Ok(asked)
    }
}

/// Requests to any rank, as bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Requests(u8);

impl Requests {
    const SAVE: Self = Self(1);
    const STOP: Self = Self(2);
    const REQUEUE: Self = Self(4);

    fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns whether a checkpoint is requested.
    pub(crate) fn save(self) -> bool {
        self != Self::default()
    }

    /// Returns whether the run should end after it.
    pub(crate) fn stop(self) -> Option<Stop> {
        match () {
            () if self.has(Self::STOP) => Some(Stop::Requested),
            () if self.has(Self::REQUEUE) => Some(Stop::Requeue),
            () => None,
        }
    }
}

/// Signals and the clock.
pub(crate) struct Triggers {
    signals: Signals,
    /// Between two checkpoints, by rank 0's clock.
    every: Option<Duration>,
    saved: Instant,
}

impl Triggers {
    pub(crate) fn new(signals: &Signals, every_minutes: f64) -> Result<Self> {
        let every = Duration::try_from_secs_f64(every_minutes * 60.0).map_err(|_| {
            Error::setting("checkpoint.every_minutes", every_minutes, "a number of 0 or more", 30)
        })?;
        let every = (every > Duration::ZERO).then_some(every);
        Ok(Self { signals: signals.clone(), every, saved: Instant::now() })
    }

    /// After a checkpoint.
    pub(crate) fn saved(&mut self) {
        self.saved = Instant::now();
    }

    /// The sum of `value` over the ranks of `data`, in rank order, so that it is the same to the last bit on all; what any rank of
    /// the world is asked for; and each rank's `busy` seconds. One exchange. All ranks of the world call.
    pub(crate) fn join(&self, world: &Group, data: &Group, value: f64, busy: f64) -> Result<Joined> {
        let mut own = self.signals.take()?;
        if world.rank() == 0 && self.every.is_some_and(|every| self.saved.elapsed() >= every) {
            own = own.and(Requests::SAVE);
        }
        if world.size() == 1 {
            return Ok(Joined { sum: value, finite: value.is_finite(), asked: own, busy: vec![busy] });
        }
        let mut bytes = value.to_le_bytes().to_vec();
        bytes.extend(busy.to_le_bytes());
        bytes.push(own.0);
        let all = world.all_gather_bytes(&bytes)?;
        let said: Vec<(f64, f64, u8)> = all
            .iter()
            .filter_map(|bytes| {
                let (value, rest) = bytes.split_first_chunk::<8>()?;
                let (busy, asked) = rest.split_first_chunk::<8>()?;
                Some((f64::from_le_bytes(*value), f64::from_le_bytes(*busy), *asked.first()?))
            })
            .collect();
        let asked = said.iter().fold(Requests::default(), |asked, (_, _, other)| asked.and(Requests(*other)));
        let finite = said.iter().all(|(value, ..)| value.is_finite());
        let busy = said.iter().map(|(_, busy, _)| *busy).collect();
        if data.size() == 1 {
            return Ok(Joined { sum: value, finite, asked, busy });
        }
        let place = |member: &usize| world.ranks().iter().position(|rank| rank == member);
        let sum =
            data.ranks().iter().filter_map(place).filter_map(|at| said.get(at)).map(|(value, ..)| value);
        Ok(Joined { sum: sum.sum(), finite, asked, busy })
    }
}

/// Combined state of all ranks after a step.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Joined {
    pub(crate) sum: f64,
    /// True if every rank's value is finite.
    pub(crate) finite: bool,
    pub(crate) asked: Requests,
    /// Seconds of each rank.
    pub(crate) busy: Vec<f64>,
}

#[cfg(test)]
mod tests {
    use isobar_collectives::threads;

    use super::*;

    #[test]
    fn one_rank_that_is_asked_is_enough() {
        let all = threads::run(3, Duration::from_secs(60), |world| {
            let signals = Signals::default().requeue(world.rank() == 2);
            let triggers = Triggers::new(&signals, 0.0).unwrap();
            let pair = world.split("pair", Some(world.rank() / 2), 0).unwrap().unwrap();
            let join = |value| {
                let joined = triggers.join(&world, &pair, value, world.rank() as f64).unwrap();
                assert_eq!((joined.finite, joined.busy), (true, vec![0.0, 1.0, 2.0]));
                (joined.sum, joined.asked)
            };
            let mut seen = vec![join(1.0 + world.rank() as f64)];
            if world.rank() == 2 {
                signals.ask_to_save();
            }
            seen.push(join(1.0));
            if world.rank() == 1 {
                signals.ask_to_stop();
                signals.ask_to_save();
            }
            seen.push(join(1.0));
            seen
        });
        for (rank, seen) in all.iter().enumerate() {
            // 1 + 2 of the pair, and 3 of the rank alone.
            assert_eq!(seen[0], (3.0, Requests::default()), "rank {rank}");
            assert_eq!((seen[1].1.save(), seen[1].1.stop()), (true, Some(Stop::Requeue)));
            assert_eq!((seen[2].1.save(), seen[2].1.stop()), (true, Some(Stop::Requested)));
        }
    }

    #[test]
    fn the_clock_asks() {
        let mut triggers = Triggers::new(&Signals::default(), 1e-6).unwrap();
        std::thread::sleep(Duration::from_millis(1));
        let asked =
            |triggers: &Triggers| triggers.join(&Group::single(), &Group::single(), 0.0, 0.0).unwrap().asked;
        assert_eq!((asked(&triggers).save(), asked(&triggers).stop()), (true, None));
        triggers.every = Some(Duration::from_secs(1000));
        triggers.saved();
        assert!(!asked(&triggers).save());
        assert!(Triggers::new(&Signals::default(), -1.0).is_err());
        assert!(Triggers::new(&Signals::default(), f64::NAN).is_err());
    }

    #[test]
    fn dead_peers_write_no_checkpoint() {
        let signals = Signals::default().peers_alive(|| false);
        let triggers = Triggers::new(&signals, 0.0).unwrap();
        let join = || triggers.join(&Group::single(), &Group::single(), 0.0, 0.0);
        assert!(join().is_ok());
        signals.ask_to_stop();
        assert!(matches!(join(), Err(Error::PeersLost)));
    }
}
