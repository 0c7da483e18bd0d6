//! Layouts of the operands of an attention, chosen from their layouts alone.

use isobar_array::AttentionStrategy;
use isobar_collectives::balanced;

use super::tiles::work;
use super::{AttentionOptions, NAME};
use crate::error::Result;
use crate::layout::{Dim, Interval, Layout};
use crate::ops::refuse;
use crate::tensor::ShardTensor;

/// Less than this much more work than the mean on the busiest rank is not worth moving queries for.
const BALANCED: f64 = 1.1;

/// Sequences shorter than this for each rank are not balanced unless asked for: the messages would take longer.
const WORTH_MOVING: i64 = 128;

/// The layouts in which attention is computed.
pub(super) struct Plan {
    pub(super) query: Layout,
    pub(super) key: Layout,
    pub(super) value: Layout,
    /// Of the matrix of scores that a rank computes, at least in parts.
    pub(super) scores: Layout,
    pub(super) output: Layout,
    /// Layout of the result.
    pub(super) returned: Layout,
    /// Axes that split the keys while it is computed.
    pub(super) key_axes: Vec<usize>,
    /// Axes that split the queries, but not the keys.
    pub(super) query_axes: Vec<usize>,
    /// True if each rank attends all queries to its own keys, and the results are combined.
    pub(super) combines: bool,
}

/// Splits of all dims, as the operands have them.
struct Splits {
    /// Of the batch dims and of the heads of keys.
    lead: Vec<Dim>,
    queries: Dim,
    keys: Dim,
}

/// Extents.
struct Shape {
    queries: i64,
    keys: i64,
    features: i64,
    out: i64,
    /// Product of the keys' lead dims: batch times heads.
    lead: i64,
    /// Queries' heads for each of the keys'.
    groups: i64,
    /// Index of the heads among the lead dims.
    heads: Option<usize>,
    /// Number of heads of the keys; 0 without heads.
    key_heads: i64,
}

/// Mesh axes that shard the queries or keys, with their numbers of ranks.
struct Ranks {
    /// Axes that shard the queries, the keys or both.
    axes: Vec<usize>,
    /// Axes that shard both.
    common: Vec<usize>,
    all: usize,
    of_keys: usize,
    of_common: usize,
}

/// Elements that a rank receives in each [`Way`], without those common to all.
struct Received {
    ring: f64,
    heads: f64,
    combine: f64,
}

/// Communication pattern that brings queries and keys together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Keys and values are sent from rank to rank.
    Ring,
    /// An all-to-all reshards from tokens to heads, and another one back.
    Heads,
    /// Each rank attends all queries to its own keys, and the results are combined.
    Combine,
}

impl Plan {
    pub(super) fn new(
        query: &ShardTensor,
        key: &ShardTensor,
        value: &ShardTensor,
        options: &AttentionOptions<'_>,
    ) -> Result<Self> {
        let shape = Shape::of(query, key, value);
        let splits = Splits::of([query, key, value], &shape);
        let mesh = query.layout().mesh_shape();
        let ranks = Ranks::of(&splits, mesh);
        let aligned = refined(&splits.queries, &splits.keys.axes, shape.queries, mesh);
        let zigzag = (options.is_causal && ranks.all > 1)
            .then(|| zigzag(&ranks.axes, shape.queries, ranks.all))
            .filter(|zigzag| pays(options.balance, &aligned, zigzag, &shape));
        let way = Way::choose(options, &shape, &splits, &ranks, zigzag.is_some())?;

        let whole = |extent| Dim::whole(extent);
        let (mut lead, mut queries, mut keys) = (splits.lead.clone(), aligned.clone(), splits.keys.clone());
        let mut returned = aligned;
        match (way, shape.heads) {
            (Way::Heads, Some(heads)) => {
                lead[heads] = Dim::consecutive(ranks.axes.clone(), &balanced(shape.key_heads, ranks.all));
                (queries, keys) = (whole(shape.queries), whole(shape.keys));
            }
            (Way::Combine, _) => {
                returned = splits.queries.clone();
                queries = if ranks.common.is_empty() { splits.queries.clone() } else { whole(shape.queries) };
            }
            _ => queries = zigzag.unwrap_or(queries),
        }
        let combines = way == Way::Combine;
        let base = query.layout();
        let [query, key, value, output] = shape.layouts(base, &lead, &queries, &keys);
        let [.., returned] = shape.layouts(base, &splits.lead, &returned, &splits.keys);
        // A score is of one axis's queries and of all keys, or of all queries and one axis's keys.
        let columns = if combines { keys.clone() } else { whole(shape.keys) };
        let rows = query.dims().iter().take(query.ndim() - 1).cloned();
        let scores = base.with_dims(rows.chain([columns]).collect());
        let query_axes = queries.axes.iter().copied().filter(|axis| !keys.axes.contains(axis)).collect();
        Ok(Self { query, key, value, scores, output, returned, key_axes: keys.axes, query_axes, combines })
    }

