//! all_gather_v, gather_v and scatter_v against concatenation and slices.

use isobar_collectives::{Error, all_gather_v, gather_v, scatter_v};
use tch::{Kind, Tensor};

use super::data::{KINDS, MEMORIES, Memory, is_channels_last, laid_out, splits};
use super::{Case, Suite};

pub(crate) const CASES: &[Case] = &[
    ("all_gather_v", all_gather),
    ("all_gather_v without sizes", all_gather_equal),
    ("gather_v", gather),
    ("scatter_v", scatter),
    ("scatter_v without sizes", scatter_equal),
    ("zero-size dims", zero_size),
];

/// The shapes and kinds that moving collectives are tried with, as (shape with any extent along the dim, dim, kind,
/// memory).
pub(crate) fn forms() -> Vec<(Vec<i64>, i64, Kind, Memory)> {
    let mut forms = Vec::new();
    for kind in KINDS {
        forms.push((vec![3, 0, 2], 1, kind, Memory::Contiguous));
        forms.push((vec![0], 0, kind, Memory::Contiguous));
    }
    for memory in MEMORIES {
        for dim in [0, 1, 2, -1] {
            forms.push((vec![3, 4, 5], dim, Kind::Float, memory));
        }
        forms.push((vec![3, 4, 5], 1, Kind::ComplexDouble, memory));
        forms.push((vec![3, 4, 5], 0, Kind::ComplexFloat, memory));
        for dim in 0..4 {
            forms.push((vec![2, 3, 4, 2], dim, Kind::Double, memory));
        }
        for dim in [0, 1, 4, -2] {
            forms.push((vec![2, 3, 2, 2, 3], dim, Kind::BFloat16, memory));
        }
    }
    // Rows long enough to travel without a copy where the backend does that.
    forms.push((vec![3, 0, 70], 1, Kind::Double, Memory::Window));
    forms.push((vec![2, 3, 4, 90], 1, Kind::Float, Memory::ChannelsLast));
    forms
}

pub(crate) fn with_extent(shape: &[i64], dim: i64, extent: i64) -> Vec<i64> {
    let mut shape = shape.to_vec();
    let dims = shape.len() as i64;
    shape[dim.rem_euclid(dims) as usize] = extent;
    shape
}

fn all_gather(suite: &mut Suite<'_>) -> Result<(), Error> {
    for (n, (shape, dim, kind, memory)) in forms().into_iter().enumerate() {
        let sizes = &splits(suite.ranks())[n % 4];
        let parts = parts(suite, &shape, dim, kind, memory, sizes);
        let own = &parts[suite.rank()];
        let what = format!("{shape:?} {memory:?} along {dim} with sizes {sizes:?}");
        let got = suite.unchanged(&[own], |s| all_gather_v(own, Some(sizes), dim, true, s.group))?;
        suite.same(&what, &got, &Tensor::cat(&parts, dim));
        suite.check(!is_channels_last(own) || is_channels_last(&got), || {
            format!("{what}: channels-last was lost")
        });
    }
    Ok(())
}

fn all_gather_equal(suite: &mut Suite<'_>) -> Result<(), Error> {
    let sizes = vec![3; suite.ranks()];
    for dim in [0, -1] {
        let parts = parts(suite, &[2, 2, 2], dim, Kind::Int16, Memory::Window, &sizes);
        let got = all_gather_v(&parts[suite.rank()], None, dim, true, suite.group)?;
        suite.same("equal parts", &got, &Tensor::cat(&parts, dim));
        suite.same_everywhere("equal parts", &got)?;
    }
    Ok(())
}

fn gather(suite: &mut Suite<'_>) -> Result<(), Error> {
    for (n, (shape, dim, kind, memory)) in forms().into_iter().enumerate() {
        let sizes = &splits(suite.ranks())[(n / 2) % 4];
        let dst = n % suite.ranks();
        let parts = parts(suite, &shape, dim, kind, memory, sizes);
        let own = &parts[suite.rank()];
        let equal = sizes.iter().all(|&size| size == sizes[0]);
        let given = (!equal || n % 3 == 0).then_some(sizes.as_slice());
        let got = suite.unchanged(&[own], |s| gather_v(own, given, dim, dst, s.group))?;
        let want = match suite.rank() == dst {
            true => Tensor::cat(&parts, dim),
            false => own.narrow(dim, 0, 0),
        };
        suite.same(&format!("{shape:?} {memory:?} along {dim} to {dst}"), &got, &want);
    }
    Ok(())
}

