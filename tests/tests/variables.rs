//! Errors of forecasts of several variables, of which one is a thousand times the others: each is reported on its own, and
//! the same on every mesh.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
    time::Duration,
};

use isobar_data::{WellDim, WellFile, WellMeta, WellWriter};
use isobar_harness::{Launch, Outcome, workspace};
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use tempfile::{TempDir, tempdir};

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");
const FRAMES: usize = 6;
const POINTS: usize = 16;
const TRAJECTORIES: usize = 5;
const VARIABLES: [&str; 3] = ["u", "v", "h"];

/// Shallow water, as a newcomer has it: winds of some metres a second over a depth of 9800 m.
static WATER: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("shallow_water.h5");
    let coordinates: Vec<f64> = (0..POINTS).map(|point| point as f64).collect();
    let dim =
        |name: &str| WellDim { name: name.to_owned(), coordinates: coordinates.clone(), periodic: true };
    let meta = WellMeta {
        name: "shallow_water".to_owned(),
        trajectories: TRAJECTORIES,
        times: (0..FRAMES).map(|frame| frame as f64 * 600.0).collect(),
        dims: vec![dim("x"), dim("y")],
        fields: VARIABLES.map(|name| (name.to_owned(), 0)).to_vec(),
        units: vec![("u".to_owned(), "m s-1".to_owned()), ("h".to_owned(), "m".to_owned())],
        ..WellMeta::default()
    };
    let angle = std::f64::consts::TAU / POINTS as f64;
    let line = Tensor::arange(POINTS as i64, (Kind::Double, Device::Cpu)) * angle;
    let (x, y) = (line.view([-1, 1]), line.view([1, -1]));
    let shape = [1, 1, POINTS as i64, POINTS as i64];
    let mut writer = WellWriter::create(&path, &meta).unwrap();
    for trajectory in 0..TRAJECTORIES {
        for frame in 0..FRAMES {
            let phase = trajectory as f64 * 1.3 + frame as f64 * 0.5;
            let u = (&x + &y * 2.0 + phase).sin() * 8.0;
            let v = (&x * 3.0 - &y - phase * 2.0).sin() * 0.4;
            let h = (&x - &y * 2.0 + phase * 0.3).cos() * 120.0 + 9800.0;
            for (name, field) in VARIABLES.iter().zip([u, v, h]) {
                writer.write(name, trajectory, frame, &field.view(shape)).unwrap();
            }
        }
    }
    writer.finish().unwrap();
    path
});

fn isobar(ranks: usize, command: &str, output: &Path, sets: &[&str]) -> Launch {
    let data = format!("data.path={}", WATER.display());
    let output = format!("run.output={}", output.display());
    let fields = "data.fields=[\"u\", \"v\", \"h\"]";
    let model = ["model.latent_channels=8", "model.num_fno_layers=2", "model.num_fno_modes=4"];
    let channels = ["model.in_channels=3", "model.out_channels=3", "schedule.warmup_epochs=0"];
    let small = ["run.name=run", "data.validation_samples=2", "data.validation_steps=3", "train.epochs=2"];
    let more = ["train.batch_size=3", "metrics.every_steps=1", "distributed.timeout_s=200", fields];
    let all = small.iter().chain(&more).chain(&model).chain(&channels).chain(sets).copied();
    let all = all.chain([&*data, &*output]).flat_map(|set| ["--set", set]).collect::<Vec<_>>();
    let launch = Launch::plain(ranks, ISOBAR).current_dir(workspace()).deadline(Duration::from_secs(120));
    launch.args([command, "configs/navier_stokes_fno.toml"]).args(all)
}

fn mesh(shape: &str, names: &str) -> [String; 2] {
    [format!("distributed.mesh.shape={shape}"), format!("distributed.mesh.names={names}")]
}

/// Returns the metrics of the end of the last epoch.
fn last_epoch(output: &Path) -> Value {
    let text = fs::read_to_string(output.join("run/metrics.jsonl")).unwrap();
    let records: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    records.into_iter().rfind(|record| record["validation_error"].is_number()).unwrap()
}

fn number(record: &Value, key: &str) -> f64 {
    record[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {record}"))
}

/// Reads the energy spectra beside a prediction: of each line the step, time, variable, unit and wave number, and the energies of
/// forecast and truth.
fn spectra(out: &Path) -> Vec<(String, [f64; 2])> {
    let text = fs::read_to_string(out.with_extension("spectra.csv")).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("step,time,variable,unit,wave_number,forecast,truth"));
    let line = |line: &str| {
        let (rest, truth) = line.rsplit_once(',').unwrap();
        let (key, forecast) = rest.rsplit_once(',').unwrap();
        (key.to_owned(), [forecast, truth].map(|energy| energy.parse().unwrap()))
    };
    lines.map(line).collect()
}

