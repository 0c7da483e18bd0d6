//! Fields at points between those of their grid.

use tch::{Kind, Tensor};

use crate::array::{Array, Comparison, Unary, argument, named};
use crate::dtypes::{Dtype, check_dtypes};
use crate::error::Result;
use crate::registry::Attrs;
use crate::windowed::Interpolation;

/// Options of [`grid_sample`](super::Resample::grid_sample).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridSample {
    /// Linear or nearest.
    pub interpolation: Interpolation,
    /// Values beyond the ends of the field.
    pub padding: SamplePadding,
    /// Places −1 and 1 at the centres of the first and the last cell; otherwise they are at the cells' outer edges.
    pub align_corners: bool,
}

impl Default for GridSample {
    /// Returns PyTorch's defaults: linear interpolation, zero padding, `align_corners` off.
    fn default() -> Self {
        Self { interpolation: Interpolation::Linear, padding: SamplePadding::default(), align_corners: false }
    }
}

impl GridSample {
    /// Returns them as PyTorch's arguments. PyTorch says bilinear over three dims, too.
    pub(super) fn attrs(&self) -> Attrs {
        let (mode, padding) = (self.interpolation.name(2), self.padding.name());
        args!("mode": mode, "padding_mode": padding, "align_corners": self.align_corners)()
    }
}

/// Values of a sampled field beyond its ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SamplePadding {
    /// Zero.
    #[default]
    Zeros,
    /// The value at the end.
    Border,
    /// The field mirrored at its ends.
    Reflection,
}

impl SamplePadding {
    /// Returns PyTorch's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zeros => "zeros",
            Self::Border => "border",
            Self::Reflection => "reflection",
        }
    }
}

/// A point of the field's grid beside a sampled point, along one dim.
struct Neighbour<A> {
    /// Its index, in double precision; one that does not exist is moved to the nearest that does.
    index: A,
    weight: A,
}

pub(super) fn grid_sample<A: Array>(x: &A, grid: &A, options: &GridSample) -> Result<A> {
    const OP: &str = "grid_sample";
    let (shape, points) = (x.shape(), grid.shape());
    let spatial = shape.len().saturating_sub(2);
    let fits = (2..=3).contains(&spatial)
        && points.len() == spatial + 2
        && points[0] == shape[0]
        && points[spatial + 1] == spatial as i64
        && shape[2..].iter().all(|&extent| extent > 0);
    if !fits {
        let want = "[batch, channel, 2 or 3 extents] and [batch, extents…, 2 or 3]";
        return Err(argument(OP, format!("shapes {shape:?} and {points:?}; expected {want}")));
    }
    let tensors = [("input", x.kind(), Dtype::Floating), ("grid", grid.kind(), Dtype::Operand)];
    check_dtypes(OP, tensors, x.device())?;
    let kinds = [x.kind(), grid.kind()];
    let all_dims: Vec<usize> = (0..spatial + 2).collect();
    let is_wide = kinds == [Kind::Float; 2] || kinds == [Kind::Double; 2];
    if is_wide && x.num_shards(&all_dims) == 1 && grid.num_shards(&[spatial + 1]) == 1 {
        return sample_replicated(x, grid, options);
    }
    // Rows of the table: the index of a sample times the points of a field, and of each dim in turn.
    let samples = whole(&grid.to_kind(Kind::Double)?.linspace_along(0, 0.0, (shape[0] - 1) as f64)?)?;
    let samples = samples.reshape(&[&[shape[0]], &vec![1; spatial][..]].concat())?;
    let mut corners = vec![(samples, None::<A>)];
    for (dim, &extent) in shape[2..].iter().enumerate() {
        let at = grid.select(-1, (spatial - 1 - dim) as i64)?;
        let neighbours = neighbours(OP, &at, extent, options)?;
        let mut next = Vec::with_capacity(corners.len() * neighbours.len());
        for (row, weight) in &corners {
            for beside in &neighbours {
                let row = row.mul_scalar(extent as f64)?.add(&beside.index)?;
                let weight = match weight {
                    Some(weight) => weight.mul(&beside.weight)?,
                    None => beside.weight.shallow_clone(),
                };
                next.push((row, Some(weight)));
            }
        }
        corners = next;
    }
    let rows: Vec<A> = corners.iter().map(|(row, _)| row.to_kind(Kind::Int64)).collect::<Result<_>>()?;
    let rows = A::stack(&rows.iter().collect::<Vec<_>>(), 0)?;
    let weights: Vec<&A> = corners.iter().filter_map(|(_, weight)| weight.as_ref()).collect();
    let weights = A::stack(&weights, 0)?.unsqueeze(-1)?;
    let channels_last: Vec<i64> = [0].into_iter().chain(2..=spatial as i64 + 1).chain([1]).collect();
    let table = x.permute(&channels_last)?.reshape(&[-1, shape[1]])?;
    let y = table.embedding(&rows)?.mul(&weights)?.reduce(crate::array::Reduction::Sum, &[0], false)?;
    let channels_second: Vec<i64> = [0, spatial as i64 + 1].into_iter().chain(1..=spatial as i64).collect();
    y.permute(&channels_second)
}

