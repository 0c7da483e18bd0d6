//! Networks with a history, forcings, static fields and diagnostic outputs.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::f64::consts::TAU;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use isobar_array::{Array, Generator};
use isobar_collectives::threads;
use isobar_data::{Augment, Computed, DataVariable, Dataset, Dim, InMemory, Normalizer, TimeUnit, Window};
use isobar_data::{Batch, Result as DataResult};
use isobar_manager::{DeviceMesh, DistributedManager};
use isobar_models::{Architecture, FnoConfig, PerDim, Sharding};
use isobar_shard::{ParamStore, Scope};
use isobar_train::config::TrainConfig;
use isobar_train::loss::Mse;
use isobar_train::metric::Report;
use isobar_train::{
    BoxError, DenseFields, FieldLayout, FieldModel, FieldTask, FitConfig, Network, Parameters, Roles,
    ShardedFields, Start, Step, Task, Variable, Weights, fit, on_mesh,
};
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

const ROWS: usize = 7;
const COLUMNS: usize = 8;
const FRAMES: usize = 12;

/// A trajectory of `u` (prognostic), `rain` (diagnostic) and `f` (forcing) every six hours.
#[derive(Debug)]
struct Globe {
    dims: Vec<Dim>,
    times: Vec<f64>,
    unit: TimeUnit,
    variables: Vec<DataVariable>,
}

impl Globe {
    fn new() -> Self {
        let dim = |name: &str, unit: &str, coordinates: Vec<f64>, periodic| Dim {
            name: name.to_owned(),
            unit: Some(unit.to_owned()),
            coordinates,
            periodic,
        };
        let latitudes = (0..ROWS).map(|row| 75.0 - 25.0 * row as f64).collect();
        let longitudes = (0..COLUMNS).map(|column| 45.0 * column as f64).collect();
        Self {
            dims: vec![
                dim("lat", "degrees_north", latitudes, false),
                dim("lon", "degrees_east", longitudes, true),
            ],
            times: (0..FRAMES).map(|frame| 6.0 * frame as f64).collect(),
            unit: TimeUnit { unit: "hours since 1999-12-31".to_owned(), calendar: None },
            variables: ["u", "rain", "f"].map(DataVariable::scalar).to_vec(),
        }
    }

    /// This window of all channels in double precision: `[1, frame, channel, lat, lon]`.
    fn fields(&self, window: &[Range<usize>]) -> Tensor {
        let mut values = Vec::new();
        for frame in 0..FRAMES {
            for channel in 0..3 {
                for row in window[0].clone() {
                    for column in window[1].clone() {
                        let phase = TAU * column as f64 / COLUMNS as f64 + 0.4 * frame as f64;
                        values
                            .push((phase + channel as f64).sin() * (1.0 + 0.1 * row as f64) + channel as f64);
                    }
                }
            }
        }
        let shape = [1, FRAMES, 3, window[0].len(), window[1].len()].map(|extent| extent as i64);
        Tensor::from_slice(&values).view(shape)
    }
}

impl Dataset for Globe {
    fn path(&self) -> &Path {
        Path::new("globe")
    }
    fn samples(&self) -> usize {
        1
    }
    fn dims(&self) -> &[Dim] {
        &self.dims
    }
    fn times(&self) -> Option<&[f64]> {
        Some(&self.times)
    }
    fn time_unit(&self) -> Option<&TimeUnit> {
        Some(&self.unit)
    }
    fn variables(&self) -> &[DataVariable] {
        &self.variables
    }
    fn read(&self, window: &Window, _: &[usize], _: &[&str]) -> DataResult<Tensor> {
        Ok(self.fields(&window.points).to_kind(Kind::Float))
    }
}

fn whole() -> [Range<usize>; 2] {
    [0..ROWS, 0..COLUMNS]
}

fn roles(window: &[Range<usize>]) -> Roles {
    let names = ["toa_radiation", "time_of_day", "latitude"].map(str::to_owned);
    Roles {
        history: 2,
        prognostic: 1,
        diagnostic: 1,
        forcing: Some(Normalizer::new(2.0, 0.5).unwrap()),
        computed: Some(Computed::new(&names, &Globe::new(), window).unwrap()),
    }
}

/// Channels of the input: two frames of `u`, `f`, four computed ones, a static one.
const INPUTS: i64 = 8;

