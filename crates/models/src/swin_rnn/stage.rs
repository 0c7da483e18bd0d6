//! Stages of shifted windows.

use std::cell::OnceCell;
use std::iter;

use isobar_array::{Array, kernel};
use isobar_nn::{LayerNorm, Mlp, MlpOptions, Mode};
use isobar_shard::{Init, Params, Placement};
use tch::Tensor;

use super::MODEL;
use crate::error::{Checker, Result};
use crate::layers::{Recompute, Start};
use crate::windows::{WindowAttention, Windows, centred, crop, pad, product};

/// Blocks of a Swin transformer (Liu et al., arXiv:2103.14030) on a grid that is padded to windows around all of them.
#[derive(Debug)]
pub(super) struct SwinStage<A> {
    grid: [i64; 2],
    windows: Windows,
    blocks: Vec<Recompute<Block<A>>>,
}

/// Sizes of a stage.
#[derive(Debug, Clone, Copy)]
pub(super) struct SwinOptions {
    /// Rows and columns.
    pub(super) grid: [i64; 2],
    pub(super) width: i64,
    pub(super) heads: i64,
    pub(super) window: i64,
    pub(super) recomputes: bool,
}

impl SwinOptions {
    /// Windows of blocks that are shifted or not.
    pub(super) fn windows(&self, shifts: bool) -> Windows {
        let window = [1, self.window, self.window];
        let [rows, columns] = self.grid;
        let [_, rows, columns] = Windows { grid: [1, rows, columns], window, shift: [0; 3] }.padded();
        // A dim of a single window is not shifted.
        let shift = |extent: i64| if shifts && extent > self.window { self.window / 2 } else { 0 };
        Windows { grid: [1, rows, columns], window, shift: [0, shift(rows), shift(columns)] }
    }
}

impl<A: Array> SwinStage<A> {
    /// Makes `count` blocks, named `{name}.layer.blocks.{i}`.
    pub(super) fn new(
        name: &str,
        (options, count): (&SwinOptions, usize),
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let block = |i: usize| {
            let name = format!("{name}.layer.blocks.{i}");
            let block = Block::new(options.windows(i % 2 == 1), options, &mut params.scope(&name))?;
            Ok(Recompute::new(&name, block, options.recomputes))
        };
        let blocks = (0..count).map(block).collect::<Result<_>>()?;
        Ok(Self { grid: options.grid, windows: options.windows(false), blocks })
    }

    /// Applies the blocks to `[batch, width, rows, columns]`.
    pub(super) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let margin = |dim: usize| (dim + 1, centred(self.windows.grid[dim + 1] - self.grid[dim]));
        let x = pad(&x.permute(&[0, 2, 3, 1])?, &[margin(0), margin(1)])?.unsqueeze(1)?;
        let x = self.windows.within(&x, |mut x| {
            for block in &self.blocks {
                x = block.forward(&[&x], mode, |block, inputs, mode| block.forward(&inputs[0], mode))?;
            }
            Ok(x)
        })?;
        let x = crop(&x.select(1, 0)?, &[(1, self.grid[0]), (2, self.grid[1])])?;
        Ok(x.permute(&[0, 3, 1, 2])?)
    }
}

#[derive(Debug)]
struct Block<A> {
    windows: Windows,
    norm1: LayerNorm<A>,
    attn: WindowAttention<A>,
    /// Bias of each offset between two tokens, `[offsets, heads]`.
    table: A,
    /// Row of the table for each pair of tokens.
    index: OnceCell<Tensor>,
    norm2: LayerNorm<A>,
    mlp: Mlp<A>,
}

impl<A: Array> Block<A> {
    fn new(windows: Windows, options: &SwinOptions, params: &mut impl Params<Array = A>) -> Result<Self> {
        let SwinOptions { width, heads, window, .. } = *options;
        let norm1 = LayerNorm::new(&[width], &mut params.scope("norm1"))?;
        let offsets = product(&Checker(MODEL), "window_size", &[2 * window - 1, 2 * window - 1])?;
        let attn = &mut params.scope("attn");
        let init = Init::TruncNormal { std: 0.02 };
        let shape = [offsets, heads];
        let table = attn.param("relative_position_bias_table", &shape, init, Placement::Replicate)?;
        let attn = WindowAttention::new(width, heads, Start::Torch, attn)?;
        let norm2 = LayerNorm::new(&[width], &mut params.scope("norm2"))?;
        let mlp = Mlp::new([width, 4 * width, width], MlpOptions::default(), &mut params.scope("mlp"))?;
        Ok(Self { windows, norm1, attn, table, index: OnceCell::new(), norm2, mlp })
    }

