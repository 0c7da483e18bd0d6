//! Ranks in few words: what is evenly spaced as `[first, distance, count]`.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A list of more ranks is none of ours: what a file says may not take more memory than a job could.
const MOST: usize = 1 << 20;

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Item {
    Rank(usize),
    Run([usize; 3]),
}

pub(super) fn serialize<S: Serializer>(ranks: &[usize], serializer: S) -> Result<S::Ok, S::Error> {
    let mut items = Vec::new();
    let mut rest = ranks;
    while let Some((&first, after)) = rest.split_first() {
        let distance = after.first().and_then(|second| second.checked_sub(first));
        let count = distance.map_or(1, |distance| {
            rest.windows(2).take_while(|pair| pair[0].checked_add(distance) == Some(pair[1])).count() + 1
        });
        let run = distance.filter(|_| count > 3).map(|distance| Item::Run([first, distance, count]));
        let taken = if run.is_some() { count } else { 1 };
        items.push(run.unwrap_or(Item::Rank(first)));
        rest = &rest[taken..];
    }
    items.serialize(serializer)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    let mut ranks = Vec::new();
    for item in Vec::<Item>::deserialize(deserializer)? {
        let (first, distance, count) = match item {
            Item::Rank(rank) => (rank, 0, 1),
            Item::Run([first, distance, count]) => (first, distance, count),
        };
        if count > MOST - ranks.len() || (count > 1 && distance == 0) {
            return Err(D::Error::custom(format!("more than {MOST} ranks, or one twice")));
        }
        for index in 0..count {
            let rank = distance.checked_mul(index).and_then(|far| first.checked_add(far));
            ranks.push(rank.ok_or_else(|| D::Error::custom("a rank that is no number here"))?);
        }
    }
    Ok(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Ranks(#[serde(with = "super")] Vec<usize>);

    #[rstest]
    #[case::none(&[], "[]")]
    #[case::few(&[0, 1, 2], "[0,1,2]")]
    #[case::all(&[0, 1, 2, 3], "[[0,1,4]]")]
    #[case::spaced(&[1, 5, 9, 13, 17], "[[1,4,5]]")]
    #[case::down(&[3, 2, 1, 0], "[3,2,1,0]")]
    #[case::mixed(&[7, 0, 2, 4, 6, 9], "[7,[0,2,4],9]")]
    fn ranks_come_back(#[case] ranks: &[usize], #[case] text: &str) {
        let ranks = Ranks(ranks.to_vec());
        assert_eq!(serde_json::to_string(&ranks).unwrap(), text);
        assert_eq!(serde_json::from_str::<Ranks>(text).unwrap(), ranks);
    }

    #[rstest]
    #[case("[[0,1,18446744073709551615]]")]
    #[case("[[0,1,1048576],[1048576]]")]
    #[case("[[0,1,1048576],1048576]")]
    #[case("[[5,0,4]]")]
    #[case("[[1,18446744073709551615,3]]")]
    #[case("[[0,1]]")]
    #[case("[-1]")]
    fn what_no_job_has_is_refused(#[case] text: &str) {
        assert!(serde_json::from_str::<Ranks>(text).is_err());
    }
}
