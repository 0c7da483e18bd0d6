//! Window fetch: each rank gets the indices that it needs of a tensor whose parts lie on the ranks, and its adjoint.
//!
//! A [`Transfer`] is one rank's share of such an exchange: which regions of its tensor go where. The layouts that it
//! follows from are the caller's; all ranks must work theirs out from the same ones.

use std::sync::Arc;

use isobar_torch::guard::{NoGrad, is_grad_enabled};
use tch::{Kind, Tensor};

use crate::collective::linear::{LinearMap, attach, differentiable, records};
use crate::engine::exchange::Exchange;
use crate::engine::group::Group;
use crate::engine::work::Work;
use crate::error::{Error, Result};
use crate::local::memory::{self, output_like};

/// Indices `start, start + step, …` along a dim, `len` of them; `step` may be negative, and is not 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IndexRun {
    /// The first index.
    pub start: i64,
    /// Number of indices.
    pub len: i64,
    /// Difference between an index and the next.
    pub step: i64,
}

/// A run along each dim.
pub type IndexBox = Vec<IndexRun>;

/// A region of one rank's tensor that is a region of another's.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SharedRegion {
    /// Region of this rank's tensor.
    pub region: IndexBox,
    /// The dim from which on the memory of both sides is in one piece: the last along which either is cut.
    pub row_dim: usize,
}

/// Regions that one rank sends and receives in an exchange.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Transfer {
    /// The shape of this rank's part before.
    pub input: Vec<i64>,
    /// The shape of what it gets.
    pub output: Vec<i64>,
    /// Regions copied locally, from the input to the output.
    pub own: Vec<(IndexBox, IndexBox)>,
    /// Regions of the input that go to a rank of the group, by rank; both sides list them in the same order.
    pub sends: Vec<(usize, Vec<SharedRegion>)>,
    /// Regions of the output that come from a rank, by rank.
    pub receives: Vec<(usize, Vec<SharedRegion>)>,
    /// True if any rank sends anything; the same on all ranks.
    pub communicates: bool,
    /// Digest of what all ranks must agree on besides shapes, such as their layouts.
    pub fingerprint: u64,
}

impl Transfer {
    /// Returns whether the output is a view of one region of the input.
    fn is_view(&self) -> bool {
        let [(from, to)] = &self.own[..] else { return false };
        self.receives.is_empty() && covers(to, &self.output) && from.iter().all(|run| run.step > 0)
    }

    /// Returns whether every element of the output is written. (None is written twice.)
    fn fills(&self) -> bool {
        let own = self.own.iter().map(|(_, to)| numel(to));
        let received = self.receives.iter().flat_map(|(_, blocks)| blocks).map(|block| numel(&block.region));
        own.chain(received).sum::<i64>() == self.output.iter().product::<i64>()
    }
}

/// Gathers what this rank needs; what no rank has is `fill`. Where the output is a region of this rank's own part, it is
/// a view of it.
///
/// All ranks of the group call where the transfer [communicates](Transfer::communicates).
///
/// # Errors
///
/// A tensor of another shape than the transfer's input; the errors of the exchange.
pub fn fetch(tensor: &Tensor, transfer: &Transfer, fill: f64, group: &Group) -> Result<Work<Tensor>> {
    let _guard = NoGrad::new();
    let call = if transfer.communicates { group.call("fetch") } else { group.local_call("fetch") };
    call.describe(tensor);
    if tensor.size() != transfer.input {
        return Err(call.refuse(format!("the tensor is {:?}, expected {:?}", tensor.size(), transfer.input)));
    }
    let tensor = tensor.detach();
    if transfer.is_view() && (!transfer.communicates || transfer.sends.is_empty()) {
        let view = region(&tensor, &transfer.own[0].0)?;
        return Ok(Work::start(call, async move { Ok(view) }));
    }
    let mut output = output_like(&tensor, &transfer.output)?;
    if !transfer.fills() {
        let _ = output.f_fill_(fill)?;
    }
    let mut exchange = Exchange::new(&call, 0).with_fingerprint(transfer.fingerprint);
    let mut unpack = Vec::new();
    for (peer, blocks) in &transfer.receives {
        match &blocks[..] {
            [block] if ascending(&block.region) => {
                exchange.receive(*peer, &region(&output, &block.region)?, block.row_dim)?;
            }
            blocks => {
                let packed = memory::empty(&[total(blocks)], tensor.kind(), tensor.device())?;
                exchange.receive(*peer, &packed, 0)?;
                unpack.push((packed, blocks.to_vec()));
            }
        }
    }
    send(&mut exchange, &tensor, &transfer.sends)?;
    let pending = exchange.start()?;
    for (from, to) in &transfer.own {
        memory::copy(&region(&output, to)?, &region(&tensor, from)?)?;
    }
    Ok(Work::start(call, async move {
        pending.await?;
        let _guard = NoGrad::new();
        for (packed, blocks) in &unpack {
            for (part, block) in parts(packed, blocks)? {
                memory::copy(&region(&output, &block.region)?, &part)?;
            }
        }
        Ok(output)
    }))
}

