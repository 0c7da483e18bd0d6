//! Boxes of indices: chunks that a window touches, and the parts that they share.

use std::ops::Range;

use crate::runs::runs;
use crate::{Error, Result};

/// Rejects a range that reaches beyond what there is.
pub(crate) fn check_range(what: impl Into<String>, range: &Range<usize>, available: usize) -> Result<()> {
    if range.start > range.end || range.end > available {
        return Err(Error::OutOfRange { what: what.into(), asked: format!("{range:?}"), available });
    }
    Ok(())
}

/// All indices of a box, in C order.
pub(crate) fn indices(all: &[Range<usize>]) -> impl Iterator<Item = Vec<usize>> + Send + use<> {
    let all = all.to_vec();
    let mut next = (!all.iter().any(Range::is_empty)).then(|| all.iter().map(|range| range.start).collect());
    std::iter::from_fn(move || {
        let now: Vec<usize> = next.take()?;
        let mut after = now.clone();
        for axis in (0..all.len()).rev() {
            after[axis] += 1;
            if after[axis] < all[axis].end {
                next = Some(after);
                break;
            }
            after[axis] = all[axis].start;
        }
        Some(now)
    })
}

/// Returns the index in the array of element `at` of a window, in C order.
pub(crate) fn index_in_array(window: &[Range<usize>], at: usize) -> Vec<usize> {
    let mut left = at;
    let place = |range: &Range<usize>| {
        let place = range.start + left % range.len();
        left /= range.len();
        place
    };
    let mut index: Vec<usize> = window.iter().rev().map(place).collect();
    index.reverse();
    index
}

/// The chunks of this shape that a window touches.
pub(crate) fn touched(window: &[Range<usize>], chunk: &[usize]) -> Vec<Range<usize>> {
    let of = |(range, &extent): (&Range<usize>, &usize)| range.start / extent..range.end.div_ceil(extent);
    window.iter().zip(chunk).map(of).collect()
}

/// Intersection of a window and a chunk: counted in the chunk, and in the window.
pub(crate) fn shared(
    window: &[Range<usize>],
    chunk: &[usize],
    index: &[usize],
) -> (Vec<Range<usize>>, Vec<Range<usize>>) {
    let of = |((range, &extent), &index): ((&Range<usize>, &usize), &usize)| {
        let first = index * extent;
        let (start, end) = (range.start.max(first), range.end.min(first + extent));
        (start - first..end - first, start - range.start..end - range.start)
    };
    window.iter().zip(chunk).zip(index).map(of).unzip()
}

/// Copies a box of values of `size` bytes from one array to a box of the same extents in another.
pub(crate) fn copy(
    size: usize,
    (from, shape, window): (&[u8], &[usize], &[Range<usize>]),
    (to, to_shape, to_window): (&mut [u8], &[usize], &[Range<usize>]),
) {
    let (source, target) = (runs(shape, window), runs(to_shape, to_window));
    let piece = source.length.min(target.length).max(1);
    let pieces = |starts: Vec<u64>, length: usize| {
        starts
            .into_iter()
            .flat_map(move |start| (0..length / piece).map(move |at| start as usize + at * piece))
    };
    let both = pieces(source.starts, source.length).zip(pieces(target.starts, target.length));
    for (from_at, to_at) in both {
        let bytes = piece * size;
        to[to_at * size..to_at * size + bytes].copy_from_slice(&from[from_at * size..from_at * size + bytes]);
    }
}

/// Extents of a box.
pub(crate) fn extents(of: &[Range<usize>]) -> Vec<usize> {
    of.iter().map(Range::len).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_in_order() {
        let all: Vec<Vec<usize>> = indices(&[1..3, 0..2]).collect();
        assert_eq!(all, [[1, 0], [1, 1], [2, 0], [2, 1]]);
        assert_eq!(indices(&[]).collect::<Vec<_>>(), [Vec::<usize>::new()]);
        assert_eq!(indices(&[0..2, 3..3]).count(), 0);
    }

    #[test]
    fn chunks_make_up_a_window() {
        let (shape, chunk, window) = ([5, 7], [2, 3], [1..5, 2..7]);
        let whole: Vec<u8> = (0..35).collect();
        let mut made = vec![0; 20];
        for index in indices(&touched(&window, &chunk)) {
            let (inside, outside) = shared(&window, &chunk, &index);
            // The chunk as it is stored: complete, even at the end.
            let mut stored = vec![0; 6];
            let there: Vec<_> = index
                .iter()
                .zip(chunk)
                .zip(shape)
                .map(|((&at, chunk), shape)| at * chunk..(at * chunk + chunk).min(shape))
                .collect();
            let place: Vec<_> = there.iter().map(|range| 0..range.len()).collect();
            copy(1, (&whole, &shape, &there), (&mut stored, &chunk, &place));
            copy(1, (&stored, &chunk, &inside), (&mut made, &[4, 5], &outside));
        }
        let mut expected = vec![0; 20];
        copy(1, (&whole, &shape, &window), (&mut expected, &[4, 5], &[0..4, 0..5]));
        assert_eq!(made, expected);
        assert_eq!((made[0], made[19]), (9, 34));
    }
}
