//! Parts of each tensor that the ranks hold, and the layouts that a case asks for.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::Result;
use isobar_collectives::{balanced, chunk};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::case::Header;
use super::mesh::Mesh;

/// Placement of a tensor along one axis of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Placement {
    /// Equal on all ranks.
    Replicate,
    /// Split along this dim.
    Shard(usize),
}

/// A rule that splits an extent over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sizes {
    /// As `torch.chunk`.
    Chunk,
    /// As equal as can be.
    Balanced,
    /// In the proportion 1 : 2 : … : p.
    Uneven,
    /// Balanced over all ranks but p//2, which has nothing.
    Empty,
    /// By the case's own list, for tensors that it names rank by rank.
    Given,
}

/// Layouts of a case's tensors on a mesh. Tensors that it does not name are replicated.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// The ranks.
    pub(crate) mesh: Mesh,
    /// Split of extents.
    pub(crate) sizes: Sizes,
    /// A placement for each axis of the mesh, by the tensor's name.
    pub(crate) placements: BTreeMap<String, Vec<Placement>>,
}

/// Parts of a tensor, by rank.
#[derive(Debug, Clone)]
pub(crate) struct Parts {
    shape: Vec<i64>,
    placements: Vec<Placement>,
    windows: Vec<Window>,
}

/// Along every dim the pieces that a rank has: their first indices and extents.
pub(crate) type Window = Vec<Vec<(i64, i64)>>;

impl Sizes {
    /// All rules that a case is run by.
    pub(crate) const ALL: [Self; 4] = [Self::Chunk, Self::Balanced, Self::Uneven, Self::Empty];

    /// The parts of `extent`.
    pub(crate) fn split(self, extent: i64, parts: usize) -> Vec<i64> {
        match self {
            Self::Chunk | Self::Given => chunk(extent, parts),
            Self::Balanced => balanced(extent, parts),
            Self::Uneven => {
                let weights = parts as i64 * (parts as i64 + 1) / 2;
                let mut sizes: Vec<i64> =
                    (1..=parts as i64).map(|weight| extent * weight / weights).collect();
                sizes[parts - 1] += extent - sizes.iter().sum::<i64>();
                sizes
            }
            Self::Empty if parts == 1 => vec![extent],
            Self::Empty => {
                let mut sizes = balanced(extent, parts - 1);
                sizes.insert(parts / 2, 0);
                sizes
            }
        }
    }
}

impl Layout {
    /// The layout of a tensor of that name and shape, on a mesh of all ranks.
    pub(crate) fn shard(
        &self,
        name: &str,
        shape: &[i64],
        mesh: &isobar_manager::DeviceMesh,
    ) -> isobar_shard::Result<isobar_shard::Layout> {
        let places = self.of(name);
        let tables = (0..shape.len()).filter_map(|dim| {
            let of_dim =
                |(axis, place): (usize, &Placement)| (*place == Placement::Shard(dim)).then_some(axis);
            let axes: Vec<usize> = places.iter().enumerate().filter_map(of_dim).collect();
            let split = |sizes: Vec<i64>, axis: &usize| -> Vec<i64> {
                sizes.into_iter().flat_map(|size| self.sizes.split(size, self.mesh.axes()[*axis])).collect()
            };
            (!axes.is_empty()).then(|| (dim, axes.iter().fold(vec![shape[dim]], split)))
        });
        let sizes = isobar_shard::Sizes::Explicit(tables.collect());
        let placement = |place: &Placement| match *place {
            Placement::Replicate => isobar_shard::Placement::Replicate,
            Placement::Shard(dim) => isobar_shard::Placement::Shard(dim),
        };
        let placements: Vec<_> = places.iter().map(placement).collect();
        isobar_shard::Layout::new(mesh, &placements, shape, &sizes)
    }

    /// Everything replicated.
    pub(crate) fn replicated(mesh: &Mesh) -> Self {
        Self { mesh: mesh.clone(), sizes: Sizes::Chunk, placements: BTreeMap::new() }
    }