    /// Applies the block to `[batch, 1, rows, columns, width]`.
    fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let windows = self.windows.partition(&self.norm1.forward(x)?)?;
        let y = self.windows.merge(&self.attn.forward(&windows, &self.added(&windows)?)?)?;
        // Rows stay where the windows are: the next block finds them there.
        let x = x.redistribute_like(&y)?.add(&y)?;
        Ok(x.add(&self.mlp.forward(&self.norm2.forward(&x)?, mode)?)?)
    }

    /// Returns what is added to the scores `[batch, 1, ny, nx, heads, tokens, tokens]` of `windows`: the bias with the mask of rows, a
    /// view of one for each row of windows, and the mask of columns, if windows are shifted. Each rank makes those of its own windows;
    /// only the gradient of the table is summed over ranks.
    fn added(&self, windows: &A) -> Result<Vec<A>> {
        let index = match self.index.get() {
            Some(index) => index,
            None => {
                let made = self.index()?;
                self.index.get_or_init(|| made)
            }
        };
        let (tokens, heads) = (self.windows.tokens(), self.table.shape()[1]);
        let bias = |table: &Tensor| {
            let bias = table.f_index_select(0, &index.f_to(table.device())?)?;
            let bias = bias.f_reshape([tokens, tokens, heads])?.f_permute([2, 0, 1])?;
            bias.f_reshape([1, 1, 1, 1, heads, tokens, tokens])
        };
        let regions = [0, 1, 2].map(|dim| self.windows.regions(dim, true));
        let masked = |table: &Tensor, at: &[Tensor]| {
            let bias = kernel::named("position_bias", &[table], bias(table))?;
            self.windows.masked(bias, (&[1], &regions), at)
        };
        let bias = self.table.on_shards_of(windows, 4, &masked)?;
        let columns = self.windows.mask(windows, (&[2], &regions))?;
        Ok(iter::once(bias).chain(columns).collect())
    }

    /// Computes the row of the table for each pair of tokens, `[tokens · tokens]`.
    fn index(&self) -> Result<Tensor> {
        let [_, window, _] = self.windows.window;
        let points = || (0..window).flat_map(move |y| (0..window).map(move |x| (y, x)));
        let row = |(yi, xi): (i64, i64), (yj, xj): (i64, i64)| {
            (yi - yj + window - 1) * (2 * window - 1) + xi - xj + window - 1
        };
        let rows: Vec<i64> = points().flat_map(|i| points().map(move |j| row(i, j))).collect();
        Ok(kernel::named("relative_position_index", &[], Tensor::f_from_slice(&rows))?)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::windows::tests::{assert_receives_the_shift, passes_of_stage};

    /// The second block shifts its windows of 4 x 4 points by half of one, round the ends. Nothing is gathered.
    #[rstest]
    #[case::rows(2, [16, 8])]
    #[case::more_rows(2, [32, 8])]
    #[case::columns(3, [8, 16])]
    #[case::more_columns(3, [8, 32])]
    fn a_shift_receives_half_a_window(#[case] dim: usize, #[case] grid: [i64; 2]) {
        let width = 4;
        let options = SwinOptions { grid, width, heads: 2, window: 4, recomputes: false };
        let passed = passes_of_stage(
            &[1, width, grid[0], grid[1]],
            (dim, &[grid[dim - 2] / 4; 4]),
            |params| SwinStage::new("stage", (&options, 2), params).unwrap(),
            |stage, x| stage.forward(x, Mode::Eval).unwrap(),
        );
        assert_receives_the_shift(&passed, 2, grid[3 - dim] * width * 8);
    }
}
