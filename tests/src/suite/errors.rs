//! Calls that must be rejected, with an error that describes the problem on every affected rank, and with a group that
//! stays usable.

use isobar_collectives::{
    Error, PadMode, ReduceOp, all_gather_v, all_reduce, all_to_all_v, broadcast, fused_all_reduce,
    gather_from_parallel_region, gather_v, indexed_all_to_all_v, pad, reduce, reduce_loss, reduce_scatter_v,
    scatter_to_parallel_region, scatter_v, send_recv, start, transpose, truncate,
};
use tch::{Device, Kind, Tensor};

use super::data::repeated;
use super::{Case, Options, Report, Suite};

pub(crate) const CASES: &[Case] = &[
    ("wrong sizes", sizes),
    ("wrong dims", dims),
    ("wrong ranks", ranks),
    ("wrong on one rank only", one_sided),
    ("wrong on one rank only, with gradients", one_sided_gradients),
    ("wrong indices", indices),
    ("kinds without a reduction", kinds),
    ("no gradient", no_gradient),
    ("wrong structures", structures),
    ("wrong subgroups", subgroups),
    ("wrong losses", losses),
    ("pad and truncate", padding),
    ("undefined tensors", undefined),
];

/// Runs the errors alone; see [`run`](super::run).
///
/// # Errors
///
/// As there.
pub fn run(group: &isobar_collectives::Group, options: &Options) -> Result<Report, String> {
    super::run_cases(group, options, CASES)
}

type Bad<'a> = Box<dyn Fn() -> Result<Tensor, Error> + 'a>;

fn floats(shape: &[i64]) -> Tensor {
    Tensor::ones(shape, (Kind::Float, Device::Cpu))
}

/// That a call that is wrong on all ranks is refused by all, and the group works on.
fn refused<T>(
    suite: &mut Suite<'_>,
    what: &str,
    result: Result<T, Error>,
    needle: &str,
) -> Result<(), Error> {
    match result {
        Ok(_) => suite.fail(format!("{what} was taken")),
        Err(error) => {
            let text = error.to_string();
            suite.check(text.contains(needle), || format!("{what}: expected {needle:?} in: {text}"));
            let kept = matches!(error, Error::Argument { .. } | Error::Peer { .. } | Error::Input { .. });
            suite.check(kept, || format!("{what}: not an error of arguments: {error:?}"));
        }
    }
    works(suite, what)
}

/// That the next collective is right.
fn works(suite: &mut Suite<'_>, what: &str) -> Result<(), Error> {
    let sum = all_reduce(&Tensor::from_slice(&[suite.rank() as i64]), ReduceOp::Sum, suite.group)?;
    let ranks = suite.ranks() as i64;
    suite.same(
        &format!("the collective after {what}"),
        &sum,
        &Tensor::from_slice(&[ranks * (ranks - 1) / 2]),
    );
    Ok(())
}

/// That where one rank alone calls wrongly, all get an error that names it: `bad` on the last rank, `good` elsewhere.
fn alone(suite: &mut Suite<'_>, what: &str, bad: Bad<'_>, good: Bad<'_>, needle: &str) -> Result<(), Error> {
    let culprit = suite.ranks() - 1;
    if culprit == 0 {
        return refused(suite, what, bad(), needle);
    }
    let result = if suite.rank() == culprit { bad() } else { good() };
    match &result {
        Err(Error::Peer { peer, problem, .. }) if suite.rank() != culprit => {
            let right = *peer == suite.group.ranks()[culprit] && problem.contains(needle);
            suite.check(right, || format!("{what}: rank {peer} is said to have said {problem}"));
        }
        Err(Error::Argument { problem, .. }) if suite.rank() == culprit => {
            suite.check(problem.contains(needle), || format!("{what}: expected {needle:?} in: {problem}"));
        }
        other => suite.fail(format!("{what}: got {other:?}")),
    }
    works(suite, what)
}

