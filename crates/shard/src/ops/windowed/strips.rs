//! Interior and border strips of a rank's part of a convolution: the interior's windows lie in the rank's shard, those of the
//! strips reach into its halo. Both are computed from the layout alone.

use isobar_array::kernel::WindowGeometry;

use super::window;
use crate::layout::{Dim, Interval};

/// A rank's part of a convolution along one dim.
#[derive(Debug, Clone, Copy)]
pub(super) struct Share {
    geometry: WindowGeometry,
    /// Indices of the input that the rank holds.
    pub(super) shard: Interval,
    /// Indices of the result that the rank computes.
    pub(super) result: Interval,
    /// Indices of the result whose windows lie in the shard.
    interior: Interval,
}

impl Share {
    /// Computes the interior. With `zeros`, the input is zero-padded, and the shards at its ends include the padding.
    pub(super) fn new(geometry: WindowGeometry, zeros: bool, shard: Interval, result: Interval) -> Self {
        let WindowGeometry { stride, before, extent, .. } = geometry;
        let (start, end) = (result.start, result.end());
        let first = match zeros && shard.start == 0 {
            true => start,
            false => -(-(shard.start + before)).div_euclid(stride),
        };
        let last = match zeros && shard.end() == extent {
            true => end,
            false => (shard.end() + before - geometry.reach()).div_euclid(stride) + 1,
        };
        let first = first.clamp(start, end);
        let interior = Interval::new(first, last.clamp(first, end) - first);
        Self { geometry, shard, result, interior }
    }

    /// Returns the padding on both sides with which the dense operator on the shard covers the rank's result, and the number of
    /// surplus elements that it computes before that result.
    pub(super) fn padding(&self) -> (i64, i64) {
        let WindowGeometry { stride, before, .. } = self.geometry;
        let aligned = self.shard.start + before - self.result.start * stride;
        let (_, end) = window(&self.geometry, self.result);
        let needed = aligned.max(end - self.shard.end()).max(0);
        let padding = needed + (aligned - needed).rem_euclid(stride);
        (padding, (padding - aligned) / stride)
    }
}

/// Returns the smallest interior share of any rank's results along a dim; 0 if a rank has an empty shard or result.
pub(super) fn least_interior(geometry: WindowGeometry, zeros: bool, dim: &Dim, result: &Dim) -> f64 {
    let interval = |part: &[Interval]| part.first().copied().unwrap_or(Interval::new(0, 0));
    let shares = dim.parts.iter().zip(&result.parts).map(|(shard, result)| {
        let share = Share::new(geometry, zeros, interval(shard), interval(result));
        match share.shard.len > 0 && share.result.len > 0 {
            true => share.interior.len as f64 / share.result.len as f64,
            false => 0.0,
        }
    });
    shares.fold(1.0, f64::min)
}

/// Box of a rank's result whose windows reach beyond the rank's shard.
#[derive(Debug, Clone)]
pub(super) struct Strip {
    /// Place in the rank's result along each spatial dim.
    pub(super) place: Vec<Interval>,
    /// Indices of the input that the strip's windows cover; they may lie beyond the input's ends.
    pub(super) window: Vec<Interval>,
}

/// Covers the result outside of the interior by disjoint strips. The strips of a dim have the interior's extent along earlier
/// dims, and the result's along later ones.
pub(super) fn strips(shares: &[Share]) -> Vec<Strip> {
    let mut found = Vec::new();
    for (dim, share) in shares.iter().enumerate() {
        let (result, interior) = (share.result, share.interior);
        let sides = [(result.start, interior.start), (interior.end(), result.end())];
        for (start, end) in sides.into_iter().filter(|(start, end)| start < end) {
            let extent = |(at, other): (usize, &Share)| match at.cmp(&dim) {
                std::cmp::Ordering::Less => other.interior,
                std::cmp::Ordering::Equal => Interval::new(start, end - start),
                std::cmp::Ordering::Greater => other.result,
            };
            let outputs: Vec<Interval> = shares.iter().enumerate().map(extent).collect();
            let pairs = || shares.iter().zip(&outputs);
            found.push(Strip {
                place: pairs().map(|(s, out)| Interval::new(out.start - s.result.start, out.len)).collect(),
                window: pairs()
                    .map(|(s, out)| window(&s.geometry, *out))
                    .map(|(first, end)| Interval::new(first, end - first))
                    .collect(),
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(kernel: i64, stride: i64, before: i64, extent: i64) -> WindowGeometry {
        let result = (extent + 2 * before - kernel) / stride + 1;
        WindowGeometry { dim: 2, extent, result, kernel, stride, dilation: 1, before, after: before }
    }

    #[test]
    fn interiors_and_paddings() {
        let share = |geometry, zeros, (a, b): (i64, i64), (c, d): (i64, i64)| {
            let share = Share::new(geometry, zeros, Interval::new(a, b - a), Interval::new(c, d - c));
            ((share.interior.start, share.interior.end()), share.padding())
        };
        let three = geometry(3, 1, 1, 16);
        assert_eq!(share(three, true, (0, 8), (0, 8)), ((0, 7), (1, 0)));
        assert_eq!(share(three, false, (0, 8), (0, 8)), ((1, 7), (1, 0)));
        assert_eq!(share(three, true, (8, 16), (8, 16)), ((9, 16), (1, 0)));
        // Results 5..9 of stride 2 begin with the window 9..12, within the shard.
        assert_eq!(share(geometry(3, 2, 1, 18), true, (9, 18), (5, 9)), ((5, 9), (0, 0)));
        // Nothing is padded: the result of the first rank ends before its shard does.
        assert_eq!(share(geometry(5, 1, 0, 16), true, (0, 8), (0, 6)), ((0, 4), (2, 2)));
    }

    #[test]
    fn strips_cover_what_is_not_interior_once() {
        let share = |extent: i64| {
            let all = Interval::new(4, 8);
            Share::new(geometry(5, 1, 2, extent), false, all, all)
        };
        let mut count = [[0; 8]; 8];
        for strip in strips(&[share(16), share(16)]) {
            let [rows, columns] = &strip.place[..] else { panic!("two dims") };
            for row in rows.start..rows.end() {
                for column in columns.start..columns.end() {
                    count[row as usize][column as usize] += 1;
                }
            }
        }
        for (row, counts) in count.iter().enumerate() {
            for (column, count) in counts.iter().enumerate() {
                let interior = (2..6).contains(&row) && (2..6).contains(&column);
                assert_eq!(*count, i32::from(!interior), "{row}, {column}");
            }
        }
    }
}
