//! A training step of the channel-parallel AFNO over all ranks.

use anyhow::{Result, ensure};
use isobar_array::Generator;
use isobar_collectives::Group;
use isobar_models::{DistributedAfno, DistributedAfnoConfig, Mode};
use isobar_shard::{ParallelRegion, ParamStore};
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
