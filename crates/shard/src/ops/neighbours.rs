//! Distances between points, nearest neighbours, and neighbours within a radius.

mod ring_search;
mod search;

use isobar_array::kernel::{distances, number};
use tch::{Kind, TchError, Tensor};

use self::ring_search::{RingSchedule, Selection};
use self::search::{Nearest, Pairs, Within};
use super::attention::plan::refined;
use super::attention::ring::Ring;
use super::contract::{Factor, contract};
use super::{operator, refuse};
use crate::error::Result;
use crate::layout::{Dim, Interval, Layout};
use crate::promote::Operand;
use crate::tensor::{ShardTensor, same_mesh};

/// The points within a radius of each query, all of them: row q of a compressed sparse matrix has the entries from
/// `offsets[q]` to `offsets[q + 1]`, in the order of the points.
pub struct Ball {
    /// `[queries + 1]`, of dtype `Int64`; split as the queries, the last number with the last part.
    pub offsets: ShardTensor,
    /// The points' global numbers, `[entries]`, of dtype `Int64`: each rank has those of its queries.
    pub indices: ShardTensor,
    /// `[entries]`, laid out alike.
    pub distances: ShardTensor,
}

/// The first points within a radius of each query, in the order of the points.
pub struct LimitedBall {
    /// The points' global numbers, `[queries, max_points]`, of dtype `Int64`; −1 where there are no more.
    pub indices: ShardTensor,
    /// Number of neighbours, at most `max_points`: `[queries]`, dtype `Int64`.
    pub counts: ShardTensor,
    /// `[queries, max_points]`; 0 where there are no more.
    pub distances: ShardTensor,
}

impl From<Ball> for [ShardTensor; 3] {
    fn from(found: Ball) -> Self {
        [found.offsets, found.indices, found.distances]
    }
}

impl From<LimitedBall> for [ShardTensor; 3] {
    fn from(found: LimitedBall) -> Self {
        [found.indices, found.counts, found.distances]
    }
}

impl ShardTensor {
    /// ‖aᵢ − bⱼ‖ₚ: `a` `[…, n, features]`, `b` `[…, m, features]`, the result `[…, n, m]`; dims before them are broadcast. From
    /// differences, not from products, so that close points keep their digits. The gradient at distance zero is zero, as
    /// libtorch's.
    ///
    /// The result is sharded like the rows of `a` and of `b`; if both are sharded over the same axis, the smaller is gathered.
    /// Sharded features are gathered. All ranks of the mesh must call.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a negative `p`; different meshes; the errors of the exchange.
    pub fn cdist(a: &Self, b: &dyn Operand, p: f64) -> Result<Self> {
        let b = &*b.promote("cdist", a)?;
        operator("cdist", &[a, b], args!("p": number(p)), || {
            let features = |x: &Self| x.shape().last().copied();
            if a.ndim() < 2 || b.ndim() < 2 || features(a) != features(b) {
                let shapes = format!("{:?} and {:?}", a.shape(), b.shape());
                return refuse("cdist", format!("{shapes}: expected […, n, features] and […, m, features]"));
            }
            if p.is_nan() || p < 0.0 {
                return refuse("cdist", format!("p = {p}: expected 0 or more"));
            }
            same_mesh("cdist", &[a, b])?;
            let ready = |x: &Self| x.resolved()?.replicate_where(|dim| dim + 1 == x.ndim());
            let (a, b) = (ready(a)?, ready(b)?);
            let batch = |x: &Self| (0..x.ndim() - 2).rev().filter_map(|i| char::from_u32(0x100 + i as u32));
            let labels = |x: &Self, rest: [char; 2]| batch(x).chain(rest).collect::<Vec<char>>();
            let factor = |tensor, labels| Factor { tensor, labels, added: false };
            let longer = if a.ndim() > b.ndim() { &a } else { &b };
            let factors = [factor(&a, labels(&a, ['n', 'k'])), factor(&b, labels(&b, ['m', 'k']))];
            contract("cdist", &factors, &labels(longer, ['n', 'm']), as_given, |t| distances(&t[0], &t[1], p))
        })
    }

