//! Rounds of samples: their order, and the samples of several ranks.

use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use isobar_array::Array;
use isobar_collectives::{Group, threads};
use isobar_data::{Content, DataConfig, DatasetWriter, Normalizer, Window, WriterFormat};
use isobar_manager::DeviceMesh;
use isobar_train::metric::{Acc, Rmse};
use isobar_train::{
    BoxError, DenseFields, FieldLayout, FieldModel, Forward, ShardedFields, Step, Variable, VariableError,
};
use rstest::rstest;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::{TempDir, tempdir};

use super::fields::{Out, Prediction};
use super::outcome::Outcome;
use super::rounds::Place;
use super::sharing::{InLayout, OverData, Sharing};
use crate::config::Config;
use crate::run::{Scoring, Source};

const SAMPLES: usize = 6;
const FRAMES: usize = 6;
const EXTENTS: [usize; 2] = [4, 3];

thread_local! {
    /// Calls of the network and of a recording writer on this thread's rank.
    static CALLS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

fn called(text: String) {
    CALLS.with_borrow_mut(|calls| calls.push(text));
}

/// Records what is written instead of writing it; takes windows if `W`.
struct Recorder<const W: bool>;

impl<const W: bool> DatasetWriter for Recorder<W> {
    fn write(&mut self, _: &str, sample: usize, first: usize, _: &Tensor) -> isobar_data::Result<()> {
        called(format!("write {sample} {first}"));
        Ok(())
    }

    fn takes_windows(&self) -> bool {
        W
    }

    fn write_window(
        &mut self,
        variable: &str,
        sample: usize,
        first: usize,
        _: &[Range<usize>],
        values: &Tensor,
    ) -> isobar_data::Result<()> {
        self.write(variable, sample, first, values)
    }

    fn finish(self: Box<Self>) -> isobar_data::Result<()> {
        Ok(())
    }
}

impl<const W: bool> WriterFormat for Recorder<W> {
    const NAME: &'static str = if W { "recorded_windows" } else { "recorded_frames" };
    const SUMMARY: &'static str = "Nothing but a record of calls.";
    const EXTENSIONS: &'static [&'static str] = if W { &["windows"] } else { &["frames"] };

    fn create(_: &Path, _: &Content) -> isobar_data::Result<Box<dyn DatasetWriter>> {
        Ok(Box::new(Self))
    }
}

isobar_data::register_writer!(Recorder<true>);
isobar_data::register_writer!(Recorder<false>);

/// Writes a NumPy array whose value at each place is `value` of it.
fn array(folder: &Path, name: &str, value: impl Fn(usize) -> f32) {
    let [rows, cols] = EXTENTS;
    let shape = format!("{SAMPLES}, {FRAMES}, {rows}, {cols}");
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.bytes());
    bytes.extend((0..SAMPLES * FRAMES * rows * cols).flat_map(|at| value(at).to_le_bytes()));
    std::fs::write(folder.join(format!("{name}.npy")), bytes).unwrap();
}

/// Trajectories of one variable with holes, and a forcing.
fn data(own: Value) -> (TempDir, Config) {
    let folder = tempdir().unwrap();
    let hole = |at: usize| own["missing"] == "mask" && at % 4 == 1;
    array(folder.path(), "u", |at| if hole(at) { f32::NAN } else { 2.0 + (0.3 * at as f32).sin() });
    array(folder.path(), "wind", |at| (0.7 * at as f32).cos());
    let mut data = json!({
        "path": folder.path(), "format": "npy", "fields": ["u"], "validation_samples": 1,
        "npy": { "axes": ["sample", "time", "x", "y"] },
    });
    data.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    let mut config =
        Config { data: serde_json::from_value::<DataConfig>(data).unwrap(), ..Config::default() };
    config.metrics.report = vec![Rmse {}.into(), Acc {}.into()];
    (folder, config)
}

