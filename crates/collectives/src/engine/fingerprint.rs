//! Fingerprints: compare the operations of a group's ranks before data moves.
//!
//! Messages carry a label, so no rank accepts data of another call. A fingerprint says more: each rank sends a description
//! of its call to all others, and each finds out which ranks make another call, and which. A rank that has sent nothing by
//! the deadline is named too.

use tch::{Device, Kind, Tensor};

use crate::engine::call::Call;
use crate::error::Result;
use crate::observe::flight::FlightEntry;
use crate::wire::Transfer;

/// The step of a comparison's messages, which no other step of a collective has.
const STEP: u8 = 6;

/// The length of a fingerprint, in bytes: all ranks send as many, whatever they call.
const LENGTH: usize = 1024;

/// Tells all ranks of the group what this one calls, and ends when all have said the same.
pub(crate) fn compare(call: &Call) -> Result<impl Future<Output = Result<()>> + Send + use<>> {
    let own = call.recorded.entry();
    let group = call.group();
    let (rank, ranks) = (group.rank(), group.size());
    let mine = packed(own.as_ref())?;
    let mut waiting = Vec::with_capacity(ranks);
    let peers = (1..ranks).map(|i| (rank + i) % ranks);
    for peer in peers {
        let theirs = Tensor::f_empty([LENGTH as i64], (Kind::Uint8, Device::Cpu))?;
        call.check_alive()?;
        let (send, receive) = (message(call, peer, &mine), message(call, peer, &theirs));
        let started = call.backend().start(call.tag(STEP), vec![send], vec![receive]);
        let request = started.map_err(|failure| call.broken(failure.0))?;
        waiting.push((peer, theirs, Box::pin(call.complete(request))));
    }
    let comparison = call.comparison.clone();
    comparison.wait_for((0..ranks).filter(|&peer| peer != rank).collect());
    let call = call.clone();
    Ok(async move {
        let mut calls: Vec<(usize, Option<FlightEntry>)> = vec![(rank, own)];
        std::future::poll_fn(|context| {
            let mut at = 0;
            // All of them move on at each poll, so that those that are missing are known.
            while let Some((peer, theirs, request)) = waiting.get_mut(at) {
                match request.as_mut().poll(context) {
                    std::task::Poll::Pending => at += 1,
                    std::task::Poll::Ready(Err(error)) => return std::task::Poll::Ready(Err(error)),
                    std::task::Poll::Ready(Ok(())) => {
                        calls.push((*peer, unpacked(theirs)));
                        comparison.came(*peer);
                        drop(waiting.remove(at));
                    }
                }
            }
            if waiting.is_empty() { std::task::Poll::Ready(Ok(())) } else { std::task::Poll::Pending }
        })
        .await?;
        calls.sort_by_key(|(rank, _)| *rank);
        match differences(&calls) {
            None => Ok(()),
            Some(differences) => Err(call.error(format!(
                "the ranks make different calls: {differences}; all must make the same calls in the same order"
            ))),
        }
    })
}

/// Returns one side of a comparison's message. Its label is 0, so that ranks that make another call receive it too and find
/// the difference.
fn message(call: &Call, peer: usize, tensor: &Tensor) -> Transfer {
    Transfer { peer: call.world_rank(peer), tensor: tensor.shallow_clone(), rows: None, label: 0 }
}

/// Describes the call of each rank; `None` if all are the same.
fn differences(calls: &[(usize, Option<FlightEntry>)]) -> Option<String> {
    let mut kinds: Vec<(&Option<FlightEntry>, Vec<usize>)> = Vec::new();
    for (rank, call) in calls {
        // With every call of that kind: of exchanges each pair has sizes of its own to agree on.
        let same = |known: &Vec<usize>| {
            known.iter().all(|other| {
                let known = calls.iter().find(|(rank, _)| rank == other).and_then(|(_, call)| call.as_ref());
                match (known, call) {
                    (Some(known), Some(call)) => {
                        known.agrees_with(call) && sizes_agree(known, *other, call, *rank)
                    }
                    _ => false,
                }
            })
        };
        match kinds.iter_mut().find(|(_, ranks)| same(ranks)) {
            Some((_, ranks)) => ranks.push(*rank),
            None => kinds.push((call, vec![*rank])),
        }
    }
    if kinds.len() == 1 {
        return None;
    }
    let words = kinds.iter().map(|(call, ranks)| {
        let call =
            call.as_ref().map_or_else(|| "something that cannot be read".to_owned(), FlightEntry::call);
        match &ranks[..] {
            [rank] => format!("rank {rank} {call}"),
            ranks => format!("ranks {ranks:?} {call}"),
        }
    });
    Some(words.collect::<Vec<_>>().join(", "))
}

