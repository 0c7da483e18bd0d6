//! Fully sharded training against data parallelism: values, losses, memory.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use isobar_array::{Conv2d, Generator, Linear, Reduce, Window};
use isobar_collectives::{Group, threads};
use isobar_manager::DeviceMesh;
use isobar_models::{
    Afno, AfnoConfig, DistributedAfno, DistributedAfnoConfig, Fno, FnoConfig, Mode, PerDim, UNet, UNetConfig,
};
use isobar_shard::{
    Init, MeshParams, ParallelRegion, ParamStore, Params, Placement, ShardTensor, forbid_hidden_communication,
};
use isobar_train::checkpoint::{CheckpointSelector, Checkpoints, Contents, Keep, RunState};
use isobar_train::optim::{AdamW, AdamWConfig, LionConfig, MuonConfig, Optimizer, OptimizerKind, SgdConfig};
use isobar_train::{
    DataParallel, DataParallelConfig, FieldLayout, FullySharded, Overlap, Parameters, Precision,
    ShardedFields, ShardedParameters, clip_grad_norm, distribute_over_domain_for_fsdp, grad_norm,
    wrap_for_fsdp,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
const STEPS: usize = 6;

#[derive(Debug, Clone, Copy)]
enum Subject {
    Afno,
    AfnoAgain,
    DistributedAfno,
    Fno,
    /// A convolution between two parameters without dims.
    Gains,
    UNet,
    /// One step, and after three passes two.
    Rollout {
        again: bool,
    },
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
            Self::Rollout { again } => {
                let step = if again { Self::AfnoAgain } else { Self::Afno }.make(params);
                let passes = Cell::new(0);
                Box::new(move |x| {
                    passes.set(passes.get() + 1);
                    if passes.get() > 3 { step(&step(x)?) } else { step(x) }
                })
            }
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
            Self::DistributedAfno => {
                let config = DistributedAfnoConfig {
                    patch_size: 2,
                    embed_dim: 8,
                    depth: 2,
                    num_blocks: 4,
                    ..DistributedAfnoConfig::new([12, 8], 2)
                };
                let model = DistributedAfno::new(&config, params).unwrap();
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
            Self::Gains => {
                let mut gain =
                    |name, value| params.param(name, &[], Init::Constant(value), Placement::Replicate);
                let [before, after] = [gain("before", 0.7), gain("after", 1.5)].map(Result::unwrap);
                let weight = params.param("weight", &[2, 2, 3, 3], Init::XavierUniform, Placement::Replicate);
                let (weight, same) = (weight.unwrap(), Conv2d { padding: [1, 1], ..Conv2d::default() });
                Box::new(move |x| Ok(x.mul(&before)?.conv2d(&weight, None, &same)?.mul(&after)?))
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

/// Event in the middle of a run.
#[derive(Debug, Clone, Copy)]
enum Halfway<'a> {
    Nothing,
    /// Its state is written to a folder.
    Saved(&'a Path),
    /// Its state is lost, and comes from what another run has saved.
    Loaded(&'a Path),
}

impl Halfway<'_> {
    fn happens(
        self,
        params: &Parameters,
        kind: &OptimizerKind,
        mut optimizer: Box<dyn Optimizer>,
        world: &Group,
    ) -> Box<dyn Optimizer> {
        let checkpoints = |folder| Checkpoints::new(folder, Keep::ALL, world);
        match self {
            Self::Nothing => optimizer,
            Self::Saved(folder) => {
                let contents = Contents { params, buffers: &[], optimizer: Some(&mut *optimizer) };
                checkpoints(folder).save(&contents, &RunState::default()).unwrap();
                optimizer
            }
            Self::Loaded(folder) => {
                tch::no_grad(|| params.iter().for_each(|param| drop(param.tensor.shallow_clone().zero_())));
                let mut optimizer = kind.build(params).unwrap();
                let mut contents = Contents { params, buffers: &[], optimizer: Some(&mut *optimizer) };
                checkpoints(folder).load(&CheckpointSelector::Newest, &mut contents).unwrap();
                optimizer
            }
        }
    }
}

fn adamw() -> OptimizerKind {
    OptimizerKind::from(AdamWConfig { lr: 0.01, ..Default::default() })
}

fn muon() -> OptimizerKind {
    OptimizerKind::from(MuonConfig { lr: 0.01, ..Default::default() })
}

/// Losses and norms of gradients of some steps, and the loss of what came of them, without gradients.
fn train(subject: Subject, mesh: &DeviceMesh, sharded: bool, units: (f64, Overlap)) -> Vec<f64> {
    train_on(subject, mesh, sharded, units, &adamw(), Halfway::Nothing)
}

fn train_on(
    subject: Subject,
    mesh: &DeviceMesh,
    sharded: bool,
    units: (f64, Overlap),
    kind: &OptimizerKind,
    halfway: Halfway<'_>,
) -> Vec<f64> {
    let names = mesh.names();
    let place = |name: &&str| match *name {
        "domain" => Placement::Shard(2),
        "model" => Placement::Replicate,
        _ => Placement::Shard(0),
    };
    let places: Vec<Placement> = names.iter().map(place).collect();
    let fields = |seed| {
        let whole = Generator::new(seed).normal(&Window::whole(subject.shape()), 0.0, 1.0, DOUBLE).unwrap();
        ShardTensor::distribute(&whole, mesh, &places).unwrap()
    };
    let (x, target) = (fields(1), fields(2));
    let splits = names.contains(&"model");
    let model = if splits { mesh.group("model").unwrap() } else { Group::single() };
    let store = ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu);
    let mut store = store.with_region(ParallelRegion::new(model.clone()));
    let watch = ShardedParameters::default();
    let params = MeshParams::new(&mut store, mesh).pending();
    let params = if splits { params.along("model").unwrap() } else { params };
    let others: Vec<usize> = (0..names.len()).filter(|&axis| names[axis] != "model").collect();
    let others = mesh.group_along(&others).unwrap();
    let split = model;
    let model = subject.make(&mut if sharded { params.watched(watch.watch()) } else { params });
    let (whole, _) = Parameters::from_store(&store, &split).unwrap();
    let config = DataParallelConfig { bucket_mb: units.0, overlap: units.1, ..Default::default() };
    let replicated = (!sharded).then(|| DataParallel::new(&whole, &[], &others, &config).unwrap());
    let fully = sharded.then(|| FullySharded::new(watch, &whole, &[], mesh, &config).unwrap());
    let params = fully.as_ref().map_or(&whole, FullySharded::parameters);
    let mut optimizer = kind.build(params).unwrap();
    let _guard = forbid_hidden_communication();
    let loss_of = || model(&x).unwrap().mse_loss(&target).unwrap().full_tensor(None).unwrap();
    let mut found = Vec::new();
    for step in 0..STEPS {
        if step == STEPS / 2 {
            let all: Vec<usize> = (0..names.len()).collect();
            optimizer = halfway.happens(params, kind, optimizer, &mesh.group_along(&all).unwrap());
        }
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
        optimizer.step(0.01).unwrap();
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
    #[values(Subject::Afno, Subject::AfnoAgain, Subject::Fno, Subject::Gains, Subject::UNet)]
    subject: Subject,
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
        let want = train(subject, &mesh, false, units);
        let got = train(subject, &mesh, true, units);
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() < 1e-9 * want.abs(), "{got}, expected {want}");
        }
        assert_eq!(want[want.len() - 1], want[want.len() - 2]);
    });
}

