use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::{Device, Kind, Tensor};

use super::*;
use crate::error::{BoxError, Error, Result};
use crate::guard::NoGrad;
use crate::memory;

const CPU: (Kind, Device) = (Kind::Double, Device::Cpu);

fn leaf(values: &[f64]) -> Tensor {
    memory::from_vec(values.to_vec(), &[values.len() as i64]).unwrap().set_requires_grad(true)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    memory::to_vec(tensor).unwrap()
}

fn no_grad<T>(body: impl FnOnce() -> T) -> T {
    let _no_grad = NoGrad::new();
    body()
}

fn default() -> BackwardOptions {
    BackwardOptions::default()
}

fn retain() -> BackwardOptions {
    BackwardOptions { retain_graph: true, ..default() }
}

/// exp with its output saved.
fn exp(x: &Tensor) -> Result<Tensor> {
    let y = no_grad(|| x.f_exp())?;
    let outputs = Function::new("exp").save(&[&y]).apply(&[x], vec![y], |ctx, grads| {
        let grad = ctx.grad_or_zeros(grads, 0)?;
        Ok(vec![Some(grad.f_mul(&ctx.saved(0)?)?)])
    })?;
    Ok(outputs.into_iter().next().unwrap())
}

/// (x·y, x+y) with both inputs saved; what backward got is counted as bits.
fn product_and_sum(x: &Tensor, y: &Tensor, defined: &Arc<AtomicUsize>) -> Result<Vec<Tensor>> {
    let outputs = no_grad(|| Ok::<_, Error>(vec![x.f_mul(y)?, x.f_add(y)?]))?;
    let defined = Arc::clone(defined);
    Function::new("product_and_sum").save(&[x, y]).apply(&[x, y], outputs, move |ctx, grads| {
        let bits = grads.iter().enumerate().map(|(i, grad)| usize::from(grad.is_some()) << i).sum();
        defined.store(bits, Ordering::Relaxed);
        let [product, sum] = [ctx.grad_or_zeros(grads, 0)?, ctx.grad_or_zeros(grads, 1)?];
        let mut gradients = Vec::new();
        for (input, other) in [(0, 1), (1, 0)] {
            let needed = ctx.needs_input_grad(input);
            let gradient = || Ok::<_, BoxError>(product.f_mul(&ctx.saved(other)?)?.f_add(&sum)?);
            gradients.push(needed.then(gradient).transpose()?);
        }
        Ok(gradients)
    })
}

#[test]
fn several_inputs_and_outputs_and_undefined_gradients() {
    let defined = Arc::new(AtomicUsize::new(0));
    let (x, y) = (leaf(&[2.0, 3.0]), leaf(&[5.0, 7.0]));
    let outputs = product_and_sum(&x, &y, &defined).unwrap();
    let ones = || Some(Tensor::ones([2], CPU));
    backward(&[&outputs[0], &outputs[1]], &[ones(), ones()], retain()).unwrap();
    assert_eq!((values(&x.grad()), values(&y.grad())), (vec![6.0, 8.0], vec![3.0, 4.0]));
    assert_eq!(defined.load(Ordering::Relaxed), 0b11);
    let found = grad(&[&outputs[1]], &[&x, &y], &[ones()], retain()).unwrap();
    assert_eq!(values(found[0].as_ref().unwrap()), [1.0, 1.0]);
    assert_eq!(defined.load(Ordering::Relaxed), 0b10, "the gradient of the product is undefined");
}

#[test]
fn only_needed_gradients_are_asked_for() {
    let asked = Arc::new(AtomicUsize::new(0));
    let (x, y) = (leaf(&[2.0]), leaf(&[3.0]));
    let z = no_grad(|| x.f_mul(&y)).unwrap();
    let seen = Arc::clone(&asked);
    let outputs = Function::new("ask")
        .apply(&[&x, &y, &z], vec![z.copy()], move |ctx, grads| {
            let bits = (0..4).map(|i| usize::from(ctx.needs_input_grad(i)) << i).sum();
            seen.store(bits, Ordering::Relaxed);
            Ok(vec![grads[0].as_ref().map(Tensor::shallow_clone), None, None])
        })
        .unwrap();
    let options = BackwardOptions { retain_graph: true, allow_unused: true, ..default() };
    grad(&[&outputs[0]], &[&x], &[], options).unwrap();
    assert_eq!(
        asked.load(Ordering::Relaxed),
        0b001,
        "y is not asked for, z requires none, there is no fourth"
    );
    backward(&[&outputs[0]], &[], default()).unwrap();
    assert_eq!(asked.load(Ordering::Relaxed), 0b011);
    assert!(!y.grad().defined(), "None is no gradient");
}

