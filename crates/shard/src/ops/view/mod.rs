//! Other views of the same elements.
//!
//! Views read no values, and exchange only elements near the boundaries of shards.

mod join;
mod reshape;
mod select;
mod tiles;

use tch::Kind;

use super::{operator, refuse, resolve, torch};
use crate::error::Result;
use crate::layout::{Dim, Interval};
use crate::rules::broadcast;
use crate::tensor::ShardTensor;

impl ShardTensor {
    /// The dims in another order: dim `i` of the result is `order[i]` of this.
    ///
    /// # Errors
    ///
    /// An order that does not name every dim once.
    pub fn permute(&self, order: &[i64]) -> Result<Self> {
        const OP: &str = "permute";
        operator(OP, &[self], args!("dims": order), || {
            let wanted: Vec<usize> =
                order.iter().map(|&dim| resolve(OP, dim, self.ndim())).collect::<Result<_>>()?;
            let mut sorted = wanted.clone();
            sorted.sort_unstable();
            if sorted != (0..self.ndim()).collect::<Vec<_>>() {
                return refuse(OP, format!("{order:?} does not name every one of {} dims once", self.ndim()));
            }
            let dims = wanted.iter().map(|&dim| self.layout().dims()[dim].clone()).collect();
            self.viewed(OP, self.layout().with_dims(dims), |x| x.f_permute(order))
        })
    }

    /// Two dims exchanged.
    ///
    /// # Errors
    ///
    /// Dims that do not exist.
    pub fn transpose(&self, dim0: i64, dim1: i64) -> Result<Self> {
        const OP: &str = "transpose";
        operator(OP, &[self], args!("dim0": dim0, "dim1": dim1), || {
            let (a, b) = (resolve(OP, dim0, self.ndim())?, resolve(OP, dim1, self.ndim())?);
            let mut dims = self.layout().dims().to_vec();
            dims.swap(a, b);
            self.viewed(OP, self.layout().with_dims(dims), |x| x.f_transpose(dim0, dim1))
        })
    }

    /// A new dim of extent 1.
    ///
    /// # Errors
    ///
    /// An index out of range.
    pub fn unsqueeze(&self, dim: i64) -> Result<Self> {
        const OP: &str = "unsqueeze";
        operator(OP, &[self], args!("dim": dim), || {
            let at = resolve(OP, dim, self.ndim() + 1)?;
            let mut dims = self.layout().dims().to_vec();
            dims.insert(at, Dim::whole(1));
            self.viewed(OP, self.layout().with_dims(dims), |x| x.f_unsqueeze(at as i64))
        })
    }

    /// Without those of the dims (of all, where none are named) that have extent 1.
    ///
    /// # Errors
    ///
    /// Dims that do not exist.
    pub fn squeeze(&self, dims: &[i64]) -> Result<Self> {
        const OP: &str = "squeeze";
        operator(OP, &[self], args!("dim": dims), || {
            let named: Vec<usize> = match dims {
                [] => (0..self.ndim()).collect(),
                dims => dims.iter().map(|&dim| resolve(OP, dim, self.ndim())).collect::<Result<_>>()?,
            };
            let goes = |dim: usize| named.contains(&dim) && self.shape()[dim] == 1;
            // A single element that one rank has is wanted by all.
            let x = self.replicate_where(goes)?;
            let gone: Vec<i64> = (0..x.ndim()).filter(|&dim| goes(dim)).map(|dim| dim as i64).collect();
            let kept = (0..x.ndim()).filter(|&dim| !goes(dim)).map(|dim| x.layout().dims()[dim].clone());
            let layout = x.layout().with_dims(kept.collect());
            let y = if gone.is_empty() {
                x.local().shallow_clone()
            } else {
                torch(OP, x.local().f_squeeze_dims(gone))?
            };
            Ok(Self::new(y, layout))
        })
    }

