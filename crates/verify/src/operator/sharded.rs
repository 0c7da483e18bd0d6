//! The operators of sharded tensors.

use std::sync::LazyLock;

use anyhow::{Context, Result, bail};
use isobar_array::Attrs;
use isobar_shard::rules::{Footprint, FootprintTensor, Operator as Descriptor, operators};
use isobar_shard::{ShardTensor, forbid_hidden_communication};
use tch::Tensor;

use super::{Forward, LocalTensor, Operator, Part, Rank};
use crate::case::Case;
use crate::layout::{Layout, Parts};

/// An operator of `isobar-shard`, or of the program, by its name there and in the cases.
pub(crate) struct Sharded(&'static Descriptor);

/// All of them.
pub(crate) static ALL: LazyLock<Vec<Sharded>> =
    LazyLock::new(|| operators().into_iter().map(Sharded).collect());

impl Sharded {
    /// The case's tensors that go in, in the operator's order.
    fn names(&self, case: &Case) -> Result<Vec<String>> {
        let inputs = case.header.inputs.iter().chain(&case.header.params);
        let mut there: Vec<String> = inputs.filter(|name| case.get(name).is_some()).cloned().collect();
        let ordered = self.0.tensors();
        // Any number of them, or the only one, by whatever name.
        if ordered.len() > 1 {
            let place = |name: &String| ordered.iter().position(|known| known == name);
            if let Some(unknown) = there.iter().find(|name| place(name).is_none()) {
                let (op, known) = (self.0.name(), ordered.join(", "));
                bail!("{op} has no tensor \"{unknown}\"; its tensors are {known}");
            }
            there.sort_by_key(place);
        }
        Ok(there)
    }
}

impl Operator for Sharded {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn forward(&self, rank: &Rank, case: &Case, layout: &Layout) -> Result<Forward> {
        let mut leaves = Vec::new();
        let mut tensors = Vec::new();
        for name in self.names(case)? {
            let shape = case.tensor(&name)?.size();
            let of_shards = layout.shard(&name, &shape, &rank.mesh)?;
            let leaf = LocalTensor::leaf(rank, case, &name, layout.parts(&shape, &layout.of(&name)))?;
            tensors.push(ShardTensor::from_parts(&leaf.tensor, &of_shards)?);
            leaves.push(leaf);
        }
        // An operator that would gather its inputs silently does not count as supported.
        let _guard = forbid_hidden_communication();
        let attrs: &Attrs = case.header.attrs.as_object().context("`attrs` is no table")?;
        let inputs: Vec<&ShardTensor> = tensors.iter().collect();
        let results = ShardTensor::op(self.0.name(), &inputs, attrs)?;
        let mut outputs = Vec::new();
        for (name, result) in case.header.outputs.iter().zip(results) {
            let whole = result.redistribute(None, &settled(&result))?;
            let part = Part::Of(Parts::of_layout(whole.layout()));
            outputs.push(LocalTensor { name: name.clone(), tensor: whole.local().shallow_clone(), part });
        }
        Ok(Forward::Ran { outputs, leaves })
    }

    fn budget(&self, case: &Case, layout: &Layout, rank: &Rank) -> Result<u64> {
        let element = |tensor: &Tensor| tensor.kind().elt_size_in_bytes() as u64;
        let mut tensors = Vec::new();
        for name in self.names(case)? {
            let tensor = case.tensor(&name)?;
            let layout = layout.shard(&name, &tensor.size(), &rank.mesh)?;
            tensors.push(FootprintTensor { layout, element: element(tensor) });
        }
        let outputs = case.header.outputs.iter().filter_map(|name| case.get(name));
        let footprint = Footprint {
            operator: self.0.name(),
            tensors,
            outputs: outputs.map(|output| (output.size(), element(output))).collect(),
            attrs: case.header.attrs.as_object().context("`attrs` is no table")?,
            rank: rank.number(),
            gradients: self.names(case)?.iter().any(|name| case.get(&format!("grad.{name}")).is_some()),
        };
        Ok(self.0.traffic().bytes(&footprint)?)
    }
}

/// The placements of a tensor with what is partial replicated: the values are looked at.
pub(super) fn settled(tensor: &ShardTensor) -> Vec<isobar_shard::Placement> {
    tensor.placements().iter().map(|placement| placement.without_partial()).collect()
}
