//! Reshaping: split dims are merged and cut without moving elements wherever the ranks' parts are boxes of the result too.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::layout::{Dim, Interval, Layout, join};
use crate::ops::{operator, refuse, torch};
use crate::rules::Footprint;
use crate::tensor::{ShardTensor, received};

/// More pieces than this a part shall not be in; it is exchanged into one piece then.
const MAX_PIECES: usize = 256;

impl ShardTensor {
    /// The elements, in row-major order, as another shape; one extent may be −1.
    ///
    /// Every rank keeps its elements where its part of the result is a box of them: dims merged (also with others before a
    /// split one: its part then consists of several pieces), and cut again. Else the elements that would be torn from their
    /// box are exchanged, and no others.
    ///
    /// # Errors
    ///
    /// A shape of another number of elements; the errors of the exchange.
    pub fn reshape(&self, shape: &[i64]) -> Result<Self> {
        const OP: &str = "reshape";
        operator(OP, &[self], args!("size": shape), || {
            if shape == self.shape() {
                return Ok(self.shallow_clone());
            }
            let shape = fill_in(OP, shape, self.layout().numel())?;
            if self.layout().numel() == 0 {
                let x = self.replicate_where(|_| true)?;
                let layout = x.layout().with_dims(shape.iter().map(|&extent| Dim::whole(extent)).collect());
                return Ok(Self::new(torch(OP, x.local().f_reshape(&shape))?, layout));
            }
            let mut x = self.shallow_clone();
            for _ in 0..3 {
                match plan(x.layout(), &shape) {
                    Plan::Views(dims) => {
                        let layout = x.layout().with_dims(dims);
                        let shape = layout.local_shape().to_vec();
                        return x.viewed(OP, layout, |x| x.f_reshape(&shape));
                    }
                    Plan::Exchange(dims) => {
                        let x0 = x.resolved()?;
                        x = x0.to_layout(&x0.layout().with_dims(dims))?;
                    }
                }
            }
            let x = x.replicate_dims(OP, &(0..x.ndim()).collect::<Vec<_>>())?;
            let layout = x.layout().with_dims(shape.iter().map(|&extent| Dim::whole(extent)).collect());
            Ok(Self::new(torch(OP, x.local().f_reshape(&shape))?, layout))
        })
    }
}

/// Plan of a reshape.
enum Plan {
    /// The result's dims; every rank keeps what it has.
    Views(Vec<Dim>),
    /// Other parts of the input's dims, with which it needs nothing more.
    Exchange(Vec<Dim>),
}

fn plan(layout: &Layout, shape: &[i64]) -> Plan {
    let mut result = Vec::with_capacity(shape.len());
    let mut input: Vec<Dim> = layout.dims().to_vec();
    let mut views = true;
    for (old, new) in groups(layout.shape(), shape) {
        let dims = &layout.dims()[old.clone()];
        let extents = &shape[new];
        if dims.len() == extents.len()
            && dims.iter().zip(extents).all(|(dim, extent)| dim.extent() == *extent)
        {
            result.extend(dims.iter().cloned());
            continue;
        }
        if dims.iter().all(|dim| !dim.is_split()) {
            result.extend(extents.iter().map(|&extent| Dim::whole(extent)));
            continue;
        }
        if dims.iter().all(|dim| dim.extent() == 1) {
            // One element, wanted by all.
            views = false;
            input.splice(old, dims.iter().map(|dim| Dim::whole(dim.extent())));
            result.extend(extents.iter().map(|&extent| Dim::whole(extent)));
            continue;
        }
        let cut = merged(dims, layout.mesh_shape()).and_then(|flat| cut(&flat, extents, layout.mesh_shape()));
        match cut {
            Some(cut) => result.extend(cut),
            None => {
                views = false;
                let aligned = aligned(dims, extents, layout.mesh_shape());
                input.splice(old, aligned);
                result.extend(extents.iter().map(|&extent| Dim::whole(extent)));
            }
        }
    }
    if views { Plan::Views(result) } else { Plan::Exchange(input) }
}

