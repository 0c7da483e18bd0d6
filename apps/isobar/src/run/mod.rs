//! What commands that run a network share: its ranks, its data, itself.

mod fields;
pub(crate) mod picture;
mod ranks;
mod raster;

use anyhow::Result;
use isobar_data::Normalizer;
use isobar_manager::DistributedManager;
use isobar_shard::{Generator, MeshParams, ParallelRegion, ParamStore, ShardTensor};
use isobar_train::{BoxError, DenseFields, FieldLayout, FieldTask, Parameters, Ranks, ShardedFields, Step};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use self::fields::Fields;
use self::ranks::Arrangement;
use crate::config::Config;

/// The network of a configuration with its data.
pub(crate) struct Run<L, F> {
    pub(crate) task: FieldTask<L, F>,
    pub(crate) params: Parameters,
    pub(crate) buffers: Vec<(String, Tensor)>,
    pub(crate) ranks: Ranks,
}

/// By what fields are scaled for the network: what a checkpoint keeps beside its parameters.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Scales {
    pub(crate) input: Normalizer,
    pub(crate) target: Normalizer,
}

/// What is to be done with a [`Run`], whether its fields are whole on a rank or split.
pub(crate) trait Job {
    /// What comes of it.
    type Out;

    /// Does it. All ranks call.
    fn run<L, F>(self, run: Run<L, F>) -> Result<Self::Out>
    where
        L: FieldLayout,
        F: Fn(&L::Array, Option<Step<'_>>) -> Result<L::Array, BoxError>;
}

/// Arranges the ranks, reads the data, makes the network, and does the job. All ranks call.
pub(crate) fn with<J: Job>(manager: &DistributedManager, config: &Config, job: J) -> Result<J::Out> {
    let Arrangement { ranks, model, domain } = Arrangement::new(manager, config)?;
    let device = manager.device();
    let store = ParamStore::new(Generator::new(config.run.seed)).with_options(Kind::Float, device);
    let mut store = store.with_region(ParallelRegion::new(model.clone()));
    match domain {
        None => {
            let (fields, layout) = Fields::read_alike(config, device, &ranks.world, |_| Ok(DenseFields))?;
            let network = config.model.build(&mut store)?;
            let (params, buffers) = Parameters::from_store(&store, &model)?;
            let forward = move |x: &Tensor, step: Option<Step<'_>>| network.forward(x, step);
            job.run(Run { task: task(config, fields, layout, forward), params, buffers, ranks })
        }
        Some(mesh) => {
            let lay_out = |extents: &[usize]| Ok(ShardedFields::new(&mesh, extents)?);
            let (fields, layout) = Fields::read_alike(config, device, &ranks.world, lay_out)?;
            let network = config.model.build(&mut MeshParams::new(&mut store, &mesh))?;
            let (params, buffers) = Parameters::from_store(&store, &model)?;
            let forward = move |x: &ShardTensor, step: Option<Step<'_>>| network.forward(x, step);
            job.run(Run { task: task(config, fields, layout, forward), params, buffers, ranks })
        }
    }
}

fn task<L, F>(config: &Config, fields: Fields, layout: L, forward: F) -> FieldTask<L, F> {
    FieldTask {
        forward,
        layout,
        train: fields.train,
        validation: fields.validation,
        rollouts: fields.rollouts,
        input: fields.input,
        target: fields.target,
        augment: config.data.augment.into(),
        loss: config.train.loss,
        seed: config.run.seed,
    }
}