/// The adjoint of [`fetch`] (with a fill of 0): sends what it brought back and adds it up where it came from, in fp32 for
/// 16-bit floats. The order of addition is this rank's own first, then the others' by rank.
///
/// All ranks of the group call where the transfer communicates.
///
/// # Errors
///
/// A tensor of another shape than the transfer's output; the errors of the exchange.
pub fn accumulate(tensor: &Tensor, transfer: &Transfer, group: &Group) -> Result<Work<Tensor>> {
    accumulate_in(tensor, transfer, false, group)
}

/// Does the work of [`accumulate`]; with `in_place`, sums in the memory of `tensor`, which nothing else may use.
fn accumulate_in(
    tensor: &Tensor,
    transfer: &Transfer,
    in_place: bool,
    group: &Group,
) -> Result<Work<Tensor>> {
    let _guard = NoGrad::new();
    let call = if transfer.communicates { group.call("accumulate") } else { group.local_call("accumulate") };
    call.describe(tensor);
    if tensor.size() != transfer.output {
        return Err(call.refuse(format!(
            "the tensor is {:?}, expected {:?}",
            tensor.size(),
            transfer.output
        )));
    }
    let tensor = tensor.detach();
    let mut exchange = Exchange::new(&call, 0).with_fingerprint(transfer.fingerprint);
    let received = receive_packed(&mut exchange, &transfer.sends, &tensor)?;
    send(&mut exchange, &tensor, &transfer.receives)?;
    let pending = exchange.start()?;
    let half = matches!(tensor.kind(), Kind::Half | Kind::BFloat16);
    let whole = match &transfer.own[..] {
        [(from, to)] if covers(from, &transfer.input) => Some(region(&tensor, to)?),
        _ => None,
    };
    if let (Some(whole), true) = (&whole, received.is_empty()) {
        let whole = whole.shallow_clone();
        return Ok(Work::start(call, async move {
            pending.await?;
            Ok(whole)
        }));
    }
    let reused = whole.as_ref().filter(|_| in_place && !half).map(Tensor::shallow_clone);
    let fresh = reused.is_none();
    let sum = match reused {
        Some(whole) => whole,
        None => output_like(&tensor, &transfer.input)?,
    };
    let mut sum = if half { sum.f_to_kind(Kind::Float)? } else { sum };
    match whole {
        Some(_) if !fresh => {}
        Some(whole) => memory::copy(&sum, &whole)?,
        None => {
            let _ = sum.f_zero_()?;
            for (from, to) in &transfer.own {
                add(&sum, from, &region(&tensor, to)?)?;
            }
        }
    }
    let kind = tensor.kind();
    Ok(Work::start(call, async move {
        pending.await?;
        let _guard = NoGrad::new();
        Returned { received }.add(&sum)?;
        Ok(if half { sum.f_to_kind(kind)? } else { sum })
    }))
}

/// Receives the blocks of a [`fetch`] that other ranks hold, each as a separate tensor, in the order of
/// [`Transfer::receives`]. Does not copy this rank's elements: callers compute on their own shard meanwhile.
///
/// All ranks of the group call.
///
/// # Errors
///
/// See [`fetch`].
pub fn fetch_blocks(tensor: &Tensor, transfer: &Transfer, group: &Group) -> Result<Work<Vec<Tensor>>> {
    let _guard = NoGrad::new();
    let call = group.call("fetch");
    call.describe(tensor);
    if tensor.size() != transfer.input {
        return Err(call.refuse(format!("the tensor is {:?}, expected {:?}", tensor.size(), transfer.input)));
    }
    let tensor = tensor.detach();
    let mut exchange = Exchange::new(&call, 0).with_fingerprint(transfer.fingerprint);
    let received = receive_packed(&mut exchange, &transfer.receives, &tensor)?;
    send(&mut exchange, &tensor, &transfer.sends)?;
    let pending = exchange.start()?;
    Ok(Work::start(call, async move {
        pending.await?;
        let _guard = NoGrad::new();
        let mut all = Vec::new();
        for (packed, blocks) in &received {
            all.extend(parts(packed, blocks)?.into_iter().map(|(part, _)| part));
        }
        Ok(all)
    }))
}

