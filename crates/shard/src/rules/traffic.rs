//! Traffic of operators: the data that a rank receives, in words and as a byte bound from a call's [`Footprint`].

use super::footprint::{Footprint, FootprintTensor, Side, SideWindow};
use crate::error::Result;
use crate::layout::Layout;

/// Data that a rank receives from others in an operator and its gradient. `isobar verify` checks the received bytes of each layout
/// against it, for built-in operators and a program's own. A class that needs more than the layouts holds a function of the
/// [`Footprint`], defined next to the operator's rule.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Traffic {
    /// Nothing.
    Nothing,
    /// The smaller operands and their gradients, where layouts differ.
    SmallerOperands,
    /// The elements of its windows that others hold, and sums of the weights' gradients. Holds the window along a split dim.
    Halo(SideWindow),
    /// The elements that move to another rank.
    Moved,
    /// One statistic of each row from each other shard.
    Rows,
    /// The result's terms from each other shard.
    Terms,
    /// Means and squared deviations from each other shard. Holds the number of groups with statistics of their own.
    Moments(fn(&Footprint<'_>) -> Result<i64>),
    /// The smaller operand of a product, and sums of its gradient; also the result, if the contracted dim is sharded. Holds the
    /// test for that.
    Product(fn(&Footprint<'_>) -> bool),
    /// Keys and values once, and once more with their gradients.
    Attention,
    /// The selected elements.
    Selected,
    /// The elements between the boundaries of the old shards and of the new.
    Boundaries,
    /// A dim of extent 1 that was sharded.
    Squeezed,
    /// Tensors whose layouts differ from that of the largest.
    Followed,
    /// The indexed elements and the indices.
    Indexed(Indexing),
    /// One all-to-all, and one back.
    Sorted,
    /// The best elements of each other shard.
    Best,
    /// One set of points.
    Points,
    /// The points of each other shard, and sums of their gradients.
    Candidates,
    /// The sampled points, and their gradients.
    Samples,
    /// One all-to-all for each transformed dim that is sharded.
    Transform,
    /// Other data: a description, and the bound of its bytes, forward and backward together.
    Bytes(&'static str, fn(&Footprint<'_>) -> Result<u64>),
}

/// Tensors of an operator that picks or adds elements by indices.
#[derive(Debug, Clone, Copy)]
pub struct Indexing {
    /// Position of the indexed tensor among the inputs.
    table: usize,
    /// Indexed dim; `None` if the argument `dim` names it.
    dim: Option<i64>,
    /// Position of the tensor that is added; `None` if elements are picked.
    added: Option<usize>,
}

impl Indexing {
    /// Picks elements of the first tensor along `dim`.
    pub const PICK: Self = Self { table: 0, dim: None, added: None };
    /// Adds the third tensor to elements of the first along `dim`.
    pub const ADD: Self = Self { table: 0, dim: None, added: Some(2) };
    /// Picks rows of the second tensor.
    pub const ROWS: Self = Self { table: 1, dim: Some(0), added: None };
}

/// Windows of a rank, one for each dim.
type Windows = Vec<(i64, i64)>;

impl Traffic {
    /// Returns the description.
    pub fn text(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::SmallerOperands => "the smaller operands, where layouts differ",
            Self::Halo(_) => "its halo",
            Self::Moved => "the elements that change their rank",
            Self::Rows => "one statistic of each row from each other shard",
            Self::Terms => "the result's terms from each other shard",
            Self::Moments(_) => "means and squared deviations from each other shard",
            Self::Product(_) => "the smaller operand; the result, where the contracted dim is sharded",
            Self::Attention => "keys and values once (ring), or the heads it computes (all-to-all)",
            Self::Selected => "the selected elements",
            Self::Boundaries => "the elements between old and new boundaries of shards",
            Self::Squeezed => "a sharded dim of extent 1",
            Self::Followed => "tensors whose layouts differ from that of the largest",
            Self::Indexed(_) => "the indexed elements",
            Self::Sorted => "one all-to-all, where the sorted dim is sharded",
            Self::Best => "the best elements of each other shard",
            Self::Points => "one set of points",
            Self::Candidates => "the points of each other shard",
            Self::Samples => "the sampled points",
            Self::Transform => "one all-to-all for each transformed dim that is sharded",
            Self::Bytes(text, _) => text,
        }
    }

    /// Returns the bytes that the footprint's rank may receive, forward and backward together.
    ///
    /// # Errors
    ///
    /// Tensors or arguments that the operator does not have.
    pub fn bytes(self, call: &Footprint<'_>) -> Result<u64> {
        if (0..call.tensors.len()).all(|at| !call.is_split(at)) {
            return Ok(0);
        }
        Ok(match self {
            Self::Nothing => 0,
            Self::Halo(window) => halo(call, window)? + call.reduced(call.weights()) + channels(call),
            // Once forward, and once as gradients backward.
            Self::Moved => 2 * largest_shard(call)?,
            Self::Squeezed => call.size(0),
            // The selection along a sharded dim goes to each rank.
            Self::Selected => call.results(),
            Self::Boundaries => view(call)?,
            // Their gradients return with the same layouts.
            Self::Followed => call.otherwise_split(),
            Self::Indexed(indexing) => indexed(call, indexing)?,
            Self::Sorted => sorted(call)?,
            Self::Best => call.others() * call.results(),
            Self::Product(contracted) => product(call, contracted(call)),
            Self::SmallerOperands => {
                // The operands of another layout, their gradients, and the reduction of partial operands.
                let moved = otherwise_laid_out(call);
                2 * moved + call.reduced(moved) + broadcast(call)
            }
            Self::Moments(groups) => {
                // A number, and its place in a message of its own.
                let statistics = 8 * groups(call)? as u64;
                let parameters = call.reduced(call.weights()) + call.weights();
                call.others() * 4 * statistics + parameters + torn_groups(call)?
            }
            Self::Terms => call.others() * 2 * call.results(),
            Self::Rows => call.others() * 3 * rows(call)?,
            Self::Attention => attention(call),
            Self::Points => {
                // One set goes around a ring, or the gradient of a replicated one is summed.
                let (smaller, replicated) = (smaller(call), call.replicated(2));
                let sums = match replicated {
                    0 => 2 * smaller + call.sum(smaller),
                    _ => call.sum(replicated),
                };
                sums + split_features(call, 2)
            }
            Self::Candidates => candidates(call)?,
            // The neighbours of each point and their gradients, their indices, the gradient of a replicated tensor, and the
            // grid if it is redistributed.
            Self::Samples => {
                let corners = 1 << call.ndim().saturating_sub(2).min(3);
                let table = if call.is_split(0) { 0 } else { call.sum(call.size(0)) };
                2 * corners * call.results() + table + call.otherwise_split() + call.asking()
            }
            Self::Transform => transform(call)?,
            Self::Bytes(_, bytes) => bytes(call)?,
        })
    }
}

fn smaller(call: &Footprint<'_>) -> u64 {
    let sizes = (0..call.tensors.len()).map(|at| call.size(at));
    call.all() - sizes.max().unwrap_or(0)
}

/// Returns the bytes of the operands whose layout differs from that of the largest sharded operand, which the result has.
fn otherwise_laid_out(call: &Footprint<'_>) -> u64 {
    if call.tensors.iter().any(|tensor| tensor.layout.is_partial()) {
        return smaller(call);
    }
    let split = call.tensors.iter().filter(|tensor| !tensor.layout.is_replicated());
    let Some(largest) = split.max_by_key(|tensor| tensor.bytes()) else { return 0 };
    let differ = call.tensors.iter().filter(|tensor| tensor.layout != largest.layout);
    differ.map(FootprintTensor::bytes).sum()
}

fn largest_shard(call: &Footprint<'_>) -> Result<u64> {
    let input = call.tensor(0)?;
    let elements =
        (0..input.layout.mesh().size()).map(|rank| input.layout.local_shape_of(rank).iter().product());
    Ok(elements.max().unwrap_or(0_i64) as u64 * input.element)
}

/// Returns the bytes of one number for each row along the argument `dim`: in the dtype of the result, at least single precision.
fn rows(call: &Footprint<'_>) -> Result<u64> {
    let input = call.tensor(0)?;
    let dim: i64 = call.attr("dim")?.unwrap_or(-1);
    let dim = dim.rem_euclid(input.layout.ndim().max(1) as i64) as usize;
    let rows: i64 = (0..input.layout.ndim()).filter(|&d| d != dim).map(|d| input.layout.shape()[d]).product();
    let result = call.outputs.first().map_or(0, |(_, element)| *element);
    Ok(rows as u64 * input.element.max(result).max(4))
}

/// Bounds operands that are broadcast along a split dim of extent 1: they become whole, and their gradients are summed. Dims are those
/// of the result, counted from the last.
pub(crate) fn broadcast(call: &Footprint<'_>) -> u64 {
    let result = call.outputs.first().map(|(shape, _)| &shape[..]).unwrap_or_default();
    let grows = |shape: &[i64], dim: usize| {
        let of_result = (dim + result.len()).checked_sub(shape.len()).and_then(|at| result.get(at));
        of_result.is_none_or(|&extent| extent != 1)
    };
    whole_ones(call, grows)
}

/// Bounds operands with a split dim of extent 1, if it `grows` in the result.
fn whole_ones(call: &Footprint<'_>, grows: impl Fn(&[i64], usize) -> bool) -> u64 {
    let is_broadcast = |tensor: &&FootprintTensor| {
        let shape = tensor.layout.shape();
        let mut dims = shape.iter().enumerate();
        dims.any(|(dim, &extent)| extent == 1 && tensor.layout.is_sharded(dim) && grows(shape, dim))
    };
    let bytes = call.tensors.iter().filter(is_broadcast).map(FootprintTensor::bytes).sum();
    bytes + call.sum(bytes)
}

/// Bounds operands among the first `count` whose features, the last dim, are split: they become whole, and their gradients return.
fn split_features(call: &Footprint<'_>, count: usize) -> u64 {
    (0..count).filter(|&at| call.is_split_along(at, -1)).map(|at| 2 * call.size(at)).sum()
}

/// Bounds a convolution with split channels: partial results are summed, and so is the gradient of a replicated input; groups that a
/// boundary cuts move as a whole.
fn channels(call: &Footprint<'_>) -> u64 {
    let Some(weight) = call.tensors.get(1) else { return 0 };
    let channel = 1 - weight.layout.ndim() as i64;
    let is_split = call.is_split_along(0, channel);
    if !is_split && !call.is_split(1) {
        return 0;
    }
    let input = if call.is_split(0) { 0 } else { call.reduced(call.size(0)) };
    let weights = if call.is_split(0) && call.is_split(1) { 2 * call.weights() } else { 0 };
    let summed = if call.operator.contains("transpose") { 0 } else { 1 };
    let groups = call.number("groups", 0, 1);
    let result = match groups {
        1 if is_split || call.is_split_along(1, summed) => call.reduced(call.results()),
        1 => 0,
        _ if cuts_groups(call, channel, groups) => 2 * call.size(0) + call.reduced(call.results()),
        _ => 0,
    };
    input + weights + result
}

/// Returns whether a split of the first tensor or of the weight's channels cuts a group, or leaves a rank without one.
fn cuts_groups(call: &Footprint<'_>, channel: i64, groups: i64) -> bool {
    let cuts = |at: usize, dim: i64| {
        let Some(tensor) = call.tensors.get(at).filter(|_| call.is_split_along(at, dim)) else {
            return false;
        };
        let dim = dim.rem_euclid(tensor.layout.ndim() as i64) as usize;
        let group = (tensor.layout.shape()[dim] / groups.max(1)).max(1);
        let dim = &tensor.layout.dims()[dim];
        dim.boundaries().iter().any(|boundary| boundary % group != 0) || dim.sizes().contains(&0)
    };
    cuts(0, channel) || cuts(1, 0) || call.is_split_along(1, 1)
}

/// Bounds a group norm: if a shard boundary cuts a group of channels, the input is redistributed, and the result back.
fn torn_groups(call: &Footprint<'_>) -> Result<u64> {
    let Some(groups) = call.attr::<i64>("num_groups")? else { return Ok(0) };
    let layout = &call.tensor(0)?.layout;
    let group = layout.shape().get(1).map_or(1, |channels| channels / groups.max(1)).max(1);
    let is_torn = |boundary: &i64| boundary % group != 0;
    let torn = layout.dims().get(1).is_some_and(|dim| dim.boundaries().iter().any(is_torn));
    Ok(if torn { 2 * call.size(0) } else { 0 })
}

/// Bounds a product. With split rows or columns, the other operand's gradient is summed. With a split contracted dim, the result
/// is summed, and slices of the other operand's gradient return. If both operands are split, the smaller one moves too. Gradients
/// of biases are summed.
fn product(call: &Footprint<'_>, contracted: bool) -> u64 {
    let (first, second) = (call.size(0), call.size(1));
    let (pair, smaller) = (first + second, first.min(second));
    let replicated = call.replicated(2.min(call.tensors.len()));
    let result = if contracted { call.sum(call.results()) } else { 0 };
    let is_line = call.tensors.first().is_some_and(|tensor| tensor.layout.mesh().ndim() == 1);
    let moved = match (call.is_split(0) && call.is_split(1), contracted && is_line) {
        (true, _) => 2 * smaller + call.sum(smaller),
        (false, true) => replicated,
        (false, false) => call.sum(replicated),
    };
    result + moved + whole_ones(call, |_, _| true) + 2 * call.sum(call.all() - pair)
}

/// Bounds an attention. With split tokens, keys and values go around a ring once forward, and once more with their gradients
/// backward; or the gradients of replicated ones are summed. Tensors with other placements are redistributed.
fn attention(call: &Footprint<'_>) -> u64 {
    let tokens = (0..3).any(|at| call.is_split_along(at, -2) || call.is_split_along(at, -1));
    let pairs = over_batch(call, 1) + over_batch(call, 2);
    let round = if tokens { (3 * pairs).max(call.sum(pairs)) } else { 0 };
    // Fewer heads of keys than of queries may be split otherwise; a mask is cut to the scores, and its gradient summed.
    let heads = |at: usize| {
        let shape = call.tensors.get(at).map(|tensor| tensor.layout.shape()).unwrap_or_default();
        shape.len().checked_sub(3).map(|dim| shape[dim])
    };
    let split_heads = heads(0) != heads(1) && (0..3).any(|at| call.is_split_along(at, -3));
    let grouped = if split_heads { pairs + call.sum(pairs) + 2 * call.size(0) } else { 0 };
    let mask = if call.is_split(3) { call.size(3) } else { 0 };
    let mask = mask + if call.gradients { call.sum(call.size(3)) } else { 0 };
    round + grouped + mask + split_features(call, 3) + call.otherwise_split()
}

/// Returns the bytes of keys or values, broadcast to the batch and the heads of the queries.
fn over_batch(call: &Footprint<'_>, at: usize) -> u64 {
    let shape = |at: usize| call.tensors.get(at).map(|tensor| tensor.layout.shape()).unwrap_or_default();
    let shares_heads = matches!(call.attr("enable_gqa"), Ok(Some(true)));
    let batch = shape(0).len().saturating_sub(if shares_heads { 3 } else { 2 });
    let lead = shape(0).iter().zip(shape(at)).take(batch);
    let copies: i64 = lead.map(|(&wide, &extent)| if extent == 1 { wide } else { 1 }).product();
    call.size(at) * copies as u64
}

/// Bounds a search of neighbours: split points travel round a ring once, and their gradients come from each other shard; the
/// gradients of replicated points or queries are summed. A word comes from each rank.
fn candidates(call: &Footprint<'_>) -> Result<u64> {
    let points = if call.is_split(0) { call.size(0) } else { 0 };
    let sums = match call.gradients {
        true if call.is_split(0) => call.others() * largest_shard(call)? + call.sum(call.replicated(2)),
        true => call.sum(call.replicated(2)),
        false => 0,
    };
    Ok(points + sums + split_features(call, 2) + 8 * (call.others() + 1))
}

/// Bounds a view: the elements between a shard's boundary and the next slice along the coarser dim, forward and backward.
fn view(call: &Footprint<'_>) -> Result<u64> {
    let input = call.tensor(0)?;
    let output = call.outputs.first().map(|(shape, _)| &shape[..]).unwrap_or_default();
    let slice = |dim: usize| {
        let own = input.layout.shape()[dim];
        let beside = output.get(dim.min(output.len().saturating_sub(1))).copied().unwrap_or(own);
        input.bytes() / own.min(beside).max(1) as u64
    };
    let slices: u64 = input.layout.placements().iter().filter_map(|place| place.dim()).map(slice).sum();
    Ok(2 * slices.min(input.bytes()))
}

/// Bounds an indexed operator. With a split indexed dim, the picked or added elements move forward and backward, with the indices.
/// With split indices, the gradient of the indexed tensor is summed. Splits along other dims cost nothing, but added tensors are
/// redistributed to them.
fn indexed(call: &Footprint<'_>, Indexing { table, dim, added }: Indexing) -> Result<u64> {
    let dim = match dim {
        Some(dim) => dim,
        None => call.attr("dim")?.unwrap_or(0),
    };
    let picked = added.map_or_else(|| call.results(), |at| call.size(at));
    let mut received = if added.is_some() { call.otherwise_split() } else { 0 };
    if call.is_split_along(table, dim) {
        received += 2 * picked + call.asking();
    }
    if (0..call.tensors.len()).any(|at| at != table && call.is_split(at)) {
        received += call.sum(call.size(table)) + picked + call.asking();
    }
    // A split dim of extent 1 is whole in the result.
    if whole_ones(call, |_, _| true) > 0 {
        received += picked;
    }
    Ok(received)
}

/// Bounds a sort along a sharded dim: one all-to-all shards another dim instead, so that rows are complete, and one returns
/// values and indices; backward sends gradients over both. A single row is sorted by exchanges between neighbours.
fn sorted(call: &Footprint<'_>) -> Result<u64> {
    let input = call.tensor(0)?;
    let dim = call.attr("dim")?.unwrap_or(-1);
    if !call.is_split_along(0, dim) {
        return Ok(0);
    }
    let shape = input.layout.shape();
    let at = dim.rem_euclid(shape.len().max(1) as i64) as usize;
    const INDEX: u64 = 8;
    let others = (0..shape.len()).filter(|&other| other != at);
    let widest = others.max_by_key(|&other| (shape[other], !input.layout.is_sharded(other)));
    let Some(other) = widest.filter(|&other| shape[other] > 1) else {
        // As many rounds as shards; then each element is asked for, comes, and its gradient returns.
        let block = largest_shard(call)? / input.element.max(1);
        let rounds = (call.others() + 1) * block * (input.element + INDEX);
        return Ok(rounds + block * (2 * INDEX + 3 * input.element) + call.results() + call.asking());
    };
    let elements = |layout: &Layout| layout.local_shape_of(call.rank).iter().product::<i64>() as u64;
    let (columns, own) = (elements(&input.layout.all_to_all(at, other)), elements(&input.layout));
    // Values and indices forward; the gradient goes to the columns and back.
    Ok(2 * columns * input.element + own * (2 * input.element + INDEX))
}

/// Bounds a transform: for each split dim, forward an all-to-all to an even split of another dim, and backward one to the split of
/// this dim. If the halved dim is in the way, a second exchange goes through another transformed dim.
fn transform(call: &Footprint<'_>) -> Result<u64> {
    let input = call.tensor(0)?;
    let shape = input.layout.shape();
    let Some((result, _)) = call.outputs.first() else { return call.refuse("there is no result") };
    let whole = input.bytes().max(call.results()).max(spectrum(call)?) as f64;
    let ranks = call.others() as i64 + 1;
    let mut received = 0.0;
    for dim in (0..shape.len()).filter(|&dim| input.layout.is_sharded(dim)) {
        let extents = (0..shape.len()).filter(|&to| to != dim).map(|to| shape[to].min(result[to]));
        let share = |extent: i64| whole * ((extent + ranks - 1) / ranks) as f64 / extent as f64;
        let there = extents.filter(|&extent| extent > 1).map(share).fold(0.0, f64::max);
        let there = if there > 0.0 { there } else { whole };
        // An even split on the way, or the input's.
        let own = input.layout.local_shape_of(call.rank)[dim].max((shape[dim] + ranks - 1) / ranks);
        let back = whole * own as f64 / shape[dim].max(1) as f64;
        received += 2.0 * (there + back);
    }
    Ok(received as u64)
}

/// Returns the bytes of the complex array in the midst of a transform, which may have more elements than input and result.
fn spectrum(call: &Footprint<'_>) -> Result<u64> {
    let input = call.tensor(0)?;
    let Some((result, element)) = call.outputs.first() else { return Ok(0) };
    let halved = if call.operator.contains("rfft") { input.layout.ndim().checked_sub(1) } else { None };
    let dims = call.numbers("dim", -1);
    let last = dims.last().map(|last| last.rem_euclid(result.len().max(1) as i64) as usize);
    let halved = halved.and(last);
    let extent =
        |(dim, (&a, &b)): (usize, (&i64, &i64))| if halved == Some(dim) { a.min(b) } else { a.max(b) };
    let elements: i64 = input.layout.shape().iter().zip(result).enumerate().map(extent).product();
    Ok(elements as u64 * input.element.max(*element))
}

/// Returns the bytes of a rank's halo, and of the others' halos in its shard.
fn halo(call: &Footprint<'_>, window: SideWindow) -> Result<u64> {
    let input = call.tensor(0)?;
    let ranks = input.layout.mesh().size();
    let wraps = wraps(call)?;
    let sides = (0..ranks).map(|rank| call.sides(rank)).collect::<Result<Vec<_>>>()?;
    let needed = |side: &Side| -> Result<(i64, i64)> {
        let (first, end) = match side {
            // Copies beyond the ends are also fetched along dims that are not sharded.
            side if side.shard == (0, side.extent) && !wraps => side.shard,
            side => window(call, side)?,
        };
        let n = side.extent;
        Ok(if wraps { (first, end) } else { (first.clamp(0, n), end.clamp(0, n)) })
    };
    let windows = |sides: &Vec<Side>| sides.iter().map(needed).collect::<Result<Windows>>();
    let needs = sides.iter().map(windows).collect::<Result<Vec<_>>>()?;
    let shard = |rank: usize| sides[rank].iter().map(|side| side.shard).collect::<Windows>();
    let whole: Windows = sides[call.rank].iter().map(|side| (0, side.extent)).collect();
    // Elements beyond the ends are copies from any rank: their indices do not tell which one.
    let beyond = |rank: usize| volume(&needs[rank]) - common(&needs[rank], &whole);
    let mine = shard(call.rank);
    let lacks = volume(&needs[call.rank]) - common(&needs[call.rank], &mine);
    let others = (0..ranks).filter(|&other| other != call.rank && shard(other) != mine);
    let asked = others.map(|other| common(&needs[other], &mine) + beyond(other)).sum::<i64>();
    Ok((lacks + asked) as u64 * input.element)
}

/// Returns whether elements beyond the ends are copies of others, as of periodic or mirrored borders.
fn wraps(call: &Footprint<'_>) -> Result<bool> {
    for name in ["mode", "padding_mode"] {
        let mode: Option<String> = call.attr(name)?;
        if matches!(mode.as_deref(), Some("circular" | "reflect" | "replicate")) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn volume(window: &[(i64, i64)]) -> i64 {
    window.iter().map(|(low, high)| (high - low).max(0)).product()
}

fn common(a: &[(i64, i64)], b: &[(i64, i64)]) -> i64 {
    volume(&a.iter().zip(b).map(|(a, b)| (a.0.max(b.0), a.1.min(b.1))).collect::<Windows>())
}