fn task<L: FieldLayout, F>(layout: L, forward: F, change: bool, train_steps: usize) -> FieldTask<L, F> {
    let window = layout.window(&[ROWS, COLUMNS]).unwrap();
    let globe = Globe::new();
    let frames = globe.fields(&window);
    let rollouts = |steps, stride| {
        InMemory::rollouts(&frames, 1 + steps, stride).unwrap().with_times(&globe.times).unwrap()
    };
    let mask = globe.fields(&window).select(1, 3).select(1, 2).sign();
    let values = [(0.5, 2.0), (-1.0, 0.25)];
    let normalizer = |count: usize| {
        let json = serde_json::json!({
            "mean": values[..count].iter().map(|value| value.0).collect::<Vec<_>>(),
            "std": values[..count].iter().map(|value| value.1).collect::<Vec<_>>(),
        });
        serde_json::from_value::<Normalizer>(json).unwrap()
    };
    let model = FieldModel {
        forward,
        layout,
        positions: Some(mask),
        change: change.then(|| Normalizer::of_scales(&[0.5]).unwrap()),
        input: normalizer(1),
        target: normalizer(2),
        variables: ["u", "rain"].map(Variable::new).to_vec(),
        roles: Some(roles(&window)),
        missing: None,
    };
    FieldTask {
        model,
        train: rollouts(train_steps, 1).into(),
        validation: rollouts(1, 1).into(),
        rollouts: Some(rollouts(3, 3).into()),
        augment: Augment::None,
        loss: Mse {}.into(),
        weights: Weights::default(),
        report: Report::default(),
        seed: 0,
    }
}

/// Fixed sums of channels: the older and the newer frame, the forcing and so on.
fn sums<A: Array>(x: &A) -> Result<A, BoxError> {
    let sum = |weights: [f64; INPUTS as usize]| -> Result<A, BoxError> {
        let mut all = x.narrow(1, 0, 1)?.mul_scalar(weights[0])?;
        for (channel, weight) in weights.iter().enumerate().skip(1) {
            all = all.add(&x.narrow(1, channel as i64, 1)?.mul_scalar(*weight)?)?;
        }
        Ok(all)
    };
    let state = sum([-1.0, 2.0, 0.1, 0.2, 0.3, -0.1, 0.05, 0.4])?;
    let rain = sum([0.5, -0.5, 1.0, 0.0, 0.7, 0.0, 0.2, -0.3])?;
    Ok(A::cat(&[&state, &rain], 1)?)
}

/// A rollout is the recursion written out: the history moves on, forcings are those of each step's time.
#[test]
fn a_rollout_is_the_recursion_by_hand() {
    for change in [false, true] {
        let forward = |x: &Tensor, _: Option<Step<'_>>| {
            assert_eq!(x.size()[1], INPUTS);
            sums(x)
        };
        let task = task(DenseFields, forward, change, 1);
        assert_eq!((task.train.len(), task.validation.len(), task.rollouts()), (10, 10, 3));
        let rollouts = task.rollouts.as_ref().unwrap();
        let predicted = task.predict(&**rollouts, &[1]).unwrap();
        assert_eq!(predicted.len(), 3);

        let globe = Globe::new();
        let frames = globe.fields(&whole()).select(0, 0);
        let computed = roles(&whole()).computed.unwrap();
        let scaled = |frame: i64| (frames.get(frame).narrow(0, 0, 1) - 0.5) / 2.0;
        let (mut older, mut newer) = (scaled(3), scaled(4));
        let mask = frames.get(3).narrow(0, 2, 1).sign();
        for (step, found) in predicted.iter().enumerate() {
            let frame = 4 + step as i64;
            let forcing = (frames.get(frame).narrow(0, 2, 1) - 2.0) / 0.5;
            let own = computed.at(&[globe.times[frame as usize]]).unwrap().select(0, 0);
            let x = Tensor::cat(&[older, newer.shallow_clone(), forcing, own, mask.shallow_clone()], 0);
            let y = sums(&x.unsqueeze(0)).unwrap().select(0, 0);
            let state = y.narrow(0, 0, 1);
            let state = if change { &newer + state * (0.5 / 2.0) } else { state };
            let want = Tensor::cat(&[&state * 2.0 + 0.5, y.narrow(0, 1, 1) * 0.25 - 1.0], 0);
            assert!(found.select(0, 0).allclose(&want, 1e-12, 1e-12, false), "step {step}, change {change}");
            (older, newer) = (newer, state);
        }
        // The truth is that of the same frames, from the newest input frame on.
        let (input, truth) = task.truth(&**rollouts, &[1]).unwrap();
        assert_eq!(input.select(0, 0), frames.get(4).narrow(0, 0, 2));
        assert_eq!(truth[2].select(0, 0), frames.get(7).narrow(0, 0, 2));
        assert_eq!(task.errors(&[0, 9]).unwrap()[0].len(), 2);
        assert_eq!(task.rollout_baseline().unwrap().len(), 2);
    }
}

