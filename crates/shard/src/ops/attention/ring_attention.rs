//! Attention to keys that other ranks have, block by block, and its gradients.

use std::sync::Arc;

use isobar_collectives::trace::Label;
use isobar_collectives::{ReduceOp, Work, all_gather_v, all_reduce, reduce_scatter_v};
use isobar_torch::BoxError;
use isobar_torch::autograd::{Context, Function};
use isobar_torch::guard::{NoGrad, is_grad_enabled};
use tch::{TchError, Tensor};

use super::exact::exact;
use super::kernel::{Gradients, Inputs, Kernel, Operands, Running, Tile, finite, wide};
use super::plan::Plan;
use super::ring::Ring;
use super::tiles::{meet, tiles};
use super::torch;
use crate::error::Result;
use crate::layout::Interval;
use crate::ops::refuse;

/// The blocks of keys that this rank meets, in order, and who takes its own.
pub(super) struct RingSchedule {
    pub(super) kernel: Kernel,
    pub(super) causal: bool,
    pub(super) ring: Ring,
    /// True if queries stay and results are combined; otherwise blocks of keys are sent around.
    combines: bool,
    queries: Vec<Vec<Interval>>,
    pub(super) keys: Vec<Interval>,
}

impl RingSchedule {
    pub(super) fn new(plan: &Plan, kernel: Kernel, causal: bool) -> Result<Self> {
        let ring = Ring::new(&plan.query, &plan.key_axes)?;
        let queries = ring.members.iter().map(|at| plan.queries_at(at)).collect();
        let keys = ring.members.iter().map(|at| plan.keys_at(at)).collect();
        Ok(Self { kernel, causal, ring, combines: plan.combines, queries, keys })
    }

    pub(super) fn own_queries(&self) -> &[Interval] {
        &self.queries[self.ring.me]
    }

    /// Returns whether a rank's queries attend to another rank's keys.
    fn meet(&self, queries: usize, keys: usize) -> bool {
        meet(&self.queries[queries], self.keys[keys], self.causal)
    }

    /// Returns the number of key blocks for this rank.
    fn steps(&self) -> usize {
        if self.combines { 1 } else { self.ring.len() }
    }

    /// Returns the offset of this key block's columns in this rank's mask.
    fn mask_shift(&self, keys: usize) -> i64 {
        if self.combines { 0 } else { self.keys[keys].start }
    }

    /// Nothing, where the rank has no batch or no heads: libtorch does not take such blocks.
    fn tiles(&self, query: &Tensor, keys: usize) -> Vec<Tile> {
        if query.size()[..2].contains(&0) {
            return Vec::new();
        }
        tiles(self.own_queries(), self.keys[keys], self.causal)
    }

    /// The differentiable result.
    pub(super) fn apply(self, x: &Inputs<'_>) -> Result<Tensor> {
        let (output, log_sum) = {
            let _guard = NoGrad::new();
            self.forward(x)?
        };
        let mut saved = vec![x.query, x.key, x.value, &output, &log_sum];
        saved.extend(x.mask);
        let mut inputs = vec![x.query, x.key, x.value];
        inputs.extend(x.mask);
        let (masked, schedule) = (x.mask.is_some(), Arc::new(self));
        let function = Function::new(super::NAME).save(&saved);
        let label = Label::current();
        let outputs = function.apply(&inputs, vec![output.shallow_clone()], move |context, grads| {
            let _label = label.backward();
            let mask = masked.then(|| context.saved(5)).transpose()?;
            let (query, key, value) = (context.saved(0)?, context.saved(1)?, context.saved(2)?);
            let x = Inputs { query: &query, key: &key, value: &value, mask: mask.as_ref() };
            let gradient = context.grad_or_zeros(grads, 0)?;
            let mut found = match is_grad_enabled() {
                true => schedule.double_backward(&x, &gradient)?,
                false => schedule.backward(&x, context, &gradient)?,
            };
            found.truncate(if masked { 4 } else { 3 });
            Ok::<_, BoxError>(found)
        });
        Ok(outputs?.pop().unwrap_or(output))
    }

    fn forward(&self, x: &Inputs<'_>) -> Result<(Tensor, Tensor)> {
        let (query, key, value) = (x.query.detach(), x.key.detach(), x.value.detach());
        let mask = x.mask.map(Tensor::detach);
        let running = Running::new(&query, value.size()[3])?;
        let ring = &self.ring;
        let block = self.pack(&key, &value)?;
        let mut messages = Vec::new();
        for step in 1..self.steps() {
            let target = ring.target(step);
            if self.meet(target, ring.me) {
                messages.push(ring.send(&block, target)?);
            }
        }
        let mut coming = self.begin(1, &block, &key, &value)?;
        for step in 0..self.steps() {
            let source = ring.source(step);
            let packed = match (step, coming.take()) {
                (0, next) => {
                    coming = next;
                    None
                }
                (_, Some(work)) => Some(work.wait()?),
                (_, None) => None,
            };
            if step > 0 {
                coming = self.begin(step + 1, &block, &key, &value)?;
            }
            if !self.meet(ring.me, source) {
                continue;
            }
            let (key, value) = match packed {
                Some(packed) => self.unpack(&packed, source, &key, &value)?,
                None => (key.shallow_clone(), value.shallow_clone()),
            };
            let shift = self.mask_shift(source);
            let x =
                Operands { query: &query, key: &key, value: &value, mask: mask.as_ref(), mask_shift: shift };
            for tile in self.tiles(&query, source) {
                self.kernel.forward(&x, &tile, &running)?;
                advance(&mut messages, [&mut coming])?;
            }
        }
        for message in messages {
            message.wait()?;
        }
        let running = if self.combines { self.combine(&running)? } else { running };
        Ok((torch(running.output.f_to_kind(query.kind()))?, running.log_sum))
    }