/// Samples a field that every rank holds in full, with libtorch's operator.
fn sample_replicated<A: Array>(x: &A, grid: &A, options: &GridSample) -> Result<A> {
    const OP: &str = "grid_sample";
    let dims = grid.shape().len();
    let (points, _) = grid.into_local()?;
    let mode = match options.interpolation {
        Interpolation::Linear => 0,
        Interpolation::Nearest => 1,
        other => return Err(argument(OP, format!("interpolation {other:?}; expected Linear or Nearest"))),
    };
    let padding = options.padding as i64;
    let channels_last: Vec<i64> = [0].into_iter().chain(2..dims as i64).chain([1]).collect();
    let sampled = |x: &Tensor, indices: &[Tensor]| {
        let sample = || {
            let own = if points.size()[0] == x.size()[0] {
                x.shallow_clone()
            } else {
                x.f_index_select(0, &indices[0])?
            };
            let mut shape = points.size();
            shape[dims - 1] = x.size()[1];
            if shape.contains(&0) {
                // libtorch does not take these. The graph is that of the other ranks.
                return own.f_sum(own.kind())?.f_add(&points.f_sum(points.kind())?)?.f_expand(shape, false);
            }
            own.f_grid_sampler(&points, mode, padding, options.align_corners)?.f_permute(&channels_last)
        };
        named(OP, &[x, &points], sample())
    };
    let channels_second: Vec<i64> = [0, dims as i64 - 1].into_iter().chain(1..dims as i64 - 1).collect();
    x.on_shards_of(grid, dims - 1, &sampled)?.permute(&channels_second)
}

/// The neighbours along a dim of that extent of points at these coordinates between −1 and 1.
fn neighbours<A: Array>(
    op: &'static str,
    at: &A,
    extent: i64,
    options: &GridSample,
) -> Result<Vec<Neighbour<A>>> {
    let n = extent as f64;
    let at = match options.align_corners {
        true => at.add_scalar(1.0)?.mul_scalar((n - 1.0) / 2.0)?,
        false => at.add_scalar(1.0)?.mul_scalar(n / 2.0)?.add_scalar(-0.5)?,
    };
    let last = n - 1.0;
    let at = match options.padding {
        // All of them are zero from a point beyond the ends on.
        SamplePadding::Zeros => clamp(&at, -2.0, n + 1.0)?,
        SamplePadding::Border => cut_to_ends(&at, last)?,
        SamplePadding::Reflection => {
            let (low, span) = if options.align_corners { (0.0, last) } else { (-0.5, n) };
            cut_to_ends(&mirrored(&at, low, span)?, last)?
        }
    };
    let floor = whole(&at.detach()?.add_scalar(2.0)?)?.add_scalar(-2.0)?;
    let past = at.sub(&floor.to_kind(at.kind())?)?;
    match options.interpolation {
        Interpolation::Linear => {
            let before = past.mul_scalar(-1.0)?.add_scalar(1.0)?;
            Ok(vec![
                neighbour_at(&floor, &before, last)?,
                neighbour_at(&floor.add_scalar(1.0)?, &past, last)?,
            ])
        }
        Interpolation::Nearest => {
            let nearest = floor.add(&rounded_up(&floor, &past.detach()?.to_kind(Kind::Double)?)?)?;
            let one = past.detach()?.mul_scalar(0.0)?.add_scalar(1.0)?;
            Ok(vec![neighbour_at(&nearest, &one, last)?])
        }
        other => Err(argument(op, format!("interpolation {other:?}; expected Linear or Nearest"))),
    }
}

