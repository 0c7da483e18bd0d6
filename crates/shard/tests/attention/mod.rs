//! Attention on every layout equals dense attention: values and gradients.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod case;
mod masks;
mod more;
mod ways;

use case::{Case, triples};
use isobar_array::AttentionStrategy;
use isobar_shard::{AttentionOptions, Placement, ShardTensor, context_parallel};
use isobar_torch::autograd::BackwardOptions;
use rstest::rstest;

use crate::common::{MESHES, SPLITS, Split, difference, leaf, numbers, on_mesh};

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

/// Keys and values of one sample, or one head, for all.
#[rstest]
fn broadcast_keys(#[values(0, 1, 2, 4)] mesh: usize, #[values(0, 1)] which: usize) {
    on_mesh(MESHES[mesh], move |mesh| {
        let key = [[1, 2, 6, 3], [2, 1, 6, 3]][which];
        let case = Case::new(&[2, 2, 5, 3], &key, 3);
        let want = case.dense(None, false, false);
        for layouts in &triples(mesh, &case) {
            case.check(layouts.each_ref(), &AttentionOptions::default(), &want);
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
        assert!(attend(&x, &tensor(&[2, 3, 4, 3]), &plain).contains("expected equal"));
        assert!(attend(&x, &tensor(&[2, 4, 3]), &plain).contains("dims"));
        let both = AttentionOptions { attn_mask: Some(&mask), is_causal: true, ..plain };
        assert!(attend(&x, &x, &both).contains("is_causal"));
        let wide = tensor(&[5, 4]);
        assert!(attend(&x, &x, &AttentionOptions { attn_mask: Some(&wide), ..plain }).contains("broadcast"));
        assert!(attend(&x, &x, &AttentionOptions { dropout_p: 0.5, ..plain }).contains("generator"));
    });
}
