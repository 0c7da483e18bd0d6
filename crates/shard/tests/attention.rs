//! Attention on every layout equals dense attention: values and gradients.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{MESHES, SPLITS, Split, difference, leaf, numbers, on_mesh, placements};
use isobar_manager::DeviceMesh;
use isobar_shard::{
    AttentionOptions, AttentionStrategy, Elementwise, Generator, Layout, Placement, ShardTensor,
    context_parallel, grad,
};
use isobar_torch::autograd::BackwardOptions;
use rstest::rstest;
use tch::{Kind, Tensor};

/// Query, key and value, and the gradient of the result.
struct Case {
    inputs: [Tensor; 3],
    cotangent: Tensor,
}

impl Case {
    fn new(query: &[i64], key: &[i64], out: i64) -> Self {
        let with = |shape: &[i64]| [&shape[..shape.len() - 1], &[out]].concat();
        let inputs = [numbers(query, 1), numbers(key, 2), numbers(&with(key), 3)];
        Self { inputs, cotangent: numbers(&with(query), 4) }
    }

    /// The result and its gradients by libtorch.
    fn dense(&self, mask: Option<&Tensor>, is_causal: bool, gqa: bool) -> (Tensor, Vec<Tensor>) {
        let x: Vec<Tensor> = self.inputs.iter().map(|x| x.detach().copy().set_requires_grad(true)).collect();
        let y = Tensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], mask, 0.0, is_causal, None, gqa);
        (&y * &self.cotangent).sum(None).backward();
        let grads = x.iter().map(Tensor::grad).collect();
        (y.detach(), grads)
    }

    fn check(&self, layouts: [&Layout; 3], options: &AttentionOptions<'_>, want: &(Tensor, Vec<Tensor>)) {
        let x: Vec<ShardTensor> =
            self.inputs.iter().zip(layouts).map(|(whole, layout)| leaf(whole, layout)).collect();
        let what = || format!("{layouts:?} {:?} {:?}", options.strategy, options.balance);
        let y = ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], options);
        let y = y.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(y.local().size(), y.layout().local_shape());
        let error = difference(&y.full_tensor(None).unwrap(), &want.0);
        assert!(error < 1e-9, "{error} of {}", what());
        let g = ShardTensor::distribute_as(&self.cotangent, y.layout()).unwrap();
        let grads = grad(&[&y], &[&x[0], &x[1], &x[2]], &[Some(&g)], BackwardOptions::default()).unwrap();
        for (index, (got, want)) in grads.iter().zip(&want.1).enumerate() {
            let got = got.as_ref().unwrap();
            assert_eq!(got.layout(), layouts[index]);
            let error = difference(&got.full_tensor(None).unwrap(), want);
            assert!(error < 1e-9, "gradient {index} wrong by {error} of {}", what());
        }
    }
}

/// Layouts of query, key and value: each alone, all at once, and mixtures.
fn triples(mesh: &DeviceMesh, case: &Case) -> Vec<[Layout; 3]> {
    let n = case.inputs[0].dim();
    let all = placements(n - 1, mesh.ndim());
    let replicated = vec![Placement::Replicate; mesh.ndim()];
    let mut triples = Vec::new();
    for (index, placed) in all.iter().enumerate() {
        for (number, &split) in SPLITS.iter().enumerate() {
            // Every split with one mixture, so that all meet all over the placements.
            let other = &all[(index * 7 + number * 3) % all.len()];
            let last = SPLITS[(number + 1) % 4];
            let layout = |which: usize, placements: &[Placement], split: Split| {
                split.layout(mesh, placements, &case.inputs[which].size())
            };
            triples.push([layout(0, placed, split), layout(1, placed, split), layout(2, placed, split)]);
            triples.push([layout(0, placed, split), layout(1, other, last), layout(2, placed, last)]);
            match (index + number) % 3 {
                0 => triples.push([
                    layout(0, placed, split),
                    layout(1, &replicated, split),
                    layout(2, &replicated, split),
                ]),
                1 => triples.push([
                    layout(0, &replicated, split),
                    layout(1, placed, split),
                    layout(2, placed, split),
                ]),
                _ => triples.push([
                    layout(0, other, split),
                    layout(1, placed, last),
                    layout(2, &replicated, split),
                ]),
            }
        }
    }
    triples
}