/// Ranges of the old and of the new dims that hold the same elements, as short as can be.
fn groups(old: &[i64], new: &[i64]) -> Vec<(std::ops::Range<usize>, std::ops::Range<usize>)> {
    let mut groups = Vec::new();
    let (mut i, mut j) = (0, 0);
    while i < old.len() || j < new.len() {
        let (from, to) = (i, j);
        let (mut a, mut b) = (1, 1);
        if i < old.len() {
            a = old[i];
            i += 1;
        }
        if j < new.len() {
            b = new[j];
            j += 1;
        }
        while a != b {
            if a < b && i < old.len() {
                a *= old[i];
                i += 1;
            } else if j < new.len() {
                b *= new[j];
                j += 1;
            } else {
                break;
            }
        }
        // Extents of 1 that follow belong to nobody; the last group takes them.
        if i == old.len() && new[j..].iter().all(|&extent| extent == 1) {
            j = new.len();
        }
        if j == new.len() && old[i..].iter().all(|&extent| extent == 1) {
            i = old.len();
        }
        groups.push((from..i, to..j));
    }
    groups
}

/// Several dims as one: for each combination of coordinates, the indices into the flattened dim.
fn merged(dims: &[Dim], mesh: &[usize]) -> Option<Dim> {
    let mut axes: Vec<usize> = dims.iter().flat_map(|dim| dim.axes.iter().copied()).collect();
    axes.sort_unstable();
    let count: usize = axes.iter().map(|&axis| mesh[axis]).product();
    let mut parts = Vec::with_capacity(count);
    for index in 0..count {
        let at = place(index, &axes, mesh);
        let mut flat = vec![Interval::new(0, 1)];
        for dim in dims {
            let part: Vec<Interval> = dim.part(&at, mesh).iter().copied().filter(|i| i.len > 0).collect();
            let extent = dim.extent();
            if matches!(&part[..], [one] if one.len == extent) {
                for interval in &mut flat {
                    *interval = Interval::new(interval.start * extent, interval.len * extent);
                }
                continue;
            }
            let starts: i64 = flat.iter().map(|interval| interval.len).sum();
            if starts as usize * part.len().max(1) > MAX_PIECES {
                return None;
            }
            let inside = |head: i64| part.iter().map(move |i| Interval::new(head * extent + i.start, i.len));
            let heads = flat.iter().flat_map(|interval| interval.start..interval.end());
            flat = join(heads.flat_map(inside).collect::<Vec<_>>().into_iter());
        }
        parts.push(flat);
    }
    Some(Dim { axes, parts })
}

