//! Bytes that a rank may receive in an operator and its gradient, from the shapes alone (design decision 26): windowed
//! operators their halo, reductions their statistics, products the smaller operand, selections the selected elements, ring
//! algorithms the other operand once, transforms one exchange per dim.

use anyhow::{Context, Result, bail};
use isobar_shard::rules::{Operator, Traffic};
use serde_json::Value;

use super::bytes;
use super::splits::{Amounts, Splits};
use crate::verify::case::Case;
use crate::verify::layout::{Layout, Parts, Placement};

/// The budget of an operator of sharded tensors on `rank`, forward and backward together.
pub(super) fn received(
    operator: &Operator,
    names: &[String],
    case: &Case,
    layout: &Layout,
    rank: usize,
) -> Result<u64> {
    let sizes = names.iter().map(|name| Ok(bytes(case.tensor(name)?))).collect::<Result<Vec<u64>>>()?;
    let outputs: u64 = case.header.outputs.iter().filter_map(|name| case.get(name)).map(bytes).sum();
    let of = Amounts { others: layout.mesh.ranks() as u64 - 1, sizes, outputs };
    let splits = Splits::new(case, layout, names, &of);
    if (0..names.len()).all(|at| layout.of(&names[at]).iter().all(|place| *place == Placement::Replicate)) {
        return Ok(0);
    }
    let op = operator.name();
    Ok(match operator.traffic() {
        Traffic::Nothing => 0,
        Traffic::Halo => windows(op, case, layout, rank)? + of.weights(),
        Traffic::Squeezed => of.first(),
        // Of a sharded dim, to each rank.
        Traffic::Selected => of.outputs,
        Traffic::Boundaries => splits.view()?,
        Traffic::Followed => splits.followed(),
        Traffic::Indexed => splits.indexed(op)?,
        Traffic::Sorted => splits.sorted()?,
        Traffic::Best => of.others * of.outputs,
        Traffic::Product => splits.product(op)?,
        Traffic::SmallerOperands => {
            // The smaller operands, their gradients, and what is partial when it is looked at.
            let smaller = of.all() - of.sizes.iter().copied().max().unwrap_or(0);
            2 * smaller + of.reduced(smaller)
        }
        Traffic::Moments => of.others * 4 * statistics(op, case)? + of.weights() + of.weights_once(),
        Traffic::Terms => of.others * 2 * of.outputs,
        Traffic::Rows => of.others * 3 * along(case)?,
        Traffic::Attention => splits.attention()?,
        Traffic::Points => splits.distances(),
        Traffic::Candidates => splits.nearest(),
        Traffic::Samples => splits.sampled(),
        Traffic::Transform => exchanges(case, layout, rank)?,
        unknown => bail!("the bytes of {unknown:?} have no bound yet"),
    })
}

/// One exchange for each dim that is split: forward, a rank receives its part of another dim, split as evenly as can be, and
/// backward its part of this one. Where the halved dim stands in the
/// way, a second exchange goes by way of another transformed dim.
fn exchanges(case: &Case, layout: &Layout, rank: usize) -> Result<u64> {
    let input = case.tensor("input")?;
    let output = case.tensor(case.header.outputs.first().context("the case has no outputs")?)?;
    let (shape, whole) = (input.size(), bytes(input).max(bytes(output)) as f64);
    let ranks = layout.mesh.ranks() as i64;
    let split = |dim: usize| layout.of("input").contains(&Placement::Shard(dim));
    let parts = layout.parts(&shape, &layout.of("input"));
    let mut received = 0.0;
    for dim in (0..shape.len()).filter(|&dim| split(dim)) {
        let extents = (0..shape.len()).filter(|&to| to != dim).map(|to| shape[to].min(output.size()[to]));
        let share = |extent: i64| whole * ((extent + ranks - 1) / ranks) as f64 / extent as f64;
        let there = extents.filter(|&extent| extent > 1).map(share).fold(0.0, f64::max);
        let there = if there > 0.0 { there } else { whole };
        let back = whole * parts.shape_of(rank)[dim] as f64 / shape[dim].max(1) as f64;
        received += 2.0 * (there + back);
    }
    Ok(received as u64)
}

/// Bytes of one number for each of the elements that a norm treats alike.
fn statistics(op: &str, case: &Case) -> Result<u64> {
    let shape = case.tensor("input")?.size();
    let groups: i64 = match op {
        "layer_norm" => {
            let normalized: Vec<i64> = case.header.attr("normalized_shape")?;
            shape[..shape.len() - normalized.len()].iter().product()
        }
        "group_norm" => shape[0] * case.header.attr::<i64>("num_groups")?,
        "instance_norm" => shape[0] * shape[1],
        _ => shape[1],
    };
    // A number, and its place in a message of its own.
    Ok(groups as u64 * 8)
}

/// Bytes of one number for each row along the dim.
fn along(case: &Case) -> Result<u64> {
    let input = case.tensor("input")?;
    let dim = case.header.attr::<i64>("dim")?.rem_euclid(input.dim() as i64) as usize;
    Ok(bytes(input) / input.size()[dim].max(1) as u64)
}