    /// The part of the keys of the rank at these coordinates.
    pub(super) fn keys_at(&self, at: &[usize]) -> Interval {
        let dim = &self.key.dims()[self.key.ndim() - 2];
        dim.part(at, self.key.mesh_shape()).first().copied().unwrap_or(Interval::new(0, 0))
    }

    /// The queries of the rank at these coordinates.
    pub(super) fn queries_at(&self, at: &[usize]) -> Vec<Interval> {
        let dim = &self.query.dims()[self.query.ndim() - 2];
        dim.part(at, self.query.mesh_shape()).to_vec()
    }
}

impl Shape {
    fn of(query: &ShardTensor, key: &ShardTensor, value: &ShardTensor) -> Self {
        let n = query.ndim();
        let heads = n.checked_sub(3);
        let key_heads = heads.map_or(0, |heads| key.shape()[heads]);
        Self {
            queries: query.shape()[n - 2],
            keys: key.shape()[n - 2],
            features: query.shape()[n - 1],
            out: value.shape()[n - 1],
            lead: key.shape()[..n - 2].iter().product(),
            groups: heads.map_or(1, |heads| query.shape()[heads] / key_heads.max(1)).max(1),
            heads,
            key_heads,
        }
    }

    /// Returns the layouts of queries, keys, values and the result, on the mesh of `base`.
    fn layouts(&self, base: &Layout, lead: &[Dim], queries: &Dim, keys: &Dim) -> [Layout; 4] {
        let with = |groups: i64, tokens: &Dim, features: i64| {
            let widen = |(index, dim): (usize, &Dim)| match Some(index) == self.heads {
                true => times(dim, groups),
                false => dim.clone(),
            };
            let rest = [tokens.clone(), Dim::whole(features)];
            base.with_dims(lead.iter().enumerate().map(widen).chain(rest).collect())
        };
        [
            with(self.groups, queries, self.features),
            with(1, keys, self.features),
            with(1, keys, self.out),
            with(self.groups, queries, self.out),
        ]
    }
}

impl Ranks {
    fn of(splits: &Splits, mesh: &[usize]) -> Self {
        let count = |axes: &[usize]| axes.iter().map(|&axis| mesh[axis]).product::<usize>();
        let (queries, keys) = (&splits.queries.axes, &splits.keys.axes);
        let axes = union(queries, keys);
        let common: Vec<usize> = queries.iter().copied().filter(|axis| keys.contains(axis)).collect();
        Self { all: count(&axes), of_keys: count(keys), of_common: count(&common), axes, common }
    }
}

impl Received {
    fn new(shape: &Shape, ranks: &Ranks, zigzag: bool) -> Self {
        let keys = shape.lead as f64 * shape.keys as f64;
        let queries = (shape.lead * shape.groups) as f64 * shape.queries as f64;
        let (features, out) = (shape.features as f64, shape.out as f64);
        let others = |ranks: usize| 1.0 - 1.0 / ranks.max(1) as f64;
        let share = others(ranks.all) * (features + out) / ranks.all as f64;
        Self {
            ring: others(ranks.of_keys) * keys * (features + out)
                + if zigzag { share * queries } else { 0.0 },
            heads: share * (keys + queries),
            combine: others(ranks.of_common) * queries * features
                + 2.0 * others(ranks.of_keys) * queries * (out + 2.0),
        }
    }
}

impl Way {
    /// Chooses the requested way, or the one that moves the least data.
    fn choose(
        options: &AttentionOptions<'_>,
        shape: &Shape,
        splits: &Splits,
        ranks: &Ranks,
        zigzag: bool,
    ) -> Result<Self> {
        let (count, key_heads) = (ranks.all as i64, shape.key_heads);
        let free = shape.heads.is_some_and(|heads| !splits.lead[heads].is_split());
        let enough = free && key_heads >= count;
        match options.strategy {
            AttentionStrategy::AllToAll if count > 1 && !enough => {
                return refuse(
                    NAME,
                    format!(
                        "an exchange over heads needs unsplit heads of keys, at least as many as ranks: {key_heads} over \
                         {count} ranks; use Ring or Auto"
                    ),
                );
            }
            AttentionStrategy::AllToAll if count > 1 => return Ok(Self::Heads),
            AttentionStrategy::AllToAll | AttentionStrategy::Ring => return Ok(Self::Ring),
            AttentionStrategy::Auto if ranks.of_keys <= 1 => return Ok(Self::Ring),
            AttentionStrategy::Auto => {}
        }
        let received = Received::new(shape, ranks, zigzag);
        let even = key_heads % count == 0 || key_heads >= 8 * count;
        if enough && even && received.heads < received.ring.min(received.combine) {
            return Ok(Self::Heads);
        }
        let disjoint_or_within = ranks.common.is_empty() || ranks.common == splits.queries.axes;
        let combines = !options.is_causal && disjoint_or_within && 2.0 * received.combine < received.ring;
        Ok(if combines { Self::Combine } else { Self::Ring })
    }
}

