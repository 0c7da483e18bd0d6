//! Masks, with and without gradients, and dropout.

use isobar_array::{AttentionStrategy, Generator};
use isobar_mesh::DeviceMesh;
use isobar_shard::{AttentionOptions, Layout, ShardTensor, grad};
use isobar_torch::autograd::BackwardOptions;
use rstest::rstest;
use tch::Tensor;

use super::case::{Case, triples};
use crate::common::{MESHES, SPLITS, difference, leaf, numbers, on_mesh, placements};

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
