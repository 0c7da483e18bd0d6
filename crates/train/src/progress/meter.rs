//! The speed of a run.

use std::time::{Duration, Instant};

/// Samples a second, older ones counting less.
#[derive(Debug)]
pub(super) struct Meter {
    last: Option<Instant>,
    samples: f64,
    steps: f64,
    seconds: f64,
}

impl Meter {
    pub(super) fn new() -> Self {
        Self { last: Some(Instant::now()), samples: 0.0, steps: 0.0, seconds: 0.0 }
    }

    pub(super) fn add(&mut self, samples: u64) {
        let now = Instant::now();
        let seconds = self.last.map_or(Duration::ZERO, |last| now - last).as_secs_f64();
        if self.last.replace(now).is_none() {
            return; // the time of the first step after a pause is not known
        }
        let keep = (-seconds / 10.0).exp();
        self.samples = self.samples * keep + samples as f64;
        self.steps = self.steps * keep + 1.0;
        self.seconds = self.seconds * keep + seconds;
    }

    pub(super) fn rate(&self) -> f64 {
        if self.seconds > 0.0 { self.samples / self.seconds } else { 0.0 }
    }

    /// The time that so many steps take, in words.
    pub(super) fn left(&self, steps: u64) -> String {
        match self.steps > 0.0 {
            true => duration(self.seconds / self.steps * steps as f64),
            false => "?".to_owned(),
        }
    }

    pub(super) fn pause(&mut self) {
        self.last = None;
    }
}

/// A time in its two largest units.
fn duration(seconds: f64) -> String {
    let seconds = seconds.round() as u64;
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    match (seconds, hours) {
        (0..120, _) => format!("{seconds} s"),
        (_, 0..2) => format!("{minutes} min"),
        (_, 2..48) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{} d {} h", hours / 24, hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_between_epochs_does_not_count() {
        let mut meter = Meter::new();
        std::thread::sleep(Duration::from_millis(5));
        meter.add(8);
        let rate = meter.rate();
        meter.pause();
        std::thread::sleep(Duration::from_millis(50));
        meter.add(8);
        assert_eq!(meter.rate(), rate);
    }

    #[test]
    fn times_are_of_two_units() {
        let all = [0.4, 16.0, 119.0, 125.0, 7100.0, 7260.0, 200_000.0].map(duration);
        assert_eq!(all, ["0 s", "16 s", "119 s", "2 min", "118 min", "2 h 1 min", "2 d 7 h"]);
        let mut meter = Meter::new();
        assert_eq!(meter.left(5), "?");
        meter.add(8);
        (meter.steps, meter.seconds) = (2.0, 3.0);
        assert_eq!(meter.left(10), "15 s");
    }
}
