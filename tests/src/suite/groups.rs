//! Barriers, bytes of the host, and groups within groups.

use isobar_collectives::{
    BackendKind, Error, Group, ReduceOp, all_gather_v, all_reduce, broadcast, send_recv,
};
use tch::{Kind, Tensor};

use super::{Case, Suite};

pub(crate) const CASES: &[Case] = &[
    ("barrier", barrier),
    ("all_gather_bytes", gather_bytes),
    ("broadcast_bytes", broadcast_bytes),
    ("subgroups", subgroups),
    ("groups by split", splits),
    ("groups under way together", together),
    ("traffic", traffic),
];

fn barrier(suite: &mut Suite<'_>) -> Result<(), Error> {
    (0..3).try_for_each(|_| suite.group.barrier())
}

fn gather_bytes(suite: &mut Suite<'_>) -> Result<(), Error> {
    let held = |rank: usize| vec![rank as u8 + 1; rank * 700];
    let got = suite.group.all_gather_bytes(&held(suite.rank()))?;
    let want: Vec<_> = (0..suite.ranks()).map(held).collect();
    suite.check(got == want, || format!("got {got:?}"));
    Ok(())
}

fn broadcast_bytes(suite: &mut Suite<'_>) -> Result<(), Error> {
    for root in 0..suite.ranks() {
        for length in [0, 5, 40_000] {
            let mine = vec![suite.rank() as u8; length + suite.rank()];
            let got = suite.group.broadcast_bytes(&mine, root)?;
            suite.check(got == vec![root as u8; length + root], || {
                format!("{length} bytes from {root} differ")
            });
        }
    }
    Ok(())
}

fn subgroups(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    // All in reverse order.
    let reversed: Vec<usize> = (0..ranks).rev().collect();
    let group = made(suite, "reversed", &reversed)?;
    if let Some(group) = &group {
        members_agree(suite, group)?;
        // Its ranks are its own: its rank 0 is the last of the world.
        let x = Tensor::from_slice(&[rank as i64]);
        let got = broadcast(&x, 0, group)?;
        suite.same("from rank 0", &got, &Tensor::from_slice(&[ranks as i64 - 1]));
        // A group of a group: its ranks are counted in the one that it is made from.
        let nested = group.subgroup("nested", &(0..ranks.div_ceil(2)).collect::<Vec<_>>())?;
        let expected: Vec<usize> = reversed[..ranks.div_ceil(2)].to_vec();
        suite.check(nested.is_some() == expected.contains(&rank), || "membership is wrong".into());
        if let Some(nested) = nested {
            let world: Vec<usize> = expected.iter().map(|&r| suite.group.ranks()[r]).collect();
            suite.check(nested.ranks() == world, || format!("members are {:?}", nested.ranks()));
            members_agree(suite, &nested)?;
        }
    }
    // Some ranks only.
    let odd: Vec<usize> = (0..ranks).filter(|r| r % 2 == 1).collect();
    if !odd.is_empty() {
        let group = made(suite, "odd", &odd)?;
        if let Some(group) = &group {
            members_agree(suite, group)?;
        }
    }
    // Each alone; every rank makes the groups of all.
    for one in 0..ranks {
        if let Some(alone) = made(suite, "alone", &[one])? {
            suite.check(alone.size() == 1 && alone.rank() == 0, || format!("{alone:?} is not of one rank"));
            members_agree(suite, &alone)?;
        }
    }
    suite.group.barrier()
}

fn made(suite: &mut Suite<'_>, name: &str, ranks: &[usize]) -> Result<Option<Group>, Error> {
    let group = suite.group.subgroup(name, ranks)?;
    let place = ranks.iter().position(|&r| r == suite.rank());
    suite.check(group.as_ref().map(Group::rank) == place, || format!("rank in {name} is wrong"));
    if let Some(group) = &group {
        let world: Vec<usize> = ranks.iter().map(|&r| suite.group.ranks()[r]).collect();
        suite
            .check(group.name() == name && group.ranks() == world, || format!("{group:?} is of other ranks"));
        suite.check(group.deadline() == suite.group.deadline(), || "the deadline differs".into());
        suite.check(group.backend() == suite.group.backend(), || "the backend differs".into());
    }
    Ok(group)
}

