//! Rules that programs bring: local maps, declared shardings, operators by name.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use isobar_array::{Array, Attrs, Conv, Elementwise, Linear, Padding, Windowed, args, register_op};
use isobar_collectives::ReduceOp;
use isobar_shard::rules::{
    LocalMap, LocalOutput, Sharding, Shardings, local_map, register_sharded_op, register_sharding,
};
use isobar_shard::{
    CommTrace, Error, Layout, Placement, ShardTensor, Sizes, forbid_hidden_communication, grad,
};
use isobar_torch::autograd::BackwardOptions;
use rstest::rstest;
use tch::{Kind, Tensor};

use crate::common::{MESHES, difference, layouts, leaf, numbers, on_mesh};

const SUM: Placement = Placement::Partial(ReduceOp::Sum);

/// gelu(x + bias), on dense tensors.
fn biased(inputs: &[&Tensor]) -> Result<Vec<Tensor>, Box<dyn std::error::Error + Send + Sync>> {
    Ok(vec![inputs[0].f_add(inputs[1])?.f_gelu("none")?])
}

/// The gradients of x and bias for a cotangent.
fn dense_gradients(x: &Tensor, bias: &Tensor, cotangent: &Tensor) -> (Tensor, Tensor, Tensor) {
    let (x, bias) = (x.copy().set_requires_grad(true), bias.copy().set_requires_grad(true));
    let y = biased(&[&x, &bias]).unwrap().remove(0);
    (&y * cotangent).sum(Kind::Double).backward();
    (y.detach(), x.grad(), bias.grad())
}

#[rstest]
fn local_maps_have_the_gradients_of_the_whole(#[values(0, 1, 2, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let (x, bias, cotangent) = (numbers(&[7, 3], 1), numbers(&[3], 2), numbers(&[7, 3], 3));
        let (want, want_x, want_bias) = dense_gradients(&x, &bias, &cotangent);
        for layout in layouts(mesh, &[7, 3]).iter().filter(|layout| !layout.is_sharded(1)) {
            let whole =
                Layout::new(mesh, &vec![Placement::Replicate; mesh.ndim()], &[3], &Sizes::Chunk).unwrap();
            let (x, bias) = (leaf(&x, layout), leaf(&bias, &whole));
            let run = |parts: &[Tensor]| biased(&[&parts[0], &parts[1]]);
            let outputs = [LocalOutput::Like(layout.clone())];
            let y = local_map(run, &[&x, &bias], &outputs, &LocalMap::default()).unwrap().remove(0);
            assert!(difference(&y.full_tensor(None).unwrap(), &want) < 1e-12);
            let g = ShardTensor::distribute_as(&cotangent, layout).unwrap();
            let grads = grad(&[&y], &[&x, &bias], &[Some(&g)], BackwardOptions::default()).unwrap();
            let full = |index: usize| grads[index].as_ref().unwrap().full_tensor(None).unwrap();
            assert!(difference(&full(0), &want_x) < 1e-12, "{layout}");
            assert!(difference(&full(1), &want_bias) < 1e-12, "{layout}");
        }
    });
}

#[test]
fn local_maps_redistribute_where_they_may() {
    on_mesh(&[3], |mesh| {
        let whole = numbers(&[7, 3], 1);
        let x = ShardTensor::distribute(&whole, mesh, &[Placement::Shard(1)]).unwrap();
        let columns = |parts: &[Tensor]| Ok(vec![parts[0].f_sum_dim_intlist(0, false, None)?]);
        let rows = LocalMap {
            inputs: vec![Some(vec![Placement::Shard(0)])],
            redistribute: true,
            ..LocalMap::default()
        };
        let y = local_map(columns, &[&x], &[LocalOutput::placed(&[SUM])], &rows).unwrap().remove(0);
        assert!(difference(&y.full_tensor(None).unwrap(), &whole.sum_dim_intlist(0, false, None)) < 1e-12);

        let strict = LocalMap { redistribute: false, ..rows };
        let error = local_map(columns, &[&x], &[LocalOutput::placed(&[SUM])], &strict).unwrap_err();
        insta::allow_duplicates! {
            insta::assert_snapshot!(error, @"local_map of Double [7, 3] on mesh (a=3): a Shard(1) of [1, 1, 1]: local_map: input 0 is [7, 3] on mesh (a=3): a Shard(1) of [1, 1, 1], expected [Shard(0)]; redistribute it, or let local_map do so");
        }
        let none = local_map(|_| Ok(vec![]), &[&x], &[LocalOutput::placed(&[SUM])], &LocalMap::default());
        assert!(none.unwrap_err().to_string().ends_with("1 outputs are declared, got 0"));
        let failed = local_map(|_| Err("no".into()), &[&x], &[], &LocalMap::default());
        assert!(failed.unwrap_err().to_string().ends_with("operator \"local_map\" failed: no"));
    });
}