/// Each recomputed step of a rollout adds a gradient to every parameter.
#[rstest]
#[case::shard(&[2], &["shard"])]
#[case::domain(&[2, 2], &["shard", "domain"])]
fn rollouts_are_computed_again(
    #[case] shape: &[i64],
    #[case] names: &[&str],
    #[values(false, true)] sharded: bool,
    #[values((1e-9, Overlap::On), (0.002, Overlap::Auto), (0.002, Overlap::Off))] units: (f64, Overlap),
) {
    let ranks = shape.iter().product::<i64>() as usize;
    threads::run(ranks, Duration::from_secs(120), |group| {
        let mesh = DeviceMesh::new(&group, shape, names).unwrap();
        let want = train(Subject::Rollout { again: false }, &mesh, false, units);
        let got = train(Subject::Rollout { again: true }, &mesh, sharded, units);
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() < 1e-9 * want.abs(), "{got}, expected {want}");
        }
    });
}

/// A model whose channels are split over the axis `model` besides.
#[rstest]
#[case::model(&[2, 2], &["model", "shard"])]
#[case::after(&[3, 2], &["shard", "model"])]
#[case::all(&[2, 2, 2], &["model", "domain", "shard"])]
fn parts_of_split_channels_are_split_again(
    #[case] shape: &[i64],
    #[case] names: &[&str],
    #[values((adamw(), 0.001), (adamw(), 4.0), (muon(), 0.001))] (kind, bucket_mb): (OptimizerKind, f64),
) {
    let ranks = shape.iter().product::<i64>() as usize;
    threads::run(ranks, Duration::from_secs(120), |group| {
        let mesh = DeviceMesh::new(&group, shape, names).unwrap();
        let train = |sharded| {
            let units = (bucket_mb, Overlap::Auto);
            train_on(Subject::DistributedAfno, &mesh, sharded, units, &kind, Halfway::Nothing)
        };
        let (want, got) = (train(false), train(true));
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() < 1e-9 * want.abs(), "{got}, expected {want}");
        }
    });
}

