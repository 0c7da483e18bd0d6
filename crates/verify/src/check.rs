//! One layout of a case: run, compare, gather.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use isobar_collectives::gather_v;
use isobar_shard::forbid_hidden_communication;
use isobar_torch::autograd::{self, BackwardOptions};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::bytes::{pack, unpack};
use super::case::Case;
use super::layout::{Layout, Parts, Placement, Sizes, is_sharded};
use super::operator::{Forward, LocalTensor, Operator, Part, Rank};
use super::report::{LayoutReport, number};

/// Report of one rank on a layout.
#[derive(Debug, Default, Serialize, Deserialize)]
struct RankReport {
    received: u64,
    budget: u64,
    error: f64,
    refused: Option<String>,
    problems: Vec<String>,
    /// Local shapes of the sharded tensors.
    shapes: BTreeMap<String, Vec<i64>>,
    placements: BTreeMap<String, Vec<Placement>>,
    /// The names of what the rank holds, in the order of its file.
    names: Vec<String>,
}

/// Runs a layout; all ranks call. Rank 0 gets the report, and writes the gathered tensors into `dump`.
pub(crate) fn layout(
    rank: &Rank,
    operator: &dyn Operator,
    case: &Case,
    layout: &Layout,
    n: usize,
    dump: Option<&Path>,
) -> Result<Option<LayoutReport>> {
    let must_refuse = operator.must_refuse(&case.header, layout)?;
    let before = rank.world.traffic().received;
    let ran = operator.forward(rank, case, layout)?;
    let mut report = RankReport::default();
    let forward = (rank.world.traffic().received - before, operator.forward_budget(case, layout)?);
    if forward.0 > forward.1 {
        report.problems.push(format!(
            "rank {} received {} bytes in forward, more than the operator's {}",
            rank.number(),
            forward.0,
            forward.1
        ));
    }
    let held = match ran {
        Forward::Refused(why) => {
            if must_refuse.is_none() {
                report.problems.push(format!("rank {} refuses it: {why}", rank.number()));
            }
            report.refused = Some(why);
            Vec::new()
        }
        Forward::Ran { outputs, leaves } => {
            describe(layout, &outputs, &leaves, &mut report);
            // Backward gathers no more silently than forward, also where it computes activations again.
            let _guard = forbid_hidden_communication();
            let gradients = backward(rank, case, &outputs, &leaves)?;
            if let Some(why) = must_refuse {
                report.problems.push(format!("rank {} runs it, though {why}", rank.number()));
            }
            outputs.into_iter().chain(gradients).collect()
        }
    };
    report.received = rank.world.traffic().received - before;
    report.budget = operator.budget(case, layout, rank)?;
    if report.received > report.budget {
        report.problems.push(format!(
            "rank {} received {} bytes, more than the operator's {}",
            rank.number(),
            report.received,
            report.budget
        ));
    }
    for held in &held {
        check_own(rank, case, held, &mut report)?;
    }
    report.names = held.iter().map(|held| held.name.clone()).collect();

    let reports = rank.world.all_gather_bytes(&serde_json::to_vec(&report)?)?;
    let tensors = gather(rank, &held)?;
    if rank.number() > 0 {
        return Ok(None);
    }
    let reports: Vec<RankReport> =
        reports.iter().map(|r| serde_json::from_slice(r)).collect::<Result<_, _>>()?;
    let mut merged = merge(case, layout, n, &reports);
    let gathered = assemble(case, &held, &reports, &tensors, &mut merged)?;
    if merged.refused.is_none() {
        let missing = case.results().into_iter().filter(|name| !gathered.contains_key(*name));
        merged.problems.extend(missing.map(|name| format!("{name} was not computed, and so not compared")));
    }
    if let Some(folder) = dump.filter(|_| merged.refused.is_none()) {
        write(folder, case, &merged, &gathered)?;
    }
    Ok(Some(merged))
}