fn sizes(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (group, count) = (suite.group, suite.ranks());
    let x = floats(&[2, 2 * count as i64 + 1]);
    let few = vec![2; count + 1];
    let mut negative = vec![2; count];
    negative[0] = -1;
    let huge: Vec<i64> = (0..count).map(|r| if r == suite.rank() { 2 } else { i64::MAX / 2 }).collect();
    let short = vec![2; count];
    let none = vec![];
    for (given, needle) in [(&few, "one for each"), (&none, "one for each"), (&negative, "negative")] {
        let given = Some(given.as_slice());
        refused(suite, "all_gather_v", all_gather_v(&x, given, 0, true, group), needle)?;
        refused(suite, "gather_v", gather_v(&x, given, 0, 0, group), needle)?;
        refused(suite, "scatter_v", scatter_v(&x, given, 0, 0, group), needle)?;
        refused(
            suite,
            "reduce_scatter_v",
            reduce_scatter_v(&x, given, 0, ReduceOp::Sum, true, group),
            needle,
        )?;
        refused(suite, "all_to_all_v", all_to_all_v(&x, given, given, 0, group), needle)?;
        refused(suite, "transpose", transpose(&x, 1, given, 0, None, group), needle)?;
        refused(suite, "scatter region", scatter_to_parallel_region(&x, 0, given, group), needle)?;
        refused(suite, "gather region", gather_from_parallel_region(&x, 0, given, group), needle)?;
    }
    if count > 2 {
        let given = Some(huge.as_slice());
        refused(suite, "sizes beyond all numbers", all_gather_v(&x, given, 0, true, group), "sum")?;
    }
    let given = Some(short.as_slice());
    refused(
        suite,
        "an extent not covered",
        reduce_scatter_v(&x, given, 1, ReduceOp::Sum, true, group),
        "sum to",
    )?;
    refused(suite, "an extent not covered", all_to_all_v(&x, given, given, 1, group), "sum to")?;
    refused(suite, "an extent not covered", scatter_to_parallel_region(&x, 1, given, group), "sum to")?;
    refused(suite, "a part of another extent", all_gather_v(&x, given, 1, true, group), "expected 2")?;
    if count > 1 {
        // Only the source knows the extent.
        refused(suite, "an extent not covered", scatter_v(&x, given, 1, 0, group), "sum to")?;
        refused(suite, "unequal parts", scatter_v(&x, None, 1, 0, group), "equal parts")?;
        refused(
            suite,
            "unequal parts",
            reduce_scatter_v(&x, None, 1, ReduceOp::Sum, true, group),
            "equal parts",
        )?;
        refused(suite, "unequal parts", all_to_all_v(&x, None, None, 1, group), "equal parts")?;
        refused(suite, "unequal parts", transpose(&x, 1, None, 0, None, group), "equal parts")?;
        refused(suite, "unequal parts", scatter_to_parallel_region(&x, 1, None, group), "equal parts")?;
        // A rank must expect from itself what it sends itself.
        let mut other = vec![2; count];
        other[suite.rank()] = 1;
        let x = floats(&[2 * count as i64]);
        refused(suite, "two sizes of one block", all_to_all_v(&x, None, Some(&other), 0, group), "itself")?;
    }
    Ok(())
}

fn dims(suite: &mut Suite<'_>) -> Result<(), Error> {
    let group = suite.group;
    let x = floats(&[suite.ranks() as i64, 3]);
    for grad in [false, true] {
        let x = x.copy().set_requires_grad(grad);
        for dim in [2, -3, i64::MAX, i64::MIN] {
            let needle = "out of range";
            refused(suite, "all_gather_v", all_gather_v(&x, None, dim, true, group), needle)?;
            refused(suite, "gather_v", gather_v(&x, None, dim, 0, group), needle)?;
            refused(suite, "scatter_v", scatter_v(&x, None, dim, 0, group), needle)?;
            refused(
                suite,
                "reduce_scatter_v",
                reduce_scatter_v(&x, None, dim, ReduceOp::Sum, true, group),
                needle,
            )?;
            refused(suite, "all_to_all_v", all_to_all_v(&x, None, None, dim, group), needle)?;
            refused(suite, "transpose", transpose(&x, dim, None, 0, None, group), needle)?;
            refused(suite, "transpose", transpose(&x, 0, None, dim, None, group), needle)?;
            refused(suite, "indexed", indexed_all_to_all_v(&x, &[], &[], true, dim, group), needle)?;
            refused(suite, "scatter region", scatter_to_parallel_region(&x, dim, None, group), needle)?;
            refused(suite, "gather region", gather_from_parallel_region(&x, dim, None, group), needle)?;
        }
    }
    refused(
        suite,
        "a tensor without dims",
        all_gather_v(&floats(&[]), None, 0, true, group),
        "out of range",
    )?;
    let square = floats(&[suite.ranks() as i64, 2]);
    refused(suite, "one dim twice", transpose(&square, 0, None, -2, None, group), "two dims")
}