/// A network of the newest frame and, if there is one, the forcing.
fn network<A: Array>(x: &A) -> Result<A, BoxError> {
    called("network".to_owned());
    let channels = x.shape()[1];
    let forcing = x.narrow(1, channels - 1, 1)?.mul_scalar(0.25)?;
    Ok(x.narrow(1, 0, 1)?.mul_scalar(0.75)?.add(&forcing)?)
}

/// An ensemble of two members.
fn ensemble<A: Array>(x: &A) -> Result<A, BoxError> {
    let (one, other) = (network(x)?, x.narrow(1, 0, 1)?.mul_scalar(0.5)?);
    Ok(A::stack(&[&one, &other], 1)?)
}

fn model<L: FieldLayout, F: Forward<L::Array>>(
    (source, config): (&Source, &Config),
    layout: L,
    forward: F,
) -> FieldModel<L, F> {
    let variables = source.variables().unwrap();
    let scales = Normalizer::of_scales(&vec![1.0; variables.len()]).unwrap();
    let window = layout.window(&EXTENTS).unwrap();
    let forcing = (!source.names.forcings.is_empty()).then(|| scales.clone());
    FieldModel {
        forward,
        positions: None,
        change: None,
        input: scales.clone(),
        target: scales,
        variables,
        roles: source.names.roles(&*source.data, &config.data, &window, forcing).unwrap(),
        missing: config.data.masks(),
        layout,
    }
}

/// Samples and steps to predict, and the file.
struct Asked<'a> {
    samples: &'a [usize],
    start: usize,
    steps: usize,
    out: &'a Path,
}

fn predict<L: FieldLayout, F: Forward<L::Array>, S: Sharing<L>>(
    config: &Config,
    asked: &Asked<'_>,
    world: &Group,
    (source, model, sharing): (&Source, &FieldModel<L, F>, &S),
) -> Outcome {
    let window = model.layout.window(&EXTENTS).unwrap();
    let &Asked { samples, start, steps, out } = asked;
    let name = "a test".to_owned();
    let legend = source.legend(None).unwrap();
    let prediction = Prediction { source, samples, start, steps, name, legend };
    let options = (Kind::Double, Device::Cpu);
    let place = Place { window: &window, target_window: &window, world, options };
    let scoring = Scoring::new(source, config, &window, world).unwrap();
    let out = Out { path: out, attributes: &[], plain: false };
    prediction.run((model, sharing), &place, out, &scoring).unwrap()
}

/// Predicts with full fields, whose samples data ranks share.
fn with_full_fields(
    config: &Config,
    asked: &Asked<'_>,
    world: &Group,
    forward: impl Forward<Tensor>,
) -> Outcome {
    let source = Source::open(&config.data, None).unwrap();
    let model = model((&source, config), DenseFields, forward);
    if world.size() == 1 {
        return predict(config, asked, world, (&source, &model, &InLayout(&model.layout)));
    }
    let sharing = OverData::new(&model.layout, world, [&EXTENTS, &EXTENTS]).unwrap();
    predict(config, asked, world, (&source, &model, &sharing))
}

/// Number of calls of the network on this rank.
fn networks() -> usize {
    CALLS.with_borrow(|calls| calls.iter().filter(|call| *call == "network").count())
}

/// A step is in the file before the network computes the next one, and a writer of complete frames gets sample after sample.
#[rstest]
#[case("windows", 1, "0,0 n 0,1 n 0,2 1,0 n 1,1 n 1,2 2,0 n 2,1 n 2,2")]
#[case("frames", 1, "0,0 n 0,1 n 0,2 1,0 n 1,1 n 1,2 2,0 n 2,1 n 2,2")]
#[case("windows", 2, "0,0 1,0 n 0,1 1,1 n 0,2 1,2 2,0 n 2,1 n 2,2")]
#[case("frames", 2, "0,0 n 0,1 n 0,2 1,0 n 1,1 n 1,2 2,0 n 2,1 n 2,2")]
fn each_step_is_written_before_the_next(
    #[case] extension: &str,
    #[case] ranks: usize,
    #[case] expected: &str,
) {
    let (folder, config) = data(json!({}));
    let out = folder.path().join(format!("out.{extension}"));
    let found = threads::run(ranks, Duration::from_secs(60), |world| {
        let asked = Asked { samples: &[4, 0, 2], start: 1, steps: 2, out: &out };
        let forward = |x: &Tensor, _: Option<Step<'_>>| network(x);
        let _ = with_full_fields(&config, &asked, &world, forward);
        CALLS.with_borrow(|calls| calls.join(" "))
    });
    let calls = found[0].replace("write ", "w").replace("network", "n");
    let expected = expected.split(' ').map(|call| match call {
        "n" => "n".to_owned(),
        written => format!("w{}", written.replace(',', " ")),
    });
    assert_eq!(calls, expected.collect::<Vec<_>>().join(" "));
}

