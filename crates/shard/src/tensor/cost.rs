//! Cost of a redistribution, from the layouts alone.

use super::reduction;
use crate::error::Result;
use crate::layout::{Interval, Layout, length};

/// The bytes that the rank receives that receives the most, from one layout to another on the same mesh; `None` where there
/// is no way, since the target is partial and the source is not.
///
/// The number is the same on all ranks, which decide by it.
pub(crate) fn received(from: &Layout, to: &Layout, element: usize) -> Result<Option<i64>> {
    let mut placements = from.placements().iter().zip(to.placements());
    if placements.any(|(own, wanted)| wanted.is_partial() && own != wanted) {
        return Ok(None);
    }
    let mesh = from.mesh_shape();
    let most = |f: &dyn Fn(usize) -> i64| (0..mesh.iter().product()).map(f).max().unwrap_or(0);
    let (mut from, mut elements) = (from.clone(), 0);
    while let Some((reduced, _, axes)) = reduction(&from, to)? {
        let ranks: i64 = axes.iter().map(|&axis| mesh[axis] as i64).product();
        // Each of the others' parts once, and, where the sum is wanted whole, the sums of the other parts.
        let scattered = axes.iter().any(|&axis| reduced.placements()[axis].dim().is_some());
        let times = if scattered { 1 } else { 2 };
        elements += times * most(&|index| numel(&from, index)) * (ranks - 1) / ranks;
        from = reduced;
    }
    elements += most(&|index| {
        let overlap = from.intervals_of(index).into_iter().zip(to.intervals_of(index));
        numel(to, index) - overlap.map(|(own, wanted)| common(own, wanted)).product::<i64>()
    });
    Ok(Some(elements * element as i64))
}

fn numel(layout: &Layout, index: usize) -> i64 {
    layout.intervals_of(index).into_iter().map(length).product()
}

/// Returns the number of common indices.
fn common(a: &[Interval], b: &[Interval]) -> i64 {
    let both = |x: &Interval, y: &Interval| (x.end().min(y.end()) - x.start.max(y.start)).max(0);
    a.iter().flat_map(|x| b.iter().map(move |y| both(x, y))).sum()
}
