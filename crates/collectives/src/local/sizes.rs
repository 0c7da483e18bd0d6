//! Rules that split an extent over ranks.

/// PhysicsNeMo's rule: chunks of `ceil(size / parts)` and the rest for the last; where nothing would be left for the
/// last, chunks of `floor(size / parts)` and the rest for the last.
///
/// Kept for weights and files made by that system; [`balanced`] spreads better and [`chunk`] is DTensor's.
///
/// ```
/// use isobar_collectives::compute_split_shapes;
/// assert_eq!(compute_split_shapes(10, 4), [3, 3, 3, 1]);
/// assert_eq!(compute_split_shapes(9, 8), [1, 1, 1, 1, 1, 1, 1, 2]);
/// assert_eq!(compute_split_shapes(3, 4), [0, 0, 0, 3]);
/// ```
pub fn compute_split_shapes(size: i64, parts: usize) -> Vec<i64> {
    let (size, count) = (size.max(0), parts as i64);
    if count == 0 {
        return Vec::new();
    }
    let mut part = ceiling(size, count);
    if size.saturating_sub(part.saturating_mul(count - 1)) <= 0 {
        part = size / count;
    }
    let mut sizes = vec![part; parts];
    sizes[parts - 1] = size - part * (count - 1);
    sizes
}

/// `torch.chunk`'s rule, which DTensor follows: chunks of `ceil(size / parts)`, then a shorter one, then empty ones.
///
/// ```
/// use isobar_collectives::chunk;
/// assert_eq!(chunk(10, 4), [3, 3, 3, 1]);
/// assert_eq!(chunk(5, 4), [2, 2, 1, 0]);
/// ```
pub fn chunk(size: i64, parts: usize) -> Vec<i64> {
    let (size, count) = (size.max(0), parts.max(1) as i64);
    let part = ceiling(size, count);
    (0..parts as i64).map(|i| size.saturating_sub(i.saturating_mul(part)).clamp(0, part)).collect()
}

/// Returns `size / count`, rounded up, of any size.
fn ceiling(size: i64, count: i64) -> i64 {
    size / count + i64::from(size % count != 0)
}

/// Parts that differ by at most one, the larger ones first.
///
/// ```
/// use isobar_collectives::balanced;
/// assert_eq!(balanced(10, 4), [3, 3, 2, 2]);
/// ```
pub fn balanced(size: i64, parts: usize) -> Vec<i64> {
    let (size, count) = (size.max(0), parts.max(1) as i64);
    (0..parts as i64).map(|i| size / count + i64::from(i < size % count)).collect()
}

/// Returns the offset of each shard: the running sums of `sizes`, without the last.
pub(crate) fn offsets(sizes: &[i64]) -> Vec<i64> {
    sizes
        .iter()
        .scan(0, |next, &size| {
            let at = *next;
            *next += size;
            Some(at)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_rule_covers_the_extent(size in 0i64..200, parts in 1usize..17) {
            for rule in [compute_split_shapes, chunk, balanced] {
                let sizes = rule(size, parts);
                prop_assert_eq!(sizes.len(), parts);
                prop_assert_eq!(sizes.iter().sum::<i64>(), size);
                prop_assert!(sizes.iter().all(|&s| s >= 0));
            }
        }

        #[test]
        fn every_rule_covers_an_extent_of_any_size(less in 0i64..20, parts in 1usize..17) {
            for rule in [compute_split_shapes, chunk, balanced] {
                let sizes = rule(i64::MAX - less, parts);
                prop_assert_eq!(sizes.iter().sum::<i64>(), i64::MAX - less);
            }
        }
    }
}