    fn backward(
        &self,
        x: &Inputs<'_>,
        context: &Context<'_>,
        gradient: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let (output, log_sum) = (context.saved(3)?.detach(), context.saved(4)?.detach());
        let (query, key, value) = (x.query.detach(), x.key.detach(), x.value.detach());
        let mask = x.mask.map(Tensor::detach);
        let gradient = torch(gradient.detach().f_contiguous())?;
        // Queries that saw no key have weights of zero.
        let log_sum = torch(log_sum.f_masked_fill(&torch(log_sum.f_eq(f64::NEG_INFINITY))?, 0.0))?;
        let zeros = |like: &Tensor| torch(Tensor::f_zeros(like.size(), (wide(like.kind()), like.device())));
        let mut sums = Gradients {
            query: zeros(&query)?,
            key: zeros(&key)?,
            value: zeros(&value)?,
            mask: match &mask {
                Some(mask) if self.kernel.mask_gradient => Some(zeros(mask)?),
                _ => None,
            },
        };
        let ring = &self.ring;
        let wants_keys = context.needs_input_grad(1) || context.needs_input_grad(2);
        let block = self.pack(&key, &value)?;
        let mut messages = Vec::new();
        let mut coming = None;
        let mut back: Option<Work<Tensor>> = None;
        for step in 0..self.steps() {
            let source = ring.source(step);
            let packed = coming.take().map(Work::wait).transpose()?;
            if step + 1 < self.steps() {
                // Each rank sends and receives in the same order of steps: messages of a pair arrive as they are sent.
                let target = ring.target(step + 1);
                if self.meet(target, ring.me) {
                    messages.push(ring.send(&block, target)?);
                }
                coming = self.begin(step + 1, &block, &key, &value)?;
            }
            if self.meet(ring.me, source) {
                let (key, value) = match packed {
                    Some(packed) => self.unpack(&packed, source, &key, &value)?,
                    None => (key.shallow_clone(), value.shallow_clone()),
                };
                let into = match step {
                    0 => Gradients { mask: sums.mask.take(), ..copy(&sums) },
                    _ => Gradients {
                        key: zeros(&key)?,
                        value: zeros(&value)?,
                        mask: sums.mask.take(),
                        ..copy(&sums)
                    },
                };
                let shift = self.mask_shift(source);
                let x = Operands {
                    query: &query,
                    key: &key,
                    value: &value,
                    mask: mask.as_ref(),
                    mask_shift: shift,
                };
                for tile in self.tiles(&query, source) {
                    self.kernel.backward(&x, &tile, (&output, &log_sum), &gradient, &into)?;
                    advance(&mut messages, [&mut coming, &mut back])?;
                }
                if step > 0 && wants_keys {
                    let kind = key.kind();
                    let home =
                        self.pack(&torch(into.key.f_to_kind(kind))?, &torch(into.value.f_to_kind(kind))?)?;
                    messages.push(ring.send(&home, source)?);
                }
                sums.mask = into.mask;
            }
            if let Some(work) = back.take() {
                self.accumulate_grads(&work.wait()?, &sums)?;
            }
            if step > 0 && wants_keys && self.meet(ring.target(step), ring.me) {
                back = Some(ring.receive(&block.size(), &block, ring.target(step))?);
            }
        }
        if let Some(work) = back {
            self.accumulate_grads(&work.wait()?, &sums)?;
        }
        for message in messages {
            message.wait()?;
        }
        if self.combines {
            sums.query = all_reduce(&sums.query, ReduceOp::Sum, &ring.group)?;
        }
        let finish = |sum: Tensor, like: &Tensor| torch(sum.f_to_kind(like.kind())).map(Some);
        Ok(vec![
            finish(sums.query, &query)?,
            finish(sums.key, &key)?,
            finish(sums.value, &value)?,
            match (sums.mask, &mask) {
                (Some(sum), Some(mask)) => finish(sum, mask)?,
                _ => None,
            },
        ])
    }