#[rstest]
fn equals_dense(#[values(0, 1, 2, 3, 4)] mesh: usize, #[values(false, true)] causal: bool) {
    on_mesh(MESHES[mesh], move |mesh| {
        tch::set_num_threads(1);
        for (query, key, out) in [([2, 4, 7, 3], [2, 4, 9, 3], 3), ([1, 3, 9, 2], [1, 3, 5, 2], 4)] {
            let case = Case::new(&query, &key, out);
            let want = case.dense(None, causal, false);
            for (index, layouts) in triples(mesh, &case).iter().enumerate() {
                let options = AttentionOptions {
                    is_causal: causal,
                    strategy: [AttentionStrategy::Auto, AttentionStrategy::Ring][index % 2],
                    balance: [None, Some(true)][index / 2 % 2],
                    ..Default::default()
                };
                case.check(layouts.each_ref(), &options, &want);
            }
        }
    });
}

#[test]
fn over_heads() {
    on_mesh(&[3], |mesh| {
        for (query, key, gqa) in [([1, 6, 7, 3], [1, 3, 9, 3], true), ([2, 4, 7, 3], [2, 4, 9, 3], false)] {
            let case = Case::new(&query, &key, 3);
            for causal in [false, true] {
                let want = case.dense(None, causal, gqa);
                for split in SPLITS {
                    let layout =
                        |which: usize| split.layout(mesh, &[Placement::Shard(2)], &case.inputs[which].size());
                    let options = AttentionOptions {
                        is_causal: causal,
                        enable_gqa: gqa,
                        strategy: AttentionStrategy::AllToAll,
                        ..Default::default()
                    };
                    case.check([&layout(0), &layout(1), &layout(2)], &options, &want);
                }
            }
        }
        let x = leaf(
            &numbers(&[2, 2, 6, 3], 1),
            &Split::Chunk.layout(mesh, &[Placement::Shard(2)], &[2, 2, 6, 3]),
        );
        let options = AttentionOptions { strategy: AttentionStrategy::AllToAll, ..Default::default() };
        let error = ShardTensor::scaled_dot_product_attention(&x, &x, &x, &options).unwrap_err();
        assert!(error.to_string().contains("2 over 3 ranks"), "{error}");
    });
}

#[rstest]
fn grouped_queries(#[values(1, 2, 4)] mesh: usize, #[values(false, true)] causal: bool) {
    on_mesh(MESHES[mesh], move |mesh| {
        let case = Case::new(&[2, 6, 7, 3], &[2, 2, 9, 3], 3);
        let want = case.dense(None, causal, true);
        for layouts in &triples(mesh, &case) {
            let options = AttentionOptions { is_causal: causal, enable_gqa: true, ..Default::default() };
            case.check(layouts.each_ref(), &options, &want);
        }
    });
}

#[rstest]
fn masks(#[values(0, 1, 2, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let case = Case::new(&[2, 4, 6, 3], &[2, 4, 5, 3], 3);
        let seen = numbers(&[6, 5], 9).gt(-0.6);
        // A query that sees no key: zeros, no NaN.
        let _ = seen.get(2).fill_(0);
        let want = case.dense(Some(&seen), false, false);
        assert_eq!(want.0.narrow(2, 2, 1).abs().max().double_value(&[]), 0.0);
        for (index, layouts) in triples(mesh, &case).iter().enumerate().step_by(3) {
            for placed in placements(2, mesh.ndim()) {
                let layout = SPLITS[index % 4].layout(mesh, &placed, &[6, 5]);
                let mask = ShardTensor::distribute_as(&seen, &layout).unwrap();
                let options = AttentionOptions {
                    attn_mask: Some(&mask),
                    strategy: [AttentionStrategy::Auto, AttentionStrategy::Ring][index % 2],
                    ..Default::default()
                };
                case.check(layouts.each_ref(), &options, &want);
            }
        }
    });
}

