//! Timing of a case: between barriers, on the slowest rank, several times.

use std::time::Instant;

use anyhow::Result;
use isobar_collectives::{Group, ReduceOp, all_reduce};
use isobar_torch::memory;
use serde::Serialize;
use tch::Tensor;

use super::{Prepared, Timed};

/// The times of a case, in seconds.
#[derive(Debug, Serialize)]
pub(crate) struct Times {
    pub(crate) median_s: f64,
    pub(crate) min_s: f64,
    pub(crate) max_s: f64,
    /// The median of the copy of the result into memory that is there already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memcpy_s: Option<f64>,
    /// The median in units of the copy's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memcpy_ratio: Option<f64>,
    /// Peak of bytes live in libtorch's CPU allocator during a step, on the rank with the most; of all cases that are ready
    /// at that time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peak_bytes: Option<u64>,
}

/// Measurements of a case so far.
#[derive(Default)]
struct Taken {
    /// Target of copies of the output.
    target: Option<Tensor>,
    steps: Vec<f64>,
    copies: Vec<f64>,
    peak_bytes: Option<u64>,
}

/// Times cases in turns, so that other load on the machine affects all of them. Each round runs each case, and beside it a copy
/// of its output. Warm-up rounds do not count. All ranks call.
pub(crate) fn time(group: &Group, warm_ups: u32, repeats: u32, cases: &mut [Prepared]) -> Result<Vec<Times>> {
    let mut all = Vec::new();
    for case in cases.iter() {
        let target = case.output.as_ref().map(Tensor::f_zeros_like).transpose()?;
        all.push(Taken { target, ..Taken::default() });
    }
    for round in 0..repeats + warm_ups {
        let is_last = round + 1 == repeats + warm_ups;
        for (case, taken) in cases.iter_mut().zip(&mut all) {
            memory::reset_peak();
            let step_time = match &mut case.timed {
                Timed::Step(step) => slowest(group, &mut || seconds_of(step))?,
                Timed::Measured(measure) => slowest(group, measure)?,
            };
            let mut copy_time = None;
            if let (Some(output), Some(target)) = (&case.output, &mut taken.target) {
                copy_time = Some(slowest(group, &mut || seconds_of(&mut || Ok(target.f_copy_(output)?)))?);
            }
            if is_last && memory::is_installed() {
                taken.peak_bytes = Some(largest(group, memory::peak_bytes() as f64)? as u64);
            }
            if round >= warm_ups {
                taken.steps.push(step_time);
                taken.copies.extend(copy_time);
            }
        }
    }
    Ok(all.iter_mut().map(Taken::times).collect())
}

impl Taken {
    fn times(&mut self) -> Times {
        let median_s = median(&mut self.steps);
        let memcpy_s = (!self.copies.is_empty()).then(|| median(&mut self.copies));
        Times {
            median_s,
            min_s: self.steps[0],
            max_s: self.steps[self.steps.len() - 1],
            memcpy_s,
            memcpy_ratio: memcpy_s.map(|copy| median_s / copy),
            peak_bytes: self.peak_bytes,
        }
    }
}

/// The time of one call.
fn seconds_of<T>(step: &mut dyn FnMut() -> Result<T>) -> Result<f64> {
    let start = Instant::now();
    step()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Returns the measurement of the slowest rank.
fn slowest(group: &Group, measure: &mut dyn FnMut() -> Result<f64>) -> Result<f64> {
    group.barrier()?;
    largest(group, measure()?)
}

/// Returns the largest of the ranks' numbers.
fn largest(group: &Group, number: f64) -> Result<f64> {
    Ok(all_reduce(&Tensor::f_from_slice(&[number])?, ReduceOp::Max, group)?.f_double_value(&[0])?)
}

/// The median; sorts.
pub(crate) fn median(times: &mut [f64]) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    let middle = times.len() / 2;
    if times.len() % 2 == 1 { times[middle] } else { (times[middle - 1] + times[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 3.0, 2.0]), 2.5);
    }

    #[test]
    fn every_round_runs_in_turns_and_the_copy_is_timed_beside() {
        let calls = Rc::new(RefCell::new(Vec::new()));
        let case = |name: char| {
            let calls = calls.clone();
            let step = move || {
                calls.borrow_mut().push(name);
                Ok(())
            };
            let output = (name == 'a').then(|| Tensor::zeros([4], tch::kind::FLOAT_CPU));
            Prepared { timed: Timed::Step(Box::new(step)), output }
        };
        let times = time(&Group::single(), 2, 2, &mut [case('a'), case('b')]).unwrap();
        assert_eq!(calls.take(), "abababab".chars().collect::<Vec<_>>());
        let [a, b] = &times[..] else { panic!("{times:?}") };
        assert!(a.min_s <= a.median_s && a.median_s <= a.max_s);
        assert!(a.memcpy_s.is_some() && b.memcpy_s.is_none());
    }

    #[test]
    fn what_a_case_measures_itself_is_taken() {
        let case = Prepared { timed: Timed::Measured(Box::new(|| Ok(0.25))), output: None };
        let times = time(&Group::single(), 1, 2, &mut [case]).unwrap();
        assert_eq!((times[0].median_s, times[0].max_s), (0.25, 0.25));
    }
}