    /// The layouts that a case asks for on a mesh. With S the tensors that have `shard_dims`: all replicated; each of S
    /// alone along each of its dims; for each dim that two or more of S have, all those along it at once. On several
    /// axes, along every ordered choice of a dim for each. Each by every rule of sizes.
    pub(crate) fn asked(header: &Header, mesh: &Mesh) -> Vec<Self> {
        let mut sharded = Vec::new();
        for (name, dims) in &header.shard_dims {
            for choice in choices(dims, mesh.axes().len()) {
                let placements = choice.into_iter().map(Placement::Shard).collect();
                sharded.push(BTreeMap::from([(name.clone(), placements)]));
            }
        }
        let all: BTreeSet<usize> = header.shard_dims.values().flatten().copied().collect();
        let have = |dim: usize| header.shard_dims.values().filter(|dims| dims.contains(&dim)).count();
        let shared: Vec<usize> = all.into_iter().filter(|&dim| have(dim) > 1).collect();
        for choice in choices(&shared, mesh.axes().len()) {
            let placements = header.shard_dims.iter().map(|(name, dims)| {
                let place =
                    |dim| if dims.contains(dim) { Placement::Shard(*dim) } else { Placement::Replicate };
                (name.clone(), choice.iter().map(place).collect())
            });
            sharded.push(placements.collect());
        }
        // On one rank all rules are the same.
        let rules = if mesh.ranks() == 1 { &Sizes::ALL[..1] } else { &Sizes::ALL };
        let with_rule = |placements: &BTreeMap<String, Vec<Placement>>| {
            let placements = placements.clone();
            rules.iter().map(move |&sizes| Self { mesh: mesh.clone(), sizes, placements: placements.clone() })
        };
        std::iter::once(Self::replicated(mesh)).chain(sharded.iter().flat_map(with_rule)).collect()
    }

    /// The `n`th layout of its mesh in a few words, such as `2-1 (input Shard(0), chunk)`.
    pub(crate) fn title(&self, n: usize) -> String {
        format!("{}-{n} ({self})", self.mesh)
    }

    /// The placements of a tensor.
    pub(crate) fn of(&self, name: &str) -> Vec<Placement> {
        let replicated = || vec![Placement::Replicate; self.mesh.axes().len()];
        self.placements.get(name).cloned().unwrap_or_else(replicated)
    }

    /// Returns the part of a tensor of `shape` with these placements that each rank holds. Along a dim that several axes split, a
    /// later axis splits the parts of an earlier one.
    pub(crate) fn parts(&self, shape: &[i64], placements: &[Placement]) -> Parts {
        let windows = (0..self.mesh.ranks()).map(|rank| {
            let mut window: Vec<(i64, i64)> = shape.iter().map(|&extent| (0, extent)).collect();
            let at = self.mesh.coordinates(rank);
            for ((&axis, place), at) in self.mesh.axes().iter().zip(placements).zip(at) {
                if let Placement::Shard(dim) = *place {
                    let (start, extent) = window[dim];
                    let sizes = self.sizes.split(extent, axis);
                    window[dim] = (start + sizes[..at].iter().sum::<i64>(), sizes[at]);
                }
            }
            window.into_iter().map(|piece| vec![piece]).collect()
        });
        let windows = windows.collect();
        Parts { shape: shape.to_vec(), placements: placements.to_vec(), windows }
    }
}

impl Parts {
    /// The shape of the whole tensor.
    pub(crate) fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Returns the placement along each axis.
    pub(crate) fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// Returns whether the tensor is sharded.
    pub(crate) fn is_sharded(&self) -> bool {
        is_sharded(&self.placements)
    }

    /// The parts of a sharded tensor, on a mesh of all ranks.
    pub(crate) fn of_layout(layout: &isobar_shard::Layout) -> Self {
        let place = |placement: &isobar_shard::Placement| match placement.dim() {
            Some(dim) => Placement::Shard(dim),
            None => Placement::Replicate,
        };
        let window = |rank: usize| -> Window {
            let pieces =
                |part: &[isobar_shard::Interval]| part.iter().map(|piece| (piece.start, piece.len)).collect();
            layout.intervals_of(rank).into_iter().map(pieces).collect()
        };
        Self {
            shape: layout.shape().to_vec(),
            placements: layout.placements().iter().map(place).collect(),
            windows: (0..layout.mesh().size()).map(window).collect(),
        }
    }

    /// Returns the window of `rank`.
    pub(crate) fn window(&self, rank: usize) -> &Window {
        &self.windows[rank]
    }

    /// The shape of what `rank` holds.
    pub(crate) fn shape_of(&self, rank: usize) -> Vec<i64> {
        self.windows[rank].iter().map(|pieces| pieces.iter().map(|(_, extent)| extent).sum()).collect()
    }

    /// Returns the shard of `rank`: a view, if it is one interval along every dim.
    pub(crate) fn of(&self, whole: &Tensor, rank: usize) -> Result<Tensor> {
        let mut part = whole.shallow_clone();
        for (dim, pieces) in self.windows[rank].iter().enumerate() {
            let cut = |&(start, extent): &(i64, i64)| part.f_narrow(dim as i64, start, extent);
            part = match &pieces[..] {
                [piece] => cut(piece)?,
                many => Tensor::f_cat(&many.iter().map(cut).collect::<Result<Vec<_>, _>>()?, dim as i64)?,
            };
        }
        Ok(part)
    }

    /// Writes what `rank` holds to its place in the whole.
    pub(crate) fn put(&self, whole: &Tensor, rank: usize, part: &Tensor) -> Result<()> {
        put(whole, part, &self.windows[rank], 0)
    }
}

