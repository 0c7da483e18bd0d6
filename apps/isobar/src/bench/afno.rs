//! Training steps of AFNOs over all ranks: channel-parallel, and sharded over the domain.

use anyhow::{Result, ensure};
use isobar_collectives::Group;
use isobar_manager::DeviceMesh;
use isobar_models::{Afno, AfnoConfig, DistributedAfno, DistributedAfnoConfig, Mode};
use isobar_shard::{
    Generator, MeshParams, Parallel, ParallelRegion, ParamStore, Placement, Reduce, ShardTensor,
};
use isobar_torch::guard::NoGrad;
use isobar_torch::{autograd, autograd::BackwardOptions};
use isobar_train::Parameters;
use isobar_train::optim::{AdamW, AdamWConfig, Optimizer};
use tch::{Device, Kind, Reduction, Tensor};

use super::{Prepared, Timed};

const LR: f64 = 1e-3;

pub(crate) fn train_step(group: &Group) -> Result<Prepared> {
    let config = DistributedAfnoConfig {
        out_channels: Some(8),
        patch_size: 8,
        embed_dim: 256,
        depth: 4,
        num_blocks: 8,
        ..DistributedAfnoConfig::new([360, 720], 8)
    };
    tch::manual_seed(0);
    let x = Tensor::f_randn([1, 8, 360, 720], (Kind::Float, Device::Cpu))?;
    let mut store = ParamStore::new(Generator::new(0)).with_region(ParallelRegion::new(group.clone()));
    let model = DistributedAfno::new(&config, &mut store)?;
    check(&config, &model, &x)?;

    let (params, _) = Parameters::from_store(&store, group)?;
    let mut optimizer = AdamW::new(&params, &AdamWConfig { lr: LR, ..AdamWConfig::default() })?;
    let step = move || {
        params.zero_grad()?;
        let loss = model.forward(&x, Mode::Eval)?.f_mse_loss(&x, Reduction::Mean)?;
        autograd::backward(&[&loss], &[], BackwardOptions::default())?;
        optimizer.step(LR)?;
        Ok(())
    };
    Ok(Prepared { timed: Timed::Step(Box::new(step)), output: None })
}

/// Parameters start with the same values on any number of ranks, and so must the output.
fn check(config: &DistributedAfnoConfig, model: &DistributedAfno, x: &Tensor) -> Result<()> {
    let _no_grad = NoGrad::new();
    let dense = DistributedAfno::new(config, &mut ParamStore::new(Generator::new(0)))?;
    let want = dense.forward(x, Mode::Eval)?;
    let got = model.forward(x, Mode::Eval)?;
    ensure!(
        got.f_allclose(&want, 1e-3, 1e-4, false)?,
        "the model gives another result on these ranks than on one"
    );
    Ok(())
}

/// A training step of the AFNO of the same sizes, its fields split along their height over all ranks; `alone`, each rank has
/// the whole for itself, all at the same time.
pub(crate) fn domain_step(group: &Group, alone: bool) -> Result<Prepared> {
    let group = if alone { Group::single() } else { group.clone() };
    let config = AfnoConfig {
        patch_size: [8, 8],
        embed_dim: 256,
        depth: 4,
        num_blocks: 8,
        ..AfnoConfig::new([360, 720], 8, 8)
    };
    tch::manual_seed(0);
    let whole = Tensor::f_randn([1, 8, 360, 720], (Kind::Float, Device::Cpu))?;
    let mesh = DeviceMesh::new(&group, &[group.size() as i64], &["domain"])?;
    let split = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(2)])?;
    let x = ShardTensor::from_parts(&split.local().f_contiguous()?.f_detach_copy()?, split.layout())?;
    let mut store = ParamStore::new(Generator::new(0));
    let model = Afno::new(&config, &mut MeshParams::new(&mut store, &mesh))?;
    {
        let _no_grad = NoGrad::new();
        let dense = Afno::new(&config, &mut ParamStore::new(Generator::new(0)))?;
        let want = ShardTensor::distribute_as(&dense.forward(&whole, Mode::Eval)?, x.layout())?;
        let got = model.forward(&x, Mode::Eval)?.laid_out_as(&x)?;
        ensure!(
            got.local().f_allclose(want.local(), 1e-3, 1e-4, false)?,
            "the model gives another result on these ranks than on one"
        );
    }
    let (params, _) = Parameters::from_store(&store, &Group::single())?;
    let mut optimizer = AdamW::new(&params, &AdamWConfig { lr: LR, ..AdamWConfig::default() })?;
    let step = move || {
        params.zero_grad()?;
        model.forward(&x, Mode::Eval)?.mse_loss(&x)?.backward()?;
        optimizer.step(LR)?;
        Ok(())
    };
    Ok(Prepared { timed: Timed::Step(Box::new(step)), output: None })
}
