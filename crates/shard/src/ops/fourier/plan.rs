//! In which order dims are transformed, and where what splits them goes meanwhile.

use std::cell::RefCell;
use std::collections::HashMap;

use isobar_array::kernel::{Kind, Transform};
use isobar_collectives::ReduceOp;

use crate::error::Result;
use crate::layout::{Dim, Layout, Placement};
use crate::tensor::received;

/// Next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    /// These dims, which are whole, are transformed; the one that is halved stands last.
    Transform(Vec<usize>),
    /// All-to-all that reshards the first dim onto the second.
    Turn(usize, usize),
    /// The dim becomes whole on all ranks: of a single vector, there is no other to split.
    Gather(usize),
    /// The first dim is transformed to its few modes: each rank finds what its points add to them, and what splits the first
    /// dim splits the second of their sums.
    Sum(usize, usize),
    /// The second dim is transformed back from its few modes: they become whole along the first dim, and each rank finds the
    /// points that are its own when what splits the first dim splits the second.
    Spread(usize, usize),
}

impl Step {
    /// The layout after it.
    pub(super) fn layout(&self, before: &Layout, transform: &Transform) -> Layout {
        let result = |dim| Dim::whole(transform.result_extent(dim));
        match self {
            Self::Transform(dims) => {
                let mut parts = before.dims().to_vec();
                dims.iter().for_each(|&dim| parts[dim] = result(dim));
                before.with_dims(parts)
            }
            Self::Turn(from, to) => before.all_to_all(*from, *to),
            Self::Gather(dim) => before.with_dim(*dim, Dim::whole(before.shape()[*dim])),
            Self::Sum(from, to) => before.all_to_all(*from, *to).with_dim(*from, result(*from)),
            Self::Spread(from, to) => before.with_dim(*to, result(*to)).all_to_all(*from, *to),
        }
    }

    /// Returns the transformed dims.
    fn transformed(&self) -> Vec<usize> {
        match self {
            Self::Transform(dims) => dims.clone(),
            Self::Sum(dim, _) | Self::Spread(_, dim) => vec![*dim],
            Self::Turn(..) | Self::Gather(_) => Vec::new(),
        }
    }
}

/// The sums of a [`Step::Sum`] before they are added up.
pub(super) fn sums(before: &Layout, from: usize, transform: &Transform) -> Layout {
    let axes = &before.dims()[from].axes;
    let whole = before.with_dim(from, Dim::whole(transform.result_extent(from)));
    let mut placements = whole.placements().to_vec();
    axes.iter().for_each(|&axis| placements[axis] = Placement::Partial(ReduceOp::Sum));
    whole.with_placements(placements, whole.dims().to_vec())
}

/// An exchange that moves the split to a dim that is not transformed must save this much: models mix channels, which is cheap
/// where these are whole.
const PREFERENCE: f64 = 1.25;

/// More are not kept: then all are forgotten.
const MOST_PLANS: usize = 128;

#[derive(PartialEq, Eq, Hash)]
struct PlanKey {
    mesh: Vec<usize>,
    dims: Vec<Dim>,
    transform: Transform,
    element: usize,
}

thread_local! {
    static PLANS: RefCell<HashMap<PlanKey, Vec<Step>>> = RefCell::default();
}