    /// The `k` points nearest to each query by Euclidean distance: `points` `[n, features]`, `queries` `[q, features]`; the
    /// distances `[q, k]`, ascending, and the points' global numbers `[q, k]` of dtype `Int64`. Of points equally far, those
    /// of lower number come first: the result is the same on every layout.
    ///
    /// Points and queries may be split in parts of any sizes; `k` may exceed a part. Results are split as the queries, and
    /// over the axes that split the points. Split points travel while the block at hand is searched: a rank receives them
    /// once, and backward their gradients once. Distances have gradients to both (zero at distance zero), and these again.
    /// All ranks of the mesh call.
    ///
    /// ```
    /// use isobar_collectives::Group;
    /// use isobar_mesh::DeviceMesh;
    /// use isobar_shard::{Placement, ShardTensor};
    /// use tch::Tensor;
    ///
    /// let mesh = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
    /// let shard = |x: &[f64]| {
    ///     let x = Tensor::from_slice(x).unsqueeze(1);
    ///     ShardTensor::distribute(&x, &mesh, &[Placement::Shard(0)])
    /// };
    /// let (distances, indices) = shard(&[0.0, 10.0, 4.0])?.knn(&shard(&[3.0])?, 2)?;
    /// assert_eq!(Vec::<i64>::try_from(indices.local().flatten(0, -1))?, [2, 0]);
    /// assert_eq!(Vec::<f64>::try_from(distances.local().flatten(0, -1))?, [1.0, 3.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Shapes or dtypes that do not fit; more neighbours than points; different meshes; the errors of the exchange.
    pub fn knn(&self, queries: &dyn Operand, k: i64) -> Result<(Self, Self)> {
        let queries = &*queries.promote("knn", self)?;
        operator("knn", &[self, queries], args!("k": k), || {
            let search = Search::new("knn", self, queries)?;
            if k < 1 || k > self.shape()[0] {
                return refuse("knn", format!("{k} neighbours of {} points", self.shape()[0]));
            }
            let (found, distances) = search.run(Nearest { k })?;
            let layout = search.rows(&[k]);
            let shape = layout.local_shape();
            let distances = torch(distances.f_reshape(shape))?;
            let indices = torch(found.indices.f_reshape(shape))?;
            Ok((Self::new(distances, layout.clone()), Self::new(indices, layout)))
        })
    }

    /// All points within `radius` (inclusive) of each query; shapes, layouts, communication and gradients as for
    /// [`knn`](Self::knn). One exchange of the ranks' numbers of entries is added. All ranks of the mesh call.
    ///
    /// # Errors
    ///
    /// Shapes or dtypes that do not fit; a radius that is negative or not a number; different meshes; the errors of the
    /// exchange.
    pub fn ball_query(&self, queries: &dyn Operand, radius: f64) -> Result<Ball> {
        let queries = &*queries.promote("ball_query", self)?;
        let parts = operator("ball_query", &[self, queries], args!("radius": number(radius)), || {
            check_radius(radius)?;
            let search = Search::new("ball_query", self, queries)?;
            let (found, distances) = search.run(Within { radius, limit: None })?;
            let (entries, first) = search.entries(found.indices.size()[0])?;
            let counts = torch(found.counts(search.queries_here()))?;
            let (rows, last) = search.row_bounds();
            let ends = torch(counts.f_cumsum(0, Kind::Int64).and_then(|ends| ends.f_add_scalar(first)))?;
            let mut offsets = torch(ends.f_sub(&counts))?;
            if last {
                let total = torch(Tensor::f_full([1], entries.shape()[0], (Kind::Int64, ends.device())))?;
                offsets = torch(Tensor::f_cat(&[offsets, total], 0))?;
            }
            let indices = Self::new(found.indices, entries.clone());
            Ok([Self::new(offsets, rows), indices, Self::new(distances, entries)])
        });
        let [offsets, indices, distances] = parts?;
        Ok(Ball { offsets, indices, distances })
    }

