//! Nothing grows: closures, saved tensors, gradients and errors of a million nodes are freed, whether backward runs,
//! fails, or never comes. One test in its own process, since it watches the process's memory.

#![expect(clippy::unwrap_used, reason = "a step that fails is a test that fails")]

use std::sync::atomic::{AtomicUsize, Ordering};

use isobar_torch::autograd::{self, BackwardOptions, Function};
use isobar_torch::guard::NoGrad;
use isobar_torch::{Complex64, memory};
use tch::{Device, Kind, Tensor};

static LIVE_CLOSURES: AtomicUsize = AtomicUsize::new(0);

/// Counts the closures that hold one.
struct Held;

impl Held {
    fn new() -> Self {
        LIVE_CLOSURES.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        LIVE_CLOSURES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// x·y with an input and its output saved; backward fails where `fail` says so.
fn node(x: &Tensor, fail: bool) -> Tensor {
    let y = {
        let _no_grad = NoGrad::new();
        x.f_mul_scalar(0.5).unwrap()
    };
    let held = Held::new();
    let outputs = Function::new("half").save(&[x, &y]).apply(&[x], vec![y], move |ctx, grads| {
        let _ = (&held, ctx.saved(0)?, ctx.saved(1)?);
        if fail {
            return Err("on purpose".into());
        }
        Ok(vec![Some(ctx.grad_or_zeros(grads, 0)?.f_mul_scalar(0.5)?)])
    });
    outputs.unwrap().remove(0)
}

/// Kilobytes of the process in memory.
fn resident() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Runs `round` until warm, then `times`, and checks that nothing is left.
fn check(what: &str, times: usize, mut round: impl FnMut(usize)) {
    for i in 0..(times / 20).max(2) {
        round(i);
    }
    let (bytes, kilobytes) = (memory::live_bytes(), resident());
    for i in 0..times {
        round(i);
    }
    assert_eq!(LIVE_CLOSURES.load(Ordering::Relaxed), 0, "{what}: closures");
    assert_eq!(memory::live_bytes(), bytes, "{what}: bytes of tensors");
    // A leaked node is some hundred bytes; allocators breathe.
    let grown = resident() - kilobytes;
    assert!(grown < 24 * 1024, "{what}: the process grew by {grown} kB");
}

#[test]
fn a_million_nodes_leave_nothing() {
    memory::install_caching_allocator();
    tch::set_num_threads(1);
    let x = Tensor::ones([8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let seed = || Some(Tensor::ones([8], (Kind::Float, Device::Cpu)));
    let options = BackwardOptions::default();
    let retain = BackwardOptions { retain_graph: true, ..options };
    let create = BackwardOptions { create_graph: true, ..options };

    check("without backward", 500_000, |_| drop(node(&x, false)));
    check("with backward", 200_000, |_| {
        autograd::grad(&[&node(&x, false)], &[&x], &[seed()], options).unwrap();
    });
    check("with errors", 30_000, |i| {
        let deep = node(&node(&x, i % 2 == 0), i % 2 == 1);
        assert!(autograd::grad(&[&deep], &[&x], &[seed()], options).is_err());
    });
    check("with a retained graph", 20_000, |_| {
        let y = node(&x, false);
        for _ in 0..2 {
            autograd::grad(&[&y], &[&x], &[seed()], retain).unwrap();
        }
    });
    check("with a graph of the gradient", 10_000, |_| {
        autograd::grad(&[&node(&node(&x, false), false)], &[&x], &[seed()], create).unwrap();
    });
    check("hooks", 20_000, |_| {
        let held = Held::new();
        let hook = autograd::register_hook(&x, move |grad| {
            let _ = &held;
            Ok(Some(grad.f_mul_scalar(2.0)?))
        });
        let held = Held::new();
        let post = autograd::register_post_accumulate_grad_hook(&x, move |_| {
            let _ = &held;
            Ok(())
        });
        autograd::backward(&[&node(&x, false)], &[seed()], options).unwrap();
        hook.unwrap().remove();
        post.unwrap().remove();
    });
    check("vectors", 100_000, |i| {
        let len = i % 1000;
        let values = memory::from_vec(vec![Complex64::new(1.0, 2.0); len], &[len as i64]).unwrap();
        assert_eq!(memory::to_vec::<Complex64>(&values.f_conj().unwrap()).unwrap().len(), len);
        assert!(memory::from_vec(vec![0u8; 4096], &[5]).is_err());
    });
    check("a chain of many nodes", 5, |_| {
        let mut y = x.shallow_clone();
        for _ in 0..20_000 {
            y = node(&y, false);
        }
    });
}
