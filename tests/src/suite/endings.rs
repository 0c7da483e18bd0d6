//! Errors that end a group, or may: each test needs its own world, with a deadline of a second or two.

use std::time::Instant;

use isobar_collectives::{
    Error, Fingerprints, Group, ReduceOp, all_gather_v, all_reduce, broadcast, fused_all_reduce, gather_v,
    reduce, reduce_scatter_v, send_recv, start, transpose,
};
use tch::{Kind, Tensor};

/// The endings by name, for programs that run one.
pub const ALL: [(&str, Ending); 10] = [
    ("mismatch", mismatch),
    ("other-operation", other_operation),
    ("other-kind", other_kind),
    ("other-shape", other_shape),
    ("other-arguments", other_arguments),
    ("pair-mismatch", pair_mismatch),
    ("compared", compared),
    ("absent", absent),
    ("dropped", dropped),
    ("too-many-groups", too_many_groups),
];

/// A test of a group that may not be used afterwards. All ranks call.
pub type Ending = fn(&Group) -> Result<(), String>;

/// Messages of another length than expected are an error that names both; the group is dead on all ranks then.
///
/// # Errors
///
/// A description of the deviation.
pub fn mismatch(group: &Group) -> Result<(), String> {
    // Only the labels of messages detect it.
    group.set_fingerprints(Fingerprints::Off);
    let extent = if group.rank() == 0 { 3 } else { 2 };
    let x = Tensor::ones([extent], (Kind::Double, tch::Device::Cpu));
    match all_gather_v(&x, None, 0, true, group) {
        Ok(got) => return Err(format!("parts of other extents were taken for {got:?}")),
        Err(Error::Backend { problem, .. }) => names_both(&problem)?,
        Err(Error::Peer { problem, .. } | Error::Dead { cause: problem, .. }) => names_both(&problem)?,
        Err(error) => return Err(format!("not an error of lengths: {error}")),
    }
    is_dead(group)
}

/// Another operation with messages of the same length is an error on all ranks.
///
/// # Errors
///
/// A description of the deviation.
pub fn other_operation(group: &Group) -> Result<(), String> {
    let (x, last) = (Tensor::from_slice(&[1.0]), group.size() - 1);
    foreign(group, |group| match group.rank() == last {
        true => broadcast(&x, last, group),
        false => all_reduce(&x, ReduceOp::Sum, group),
    })
}

/// Ranks call with different dtypes.
///
/// # Errors
///
/// A description of the deviation.
pub fn other_kind(group: &Group) -> Result<(), String> {
    let kind = if group.rank() == 0 { Kind::Float } else { Kind::Int };
    let x = Tensor::ones([2], (kind, tch::Device::Cpu));
    foreign(group, |group| all_reduce(&x, ReduceOp::Sum, group))
}

/// Ranks call with different shapes.
///
/// # Errors
///
/// A description of the deviation.
pub fn other_shape(group: &Group) -> Result<(), String> {
    let shape = if group.rank() == 0 { [2, 3] } else { [3, 2] };
    let x = Tensor::ones(shape, (Kind::Double, tch::Device::Cpu));
    foreign(group, |group| all_gather_v(&x, None, 1, true, group))
}

/// The last rank calls with another reduction, or along another dim, in messages of the same dtype and shape. Each trial has a group
/// of its own, which it ends.
///
/// # Errors
///
/// A description of the deviation.
pub fn other_arguments(group: &Group) -> Result<(), String> {
    type Differing<'a> = (&'a str, &'a dyn Fn(&Group, bool) -> Result<Tensor, Error>);
    let all: Vec<usize> = (0..group.size()).collect();
    let ranks = group.size() as i64;
    let square = Tensor::ones([ranks; 3], (Kind::Double, tch::Device::Cpu));
    let line = Tensor::ones([ranks], (Kind::Double, tch::Device::Cpu));
    // Reduced in two steps.
    let large = Tensor::ones([30_000], (Kind::Double, tch::Device::Cpu));
    let op = |other| if other { ReduceOp::Max } else { ReduceOp::Sum };
    let pair = |other| {
        let pair = if other { [&line, &square] } else { [&square, &line] };
        Vec::from(pair.map(Tensor::shallow_clone))
    };
    let trials: [Differing<'_>; 10] = [
        ("all_reduce", &|group, other| all_reduce(&square, op(other), group)),
        ("all_reduce of many", &|group, other| all_reduce(&large, op(other), group)),
        ("start::all_reduce", &|group, other| start::all_reduce(&square, op(other), group)?.wait()),
        ("fused_all_reduce", &|group, other| fused_all_reduce(&square, op(other), None, group)),
        ("fused_all_reduce of a structure", &|group, other| {
            Ok(fused_all_reduce(&pair(other), ReduceOp::Sum, None, group)?.remove(0))
        }),
        ("reduce", &|group, other| reduce(&square, op(other), 0, group)),
        ("reduce_scatter_v", &|group, other| reduce_scatter_v(&square, None, 0, op(other), true, group)),
        ("all_gather_v", &|group, other| all_gather_v(&square, None, i64::from(other), true, group)),
        ("gather_v", &|group, other| gather_v(&square, None, i64::from(other), 0, group)),
        ("transpose", &|group, other| transpose(&square, 0, None, if other { 2 } else { 1 }, None, group)),
    ];
    for (name, call) in trials {
        let own = group.subgroup(name, &all).map_err(|error| error.to_string())?;
        let own = own.ok_or("a group without this rank")?;
        let other = group.rank() + 1 == group.size();
        foreign(&own, |group| call(group, other)).map_err(|error| format!("{name}: {error}"))?;
    }
    Ok(())
}