    /// Extents of 1 repeated to `shape`, and new dims before, without a copy; −1 keeps an extent.
    ///
    /// # Errors
    ///
    /// A shape that the tensor does not expand to.
    pub fn expand(&self, shape: &[i64]) -> Result<Self> {
        const OP: &str = "expand";
        operator(OP, &[self], args!("size": shape), || {
            let Some(new) = shape.len().checked_sub(self.ndim()) else {
                return refuse(OP, format!("{:?} has more dims than {shape:?}", self.shape()));
            };
            let wanted: Vec<i64> = shape
                .iter()
                .enumerate()
                .map(|(index, &extent)| match (extent, index.checked_sub(new)) {
                    (-1, Some(own)) => self.shape()[own],
                    _ => extent,
                })
                .collect();
            let fits = |own: usize| self.shape()[own] == wanted[own + new] || self.shape()[own] == 1;
            if wanted.iter().any(|&extent| extent < 0) || !(0..self.ndim()).all(fits) {
                return refuse(OP, format!("{:?} does not expand to {shape:?}", self.shape()));
            }
            let x = self.replicate_where(|dim| self.shape()[dim] != wanted[dim + new])?;
            let dims: Vec<Dim> = wanted
                .iter()
                .enumerate()
                .map(|(index, &extent)| match index.checked_sub(new) {
                    Some(own) if x.shape()[own] == extent => x.layout().dims()[own].clone(),
                    _ => Dim::whole(extent),
                })
                .collect();
            let layout = x.layout().with_dims(dims);
            Ok(Self::new(torch(OP, x.local().f_expand(layout.local_shape(), false))?, layout))
        })
    }

    /// The tensor `repeats` times along each dim; more repeats than dims make new dims before.
    ///
    /// Along a split dim every rank repeats what it has, and nothing is sent.
    ///
    /// # Errors
    ///
    /// Fewer repeats than dims, or negative ones.
    pub fn repeat(&self, repeats: &[i64]) -> Result<Self> {
        const OP: &str = "repeat";
        operator(OP, &[self], args!("repeats": repeats), || {
            let Some(new) = repeats.len().checked_sub(self.ndim()) else {
                return refuse(OP, format!("{} repeats for {} dims", repeats.len(), self.ndim()));
            };
            if repeats.iter().any(|&times| times < 0) {
                return refuse(OP, format!("{repeats:?} holds a negative number"));
            }
            // Very many copies of many pieces are better gathered than kept apart.
            let x =
                self.resolved()?.replicate_where(|dim| repeats[dim + new] > 64 || repeats[dim + new] == 0)?;
            let dims = repeats.iter().enumerate().map(|(index, &times)| match index.checked_sub(new) {
                None => Dim::whole(times),
                Some(own) => {
                    let dim = &x.layout().dims()[own];
                    if !dim.is_split() {
                        return Dim::whole(dim.extent() * times);
                    }
                    let copies = |part: &Vec<Interval>| {
                        let copy = |time: i64| {
                            part.iter().map(move |i| Interval::new(i.start + time * dim.extent(), i.len))
                        };
                        crate::layout::join((0..times).flat_map(copy))
                    };
                    Dim { axes: dim.axes.clone(), parts: dim.parts.iter().map(copies).collect() }
                }
            });
            let layout = x.layout().with_dims(dims.collect());
            Ok(Self::new(torch(OP, x.local().f_repeat(repeats))?, layout))
        })
    }

