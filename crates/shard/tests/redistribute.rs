//! Redistribution between any two layouts: values, gradients, gradients of gradients.

use isobar_array::Elementwise;
use isobar_collectives::ReduceOp;
use isobar_shard::{CurrentMesh, Layout, Placement, Redistribute, ShardTensor, Sizes, grad};
use isobar_torch::autograd::BackwardOptions;
use rstest::rstest;
use tch::{Kind, Tensor};

use crate::common::{MESHES, difference, layouts, leaf, numbers, on_mesh};

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
            isobar_mesh::DeviceMesh::with_ranks(&group, &[3, 1, 0, 2], &[2, 2], &["x", "y"]).unwrap();
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

#[rstest]
fn begun_now_and_waited_for_later(#[values(1, 2, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let whole = numbers(&[7, 5], 1);
        let all = layouts(mesh, &[7, 5]);
        for (from, to) in all.iter().zip(all.iter().rev()) {
            let x = leaf(&whole, from);
            let pending = x.start_redistribute(None, to.placements(), &Redistribute::default()).unwrap();
            let between = x.mul_scalar(2.0).unwrap();
            let y = pending.wait().unwrap();
            assert_eq!(y.full_tensor(None).unwrap(), whole);
            y.mul(&y).unwrap().sum().unwrap().backward().unwrap();
            assert!(difference(&x.grad().unwrap().full_tensor(None).unwrap(), &(&whole * 2.0)) < 1e-12);
            assert_eq!(between.layout(), from);
        }
        // A partial tensor is reduced, and then moved.
        let part = numbers(&[7, 5], 3);
        let placements = vec![Placement::Partial(ReduceOp::Sum); mesh.ndim()];
        let x = ShardTensor::from_local(&part, Some(mesh), &placements, &Default::default(), None).unwrap();
        let to = vec![Placement::Shard(1); mesh.ndim()];
        let y = x.start_redistribute(None, &to, &Redistribute::default()).unwrap().wait().unwrap();
        let want = &part * mesh.size() as f64;
        assert!(difference(&y.full_tensor(None).unwrap(), &want) < 1e-12);
    });
}

#[test]
fn lower_precision_on_the_wire() {
    on_mesh(&[2], |mesh| {
        let whole = numbers(&[6, 4], 1);
        let layout = Layout::new(mesh, &[Placement::Shard(0)], &[6, 4], &Sizes::Chunk).unwrap();
        let x = leaf(&whole, &layout);
        let options = Redistribute {
            forward_kind: Some(Kind::Float),
            backward_kind: Some(Kind::BFloat16),
            ..Redistribute::default()
        };
        let y = x.redistribute_with(None, &[Placement::Shard(1)], &options).unwrap();
        assert_eq!(y.kind(), Kind::Double);
        let rounded = whole.to_kind(Kind::Float).to_kind(Kind::Double);
        assert_eq!(y.full_tensor(None).unwrap(), rounded);
        y.backward_from(Some(&y.detach()), BackwardOptions::default()).unwrap();
        let back = rounded.to_kind(Kind::BFloat16).to_kind(Kind::Double);
        assert_eq!(x.grad().unwrap().full_tensor(None).unwrap(), back);
    });
}

#[test]
fn the_current_mesh_serves_where_none_is_given() {
    on_mesh(&[2], |mesh| {
        let local = numbers(&[3, 2], 1);
        let shard = |mesh| ShardTensor::from_local(&local, mesh, &[Placement::Shard(0)], &Sizes::Infer, None);
        let error = shard(None).unwrap_err().to_string();
        assert!(error.contains("no mesh was given"), "{error}");
        let _current = CurrentMesh::enter(mesh);
        let x = shard(None).unwrap();
        assert_eq!(x.shape(), [6, 2]);
        assert_eq!(x.redistribute(None, &[Placement::Replicate]).unwrap().local_shape(), [6, 2]);
    });
}

#[test]
fn targets_that_cannot_be_are_refused_on_all_ranks() {
    on_mesh(&[2], |mesh| {
        let x = ShardTensor::distribute(&numbers(&[4, 2], 1), mesh, &[Placement::Shard(0)]).unwrap();
        let partial = x.redistribute(None, &[Placement::Partial(ReduceOp::Sum)]).unwrap_err().to_string();
        assert!(partial.contains("partial"), "{partial}");
        assert!(x.redistribute(None, &[Placement::Shard(2)]).is_err());
        assert!(x.redistribute(None, &[]).is_err());
        // The mesh is as usable as before.
        assert_eq!(x.full_tensor(None).unwrap(), numbers(&[4, 2], 1));
    });
}

#[test]
fn hooks_see_the_gradient_in_the_tensors_layout() {
    on_mesh(&[3], |mesh| {
        let layout = Layout::new(mesh, &[Placement::Shard(0)], &[7], &Sizes::Chunk).unwrap();
        let x = leaf(&numbers(&[7], 1), &layout);
        let y = x.mul_scalar(3.0).unwrap();
        let hook = y.register_hook(|grad| Ok(Some(grad.mul_scalar(2.0)?))).unwrap();
        y.sum().unwrap().backward().unwrap();
        let grad = x.grad().unwrap();
        assert_eq!(
            (grad.layout(), grad.full_tensor(None).unwrap()),
            (&layout, numbers(&[7], 1).ones_like() * 6.0)
        );
        hook.remove();
        assert!(!y.is_leaf() && x.is_leaf());
    });
}

#[test]
fn what_ranks_do_differently_with_a_whole_tensor_is_added_up() {
    on_mesh(&[3], |mesh| {
        let rank = mesh.coordinates().unwrap()[0];
        let layout = Layout::new(mesh, &[Placement::Shard(0)], &[5], &Sizes::Chunk).unwrap();
        let x = leaf(&numbers(&[5], 1), &layout);
        let full = x.full_tensor(Some(&[Placement::Partial(ReduceOp::Sum)])).unwrap();
        (full * (rank as f64 + 1.0)).sum(None).backward();
        assert_eq!(x.grad().unwrap().full_tensor(None).unwrap(), numbers(&[5], 1).ones_like() * 6.0);
        assert!(x.full_tensor(Some(&[Placement::Shard(0)])).is_err());
    });
}