/// Declares that `biased` may be sharded along any dim of x but the last, or the last together with the bias.
fn declare_biased(name: &str, with_shapes: bool) {
    register_op(name, |inputs, _| biased(inputs));
    register_sharding(name, move |layouts, _| {
        let last = layouts[0].ndim() - 1;
        let mut choices: Vec<Sharding> = (0..last)
            .map(Placement::Shard)
            .map(|rows| Sharding::new(&[rows, Placement::Replicate], &[rows]))
            .collect();
        let channels = Placement::Shard(last);
        choices.push(Sharding::new(&[channels, Placement::Shard(0)], &[channels]));
        let shardings = Shardings::new(choices);
        Ok(if with_shapes { shardings.with_shapes(vec![layouts[0].shape().to_vec()]) } else { shardings })
    });
}

#[rstest]
fn declared_shardings_have_values_and_gradients(#[values(0, 1, 2, 3, 4)] mesh: usize) {
    declare_biased("test_declared", true);
    on_mesh(MESHES[mesh], |mesh| {
        let _guard = forbid_hidden_communication();
        let (x, bias, cotangent) = (numbers(&[7, 5], 1), numbers(&[5], 2), numbers(&[7, 5], 3));
        let (want, want_x, want_bias) = dense_gradients(&x, &bias, &cotangent);
        let biases = layouts(mesh, &[5]);
        for (index, layout) in layouts(mesh, &[7, 5]).iter().enumerate() {
            let of_bias = &biases[index % biases.len()];
            let (x, bias) = (leaf(&x, layout), leaf(&bias, of_bias));
            let y = ShardTensor::op("test_declared", &[&x, &bias], &Attrs::default()).unwrap().remove(0);
            assert_eq!(y.local().size(), y.local_shape());
            assert!(difference(&y.full_tensor(None).unwrap(), &want) < 1e-12, "{layout}; {of_bias}");
            let g = ShardTensor::distribute_as(&cotangent, y.layout()).unwrap();
            let grads = grad(&[&y], &[&x, &bias], &[Some(&g)], BackwardOptions::default()).unwrap();
            let full = |index: usize| grads[index].as_ref().unwrap().full_tensor(None).unwrap();
            assert!(difference(&full(0), &want_x) < 1e-12, "{layout}; {of_bias}");
            assert!(difference(&full(1), &want_bias) < 1e-12, "{layout}; {of_bias}");
        }
    });
}

