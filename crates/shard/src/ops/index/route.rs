//! Routing of indexed elements between ranks.

use isobar_collectives::{Group, all_to_all_v, indexed_all_to_all_v, indexed_scatter_add_v};
use isobar_torch::guard::NoGrad;
use tch::{Kind, TchError, Tensor};

use crate::error::Result;
use crate::layout::{Dim, Layout, coordinates, index_of};
use crate::ops::{refuse, torch};

/// The way of elements from the ranks that have them to those that asked, or back.
pub(super) struct Route {
    group: Group,
    /// For each rank of the group, the places in this rank's part that it asks for.
    give: Vec<Tensor>,
    /// `sizes[r][q]`: how many rank r gives to rank q.
    sizes: Vec<Vec<i64>>,
    /// From the order of asking to that of the ranks asked.
    by_rank: Tensor,
    /// And back.
    as_asked: Tensor,
}

/// Owners of a sharded dim's indices.
pub(in crate::ops) struct Owners {
    pub(in crate::ops) group: Group,
    /// For each part, the rank in the group.
    ranks: Vec<i64>,
    /// The number of this rank's part.
    own: usize,
    dim: usize,
    starts: Vec<i64>,
    pub(in crate::ops) sizes: Vec<i64>,
}

/// Locations of requested indices.
pub(super) struct Located {
    /// The rank in the group.
    pub(super) owner: Tensor,
    /// The place in its part.
    pub(super) place: Tensor,
    /// The extent of its part.
    pub(super) extent: Tensor,
    /// Number of indices out of range.
    bad: i64,
    /// One of them, or 0.
    example: i64,
    /// Extent of the dim.
    whole: i64,
    /// The dim.
    dim: usize,
}

impl Owners {
    pub(in crate::ops) fn new(layout: &Layout, dim: usize) -> Result<Self> {
        let split: &Dim = &layout.dims()[dim];
        let group = layout.group_along(&split.axes)?;
        let order = layout.mesh().ranks();
        let Some(own) = layout.coordinates() else {
            return refuse("index", format!("this rank is outside of {}", layout.mesh()));
        };
        let mesh = layout.mesh_shape();
        let extents: Vec<usize> = split.axes.iter().map(|&axis| mesh[axis]).collect();
        let rank_of = |part: usize| {
            let mut at = own.to_vec();
            for (&axis, place) in split.axes.iter().zip(coordinates(part, &extents)) {
                at[axis] = place;
            }
            let world = order[index_of(&at, mesh)];
            layout.place(group.ranks(), world).map(|place| place as i64)
        };
        let ranks = (0..split.parts.len()).map(rank_of).collect::<Result<_>>()?;
        let own = index_of(&split.axes.iter().map(|&axis| own[axis]).collect::<Vec<_>>(), &extents);
        let boundaries = split.boundaries();
        let starts = boundaries[..boundaries.len() - 1].to_vec();
        Ok(Self { group, ranks, own, dim, starts, sizes: split.sizes() })
    }

    /// The rank in the group that has the part of that number.
    pub(in crate::ops) fn rank(&self, part: usize) -> usize {
        self.ranks[part] as usize
    }

    /// The number of this rank's part.
    pub(in crate::ops) fn own_part(&self) -> usize {
        self.own
    }

    /// Finds the owners and local positions of global indices.
    pub(super) fn find(&self, indices: &Tensor) -> Result<Located, TchError> {
        let device = indices.device();
        let on_device = |list: &[i64]| Tensor::f_from_slice(list)?.f_to_device(device);
        let ends: Vec<i64> = self.starts.iter().zip(&self.sizes).map(|(start, size)| start + size).collect();
        let extent = ends.last().copied().unwrap_or(0);
        let outside = indices.f_lt(0)?.f_logical_or(&indices.f_ge(extent)?)?;
        let bad = outside.f_sum(Kind::Int64)?.f_int64_value(&[])?;
        let example = match bad {
            0 => 0,
            _ => indices.f_masked_select(&outside)?.f_int64_value(&[0])?,
        };
        let safe = indices.f_masked_fill(&outside, 0)?;
        let part =
            safe.f_bucketize(&on_device(&ends)?, false, true)?.f_clamp_max((ends.len() as i64 - 1).max(0))?;
        let look_up = |list: &[i64]| on_device(list)?.f_take(&part);
        Ok(Located {
            owner: look_up(&self.ranks)?,
            place: safe.f_sub(&look_up(&self.starts)?)?,
            extent: look_up(&self.sizes)?,
            bad,
            example,
            whole: extent,
            dim: self.dim,
        })
    }
}