/// Notes what the rank has of the sharded tensors, and which of them the operator did not take as the layout says.
fn describe(layout: &Layout, outputs: &[LocalTensor], leaves: &[LocalTensor], report: &mut RankReport) {
    for held in outputs.iter().chain(leaves).filter(|held| !matches!(held.part, Part::Of(_))) {
        // The case names it rank by rank.
        let name = held.name.rsplit_once('.').map_or(held.name.as_str(), |(name, _)| name);
        report.shapes.insert(name.to_owned(), held.tensor.size());
    }
    for leaf in leaves {
        let Part::Of(parts) = &leaf.part else { continue };
        if parts.is_sharded() || layout.placements.contains_key(&leaf.name) {
            report.shapes.insert(leaf.name.clone(), leaf.tensor.size());
            report.placements.insert(leaf.name.clone(), parts.placements().to_vec());
        }
    }
    for (name, places) in layout.placements.iter().filter(|(_, places)| is_sharded(places)) {
        let by_rank = layout.sizes == Sizes::Given && report.shapes.contains_key(name);
        if !by_rank && report.placements.get(name) != Some(places) {
            report.problems.push(format!("the operator does not take {name} sharded"));
        }
    }
}

/// The gradients of the leaves, each under the case's name for it.
fn backward(
    rank: &Rank,
    case: &Case,
    outputs: &[LocalTensor],
    leaves: &[LocalTensor],
) -> Result<Vec<LocalTensor>> {
    let mut roots = Vec::new();
    let mut cotangents = Vec::new();
    for output in outputs.iter().filter(|output| output.tensor.requires_grad()) {
        let whole = case.get(&format!("grad.{}", output.name));
        let cotangent = match (whole, &output.part) {
            (Some(whole), Part::Of(parts)) => parts.of(whole, rank.number())?,
            (Some(whole), _) => whole.shallow_clone(),
            (None, _) => output.tensor.f_zeros_like()?,
        };
        roots.push(&output.tensor);
        cotangents.push(Some(cotangent));
    }
    let wanted: Vec<&LocalTensor> = leaves.iter().filter(|leaf| leaf.tensor.requires_grad()).collect();
    if roots.is_empty() || wanted.is_empty() {
        return Ok(Vec::new());
    }
    autograd::backward(&roots, &cotangents, BackwardOptions::default())?;
    let named = wanted.into_iter().map(|leaf| {
        let gradient = leaf.tensor.f_grad()?;
        let tensor = if gradient.defined() { gradient } else { leaf.tensor.f_zeros_like()? };
        Ok(LocalTensor { name: format!("grad.{}", leaf.name), tensor, part: leaf.part.clone() })
    });
    named.collect()
}

/// Compares what this rank holds with its part of the case's tensor.
fn check_own(rank: &Rank, case: &Case, held: &LocalTensor, report: &mut RankReport) -> Result<()> {
    let LocalTensor { name, tensor, part } = held;
    let wanted = match (case.get(name), part) {
        (_, Part::Nothing) => {
            if tensor.numel() > 0 {
                let shape = tensor.size();
                report.problems.push(format!("{name} has shape {shape:?} where a rank receives nothing"));
            }
            return Ok(());
        }
        (Some(whole), Part::Of(parts)) => parts.of(whole, rank.number())?,
        (Some(whole), Part::Own { .. }) => whole.shallow_clone(),
        // The gradient of what takes no part is zero.
        (None, _) => tensor.f_zeros_like()?,
    };
    let which = format!("{name} on rank {}", rank.number());
    compare(case, &which, tensor, &wanted, &mut report.error, &mut report.problems)
}

