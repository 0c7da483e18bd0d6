//! Tiles of the matrix of scores: queries and the keys that they attend to.

use super::kernel::Tile;
use crate::layout::Interval;

/// Queries of a tile at most: after so many, messages under way are moved on.
const ROWS: i64 = 1024;

/// The tiles in which the queries of these intervals, which follow each other in memory, meet a block of keys. Causal ones
/// are cut where the diagonal enters and leaves the block, so that each tile lies below it or is a square upon it.
pub(super) fn tiles(queries: &[Interval], keys: Interval, causal: bool) -> Vec<Tile> {
    let mut found = Vec::new();
    let mut before = 0;
    for interval in queries {
        for start in (interval.start..interval.end()).step_by(ROWS as usize) {
            let end = interval.end().min(start + ROWS);
            let at = before + start - interval.start;
            cut((start, end), at, keys, causal, &mut found);
        }
        before += interval.len;
    }
    found
}

fn cut((start, end): (i64, i64), at: i64, keys: Interval, causal: bool, found: &mut Vec<Tile>) {
    let mut push = |(first, last): (i64, i64), (from, to): (i64, i64), diagonal| {
        if first < last && from < to {
            found.push(Tile {
                query: (at + first - start, first),
                queries: last - first,
                key: (from - keys.start, from),
                keys: to - from,
                diagonal,
            });
        }
    };
    if !causal {
        return push((start, end), (keys.start, keys.end()), false);
    }
    let (enters, leaves) = (start.max(keys.start), end.min(keys.end()));
    push((enters, leaves), (keys.start, enters), false);
    push((enters, leaves), (enters, leaves), true);
    push((start.max(keys.end()), end), (keys.start, keys.end()), false);
}

/// Returns the number of query-key pairs for the queries of these intervals.
pub(super) fn work(queries: &[Interval], keys: i64, causal: bool) -> f64 {
    let of = |interval: &Interval| {
        if !causal {
            return interval.len as f64 * keys as f64;
        }
        let (growing, rest) = (interval.end().min(keys), interval.start.max(keys));
        let triangle = |n: i64| n.max(0) as f64 * (n.max(0) as f64 + 1.0) / 2.0;
        let below = if interval.start < growing { triangle(growing) - triangle(interval.start) } else { 0.0 };
        below + (interval.end() - rest).max(0) as f64 * keys as f64
    };
    queries.iter().map(of).sum()
}

/// Returns whether any of these queries attends to any of these keys.
pub(super) fn meet(queries: &[Interval], keys: Interval, causal: bool) -> bool {
    keys.len > 0 && queries.iter().any(|queries| queries.len > 0 && (!causal || queries.end() > keys.start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_pair_is_met_once() {
        for (queries, keys) in [
            (vec![Interval::new(0, 5)], Interval::new(0, 5)),
            (vec![Interval::new(3, 4), Interval::new(12, 2)], Interval::new(5, 4)),
            (vec![Interval::new(0, 0), Interval::new(6, 9)], Interval::new(2, 6)),
            (vec![Interval::new(0, 2300)], Interval::new(1000, 700)),
        ] {
            for causal in [false, true] {
                let mut pairs = 0;
                for tile in tiles(&queries, keys, causal) {
                    for query in 0..tile.queries {
                        let seen = if tile.diagonal { query + 1 } else { tile.keys };
                        let last = tile.key.1 + seen - 1;
                        assert!(!causal || last <= tile.query.1 + query);
                        assert!(tile.key.1 - keys.start == tile.key.0 && last < keys.end());
                        pairs += seen;
                    }
                }
                let all = queries.iter().flat_map(|queries| queries.start..queries.end());
                let seen = all.map(|query| match causal {
                    true => (query + 1 - keys.start).clamp(0, keys.len),
                    false => keys.len,
                });
                let seen: i64 = seen.sum();
                assert_eq!(pairs, seen);
                assert_eq!(meet(&queries, keys, causal), seen > 0);
                if keys.start == 0 {
                    assert_eq!(work(&queries, keys.len, causal), seen as f64);
                }
            }
        }
    }
}
