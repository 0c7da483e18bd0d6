//! The v-collectives. Each case is checked on all ranks before it is timed: every rank makes the whole data, from a seed,
//! and compares what it got.

use std::time::Instant;

use anyhow::{Result, ensure};
use isobar_collectives::{
    Fingerprints, Group, ReduceOp, all_gather_v, all_reduce, indexed_all_to_all_v, scatter_v,
};
use isobar_torch::autograd::{BackwardOptions, grad};
use tch::{Device, Kind, Tensor};

use super::{Prepared, Timed};

const ROWS: i64 = 65_536;
const COLUMNS: i64 = 256;
const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

pub(crate) fn all_gather(group: &Group, dim: usize) -> Result<Prepared> {
    let shape = if dim == 0 { [ROWS, COLUMNS] } else { [COLUMNS, ROWS] };
    let Parts { whole, own, sizes } = Parts::new(group, &shape, dim)?;
    let group = group.clone();
    let run = move || -> Result<Tensor> { Ok(all_gather_v(&own, Some(&sizes), dim as i64, true, &group)?) };
    ensure!(run()? == whole, "all_gather_v along dim {dim} gave a wrong result");
    Ok(prepared(run, whole))
}

pub(crate) fn all_gather_fwd_bwd(group: &Group) -> Result<Prepared> {
    let Parts { whole, own, sizes } = Parts::new(group, &[ROWS, COLUMNS], 0)?;
    let own = own.f_set_requires_grad(true)?;
    let group = group.clone();
    let ranks = group.size() as i64;
    let run = move || -> Result<(Tensor, Tensor)> {
        let gathered = all_gather_v(&own, Some(&sizes), 0, true, &group)?;
        let gradient = gradient_of_sum(&gathered, &own)?;
        Ok((gathered, gradient))
    };
    let (gathered, gradient) = run()?;
    ensure!(gathered == whole, "all_gather_v gave a wrong result");
    // Each of the ranks sums all elements.
    ensure!(gradient == gradient.f_full_like(ranks)?, "backward of all_gather_v gave a wrong result");
    Ok(prepared(run, whole))
}

pub(crate) fn scatter(group: &Group) -> Result<Prepared> {
    let Parts { whole, own, sizes } = Parts::new(group, &[ROWS, COLUMNS], 0)?;
    let source = if group.rank() == 0 { whole } else { Tensor::f_empty([1, COLUMNS], FLOAT)? };
    let group = group.clone();
    let run = move || -> Result<Tensor> { Ok(scatter_v(&source, Some(&sizes), 0, 0, &group)?) };
    ensure!(run()? == own, "scatter_v gave a wrong result");
    Ok(prepared(run, own))
}

/// Each rank sends a random half of its rows to every rank.
pub(crate) fn indexed_all_to_all_fwd_bwd(group: &Group) -> Result<Prepared> {
    const ROWS: i64 = 131_072;
    const COLUMNS: i64 = 64;
    let (rank, ranks) = (group.rank(), group.size());
    let sizes = vec![vec![ROWS / 2; ranks]; ranks];
    let data = |of: usize| -> Result<(Tensor, Vec<Tensor>)> {
        tch::manual_seed(of as i64);
        let rows = Tensor::f_randn([ROWS, COLUMNS], FLOAT)?;
        let half = |_| Tensor::f_randperm(ROWS, (Kind::Int64, Device::Cpu))?.f_narrow(0, 0, ROWS / 2);
        Ok((rows, (0..ranks).map(half).collect::<Result<_, _>>()?))
    };
    let (own, indices) = data(rank)?;
    let own = own.f_set_requires_grad(true)?;
    let sent = Tensor::f_cat(&indices, 0)?.f_bincount(None::<Tensor>, ROWS)?;
    let group = group.clone();
    let run = move || -> Result<(Tensor, Tensor)> {
        let received = indexed_all_to_all_v(&own, &indices, &sizes, true, 0, &group)?;
        let gradient = gradient_of_sum(&received, &own)?;
        Ok((received, gradient))
    };
    let (received, gradient) = run()?;
    for from in 0..ranks {
        let (rows, indices) = data(from)?;
        let block = received.f_narrow(0, from as i64 * ROWS / 2, ROWS / 2)?;
        ensure!(block == rows.f_index_select(0, &indices[rank])?, "indexed_all_to_all_v gave a wrong result");
    }
    let times_sent = sent.f_to_kind(Kind::Float)?.f_unsqueeze(1)?.f_expand_as(&gradient)?;
    ensure!(gradient == times_sent, "backward of indexed_all_to_all_v gave a wrong result");
    Ok(prepared(run, received.f_detach()?))
}