/// Adds the difference of two tensors to the worst error, and to the problems if it is too large.
fn compare(
    case: &Case,
    which: &str,
    got: &Tensor,
    want: &Tensor,
    worst: &mut f64,
    problems: &mut Vec<String>,
) -> Result<()> {
    if got.size() != want.size() || got.kind() != want.kind() {
        let (got, want) = [got, want].map(|t| format!("{:?} {:?}", t.kind(), t.size())).into();
        problems.push(format!("{which} is {got}, expected {want}"));
        *worst = f64::MAX;
        return Ok(());
    }
    if want.numel() == 0 {
        return Ok(());
    }
    let wide = match want.kind() {
        Kind::ComplexFloat | Kind::ComplexDouble => Kind::ComplexDouble,
        Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16 => Kind::Double,
        // Large integers are not told apart as floating numbers.
        _ => Kind::Int64,
    };
    let (got, want) = (got.f_detach()?.f_to_kind(wide)?, want.f_to_kind(wide)?);
    let (rtol, atol) = (case.header.rtol, case.header.atol);
    let size = |t: Tensor| t.f_abs()?.f_to_kind(Kind::Double);
    let rounded = |t: &Tensor| t.f_to_kind(if wide == Kind::Int64 { Kind::Double } else { wide });
    let allowed = size(rounded(&want)?)?.f_mul_scalar(rtol)?.f_add_scalar(atol)?;
    let same = got.f_eq_tensor(&want)?;
    // Of integers both ways: one is exact, the other does not wrap.
    let difference = size(got.f_sub(&want)?)?.f_maximum(&size(rounded(&got)?.f_sub(&rounded(&want)?)?)?)?;
    // Equal infinities have no difference, and what is equal needs no tolerance.
    let error = difference.f_div(&allowed)?.f_masked_fill(&same, 0.0)?.f_max()?.f_double_value(&[])?;
    // NaN anywhere makes the maximum NaN.
    let error = if error.is_finite() { error } else { f64::MAX };
    if error > 1.0 {
        problems.push(format!("{which} is off by {} times what is allowed", number(error)));
    }
    *worst = worst.max(error);
    Ok(())
}

/// The files of what all ranks hold, at rank 0.
fn gather(rank: &Rank, held: &[LocalTensor]) -> Result<Vec<Vec<u8>>> {
    let numbered: Vec<String> = (0..held.len()).map(|i| i.to_string()).collect();
    let named: Vec<(&str, &Tensor)> =
        numbered.iter().map(String::as_str).zip(held.iter().map(|h| &h.tensor)).collect();
    let mine = pack(&named, None)?;
    let lengths = rank.world.all_gather_bytes(&(mine.len() as i64).to_le_bytes())?;
    let lengths: Vec<i64> = lengths
        .into_iter()
        .map(|bytes| {
            Ok(i64::from_le_bytes(bytes.try_into().ok().context("a length of 8 bytes was expected")?))
        })
        .collect::<Result<_>>()?;
    let all = gather_v(&Tensor::f_from_slice(&mine)?, Some(&lengths), 0, 0, &rank.world)?;
    if rank.number() > 0 {
        return Ok(Vec::new());
    }
    let parts = all.f_split_with_sizes(&lengths, 0)?;
    let bytes = |part: Tensor| {
        let mut bytes = vec![0; part.numel()];
        part.f_copy_data_u8(&mut bytes, part.numel())?;
        Ok(bytes)
    };
    parts.into_iter().map(bytes).collect()
}

fn merge(case: &Case, layout: &Layout, n: usize, ranks: &[RankReport]) -> LayoutReport {
    let mut problems: Vec<String> = ranks.iter().flat_map(|rank| rank.problems.clone()).collect();
    let refused = ranks.iter().find_map(|rank| rank.refused.clone());
    if refused.is_some() && ranks.iter().any(|rank| rank.refused.is_none()) {
        problems.push("it is refused on some ranks only".to_owned());
    }
    let mut placements = layout.placements.clone();
    let mut shapes: BTreeMap<String, Vec<Vec<i64>>> = BTreeMap::new();
    for rank in ranks {
        placements.extend(rank.placements.clone());
        for (name, shape) in &rank.shapes {
            shapes.entry(name.clone()).or_default().push(shape.clone());
        }
    }
    let names = |places: Vec<Placement>| places.iter().map(Placement::to_string).collect();
    LayoutReport {
        ranks: layout.mesh.clone(),
        n,
        title: layout.title(n),
        sizes: match layout.sizes {
            Sizes::Given => case.header.attrs["sizes"].clone(),
            rule => rule.to_string().into(),
        },
        placements: placements.into_iter().map(|(name, places)| (name, names(places))).collect(),
        shapes,
        bytes: ranks.iter().map(|rank| rank.received).collect(),
        budget: ranks.iter().map(|rank| rank.budget).collect(),
        error: ranks.iter().map(|rank| rank.error).fold(0.0, f64::max),
        refused,
        problems,
    }
}

