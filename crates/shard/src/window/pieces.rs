//! Window of a rank along one dim.

use crate::layout::{Dim, Interval};

/// Consecutive elements of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum WindowRun {
    /// Global indices `start, start + step, …`, `len` of them.
    Take { start: i64, len: i64, step: i64 },
    /// One element, so many times: it is fetched once.
    Repeat { start: i64, times: i64 },
    /// Elements that no rank has.
    Fill(i64),
}

/// The windows of all ranks along one dim: for each combination of coordinates along some axes, the last axis fastest.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct HaloSpec {
    pub(crate) axes: Vec<usize>,
    pub(crate) parts: Vec<Vec<WindowRun>>,
}

/// Continuation of a dim beyond its ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Border {
    /// By the fill.
    Fill,
    /// From the other end.
    Circular,
    /// Mirrored at the last element, which comes once.
    Reflect,
    /// By the last element.
    Replicate,
}

impl HaloSpec {
    /// Returns the window that is the rank's own shard.
    pub(crate) fn own(dim: &Dim) -> Self {
        let take =
            |interval: &Interval| WindowRun::Take { start: interval.start, len: interval.len, step: 1 };
        let parts = dim.parts.iter().map(|part| part.iter().map(take).collect());
        Self { axes: dim.axes.clone(), parts: parts.collect() }
    }

    /// Returns the same pieces for all ranks.
    pub(crate) fn everywhere(pieces: Vec<WindowRun>) -> Self {
        Self { axes: vec![], parts: vec![pieces] }
    }

    /// For each part of the result's dim, the interval `first..end` of this dim's indices that `window` gives for the part's
    /// own; beyond `0..extent` by the border.
    pub(crate) fn windows(
        result: &Dim,
        extent: i64,
        border: Border,
        window: impl Fn(Interval) -> (i64, i64),
    ) -> Self {
        let pieces = |part: &Vec<Interval>| {
            let own = part.first().copied().unwrap_or(Interval::new(0, 0));
            let (first, end) = window(own);
            spread(first, end, extent, border)
        };
        Self { axes: result.axes.clone(), parts: result.parts.iter().map(pieces).collect() }
    }

    /// Returns the same windows with one run for each repetition of an element.
    pub(crate) fn singly(&self) -> Self {
        let single = |piece: &WindowRun| match *piece {
            WindowRun::Repeat { start, times } => {
                vec![WindowRun::Take { start, len: 1, step: 1 }; times.max(0) as usize]
            }
            other => vec![other],
        };
        let parts = self.parts.iter().map(|pieces| pieces.iter().flat_map(single).collect());
        Self { axes: self.axes.clone(), parts: parts.collect() }
    }

    /// The pieces of a rank with these coordinates.
    pub(crate) fn at(&self, coordinates: &[usize], mesh: &[usize]) -> &[WindowRun] {
        let index = self.axes.iter().fold(0, |index, &axis| index * mesh[axis] + coordinates[axis]);
        &self.parts[index]
    }
}

/// The indices `first..end` of a dim of that extent, with what is beyond its ends.
pub(crate) fn spread(first: i64, end: i64, extent: i64, border: Border) -> Vec<WindowRun> {
    let mut pieces = Vec::new();
    let mut at = first;
    while at < end {
        let (piece, len) = if (0..extent).contains(&at) {
            let len = end.min(extent) - at;
            (WindowRun::Take { start: at, len, step: 1 }, len)
        } else {
            beyond(at, end, extent, border)
        };
        pieces.push(piece);
        at += len;
    }
    pieces
}

/// One piece from `at`, which is outside of the dim, at most up to `end`.
fn beyond(at: i64, end: i64, extent: i64, border: Border) -> (WindowRun, i64) {
    // End of the range in which the same rule holds.
    let side_end = if at < 0 { end.min(0) } else { end };
    if extent == 0 {
        return (WindowRun::Fill(side_end - at), side_end - at);
    }
    match border {
        Border::Fill => (WindowRun::Fill(side_end - at), side_end - at),
        Border::Replicate => {
            let times = side_end - at;
            (WindowRun::Repeat { start: at.clamp(0, extent - 1), times }, times)
        }
        Border::Circular => {
            let start = at.rem_euclid(extent);
            let len = (extent - start).min(side_end - at);
            (WindowRun::Take { start, len, step: 1 }, len)
        }
        Border::Reflect => {
            let period = (2 * (extent - 1)).max(1);
            let phase = at.rem_euclid(period);
            if extent == 1 {
                return (WindowRun::Take { start: 0, len: 1, step: 1 }, 1);
            }
            if phase < extent - 1 {
                let len = (extent - 1 - phase).min(side_end - at);
                (WindowRun::Take { start: phase, len, step: 1 }, len)
            } else {
                let start = period - phase;
                let len = start.min(side_end - at).max(1);
                (WindowRun::Take { start: start.min(extent - 1), len, step: -1 }, len)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn indices(pieces: &[WindowRun]) -> Vec<i64> {
        let of = |piece: &WindowRun| match *piece {
            WindowRun::Take { start, len, step } => (0..len).map(|i| start + i * step).collect(),
            WindowRun::Repeat { start, times } => vec![start; times as usize],
            WindowRun::Fill(len) => vec![-1; len as usize],
        };
        pieces.iter().flat_map(of).collect()
    }

    #[test]
    fn borders() {
        let of = |border| indices(&spread(-3, 7, 4, border));
        assert_eq!(of(Border::Fill), [-1, -1, -1, 0, 1, 2, 3, -1, -1, -1]);
        assert_eq!(of(Border::Circular), [1, 2, 3, 0, 1, 2, 3, 0, 1, 2]);
        assert_eq!(of(Border::Reflect), [3, 2, 1, 0, 1, 2, 3, 2, 1, 0]);
        assert_eq!(of(Border::Replicate), [0, 0, 0, 0, 1, 2, 3, 3, 3, 3]);
        assert_eq!(indices(&spread(-9, -5, 4, Border::Circular)), [3, 0, 1, 2]);
        assert_eq!(indices(&spread(5, 9, 3, Border::Circular)), [2, 0, 1, 2]);
        assert_eq!(spread(3, 3, 4, Border::Fill), []);
    }
}
