//! The four region mappings, paired as global tensors in which a replicated value counts once (design decision 1).

use isobar_collectives::{
    Error, copy_to_parallel_region, gather_from_parallel_region, reduce_from_parallel_region,
    scatter_to_parallel_region,
};
use tch::{Kind, Tensor};

use super::adjoints::gradient;
use super::data::{Memory, is_channels_last, laid_out, splits};
use super::gathers::with_extent;
use super::{Case, Suite};

pub(crate) const CASES: &[Case] = &[
    ("copy_to_parallel_region", copy),
    ("reduce_from_parallel_region", reduce),
    ("scatter_to_parallel_region", scatter),
    ("gather_from_parallel_region", gather),
    ("gradients of gradients of regions", twice),
    ("regions under 16 bits", half),
];

const TOLERANCE: f64 = 1e-12;

/// Returns a different tensor for each rank.
fn every(suite: &mut Suite<'_>, shape: &[i64]) -> Vec<Tensor> {
    let id = suite.fresh();
    (0..suite.ranks()).map(|rank| suite.data(id, rank, shape, Kind::Double)).collect()
}

fn sum(tensors: &[Tensor]) -> Tensor {
    tensors[1..].iter().fold(tensors[0].shallow_clone(), |sum, one| sum + one)
}

/// A replicated tensor, a leaf.
fn replicated(suite: &mut Suite<'_>, shape: &[i64]) -> Tensor {
    let id = suite.fresh();
    suite.data(id, 0, shape, Kind::Double).set_requires_grad(true)
}

fn copy(suite: &mut Suite<'_>) -> Result<(), Error> {
    let x = replicated(suite, &[3, 4]);
    let y = every(suite, &[3, 4]);
    let z = suite.unchanged(&[&x], |s| copy_to_parallel_region(&x, s.group))?;
    suite.same("the copy", &z, &x);
    let got = gradient(&z, &x, &y[suite.rank()], false)?;
    suite.near("the gradient", &got, &sum(&y), TOLERANCE);
    suite.same_everywhere("the gradient", &got)
}

fn reduce(suite: &mut Suite<'_>) -> Result<(), Error> {
    for shape in [vec![3, 4], vec![5000]] {
        let parts = every(suite, &shape);
        let x = parts[suite.rank()].copy().set_requires_grad(true);
        let z = suite.unchanged(&[&x], |s| reduce_from_parallel_region(&x, s.group))?;
        suite.same("the sum", &z, &sum(&parts));
        let y = replicated(suite, &shape).detach();
        let got = gradient(&z, &x, &y, false)?;
        suite.same("the gradient", &got, &y);
    }
    Ok(())
}

fn scatter(suite: &mut Suite<'_>) -> Result<(), Error> {
    let rank = suite.rank();
    for (n, sizes) in splits(suite.ranks()).iter().enumerate() {
        for dim in [0, 1, -1] {
            let x = replicated(suite, &with_extent(&[2, 3, 4], dim, sizes.iter().sum()));
            let given = (n != 0).then_some(sizes.as_slice());
            let z = suite.unchanged(&[&x], |s| scatter_to_parallel_region(&x, dim, given, s.group))?;
            let start = sizes[..rank].iter().sum();
            suite.same("the slice", &z, &x.narrow(dim, start, sizes[rank]));
            let id = suite.fresh();
            let y: Vec<Tensor> = (0..suite.ranks())
                .map(|r| suite.data(id, r, &with_extent(&[2, 3, 4], dim, sizes[r]), Kind::Double))
                .collect();
            let got = gradient(&z, &x, &y[rank], false)?;
            suite.same("the gradient", &got, &Tensor::cat(&y, dim));
        }
    }
    Ok(())
}

fn gather(suite: &mut Suite<'_>) -> Result<(), Error> {
    let rank = suite.rank();
    for (n, sizes) in splits(suite.ranks()).iter().enumerate() {
        for dim in [0, 1, -1] {
            let id = suite.fresh();
            let parts: Vec<Tensor> = (0..suite.ranks())
                .map(|r| suite.data(id, r, &with_extent(&[2, 3, 2, 3], dim, sizes[r]), Kind::Double))
                .map(|part| laid_out(&part, Memory::ChannelsLast))
                .collect();
            let x = parts[rank].shallow_clone().set_requires_grad(true);
            let given = (n != 0).then_some(sizes.as_slice());
            let z = suite.unchanged(&[&x], |s| gather_from_parallel_region(&x, dim, given, s.group))?;
            suite.same("the whole", &z, &Tensor::cat(&parts, dim));
            suite.check(!is_channels_last(&x) || is_channels_last(&z), || "channels-last was lost".into());
            let y = replicated(suite, &z.size()).detach();
            let got = gradient(&z, &x, &y, false)?;
            suite.same("the gradient", &got, &y.narrow(dim, sizes[..rank].iter().sum(), sizes[rank]));
        }
    }
    Ok(())
}

/// Through copy, a product and reduce, as a layer split over ranks: f = Σ_r (w_r x)², whose derivatives are known.
fn twice(suite: &mut Suite<'_>) -> Result<(), Error> {
    let x = replicated(suite, &[5]);
    let weights = every(suite, &[5]);
    let inside = copy_to_parallel_region(&x, suite.group)?;
    let part = (&weights[suite.rank()] * inside).pow_tensor_scalar(2);
    let f = reduce_from_parallel_region(&part, suite.group)?;
    let squares = sum(&weights.iter().map(|w| w * w).collect::<Vec<_>>());
    let first = gradient(&f, &x, &f.ones_like(), true)?;
    suite.near("the gradient", &first, &(&squares * x.detach() * 2.0), TOLERANCE);
    let second = gradient(&first, &x, &first.ones_like(), false)?;
    suite.near("its gradient", &second, &(&squares * 2.0), TOLERANCE);
    // Through scatter, a cube and gather: each element by itself.
    let sizes = &splits(suite.ranks())[1];
    let x = replicated(suite, &[2, sizes.iter().sum()]);
    let slice = scatter_to_parallel_region(&x, 1, Some(sizes), suite.group)?;
    let f = gather_from_parallel_region(&slice.pow_tensor_scalar(3), 1, Some(sizes), suite.group)?;
    let first = gradient(&f, &x, &f.ones_like(), true)?;
    suite.near("the gradient of a cube", &first, &(x.detach().pow_tensor_scalar(2) * 3.0), TOLERANCE);
    let second = gradient(&first, &x, &first.ones_like(), false)?;
    suite.near("its gradient", &second, &(x.detach() * 6.0), TOLERANCE);
    Ok(())
}

/// Sums of 16-bit floats are taken in fp32, forward and backward.
fn half(suite: &mut Suite<'_>) -> Result<(), Error> {
    let value = if suite.rank() == 0 { 2048.0 } else { 1.0 };
    let x = Tensor::from_slice(&[value]).to_kind(Kind::Half).set_requires_grad(true);
    let want = Tensor::from_slice(&[2047.0 + suite.ranks() as f64]).to_kind(Kind::Half);
    let z = reduce_from_parallel_region(&x, suite.group)?;
    suite.same("the sum", &z, &want);
    let z = copy_to_parallel_region(&x, suite.group)?;
    let got = gradient(&z, &x, &x.detach(), false)?;
    suite.same("the gradient", &got, &want);
    Ok(())
}