#[test]
fn gradients_of_gradients() {
    let x = leaf(&[0.5, 1.0]);
    let create = BackwardOptions { create_graph: true, ..default() };
    let ones = || Some(Tensor::ones([2], CPU));
    let y = exp(&x).unwrap();
    let mut derivative = y;
    for _ in 0..3 {
        derivative = grad(&[&derivative], &[&x], &[ones()], create).unwrap().remove(0).unwrap();
        assert_eq!(values(&derivative), values(&no_grad(|| x.exp())));
        assert!(derivative.requires_grad());
    }
    let plain = grad(&[&derivative], &[&x], &[ones()], default()).unwrap().remove(0).unwrap();
    assert!(!plain.requires_grad());
}

#[test]
fn errors_and_panics_come_out_as_errors() {
    #[derive(Debug, thiserror::Error)]
    #[error("rank {0} is lost")]
    struct Lost(usize);

    let x = leaf(&[1.0]);
    let failing = |how: fn() -> Result<Vec<Option<Tensor>>, BoxError>| {
        let outputs = Function::new("gather").apply(&[&x], vec![Tensor::ones([1], CPU)], move |_, _| how());
        let loss = outputs.unwrap()[0].f_mul_scalar(2.0).unwrap();
        let first = backward(&[&loss], &[], retain()).unwrap_err();
        let second = grad(&[&loss], &[&x], &[], default()).unwrap_err();
        assert_eq!(first.to_string(), second.to_string());
        first
    };
    let error = failing(|| Err(Box::new(Lost(3))));
    assert_eq!(error.to_string(), "backward of 'gather' failed: rank 3 is lost");
    assert!(matches!(error, Error::Closure { error, .. } if error.downcast_ref::<Lost>().unwrap().0 == 3));
    let error = failing(|| panic!("index {} out of range", 7));
    assert_eq!(error.to_string(), "backward of 'gather' panicked: index 7 out of range");
    assert!(matches!(error, Error::Panic { .. }));
    assert!(failing(|| Ok(vec![])).to_string().contains("0 gradients for 1 inputs"));
    assert!(failing(|| Ok(vec![Some(Tensor::new())])).to_string().contains("undefined"));
    assert!(failing(|| std::panic::panic_any(5)).to_string().contains("without a text"));
    // Gradients of the wrong shape are found by libtorch.
    let (pair, ones) = (leaf(&[1.0, 2.0]), Tensor::ones([5], CPU));
    let outputs = Function::new("f")
        .apply(&[&pair], vec![Tensor::ones([1], CPU)], move |_, _| Ok(vec![Some(ones.shallow_clone())]));
    let error = backward(&[&outputs.unwrap()[0]], &[], default()).unwrap_err().to_string();
    assert!(error.contains("invalid gradient"), "{error}");
    // torch and tch work on as if nothing had happened.
    backward(&[&exp(&x).unwrap()], &[], default()).unwrap();
}

#[test]
fn an_error_crosses_nested_passes() {
    let x = leaf(&[1.0]);
    let outputs = Function::new("outer")
        .apply(&[&x], vec![Tensor::ones([1], CPU)], |_, _| {
            let _grad = crate::guard::EnableGrad::new();
            let y = leaf(&[1.0]);
            let inner = Function::new("inner")
                .apply(&[&y], vec![Tensor::ones([1], CPU)], |_, _| Err("deep".into()))?;
            backward(&[&inner[0]], &[], default())?;
            Ok(vec![None])
        })
        .unwrap();
    let error = backward(&[&outputs[0]], &[], default()).unwrap_err().to_string();
    assert_eq!(error, "backward of 'outer' failed: backward of 'inner' failed: deep");
}

