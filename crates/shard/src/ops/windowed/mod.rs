//! Operators that look at neighbours: convolution, pooling, interpolation, padding. All go through the one window fetch: a
//! rank takes its part of the result, works out which indices of the input that needs, and fetches those.

mod adaptive;
mod conv;
mod halo;
mod interpolate;
mod pad;
mod pool;
mod steps;

use tch::Tensor;

pub use conv::{Conv, Padding};
pub(crate) use interpolate::interpolated;
pub use interpolate::{Interpolation, Resize};
pub use pad::PadMode;
pub use pool::Pool;
pub(crate) use steps::{Steps, spatial_dims};

use super::refuse;
use crate::error::Result;
use crate::layout::{Dim, Interval, Layout};
use crate::tensor::ShardTensor;
use crate::window::{Border, Need, Piece, Windows, fetch};

/// How an operator walks along one dim.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Walk {
    /// The dim of the input.
    dim: usize,
    /// Its extent.
    extent: i64,
    /// Extent of the result.
    result: i64,
    kernel: i64,
    stride: i64,
    dilation: i64,
    /// Elements that the border supplies before the first.
    pub(crate) before: i64,
    /// And after the last.
    pub(crate) after: i64,
}

impl Walk {
    /// Extent of the kernel with its gaps.
    fn reach(&self) -> i64 {
        self.dilation * (self.kernel - 1) + 1
    }

    /// The input's indices that some of the result's need; they may lie beyond its ends.
    fn window(&self, own: Interval) -> (i64, i64) {
        let first = own.start * self.stride - self.before;
        (first, first + (own.len - 1) * self.stride + self.reach())
    }
}

/// A rank's window of an input, and what follows from it for the result.
struct Windowed {
    local: Tensor,
    /// How the result is split along the walks' dims.
    results: Vec<Dim>,
    /// This rank's part of the result along them.
    own: Vec<Interval>,
    /// Whether a walk's border was left to the dense operator.
    native: Vec<bool>,
}

impl Windowed {
    /// Fetches the windows of all walks. Along dims that are not split, a border of zeros that is the same on both sides is
    /// left to the dense operator. A rank without results gets a window of fill that gives one, to be cut off again by
    /// [`Windowed::trim`]: so that it computes as all others do.
    fn new(x: &ShardTensor, walks: &[Walk], border: Border, fill: f64, native_border: bool) -> Result<Self> {
        let layout = x.layout();
        let mut windows = Windows::of(layout);
        // A copy of its own where something is repeated, which the gradient of the window is not.
        windows.hidden = border != Border::Replicate;
        let mut moved = false;
        let (mut results, mut own, mut native) = (Vec::new(), Vec::new(), Vec::new());
        for walk in walks {
            let dim = &layout.dims()[walk.dim];
            let result = dim.scaled(walk.result);
            let left =
                !dim.is_split() && border == Border::Fill && native_border && walk.before == walk.after;
            own.push(part_of(&result, layout));
            if !left {
                let need = windows_along(&result, walk, border);
                moved |= need != Need::of(dim);
                windows = windows.with(walk.dim, need);
            }
            results.push(result);
            native.push(left);
        }
        let local = if moved { fetch(x.local(), layout, &windows, fill)? } else { x.local().shallow_clone() };
        Ok(Self { local, results, own, native })
    }

    /// The result without the elements of ranks that have none.
    fn trim(&self, mut y: Tensor, walks: &[Walk]) -> Result<Tensor, tch::TchError> {
        for (walk, own) in walks.iter().zip(&self.own) {
            if own.len == 0 {
                y = y.f_narrow(walk.dim as i64, 0, 0)?;
            }
        }
        Ok(y)
    }
}

/// What each rank needs along a walk.
fn windows_along(result: &Dim, walk: &Walk, border: Border) -> Need {
    let mut need = Need::windows(result, walk.extent, border, |own| match own.len {
        0 => (0, 0),
        _ => walk.window(own),
    });
    for (pieces, part) in need.parts.iter_mut().zip(&result.parts) {
        if part.iter().all(|interval| interval.len == 0) {
            *pieces = vec![Piece::Fill(walk.reach())];
        }
    }
    need
}

/// This rank's part of a dim of consecutive parts.
fn part_of(dim: &Dim, layout: &Layout) -> Interval {
    let nothing = Interval::new(0, 0);
    let Some(at) = layout.coordinates() else { return nothing };
    dim.part(at, layout.mesh_shape()).first().copied().unwrap_or(nothing)
}

/// The name of an operator with so many spatial dims; others are refused under the first.
fn spatial_name(names: [&'static str; 3], spatial: usize) -> &'static str {
    names.get(spatial.wrapping_sub(1)).unwrap_or(&names[0])
}

/// One value for each of `dims` dims: those given, or the single one for all.
fn each(op: &'static str, what: &str, values: &[i64], dims: usize) -> Result<Vec<i64>> {
    match values {
        [one] => Ok(vec![*one; dims]),
        many if many.len() == dims => Ok(many.to_vec()),
        _ => refuse(op, format!("{what} {values:?}: expected one value, or one for each of {dims} dims")),
    }
}

/// Multiplies the last but `dims` dims' elements by a vector along dim `dim`.
fn along(vector: &Tensor, dim: usize, dims: usize) -> Result<Tensor, tch::TchError> {
    let shape: Vec<i64> = (0..dims).map(|d| if d == dim { -1 } else { 1 }).collect();
    vector.f_view(shape.as_slice())
}