/// One dim as several of these extents, where every part is a box of them.
fn cut(flat: &Dim, extents: &[i64], mesh: &[usize]) -> Option<Vec<Dim>> {
    if extents.len() == 1 {
        return Some(vec![flat.clone()]);
    }
    // For each part, the indices along each new dim.
    let boxes: Vec<Vec<Vec<Interval>>> =
        flat.parts.iter().map(|part| as_box(part, extents)).collect::<Option<_>>()?;
    let mut dims = Vec::with_capacity(extents.len());
    let mut used = Vec::new();
    for (index, &extent) in extents.iter().enumerate() {
        // The axes on whose coordinates the part along this dim depends. That a part has no elements is told by the first dim
        // that depends on the axis, or else by the first that can.
        let own = |part: usize| &boxes[part][index];
        let depends = |axis: &usize| {
            let differs = |dim: usize| {
                pairs(flat, *axis, mesh).any(|(part, other)| {
                    !is_empty(&boxes[part])
                        && !is_empty(&boxes[other])
                        && boxes[part][dim] != boxes[other][dim]
                })
            };
            let empties = pairs(flat, *axis, mesh)
                .any(|(part, other)| is_empty(&boxes[part]) != is_empty(&boxes[other]));
            let teller = (0..extents.len())
                .find(|&dim| differs(dim))
                .or_else(|| extents.iter().position(|&extent| extent > 1));
            differs(index) || (empties && teller == Some(index))
        };
        let axes: Vec<usize> =
            flat.axes.iter().copied().filter(|axis| depends(axis) && !used.contains(axis)).collect();
        if axes.is_empty() {
            // All that have elements must have the same ones.
            let all = (0..boxes.len()).filter(|&part| !is_empty(&boxes[part]));
            if all.clone().any(|part| own(part) != &vec![Interval::new(0, extent)]) {
                return None;
            }
            dims.push(Dim::whole(extent));
            continue;
        }
        let count: usize = axes.iter().map(|&axis| mesh[axis]).product();
        let mut table: Vec<Option<Vec<Interval>>> = vec![None; count];
        for (part, sets) in boxes.iter().enumerate() {
            let at = place(part, &flat.axes, mesh);
            let row = axes.iter().fold(0, |row, &axis| row * mesh[axis] + at[axis]);
            if is_empty(sets) {
                continue;
            }
            match &table[row] {
                None => table[row] = Some(own(part).clone()),
                Some(known) if known == own(part) => {}
                Some(_) => return None,
            }
        }
        used.extend(&axes);
        let mut next = 0;
        let parts: Vec<Vec<Interval>> = table
            .into_iter()
            .map(|part| {
                let part = part.unwrap_or_else(|| vec![Interval::new(next, 0)]);
                next = part.last().map_or(next, |last| last.end());
                part
            })
            .collect();
        let dim = Dim { axes, parts };
        if dim.extent() != extent {
            return None;
        }
        dims.push(dim);
    }
    let all_used = flat.axes.iter().all(|axis| used.contains(axis) || mesh[*axis] == 1);
    all_used.then_some(dims)
}

/// The parts, each with the one at the beginning of the axis beside it.
fn pairs(flat: &Dim, axis: usize, mesh: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    (0..flat.parts.len()).map(move |part| {
        let mut other = place(part, &flat.axes, mesh);
        other[axis] = 0;
        (part, flat.index(&other, mesh))
    })
}

/// The indices along each dim of which a set of flat ones is the product.
fn as_box(part: &[Interval], extents: &[i64]) -> Option<Vec<Vec<Interval>>> {
    let [_, rest @ ..] = extents else { return None };
    let part: Vec<Interval> = part.iter().copied().filter(|interval| interval.len > 0).collect();
    if part.is_empty() {
        return Some(vec![vec![Interval::new(0, 0)]; extents.len()]);
    }
    if rest.is_empty() {
        return Some(vec![part]);
    }
    let inner: i64 = rest.iter().product();
    if part.iter().all(|i| i.start % inner == 0 && i.len % inner == 0) {
        let outer = part.iter().map(|i| Interval::new(i.start / inner, i.len / inner)).collect();
        let whole = rest.iter().map(|&extent| vec![Interval::new(0, extent)]);
        return Some(std::iter::once(outer).chain(whole).collect());
    }
    // Every outer index must have the same inner set.
    let mut rows: BTreeMap<i64, Vec<Interval>> = BTreeMap::new();
    for interval in &part {
        let mut at = interval.start;
        while at < interval.end() {
            let row = at / inner;
            let len = interval.end().min((row + 1) * inner) - at;
            rows.entry(row).or_default().push(Interval::new(at - row * inner, len));
            at += len;
            if rows.len() > MAX_PIECES {
                return None;
            }
        }
    }
    let first = rows.values().next()?.clone();
    if rows.values().any(|set| *set != first) {
        return None;
    }
    let outer = join(rows.keys().map(|&row| Interval::new(row, 1)));
    let mut sets = vec![outer];
    sets.extend(as_box(&first, rest)?);
    Some(sets)
}

fn is_empty(sets: &[Vec<Interval>]) -> bool {
    sets.iter().any(|set| set.iter().all(|interval| interval.len == 0))
}

