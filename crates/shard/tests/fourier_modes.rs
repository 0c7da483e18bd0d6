//! Transforms of which only some modes are kept: values and gradients against the dense ones, and what travels.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;

use isobar_array::{Convert, FftNorm, Modes, Spectral};
use isobar_collectives::Group;
use isobar_shard::{CommTrace, Layout, Placement, ShardTensor, Sizes, forbid_hidden_communication};
use rstest::rstest;
use tch::TchError;

use crate::common::{Dice, MESHES, SPLITS, leaf, numbers, on_mesh, same};

const NORMS: [FftNorm; 3] = [FftNorm::Backward, FftNorm::Ortho, FftNorm::Forward];
const EXTENTS: [i64; 6] = [1, 2, 5, 6, 7, 11];

/// Within so many modes, some of them.
fn range(dice: &mut Dice, modes: i64) -> Range<i64> {
    let start = dice.roll(0, modes - 1);
    start..dice.roll(start + 1, modes)
}

fn dense<T>(result: isobar_array::Result<T>) -> Result<T, TchError> {
    result.map_err(|e| TchError::Torch(e.to_string()))
}

/// One rectangle of modes, of real and imaginary parts, dims behind them or not.
#[rstest]
fn a_rectangle_of_modes(#[values(1, 2, 3, 4)] mesh: usize, #[values(0, 1, 2)] norm: usize) {
    let norm = NORMS[norm];
    on_mesh(MESHES[mesh], move |mesh| {
        let _guard = forbid_hidden_communication();
        let mut dice = Dice(67);
        for _ in 0..25 {
            let [height, width] = [*dice.pick(&EXTENTS), *dice.pick(&EXTENTS)];
            let modes = Modes { rows: range(&mut dice, height), columns: range(&mut dice, width / 2 + 1) };
            let at = dice.roll(0, 2);
            let around = |grid: &[i64]| {
                let mut shape = vec![3, 2];
                shape.splice(at as usize..at as usize, grid.iter().copied());
                shape
            };
            let field = around(&[height, width]);
            let layout = dice.layout(mesh, &field, &[0, 1, 2, 3]);
            let what = format!("{modes:?} {norm:?} at {at}");
            same(
                &format!("rfft2_modes {what}"),
                &[(&numbers(&field, 1), &layout)],
                1e-10,
                |t| Ok(t[0].rfft2_modes(at, &modes, norm)?),
                |t| dense(t[0].rfft2_modes(at, &modes, norm)),
            );
            let rows = modes.rows.end - modes.rows.start;
            let pairs = around(&[2, rows, modes.columns.end - modes.columns.start]);
            let layout = dice.layout(mesh, &pairs, &[0, 1, 2, 3, 4]);
            same(
                &format!("irfft2_modes {what}"),
                &[(&numbers(&pairs, 2), &layout)],
                1e-10,
                |t| Ok(t[0].irfft2_modes(at, [height, width], &modes, norm)?),
                |t| dense(t[0].irfft2_modes(at, [height, width], &modes, norm)),
            );
        }
    });
}

/// Limit on the bytes that a rank receives in each pass.
struct Budget {
    group: Group,
    most: u64,
    what: String,
}

impl Budget {
    fn of<T>(&self, pass: &str, run: impl FnOnce() -> T) -> T {
        let trace = CommTrace::start(&self.group);
        let result = run();
        let received = trace.received();
        assert!(received <= self.most, "{pass} of {}: {received} bytes, of {}", self.what, self.most);
        result
    }

    fn backward(&self, pass: &str, y: &ShardTensor) {
        let cotangent = y.detach();
        self.of(pass, || y.backward_from(Some(&cotangent), Default::default()).unwrap());
    }
}

/// Of a field that is split along one dim, other than the halved one, a rank receives no more than the modes that are kept: there,
/// back, and in backward of each.
#[rstest]
fn kept_modes_travel_and_no_points(#[values(2, 3, 4)] ranks: i64) {
    on_mesh(&[ranks], move |mesh| {
        let _guard = forbid_hidden_communication();
        let mut dice = Dice(71);
        for _ in 0..30 {
            let count = dice.roll(2, 3) as usize;
            let extents: Vec<i64> = (0..count).map(|_| dice.roll(16, 20)).collect();
            let shape = [&[3], &extents[..]].concat();
            let dims: Vec<i64> = (1..=count as i64).collect();
            // As many columns for each rank.
            let columns = ranks * dice.roll(1, 2);
            let mut kept: Vec<_> = (1..count).map(|_| vec![0..dice.roll(1, 2), 14..16]).collect();
            kept.push(vec![1..2, 2..1 + columns]);
            let modes = kept.iter().map(|ranges| ranges.iter().map(|r| r.end - r.start).sum::<i64>());
            let most = (3 * 16 * modes.product::<i64>()) as u64;
            let split = Placement::Shard(dice.roll(1, count as i64 - 1) as usize);
            let layout = dice.pick(&SPLITS).layout(mesh, &[split], &shape);
            let budget =
                Budget { group: mesh.group("a").unwrap(), most, what: format!("{kept:?} of {layout}") };

            let x = leaf(&numbers(&shape, 1), &layout);
            let norm = *dice.pick(&NORMS);
            let modes = budget.of("rfftn_modes", || x.rfftn_modes(&dims, &kept, norm).unwrap());
            let pairs = modes.view_as_real().unwrap();
            budget.backward("backward of rfftn_modes", &pairs);
            let pairs = leaf(&pairs.detach().full_tensor(None).unwrap(), pairs.layout());
            let field = x.detach();
            let back = budget.of("irfftn_modes_as", || {
                pairs.view_as_complex().unwrap().irfftn_modes_as(&field, &dims, &kept, norm).unwrap()
            });
            assert_eq!(back.layout(), field.layout());
            budget.backward("backward of irfftn_modes_as", &back);
        }
    });
}

/// A rectangle is of fields that ranks have whole: such fields stay, others travel as they are, and of the way back the modes.
#[test]
fn a_rectangle_is_of_whole_fields() {
    on_mesh(&[2], |mesh| {
        let _guard = forbid_hidden_communication();
        let modes = Modes { rows: 3..7, columns: 0..3 };
        let (field, spectrum) = ([4, 10, 12], [4, 2, 4, 3]);
        let budget =
            |most, what: &str| Budget { group: mesh.group("a").unwrap(), most, what: what.to_owned() };
        let x = |shape: &[i64], dim| {
            let layout = Layout::new(mesh, &[Placement::Shard(dim)], shape, &Sizes::Chunk).unwrap();
            leaf(&numbers(shape, 1), &layout)
        };
        for (most, dim) in [(0, 0), (2 * 10 * 12 / 2 * 8, 1), (2 * 10 * 12 / 2 * 8, 2)] {
            let budget = budget(most, &format!("a field split along dim {dim}"));
            let x = x(&field, dim);
            let y = budget.of("rfft2_modes", || x.rfft2_modes(1, &modes, FftNorm::Ortho).unwrap());
            budget.backward("backward", &y);
        }
        for (most, dim) in [(0, 0), (2 * 24 / 2 * 8, 1), (2 * 24 / 2 * 8, 2), (4 * 8 * 8, 3)] {
            let budget = budget(most, &format!("modes split along dim {dim}"));
            let x = x(&spectrum, dim);
            let y =
                budget.of("irfft2_modes", || x.irfft2_modes(1, [10, 12], &modes, FftNorm::Ortho).unwrap());
            budget.backward("backward", &y);
        }
    });
}