/// Errors, errors of persistence and metrics of a prediction as one list of numbers, and the bits of its file.
fn results(outcome: Outcome, out: &Path) -> (Vec<f64>, Vec<u32>) {
    let Outcome { errors, persistence, board, .. } = outcome;
    let errors = errors.iter().chain(&persistence).flatten().flatten();
    let errors = errors.flat_map(|error: &VariableError| [error.relative, error.rmse]);
    let scores = board.scores();
    let scores = scores.iter().flat_map(|scores| [0, 1].map(|at| scores.get(at, 0).unwrap_or(f64::NAN)));
    let format = match out.extension().and_then(|end| end.to_str()) {
        Some("zarr") => "zarr",
        Some("nc") => "netcdf",
        _ => "hdf5",
    };
    let fields = vec!["u".to_owned()];
    let config = DataConfig { path: out.into(), format: format.into(), fields, ..DataConfig::default() };
    let data = DataConfig { missing: serde_json::from_value("mask".into()).unwrap(), ..config };
    let data = data.open().unwrap();
    let samples: Vec<usize> = (0..data.samples()).collect();
    let points = vec![0..EXTENTS[0], 0..EXTENTS[1]];
    let window = Window { frames: 0..data.times().unwrap().len(), points };
    let values = data.read(&window, &samples, &["u"]).unwrap();
    let values = Vec::<f32>::try_from(values.flatten(0, -1)).unwrap();
    (errors.chain(scores).collect(), values.into_iter().map(f32::to_bits).collect())
}

/// Compares files to the bit, and numbers up to rounding.
fn assert_alike(found: &(Vec<f64>, Vec<u32>), want: &(Vec<f64>, Vec<u32>), of: &str) {
    assert_eq!(found.1, want.1, "the file of {of}");
    assert_eq!(found.0.len(), want.0.len(), "numbers of {of}");
    for (found, want) in found.0.iter().zip(&want.0) {
        let alike = (found - want).abs() <= 1e-12 * want.abs() || found.is_nan() && want.is_nan();
        assert!(alike, "{found}, not {want}, of {of}");
    }
}

/// Full fields on data ranks, of which some have no sample in the last round, or none at all, give the file, errors and metrics of
/// one rank.
#[rstest]
#[case::plain(json!({}), 5)]
#[case::beyond_the_data(json!({}), 7)]
#[case::masked(json!({ "missing": "mask" }), 3)]
#[case::roles(json!({ "history": 2, "forcings": ["wind"] }), 4)]
fn data_ranks_share_samples(
    #[case] own: Value,
    #[case] steps: usize,
    #[values("h5", "nc", "zarr")] extension: &str,
) {
    let (folder, config) = data(own);
    let samples = [5, 0, 3, 1, 2];
    let run = |ranks: usize| {
        let out = folder.path().join(format!("out_{ranks}.{extension}"));
        let found = threads::run(ranks, Duration::from_secs(60), |world| {
            let asked = Asked { samples: &samples, start: config.data.history - 1, steps, out: &out };
            let forward = |x: &Tensor, _: Option<Step<'_>>| network(x);
            let outcome = with_full_fields(&config, &asked, &world, forward);
            (outcome, networks())
        });
        let calls: Vec<usize> = found.iter().map(|(_, calls)| *calls).collect();
        let rounds = samples.len().div_ceil(ranks);
        assert_eq!(calls, vec![rounds * steps; ranks], "a sample a round");
        let outcome = found.into_iter().next().unwrap().0;
        assert_eq!(outcome.divergence.first_step(), None, "missing values are not the forecast's");
        results(outcome, &out)
    };
    let want = run(1);
    for ranks in [2, 3, 6] {
        assert_alike(&run(ranks), &want, &format!("{ranks} ranks"));
    }
}