    /// The first `max_points` points within `radius` (inclusive) of each query, by their numbers; else as
    /// [`ball_query`](Self::ball_query), and nothing is exchanged but points.
    ///
    /// # Errors
    ///
    /// As [`ball_query`](Self::ball_query); a limit below 1.
    pub fn ball_query_limited(
        &self,
        queries: &dyn Operand,
        radius: f64,
        max_points: i64,
    ) -> Result<LimitedBall> {
        let queries = &*queries.promote("ball_query", self)?;
        let args = args!("radius": number(radius), "max_points": max_points);
        let parts = operator("ball_query_limited", &[self, queries], args, || {
            check_radius(radius)?;
            if max_points < 1 {
                return refuse("ball_query", format!("{max_points} points at most; expected 1 or more"));
            }
            let search = Search::new("ball_query", self, queries)?;
            let (found, distances) = search.run(Within { radius, limit: Some(max_points) })?;
            let here = search.queries_here();
            let counts = torch(found.counts(here))?;
            let dense = || {
                let places = found.rows.f_mul_scalar(max_points)?.f_add(&found.places(here)?)?;
                let sparse = Tensor::f_zeros([here * max_points], (distances.kind(), distances.device()))?;
                let distances = sparse.f_index_add(0, &places, &distances)?;
                let none = Tensor::f_full([here * max_points], -1, (Kind::Int64, distances.device()))?;
                let indices = none.f_index_copy(0, &places, &found.indices)?;
                Ok((distances.f_reshape([here, max_points])?, indices.f_reshape([here, max_points])?))
            };
            let (distances, indices) = torch(dense())?;
            let layout = search.rows(&[max_points]);
            let counts = Self::new(counts, search.rows(&[]));
            Ok([Self::new(indices, layout.clone()), counts, Self::new(distances, layout)])
        });
        let [indices, counts, distances] = parts?;
        Ok(LimitedBall { indices, counts, distances })
    }
}

fn torch<T>(result: Result<T, TchError>) -> Result<T> {
    super::torch("neighbours", result)
}

fn check_radius(radius: f64) -> Result<()> {
    match radius >= 0.0 {
        true => Ok(()),
        false => refuse("ball_query", format!("a radius of {radius}; expected 0 or more")),
    }
}

/// Returns points in their own dtype, in mixed precision too.
fn as_given(x: &Tensor) -> Result<Tensor, TchError> {
    Ok(x.shallow_clone())
}

/// A search: queries split over the axes that split either, points as they are.
struct Search {
    points: Tensor,
    queries: Tensor,
    query_layout: Layout,
    schedule: RingSchedule,
}

impl Search {
    fn new(op: &'static str, points: &ShardTensor, queries: &ShardTensor) -> Result<Self> {
        let shapes = [points.shape(), queries.shape()];
        if shapes.iter().any(|shape| shape.len() != 2) || shapes[0][1] != shapes[1][1] {
            return refuse(
                op,
                format!("{shapes:?}: expected points [n, features] and queries [q, features]"),
            );
        }
        let float =
            |x: &ShardTensor| matches!(x.kind(), Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16);
        if points.kind() != queries.kind() || !float(points) {
            let kinds = [points.kind(), queries.kind()];
            return refuse(op, format!("the dtypes are {kinds:?}, expected one floating dtype"));
        }
        same_mesh(op, &[points, queries])?;
        let ready = |x: &ShardTensor| x.resolved()?.replicate_where(|dim| dim == 1)?.consecutive();
        let (points, queries) = (ready(points)?, ready(queries)?);
        let (of_points, of_queries) = (&points.layout().dims()[0], &queries.layout().dims()[0]);
        let mesh = points.layout().mesh_shape();
        let split = refined(of_queries, &of_points.axes, of_queries.extent(), mesh);
        let query_layout = queries.layout().with_dim(0, split);
        let query_only = |axis: &usize| !of_points.axes.contains(axis);
        let differing: Vec<usize> = query_layout.dims()[0].axes.iter().copied().filter(query_only).collect();
        let ring = Ring::new(points.layout(), &of_points.axes)?;
        let part =
            |dim: &Dim, at: &[usize]| dim.part(at, mesh).first().copied().unwrap_or(Interval::new(0, 0));
        let points_of = ring.members.iter().map(|at| part(of_points, at)).collect();
        let queries_of = ring.members.iter().map(|at| part(&query_layout.dims()[0], at).len).collect();
        Ok(Self {
            schedule: RingSchedule { ring, points: points_of, queries: queries_of },
            points: torch(points.mark_varying(&differing)?.f_contiguous())?,
            queries: queries.to_layout(&query_layout)?.local().shallow_clone(),
            query_layout,
        })
    }

