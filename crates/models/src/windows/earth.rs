//! Blocks with earth-specific positions: Bi et al., *Accurate medium-range global weather forecasting with 3D neural networks*.

use std::cell::OnceCell;
use std::iter;
use std::sync::Arc;

use isobar_array::{Array, kernel};
use isobar_nn::{DropPath, LayerNorm, Linear, Mode};
use isobar_shard::{Init, Params, Placement};
use tch::{TchError, Tensor};

use super::{WindowAttention, Windows, product};
use crate::error::{Checker, Result};
use crate::layers::{Recompute, Start};

/// A stage of blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StageOptions<'a> {
    /// Levels, rows and columns.
    pub(crate) grid: [i64; 3],
    /// Features.
    pub(crate) width: i64,
    /// Heads of attention.
    pub(crate) heads: i64,
    /// Extents of a window.
    pub(crate) window: [i64; 3],
    /// Shift of every second block.
    pub(crate) shift: [i64; 3],
    /// Probability of each block to be dropped in training.
    pub(crate) drop_path: &'a [f64],
    /// Computes the blocks again in backward.
    pub(crate) recomputes: bool,
}

impl StageOptions<'_> {
    /// Number of windows of rows and columns.
    pub(crate) fn window_counts(&self) -> [i64; 3] {
        self.windows().counts()
    }

    /// The scores of a sample's attention.
    pub(crate) fn scores(&self) -> u128 {
        self.windows().scores(self.heads)
    }

    fn windows(&self) -> Windows {
        Windows { grid: self.grid, window: self.window, shift: [0; 3] }
    }
}

/// Probabilities by which blocks of growing depth are dropped in training.
pub(crate) fn drop_rates() -> [f64; 8] {
    std::array::from_fn(|block| 0.2 * block as f64 / 7.0)
}

/// Blocks, every second of which shifts its windows.
#[derive(Debug)]
pub(crate) struct EarthStage<A> {
    windows: Windows,
    blocks: Vec<Recompute<Block<A>>>,
}

impl<A: Array> EarthStage<A> {
    /// Makes as many blocks as `drop_path` has probabilities, named `{name}.{i}`.
    pub(crate) fn new(
        check: &Checker,
        name: &str,
        options: StageOptions<'_>,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let block = |(i, &drop_path): (usize, &f64)| {
            let name = format!("{name}.{i}");
            let shift = if i % 2 == 1 { options.shift } else { [0; 3] };
            let windows = Windows { grid: options.grid, window: options.window, shift };
            let block = Block::new(check, windows, (&options, drop_path), &mut params.scope(&name))?;
            Ok(Recompute::new(&name, block, options.recomputes))
        };
        let blocks = options.drop_path.iter().enumerate().map(block).collect::<Result<_>>()?;
        Ok(Self { windows: options.windows(), blocks })
    }

    /// Applies the blocks to `[batch, levels, rows, columns, features]`.
    pub(crate) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        self.windows.within(x, |mut x| {
            for block in &self.blocks {
                x = block.forward(&[&x], mode, |block, inputs, mode| block.forward(&inputs[0], mode))?;
            }
            Ok(x)
        })
    }
}

#[derive(Debug)]
struct Block<A> {
    windows: Windows,
    norm1: LayerNorm<A>,
    attn: WindowAttention<A>,
    position_bias: EarthBias<A>,
    norm2: LayerNorm<A>,
    mlp: [Linear<A>; 2],
    drop_path: DropPath,
}

impl<A: Array> Block<A> {
    fn new(
        check: &Checker,
        windows: Windows,
        (options, drop_path): (&StageOptions<'_>, f64),
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let width = options.width;
        let norm1 = LayerNorm::new(&[width], &mut params.scope("norm1"))?;
        let position_bias = EarthBias::new(check, windows, options.heads, &mut params.scope("attn"))?;
        let attn = WindowAttention::new(width, options.heads, Start::Torch, &mut params.scope("attn"))?;
        if windows.shift != [0; 3] {
            let mask = move |part: &_| windows.earth_mask(part);
            params.computed_buffer("attn_mask", &windows.earth_mask_shape(), Arc::new(mask))?;
        }
        let norm2 = LayerNorm::new(&[width], &mut params.scope("norm2"))?;
        let mlp = [
            Linear::new(width, 4 * width, &mut params.scope("mlp.layers.0"))?,
            Linear::new(4 * width, width, &mut params.scope("mlp.layers.2"))?,
        ];
        let drop_path = DropPath::new(drop_path)?;
        Ok(Self { windows, norm1, attn, position_bias, norm2, mlp, drop_path })
    }

    fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let windows = self.windows.partition(&self.norm1.forward(x)?)?;
        let added = self.position_bias.forward(&windows)?;
        let y = self.windows.merge(&self.attn.forward(&windows, &added)?)?;
        // Rows stay where the windows are: the next block finds them there.
        let x = x.redistribute_like(&y)?.add(&self.drop_path.forward(&y, mode)?)?;
        let y = self.mlp[1].forward(&self.mlp[0].forward(&self.norm2.forward(&x)?)?.gelu()?)?;
        Ok(x.add(&self.drop_path.forward(&y, mode)?)?)
    }
}

