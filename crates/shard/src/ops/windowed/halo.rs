//! Convolution of a rank's own part while its halo travels.
//!
//! A convolution is linear in its input: that of a window is that of the part in zeros, which needs no copy of it, plus, at
//! the part's ends, that of the halo in zeros. The ends are small, and come when the halo does; backward, the halo's
//! gradient travels while the part's is computed.

use std::sync::{Arc, Mutex, PoisonError};

use isobar_array::kernel::{ConvGeometry, ConvParams, product_kind};
use isobar_collectives::Group;
use isobar_collectives::trace::Label;
use isobar_collectives::windows::{self, Fetch, Transfer};
use isobar_torch::autograd::{self, BackwardOptions, Context, Function};
use isobar_torch::guard::{EnableGrad, NoGrad, is_grad_enabled};
use tch::{Kind, TchError, Tensor};

use super::channels::ConvOperands;
use crate::error::Result;
use crate::layout::Dim;
use crate::ops::{refuse, torch};
use crate::tensor::ShardTensor;
use crate::window::{Need, Piece, transfer};

const OP: &str = "conv";

/// Error of a backward pass.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The halo of each rank along the one dim that is split.
#[derive(Clone)]
pub(super) struct Halo {
    dim: i64,
    /// Elements of it on a side.
    width: i64,
    /// This rank has neighbours before and after.
    sides: [bool; 2],
    /// From the ends of all parts to the halos.
    share: Arc<Transfer>,
    group: Group,
}

/// Geometry of the dense operator on a shard.
#[derive(Clone)]
pub(super) struct Native {
    pub(super) stride: Vec<i64>,
    pub(super) padding: Vec<i64>,
    pub(super) dilation: Vec<i64>,
    pub(super) groups: i64,
    /// True if a bias is added.
    pub(super) bias: bool,
}

impl Native {
    fn convolve(&self, x: &Tensor, w: &Tensor, b: Option<&Tensor>) -> Result<Tensor, TchError> {
        let steps = ConvParams {
            stride: self.stride.clone(),
            padding: self.padding.clone(),
            dilation: self.dilation.clone(),
            extra: vec![0; self.padding.len()],
        };
        steps.convolve(x, w, b, self.groups, false)
    }
}

impl Halo {
    /// The halo of a convolution that pads with zeros, if one of its dims is split, over which it goes in single steps to a
    /// result of the same extent, and no part is smaller than the halo; not where 16-bit floats are computed, which would be rounded
    /// once more where it is added. The same answer on all ranks.
    pub(super) fn new(x: &ShardTensor, geometries: &[ConvGeometry]) -> Result<Option<Self>> {
        let layout = x.layout();
        if matches!(x.kind(), Kind::Half | Kind::BFloat16) || product_kind(x.device()).is_some() {
            return Ok(None);
        }
        let mut split = geometries.iter().filter(|walk| layout.is_sharded(walk.dim));
        let (Some(walk), None) = (split.next(), split.next()) else { return Ok(None) };
        let width = walk.before;
        let dim = &layout.dims()[walk.dim];
        let fits = geometries.iter().all(|walk| walk.before == walk.after)
            && walk.stride == 1
            && walk.result == walk.extent
            && width > 0
            && dim.sizes().iter().all(|&size| size >= width);
        if !fits {
            return Ok(None);
        }
        // The first and the last elements of each part, one after another.
        let parts = dim.parts.len() as i64;
        let ends =
            layout.with_dim(walk.dim, Dim::consecutive(dim.axes.clone(), &vec![2 * width; dim.parts.len()]));
        let halo = |part: i64| {
            let before = (part > 0).then(|| 2 * width * part - width);
            let after = (part + 1 < parts).then(|| 2 * width * (part + 1));
            let take = |start| Piece::Take { start, len: width, step: 1 };
            before.into_iter().chain(after).map(take).collect()
        };
        let mut needs: Vec<Need> = ends.dims().iter().map(Need::of).collect();
        needs[walk.dim] = Need { axes: dim.axes.clone(), parts: (0..parts).map(halo).collect() };
        let sharding = layout.sharding_axes();
        let replicated: Vec<usize> =
            (0..layout.placements().len()).filter(|axis| !sharding.contains(axis)).collect();
        let share = transfer(&ends, &needs, &replicated)?;
        let part = super::part_of(dim, layout);
        let sides = [part.start > 0, part.end() < walk.extent];
        let group = layout.ranks()?.group.clone();
        Ok(Some(Self { dim: walk.dim as i64, width, sides, share, group }))
    }

