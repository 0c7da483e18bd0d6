//! Picking elements at places that all ranks know.

use tch::{Device, Kind, TchError, Tensor};

use super::indices_of;
use super::route::Route;
use crate::error::Result;
use crate::layout::{Dim, Layout, coordinates, index_of};
use crate::ops::{refuse, rule, torch};
use crate::tensor::ShardTensor;

const OP: &str = "pick";

impl ShardTensor {
    /// For each element of `like` along `dims`, the element of this tensor whose row-major number along the same dims `index`
    /// (`Int64`, the extents of `like` along `dims`, the same on all ranks) names; other dims stay. Laid out as `like`. Only named
    /// elements that a rank lacks travel: all ranks know the index, so it does not.
    ///
    /// # Errors
    ///
    /// Dims, shapes or layouts that do not fit; numbers out of range; the exchange fails.
    pub(crate) fn pick(&self, dims: &[usize], index: &Tensor, like: &Self) -> Result<Self> {
        rule(OP, &[self, like], || {
            check(self, dims, index, like)?;
            let x = self.resolved()?.consecutive_along(|dim| dims.contains(&dim))?;
            let (from, to) = (axes(x.layout(), dims), axes(like.layout(), dims));
            if let Some(axis) = from.iter().find(|axis| !to.contains(axis)) {
                return refuse(
                    OP,
                    format!("{x} is split over axis {axis} along {dims:?}, and {like} is not"),
                );
            }
            let alike = to.iter().copied().filter(|axis| !from.contains(axis)).collect::<Vec<_>>();
            let local = x.mark_varying(&alike)?;
            let rows = torch(OP, rows(&local, dims))?;
            let picked = if from.is_empty() {
                let wanted = torch(OP, wanted(index, like.layout().intervals().as_slice(), dims))?;
                torch(OP, wanted.f_reshape([-1]).and_then(|wanted| rows.f_index_select(0, &wanted)))?
            } else {
                route(&x, dims, index, like, &from)?.pull(OP, &rows)?
            };
            let mut parts = x.layout().dims().to_vec();
            for &dim in dims {
                parts[dim] = like.layout().dims()[dim].clone();
            }
            let layout = x.layout().with_dims(parts);
            Ok(Self::new(torch(OP, unrolled(&picked, dims, layout.local_shape()))?, layout))
        })
    }
}

fn check(x: &ShardTensor, dims: &[usize], index: &Tensor, like: &ShardTensor) -> Result<()> {
    let shapes = || format!("{:?} at {:?} along {dims:?} as {:?}", x.shape(), index.size(), like.shape());
    let exists = dims.is_sorted() && dims.iter().all(|&dim| dim < x.ndim()) && x.ndim() == like.ndim();
    if !exists || index.kind() != Kind::Int64 {
        return refuse(OP, format!("cannot pick {}", shapes()));
    }
    let extents: Vec<i64> = dims.iter().map(|&dim| like.shape()[dim]).collect();
    let rest = |dim: &usize| !dims.contains(dim);
    let fits = |dim: usize| {
        x.shape()[dim] == like.shape()[dim] && x.layout().dims()[dim].parts == like.layout().dims()[dim].parts
    };
    if extents != index.size() || !(0..x.ndim()).filter(rest).all(fits) {
        return refuse(OP, format!("shapes or layouts do not fit: {}", shapes()));
    }
    let count: i64 = dims.iter().map(|&dim| x.shape()[dim]).product();
    let outside = torch(OP, index.f_lt(0).and_then(|low| low.f_logical_or(&index.f_ge(count)?)?.f_any()))?;
    match torch(OP, outside.f_int64_value(&[]))? {
        0 => Ok(()),
        _ => refuse(OP, format!("numbers outside of 0..{count}")),
    }
}

/// The axes that split these dims, sorted.
fn axes(layout: &Layout, dims: &[usize]) -> Vec<usize> {
    let mut axes: Vec<usize> = dims.iter().flat_map(|&dim| layout.dims()[dim].axes.clone()).collect();
    axes.sort_unstable();
    axes
}

/// The elements along `dims` as rows.
fn rows(x: &Tensor, dims: &[usize]) -> Result<Tensor, TchError> {
    let (from, to) = moved(dims);
    let rest = (0..x.dim()).filter(|dim| !dims.contains(dim)).map(|dim| x.size()[dim]);
    let count: i64 = dims.iter().map(|&dim| x.size()[dim]).product();
    x.f_movedim(from, to)?.f_reshape([count].into_iter().chain(rest).collect::<Vec<_>>())
}

/// The inverse of [`rows`], for a result of `shape`.
fn unrolled(rows: &Tensor, dims: &[usize], shape: &[i64]) -> Result<Tensor, TchError> {
    let (from, to) = moved(dims);
    let first = dims.iter().map(|&dim| shape[dim]);
    let rest = (0..shape.len()).filter(|dim| !dims.contains(dim)).map(|dim| shape[dim]);
    rows.f_reshape(first.chain(rest).collect::<Vec<_>>())?.f_movedim(to, from)
}

