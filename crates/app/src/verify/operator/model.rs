//! Models over sharded tensors: inputs and parameters lie as the layout says, and the model is single-device code.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use isobar_models::{Afno, Fno, FullyConnected, ModAfno, SrResNet, UNet};
use isobar_shard::{
    Error, Init, ParallelRegion, Params, Placement, ShardTensor, forbid_hidden_communication,
};

use super::{Forward, Held, Operator, Part, Pass, Rank, config};
use crate::verify::case::{Case, Header};
use crate::verify::layout::{Layout, Parts};

pub(crate) struct Model {
    name: &'static str,
    /// Makes the model from its arguments and the supplier of its parameters.
    make: fn(&Header, &mut Supplier<'_>) -> Result<Run>,
}

/// A model's forward pass, of the case's inputs by name.
type Run = Box<dyn Fn(&Inputs) -> Result<ShardTensor>>;

pub(crate) static ALL: [Model; 6] = [
    Model {
        name: "fully_connected",
        make: |header, params| {
            let model = FullyConnected::new(&config(header)?, params)?;
            Ok(Box::new(move |inputs| Ok(model.forward(inputs.get("input")?)?)))
        },
    },
    Model {
        name: "afno",
        make: |header, params| {
            let (model, pass) = (Afno::new(&config(header)?, params)?, Pass::of(header));
            Ok(Box::new(move |inputs| Ok(model.forward(inputs.get("input")?, pass.mode())?)))
        },
    },
    Model {
        name: "mod_afno",
        make: |header, params| {
            let (model, pass) = (ModAfno::new(&config(header)?, params)?, Pass::of(header));
            Ok(Box::new(move |inputs| {
                Ok(model.forward(inputs.get("x")?, inputs.get("mod")?, pass.mode())?)
            }))
        },
    },
    Model {
        name: "fno",
        make: |header, params| {
            let model = Fno::new(&config(header)?, params)?;
            Ok(Box::new(move |inputs| Ok(model.forward(inputs.get("input")?)?)))
        },
    },
    Model {
        name: "unet",
        make: |header, params| {
            let (model, pass) = (UNet::new(&config(header)?, params)?, Pass::of(header));
            Ok(Box::new(move |inputs| Ok(model.forward(inputs.get("input")?, pass.mode())?)))
        },
    },
    Model {
        name: "sr_res_net",
        make: |header, params| {
            let (model, pass) = (SrResNet::new(&config(header)?, params)?, Pass::of(header));
            Ok(Box::new(move |inputs| Ok(model.forward(inputs.get("input")?, pass.mode())?)))
        },
    },
];

/// The inputs of a case.
struct Inputs(BTreeMap<String, ShardTensor>);

impl Inputs {
    fn get(&self, name: &str) -> Result<&ShardTensor> {
        self.0.get(name).with_context(|| format!("the case has no input `{name}`"))
    }
}

impl Operator for Model {
    fn name(&self) -> &'static str {
        self.name
    }

    fn forward(&self, rank: &Rank, case: &Case, layout: &Layout) -> Result<Forward> {
        let mut supplier =
            Supplier { rank, case, layout, leaves: Vec::new(), region: ParallelRegion::single() };
        let mut inputs = BTreeMap::new();
        for name in &case.header.inputs {
            inputs.insert(name.clone(), supplier.take(name)?);
        }
        let model = (self.make)(&case.header, &mut supplier)?;
        let unused = case.header.params.iter().find(|name| !supplier.leaves.iter().any(|l| l.name == **name));
        if let Some(unused) = unused {
            bail!("the model has no parameter `{unused}`");
        }
        // An operator that would gather its inputs silently does not count as supported.
        let _guard = forbid_hidden_communication();
        let output = model(&Inputs(inputs))?;
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
