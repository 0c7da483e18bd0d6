//! Footprint of a call: shapes, dtypes and layouts of its tensors, without data. Byte bounds are computed from it.

use isobar_array::Attrs;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::layout::{Interval, Layout};

/// Bytes above which an all-reduce is a reduce-scatter followed by an all-gather.
const SMALL: u64 = 16 << 10;

/// Returns the bytes that a rank receives in an all-reduce of `size` bytes over `ranks` ranks.
///
/// ```
/// use isobar_shard::rules::summed;
///
/// assert_eq!(summed(100, 4), 300);
/// assert_eq!(summed(1 << 20, 4), 2 << 20);
/// ```
pub fn summed(size: u64, ranks: u64) -> u64 {
    if size > SMALL { 2 * size } else { size * ranks.saturating_sub(1) }
}

/// Layout and element size of a tensor in a call.
#[derive(Debug, Clone)]
pub struct FootprintTensor {
    /// Layout, with the global shape.
    pub layout: Layout,
    /// Bytes of an element.
    pub element: u64,
}

impl FootprintTensor {
    /// Returns the bytes of the global tensor.
    pub fn bytes(&self) -> u64 {
        self.layout.shape().iter().product::<i64>() as u64 * self.element
    }
}

/// Shapes, dtypes and layouts of a call's tensors, and its arguments. Bounds of received bytes are computed from it, without
/// communication.
#[derive(Debug)]
pub struct Footprint<'a> {
    /// Name of the operator, for errors.
    pub operator: &'static str,
    /// Input tensors, in the operator's order.
    pub tensors: Vec<FootprintTensor>,
    /// Global shape and bytes of an element of each result.
    pub outputs: Vec<(Vec<i64>, u64)>,
    /// Arguments by name.
    pub attrs: &'a Attrs,
    /// Number of the rank in the mesh.
    pub rank: usize,
    /// True if a backward pass follows, whose bytes count, too.
    pub gradients: bool,
}

/// One dim of a windowed operator's input on a rank: the input's shard, and the rank's part of the result.
#[derive(Debug, Clone, Copy)]
pub struct Side {
    /// Number of the rank in the mesh.
    pub rank: usize,
    /// Dim of the input.
    pub dim: usize,
    /// Extent of the input.
    pub extent: i64,
    /// Extent of the result.
    pub result: i64,
    /// First index and end of the input's shard.
    pub shard: (i64, i64),
    /// First index and end of the rank's part of the result, if its boundaries are those of the input, scaled; `None` if it is empty.
    pub own: Option<(i64, i64)>,
}

