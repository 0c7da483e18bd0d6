//! Operators that look at neighbours: convolution, pooling, interpolation, padding. All go through the one window fetch: a
//! rank takes its part of the result, works out which indices of the input that needs, and fetches those.
//!
//! They name no rank by number: plans follow from layouts.

mod adaptive;
mod channels;
mod conv;
mod halo;
mod interpolate;
mod pad;
mod pool;
mod strips;

use isobar_array::PadMode;
use isobar_array::kernel::WindowGeometry;
use tch::Tensor;

use crate::error::Result;
use crate::layout::{Dim, Interval, Layout};
use crate::rules::{Footprint, Side};
use crate::tensor::ShardTensor;
use crate::window::{Border, HaloSpec, WindowRun, Windows, fetch};

/// Windows of all ranks, and the layout of the result that follows from them.
struct WindowPlan {
    windows: Windows,
    /// True if some rank's window is not its shard.
    moved: bool,
    /// Split of the result along the windowed dims.
    results: Vec<Dim>,
    /// This rank's part of the result along them.
    own: Vec<Interval>,
    /// True for dims whose border is left to the dense operator.
    native: Vec<bool>,
}

impl WindowPlan {
    /// Plans the windows of all geometries. Along dims that are not split, the dense operator pads symmetric borders of zeros.
    /// A rank without results gets a window of fill values that gives one result, so that it makes the same calls as all others;
    /// [`Windowed::trim`] cuts that result off.
    fn new(layout: &Layout, geometries: &[WindowGeometry], border: Border, native_border: bool) -> Self {
        let mut windows = Windows::own(layout);
        // A copy of its own where something is repeated, which the gradient of the window is not.
        windows.hidden = border != Border::Replicate;
        let mut moved = false;
        let (mut results, mut own, mut native) = (Vec::new(), Vec::new(), Vec::new());
        for geometry in geometries {
            let dim = &layout.dims()[geometry.dim];
            let result = split_of_result(dim, geometry);
            let symmetric = geometry.before == geometry.after;
            let left = !dim.is_split() && border == Border::Fill && native_border && symmetric;
            own.push(part_of(&result, layout));
            if !left {
                let need = windows_along(&result, geometry, border);
                moved |= need != HaloSpec::own(dim);
                windows = windows.with(geometry.dim, need);
            }
            results.push(result);
            native.push(left);
        }
        Self { windows, moved, results, own, native }
    }

    /// Fetches the windows.
    fn fetch(self, x: &ShardTensor, fill: f64) -> Result<Windowed> {
        let local = match self.moved {
            true => fetch(x.local(), x.layout(), &self.windows, fill)?,
            false => x.local().shallow_clone(),
        };
        Ok(Windowed { local, results: self.results, own: self.own, native: self.native })
    }
}

/// A rank's window of an input.
struct Windowed {
    local: Tensor,
    /// Split of the result along the windowed dims.
    results: Vec<Dim>,
    /// This rank's part of the result along them.
    own: Vec<Interval>,
    /// True for dims whose border is left to the dense operator.
    native: Vec<bool>,
}

impl Windowed {
    /// Fetches the windows of all geometries, as [`WindowPlan::new`] plans them.
    fn new(
        x: &ShardTensor,
        geometries: &[WindowGeometry],
        border: Border,
        fill: f64,
        native_border: bool,
    ) -> Result<Self> {
        WindowPlan::new(x.layout(), geometries, border, native_border).fetch(x, fill)
    }

    /// The result without the elements of ranks that have none.
    fn trim(&self, mut y: Tensor, geometries: &[WindowGeometry]) -> Result<Tensor, tch::TchError> {
        for (geometry, own) in geometries.iter().zip(&self.own) {
            if own.len == 0 {
                y = y.f_narrow(geometry.dim as i64, 0, 0)?;
            }
        }
        Ok(y)
    }
}

/// Returns the interval of input indices that an interval of the result needs; it may extend beyond the input's ends.
fn window(geometry: &WindowGeometry, own: Interval) -> (i64, i64) {
    let first = own.start * geometry.stride - geometry.before;
    (first, first + (own.len - 1) * geometry.stride + geometry.reach())
}

/// Returns the window of an operator on a rank, to bound its bytes.
fn window_on(call: &Footprint<'_>, side: &Side, geometry: &WindowGeometry) -> Result<(i64, i64)> {
    let layout = &call.tensor(0)?.layout;
    let mut dims = layout.dims().to_vec();
    dims[side.dim] = split_of_result(&dims[side.dim], geometry);
    let layout = layout.with_dims(dims);
    let own = layout.intervals_of(side.rank)[side.dim].first().copied();
    Ok(own.filter(|own| own.len > 0).map_or((0, 0), |own| window(geometry, own)))
}

/// Returns the border of a window for a mode of padding.
fn border(mode: PadMode) -> Border {
    match mode {
        PadMode::Constant => Border::Fill,
        PadMode::Circular => Border::Circular,
        PadMode::Reflect => Border::Reflect,
        PadMode::Replicate => Border::Replicate,
    }
}

/// Returns the sharding of a result along one dim. With stride 1, each element of the result stays on the rank with
/// the centre of its window, so that a convolution which crops a padding restores the sharding before that padding.
/// With larger strides, the sharding is scaled.
fn split_of_result(dim: &Dim, geometry: &WindowGeometry) -> Dim {
    if geometry.stride != 1 || geometry.result == geometry.extent {
        return dim.scaled(geometry.result);
    }
    let shift = geometry.before - (geometry.reach() - 1) / 2;
    let mut boundaries: Vec<i64> =
        dim.boundaries().into_iter().map(|boundary| (boundary + shift).clamp(0, geometry.result)).collect();
    boundaries[0] = 0;
    if let Some(last) = boundaries.last_mut() {
        *last = geometry.result;
    }
    Dim::between(dim.axes.clone(), &boundaries)
}

/// Returns the window of each rank along one dim.
fn windows_along(result: &Dim, geometry: &WindowGeometry, border: Border) -> HaloSpec {
    let mut need = HaloSpec::windows(result, geometry.extent, border, |own| match own.len {
        0 => (0, 0),
        _ => window(geometry, own),
    });
    for (pieces, part) in need.parts.iter_mut().zip(&result.parts) {
        if part.iter().all(|interval| interval.len == 0) {
            *pieces = vec![WindowRun::Fill(geometry.reach())];
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
