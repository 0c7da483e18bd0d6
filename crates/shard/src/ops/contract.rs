//! Products that sum over shared dims: matmul, linear, einsum.

use std::collections::BTreeMap;

use isobar_array::kernel::{self, Dtype, lowered};
use isobar_collectives::ReduceOp;
use tch::{Device, TchError, Tensor};

use super::ellipsis::spelled_out;
use super::{operator, refuse, rule};
use crate::dense::named;
use crate::error::Result;
use crate::layout::{Dim, Interval, Layout, Placement};
use crate::promote::{Operand, operand, promote_optional};
use crate::rules::{Footprint, check_dtypes, is_anything_registered};
use crate::tensor::{ShardTensor, same_mesh};

/// A factor of a product, or what is added to it; each of its dims under a label.
pub(crate) struct Factor<'a> {
    pub(crate) tensor: &'a ShardTensor,
    pub(crate) labels: Vec<char>,
    /// True if it is added to the product, and so counts once if that is a partial sum.
    pub(crate) added: bool,
}

/// The product of factors by their labels: dims of one label are walked together, and summed over where the result has it
/// not. Labels stay split as the largest factor that has them is; a sum over a split label gives a partial result, which
/// costs nothing. `precision` casts the local tensors, and `f` multiplies them.
pub(crate) fn contract(
    op: &'static str,
    factors: &[Factor<'_>],
    result: &[char],
    precision: fn(&Tensor) -> Result<Tensor, TchError>,
    f: impl FnOnce(&[Tensor]) -> Result<Tensor, TchError>,
) -> Result<ShardTensor> {
    let resolved: Vec<ShardTensor> =
        factors.iter().map(|factor| factor.tensor.resolved()).collect::<Result<_>>()?;
    same_mesh(op, &resolved.iter().collect::<Vec<_>>())?;
    let mut extents: BTreeMap<char, i64> = BTreeMap::new();
    for (factor, tensor) in factors.iter().zip(&resolved) {
        for (&label, &extent) in factor.labels.iter().zip(tensor.shape()) {
            let known = extents.entry(label).or_insert(extent);
            if *known == 1 {
                *known = extent;
            }
            if extent != 1 && *known != extent {
                return refuse(op, format!("the extents {known} and {extent} of one dim differ"));
            }
        }
    }
    // By size, the largest first, of equal ones the earlier.
    let mut order: Vec<usize> = (0..factors.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(resolved[index].layout().numel()));
    let mut split: BTreeMap<char, Dim> = BTreeMap::new();
    let mut used = Vec::new();
    for index in order {
        for (label, dim) in factors[index].labels.iter().zip(resolved[index].layout().dims()) {
            let free = !dim.axes.iter().any(|axis| used.contains(axis));
            if dim.is_split() && free && !split.contains_key(label) && dim.extent() == extents[label] {
                used.extend(&dim.axes);
                split.insert(*label, dim.clone());
            }
        }
    }
    let dims = |labels: &[char], shape: Option<&[i64]>| -> Vec<Dim> {
        let of = |(index, label): (usize, &char)| {
            let extent = shape.map_or(extents[label], |shape| shape[index]);
            let whole = || Dim::whole(extent);
            split.get(label).filter(|dim| dim.extent() == extent).cloned().unwrap_or_else(whole)
        };
        labels.iter().enumerate().map(of).collect()
    };
    let mesh = resolved[0].layout();
    let summed: Vec<usize> = split
        .iter()
        .filter(|(label, _)| !result.contains(label))
        .flat_map(|(_, dim)| dim.axes.clone())
        .collect();
    let first = summed.iter().all(|&axis| mesh.coordinates().is_none_or(|at| at[axis] == 0));
    let mut locals = Vec::with_capacity(factors.len());
    for (factor, tensor) in factors.iter().zip(&resolved) {
        let target = layout_of(mesh, dims(&factor.labels, Some(tensor.shape())), &[]);
        let moved = tensor.to_layout(&target)?;
        let own = target.sharding_axes();
        let differing: Vec<usize> = used.iter().copied().filter(|axis| !own.contains(axis)).collect();
        // Gradients of what all ranks have are summed in its own dtype.
        let local = named(op, &[moved.local()], precision(&moved.mark_varying(&differing)?))?;
        locals.push(match factor.added && !first {
            // It is in the sum of the first rank.
            true => named(op, &[&local], graph_zeros(&local))?,
            false => local,
        });
    }
    let layout = layout_of(mesh, dims(result, None), &summed);
    let views: Vec<&Tensor> = locals.iter().collect();
    Ok(ShardTensor::new(named(op, &views, f(&locals))?, layout))
}

/// The layout of these dims, partial sums along some axes.
fn layout_of(mesh: &Layout, dims: Vec<Dim>, summed: &[usize]) -> Layout {
    let split = mesh.without_partial().with_dims(dims);
    if summed.is_empty() {
        return split;
    }
    let mut placements = split.placements().to_vec();
    for &axis in summed {
        placements[axis] = Placement::Partial(ReduceOp::Sum);
    }
    let dims = split.dims().to_vec();
    split.with_placements(placements, dims)
}

/// Zeros that are part of the graph, whatever the values.
pub(crate) fn graph_zeros(tensor: &Tensor) -> Result<Tensor, TchError> {
    tensor.f_masked_fill(&Tensor::f_from_slice(&[true])?.f_to_device(tensor.device())?, 0)
}

fn factor(tensor: &ShardTensor, labels: impl IntoIterator<Item = char>) -> Factor<'_> {
    Factor { tensor, labels: labels.into_iter().collect(), added: false }
}

