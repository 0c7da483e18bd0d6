//! Plan of an exchange: the regions that each rank sends to each other.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use isobar_collectives::windows::{IndexBox, IndexRun, SharedRegion, Transfer};

use super::{HaloSpec, WindowRun};
use crate::error::Result;
use crate::layout::{Dim, Interval, Layout, Placement, coordinates, index_of, length};

/// Overlap of a run of a window with one interval of one part of the source.
#[derive(Clone, Copy)]
struct Overlap {
    /// Number of the source's part.
    part: usize,
    from: IndexRun,
    to: IndexRun,
}

/// This rank's share of the exchange that brings every rank of the layout's mesh what it needs. `once` are axes along which
/// all ranks need the same and only what a rank has of its own coordinate is wanted: so that every element goes out once.
///
/// The shares of the last few exchanges are kept: a model asks for the same ones at every step.
pub(crate) fn transfer(layout: &Layout, needs: &[HaloSpec], once: &[usize]) -> Result<Arc<Transfer>> {
    let Some(own) = layout.coordinates() else { return Ok(Arc::default()) };
    let places = layout.ranks()?.places.as_deref();
    let mut hasher = DefaultHasher::new();
    (layout.digest(), needs, once).hash(&mut hasher);
    let fingerprint = hasher.finish();
    let known = PLANS.with_borrow(|plans| {
        let plan = plans.get(&fingerprint)?;
        plan.is_for(layout, own, places, needs, once).then(|| plan.share.clone())
    });
    if let Some(share) = known {
        return Ok(share);
    }
    let share = Arc::new(work_out(layout, own, places, needs, once, fingerprint));
    PLANS.with_borrow_mut(|plans| {
        if plans.len() >= MOST_PLANS {
            plans.clear();
        }
        let plan = Plan {
            mesh: layout.mesh_shape().to_vec(),
            own: own.to_vec(),
            places: places.map(<[usize]>::to_vec),
            placements: layout.placements().to_vec(),
            dims: layout.dims().to_vec(),
            needs: needs.to_vec(),
            once: once.to_vec(),
            share: share.clone(),
        };
        plans.insert(fingerprint, plan);
    });
    Ok(share)
}

/// More are not kept: then all are forgotten.
const MOST_PLANS: usize = 128;

thread_local! {
    static PLANS: RefCell<HashMap<u64, Plan>> = RefCell::default();
}

/// A share that was worked out, and everything that it follows from; no mesh, whose groups it would keep alive.
struct Plan {
    mesh: Vec<usize>,
    own: Vec<usize>,
    places: Option<Vec<usize>>,
    placements: Vec<Placement>,
    dims: Vec<Dim>,
    needs: Vec<HaloSpec>,
    once: Vec<usize>,
    share: Arc<Transfer>,
}

impl Plan {
    fn is_for(
        &self,
        layout: &Layout,
        own: &[usize],
        places: Option<&[usize]>,
        needs: &[HaloSpec],
        once: &[usize],
    ) -> bool {
        self.own == own
            && self.places.as_deref() == places
            && self.once == once
            && self.mesh == layout.mesh_shape()
            && self.placements == layout.placements()
            && self.needs == needs
            && self.dims == layout.dims()
    }
}