#[rstest]
fn gradients_of_masks(#[values(0, 1, 2, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let case = Case::new(&[2, 4, 6, 3], &[2, 4, 5, 3], 3);
        for shape in [&[2, 4, 6, 5][..], &[4, 1, 5], &[6, 1], &[5], &[2, 1, 1, 1]] {
            let added = numbers(shape, 8).set_requires_grad(true);
            let want = case.dense(Some(&added), false, false);
            let by_mask = added.grad();
            let every = if shape.len() == 4 { 7 } else { 11 };
            for (index, layouts) in triples(mesh, &case).iter().enumerate().step_by(every) {
                let all = placements(shape.len(), mesh.ndim());
                let layout = SPLITS[index % 4].layout(mesh, &all[index % all.len()], shape);
                let mask = leaf(&added.detach(), &layout);
                let options = AttentionOptions {
                    attn_mask: Some(&mask),
                    strategy: [AttentionStrategy::Auto, AttentionStrategy::Ring][index % 2],
                    ..Default::default()
                };
                case.check(layouts.each_ref(), &options, &want);
                let x: Vec<ShardTensor> =
                    case.inputs.iter().zip(layouts).map(|(whole, layout)| leaf(whole, layout)).collect();
                let y = ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], &options).unwrap();
                let g = ShardTensor::distribute_as(&case.cotangent, y.layout()).unwrap();
                let got = grad(&[&y], &[&mask], &[Some(&g)], BackwardOptions::default()).unwrap();
                let got = got[0].as_ref().unwrap();
                assert_eq!(got.layout(), &layout);
                let error = difference(&got.full_tensor(None).unwrap(), &by_mask);
                assert!(error < 1e-9, "{error}: {shape:?} as {layout}, {layouts:?}");
            }
        }
    });
}

#[test]
fn few_queries_stay_on_every_rank() {
    on_mesh(&[3], |mesh| {
        let case = Case::new(&[1, 2, 2, 4], &[1, 2, 60, 4], 4);
        let want = case.dense(None, false, false);
        for placed in [Placement::Replicate, Placement::Shard(2)] {
            for split in SPLITS {
                let layout = |which: usize, placed| split.layout(mesh, &[placed], &case.inputs[which].size());
                let keys = Placement::Shard(2);
                let group = mesh.group("a").unwrap();
                let layouts = [layout(0, placed), layout(1, keys), layout(2, keys)];
                case.check(layouts.each_ref(), &AttentionOptions::default(), &want);
                for shape in [&[2, 2, 60][..], &[60], &[2, 1]] {
                    let added = numbers(shape, 8).set_requires_grad(true);
                    let want = case.dense(Some(&added), false, false);
                    for placed in placements(shape.len(), 1) {
                        let mask = leaf(&added.detach(), &split.layout(mesh, &placed, shape));
                        let options = AttentionOptions { attn_mask: Some(&mask), ..Default::default() };
                        case.check(layouts.each_ref(), &options, &want);
                        let x: Vec<ShardTensor> = case
                            .inputs
                            .iter()
                            .zip(&layouts)
                            .map(|(whole, layout)| leaf(whole, layout))
                            .collect();
                        let y =
                            ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], &options).unwrap();
                        let g = ShardTensor::distribute_as(&case.cotangent, y.layout()).unwrap();
                        y.backward_from(Some(&g), BackwardOptions::default()).unwrap();
                        let got = mask.grad().unwrap().full_tensor(None).unwrap();
                        assert!(difference(&got, &added.grad()) < 1e-9, "{shape:?} as {placed:?}");
                    }
                }
                let x: Vec<ShardTensor> =
                    case.inputs.iter().zip(&layouts).map(|(whole, layout)| leaf(whole, layout)).collect();
                let before = group.traffic().received;
                ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], &AttentionOptions::default())
                    .unwrap();
                // Much less than the keys and values of 2 · 2 · 60 · 4 numbers.
                assert!(group.traffic().received - before < 2 * 60 * 4 * 8);
            }
        }
    });
}

