//! Search of a rank's queries in a block of points.

use isobar_array::kernel::{distances, query_tiles, smallest};
use tch::{Kind, TchError, Tensor};

use super::torch;
use crate::error::Result;

/// Pairs of a query and a point, by query; of each query in the order that the search wants.
pub(super) struct Pairs {
    /// The number of the query on this rank.
    pub(super) rows: Tensor,
    /// The point's global number.
    pub(super) indices: Tensor,
    pub(super) distances: Tensor,
    /// The point's coordinates.
    pub(super) points: Tensor,
}

/// Search criterion: merges earlier results with those of a block.
pub(super) trait Search {
    /// Takes a block of points in, which begins at that global number.
    fn block(
        &self,
        queries: &Tensor,
        block: &Tensor,
        start: i64,
        before: &Pairs,
        moves_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Pairs>;
}

/// The nearest ones; of those equally far, the ones of lower numbers.
pub(super) struct Nearest {
    pub(super) k: i64,
}

/// All within a radius, or the first ones by number.
pub(super) struct Within {
    pub(super) radius: f64,
    pub(super) limit: Option<i64>,
}

impl Pairs {
    pub(super) fn nothing(points: &Tensor) -> Result<Self, TchError> {
        let (numbers, values) = ((Kind::Int64, points.device()), (points.kind(), points.device()));
        Ok(Self {
            rows: Tensor::f_zeros([0], numbers)?,
            indices: Tensor::f_zeros([0], numbers)?,
            distances: Tensor::f_zeros([0], values)?,
            points: Tensor::f_zeros([0, points.size()[1]], values)?,
        })
    }

    /// Returns the number of results of each query.
    pub(super) fn counts(&self, queries: i64) -> Result<Tensor, TchError> {
        self.rows.f_bincount(None::<Tensor>, queries)
    }

    /// Returns the place of each entry among those of its query.
    pub(super) fn places(&self, queries: i64) -> Result<Tensor, TchError> {
        let counts = self.counts(queries)?;
        let first = counts.f_cumsum(0, Kind::Int64)?.f_sub(&counts)?;
        let all = Tensor::f_arange(self.rows.size()[0], (Kind::Int64, self.rows.device()))?;
        all.f_sub(&first.f_index_select(0, &self.rows)?)
    }

    fn join(all: &[&Self]) -> Result<Self, TchError> {
        let cat = |part: fn(&Self) -> &Tensor| {
            Tensor::f_cat(&all.iter().map(|one| part(one)).collect::<Vec<_>>(), 0)
        };
        Ok(Self {
            rows: cat(|one| &one.rows)?,
            indices: cat(|one| &one.indices)?,
            distances: cat(|one| &one.distances)?,
            points: cat(|one| &one.points)?,
        })
    }

    fn select(&self, order: &Tensor) -> Result<Self, TchError> {
        let take = |part: &Tensor| part.f_index_select(0, order);
        Ok(Self {
            rows: take(&self.rows)?,
            indices: take(&self.indices)?,
            distances: take(&self.distances)?,
            points: take(&self.points)?,
        })
    }

    /// By query, and within it by what `keys` give, the last key first.
    fn sort(&self, keys: &[&Tensor]) -> Result<Self, TchError> {
        let mut order: Option<Tensor> = None;
        for key in keys.iter().copied().chain([&self.rows]) {
            let key = match &order {
                Some(order) => key.f_index_select(0, order)?,
                None => key.shallow_clone(),
            };
            let (_, next) = key.f_sort_stable(true, 0, false)?;
            order = Some(match order {
                Some(order) => order.f_index_select(0, &next)?,
                None => next,
            });
        }
        order.map_or_else(|| self.select(&self.rows), |order| self.select(&order))
    }

    /// The first `limit` entries of each query.
    fn first(self, limit: i64, queries: i64) -> Result<Self, TchError> {
        let kept = self.places(queries)?.f_lt(limit)?.f_nonzero()?.f_squeeze_dim(1)?;
        if kept.size()[0] == self.rows.size()[0] { Ok(self) } else { self.select(&kept) }
    }
}

/// Calls `f` with distances of some queries to all points of a block, and the first query's number.
fn tiles(
    queries: &Tensor,
    block: &Tensor,
    moves_on: &mut dyn FnMut() -> Result<()>,
    mut f: impl FnMut(&Tensor, i64) -> Result<(), TchError>,
) -> Result<()> {
    for (from, count) in query_tiles(queries.size()[0], block.size()[0]) {
        let some = torch(queries.f_narrow(0, from, count))?;
        torch(distances(&some, block, 2.0).and_then(|distances| f(&distances, from)))?;
        moves_on()?;
    }
    Ok(())
}

/// The pairs at these places of a tile.
fn pairs(
    distances: Tensor,
    rows: Tensor,
    columns: &Tensor,
    block: &Tensor,
    start: i64,
) -> Result<Pairs, TchError> {
    Ok(Pairs {
        rows,
        indices: columns.f_add_scalar(start)?,
        distances,
        points: block.f_index_select(0, columns)?,
    })
}

impl Search for Nearest {
    fn block(
        &self,
        queries: &Tensor,
        block: &Tensor,
        start: i64,
        before: &Pairs,
        moves_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Pairs> {
        let k = self.k.min(block.size()[0]);
        let mut parts = Vec::new();
        tiles(queries, block, moves_on, |distances, from| {
            let count = distances.size()[0];
            let (values, columns) = smallest(distances, k)?;
            let first = Tensor::f_arange_start(from, from + count, (Kind::Int64, block.device()))?;
            let rows = first.f_unsqueeze(1)?.f_expand([count, k], false)?.f_reshape([-1])?;
            parts.push(pairs(values.f_reshape([-1])?, rows, &columns.f_reshape([-1])?, block, start)?);
            Ok(())
        })?;
        let merge = || {
            let all = Pairs::join(&std::iter::once(before).chain(&parts).collect::<Vec<_>>())?;
            all.sort(&[&all.indices, &all.distances])?.first(self.k, queries.size()[0])
        };
        torch(merge())
    }
}

impl Search for Within {
    fn block(
        &self,
        queries: &Tensor,
        block: &Tensor,
        start: i64,
        before: &Pairs,
        moves_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Pairs> {
        let mut parts = Vec::new();
        tiles(queries, block, moves_on, |distances, from| {
            let near = distances.f_le(self.radius)?.f_nonzero()?;
            let (rows, columns) = (near.f_select(1, 0)?, near.f_select(1, 1)?);
            let values = distances.f_reshape([-1])?;
            let values = values.f_index_select(0, &rows.f_mul_scalar(block.size()[0])?.f_add(&columns)?)?;
            let found = pairs(values, rows, &columns, block, start)?;
            let found = match self.limit {
                Some(limit) => found.first(limit, distances.size()[0])?,
                None => found,
            };
            parts.push(Pairs { rows: found.rows.f_add_scalar(from)?, ..found });
            Ok(())
        })?;
        let merge = || {
            let all = Pairs::join(&std::iter::once(before).chain(&parts).collect::<Vec<_>>())?;
            let sorted = all.sort(&[&all.indices])?;
            match self.limit {
                Some(limit) => sorted.first(limit, queries.size()[0]),
                None => Ok(sorted),
            }
        };
        torch(merge())
    }
}