/// The letters of each operand of an equation, whose numbers of dims are `dims`, and those of its result.
fn letters(equation: &str, dims: &[usize]) -> Result<(Vec<Vec<char>>, Vec<char>), String> {
    let plain: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (left, right) = match plain.split_once("->") {
        Some((left, right)) => (left.to_owned(), right.to_owned()),
        None => {
            // Letters that appear once, in alphabetical order.
            let mut letters: Vec<char> = plain.chars().filter(|c| !",.".contains(*c)).collect();
            letters.sort_unstable();
            let once = |letter: &char| plain.chars().filter(|c| c == letter).count() == 1;
            let broadcast = if plain.contains("...") { "..." } else { "" };
            let once = letters.iter().copied().filter(once);
            (plain.clone(), broadcast.chars().chain(once).collect())
        }
    };
    let parts: Vec<&str> = left.split(',').collect();
    if parts.len() != dims.len() || dims.is_empty() {
        return Err(format!("it names {} tensors, got {}", parts.len(), dims.len()));
    }
    spelled_out(&parts, &right, dims)
}

/// The first two dims of one label.
fn repeated(labels: &[char]) -> Option<(usize, usize)> {
    let first = |second: usize| labels[..second].iter().position(|label| *label == labels[second]);
    (0..labels.len()).find_map(|second| Some((first(second)?, second)))
}

/// Says why a tensor has no diagonal on its ranks: dims of one label have different extents, or several of them are split.
fn no_diagonal(tensor: &ShardTensor, labels: &[char]) -> Option<String> {
    let _ = repeated(labels)?;
    labels.iter().enumerate().find_map(|(first, label)| {
        let same: Vec<usize> = (first..labels.len()).filter(|&dim| labels[dim] == *label).collect();
        let extents: Vec<i64> = same.iter().map(|&dim| tensor.shape()[dim]).collect();
        let split = same.iter().filter(|&&dim| tensor.layout().is_sharded(dim)).count();
        if extents.iter().any(|extent| *extent != extents[0]) {
            return Some(format!("'{label}' names dims {same:?} of the extents {extents:?}; expected equal extents"));
        }
        (split > 1).then(|| {
            format!("'{label}' names dims {same:?}, of which {split} are sharded; expected one at most: redistribute the others")
        })
    })
}

