//! Input channels that a network is given as one vector for each sample.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{Array, Generator, Window};
use isobar_collectives::threads;
use isobar_manager::{DeviceMesh, DistributedManager};
use isobar_models::{
    Batch, DitConfig, EdmPreconditionerConfig, Mode, ModelArray, ModelConfig, PerDim, Sharding, SigmaData,
    SongUNetConfig,
};
use isobar_shard::{Layout, ParamStore, Params, Placement, ShardTensor, Sizes};
use isobar_train::{Conditions, DiffusionConfig, Forward, Network, on_mesh};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Two numbers a sample, before one channel of positions.
const CONDITIONS: Conditions = Conditions { count: 2, behind: 1 };

fn store() -> ParamStore {
    ParamStore::new(Generator::new(3)).with_options(DOUBLE.0, DOUBLE.1)
}

fn random(seed: u64, shape: &[i64]) -> Tensor {
    Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, DOUBLE).unwrap()
}

/// Two samples of a field and positions, and their numbers.
fn parts() -> [Tensor; 3] {
    [random(1, &[2, 1, 12, 10]), random(2, &[2, 1, 12, 10]), random(3, &[2, 2])]
}

/// All as channels.
fn channels() -> Tensor {
    let [x, positions, numbers] = parts();
    Tensor::cat(&[x, numbers.reshape([2, 2, 1, 1]).expand([2, 2, 12, 10], false), positions], 1)
}

fn dit<A: ModelArray>(params: &mut impl Params<Array = A>) -> Box<dyn isobar_models::Model<A>> {
    let config = DitConfig {
        patch_size: PerDim::All(2),
        out_channels: Some(1),
        hidden_size: 8,
        depth: 1,
        num_heads: 2,
        condition_dim: Some(2),
        dit_initialization: false,
        ..DitConfig::new([12, 10], 2)
    };
    ModelConfig::new(config).build(params).unwrap()
}

fn denoiser<A: ModelArray>(params: &mut impl Params<Array = A>) -> Box<dyn isobar_models::Model<A>> {
    let unet = SongUNetConfig {
        model_channels: 4,
        channel_mult: vec![1, 2],
        num_blocks: 1,
        attn_resolutions: vec![],
        dropout: 0.0,
        label_dim: 2,
        ..SongUNetConfig::new([12, 10], 3, 1)
    };
    ModelConfig::new(EdmPreconditionerConfig::new(ModelConfig::new(unet))).build(params).unwrap()
}

fn network<A: ModelArray>(denoises: bool, params: &mut impl Params<Array = A>) -> Network<A> {
    match denoises {
        false => Network::new(dit(params)),
        true => Network::new(denoiser(params))
            .denoising(Some(SigmaData::All(0.5).into()))
            .objective(DiffusionConfig::default(), 3),
    }
    .conditioned(Some(CONDITIONS))
}

/// The batch of a network of all channels; of a denoiser, they are conditions on the grid.
fn batch<A: Array>(denoises: bool, array: impl Fn(&Tensor, bool) -> A) -> Batch<A> {
    let inputs = array(&channels(), true);
    match denoises {
        false => Batch::of_fields(inputs),
        true => Batch::of_fields(array(&random(4, &[2, 1, 12, 10]), true))
            .with(Batch::<A>::CONDITIONS, inputs)
            .with(Batch::<A>::SIGMA, array(&Tensor::from_slice(&[0.3, 2.0]), false)),
    }
}

#[rstest]
fn numbers_of_samples_are_an_array(#[values(false, true)] denoises: bool) {
    let whole = |x: &Tensor, _: bool| x.shallow_clone();
    let got = network(denoises, &mut store()).forward(batch(denoises, whole), None).unwrap();
    let [x, positions, numbers] = parts();
    let fields = Tensor::cat(&[x, positions], 1);
    let given = match denoises {
        false => Batch::of_fields(fields).with("conditions", numbers),
        true => batch(true, whole).with("conditions", fields).with("class_labels", numbers),
    };
    let model = if denoises { denoiser(&mut store()) } else { dit(&mut store()) };
    let want = model.forward(&given, Mode::Eval).unwrap().take("fields").unwrap();
    assert_eq!(got, want);
    let other = Conditions { count: 4, behind: 0 };
    let error = Network::new(dit(&mut store())).conditioned(Some(other)).forward(batch(false, whole), None);
    assert!(error.unwrap_err().to_string().contains("have no fields besides 4 conditions"));
}

#[rstest]
fn they_are_the_same_on_every_mesh(#[values(false, true)] denoises: bool) {
    let want = {
        let _no_grad = tch::no_grad_guard();
        network(denoises, &mut store()).forward(batch(denoises, |x, _| x.shallow_clone()), None).unwrap()
    };
    for (ranks, shape, names) in [
        (2, &[2][..], &["domain"][..]),
        (3, &[3], &["domain"]),
        (4, &[2, 2], &["domain", "domain_y"]),
        (4, &[2, 2], &["data", "domain"]),
    ] {
        let runs = threads::run(ranks, Duration::from_secs(240), move |world| {
            let _rank = DistributedManager::bind_thread(&world);
            let mesh = DeviceMesh::new(&world, shape, names).unwrap();
            let mut store = store();
            let (mut params, _) = on_mesh(&mut store, &mesh, &world, &Sharding::new(), false).unwrap();
            let network = network(denoises, &mut params);
            let array = |x: &Tensor, on_grid: bool| {
                let placements = names.iter().map(|&name| match name {
                    "data" => Placement::Shard(0),
                    _ if !on_grid => Placement::Replicate,
                    "domain" => Placement::Shard(2),
                    _ => Placement::Shard(3),
                });
                let placements: Vec<Placement> = placements.collect();
                let layout = Layout::new(&mesh, &placements, &x.size(), &Sizes::Chunk).unwrap();
                ShardTensor::distribute_as(x, &layout).unwrap()
            };
            let y = network.forward(batch(denoises, array), None).unwrap();
            y.full_tensor(None).unwrap().detach()
        });
        for got in runs {
            assert!((got - &want).abs().max().double_value(&[]) < 1e-12, "{names:?}");
        }
    }
}