/// Returns whether the sizes that two ranks send each other are those that the other expects, if both are known.
fn sizes_agree(one: &FlightEntry, rank: usize, other: &FlightEntry, other_rank: usize) -> bool {
    let pair = |from: &FlightEntry, to: usize, at: &FlightEntry, of: usize| match (
        from.sizes.get(to),
        at.receives.get(of),
    ) {
        (Some(sent), Some(expected)) => sent == expected,
        _ => true,
    };
    pair(one, other_rank, other, rank) && pair(other, rank, one, other_rank)
}

fn packed(entry: Option<&FlightEntry>) -> Result<Tensor> {
    let mut bytes = entry.and_then(|entry| serde_json::to_vec(&entry.signature()).ok()).unwrap_or_default();
    // One that is too long is cut, and then cannot be read: it is not silently taken for the same.
    bytes.resize(LENGTH, b' ');
    Ok(Tensor::f_from_slice(&bytes)?)
}

fn unpacked(tensor: &Tensor) -> Option<FlightEntry> {
    let mut bytes = vec![0_u8; tensor.numel()];
    tensor.f_copy_data_u8(&mut bytes, tensor.numel()).ok()?;
    serde_json::from_slice(&bytes).ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rstest::rstest;

    use super::*;
    use crate::engine::comparison::Fingerprints;
    use crate::{
        Error, Group, ReduceOp, all_gather_v, all_reduce, all_to_all_v, broadcast, reduce_scatter_v, start,
        threads, transpose,
    };

    type Answer = Result<Tensor, Error>;

    const RANKS: usize = 3;

    fn ones(shape: &[i64], kind: Kind) -> Tensor {
        Tensor::ones(shape, (kind, Device::Cpu))
    }

    /// Rank 2 calls otherwise; what each rank gets, and whether the group works on.
    fn called(run: impl Fn(&Group, bool) -> Answer + Sync) -> Vec<(Answer, bool)> {
        threads::run(RANKS, Duration::from_secs(30), |group| {
            group.set_fingerprints(Fingerprints::Always);
            let answer = run(&group, group.rank() == 2);
            (answer, group.barrier().is_ok())
        })
    }

    /// Works for many ranks too, although not all of their sizes are kept.
    #[test]
    fn the_sizes_of_all_ranks_are_compared() {
        const MANY: usize = 20;
        let answers = threads::run(MANY, Duration::from_secs(60), |group| {
            group.set_fingerprints(Fingerprints::Always);
            let mut sizes = vec![1; MANY];
            if group.rank() == 3 {
                sizes[18] = 2;
            }
            all_gather_v(&ones(&[1], Kind::Float), Some(&sizes), 0, true, &group)
        });
        for answer in answers {
            let text = answer.expect_err("different sizes were taken").to_string();
            assert!(text.contains("rank 3 all_gather_v"), "{text}");
        }
    }

    #[rstest]
    #[case::shape("rank 2 all_reduce of Float [9]", |group: &Group, other: bool| {
        all_reduce(&ones(&[if other { 9 } else { 8 }], Kind::Float), ReduceOp::Sum, group)
    })]
    #[case::kind("rank 2 all_reduce of Int [8]", |group: &Group, other: bool| {
        all_reduce(&ones(&[8], if other { Kind::Int } else { Kind::Float }), ReduceOp::Sum, group)
    })]
    #[case::reduction("rank 2 all_reduce of Float [8] with Max", |group: &Group, other: bool| {
        let op = if other { ReduceOp::Max } else { ReduceOp::Sum };
        start::all_reduce(&ones(&[8], Kind::Float), op, group)?.wait()
    })]
    #[case::scattered_reduction(
        "rank 2 reduce_scatter_v of Float [3] along dim 0 with Avg",
        |group: &Group, other: bool| {
            let op = if other { ReduceOp::Avg } else { ReduceOp::Sum };
            reduce_scatter_v(&ones(&[3], Kind::Float), None, 0, op, true, group)
        }
    )]
    #[case::dim("rank 2 all_gather_v of Float [2, 2] along dim 1", |group: &Group, other: bool| {
        all_gather_v(&ones(&[2, 2], Kind::Float), None, i64::from(other), true, group)
    })]
    #[case::joined_dim("rank 2 transpose of Float [3, 3, 3] along dim 0 and dim 2", |group: &Group, other: bool| {
        transpose(&ones(&[3; 3], Kind::Float), 0, None, if other { 2 } else { 1 }, None, group)
    })]
    #[case::kind_without_data("rank 2 all_gather_v of Double [0, 2] along dim 0", |group: &Group, other: bool| {
        all_gather_v(&ones(&[0, 2], if other { Kind::Double } else { Kind::Float }), None, 0, true, group)
    })]
    #[case::operation("rank 2 broadcast of Float [8] at rank 0 of the group", |group: &Group, other: bool| {
        match other {
            true => broadcast(&ones(&[8], Kind::Float), 0, group),
            false => all_reduce(&ones(&[8], Kind::Float), ReduceOp::Sum, group),
        }
    })]
    #[case::root("rank 2 broadcast of Float [8] at rank 2 of the group", |group: &Group, other: bool| {
        broadcast(&ones(&[8], Kind::Float), if other { 2 } else { 0 }, group)
    })]
    #[case::part("rank 2 all_gather_v of Float [4] along dim 0", |group: &Group, other: bool| {
        all_gather_v(&ones(&[if other { 4 } else { 3 }], Kind::Float), None, 0, true, group)
    })]
    #[case::sizes("rank 2 all_gather_v of Float [3] along dim 0 by sizes [1, 2, 3]", |group: &Group, other: bool| {
        let sizes = if other { [1, 2, 3] } else { [1, 2, 4] };
        let own = ones(&[sizes[group.rank()]], Kind::Float);
        all_gather_v(&own, Some(&sizes), 0, true, group)
    })]
    #[case::counts("rank 2 all_to_all_v of Float [4] along dim 0 by sizes [2, 1, 1] and [1, 1, 1]", |group: &Group, other: bool| {
        let sizes = if other { [2, 1, 1] } else { [1, 1, 1] };
        let x = ones(&[sizes.iter().sum()], Kind::Float);
        all_to_all_v(&x, Some(&sizes), Some(&[1, 1, 1]), 0, group)
    })]
    fn different_calls_are_an_error_that_names_both_sides(
        #[case] named: &str,
        #[case] run: fn(&Group, bool) -> Answer,
    ) {
        for (rank, (answer, works)) in called(run).into_iter().enumerate() {
            let text = answer.expect_err("different calls were taken").to_string();
            assert!(text.contains("ranks [0, 1] ") && text.contains(named), "rank {rank}: {text}");
            assert!(works, "rank {rank}");
        }
    }

    #[test]
    fn equal_calls_give_what_they_give_without() {
        let sums = |fingerprints| {
            threads::run(RANKS, Duration::from_secs(30), |group| {
                group.set_fingerprints(fingerprints);
                let own = ones(&[group.rank() as i64 + 1, 2], Kind::Float);
                let all = all_gather_v(&own, Some(&[1, 2, 3]), 0, true, &group).unwrap();
                let large = all_reduce(&ones(&[100_000], Kind::Float), ReduceOp::Sum, &group).unwrap();
                let table =
                    all_to_all_v(&all, Some(&[1, 2, 3]), Some(&[group.rank() as i64 + 1; 3]), 0, &group);
                let sums = [all, large, table.unwrap()].map(|x| x.sum(Kind::Float).double_value(&[]));
                (sums, group.traffic())
            })
        };
        let without = sums(Fingerprints::Off);
        assert_eq!(sums(Fingerprints::Always), without);
        assert_eq!(sums(Fingerprints::Sample), without);
    }

    #[test]
    fn works_under_way_are_compared_too() {
        threads::run(2, Duration::from_secs(30), |group| {
            group.set_fingerprints(Fingerprints::Always);
            let works: Vec<_> = (0..8)
                .map(|i| start::all_reduce(&ones(&[i + 1], Kind::Float), ReduceOp::Sum, &group).unwrap())
                .collect();
            for work in works.into_iter().rev() {
                assert_eq!(work.wait().unwrap().double_value(&[0]), 2.0);
            }
        });
    }

    #[test]
    fn who_does_not_come_is_named() {
        let deadline = Duration::from_millis(500);
        let said = threads::run(RANKS, deadline, |group| {
            group.set_fingerprints(Fingerprints::Always);
            if group.rank() == 2 {
                std::thread::sleep(3 * deadline);
                return None;
            }
            Some(all_reduce(&ones(&[8], Kind::Float), ReduceOp::Sum, &group).unwrap_err().to_string())
        });
        for text in said.into_iter().flatten() {
            assert!(text.contains("rank 2 of the world has not come to it"), "{text}");
        }
    }

    /// The calls of two groups in another order: each names whom it waits for.
    #[test]
    fn groups_in_another_order_are_named() {
        let said = threads::run(2, Duration::from_millis(500), |group| {
            let other = group.subgroup("other", &[0, 1]).unwrap().unwrap();
            group.set_fingerprints(Fingerprints::Always);
            let first = if group.rank() == 0 { &group } else { &other };
            all_reduce(&ones(&[8], Kind::Float), ReduceOp::Sum, first).unwrap_err().to_string()
        });
        // The first to give up names whom it waited for; the other may hear of that instead.
        for (rank, text) in said.iter().enumerate() {
            let named = format!("rank {} of the world has not come to it", 1 - rank);
            assert!(text.contains(&named) || text.contains("could not take part"), "{text}");
        }
        assert!(said.iter().any(|text| text.contains("has not come to it")), "{said:?}");
    }
}