fn ranks(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (group, count) = (suite.group, suite.ranks());
    let needle = format!("rank below {count}");
    for grad in [false, true] {
        let x = floats(&[2]).set_requires_grad(grad);
        for rank in [count, usize::MAX] {
            refused(suite, "gather_v", gather_v(&x, None, 0, rank, group), &needle)?;
            refused(suite, "scatter_v", scatter_v(&x, None, 0, rank, group), &needle)?;
            refused(suite, "broadcast", broadcast(&x, rank, group), &needle)?;
            refused(suite, "reduce", reduce(&x, ReduceOp::Sum, rank, group), &needle)?;
            refused(suite, "send", send_recv(&x, Some(rank), None, &[2], group), &needle)?;
            refused(suite, "recv", send_recv(&x, None, Some(rank), &[2], group), &needle)?;
            refused(suite, "broadcast_bytes", group.broadcast_bytes(&[1], rank), &needle)?;
            refused(suite, "reduce_loss", reduce_loss(&x.sum(Kind::Float), rank, true, group), &needle)?;
        }
    }
    let x = floats(&[2]);
    refused(suite, "send to oneself", start::send(&x, suite.rank(), group).map(drop), "itself")?;
    refused(suite, "recv of oneself", send_recv(&x, None, Some(suite.rank()), &[2], group), "itself")
}

fn one_sided(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (group, count) = (suite.group, suite.ranks());
    let sizes = vec![2; count];
    let (right, wrong) = (floats(&[2, 3]), floats(&[3, 3]));
    let (whole, short) = (floats(&[2 * count as i64, 3]), floats(&[1 + 2 * count as i64, 3]));
    let bools = whole.to_kind(Kind::Bool);
    let given = Some(sizes.as_slice());
    let expected = "expected 2";
    alone(
        suite,
        "a part of another extent in all_gather_v",
        Box::new(|| all_gather_v(&wrong, given, 0, true, group)),
        Box::new(|| all_gather_v(&right, given, 0, true, group)),
        expected,
    )?;
    alone(
        suite,
        "a part of another extent in gather_from_parallel_region",
        Box::new(|| gather_from_parallel_region(&wrong, 0, given, group)),
        Box::new(|| gather_from_parallel_region(&right, 0, given, group)),
        expected,
    )?;
    alone(
        suite,
        "an extent not covered in reduce_scatter_v",
        Box::new(|| reduce_scatter_v(&short, given, 0, ReduceOp::Sum, true, group)),
        Box::new(|| reduce_scatter_v(&whole, given, 0, ReduceOp::Sum, true, group)),
        "sum to",
    )?;
    alone(
        suite,
        "an extent not covered in all_to_all_v",
        Box::new(|| all_to_all_v(&short, given, given, 0, group)),
        Box::new(|| all_to_all_v(&whole, given, given, 0, group)),
        "sum to",
    )?;
    alone(
        suite,
        "a source that cannot",
        Box::new(|| scatter_v(&short, given, 0, count - 1, group)),
        Box::new(|| scatter_v(&whole, given, 0, count - 1, group)),
        "sum to",
    )?;
    alone(
        suite,
        "a dtype without sums",
        Box::new(|| all_reduce(&bools, ReduceOp::Sum, group)),
        Box::new(|| all_reduce(&whole, ReduceOp::Sum, group)),
        "Bool",
    )?;
    // Large enough to be on its way when the error comes.
    let large = floats(&[2, 100_000]);
    alone(
        suite,
        "a large part",
        Box::new(|| all_gather_v(&large, given, 7, true, group)),
        Box::new(|| all_gather_v(&large, given, 0, true, group)),
        "out of range",
    )
}