/// A run on split channels and shards goes on from what it has saved as if nothing had been, and so do others elsewhere.
#[rstest]
#[case::same(&[2, 2], &["model", "shard"])]
#[case::turned(&[2, 2], &["shard", "model"])]
#[case::channels_together(&[4], &["shard"])]
#[case::channels_further_apart(&[1, 4], &["data", "model"])]
#[case::domain(&[2, 2], &["domain", "shard"])]
fn split_channels_go_on_from_a_checkpoint(
    #[case] shape: &[i64],
    #[case] names: &[&str],
    #[values(adamw(), muon())] kind: OptimizerKind,
) {
    let folder = tempfile::tempdir().unwrap();
    threads::run(4, Duration::from_secs(120), |group| {
        let [first, then] = [(&[2, 2][..], &["model", "shard"][..]), (shape, names)]
            .map(|(shape, names)| DeviceMesh::new(&group, shape, names).unwrap());
        let train = |mesh: &DeviceMesh, halfway| {
            let sharded = mesh.names().contains(&"shard");
            train_on(Subject::DistributedAfno, mesh, sharded, (0.001, Overlap::Auto), &kind, halfway)
        };
        let want = train(&first, Halfway::Saved(folder.path()));
        let got = train(&then, Halfway::Loaded(folder.path()));
        if first.names() == then.names() {
            assert_eq!(got, want);
        }
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() < 1e-9 * want.abs(), "{got}, expected {want}");
        }
    });
}