/// Function that returns the window of the input that a rank needs along one dim: its first index and its end; `(0, 0)` if the
/// rank has no part of the result.
pub type SideWindow = fn(&Footprint<'_>, &Side) -> Result<(i64, i64)>;

impl Footprint<'_> {
    /// Returns the argument `name`; `None` if it is missing or null.
    ///
    /// # Errors
    ///
    /// An argument of another type.
    pub fn attr<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        match self.attrs.get(name).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => match serde_json::from_value(value.clone()) {
                Ok(value) => Ok(Some(value)),
                Err(error) => self.refuse(format!(
                    "the argument \"{name}\" is {value}: {error}; pass the type that the operator's descriptor reads"
                )),
            },
        }
    }

    /// Returns the argument `name` as a list with one number for each dim, or one for all; `default` if it is missing.
    pub fn numbers(&self, name: &str, default: i64) -> Vec<i64> {
        match self.attrs.get(name) {
            Some(Value::Array(values)) => values.iter().filter_map(Value::as_i64).collect(),
            Some(value) if value.is_i64() => value.as_i64().into_iter().collect(),
            _ => vec![default],
        }
    }

    /// Returns the value of [`numbers`](Self::numbers) for one dim.
    pub fn number(&self, name: &str, index: usize, default: i64) -> i64 {
        let values = self.numbers(name, default);
        values.get(index).or(values.first()).copied().unwrap_or(default)
    }

    /// Returns the tensor at `index`.
    ///
    /// # Errors
    ///
    /// There are fewer tensors.
    pub fn tensor(&self, index: usize) -> Result<&FootprintTensor> {
        match self.tensors.get(index) {
            Some(tensor) => Ok(tensor),
            None => self.refuse(format!(
                "{} tensors were given, expected at least {}; pass the missing ones, or ask for fewer in the operator's descriptor",
                self.tensors.len(),
                index + 1
            )),
        }
    }

    /// Returns the number of dims of the first tensor.
    pub fn ndim(&self) -> usize {
        self.tensors.first().map_or(0, |tensor| tensor.layout.ndim())
    }

    /// Returns the number of other ranks.
    pub fn others(&self) -> u64 {
        self.tensors.first().map_or(0, |tensor| tensor.layout.mesh().size() as u64 - 1)
    }

    /// Returns the bytes of the global tensor at `index`; 0 where there is none.
    pub fn size(&self, index: usize) -> u64 {
        self.tensors.get(index).map_or(0, FootprintTensor::bytes)
    }

    /// Returns the bytes of all tensors.
    pub fn all(&self) -> u64 {
        self.tensors.iter().map(FootprintTensor::bytes).sum()
    }

    /// Returns the bytes of all results.
    pub fn results(&self) -> u64 {
        let bytes = |(shape, element): &(Vec<i64>, u64)| shape.iter().product::<i64>() as u64 * element;
        self.outputs.iter().map(bytes).sum()
    }

    /// Returns whether the tensor at `index` is split along `dim`, counted from the end where it is negative.
    pub fn is_split_along(&self, index: usize, dim: i64) -> bool {
        let Some(tensor) = self.tensors.get(index) else { return false };
        let dim = if dim < 0 { dim + tensor.layout.ndim() as i64 } else { dim };
        usize::try_from(dim).is_ok_and(|dim| dim < tensor.layout.ndim() && tensor.layout.is_sharded(dim))
    }

    /// Returns whether the tensor at `index` is split along any dim.
    pub fn is_split(&self, index: usize) -> bool {
        self.tensors.get(index).is_some_and(|tensor| !tensor.layout.is_replicated())
    }

    /// Returns the bytes that a rank receives in an all-reduce of `size` bytes over all ranks.
    pub fn sum(&self, size: u64) -> u64 {
        summed(size, self.others() + 1)
    }

    /// Returns the larger cost of the two forms of an all-reduce over all ranks (see [`summed`]).
    pub(super) fn reduced(&self, bytes: u64) -> u64 {
        bytes * self.others().max(2).min(2 * self.others())
    }

    /// Returns the bytes of all tensors but the first.
    pub(super) fn weights(&self) -> u64 {
        self.all() - self.size(0)
    }

    /// Returns the bytes of the requests for elements: a few words a message, and all tensors but the first, such as indices.
    pub(super) fn asking(&self) -> u64 {
        self.others() * 8 * (self.others() + 4) * 2 + self.weights()
    }

    /// Returns the bytes of the tensors whose placements differ from those of the first split tensor.
    pub(super) fn otherwise_split(&self) -> u64 {
        let Some(first) = (0..self.tensors.len()).find(|&at| self.is_split(at)) else { return 0 };
        let first = self.tensors[first].layout.placements();
        let differ = self.tensors.iter().filter(|tensor| tensor.layout.placements() != first);
        // In the dtype of the result, if that is wider.
        let result = self.outputs.first().map_or(0, |(_, element)| *element);
        differ.map(|tensor| tensor.bytes() / tensor.element.max(1) * tensor.element.max(result)).sum()
    }

    /// Returns the bytes of the replicated tensors among the first `count`.
    pub(super) fn replicated(&self, count: usize) -> u64 {
        (0..count).filter(|&at| !self.is_split(at)).map(|at| self.size(at)).sum()
    }

    /// Returns the sides of the first tensor on a rank.
    pub(super) fn sides(&self, rank: usize) -> Result<Vec<Side>> {
        let layout = &self.tensor(0)?.layout;
        let result = self.outputs.first().map(|(shape, _)| &shape[..]).unwrap_or_default();
        let intervals = layout.intervals_of(rank).into_iter().enumerate();
        let side = |(dim, part): (usize, &[Interval])| {
            let part = part.first().copied().unwrap_or(Interval::new(0, 0));
            let extent = layout.shape()[dim];
            let result = result.get(dim).copied().unwrap_or(extent);
            let scaled = |boundary: i64| match boundary >= extent {
                true => result,
                false => (boundary * result + extent - 1) / extent.max(1),
            };
            let shard = (part.start, part.end());
            let own = (scaled(shard.0), scaled(shard.1));
            Side { rank, dim, extent, result, shard, own: (own.0 < own.1).then_some(own) }
        };
        Ok(intervals.map(side).collect())
    }

    /// Fails with an error that names the operator and `reason`.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn refuse<T>(&self, reason: impl Into<String>) -> Result<T> {
        Err(Error::from(isobar_array::Error::Argument { op: self.operator, reason: reason.into() }))
    }
}
