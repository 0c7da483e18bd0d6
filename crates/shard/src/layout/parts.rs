//! Split of one dim: the indices of each rank.

use super::Sizes;

/// Indices `start..start + len` of a dim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Interval {
    /// The first.
    pub start: i64,
    /// Number of indices.
    pub len: i64,
}

impl Interval {
    pub(crate) fn new(start: i64, len: i64) -> Self {
        Self { start, len }
    }

    pub(crate) fn end(self) -> i64 {
        self.start + self.len
    }
}

/// Split of one dim over the mesh: for each combination of coordinates along the axes that shard it, the last axis
/// fastest, the indices of that rank, in its order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Dim {
    /// The axes that split it, in the mesh's order.
    pub(crate) axes: Vec<usize>,
    /// The parts.
    pub(crate) parts: Vec<Vec<Interval>>,
}

impl Dim {
    pub(crate) fn whole(extent: i64) -> Self {
        Self { axes: vec![], parts: vec![vec![Interval::new(0, extent)]] }
    }

    /// Consecutive parts of these lengths.
    pub(crate) fn consecutive(axes: Vec<usize>, sizes: &[i64]) -> Self {
        let mut at = 0;
        let parts = sizes.iter().map(|&len| {
            let part = vec![Interval::new(at, len)];
            at += len;
            part
        });
        Self { axes, parts: parts.collect() }
    }

    /// Consecutive parts that begin at these boundaries; one more than there are parts.
    pub(crate) fn between(axes: Vec<usize>, boundaries: &[i64]) -> Self {
        let sizes: Vec<i64> = boundaries.windows(2).map(|pair| pair[1] - pair[0]).collect();
        Self::consecutive(axes, &sizes)
    }

    /// Split once more by the next axis.
    pub(crate) fn split(mut self, axis: usize, ranks: usize, sizes: &Sizes, split_factor: usize) -> Self {
        self.axes.push(axis);
        self.parts = self.parts.iter().flat_map(|part| split(part, ranks, sizes, split_factor)).collect();
        self
    }

    /// Extent of the dim.
    pub(crate) fn extent(&self) -> i64 {
        self.parts.iter().flatten().map(|interval| interval.len).sum()
    }

    pub(crate) fn is_split(&self) -> bool {
        !self.axes.is_empty()
    }

    /// The part of a rank with these coordinates in a mesh of this shape.
    pub(crate) fn part(&self, coordinates: &[usize], mesh: &[usize]) -> &[Interval] {
        &self.parts[self.index(coordinates, mesh)]
    }

    /// The number of that part.
    pub(crate) fn index(&self, coordinates: &[usize], mesh: &[usize]) -> usize {
        self.axes.iter().fold(0, |index, &axis| index * mesh[axis] + coordinates[axis])
    }

    /// Returns the size of each shard.
    pub(crate) fn sizes(&self) -> Vec<i64> {
        self.parts.iter().map(|part| length(part)).collect()
    }

    /// Returns whether all shards are consecutive single intervals.
    pub(crate) fn is_consecutive(&self) -> bool {
        let mut next = 0;
        self.parts.iter().all(|part| match &part[..] {
            [] => true,
            [one] if one.len == 0 => true,
            [one] => std::mem::replace(&mut next, one.end()) == one.start,
            _ => false,
        })
    }

    /// Returns the offsets of consecutive shards, and the extent.
    pub(crate) fn boundaries(&self) -> Vec<i64> {
        let mut at = 0;
        std::iter::once(0)
            .chain(self.sizes().into_iter().map(|len| {
                at += len;
                at
            }))
            .collect()
    }

    /// Scales the split to another extent: boundary b of n becomes ⌈b·m/n⌉ (if n is 0, the last shard gets all).
    pub(crate) fn scaled(&self, to: i64) -> Self {
        let from = self.extent();
        let scale = |b: i64| if from == 0 { 0 } else { (b * to + from - 1) / from };
        let mut boundaries: Vec<i64> = self.boundaries().into_iter().map(scale).collect();
        if let Some(last) = boundaries.last_mut() {
            *last = to;
        }
        Self::between(self.axes.clone(), &boundaries)
    }
}

/// The number of indices in a part.
pub(crate) fn length(part: &[Interval]) -> i64 {
    part.iter().map(|interval| interval.len).sum()
}

fn split(part: &[Interval], ranks: usize, sizes: &Sizes, split_factor: usize) -> Vec<Vec<Interval>> {
    let pieces = sizes.split(length(part), ranks * split_factor);
    let mut at = 0;
    let cut: Vec<Vec<Interval>> = pieces
        .iter()
        .map(|&len| {
            let piece = slice(part, at, len);
            at += len;
            piece
        })
        .collect();
    if split_factor == 1 {
        return cut;
    }
    (0..ranks).map(|rank| join(cut.iter().skip(rank).step_by(ranks).flatten().copied())).collect()
}

/// `len` indices of a part from its `at`th on.
pub(crate) fn slice(part: &[Interval], at: i64, len: i64) -> Vec<Interval> {
    let (mut skip, mut left) = (at, len);
    let mut found = Vec::new();
    for interval in part {
        let from = skip.min(interval.len);
        let take = (interval.len - from).min(left);
        skip -= from;
        left -= take;
        if take > 0 {
            found.push(Interval::new(interval.start + from, take));
        }
    }
    if found.is_empty() {
        // An empty part still says where it is.
        let start = part.last().map_or(0, |last| last.end());
        found.push(Interval::new(start, 0));
    }
    found
}

/// Joins intervals that follow each other; at least one, of no indices.
pub(crate) fn join(intervals: impl Iterator<Item = Interval>) -> Vec<Interval> {
    let mut joined: Vec<Interval> = Vec::new();
    for interval in intervals {
        match joined.last_mut() {
            Some(last) if last.end() == interval.start => last.len += interval.len,
            Some(last) if last.len == 0 => *last = interval,
            Some(_) if interval.len == 0 => {}
            _ => joined.push(interval),
        }
    }
    if joined.is_empty() {
        joined.push(Interval::new(0, 0));
    }
    joined
}