/// Parameters without dims are on all ranks, count once in norms, and are saved once: a run goes on on any number of ranks.
#[rstest]
fn parameters_without_dims_go_on_on_other_ranks(
    #[values(
        adamw(),
        muon(),
        OptimizerKind::from(LionConfig::default()),
        OptimizerKind::from(SgdConfig { momentum: 0.9, ..Default::default() })
    )]
    kind: OptimizerKind,
) {
    let folder = tempfile::tempdir().unwrap();
    let run = |shape: &[i64], names: &[&str], halfway: Halfway<'_>| {
        let ranks = shape.iter().product::<i64>() as usize;
        threads::run(ranks, Duration::from_secs(120), |group| {
            let mesh = DeviceMesh::new(&group, shape, names).unwrap();
            let sharded = names.contains(&"shard");
            train_on(Subject::Gains, &mesh, sharded, (0.001, Overlap::Auto), &kind, halfway)
        })
    };
    let want = run(&[1], &["domain"], Halfway::Nothing).remove(0);
    for (shape, names, halfway) in [
        (&[2][..], &["shard"][..], Halfway::Saved(folder.path())),
        (&[3], &["shard"], Halfway::Loaded(folder.path())),
        (&[2, 2], &["shard", "domain"], Halfway::Loaded(folder.path())),
        (&[2, 2], &["model", "shard"], Halfway::Loaded(folder.path())),
        (&[1], &["domain"], Halfway::Loaded(folder.path())),
    ] {
        for got in run(shape, names, halfway) {
            for (got, want) in got.iter().zip(&want) {
                assert!((got - want).abs() < 1e-9 * want.abs(), "{names:?}: {got}, expected {want}");
            }
        }
    }
}

/// A model among plain tensors: this rank's windows in and out, a loss over windows. Gradients are those of the loss over fields.
#[rstest]
#[case::shard(&[3], &["shard"])]
#[case::domain(&[3], &["domain"])]
#[case::both(&[2, 2], &["shard", "domain"])]
fn plain_surroundings_get_the_same_gradients(
    #[values(Subject::Afno, Subject::UNet)] subject: Subject,
    #[case] shape: &[i64],
    #[case] names: &[&str],
) {
    let ranks = shape.iter().product::<i64>() as usize;
    threads::run(ranks, Duration::from_secs(120), |group| {
        let whole =
            |seed| Generator::new(seed).normal(&Window::whole(subject.shape()), 0.0, 1.0, DOUBLE).unwrap();
        let (x, target) = (whole(1), whole(2));
        let elements = x.numel() as f64;
        let samples = subject.shape()[0] as usize;
        let all: Vec<usize> = (0..samples).collect();
        let extents: Vec<usize> = subject.shape()[2..].iter().map(|&extent| extent as usize).collect();
        let gradients = |mesh: &DeviceMesh| {
            let fields = ShardedFields::new(mesh, &extents).unwrap();
            let mut store = ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu);
            let sharded = mesh.names().contains(&"shard");
            let (mut params, watch) = match sharded {
                true => distribute_over_domain_for_fsdp(&mut store, mesh),
                false => (MeshParams::new(&mut store, mesh).pending(), ShardedParameters::default()),
            };
            let model = subject.make(&mut params);
            let model = wrap_for_fsdp(&fields, move |x| Ok(model(x)?));
            let (params, _) = Parameters::from_store(&store, &Group::single()).unwrap();
            let own = fields.own(&all).unwrap();
            let window = fields.window(&extents).unwrap();
            let part = |field: &Tensor| {
                let mut part =
                    field.narrow(0, own.first().map_or(0, |&first| first as i64), own.len() as i64);
                for (dim, range) in window.iter().enumerate() {
                    part = part.narrow(dim as i64 + 2, range.start as i64, range.len() as i64);
                }
                part.contiguous()
            };
            let config = DataParallelConfig::default();
            let loss = |x: &Tensor| {
                let y = model(x, samples).unwrap();
                (y - part(&target)).square().sum(Kind::Double) / elements
            };
            let input = part(&x).set_requires_grad(true);
            let norm = if sharded {
                let parallel = FullySharded::new(watch, &params, &[], mesh, &config).unwrap();
                parallel.zero_grad().unwrap();
                parallel.backward(&loss(&input)).unwrap();
                grad_norm(parallel.parameters()).unwrap()
            } else {
                let parallel = DataParallel::new(
                    &params,
                    &[],
                    &mesh.group_along(&(0..mesh.ndim()).collect::<Vec<_>>()).unwrap(),
                    &config,
                )
                .unwrap();
                parallel.zero_grad().unwrap();
                parallel.backward(Some(&loss(&input)), 1, 1).unwrap();
                grad_norm(&params).unwrap()
            };
            (norm, input.grad().square().sum(Kind::Double).double_value(&[]))
        };
        let alone = DeviceMesh::new(&Group::single(), &[1], &["domain"]).unwrap();
        let (want, want_input) = gradients(&alone);
        let mesh = DeviceMesh::new(&group, shape, names).unwrap();
        let (got, input) = gradients(&mesh);
        assert!((got - want).abs() < 1e-9 * want, "{got}, expected {want}");
        let inputs = group.all_gather_bytes(&input.to_le_bytes()).unwrap();
        let sum: f64 = inputs.iter().map(|bytes| f64::from_le_bytes(bytes[..].try_into().unwrap())).sum();
        assert!((sum - want_input).abs() < 1e-9 * want_input, "{sum}, expected {want_input}");
    });
}