    /// Views the bytes of the elements as another dtype; the last dim changes its extent if the sizes of the dtypes differ.
    ///
    /// # Errors
    ///
    /// Bytes that are no whole number of elements; no dims, where the sizes differ.
    pub fn view_kind(&self, kind: Kind) -> Result<Self> {
        const OP: &str = "view_kind";
        operator(OP, &[self], args!("dtype": format!("{kind:?}")), || {
            let (from, to) = (self.kind().elt_size_in_bytes() as i64, kind.elt_size_in_bytes() as i64);
            let mut x = self.resolved()?;
            let mut dims = x.layout().dims().to_vec();
            if from != to {
                let Some(last) = dims.last_mut() else { return refuse(OP, "a tensor without dims") };
                let extent = last.extent();
                if extent * from % to != 0 {
                    return refuse(OP, format!("{extent} elements of {from} bytes are not elements of {to}"));
                }
                let result = extent * from / to;
                let whole = |part: &Vec<Interval>| {
                    part.iter().all(|i| i.start * from % to == 0 && i.len * from % to == 0)
                };
                if !last.parts.iter().all(whole) {
                    // An element would lie on two ranks.
                    let coarse = last.scaled(result);
                    let bounds: Vec<i64> = coarse.boundaries().iter().map(|b| b * to / from).collect();
                    let aligned = Dim::between(last.axes.clone(), &bounds);
                    x = x.to_layout(&x.layout().with_dim(x.ndim() - 1, aligned.clone()))?;
                    *last = aligned;
                }
                for interval in last.parts.iter_mut().flatten() {
                    *interval = Interval::new(interval.start * from / to, interval.len * from / to);
                }
            }
            let layout = x.layout().with_dims(dims);
            // Flat, since strides of dims of extent 1 are arbitrary, and libtorch looks at them.
            let flat =
                x.local().f_contiguous().and_then(|x| x.f_reshape([-1])).and_then(|x| x.f_view_dtype(kind));
            Ok(Self::new(torch(OP, flat.and_then(|y| y.f_reshape(layout.local_shape())))?, layout))
        })
    }

    /// The dims from `start` to `end` (both included) as one.
    ///
    /// # Errors
    ///
    /// Dims that do not exist, or in the wrong order.
    pub fn flatten(&self, start: i64, end: i64) -> Result<Self> {
        const OP: &str = "flatten";
        operator(OP, &[self], args!("start_dim": start, "end_dim": end), || {
            if self.ndim() == 0 {
                return self.reshape(&[1]);
            }
            let (first, last) = (resolve(OP, start, self.ndim())?, resolve(OP, end, self.ndim())?);
            if first > last {
                return refuse(OP, format!("dim {start} comes after dim {end}"));
            }
            let shape = self.shape();
            let merged: i64 = shape[first..=last].iter().product();
            self.reshape(&[&shape[..first], &[merged], &shape[last + 1..]].concat())
        })
    }
}

crate::register! {
    /// The bytes of the elements as elements of another dtype.
    "view_kind"(input; dtype) Boundaries: |call| call.tensor(0)?.view_kind(call.kind("dtype")?);
    /// The dims from `start_dim` to `end_dim` as one.
    "flatten"(input; start_dim, end_dim) Bytes(reshape::TORN, reshape::torn):
        |call| call.tensor(0)?.flatten(call.or("start_dim", 0)?, call.or("end_dim", -1)?);
    /// The dims in the order `dims`.
    "permute"(input; dims) Nothing: |call| call.tensor(0)?.permute(&call.get::<Vec<i64>>("dims")?);
    /// `dim0` and `dim1` exchanged.
    "transpose"(input; dim0, dim1) Nothing:
        |call| call.tensor(0)?.transpose(call.get("dim0")?, call.get("dim1")?);
    /// Removes the dims `dim` of extent 1, or all such dims.
    "squeeze"(input; dim) Squeezed: |call| call.tensor(0)?.squeeze(&call.list::<i64>("dim", Vec::new())?);
    /// A dim of extent 1 at `dim`.
    "unsqueeze"(input; dim) Nothing: |call| call.tensor(0)?.unsqueeze(call.get("dim")?);
    /// Dims of extent 1 repeated to the shape `size`.
    "expand"(input; size) Bytes("a sharded dim of extent 1 that grows", |call| Ok(broadcast(call))): |call| call.tensor(0)?.expand(&call.get::<Vec<i64>>("size")?);
    /// The tensor `repeats` times along each dim.
    "repeat"(input; repeats) Nothing: |call| call.tensor(0)?.repeat(&call.get::<Vec<i64>>("repeats")?);
}