/// Clamps coordinates to the ends of the field. Points at the ends have no gradient, as in PyTorch, whose `clamp` would
/// give them one.
fn cut_to_ends<A: Array>(at: &A, last: f64) -> Result<A> {
    let cut = clamp(&at.detach()?, 0.0, last)?;
    let first = cut.mul_scalar(0.0)?;
    let before_last = cut.compare(Comparison::Lt, &first.add_scalar(last)?)?.select_where(at, &cut)?;
    cut.compare(Comparison::Gt, &first)?.select_where(&before_last, &cut)
}

/// The neighbour with that index; beyond the ends it has no weight.
fn neighbour_at<A: Array>(index: &A, weight: &A, last: f64) -> Result<Neighbour<A>> {
    let inside = clamp(index, 0.0, last)?;
    let outside = clamp(&index.sub(&inside)?.unary(Unary::Abs)?, 0.0, 1.0)?;
    let exists = outside.mul_scalar(-1.0)?.add_scalar(1.0)?.to_kind(weight.kind())?;
    Ok(Neighbour { index: inside, weight: weight.mul(&exists)? })
}

/// 1 where a point past `floor` by that much is nearer to the next one, else 0; half-way, 1 where the next one is even.
fn rounded_up<A: Array>(floor: &A, past: &A) -> Result<A> {
    let at_least_half = clamp(&whole(&past.mul_scalar(2.0)?)?, 0.0, 1.0)?;
    let at_most_half = clamp(&whole(&past.mul_scalar(-2.0)?.add_scalar(2.0)?)?, 0.0, 1.0)?;
    let more = at_most_half.mul_scalar(-1.0)?.add_scalar(1.0)?;
    // −2 is even, and no index is below it.
    let shifted = floor.add_scalar(2.0)?;
    let odd = shifted.sub(&whole(&shifted.mul_scalar(0.5)?)?.mul_scalar(2.0)?)?;
    more.add(&at_least_half.sub(&more)?.mul(&odd)?)
}

/// Points beyond an interval mirrored at its ends.
fn mirrored<A: Array>(at: &A, low: f64, span: f64) -> Result<A> {
    if span == 0.0 {
        return at.mul_scalar(0.0);
    }
    let from_low = at.add_scalar(-low)?.unary(Unary::Abs)?;
    let turns = whole(&from_low.detach()?.mul_scalar(1.0 / span)?)?;
    let backwards = turns.sub(&whole(&turns.mul_scalar(0.5)?)?.mul_scalar(2.0)?)?.to_kind(at.kind())?;
    let extra = from_low.sub(&turns.mul_scalar(span)?.to_kind(at.kind())?)?;
    let mirrored = extra.mul_scalar(-2.0)?.add_scalar(span)?;
    extra.add(&backwards.mul(&mirrored)?)?.add_scalar(low)
}

/// Cuts off what is behind the point of numbers of at least 0; in double precision, in which indices are exact.
fn whole<A: Array>(x: &A) -> Result<A> {
    x.to_kind(Kind::Int64)?.to_kind(Kind::Double)
}

fn clamp<A: Array>(x: &A, min: f64, max: f64) -> Result<A> {
    x.unary(Unary::Clamp { min, max })
}

pub(super) fn affine_grid<A: Array>(theta: &A, field: &A, align_corners: bool) -> Result<A> {
    const OP: &str = "affine_grid";
    let (of_theta, shape) = (theta.shape(), field.shape());
    let spatial = shape.len().saturating_sub(2);
    if !(2..=3).contains(&spatial) || of_theta != [shape[0], spatial as i64, spatial as i64 + 1] {
        let want = "[batch, d, d + 1] and [batch, channel, d extents], d = 2 or 3";
        return Err(argument(OP, format!("shapes {of_theta:?} and {shape:?}; expected {want}")));
    }
    let spread = |column: i64| {
        let column = theta.select(2, column)?;
        column.reshape(&[&[shape[0]], &vec![1; spatial][..], &[spatial as i64]].concat())
    };
    let mut grid = spread(spatial as i64)?;
    for dim in 0..spatial {
        let n = shape[dim + 2] as f64;
        let end = if align_corners { 1.0 } else { (n - 1.0) / n };
        let points = field.linspace_along(dim as i64 + 2, -end, end)?.to_kind(theta.kind())?;
        let points = if align_corners && shape[dim + 2] == 1 { points.mul_scalar(0.0)? } else { points };
        let mut along = vec![1; spatial + 2];
        along[dim + 1] = shape[dim + 2];
        // Coordinates stand in the opposite order of the dims.
        let column = spread((spatial - 1 - dim) as i64)?;
        grid = grid.add(&points.reshape(&along)?.mul(&column)?)?;
    }
    Ok(grid)
}