#[test]
fn frames_that_do_not_fit_the_roles_are_refused() {
    let frames = Globe::new().fields(&whole());
    let arrange = |roles: &Roles, channels: i64, steps: i64| {
        let frame = |at: i64| frames.select(1, at).narrow(1, 0, channels);
        let batch = Batch { input: frame(0), targets: (1..=steps).map(frame).collect(), times: Vec::new() };
        Roles::arrange(Some(roles), batch).map(|_| ()).unwrap_err().to_string()
    };
    let roles = roles(&whole());
    let error = arrange(&roles, 2, 3);
    assert!(error.contains("2 channels, expected 1 prognostic, 1 diagnostic and 1 forcing"), "{error}");
    assert!(arrange(&roles, 3, 1).contains("2 frames, expected more than the 2 of the history"));
    let task = task(DenseFields, |x: &Tensor, _: Option<Step<'_>>| sums(x), false, 1);
    let frame = frames.select(1, 0).narrow(1, 0, 1);
    let error = task.model.roll_out(&frame, 1, 1).unwrap_err().to_string();
    assert!(error.contains("starts from 1 frames, expected 2"), "{error}");
    let start = Start {
        frames: vec![frame.shallow_clone(), frame],
        forcings: Vec::new(),
        times: Vec::new(),
        steps: 1,
        part: None,
    };
    let error = task.model.roll_out_from(start, 1).unwrap_err().to_string();
    assert!(error.contains("the forcings of step 1 are not known"), "{error}");
}

/// Losses of training over a mesh, and the errors of rollouts afterwards.
fn trained(ranks: usize, shape: &[i64], names: &[&str]) -> Vec<(Vec<f64>, Vec<f64>)> {
    let folder = tempdir().unwrap();
    threads::run(ranks, Duration::from_secs(240), |world| {
        let _rank = DistributedManager::bind_thread(&world);
        let mesh = DeviceMesh::new(&world, shape, names).unwrap();
        let mut store = ParamStore::new(Generator::new(3)).with_options(Kind::Double, Device::Cpu);
        let (mut params, ranks) = on_mesh(&mut store, &mesh, &world, &Sharding::new(), true).unwrap();
        let fno = FnoConfig {
            dimension: 2,
            num_fno_modes: PerDim::All(2),
            latent_channels: 4,
            num_fno_layers: 1,
            ..FnoConfig::new(INPUTS as usize, 2)
        };
        let network = fno.build(&mut Scope::new(&mut params, "")).unwrap();
        let forward = Network::new(network);
        let layout = ShardedFields::new(&mesh, &[ROWS, COLUMNS]).unwrap();
        let task = task(layout, forward, true, 2);
        let (parameters, buffers) = Parameters::on_mesh(&store, &mesh).unwrap();
        let config = FitConfig {
            folder: folder.path().join("run"),
            train: TrainConfig { epochs: 2, batch_size: 4, ..TrainConfig::default() },
            ..FitConfig::default()
        };
        let summary = fit(&task, &parameters, &buffers, &ranks, &config).unwrap();
        let errors = task.rollout_errors(&[0, 1, 2]).unwrap_or_default();
        (summary.losses, errors.iter().map(|error| error.error()).collect())
    })
}

#[test]
fn all_roles_train_alike_on_every_mesh() {
    let (losses, errors) = trained(1, &[1], &["domain"]).remove(0);
    assert!(losses.len() >= 4 && errors.len() == 3, "{losses:?} {errors:?}");
    assert!(losses.last() < losses.first(), "{losses:?}");
    for (ranks, shape, names) in [
        (2, &[2][..], &["domain"][..]),
        (2, &[2], &["data"]),
        (3, &[3], &["domain"]),
        (4, &[2, 2], &["domain", "domain_y"]),
        (4, &[2, 2], &["data", "domain"]),
    ] {
        for (own, _) in trained(ranks, shape, names) {
            assert_eq!(own.len(), losses.len(), "{names:?}");
            for (got, want) in own.iter().zip(&losses) {
                assert!((got - want).abs() <= 1e-9 * want.abs(), "{names:?}: {own:?} {losses:?}");
            }
        }
    }
}