    /// Runs the search; returns its results, and their differentiable distances.
    fn run(&self, search: impl search::Search) -> Result<(Pairs, Tensor)> {
        let found = self.schedule.search(&self.points, &self.queries, search)?;
        let selection = Selection::new(&self.schedule, &found.indices);
        let chosen = selection.attach(&self.points, &found.points)?;
        let distances = || {
            let difference = self.queries.f_index_select(0, &found.rows)?.f_sub(&chosen)?;
            difference.f_norm_scalaropt_dim(2.0, [-1].as_slice(), false)
        };
        let distances = torch(distances())?;
        Ok((found, distances))
    }

    fn queries_here(&self) -> i64 {
        self.query_layout.local_shape()[0]
    }

    /// The layout of `[queries, rest…]`.
    fn rows(&self, rest: &[i64]) -> Layout {
        let dims = std::iter::once(self.query_layout.dims()[0].clone());
        self.query_layout.with_dims(dims.chain(rest.iter().map(|&extent| Dim::whole(extent))).collect())
    }

    /// The layout of a number for each query and one more; whether this rank has the last.
    fn row_bounds(&self) -> (Layout, bool) {
        let mut dim = self.query_layout.dims()[0].clone();
        let extent = dim.extent();
        let ends = |part: &Vec<Interval>| part.last().map_or(0, |interval| interval.end());
        // The last part in the order of queries, empty ones included.
        let last = (0..dim.parts.len())
            .rev()
            .max_by_key(|&index| (ends(&dim.parts[index]), std::cmp::Reverse(index)));
        let last = last.unwrap_or(0);
        match dim.parts[last].last_mut() {
            Some(interval) => interval.len += 1,
            None => dim.parts[last].push(Interval::new(extent, 1)),
        }
        let layout = self.query_layout.with_dims(vec![dim]);
        let here = layout.local_shape()[0] > self.queries_here();
        (layout, here)
    }

    /// The layout of the ranks' entries, in the order of their queries, and where this rank's begin.
    fn entries(&self, here: i64) -> Result<(Layout, i64)> {
        let dim = &self.query_layout.dims()[0];
        let ring = Ring::new(&self.query_layout, &dim.axes)?;
        let gathered = ring.group.all_gather_bytes(&here.to_le_bytes())?;
        let mut counts = vec![0; dim.parts.len()];
        for (number, bytes) in ring.by_group_rank().into_iter().zip(gathered) {
            counts[number] = i64::from_le_bytes(bytes.try_into().unwrap_or_default());
        }
        let mut order: Vec<usize> = (0..counts.len()).collect();
        order.sort_by_key(|&number| dim.parts[number].first().map_or(0, |interval| interval.start));
        let mut parts = vec![Vec::new(); counts.len()];
        let mut at = 0;
        for number in order {
            parts[number] = vec![Interval::new(at, counts[number])];
            at += counts[number];
        }
        let first = parts[ring.me][0].start;
        let dim = Dim { axes: dim.axes.clone(), parts };
        Ok((self.query_layout.with_dims(vec![dim]), first))
    }
}

crate::register! {
    /// The distance of each pair of points, by the norm `p` (2 if not given; "inf": the greatest difference).
    "cdist"(a: Floating, b: Operand; p) Points: |call| ShardTensor::cdist(call.tensor(0)?, call.tensor(1)?, call.or("p", 2.0)?);
    /// The `k` nearest points of each query: distances and indices.
    "knn"(points, queries; k) Candidates: |call| call.tensor(0)?.knn(call.tensor(1)?, call.get("k")?);
    /// The points within `radius` of each query: offsets of the queries, indices, distances.
    "ball_query"(points, queries; radius) Candidates:
        |call| call.tensor(0)?.ball_query(call.tensor(1)?, call.get("radius")?).map(<[ShardTensor; 3]>::from);
    /// At most `max_points` points within `radius` of each query: indices, counts, distances.
    "ball_query_limited"(points, queries; radius, max_points) Candidates: |call| {
        let (radius, most) = (call.get("radius")?, call.get("max_points")?);
        call.tensor(0)?.ball_query_limited(call.tensor(1)?, radius, most).map(<[ShardTensor; 3]>::from)
    };
}
