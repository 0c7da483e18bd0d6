//! Orders: sort, topk.

use isobar_collectives::send_recv;
use isobar_torch::guard::NoGrad;
use tch::{Kind, TchError, Tensor};

use super::own_indices;
use super::route::Owners;
use crate::error::Result;
use crate::layout::Dim;
use crate::ops::{operator, refuse, resolve, torch};
use crate::tensor::ShardTensor;

impl ShardTensor {
    /// The elements in order along `dim`, and where they were (`Int64`); equal ones keep their order. Laid out as the tensor.
    ///
    /// Along a split dim the rows are exchanged for columns where there are other dims, so that each rank sorts whole rows of
    /// some columns; a single row is sorted by exchanges of neighbours (odd-even merge-split). No rank holds the whole.
    ///
    /// # Errors
    ///
    /// A dim that does not exist; dtypes without an order; the errors of the exchange.
    pub fn sort(&self, dim: i64, descending: bool) -> Result<(Self, Self)> {
        const OP: &str = "sort";
        operator(OP, &[self], args!("dim": dim, "descending": descending), || {
            let at = resolve(OP, dim, self.ndim())?;
            let x = self.resolved()?;
            if !x.layout().is_sharded(at) || x.layout().numel() == 0 {
                let (values, places) = torch(OP, x.local().f_sort_stable(true, at as i64, descending))?;
                return Ok((Self::new(values, x.layout().clone()), Self::new(places, x.layout().clone())));
            }
            let others = (0..x.ndim()).filter(|&d| d != at);
            let widest = others.max_by_key(|&d| (x.shape()[d], !x.layout().is_sharded(d)));
            match widest.filter(|&d| x.shape()[d] > 1) {
                Some(other) => {
                    let columns = x.layout().all_to_all(at, other);
                    let (values, places) = x.to_layout(&columns)?.sort(dim, descending)?;
                    Ok((values.to_layout(x.layout())?, places.to_layout(x.layout())?))
                }
                None => {
                    let row = x.consecutive()?.reshape(&[-1])?;
                    let places = sorted_places(&row.detach(), descending)?;
                    let values = row.index_select(0, &places)?;
                    let shape = x.shape();
                    let back = |y: Self| y.reshape(shape)?.to_layout(x.layout());
                    Ok((back(values)?, back(places)?))
                }
            }
        })
    }

    /// The `k` greatest (or least) elements along `dim` in order, and where they are (`Int64`). Of a split dim, ranks exchange
    /// their own `k` best, and the result is replicated along its axes.
    ///
    /// # Errors
    ///
    /// A dim that does not exist, more elements than there are; the errors of the exchange.
    pub fn topk(&self, k: i64, dim: i64, largest: bool) -> Result<(Self, Self)> {
        const OP: &str = "topk";
        operator(OP, &[self], args!("k": k, "dim": dim, "largest": largest), || {
            let at = resolve(OP, dim, self.ndim())?;
            if !(0..=self.shape()[at]).contains(&k) {
                return refuse(OP, format!("{k} of {} elements", self.shape()[at]));
            }
            let x = self.resolved()?;
            let own = k.min(x.local_shape()[at]);
            let (values, places) = torch(OP, x.local().f_topk(own, at as i64, largest, true))?;
            if !x.layout().is_sharded(at) {
                let layout = x.layout().with_dim(at, Dim::whole(k));
                return Ok((Self::new(values, layout.clone()), Self::new(places, layout)));
            }
            let split = &x.layout().dims()[at];
            let sizes: Vec<i64> = split.sizes().iter().map(|size| k.min(*size)).collect();
            let candidates = x.layout().with_dim(at, Dim::consecutive(split.axes.clone(), &sizes));
            let table = torch(OP, own_indices(x.layout(), at, x.device()))?;
            let global = torch(OP, table.f_take(&places))?;
            let values = Self::new(values, candidates.clone()).replicate_where(|d| d == at)?;
            let places = Self::new(global, candidates).replicate_where(|d| d == at)?;
            let (best, which) = torch(OP, values.local().f_topk(k, at as i64, largest, true))?;
            let places = torch(OP, places.local().f_gather(at as i64, &which, false))?;
            let layout = values.layout().with_dim(at, Dim::whole(k));
            Ok((Self::new(best, layout.clone()), Self::new(places, layout)))
        })
    }
}