/// Relative errors and RMSEs by step and variable, by the table that `predict` writes: error, rmse and those of no change.
fn table(csv: &Path) -> BTreeMap<(usize, String), [f64; 4]> {
    let text = fs::read_to_string(csv).unwrap();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("step,time,variable,unit,error,rmse,baseline_error,baseline_rmse"));
    let row = |line: &str| {
        let cells: Vec<&str> = line.split(',').collect();
        let step: usize = cells[0].parse().unwrap();
        let unit = BTreeMap::from([("u", "m s-1"), ("v", ""), ("h", "m")])[cells[2]];
        assert_eq!((cells[1], cells[3]), (&*(step as f64 * 600.0).to_string(), unit), "{line}");
        let numbers: Vec<f64> = cells[4..].iter().map(|cell| cell.parse().unwrap()).collect();
        ((step, cells[2].to_owned()), numbers.try_into().unwrap())
    };
    lines.map(row).collect()
}

/// Computes the errors from the fields themselves: of predictions, or of the first frame as the prediction of all.
fn computed(prediction: &Path, step: usize, variable: &str) -> [f64; 4] {
    let (file, truth) = (WellFile::open(prediction).unwrap(), WellFile::open(&*WATER).unwrap());
    let window = [0..POINTS, 0..POINTS];
    let (mut relative, mut square) = ([0.0; 2], [0.0; 2]);
    for sample in 0..file.trajectories() {
        let read = |file: &WellFile, trajectory: usize, frame: usize| {
            let field = file.read(&[variable], trajectory, frame..frame + 1, &window).unwrap();
            field.to_kind(Kind::Double)
        };
        let target = read(&truth, TRAJECTORIES - 2 + sample, step);
        let predictions = [read(&file, sample, step), read(&truth, TRAJECTORIES - 2 + sample, 0)];
        for (at, prediction) in predictions.iter().enumerate() {
            let difference = (prediction - &target).square().sum(None).double_value(&[]);
            relative[at] += (difference / target.square().sum(None).double_value(&[])).sqrt();
            square[at] += difference / (POINTS * POINTS) as f64;
        }
    }
    let count = file.trajectories() as f64;
    let [own, none] = [0, 1].map(|at| [relative[at] / count, (square[at] / count).sqrt()]);
    [own[0], own[1], none[0], none[1]]
}

fn train(folder: &TempDir, ranks: usize, sets: &[&str]) -> Outcome {
    isobar(ranks, "train", folder.path(), sets).run().unwrap().expect_success()
}

/// On the line, in the files and at the end: an error for each variable, whose mean is the validation error.
#[test]
fn each_variable_is_reported_on_its_own() {
    let folder = tempdir().unwrap();
    let outcome = train(&folder, 1, &[]);
    let record = last_epoch(folder.path());
    let errors = VARIABLES.map(|name| number(&record, &format!("validation_error/{name}")));
    let mean = errors.iter().sum::<f64>() / 3.0;
    assert!((number(&record, "validation_error") - mean).abs() < 1e-12 * mean, "{record}");
    let rollouts = VARIABLES.map(|name| number(&record, &format!("rollout_error/{name}")));
    let mean_rollout = rollouts.iter().sum::<f64>() / 3.0;
    assert!((number(&record, "rollout_error") - mean_rollout).abs() < 1e-12 * mean_rollout, "{record}");
    // A depth that is right to some percent hides no wind that is not.
    assert!(errors[2] < 0.05 && errors[1] > 0.1, "{errors:?}");
    assert!(number(&record, "validation_rmse/h") > 1.0 && number(&record, "validation_rmse/v") < 1.0);
    let csv = fs::read_to_string(folder.path().join("run/metrics.csv")).unwrap();
    let tensorboard = fs::read_dir(folder.path().join("run/tensorboard")).unwrap().next().unwrap().unwrap();
    let events = fs::read(tensorboard.path()).unwrap();
    for kind in ["validation_error", "validation_rmse", "rollout_error", "rollout_rmse"] {
        for name in VARIABLES {
            let column = format!("{kind}/{name}");
            assert!(csv.lines().next().unwrap().split(',').any(|of| of == column), "{csv}");
            assert!(events.windows(column.len()).any(|part| part == column.as_bytes()), "{column}");
        }
    }
    let percent = |error: f64| format!("{:.2} %", error * 100.0);
    let named = [0, 1, 2].map(|at| format!("{} {}", VARIABLES[at], percent(errors[at]))).join(", ");
    let line = format!("validation error {} (mean of {named})", percent(mean));
    assert!(outcome.ranks[0].stderr.contains(&line), "no {line:?} in {outcome}");
    let said = &outcome.ranks[0].stdout;
    let summary = format!("validation relative L2 error {}, mean over 3 variables; ", percent(mean));
    assert!(said.contains(&summary) && said.contains("predicting no change gives "), "{outcome}");
    for (name, error) in VARIABLES.iter().zip(errors) {
        let row = |line: &&str| line.starts_with(name) && line.contains(&percent(error));
        assert!(said.lines().any(|line| row(&line)), "no row of {name} in {outcome}");
    }
    assert!(said.lines().any(|line| line.starts_with("h ") && line.contains(" m")), "{outcome}");
}

