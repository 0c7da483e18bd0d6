//! Traffic of operators: each receives the data that it needs, and nothing else.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::{Conv, Elementwise, Interpolation, PadMode, Padding, Pool, Resize, Statistic};
use isobar_collectives::trace::CommTrace;
use isobar_mesh::DeviceMesh;
use isobar_shard::{Layout, Placement, ShardTensor, Sizes};
use tch::Tensor;

use crate::common::{difference, leaf, numbers, on_mesh};

fn sharded(mesh: &DeviceMesh, shape: &[i64], dim: usize) -> ShardTensor {
    let layout = Layout::new(mesh, &[Placement::Shard(dim)], shape, &Sizes::Chunk).unwrap();
    leaf(&numbers(shape, 1), &layout)
}

fn trace(mesh: &DeviceMesh, run: impl FnOnce()) -> CommTrace {
    let trace = CommTrace::start(&mesh.group("a").unwrap());
    run();
    trace.stop();
    trace
}

#[test]
fn a_convolution_exchanges_two_rows_of_each_inner_rank() {
    on_mesh(&[4], |mesh| {
        let x = sharded(mesh, &[2, 3, 16, 10], 2);
        let weight =
            ShardTensor::distribute(&numbers(&[4, 3, 3, 3], 2), mesh, &[Placement::Replicate]).unwrap();
        let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
        let row = 2 * 3 * 10 * 8;
        let inner = (1..3).contains(&mesh.coordinates().unwrap()[0]);
        let seen = trace(mesh, || {
            x.conv(&weight, None, &conv).unwrap();
        });
        assert_eq!(seen.received(), if inner { 2 * row } else { row });
        assert_eq!(seen.sent(), if inner { 2 * row } else { row });
        assert_eq!((seen.count("fetch"), seen.record().len()), (1, 1));
        // Backward, the rows' gradients come back: nothing else, as the weight requires none.
        let y = x.conv(&weight, None, &conv).unwrap();
        let seen = trace(mesh, || {
            y.backward_from(None, Default::default()).unwrap();
        });
        assert_eq!(seen.received(), if inner { 2 * row } else { row });
        assert_eq!((seen.count("accumulate"), seen.record().len()), (1, 1));
    });
}

#[test]
fn selection_never_moves_the_whole() {
    on_mesh(&[4], |mesh| {
        let x = sharded(mesh, &[40, 6], 0);
        let row = 6 * 8;
        let seen = trace(mesh, || {
            let part = x.slice(0, Some(3), Some(38), 2).unwrap();
            ShardTensor::cat(&[&x, &part, &x], 0).unwrap();
            x.split(&[13, 27], 0).unwrap();
            ShardTensor::stack(&[&x, &x], 1).unwrap();
            x.reshape(&[4, 10, 6]).unwrap();
        });
        assert_eq!(seen.record().len(), 0, "{}", seen.record());
        // One row to all; its owner receives nothing.
        let seen = trace(mesh, || {
            x.select(0, 17).unwrap();
        });
        let owner = mesh.coordinates().unwrap()[0] == 1;
        assert_eq!(seen.received(), if owner { 0 } else { row });
        // The rows that are asked for; the asking is counted apart.
        let index =
            ShardTensor::distribute(&Tensor::from_slice(&[39_i64, 0, 21, 8]), mesh, &[Placement::Shard(0)]);
        let index = index.unwrap();
        let seen = trace(mesh, || {
            x.index_select(0, &index).unwrap();
        });
        assert!(seen.record().of_operation("indexed_all_to_all_v").received() <= row, "{}", seen.record());
    });
}

#[test]
fn scatter_sends_each_element_once() {
    on_mesh(&[4], |mesh| {
        let full = numbers(&[10, 6], 1);
        let source = mesh.coordinates().unwrap()[0] == 2;
        let seen = trace(mesh, || {
            let whole = source.then_some(&full);
            let x =
                ShardTensor::scatter(whole, 2, mesh, &[Placement::Shard(0)], &Sizes::Chunk, false).unwrap();
            assert_eq!(x.local().size(), x.local_shape());
        });
        let moved = seen.record().of_operation("fetch");
        // Chunks of 3, 3, 3 and 1; the source keeps its own.
        let rows = [3, 3, 0, 1][mesh.coordinates().unwrap()[0]];
        assert_eq!(moved.received(), rows * 6 * 8);
        assert_eq!(moved.sent(), if source { 7 * 6 * 8 } else { 0 });
    });
}

#[test]
fn backward_is_counted_under_the_module_that_ran_forward() {
    on_mesh(&[2], |mesh| {
        let x = sharded(mesh, &[6, 8], 0);
        let seen = trace(mesh, || {
            let y = {
                let _module = isobar_collectives::trace::module("head");
                x.softmax(0).unwrap().layer_norm(&[6, 8], None, None, 1e-5).unwrap()
            };
            y.statistic(isobar_array::Statistic::Max, &[0], false)
                .unwrap()
                .sum()
                .unwrap()
                .backward()
                .unwrap();
        });
        let head = seen.record().of_module("head");
        // Of each operator one exchange forward and one backward.
        assert_eq!((head.forward().len(), head.backward().len()), (2, 2), "{}", seen.record());
    });
}

