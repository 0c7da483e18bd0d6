//! Models over sharded tensors: inputs and parameters lie as the layout says, and the model is single-device code.

use anyhow::{Context, Result, bail};
use isobar_models::{Batch, ModelConfig, registered};
use isobar_shard::{
    Error, Init, ParallelRegion, Params, Placement, ShardTensor, forbid_hidden_communication,
};

use super::{Forward, Held, Operator, Part, Pass, Rank, arguments};
use crate::verify::case::Case;
use crate::verify::layout::{Layout, Parts};

/// Every registered model. Its name is the case's operator, its configuration the case's arguments.
pub(crate) struct Registered;

/// Returns whether a model of that name is registered.
pub(crate) fn is_registered(name: &str) -> bool {
    registered().iter().any(|entry| entry.name() == name)
}

/// The array of a batch that an input of a case stands for.
fn array(input: &str) -> &str {
    match input {
        "input" | "x" => Batch::<ShardTensor>::FIELDS,
        "mod" => Batch::<ShardTensor>::TIME,
        other => other,
    }
}

/// Models whose cases have the channels behind the other dims, where a batch has them second.
const CHANNELS_LAST: [&str; 1] = ["fully_connected"];

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
        let mut supplier =
            Supplier { rank, case, layout, leaves: Vec::new(), region: ParallelRegion::single() };
        let mut batch = Batch::default();
        let channels_last = CHANNELS_LAST.contains(&case.header.op.as_str());
        for name in &case.header.inputs {
            let input = supplier.take(name)?;
            let input = if channels_last { turned(&input, true)? } else { input };
            batch = batch.with(array(name), input);
        }
        let config = ModelConfig::named(&case.header.op, arguments(&case.header))?;
        let model = config.build(&mut supplier)?;
        let unused = case.header.params.iter().find(|name| !supplier.leaves.iter().any(|l| l.name == **name));
        if let Some(unused) = unused {
            bail!("the model has no parameter `{unused}`");
        }
        // An operator that would gather its inputs silently does not count as supported.
        let _guard = forbid_hidden_communication();
        let batch = model.forward(&batch, Pass::of(&case.header).mode())?;
        let output = batch.get(Batch::<ShardTensor>::FIELDS).context("the model gives no fields")?;
        let output = if channels_last { turned(output, false)? } else { output.shallow_clone() };
        let whole = output.redistribute(None, &super::sharded::settled(&output))?;
        let part = Part::Of(Parts::of_layout(whole.layout()));
        let name = case.header.outputs.first().context("the case has no output")?.clone();
        let outputs = vec![Held { name, tensor: whole.local().shallow_clone(), part }];
        let counts = |leaf: &Held| case.get(&format!("grad.{}", leaf.name)).is_some();
        let leaves = supplier.leaves.into_iter().filter(counts).collect();
        Ok(Forward::Ran { outputs, leaves })
    }

    /// Models have none: what a layer may receive is checked of its operators.
    fn budget(&self, _case: &Case, _layout: &Layout, _rank: usize) -> Result<u64> {
        Ok(u64::MAX)
    }
}

/// Parameters that are the case's, laid out as is asked.
struct Supplier<'a> {
    rank: &'a Rank,
    case: &'a Case,
    layout: &'a Layout,
    leaves: Vec<Held>,
    region: ParallelRegion,
}

impl Supplier<'_> {
    /// The case's tensor of that name, which may be a further one of a tensor that several names stand for.
    fn take(&mut self, name: &str) -> Result<ShardTensor> {
        let case = self.case;
        let name = case.saved(name);
        let shape = case.tensor(name)?.size();
        let parts = self.layout.parts(&shape, &self.layout.of(name));
        let leaf = Held::leaf(self.rank, case, name, parts)?;
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
