//! Sets of ranks.

use std::collections::BTreeSet;
use std::fmt;

use isobar_collectives::Group;
use serde::{Deserialize, Serialize};

/// Set of world ranks, stored compactly if they are evenly spaced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankSet(Vec<Stretch>);

/// First rank, step and count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Stretch {
    first: usize,
    step: usize,
    count: usize,
}

impl RankSet {
    /// These ranks, and rank `me`. A single rank is `me`, whatever its number in a world of its own.
    pub(crate) fn of(ranks: &[usize], me: usize) -> Self {
        match ranks {
            [] | [_] => Self::from(BTreeSet::from([me])),
            several => Self::from(several.iter().copied().collect::<BTreeSet<_>>()),
        }
    }

    /// The ranks of a group.
    pub(crate) fn of_group(group: &Group, me: usize) -> Self {
        Self::of(group.ranks(), me)
    }

    pub(crate) fn ranks(&self) -> BTreeSet<usize> {
        self.0.iter().flat_map(|part| (0..part.count).map(move |at| part.first + at * part.step)).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|part| part.count).sum()
    }
}

impl From<BTreeSet<usize>> for RankSet {
    fn from(ranks: BTreeSet<usize>) -> Self {
        let mut stretches: Vec<Stretch> = Vec::new();
        for rank in ranks {
            match stretches.last_mut() {
                Some(last) if last.count == 1 => {
                    (last.step, last.count) = (rank - last.first, 2);
                }
                Some(last) if rank == last.first + last.count * last.step => last.count += 1,
                _ => stretches.push(Stretch { first: rank, step: 1, count: 1 }),
            }
        }
        Self(stretches)
    }
}

/// Largest number of ranks in a message.
const SHOWN: usize = 16;

impl fmt::Display for RankSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks = self.ranks();
        let shown: Vec<usize> = ranks.iter().copied().take(SHOWN).collect();
        match ranks.len() {
            1 => write!(f, "rank {}", shown[0]),
            all if all > SHOWN => write!(f, "{all} ranks {shown:?}…"),
            _ => write!(f, "ranks {shown:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evenly_spaced_ranks_take_three_numbers() {
        for (ranks, stretches) in
            [(vec![0, 1, 2, 3], 1), (vec![1, 5, 9], 1), (vec![0, 1, 4, 5], 2), (vec![0, 1, 4, 5, 8], 3)]
        {
            let set = RankSet::of(&ranks, 0);
            assert_eq!((set.0.len(), set.len()), (stretches, ranks.len()), "{ranks:?}");
            assert!(set.ranks().into_iter().eq(ranks.iter().copied()), "{set:?}");
        }
        assert_eq!(RankSet::of(&[0], 3), RankSet::of(&[], 3));
    }
}