/// Sends the blocks' gradients back and returns those to add to this rank's own gradient: the adjoint of [`fetch_blocks`].
///
/// All ranks of the group call.
///
/// # Errors
///
/// Blocks of other shapes than the transfer's; the errors of the exchange.
pub fn return_blocks(
    blocks: &[Tensor],
    transfer: &Transfer,
    like: &Tensor,
    group: &Group,
) -> Result<Work<Returned>> {
    let _guard = NoGrad::new();
    let call = group.call("accumulate");
    call.describe(like);
    let shapes = transfer.receives.iter().flat_map(|(_, blocks)| blocks).map(|block| shape(&block.region));
    if !shapes.eq(blocks.iter().map(Tensor::size)) {
        return Err(call.refuse("the blocks are not those that the transfer receives".to_owned()));
    }
    let mut exchange = Exchange::new(&call, 0).with_fingerprint(transfer.fingerprint);
    let received = receive_packed(&mut exchange, &transfer.sends, like)?;
    let mut blocks = blocks.iter();
    for (peer, regions) in &transfer.receives {
        let own: Vec<&Tensor> = blocks.by_ref().take(regions.len()).collect();
        match (&own[..], &regions[..]) {
            ([block], [region]) => exchange.send(*peer, &block.detach(), region.row_dim)?,
            _ => {
                let flat: Vec<Tensor> =
                    own.iter().map(|block| block.detach().f_reshape([-1])).collect::<Result<_, _>>()?;
                exchange.send(*peer, &Tensor::f_cat(&flat, 0)?, 0)?;
            }
        }
    }
    let pending = exchange.start()?;
    Ok(Work::start(call, async move {
        pending.await?;
        Ok(Returned { received })
    }))
}

/// Gradients that other ranks sent back, with their regions of this rank's tensor.
pub struct Returned {
    received: Vec<(Tensor, Vec<SharedRegion>)>,
}

impl Returned {
    /// Adds them to this rank's own gradient, in the order of ranks.
    ///
    /// # Errors
    ///
    /// An error of libtorch, such as for a tensor of another shape.
    pub fn add(&self, sum: &Tensor) -> Result<()> {
        for (packed, blocks) in &self.received {
            for (part, block) in parts(packed, blocks)? {
                add(sum, &block.region, &part)?;
            }
        }
        Ok(())
    }
}

/// Sends regions of a tensor, one message a rank.
fn send(exchange: &mut Exchange<'_>, tensor: &Tensor, blocks: &[(usize, Vec<SharedRegion>)]) -> Result<()> {
    for (peer, blocks) in blocks {
        match &blocks[..] {
            [block] => exchange.send(*peer, &region(tensor, &block.region)?, block.row_dim)?,
            blocks => exchange.send(*peer, &pack(tensor, blocks)?, 0)?,
        }
    }
    Ok(())
}

/// Receives these blocks, one buffer for each sending rank.
fn receive_packed(
    exchange: &mut Exchange<'_>,
    blocks: &[(usize, Vec<SharedRegion>)],
    like: &Tensor,
) -> Result<Vec<(Tensor, Vec<SharedRegion>)>> {
    let mut received = Vec::new();
    for (peer, blocks) in blocks {
        let packed = memory::empty(&[total(blocks)], like.kind(), like.device())?;
        match &blocks[..] {
            // The sender has the block's shape, which the message's label tells.
            [block] => {
                exchange.receive(*peer, &packed.f_view(shape(&block.region).as_slice())?, block.row_dim)?;
            }
            _ => exchange.receive(*peer, &packed, 0)?,
        }
        received.push((packed, blocks.clone()));
    }
    Ok(received)
}

/// A window fetch as a linear map. `back` is the transfer that the adjoint takes: the same, or, where the output is
/// replicated and counts once, its part that reaches every element of the input once.
pub struct Fetch {
    /// Transfer of the forward pass.
    pub forward: Arc<Transfer>,
    /// Transfer of the backward pass.
    pub back: Arc<Transfer>,
    /// The ranks.
    pub group: Group,
    /// True if the fetched tensor is not visible to the caller. Its gradient then has no other user, and the adjoint may
    /// accumulate in the gradient's memory, unless second derivatives are needed.
    pub hidden: bool,
}

struct Accumulate {
    fetch: Fetch,
    in_place: bool,
}

impl LinearMap for Fetch {
    fn name(&self) -> &'static str {
        "fetch"
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        fetch(x, &self.forward, 0.0, &self.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        // Gradient mode in backward tells whether gradients of gradients are asked for.
        Arc::new(Accumulate { fetch: self.copy(), in_place: self.hidden && !is_grad_enabled() })
    }
}

impl Fetch {
    fn copy(&self) -> Self {
        Self {
            forward: self.forward.clone(),
            back: self.back.clone(),
            group: self.group.clone(),
            hidden: self.hidden,
        }
    }
}