/// Trained bias of pairs of tokens: absolute in level and row, relative in column, the same for all windows of a row.
#[derive(Debug)]
struct EarthBias<A> {
    windows: Windows,
    heads: i64,
    table: A,
    index: OnceCell<Tensor>,
}

impl<A: Array> EarthBias<A> {
    fn new(
        check: &Checker,
        windows: Windows,
        heads: i64,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let ([nz, ny, _], [wz, wy, wx]) = (windows.counts(), windows.window);
        let pairs = product(check, "window_size", &[wz, wz, wy, wy, 2 * wx - 1])?;
        product(check, "window_size", &[wz, wz, wy, wy, wx, wx])?;
        let shape = [pairs, nz * ny, heads];
        let init = Init::TruncNormal { std: 0.02 };
        let table = params.param("earth_position_bias_table", &shape, init, Placement::Replicate)?;
        Ok(Self { windows, heads, table, index: OnceCell::new() })
    }

    /// Returns what is added to the scores `[batch, nz, ny, nx, heads, tokens, tokens]` of `windows`: the bias with the masks of levels
    /// and rows, a view of one for each row of windows, and the mask of columns, if windows are shifted along them. Each rank makes
    /// those of its own windows; only the gradient of the table is summed over ranks.
    fn forward(&self, windows: &A) -> Result<Vec<A>> {
        let ([nz, ny, _], tokens, heads) = (self.windows.counts(), self.windows.tokens(), self.heads);
        let index = match self.index.get() {
            Some(index) => index,
            None => {
                let made = self.index()?;
                self.index.get_or_init(|| made)
            }
        };
        let bias = |table: &Tensor, at: &[Tensor]| -> Result<Tensor, TchError> {
            let [_, z, y, _] = at else { return table.f_reshape([0]) };
            let table = table.f_reshape([-1, nz, ny, heads])?.f_index_select(1, z)?.f_index_select(2, y)?;
            let bias = table.f_index_select(0, &index.f_to(table.device())?)?;
            let (_, levels, rows, _) = bias.size4()?;
            let bias = bias.f_reshape([tokens, tokens, levels, rows, heads])?.f_permute([2, 3, 4, 0, 1])?;
            bias.f_unsqueeze(2)?.f_unsqueeze(0)
        };
        let regions = self.windows.earth_regions();
        let masked = |table: &Tensor, at: &[Tensor]| {
            let bias = kernel::named("position_bias", &[table], bias(table, at))?;
            self.windows.masked(bias, (&[0, 1], &regions), at)
        };
        let bias = self.table.on_shards_of(windows, 4, &masked)?;
        let columns = self.windows.mask(windows, (&[2], &regions))?;
        Ok(iter::once(bias).chain(columns).collect())
    }

    /// Computes the row of the table for each pair of tokens, `[tokens · tokens]`.
    fn index(&self) -> Result<Tensor> {
        let [wz, wy, wx] = self.windows.window;
        let columns = 2 * wx - 1;
        let points = || (0..wz).flat_map(move |z| (0..wy).flat_map(move |y| (0..wx).map(move |x| [z, y, x])));
        let row = |[zi, yi, xi]: [i64; 3], [zj, yj, xj]: [i64; 3]| {
            ((zi + wz * zj) * wy * wy + yi + wy * yj) * columns + xi - xj + wx - 1
        };
        let rows: Vec<i64> = points().flat_map(|i| points().map(move |j| row(i, j))).collect();
        Ok(kernel::named("earth_position_index", &[], Tensor::f_from_slice(&rows))?)
    }
}