/// Puts the ranks' parts together, compares the wholes with the case, and equal parts with each other.
fn assemble(
    case: &Case,
    own: &[LocalTensor],
    reports: &[RankReport],
    files: &[Vec<u8>],
    merged: &mut LayoutReport,
) -> Result<BTreeMap<String, Tensor>> {
    let none: &[String] = &[];
    let ranks: Vec<BTreeMap<String, Tensor>> =
        files.iter().map(|file| unpack(file, none)).collect::<Result<_>>()?;
    ensure!(
        reports.iter().all(|r| r.names.len() == own.len()),
        "the ranks hold different numbers of tensors"
    );
    let mut gathered = BTreeMap::new();
    for (index, held) in own.iter().enumerate() {
        let key = index.to_string();
        let of_rank: Vec<&Tensor> =
            ranks.iter().map(|r| r.get(&key).context("a tensor is missing")).collect::<Result<_>>()?;
        match &held.part {
            Part::Of(parts) => {
                for (rank, other) in differing_copies(parts, &of_rank)? {
                    merged
                        .problems
                        .push(format!("{} differs in its bits on ranks {other} and {rank}", held.name));
                }
                let Some(whole) = join(parts, &of_rank)? else { continue };
                let complex = case.header.complex.contains(&held.name);
                let whole = if complex { whole.f_view_as_complex()? } else { whole };
                let want = match case.get(&held.name) {
                    Some(want) => want.shallow_clone(),
                    None => whole.f_zeros_like()?,
                };
                let which = format!("{}, gathered,", held.name);
                compare(case, &which, &whole, &want, &mut merged.error, &mut merged.problems)?;
                gathered.insert(held.name.clone(), whole);
            }
            part => {
                if matches!(part, Part::Own { identical: true }) {
                    for rank in (1..of_rank.len()).filter(|&rank| !same_bits(of_rank[0], of_rank[rank])) {
                        merged.problems.push(format!("{} differs in its bits on rank {rank}", held.name));
                    }
                }
                for (report, tensor) in reports.iter().zip(of_rank) {
                    let name = &report.names[index];
                    if case.get(name).is_some() {
                        gathered.insert(name.clone(), tensor.shallow_clone());
                    }
                }
            }
        }
    }
    Ok(gathered)
}

/// The pairs of ranks that should hold the same part and do not, to the last bit.
fn differing_copies(parts: &Parts, tensors: &[&Tensor]) -> Result<Vec<(usize, usize)>> {
    let mut differing = Vec::new();
    for rank in 1..tensors.len() {
        let first = (0..rank).find(|&other| parts.window(other) == parts.window(rank));
        differing.extend(
            first.filter(|&other| !same_bits(tensors[other], tensors[rank])).map(|other| (rank, other)),
        );
    }
    Ok(differing)
}

fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    matches!((pack(&[("", a)], None), pack(&[("", b)], None)), (Ok(a), Ok(b)) if a == b)
}

/// The whole of the ranks' parts; nothing where one has another shape than its layout says.
fn join(parts: &Parts, tensors: &[&Tensor]) -> Result<Option<Tensor>> {
    let Some(first) = tensors.first() else { return Ok(None) };
    // Complex tensors come as real ones with a trailing dim.
    let trailing = &first.size()[parts.shape().len().min(first.dim())..];
    let whole = Tensor::f_zeros([parts.shape(), trailing].concat(), (first.kind(), first.device()))?;
    for (rank, tensor) in tensors.iter().enumerate() {
        let shape = [&parts.shape_of(rank)[..], trailing].concat();
        if shape != tensor.size() || whole.kind() != tensor.kind() {
            return Ok(None);
        }
        parts.put(&whole, rank, tensor)?;
    }
    Ok(Some(whole))
}

/// Writes the gathered tensors under the case's names.
fn write(
    folder: &Path,
    case: &Case,
    layout: &LayoutReport,
    gathered: &BTreeMap<String, Tensor>,
) -> Result<()> {
    let folder = folder.join(&case.name);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let file = folder.join(format!("{}-{}.safetensors", layout.ranks, layout.n));
    let tensors: Vec<(&str, &Tensor)> =
        gathered.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let bytes = pack(&tensors, Some(("case", &case.text)))?;
    isobar_files::write(&file, bytes).with_context(|| format!("cannot write {}", file.display()))
}
