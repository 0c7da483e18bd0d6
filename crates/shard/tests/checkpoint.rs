//! Activation checkpointing: draws, hooks, errors, and what is refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use isobar_array::{Elementwise, Generator, RandomOps, Window, is_recomputing};
use isobar_collectives::{SharedOptions, mark_module_as_shared, threads};
use isobar_shard::{Error, checkpoint};
use isobar_torch::autograd::{self, BackwardOptions};
use isobar_torch::guard::NoGrad;
use tch::{Device, Kind, Tensor};

fn leaf(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

#[test]
fn draws_are_made_again_and_count_once() {
    let x = Tensor::ones([64], (Kind::Double, Device::Cpu));
    let dropped =
        |x: &Tensor, generator: &Generator| RandomOps::dropout(x, 0.5, generator, &Window::whole(&[64]));
    let (generator, plain) = (Generator::new(3), Generator::new(3));
    let weight = leaf(&[2.0]);
    let captured = weight.shallow_clone();
    let y = checkpoint(&[&x], Some(&generator), move |inputs, generator| {
        dropped(&inputs[0].mul(&captured)?, generator.unwrap())
    })
    .unwrap();
    assert_eq!(generator.draws(), 1);
    generator.next_u64();
    y.sum(Kind::Double).backward();
    assert_eq!(generator.draws(), 2);
    assert_eq!(
        weight.grad().double_value(&[0]),
        dropped(&x, &plain).unwrap().sum(Kind::Double).double_value(&[])
    );
    assert!(!x.grad().defined());
}

#[test]
fn without_gradients_it_is_a_call() {
    let (calls, x) = (Arc::new(AtomicUsize::new(0)), leaf(&[2.0]));
    let counted = calls.clone();
    let f = move |inputs: &[Tensor], _: Option<&Generator>| {
        counted.fetch_add(1, Ordering::Relaxed);
        inputs[0].mul_scalar(if is_recomputing() { 3.0 } else { 2.0 })
    };
    {
        let _no_grad = NoGrad::new();
        assert!(!checkpoint(&[&x], None, f.clone()).unwrap().requires_grad());
    }
    let y = checkpoint(&[&x], None, f).unwrap();
    assert_eq!(y.double_value(&[0]), 4.0);
    y.backward();
    assert_eq!(x.grad().double_value(&[0]), 3.0);
    assert!(!is_recomputing());
    assert_eq!(calls.load(Ordering::Relaxed), 3);
}

#[test]
fn errors_of_backward_say_what_failed() {
    let x = leaf(&[2.0]);
    let y = checkpoint(&[&x], None, |inputs, _| match is_recomputing() {
        true => Err(Error::from(isobar_array::Error::Argument { op: "test", reason: "out of luck".into() })),
        false => Ok(inputs[0].mul_scalar(2.0)?),
    });
    let told = autograd::backward(&[&y.unwrap()], &[], BackwardOptions::default()).unwrap_err();
    assert_eq!(told.to_string(), "backward of 'checkpoint' failed: test: out of luck");

    let square = |inputs: &[Tensor], _: Option<&Generator>| inputs[0].mul(&inputs[0]);
    let y = checkpoint(&[&x], None, square).unwrap();
    let create = BackwardOptions { create_graph: true, ..Default::default() };
    let told = autograd::backward(&[&y], &[], create).unwrap_err();
    assert!(told.to_string().contains("gradients of gradients"), "{told}");

    let y = checkpoint(&[&x], None, square).unwrap();
    let told = autograd::grad(&[&y], &[&x], &[], BackwardOptions::default()).unwrap_err();
    assert!(told.to_string().contains("some inputs only"), "{told}");
    assert!(!x.grad().defined());
}

#[test]
fn a_kept_graph_is_gone_through_twice() {
    let x = leaf(&[3.0]);
    let y = checkpoint(&[&x], None, |inputs, _| inputs[0].mul(&inputs[0])).unwrap();
    let retain = BackwardOptions { retain_graph: true, ..Default::default() };
    autograd::backward(&[&y], &[], retain).unwrap();
    autograd::backward(&[&y], &[], BackwardOptions::default()).unwrap();
    assert_eq!(x.grad().double_value(&[0]), 12.0);
}

#[test]
fn one_inside_another() {
    let x = leaf(&[3.0]);
    let y = checkpoint(&[&x], None, |inputs, _| {
        let inner = checkpoint(&[&inputs[0]], None, |inputs, _| inputs[0].mul(&inputs[0]))?;
        inner.mul(&inputs[0])
    });
    y.unwrap().backward();
    assert_eq!(x.grad().double_value(&[0]), 27.0);
}

/// The reduction of shared parameters waits for the end of the whole pass.
#[test]
fn shared_parameters_are_reduced_once() {
    threads::run(2, Duration::from_secs(30), |group| {
        let [first, second] = [2.0, 5.0].map(|value| leaf(&[value]));
        let trace = isobar_shard::CommTrace::start(&group);
        let module = mark_module_as_shared(&[&first, &second], &group, SharedOptions::default()).unwrap();
        let x = Tensor::from_slice(&[1.0 + group.rank() as f64]);
        let layer = |x: &Tensor, weight: &Tensor| {
            let weight = weight.shallow_clone();
            checkpoint(&[x], None, move |inputs, _| inputs[0].mul(&weight)).unwrap()
        };
        autograd::backward(&[&layer(&layer(&x, &first), &second)], &[], BackwardOptions::default()).unwrap();
        assert_eq!(first.grad().double_value(&[0]), 15.0);
        assert_eq!(second.grad().double_value(&[0]), 6.0);
        trace.stop();
        assert_eq!(trace.record().len(), 1, "{}", trace.record().table());
        drop(module);
    });
}
