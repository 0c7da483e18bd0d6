//! Times at which lines of progress are due.

use std::time::{Duration, Instant};

/// Schedule of the lines of the log.
#[derive(Debug)]
pub(super) struct Pace {
    /// The last line.
    last: Instant,
    /// Tenths of epochs that had passed then.
    tenths: u64,
    /// Time after which a line is due in any case.
    longest: Duration,
}

/// The time between two lines, at least.
const SHORTEST: Duration = Duration::from_secs(2);
/// The time after which a line is due in any case.
pub(super) const LONGEST: Duration = Duration::from_secs(30);

impl Pace {
    pub(super) fn new(now: Instant, longest: Duration) -> Self {
        Self { last: now, tenths: 0, longest }
    }

    /// Returns the time at which a line is due in any case.
    pub(super) fn next(&self) -> Instant {
        self.last + self.longest
    }

    /// Returns whether a line is due after `done` steps, and then counts it as written. The end of an epoch
    /// has its own line.
    pub(super) fn due(&mut self, now: Instant, done: u64, steps_per_epoch: u64) -> bool {
        let steps = steps_per_epoch.max(1);
        let tenths = done.saturating_mul(10) / steps;
        let tenth = tenths > self.tenths && now - self.last >= SHORTEST && !done.is_multiple_of(steps);
        if tenth || now >= self.next() {
            (self.last, self.tenths) = (now, tenths);
            return true;
        }
        false
    }

    /// Returns whether the last line is too long ago, and then counts a new one as written.
    pub(super) fn late(&mut self, now: Instant) -> bool {
        let late = now >= self.next();
        if late {
            self.last = now;
        }
        late
    }

    /// Another line was written.
    pub(super) fn spoken(&mut self, now: Instant) {
        self.last = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tenth of an epoch, but no two lines within two seconds; 30 seconds, however far that is.
    #[test]
    fn lines_are_due_after_tenths_and_after_half_a_minute() {
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        // Steps of a second, 100 an epoch.
        let mut pace = Pace::new(start, LONGEST);
        let due: Vec<u64> = (1..=100).filter(|&step| pace.due(at(step as f64), step, 100)).collect();
        assert_eq!(due, [10, 20, 30, 40, 50, 60, 70, 80, 90]);
        pace.spoken(at(101.0));
        assert!(!pace.due(at(102.0), 101, 100) && pace.due(at(111.0), 110, 100));
        // Steps of a minute.
        let mut pace = Pace::new(start, LONGEST);
        assert!((1..=5).all(|step| pace.due(at(step as f64 * 60.0), step, 5)));
        // Of a fifth of a second, in epochs of ten: only every eleventh, once two seconds have passed.
        let mut pace = Pace::new(start, LONGEST);
        let due: Vec<u64> = (1..=40).filter(|&step| pace.due(at(step as f64 * 0.2), step, 10)).collect();
        assert_eq!(due, [11, 21, 31]);
        // An epoch of hours.
        let mut pace = Pace::new(start, LONGEST);
        let due = (1..=100).filter(|&step| pace.due(at(step as f64 * 10.0), step, 100_000)).count();
        assert_eq!(due, 33);
        assert!(!pace.late(at(1000.0)) && pace.late(at(1030.0)));
    }
}
