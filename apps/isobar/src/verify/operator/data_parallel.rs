//! Models whose samples are independent: the input's shards go through one set of parameters, whole on every rank or
//! gathered there from their shards, and the parameters' gradients are summed over the ranks.

use std::collections::BTreeMap;

use anyhow::Result;
use isobar_collectives::{Group, copy_to_parallel_region, gather_from_parallel_region};
use isobar_models::{Afno, FullyConnected, Mode};
use isobar_shard::{Generator, Init, ParallelRegion, ParamStore, Params, Placement as ParamPlacement};
use tch::Tensor;

use super::{Forward, Held, Operator, Part, Rank, bytes, config, parameters};
use crate::verify::case::{Case, Header};
use crate::verify::layout::{Layout, Placement, is_sharded};
use crate::verify::mesh::Mesh;

const INPUT: &str = "input";

pub(crate) struct DataParallel {
    name: &'static str,
    /// The dims along which the input may be split; all where not given.
    dims: Option<&'static [usize]>,
    /// Makes the model from its arguments and the supplier of its parameters.
    make: fn(&Header, &mut PerRank) -> Result<Model>,
}

type Model = Box<dyn Fn(&Tensor) -> Result<Tensor>>;

pub(crate) static FULLY_CONNECTED: DataParallel = DataParallel {
    name: "fully_connected",
    dims: None,
    make: |header, params| {
        let model = FullyConnected::new(&config(header)?, params)?;
        Ok(Box::new(move |input| Ok(model.forward(input)?)))
    },
};

/// The transform over space couples the other dims; until it is distributed, samples are split and nothing else.
pub(crate) static AFNO: DataParallel = DataParallel {
    name: "afno",
    dims: Some(&[0]),
    make: |header, params| {
        let model = Afno::new(&config(header)?, params)?;
        Ok(Box::new(move |input| Ok(model.forward(input, Mode::Eval)?)))
    },
};

impl Operator for DataParallel {
    fn name(&self) -> &'static str {
        self.name
    }

    fn layouts(&self, header: &Header, mesh: &Mesh) -> Result<Vec<Layout>> {
        let takes = |layout: &Layout| layout.of(INPUT).iter().all(|place| self.takes(*place));
        Ok(Layout::asked(header, mesh).into_iter().filter(takes).collect())
    }

    fn notes(&self, header: &Header, _asked: &[Mesh]) -> Result<Vec<String>> {
        let asked = header.shard_dims.get(INPUT).cloned().unwrap_or_default();
        let run: Vec<usize> =
            asked.iter().copied().filter(|&dim| self.takes(Placement::Shard(dim))).collect();
        let list = |dims: &[usize]| dims.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let note = format!("{INPUT} along dims {} of {}", list(&run), list(&asked));
        Ok(if run == asked { Vec::new() } else { vec![note] })
    }

    fn forward(&self, rank: &Rank, case: &Case, layout: &Layout) -> Result<Forward> {
        let whole = case.tensor(INPUT)?;
        let placements = layout.of(INPUT);
        let features = whole.dim() - 1;
        let input = Held::leaf(rank, case, INPUT, layout.parts(&whole.size(), &placements))?;

        // Features are not independent: ranks that have parts of them join them, and go on alike.
        let mut after = placements.clone();
        let along_features = |place| place == Placement::Shard(features);
        let local = join(rank, layout, &input.tensor, &whole.size(), &mut after, along_features)?;
        let split = after.iter().zip(&rank.axes).filter(|(place, _)| **place != Placement::Replicate);
        let groups: Vec<Group> = split.map(|(_, group)| group.clone()).collect();

        let store = ParamStore::new(Generator::new(0)).with_options(whole.kind(), whole.device());
        let shards = Shards::cut(rank, case, layout)?;
        let mut params = PerRank { store, groups, gathered: shards.gathered };
        let model = (self.make)(&case.header, &mut params)?;
        params.store.load(&case.params()?)?;
        let output = model(&local)?;

        let name = case.header.outputs.first().cloned().unwrap_or_else(|| "output".to_owned());
        let parts = layout.parts(&case.tensor(&name)?.size(), &after);
        let outputs = vec![Held { name, tensor: output, part: Part::Of(parts) }];
        let mut leaves = vec![input];
        let replicated = vec![Placement::Replicate; placements.len()];
        let whole = parameters(&params.store, case, |parameter| layout.parts(&parameter.shape, &replicated));
        leaves.extend(whole.into_iter().filter(|leaf| !params.gathered.contains_key(&leaf.name)));
        leaves.extend(shards.leaves);
        Ok(Forward::Ran { outputs, leaves })
    }

    /// The parts of the input and of the parameters that are joined, and the other ranks' gradients of the parameters.
    fn budget(&self, case: &Case, layout: &Layout, _rank: usize) -> Result<u64> {
        let input = case.tensor(INPUT)?;
        let features = Placement::Shard(input.dim() - 1);
        let parameters: u64 = case.params()?.values().map(bytes).sum();
        let axes = layout.of(INPUT).into_iter().zip(layout.mesh.axes());
        let each = axes.map(|(place, &ranks)| match place {
            Placement::Replicate => 0,
            joined if joined == features => bytes(input),
            _ => (ranks as u64 - 1) * parameters,
        });
        let sharded = layout.placements.iter().filter(|(name, _)| *name != INPUT);
        let joined = sharded.map(|(name, places)| {
            let times = places.iter().filter(|place| **place != Placement::Replicate).count() as u64;
            Ok(times * bytes(case.tensor(name)?))
        });
        Ok(each.sum::<u64>() + joined.sum::<Result<u64>>()?)
    }
}