#[test]
fn the_cheapest_sharding_is_taken() {
    declare_biased("test_cheapest", true);
    declare_biased("test_cheapest_inferred", false);
    on_mesh(&[2], |mesh| {
        let (whole, whole_bias) = (numbers(&[40, 6], 1), numbers(&[6], 2));
        let bias = ShardTensor::distribute(&whole_bias, mesh, &[Placement::Shard(0)]).unwrap();
        let group = mesh.group("a").unwrap();
        let run = |name: &str, x: &ShardTensor| {
            let trace = CommTrace::start(&group);
            let y = ShardTensor::op(name, &[x, &bias], &Attrs::default()).unwrap().remove(0);
            trace.stop();
            (y, trace.record())
        };
        // The bias is gathered, half of it on each rank, and x stays, in its own uneven sizes.
        let sizes = Sizes::Explicit(vec![(0, vec![11, 29])]);
        let uneven = Layout::new(mesh, &[Placement::Shard(0)], &[40, 6], &sizes).unwrap();
        let x = ShardTensor::distribute_as(&whole, &uneven).unwrap();
        let (y, record) = run("test_cheapest", &x);
        assert_eq!(*y.layout(), uneven);
        assert_eq!((record.len(), record.count("fetch"), record.received()), (1, 1, 3 * 8));
        // Both are split along the channels already.
        let x = ShardTensor::distribute(&whole, mesh, &[Placement::Shard(1)]).unwrap();
        let (y, record) = run("test_cheapest", &x);
        assert_eq!(y.placements(), [Placement::Shard(1)]);
        assert!(record.is_empty());
        // Without shapes, the layout of the result is found out by an exchange, of shapes.
        let (y, record) = run("test_cheapest_inferred", &x);
        assert_eq!((record.len(), record.count("all_gather_bytes")), (1, 1));
        assert_eq!(y.shape(), [40, 6]);
    });
}

#[test]
fn partial_sums_stay_so_where_the_rule_lets_them() {
    // x w, linear in x: sums may be done later.
    register_op("test_scaled", |inputs, _| Ok(vec![inputs[0].f_mul(inputs[1])?]));
    register_sharding("test_scaled", |layouts, _| {
        let choices = vec![
            Sharding::new(&[SUM, Placement::Replicate], &[SUM]),
            Sharding::new(&[Placement::Shard(0), Placement::Shard(0)], &[Placement::Shard(0)]),
        ];
        Ok(Shardings::new(choices).with_shapes(vec![layouts[0].shape().to_vec()]))
    });
    on_mesh(&[2, 2], |mesh| {
        let (whole_w, cotangent) = (numbers(&[6], 2), numbers(&[6], 3));
        let part = |rank: usize| numbers(&[6], 10 + rank as i64);
        let whole = part(0) + part(1);
        let at = mesh.coordinates().unwrap();
        let local = part(at[0]).set_requires_grad(true);
        let placements = [SUM, Placement::Replicate];
        let x = ShardTensor::from_local(&local, Some(mesh), &placements, &Sizes::Chunk, None).unwrap();
        let w = Layout::new(mesh, &[Placement::Replicate, Placement::Shard(0)], &[6], &Sizes::Chunk).unwrap();
        let w = leaf(&whole_w, &w);
        let y = ShardTensor::op("test_scaled", &[&x, &w], &Attrs::default()).unwrap().remove(0);
        // Along the second axis w is split, and x, the same on its ranks, is sliced for nothing.
        assert_eq!(y.placements(), [SUM, Placement::Shard(0)]);
        assert!(difference(&y.full_tensor(None).unwrap(), &(&whole * &whole_w)) < 1e-12);
        let g = ShardTensor::distribute(&cotangent, mesh, &[Placement::Replicate; 2]).unwrap();
        let gradient =
            grad(&[&y], &[&w], &[Some(&g)], BackwardOptions { retain_graph: true, ..Default::default() });
        let of_w = gradient.unwrap().remove(0).unwrap();
        assert!(difference(&of_w.full_tensor(None).unwrap(), &(&whole * &cotangent)) < 1e-12);
        y.backward_from(Some(&g), BackwardOptions::default()).unwrap();
        assert!(difference(&local.grad(), &(&whole_w * &cotangent)) < 1e-12);
    });
}