/// Parts of the old dims with which nothing is torn: all along the first of them that has elements to split, at multiples of
/// what both shapes have behind it.
fn aligned(dims: &[Dim], extents: &[i64], mesh: &[usize]) -> Vec<Dim> {
    let mut axes: Vec<usize> = dims.iter().flat_map(|dim| dim.axes.iter().copied()).collect();
    axes.sort_unstable();
    let count: usize = axes.iter().map(|&axis| mesh[axis]).product();
    let lead = dims.iter().position(|dim| dim.extent() > 1).unwrap_or(0);
    let behind: i64 = dims[lead + 1..].iter().map(Dim::extent).product();
    let new_lead = extents.iter().position(|&extent| extent > 1).unwrap_or(0);
    let new_behind: i64 = extents.iter().skip(new_lead + 1).product();
    // So many rows of the first dim are whole rows of the new one.
    let rows = (new_behind / gcd(new_behind, behind)).max(1);
    let extent = dims[lead].extent();
    let split = |index: usize| {
        let even = extent * index as i64 / count as i64;
        let wanted = match dims[lead].is_split() && dims[lead].is_consecutive() && dims[lead].axes == axes {
            true => dims[lead].boundaries()[index],
            false => even,
        };
        if index == count { extent } else { ((wanted + rows / 2) / rows * rows).min(extent) }
    };
    let boundaries: Vec<i64> = (0..=count).map(split).collect();
    let aligned = Dim::between(axes, &boundaries);
    let whole =
        |(index, dim): (usize, &Dim)| if index == lead { aligned.clone() } else { Dim::whole(dim.extent()) };
    dims.iter().enumerate().map(whole).collect()
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Coordinates of the part of that number; zeros along the other axes.
fn place(mut index: usize, axes: &[usize], mesh: &[usize]) -> Vec<usize> {
    let mut at = vec![0; mesh.len()];
    for &axis in axes.iter().rev() {
        at[axis] = index % mesh[axis];
        index /= mesh[axis];
    }
    at
}

/// The shape with −1 filled in.
fn fill_in(op: &'static str, shape: &[i64], numel: i64) -> Result<Vec<i64>> {
    let known: i64 = shape.iter().filter(|&&extent| extent != -1).product();
    let open = shape.iter().filter(|&&extent| extent == -1).count();
    let fits = match open {
        0 => known == numel,
        1 => known > 0 && numel % known == 0,
        _ => false,
    };
    if !fits || shape.iter().any(|&extent| extent < -1) {
        return refuse(op, format!("{numel} elements cannot have the shape {shape:?}"));
    }
    Ok(shape.iter().map(|&extent| if extent == -1 { numel / known } else { extent }).collect())
}

/// Description of the data that a reshape moves.
pub(super) const TORN: &str = "the elements between old and new boundaries of shards";

/// Bounds a reshape: the elements that leave their box, and their gradients.
pub(super) fn torn(call: &Footprint<'_>) -> Result<u64> {
    let input = call.tensor(0)?;
    let shape = call.outputs.first().map(|(shape, _)| &shape[..]).unwrap_or_default();
    let mut layout = input.layout.without_partial();
    let mut moved = 0;
    for _ in 0..3 {
        let Plan::Exchange(dims) = plan(&layout, shape) else { return Ok(moved) };
        let next = layout.with_dims(dims);
        for (from, to) in [(&layout, &next), (&next, &layout)] {
            moved += received(from, to, input.element as usize)?.unwrap_or(0) as u64;
        }
        layout = next;
    }
    Ok(moved + input.bytes() + call.sum(input.bytes()))
}

crate::register! {
    /// The elements in the shape `size`.
    "view"(input; size) Bytes(TORN, torn): |call| call.tensor(0)?.reshape(&call.list::<i64>("size", Vec::new())?);
    /// The elements in the shape `size`.
    "reshape"(input; size) Bytes(TORN, torn): |call| call.tensor(0)?.reshape(&call.list::<i64>("size", Vec::new())?);
}