#[rstest]
#[case(3, &[5, 8, 4], &[5, 6, 4])]
#[case(2, &[8, 4], &[6, 4])]
#[case(5, &[2, 2, 2, 8, 4], &[2, 2, 2, 6, 4])]
fn other_numbers_of_dims(#[case] _dims: usize, #[case] query: &'static [i64], #[case] key: &'static [i64]) {
    on_mesh(&[2], move |mesh| {
        let case = Case::new(query, key, 4);
        let want = case.dense(None, false, false);
        for layouts in &triples(mesh, &case) {
            case.check(layouts.each_ref(), &AttentionOptions::default(), &want);
        }
        let n = query.len();
        let added = numbers(&[&query[..n - 1], &key[n - 2..n - 1]].concat(), 8);
        let want = case.dense(Some(&added), false, false);
        for layouts in &triples(mesh, &case) {
            let layout = Split::Chunk.layout(mesh, &[Placement::Replicate], &added.size());
            let mask = leaf(&added, &layout);
            let options = AttentionOptions { attn_mask: Some(&mask), ..Default::default() };
            case.check(layouts.each_ref(), &options, &want);
        }
    });
}

#[test]
fn features_split() {
    on_mesh(&[2], |mesh| {
        let case = Case::new(&[1, 2, 5, 6], &[1, 2, 7, 6], 4);
        let want = case.dense(None, false, false);
        let layout =
            |which: usize| Split::Uneven.layout(mesh, &[Placement::Shard(3)], &case.inputs[which].size());
        case.check([&layout(0), &layout(1), &layout(2)], &AttentionOptions::default(), &want);
    });
}

/// Dropout leaves out the same weights on every layout: values and gradients equal those of one rank.
#[test]
fn dropout_does_not_depend_on_the_layout() {
    fn run(mesh: &DeviceMesh, case: &Case, layouts: &[Layout; 3], strategy: AttentionStrategy) -> Vec<f64> {
        let x: Vec<ShardTensor> =
            case.inputs.iter().zip(layouts).map(|(whole, layout)| leaf(whole, layout)).collect();
        let generator = Generator::new(5);
        let options = AttentionOptions {
            dropout_p: 0.4,
            generator: Some(&generator),
            strategy,
            balance: Some(mesh.size() == 3),
            is_causal: true,
            ..Default::default()
        };
        let y = ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], &options).unwrap();
        assert_eq!(generator.draws(), 1);
        let g = ShardTensor::distribute_as(&case.cotangent, y.layout()).unwrap();
        let grads = grad(&[&y], &[&x[0], &x[1], &x[2]], &[Some(&g)], BackwardOptions::default()).unwrap();
        let parts = std::iter::once(y).chain(grads.into_iter().flatten());
        let flat = |part: ShardTensor| part.full_tensor(None).unwrap().flatten(0, -1);
        Vec::try_from(Tensor::cat(&parts.map(flat).collect::<Vec<_>>(), 0)).unwrap()
    }
    let case = || Case::new(&[2, 4, 6, 3], &[2, 4, 9, 3], 3);
    let single = on_mesh(&[1], move |mesh| {
        let case = case();
        let layouts = triples(mesh, &case).remove(0);
        run(mesh, &case, &layouts, AttentionStrategy::Auto)
    });
    let want = single.into_iter().next().unwrap();
    let case = Case::new(&[2, 4, 6, 3], &[2, 4, 9, 3], 3);
    let (plain, _) = case.dense(None, true, false);
    let output = Tensor::from_slice(&want).narrow(0, 0, plain.numel() as i64).reshape_as(&plain);
    assert!(difference(&output, &plain) > 0.1, "something is dropped");
    for shape in [&[2][..], &[3], &[2, 2]] {
        let want = want.clone();
        on_mesh(shape, move |mesh| {
            let case = Case::new(&[2, 4, 6, 3], &[2, 4, 9, 3], 3);
            for (index, layouts) in triples(mesh, &case).iter().enumerate() {
                let strategy = [AttentionStrategy::Auto, AttentionStrategy::Ring][index % 2];
                let got = Tensor::from_slice(&run(mesh, &case, layouts, strategy));
                assert!(difference(&got, &Tensor::from_slice(&want)) < 1e-9, "{layouts:?}");
            }
        });
    }
}

