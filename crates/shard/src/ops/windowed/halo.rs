//! Convolution of a rank's interior while its halo is in flight.
//!
//! Forward convolves the shard with zero padding, which needs no copy (except of volumes on some processors) and gives the interior:
//! the results whose windows lie in the shard. Then it convolves the border strips from shard and halo, and replaces the results at
//! the edges. Backward relies on convolution being linear in its input: the shard's gradient is that of the zero-padded convolution.
//! Only the halo's gradient, computed from the strips, is sent back, in flight while the shard's gradient is computed.

use std::sync::{Arc, Mutex, PoisonError};

use isobar_array::in_full_precision;
use isobar_array::kernel::{ConvParams, WindowGeometry, lowered};
use isobar_collectives::Group;
use isobar_collectives::trace::Label;
use isobar_collectives::windows::{self, Fetch, IndexBox, Transfer};
use isobar_torch::autograd::{self, BackwardOptions, Context, Function};
use isobar_torch::guard::{EnableGrad, NoGrad, is_grad_enabled};
use tch::{TchError, Tensor};

use super::channels::ConvOperands;
use super::strips::{Share, Strip, least_interior, strips};
use super::{WindowPlan, window};
use crate::error::Result;
use crate::layout::{Interval, Layout};
use crate::ops::{refuse, torch, wide};
use crate::window::{Border, HaloSpec, transfer};

const OP: &str = "conv";

/// Least interior share of a rank's results: below it, the strips, which are computed twice, cost more than waiting.
const LEAST_INTERIOR: f64 = 0.5;

/// Error of a backward pass.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// One rank's share of a convolution that overlaps its halo exchange.
#[derive(Clone)]
pub(super) struct Overlap {
    shares: Vec<Share>,
    strips: Vec<Strip>,
    /// Places of the blocks that other ranks send: global indices of the input along spatial dims, local ones along batch and
    /// channels.
    received: Vec<Vec<Interval>>,
    /// Regions of the shard that the border mode repeats elsewhere, with their places there.
    repeated: Vec<(IndexBox, Vec<Interval>)>,
    transfer: Arc<Transfer>,
    group: Group,
    /// Arguments of the dense operator on the shard, on a strip, and on the complete window.
    shard: ConvParams,
    strip: ConvParams,
    window: ConvParams,
    groups: i64,
}

impl Overlap {
    /// Returns the share of this rank; `None` if nothing is exchanged, or if less than half of some rank's result is interior:
    /// then the window is fetched first. All ranks decide the same.
    pub(super) fn new(
        layout: &Layout,
        geometries: &[WindowGeometry],
        plan: &WindowPlan,
        border: Border,
        groups: i64,
    ) -> Result<Option<Self>> {
        let zeros = border == Border::Fill;
        let interior = geometries
            .iter()
            .zip(&plan.results)
            .map(|(geometry, result)| least_interior(*geometry, zeros, &layout.dims()[geometry.dim], result));
        // Every repetition of an element is fetched separately.
        let wide = |geometry: &WindowGeometry| geometry.before.max(geometry.after) >= geometry.reach();
        let repeats = border == Border::Replicate && geometries.iter().any(wide);
        if layout.coordinates().is_none() || interior.product::<f64>() < LEAST_INTERIOR || repeats {
            return Ok(None);
        }
        let needs: Vec<HaloSpec> = plan.windows.needs.iter().map(HaloSpec::singly).collect();
        let transfer = transfer(layout, &needs, &[])?;
        if !transfer.communicates {
            return Ok(None);
        }
        let share = |(geometry, result): (&WindowGeometry, &Interval)| {
            let shard = super::part_of(&layout.dims()[geometry.dim], layout);
            Share::new(*geometry, zeros, shard, *result)
        };
        let shares: Vec<Share> = geometries.iter().zip(&plan.own).map(share).collect();
        let origin = |(at, geometry): (usize, &WindowGeometry)| match plan.native[at] {
            true => 0,
            false => window(geometry, plan.own[at]).0,
        };
        let origins: Vec<i64> = [0, 0].into_iter().chain(geometries.iter().enumerate().map(origin)).collect();
        let place = |region: &IndexBox| -> Vec<Interval> {
            let runs = region.iter().zip(&origins);
            runs.map(|(run, origin)| Interval::new(run.start + origin, run.len)).collect()
        };
        let stays = |(from, to): &(IndexBox, IndexBox)| {
            let mut dims = from[2..].iter().zip(place(to).split_off(2)).zip(&shares);
            dims.all(|((from, to), share)| from.start + share.shard.start == to.start && from.step == 1)
        };
        let received = transfer.receives.iter().flat_map(|(_, blocks)| blocks);
        let received = received.map(|block| place(&block.region)).collect();
        let repeated = transfer.own.iter().filter(|pair| !stays(pair));
        let repeated = repeated.map(|(from, to)| (from.clone(), place(to))).collect();
        let window = ConvParams::within(geometries, &plan.native);
        let padded = |padding: Vec<i64>| ConvParams { padding, ..window.clone() };
        Ok(Some(Self {
            strips: strips(&shares),
            received,
            repeated,
            group: layout.ranks()?.group.clone(),
            shard: padded(shares.iter().map(|share| share.padding().0).collect()),
            strip: padded(vec![0; shares.len()]),
            window,
            shares,
            transfer,
            groups,
        }))
    }