    /// The convolution of this rank's part.
    pub(super) fn convolve(self, x: &Tensor, parts: &ConvOperands, native: Native) -> Result<Tensor> {
        let (weight, bias) = (&parts.weight, parts.bias.as_ref());
        let inputs: Vec<&Tensor> = [x, weight].into_iter().chain(bias).collect();
        let records = is_grad_enabled() && inputs.iter().any(|input| input.requires_grad());
        let ends = torch(OP, self.ends(&x.detach()))?;
        let work = windows::fetch(&ends, &self.share, 0.0, &self.group)?;
        let leaf = |tensor: &Tensor| tensor.detach().set_requires_grad(records && tensor.requires_grad());
        let leaves: Vec<Tensor> = inputs.iter().map(|input| leaf(input)).collect();
        let own = {
            let _grad = records.then(EnableGrad::new);
            torch(OP, native.convolve(&leaves[0], &leaves[1], leaves.get(2)))?
        };
        let halo = work.wait()?.set_requires_grad(leaves[0].requires_grad());
        let mut inner = Inner { leaves, halo, own, ends: [None, None] };
        {
            let _grad = records.then(EnableGrad::new);
            inner.ends = torch(OP, self.of_ends(&native, &inner.halo, &inner.leaves[1]))?;
        }
        let y = inner.own.detach();
        for (start, end) in self.starts(&y).zip(&inner.ends) {
            if let Some(end) = end {
                let here = torch(OP, y.f_narrow(self.dim, start, self.width))?;
                let _ = torch(OP, here.shallow_clone().f_add_(&end.detach()))?;
            }
        }
        if !records {
            return Ok(y);
        }
        // The graph needs the place of its result only, not the elements.
        let place =
            torch(OP, y.f_new_zeros([1], (y.kind(), y.device())).and_then(|x| x.f_expand(y.size(), false)))?;
        torch(OP, inner.own.f_set_data(&place))?;
        let saved: Vec<&Tensor> = [x, weight, &inner.halo].into_iter().chain(bias).collect();
        let saved: Vec<Tensor> = saved.into_iter().map(Tensor::shallow_clone).collect();
        let saved: Vec<&Tensor> = saved.iter().collect();
        let label = Label::current();
        let inner = Mutex::new(Some(inner));
        let outputs = Function::new(OP).save(&saved).apply(&inputs, vec![y], move |context, grads| {
            let _label = label.backward();
            let gradient = context.grad_or_zeros(grads, 0)?;
            let inner = inner.lock().unwrap_or_else(PoisonError::into_inner).take();
            match is_grad_enabled() {
                true => self.differentiable_gradients(&native, context, &gradient),
                false => self.gradients(&native, context, inner, &gradient),
            }
        })?;
        outputs.into_iter().next().map_or_else(|| refuse(OP, "a function lost its output"), Ok)
    }

    /// A part's first and last elements.
    fn ends(&self, x: &Tensor) -> Result<Tensor, TchError> {
        let starts: Vec<i64> = self.starts(x).collect();
        let end = |start: &i64| x.f_narrow(self.dim, *start, self.width);
        Tensor::f_cat(&starts.iter().map(end).collect::<Result<Vec<_>, _>>()?, self.dim)
    }

    /// Returns the starts of the first and the last elements.
    fn starts(&self, x: &Tensor) -> impl Iterator<Item = i64> + use<> {
        [0, x.size()[self.dim as usize] - self.width].into_iter()
    }

    /// Computes the halo's contribution at both ends, from the kernel elements that reach it.
    fn of_ends(
        &self,
        native: &Native,
        halo: &Tensor,
        weight: &Tensor,
    ) -> Result<[Option<Tensor>; 2], TchError> {
        let (dim, spatial) = (self.dim, self.dim as usize - 2);
        let dilation = native.dilation[spatial];
        let kernel = weight.size()[dim as usize];
        let reaching = (self.width - 1) / dilation + 1;
        // A halo of one element, which one of the kernel's reaches, is a thing of one dim fewer.
        let thin = self.width == 1 && halo.dim() > 3;
        let mut native = native.clone();
        native.padding[spatial] = 0;
        if thin {
            for steps in [&mut native.stride, &mut native.padding, &mut native.dilation] {
                steps.remove(spatial);
            }
        }
        // In the place of the part's own elements that these see: zeros.
        let own = dilation * (reaching - 1);
        let mut at = 0;
        let mut end = |side: usize| -> Result<Option<Tensor>, TchError> {
            if !self.sides[side] {
                return Ok(None);
            }
            let part = halo.f_narrow(dim, at, self.width)?;
            at += self.width;
            let weight = weight.f_narrow(dim, if side == 0 { 0 } else { kernel - reaching }, reaching)?;
            if thin {
                let y = native.convolve(&part.f_squeeze_dim(dim)?, &weight.f_squeeze_dim(dim)?, None)?;
                return y.f_unsqueeze(dim).map(Some);
            }
            let mut around = vec![0; 2 * (halo.dim() - dim as usize - 1)];
            around.extend(if side == 0 { [0, own] } else { [own, 0] });
            native.convolve(&part.f_constant_pad_nd(around)?, &weight, None).map(Some)
        };
        Ok([end(0)?, end(1)?])
    }