/// d²/dx² of a sum of powers of the result, against libtorch's dense operator.
#[rstest]
fn gradients_of_gradients(#[values(0, 1, 2, 4)] mesh: usize, #[values(false, true)] causal: bool) {
    on_mesh(MESHES[mesh], move |mesh| {
        let case = Case::new(&[2, 2, 5, 3], &[2, 2, 5, 3], 3);
        let dense: Vec<Tensor> = case.inputs.iter().map(|x| x.copy().set_requires_grad(true)).collect();
        let scores = dense[0].matmul(&dense[1].transpose(-2, -1)) / 3_f64.sqrt();
        let scores = match causal {
            true => {
                let hidden = Tensor::ones([5, 5], (Kind::Bool, tch::Device::Cpu)).triu(1);
                scores.masked_fill(&hidden, f64::NEG_INFINITY)
            }
            false => scores,
        };
        let y = scores.softmax(-1, Kind::Double).matmul(&dense[2]);
        let first = Tensor::run_backward(&[(&y * &y * &case.cotangent).sum(None)], &dense, true, true);
        let penalty: Tensor = first.iter().map(|g| (g * g).sum(None)).sum();
        let want = Tensor::run_backward(&[penalty], &dense, false, false);
        for layouts in triples(mesh, &case).iter().step_by(3) {
            let x: Vec<ShardTensor> =
                case.inputs.iter().zip(layouts).map(|(whole, layout)| leaf(whole, layout)).collect();
            let options = AttentionOptions {
                is_causal: causal,
                strategy: AttentionStrategy::Ring,
                balance: Some(true),
                ..Default::default()
            };
            let y = ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], &options).unwrap();
            let g = ShardTensor::distribute_as(&case.cotangent, y.layout()).unwrap();
            let leaves = [&x[0], &x[1], &x[2]];
            let create = BackwardOptions { create_graph: true, ..Default::default() };
            let square = y.mul(&y).unwrap();
            let first = grad(&[&square], &leaves, &[Some(&g)], create).unwrap();
            let first: Vec<ShardTensor> = first.into_iter().flatten().collect();
            let squares: Vec<ShardTensor> = first.iter().map(|g| g.mul(g).unwrap()).collect();
            let outputs: Vec<&ShardTensor> = squares.iter().collect();
            let second = grad(&outputs, &leaves, &[], BackwardOptions::default()).unwrap();
            for (got, want) in second.iter().zip(&want) {
                let error = difference(&got.as_ref().unwrap().full_tensor(None).unwrap(), want);
                assert!(error < 1e-8, "{error} of {layouts:?}");
            }
        }
    });
}

/// A rank receives the keys and values once, and in backward their gradients once more.
#[rstest]
fn traffic(#[values(2, 3, 4)] ranks: i64, #[values(false, true)] causal: bool) {
    on_mesh(&[ranks], move |mesh| {
        let shape = [1, 2, 24, 4];
        let layout = Split::Balanced.layout(mesh, &[Placement::Shard(2)], &shape);
        let x: Vec<ShardTensor> = (0..3).map(|seed| leaf(&numbers(&shape, seed), &layout)).collect();
        let options = AttentionOptions {
            strategy: AttentionStrategy::Ring,
            is_causal: causal,
            balance: Some(causal),
            ..Default::default()
        };
        let group = mesh.group("a").unwrap();
        let both = 2 * 8 * shape.iter().product::<i64>() as u64;
        let start = group.traffic().received;
        let y = ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], &options).unwrap();
        let forward = group.traffic().received - start;
        assert!(forward <= both, "{forward} > {both}");
        let g = ShardTensor::distribute_as(&numbers(&shape, 7), y.layout()).unwrap();
        let start = group.traffic().received;
        y.backward_from(Some(&g), BackwardOptions::default()).unwrap();
        let backward = group.traffic().received - start;
        assert!(backward <= 2 * both, "{backward} > {}", 2 * both);
    });
}