impl Splits {
    /// The splits that the largest operands have; an axis splits one dim, or the queries and the keys.
    fn of(operands: [&ShardTensor; 3], shape: &Shape) -> Self {
        let n = operands[0].ndim();
        let key = operands[1];
        let mut lead: Vec<Dim> = key.shape()[..n - 2].iter().map(|&extent| Dim::whole(extent)).collect();
        let (mut queries, mut keys) = (Dim::whole(shape.queries), Dim::whole(shape.keys));
        let mut order = [0, 1, 2];
        order.sort_by_key(|&index| std::cmp::Reverse(operands[index].layout().numel()));
        for index in order {
            for (dim, split) in operands[index].layout().dims()[..n - 1].iter().enumerate() {
                let in_lead = lead.iter().flat_map(|dim| &dim.axes).any(|axis| split.axes.contains(axis));
                let in_sequence =
                    split.axes.iter().any(|axis| queries.axes.contains(axis) || keys.axes.contains(axis));
                if !split.is_split() || in_lead {
                    continue;
                }
                if dim == n - 2 {
                    let own = if index == 0 { &mut queries } else { &mut keys };
                    if !own.is_split() {
                        *own = split.clone();
                    }
                } else if !lead[dim].is_split() && !in_sequence {
                    // Queries' heads stay with the keys' that they share.
                    lead[dim] = split.scaled(lead[dim].extent());
                }
            }
        }
        Self { lead, queries, keys }
    }
}

fn union(a: &[usize], b: &[usize]) -> Vec<usize> {
    let mut all = [a, b].concat();
    all.sort_unstable();
    all.dedup();
    all
}

/// Each part `times` as long.
fn times(dim: &Dim, times: i64) -> Dim {
    let sizes: Vec<i64> = dim.sizes().iter().map(|size| size * times).collect();
    Dim::consecutive(dim.axes.clone(), &sizes)
}

/// The split with its parts cut further, evenly, over more axes.
pub(crate) fn refined(dim: &Dim, more: &[usize], extent: i64, mesh: &[usize]) -> Dim {
    let axes = union(&dim.axes, more);
    if axes == dim.axes {
        return dim.clone();
    }
    let extra: Vec<usize> = axes.iter().copied().filter(|axis| !dim.axes.contains(axis)).collect();
    let count: usize = extra.iter().map(|&axis| mesh[axis]).product();
    let extents: Vec<usize> = axes.iter().map(|&axis| mesh[axis]).collect();
    let part = |index: usize| {
        let mut at = vec![0; mesh.len()];
        for (&axis, coordinate) in axes.iter().zip(crate::layout::coordinates(index, &extents)) {
            at[axis] = coordinate;
        }
        let own = dim.part(&at, mesh).first().copied().unwrap_or(Interval::new(extent, 0));
        let number = extra.iter().fold(0, |number, &axis| number * mesh[axis] + at[axis]);
        let sizes = balanced(own.len, count);
        vec![Interval::new(own.start + sizes[..number].iter().sum::<i64>(), sizes[number])]
    };
    Dim { axes: axes.clone(), parts: (0..extents.iter().product()).map(part).collect() }
}

/// The rank of number r has the r-th piece from the front and the r-th from the end: under a causal mask each has the same to do.
fn zigzag(axes: &[usize], extent: i64, ranks: usize) -> Dim {
    let sizes = balanced(extent, 2 * ranks);
    let piece = |number: usize| Interval::new(sizes[..number].iter().sum(), sizes[number]);
    let part = |rank: usize| {
        let pair = [piece(rank), piece(2 * ranks - 1 - rank)];
        crate::layout::join(pair.into_iter())
    };
    Dim { axes: axes.to_vec(), parts: (0..ranks).map(part).collect() }
}

/// Returns whether balancing saves the busiest rank enough work.
fn pays(asked: Option<bool>, own: &Dim, zigzag: &Dim, shape: &Shape) -> bool {
    let most = |dim: &Dim| dim.parts.iter().map(|part| work(part, shape.keys, true)).fold(0.0, f64::max);
    let long = shape.queries >= WORTH_MOVING * zigzag.parts.len() as i64;
    asked.unwrap_or(long && most(own) > BALANCED * most(zigzag))
}
