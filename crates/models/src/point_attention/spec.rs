//! Sizes of the attention and checks that the models share.

use crate::error::{Checker, Result};
use crate::layers::Start;
use crate::model::LargestArray;

/// Attention of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttentionKind {
    /// Transolver's: points are averaged into slices, which attend to each other.
    Slices,
    /// FLARE's: trained queries attend to the points, and the points to the queries.
    Flare,
}

/// Way in which attention within the points and attention to the context are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MixingMode {
    Weighted,
    ConcatProject,
}

/// Dropout of points.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum PointDropout {
    /// Of what attention adds to a point, with this probability.
    Fixed(f64),
    /// Of what attention adds, of both sums of a block and of the slices of a context, each with a trained probability.
    Trained {
        /// Initial value of the trained probabilities.
        start: f64,
        /// The fixed probability for slice attention on a grid, which trains none.
        given: f64,
    },
}

/// Sizes and options of the attention of a block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionSpec {
    pub(crate) kind: AttentionKind,
    /// Features of a point.
    pub(crate) width: i64,
    pub(crate) heads: i64,
    /// Slices, or FLARE's queries.
    pub(crate) slices: i64,
    /// Number of dims of the grid that the projections are convolutions on.
    pub(crate) grid: Option<usize>,
    pub(crate) dropout: PointDropout,
    pub(crate) tiles: usize,
    pub(crate) start: Start,
    /// True if the projection to slices starts orthogonal.
    pub(crate) orthogonal: bool,
    /// True for Transolver++: one projection, a temperature for each point, and noise in training.
    pub(crate) plus: bool,
    /// Features of the context and the mode of mixing, in models that have a context; 0 features where they are given none.
    pub(crate) context: Option<(i64, MixingMode)>,
}

impl AttentionSpec {
    /// Features of a head.
    pub(crate) fn features(&self) -> i64 {
        self.width / self.heads
    }

    /// Checks the numbers that a configuration gives for `n_hidden`, `n_head`, `slice_num`, `tiles` and `dropout`.
    pub(crate) fn check(
        model: &'static str,
        [width, heads, slices, tiles]: [usize; 4],
        dropout: f64,
    ) -> Result<[i64; 3]> {
        let check = Checker(model);
        let width = check.extent("n_hidden", width)?;
        let heads = check.extent("n_head", heads)?;
        let slices = check.extent("slice_num", slices)?;
        check.extent("tiles", tiles)?;
        check.divisible(("n_hidden", width), ("n_head", heads))?;
        check.probability("dropout", dropout)?;
        Ok([width, heads, slices])
    }
}

/// Rejects NVIDIA's Transformer Engine.
pub(crate) fn check_engine(model: &'static str, use_te: bool) -> Result<()> {
    Checker(model).ensure(!use_te, || {
        "use_te is true, which asks for NVIDIA's Transformer Engine; expected false: --set model.use_te=false"
            .into()
    })
}

/// Returns the larger of the array of weights and the hidden features of the perceptrons, for one sample of these extents.
pub(crate) fn largest(
    extents: &[usize],
    [width, ratio]: [usize; 2],
    [heads, slices, tiles]: [usize; 3],
) -> LargestArray {
    let wide = |numbers: &[usize]| numbers.iter().fold(1u128, |all, &n| all.saturating_mul(n as u128));
    let points = wide(extents);
    let weights = points.saturating_mul(wide(&[heads, slices])) / tiles.max(1) as u128;
    let hidden = points.saturating_mul(wide(&[width, ratio]));
    if weights > hidden {
        let keys = format!("model.n_head = {heads}, model.slice_num = {slices}, model.tiles = {tiles}");
        LargestArray { elements: weights, keys }
    } else {
        let keys = format!("model.n_hidden = {width}, model.mlp_ratio = {ratio}");
        LargestArray { elements: hidden, keys }
    }
}
