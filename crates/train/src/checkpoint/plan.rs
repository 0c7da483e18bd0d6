//! Plan of a save: the writer of each box, computed identically on all ranks from the boxes that each declares.

use std::collections::BTreeMap;

use isobar_collectives::Group;
use safetensors::tensor::Dtype;
use serde::{Deserialize, Serialize};

use super::dtype::dtype;
use super::manifest::{BoxEntry, TensorEntry};
use super::tensor_shard::{Region, TensorShard, check_tiling};
use crate::error::{Error, Result};

/// Declaration of a box that a rank holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Declared {
    name: String,
    dtype: Dtype,
    shape: Vec<i64>,
    region: Region,
}

impl Declared {
    pub(super) fn all(shards: &[TensorShard]) -> Result<Vec<Self>> {
        let declared = shards.iter().map(|shard| {
            shard.check()?;
            let dtype = dtype(&shard.name, shard.tensor.kind())?;
            Ok(Self {
                name: shard.name.clone(),
                dtype,
                shape: shard.shape.clone(),
                region: shard.region.clone(),
            })
        });
        declared.collect()
    }
}

/// Boxes that each rank writes, and their files.
#[derive(Debug, PartialEq)]
pub(super) struct Plan {
    pub(super) tensors: Vec<TensorPlan>,
}

/// A tensor, and who writes its boxes.
#[derive(Debug, PartialEq)]
pub(super) struct TensorPlan {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<i64>,
    pub(super) boxes: Vec<BoxPlan>,
}

/// A box, and who writes it.
#[derive(Debug, PartialEq)]
pub(super) struct BoxPlan {
    pub(super) region: Region,
    pub(super) rank: usize,
    pub(super) key: String,
    /// Offset in the data of the rank's file.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Plan {
    /// Of what the ranks hold, by rank. A box that several hold is written by the one with the fewest bytes so far, large boxes
    /// first.
    pub(super) fn new(declared: &[Vec<Declared>], group: &str) -> Result<Self> {
        let mut tensors: Vec<TensorPlan> = Vec::new();
        let mut by_name: BTreeMap<&str, usize> = BTreeMap::new();
        // Boxes by tensor, with the ranks that hold them.
        let mut holders: BTreeMap<(usize, &Region), Vec<usize>> = BTreeMap::new();
        for (rank, shards) in declared.iter().enumerate() {
            for shard in shards {
                let at = *by_name.entry(&shard.name).or_insert_with(|| {
                    tensors.push(TensorPlan {
                        name: shard.name.clone(),
                        dtype: shard.dtype,
                        shape: shard.shape.clone(),
                        boxes: Vec::new(),
                    });
                    tensors.len() - 1
                });
                let first = &tensors[at];
                if (first.dtype, &first.shape) != (shard.dtype, &shard.shape) {
                    return Err(Error::ParametersDiffer {
                        group: group.to_owned(),
                        rank,
                        expected: format!("{:?} of {:?} {:?}", first.name, first.dtype, first.shape),
                        found: format!("it of {:?} {:?}", shard.dtype, shard.shape),
                    });
                }
                if shard.region.elements() > 0 {
                    let ranks = holders.entry((at, &shard.region)).or_default();
                    if ranks.last() != Some(&rank) {
                        ranks.push(rank);
                    }
                }
            }
        }
        let size = |&(at, region): &(usize, &Region)| {
            region.elements() as u64 * (tensors[at].dtype.bitsize() as u64 / 8)
        };
        let mut order: Vec<_> = holders.iter().map(|(key, ranks)| (size(key), key, ranks)).collect();
        // Sorting keeps the order of tensors among boxes of one size.
        order.sort_by_key(|(bytes, ..)| std::cmp::Reverse(*bytes));
        let mut written = vec![0; declared.len()];
        let mut chosen: Vec<(usize, BoxPlan)> = Vec::new();
        for (bytes, &(at, region), ranks) in order {
            let Some(&rank) = ranks.iter().min_by_key(|&&rank| (written[rank], rank)) else { continue };
            written[rank] += bytes;
            let plan = BoxPlan { region: region.clone(), rank, key: String::new(), offset: 0, bytes };
            chosen.push((at, plan));
        }
        chosen.sort_by(|a, b| (a.0, &a.1.region).cmp(&(b.0, &b.1.region)));
        for (at, plan) in chosen {
            tensors[at].boxes.push(plan);
        }
        let mut plan = Self { tensors };
        plan.check()?;
        plan.place(declared.len());
        Ok(plan)
    }