fn one_sided_gradients(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (group, count) = (suite.group, suite.ranks());
    if count == 1 {
        return Ok(());
    }
    let whole = floats(&[2 * count as i64, 3]).set_requires_grad(true);
    let short = floats(&[1 + 2 * count as i64, 3]).set_requires_grad(true);
    alone(
        suite,
        "unequal parts in reduce_scatter_v",
        Box::new(|| reduce_scatter_v(&short, None, 0, ReduceOp::Sum, true, group)),
        Box::new(|| reduce_scatter_v(&whole, None, 0, ReduceOp::Sum, true, group)),
        "equal parts",
    )?;
    alone(
        suite,
        "unequal parts in all_to_all_v",
        Box::new(|| all_to_all_v(&short, None, None, 0, group)),
        Box::new(|| all_to_all_v(&whole, None, None, 0, group)),
        "equal parts",
    )?;
    alone(
        suite,
        "unequal parts in transpose",
        Box::new(|| transpose(&short, 0, None, 1, None, group)),
        Box::new(|| transpose(&whole, 0, None, 1, None, group)),
        "equal parts",
    )?;
    alone(
        suite,
        "a maximum with a gradient",
        Box::new(|| all_reduce(&whole, ReduceOp::Max, group)),
        Box::new(|| all_reduce(&whole.detach(), ReduceOp::Max, group)),
        "no gradient",
    )
}

fn indices(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (group, count) = (suite.group, suite.ranks());
    let x = floats(&[4, 2]);
    let table = vec![vec![2_i64; count]; count];
    let with = |bad: Tensor| -> Vec<Tensor> {
        let mut all = repeated(&[0, 3], count);
        all[count - 1] = bad;
        all
    };
    let good = with(Tensor::from_slice(&[1_i64, 1]));
    for grad in [false, true] {
        let x = x.copy().set_requires_grad(grad);
        for (bad, needle) in [
            (Tensor::from_slice(&[0_i64, 4]), "expected 0 to 3"),
            (Tensor::from_slice(&[-1_i64, 0]), "hold -1"),
            (Tensor::from_slice(&[0_i32, 1]), "expected Int64"),
            (Tensor::from_slice(&[0.0_f32, 1.0]), "expected Int64"),
            (Tensor::from_slice(&[0_i64, 1, 2]), "shape [2]"),
            (Tensor::from_slice(&[0_i64, 1]).view([1, 2]), "shape [2]"),
            (Tensor::from_slice(&[true, true]), "expected Int64"),
        ] {
            let bad = with(bad);
            alone(
                suite,
                needle,
                Box::new(|| indexed_all_to_all_v(&x, &bad, &table, true, 0, group)),
                Box::new(|| indexed_all_to_all_v(&x, &good, &table, true, 0, group)),
                needle,
            )?;
        }
    }
    let needle = "one a rank";
    refused(suite, "too few indices", indexed_all_to_all_v(&x, &good[1..], &table, true, 0, group), needle)?;
    refused(suite, "too few sizes", indexed_all_to_all_v(&x, &good, &table[1..], true, 0, group), needle)?;
    let mut ragged = table.clone();
    ragged[0].push(1);
    refused(suite, "ragged sizes", indexed_all_to_all_v(&x, &good, &ragged, true, 0, group), needle)?;
    let mut negative = table.clone();
    negative[0][0] = -2;
    refused(suite, "negative sizes", indexed_all_to_all_v(&x, &good, &negative, true, 0, group), "negative")?;
    let nothing = floats(&[0, 2]);
    refused(
        suite,
        "rows of empty shards",
        indexed_all_to_all_v(&nothing, &good, &table, true, 0, group),
        "extent being 0",
    )
}

