//! Fully sharded training against data parallelism: values, losses, memory.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_collectives::{Group, threads};
use isobar_manager::DeviceMesh;
use isobar_models::{Afno, AfnoConfig, Fno, FnoConfig, Mode, PerDim, UNet, UNetConfig};
use isobar_shard::{
    Generator, MeshParams, ParamStore, Placement, Reduce, ShardTensor, Window, forbid_hidden_communication,
};
use isobar_train::optim::{AdamW, AdamWConfig, Optimizer};
use isobar_train::{
    DataParallel, DataParallelConfig, FullySharded, Overlap, Parameters, ShardedParameters, clip_grad_norm,
};
use rstest::rstest;
use tch::{Device, Kind};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
const STEPS: usize = 6;

#[derive(Debug, Clone, Copy)]
enum Subject {
    Afno,
    AfnoAgain,
    Fno,
    UNet,
}

type Model = Box<dyn Fn(&ShardTensor) -> isobar_models::Result<ShardTensor>>;

impl Subject {
    /// Its fields, which come out as they go in.
    fn shape(self) -> &'static [i64] {
        match self {
            Self::UNet => &[6, 2, 8, 6, 4],
            _ => &[6, 2, 12, 8],
        }
    }

    fn make(self, params: &mut MeshParams<'_>) -> Model {
        match self {
            Self::Afno | Self::AfnoAgain => {
                let config = AfnoConfig {
                    patch_size: [2, 2],
                    embed_dim: 8,
                    depth: 3,
                    num_blocks: 2,
                    gradient_checkpointing: matches!(self, Self::AfnoAgain),
                    ..AfnoConfig::new([12, 8], 2, 2)
                };
                let model = Afno::new(&config, params).unwrap();
                Box::new(move |x| model.forward(x, Mode::Eval))
            }
            Self::Fno => {
                let config = FnoConfig {
                    latent_channels: 6,
                    decoder_layer_size: 5,
                    num_fno_layers: 2,
                    num_fno_modes: PerDim::All(3),
                    ..FnoConfig::new(2, 2)
                };
                let model = Fno::new(&config, params).unwrap();
                Box::new(move |x| model.forward(x))
            }
            Self::UNet => {
                let channels = vec![3, 4, 4, 4];
                let config =
                    UNetConfig { model_depth: 2, feature_map_channels: channels, ..UNetConfig::new(2, 2) };
                let model = UNet::new(&config, params).unwrap();
                Box::new(move |x| model.forward(x, Mode::Eval))
            }
        }
    }
}

/// Losses and norms of gradients of some steps, and the loss of what came of them, without gradients.
fn train(
    subject: Subject,
    group: &Group,
    mesh: &DeviceMesh,
    sharded: bool,
    units: (f64, Overlap),
) -> Vec<f64> {
    let names = mesh.names();
    let place = |name: &&str| match *name {
        "domain" => Placement::Shard(2),
        _ => Placement::Shard(0),
    };
    let places: Vec<Placement> = names.iter().map(place).collect();
    let fields = |seed| {
        let whole = Generator::new(seed).normal(&Window::whole(subject.shape()), 0.0, 1.0, DOUBLE).unwrap();
        ShardTensor::distribute(&whole, mesh, &places).unwrap()
    };
    let (x, target) = (fields(1), fields(2));
    let mut store = ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu);
    let watch = ShardedParameters::default();
    let params = MeshParams::new(&mut store, mesh).pending();
    let model = subject.make(&mut if sharded { params.watched(watch.watch()) } else { params });
    let (whole, _) = Parameters::from_store(&store, &Group::single()).unwrap();
    let config = DataParallelConfig { bucket_mb: units.0, overlap: units.1, ..Default::default() };
    let replicated = (!sharded).then(|| DataParallel::new(&whole, &[], group, &config).unwrap());
    let fully = sharded.then(|| FullySharded::new(watch, &whole, &[], mesh, &config).unwrap());
    let params = fully.as_ref().map_or(&whole, FullySharded::parameters);
    let mut adamw = AdamW::new(params, &AdamWConfig { lr: 0.01, ..Default::default() }).unwrap();
    let _guard = forbid_hidden_communication();
    let loss_of = || model(&x).unwrap().mse_loss(&target).unwrap().full_tensor(None).unwrap();
    let mut found = Vec::new();
    for _ in 0..STEPS {
        let loss = loss_of();
        match (&replicated, &fully) {
            (Some(parallel), _) => {
                parallel.zero_grad().unwrap();
                parallel.backward(Some(&loss), 1, 1).unwrap();
            }
            (_, Some(parallel)) => {
                parallel.zero_grad().unwrap();
                parallel.backward(&loss).unwrap();
            }
            _ => unreachable!(),
        }
        found.push(loss.double_value(&[]));
        found.push(clip_grad_norm(params, 0.1).unwrap());
        adamw.step(0.01).unwrap();
    }
    found.push(tch::no_grad(|| loss_of().double_value(&[])));
    found.push(tch::no_grad(|| loss_of().double_value(&[])));
    found
}

#[rstest]
#[case::two(&[2], &["shard"])]
#[case::three(&[3], &["shard"])]
#[case::four(&[4], &["shard"])]
#[case::replicated(&[2, 2], &["data", "shard"])]
#[case::domain(&[2, 2], &["shard", "domain"])]
#[case::all(&[2, 2, 2], &["data", "shard", "domain"])]
fn losses_are_those_of_data_parallelism(
    #[values(Subject::Afno, Subject::AfnoAgain, Subject::Fno, Subject::UNet)] subject: Subject,
    #[case] shape: &[i64],
    #[case] names: &[&str],
    #[values((1e-9, Overlap::On), (0.002, Overlap::Off), (0.002, Overlap::On), (4.0, Overlap::Auto))] units: (
        f64,
        Overlap,
    ),
) {
    let ranks = shape.iter().product::<i64>() as usize;
    threads::run(ranks, Duration::from_secs(120), |group| {
        let mesh = DeviceMesh::new(&group, shape, names).unwrap();
        let want = train(subject, &group, &mesh, false, units);
        let got = train(subject, &group, &mesh, true, units);
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() < 1e-9 * want.abs(), "{got}, expected {want}");
        }
        assert_eq!(want[want.len() - 1], want[want.len() - 2]);
    });
}

/// On four ranks the optimizer's state is a quarter, and with it parameters and gradients between steps.
#[test]
fn state_is_a_quarter_on_four_ranks() {
    threads::run(4, Duration::from_secs(120), |group| {
        let mesh = DeviceMesh::new(&group, &[4], &["shard"]).unwrap();
        let mut store = ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu);
        let watch = ShardedParameters::default();
        let model =
            Subject::Afno.make(&mut MeshParams::new(&mut store, &mesh).pending().watched(watch.watch()));
        let (whole, _) = Parameters::from_store(&store, &Group::single()).unwrap();
        let replicated = AdamW::new(&whole, &AdamWConfig::default()).unwrap();
        let parallel = FullySharded::new(watch, &whole, &[], &mesh, &DataParallelConfig::default()).unwrap();
        let sharded = AdamW::new(parallel.parameters(), &AdamWConfig::default()).unwrap();
        let bytes = |adamw: &AdamW| -> usize {
            let state = adamw.state();
            state.tensors.iter().map(|state| isobar_torch::memory::nbytes(&state.tensor)).sum()
        };
        let (own, all) = (bytes(&sharded) as f64, bytes(&replicated) as f64);
        assert!(own <= 0.3 * all, "{own} of {all} bytes");
        drop(model);
    });
}