    fn check(&self) -> Result<()> {
        for tensor in &self.tensors {
            let regions: Vec<&Region> = tensor.boxes.iter().map(|part| &part.region).collect();
            check_tiling(&tensor.shape, &regions).map_err(|problem| {
                Error::invalid(
                    format!("what the ranks hold of tensor {:?}", tensor.name),
                    format!("no whole: {problem}"),
                    "boxes that cover it once",
                )
            })?;
        }
        Ok(())
    }

    /// Names the boxes, and gives each its place: elements of many bytes first, so that all are aligned.
    fn place(&mut self, ranks: usize) {
        for tensor in &mut self.tensors {
            let mut count = BTreeMap::<usize, usize>::new();
            for part in &mut tensor.boxes {
                let number = count.entry(part.rank).or_default();
                part.key = match number {
                    0 => tensor.name.clone(),
                    _ => format!("{}#{number}", tensor.name),
                };
                *number += 1;
            }
        }
        let mut ends = vec![0; ranks];
        let mut order: Vec<_> = (0..self.tensors.len()).collect();
        order.sort_by_key(|&at| std::cmp::Reverse(self.tensors[at].dtype.bitsize()));
        for at in order {
            for part in &mut self.tensors[at].boxes {
                part.offset = ends[part.rank];
                ends[part.rank] += part.bytes;
            }
        }
    }

    /// The boxes that `rank` writes, in the order in which they lie in its file.
    pub(super) fn of_rank(&self, rank: usize) -> Vec<(&TensorPlan, &BoxPlan)> {
        let boxes =
            self.tensors.iter().flat_map(|tensor| tensor.boxes.iter().map(move |part| (tensor, part)));
        let mut own: Vec<_> = boxes.filter(|(_, part)| part.rank == rank).collect();
        own.sort_by_key(|(_, part)| part.offset);
        own
    }

    /// The ranks that write something, in rising order.
    pub(super) fn writers(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> =
            self.tensors.iter().flat_map(|tensor| tensor.boxes.iter().map(|part| part.rank)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// The tensors as a manifest lists them, given the writers and where the data of each one's file begin.
    pub(super) fn entries(&self, data: &BTreeMap<usize, (usize, u64)>) -> Vec<TensorEntry> {
        let entry = |part: &BoxPlan| {
            let (file, begin) = *data.get(&part.rank)?;
            let begin = begin + part.offset;
            let bytes = [begin, begin + part.bytes];
            Some(BoxEntry { file, key: part.key.clone(), region: part.region.clone(), bytes })
        };
        self.tensors
            .iter()
            .map(|tensor| TensorEntry {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                boxes: tensor.boxes.iter().filter_map(entry).collect(),
            })
            .collect()
    }
}

/// Message of a rank to all others before a save.
#[derive(Debug, Serialize, Deserialize)]
struct Opening {
    /// Digest of its declaration.
    digest: String,
    /// Reason why it cannot go on.
    failed: Option<String>,
    /// Reason why its last write, in the background, failed.
    unwritten: Option<String>,
    /// Rank 0's choice for all: the save's nonce, and the suffix of the files' names.
    nonce: String,
    suffix: String,
}

/// Agreement of all ranks before a save begins.
#[derive(Debug)]
pub(super) struct Agreed {
    pub(super) nonce: String,
    pub(super) suffix: String,
    /// Of what all ranks declare, by rank: where it is what it was, so is the plan.
    pub(super) digests: Vec<String>,
    /// The first rank whose last write, in the background, failed, and why.
    pub(super) unwritten: Option<(usize, String)>,
}

/// The first exchange of a save. All ranks call, with why their last write failed, where it did.
pub(super) fn open(
    world: &Group,
    declared: &Result<Vec<Declared>>,
    unwritten: Option<String>,
    (nonce, suffix): (String, String),
) -> Result<Agreed> {
    let failed = declared.as_ref().err().map(ToString::to_string);
    let bytes = declared.as_ref().map(|own| serde_json::to_vec(own).unwrap_or_default()).unwrap_or_default();
    let digest = blake3::hash(&bytes).to_hex().to_string();
    let own = encode(&Opening { digest, failed, unwritten, nonce, suffix })?;
    let all = world.all_gather_bytes(&own)?;
    let all: Vec<Opening> = all.iter().map(|bytes| decode(bytes)).collect::<Result<_>>()?;
    let first = |reason: fn(&Opening) -> &Option<String>| {
        all.iter().enumerate().find_map(|(rank, said)| Some((rank, reason(said).clone()?)))
    };
    if let Some((rank, reason)) = first(|said| &said.failed) {
        return Err(Error::OtherRank { rank, group: world.name().to_owned(), reason });
    }
    let unwritten = first(|said| &said.unwritten);
    let (nonce, suffix) = (all[0].nonce.clone(), all[0].suffix.clone());
    Ok(Agreed { nonce, suffix, unwritten, digests: all.into_iter().map(|said| said.digest).collect() })
}

/// The second exchange, where the ranks do not hold what they held at the last save. All ranks call.
pub(super) fn exchange(world: &Group, declared: &[Declared]) -> Result<Plan> {
    let all = world.all_gather_bytes(&encode(&declared)?)?;
    let all: Vec<Vec<Declared>> = all.iter().map(|bytes| decode(bytes)).collect::<Result<_>>()?;
    Plan::new(&all, world.name())
}

fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| Error::invalid("what a rank holds", error, "what JSON can say"))
}

fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::invalid("what another rank says that it holds", error, "this program's words")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(name: &str, shape: &[i64], region: Region) -> Declared {
        Declared { name: name.into(), dtype: Dtype::F32, shape: shape.to_vec(), region }
    }

    fn rows(name: &str, start: i64, extent: i64) -> Declared {
        declared(name, &[6, 2], Region::along(&[6, 2], 0, start, extent))
    }

    #[test]
    fn copies_are_written_once_and_evenly() {
        let names = ["a", "b", "c", "d"];
        let all = names.map(|name| declared(name, &[6, 2], Region::whole(&[6, 2])));
        let plan = Plan::new(&[all.to_vec(), all.to_vec()], "world").unwrap();
        assert_eq!(plan.of_rank(0).len(), 2);
        assert_eq!(plan.of_rank(1).len(), 2);
        assert_eq!(plan.of_rank(1).iter().map(|(_, part)| part.offset).collect::<Vec<_>>(), [0, 48]);
        assert_eq!(plan.writers(), [0, 1]);
    }

    #[test]
    fn boxes_of_one_tensor_in_one_file_have_keys_of_their_own() {
        let plan =
            Plan::new(&[vec![rows("a", 0, 2), rows("a", 4, 2)], vec![rows("a", 2, 2)]], "world").unwrap();
        let keys = |rank| plan.of_rank(rank).iter().map(|(_, part)| part.key.clone()).collect::<Vec<_>>();
        assert_eq!((keys(0), keys(1)), (vec!["a".to_owned(), "a#1".to_owned()], vec!["a".to_owned()]));
    }

    #[test]
    fn what_the_ranks_hold_must_be_the_whole() {
        let error = |all: &[Vec<Declared>]| Plan::new(all, "world").unwrap_err().to_string();
        assert!(error(&[vec![rows("a", 0, 2)], vec![rows("a", 3, 3)]]).contains("cover 10 of 12"));
        assert!(error(&[vec![rows("a", 0, 4)], vec![rows("a", 3, 3)]]).contains("overlap"));
        let other = declared("a", &[6, 3], Region::whole(&[6, 3]));
        let said = error(&[vec![rows("a", 0, 6)], vec![other]]);
        assert!(said.contains("rank 1 has it of F32 [6, 3]"), "{said}");
    }
}