/// Several passes a step, and a parameter that no loss knows.
#[rstest]
#[case::shard(&[3], &["shard"])]
#[case::both(&[2, 2], &["data", "shard"])]
fn passes_add_up_and_unused_parameters_count_as_zero(
    #[case] shape: &[i64],
    #[case] names: &[&str],
    #[values(1e-9, 4.0)] bucket_mb: f64,
    #[values(false, true)] no_sync: bool,
) {
    let ranks = shape.iter().product::<i64>() as usize;
    threads::run(ranks, Duration::from_secs(120), |group| {
        let mesh = DeviceMesh::new(&group, shape, names).unwrap();
        let layout = vec![Placement::Shard(0); names.len()];
        let subject = Subject::Afno;
        let fields = |seed| {
            let window = Window::whole(subject.shape());
            let whole = Generator::new(seed).normal(&window, 0.0, 1.0, DOUBLE).unwrap();
            ShardTensor::distribute(&whole, &mesh, &layout).unwrap()
        };
        let passes = [(fields(1), fields(2)), (fields(3), fields(4))];
        let train = |sharded: bool| {
            let mut store = ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu);
            let watch = ShardedParameters::default();
            let params = MeshParams::new(&mut store, &mesh).pending();
            let mut params = if sharded { params.watched(watch.watch()) } else { params };
            let _unused = params.param("unused", &[5, 3], Init::Constant(2.0), Placement::Replicate).unwrap();
            let model = subject.make(&mut params);
            let (whole, _) = Parameters::from_store(&store, &Group::single()).unwrap();
            let config = DataParallelConfig { bucket_mb, find_unused_parameters: true, ..Default::default() };
            let replicated = (!sharded).then(|| DataParallel::new(&whole, &[], &group, &config).unwrap());
            let fully = sharded.then(|| FullySharded::new(watch, &whole, &[], &mesh, &config).unwrap());
            let params = fully.as_ref().map_or(&whole, FullySharded::parameters);
            let mut optimizer = adamw().build(params).unwrap();
            let mut found = Vec::new();
            for _ in 0..3 {
                replicated.iter().for_each(|parallel| parallel.zero_grad().unwrap());
                fully.iter().for_each(|parallel| parallel.zero_grad().unwrap());
                for (pass, (x, target)) in passes.iter().enumerate() {
                    let loss = model(x).unwrap().mse_loss(target).unwrap().full_tensor(None).unwrap();
                    found.push(loss.double_value(&[]));
                    match (&replicated, &fully) {
                        (Some(parallel), _) if pass == 0 => parallel.backward_no_sync(Some(&loss), 1, 2),
                        (Some(parallel), _) => parallel.backward(Some(&loss), 1, 2),
                        (_, Some(parallel)) if pass == 0 && no_sync => {
                            parallel.backward_no_sync(&(loss * 0.5))
                        }
                        (_, Some(parallel)) => parallel.backward(&(loss * 0.5)),
                        _ => unreachable!(),
                    }
                    .unwrap();
                }
                found.push(grad_norm(params).unwrap());
                optimizer.step(0.01).unwrap();
            }
            // The decay of weights is all that becomes of it.
            let unused = params.get("unused").unwrap();
            assert_eq!(unused.grad().unwrap().abs().sum(Kind::Double).double_value(&[]), 0.0);
            found.extend((unused.tensor.numel() > 0).then(|| unused.tensor.max().double_value(&[])));
            found
        };
        let (want, got) = (train(false), train(true));
        assert!(want[9] < 2.0 && want[9] > 1.9, "{want:?}");
        assert!(got.len() >= 9);
        for (got, want) in got.iter().zip(&want) {
            assert!((got - want).abs() < 1e-9 * want.abs(), "{got}, expected {want}");
        }
    });
}