    /// Convolves this rank's part.
    pub(super) fn convolve(self, operands: &ConvOperands) -> Result<Tensor> {
        // Cast before the exchange, so that mixed precision sends 16 bits.
        let low = |tensor: &Tensor| torch(OP, lowered(tensor));
        let (x, weight) = (low(operands.x.local())?, low(&operands.weight)?);
        let bias = operands.bias.as_ref().map(low).transpose()?;
        let inputs: Vec<&Tensor> = [&x, &weight].into_iter().chain(&bias).collect();
        let records = is_grad_enabled() && inputs.iter().any(|input| input.requires_grad());
        let work = windows::fetch_blocks(&x, &self.transfer, &self.group)?;
        let leaf = |tensor: &&Tensor| tensor.detach().set_requires_grad(records && tensor.requires_grad());
        let leaves: Vec<Tensor> = inputs.iter().map(leaf).collect();
        let mut inner = {
            let _grad = records.then(EnableGrad::new);
            torch(OP, self.inner(leaves))?
        };
        let y = inner.own.detach();
        let blocks = work.wait()?;
        {
            let _guard = NoGrad::new();
            torch(OP, self.replace_strips(&y, &inputs, &self.sources(&x, &blocks)?))?;
        }
        if !records {
            return Ok(y);
        }
        if !inner.cropped {
            // The graph needs only the shape of its result, not the elements.
            let place = torch(
                OP,
                y.f_new_zeros([1], (y.kind(), y.device())).and_then(|x| x.f_expand(y.size(), false)),
            )?;
            torch(OP, inner.own.f_set_data(&place))?;
        }
        let saved: Vec<&Tensor> = inputs.iter().copied().chain(&blocks).collect();
        let label = Label::current();
        let (inputs_count, inner) = (inputs.len(), Mutex::new(Some(inner)));
        let outputs = Function::new(OP).save(&saved).apply(&inputs, vec![y], move |context, grads| {
            let _label = label.backward();
            let gradient = context.grad_or_zeros(grads, 0)?;
            let inner = inner.lock().unwrap_or_else(PoisonError::into_inner).take();
            // Keep the dtypes of forward, whatever autocast is active where backward is called.
            in_full_precision(gradient.device(), || match is_grad_enabled() {
                true => self.differentiable_gradients(context, inputs_count, &gradient),
                false => self.gradients(context, inputs_count, inner, &gradient),
            })
        })?;
        outputs.into_iter().next().map_or_else(|| refuse(OP, "a function lost its output"), Ok)
    }

    /// Convolves the shard with zero padding.
    fn inner(&self, leaves: Vec<Tensor>) -> Result<Inner, TchError> {
        let mut own = self.shard.convolve(&leaves[0], &leaves[1], leaves.get(2), self.groups, false)?;
        let mut cropped = false;
        for (dim, share) in (2..).zip(&self.shares) {
            let (_, skipped) = share.padding();
            if own.size()[dim as usize] != share.result.len {
                own = own.f_narrow(dim, skipped, share.result.len)?;
                cropped = true;
            }
        }
        Ok(Inner { leaves, own: own.f_contiguous()?, cropped })
    }

    /// Returns the blocks outside of the shard that the strips read, each with its place: those received, and those that the
    /// border mode repeats from the shard.
    fn sources(&self, x: &Tensor, received: &[Tensor]) -> Result<Vec<(Tensor, &[Interval])>> {
        let mut sources: Vec<(Tensor, &[Interval])> = Vec::new();
        sources
            .extend(received.iter().map(Tensor::shallow_clone).zip(self.received.iter().map(Vec::as_slice)));
        for (from, place) in &self.repeated {
            sources.push((windows::region(&x.detach(), from)?, place));
        }
        Ok(sources)
    }

