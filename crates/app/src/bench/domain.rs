//! Training steps of models whose fields are split along their height over all ranks.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use isobar_array::{Generator, Local, Reduce};
use isobar_collectives::Group;
use isobar_manager::DeviceMesh;
use isobar_models::{Afno, AfnoConfig, Fno, FnoConfig, Mode, UNet, UNetConfig};
use isobar_shard::{MeshParams, ParamStore, Params, Placement, ShardTensor};
use isobar_torch::guard::NoGrad;
use isobar_train::optim::{AdamW, AdamWConfig, Optimizer};
use isobar_train::{DataParallel, DataParallelConfig, Parameters};
use tch::{Device, Kind, Tensor};

use super::{Prepared, Timed};

const LR: f64 = 1e-3;

/// A model, and the shape of its fields, which come out as they go in.
pub(crate) struct Case {
    shape: &'static [i64],
    dense: fn(&mut ParamStore) -> Result<Pass<Tensor>>,
    sharded: fn(&mut MeshParams<'_>) -> Result<Pass<ShardTensor>>,
}

type Pass<A> = Box<dyn Fn(&A) -> isobar_models::Result<A>>;

/// The AFNO of `afno/train_step`.
pub(crate) const AFNO: Case =
    Case { shape: &[1, 8, 360, 720], dense: |params| afno(params), sharded: |params| afno(params) };

/// A Fourier neural operator of width 32 and 16 modes.
pub(crate) const FNO: Case =
    Case { shape: &[4, 2, 256, 256], dense: |params| fno(params), sharded: |params| fno(params) };

/// A U-Net of three levels.
pub(crate) const UNET: Case =
    Case { shape: &[1, 2, 64, 64, 64], dense: |params| unet(params), sharded: |params| unet(params) };

/// The model and the batch of `configs/darcy_afno.toml`.
const DEMO: Case =
    Case { shape: &[8, 1, 64, 64], dense: |params| demo(params), sharded: |params| demo(params) };

fn demo<P: Params>(params: &mut P) -> Result<Pass<P::Array>>
where
    P::Array: 'static,
{
    let sizes = AfnoConfig::new([64, 64], 1, 1);
    let config = AfnoConfig { patch_size: [4, 4], embed_dim: 128, depth: 4, num_blocks: 8, ..sizes };
    let model = Afno::new(&config, params)?;
    Ok(Box::new(move |x| model.forward(x, Mode::Eval)))
}

fn afno<P: Params>(params: &mut P) -> Result<Pass<P::Array>>
where
    P::Array: 'static,
{
    let sizes = AfnoConfig::new([360, 720], 8, 8);
    let config = AfnoConfig { patch_size: [8, 8], embed_dim: 256, depth: 4, num_blocks: 8, ..sizes };
    let model = Afno::new(&config, params)?;
    Ok(Box::new(move |x| model.forward(x, Mode::Eval)))
}

fn fno<P: Params>(params: &mut P) -> Result<Pass<P::Array>>
where
    P::Array: 'static,
{
    let model = Fno::new(&FnoConfig::new(2, 2), params)?;
    Ok(Box::new(move |x| model.forward(x)))
}

fn unet<P: Params>(params: &mut P) -> Result<Pass<P::Array>>
where
    P::Array: 'static,
{
    let sizes = UNetConfig::new(2, 2);
    let channels = vec![16, 16, 32, 32, 64, 64];
    let config = UNetConfig { model_depth: 3, feature_map_channels: channels, ..sizes };
    let model = UNet::new(&config, params)?;
    Ok(Box::new(move |x| model.forward(x, Mode::Eval)))
}

/// A training step over all ranks; `alone`, each rank has the whole for itself, all at the same time.
pub(crate) fn step(group: &Group, case: &Case, alone: bool) -> Result<Prepared> {
    let group = if alone { Group::single() } else { group.clone() };
    tch::manual_seed(0);
    let whole = Tensor::f_randn(case.shape, (Kind::Float, Device::Cpu))?;
    let mesh = DeviceMesh::new(&group, &[group.size() as i64], &["domain"])?;
    let split = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(2)])?;
    let x = ShardTensor::from_parts(&split.local().f_contiguous()?.f_detach_copy()?, split.layout())?;
    let mut store = ParamStore::new(Generator::new(0));
    let model = (case.sharded)(&mut MeshParams::new(&mut store, &mesh).pending())?;
    {
        let _no_grad = NoGrad::new();
        let dense = (case.dense)(&mut ParamStore::new(Generator::new(0)))?;
        let want = ShardTensor::distribute_as(&dense(&whole)?, x.layout())?;
        let got = model(&x)?.laid_out_as(&x)?;
        ensure!(
            got.local().f_allclose(want.local(), 1e-3, 1e-4, false)?,
            "the model gives another result on these ranks than on one"
        );
    }
    let (params, _) = Parameters::from_store(&store, &Group::single())?;
    let mut optimizer = AdamW::new(&params, &AdamWConfig { lr: LR, ..AdamWConfig::default() })?;
    // The loss is that of the whole field, on every rank: one sample of one.
    let parallel = DataParallel::new(&params, &[], &group, &DataParallelConfig::default())?;
    let step = move || {
        parallel.zero_grad()?;
        let loss = model(&x)?.mse_loss(&x)?.full_tensor(None)?;
        parallel.backward(Some(&loss), 1, 1)?;
        optimizer.step(LR)?;
        Ok(())
    };
    Ok(Prepared { timed: Timed::Step(Box::new(step)), output: None })
}

/// Measures the time of a step per collective, for the demo's model with sharded fields.
pub(crate) fn step_for_each_collective(group: &Group) -> Result<Prepared> {
    let Timed::Step(mut step) = step(group, &DEMO, false)?.timed else { bail!("a step is timed as one") };
    let group = group.clone();
    let begun = move || group.flight().entries(1, false).last().map_or(0, |entry| entry.number);
    let measure = move || {
        let (before, start) = (begun(), Instant::now());
        step()?;
        let seconds = start.elapsed().as_secs_f64();
        let collectives = begun() - before;
        ensure!(collectives > 0, "a step has no collective; expected more ranks than one");
        Ok(seconds / collectives as f64)
    };
    Ok(Prepared { timed: Timed::Measured(Box::new(measure)), output: None })
}