    fn gradients(
        &self,
        native: &Native,
        context: &Context<'_>,
        inner: Option<Inner>,
        gradient: &Tensor,
    ) -> Result<Vec<Option<Tensor>>, Failure> {
        let inner = match inner {
            Some(inner) => inner,
            None => self.again(native, context)?,
        };
        let Inner { leaves, halo, own, ends } = &inner;
        // The ends first: what they give the halo travels while the part's gradients are computed.
        let mut outputs = Vec::new();
        let mut cotangents = Vec::new();
        for (end, at) in ends.iter().zip(self.starts(gradient)) {
            if let Some(end) = end {
                outputs.push(end);
                cotangents.push(gradient.f_narrow(self.dim, at, self.width)?);
            }
        }
        let mut of_ends = grads(&outputs, &[halo, &leaves[1]], cotangents, false)?;
        let back = match halo.requires_grad() {
            true => {
                let of_halo = of_ends[0].take().map_or_else(|| halo.f_zeros_like(), Ok)?;
                Some(windows::accumulate(&of_halo, &self.share, &self.group)?)
            }
            false => None,
        };
        let inputs: Vec<&Tensor> = leaves.iter().collect();
        let all = grads(&[own], &inputs, vec![gradient.shallow_clone()], false)?;
        // These are nobody else's yet.
        let _guard = NoGrad::new();
        if let (Some(work), Some(x)) = (back, &all[0]) {
            let of_halo = work.wait()?;
            for (number, start) in self.starts(x).enumerate() {
                let end = of_halo.f_narrow(self.dim, number as i64 * self.width, self.width)?;
                let _ = x.f_narrow(self.dim, start, self.width)?.f_add_(&end)?;
            }
        }
        if let (Some(weight), Some(of_ends)) = (&all[1], &of_ends[1]) {
            let _ = weight.shallow_clone().f_add_(of_ends)?;
        }
        Ok(all)
    }

    /// The convolutions once more, for a second backward pass.
    fn again(&self, native: &Native, context: &Context<'_>) -> Result<Inner, Failure> {
        let _grad = EnableGrad::new();
        let leaf = |index: usize| -> Result<Tensor, Failure> {
            let saved = context.saved(index)?;
            Ok(saved.detach().set_requires_grad(saved.requires_grad()))
        };
        let (x, weight, halo) = (leaf(0)?, leaf(1)?, leaf(2)?);
        let bias = native.bias.then(|| leaf(3)).transpose()?;
        let own = native.convolve(&x, &weight, bias.as_ref())?;
        let ends = self.of_ends(native, &halo, &weight)?;
        Ok(Inner { leaves: [x, weight].into_iter().chain(bias).collect(), halo, own, ends })
    }

    /// Gradients that have gradients.
    fn differentiable_gradients(
        &self,
        native: &Native,
        context: &Context<'_>,
        gradient: &Tensor,
    ) -> Result<Vec<Option<Tensor>>, Failure> {
        // Nodes of their own: one input may have been computed from another, and that way is gone through outside.
        let own = |index: usize| -> Result<Tensor, Failure> { Ok(context.saved(index)?.f_alias()?) };
        let (x, weight) = (own(0)?, own(1)?);
        let bias = native.bias.then(|| own(3)).transpose()?;
        let share = self.share.clone();
        let fetch = Fetch { forward: share.clone(), back: share, group: self.group.clone(), hidden: false };
        let halo = windows::fetch_window(&self.ends(&x)?, fetch, 0.0)?;
        let mut y = native.convolve(&x, &weight, bias.as_ref())?;
        let extent = y.size()[self.dim as usize];
        for (start, end) in self.starts(&y).zip(self.of_ends(native, &halo, &weight)?) {
            if let Some(end) = end {
                let mut around = vec![0; 2 * (y.dim() - self.dim as usize - 1)];
                around.extend([start, extent - start - self.width]);
                y = y.f_add(&end.f_constant_pad_nd(around)?)?;
            }
        }
        let inputs: Vec<&Tensor> = [&x, &weight].into_iter().chain(bias.as_ref()).collect();
        grads(&[&y], &inputs, vec![gradient.shallow_clone()], true)
    }
}

/// The gradients of inputs, of those that require one.
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
    let of = |input: &&Tensor| if input.requires_grad() { found.next().flatten() } else { None };
    Ok(inputs.iter().map(of).collect())
}

/// The convolutions of a part and of its halo, each a graph of its own.
struct Inner {
    /// Part, weight, and bias if there is one.
    leaves: Vec<Tensor>,
    halo: Tensor,
    own: Tensor,
    ends: [Option<Tensor>; 2],
}