/// The members, and nobody else, take part in the group's collectives, in the group's order.
fn members_agree(suite: &mut Suite<'_>, group: &Group) -> Result<(), Error> {
    let world = Tensor::from_slice(&[suite.rank() as i64]);
    let members: Vec<i64> = group
        .ranks()
        .iter()
        .map(|member| suite.group.ranks().iter().position(|r| r == member).map_or(-1, |r| r as i64))
        .collect();
    let gathered = all_gather_v(&world, None, 0, true, group)?;
    suite.same("members in order", &gathered, &Tensor::from_slice(&members));
    let sum = all_reduce(&world, ReduceOp::Sum, group)?;
    suite.same("sum over members", &sum, &Tensor::from_slice(&[members.iter().sum::<i64>()]));
    if group.size() > 1 {
        let next = (group.rank() + 1) % group.size();
        let last = (group.rank() + group.size() - 1) % group.size();
        let got = send_recv(&world, Some(next), Some(last), &[1], group)?;
        suite.same("from the member before", &got, &Tensor::from_slice(&[members[last]]));
    }
    group.barrier()
}

fn splits(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    // Even and odd ranks, the last first.
    let group = suite.group.split("parity", Some(rank % 2 + 5), -(rank as i64))?;
    let expected: Vec<usize> = (0..ranks).rev().filter(|r| r % 2 == rank % 2).collect();
    match group {
        Some(group) => {
            let world: Vec<usize> = expected.iter().map(|&r| suite.group.ranks()[r]).collect();
            suite.check(group.ranks() == world, || format!("members are {:?}", group.ranks()));
            members_agree(suite, &group)?;
            // Split again, within.
            if let Some(inner) = group.split("halves", Some(group.rank() / 2), 0)? {
                members_agree(suite, &inner)?;
            } else {
                suite.fail("a rank with a colour has no group".into());
            }
        }
        None => suite.fail("a rank with a colour has no group".into()),
    }
    // Equal keys: in the order of ranks. Some have no colour.
    let colour = (rank != 0).then_some(0);
    let group = suite.group.split("without the first", colour, 3)?;
    suite.check(group.is_some() == (rank != 0), || "membership is wrong".into());
    if let Some(group) = group {
        suite.check(group.rank() + 1 == rank && group.size() + 1 == ranks, || format!("{group:?} is wrong"));
        members_agree(suite, &group)?;
    }
    Ok(())
}

/// Operations of several groups are under way at once and do not mix.
fn together(suite: &mut Suite<'_>) -> Result<(), Error> {
    use isobar_collectives::start;
    let (rank, ranks) = (suite.rank(), suite.ranks());
    let all: Vec<usize> = (0..ranks).collect();
    let reversed: Vec<usize> = (0..ranks).rev().collect();
    let one = suite.group.subgroup("one", &all)?;
    let other = suite.group.subgroup("other", &reversed)?;
    let (Some(one), Some(other)) = (one, other) else {
        suite.fail("a group of all ranks lacks one".into());
        return Ok(());
    };
    suite.check(one != other && one == one.clone(), || "groups are not told apart".into());
    let x = Tensor::from_slice(&[rank as i64]);
    let works = [&one, &other, suite.group].map(|group| start::all_gather_v(&x, None, 0, group));
    let forward = Tensor::arange(ranks as i64, (Kind::Int64, tch::Device::Cpu));
    let mut results = Vec::new();
    for work in works.into_iter().rev() {
        results.push(work?.wait()?);
    }
    suite.same("of the world", &results[0], &forward);
    suite.same("of the other group", &results[1], &forward.flip([0]));
    suite.same("of the one group", &results[2], &forward);
    Ok(())
}

fn traffic(suite: &mut Suite<'_>) -> Result<(), Error> {
    let ranks = suite.ranks() as u64;
    let before = suite.group.traffic();
    let x = Tensor::from_slice(&[1.0_f64; 6]);
    all_gather_v(&x, None, 0, true, suite.group).map(drop)?;
    let after = suite.group.traffic();
    let (sent, received) = (after.sent - before.sent, after.received - before.received);
    suite.check(sent == 48 * (ranks - 1) && received == sent, || format!("sent {sent}, received {received}"));
    suite.check(after.operations == before.operations + 1, || "operations are not counted".into());
    let single = suite.group.backend() == BackendKind::Single;
    suite.check(!single || suite.ranks() == 1, || "a single backend of several ranks".into());
    Ok(())
}