/// Errors of a forecast are those that its file gives, after each step, on every mesh; they and metrics are drawn.
#[test]
fn forecasts_have_the_errors_of_their_fields() {
    let folder = tempdir().unwrap();
    let double = "train.precision=float64";
    let _ = train(&folder, 1, &[double]);
    let predict = |ranks: usize, mesh: &[String]| {
        let out = folder.path().join(format!("{ranks}-{}.h5", mesh.len()));
        let report = "metrics.report=[\"rmse\", \"bias\", \"acc\", \"spectrum\"]";
        let sets: Vec<&str> = mesh.iter().map(String::as_str).chain([double, report]).collect();
        let launch = isobar(ranks, "predict", folder.path(), &sets).arg("--out").arg(&out);
        let outcome = launch.run().unwrap().expect_success();
        for curves in ["errors.png", "metrics.png", "spectra.png"].map(|end| out.with_extension(end)) {
            let line = format!("curves      {}", curves.display());
            assert!(outcome.ranks[0].stdout.lines().any(|own| own == line), "{outcome}");
            assert!(curves.is_file(), "{outcome}");
        }
        (outcome, out)
    };
    let (outcome, out) = predict(1, &[]);
    let (whole, energies) = (table(&out.with_extension("csv")), spectra(&out));
    // The largest wave number is that of the corner, √2 · POINTS / 2.
    let shells = (POINTS as f64 / 2.0 * 2_f64.sqrt()).round() as usize + 1;
    assert_eq!(energies.len(), (FRAMES - 1) * 3 * shells);
    assert_eq!(whole.len(), (FRAMES - 1) * 3);
    for ((step, variable), found) in &whole {
        for (found, want) in found.iter().zip(computed(&out, *step, variable)) {
            assert!((found - want).abs() <= 1e-5 * want, "{variable} after {step}: {found}, not {want}");
        }
    }
    let said = &outcome.ranks[0].stdout;
    for part in
        ["forecast    relative L2 error ", " after 1 step, ", " after 5 steps, mean over 3 variables; "]
    {
        assert!(said.contains(part), "no {part:?} in {outcome}");
    }
    let meshes = [
        (2, mesh("[2]", "[\"domain\"]")),
        (3, mesh("[3]", "[\"domain_y\"]")),
        (4, mesh("[2, 2]", "[\"domain\", \"domain_y\"]")),
        (4, mesh("[2, 2]", "[\"data\", \"domain\"]")),
    ];
    for (ranks, mesh) in meshes {
        let (outcome, out) = predict(ranks, &mesh);
        assert_eq!(outcome.ranks[1].stdout, "", "rank 0 speaks for all");
        for (key, split) in table(&out.with_extension("csv")) {
            for (found, want) in split.iter().zip(whole[&key]) {
                assert!((found - want).abs() <= 1e-9 * want, "{key:?}: {found}, not {want}, on {mesh:?}");
            }
        }
        let split = spectra(&out);
        assert_eq!(split.len(), energies.len());
        for ((key, split), (_, whole)) in split.iter().zip(&energies) {
            for (found, want) in split.iter().zip(whole) {
                assert!(
                    (found - want).abs() <= 1e-9 * want + 1e-15,
                    "{key}: {found}, not {want}, on {mesh:?}"
                );
            }
        }
    }
}

/// The errors of training are the same on every mesh.
#[test]
fn training_has_the_same_errors_on_every_mesh() {
    let alone = tempdir().unwrap();
    let double = "train.precision=float64";
    let _ = train(&alone, 1, &[double]);
    let want = last_epoch(alone.path());
    for (ranks, mesh) in [
        (2, mesh("[2]", "[\"data\"]")),
        (3, mesh("[3]", "[\"domain\"]")),
        (4, mesh("[2, 2]", "[\"domain\", \"domain_y\"]")),
    ] {
        let folder = tempdir().unwrap();
        let _ = train(&folder, ranks, &[double, &mesh[0], &mesh[1]]);
        let found = last_epoch(folder.path());
        for kind in ["validation_error", "validation_rmse", "rollout_error", "rollout_rmse", "spectrum_error"]
        {
            for name in VARIABLES {
                let key = format!("{kind}/{name}");
                let (found, want) = (number(&found, &key), number(&want, &key));
                assert!((found - want).abs() <= 1e-9 * want, "{key}: {found}, not {want}, on {mesh:?}");
            }
        }
    }
}

