//! Redistribution between any two layouts: values, gradients, gradients of gradients.

mod common;

use common::{MESHES, difference, layouts, leaf, numbers, on_mesh};
use isobar_collectives::ReduceOp;
use isobar_shard::{Elementwise, Placement, ShardTensor, grad};
use isobar_torch::autograd::BackwardOptions;
use rstest::rstest;
use tch::Tensor;

#[rstest]
fn any_to_any(#[values(0, 1, 2, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let shape = [7, 5];
        let (whole, cotangent) = (numbers(&shape, 1), numbers(&shape, 2));
        let all = layouts(mesh, &shape);
        // Every pair on few ranks, a thinned set on more.
        let step = if mesh.size() > 3 { 5 } else { 2 };
        for (i, from) in all.iter().enumerate() {
            for to in all.iter().skip(i % step).step_by(step) {
                let x = leaf(&whole, from);
                let y = x.to_layout(to).unwrap();
                assert_eq!(y.local().size(), to.local_shape());
                assert_eq!(y.full_tensor(None).unwrap(), whole, "{from} to {to}");
                let g = ShardTensor::distribute_as(&cotangent, to).unwrap();
                let gx =
                    grad(&[&y], &[&x], &[Some(&g)], BackwardOptions::default()).unwrap().remove(0).unwrap();
                assert_eq!(gx.layout(), from);
                assert_eq!(gx.full_tensor(None).unwrap(), cotangent, "back of {from} to {to}");
            }
        }
    });
}

#[rstest]
fn gradients_of_gradients(#[values(1, 3, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let shape = [4, 3];
        let whole = numbers(&shape, 1);
        let all = layouts(mesh, &shape);
        let options = BackwardOptions { create_graph: true, ..Default::default() };
        for (from, to) in all.iter().zip(all.iter().rev()) {
            let x = leaf(&whole, from);
            // y = x³ on the other layout; dy/dx = 3x², d²y/dx² = 6x
            let moved = x.to_layout(to).unwrap();
            let y = moved.mul(&moved).unwrap().mul(&moved).unwrap();
            let first = grad(&[&y], &[&x], &[], options).unwrap().remove(0).unwrap();
            assert!(difference(&first.full_tensor(None).unwrap(), &(&whole * &whole * 3.0)) < 1e-12);
            let second = grad(&[&first], &[&x], &[], BackwardOptions::default()).unwrap().remove(0).unwrap();
            assert!(difference(&second.full_tensor(None).unwrap(), &(&whole * 6.0)) < 1e-12, "{from} {to}");
        }
    });
}

#[rstest]
#[case(ReduceOp::Sum)]
#[case(ReduceOp::Avg)]
#[case(ReduceOp::Product)]
#[case(ReduceOp::Min)]
#[case(ReduceOp::Max)]
fn partial(#[case] op: ReduceOp) {
    on_mesh(&[3], move |mesh| {
        let shape = [4, 5];
        let part = |rank: usize| numbers(&shape, rank as i64 + 7);
        let rank = mesh.coordinates().unwrap()[0];
        let parts: Vec<Tensor> = (0..3).map(|r| part(r).set_requires_grad(true)).collect();
        let stacked = Tensor::stack(&parts, 0);
        let dense = match op {
            ReduceOp::Sum => stacked.sum_dim_intlist(0, false, None),
            ReduceOp::Avg => stacked.mean_dim(0, false, None),
            ReduceOp::Product => stacked.prod_dim_int(0, false, None),
            ReduceOp::Min => stacked.amin(0, false),
            ReduceOp::Max => stacked.amax(0, false),
        };
        let cotangent = numbers(&shape, 99);
        dense.backward_with(&cotangent);
        for to in layouts(mesh, &shape) {
            let local = part(rank).set_requires_grad(true);
            let x = ShardTensor::from_local(
                &local,
                Some(mesh),
                &[Placement::Partial(op)],
                &Default::default(),
                None,
            )
            .unwrap();
            let y = x.to_layout(&to).unwrap();
            assert!(difference(&y.full_tensor(None).unwrap(), &dense) < 1e-12);
            let g = ShardTensor::distribute_as(&cotangent, &to).unwrap();
            y.backward_from(Some(&g), BackwardOptions::default()).unwrap();
            assert!(difference(&local.grad(), &parts[rank].grad()) < 1e-12, "{op:?} to {to}");
        }
    });
}

trait BackwardWith {
    fn backward_with(&self, cotangent: &Tensor);
}

impl BackwardWith for Tensor {
    fn backward_with(&self, cotangent: &Tensor) {
        (self * cotangent).sum(None).backward();
    }
}

#[test]
fn strided_shards() {
    on_mesh(&[2, 2], |mesh| {
        for extent in [8, 9, 5, 3] {
            let whole = numbers(&[extent, 2], 3);
            let strided = [Placement::StridedShard { dim: 0, split_factor: 2 }, Placement::Shard(0)];
            let x = ShardTensor::distribute(&whole, mesh, &strided).unwrap();
            assert_eq!(x.full_tensor(None).unwrap(), whole);
            let back = x.redistribute(None, &[Placement::Shard(1), Placement::Shard(0)]).unwrap();
            assert_eq!(back.full_tensor(None).unwrap(), whole);
        }
        // As DTensor: ranks (i, j) hold quarter 2 j + i.
        let x = ShardTensor::distribute(
            &numbers(&[8], 0),
            mesh,
            &[Placement::StridedShard { dim: 0, split_factor: 2 }, Placement::Shard(0)],
        )
        .unwrap();
        let at = mesh.coordinates().unwrap();
        assert_eq!(x.layout().intervals()[0][0].start, 2 * (2 * at[1] + at[0]) as i64);
    });
}

#[test]
fn to_another_mesh_of_the_same_ranks() {
    on_mesh(&[4], |line| {
        let group = line.group("a").unwrap();
        let square =
            isobar_manager::DeviceMesh::with_ranks(&group, &[3, 1, 0, 2], &[2, 2], &["x", "y"]).unwrap();
        let whole = numbers(&[7, 6], 5);
        for from in layouts(line, &[7, 6]).iter().step_by(2) {
            for to in layouts(&square, &[7, 6]).iter().step_by(7) {
                let x = leaf(&whole, from);
                let y = x.to_layout(to).unwrap();
                assert_eq!(y.full_tensor(None).unwrap(), whole);
                let g = ShardTensor::distribute_as(&whole, to).unwrap();
                let gx =
                    grad(&[&y], &[&x], &[Some(&g)], BackwardOptions::default()).unwrap().remove(0).unwrap();
                assert_eq!(gx.full_tensor(None).unwrap(), whole);
            }
        }
    });
}