impl DataParallel {
    fn takes(&self, place: Placement) -> bool {
        match (place, self.dims) {
            (Placement::Shard(dim), Some(dims)) => dims.contains(&dim),
            _ => true,
        }
    }
}

/// The whole, along the dims that `chosen` tells, of a tensor of `shape` that the ranks have shards of. What is joined is
/// replicated in `placements` then.
fn join(
    rank: &Rank,
    layout: &Layout,
    shard: &Tensor,
    shape: &[i64],
    placements: &mut [Placement],
    chosen: impl Fn(Placement) -> bool,
) -> Result<Tensor> {
    let mut local = shard.shallow_clone();
    // A later axis splits the parts of an earlier one.
    for axis in (0..placements.len()).rev() {
        let Placement::Shard(dim) = placements[axis] else { continue };
        if chosen(placements[axis]) {
            placements[axis] = Placement::Replicate;
            let extent = layout.parts(shape, placements).shape_of(rank.number())[dim];
            let sizes = layout.sizes.split(extent, rank.axes[axis].size());
            local = gather_from_parallel_region(&local, dim as i64, Some(&sizes), &rank.axes[axis])?;
        }
    }
    Ok(local)
}

/// The parameters that a layout splits.
struct Shards {
    /// The rank's parts.
    leaves: Vec<Held>,
    /// The wholes that are gathered from them, by name.
    gathered: BTreeMap<String, Tensor>,
}

impl Shards {
    fn cut(rank: &Rank, case: &Case, layout: &Layout) -> Result<Self> {
        let mut shards = Self { leaves: Vec::new(), gathered: BTreeMap::new() };
        for name in &case.header.params {
            let mut placements = layout.of(name);
            if !is_sharded(&placements) {
                continue;
            }
            let shape = case.tensor(name)?.size();
            let leaf = Held::leaf(rank, case, name, layout.parts(&shape, &placements))?;
            let whole = join(rank, layout, &leaf.tensor, &shape, &mut placements, |_| true)?;
            shards.gathered.insert(name.clone(), whole);
            shards.leaves.push(leaf);
        }
        Ok(shards)
    }
}

/// A supplier whose parameters are the same on all ranks of some groups, each of which uses them for its own samples: the
/// gradients are summed over the groups.
struct PerRank {
    store: ParamStore,
    groups: Vec<Group>,
    /// What stands for the store's tensors of these names.
    gathered: BTreeMap<String, Tensor>,
}

impl PerRank {
    fn of_store(&self, name: &str, tensor: Tensor) -> Tensor {
        self.gathered.get(name).map_or(tensor, Tensor::shallow_clone)
    }

    fn shared(&self, mut parameter: Tensor) -> isobar_shard::Result<Tensor> {
        for group in &self.groups {
            parameter = copy_to_parallel_region(&parameter, group)?;
        }
        Ok(parameter)
    }
}

impl Params for PerRank {
    type Array = Tensor;

    fn param(
        &mut self,
        name: &str,
        shape: &[i64],
        init: Init<Tensor>,
        placement: ParamPlacement,
    ) -> isobar_shard::Result<Tensor> {
        let parameter = self.store.param(name, shape, init, placement)?;
        self.shared(self.of_store(name, parameter))
    }

    fn buffer(
        &mut self,
        name: &str,
        shape: &[i64],
        init: Init<Tensor>,
        placement: ParamPlacement,
    ) -> isobar_shard::Result<Tensor> {
        let buffer = self.store.buffer(name, shape, init, placement)?;
        Ok(self.of_store(name, buffer))
    }

    fn draw(
        &self,
        name: &str,
        shape: &[i64],
        init: &Init<Tensor>,
        placement: ParamPlacement,
    ) -> isobar_shard::Result<Tensor> {
        self.store.draw(name, shape, init, placement)
    }

    fn tie(&mut self, alias: &str, name: &str) -> isobar_shard::Result<()> {
        self.store.tie(alias, name)
    }

    fn region(&self) -> &ParallelRegion {
        self.store.region()
    }
}