fn kinds(suite: &mut Suite<'_>) -> Result<(), Error> {
    let group = suite.group;
    let count = suite.ranks() as i64;
    let bad = [
        (ReduceOp::Sum, Kind::Bool),
        (ReduceOp::Avg, Kind::Bool),
        (ReduceOp::Avg, Kind::Int64),
        (ReduceOp::Avg, Kind::Uint8),
        (ReduceOp::Min, Kind::ComplexFloat),
        (ReduceOp::Max, Kind::ComplexDouble),
    ];
    for (op, kind) in bad {
        let x = floats(&[count]).to_kind(kind);
        let needle = format!("{kind:?}");
        refused(suite, "all_reduce", all_reduce(&x, op, group), &needle)?;
        refused(suite, "reduce", reduce(&x, op, 0, group), &needle)?;
        refused(suite, "reduce_scatter_v", reduce_scatter_v(&x, None, 0, op, true, group), &needle)?;
        refused(suite, "fused_all_reduce", fused_all_reduce(&x, op, None, group), &needle)?;
    }
    Ok(())
}

fn no_gradient(suite: &mut Suite<'_>) -> Result<(), Error> {
    if suite.ranks() == 1 {
        return Ok(());
    }
    let group = suite.group;
    let x = floats(&[suite.ranks() as i64]).set_requires_grad(true);
    for op in [ReduceOp::Min, ReduceOp::Max, ReduceOp::Product] {
        let needle = "no gradient";
        refused(suite, "all_reduce", all_reduce(&x, op, group), needle)?;
        refused(suite, "reduce", reduce(&x, op, 0, group), needle)?;
        refused(suite, "reduce_scatter_v", reduce_scatter_v(&x, None, 0, op, true, group), needle)?;
    }
    Ok(())
}

fn structures(suite: &mut Suite<'_>) -> Result<(), Error> {
    let group = suite.group;
    let mixed = vec![floats(&[2]), Tensor::from_slice(&[1_i64])];
    let right = vec![floats(&[2]), floats(&[1])];
    refused(
        suite,
        "integers among floats",
        fused_all_reduce(&mixed, ReduceOp::Sum, None, group),
        "buffer dtype",
    )?;
    alone(
        suite,
        "integers among floats",
        Box::new(|| fused_all_reduce(&mixed, ReduceOp::Sum, None, group).map(|mut all| all.remove(0))),
        Box::new(|| fused_all_reduce(&right, ReduceOp::Sum, None, group).map(|mut all| all.remove(0))),
        "buffer dtype",
    )?;
    let complex = vec![Tensor::complex(&floats(&[2]), &floats(&[2]))];
    for (what, tensors, kind) in
        [("fractions", &right, Kind::Int64), ("imaginary parts", &complex, Kind::Double)]
    {
        refused(suite, what, fused_all_reduce(tensors, ReduceOp::Sum, Some(kind), group), "do not fit")?;
    }
    let bytes = vec![Tensor::from_slice(&[1_u8])];
    refused(suite, "a mean of integers", fused_all_reduce(&bytes, ReduceOp::Avg, None, group), "Avg")
}

fn subgroups(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (group, count) = (suite.group, suite.ranks());
    let bad: [Vec<usize>; 4] = [vec![], vec![0, 0], vec![count], vec![0, usize::MAX]];
    for ranks in bad {
        refused(suite, "a wrong list", group.subgroup("bad", &ranks), "different ranks below")?;
    }
    if count == 1 {
        return Ok(());
    }
    // On one rank only.
    let ranks: Vec<usize> = (0..count).collect();
    let mut wrong = ranks.clone();
    wrong[0] = wrong[1];
    let mine = if suite.rank() == 0 { &wrong } else { &ranks };
    refused(suite, "a wrong list on one rank", group.subgroup("bad", mine), "different ranks below")?;
    // All right, but not the same.
    let mut swapped = ranks.clone();
    swapped.swap(0, 1);
    let mine = if suite.rank() == 0 { &swapped } else { &ranks };
    refused(suite, "different lists", group.subgroup("bad", mine), "different groups")?;
    let name = if suite.rank() == 0 { "one" } else { "other" };
    refused(suite, "different names", group.subgroup(name, &ranks), "different groups")?;
    suite.check(group.subgroup("good", &ranks)?.is_some(), || "no group afterwards".into());
    Ok(())
}

