//! Windows: which global indices each rank needs along each dim, and the exchange that brings them.
//!
//! Plans follow from layouts alone; nothing here depends on `ShardTensor` or an operator.

mod pieces;
mod plan;

use isobar_collectives::windows::{Fetch, IndexBox, IndexRun, SharedRegion, fetch_window};
use tch::Tensor;

pub(crate) use pieces::{Border, HaloSpec, WindowRun};
pub(crate) use plan::transfer;

use crate::error::Result;
use crate::layout::Layout;

/// Windows of all ranks: for each dim, the pieces that a rank needs. `replicated` are the axes along which all ranks get the
/// same.
pub(crate) struct Windows {
    pub(crate) needs: Vec<HaloSpec>,
    pub(crate) replicated: Vec<usize>,
    /// True if the fetched tensor is only used inside of one operator.
    pub(crate) hidden: bool,
}

impl Windows {
    /// Every rank gets what it has.
    pub(crate) fn own(layout: &Layout) -> Self {
        let needs = layout.dims().iter().map(HaloSpec::own).collect();
        let sharding = layout.sharding_axes();
        let replicated = (0..layout.placements().len()).filter(|axis| !sharding.contains(axis)).collect();
        Self { needs, replicated, hidden: false }
    }

    /// Returns the windows with another need along one dim.
    pub(crate) fn with(mut self, dim: usize, need: HaloSpec) -> Self {
        self.needs[dim] = need;
        self
    }
}

/// Brings each rank its window of the tensor whose parts are `local`; what lies outside of it is `fill`. Differentiable: a
/// replicated result counts once. Axes along which the tensor is replicated and the windows differ must have gone through
/// `mark_varying` before.
pub(crate) fn fetch(local: &Tensor, layout: &Layout, windows: &Windows, fill: f64) -> Result<Tensor> {
    let forward = transfer(layout, &windows.needs, &[])?;
    let back = match windows.replicated.is_empty() || !forward.communicates {
        true => forward.clone(),
        false => transfer(layout, &windows.needs, &windows.replicated)?,
    };
    let group = layout.ranks()?.group.clone();
    let window = fetch_window(local, Fetch { forward, back, group, hidden: windows.hidden }, fill)?;
    repeated(window, layout, windows)
}

/// The window with what is there several times repeated.
fn repeated(mut window: Tensor, layout: &Layout, windows: &Windows) -> Result<Tensor> {
    let Some(at) = layout.coordinates() else { return Ok(window) };
    for (dim, need) in windows.needs.iter().enumerate() {
        let pieces = need.at(at, layout.mesh_shape());
        if !pieces.iter().any(|piece| matches!(piece, WindowRun::Repeat { .. })) {
            continue;
        }
        let mut indices = Vec::new();
        let mut next = 0;
        for piece in pieces {
            match *piece {
                WindowRun::Take { len, .. } | WindowRun::Fill(len) => {
                    indices.extend(next..next + len);
                    next += len;
                }
                WindowRun::Repeat { times, .. } => {
                    indices.extend((0..times).map(|_| next));
                    next += 1;
                }
            }
        }
        let pick = Tensor::f_from_slice(&indices)
            .and_then(|indices| window.f_index_select(dim as i64, &indices.f_to_device(window.device())?));
        window = crate::dense::named("window", &[&window], pick)?;
    }
    Ok(window)
}

/// The regions of the whole that the mesh's rank `index` has, each with its place in the rank's part.
pub(crate) fn whole_blocks(layout: &Layout, index: usize) -> Vec<(IndexBox, IndexBox)> {
    layout.intervals_of(index).into_iter().fold(vec![(vec![], vec![])], |heads, part| {
        let extend = |(from, to): (IndexBox, IndexBox)| {
            let mut at = 0;
            let mut longer = Vec::new();
            for interval in part.iter().filter(|interval| interval.len > 0) {
                let run = |start| IndexRun { start, len: interval.len, step: 1 };
                longer.push(([&from[..], &[run(interval.start)]].concat(), [&to[..], &[run(at)]].concat()));
                at += interval.len;
            }
            longer
        };
        heads.into_iter().flat_map(extend).collect()
    })
}

/// Regions as blocks of packed messages.
pub(crate) fn as_blocks(regions: impl Iterator<Item = IndexBox>, layout: &Layout) -> Vec<SharedRegion> {
    // The last dim that is cut anywhere.
    let cut = |dim: &usize| layout.is_sharded(*dim);
    let row_dim = (0..layout.ndim()).rev().find(cut).unwrap_or(0);
    regions.map(|region| SharedRegion { region, row_dim }).collect()
}
