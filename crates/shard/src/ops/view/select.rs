//! Parts of a tensor: elements stay on their ranks.

use serde_json::Value;
use tch::Tensor;

use crate::dense::named;
use crate::error::Result;
use crate::layout::{Dim, Interval};
use crate::ops::{operator, refuse, resolve, torch};
use crate::rules::Call;
use crate::tensor::ShardTensor;
use crate::window::{HaloSpec, WindowRun, Windows, fetch};

impl ShardTensor {
    /// The elements `start, start + step, …` before `end` along `dim`; negative places count from the end, and places beyond
    /// the ends are these, as in Python. Nothing is sent.
    ///
    /// # Errors
    ///
    /// A dim that does not exist, a step below 1.
    pub fn slice(&self, dim: i64, start: Option<i64>, end: Option<i64>, step: i64) -> Result<Self> {
        const OP: &str = "slice";
        operator(OP, &[self], args!("dim": dim, "start": start, "end": end, "step": step), || {
            let dim = resolve(OP, dim, self.ndim())?;
            if step < 1 {
                return refuse(OP, format!("a step of {step}; expected at least 1"));
            }
            let extent = self.shape()[dim];
            let place = |at: i64| if at < 0 { (at + extent).max(0) } else { at.min(extent) };
            let start = place(start.unwrap_or(0));
            let end = place(end.unwrap_or(extent)).max(start);
            let split = &self.layout().dims()[dim];
            let layout = self.layout().with_dim(dim, kept(split, start, end, step));
            let own = self.layout().intervals()[dim];
            let mut pieces = Vec::new();
            let mut local = 0;
            for interval in own {
                if let Some((first, count)) = hits(*interval, start, end, step) {
                    let from = local + start + first * step - interval.start;
                    pieces.push((from, from + (count - 1) * step + 1));
                }
                local += interval.len;
            }
            self.viewed(OP, layout, |x| {
                let piece = |&(from, until): &(i64, i64)| x.f_slice(dim as i64, from, until, step);
                match &pieces[..] {
                    [] => x.f_narrow(dim as i64, 0, 0),
                    [one] => piece(one),
                    many => {
                        Tensor::f_cat(&many.iter().map(piece).collect::<Result<Vec<_>, _>>()?, dim as i64)
                    }
                }
            })
        })
    }

    /// `length` elements from `start` along `dim`. Nothing is sent.
    ///
    /// # Errors
    ///
    /// A dim or elements that do not exist.
    pub fn narrow(&self, dim: i64, start: i64, length: i64) -> Result<Self> {
        const OP: &str = "narrow";
        operator(OP, &[self], args!("dim": dim, "start": start, "length": length), || {
            let extent = self.shape()[resolve(OP, dim, self.ndim())?];
            let start = if start < 0 { start + extent } else { start };
            if start < 0 || length < 0 || start + length > extent {
                return refuse(OP, format!("{length} elements from {start} of {extent}"));
            }
            self.slice(dim, Some(start), Some(start + length), 1)
        })
    }

    /// The element `index` along `dim`, which disappears: replicated along the axes that split the dim, whose owner sends it.
    ///
    /// # Errors
    ///
    /// A dim or an element that does not exist; the errors of the exchange.
    pub fn select(&self, dim: i64, index: i64) -> Result<Self> {
        const OP: &str = "select";
        operator(OP, &[self], args!("dim": dim, "index": index), || {
            let dim = resolve(OP, dim, self.ndim())?;
            let extent = self.shape()[dim];
            if !(-extent..extent).contains(&index) {
                return refuse(OP, format!("index {index} of {extent} elements"));
            }
            let index = index.rem_euclid(extent);
            let mut dims = self.layout().dims().to_vec();
            dims.remove(dim);
            if !self.layout().is_sharded(dim) {
                return self.viewed(OP, self.layout().with_dims(dims), |x| x.f_select(dim as i64, index));
            }
            let x = self.resolved()?;
            let one = HaloSpec::everywhere(vec![WindowRun::Take { start: index, len: 1, step: 1 }]);
            let mut windows = Windows::own(x.layout()).with(dim, one);
            windows.replicated.extend(&x.layout().dims()[dim].axes);
            let y = fetch(x.local(), x.layout(), &windows, 0.0)?;
            let y = named(OP, &[&y], y.f_squeeze_dim(dim as i64))?;
            Ok(Self::new(y, x.layout().with_dims(dims)))
        })
    }

    /// Returns the elements along `dim`, each a tensor without that dim, as `torch.unbind`. A sharded `dim` is first
    /// resharded onto the widest other dim by one all-to-all, or gathered if all other dims have extent 1.
    ///
    /// # Errors
    ///
    /// A dim that does not exist; the errors of the exchange.
    pub fn unbind(&self, dim: i64) -> Result<Vec<Self>> {
        const OP: &str = "unbind";
        operator(OP, &[self], args!("dim": dim), || {
            let dim = resolve(OP, dim, self.ndim())?;
            let x = self.resolved()?;
            let others = (0..x.ndim()).filter(|&other| other != dim);
            let widest = others.max_by_key(|&other| (x.shape()[other], !x.layout().is_sharded(other)));
            let x = match widest {
                Some(other) if x.layout().is_sharded(dim) && x.shape()[other] > 1 => {
                    x.to_layout(&x.layout().all_to_all(dim, other))?
                }
                _ => x.replicate_where(|d| d == dim)?,
            };
            let mut dims = x.layout().dims().to_vec();
            dims.remove(dim);
            let layout = x.layout().with_dims(dims);
            let parts = torch(OP, x.local().f_unbind(dim as i64))?;
            Ok(parts.into_iter().map(|part| Self::new(part, layout.clone())).collect())
        })
    }

