//! Distances between points, nearest neighbours, and neighbours within a radius.

use tch::{Kind, TchError, Tensor};

use super::by_name::{call, one, two};
use super::{Array, named, number, refuse};
use crate::dtypes::{Dtype, check_dtypes};
use crate::error::Result;

/// Distances and neighbours of points `[n, features]`. Indices are of dtype `Int64`.
///
/// # Errors
///
/// All methods fail alike: shapes or dtypes that do not fit, numbers out of range;
/// on sharded arrays also an exchange that fails.
#[expect(
    clippy::missing_errors_doc,
    reason = "all fail alike: shapes or kinds that do not fit, numbers out of range"
)]
pub trait Neighbours: Sized {
    /// ‖aᵢ − bⱼ‖ₚ: `a` `[…, n, features]`, `b` `[…, m, features]`, the result `[…, n, m]`.
    ///
    /// ```
    /// use isobar_array::Neighbours;
    /// use tch::Tensor;
    ///
    /// let a = Tensor::from_slice2(&[[0.0, 0.0], [3.0, 4.0]]);
    /// let distances = Neighbours::cdist(&a, &Tensor::from_slice2(&[[0.0, 0.0]]), 2.0)?;
    /// assert_eq!(distances, Tensor::from_slice2(&[[0.0], [5.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn cdist(a: &Self, b: &Self, p: f64) -> Result<Self>
    where
        Self: Array,
    {
        one("cdist", &[a, b], args!("p": number(p)))
    }

    /// The `k` points nearest to each of `queries` `[q, features]`: distances, ascending, and the points' numbers, both `[q, k]`.
    ///
    /// ```
    /// use isobar_array::Neighbours;
    /// use tch::Tensor;
    ///
    /// let points = Tensor::from_slice(&[0.0, 10.0, 4.0]).unsqueeze(1);
    /// let (distances, indices) = points.knn(&Tensor::from_slice(&[3.0]).unsqueeze(1), 2)?;
    /// assert_eq!(indices, Tensor::from_slice2(&[[2_i64, 0]]));
    /// assert_eq!(distances, Tensor::from_slice2(&[[1.0, 3.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn knn(&self, queries: &Self, k: i64) -> Result<(Self, Self)>
    where
        Self: Array,
    {
        two("knn", &[self, queries], args!("k": k))
    }

    /// All points within `radius` (inclusive) of each query: row q of a compressed sparse matrix has the entries from
    /// `offsets[q]` to `offsets[q + 1]`. Returns the offsets `[q + 1]`, the points' numbers and the distances, `[entries]`.
    ///
    /// ```
    /// use isobar_array::Neighbours;
    /// use tch::Tensor;
    ///
    /// let points = Tensor::from_slice2(&[[0.0], [1.0], [5.0]]);
    /// let queries = Tensor::from_slice2(&[[0.5], [9.0], [4.0]]);
    /// let [offsets, indices, distances] = points.ball_query(&queries, 1.0)?;
    /// assert_eq!(offsets, Tensor::from_slice(&[0_i64, 2, 2, 3]));
    /// assert_eq!(indices, Tensor::from_slice(&[0_i64, 1, 2]));
    /// assert_eq!(distances, Tensor::from_slice(&[0.5, 0.5, 1.0]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn ball_query(&self, queries: &Self, radius: f64) -> Result<[Self; 3]>
    where
        Self: Array,
    {
        call("ball_query", &[self, queries], args!("radius": number(radius)))
    }

    /// The first `max_points` points within `radius` of each query: their numbers `[q, max_points]` (−1 where there are no
    /// more), how many there are `[q]`, and the distances `[q, max_points]` (0 where there are no more).
    ///
    /// ```
    /// use isobar_array::Neighbours;
    /// use tch::Tensor;
    ///
    /// let points = Tensor::from_slice2(&[[0.0], [1.0], [5.0]]);
    /// let queries = Tensor::from_slice2(&[[0.5], [4.0]]);
    /// let [indices, counts, distances] = points.ball_query_limited(&queries, 1.0, 2)?;
    /// assert_eq!(indices, Tensor::from_slice2(&[[0_i64, 1], [2, -1]]));
    /// assert_eq!(counts, Tensor::from_slice(&[2_i64, 1]));
    /// assert_eq!(distances, Tensor::from_slice2(&[[0.5, 0.5], [1.0, 0.0]]));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    fn ball_query_limited(&self, queries: &Self, radius: f64, max_points: i64) -> Result<[Self; 3]>
    where
        Self: Array,
    {
        call(
            "ball_query_limited",
            &[self, queries],
            args!("radius": number(radius), "max_points": max_points),
        )
    }
}