/// The steps for a tensor of that layout, with the fewest bytes that a rank receives: slabs, pencils, or an exchange with a
/// dim that is not transformed. The same on all ranks.
pub(super) fn steps(layout: &Layout, transform: &Transform, element: usize) -> Result<Vec<Step>> {
    if transform.dims.iter().all(|&dim| is_whole(layout, dim)) {
        return Ok(vec![Step::Transform(transform.dims.clone())]);
    }
    let asked = PlanKey {
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

/// Returns whether the ranks hold the full dim.
pub(super) fn is_whole(layout: &Layout, dim: usize) -> bool {
    layout.dims()[dim].parts.len() == 1
}

/// A transform on its way.
#[derive(Clone)]
struct State {
    layout: Layout,
    /// The dims that are not transformed yet, in the transform's order.
    pending: Vec<usize>,
    /// Bytes of an element.
    element: usize,
}

impl State {
    /// The steps from here on, and their cost, if that is below `limit`.
    fn best(&self, transform: &Transform, limit: f64) -> Result<Option<(f64, Vec<Step>)>> {
        if self.pending.is_empty() {
            return Ok(Some((0.0, Vec::new())).filter(|_| limit > 0.0));
        }
        let mut found: Option<(f64, Vec<Step>)> = None;
        let mut consider = |first: &[Step], state: &Self, ways: Vec<Step>| -> Result<()> {
            for step in ways {
                let Some(bytes) = state.received(&step, transform)? else { continue };
                let stays =
                    !matches!(step, Step::Turn(_, to) | Step::Sum(_, to) if !transform.dims.contains(&to));
                let factor = if stays { 1.0 } else { PREFERENCE };
                // (So that of equal ways the shorter one is taken, also where nothing is to be sent.)
                let cost = bytes as f64 * factor + 1.0;
                let most = found.as_ref().map_or(limit, |(least, _)| *least);
                if cost >= most {
                    continue;
                }
                if let Some((rest, tail)) = state.after(&step, transform).best(transform, most - cost)? {
                    found = Some((cost + rest, [first, &[step], &tail].concat()));
                }
            }
            Ok(())
        };
        consider(&[], self, self.spreads(transform))?;
        let ready = self.ready(transform);
        let (first, state) = match ready.is_empty() {
            true => (Vec::new(), self.clone()),
            false => {
                let step = Step::Transform(ready);
                let state = self.after(&step, transform);
                (vec![step], state)
            }
        };
        if state.pending.is_empty() {
            return Ok(Some((0.0, first)).filter(|_| limit > 0.0));
        }
        for from in state.blocked(transform) {
            consider(&first, &state, state.moves(from, transform))?;
        }
        Ok(found.filter(|(cost, _)| *cost < limit))
    }

    fn after(&self, step: &Step, transform: &Transform) -> Self {
        let done = step.transformed();
        let halves = transform.last().is_some_and(|last| done.contains(&last));
        // From now on numbers are complex.
        let wider = if transform.kind == Kind::Real && halves { 2 } else { 1 };
        Self {
            layout: step.layout(&self.layout, transform),
            pending: self.pending.iter().copied().filter(|dim| !done.contains(dim)).collect(),
            element: self.element * wider,
        }
    }

    /// The bytes that a rank receives in a step.
    fn received(&self, step: &Step, transform: &Transform) -> Result<Option<i64>> {
        let after = self.after(step, transform);
        match *step {
            Step::Sum(from, _) => {
                received(&sums(&self.layout, from, transform), &after.layout, after.element)
            }
            Step::Spread(from, _) => {
                let whole = Step::Gather(from).layout(&self.layout, transform);
                received(&self.layout, &whole, self.element)
            }
            _ => received(&self.layout, &after.layout, self.element),
        }
    }

    /// Returns the possible steps for a sharded dim.
    fn moves(&self, from: usize, transform: &Transform) -> Vec<Step> {
        let others = || (0..self.layout.ndim()).filter(|&to| to != from && self.layout.shape()[to] > 1);
        let mut moves: Vec<Step> = others().map(|to| Step::Turn(from, to)).collect();
        let one_axis = self.layout.dims()[from].axes.len() == 1;
        if transform.kind == Kind::Real && one_axis && transform.has_few_modes(from) {
            moves.extend(others().filter(|&to| is_whole(&self.layout, to)).map(|to| Step::Sum(from, to)));
        }
        if moves.is_empty() { vec![Step::Gather(from)] } else { moves }
    }

    /// The ways to transform a dim back so that it comes to be split.
    fn spreads(&self, transform: &Transform) -> Vec<Step> {
        if transform.kind != Kind::InverseReal {
            return Vec::new();
        }
        let pending = || self.pending.iter().copied();
        let inner = |dim: &usize| transform.last() != Some(*dim) && is_whole(&self.layout, *dim);
        let to = || pending().filter(inner).filter(|&dim| transform.has_few_modes(dim));
        let split = pending().filter(|&dim| !is_whole(&self.layout, dim));
        split.flat_map(|from| to().map(move |to| Step::Spread(from, to))).collect()
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
