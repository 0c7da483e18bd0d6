//! Gradients of shared parameters, summed over ranks as backward goes on.

use isobar_collectives::{Error, SharedOptions, mark_module_as_shared, unmark_module_as_shared};
use isobar_torch::autograd::{self, BackwardOptions, Function};
use tch::{Kind, Tensor};

use super::{Case, Suite};

pub(crate) const CASES: &[Case] = &[
    ("shared parameters", summed),
    ("shared parameters after a backward that failed", after_failure),
    ("shared parameters whose gradients are views", views),
    ("shared parameters of 16 bits", half),
    ("what cannot be shared", refused),
];

/// Parameters of several shapes and kinds, the same on all ranks, and what each rank multiplies them by.
fn module(suite: &mut Suite<'_>) -> (Vec<Tensor>, Vec<Vec<Tensor>>) {
    let shapes: [&[i64]; 5] = [&[3, 2], &[7], &[40, 50], &[1], &[2, 2]];
    let kinds = [Kind::Double, Kind::Double, Kind::Float, Kind::Float, Kind::Double];
    let id = suite.fresh();
    let of = |rank: usize| -> Vec<Tensor> {
        (0..5).map(|n| suite.data(id + n as u64, rank, shapes[n], kinds[n])).collect()
    };
    let parameters = of(99).into_iter().map(|p| p.set_requires_grad(true)).collect();
    (parameters, (0..suite.ranks()).map(of).collect())
}

/// Computes this rank's loss, whose gradients are its factors.
fn loss(parameters: &[Tensor], factors: &[Tensor]) -> Tensor {
    let terms = parameters.iter().zip(factors).map(|(p, x)| (p * x).sum(Kind::Double));
    terms.reduce(|sum, term| sum + term).unwrap_or_default()
}

fn total(factors: &[Vec<Tensor>], n: usize) -> Tensor {
    factors[1..].iter().fold(factors[0][n].shallow_clone(), |sum, of| sum + &of[n])
}

fn summed(suite: &mut Suite<'_>) -> Result<(), Error> {
    // A bucket for each, some for several, one for all.
    for bucket_bytes in [1, 200, 1 << 20] {
        let (parameters, factors) = module(suite);
        let own = &factors[suite.rank()];
        let all: Vec<&Tensor> = parameters.iter().collect();
        let shared =
            mark_module_as_shared(&all, suite.group, SharedOptions { bucket_bytes, ..Default::default() })?;
        for passes in 1..=2 {
            autograd::backward(&[&loss(&parameters, own)], &[], BackwardOptions::default())?;
            for (n, parameter) in parameters.iter().enumerate() {
                let want = total(&factors, n) * f64::from(passes);
                suite.near(&format!("parameter {n} after {passes} passes"), &parameter.grad(), &want, 1e-6);
            }
        }
        // Some parameters take part only, the same ones everywhere.
        parameters.iter().for_each(|p| p.shallow_clone().zero_grad());
        autograd::backward(&[&loss(&parameters[1..3], &own[1..3])], &[], BackwardOptions::default())?;
        suite.near("a parameter that takes part", &parameters[2].grad(), &total(&factors, 2), 1e-6);
        let zeros = parameters[0].grad().zeros_like();
        suite.near("a parameter that does not", &parameters[0].grad(), &zeros, 1e-6);
        // Gradients that are only asked for are this rank's own, and change nothing.
        let before = parameters[2].grad().copy();
        let asked = autograd::grad(&[&loss(&parameters, own)], &[&parameters[2]], &[], Default::default())?;
        let asked = asked.into_iter().flatten().next().unwrap_or_default();
        suite.same("a gradient asked for", &asked, &own[2]);
        suite.same("the gradient beside it", &parameters[2].grad(), &before);
        unmark_module_as_shared(shared);
        parameters.iter().for_each(|p| p.shallow_clone().zero_grad());
        autograd::backward(&[&loss(&parameters, own)], &[], BackwardOptions::default())?;
        suite.same("a parameter no longer shared", &parameters[2].grad(), &own[2]);
    }
    Ok(())
}

