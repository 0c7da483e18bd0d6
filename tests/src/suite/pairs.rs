//! send and recv of pairs, rings of send_recv, and works under way together that end in another order.

use isobar_collectives::{Error, ReduceOp, send_recv, start};
use tch::{Device, Kind, Tensor};

use super::data::{KINDS, MEMORIES, Memory, laid_out, splits};
use super::reductions::combined;
use super::{Case, Suite};

pub(crate) const CASES: &[Case] = &[
    ("send and recv", pairs),
    ("several messages of a pair", several),
    ("ring", ring),
    ("shift without wrapping", shift),
    ("works out of order", out_of_order),
    ("works polled", polled),
];

/// Every rank sends to every later one, which sends back.
fn pairs(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    for (n, kind) in KINDS.into_iter().enumerate() {
        let memory = MEMORIES[n % MEMORIES.len()];
        let id = suite.fresh();
        for (low, high) in (0..ranks).flat_map(|low| (low + 1..ranks).map(move |high| (low, high))) {
            if rank != low && rank != high {
                continue;
            }
            let peer = low + high - rank;
            let own = laid_out(&suite.data(id, rank, &[3, 2, 5], kind), memory);
            let want = laid_out(&suite.data(id, peer, &[3, 2, 5], kind), memory);
            let got = suite.unchanged(&[&own], |s| {
                let sent = start::send(&own, peer, s.group)?;
                let got = start::recv(&own, peer, s.group)?.wait()?;
                sent.wait()?;
                Ok(got)
            })?;
            suite.same(&format!("{kind:?} {memory:?} from {peer}"), &got, &want);
        }
    }
    Ok(())
}

/// Messages of a pair meet in the order in which they were sent, whatever the order of the waits.
fn several(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    let id = suite.fresh();
    let message = |suite: &Suite<'_>, n: i64| suite.data(id + n as u64, 0, &[n + 1], Kind::Int);
    if ranks > 1 && rank == 0 {
        let works: Vec<_> = (0..6)
            .map(|n| start::send(&message(suite, n), ranks - 1, suite.group))
            .collect::<Result<_, _>>()?;
        works.into_iter().rev().try_for_each(|work| work.wait())?;
    } else if ranks > 1 && rank == ranks - 1 {
        let works: Vec<_> =
            (0..6).map(|n| start::recv(&message(suite, n), 0, suite.group)).collect::<Result<_, _>>()?;
        for (n, work) in works.into_iter().enumerate().rev() {
            let got = work.wait()?;
            suite.same(&format!("message {n}"), &got, &message(suite, n as i64));
        }
    }
    suite.group.barrier()
}

fn ring(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    if ranks == 1 {
        return Ok(());
    }
    let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    for large in [3, 30_000] {
        // Each rank sends another shape, one of them nothing.
        let shape = |rank: usize| [rank as i64, large];
        let id = suite.fresh();
        let own = suite.data(id, rank, &shape(rank), Kind::Float);
        let got =
            suite.unchanged(&[&own], |s| send_recv(&own, Some(next), Some(last), &shape(last), s.group))?;
        suite.same("from the last rank", &got, &suite.data(id, last, &shape(last), Kind::Float));
    }
    Ok(())
}

fn shift(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    let id = suite.fresh();
    let own = suite.data(id, rank, &[4], Kind::Double);
    let (next, last) = ((rank + 1 < ranks).then_some(rank + 1), rank.checked_sub(1));
    let got = send_recv(&own, next, last, &[4], suite.group)?;
    let want = match last {
        Some(last) => suite.data(id, last, &[4], Kind::Double),
        None => Tensor::zeros([0], (Kind::Double, Device::Cpu)),
    };
    suite.same("from the last rank", &got, &want);
    Ok(())
}

fn out_of_order(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    let sizes = &splits(ranks)[1];
    let total: i64 = sizes.iter().sum();
    let id = suite.fresh();
    let at = |suite: &Suite<'_>, n: u64, r: usize, shape: &[i64]| suite.data(id + n, r, shape, Kind::Double);
    let every = |suite: &Suite<'_>, n: u64, shape: &[i64]| -> Vec<Tensor> {
        (0..ranks).map(|r| at(suite, n, r, shape)).collect()
    };
    let parts: Vec<Tensor> = (0..ranks).map(|r| at(suite, 0, r, &[sizes[r], 3])).collect();
    let (small, large) = (every(suite, 1, &[5]), every(suite, 2, &[7001]));
    let whole = every(suite, 3, &[total, 2]);
    // As many as ten under way, waited for in an order that differs between ranks.
    let group = suite.group;
    let mut works = Vec::new();
    for _ in 0..2 {
        works.push(("all_gather_v", start::all_gather_v(&parts[rank], Some(sizes), 0, group)?));
        works.push(("all_reduce", start::all_reduce(&small[rank], ReduceOp::Sum, group)?));
        works.push(("large all_reduce", start::all_reduce(&large[rank], ReduceOp::Avg, group)?));
        works.push(("scatter_v", start::scatter_v(&whole[rank], Some(sizes), 0, ranks - 1, group)?));
        works.push(("broadcast", start::broadcast(&large[rank], 0, group)?));
    }
    let offset: i64 = sizes[..rank].iter().sum();
    while !works.is_empty() {
        let (name, work) = works.remove((rank * 3 + works.len() / 2) % works.len());
        let got = work.wait()?;
        let want = match name {
            "all_gather_v" => Tensor::cat(&parts, 0),
            "all_reduce" => combined(&small, ReduceOp::Sum, true),
            "large all_reduce" => combined(&large, ReduceOp::Avg, true),
            "scatter_v" => whole[ranks - 1].narrow(0, offset, sizes[rank]),
            _ => large[0].shallow_clone(),
        };
        suite.same(name, &got, &want);
    }
    Ok(())
}

/// A work moves when it is polled, and its result is there without a wait.
fn polled(suite: &mut Suite<'_>) -> Result<(), Error> {
    let id = suite.fresh();
    let inputs: Vec<Tensor> =
        (0..suite.ranks()).map(|rank| suite.data(id, rank, &[9001], Kind::Float)).collect();
    let mut work =
        start::all_reduce(&laid_out(&inputs[suite.rank()], Memory::Strided), ReduceOp::Sum, suite.group)?;
    let end = std::time::Instant::now() + suite.group.deadline();
    while !work.poll()? {
        if std::time::Instant::now() > end {
            suite.fail("polling does not end".into());
            break;
        }
        std::thread::yield_now();
    }
    suite.same("the sum", &work.wait()?, &combined(&inputs, ReduceOp::Sum, true));
    Ok(())
}
