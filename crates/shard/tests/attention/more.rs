//! Gradients of gradients, golden cases, and where PhysicsNeMo fails.

use isobar_array::AttentionStrategy;
use isobar_shard::{AttentionOptions, Placement, ShardTensor, grad};
use isobar_torch::autograd::BackwardOptions;
use rstest::rstest;
use tch::{Kind, Tensor};

use super::case::{Case, triples};
use crate::common::{MESHES, Split, difference, leaf, numbers, on_mesh};

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