fn scatter(suite: &mut Suite<'_>) -> Result<(), Error> {
    for (n, (shape, dim, kind, memory)) in forms().into_iter().enumerate() {
        let sizes = &splits(suite.ranks())[(n / 3) % 4];
        let src = n % suite.ranks();
        let id = suite.fresh();
        let whole = suite.data(id, 0, &with_extent(&shape, dim, sizes.iter().sum()), kind);
        let whole = laid_out(&whole, memory);
        // The other ranks' tensors only give the dtype and the other extents.
        let input = match suite.rank() == src {
            true => whole.shallow_clone(),
            false => laid_out(&suite.data(id, 7, &with_extent(&shape, dim, n as i64 % 3), kind), memory),
        };
        let got = suite.unchanged(&[&input], |s| scatter_v(&input, Some(sizes), dim, src, s.group))?;
        let start: i64 = sizes[..suite.rank()].iter().sum();
        let want = whole.narrow(dim, start, sizes[suite.rank()]);
        let what = format!("{shape:?} {memory:?} along {dim} from {src} with sizes {sizes:?}");
        suite.same(&what, &got, &want);
        suite.check(
            !is_channels_last(&input) || want.numel() == 0 || !shows_order(&want) || is_channels_last(&got),
            || format!("{what}: channels-last was lost"),
        );
    }
    Ok(())
}

/// Returns whether the memory order is visible in the shape.
fn shows_order(tensor: &Tensor) -> bool {
    let shape = tensor.size();
    shape[1] != 1 && shape[2..].iter().any(|&extent| extent != 1)
}

fn scatter_equal(suite: &mut Suite<'_>) -> Result<(), Error> {
    let ranks = suite.ranks();
    for (n, dim) in [0, 1, -1].into_iter().enumerate() {
        let src = (ranks - 1).min(n);
        let id = suite.fresh();
        let whole = suite.data(id, 0, &with_extent(&[2, 3, 4], dim, 2 * ranks as i64), Kind::Float);
        let input = if suite.rank() == src { whole.shallow_clone() } else { whole.narrow(dim, 0, 1) };
        let got = scatter_v(&input, None, dim, src, suite.group)?;
        suite.same("the part", &got, &whole.narrow(dim, 2 * suite.rank() as i64, 2));
    }
    // Nothing to hand out is no special case.
    let nothing = Tensor::zeros([2, 0], (Kind::Int64, tch::Device::Cpu));
    let got = scatter_v(&nothing, None, 1, 0, suite.group)?;
    suite.same("nothing", &got, &nothing);
    Ok(())
}

fn zero_size(suite: &mut Suite<'_>) -> Result<(), Error> {
    let sizes = &splits(suite.ranks())[1];
    for kind in [Kind::Double, Kind::Bool] {
        let parts = parts(suite, &[0, 3, 4], 1, kind, Memory::Contiguous, sizes);
        let own = &parts[suite.rank()];
        let whole = Tensor::cat(&parts, 1);
        suite.same("all_gather_v", &all_gather_v(own, Some(sizes), 1, true, suite.group)?, &whole);
        let got = scatter_v(&whole, Some(sizes), 1, 0, suite.group)?;
        suite.same("scatter_v", &got, own);
        let got = gather_v(own, Some(sizes), 1, 0, suite.group)?;
        let extent = if suite.rank() == 0 { sizes.iter().sum() } else { 0 };
        suite.same("gather_v", &got, &whole.narrow(1, 0, extent));
    }
    Ok(())
}

/// The ranks' parts, of extents `sizes` along `dim`.
fn parts(
    suite: &mut Suite<'_>,
    shape: &[i64],
    dim: i64,
    kind: Kind,
    memory: Memory,
    sizes: &[i64],
) -> Vec<Tensor> {
    let id = suite.fresh();
    let part = |(rank, &size): (usize, &i64)| {
        laid_out(&suite.data(id, rank, &with_extent(shape, dim, size), kind), memory)
    };
    sizes.iter().enumerate().map(part).collect()
}