/// The tensor with one dim for each label, the diagonal of dims that have the same one. Nothing is sent.
fn diagonal(tensor: &ShardTensor, mut labels: Vec<char>) -> Result<(ShardTensor, Vec<char>)> {
    let mut x = tensor.shallow_clone();
    while let Some((first, second)) = repeated(&labels) {
        let is_second = x.layout().is_sharded(second);
        let (split, whole) = if is_second { (second, first) } else { (first, second) };
        let mut dims = x.layout().dims().to_vec();
        dims[first] = dims[split].clone();
        let _ = dims.remove(second);
        let own = x.layout().intervals()[split].to_vec();
        x = x.viewed("einsum", x.layout().with_dims(dims), |local| {
            // Of the dim that is whole, the indices of this rank's shard of the other.
            let piece = |part: &Interval| local.f_narrow(whole as i64, part.start, part.len);
            let square = match &own[..] {
                [] => local.f_narrow(whole as i64, 0, 0)?,
                parts => {
                    Tensor::f_cat(&parts.iter().map(piece).collect::<Result<Vec<_>, _>>()?, whole as i64)?
                }
            };
            square.f_diagonal(0, first as i64, second as i64)?.f_movedim_int(-1, first as i64)
        })?;
        let _ = labels.remove(second);
    }
    Ok((x, labels))
}

/// Labels for `count` dims that are walked together, the last one `a`.
fn batch(count: usize) -> Vec<char> {
    (0..count).rev().filter_map(|index| char::from_u32(0x100 + index as u32)).collect()
}

impl ShardTensor {
    /// x Wᵀ + b over the last dim: `weight` `[out, in]`, `bias` `[out]`. Where the features that are summed over are split,
    /// the result is a partial sum, which the next operator that needs to resolves.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; different meshes; the errors of the exchange.
    pub fn linear(&self, weight: &dyn Operand, bias: Option<&dyn Operand>) -> Result<Self> {
        const OP: &str = "linear";
        let (weight, bias) = (&*weight.promote(OP, self)?, promote_optional(OP, self, bias)?);
        let bias = bias.as_deref();
        // The common case, without a detour: independent samples, whole weights, as many features out as in.
        let [out, features] = weight.shape() else {
            return rule(OP, &[self, weight], || refuse(OP, "weight must be [out, in]"));
        };
        let inputs: Vec<&Self> = [self, weight].into_iter().chain(bias).collect();
        let last = self.ndim().checked_sub(1);
        if out == features
            && bias.is_none_or(|bias| bias.layout().is_replicated())
            && weight.layout().is_replicated()
            && last.is_some_and(|last| self.shape()[last] == *features && !self.layout().is_sharded(last))
            && !self.layout().is_partial()
            && !weight.requires_grad()
            && bias.is_none_or(|bias| !bias.requires_grad())
            && self.device_mesh() == weight.device_mesh()
            && !is_anything_registered()
            && weight.watched().is_none()
            && bias.is_none_or(|bias| bias.watched().is_none())
            && check_dtypes(OP, &inputs).is_ok()
        {
            let y = self.local().f_linear(weight.local(), bias.map(Self::local));
            if let Ok(y) = y {
                return Ok(Self::new(y, self.layout().clone()));
            }
        }
        operator(OP, &inputs, args!(), || {
            if self.ndim() == 0 || self.shape().last() != Some(features) {
                let reason = format!("the last dim of {:?} is not the {features} features", self.shape());
                return refuse(OP, reason);
            }
            let mut labels = batch(self.ndim() - 1);
            let mut result = labels.clone();
            labels.push('k');
            result.push('o');
            let mut factors = vec![factor(self, labels), factor(weight, ['o', 'k'])];
            factors.extend(bias.map(|bias| Factor { tensor: bias, labels: vec!['o'], added: true }));
            contract(OP, &factors, &result, lowered, |t| t[0].f_linear(&t[1], t.get(2)))
        })
    }