/// The picture shows the first variable, and its title has the error of that variable, without missing points.
#[rstest]
fn a_picture_has_the_error_of_its_variable(
    #[values("error", "mask")] missing: &str,
    #[values(1, 2)] ranks: usize,
) {
    let (folder, config) = data(json!({ "missing": missing, "fields": ["u", "wind"] }));
    // The second variable is a thousand times the first, and is predicted exactly.
    array(folder.path(), "wind", |_| 2000.0);
    let out = folder.path().join("out.h5");
    let found = threads::run(ranks, Duration::from_secs(60), |world| {
        let asked = Asked { samples: &[2, 0], start: 0, steps: 2, out: &out };
        let forward = |x: &Tensor, _: Option<Step<'_>>| {
            Ok::<_, BoxError>(Tensor::cat(&[x.narrow(1, 0, 1) * 0.5, x.narrow(1, 1, 1)], 1))
        };
        with_full_fields(&config, &asked, &world, forward)
    });
    let errors = found[0].errors.iter().map(|samples| samples[0][0].relative * 100.0);
    let [first, last] = <[f64; 2]>::try_from(errors.collect::<Vec<_>>()).unwrap();
    assert!(first > 10.0 && last > first, "{first} {last}");
    for outcome in &found {
        let shown = outcome.first.as_ref().unwrap();
        let titles = shown.panel_titles(true, &["input".to_owned(), "u".to_owned()]);
        let expected = [
            "u, truth, step 1".to_owned(),
            "u, truth, step 2".to_owned(),
            "prediction".to_owned(),
            "prediction".to_owned(),
            format!("error of u, {first:.1} % in L2"),
            format!("error of u, {last:.1} % in L2"),
        ];
        assert_eq!(titles, expected);
    }
}

/// The network's values where the data have none, NaN in the file, do not make a forecast diverge.
#[test]
fn values_at_missing_points_do_not_diverge() {
    let (folder, config) = data(json!({ "missing": "mask" }));
    let out = folder.path().join("out.h5");
    let asked = Asked { samples: &[0, 1], start: 0, steps: 3, out: &out };
    let holes: Vec<f64> = (0..12).map(|at| if at % 4 == 1 { f64::INFINITY } else { 0.0 }).collect();
    let holes = Tensor::from_slice(&holes).view([4, 3]);
    let forward = |x: &Tensor, _: Option<Step<'_>>| Ok::<_, BoxError>(network(x)? + &holes);
    let outcome = with_full_fields(&config, &asked, &Group::single(), forward);
    assert_eq!(outcome.divergence.first_step(), None);
    let (numbers, values) = results(outcome, &out);
    assert!(numbers.iter().all(|number| number.is_finite()), "{numbers:?}");
    let is_hole = |(at, value): (usize, &u32)| f32::from_bits(*value).is_nan() == (at % 4 == 1);
    assert!(values.iter().enumerate().all(is_hole));
}

