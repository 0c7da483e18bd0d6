//! In which order dims are transformed, and where what splits them goes meanwhile.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::array::fourier::{Kind, Transform};
use crate::error::Result;
use crate::layout::{Dim, Layout};
use crate::rules::received;

/// What is done next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// These dims, which are whole, are transformed; the one that is halved stands last.
    Transform(Vec<usize>),
    /// What splits the first dim splits the second.
    Turn(usize, usize),
    /// The dim becomes whole on all ranks: of a single vector, there is no other to split.
    Gather(usize),
}

impl Step {
    /// The layout after an exchange.
    pub(super) fn layout(&self, before: &Layout) -> Layout {
        match *self {
            Self::Transform(_) => before.clone(),
            Self::Turn(from, to) => before.turned(from, to),
            Self::Gather(dim) => before.with_dim(dim, Dim::whole(before.shape()[dim])),
        }
    }
}

/// An exchange that moves the split to a dim that is not transformed must save this much: models mix channels, which is cheap
/// where these are whole.
const PREFERENCE: f64 = 1.25;

/// More are not kept: then all are forgotten.
const MOST_PLANS: usize = 128;

#[derive(PartialEq, Eq, Hash)]
struct Asked {
    mesh: Vec<usize>,
    dims: Vec<Dim>,
    transform: Transform,
    element: usize,
}

thread_local! {
    static PLANS: RefCell<HashMap<Asked, Vec<Step>>> = RefCell::default();
}

/// The steps for a tensor of that layout, with the fewest bytes that a rank receives: slabs, pencils, or an exchange with a
/// dim that is not transformed. The same on all ranks.
pub(super) fn steps(layout: &Layout, transform: &Transform, element: usize) -> Result<Vec<Step>> {
    if transform.dims.iter().all(|&dim| is_whole(layout, dim)) {
        return Ok(vec![Step::Transform(transform.dims.clone())]);
    }
    let asked = Asked {
        mesh: layout.mesh_shape().to_vec(),
        dims: layout.dims().to_vec(),
        transform: transform.clone(),
        element,
    };
    if let Some(known) = PLANS.with_borrow(|plans| plans.get(&asked).cloned()) {
        return Ok(known);
    }
    let state = State { layout: layout.clone(), pending: transform.dims.clone(), element };
    let Some((_, steps)) = state.best(transform, f64::INFINITY)? else {
        return crate::ops::refuse("fft", format!("there is no way to transform {layout}"));
    };
    PLANS.with_borrow_mut(|plans| {
        if plans.len() >= MOST_PLANS {
            plans.clear();
        }
        plans.insert(asked, steps.clone());
    });
    Ok(steps)
}

/// Whether the ranks have all of the dim.
pub(super) fn is_whole(layout: &Layout, dim: usize) -> bool {
    layout.dims()[dim].parts.len() == 1
}

/// A transform on its way.
struct State {
    layout: Layout,
    /// The dims that are not transformed yet, in the transform's order.
    pending: Vec<usize>,
    /// Bytes of an element.
    element: usize,
}

impl State {
    /// The steps from here on, and their cost, if that is below `limit`.
    fn best(mut self, transform: &Transform, limit: f64) -> Result<Option<(f64, Vec<Step>)>> {
        let ready = self.ready(transform);
        let mut steps = Vec::new();
        if !ready.is_empty() {
            self.pending.retain(|dim| !ready.contains(dim));
            for &dim in &ready {
                self.layout = self.layout.with_dim(dim, Dim::whole(transform.result_extent(dim)));
            }
            let halves = transform.last().is_some_and(|last| ready.contains(&last));
            if transform.kind == Kind::Real && halves {
                // From now on numbers are complex.
                self.element *= 2;
            }
            steps.push(Step::Transform(ready));
        }
        if self.pending.is_empty() {
            return Ok(Some((0.0, steps)));
        }
        let mut found: Option<(f64, Vec<Step>)> = None;
        for from in self.blocked(transform) {
            let others = (0..self.layout.ndim()).filter(|&to| to != from && self.layout.shape()[to] > 1);
            let turns: Vec<Step> = others.map(|to| Step::Turn(from, to)).collect();
            for turn in if turns.is_empty() { vec![Step::Gather(from)] } else { turns } {
                let layout = turn.layout(&self.layout);
                let Some(bytes) = received(&self.layout, &layout, self.element)? else { continue };
                let stays = !matches!(turn, Step::Turn(_, to) if !transform.dims.contains(&to));
                let factor = if stays { 1.0 } else { PREFERENCE };
                // (So that of equal ways the shorter one is taken, also where nothing is to be sent.)
                let cost = bytes as f64 * factor + 1.0;
                let most = found.as_ref().map_or(limit, |(least, _)| *least);
                if cost >= most {
                    continue;
                }
                let next = Self { layout, pending: self.pending.clone(), element: self.element };
                if let Some((rest, tail)) = next.best(transform, most - cost)? {
                    let way = [&steps[..], &[turn], &tail].concat();
                    found = Some((cost + rest, way));
                }
            }
        }
        Ok(found.filter(|(cost, _)| *cost < limit))
    }

    /// The dims that can be transformed as they lie. Of a real transform the halved dim is the first, of its inverse the last.
    fn ready(&self, transform: &Transform) -> Vec<usize> {
        let whole = |dim: &usize| is_whole(&self.layout, *dim);
        let ready: Vec<usize> = self.pending.iter().copied().filter(whole).collect();
        let Some(last) = transform.last().filter(|last| self.pending.contains(last)) else { return ready };
        match transform.kind {
            Kind::Real if !ready.contains(&last) => Vec::new(),
            Kind::InverseReal if ready.len() < self.pending.len() => {
                ready.into_iter().filter(|&dim| dim != last).collect()
            }
            _ => ready,
        }
    }

    /// The dims of which one must be made whole next.
    fn blocked(&self, transform: &Transform) -> Vec<usize> {
        let split: Vec<usize> =
            self.pending.iter().copied().filter(|&dim| !is_whole(&self.layout, dim)).collect();
        match transform.last() {
            Some(last) if transform.kind == Kind::Real && split.contains(&last) => vec![last],
            Some(last) if transform.kind == Kind::InverseReal && split.len() > 1 => {
                split.into_iter().filter(|&dim| dim != last).collect()
            }
            _ => split,
        }
    }
}