#[test]
fn rules_that_do_not_fit_are_errors() {
    register_op("test_misfit", |inputs, _| Ok(vec![inputs[0].shallow_clone()]));
    register_sharding("test_misfit", |layouts, _| match layouts[0].ndim() {
        1 => Err("vectors have no rows".into()),
        _ => Ok(Shardings::new(vec![Sharding::new(&[Placement::Shard(0)], &[])])
            .with_shapes(vec![layouts[0].shape().to_vec()])),
    });
    on_mesh(&[1], |mesh| {
        let error = |shape: &[i64]| {
            let x = ShardTensor::distribute(&numbers(shape, 1), mesh, &[Placement::Shard(0)]).unwrap();
            ShardTensor::op("test_misfit", &[&x], &Attrs::default()).unwrap_err().to_string()
        };
        insta::assert_snapshot!(error(&[4]), @r#"test_misfit of Double [4] on mesh (a=1): a Shard(0) of [4]: operator "test_misfit" failed: vectors have no rows"#);
        insta::assert_snapshot!(error(&[4, 2]), @"test_misfit of Double [4, 2] on mesh (a=1): a Shard(0) of [4]: register_sharding: the rule has [Shard(0)] → [] placements, expected one for each of 1 inputs, and one for each of 1 outputs");
    });
}

#[test]
fn what_has_no_rule_is_gathered_and_told_of() {
    register_op("test_sorted", |inputs, _| Ok(vec![inputs[0].f_sort(0, false)?.0]));
    on_mesh(&[2], |mesh| {
        let whole = numbers(&[10], 1);
        let sharded = leaf(&whole, &Layout::new(mesh, &[Placement::Shard(0)], &[10], &Sizes::Chunk).unwrap());
        let run = |x: &ShardTensor| ShardTensor::op("test_sorted", &[x], &Attrs::default());
        let replicated = sharded.redistribute(None, &[Placement::Replicate]).unwrap();
        {
            let _guard = forbid_hidden_communication();
            let error = run(&sharded).unwrap_err();
            assert!(matches!(error, Error::HiddenCommunication { bytes: 40, .. }), "{error}");
            insta::allow_duplicates! {
                insta::assert_snapshot!(error, @"test_sorted has no rule for [10] on mesh (a=2): a Shard(0) of [5, 5] and would gather 40 bytes, which is forbidden here; redistribute before it, or register a rule with register_sharding or register_sharded_op");
            }
            // Nothing would be gathered.
            run(&replicated).unwrap();
        }
        let y = run(&sharded).unwrap().remove(0);
        assert!(y.layout().is_replicated());
        assert_eq!(*y.local(), whole.sort(0, false).0);
        let weights = ShardTensor::distribute(&numbers(&[10], 5), mesh, &[Placement::Replicate]).unwrap();
        let gradient = grad(&[&y.mul(&weights).unwrap()], &[&sharded], &[], BackwardOptions::default())
            .unwrap()
            .remove(0);
        let dense = whole.copy().set_requires_grad(true);
        (dense.sort(0, false).0 * weights.local()).sum(Kind::Double).backward();
        assert!(difference(&gradient.unwrap().full_tensor(None).unwrap(), &dense.grad()) < 1e-12);
    });
}

/// Counts warnings, and hears nothing else.
struct Warnings(Arc<AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn the_fallback_warns_once() {
    register_op("test_warned", |inputs, _| Ok(vec![inputs[0].shallow_clone()]));
    let warnings = Arc::new(AtomicUsize::new(0));
    let heard = warnings.clone();
    on_mesh(&[2], move |mesh| {
        tracing::subscriber::with_default(Warnings(heard.clone()), || {
            let x = ShardTensor::distribute(&numbers(&[4], 1), mesh, &[Placement::Shard(0)]).unwrap();
            for _ in 0..3 {
                ShardTensor::op("test_warned", &[&x], &Attrs::default()).unwrap();
            }
        });
    });
    assert_eq!(warnings.load(Ordering::Relaxed), 1);
}

#[test]
fn a_programs_handler_comes_first_then_its_rule() {
    declare_biased("test_order", true);
    on_mesh(&[1], |mesh| {
        let x = ShardTensor::distribute(&numbers(&[4, 2], 1), mesh, &[Placement::Shard(0)]).unwrap();
        let bias = ShardTensor::distribute(&numbers(&[2], 1), mesh, &[Placement::Replicate]).unwrap();
        let run = || ShardTensor::op("test_order", &[&x, &bias], &Attrs::default()).unwrap().remove(0);
        assert_ne!(*run().local(), *x.local());
        assert!(!register_sharded_op("test_order", |inputs, _| Ok(vec![inputs[0].shallow_clone()])));
        assert_eq!(*run().local(), *x.local());
        assert!(register_sharded_op("test_order", |_, _| Err("not today".into())));
        let error = ShardTensor::op("test_order", &[&x, &bias], &Attrs::default()).unwrap_err();
        let layouts = "Double [4, 2] on mesh (a=1): a Shard(0) of [4]; Double [2] on mesh (a=1): a Replicate";
        let told = format!("test_order of {layouts}: operator \"test_order\" failed: not today");
        assert_eq!(error.to_string(), told);
        let unknown = ShardTensor::op("test_nowhere", &[&x], &Attrs::default()).unwrap_err();
        assert!(unknown.to_string().starts_with("unknown operator \"test_nowhere\"; registered are "));
    });
}

/// Unknown tensors and arguments are errors: without them an operator computes something else.
#[test]
fn tensors_and_arguments_that_an_operator_does_not_have_are_refused() {
    on_mesh(&[2], |mesh| {
        let x = ShardTensor::distribute(&numbers(&[4, 3], 1), mesh, &[Placement::Shard(0)]).unwrap();
        let error = |name: &str, inputs: &[&ShardTensor], attrs: Attrs| {
            ShardTensor::op(name, inputs, &attrs).unwrap_err().to_string()
        };
        let text = error("softmax", &[&x], args!("dim": 1, "dims": 0)());
        assert!(text.contains("no argument \"dims\" (given as 0); its arguments are dim"), "{text}");
        let text = error("tanh", &[&x], args!("inplace": true)());
        assert!(text.contains("no argument \"inplace\" (given as true); it has none"), "{text}");
        let text = error("relu", &[&x, &x], Attrs::new());
        assert!(text.contains("2 tensors were given; it takes at most 1: input"), "{text}");
        for (name, inputs, attrs, reason) in [
            ("add", vec![&x, &x], args!("other": 2.0)(), "\"other\" is given as a tensor and as a number"),
            ("relu", vec![&x], args!("inplace": true)(), "\"inplace\" is true; only false is supported"),
            ("fft", vec![&x], args!("n": 4, "s": [4])(), "both \"n\" and \"s\" are given"),
            (
                "topk",
                vec![&x],
                args!("k": 1, "sorted": false)(),
                "\"sorted\" is false; only true is supported",
            ),
        ] {
            let text = error(name, &inputs, attrs);
            assert!(text.contains(reason), "{text}");
        }
        let same = ShardTensor::op("add", &[&x, &x], &args!("alpha": 1.0)()).unwrap().remove(0);
        assert!(difference(&same.full_tensor(None).unwrap(), &(numbers(&[4, 3], 1) * 2.0)) == 0.0);
        // Null is an argument that is not given.
        assert!(ShardTensor::op("tanh", &[&x], &args!("inplace": None::<bool>)()).is_ok());
    });
}

#[test]
fn operators_by_name_take_dense_tensors() {
    let run =
        |name: &str, inputs: &[&Tensor], attrs: Attrs| Tensor::op(name, inputs, &attrs).unwrap().remove(0);
    let (x, weight) = (numbers(&[1, 2, 6, 5], 1).set_requires_grad(true), numbers(&[3, 2, 3, 3], 2));
    let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
    let y = run("conv2d", &[&x, &weight], args!("padding": 1)());
    assert!(difference(&y, &Windowed::conv(&x, &weight, None, &conv).unwrap()) == 0.0);
    y.sum(Kind::Double).backward();
    assert_eq!(x.grad().size(), x.size());
    let x = x.detach();
    assert!(
        difference(&run("softmax", &[&x], args!("dim": -1)()), &<Tensor as Linear>::softmax(&x, -1).unwrap())
            == 0.0
    );
    assert!(difference(&run("mul", &[&x, &x], Attrs::new()), &Elementwise::mul(&x, &x).unwrap()) == 0.0);
    let error = Tensor::op("softmaxx", &[&x], &Attrs::new()).unwrap_err().to_string();
    assert!(error.contains("softmax"), "{error}");
}
