//! What a redistribution costs, from the layouts alone.

use crate::layout::{Interval, Layout, Placement, length};

/// The bytes that the rank receives that receives the most, from one layout to another on the same mesh; `None` where there
/// is no way, since the target is partial and the source is not.
///
/// The same number on all ranks, which decide by it.
pub(super) fn received(from: &Layout, to: &Layout, element: usize) -> Option<i64> {
    let mut reduced = 0;
    let mut placements = from.placements().to_vec();
    let mesh = from.mesh_shape();
    for (axis, (own, wanted)) in from.placements().iter().zip(to.placements()).enumerate() {
        if wanted.is_partial() && own != wanted {
            return None;
        }
        if own.is_partial() && !wanted.is_partial() {
            placements[axis] = Placement::Replicate;
            let ranks = mesh[axis] as i64;
            let largest = (0..count(mesh)).map(|index| numel(from, index)).max().unwrap_or(0);
            // Each of the others' parts once, and, where the sum is wanted whole, the sums of the other parts.
            let times = if wanted.dim().is_some() { 1 } else { 2 };
            reduced += times * largest * (ranks - 1) / ranks;
        }
    }
    let exchanged = |index: usize| {
        let overlap = from.intervals_of(index).into_iter().zip(to.intervals_of(index));
        numel(to, index) - overlap.map(|(own, wanted)| common(own, wanted)).product::<i64>()
    };
    // A sum that is scattered is not exchanged again.
    let scattered = from.placements().iter().zip(to.placements());
    let scattered = scattered.clone().any(|(own, wanted)| own.is_partial() && wanted.dim().is_some());
    let exchanged = match scattered {
        true => 0,
        false => (0..count(mesh)).map(exchanged).max().unwrap_or(0),
    };
    Some((reduced + exchanged) * element as i64)
}

fn count(mesh: &[usize]) -> usize {
    mesh.iter().product()
}

fn numel(layout: &Layout, index: usize) -> i64 {
    layout.intervals_of(index).into_iter().map(length).product()
}

/// How many indices both have.
fn common(a: &[Interval], b: &[Interval]) -> i64 {
    let both = |x: &Interval, y: &Interval| (x.end().min(y.end()) - x.start.max(y.start)).max(0);
    a.iter().flat_map(|x| b.iter().map(move |y| both(x, y))).sum()
}