    /// Returns the window of a strip: these blocks, and zeros elsewhere.
    fn strip_of(
        &self,
        strip: &Strip,
        x: &Tensor,
        sources: &[(Tensor, &[Interval])],
    ) -> Result<Tensor, TchError> {
        let mut shape = x.size()[..2].to_vec();
        shape.extend(strip.window.iter().map(|interval| interval.len));
        let window = x.f_new_zeros(shape, (x.kind(), x.device()))?;
        for (block, place) in sources {
            if let Some((mut to, from)) = common((&window, &on_all_dims(x, &strip.window)), (block, place))? {
                to.f_copy_(&from)?;
            }
        }
        Ok(window)
    }

    /// Convolves the strips, and overwrites the results that zero padding made wrong.
    fn replace_strips(
        &self,
        y: &Tensor,
        inputs: &[&Tensor],
        sources: &[(Tensor, &[Interval])],
    ) -> Result<(), TchError> {
        let shard: Vec<Interval> = self.shares.iter().map(|share| share.shard).collect();
        for strip in &self.strips {
            let window = self.strip_of(strip, inputs[0], sources)?;
            let places = [&strip.window, &shard].map(|place| on_all_dims(inputs[0], place));
            if let Some((mut to, from)) = common((&window, &places[0]), (inputs[0], &places[1]))? {
                to.f_copy_(&from)?;
            }
            let of_strip =
                self.strip.convolve(&window, inputs[1], inputs.get(2).copied(), self.groups, false)?;
            narrowed(y, 2, &strip.place)?.f_copy_(&of_strip)?;
        }
        Ok(())
    }

    fn gradients(
        &self,
        context: &Context<'_>,
        inputs: usize,
        inner: Option<Inner>,
        gradient: &Tensor,
    ) -> Result<Vec<Option<Tensor>>, Failure> {
        let inner = match inner {
            Some(inner) => inner,
            None => self.inner_again(context, inputs)?,
        };
        let Inner { leaves, own, .. } = &inner;
        // The strips first: the halo's gradient is in flight while the shard's gradient is computed.
        let x = &leaves[0];
        let received: Vec<Tensor> =
            (0..self.received.len()).map(|at| context.saved(inputs + at)).collect::<Result<_, _>>()?;
        let sources = self.sources(x, &received)?;
        let of_strips = self.strip_gradients(leaves, &sources, gradient)?;
        let (received, repeated) = of_strips.blocks.split_at(self.received.len());
        let back = match x.requires_grad() {
            true => Some(windows::return_blocks(received, &self.transfer, x, &self.group)?),
            false => None,
        };
        let inputs: Vec<&Tensor> = leaves.iter().collect();
        let mut all = grads(&[own], &inputs, vec![gradient.shallow_clone()], false)?;
        let _guard = NoGrad::new();
        if let (Some(work), Some(of_x)) = (back, &mut all[0]) {
            let returned = work.wait()?;
            let kind = of_x.kind();
            // The gradients are not shared yet, so they are updated in place. 16-bit terms are added up in single precision.
            let sum = wide(of_x)?;
            for ((from, _), block) in self.repeated.iter().zip(repeated) {
                windows::add(&sum, from, block)?;
            }
            returned.add(&sum)?;
            *of_x = sum.f_to_kind(kind)?;
        }
        if let (Some(of_weight), Some(more)) = (&all[1], &of_strips.weight) {
            let _ = of_weight.shallow_clone().f_add_(more)?;
        }
        Ok(all)
    }

    /// Computes the gradients of the blocks that the strips read, and the strips' part of the weight's gradient.
    fn strip_gradients(
        &self,
        leaves: &[Tensor],
        sources: &[(Tensor, &[Interval])],
        gradient: &Tensor,
    ) -> Result<StripGradients, Failure> {
        let x = &leaves[0];
        let weight = leaves[1].detach().set_requires_grad(leaves[1].requires_grad());
        let mut windows = Vec::new();
        let (mut results, mut cotangents) = (Vec::new(), Vec::new());
        for strip in &self.strips {
            let window = {
                let _guard = NoGrad::new();
                self.strip_of(strip, x, sources)?
            };
            let window = window.set_requires_grad(x.requires_grad());
            let _grad = EnableGrad::new();
            results.push(self.strip.convolve(&window, &weight, None, self.groups, false)?);
            cotangents.push(narrowed(gradient, 2, &strip.place)?);
            windows.push(window);
        }
        let inputs: Vec<&Tensor> = windows.iter().chain([&weight]).collect();
        let mut all = grads(&results.iter().collect::<Vec<_>>(), &inputs, cotangents, false)?;
        let weight = all.pop().flatten();
        let _guard = NoGrad::new();
        let mut blocks = Vec::new();
        for (source, place) in sources {
            let block = source.f_zeros_like()?;
            for (strip, of_window) in self.strips.iter().zip(&all) {
                let Some(of_window) = of_window else { continue };
                let of_strip = on_all_dims(x, &strip.window);
                if let Some((mut to, from)) = common((&block, place), (of_window, &of_strip))? {
                    let _ = to.f_add_(&from)?;
                }
            }
            blocks.push(block);
        }
        Ok(StripGradients { blocks, weight })
    }