fn put(whole: &Tensor, part: &Tensor, window: &[Vec<(i64, i64)>], dim: i64) -> Result<()> {
    let Some((pieces, rest)) = window.split_first() else {
        let mut target = whole.shallow_clone();
        target.f_copy_(part)?;
        return Ok(());
    };
    let mut at = 0;
    for &(start, extent) in pieces {
        put(&whole.f_narrow(dim, start, extent)?, &part.f_narrow(dim, at, extent)?, rest, dim + 1)?;
        at += extent;
    }
    Ok(())
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.placements.is_empty() {
            return f.write_str("Replicate");
        }
        for (name, places) in &self.placements {
            let places: Vec<String> = places.iter().map(Placement::to_string).collect();
            write!(f, "{name} {}, ", places.join("+"))?;
        }
        write!(f, "{}", self.sizes)
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Chunk => "chunk",
            Self::Balanced => "balanced",
            Self::Uneven => "uneven",
            Self::Empty => "empty",
            Self::Given => "given",
        })
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replicate => f.write_str("Replicate"),
            Self::Shard(dim) => write!(f, "Shard({dim})"),
        }
    }
}

/// Returns whether any of a tensor's placements shards it.
pub(crate) fn is_sharded(placements: &[Placement]) -> bool {
    placements.iter().any(|place| *place != Placement::Replicate)
}

/// All ways to choose one of `dims` for each of `axes` axes.
fn choices(dims: &[usize], axes: usize) -> Vec<Vec<usize>> {
    (0..axes).fold(vec![Vec::new()], |partial, _| {
        let extend = |choice: &Vec<usize>| {
            let choice = choice.clone();
            dims.iter().map(move |&dim| [choice.clone(), vec![dim]].concat())
        };
        partial.iter().flat_map(extend).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case(Sizes::Chunk, 5, 4, &[2, 2, 1, 0])]
    #[case(Sizes::Balanced, 5, 4, &[2, 1, 1, 1])]
    #[case(Sizes::Uneven, 10, 4, &[1, 2, 3, 4])]
    #[case(Sizes::Uneven, 2, 4, &[0, 0, 0, 2])]
    #[case(Sizes::Empty, 7, 4, &[3, 2, 0, 2])]
    #[case(Sizes::Empty, 7, 2, &[7, 0])]
    #[case(Sizes::Empty, 7, 1, &[7])]
    fn rules(#[case] rule: Sizes, #[case] extent: i64, #[case] parts: usize, #[case] expected: &[i64]) {
        assert_eq!(rule.split(extent, parts), expected);
    }

    fn header(shard_dims: serde_json::Value) -> Header {
        serde_json::from_value(json!({
            "op": "matmul", "attrs": {}, "inputs": ["input", "other"], "params": [], "outputs": ["output"],
            "shard_dims": shard_dims, "complex": [], "rtol": 1e-6, "atol": 1e-6
        }))
        .unwrap()
    }

    fn asked(shard_dims: serde_json::Value, mesh: &str) -> Vec<String> {
        let layouts = Layout::asked(&header(shard_dims), &mesh.parse().unwrap());
        let chunks = layouts.into_iter().filter(|layout| layout.sizes == Sizes::Chunk);
        chunks.map(|layout| layout.to_string()).collect()
    }

    #[test]
    fn one_axis() {
        assert_eq!(
            asked(json!({"input": [0, 1], "other": [1]}), "2"),
            [
                "Replicate",
                "input Shard(0), chunk",
                "input Shard(1), chunk",
                "other Shard(1), chunk",
                "input Shard(1), other Shard(1), chunk"
            ]
        );
    }

    #[test]
    fn two_axes_take_every_ordered_pair() {
        let layouts = asked(json!({"input": [0, 1]}), "2x2");
        assert_eq!(
            layouts,
            [
                "Replicate",
                "input Shard(0)+Shard(0), chunk",
                "input Shard(0)+Shard(1), chunk",
                "input Shard(1)+Shard(0), chunk",
                "input Shard(1)+Shard(1), chunk"
            ]
        );
        let all = Layout::asked(&header(json!({"input": [0, 1]})), &"2x2".parse().unwrap());
        assert_eq!(all.len(), 1 + 4 * 4);
    }

    #[test]
    fn a_dim_split_twice() {
        let mesh: Mesh = "2x2".parse().unwrap();
        let layout = Layout { sizes: Sizes::Uneven, ..Layout::replicated(&mesh) };
        let parts = layout.parts(&[10, 3], &[Placement::Shard(0), Placement::Shard(0)]);
        assert_eq!([0, 1, 2, 3].map(|rank| parts.shape_of(rank)), [[1, 3], [2, 3], [2, 3], [5, 3]]);
        assert_eq!(parts.window(3), &[vec![(5, 5)], vec![(0, 3)]]);
    }
}