/// Variables that a model predicts no better than no change are named, at the end of training and with forecasts.
#[test]
fn a_variable_that_is_no_better_than_no_change_is_named() {
    let folder = tempdir().unwrap();
    let untrained = ["optimizer.lr=1e-12", "data.predict=frame", "data.validation_steps=1"];
    let outcome = train(&folder, 1, &untrained);
    let warning = "no better than predicting no change, on the validation samples: u (";
    assert_eq!(outcome.ranks[0].stderr.matches(warning).count(), 1, "{outcome}");
    assert!(outcome.ranks[0].stdout.lines().any(|line| line.ends_with("  no better")), "{outcome}");
    let outcome = isobar(1, "predict", folder.path(), &untrained).run().unwrap().expect_success();
    // Winds turn, so that after some steps nothing is better than no change; the depth stays.
    let warning = "no better than predicting no change, over 5 steps: h (";
    assert!(outcome.ranks[0].stderr.contains(warning), "{outcome}");

    let folder = tempdir().unwrap();
    let outcome = train(&folder, 1, &["train.epochs=40", "optimizer.lr=5e-3", "data.validation_steps=1"]);
    assert!(!outcome.ranks[0].stderr.contains("no better"), "{outcome}");
}

/// The loss `crps` of a network without members is said to be another one, once, whatever the number of ranks.
#[test]
fn a_crps_without_an_ensemble_is_warned_of() {
    for ranks in [1, 2] {
        let folder = tempdir().unwrap();
        let outcome = train(&folder, ranks, &["train.loss=crps", "train.epochs=1"]);
        let errors: String = outcome.ranks.iter().map(|rank| &*rank.stderr).collect();
        let warnings: Vec<&str> = errors.lines().filter(|line| line.contains("\"crps\"")).collect();
        assert_eq!(warnings.len(), 1, "{outcome}");
        assert!(
            warnings[0].contains("mean absolute error") && warnings[0].contains("spread is 0"),
            "{outcome}"
        );
    }
}

/// A prediction names its checkpoint and samples on the terminal and in its file; the picture of training stays.
#[test]
fn a_prediction_says_what_it_was_made_with() {
    let folder = tempdir().unwrap();
    let _ = train(&folder, 1, &[]);
    let run = folder.path().join("run");
    let picture = fs::read(run.join("validation.png")).unwrap();
    // By the folder of the run alone.
    let launch = Launch::plain(1, ISOBAR).current_dir(workspace()).deadline(Duration::from_secs(120));
    let launch = launch.arg("predict").arg(&run).args(["--samples", "0-1,4", "--start", "1", "--steps", "2"]);
    let outcome = launch.run().unwrap().expect_success();
    let said: Vec<&str> = outcome.ranks[0].stdout.lines().collect();
    let record = last_epoch(folder.path());
    let (step, error) = (record["step"].as_u64().unwrap(), number(&record, "validation_error"));
    let checkpoint = run.join(format!("checkpoints/step_{step:08}"));
    let line = format!(
        "checkpoint  {} (step {step}, epoch 2, validation error {:.2} %: mean over 3 variables of the relative L2 error; \
         the lowest validation error)",
        checkpoint.display(),
        error * 100.0
    );
    assert_eq!(said[0], line, "{outcome}");
    assert_eq!(said[1], "samples     trajectories 0-1,4, 2 steps from frame 1", "{outcome}");
    assert!(said[2].starts_with("forecast    relative L2 error "), "{outcome}");
    assert_eq!(fs::read(run.join("validation.png")).unwrap(), picture);
    assert!(run.join("prediction.png").exists() && run.join("prediction.csv").exists());
    assert!(run.join("prediction.errors.png").exists() && !run.join("prediction.metrics.png").exists());

    let file = hdf5_metno::File::open(run.join("prediction.h5")).unwrap();
    let attribute = |name: &str| {
        let text: hdf5_metno::types::VarLenUnicode = file.attr(name).unwrap().read_scalar().unwrap();
        text.to_string()
    };
    assert_eq!(attribute("isobar_checkpoint"), checkpoint.display().to_string());
    assert_eq!((attribute("isobar_step"), attribute("isobar_epoch")), (step.to_string(), "2".to_owned()));
    assert_eq!(attribute("isobar_validation_error").parse::<f64>().unwrap(), error);
    assert_eq!(attribute("isobar_validation_metric"), "mean over 3 variables of the relative L2 error");
    assert_eq!((attribute("isobar_samples"), attribute("isobar_start_frame")), ("0-1,4".into(), "1".into()));
    assert_eq!(attribute("isobar_data"), WATER.display().to_string());
    let written = WellFile::open(run.join("prediction.h5")).unwrap();
    assert_eq!(written.field("h").unwrap().unit(), Some("m"));
}
