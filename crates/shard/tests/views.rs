//! Views for people: layouts as pictures, communication as records.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use crate::common::{leaf, numbers, on_mesh};
use isobar_collectives::ReduceOp;
use isobar_shard::{CommTrace, Layout, Placement, Sizes, trace, visualize_sharding};
use tch::Kind;

const R: Placement = Placement::Replicate;

fn s(dim: usize) -> Placement {
    Placement::Shard(dim)
}

/// The picture that rank 0 makes; the others make the same.
fn picture(mesh: &[i64], placements: &[Placement], shape: &[i64], sizes: &Sizes) -> (String, String) {
    let (placements, shape, sizes) = (placements.to_vec(), shape.to_vec(), sizes.clone());
    let mut all = on_mesh(mesh, move |mesh| {
        let view = visualize_sharding(&Layout::new(mesh, &placements, &shape, &sizes).unwrap()).unwrap();
        (view.to_string(), view.svg())
    });
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
    all.remove(0)
}

#[test]
fn lines() {
    let sizes = Sizes::Explicit(vec![(0, vec![5, 0, 2])]);
    insta::assert_snapshot!(picture(&[3], &[s(0)], &[7], &sizes).0, @r"
    [7] on mesh (a=3): a Shard(0) of [5, 0, 2]
    0..5    5..7
    rank 0  rank 2
    nothing: rank 1
    ");
    insta::assert_snapshot!(picture(&[2], &[Placement::Partial(ReduceOp::Sum)], &[7], &Sizes::Chunk).0, @r"
    [7] on mesh (a=2): a Partial(sum)
    0..7
    ranks 0 1
    ");
    insta::assert_snapshot!(picture(&[2, 2], &[s(0), R], &[7], &Sizes::Chunk).0, @r"
    [7] on mesh (a=2, b=2): a Shard(0) of [4, 3], b Replicate
    0..4       4..7
    ranks 0 1  ranks 2 3
    ");
    let strided = [Placement::StridedShard { dim: 0, split_factor: 2 }, s(0)];
    insta::assert_snapshot!(picture(&[2, 2], &strided, &[8], &Sizes::Chunk).0, @r"
    [8] on mesh (a=2, b=2): a StridedShard(0, 2) of [2, 2, 2, 2], b Shard(0) of [2, 2, 2, 2]
    0..2    2..4    4..6    6..8
    rank 0  rank 2  rank 1  rank 3
    ");
    let alone = [Placement::StridedShard { dim: 0, split_factor: 2 }];
    insta::assert_snapshot!(picture(&[2], &alone, &[8], &Sizes::Chunk).0, @r"
    [8] on mesh (a=2): a StridedShard(0, 2) of [4, 4]
    0..2    2..4    4..6    6..8
    rank 0  rank 1  rank 0  rank 1
    ");
    insta::assert_snapshot!(picture(&[2], &[s(0)], &[0], &Sizes::Chunk).0, @r"
    [0] on mesh (a=2): a Shard(0) of [0, 0]
    no elements
    ");
    insta::assert_snapshot!(picture(&[2], &[R], &[], &Sizes::Chunk).0, @r"
    [] on mesh (a=2): a Replicate
    ranks 0 1
    ");
}

#[test]
fn grids_and_slabs() {
    insta::assert_snapshot!(picture(&[2, 2], &[s(0), s(1)], &[7, 5], &Sizes::Chunk).0, @r"
    [7, 5] on mesh (a=2, b=2): a Shard(0) of [4, 3], b Shard(1) of [3, 2]
          0..3    3..5
    0..4  rank 0  rank 1
    4..7  rank 2  rank 3
    ");
    insta::assert_snapshot!(picture(&[3], &[s(1)], &[4, 6], &Sizes::Chunk).0, @r"
    [4, 6] on mesh (a=3): a Shard(1) of [2, 2, 2]
          0..2    2..4    4..6
    0..4  rank 0  rank 1  rank 2
    ");
    insta::assert_snapshot!(picture(&[2, 2], &[s(0), s(2)], &[3, 4, 5], &Sizes::Chunk).0, @r"
    [3, 4, 5] on mesh (a=2, b=2): a Shard(0) of [2, 1], b Shard(2) of [3, 2]
    dim 0: 0..2
          0..3    3..5
    0..4  rank 0  rank 1
    dim 0: 2..3
          0..3    3..5
    0..4  rank 2  rank 3
    ");
}

#[test]
fn images() {
    insta::assert_snapshot!(picture(&[2, 2], &[s(0), R], &[4, 8], &Sizes::Chunk).1, @r#"
    <svg xmlns="http://www.w3.org/2000/svg" width="480" height="228" font-family="sans-serif" font-size="12">
    <text x="24" y="16">[4, 8] on mesh (a=2, b=2): a Shard(0) of [2, 2], b Replicate</text>
    <rect x="24.0" y="44.0" width="320.0" height="80.0" fill="hsl(0, 60%, 75%)" stroke="black"/>
    <text x="184.0" y="84.0" text-anchor="middle" dominant-baseline="middle">0 1</text>
    <rect x="24.0" y="124.0" width="320.0" height="80.0" fill="hsl(274, 60%, 75%)" stroke="black"/>
    <text x="184.0" y="164.0" text-anchor="middle" dominant-baseline="middle">2 3</text>
    </svg>
    "#);
    let slabs = picture(&[2], &[s(0)], &[2, 4, 4], &Sizes::Chunk).1;
    assert_eq!((slabs.matches("<rect").count(), slabs.matches("dim 0: ").count()), (2, 2));
}

#[test]
fn more_dims_are_refused() {
    on_mesh(&[1], |mesh| {
        let layout = Layout::new(mesh, &[s(0)], &[1, 1, 1, 1], &Sizes::Chunk).unwrap();
        let error = visualize_sharding(&layout).unwrap_err();
        insta::assert_snapshot!(error, @"visualize_sharding: [1, 1, 1, 1] on mesh (a=1): a Shard(0) of [1] has 4 dims, of which at most 3 can be shown; show a layout of the dims that are split");
    });
}

#[test]
fn communication_is_counted_under_the_module_that_caused_it() {
    on_mesh(&[2], |mesh| {
        let from = Layout::new(mesh, &[s(0)], &[4, 6], &Sizes::Chunk).unwrap();
        let x = leaf(&numbers(&[4, 6], 1), &from);
        let group = mesh.group("a").unwrap();
        let trace = CommTrace::start(&group);
        let y = {
            let _block = trace::module("block.0");
            x.redistribute(None, &[s(1)]).unwrap()
        };
        let loss = y.to_local(None).unwrap().sum(Kind::Double);
        isobar_torch::autograd::backward(&[&loss], &[], Default::default()).unwrap();
        trace.stop();
        let block = trace.record().of_module("block.0");
        // Each rank is missing half of its target, forward and backward.
        assert_eq!((block.forward().received(), block.backward().received()), (2 * 3 * 8, 2 * 3 * 8));
        assert_eq!((trace.count("fetch"), trace.received()), (2, block.received()));
    });
}
