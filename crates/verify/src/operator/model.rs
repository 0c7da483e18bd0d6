//! Models over sharded tensors: inputs and parameters lie as the layout says, and the model is single-device code.

use anyhow::{Result, bail};
use isobar_models::{Batch, ModelConfig, registered};
use isobar_shard::{
    BufferValues, Error, Init, ParallelRegion, Params, Placement, ShardTensor, forbid_hidden_communication,
};

use super::{Forward, LocalTensor, Operator, Part, Pass, Rank, arguments, traffic};
use crate::case::Case;
use crate::layout::{Layout, Parts};

/// Every registered model. Its name is the case's operator, its configuration the case's arguments.
pub(crate) struct Registered;

/// Returns whether a model of that name is registered.
pub(crate) fn is_registered(name: &str) -> bool {
    registered().iter().any(|entry| entry.name() == name)
}

/// The model of a case.
fn config(case: &Case) -> Result<ModelConfig> {
    Ok(ModelConfig::named(&case.header.op, arguments(&case.header))?)
}

/// Moves the last dim behind the first one, or the second to the end.
fn turned(x: &ShardTensor, to_second: bool) -> Result<ShardTensor> {
    let last = x.shape().len() as i64 - 1;
    let order: Vec<i64> = match to_second {
        true => [0, last].into_iter().chain(1..last).collect(),
        false => [0].into_iter().chain(2..=last).chain([1]).collect(),
    };
    Ok(x.permute(&order)?)
}

impl Operator for Registered {
    fn name(&self) -> &'static str {
        "a registered model"
    }

    fn forward(&self, rank: &Rank, case: &Case, layout: &Layout) -> Result<Forward> {
        let mut supplier = Supplier::new(rank, case, layout);
        let mut batch = Batch::default();
        let config = config(case)?;
        let signature = config.signature();
        for name in &case.header.inputs {
            let input = supplier.take(name)?;
            let input = if signature.moves_channels { turned(&input, true)? } else { input };
            batch = batch.with(signature.array(name), input);
        }
        let model = config.build(&mut supplier)?;
        supplier.check_used()?;
        // An operator that would gather its inputs silently does not count as supported.
        let _guard = forbid_hidden_communication();
        let batch = model.forward(&batch, Pass::of(&case.header).mode())?;
        // Outputs that the model does not give are reported as not computed.
        let given = signature.outputs.iter().map_while(|array| batch.get(array));
        let outputs = given.map(|output| match signature.moves_channels {
            true => turned(output, false),
            false => Ok(output.shallow_clone()),
        });
        supplier.ran(&outputs.collect::<Result<Vec<_>>>()?)
    }

    fn forward_budget(&self, case: &Case, layout: &Layout) -> Result<u64> {
        Ok(traffic::budget(&config(case)?, case, layout)?.map_or(u64::MAX, |budget| budget.forward))
    }

    fn budget(&self, case: &Case, layout: &Layout, _rank: &Rank) -> Result<u64> {
        Ok(traffic::budget(&config(case)?, case, layout)?.map_or(u64::MAX, |budget| budget.both))
    }
}

/// Parameters that are the case's, laid out as is asked.
pub(super) struct Supplier<'a> {
    rank: &'a Rank,
    case: &'a Case,
    layout: &'a Layout,
    leaves: Vec<LocalTensor>,
    region: ParallelRegion,
}

impl<'a> Supplier<'a> {
    pub(super) fn new(rank: &'a Rank, case: &'a Case, layout: &'a Layout) -> Self {
        Self { rank, case, layout, leaves: Vec::new(), region: ParallelRegion::single() }
    }

    /// Refuses a case with parameters that the model did not ask for.
    pub(super) fn check_used(&self) -> Result<()> {
        let unused =
            self.case.header.params.iter().find(|name| !self.leaves.iter().any(|l| l.name == **name));
        match unused {
            Some(unused) => bail!("the model has no parameter `{unused}`"),
            None => Ok(()),
        }
    }

    /// Result of a case with these outputs.
    pub(super) fn ran(self, outputs: &[ShardTensor]) -> Result<Forward> {
        let case = self.case;
        let held = |(name, output): (&String, &ShardTensor)| -> Result<LocalTensor> {
            let whole = output.redistribute(None, &super::sharded::settled(output))?;
            let part = Part::Of(Parts::of_layout(whole.layout()));
            Ok(LocalTensor { name: name.clone(), tensor: whole.local().shallow_clone(), part })
        };
        let outputs = case.header.outputs.iter().zip(outputs).map(held).collect::<Result<_>>()?;
        // Inputs of a forward pass alone have no gradient, but were taken as the layout says.
        let counts = |leaf: &LocalTensor| {
            case.get(&format!("grad.{}", leaf.name)).is_some() || case.header.inputs.contains(&leaf.name)
        };
        let leaves = self.leaves.into_iter().filter(counts).collect();
        Ok(Forward::Ran { outputs, leaves })
    }

    /// The case's tensor of that name, which may be a further one of a tensor that several names stand for.
    pub(super) fn take(&mut self, name: &str) -> Result<ShardTensor> {
        let case = self.case;
        let name = case.saved(name);
        let shape = case.tensor(name)?.size();
        let parts = self.layout.parts(&shape, &self.layout.of(name));
        let leaf = LocalTensor::leaf(self.rank, case, name, parts)?;
        let tensor =
            ShardTensor::from_parts(&leaf.tensor, &self.layout.shard(name, &shape, &self.rank.mesh)?)?;
        self.leaves.push(leaf);
        Ok(tensor)
    }
}

impl Params for Supplier<'_> {
    type Array = ShardTensor;

    fn param(
        &mut self,
        name: &str,
        shape: &[i64],
        _init: Init<ShardTensor>,
        _placement: Placement,
    ) -> isobar_shard::Result<ShardTensor> {
        let refuse = |reason: String| Error::Parameter { name: name.to_owned(), reason };
        let tensor = self.take(name).map_err(|error| refuse(format!("{error:#}")))?;
        match tensor.shape() == shape {
            true => Ok(tensor),
            false => Err(refuse(format!("the case's is {:?}, the model's {shape:?}", tensor.shape()))),
        }
    }

    fn buffer(
        &mut self,
        name: &str,
        shape: &[i64],
        init: Init<ShardTensor>,
        placement: Placement,
    ) -> isobar_shard::Result<ShardTensor> {
        self.param(name, shape, init, placement)
    }

    fn computed_buffer(
        &mut self,
        name: &str,
        shape: &[i64],
        _values: BufferValues,
    ) -> isobar_shard::Result<()> {
        self.param(name, shape, Init::Constant(0.0), Placement::Replicate).map(drop)
    }

    /// Values that nobody sees: the case's come in their place.
    fn draw(
        &self,
        _name: &str,
        shape: &[i64],
        _init: &Init<ShardTensor>,
        _placement: Placement,
    ) -> isobar_shard::Result<ShardTensor> {
        let placements = vec![Placement::Replicate; self.rank.mesh.ndim()];
        let layout =
            isobar_shard::Layout::new(&self.rank.mesh, &placements, shape, &isobar_shard::Sizes::Chunk)?;
        ShardTensor::ones(&layout, tch::Kind::Float, tch::Device::Cpu)
    }

    fn tie(&mut self, _alias: &str, _name: &str) -> isobar_shard::Result<()> {
        Ok(())
    }

    fn region(&self) -> &ParallelRegion {
        &self.region
    }
}