fn views(suite: &mut Suite<'_>) -> Result<(), Error> {
    let id = suite.fresh();
    let all: Vec<Tensor> = (0..suite.ranks()).map(|rank| suite.data(id, rank, &[6], Kind::Double)).collect();
    let total = all[1..].iter().fold(all[0].copy(), |sum, of| sum + of);
    let own = &all[suite.rank()];
    let leaf = || Tensor::ones([2, 3], (Kind::Double, tch::Device::Cpu)).set_requires_grad(true);
    let (parameter, other) = (leaf(), leaf());
    let shared = mark_module_as_shared(&[&parameter], suite.group, SharedOptions::default())?;
    for passes in 1..=2 {
        let output = parameter.view([-1]) + other.view([-1]);
        // A new one each time: libtorch makes it the gradient of the parameter that is not shared, and adds to that.
        let gradient = own.copy();
        let explicit = [Some(gradient.shallow_clone())];
        autograd::backward(&[&output], &explicit, BackwardOptions::default())?;
        let passes = f64::from(passes);
        suite.near("the gradient of a view", &parameter.grad(), &(&total * passes).view([2, 3]), 1e-12);
        suite.near("one that is not shared", &other.grad(), &(own * passes).view([2, 3]), 1e-12);
        suite.same("the gradient that was given", &gradient, own);
    }
    unmark_module_as_shared(shared);
    Ok(())
}

fn after_failure(suite: &mut Suite<'_>) -> Result<(), Error> {
    let (parameters, factors) = module(suite);
    let own = &factors[suite.rank()];
    let all: Vec<&Tensor> = parameters.iter().collect();
    let shared = mark_module_as_shared(&all, suite.group, SharedOptions::default())?;
    // The last parameter's gradient comes first, then the pass fails, on all ranks.
    let breaks = Function::new("breaks")
        .apply(&[&parameters[0]], vec![parameters[0].detach() * 1.0], |_, _| Err("broken".into()))?
        .remove(0);
    let late = (&parameters[4] * &own[4]).sum(Kind::Double);
    let result = autograd::backward(&[&(breaks.sum(Kind::Double) + late)], &[], BackwardOptions::default());
    suite.check(result.is_err(), || "a pass that fails passed".into());
    parameters.iter().for_each(|p| p.shallow_clone().zero_grad());
    autograd::backward(&[&loss(&parameters, own)], &[], BackwardOptions::default())?;
    for (n, parameter) in parameters.iter().enumerate() {
        suite.near(&format!("parameter {n} afterwards"), &parameter.grad(), &total(&factors, n), 1e-6);
    }
    unmark_module_as_shared(shared);
    Ok(())
}

fn half(suite: &mut Suite<'_>) -> Result<(), Error> {
    let value = if suite.rank() == 0 { 2048.0 } else { 1.0 };
    for use_fp32 in [true, false] {
        let parameter = Tensor::from_slice(&[1.0]).to_kind(Kind::Half).set_requires_grad(true);
        let options = SharedOptions { use_fp32, ..Default::default() };
        let shared = mark_module_as_shared(&[&parameter], suite.group, options)?;
        let factor = Tensor::from_slice(&[value]).to_kind(Kind::Half);
        autograd::backward(&[&(&parameter * factor).sum(Kind::Half)], &[], BackwardOptions::default())?;
        // In half precision 2048 + 1 is 2048.
        let sum = if use_fp32 { 2047.0 + suite.ranks() as f64 } else { 2048.0 };
        let want = Tensor::from_slice(&[sum]).to_kind(Kind::Half);
        suite.same(&format!("the sum, fp32 {use_fp32}"), &parameter.grad(), &want);
        unmark_module_as_shared(shared);
    }
    Ok(())
}

fn refused(suite: &mut Suite<'_>) -> Result<(), Error> {
    let leaf = |shape: &[i64]| Tensor::ones(shape, (Kind::Double, tch::Device::Cpu)).set_requires_grad(true);
    let (one, empty, other) = (leaf(&[2]), leaf(&[0]), leaf(&[0, 3]));
    let mark = |all: &[&Tensor]| mark_module_as_shared(all, suite.group, SharedOptions::default());
    let fails = |all: &[&Tensor], needle: &str| match mark(all) {
        Ok(_) => format!("{needle}: was taken"),
        Err(error) if error.to_string().contains(needle) => String::new(),
        Err(error) => error.to_string(),
    };
    let mut problems = vec![
        fails(&[&one.detach()], "not a leaf"),
        fails(&[&(&one * 2.0)], "not a leaf"),
        fails(&[&one, &one], "parameter 1 is marked"),
    ];
    let shared = mark(&[&one, &empty, &other])?;
    problems.push(fails(&[&one], "marked as shared already"));
    unmark_module_as_shared(shared);
    unmark_module_as_shared(mark(&[&one])?);
    for problem in problems {
        suite.check(problem.is_empty(), || problem);
    }
    suite.group.barrier()
}
