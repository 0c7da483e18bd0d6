//! Bytes that operators may receive by the dims that their tensors are split along.

use anyhow::Result;

use super::bytes;
use crate::verify::case::Case;
use crate::verify::layout::{Layout, Placement};

/// Bytes above which an all-reduce goes in two halves, each rank summing one part.
const SMALL: u64 = 16 << 10;

/// Bytes that a rank receives in a sum over all ranks.
pub(super) fn summed(size: u64, ranks: u64) -> u64 {
    if size > SMALL { 2 * size } else { size * (ranks - 1) }
}

/// Bytes of the inputs and outputs of an operator.
pub(super) struct Amounts {
    pub(super) others: u64,
    pub(super) sizes: Vec<u64>,
    pub(super) outputs: u64,
}

impl Amounts {
    pub(super) fn first(&self) -> u64 {
        self.sizes.first().copied().unwrap_or(0)
    }

    pub(super) fn all(&self) -> u64 {
        self.sizes.iter().sum()
    }

    pub(super) fn weights_once(&self) -> u64 {
        self.all() - self.first()
    }

    /// The gradients of all but the first, added up over the ranks.
    pub(super) fn weights(&self) -> u64 {
        self.reduced(self.weights_once())
    }

    /// A sum over all ranks: what is short goes to everybody, what is long in two halves.
    pub(super) fn reduced(&self, bytes: u64) -> u64 {
        bytes * self.others.max(2).min(2 * self.others)
    }

    /// Returns the size of the messages that announce requests: a few words each.
    pub(super) fn asking(&self) -> u64 {
        self.others * 8 * (self.others + 4) * 2 + self.weights_once()
    }
}

/// The tensors of a case and their split.
pub(super) struct Splits<'a> {
    case: &'a Case,
    layout: &'a Layout,
    names: &'a [String],
    of: &'a Amounts,
}

impl<'a> Splits<'a> {
    pub(super) fn new(case: &'a Case, layout: &'a Layout, names: &'a [String], of: &'a Amounts) -> Self {
        Self { case, layout, names, of }
    }

    /// Returns whether tensor `at` is split along `dim`, counted from the end where it is negative.
    fn along(&self, at: usize, dim: i64) -> Result<bool> {
        let Some(name) = self.names.get(at) else { return Ok(false) };
        let dims = self.case.tensor(name)?.dim() as i64;
        let dim = if dim < 0 { dim + dims } else { dim };
        Ok(self.layout.of(name).contains(&Placement::Shard(dim as usize)))
    }

    fn is_split(&self, at: usize) -> bool {
        let places = self.names.get(at).map(|name| self.layout.of(name)).unwrap_or_default();
        places.iter().any(|place| *place != Placement::Replicate)
    }

    /// Bytes of the tensors with another split than the first one that is split.
    fn others(&self) -> u64 {
        let Some(first) = (0..self.names.len()).find(|&at| self.is_split(at)) else { return 0 };
        let differ = |at: &usize| self.layout.of(&self.names[*at]) != self.layout.of(&self.names[first]);
        (0..self.names.len()).filter(differ).filter_map(|at| self.of.sizes.get(at)).sum()
    }

    fn sum(&self, size: u64) -> u64 {
        summed(size, self.of.others + 1)
    }

    /// Tensors that lie otherwise than the first split one follow it, and their gradients come back.
    pub(super) fn followed(&self) -> u64 {
        self.others()
    }

    /// A product: of split rows or columns, the gradient of the other operand is summed; along a contracted dim, the result, and the
    /// slices of the other operand's gradient come back. If both are split, the smaller operand moves too. Biases are summed.
    pub(super) fn product(&self, op: &str) -> Result<u64> {
        let contracted = match op {
            "linear" => self.along(0, -1)? || self.along(1, -1)?,
            "matmul" | "bmm" => self.along(0, -1)? || self.along(1, -2)?,
            _ => true,
        };
        let operands = self.of.sizes.iter().take(2);
        let (all, largest) = (operands.clone().sum::<u64>(), operands.copied().max().unwrap_or(0));
        let biases = self.of.all() - all;
        let whole: u64 = (0..2).filter(|&at| !self.is_split(at)).filter_map(|at| self.of.sizes.get(at)).sum();
        let result = if contracted { self.sum(self.of.outputs) } else { 0 };
        let moved =
            match (self.is_split(0) && self.is_split(1), contracted && self.layout.mesh.axes().len() == 1) {
                (true, _) => 2 * (all - largest) + self.sum(all - largest),
                (false, true) => whole,
                (false, false) => self.sum(whole),
            };
        Ok(result + moved + 2 * self.sum(biases))
    }