impl Route {
    /// Finds, for each requested index, the rank that holds it and its position in that rank's shard. An index out of range is
    /// an error on all ranks.
    pub(super) fn new(op: &'static str, found: &Located, place: &Tensor, group: &Group) -> Result<Self> {
        let _guard = NoGrad::new();
        let ranks = group.size() as i64;
        let owner = torch(op, found.owner.f_reshape([-1]))?;
        let place = torch(op, place.f_reshape([-1]))?;
        let by_rank = torch(op, owner.f_argsort_stable(true, 0, false))?;
        let as_asked = torch(op, by_rank.f_argsort_stable(true, 0, false))?;
        let counts = torch(op, owner.f_bincount(None::<Tensor>, ranks))?;
        let counts: Vec<i64> =
            Vec::try_from(&counts).map_err(|e: TchError| crate::dense::argument(op, e.to_string()))?;
        let mine: Vec<u8> =
            [found.bad, found.example].iter().chain(&counts).flat_map(|n| n.to_le_bytes()).collect();
        let gathered = group.all_gather_bytes(&mine)?;
        let numbers = |bytes: &Vec<u8>| -> Vec<i64> {
            bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap_or_default())).collect()
        };
        let gathered: Vec<Vec<i64>> = gathered.iter().map(numbers).collect();
        if let Some(rank) = gathered.iter().position(|row| row.first() != Some(&0)) {
            let (bad, example) = match gathered[rank][..] {
                [bad, example, ..] => (bad, example),
                _ => (0, 0),
            };
            let (whole, dim) = (found.whole, found.dim);
            return refuse(
                op,
                format!(
                    "index {example} is out of range for dim {dim} of extent {whole} ({bad} such indices on rank {rank} of \
                     the {ranks} that share the dim)"
                ),
            );
        }
        // sizes[r][q] is what q asks of r.
        let asked = |q: usize, r: usize| gathered[q].get(r + 2).copied().unwrap_or(0);
        let all = 0..group.size();
        let sizes: Vec<Vec<i64>> = all.clone().map(|r| all.clone().map(|q| asked(q, r)).collect()).collect();
        let of_me = sizes[group.rank()].clone();
        let sorted = torch(op, place.f_index_select(0, &by_rank))?;
        let places = all_to_all_v(&sorted, Some(&counts), Some(&of_me), 0, group)?;
        let give = torch(op, places.f_split_with_sizes(&of_me, 0))?;
        Ok(Self { group: group.clone(), give, sizes, by_rank, as_asked })
    }

    /// The way for requests that all ranks know: for each rank of the group, the owner of each element that it asks for and the
    /// place in that rank's part. Communicates nothing.
    pub(super) fn planned(op: &'static str, asked: &[(Tensor, Tensor)], group: &Group) -> Result<Self> {
        let _guard = NoGrad::new();
        let (ranks, me) = (group.size(), group.rank());
        let mut sizes = vec![vec![0; asked.len()]; ranks];
        for (q, (owner, _)) in asked.iter().enumerate() {
            let counts = torch(op, owner.f_bincount(None::<Tensor>, ranks as i64))?;
            let counts: Vec<i64> =
                Vec::try_from(&counts).map_err(|e: TchError| crate::dense::argument(op, e.to_string()))?;
            sizes.iter_mut().zip(counts).for_each(|(row, count)| row[q] = count);
        }
        let give = |(owner, place): &(Tensor, Tensor)| place.f_masked_select(&owner.f_eq(me as i64)?);
        let give = torch(op, asked.iter().map(give).collect())?;
        let Some((owner, _)) = asked.get(me) else { return refuse(op, "a rank without requests") };
        let by_rank = torch(op, owner.f_argsort_stable(true, 0, false))?;
        let as_asked = torch(op, by_rank.f_argsort_stable(true, 0, false))?;
        Ok(Self { group: group.clone(), give, sizes, by_rank, as_asked })
    }

    /// Returns the positions, in this rank's shard, of the rows that it sends, and the route for a tensor of only these rows.
    pub(super) fn apart(self, op: &'static str) -> Result<(Tensor, Self)> {
        let counts: Vec<i64> = self.give.iter().map(|places| places.size()[0]).collect();
        let given = torch(op, Tensor::f_cat(&self.give, 0))?;
        let order = Tensor::f_arange(counts.iter().sum::<i64>(), (Kind::Int64, given.device()));
        let give = torch(op, order.and_then(|order| order.f_split_with_sizes(&counts, 0)))?;
        Ok((given, Self { give, ..self }))
    }

    /// The rows along dim 0 that were asked for, in the order of asking. Differentiable.
    pub(super) fn pull(&self, op: &'static str, rows: &Tensor) -> Result<Tensor> {
        let came = indexed_all_to_all_v(rows, &self.give, &self.sizes, true, 0, &self.group)?;
        torch(op, came.f_index_select(0, &self.as_asked))
    }

    /// Rows in the order of asking, added up where they were asked for in a part of that extent. Differentiable.
    pub(super) fn push(&self, op: &'static str, rows: &Tensor, extent: i64) -> Result<Tensor> {
        let sorted = torch(op, rows.f_index_select(0, &self.by_rank))?;
        Ok(indexed_scatter_add_v(&sorted, &self.give, &self.sizes, extent, 0, true, &self.group)?)
    }
}
