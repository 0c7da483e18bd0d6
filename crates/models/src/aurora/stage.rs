//! Blocks of shifted windows with modulated norms behind them: Liu et al., *Swin Transformer V2*, arXiv:2111.09883.

use isobar_array::{Array, Unary};
use isobar_nn::{DropPath, LayerNorm, Linear, LinearOptions, Mlp, MlpOptions, Mode};
use isobar_shard::{Init, Params};

use crate::error::Result;
use crate::layers::{Recompute, Start};
use crate::windows::{WindowAttention, Windows, centred};

/// A stage of blocks.
#[derive(Debug, Clone)]
pub(super) struct StageOptions {
    /// Levels, rows and columns.
    pub(super) grid: [i64; 3],
    pub(super) width: i64,
    pub(super) heads: i64,
    pub(super) window: [i64; 3],
    /// Features of the hidden layers.
    pub(super) hidden: i64,
    /// Features of the vector that modulates the norms.
    pub(super) context: i64,
    /// Probability of each block to be dropped in training.
    pub(super) drop_path: Vec<f64>,
    pub(super) recomputes: bool,
}

impl StageOptions {
    /// Windows of a block: no larger than the grid, and shifted by half a window along dims with more than one.
    pub(super) fn windows(&self, shifted: bool) -> Windows {
        let window = std::array::from_fn(|dim| self.window[dim].min(self.grid[dim]));
        let half = |dim: usize| if self.grid[dim] > self.window[dim] { self.window[dim] / 2 } else { 0 };
        Windows { grid: self.grid, window, shift: if shifted { std::array::from_fn(half) } else { [0; 3] } }
    }
}

/// Blocks, every second of which shifts its windows.
#[derive(Debug)]
pub(super) struct Stage<A> {
    windows: Windows,
    blocks: Vec<Recompute<Block<A>>>,
}

impl<A: Array> Stage<A> {
    /// Makes as many blocks as `drop_path` has probabilities, named `{name}.blocks.{i}`.
    pub(super) fn new(
        name: &str,
        options: &StageOptions,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let block = |(i, &drop_path): (usize, &f64)| {
            let name = format!("{name}.blocks.{i}");
            let windows = options.windows(i % 2 == 1);
            let block = Block::new(windows, (options, drop_path), &mut params.scope(&name))?;
            Ok(Recompute::new(&name, block, options.recomputes))
        };
        let blocks = options.drop_path.iter().enumerate().map(block).collect::<Result<_>>()?;
        Ok(Self { windows: options.windows(false), blocks })
    }

    /// Applies the blocks to `[batch, levels, rows, columns, width]`; `context` is `[batch, context]`.
    pub(super) fn forward(&self, x: &A, context: &A, mode: Mode<'_>) -> Result<A> {
        self.windows.within(x, |mut x| {
            for block in &self.blocks {
                x = block.forward(&[&x, context], mode, |block, inputs, mode| {
                    block.forward(&inputs[0], &inputs[1], mode)
                })?;
            }
            Ok(x)
        })
    }
}

#[derive(Debug)]
struct Block<A> {
    windows: Windows,
    norm1: ModulatedNorm<A>,
    attn: WindowAttention<A>,
    norm2: ModulatedNorm<A>,
    mlp: Mlp<A>,
    drop_path: DropPath,
}

impl<A: Array> Block<A> {
    fn new(
        windows: Windows,
        (options, drop_path): (&StageOptions, f64),
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let &StageOptions { width, heads, hidden, context, .. } = options;
        let norm1 = ModulatedNorm::new(width, context, &mut params.scope("norm1"))?;
        let attn = WindowAttention::new(width, heads, Start::Small, &mut params.scope("attn"))?;
        let norm2 = ModulatedNorm::new(width, context, &mut params.scope("norm2"))?;
        let mlp = Mlp::new(
            [width, hidden, width],
            MlpOptions { init_std: Some(0.02), ..MlpOptions::default() },
            &mut params.scope("mlp"),
        )?;
        Ok(Self { windows, norm1, attn, norm2, mlp, drop_path: DropPath::new(drop_path)? })
    }

    fn forward(&self, x: &A, context: &A, mode: Mode<'_>) -> Result<A> {
        // The grid moves before zeros are added round it.
        let still = Windows { shift: [0; 3], ..self.windows };
        let windows = still.partition(&self.windows.rolled(x, -1)?)?;
        let y = still.merge(&self.attn.forward(&windows, &self.masks(&windows)?)?)?;
        let y = self.windows.rolled(&y, 1)?;
        // Rows stay where the windows are: the next block finds them there.
        let y = self.drop_path.forward(&self.norm1.forward(&y, context)?, mode)?;
        let x = x.redistribute_like(&y)?.add(&y)?;
        let y = self.norm2.forward(&self.mlp.forward(&x, mode)?, context)?;
        Ok(x.add(&self.drop_path.forward(&y, mode)?)?)
    }