/// Returns the bytes of a rank's halo, and of the others' halos in its shard.
fn windows(op: &str, case: &Case, layout: &Layout, rank: usize) -> Result<u64> {
    let input = case.tensor("input")?;
    let name = case.header.outputs.first().context("the case has no outputs")?;
    let output = case.tensor(name)?;
    let parts = layout.parts(&input.size(), &layout.of("input"));
    let element = (input.kind().elt_size_in_bytes()) as i64;
    let needs: Vec<Vec<(i64, i64)>> = (0..layout.mesh.ranks())
        .map(|rank| need(op, case, &parts, rank, &input.size(), &output.size()))
        .collect::<Result<_>>()?;
    let own = |rank: usize| {
        parts.window(rank).iter().map(|pieces| (pieces[0].0, pieces[0].0 + pieces[0].1)).collect::<Vec<_>>()
    };
    let volume =
        |window: &[(i64, i64)]| window.iter().map(|(low, high)| (high - low).max(0)).product::<i64>();
    let common = |a: &[(i64, i64)], b: &[(i64, i64)]| {
        let both = a.iter().zip(b).map(|(a, b)| (a.0.max(b.0), a.1.min(b.1)));
        volume(&both.collect::<Vec<_>>())
    };
    let round_the_ends = matches!(op, "roll" | "flip") || wraps(case);
    let elements = if round_the_ends {
        // For windows that wrap around, by their size alone.
        let others = (0..needs.len()).filter(|&other| other != rank).map(|other| volume(&needs[other]));
        volume(&needs[rank]) + others.sum::<i64>()
    } else {
        let mine = own(rank);
        let lacks = volume(&needs[rank]) - common(&needs[rank], &mine);
        let others = (0..needs.len()).filter(|&other| other != rank && own(other) != mine);
        lacks + others.map(|other| common(&needs[other], &mine)).sum::<i64>()
    };
    Ok((elements * element) as u64)
}

/// Returns whether elements beyond the ends come from elsewhere.
fn wraps(case: &Case) -> bool {
    let mode =
        |name: &str| case.header.attrs.get(name).and_then(Value::as_str).unwrap_or("constant").to_owned();
    ["mode", "padding_mode"]
        .iter()
        .any(|name| matches!(mode(name).as_str(), "circular" | "reflect" | "replicate"))
}

/// The indices that a rank's part of the result needs along each dim.
fn need(
    op: &str,
    case: &Case,
    parts: &Parts,
    rank: usize,
    from: &[i64],
    to: &[i64],
) -> Result<Vec<(i64, i64)>> {
    let dims = from.len();
    let spatial = op
        .bytes()
        .rev()
        .nth(1)
        .filter(u8::is_ascii_digit)
        .map_or(dims.saturating_sub(2), |d| usize::from(d - b'0'));
    let list = |name: &str, default: i64| -> Vec<i64> {
        match case.header.attrs.get(name) {
            Some(Value::Array(values)) => values.iter().filter_map(Value::as_i64).collect(),
            Some(value) => value.as_i64().into_iter().collect(),
            None => vec![default],
        }
    };
    let pick = |values: &[i64], index: usize| values.get(index).or(values.first()).copied();
    let mut window = Vec::with_capacity(dims);
    for (dim, &n) in from.iter().enumerate() {
        let (start, len) = parts.window(rank)[dim][0];
        let m = to.get(dim).copied().unwrap_or(n);
        let scale = |b: i64| if b >= n { m } else { (b * m + n - 1) / n.max(1) };
        let (low, high) = (scale(start), scale(start + len));
        let index = dim.checked_sub(dims - spatial);
        let whole = len == n;
        let (first, end) = match (op, index) {
            (_, _) if whole => (0, n),
            (_, _) if high <= low => (0, 0),
            ("pad", _) => {
                let pairs: Vec<i64> = case.header.attr("pad")?;
                let before = pairs.get(2 * (dims - 1 - dim)).copied().unwrap_or(0);
                // Padding goes to the first and the last owner.
                let (low, high) = (
                    if start == 0 { 0 } else { start + before },
                    if start + len == n { m } else { start + len + before },
                );
                (low - before, high - before)
            }
            ("roll" | "flip", _) => (start, start + len),
            ("unfold", _) => (start, n),
            (_, None) => (start, start + len),
            ("interpolate", Some(_)) => {
                let corners = case.header.attr::<bool>("align_corners").unwrap_or(false);
                let step = if corners { (n - 1) as f64 / (m - 1).max(1) as f64 } else { n as f64 / m as f64 };
                ((low as f64 * step) as i64 - 3, (high as f64 * step) as i64 + 4)
            }
            (op, Some(_)) if op.starts_with("adaptive") => (low * n / m, (high * n + m - 1) / m),
            (op, Some(index)) => {
                let kernel = match op.starts_with("conv") {
                    true => case.tensor("weight")?.size()[index + 2],
                    false => pick(&list("kernel_size", 1), index).unwrap_or(1),
                };
                let stride = pick(&list("stride", if op.starts_with("conv") { 1 } else { kernel }), index)
                    .unwrap_or(kernel);
                let dilation = pick(&list("dilation", 1), index).unwrap_or(1);
                let same = case.header.attrs.get("padding").is_some_and(Value::is_string);
                let padding = match same {
                    true => dilation * (kernel - 1) / 2,
                    false => pick(&list("padding", 0), index).unwrap_or(0),
                };
                let reach = dilation * (kernel - 1);
                match op.starts_with("conv_transpose") {
                    true => (
                        (low + padding - reach + stride - 1).div_euclid(stride),
                        (high - 1 + padding).div_euclid(stride) + 1,
                    ),
                    false => (low * stride - padding, (high - 1) * stride - padding + reach + 1),
                }
            }
        };
        let clip = !wraps(case);
        window.push(if clip { (first.clamp(0, n), end.clamp(0, n)) } else { (first, end) });
    }
    Ok(window)
}
