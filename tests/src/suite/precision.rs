//! Sums of 16-bit floats with and without fp32 accumulation: 2048 + 1 is 2048 in half precision.

use isobar_collectives::{
    Error, ReduceOp, all_gather_v, all_reduce, indexed_all_to_all_v, reduce, reduce_scatter_v,
};
use tch::{Kind, Tensor};

use super::adjoints::gradient;
use super::data::repeated;
use super::{Case, Suite};

pub(crate) const CASES: &[Case] = &[
    ("precision of all_gather_v's gradient", gathered),
    ("precision of indexed_all_to_all_v's gradient", indexed),
    ("precision of sums", sums),
];

/// A kind and the number beyond which it holds even numbers only.
const HALVES: [(Kind, f64); 2] = [(Kind::Half, 2048.0), (Kind::BFloat16, 256.0)];

/// The large number on rank 0, one on the others.
fn term(rank: usize, large: f64) -> f64 {
    if rank == 0 { large } else { 1.0 }
}

/// Their sum, rounded once, or after each addition.
fn total(ranks: usize, large: f64, kind: Kind, use_fp32: bool) -> Tensor {
    let exact = large + ranks as f64 - 1.0;
    Tensor::from_slice(&[if use_fp32 { exact } else { large }]).to_kind(kind)
}

fn gathered(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    for (kind, large) in HALVES {
        for use_fp32 in [true, false] {
            let x = Tensor::from_slice(&[0.0]).to_kind(kind).set_requires_grad(true);
            let z = all_gather_v(&x, None, 0, use_fp32, suite.group)?;
            let y = Tensor::from_slice(&vec![term(rank, large); ranks]).to_kind(kind);
            let got = gradient(&z, &x, &y, false)?;
            suite.same(&format!("{kind:?}, fp32 {use_fp32}"), &got, &total(ranks, large, kind, use_fp32));
        }
    }
    Ok(())
}

fn indexed(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    let sizes = vec![vec![2; ranks]; ranks];
    for (kind, large) in HALVES {
        for use_fp32 in [true, false] {
            let x = Tensor::from_slice(&[0.0, 0.0]).to_kind(kind).set_requires_grad(true);
            let indices = repeated(&[1, 1], ranks);
            let z = indexed_all_to_all_v(&x, &indices, &sizes, use_fp32, 0, suite.group)?;
            // Every rank's first row goes back to this one; of rank 0's two the first is large.
            let mut y = vec![1.0; 2 * ranks];
            y.iter_mut().step_by(2).for_each(|first| *first = term(rank, large));
            let got = gradient(&z, &x, &Tensor::from_slice(&y).to_kind(kind), false)?;
            let sum = total(2 * ranks, large, kind, use_fp32);
            let zero = Tensor::from_slice(&[0.0]).to_kind(kind);
            suite.same(&format!("{kind:?}, fp32 {use_fp32}"), &got, &Tensor::cat(&[zero, sum], 0));
        }
    }
    Ok(())
}

fn sums(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (rank, ranks) = (suite.rank(), suite.ranks());
    for (kind, large) in HALVES {
        for length in [1, 20_000] {
            let x = Tensor::full([length], term(rank, large), (kind, tch::Device::Cpu));
            let want = total(ranks, large, kind, true).expand([length], false);
            suite.same("all_reduce", &all_reduce(&x, ReduceOp::Sum, suite.group)?, &want);
            let got = reduce(&x, ReduceOp::Sum, 0, suite.group)?;
            suite.same("reduce", &got, &want.narrow(0, 0, if rank == 0 { length } else { 0 }));
        }
        let x = Tensor::full([ranks as i64], term(rank, large), (kind, tch::Device::Cpu));
        for use_fp32 in [true, false] {
            let got = reduce_scatter_v(&x, None, 0, ReduceOp::Sum, use_fp32, suite.group)?;
            suite.same(
                &format!("reduce_scatter_v, fp32 {use_fp32}"),
                &got,
                &total(ranks, large, kind, use_fp32),
            );
        }
    }
    Ok(())
}