/// The public golden cases on every layout.
#[rstest]
fn golden(#[values("sdpa", "sdpa_causal")] name: &'static str, #[values(0, 1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], move |mesh| {
        let file = format!("{}/../../tests/golden/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        let stored = isobar_shard::read_safetensors(file).unwrap();
        let of = |name: &str| stored[name].copy();
        let case = Case { inputs: ["query", "key", "value"].map(of), cotangent: of("grad.output") };
        let want = (of("output"), ["grad.query", "grad.key", "grad.value"].map(of).into_iter().collect());
        for layouts in triples(mesh, &case).iter().step_by(2) {
            let options = AttentionOptions { is_causal: name.ends_with("causal"), ..Default::default() };
            case.check(layouts.each_ref(), &options, &want);
        }
    });
}

/// PhysicsNeMo's ring takes equal shards only, of lengths that are multiples of 32, returns fp32 for bf16, and takes the
/// logarithm of |output|, so that exact zeros become NaN.
mod where_physicsnemo_fails {
    use super::*;

    #[test]
    fn odd_lengths_exact_zeros_and_half_precision() {
        on_mesh(&[3], |mesh| {
            for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
                let shape = [1, 2, 77, 8];
                let mut whole: Vec<Tensor> = (0..3).map(|seed| numbers(&shape, seed).to_kind(kind)).collect();
                whole[2] = whole[2].zeros_like();
                let layouts = [Split::Uneven, Split::Empty, Split::Chunk]
                    .map(|split| split.layout(mesh, &[Placement::Shard(2)], &shape));
                let options = AttentionOptions { strategy: AttentionStrategy::Ring, ..Default::default() };
                let attend = |whole: &[Tensor]| {
                    let x: Vec<ShardTensor> =
                        whole.iter().zip(&layouts).map(|(x, layout)| leaf(x, layout)).collect();
                    let y = ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], &options).unwrap();
                    assert_eq!(y.kind(), kind);
                    y.backward_from(None, BackwardOptions::default()).unwrap();
                    let grads: Vec<Tensor> =
                        x.iter().map(|x| x.grad().unwrap().full_tensor(None).unwrap()).collect();
                    (y.full_tensor(None).unwrap(), grads)
                };
                let (y, grads) = attend(&whole);
                assert_eq!(y.abs().max().double_value(&[]), 0.0);
                assert!(grads.iter().all(|g| g.isfinite().all().int64_value(&[]) == 1 && g.kind() == kind));

                whole[2] = numbers(&shape, 2).to_kind(kind);
                let (y, _) = attend(&whole);
                let wide: Vec<Tensor> = whole.iter().map(|x| x.to_kind(Kind::Double)).collect();
                let dense = |x: &[Tensor]| {
                    Tensor::scaled_dot_product_attention(
                        &x[0],
                        &x[1],
                        &x[2],
                        None::<Tensor>,
                        0.0,
                        false,
                        None,
                        false,
                    )
                };
                let exact = dense(&wide);
                let (own, theirs) = (difference(&y, &exact), difference(&dense(&whole), &exact));
                assert!(own <= 2.0 * theirs + 1e-6, "{kind:?}: {own}, libtorch's own {theirs}");
            }
        });
    }
}

#[test]
fn context_parallel_gives_back_what_it_took() {
    on_mesh(&[2, 2], |mesh| {
        let case = Case::new(&[2, 2, 8, 3], &[2, 2, 8, 3], 3);
        let want = case.dense(None, true, false);
        for placed in
            [[Placement::Shard(0), Placement::Replicate], [Placement::Shard(1), Placement::Shard(2)]]
        {
            let layout = Split::Chunk.layout(mesh, &placed, &[2, 2, 8, 3]);
            let x: Vec<ShardTensor> = case.inputs.iter().map(|whole| leaf(whole, &layout)).collect();
            let inside = |x: &[ShardTensor]| {
                assert_eq!(x[0].placements(), [placed[0], Placement::Shard(2)]);
                let options = AttentionOptions { is_causal: true, ..Default::default() };
                Ok(vec![ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], &options)?])
            };
            let y = context_parallel("b", &[&x[0], &x[1], &x[2]], &[2, 2, -2], inside).unwrap().remove(0);
            assert_eq!(y.layout(), &layout);
            assert!(difference(&y.full_tensor(None).unwrap(), &want.0) < 1e-9);
            let g = ShardTensor::distribute_as(&case.cotangent, &layout).unwrap();
            y.backward_from(Some(&g), BackwardOptions::default()).unwrap();
            for (x, want) in x.iter().zip(&want.1) {
                assert!(difference(&x.grad().unwrap().full_tensor(None).unwrap(), want) < 1e-9);
            }
            assert!(context_parallel("c", &[&x[0]], &[2], |x| Ok(vec![x[0].shallow_clone()])).is_err());
        }
    });
}