/// Returns the source positions of a sorted row's elements.
fn sorted_places(row: &ShardTensor, descending: bool) -> Result<ShardTensor> {
    const OP: &str = "sort";
    let _guard = NoGrad::new();
    let layout = row.layout();
    let owners = Owners::new(layout, 0)?;
    let (parts, own) = (owners.sizes.len(), owners.own_part());
    // Equal blocks, so that neighbours' merges sort the whole: shorter ones are filled up with elements that come last.
    let block = owners.sizes.iter().copied().max().unwrap_or(0);
    let fill = block - owners.sizes[own];
    let keys = torch(OP, row.local().f_constant_pad_nd([0, fill]))?;
    let places = torch(OP, own_indices(layout, 0, row.device()))?;
    let places = torch(OP, fill_places(&places, fill))?;
    let mut items = torch(OP, in_order([keys, places], descending))?;
    for round in 0..parts {
        let partner = if own % 2 == round % 2 { own + 1 } else { own.wrapping_sub(1) };
        if partner >= parts {
            continue;
        }
        let peer = owners.rank(partner);
        let theirs = items
            .iter()
            .map(|item| Ok(send_recv(item, Some(peer), Some(peer), &[block], &owners.group)?))
            .collect::<Result<Vec<_>>>()?;
        let pair = |index: usize| Tensor::f_cat(&[&items[index], &theirs[index]], 0);
        let both = torch(OP, (|| Ok([pair(0)?, pair(1)?]))())?;
        let merged = torch(OP, in_order(both, descending))?;
        let start = if own < partner { 0 } else { block };
        let half = |item: &Tensor| item.f_narrow(0, start, block);
        items = torch(OP, (|| Ok([half(&merged[0])?, half(&merged[1])?]))())?;
    }
    let total = layout.shape()[0];
    let sizes: Vec<i64> = (0..parts as i64).map(|part| (total - part * block).clamp(0, block)).collect();
    let sorted = layout.with_dims(vec![Dim::consecutive(layout.dims()[0].axes.clone(), &sizes)]);
    let local = torch(OP, items[1].f_narrow(0, 0, sizes[own]))?;
    ShardTensor::new(local, sorted).to_layout(layout)
}

/// Place of a padding element, which sorts behind all others.
const NOWHERE: i64 = i64::MAX;

fn fill_places(places: &Tensor, fill: i64) -> Result<Tensor, TchError> {
    let nowhere = Tensor::f_full([fill], NOWHERE, (Kind::Int64, places.device()))?;
    Tensor::f_cat(&[places, &nowhere], 0)
}

/// Keys and places in order: those that fill up a block last, equal keys by place.
fn in_order(items: [Tensor; 2], descending: bool) -> Result<[Tensor; 2], TchError> {
    let by = |[keys, places]: &[Tensor; 2], order: &Tensor| -> Result<[Tensor; 2], TchError> {
        Ok([keys.f_index_select(0, order)?, places.f_index_select(0, order)?])
    };
    let items = by(&items, &items[1].f_argsort_stable(true, 0, false)?)?;
    let items = by(&items, &items[0].f_argsort_stable(true, 0, descending)?)?;
    let fills = items[1].f_eq(NOWHERE)?.f_to_kind(Kind::Int64)?;
    by(&items, &fills.f_argsort_stable(true, 0, false)?)
}

crate::register! {
    /// The elements along `dim` (the last if not given) in order, and their indices; equal ones keep their order (`stable`).
    "sort"(input: NotComplex; dim, descending; stable) Sorted: |call| {
        // The order is stable without it, too.
        let _ = call.or("stable", false)?;
        call.tensor(0)?.sort(call.or("dim", -1)?, call.or("descending", false)?)
    };
    /// The `k` greatest or least elements along `dim` (the last if not given) in order, and their indices.
    "topk"(input: Real; k, dim, largest; sorted) Best: |call| {
        call.only("sorted", true)?;
        call.tensor(0)?.topk(call.get("k")?, call.or("dim", -1)?, call.or("largest", true)?)
    };
}