/// The file keeps all samples but the one that overflows, and its frames before that step. All ranks know the step.
#[rstest]
fn a_sample_that_diverges_has_nan_from_there_on(#[values("h5", "nc", "zarr")] extension: &str) {
    let (folder, config) = data(json!({}));
    let sample = |at: usize| at / (FRAMES * EXTENTS[0] * EXTENTS[1]);
    array(folder.path(), "u", |at| if sample(at) == 3 { 1e5 } else { 0.5 });
    let run = |ranks: usize| {
        let out = folder.path().join(format!("out_{ranks}.{extension}"));
        let found = threads::run(ranks, Duration::from_secs(60), |world| {
            let asked = Asked { samples: &[1, 3, 0], start: 0, steps: 5, out: &out };
            // 1e5, 1e10, 1e20, and 1e40, which float32 does not have.
            let forward = |x: &Tensor, _: Option<Step<'_>>| Ok::<_, BoxError>(x.square());
            with_full_fields(&config, &asked, &world, forward)
        });
        assert!(found.iter().all(|outcome| outcome.divergence.first_step() == Some(3)));
        let line = found[0].forecast(&[Variable::new("u")]).0.swap_remove(0);
        assert!(line.contains(" after 1 step, ") && line.contains(" after 2 steps;"), "{line}");
        let csv = folder.path().join("errors.csv");
        found[0].write_csv(&csv, &[Variable::new("u")], &[], &[]).unwrap();
        let csv = std::fs::read_to_string(&csv).unwrap();
        let is_nan: Vec<bool> = csv.lines().skip(1).map(|line| line.contains(",NaN,NaN,")).collect();
        assert_eq!(is_nan, [false, false, true, true, true], "{csv}");
        results(found.into_iter().next().unwrap(), &out).1
    };
    let values = run(1);
    let frames: Vec<bool> = values.chunks(12).map(|frame| f32::from_bits(frame[0]).is_nan()).collect();
    let expected: Vec<bool> = (0..3 * 6).map(|at| at / 6 == 1 && at % 6 >= 3).collect();
    assert_eq!(frames, expected, "three frames of the second sample");
    assert_eq!(run(2), values, "2 ranks");
}

/// All members of an ensemble count, whichever rank has the sample.
#[test]
fn data_ranks_share_samples_of_ensembles() {
    let (folder, config) = data(json!({}));
    let run = |ranks: usize| {
        let out = folder.path().join(format!("out_{ranks}.h5"));
        let found = threads::run(ranks, Duration::from_secs(60), |world| {
            let asked = Asked { samples: &[0, 1, 2], start: 0, steps: 1, out: &out };
            let forward = |x: &Tensor, _: Option<Step<'_>>| ensemble(x);
            with_full_fields(&config, &asked, &world, forward)
        });
        results(found.into_iter().next().unwrap(), &out)
    };
    assert_alike(&run(2), &run(1), "2 ranks");
}

/// Ranks of a mesh that splits samples and fields compute a sample a round, and the results are those of one rank.
#[rstest]
#[case(&[2], &["data"])]
#[case(&[3, 1], &["shard", "domain"])]
#[case(&[2, 2], &["data", "domain"])]
#[case(&[2, 2], &["data", "model"])]
fn ranks_of_a_mesh_share_samples(#[case] shape: &[i64], #[case] names: &[&str]) {
    let (folder, config) = data(json!({ "missing": "mask", "history": 2, "forcings": ["wind"] }));
    let ranks = shape.iter().product::<i64>() as usize;
    let alone = folder.path().join("alone.h5");
    let out = folder.path().join("out.h5");
    let asked = |out| Asked { samples: &[5, 0, 3, 1, 2], start: 1, steps: 3, out };
    let forward = |x: &Tensor, _: Option<Step<'_>>| network(x);
    let want = with_full_fields(&config, &asked(&alone), &Group::single(), forward);
    let want = results(want, &alone);
    let found = threads::run(ranks, Duration::from_secs(60), |world| {
        let mesh = DeviceMesh::new(&world, shape, names).unwrap();
        let source = Source::open(&config.data, None).unwrap();
        let layout = ShardedFields::new(&mesh, &EXTENTS).unwrap();
        let forward = |x: &isobar_shard::ShardTensor, _: Option<Step<'_>>| network(x);
        let model = model((&source, &config), layout, forward);
        let outcome = predict(&config, &asked(&out), &world, (&source, &model, &InLayout(&model.layout)));
        (outcome, networks())
    });
    let rounds = 5usize.div_ceil(shape[0] as usize);
    assert!(found.iter().all(|(_, calls)| *calls == 3 * rounds), "a sample a round");
    let found = results(found.into_iter().next().unwrap().0, &out);
    assert_alike(&found, &want, &format!("the mesh {names:?}"));
}