    /// Combines the ranks' results for the same queries, each from its own keys.
    fn combine(&self, own: &Running) -> Result<Running> {
        let group = &self.ring.group;
        let largest = all_reduce(&own.log_sum, ReduceOp::Max, group)?;
        let shift = torch(finite(&largest))?;
        let pack = || {
            let weight = own.log_sum.f_sub(&shift)?.f_exp()?.f_unsqueeze(-1)?;
            Tensor::f_cat(&[own.output.f_mul(&weight)?, weight], -1)
        };
        let all = all_reduce(&torch(pack())?, ReduceOp::Sum, group)?;
        let unpack = || {
            let features = own.output.size()[3];
            let sum = all.f_narrow(3, features, 1)?;
            let output = all.f_narrow(3, 0, features)?.f_div(&sum.f_masked_fill(&sum.f_eq(0.0)?, 1.0)?)?;
            Ok(Running { output, log_sum: sum.f_log()?.f_squeeze_dim(-1)?.f_add(&shift)? })
        };
        torch(unpack())
    }

    /// Computes the gradients by differentiable operators, with the keys of all ranks at once.
    fn double_backward(&self, x: &Inputs<'_>, gradient: &Tensor) -> Result<Vec<Option<Tensor>>> {
        if self.combines {
            return refuse(
                super::NAME,
                "gradients of gradients of whole queries and split keys: ask for the strategy Ring or AllToAll",
            );
        }
        let ring = &self.ring;
        let order = ring.by_group_rank();
        let keys: Vec<Interval> = order.iter().map(|&number| self.keys[number]).collect();
        let sizes: Vec<i64> = keys.iter().map(|keys| keys.len).collect();
        let gather = |t: &Tensor| all_gather_v(t, Some(&sizes), 2, true, &ring.group);
        let (key, value) = match ring.len() {
            1 => (x.key.shallow_clone(), x.value.shallow_clone()),
            _ => (gather(x.key)?, gather(x.value)?),
        };
        let all = Inputs { query: x.query, key: &key, value: &value, mask: x.mask };
        let [query, mut key, mut value, mask] =
            exact(&self.kernel, self.causal, &all, self.own_queries(), &keys, gradient)?;
        if ring.len() > 1 {
            let home = |t: &Option<Tensor>| {
                let scatter =
                    |t: &Tensor| reduce_scatter_v(t, Some(&sizes), 2, ReduceOp::Sum, true, &ring.group);
                t.as_ref().map(scatter).transpose()
            };
            (key, value) = (home(&key)?, home(&value)?);
        }
        Ok(vec![query, key, value, mask])
    }

    /// Keys and values as one message.
    fn pack(&self, key: &Tensor, value: &Tensor) -> Result<Tensor> {
        match self.ring.len() {
            1 => torch(Tensor::f_zeros([0], (key.kind(), key.device()))),
            _ => {
                let pack = || Tensor::f_cat(&[key.f_reshape([-1])?, value.f_reshape([-1])?], 0);
                torch(pack())
            }
        }
    }

    /// The keys and values of that rank's message.
    fn unpack(
        &self,
        packed: &Tensor,
        source: usize,
        key: &Tensor,
        value: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let shape = |like: &Tensor| {
            let mut shape = like.size();
            shape[2] = self.keys[source].len;
            shape
        };
        let (keys, values) = (shape(key), shape(value));
        let (first, second) = (keys.iter().product(), values.iter().product());
        let part = |at, length, shape: &[i64]| packed.f_narrow(0, at, length)?.f_view(shape);
        let both = || Ok::<_, TchError>((part(0, first, &keys)?, part(first, second, &values)?));
        torch(both())
    }

    /// Begins to receive the block of that step, where there is one and this rank has a use for it.
    fn begin(
        &self,
        step: usize,
        like: &Tensor,
        key: &Tensor,
        value: &Tensor,
    ) -> Result<Option<Work<Tensor>>> {
        let ring = &self.ring;
        if step >= self.steps() || !self.meet(ring.me, ring.source(step)) {
            return Ok(None);
        }
        let source = ring.source(step);
        let row = |t: &Tensor| t.size()[0] * t.size()[1] * t.size()[3];
        let length = self.keys[source].len * (row(key) + row(value));
        ring.receive(&[length], like, source).map(Some)
    }

    /// Adds what another rank has found of this rank's keys' gradients.
    fn accumulate_grads(&self, packed: &Tensor, sums: &Gradients) -> Result<()> {
        let (key, value) = self.unpack(packed, self.ring.me, &sums.key, &sums.value)?;
        let add = |sum: &Tensor, part: &Tensor| sum.shallow_clone().f_add_(part);
        torch(add(&sums.key, &key).and_then(|_| add(&sums.value, &value))).map(|_| ())
    }
}

/// Copies the tensors, but not the mask's.
fn copy(sums: &Gradients) -> Gradients {
    Gradients {
        query: sums.query.shallow_clone(),
        key: sums.key.shallow_clone(),
        value: sums.value.shallow_clone(),
        mask: None,
    }
}

/// Moves messages on between computations.
fn advance<const N: usize>(sent: &mut [Work<()>], coming: [&mut Option<Work<Tensor>>; N]) -> Result<()> {
    for message in sent {
        message.poll()?;
    }
    for work in coming.into_iter().flatten() {
        work.poll()?;
    }
    Ok(())
}
