//! The way of few queries, and what travels.

use isobar_array::AttentionStrategy;
use isobar_shard::{AttentionOptions, Placement, ShardTensor};
use isobar_torch::autograd::BackwardOptions;
use rstest::rstest;

use super::case::Case;
use crate::common::{SPLITS, Split, difference, leaf, numbers, on_mesh, placements};

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