    /// Returns what is added to the scores of `windows` so that regions and margins do not see each other. Each rank makes it of its
    /// own windows.
    fn masks(&self, windows: &A) -> Result<Vec<A>> {
        if self.windows.shift == [0; 3] {
            return Ok(Vec::new());
        }
        let regions = [0, 1, 2].map(|dim| regions(&self.windows, dim));
        let rows = self.windows.mask(windows, (&[0, 1], &regions))?;
        Ok(rows.into_iter().chain(self.windows.mask(windows, (&[2], &regions))?).collect())
    }
}

/// Regions of the points along a dim of the shifted and padded grid. Longitudes go round: what came round their end is no region of
/// its own.
fn regions(windows: &Windows, dim: usize) -> Vec<i64> {
    let (extent, window, shift) = (windows.grid[dim], windows.window[dim], windows.shift[dim]);
    let padded = windows.padded()[dim];
    let before = centred(padded - extent).0;
    let last = if dim == 2 { 1 } else { 2 };
    let region = |at: i64| match at - before {
        at if at < 0 || at >= extent => 3,
        _ if shift == 0 => 0,
        at if at >= extent - shift => last,
        at => i64::from(at >= extent - window),
    };
    (0..padded).map(region).collect()
}

/// LN(x) · scale + shift, with (shift, scale) = W silu(c) + b, which start with 0: a fresh block is the identity.
#[derive(Debug)]
struct ModulatedNorm<A> {
    width: i64,
    norm: LayerNorm<A>,
    modulation: Linear<A>,
}

impl<A: Array> ModulatedNorm<A> {
    fn new(width: i64, context: i64, params: &mut impl Params<Array = A>) -> Result<Self> {
        let zeros = || Some(Init::Constant(0.0));
        let options = LinearOptions { weight_init: zeros(), bias_init: zeros(), ..LinearOptions::default() };
        let params = &mut params.scope("ln_modulation.1");
        let modulation = Linear::with_options(context, 2 * width, options, params)?;
        Ok(Self { width, norm: LayerNorm::without_affine(&[width], 1e-5)?, modulation })
    }

    fn forward(&self, x: &A, context: &A) -> Result<A> {
        let both = self.modulation.forward(&context.unary(Unary::Silu)?)?;
        let both = both.reshape(&[both.extent(0)?, 1, 1, 1, 2 * self.width])?;
        let part = |half: i64| both.narrow(-1, half * self.width, self.width);
        Ok(self.norm.forward(x)?.mul(&part(1)?)?.add(&part(0)?)?)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::layers::constant;
    use crate::windows::tests::{assert_receives_the_shift, passes_of_stage};

    /// The second block shifts its windows of 4 x 8 points by half of one. Longitudes go round, and nothing is gathered.
    #[rstest]
    #[case::rows(2, [32, 16])]
    #[case::more_rows(2, [64, 16])]
    #[case::columns(3, [8, 32])]
    #[case::more_columns(3, [8, 64])]
    fn a_shift_receives_half_a_window(#[case] dim: usize, #[case] extents: [i64; 2]) {
        let ([rows, columns], levels, width) = (extents, 2, 4);
        let options = StageOptions {
            grid: [levels, rows, columns],
            width,
            heads: 2,
            window: [2, 4, 8],
            hidden: 8,
            context: 3,
            drop_path: vec![0.0; 2],
            recomputes: false,
        };
        let passed = passes_of_stage(
            &[1, levels, rows, columns, width],
            (dim, &[extents[dim - 2] / 4; 4]),
            |params| Stage::new("stage", &options, params).unwrap(),
            |stage, x| {
                let context = constant(&[1.0, 2.0, 3.0], &[1, 3], x).unwrap();
                stage.forward(x, &context, Mode::Eval).unwrap()
            },
        );
        assert_receives_the_shift(&passed, [2, 4][dim - 2], levels * extents[3 - dim] * width * 8);
    }

    #[test]
    fn longitudes_go_round() {
        let windows = Windows { grid: [4, 5, 6], window: [2, 3, 4], shift: [1, 1, 2] };
        assert_eq!(regions(&windows, 0), [0, 0, 1, 2]);
        assert_eq!(regions(&windows, 1), [0, 0, 1, 1, 2, 3]);
        assert_eq!(regions(&windows, 2), [3, 0, 0, 1, 1, 1, 1, 3]);
    }
}
