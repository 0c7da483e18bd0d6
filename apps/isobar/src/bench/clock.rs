//! How a case is timed: between barriers, on the slowest rank, several times.

use std::time::Instant;

use anyhow::Result;
use isobar_collectives::{Group, ReduceOp, all_reduce};
use serde::Serialize;
use tch::Tensor;

use super::Timed;

/// Rounds before the first that counts.
const WARM_UPS: u32 = 2;

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
}

/// Times what is `timed`, and beside it, in each round, a copy of `output`. All ranks call.
pub(crate) fn time(group: &Group, repeats: u32, timed: &mut Timed, output: Option<&Tensor>) -> Result<Times> {
    let mut target = output.map(Tensor::f_zeros_like).transpose()?;
    let mut steps = Vec::new();
    let mut copies = Vec::new();
    for round in 0..repeats + WARM_UPS {
        let step_time = match timed {
            Timed::Step(step) => slowest(group, &mut || seconds_of(step))?,
            Timed::Measured(measure) => slowest(group, measure)?,
        };
        let mut copy_time = None;
        if let (Some(output), Some(target)) = (output, &mut target) {
            copy_time = Some(slowest(group, &mut || seconds_of(&mut || Ok(target.f_copy_(output)?)))?);
        }
        if round >= WARM_UPS {
            steps.push(step_time);
            copies.extend(copy_time);
        }
    }
    let median_s = median(&mut steps);
    let memcpy_s = (!copies.is_empty()).then(|| median(&mut copies));
    Ok(Times {
        median_s,
        min_s: steps[0],
        max_s: steps[steps.len() - 1],
        memcpy_s,
        memcpy_ratio: memcpy_s.map(|copy| median_s / copy),
    })
}

/// The time of one call.
fn seconds_of<T>(step: &mut dyn FnMut() -> Result<T>) -> Result<f64> {
    let start = Instant::now();
    step()?;
    Ok(start.elapsed().as_secs_f64())
}

/// What is measured on the slowest rank.
fn slowest(group: &Group, measure: &mut dyn FnMut() -> Result<f64>) -> Result<f64> {
    group.barrier()?;
    let spent = Tensor::f_from_slice(&[measure()?])?;
    Ok(all_reduce(&spent, ReduceOp::Max, group)?.f_double_value(&[0])?)
}

/// The median; sorts.
pub(crate) fn median(times: &mut [f64]) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    let middle = times.len() / 2;
    if times.len() % 2 == 1 { times[middle] } else { (times[middle - 1] + times[middle]) / 2.0 }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 3.0, 2.0]), 2.5);
    }

    #[test]
    fn every_round_runs_and_the_copy_is_timed_beside() {
        let calls = Rc::new(Cell::new(0));
        let output = Tensor::zeros([4], tch::kind::FLOAT_CPU);
        let counted = calls.clone();
        let mut step = Timed::Step(Box::new(move || {
            counted.set(counted.get() + 1);
            Ok(())
        }));
        let times = time(&Group::single(), 3, &mut step, Some(&output)).unwrap();
        assert_eq!(calls.get(), 5);
        assert!(times.min_s <= times.median_s && times.median_s <= times.max_s);
        assert!(times.memcpy_s.is_some());
    }

    #[test]
    fn what_a_case_measures_itself_is_taken() {
        let mut measured = Timed::Measured(Box::new(|| Ok(0.25)));
        let times = time(&Group::single(), 2, &mut measured, None).unwrap();
        assert_eq!((times.median_s, times.max_s), (0.25, 0.25));
    }
}