fn foreign(group: &Group, call: impl Fn(&Group) -> Result<Tensor, Error>) -> Result<(), String> {
    group.set_fingerprints(Fingerprints::Off);
    // A rank that only sends may learn of it with its next call.
    match call(group).and_then(|_| group.barrier()) {
        Ok(()) => Err("a message of another call was taken".into()),
        Err(
            Error::Backend { problem, .. } | Error::Peer { problem, .. } | Error::Dead { cause: problem, .. },
        ) if problem.contains("do all ranks make the same call") => is_dead(group),
        Err(error) => Err(format!("not an error of another call: {error}")),
    }
}

/// A call, and what it is on the rank that makes another.
type Trial<'a> = (&'a str, Box<dyn Fn() -> Result<Tensor, Error> + 'a>);

/// With fingerprints, different operations are an error that names both sides on all ranks, and the group stays usable.
///
/// # Errors
///
/// A description of the deviation.
pub fn compared(group: &Group) -> Result<(), String> {
    group.set_fingerprints(Fingerprints::Always);
    let last = group.size() - 1;
    let x = |extent: i64, kind: Kind| Tensor::ones([extent], (kind, tch::Device::Cpu));
    let other = group.rank() == last;
    let calls: [Trial<'_>; 6] = [
        (
            "broadcast of Double [2]",
            Box::new(|| match other {
                true => broadcast(&x(2, Kind::Double), 0, group),
                false => all_reduce(&x(2, Kind::Double), ReduceOp::Sum, group),
            }),
        ),
        (
            "all_reduce of Int [2]",
            Box::new(|| all_reduce(&x(2, if other { Kind::Int } else { Kind::Float }), ReduceOp::Sum, group)),
        ),
        (
            "all_gather_v of Float [3]",
            Box::new(|| all_gather_v(&x(if other { 3 } else { 2 }, Kind::Float), None, 0, true, group)),
        ),
        (
            "all_reduce of Float [2] with Max",
            Box::new(|| {
                let op = if other { ReduceOp::Max } else { ReduceOp::Sum };
                all_reduce(&x(2, Kind::Float), op, group)
            }),
        ),
        (
            "all_gather_v of Float [2, 1] along dim 1",
            Box::new(|| {
                let x = x(2, Kind::Float).unsqueeze(1);
                all_gather_v(&x, None, i64::from(other), true, group)
            }),
        ),
        // No rank sends anything: only a comparison detects it.
        (
            "all_gather_v of Int [0]",
            Box::new(|| {
                all_gather_v(&x(0, if other { Kind::Int } else { Kind::Float }), None, 0, true, group)
            }),
        ),
    ];
    for (named, call) in calls {
        match call() {
            Err(Error::Argument { problem, .. })
                if problem.contains("the ranks make different calls")
                    && problem.contains(&format!("rank {last} {named}")) => {}
            answer => return Err(format!("not an error that names {named} of rank {last}: {answer:?}")),
        }
        group.barrier().map_err(|error| format!("the group does not work after {named}: {error}"))?;
    }
    Ok(())
}

/// A message between two ranks has the wrong label.
///
/// # Errors
///
/// A description of the deviation.
pub fn pair_mismatch(group: &Group) -> Result<(), String> {
    let x = Tensor::ones([3], (Kind::Double, tch::Device::Cpu));
    match group.rank() {
        0 => {
            // The message itself may be gone already.
            let _sent = send_recv(&x, Some(1), None, &[0], group);
            Ok(())
        }
        1 => {
            match send_recv(&x, None, Some(0), &[2], group) {
                Err(Error::Backend { problem, .. }) => names_both(&problem)?,
                other => return Err(format!("a message of another length gave {other:?}")),
            }
            is_dead(group)
        }
        _ => Ok(()),
    }
}