/// Distances that a search computes at once.
const TILE: i64 = 1 << 21;

/// Returns the distances `[…, n, m]` of two sets of points in the norm `p`, from differences, so that close points keep their
/// digits. Dtypes of 16 bits, which libtorch has no distances of, are widened.
///
/// # Errors
///
/// libtorch refuses the shapes or the dtype.
pub fn distances(a: &Tensor, b: &Tensor, p: f64) -> Result<Tensor, TchError> {
    // By differences, whatever the numbers of points: mode 2 of libtorch.
    Tensor::f_cdist(&wide(a)?, &wide(b)?, p, 2)?.f_to_kind(a.kind())
}

/// Returns ranges of queries, first and number, whose distances to all `points` are computed at once.
pub fn query_tiles(queries: i64, points: i64) -> impl Iterator<Item = (i64, i64)> {
    let rows = (TILE / points.max(1)).max(1);
    (0..queries).step_by(rows as usize).map(move |first| (first, rows.min(queries - first)))
}

/// Returns the `k` smallest distances of each row and their columns; of equal ones those of lower columns, in no particular
/// order.
///
/// # Errors
///
/// More than there are columns.
pub fn smallest(distances: &Tensor, k: i64) -> Result<(Tensor, Tensor), TchError> {
    let (values, mut columns) = distances.f_topk(k, 1, false, true)?;
    // It takes any of those that are as far as the last: rows where there are more are sorted.
    let last = values.f_narrow(1, k - 1, 1)?;
    let as_near = distances.f_le_tensor(&last)?.f_sum_dim_intlist(1, false, Kind::Int64)?;
    let tied = as_near.f_gt(k)?.f_nonzero()?.f_squeeze_dim(1)?;
    if tied.size()[0] == 0 {
        return Ok((values, columns));
    }
    let (_, order) = distances.f_index_select(0, &tied)?.f_sort_stable(true, 1, false)?;
    let _ = columns.f_index_copy_(0, &tied, &order.f_narrow(1, 0, k)?)?;
    Ok((distances.f_gather(1, &columns, false)?, columns))
}

fn wide(x: &Tensor) -> Result<Tensor, TchError> {
    match x.kind() {
        Kind::Half | Kind::BFloat16 => x.f_to_kind(Kind::Float),
        _ => Ok(x.shallow_clone()),
    }
}

/// Calls `f` with the distances of some queries to all points, without a graph, and the number of the first.
fn each_tile(
    points: &Tensor,
    queries: &Tensor,
    mut f: impl FnMut(&Tensor, i64) -> Result<(), TchError>,
) -> Result<(), TchError> {
    let (points, queries) = (points.detach(), queries.detach());
    query_tiles(queries.size()[0], points.size()[0]).try_for_each(|(first, count)| {
        f(&distances(&queries.f_narrow(0, first, count)?, &points, 2.0)?, first)
    })
}

/// The columns of the `k` nearest points of each query, ascending; of those equally far, the lower ones first.
fn nearest(points: &Tensor, queries: &Tensor, k: i64) -> Result<Tensor, TchError> {
    let mut found = vec![Tensor::f_zeros([0, k], (Kind::Int64, queries.device()))?];
    each_tile(points, queries, |distances, _| {
        let (columns, _) = smallest(distances, k)?.1.f_sort(1, false)?;
        let (_, order) = distances.f_gather(1, &columns, false)?.f_sort_stable(true, 1, false)?;
        found.push(columns.f_gather(1, &order, false)?);
        Ok(())
    })?;
    Tensor::f_cat(&found, 0)
}

/// The distances of queries and points, row by row.
fn row_distances(points: &Tensor, queries: &Tensor) -> Result<Tensor, TchError> {
    let difference = wide(queries)?.f_sub(&wide(points)?)?;
    difference.f_norm_scalaropt_dim(2.0, [-1].as_slice(), false)?.f_to_kind(queries.kind())
}

/// Checks the shapes of points and queries.
fn check(op: &'static str, points: &Tensor, queries: &Tensor) -> Result<()> {
    match (&points.size()[..], &queries.size()[..]) {
        ([_, a], [_, b]) if a == b => Ok(()),
        (points, queries) => {
            let shapes = format!("points {points:?} and queries {queries:?}");
            refuse(op, format!("{shapes}; expected [n, features] and [q, features]"))
        }
    }
}