#[test]
fn partial_sums_stay_partial_until_values_are_needed() {
    on_mesh(&[2], |mesh| {
        let x = sharded(mesh, &[6, 8], 1);
        let weight = ShardTensor::distribute(&numbers(&[8, 5], 2), mesh, &[Placement::Replicate]).unwrap();
        let seen = trace(mesh, || {
            let a = x.matmul(&weight).unwrap();
            let b = x.matmul(&weight).unwrap().mul_scalar(2.0).unwrap();
            a.add(&b).unwrap();
        });
        assert_eq!(seen.record().len(), 0, "{}", seen.record());
    });
}

#[test]
fn a_batch_in_pieces_stays_on_its_ranks() {
    on_mesh(&[4], |mesh| {
        // Two samples of eight faces: each rank has two pieces of the merged dim.
        let x = sharded(mesh, &[2, 8, 3, 6, 6], 1);
        let weight =
            ShardTensor::distribute(&numbers(&[4, 3, 3, 3], 2), mesh, &[Placement::Replicate]).unwrap();
        let seen = trace(mesh, || {
            let folded = x.reshape(&[16, 3, 6, 6]).unwrap();
            let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
            let y = folded.conv(&weight, None, &conv).unwrap();
            let y = y.max_pool(2, &Pool::new(&[2])).unwrap().0;
            let y = y.interpolate(&Resize::Scale(vec![2.0]), Interpolation::Nearest, false).unwrap();
            assert_eq!(y.reshape(&[2, 8, 4, 6, 6]).unwrap().layout().placements(), x.layout().placements());
        });
        assert_eq!(seen.record().len(), 0, "{}", seen.record());
    });
}

#[test]
fn a_convolution_that_crops_a_padding_has_the_split_from_before() {
    on_mesh(&[4], |mesh| {
        let x = sharded(mesh, &[1, 2, 16, 5], 2);
        let padded = x.pad_mode(&[2, 2, 2, 2], PadMode::Constant, 0.0).unwrap();
        let weight =
            ShardTensor::distribute(&numbers(&[2, 2, 5, 5], 2), mesh, &[Placement::Replicate]).unwrap();
        let y = padded.conv(&weight, None, &Conv::default()).unwrap();
        assert_eq!(y.layout(), x.layout());
        let same = Conv { padding: Padding::Each(vec![2]), ..Conv::default() };
        let want = x.conv(&weight, None, &same).unwrap();
        assert!((y.local() - want.local()).abs().max().double_value(&[]) < 1e-12);
    });
}

#[test]
fn a_weight_is_mirrored_without_communication() {
    on_mesh(&[2], |mesh| {
        let x = sharded(mesh, &[4, 6], 0);
        let seen = trace(mesh, || {
            assert_eq!(x.flip(&[1]).unwrap().local(), &x.local().flip([1]));
        });
        assert_eq!(seen.record().len(), 0, "{}", seen.record());
    });
}

/// A column by a longer row: the result keeps the column's split, and nothing is gathered.
#[test]
fn outer_products_keep_the_split_of_the_smaller_operand() {
    on_mesh(&[2], |mesh| {
        let column = sharded(mesh, &[6, 1], 0);
        let row = ShardTensor::distribute(&numbers(&[1, 40], 2), mesh, &[Placement::Replicate]).unwrap();
        let seen = trace(mesh, || {
            let y = column.mul(&row).unwrap();
            assert_eq!((y.placements(), y.local_shape()), (&[Placement::Shard(0)][..], &[3, 40][..]));
        });
        assert_eq!(seen.received(), 0);
    });
}

/// Sources and indices that are split beside the indexed dim of a replicated tensor stay where they are.
#[test]
fn indexed_operations_keep_the_split_of_the_source() {
    on_mesh(&[2], |mesh| {
        let whole = |shape: &[i64]| {
            ShardTensor::distribute(&numbers(shape, 2), mesh, &[Placement::Replicate]).unwrap()
        };
        let x = whole(&[5, 8]);
        let picks = Tensor::from_slice(&[0_i64, 4, 4, 2, 1, 0, 3]);
        let index = ShardTensor::distribute(&picks, mesh, &[Placement::Replicate]).unwrap();
        let each = picks.unsqueeze(1).expand([7, 8], false).contiguous();
        let each = ShardTensor::distribute(&each, mesh, &[Placement::Shard(1)]).unwrap();
        let source = sharded(mesh, &[7, 8], 1);
        let seen = trace(mesh, || {
            for y in [
                x.index_add(0, &index, &source).unwrap(),
                x.scatter_add(0, &each, &source).unwrap(),
                x.gather(0, &each).unwrap(),
            ] {
                assert_eq!(y.placements(), [Placement::Shard(1)]);
            }
        });
        assert_eq!(seen.received(), 0);
    });
}

/// A sum of a partial sum is partial, and reduced once it is small.
#[test]
fn sums_of_partial_sums_are_reduced_last() {
    on_mesh(&[2], |mesh| {
        let partial = sharded(mesh, &[8, 64, 64], 0).statistic(Statistic::Sum, &[0], false).unwrap();
        let mut small = None;
        let seen = trace(mesh, || small = Some(partial.statistic(Statistic::Mean, &[1], false).unwrap()));
        assert_eq!(seen.received(), 0);
        let small = small.unwrap();
        assert!(small.layout().is_partial());
        let want = numbers(&[8, 64, 64], 1).sum_dim_intlist([0].as_slice(), false, None).mean_dim(
            [1].as_slice(),
            false,
            None,
        );
        assert!(difference(&small.full_tensor(None).unwrap(), &want) < 1e-12);
    });
}