    /// Repeats the convolution of the shard, for a second backward pass.
    fn inner_again(&self, context: &Context<'_>, inputs: usize) -> Result<Inner, Failure> {
        let _grad = EnableGrad::new();
        let leaf = |index: usize| -> Result<Tensor, Failure> {
            let saved = context.saved(index)?;
            Ok(saved.detach().set_requires_grad(saved.requires_grad()))
        };
        Ok(self.inner((0..inputs).map(leaf).collect::<Result<_, _>>()?)?)
    }

    /// Computes differentiable gradients, through the convolution of the complete window.
    fn differentiable_gradients(
        &self,
        context: &Context<'_>,
        inputs: usize,
        gradient: &Tensor,
    ) -> Result<Vec<Option<Tensor>>, Failure> {
        // Aliases as separate nodes: one input may have been computed from another, and autograd follows that path outside.
        let own = |index: usize| -> Result<Tensor, Failure> { Ok(context.saved(index)?.f_alias()?) };
        let inputs: Vec<Tensor> = (0..inputs).map(own).collect::<Result<_, _>>()?;
        let share = self.transfer.clone();
        let fetch = Fetch { forward: share.clone(), back: share, group: self.group.clone(), hidden: false };
        let window = windows::fetch_window(&inputs[0], fetch, 0.0)?;
        let y = self.window.convolve(&window, &inputs[1], inputs.get(2), self.groups, false)?;
        grads(&[&y], &inputs.iter().collect::<Vec<_>>(), vec![gradient.shallow_clone()], true)
    }
}

/// Convolution of the shard, as a separate graph.
struct Inner {
    /// Shard, weight, and bias if there is one.
    leaves: Vec<Tensor>,
    own: Tensor,
    /// True if `own` was cut out of a larger result.
    cropped: bool,
}

struct StripGradients {
    /// Gradients of the blocks that the strips read.
    blocks: Vec<Tensor>,
    weight: Option<Tensor>,
}

/// Returns views of the elements that two tensors have in common, by their places.
fn common(
    (a, of_a): (&Tensor, &[Interval]),
    (b, of_b): (&Tensor, &[Interval]),
) -> Result<Option<(Tensor, Tensor)>, TchError> {
    let mut both = (Vec::new(), Vec::new());
    for (of_a, of_b) in of_a.iter().zip(of_b) {
        let start = of_a.start.max(of_b.start);
        let len = of_a.end().min(of_b.end()) - start;
        if len <= 0 {
            return Ok(None);
        }
        both.0.push(Interval::new(start - of_a.start, len));
        both.1.push(Interval::new(start - of_b.start, len));
    }
    Ok(Some((narrowed(a, 0, &both.0)?, narrowed(b, 0, &both.1)?)))
}

/// Returns the spatial place extended by all samples and channels of `x`.
fn on_all_dims(x: &Tensor, spatial: &[Interval]) -> Vec<Interval> {
    let first = x.size().into_iter().take(2).map(|extent| Interval::new(0, extent));
    first.chain(spatial.iter().copied()).collect()
}

/// Returns the view of a box along the dims from `first` on.
fn narrowed(x: &Tensor, first: i64, place: &[Interval]) -> Result<Tensor, TchError> {
    let mut dims = (first..).zip(place);
    dims.try_fold(x.shallow_clone(), |x, (dim, interval)| x.f_narrow(dim, interval.start, interval.len))
}

/// Computes the gradients of those inputs that require one.
fn grads(
    outputs: &[&Tensor],
    inputs: &[&Tensor],
    cotangents: Vec<Tensor>,
    create_graph: bool,
) -> Result<Vec<Option<Tensor>>, Failure> {
    let wanted: Vec<&Tensor> = inputs.iter().copied().filter(|input| input.requires_grad()).collect();
    let found = match outputs.is_empty() || wanted.is_empty() {
        true => Vec::new(),
        false => {
            let options = BackwardOptions { create_graph, allow_unused: true, ..BackwardOptions::default() };
            let cotangents: Vec<Option<Tensor>> = cotangents.into_iter().map(Some).collect();
            autograd::grad(outputs, &wanted, &cotangents, options)?
        }
    };
    let mut found = found.into_iter();
    let next = |input: &&Tensor| if input.requires_grad() { found.next().flatten() } else { None };
    Ok(inputs.iter().map(next).collect())
}
