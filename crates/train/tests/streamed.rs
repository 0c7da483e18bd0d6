//! Training on samples that are read while they are needed: on every mesh the bits of the same run in memory.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use isobar_array::Generator;
use isobar_collectives::{Group, threads};
use isobar_data::{
    Augment, DataConfig, Dataset, HostMemory, InMemory, Normalizer, Reader, ReaderOptions, Samples,
    StreamOptions, Streamed, TrainSteps, WellDim, WellMeta, WellWriter, Window,
};
use isobar_manager::DeviceMesh;
use isobar_models::{Architecture, FnoConfig, PerDim};
use isobar_shard::{ParamStore, Scope};
use isobar_train::config::{CheckpointConfig, Resume, TrainConfig};
use isobar_train::loss::Mse;
use isobar_train::{
    Error, FieldLayout, FieldModel, FieldTask, FitConfig, Network, Parameters, ShardedFields, Variable, fit,
    on_mesh,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// The excerpt of Darcy flow, or trajectories of The Well's schema, which are written here.
fn open(trajectories: Option<&Path>) -> Arc<dyn Dataset> {
    let Some(folder) = trajectories else {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/darcy_excerpt.h5");
        return DataConfig { path: path.into(), ..DataConfig::default() }.open().unwrap().into();
    };
    let config = DataConfig {
        path: folder.join("waves.h5").into(),
        format: "the_well".into(),
        fields: vec!["height".to_owned()],
        ..DataConfig::default()
    };
    config.open().unwrap().into()
}

fn write_waves(folder: &Path) {
    let dim = |name: &str, extent: usize| {
        let coordinates = (0..extent).map(|at| at as f64).collect();
        WellDim { name: name.to_owned(), coordinates, periodic: true }
    };
    let meta = WellMeta {
        name: "waves".to_owned(),
        trajectories: 4,
        times: (0..5).map(f64::from).collect(),
        dims: vec![dim("x", 10), dim("y", 8)],
        fields: vec![("height".to_owned(), 0)],
        ..WellMeta::default()
    };
    let mut writer = WellWriter::create(folder.join("waves.h5"), &meta).unwrap();
    let line = Tensor::arange(80, (Kind::Double, Device::Cpu)).view([1, 1, 10, 8]);
    for (trajectory, frame) in (0..4).flat_map(|trajectory| (0..5).map(move |frame| (trajectory, frame))) {
        let height = (&line * 0.37 + (trajectory as f64 + 0.2 * frame as f64)).sin();
        writer.write("height", trajectory, frame, &height).unwrap();
    }
    writer.finish().unwrap();
}

/// How samples are held, and how long a run is.
#[derive(Debug, Clone, Copy)]
struct Plan {
    streamed: Option<(usize, bool)>,
    max_steps: Option<u64>,
    resume: Resume,
}

const WHOLE: Plan = Plan { streamed: None, max_steps: None, resume: Resume::Never };

/// Training samples, and rollouts, of a rank's window; the reader of those that are streamed.
type Held = (Box<dyn Samples>, Box<dyn Samples>, Option<Arc<Reader>>);

fn hold(data: &Arc<dyn Dataset>, window: &[Range<usize>], plan: Plan) -> Held {
    let (names, steps): (_, TrainSteps) = match data.times() {
        None => ((&["nu"][..], &["u"][..]), 1.into()),
        Some(_) => {
            let steps =
                serde_json::from_str(r#"[{"epoch": 0, "steps": 1}, {"epoch": 1, "steps": 3}]"#).unwrap();
            ((&["height"][..], &["height"][..]), steps)
        }
    };
    let samples = data.samples();
    if let Some((workers, keep)) = plan.streamed {
        let host_memory = HostMemory::new(1 << 20);
        let reader = Arc::new(Reader::new(ReaderOptions { host_memory, workers, keep }).unwrap());
        let of = |samples: Range<usize>, steps: TrainSteps| {
            let options = StreamOptions::new(window, names.0, names.1);
            let options = StreamOptions { steps, options: DOUBLE, at_once: 2, ..options };
            Box::new(Streamed::new(&reader, (data.clone(), samples), &options).unwrap())
        };
        return (of(0..samples - 1, steps), of(samples - 1..samples, 1.into()), Some(reader));
    }
    let read = |samples: Range<usize>, frames: Range<usize>, names: &[&str]| {
        let window = Window { frames, points: window.to_vec() };
        data.read(&window, &samples.collect::<Vec<_>>(), names).unwrap()
    };
    let of = |samples: Range<usize>, steps: TrainSteps| {
        let held = match data.times() {
            None => {
                let [from, to] =
                    [names.0, names.1].map(|names| read(samples.clone(), 0..1, names).select(1, 0));
                InMemory::pairs(from, to).unwrap()
            }
            Some(times) => {
                let all = read(samples, 0..times.len(), names.0);
                InMemory::rollouts(&all, steps.most(), 1).unwrap().with_steps(steps).unwrap()
            }
        };
        held.to(Device::Cpu, Kind::Double).unwrap().into()
    };
    (of(0..samples - 1, steps), of(samples - 1..samples, 1.into()), None)
}

/// Trains two epochs on a mesh, and returns the losses, the validation error, and the bytes that were read.
fn train(
    world: &Group,
    (shape, names): (&[i64], &[&str]),
    (trajectories, folder): (Option<&Path>, PathBuf),
    plan: Plan,
) -> Result<(Vec<f64>, Option<f64>, u64), Error> {
    let data = open(trajectories);
    let extents: Vec<usize> = data.dims().iter().map(|dim| dim.coordinates.len()).collect();
    let mesh = DeviceMesh::new(world, shape, names).unwrap();
    let layout = ShardedFields::new(&mesh, &extents)?;
    let window = layout.window(&extents)?;
    let config = FnoConfig {
        dimension: 2,
        num_fno_modes: PerDim::All(3),
        latent_channels: 4,
        num_fno_layers: 1,
        ..FnoConfig::new(1, 1)
    };
    let mut store = ParamStore::new(Generator::new(3)).with_options(Kind::Double, Device::Cpu);
    let (mut params, ranks) = on_mesh(&mut store, &mesh, world, &config.sharding(), true)?;
    let forward = Network::new(config.build(&mut Scope::new(&mut params, "")).unwrap());
    let (parameters, buffers) = Parameters::on_mesh(&store, &mesh)?;
    let (train, validation, reader) = hold(&data, &window, plan);
    let scale = Normalizer::new(0.1, 2.0).unwrap();
    let task = FieldTask {
        model: FieldModel {
            forward,
            layout,
            positions: None,
            change: None,
            input: scale.clone(),
            target: scale,
            variables: vec![Variable::new("field")],
            roles: None,
            missing: None,
        },
        train,
        validation,
        rollouts: None,
        augment: Augment::None,
        loss: Mse {}.into(),
        weights: isobar_train::Weights::default(),
        report: isobar_train::metric::Report::default(),
        seed: 0,
    };
    let config = FitConfig {
        folder,
        train: TrainConfig {
            epochs: 2,
            batch_size: 3,
            accumulate: 2,
            max_steps: plan.max_steps,
            ..TrainConfig::default()
        },
        checkpoint: CheckpointConfig { every_steps: 1, resume: plan.resume, ..CheckpointConfig::default() },
        ..FitConfig::default()
    };
    let summary = fit(&task, &parameters, &buffers, &ranks, &config)?;
    Ok((summary.losses, summary.validation_error, reader.map_or(0, |reader| reader.account().read)))
}

fn on_ranks(
    mesh: (&[i64], &[&str]),
    trajectories: Option<&Path>,
    folder: &Path,
    plan: Plan,
) -> Vec<(Vec<f64>, Option<f64>, u64)> {
    threads::run(mesh.0.iter().product::<i64>() as usize, Duration::from_secs(240), |world| {
        train(&world, mesh, (trajectories, folder.to_owned()), plan).unwrap()
    })
}

#[rstest]
#[case::one(&[1], &["data"])]
#[case::two(&[2], &["domain"])]
#[case::uneven(&[3], &["domain"])]
#[case::data(&[4], &["data"])]
#[case::square(&[2, 2], &["data", "domain"])]
fn a_streamed_run_has_the_bits_of_one_in_memory(
    #[case] shape: &[i64],
    #[case] names: &[&str],
    #[values(false, true)] trajectories: bool,
    #[values((2, false), (1, true))] streamed: (usize, bool),
) {
    let folder = tempdir().unwrap();
    write_waves(folder.path());
    let waves = trajectories.then(|| folder.path());
    let run = |name: &str, plan: Plan| on_ranks((shape, names), waves, &folder.path().join(name), plan);
    let memory = run("memory", WHOLE);
    let stream = run("stream", Plan { streamed: Some(streamed), ..WHOLE });
    assert_eq!(memory[0].0.len(), if trajectories { 4 } else { 6 });
    for (got, want) in stream.iter().zip(&memory) {
        assert_eq!((&got.0, got.1), (&want.0, want.1));
    }
    if trajectories || streamed.1 {
        return;
    }
    // Two epochs of seven pairs; validation, after each epoch, of one by all that share samples; the baselines at the end: all ranks
    // together, and of each field its window alone.
    let sharing = if names[0] == "data" { shape[0] as u64 } else { 1 };
    let read: u64 = stream.iter().map(|rank| rank.2).sum();
    let pair = 2 * 64 * 64 * 4;
    // The mean of the targets is of all training samples, on each of the ranks that share samples.
    let expected = pair * (2 * 7 + 2) + pair * (7 * sharing + 1);
    assert_eq!(read, expected, "{:?}", stream.iter().map(|rank| rank.2).collect::<Vec<_>>());
}

/// Shape and axes of a mesh.
type Mesh = (&'static [i64], &'static [&'static str]);

const ONE: Mesh = (&[1], &["data"]);
const TWO: Mesh = (&[2], &["data"]);
const THREE: Mesh = (&[3], &["domain"]);
const SQUARE: Mesh = (&[2, 2], &["data", "domain"]);

/// A run that ends within an epoch, in the middle of the schedule of steps, goes on with the same losses, also on another mesh.
#[rstest]
#[case::same(TWO, TWO)]
#[case::more(ONE, THREE)]
#[case::fewer(SQUARE, TWO)]
fn a_streamed_run_resumes_within_an_epoch(
    #[case] first: Mesh,
    #[case] then: Mesh,
    #[values(1, 3)] stop: u64,
    #[values(false, true)] trajectories: bool,
) {
    let folder = tempdir().unwrap();
    write_waves(folder.path());
    let waves = trajectories.then(|| folder.path());
    let whole = on_ranks(first, waves, &folder.path().join("whole"), WHOLE).swap_remove(0).0;
    let run = folder.path().join("run");
    let begin = Plan { streamed: Some((1, false)), max_steps: Some(stop), resume: Resume::Never };
    let mut losses = on_ranks(first, waves, &run, begin).swap_remove(0).0;
    let rest = Plan { streamed: Some((2, true)), max_steps: None, resume: Resume::Must };
    losses.extend(on_ranks(then, waves, &run, rest).swap_remove(0).0);
    assert_eq!(losses.len(), whole.len());
    match first == then {
        true => assert_eq!(losses, whole),
        false => assert!(
            losses.iter().zip(&whole).all(|(a, b)| (a / b - 1.0).abs() < 1e-9),
            "{losses:?} {whole:?}"
        ),
    }
}
