//! Reading of data before training, in rounds of all ranks.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use isobar_collectives::Group;
use isobar_manager::format_bytes;
use isobar_train::Signals;

use super::all_ok;
use isobar_command::exit::{Because, Exit};

/// Reading that takes less is not logged.
const QUIET: Duration = Duration::from_secs(3);
/// Time between two lines of the log.
const EVERY: Duration = Duration::from_secs(30);

/// Reading in rounds, in each of which every rank reads a portion of the data. After a round, ranks exchange errors and requests to
/// stop, and rank 0 logs the progress.
pub(super) struct Reading<'a> {
    world: &'a Group,
    signals: &'a Signals,
    progress: Progress,
}

impl<'a> Reading<'a> {
    /// Prepares `rounds` rounds, as many on every rank. The log names the work by `what`, and its size by `bytes`.
    pub(super) fn new(
        (world, signals): (&'a Group, &'a Signals),
        what: &'static str,
        (bytes, rounds): (u64, usize),
    ) -> Self {
        let progress = Progress { what, bytes, done: 0, rounds, began: Instant::now(), logged: None };
        Self { world, signals, progress }
    }

    /// Returns this rank's value; an error on all ranks if one has failed. All ranks call.
    pub(super) fn all_ok<T>(&self, own: Result<T>) -> Result<T> {
        all_ok(self.world, own.map(|made| (Vec::new(), made))).map(|(made, _)| made)
    }

    /// Ends a round with this rank's result. If a rank has failed or was asked to stop, all ranks get an error. All ranks call.
    pub(super) fn end<T>(&mut self, own: Result<T>) -> Result<T> {
        let own = own.map(|read| (vec![u8::from(self.signals.stop_requested())], read));
        let (read, asked) = all_ok(self.world, own)?;
        if asked.iter().flatten().any(|&asked| asked != 0) {
            bail!(Exit::Stopped.because(format!(
                "told to stop while {}; no step was taken since the start, and earlier checkpoints stay",
                self.progress.what
            )));
        }
        self.progress.done += 1;
        if let Some(line) = self.progress.line(Instant::now())
            && self.world.rank() == 0
        {
            tracing::info!("{line}");
        }
        Ok(read)
    }
}

/// Progress of the rounds.
struct Progress {
    what: &'static str,
    bytes: u64,
    done: usize,
    rounds: usize,
    began: Instant,
    /// Time of the last line of the log.
    logged: Option<Instant>,
}

impl Progress {
    /// Returns the line to log at a time, if one is due.
    fn line(&mut self, now: Instant) -> Option<String> {
        let is_due = match self.logged {
            None => now - self.began >= QUIET,
            Some(last) => now - last >= EVERY || self.done == self.rounds,
        };
        if !is_due {
            return None;
        }
        self.logged = Some(now);
        let percent = 100 * self.done / self.rounds.max(1);
        let seconds = (now - self.began).as_secs();
        Some(format!("{}: {percent} % of {} after {seconds} s", self.what, format_bytes(self.bytes)))
    }
}

#[cfg(test)]
mod tests {
    use isobar_collectives::threads;

    use super::*;

    #[test]
    fn a_rank_that_is_told_to_stop_ends_all_after_the_same_round() {
        let rounds = threads::run(3, Duration::from_secs(60), |world| {
            let signals = Signals::default();
            let mut reading = Reading::new((&world, &signals), "reading", (1, 5));
            let mut read = |round| {
                if (world.rank(), round) == (1, 2) {
                    signals.ask_to_stop();
                }
                reading.end(Ok(round))
            };
            let error =
                (0..5).try_for_each(|round| read(round).map(|own| assert_eq!(own, round))).unwrap_err();
            assert_eq!(isobar_command::exit::of(&error), Exit::Stopped, "{error}");
            reading.progress.done
        });
        assert_eq!(rounds, [2, 2, 2]);
    }

    #[test]
    fn long_reading_is_logged() {
        let began = Instant::now();
        let mut progress =
            Progress { what: "reading", bytes: 3 << 30, done: 1, rounds: 4, began, logged: None };
        let mut after = |seconds: u64, done: usize| {
            progress.done = done;
            progress.line(began + Duration::from_secs(seconds))
        };
        assert_eq!(after(2, 1), None);
        assert_eq!(after(4, 1).unwrap(), "reading: 25 % of 3.0 GiB after 4 s");
        assert_eq!(after(20, 2), None);
        assert_eq!(after(34, 3).unwrap(), "reading: 75 % of 3.0 GiB after 34 s");
        assert_eq!(after(36, 4).unwrap(), "reading: 100 % of 3.0 GiB after 36 s");
        let mut short = Progress { what: "reading", bytes: 1, done: 4, rounds: 4, began, logged: None };
        assert_eq!(short.line(began + Duration::from_secs(1)), None);
    }
}