/// Micro-batches are summed along `shard`, and over the other axes with the last one.
#[test]
fn gradients_are_summed_over_the_other_axes_once_a_step() {
    threads::run(4, Duration::from_secs(120), |group| {
        let mesh = DeviceMesh::new(&group, &[2, 2], &["data", "shard"]).unwrap();
        let window = Window::whole(Subject::Gains.shape());
        let whole = Generator::new(1).normal(&window, 0.0, 1.0, DOUBLE).unwrap();
        let x = ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(0); 2]).unwrap();
        let mut store = ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu);
        let watch = ShardedParameters::default();
        let mut params = MeshParams::new(&mut store, &mesh).pending().watched(watch.watch());
        let model = Subject::Gains.make(&mut params);
        let (whole, _) = Parameters::from_store(&store, &Group::single()).unwrap();
        let config = DataParallelConfig::default();
        let parallel = FullySharded::new(watch, &whole, &[], &mesh, &config).unwrap();
        let loss = || model(&x).unwrap().mse_loss(&x).unwrap().full_tensor(None).unwrap();
        let sums = || {
            let entries = group.flight().entries(usize::MAX, false);
            entries.iter().filter(|entry| entry.group.contains("gradients/others")).count()
        };
        parallel.zero_grad().unwrap();
        for _ in 0..2 {
            parallel.backward_no_sync(&loss()).unwrap();
        }
        let norm =
            || parallel.parameters().iter().map(|param| param.grad().unwrap().norm().double_value(&[]));
        assert_eq!((sums(), norm().sum::<f64>()), (0, 0.0));
        parallel.backward(&loss()).unwrap();
        // The parameters without dims, and the others.
        assert_eq!(sums(), 2);
        let three: Vec<f64> = norm().collect();
        // What a step has left behind is dropped with its gradients.
        parallel.backward_no_sync(&loss()).unwrap();
        parallel.zero_grad().unwrap();
        parallel.backward(&loss()).unwrap();
        for (three, one) in three.iter().zip(norm()) {
            assert!((three - 3.0 * one).abs() < 1e-9 * three, "{three} of three passes, {one} of one");
        }
    });
}