    /// The matrix product of the last two dims; dims before them are broadcast. Vectors are rows on the left and columns on
    /// the right. A sum over a split dim gives a partial result.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; different meshes; the errors of the exchange.
    pub fn matmul(&self, other: &dyn Operand) -> Result<Self> {
        let other = &*other.promote("matmul", self)?;
        operator("matmul", &[self, other], args!(), || {
            if self.ndim() == 0 || other.ndim() == 0 {
                return refuse("matmul", "both must have dims");
            }
            let walked = |x: &Self, last: usize| x.shape()[x.ndim().saturating_sub(last)];
            let (left, right) = (walked(self, 1), walked(other, if other.ndim() > 1 { 2 } else { 1 }));
            if left != right {
                return refuse(
                    "matmul",
                    format!("the extents {left} and {right} that are summed over differ"),
                );
            }
            let before = |x: &Self| batch(x.ndim().saturating_sub(2));
            let (mut left, mut right) = (before(self), before(other));
            let mut result = if left.len() > right.len() { left.clone() } else { right.clone() };
            if self.ndim() > 1 {
                left.push('i');
                result.push('i');
            }
            left.push('k');
            right.push('k');
            if other.ndim() > 1 {
                right.push('j');
                result.push('j');
            }
            contract("matmul", &[factor(self, left), factor(other, right)], &result, lowered, |t| {
                t[0].f_matmul(&t[1])
            })
        })
    }

    /// The product of two batches of matrices, `[n, i, k]` and `[n, k, j]`, plus `bias`, broadcast to `[n, i, j]`.
    ///
    /// # Errors
    ///
    /// See [`matmul`](Self::matmul).
    pub fn bmm(&self, other: &dyn Operand, bias: Option<&dyn Operand>) -> Result<Self> {
        let (other, bias) = (&*other.promote("bmm", self)?, promote_optional("bmm", self, bias)?);
        let bias = bias.as_deref();
        let inputs: Vec<&Self> = [self, other].into_iter().chain(bias).collect();
        operator("bmm", &inputs, args!(), || {
            if self.ndim() != 3 || other.ndim() != 3 || bias.is_some_and(|bias| bias.ndim() > 3) {
                return refuse("bmm", "expected [n, i, k] and [n, k, j]");
            }
            if self.shape()[0] != other.shape()[0] || self.shape()[2] != other.shape()[1] {
                return refuse("bmm", format!("{:?} and {:?} do not fit", self.shape(), other.shape()));
            }
            let labels = ['n', 'i', 'j'];
            let mut factors = vec![factor(self, ['n', 'i', 'k']), factor(other, ['n', 'k', 'j'])];
            factors.extend(bias.map(|bias| Factor {
                tensor: bias,
                labels: labels[3 - bias.ndim()..].to_vec(),
                added: true,
            }));
            contract("bmm", &factors, &labels, lowered, |t| match t.get(2) {
                Some(bias) => bias.f_baddbmm(&t[0], &t[1], 1.0, 1.0),
                None => t[0].f_bmm(&t[1]),
            })
        })
    }

