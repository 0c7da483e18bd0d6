//! Windows against definitions, and the traffic of stages over sharded grids.

use std::time::Duration;

use isobar_array::{Generator, Window};
use isobar_collectives::threads;
use isobar_collectives::trace::CommTrace;
use isobar_mesh::DeviceMesh;
use isobar_nn::Mode;
use isobar_shard::{
    Layout, MeshParams, ParamStore, Placement, ShardTensor, Sizes, forbid_hidden_communication,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use super::{EarthStage, StageOptions, Windows};
use crate::error::Checker;

const GRID: [i64; 3] = [2, 32, 8];
const WIDTH: i64 = 4;
const SHIFT: [i64; 3] = [1, 3, 6];

fn numbers(shape: &[i64]) -> Tensor {
    let whole = Window::whole(shape);
    Generator::new(1).normal(&whole, 0.0, 1.0, (Kind::Double, Device::Cpu)).unwrap()
}

#[rstest]
#[case([2, 6, 8], [2, 2, 4], [0, 0, 0])]
#[case([2, 6, 8], [2, 2, 4], [1, 3, 6])]
#[case([3, 7, 5], [2, 3, 4], [1, 3, 6])]
#[case([1, 1, 1], [2, 6, 12], [1, 3, 6])]
fn merging_is_the_inverse_of_cutting(
    #[case] grid: [i64; 3],
    #[case] window: [i64; 3],
    #[case] shift: [i64; 3],
) {
    let windows = Windows { grid, window, shift };
    let x = numbers(&[2, grid[0], grid[1], grid[2], 3]);
    let cut = windows.partition(&x).unwrap();
    let [nz, ny, nx] = windows.counts();
    assert_eq!(cut.size(), [2, nz, ny, nx, windows.tokens(), 3]);
    assert_eq!(windows.merge(&cut).unwrap(), x);
}

#[test]
fn windows_are_shifted_towards_the_start() {
    let windows = Windows { grid: [1, 4, 4], window: [1, 2, 2], shift: [0, 1, 1] };
    let x = Tensor::arange(16, (Kind::Double, Device::Cpu)).reshape([1, 1, 4, 4, 1]);
    let cut = windows.partition(&x).unwrap().reshape([4, 4]);
    assert_eq!(cut.get(0), Tensor::from_slice(&[5.0, 6.0, 9.0, 10.0]));
    assert_eq!(cut.get(3), Tensor::from_slice(&[15.0, 12.0, 3.0, 0.0]));
}

/// Pairs of tokens that a mask leaves to each other.
fn seen(mask: &Tensor) -> i64 {
    mask.eq(0.0).sum(Kind::Int64).int64_value(&[])
}

#[test]
fn masks_hide_what_the_shift_brings_together() {
    let windows = Windows { grid: [1, 8, 8], window: [1, 4, 4], shift: [0, 2, 2] };
    let both = Tensor::arange(2, (Kind::Int64, Device::Cpu));
    let regions = [0, 1, 2].map(|dim| windows.regions(dim, true));
    let mask = |dim: usize, at: &Tensor| {
        let none = Tensor::zeros([1; 7], (Kind::Double, Device::Cpu));
        let at = [0; 4].map(|_| at.shallow_clone());
        windows.masked(none, (&[dim], &regions), &at).unwrap()
    };
    let rows = mask(1, &both).reshape([2, 1, 16, 16]);
    let columns = mask(2, &both).reshape([2, 16, 16]);
    // A rank that has only the second column of windows makes only its mask.
    let second = mask(2, &Tensor::from_slice(&[1_i64]));
    assert_eq!(second.reshape([16, 16]), columns.get(1));
    let [inner, border] = [16 * 16, 16 * 8];
    assert_eq!(seen(&rows.get(0)), inner);
    assert_eq!(seen(&rows.get(1)), border);
    let all: Tensor = rows + columns.unsqueeze(0);
    assert_eq!(seen(&all), inner + 2 * border + border / 2);
    // Of the earth, columns that came round the end are masked from the others, but not from each other.
    let whole = Window::whole(&windows.earth_mask_shape());
    let earth = windows.earth_mask(&whole).unwrap();
    assert_eq!(earth.size(), [2, 2, 16, 16]);
    let part = whole.narrow(0, 1, 1).unwrap().narrow(2, 3, 5).unwrap().narrow(3, 2, 7).unwrap();
    assert_eq!(windows.earth_mask(&part).unwrap(), earth.narrow(0, 1, 1).narrow(2, 3, 5).narrow(3, 2, 7));
    assert_eq!(seen(&earth), inner + 2 * border + border / 2);
    assert_eq!(earth.min().double_value(&[]), -100.0);
}

#[rstest]
// As many regions as there are with Python's slices [0, −w), [−w, −s), [−s, end) of shifts beyond the window.
#[case(8, 2, 3, &[0, 0, 0, 0, 0, 2, 2, 2], &[0; 8])]
#[case(8, 4, 3, &[0, 0, 0, 0, 1, 2, 2, 2], &[0, 0, 0, 0, 0, 0, 0, 1])]
#[case(4, 4, 6, &[2; 4], &[0; 4])]
#[case(4, 4, 0, &[0; 4], &[0; 4])]
fn regions_follow_slices(
    #[case] extent: i64,
    #[case] window: i64,
    #[case] shift: i64,
    #[case] with_seam: &[i64],
    #[case] without: &[i64],
) {
    let windows = Windows { grid: [1, extent, 1], window: [1, window, 1], shift: [0, shift, 0] };
    assert_eq!(windows.regions(1, true), with_seam);
    assert_eq!(windows.regions(1, false), without);
}

/// Returns the bytes that each rank receives in a stage of two blocks.
fn received(sizes: &[i64]) -> Vec<u64> {
    passes(sizes).into_iter().map(|[forward, ..]| forward).collect()
}

/// Returns the bytes that each rank receives in forward and in backward of two blocks, and those of the sums of the loss and of gradients
/// over the ranks.
fn passes(sizes: &[i64]) -> Vec<[u64; 3]> {
    passes_of(GRID, [2, 2, 4], &[0.0, 0.0], (2, sizes))
}

/// Returns these bytes for `drop_path.len()` blocks on `grid` with windows of `window`, on shards of `sizes` along `dim`.
fn passes_of(
    grid: [i64; 3],
    window: [i64; 3],
    drop_path: &[f64],
    (dim, sizes): (usize, &[i64]),
) -> Vec<[u64; 3]> {
    let (width, heads, shift, recomputes) = (WIDTH, 2, SHIFT, false);
    let options = StageOptions { grid, width, heads, window, shift, drop_path, recomputes };
    passes_of_stage(
        &[1, grid[0], grid[1], grid[2], WIDTH],
        (dim, sizes),
        |params| EarthStage::new(&Checker("test"), "blocks", options, params).unwrap(),
        |stage, x| stage.forward(x, Mode::Eval).unwrap(),
    )
}

/// Returns the same for the stage that `make` makes, on an array of `shape`.
pub(crate) fn passes_of_stage<S>(
    shape: &[i64],
    (dim, sizes): (usize, &[i64]),
    make: impl Fn(&mut MeshParams<'_>) -> S + Sync,
    forward: impl Fn(&S, &ShardTensor) -> ShardTensor + Sync,
) -> Vec<[u64; 3]> {
    threads::run(sizes.len(), Duration::from_secs(60), move |group| {
        let mesh = DeviceMesh::new(&group, &[sizes.len() as i64], &["domain"]).unwrap();
        let mut store = ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu);
        let stage = make(&mut MeshParams::new(&mut store, &mesh));
        let parts = Sizes::Explicit([(dim, sizes.to_vec())].into());
        let layout = Layout::new(&mesh, &[Placement::Shard(dim)], shape, &parts).unwrap();
        let x = ShardTensor::distribute_as(&numbers(shape), &layout).unwrap();
        let _guard = forbid_hidden_communication();
        let trace = CommTrace::start(&mesh.group("domain").unwrap());
        let loss = forward(&stage, &x).sum().unwrap();
        trace.stop();
        let forward = trace.received();
        let trace = CommTrace::start(&mesh.group("domain").unwrap());
        loss.backward().unwrap();
        trace.stop();
        let sums = store.trainable().map(|parameter| {
            let bytes = 8 * parameter.tensor.numel() as u64;
            bytes * if bytes > 16 << 10 { 2 } else { sizes.len() as u64 - 1 }
        });
        // Backward starts with the sum of the loss.
        let loss = 8 * (sizes.len() as u64 - 1);
        [forward, trace.received(), loss + sums.sum::<u64>()]
    })
}

/// Asserts that forward receives exactly the rows or columns of one block's shift, there and back, of `line` bytes each, and backward
/// at most as many and the sums. The extent of the grid along the shift does not count.
pub(crate) fn assert_receives_the_shift(passed: &[[u64; 3]], shift: i64, line: i64) {
    let moved = (2 * shift * line) as u64;
    for (rank, &[forward, backward, sums]) in passed.iter().enumerate() {
        assert_eq!(forward, moved, "rank {rank}");
        assert!(backward <= moved + sums, "rank {rank}: {backward}, sums {sums}");
    }
}

/// The columns of a shift go round the date line: the last rank receives those of the first one.
#[rstest]
fn a_shift_of_columns_receives_only_these(#[values(32, 64)] columns: i64, #[values(8, 16)] rows: i64) {
    let [levels, ..] = GRID;
    let passed = passes_of([levels, rows, columns], [2, 2, 8], &[0.0; 2], (3, &[columns / 4; 4]));
    assert_receives_the_shift(&passed, SHIFT[2], levels * rows * WIDTH * 8);
}

#[test]
fn a_shifted_block_receives_the_rows_of_its_shift() {
    let row = (GRID[0] * GRID[2] * WIDTH * 8) as u64;
    // Shards of whole windows: the first block receives nothing, the second its shift there and back.
    for bytes in received(&[8, 8, 8, 8]) {
        assert_eq!(bytes, 2 * SHIFT[1] as u64 * row);
    }
    // Other shards are first moved to whole windows, of the norm's result and of the residual.
    let aligned = [6, 10, 8, 8];
    let given = received(&[5, 11, 8, 8]);
    for (rank, bytes) in given.into_iter().enumerate() {
        let moved = u64::from(aligned[rank] > [5, 11, 8, 8][rank]);
        assert_eq!(bytes, 2 * (SHIFT[1] as u64 + moved) * row, "rank {rank}");
    }
}

/// Biases are looked up by each rank for its own windows: their gradients are summed as the table's, and not gathered for all pairs of
/// tokens of all windows.
#[test]
fn backward_receives_the_shift_and_the_sums_of_gradients() {
    assert_receives_the_shift(&passes(&[8, 8, 8, 8]), SHIFT[1], GRID[0] * GRID[2] * WIDTH * 8);
}

/// All ranks need all points of a window as high as the grid, at the start of the stage; backward gathers the gradient of the result.
#[rstest]
fn a_window_of_all_rows_is_gathered_once(
    #[values(&[0.0], &[0.0; 4])] drop_path: &'static [f64],
    #[values(&[2, 1, 1], &[4, 0, 0])] sizes: &'static [i64],
) {
    let row = (2 * 12 * WIDTH * 8) as u64;
    for (rank, passed) in passes_of([2, 4, 12], [2, 6, 12], drop_path, (2, sizes)).into_iter().enumerate() {
        let [forward, backward, sums] = passed;
        let others = (4 - sizes[rank]) as u64 * row;
        assert_eq!(forward, others, "rank {rank}");
        assert!(backward <= others + sums, "rank {rank}: {backward}, sums {sums}");
    }
}