fn losses(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (group, count) = (suite.group, suite.ranks());
    refused(suite, "a loss of two elements", reduce_loss(&floats(&[2]), 0, true, group), "one element")?;
    let loss = Tensor::from_slice(&[suite.rank() as f32]).set_requires_grad(true);
    for (mean, want) in [(false, (count * (count - 1) / 2) as f64), (true, (count as f64 - 1.0) / 2.0)] {
        for dst in [0, count - 1] {
            let got = reduce_loss(&loss.sum(Kind::Float), dst, mean, group)?;
            let want = (suite.rank() == dst).then_some(want);
            suite.check(got == want, || format!("the loss is {got:?}, expected {want:?}"));
        }
    }
    Ok(())
}

fn padding(suite: &mut Suite<'_>) -> Result<(), Error> {
    let x = floats(&[2, 3]);
    refused(suite, "pad to less", pad(&x, 1, 2, PadMode::Zero), "truncate")?;
    refused(suite, "pad a dim that is not", pad(&x, 2, 4, PadMode::Zero), "out of range")?;
    refused(suite, "pad a dim that is not", pad(&x, -3, 4, PadMode::Conjugate), "out of range")?;
    refused(suite, "mirror too much", pad(&x, 1, 6, PadMode::Conjugate), "at most 5")?;
    refused(suite, "truncate to more", truncate(&x, 1, 4), "cannot truncate")?;
    refused(suite, "truncate to less than nothing", truncate(&x, 1, -1), "cannot truncate")?;
    refused(suite, "truncate a dim that is not", truncate(&x, i64::MAX, 1), "out of range")?;
    let id = suite.fresh();
    let x = suite.data(id, 0, &[2, 3], Kind::ComplexDouble);
    suite.same("zeros", &pad(&x, -1, 5, PadMode::Zero)?, &x.constant_pad_nd([0, 2]));
    suite.same("truncated", &truncate(&pad(&x, 0, 5, PadMode::Zero)?, 0, 2)?, &x);
    // The full spectrum of a real signal, from its half.
    let signal = suite.data(id + 1, 0, &[2, 8], Kind::Double);
    let full = signal.fft_fft(None::<i64>, 1, "backward");
    let half = full.narrow(1, 0, 5);
    suite.near("the mirrored half", &pad(&half, 1, 8, PadMode::Conjugate)?, &full, 1e-12);
    Ok(())
}

fn undefined(suite: &mut Suite<'_>) -> Result<(), Error> {
    let group = suite.group;
    let none = Tensor::new();
    let needle = "undefined";
    refused(suite, "all_gather_v", all_gather_v(&none, None, 0, true, group), needle)?;
    refused(suite, "scatter_v", scatter_v(&none, None, 0, 0, group), needle)?;
    refused(suite, "gather_v", gather_v(&none, None, 0, 0, group), needle)?;
    refused(suite, "all_reduce", all_reduce(&none, ReduceOp::Sum, group), needle)?;
    refused(suite, "broadcast", broadcast(&none, 0, group), needle)?;
    refused(suite, "reduce", reduce(&none, ReduceOp::Sum, 0, group), needle)?;
    refused(
        suite,
        "fused_all_reduce",
        fused_all_reduce(&vec![Tensor::new()], ReduceOp::Sum, None, group),
        needle,
    )?;
    let table = vec![vec![0]; 1];
    refused(
        suite,
        "indices",
        indexed_all_to_all_v(&floats(&[2]), &[Tensor::new()], &table, true, 0, group),
        "",
    )?;
    if suite.ranks() > 1 {
        let peer = (suite.rank() + 1) % suite.ranks();
        refused(suite, "send", start::send(&none, peer, group).map(drop), needle)?;
    }
    Ok(())
}