fn moved(dims: &[usize]) -> (Vec<i64>, Vec<i64>) {
    (dims.iter().map(|&dim| dim as i64).collect(), (0..dims.len() as i64).collect())
}

/// The part of the index that belongs to a shard with these intervals.
fn wanted(
    index: &Tensor,
    intervals: &[&[crate::layout::Interval]],
    dims: &[usize],
) -> Result<Tensor, TchError> {
    let own = |(at, &dim): (usize, &usize)| Ok((at as i64, indices_of(intervals[dim], index.device())?));
    let own: Vec<(i64, Tensor)> = dims.iter().enumerate().map(own).collect::<Result<_, TchError>>()?;
    own.iter().try_fold(index.shallow_clone(), |index, (at, own)| index.f_index_select(*at, own))
}

/// The way of the picked elements, computed from the layouts.
fn route(
    x: &ShardTensor,
    dims: &[usize],
    index: &Tensor,
    like: &ShardTensor,
    axes: &[usize],
) -> Result<Route> {
    let (layout, group) = (x.layout(), x.layout().group_along(axes)?);
    let order = layout.mesh().ranks();
    let mut asked = Vec::with_capacity(group.size());
    for &rank in group.ranks() {
        let intervals = like.layout().intervals_of(layout.place(&order, rank)?);
        asked.push(torch(OP, wanted(index, &intervals, dims).and_then(|w| w.f_reshape([-1])))?);
    }
    let owners = owners(layout, dims, group.ranks())?;
    let found = |wanted: &Tensor| locate(layout, dims, &owners, wanted);
    let found = asked.iter().map(found).collect::<Result<Vec<_>, _>>();
    Route::planned(OP, &torch(OP, found)?, &group)
}

/// For each combination of parts along `dims`, the last fastest, the rank in the group that has it.
fn owners(layout: &Layout, dims: &[usize], group: &[usize]) -> Result<Vec<i64>> {
    let (order, mesh) = (layout.mesh().ranks(), layout.mesh_shape());
    let Some(own) = layout.coordinates() else {
        return refuse(OP, format!("this rank is outside of {}", layout.mesh()));
    };
    let counts: Vec<usize> = dims.iter().map(|&dim| layout.dims()[dim].parts.len()).collect();
    let rank_of = |combination: usize| {
        let mut at = own.to_vec();
        for (&dim, part) in dims.iter().zip(coordinates(combination, &counts)) {
            let split = &layout.dims()[dim].axes;
            let extents: Vec<usize> = split.iter().map(|&axis| mesh[axis]).collect();
            for (&axis, place) in split.iter().zip(coordinates(part, &extents)) {
                at[axis] = place;
            }
        }
        layout.place(group, order[index_of(&at, mesh)]).map(|place| place as i64)
    };
    (0..counts.iter().product()).map(rank_of).collect()
}

/// The owners of numbered elements, and their places among the rows of the owner.
fn locate(
    layout: &Layout,
    dims: &[usize],
    owners: &[i64],
    numbers: &Tensor,
) -> Result<(Tensor, Tensor), TchError> {
    let device = numbers.device();
    let zeros = || Tensor::f_zeros_like(numbers);
    let (mut owner, mut place, mut rest) = (zeros()?, zeros()?, numbers.shallow_clone());
    let (mut stride, mut scale) = (numbers.f_ones_like()?, 1);
    for &dim in dims.iter().rev() {
        let split = &layout.dims()[dim];
        let extent = split.extent().max(1);
        let at = rest.f_remainder(extent)?;
        rest = rest.f_divide_scalar_mode(extent, "floor")?;
        let (part, within, size) = along(split, &at, device)?;
        owner = owner.f_add(&part.f_mul_scalar(scale)?)?;
        place = place.f_add(&within.f_mul(&stride)?)?;
        stride = stride.f_mul(&size)?;
        scale *= split.parts.len() as i64;
    }
    let owners = Tensor::f_from_slice(owners)?.f_to_device(device)?;
    Ok((owners.f_take(&owner)?, place))
}

/// Of indices along a dim: the number of the part, the place in it and its size.
fn along(split: &Dim, at: &Tensor, device: Device) -> Result<(Tensor, Tensor, Tensor), TchError> {
    let table = |list: &[i64]| Tensor::f_from_slice(list)?.f_to_device(device);
    let (starts, sizes) = (split.boundaries(), split.sizes());
    let ends = table(&starts[1..])?;
    let part = at.f_bucketize(&ends, false, true)?.f_clamp_max(sizes.len() as i64 - 1)?;
    let start = table(&starts[..sizes.len()])?.f_take(&part)?;
    let size = table(&sizes)?.f_take(&part)?;
    Ok((part.shallow_clone(), at.f_sub(&start)?, size))
}