fn work_out(
    layout: &Layout,
    own: &[usize],
    places: Option<&[usize]>,
    needs: &[HaloSpec],
    once: &[usize],
    fingerprint: u64,
) -> Transfer {
    let mesh = layout.mesh_shape();
    let me = index_of(own, mesh);
    let ranks: usize = mesh.iter().product();
    let sharding = layout.sharding_axes();
    let mut result = Transfer { input: layout.local_shape().to_vec(), fingerprint, ..Transfer::default() };
    for target in 0..ranks {
        let at = coordinates(target, mesh);
        let overlaps: Vec<Vec<Overlap>> =
            layout.dims().iter().zip(needs).map(|(dim, need)| overlaps(dim, need.at(&at, mesh))).collect();
        let kept = |axis: usize, source: usize| !once.contains(&axis) || at[axis] == source;
        if target == me {
            result.output = needs.iter().map(|need| need.at(&at, mesh).iter().map(len).sum()).collect();
        }
        let empty = overlaps.iter().any(Vec::is_empty);
        let remote = |dim: &Dim, overlap: &Overlap| overlap.part != dim.index(&at, mesh);
        if !empty && !result.communicates {
            let mut dims = layout.dims().iter().zip(&overlaps);
            result.communicates =
                dims.any(|(dim, overlaps)| overlaps.iter().any(|overlap| remote(dim, overlap)));
        }
        if empty || (target != me && (0..mesh.len()).any(|a| !sharding.contains(&a) && at[a] != own[a])) {
            continue;
        }
        for block in product(&overlaps, |dim, overlap| {
            target == me || overlap.part == layout.dims()[dim].index(own, mesh)
        }) {
            let mut source_at = at.clone();
            for (dim, overlap) in layout.dims().iter().zip(&block) {
                place(dim, overlap.part, mesh, &mut source_at);
            }
            if (0..mesh.len()).any(|axis| !kept(axis, source_at[axis])) {
                continue;
            }
            let source = index_of(&source_at, mesh);
            let (from, to): (IndexBox, IndexBox) = block.iter().map(|s| (s.from, s.to)).unzip();
            match (source == me, target == me) {
                (true, true) => result.own.push((from, to)),
                (true, false) | (false, true) => {
                    let cut = |dim: usize| {
                        let (dim, need) = (&layout.dims()[dim], &needs[dim]);
                        (length(dim.part(&source_at, mesh)), need.at(&at, mesh).iter().map(len).sum::<i64>())
                    };
                    let row_dim = (0..block.len())
                        .rev()
                        .find(|&dim| (from[dim].len, to[dim].len) != cut(dim) || from[dim].step != 1)
                        .unwrap_or(0);
                    let (list, peer, region) = match source == me {
                        true => (&mut result.sends, target, from),
                        false => (&mut result.receives, source, to),
                    };
                    let block = SharedRegion { region, row_dim };
                    match list.iter_mut().find(|(of, _)| *of == peer) {
                        Some((_, blocks)) => blocks.push(block),
                        None => list.push((peer, vec![block])),
                    }
                }
                (false, false) => {}
            }
        }
    }
    // Beginning after this rank, so that not all send to the same at once; what is added is in the order of ranks.
    result.sends.sort_by_key(|(peer, _)| *peer);
    result.receives.sort_by_key(|(peer, _)| (peer + ranks - me) % ranks);
    if let Some(places) = places {
        for (peer, _) in result.sends.iter_mut().chain(&mut result.receives) {
            *peer = places[*peer];
        }
    }
    result
}

/// Returns the owners and positions of a window's overlaps along one dim.
fn overlaps(dim: &Dim, pieces: &[WindowRun]) -> Vec<Overlap> {
    let mut found = Vec::new();
    let mut to = 0;
    for piece in pieces {
        let (start, len, step) = match *piece {
            WindowRun::Take { start, len, step } => (start, len, step),
            WindowRun::Repeat { start, .. } => (start, 1, 1),
            WindowRun::Fill(len) => {
                to += len;
                continue;
            }
        };
        for (part, intervals) in dim.parts.iter().enumerate() {
            let mut local = 0;
            for interval in intervals {
                if let Some((first, count)) = hits(*interval, start, len, step) {
                    let from =
                        IndexRun { start: local + start + first * step - interval.start, len: count, step };
                    found.push(Overlap {
                        part,
                        from,
                        to: IndexRun { start: to + first, len: count, step: 1 },
                    });
                }
                local += interval.len;
            }
        }
        to += len;
    }
    found
}

/// Finds the `start + i · step`, i in 0..len, that lie in the interval: the first i, and their number.
fn hits(interval: Interval, start: i64, len: i64, step: i64) -> Option<(i64, i64)> {
    let (first, last) = match step > 0 {
        true => (ceil_div(interval.start - start, step), (interval.end() - 1 - start).div_euclid(step)),
        false => (ceil_div(start - interval.end() + 1, -step), (start - interval.start).div_euclid(-step)),
    };
    let (first, last) = (first.max(0), last.min(len - 1));
    (interval.len > 0 && first <= last).then(|| (first, last - first + 1))
}

fn ceil_div(a: i64, b: i64) -> i64 {
    -(-a).div_euclid(b)
}

fn len(piece: &WindowRun) -> i64 {
    match *piece {
        WindowRun::Take { len, .. } | WindowRun::Fill(len) => len,
        WindowRun::Repeat { .. } => 1,
    }
}

/// All combinations of overlaps, one for each dim, of those that `wanted` lets through; the last dim fastest.
fn product(overlaps: &[Vec<Overlap>], wanted: impl Fn(usize, &Overlap) -> bool) -> Vec<Vec<Overlap>> {
    overlaps.iter().enumerate().fold(vec![Vec::new()], |heads, (dim, choices)| {
        let choices: Vec<&Overlap> = choices.iter().filter(|overlap| wanted(dim, overlap)).collect();
        let extend = |head: Vec<Overlap>| {
            choices
                .iter()
                .map(move |&&overlap| {
                    let mut longer = head.clone();
                    longer.push(overlap);
                    longer
                })
                .collect::<Vec<_>>()
        };
        heads.into_iter().flat_map(extend).collect()
    })
}

/// Sets the coordinates of the ranks that have a part of the dim.
fn place(dim: &Dim, mut part: usize, mesh: &[usize], at: &mut [usize]) {
    for &axis in dim.axes.iter().rev() {
        at[axis] = part % mesh[axis];
        part /= mesh[axis];
    }
}
