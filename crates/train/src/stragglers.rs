//! Ranks for which the others wait.

use std::fmt;

/// Number of steps of the first check: few enough to notice a slow rank soon, enough to ignore a hiccup. Each further check that
/// names the same rank takes twice as many.
const STEPS: usize = 100;

/// From how many times the median on a rank is named.
const RATIO: f64 = 1.25;

/// A rank that computes for longer than the others in each step, which wait for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Straggler {
    /// The rank, of all.
    pub rank: usize,
    /// Seconds that it computes in a step: what it waits for others is not in it.
    pub seconds: f64,
    /// The median of all ranks' seconds.
    pub median: f64,
    /// Number of checked steps.
    pub steps: usize,
}

impl fmt::Display for Straggler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, seconds, median, steps } = self;
        write!(
            f,
            "rank {rank} computes {:.2} times as long as the median rank: {:.1} ms a step, not {:.1}, over the last {steps} steps; \
             all others wait for it. Look for other programs on its machine, a throttled device, or more work than its share",
            seconds / median,
            seconds * 1e3,
            median * 1e3,
        )
    }
}

/// Sums what the ranks need for their steps; the same on every rank.
#[derive(Debug, Default)]
pub(crate) struct Stragglers {
    sums: Vec<f64>,
    steps: usize,
    /// Rank that the last check named, and number of consecutive checks that named it.
    named: Option<(usize, u32)>,
}

impl Stragglers {
    /// After a step: seconds that each rank has computed. The slowest rank, where there is one that others wait for and enough
    /// steps have passed.
    pub(crate) fn add(&mut self, busy: &[f64]) -> Option<Straggler> {
        self.sums.resize(busy.len(), 0.0);
        self.sums.iter_mut().zip(busy).for_each(|(sum, seconds)| *sum += seconds);
        self.steps += 1;
        let doublings = self.named.map_or(0, |(_, times)| times.min(usize::BITS / 2));
        if self.steps < STEPS << doublings {
            return None;
        }
        let steps = std::mem::take(&mut self.steps);
        let mut sums = std::mem::take(&mut self.sums);
        let (rank, slowest) = sums.iter().copied().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b))?;
        sums.sort_by(f64::total_cmp);
        // The lower median: of two ranks the faster one.
        let median = sums[(sums.len() - 1) / 2];
        let of = |sum: f64| sum / steps as f64;
        let slow = median > 0.0 && slowest > RATIO * median;
        self.named = slow.then(|| match self.named {
            Some((named, times)) if named == rank => (rank, times + 1),
            _ => (rank, 1),
        });
        slow.then(|| Straggler { rank, seconds: of(slowest), median: of(median), steps })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_is_named_once_in_a_while() {
        let mut stragglers = Stragglers::default();
        let mut named = Vec::new();
        for _ in 0..100 * STEPS {
            named.extend(stragglers.add(&[0.010, 0.011, 0.019, 0.0102]));
        }
        // After 100, 300, 700, … steps.
        assert_eq!(named.len(), 6);
        let Straggler { rank, seconds, median, steps } = named[0];
        assert_eq!((rank, steps), (2, STEPS));
        assert!((seconds - 0.019).abs() < 1e-9 && (median - 0.0102).abs() < 1e-9);
        let text = named[0].to_string();
        assert!(
            text.starts_with(
                "rank 2 computes 1.86 times as long as the median rank: 19.0 ms a step, not 10.2"
            ),
            "{text}"
        );
    }

    #[test]
    fn another_rank_is_named_as_soon_as_the_first() {
        let mut stragglers = Stragglers::default();
        let mut steps = |busy: [f64; 2], steps: usize| -> Vec<usize> {
            (0..steps).filter_map(|_| stragglers.add(&busy)).map(|straggler| straggler.rank).collect()
        };
        assert_eq!(steps([0.01, 0.02], STEPS), [1]);
        assert_eq!(steps([0.02, 0.01], 2 * STEPS), [0]);
        assert_eq!(steps([0.01, 0.01], 2 * STEPS), [0; 0]);
        assert_eq!(steps([0.01, 0.02], STEPS), [1]);
    }

    #[test]
    fn a_hiccup_or_one_rank_alone_is_no_straggler() {
        let mut stragglers = Stragglers::default();
        for step in 0..STEPS {
            let hiccup = if step == 7 { 0.2 } else { 0.01 };
            assert_eq!(stragglers.add(&[0.01, hiccup]), None);
        }
        for _ in 0..STEPS {
            assert_eq!(stragglers.add(&[0.01]), None);
        }
    }
}
