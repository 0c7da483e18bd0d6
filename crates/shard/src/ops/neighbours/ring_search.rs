//! Points of all ranks, seen block by block, and gradients on their way back.

use std::sync::{Arc, Mutex, PoisonError};

use isobar_collectives::{LinearMap, Work, attach};
use isobar_torch::guard::{NoGrad, is_grad_enabled};
use tch::{Kind, TchError, Tensor};

use super::search::{Pairs, Search};
use super::torch;
use crate::error::{Error, Result};
use crate::layout::Interval;
use crate::ops::attention::ring::Ring;

/// Points, and numbers of queries, of the ranks that share their points.
#[derive(Clone)]
pub(super) struct RingSchedule {
    pub(super) ring: Ring,
    pub(super) points: Vec<Interval>,
    pub(super) queries: Vec<i64>,
}

impl RingSchedule {
    /// Searches all points, without gradients.
    pub(super) fn search(&self, points: &Tensor, queries: &Tensor, search: impl Search) -> Result<Pairs> {
        let _guard = NoGrad::new();
        let (points, queries) = (points.detach(), queries.detach());
        let mut found = torch(Pairs::nothing(&points))?;
        self.visit(&points, |block, keys, moves_on| {
            found = search.block(&queries, block, keys.start, &found, moves_on)?;
            Ok(())
        })?;
        Ok(found)
    }

    /// Returns whether that rank has a use for the points of the other.
    fn meet(&self, queries: usize, points: usize) -> bool {
        self.queries[queries] > 0 && self.points[points].len > 0
    }

    /// Calls `f` with each block of points, this rank's own first, and with what moves messages on.
    fn visit(
        &self,
        points: &Tensor,
        mut f: impl FnMut(&Tensor, Interval, &mut dyn FnMut() -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let ring = &self.ring;
        let mut messages = Vec::new();
        for step in 1..ring.len() {
            let target = ring.target(step);
            if self.meet(target, ring.me) {
                messages.push(ring.send(points, target)?);
            }
        }
        let mut block = Some(points.shallow_clone());
        for step in 0..ring.len() {
            let source = ring.source(step);
            let mut coming: Option<Work<Tensor>> = self.begin(step + 1, points)?;
            if let (Some(block), true) = (&block, self.meet(ring.me, source)) {
                let mut moves_on = || {
                    for message in &mut messages {
                        message.poll()?;
                    }
                    if let Some(work) = &mut coming {
                        work.poll()?;
                    }
                    Ok(())
                };
                f(block, self.points[source], &mut moves_on)?;
            }
            block = coming.map(Work::wait).transpose()?;
        }
        for message in messages {
            message.wait()?;
        }
        Ok(())
    }

    fn begin(&self, step: usize, like: &Tensor) -> Result<Option<Work<Tensor>>> {
        let ring = &self.ring;
        if step >= ring.len() || !self.meet(ring.me, ring.source(step)) {
            return Ok(None);
        }
        let source = ring.source(step);
        let mut shape = like.size();
        shape[0] = self.points[source].len;
        ring.receive(&shape, like, source).map(Some)
    }
}

/// The coordinates of the points of these global numbers, as a linear map of the ranks' points.
#[derive(Clone)]
pub(super) struct Selection {
    pub(super) schedule: RingSchedule,
    /// A tensor may be sent to other threads, not shared with them.
    indices: Arc<Mutex<Tensor>>,
}

/// The gradients of selected coordinates, added up by point: the adjoint of the selection.
struct Addition(Selection);

impl Selection {
    pub(super) fn new(schedule: &RingSchedule, indices: &Tensor) -> Self {
        Self { schedule: schedule.clone(), indices: Arc::new(Mutex::new(indices.shallow_clone())) }
    }

    /// The coordinates, which are here already, with their history.
    pub(super) fn attach(self, points: &Tensor, chosen: &Tensor) -> Result<Tensor> {
        match is_grad_enabled() && points.requires_grad() {
            true => Ok(attach(Arc::new(self), points, chosen.shallow_clone())?),
            false => Ok(chosen.shallow_clone()),
        }
    }

    fn indices(&self) -> Tensor {
        self.indices.lock().unwrap_or_else(PoisonError::into_inner).shallow_clone()
    }

    fn select(&self, points: &Tensor) -> Result<Tensor> {
        let indices = self.indices();
        let shape = [indices.size()[0], points.size()[1]];
        let mut chosen = torch(Tensor::f_zeros(shape, (points.kind(), points.device())))?;
        self.schedule.visit(&torch(points.f_contiguous())?, |block, keys, _| {
            let (places, rows) = torch(inside(&indices, keys))?;
            let rows = torch(block.f_index_select(0, &rows))?;
            torch(chosen.f_index_copy_(0, &places, &rows)).map(|_| ())
        })?;
        Ok(chosen)
    }

    /// Each rank adds up what it has for each block, and its owner what comes.
    fn add_up(&self, gradient: &Tensor) -> Result<Tensor> {
        let (schedule, ring) = (&self.schedule, &self.schedule.ring);
        let (indices, kind) = (self.indices(), gradient.kind());
        let wide = if kind == Kind::Double { kind } else { Kind::Float };
        let gradient = torch(gradient.f_to_kind(wide))?;
        let of_block = |keys: Interval| {
            let (places, rows) = inside(&indices, keys)?;
            let sum = Tensor::f_zeros([keys.len, gradient.size()[1]], (wide, gradient.device()))?;
            sum.f_index_add(0, &rows, &gradient.f_index_select(0, &places)?)
        };
        let mut sum = torch(of_block(schedule.points[ring.me]))?;
        let mut messages = Vec::new();
        for step in 1..ring.len() {
            let (owner, other) = (ring.source(step), ring.target(step));
            if schedule.meet(ring.me, owner) {
                let block = torch(of_block(schedule.points[owner]).and_then(|sum| sum.f_to_kind(kind)))?;
                messages.push(ring.send(&block, owner)?);
            }
            if schedule.meet(other, ring.me) {
                let like = torch(sum.f_to_kind(kind))?;
                let came = ring.receive(&sum.size(), &like, other)?.wait()?;
                let _ = torch(sum.f_add_(&came))?;
            }
        }
        for message in messages {
            message.wait()?;
        }
        torch(sum.f_to_kind(kind))
    }
}

/// Returns which indices lie in this block, and their rows in it.
fn inside(indices: &Tensor, keys: Interval) -> Result<(Tensor, Tensor), TchError> {
    let within = indices.f_ge(keys.start)?.f_logical_and(&indices.f_lt(keys.end())?)?;
    let places = within.f_nonzero()?.f_squeeze_dim(1)?;
    let rows = indices.f_index_select(0, &places)?.f_sub_scalar(keys.start)?;
    Ok((places, rows))
}

impl LinearMap for Selection {
    fn name(&self) -> &'static str {
        "select_points"
    }

    fn forward(&self, x: &Tensor) -> isobar_collectives::Result<Tensor> {
        self.select(x).map_err(Error::into_communication)
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(Addition(self.clone()))
    }
}

impl LinearMap for Addition {
    fn name(&self) -> &'static str {
        "add_up_points"
    }

    fn forward(&self, x: &Tensor) -> isobar_collectives::Result<Tensor> {
        self.0.add_up(x).map_err(Error::into_communication)
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(self.0.clone())
    }
}