fn names_both(problem: &str) -> Result<(), String> {
    let bytes = problem.contains("24") && problem.contains("16");
    let shapes = problem.contains("[3]") && problem.contains("[2]");
    if bytes || shapes { Ok(()) } else { Err(format!("does not name both lengths: {problem}")) }
}

/// A rank that never comes: the others get an error by the deadline, at least one of them that of the deadline, which names the
/// rank that it waits for, and the group is dead on each of them.
///
/// # Errors
///
/// A description of the deviation.
pub fn absent(group: &Group) -> Result<(), String> {
    // A comparison would name the rank before the barrier does.
    group.set_fingerprints(Fingerprints::Off);
    if group.rank() + 1 == group.size() {
        // Longer than the others need to come here and to wait for their deadline.
        std::thread::sleep(group.deadline() * 4);
        return Ok(());
    }
    let last = group.size() - 1;
    match group.barrier() {
        Ok(()) => return Err("a barrier passed without one rank".into()),
        Err(Error::Timeout { after, awaited, .. }) if after >= group.deadline() && awaited == [last] => {}
        Err(Error::Peer { problem, .. } | Error::Dead { cause: problem, .. })
            if problem.contains("not finished after") => {}
        Err(error) => return Err(format!("not the error of the deadline: {error}")),
    }
    is_dead(group)
}

/// Works dropped unfinished: the others get their results, and the group works on.
///
/// # Errors
///
/// A description of the deviation.
pub fn dropped(group: &Group) -> Result<(), String> {
    let x = Tensor::full([1000], group.rank() as f64, (Kind::Double, tch::Device::Cpu));
    let large = x.repeat([100]);
    for round in 0..3 {
        let work = start::all_gather_v(&x, None, 0, group).map_err(|error| error.to_string())?;
        if group.rank() == round % group.size() {
            drop(work);
        } else {
            let result = work.wait().map(drop);
            result.map_err(|error| format!("another rank's drop was an error here: {error}"))?;
        }
        // Of one in two steps too.
        drop(start::broadcast(&large, 0, group));
        let work = start::all_reduce(&large, ReduceOp::Sum, group).map_err(|error| error.to_string())?;
        if group.rank() != round % group.size() {
            let result = work.wait().map(drop);
            result.map_err(|error| format!("another rank's drop was an error here: {error}"))?;
        }
        let sum = all_reduce(&x, ReduceOp::Sum, group).map_err(|error| error.to_string())?;
        let ranks = group.size() as f64;
        if sum.double_value(&[999]) != ranks * (ranks - 1.0) / 2.0 {
            return Err(format!("the sum after a drop is {sum:?}"));
        }
    }
    // Two messages of one number, to different ranks: the first is not waited for, and both arrive.
    if group.size() > 2 {
        let result = match group.rank() {
            0 => {
                drop(start::send(&x, 1, group));
                start::send(&x, 2, group).and_then(|work| work.wait())
            }
            1 | 2 => start::recv(&x, 0, group).and_then(|work| work.wait()).map(drop),
            _ => Ok(()),
        };
        result.map_err(|error| format!("the message after a dropped one: {error}"))?;
    }
    group.barrier().map_err(|error| error.to_string())
}

/// More groups than can be: an error on all ranks, and the groups that there are work on.
///
/// # Errors
///
/// A description of the deviation.
pub fn too_many_groups(group: &Group) -> Result<(), String> {
    let all: Vec<usize> = (0..group.size()).collect();
    for made in 0..5000 {
        match group.subgroup("one more", &all) {
            Ok(_) => {}
            Err(Error::Argument { problem, .. }) if problem.contains("groups were made") && made > 500 => {
                return group.barrier().map_err(|error| error.to_string());
            }
            Err(error) => return Err(format!("group {made}: {error}")),
        }
    }
    Err("5000 groups were made".into())
}

/// Calls fail at once, and say why.
fn is_dead(group: &Group) -> Result<(), String> {
    let begun = Instant::now();
    // The notice that ends the group may still be in flight.
    while group.failure().is_none() && begun.elapsed() < group.deadline() {
        if group.barrier().is_ok() {
            return Err("a barrier passed in a group that has ended".into());
        }
    }
    match group.barrier() {
        Err(Error::Dead { cause, .. }) if !cause.is_empty() => Ok(()),
        other => Err(format!("the group is not dead: {other:?}")),
    }
}