/// Measures the overhead of the flight recorder and of fingerprints by default: 10⁴ calls with, as many without.
pub(crate) fn recording(group: &Group) -> Result<Prepared> {
    const CALLS: u32 = 10_000;
    /// Times do not drift apart when both take turns.
    const AT_ONCE: u32 = 500;
    /// Differences below this are noise.
    const LEAST: f64 = 0.05e-6;
    let x = Tensor::f_ones([8], FLOAT)?;
    let want = x.f_mul_scalar(group.size() as i64)?;
    let group = group.clone();
    let calls = move |recorded: bool| -> Result<f64> {
        group.flight().record(recorded);
        group.set_fingerprints(if recorded { Fingerprints::Sample } else { Fingerprints::Off });
        group.barrier()?;
        let begun = Instant::now();
        for _ in 0..AT_ONCE {
            let sum = all_reduce(&x, ReduceOp::Sum, &group)?;
            ensure!(sum == want, "all_reduce gave a wrong result");
        }
        Ok(begun.elapsed().as_secs_f64())
    };
    let measure = move || -> Result<f64> {
        let mut added = 0.0;
        for _ in 0..CALLS / AT_ONCE {
            added -= calls(false)?;
            added += calls(true)?;
        }
        Ok((added / f64::from(CALLS)).max(LEAST))
    };
    Ok(Prepared { timed: Timed::Measured(Box::new(measure)), output: None })
}

/// A case that was checked: what is timed, and what it gives.
fn prepared<T>(run: impl Fn() -> Result<T> + 'static, output: Tensor) -> Prepared {
    Prepared { timed: Timed::Step(Box::new(move || run().map(drop))), output: Some(output) }
}

/// Data that all ranks know, and the part of each, in proportion to 1, 2, 3, …
struct Parts {
    whole: Tensor,
    own: Tensor,
    sizes: Vec<i64>,
}

impl Parts {
    fn new(group: &Group, shape: &[i64], dim: usize) -> Result<Self> {
        let ranks = group.size() as i64;
        let weights = ranks * (ranks + 1) / 2;
        let mut sizes: Vec<i64> = (1..=ranks).map(|weight| shape[dim] * weight / weights).collect();
        sizes[group.size() - 1] += shape[dim] - sizes.iter().sum::<i64>();
        tch::manual_seed(0);
        let whole = Tensor::f_randn(shape, FLOAT)?;
        let start = sizes[..group.rank()].iter().sum();
        let own = whole.f_narrow(dim as i64, start, sizes[group.rank()])?.f_contiguous()?;
        // Memory of its own, as a rank has it that does not know the whole.
        let own = if group.size() == 1 { own.f_detach_copy()? } else { own };
        Ok(Self { whole, own, sizes })
    }
}

/// The gradient of the sum of all elements of `output`, new at every call.
fn gradient_of_sum(output: &Tensor, input: &Tensor) -> Result<Tensor> {
    let sum = output.f_sum(Kind::Float)?;
    let mut gradients = grad(&[&sum], &[input], &[], BackwardOptions::default())?;
    match gradients.pop().flatten() {
        Some(gradient) => Ok(gradient),
        None => Ok(input.f_zeros_like()?),
    }
}
