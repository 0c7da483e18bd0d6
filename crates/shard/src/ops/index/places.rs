//! Picking elements at places that all ranks know.

use std::iter;

use isobar_array::kernel::{check_picks, from_rows, rows_at};
use tch::{Device, TchError, Tensor};

use super::indices_of;
use super::route::Route;
use crate::error::Result;
use crate::layout::{Dim, Interval, Layout, coordinates, index_of};
use crate::ops::{refuse, rule, torch};
use crate::tensor::ShardTensor;

const OP: &str = "pick";

impl ShardTensor {
    /// Picks the elements whose row-major numbers along `dims` each `(index, like)` gives, in the layout of `like`: see
    /// [`Local::pick`](isobar_array::Local::pick). Each rank receives only the elements that it is missing, in one exchange.
    /// Indices are not sent: all ranks have them.
    ///
    /// # Errors
    ///
    /// Dims, shapes or layouts that do not fit; numbers out of range; the exchange fails.
    pub(crate) fn pick(&self, dims: &[usize], wanted: &[(&Tensor, &Self)]) -> Result<Vec<Self>> {
        let inputs: Vec<&Self> = iter::once(self).chain(wanted.iter().map(|&(_, like)| like)).collect();
        rule(OP, &inputs, || {
            let x = self.resolved()?;
            let wanted: Vec<(&Tensor, &Layout)> =
                wanted.iter().map(|&(index, like)| (index, like.layout())).collect();
            let to = check(&x, dims, &wanted)?;
            let x = x.consecutive_along(|dim| dims.contains(&dim))?;
            let from = axes(x.layout(), dims);
            if let Some(axis) = from.iter().find(|axis| !to.contains(axis)) {
                return refuse(
                    OP,
                    format!("{x} is split over axis {axis} along {dims:?}, but its results are not"),
                );
            }
            let alike = to.iter().copied().filter(|axis| !from.contains(axis)).collect::<Vec<_>>();
            let local = x.mark_varying(&alike)?;
            let picked = if from.is_empty() {
                let own = wanted.iter().map(|(index, like)| part_of(index, &like.intervals(), dims));
                let numbers = own.collect::<Result<Vec<_>, _>>().and_then(|own| Tensor::f_cat(&own, 0));
                torch(OP, numbers.and_then(|numbers| rows_at(&local, dims, &numbers)))?
            } else {
                let (given, route) = route(&x, dims, &wanted, &from)?.apart(OP)?;
                route.pull(OP, &torch(OP, rows_at(&local, dims, &given))?)?
            };
            let layouts = wanted.iter().map(|(_, like)| {
                let mut parts = x.layout().dims().to_vec();
                dims.iter().for_each(|&dim| parts[dim] = like.dims()[dim].clone());
                x.layout().with_dims(parts)
            });
            let layouts: Vec<Layout> = layouts.collect();
            let rows = |layout: &Layout| dims.iter().map(|&dim| layout.local_shape()[dim]).product();
            let counts: Vec<i64> = layouts.iter().map(rows).collect();
            let picked = torch(OP, picked.f_split_with_sizes(&counts, 0))?;
            let made = picked.iter().zip(layouts).map(|(rows, layout)| {
                Ok(Self::new(torch(OP, from_rows(rows, dims, layout.local_shape()))?, layout))
            });
            made.collect()
        })
    }
}

/// Checks the arguments of a pick; returns the axes that shard `dims` of each result.
fn check(x: &ShardTensor, dims: &[usize], wanted: &[(&Tensor, &Layout)]) -> Result<Vec<usize>> {
    let shapes: Vec<_> = wanted.iter().map(|&(index, like)| (index, like.shape().to_vec())).collect();
    check_picks(x.shape(), dims, &shapes)?;
    let Some((_, first)) = wanted.first() else { return refuse(OP, "nothing to pick") };
    let to = axes(first, dims);
    for (_, like) in wanted {
        let same = |dim: usize| dims.contains(&dim) || x.layout().dims()[dim].parts == like.dims()[dim].parts;
        if axes(like, dims) != to || !(0..x.ndim()).all(same) {
            return refuse(OP, format!("layouts do not fit: {x} along {dims:?} as {like}"));
        }
    }
    Ok(to)
}

/// The axes that split these dims, sorted.
fn axes(layout: &Layout, dims: &[usize]) -> Vec<usize> {
    let mut axes: Vec<usize> = dims.iter().flat_map(|&dim| layout.dims()[dim].axes.clone()).collect();
    axes.sort_unstable();
    axes
}

/// Returns the numbers of the index that belong to a shard with these intervals, in row-major order.
fn part_of(index: &Tensor, intervals: &[&[Interval]], dims: &[usize]) -> Result<Tensor, TchError> {
    let own = |(at, &dim): (usize, &usize)| Ok((at as i64, indices_of(intervals[dim], index.device())?));
    let own: Vec<(i64, Tensor)> = dims.iter().enumerate().map(own).collect::<Result<_, TchError>>()?;
    let part = own.iter().try_fold(index.shallow_clone(), |index, (at, own)| index.f_index_select(*at, own));
    part?.f_reshape([-1])
}

/// Computes the route of the picked elements from the layouts.
fn route(x: &ShardTensor, dims: &[usize], wanted: &[(&Tensor, &Layout)], axes: &[usize]) -> Result<Route> {
    let (layout, group) = (x.layout(), x.layout().group_along(axes)?);
    let order = layout.mesh().ranks();
    let owners = owners(layout, dims, group.ranks())?;
    let mut asked = Vec::with_capacity(group.size());
    for &rank in group.ranks() {
        let place = layout.place(&order, rank)?;
        let numbers = wanted.iter().map(|(index, like)| part_of(index, &like.intervals_of(place), dims));
        let numbers = numbers.collect::<Result<Vec<_>, _>>().and_then(|numbers| Tensor::f_cat(&numbers, 0));
        asked.push(torch(OP, numbers.and_then(|numbers| locate(layout, dims, &owners, &numbers)))?);
    }
    Route::planned(OP, &asked, &group)
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