/// Networks of which one's gradient is missing in the loss of one rank, or of all.
#[rstest]
fn a_parameter_that_a_loss_leaves_out_is_named(
    #[values(Some(0), Some(2), None)] rank: Option<usize>,
    #[values(0, 1, 4)] left_out: usize,
    #[values(1e-9, 4.0)] bucket_mb: f64,
) {
    const DEADLINE: Duration = Duration::from_secs(120);
    let errors = threads::run(3, DEADLINE, |group| {
        let mesh = DeviceMesh::new(&group, &[3], &["shard"]).unwrap();
        let mut store = ParamStore::new(Generator::new(7));
        let (mut params, watch) = distribute_over_domain_for_fsdp(&mut store, &mesh);
        let fields = ShardedFields::new(&mesh, &[4, 4]).unwrap();
        let networks: Vec<_> = (0..5)
            .map(|network| {
                let name = format!("weight_{network}");
                let weight = params.param(&name, &[3, 3, 1, 1], Init::XavierUniform, Placement::Replicate);
                let weight = weight.unwrap();
                let forward = move |x: &ShardTensor| Ok(x.conv2d(&weight, None, &Conv2d::default())?);
                wrap_for_fsdp(&fields, forward)
            })
            .collect();
        let (params, _) = Parameters::from_store(&store, &Group::single()).unwrap();
        let config = DataParallelConfig { bucket_mb, ..Default::default() };
        let parallel = FullySharded::new(watch, &params, &[], &mesh, &config).unwrap();
        parallel.zero_grad().unwrap();
        let x = Tensor::ones([1, 3, 4, 4], (Kind::Float, Device::Cpu));
        let outputs: Vec<Tensor> = networks.iter().map(|network| network(&x, 3).unwrap()).collect();
        let mine = rank.is_none_or(|rank| rank == group.rank());
        let used = outputs.iter().enumerate().filter(|(at, _)| !mine || *at != left_out);
        let loss: Tensor = used.map(|(_, y)| y.sum(Kind::Float)).sum();
        parallel.backward(&loss).unwrap_err()
    });
    let own = |at: usize| rank.is_none_or(|rank| rank == at);
    for (at, error) in errors.iter().enumerate() {
        let named = error.to_string().contains(&format!("\"weight_{left_out}\" got no gradient"));
        // The other ranks gather it again in backward alone, and notice that before the deadline.
        let in_time = !error.to_string().contains("not finished after");
        let gathered = in_time && rank.is_some() && left_out == 4 && bucket_mb < 1.0;
        assert!(
            named || gathered,
            "rank {at}, which {}: {error}",
            if own(at) { "misses it" } else { "does not" }
        );
    }
}

/// Parameters in single precision, products in bfloat16.
#[test]
fn mixed_precision_is_near_single_precision() {
    threads::run(2, Duration::from_secs(120), |group| {
        let mesh = DeviceMesh::new(&group, &[2], &["shard"]).unwrap();
        let fields = |seed| {
            let window = Window::whole(Subject::Afno.shape());
            let whole = Generator::new(seed).normal(&window, 0.0, 1.0, (Kind::Float, Device::Cpu)).unwrap();
            ShardTensor::distribute(&whole, &mesh, &[Placement::Shard(0)]).unwrap()
        };
        let (x, target) = (fields(1), fields(2));
        let train = |precision: Precision| {
            let mut store = ParamStore::new(Generator::new(7));
            let watch = ShardedParameters::default();
            let params = MeshParams::new(&mut store, &mesh).pending();
            let model = Subject::Afno.make(&mut params.watched(watch.watch()));
            let (whole, _) = Parameters::from_store(&store, &Group::single()).unwrap();
            let config = DataParallelConfig { bucket_mb: 0.001, ..Default::default() };
            let parallel = FullySharded::new(watch, &whole, &[], &mesh, &config).unwrap();
            let mut optimizer = adamw().build(parallel.parameters()).unwrap();
            let step = |_| {
                parallel.zero_grad().unwrap();
                let loss = {
                    let _precision = precision.enter(Device::Cpu).unwrap();
                    let y = model(&x).unwrap().to_kind(Kind::Float).unwrap();
                    y.mse_loss(&target).unwrap().full_tensor(None).unwrap()
                };
                parallel.backward(&loss).unwrap();
                optimizer.step(0.01).unwrap();
                loss.double_value(&[])
            };
            let losses: Vec<f64> = (0..2 * STEPS).map(step).collect();
            assert!(parallel.parameters().iter().all(|param| param.tensor.kind() == Kind::Float));
            losses
        };
        let (single, mixed) = (train(Precision::Float32), train(Precision::Bf16Mixed));
        assert_ne!(mixed, single);
        assert!(single[2 * STEPS - 1] < 0.9 * single[0], "{single:?}");
        for (got, want) in mixed.iter().zip(&single) {
            assert!((got - want).abs() < 0.02 * want, "{mixed:?}, expected {single:?}");
        }
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