#[test]
fn a_change_in_place_of_a_saved_tensor_is_an_error() {
    let x = leaf(&[1.0]);
    let y = exp(&x).unwrap();
    let loss = y.f_mul_scalar(1.0).unwrap();
    let _ = no_grad(|| y.shallow_clone().f_add_scalar_(1.0)).unwrap();
    let error = backward(&[&loss], &[], default()).unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

#[test]
fn a_second_pass_needs_a_retained_graph() {
    let x = leaf(&[1.0]);
    let y = exp(&x).unwrap();
    backward(&[&y], &[], retain()).unwrap();
    backward(&[&y], &[], default()).unwrap();
    let error = backward(&[&y], &[], default()).unwrap_err().to_string();
    assert!(error.contains("second time"), "{error}");
}

#[test]
fn an_output_that_is_an_input_comes_back_as_an_alias() {
    let x = leaf(&[1.0, 2.0]);
    let twice = |x: &Tensor| {
        let outputs = vec![x.shallow_clone(), x.shallow_clone()];
        Function::new("twice").save(&[x]).apply(&[x], outputs, |ctx, grads| {
            let [a, b] = [ctx.grad_or_zeros(grads, 0)?, ctx.grad_or_zeros(grads, 1)?];
            Ok(vec![Some(a.f_add(&b)?)])
        })
    };
    let outputs = twice(&x).unwrap();
    assert!(x.is_leaf() && !outputs[0].is_leaf() && !outputs[1].is_leaf());
    assert_eq!(memory::data_ptr(&outputs[0]).unwrap(), memory::data_ptr(&x).unwrap());
    let sum = outputs[0].f_add(&outputs[1].f_mul_scalar(10.0).unwrap()).unwrap().f_sum(Kind::Double).unwrap();
    backward(&[&sum], &[], default()).unwrap();
    assert_eq!(values(&x.grad()), [11.0, 11.0]);
}

#[test]
fn a_view_comes_back_with_its_own_history() {
    let (x, base) = (leaf(&[1.0]), Tensor::zeros([4], CPU));
    let view = no_grad(|| base.narrow(0, 1, 1));
    let outputs = Function::new("view")
        .save(&[&view])
        .apply(&[&x], vec![view.shallow_clone()], |ctx, grads| {
            let _ = ctx.saved(0)?;
            Ok(vec![grads[0].as_ref().map(Tensor::shallow_clone)])
        })
        .unwrap();
    backward(&[&outputs[0]], &[], default()).unwrap();
    assert_eq!(values(&x.grad()), [1.0]);
    assert!(!base.requires_grad() && !view.requires_grad());
}

#[test]
fn outputs_without_gradient_are_plain() {
    let x = leaf(&[1.0]);
    let dropped = Arc::new(AtomicUsize::new(0));
    let apply = |input: &Tensor, output: Tensor| {
        let counter = Count(Arc::clone(&dropped));
        let outputs = Function::new("plain").apply(&[input], vec![output], move |_, _| {
            let _ = &counter;
            Ok(vec![None])
        });
        outputs.unwrap().remove(0)
    };
    assert!(!apply(&x.f_detach().unwrap(), Tensor::ones([1], CPU)).requires_grad());
    assert!(!apply(&x, Tensor::ones([1], (Kind::Int64, Device::Cpu))).requires_grad());
    assert!(!no_grad(|| apply(&x, Tensor::ones([1], CPU))).requires_grad());
    assert_eq!(dropped.load(Ordering::Relaxed), 3, "the closure is dropped at once");
}

#[test]
fn integer_outputs_keep_their_place() {
    let x = leaf(&[3.0, 1.0]);
    let (sorted, indices) = no_grad(|| x.f_sort(0, false)).unwrap();
    let outputs = Function::new("sort")
        .apply(&[&x], vec![indices, sorted], |_, grads| {
            assert!(grads[0].is_none());
            Ok(vec![grads[1].as_ref().map(|grad| grad.flip([0]))])
        })
        .unwrap();
    assert!(!outputs[0].requires_grad() && outputs[1].requires_grad());
    let grad = Tensor::from_slice(&[1.0, 10.0]);
    backward(&[&outputs[1]], &[Some(grad)], default()).unwrap();
    assert_eq!(values(&x.grad()), [10.0, 1.0]);
}

#[test]
fn backward_into_leaves_others_alone() {
    let (x, y) = (leaf(&[2.0]), leaf(&[3.0]));
    let z = x.f_mul(&y).unwrap();
    backward_into(&[&z], &[], &[&x], default()).unwrap();
    assert!(x.grad().defined() && !y.grad().defined());
    assert!(backward_into(&[&z], &[], &[], default()).is_err());
}

#[test]
fn wrong_arguments_are_errors() {
    let (x, stranger) = (leaf(&[2.0, 3.0]), leaf(&[1.0]));
    let y = exp(&x).unwrap();
    let one = || Some(Tensor::ones([2], CPU));
    assert!(backward(&[&y], &[one(), one()], default()).unwrap_err().to_string().contains("2 gradients"));
    assert!(backward(&[&y], &[], default()).unwrap_err().to_string().contains("scalar"));
    assert!(backward(&[&y], &[Some(Tensor::ones([3], CPU))], default()).is_err());
    assert!(backward(&[&Tensor::ones([1], CPU)], &[], default()).is_err());
    assert!(grad(&[&y], &[], &[one()], default()).is_err());
    assert!(grad(&[&y], &[&stranger], &[one()], retain()).is_err());
    let allow = BackwardOptions { allow_unused: true, ..default() };
    assert!(grad(&[&y], &[&stranger], &[one()], allow).unwrap()[0].is_none());
    let outputs = Function::new("f").apply(&[&x], vec![Tensor::ones([1], CPU)], |ctx, _| {
        let _ = ctx.saved(2)?;
        Ok(vec![None])
    });
    let error = backward(&[&outputs.unwrap()[0]], &[], default()).unwrap_err().to_string();
    assert!(error.contains("saved tensor 2 was asked for, but 0 were saved"), "{error}");
}

/// Adds one to its counter when dropped.
struct Count(Arc<AtomicUsize>);

impl Drop for Count {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

mod hooks {
    use super::*;

    #[test]
    fn hooks_see_and_replace_gradients_in_order() {
        let x = leaf(&[1.0]);
        let y = x.f_mul_scalar(3.0).unwrap();
        register_hook(&y, |grad| Ok(Some(grad.f_mul_scalar(2.0)?))).unwrap();
        let seen = Arc::new(AtomicUsize::new(0));
        let record = Arc::clone(&seen);
        register_hook(&y, move |grad| {
            record.store(grad.double_value(&[0]) as usize, Ordering::Relaxed);
            Ok(None)
        })
        .unwrap();
        register_hook(&x, |grad| Ok(Some(grad.f_add_scalar(0.5)?))).unwrap();
        backward(&[&y], &[], default()).unwrap();
        assert_eq!(seen.load(Ordering::Relaxed), 2);
        assert_eq!(values(&x.grad()), [6.5]);
    }

    #[test]
    fn post_accumulate_hooks_see_the_sum_and_can_be_removed() {
        let x = leaf(&[1.0]);
        let seen = Arc::new(AtomicUsize::new(0));
        let record = Arc::clone(&seen);
        let handle = register_post_accumulate_grad_hook(&x, move |leaf| {
            record.store(leaf.grad().double_value(&[0]) as usize, Ordering::Relaxed);
            Ok(())
        })
        .unwrap();
        for expected in [3, 6] {
            backward(&[&x.f_mul_scalar(3.0).unwrap()], &[], default()).unwrap();
            assert_eq!(seen.load(Ordering::Relaxed), expected);
        }
        handle.remove();
        backward(&[&x.f_mul_scalar(3.0).unwrap()], &[], default()).unwrap();
        assert_eq!(seen.load(Ordering::Relaxed), 6);
        let interior = x.f_mul_scalar(3.0).unwrap();
        let error = register_post_accumulate_grad_hook(&interior, |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("leaf"), "{error}");
    }

    #[test]
    fn removal_drops_the_closure_at_once_also_from_another_thread_and_after_the_tensor() {
        let x = leaf(&[1.0]);
        let dropped = Arc::new(AtomicUsize::new(0));
        let register = |x: &Tensor| {
            let count = Count(Arc::clone(&dropped));
            register_hook(x, move |_| {
                let _ = &count;
                Err("removed hooks are not called".into())
            })
            .unwrap()
        };
        let handle = register(&x);
        std::thread::spawn(move || handle.remove()).join().unwrap();
        assert_eq!(dropped.load(Ordering::Relaxed), 1);
        backward(&[&x.f_mul_scalar(3.0).unwrap()], &[], default()).unwrap();
        let handle = register(&x);
        drop(x);
        handle.remove();
        assert_eq!(dropped.load(Ordering::Relaxed), 2);
        let (x, kept) = (leaf(&[1.0]), 3);
        drop(register(&x));
        assert_eq!(dropped.load(Ordering::Relaxed), 2, "dropping the handle keeps the hook");
        drop(x);
        assert_eq!(dropped.load(Ordering::Relaxed), kept, "the tensor takes its hooks along");
    }

    #[test]
    fn a_hook_may_remove_itself() {
        let x = leaf(&[1.0]);
        let own = Arc::new(std::sync::Mutex::new(None::<HookHandle>));
        let inside = Arc::clone(&own);
        let handle = register_hook(&x, move |grad| {
            if let Some(handle) = inside.lock().unwrap().take() {
                handle.remove();
            }
            Ok(Some(grad.f_mul_scalar(10.0)?))
        })
        .unwrap();
        *own.lock().unwrap() = Some(handle);
        for expected in [10.0, 11.0] {
            backward(&[&x.f_mul_scalar(1.0).unwrap()], &[], default()).unwrap();
            assert_eq!(values(&x.grad()), [expected]);
        }
    }

    #[test]
    fn errors_and_panics_are_errors_of_backward() {
        let x = leaf(&[1.0]);
        let run = || backward(&[&x.f_mul_scalar(3.0).unwrap()], &[], default());
        let hook = register_hook(&x, |_| Err("too large".into())).unwrap();
        assert_eq!(run().unwrap_err().to_string(), "a tensor hook failed: too large");
        hook.remove();
        let hook = register_post_accumulate_grad_hook(&x, |_| panic!("oh")).unwrap();
        assert_eq!(run().unwrap_err().to_string(), "a post-accumulate hook panicked: oh");
        hook.remove();
        run().unwrap();
        assert!(register_hook(&Tensor::ones([1], CPU), |_| Ok(None)).is_err());
    }
}
