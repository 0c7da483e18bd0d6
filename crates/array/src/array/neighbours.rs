//! Distances between points, nearest neighbours, and neighbours within a radius.

use tch::{Kind, TchError, Tensor};

use super::by_name::{call, one, two};
use super::{Array, named, number, refuse};
use crate::dtypes::{Dtype, check_dtypes};
use crate::error::Result;

/// Distances and neighbours of points `[n, features]`. Indices are of dtype `Int64`.
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

/// Distances from differences, so that close points keep their digits.
fn distances(a: &Tensor, b: &Tensor, p: f64) -> Result<Tensor, TchError> {
    let kind = a.kind();
    match kind {
        // libtorch lacks these two.
        Kind::Half | Kind::BFloat16 => {
            let wide = |x: &Tensor| x.f_to_kind(Kind::Float);
            Tensor::f_cdist(&wide(a)?, &wide(b)?, p, 2)?.f_to_kind(kind)
        }
        _ => Tensor::f_cdist(a, b, p, 2),
    }
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
    let all = distances(queries, points, 2.0)?;
    let pairs = all.f_le(radius)?.f_nonzero()?;
    let (rows, columns) = (pairs.f_select(1, 0)?, pairs.f_select(1, 1)?);
    let places = rows.f_mul_scalar(points.size()[0])?.f_add(&columns)?;
    let chosen = all.f_reshape([-1])?.f_index_select(0, &places)?;
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
        let nearest = || {
            let (values, places) = distances(queries, self, 2.0)?.f_sort_stable(true, 1, false)?;
            Ok((values.f_narrow(1, 0, k)?, places.f_narrow(1, 0, k)?))
        };
        named(OP, &[self, queries], nearest())
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
