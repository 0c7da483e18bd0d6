//! Records of operations that complete, fail, or stay incomplete.

use std::time::Duration;

use rstest::rstest;
use tch::{Device, Kind, Tensor};

use super::*;
use crate::{Group, ReduceOp, all_gather_v, all_reduce, start, threads, trace};

const DEADLINE: Duration = Duration::from_secs(30);

fn ones(extent: i64) -> Tensor {
    Tensor::ones([extent, 2], (Kind::Float, Device::Cpu))
}

#[test]
fn an_operation_is_kept_with_what_it_is_of() {
    let entries = threads::run(2, DEADLINE, |group| {
        group.mark(Phase::Backward, 3);
        let _label = trace::module("block.1");
        let sizes = [1, 2];
        let x = ones(sizes[group.rank()]);
        drop(all_gather_v(&x, Some(&sizes), 0, true, &group).unwrap());
        group.flight().entries(usize::MAX, true)
    });
    for (rank, entries) in entries.iter().enumerate() {
        let [entry] = &entries[..] else { panic!("{entries:?}") };
        let extent = rank + 1;
        assert_eq!(entry.call(), format!("all_gather_v of Float [{extent}, 2] along dim 0 by sizes [1, 2]"));
        assert_eq!((entry.group.as_str(), entry.sequence, entry.context), ("world", 0, 0));
        assert_eq!((entry.module.as_str(), entry.state), ("block.1", FlightState::Finished));
        assert_eq!((entry.phase, entry.step), (Phase::Backward, 3));
        assert!(entry.end_ns >= entry.begin_ns && entry.problem.is_none());
    }
}

#[test]
fn the_oldest_give_way() {
    let group = Group::single();
    for _ in 0..ENTRIES + 10 {
        drop(all_reduce(&ones(1), ReduceOp::Sum, &group).unwrap());
    }
    let entries = group.flight().entries(usize::MAX, false);
    let numbers: Vec<u64> = entries.iter().map(|entry| entry.number).collect();
    assert_eq!(numbers, (10..ENTRIES as u64 + 10).collect::<Vec<_>>());
    assert_eq!(group.flight().entries(3, false).len(), 3);
    assert_eq!(group.flight().groups()[0].begun, ENTRIES as u64 + 10);
}

/// The last rank never comes: the others' entry says that they wait, and where in the program.
#[test]
fn who_waits_is_kept_and_then_why_it_failed() {
    let deadline = Duration::from_secs(2);
    let kept = threads::run(2, deadline, |group| {
        if group.rank() == 1 {
            std::thread::sleep(3 * deadline);
            return (Vec::new(), Vec::new(), None);
        }
        let flight = group.flight();
        let waiting = std::thread::spawn(move || {
            let begun = Instant::now();
            loop {
                let entries = flight.entries(usize::MAX, true);
                if begun.elapsed() > DEADLINE || entries.last().is_some_and(|entry| !entry.stack.is_empty()) {
                    return entries;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        all_reduce(&ones(4), ReduceOp::Sum, &group).unwrap_err();
        let trouble = group.flight().trouble().map(str::to_owned);
        (waiting.join().unwrap(), group.flight().entries(usize::MAX, false), trouble)
    });
    let (waiting, failed, trouble) = &kept[0];
    assert_eq!(waiting[0].state, FlightState::Waiting);
    assert!(waiting[0].stack.iter().any(|frame| frame.contains("all_reduce")), "{:?}", waiting[0].stack);
    assert_eq!(failed[0].state, FlightState::Failed);
    for problem in [failed[0].problem.as_ref(), trouble.as_ref()] {
        assert!(problem.is_some_and(|problem| problem.contains("not finished after")), "{problem:?}");
    }
}

#[test]
fn refused_calls_are_no_trouble_from_others() {
    let group = Group::single();
    drop(all_gather_v(&ones(1), None, 7, true, &group).unwrap_err());
    let entries = group.flight().entries(usize::MAX, false);
    assert_eq!(entries[0].state, FlightState::Failed);
    assert!(entries[0].problem.as_ref().is_some_and(|problem| problem.contains("out of range")));
    assert_eq!(group.flight().trouble(), None);
}

#[test]
fn what_is_not_to_be_recorded_is_not() {
    let group = Group::single();
    group.flight().record(false);
    drop(all_reduce(&ones(1), ReduceOp::Sum, &group).unwrap());
    group.flight().record(true);
    group.barrier().unwrap();
    let operations: Vec<String> =
        group.flight().entries(usize::MAX, false).into_iter().map(|entry| entry.operation).collect();
    assert_eq!(operations, ["barrier"]);
}

#[test]
fn messages_of_pairs_name_the_peer() {
    let peers = threads::run(2, DEADLINE, |group| {
        match group.rank() {
            0 => start::send(&ones(1), 1, &group).unwrap().wait().unwrap(),
            _ => drop(start::recv(&ones(1), 0, &group).unwrap().wait().unwrap()),
        }
        group.flight().entries(1, false)[0].peer
    });
    assert_eq!(peers, [Some(1), Some(0)]);
}

#[test]
fn a_marker_holds_phase_and_step() {
    let group = Group::single();
    assert_eq!(group.flight().phase(), (Phase::Start, 0));
    for (step, phase) in Phase::ALL.into_iter().enumerate() {
        group.mark(phase, step as u64);
        assert_eq!(group.flight().phase(), (phase, step as u64));
    }
}

#[test]
fn groups_are_listed_while_they_are_in_use() {
    threads::run(3, DEADLINE, |group| {
        let pair = group.subgroup("pair", &[2, 0]).unwrap();
        let names = |group: &Group| -> Vec<String> {
            group.flight().groups().into_iter().map(|group| group.name).collect()
        };
        assert_eq!(names(&group).len(), if group.rank() == 1 { 1 } else { 2 });
        if let Some(pair) = &pair {
            pair.barrier().unwrap();
            let of_pair = group.flight().groups().pop().unwrap();
            assert_eq!((of_pair.ranks, of_pair.begun), (vec![2, 0], 1));
        }
    });
}

#[rstest]
fn the_name_of_a_state_is_that_in_records(
    #[values(
        FlightState::Called,
        FlightState::Started,
        FlightState::Waiting,
        FlightState::Finished,
        FlightState::Failed
    )]
    state: FlightState,
) {
    assert_eq!(serde_json::to_value(state).unwrap(), state.name());
}