#[test]
fn wrong_arguments_are_errors() {
    on_mesh(&[2], |mesh| {
        let tensor = |shape: &[i64]| {
            leaf(&numbers(shape, 1), &Split::Chunk.layout(mesh, &[Placement::Shard(0)], shape))
        };
        let x = tensor(&[2, 2, 4, 3]);
        let mask = tensor(&[4, 4]);
        let attend = |q: &ShardTensor, k: &ShardTensor, options: &AttentionOptions<'_>| {
            ShardTensor::scaled_dot_product_attention(q, k, k, options).unwrap_err().to_string()
        };
        let plain = AttentionOptions::default();
        assert!(attend(&x, &tensor(&[2, 2, 4, 5]), &plain).contains("features"));
        assert!(attend(&x, &tensor(&[2, 1, 4, 3]), &plain).contains("expected equal"));
        assert!(attend(&x, &tensor(&[2, 4, 3]), &plain).contains("dims"));
        let both = AttentionOptions { attn_mask: Some(&mask), is_causal: true, ..plain };
        assert!(attend(&x, &x, &both).contains("is_causal"));
        let wide = tensor(&[5, 4]);
        assert!(attend(&x, &x, &AttentionOptions { attn_mask: Some(&wide), ..plain }).contains("broadcast"));
        assert!(attend(&x, &x, &AttentionOptions { dropout_p: 0.5, ..plain }).contains("generator"));
    });
}

/// Seconds that this thread has been on a processor, which other programs do not lengthen as they do time by the clock.
fn busy() -> f64 {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    told.split(' ').next().unwrap().parse::<f64>().unwrap() * 1e-9
}

/// Times of one step, forward and backward, on one rank and on two; run by hand with `--ignored --nocapture`.
#[rstest]
#[ignore = "measures; the machine must be idle"]
fn speed(#[values(4096, 16384)] length: i64, #[values(false, true)] causal: bool) {
    let time = |ranks: i64| {
        let times = on_mesh(&[ranks], move |mesh| {
            tch::set_num_threads(1);
            let shape = [1, 8, length, 64];
            let layout = Split::Chunk.layout(mesh, &[Placement::Shard(2)], &shape);
            let x: Vec<ShardTensor> =
                (0..3).map(|seed| leaf(&numbers(&shape, seed).to_kind(Kind::Float), &layout)).collect();
            let options = AttentionOptions { is_causal: causal, ..Default::default() };
            let step = || {
                let (start, used) = (std::time::Instant::now(), busy());
                let y = ShardTensor::scaled_dot_product_attention(&x[0], &x[1], &x[2], &options).unwrap();
                y.backward_from(Some(&x[0].detach()), BackwardOptions::default()).unwrap();
                [start.elapsed().as_secs_f64(), busy() - used]
            };
            step();
            let steps = (0..if length > 5000 { 1 } else { 5 }).map(|_| step());
            steps.fold([f64::MAX; 2], |best, now| [best[0].min(now[0]), best[1].min(now[1])])
        });
        times
            .into_iter()
            .fold([0.0; 2], |worst, rank| [f64::max(worst[0], rank[0]), f64::max(worst[1], rank[1])])
    };
    let (one, two) = (time(1), time(2));
    let say = |what: &str, index: usize| {
        let (one, two) = (one[index], two[index]);
        format!("{one:.3} s and on two ranks {two:.3} s {what}, ratio {:.3}", two / one)
    };
    eprintln!("{length}, causal {causal}: {}; {}", say("by the clock", 0), say("busy", 1));
}