/// Pairs of a query and a point within the radius, in the order of the queries: the queries, the points, the distances.
fn within(points: &Tensor, queries: &Tensor, radius: f64) -> Result<[Tensor; 3], TchError> {
    let mut found = vec![Tensor::f_zeros([0, 2], (Kind::Int64, queries.device()))?];
    each_tile(points, queries, |distances, first| {
        let pairs = distances.f_le(radius)?.f_nonzero()?;
        let _ = pairs.f_select(1, 0)?.f_add_scalar_(first)?;
        found.push(pairs);
        Ok(())
    })?;
    let pairs = Tensor::f_cat(&found, 0)?;
    let (rows, columns) = (pairs.f_select(1, 0)?, pairs.f_select(1, 1)?);
    let chosen = row_distances(&points.f_index_select(0, &columns)?, &queries.f_index_select(0, &rows)?)?;
    Ok([rows, columns, chosen])
}

fn check_radius(radius: f64) -> Result<()> {
    if radius >= 0.0 {
        return Ok(());
    }
    refuse("ball_query", format!("a radius of {radius}; expected 0 or more"))
}

impl Neighbours for Tensor {
    fn cdist(a: &Self, b: &Self, p: f64) -> Result<Self> {
        let tensors = [("a", a.kind(), Dtype::Floating), ("b", b.kind(), Dtype::Operand)];
        check_dtypes("cdist", tensors, Tensor::device(a))?;
        named("cdist", &[a, b], distances(a, b, p))
    }

    fn knn(&self, queries: &Self, k: i64) -> Result<(Self, Self)> {
        const OP: &str = "knn";
        check(OP, self, queries)?;
        if k < 1 || k > self.size()[0] {
            return refuse(OP, format!("{k} neighbours of {} points", self.size()[0]));
        }
        let found = || {
            let columns = nearest(self, queries, k)?;
            let points = self.f_index_select(0, &columns.f_reshape([-1])?)?;
            let points = points.f_reshape([queries.size()[0], k, self.size()[1]])?;
            Ok((row_distances(&points, &queries.f_unsqueeze(1)?)?, columns))
        };
        named(OP, &[self, queries], found())
    }

    fn ball_query(&self, queries: &Self, radius: f64) -> Result<[Self; 3]> {
        const OP: &str = "ball_query";
        check(OP, self, queries)?;
        check_radius(radius)?;
        let found = || {
            let [rows, columns, chosen] = within(self, queries, radius)?;
            let counts = rows.f_bincount(None::<Tensor>, queries.size()[0])?;
            let first = Tensor::f_zeros([1], (Kind::Int64, rows.device()))?;
            let offsets = Tensor::f_cat(&[first, counts.f_cumsum(0, Kind::Int64)?], 0)?;
            Ok([offsets, columns, chosen])
        };
        named(OP, &[self, queries], found())
    }

    fn ball_query_limited(&self, queries: &Self, radius: f64, max_points: i64) -> Result<[Self; 3]> {
        const OP: &str = "ball_query";
        check(OP, self, queries)?;
        check_radius(radius)?;
        if max_points < 1 {
            return refuse(OP, format!("{max_points} points at most; expected 1 or more"));
        }
        let found = || {
            let [rows, columns, chosen] = within(self, queries, radius)?;
            let here = queries.size()[0];
            let counts = rows.f_bincount(None::<Tensor>, here)?;
            let starts = counts.f_cumsum(0, Kind::Int64)?.f_sub(&counts)?;
            let order = Tensor::f_arange(rows.size()[0], (Kind::Int64, rows.device()))?;
            let order = order.f_sub(&starts.f_index_select(0, &rows)?)?;
            let kept = order.f_lt(max_points)?.f_nonzero()?.f_reshape([-1])?;
            let pick = |x: &Tensor| x.f_index_select(0, &kept);
            let places = pick(&rows)?.f_mul_scalar(max_points)?.f_add(&pick(&order)?)?;
            let sparse = Tensor::f_zeros([here * max_points], (chosen.kind(), chosen.device()))?;
            let none = Tensor::f_full([here * max_points], -1, (Kind::Int64, chosen.device()))?;
            Ok([
                none.f_index_copy(0, &places, &pick(&columns)?)?.f_reshape([here, max_points])?,
                counts.f_clamp_max(max_points)?,
                sparse.f_index_add(0, &places, &pick(&chosen)?)?.f_reshape([here, max_points])?,
            ])
        };
        named(OP, &[self, queries], found())
    }
}