impl LinearMap for Accumulate {
    fn name(&self) -> &'static str {
        "accumulate"
    }

    fn forward(&self, y: &Tensor) -> Result<Tensor> {
        accumulate_in(y, &self.fetch.back, self.in_place, &self.fetch.group)?.wait()
    }

    fn adjoint(&self) -> Arc<dyn LinearMap> {
        Arc::new(self.fetch.copy())
    }
}

/// [`fetch`], waited for and differentiable; `fill` has no gradient.
///
/// # Errors
///
/// See [`fetch`].
pub fn fetch_window(x: &Tensor, fetch_map: Fetch, fill: f64) -> Result<Tensor> {
    if fill == 0.0 {
        return differentiable(Arc::new(fetch_map), x);
    }
    let filled = fetch(x, &fetch_map.forward, fill, &fetch_map.group)?.wait()?;
    if !records(x) {
        return Ok(filled);
    }
    attach(Arc::new(fetch_map), x, filled)
}

/// Returns a view of a region, or a copy if a run has a negative step.
///
/// # Errors
///
/// The region exceeds the tensor.
pub fn region(tensor: &Tensor, region: &[IndexRun]) -> Result<Tensor> {
    let mut view = tensor.shallow_clone();
    let mut flipped = Vec::new();
    for (dim, run) in region.iter().enumerate() {
        let (dim, extent) = (dim as i64, view.size()[dim]);
        let (first, step) = match run.step {
            step if step < 0 => (run.start + (run.len - 1) * step, -step),
            step => (run.start, step),
        };
        if run.step < 0 && run.len > 1 {
            flipped.push(dim);
        }
        if run.len <= 1 || step == 1 {
            if run.len != extent {
                view = view.f_narrow(dim, first, run.len)?;
            }
        } else {
            view = view.f_slice(dim, first, first + (run.len - 1) * step + 1, step)?;
        }
    }
    if flipped.is_empty() { Ok(view) } else { Ok(view.f_flip(flipped)?) }
}

/// Adds `part` to a region of `sum`, in the dtype of `sum`.
///
/// # Errors
///
/// The region exceeds the tensor, or `part` has another shape.
pub fn add(sum: &Tensor, at: &[IndexRun], part: &Tensor) -> Result<()> {
    let forwards: IndexBox = at.iter().map(ascend).collect();
    let flipped: Vec<i64> = (0..at.len() as i64).filter(|&dim| at[dim as usize].step < 0).collect();
    let part = if flipped.is_empty() { part.shallow_clone() } else { part.f_flip(flipped)? };
    let mut target = region(sum, &forwards)?;
    let _ = target.f_add_(&part.f_to_kind(sum.kind())?)?;
    Ok(())
}

fn ascend(run: &IndexRun) -> IndexRun {
    match run.step {
        step if step < 0 => IndexRun { start: run.start + (run.len - 1) * step, step: -step, ..*run },
        _ => *run,
    }
}

fn pack(tensor: &Tensor, blocks: &[SharedRegion]) -> Result<Tensor> {
    let flat: Vec<Tensor> = blocks
        .iter()
        .map(|block| Ok(region(tensor, &block.region)?.f_reshape([-1])?))
        .collect::<Result<_>>()?;
    Ok(Tensor::f_cat(&flat, 0)?)
}

/// The blocks of a packed message, each with its shape.
fn parts<'a>(packed: &Tensor, blocks: &'a [SharedRegion]) -> Result<Vec<(Tensor, &'a SharedRegion)>> {
    let mut at = 0;
    let cut = blocks.iter().map(|block| {
        let length = numel(&block.region);
        let part = packed.f_view([-1])?.f_narrow(0, at, length)?.f_view(shape(&block.region).as_slice())?;
        at += length;
        Ok((part, block))
    });
    cut.collect::<Result<_>>()
}

fn total(blocks: &[SharedRegion]) -> i64 {
    blocks.iter().map(|block| numel(&block.region)).sum()
}

fn numel(region: &[IndexRun]) -> i64 {
    region.iter().map(|run| run.len).product()
}

fn shape(region: &[IndexRun]) -> Vec<i64> {
    region.iter().map(|run| run.len).collect()
}

fn ascending(region: &[IndexRun]) -> bool {
    region.iter().all(|run| run.step > 0 || run.len <= 1)
}

/// Returns whether a region covers a tensor of this shape, in order.
fn covers(region: &[IndexRun], shape: &[i64]) -> bool {
    region.iter().zip(shape).all(|(run, &extent)| run.len == extent && (run.step == 1 || run.len <= 1))
}

impl Group {
    /// The error of an argument that this rank finds and others may not: they get it at their next call of this group.
    ///
    /// Counts as a call.
    pub fn refuse(&self, operation: &'static str, problem: impl Into<String>) -> Error {
        self.call(operation).refuse(problem.into())
    }
}