    /// Einstein's summation, such as `"bhqd,bhkd->bhqk"`: dims of one letter are walked together, and those that the result
    /// does not name are summed over. A letter repeated in an operand takes the diagonal; at most one of its dims may be sharded.
    /// "..." stands for the dims without a letter, which are broadcast.
    ///
    /// # Errors
    ///
    /// An equation that does not fit the tensors; different meshes; the errors of the exchange.
    pub fn einsum(equation: &str, tensors: &[&Self]) -> Result<Self> {
        operator("einsum", tensors, args!("equation": equation), || {
            let names: Vec<String> = (0..tensors.len()).map(|at| format!("operand {at}")).collect();
            let dtype = |at| if at == 0 { Dtype::NotBool } else { Dtype::Operand };
            let typed = tensors
                .iter()
                .zip(&names)
                .enumerate()
                .map(|(at, (x, name))| (&name[..], x.kind(), dtype(at)));
            kernel::check_dtypes("einsum", typed, tensors.first().map_or(Device::Cpu, |x| x.device()))?;
            let wrong = |why: &str| refuse("einsum", format!("\"{equation}\": {why}"));
            let dims: Vec<usize> = tensors.iter().map(|tensor| tensor.ndim()).collect();
            let (labels, right) = match letters(equation, &dims) {
                Ok(letters) => letters,
                Err(why) => return wrong(&why),
            };
            for (labels, tensor) in labels.iter().zip(tensors) {
                let letters = labels.iter().all(|c| c.is_ascii_alphabetic());
                if labels.len() != tensor.ndim() || !letters {
                    return wrong(&format!(
                        "{labels:?} are not a letter for each dim of {:?}",
                        tensor.shape()
                    ));
                }
                if let Some(why) = no_diagonal(tensor, labels) {
                    return wrong(&why);
                }
            }
            if right.iter().any(|label| !labels.iter().flatten().any(|known| known == label)) {
                return wrong("the result names a letter that no tensor has");
            }
            let diagonals = tensors.iter().zip(labels).map(|(tensor, labels)| diagonal(tensor, labels));
            let diagonals: Vec<(Self, Vec<char>)> = diagonals.collect::<Result<_>>()?;
            let factors: Vec<Factor<'_>> =
                diagonals.iter().map(|(tensor, labels)| factor(tensor, labels.iter().copied())).collect();
            let left: Vec<String> = diagonals.iter().map(|(_, labels)| labels.iter().collect()).collect();
            let spelled = format!("{}->{}", left.join(","), right.iter().collect::<String>());
            contract("einsum", &factors, &right, lowered, |t| Tensor::f_einsum(&spelled, t, None::<i64>))
        })
    }
}

crate::register! {
    /// x Wᵀ + b.
    "linear"(input: NotBool, weight: Operand, bias: Operand) Product(|call| call.is_split_along(0, -1) || call.is_split_along(1, -1)):
        |call| call.tensor(0)?.linear(call.tensor(1)?, operand(call.optional_tensor(2)));
    /// The product of matrices, over broadcast batch dims.
    "matmul"(input: NotBool, other: Operand) Product(rows_by_columns): |call| call.tensor(0)?.matmul(call.tensor(1)?);
    /// The product of matrices of a batch, with an optional bias.
    "bmm"(input: NotBool, other: Operand, bias: Operand) Product(rows_by_columns):
        |call| call.tensor(0)?.bmm(call.tensor(1)?, operand(call.optional_tensor(2)));
    /// Sums of products by the indices of `equation`; a letter repeated in an operand takes the diagonal (at most one dim sharded), "..." stands for broadcast dims.
    "einsum"(; equation) Product(sums_a_split_letter):
        |call| ShardTensor::einsum(&call.get::<String>("equation")?, call.tensors());
}

/// Returns whether the contracted dim of a matrix product is split.
fn rows_by_columns(call: &Footprint<'_>) -> bool {
    let is_vector = call.tensors.get(1).is_some_and(|other| other.layout.ndim() == 1);
    call.is_split_along(0, -1) || call.is_split_along(1, if is_vector { -1 } else { -2 })
}

/// Returns whether a letter that the result lacks names a split dim.
fn sums_a_split_letter(call: &Footprint<'_>) -> bool {
    let equation: String = call.attr("equation").ok().flatten().unwrap_or_default();
    let dims: Vec<usize> = call.tensors.iter().map(|tensor| tensor.layout.ndim()).collect();
    let Ok((operands, result)) = letters(&equation, &dims) else { return true };
    let is_summed = |(at, labels): (usize, &Vec<char>)| {
        let mut dims = labels.iter().enumerate();
        dims.any(|(dim, label)| !result.contains(label) && call.is_split_along(at, dim as i64))
    };
    operands.iter().enumerate().any(is_summed)
}