    /// Attention: along split tokens, keys and values go round once, and once more with their gradients in backward, or the gradients of
    /// replicated ones are summed; tensors that lie otherwise follow.
    pub(super) fn attention(&self) -> Result<u64> {
        let tokens =
            (0..3).map(|at| Ok(self.along(at, -2)? || self.along(at, -1)?)).collect::<Result<Vec<_>>>()?;
        let pairs = self.of.sizes.iter().skip(1).take(2).sum::<u64>();
        let round = if tokens.contains(&true) { (3 * pairs).max(self.sum(pairs)) } else { 0 };
        Ok(round + self.others())
    }

    /// A view: the elements between a shard's boundary and the next slice along the coarser dim, forward and backward.
    pub(super) fn view(&self) -> Result<u64> {
        let Some(name) = self.names.first() else { return Ok(0) };
        let input = self.case.tensor(name)?;
        let output = self.case.header.outputs.first().and_then(|name| self.case.get(name));
        let coarsest = output.map(|output| output.size()).unwrap_or_default();
        let slice = |place: &Placement| match *place {
            Placement::Replicate => 0,
            Placement::Shard(dim) => {
                let own = input.size()[dim];
                let beside = coarsest.get(dim.min(coarsest.len().saturating_sub(1))).copied().unwrap_or(own);
                bytes(input) / own.min(beside).max(1) as u64
            }
        };
        let slices: u64 = self.layout.of(name).iter().map(slice).sum();
        Ok(2 * slices.min(bytes(input)))
    }

    /// Picked or added elements, there and back, and the indices, where the indexed dim is split; the sum of the gradient of the indexed
    /// tensor where the indices are; nothing along other dims, but what is added lies with them.
    pub(super) fn indexed(&self, op: &str) -> Result<u64> {
        let adds = matches!(op, "index_add" | "scatter_add");
        let table = if op == "embedding" { 1 } else { 0 };
        let dim = if op == "embedding" { 0 } else { self.case.header.attr::<i64>("dim")? };
        let size = |at: usize| self.of.sizes.get(at).copied().unwrap_or(0);
        let picked = if adds { size(2) } else { self.of.outputs };
        let mut received = if adds { self.others() } else { 0 };
        if self.along(table, dim)? {
            received += 2 * picked + self.of.asking();
        }
        if (0..self.names.len()).any(|at| at != table && self.is_split(at)) {
            received += self.sum(size(table)) + picked + self.of.asking();
        }
        Ok(received)
    }

    /// A sort along a split dim: rows for columns, values and indices back, and the gradient there and back.
    pub(super) fn sorted(&self) -> Result<u64> {
        let dim = self.case.header.attr::<i64>("dim").unwrap_or(-1);
        Ok(if self.along(0, dim)? { 2 * self.of.first() + self.of.outputs / 2 } else { 0 })
    }

    /// Distances: one set of points goes round, or the gradient of a replicated one is summed.
    pub(super) fn distances(&self) -> u64 {
        let smaller = self.of.all() - self.of.sizes.iter().copied().max().unwrap_or(0);
        let whole: u64 = (0..2).filter(|&at| !self.is_split(at)).filter_map(|at| self.of.sizes.get(at)).sum();
        if whole == 0 { 2 * smaller + self.sum(smaller) } else { self.sum(whole) }
    }

    /// Nearest neighbours: as many bytes as the candidates have, where the points are split, and a word of each rank.
    pub(super) fn nearest(&self) -> u64 {
        if self.is_split(0) { self.of.outputs + 8 * (self.of.others + 1) } else { 0 }
    }

    /// Sampled points: at most 8 neighbours of each, there and back, and their indices; the grid, where it follows.
    pub(super) fn sampled(&self) -> u64 {
        match self.is_split(0) || self.is_split(1) {
            true => 2 * 8 * self.of.outputs + self.sum(self.of.first()) + self.others() + self.of.asking(),
            false => 0,
        }
    }
}