    /// Parts of these sizes along `dim`. Nothing is sent.
    ///
    /// # Errors
    ///
    /// Sizes that do not add up to the extent.
    pub fn split(&self, sizes: &[i64], dim: i64) -> Result<Vec<Self>> {
        const OP: &str = "split";
        operator(OP, &[self], args!("sizes": sizes, "dim": dim), || {
            let extent = self.shape()[resolve(OP, dim, self.ndim())?];
            if sizes.iter().sum::<i64>() != extent || sizes.iter().any(|&size| size < 0) {
                return refuse(OP, format!("sizes {sizes:?} do not add up to {extent}"));
            }
            let mut at = 0;
            let parts = sizes.iter().map(|&size| {
                at += size;
                self.narrow(dim, at - size, size)
            });
            parts.collect()
        })
    }

    /// At most `chunks` parts of equal size, the last one shorter, as `torch.chunk`; exactly `chunks` empty parts of an extent of 0.
    /// Nothing is sent.
    ///
    /// # Errors
    ///
    /// A dim that does not exist, no chunks.
    pub fn chunk(&self, chunks: usize, dim: i64) -> Result<Vec<Self>> {
        const OP: &str = "chunk";
        operator(OP, &[self], args!("chunks": chunks, "dim": dim), || {
            let extent = self.shape()[resolve(OP, dim, self.ndim())?];
            if chunks == 0 {
                return refuse(OP, "0 chunks; expected at least 1");
            }
            let mut sizes = isobar_collectives::chunk(extent, chunks);
            sizes.retain(|&size| size > 0);
            // Of no elements, as many empty parts as were asked for.
            if extent == 0 {
                sizes = vec![0; chunks];
            }
            self.split(&sizes, dim)
        })
    }
}

/// Returns the split of the elements `start, start + step, …` before `end` if they stay on their ranks.
fn kept(dim: &Dim, start: i64, end: i64, step: i64) -> Dim {
    let mut next = 0;
    let stay = |part: &Vec<Interval>| {
        let found = part.iter().filter_map(|interval| hits(*interval, start, end, step));
        let mut found: Vec<Interval> =
            crate::layout::join(found.map(|(first, count)| Interval::new(first, count)));
        match found.last_mut() {
            Some(last) if last.len > 0 => next = last.end(),
            Some(last) => last.start = next,
            None => {}
        }
        found
    };
    Dim { axes: dim.axes.clone(), parts: dim.parts.iter().map(stay).collect() }
}

/// Finds the `start + i · step` below `end` that lie in the interval: the first i, and their number.
fn hits(interval: Interval, start: i64, end: i64, step: i64) -> Option<(i64, i64)> {
    let first = (interval.start.max(start) - start + step - 1) / step;
    let last = (interval.end().min(end) - 1 - start).div_euclid(step);
    (interval.len > 0 && first <= last).then(|| (first, last - first + 1))
}

crate::register! {
    /// The slice `index` of `dim`.
    "select"(input; dim, index) Selected: |call| call.tensor(0)?.select(call.get("dim")?, call.get("index")?);
    /// Every `step`-th slice of `dim` from `start` to `end`.
    "slice"(input; dim, start, end, step) Nothing: |call| {
        let (start, end) = (call.optional("start")?, call.optional("end")?);
        call.tensor(0)?.slice(call.get("dim")?, start, end, call.or("step", 1)?)
    };
    /// `length` slices of `dim` from `start`.
    "narrow"(input; dim, start, length) Nothing:
        |call| call.tensor(0)?.narrow(call.get("dim")?, call.get("start")?, call.get("length")?);
    /// All slices of `dim` (0 if not given), each a tensor.
    "unbind"(input; dim) Selected: |call| call.tensor(0)?.unbind(call.or("dim", 0)?);
    /// Parts of `dim` (0 if not given) of the extents `sizes` or `split_size_or_sections`, or of one extent, the last part shorter.
    "split"(input; sizes, dim; split_size_or_sections) Nothing: |call| split(call);
    /// At most `chunks` parts of `dim` (0 if not given).
    "chunk"(input; chunks, dim) Nothing: |call| call.tensor(0)?.chunk(call.get("chunks")?, call.or("dim", 0)?);
}

/// Splits into parts of given extents, or of one.
fn split(call: &Call<'_>) -> Result<Vec<ShardTensor>> {
    call.either("sizes", "split_size_or_sections")?;
    let name = if call.has("split_size_or_sections")? { "split_size_or_sections" } else { "sizes" };
    let (x, dim) = (call.tensor(0)?, call.or("dim", 0)?);
    let Some(size) = call.optional::<Value>(name)?.and_then(|value| value.as_i64()) else {
        return x.split(&call.get::<Vec<i64>>(name)?, dim);
    };
    let extent = x.shape()[resolve("split", dim, x.ndim())?];
    if size < 1 {
        return call.refuse(format!("\"{name}\" is {size}; expected at least 1, or a list of extents"));
    }
    let starts = (0..extent.max(1)).step_by(size as usize);
    let sizes: Vec<i64> = starts.map(|start| size.min(extent - start)).collect();
    x.split(&sizes, dim)
}
