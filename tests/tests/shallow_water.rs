//! `configs/shallow_water.toml` and its twin for Zarr, `shallow_water_zarr.toml`: history, statics, weights of latitudes, ACC and rollouts
//! of ten steps, on 1, 2 and 4 ranks, killed and resumed within an epoch; in one file, in several and in a store of Zarr, and with missing
//! values that are masked. Predictions in Zarr are those in NetCDF.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::single_range_in_vec_init, reason = "the frames of one file")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use isobar_data::{
    Content, DataConfig, DataVariable, Dataset, Dim, Missing, PredictionMeta, Storage, TimeUnit, Window,
    writer,
};
use isobar_harness::{
    Launch,
    curve::{assert_same_run, losses, metric},
    skip, workspace,
};
use rstest::rstest;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");
const ROWS: usize = 10;
const COLUMNS: usize = 16;
/// Of both winds, and of the depth.
const UNITS: [&str; 3] = ["m s-1", "m s-1", "m"];

/// Writes frames of waves on a sphere, every two hours: winds and a depth; values of `v` in a corner are missing with `holes`.
pub(crate) fn write(path: &Path, frames: std::ops::Range<usize>, holes: bool) {
    let line = |count: usize, first: f64, step: f64| (0..count).map(|at| first + step * at as f64).collect();
    let dim = |name: &str, unit: &str, coordinates: Vec<f64>, periodic| Dim {
        name: name.into(),
        unit: Some(unit.into()),
        coordinates,
        periodic,
    };
    let names = ["u", "v", "h"];
    let content = Content {
        meta: PredictionMeta {
            name: "waves".into(),
            variables: names.map(str::to_owned).to_vec(),
            samples: 1,
            times: frames.clone().map(|frame| 2.0 * frame as f64).collect(),
            sample_times: Vec::new(),
            sample_numbers: Vec::new(),
            attributes: Vec::new(),
            missing: holes,
            left_out: Vec::new(),
        },
        time_unit: Some(TimeUnit { unit: "hours since 2000-01-01".into(), calendar: None }),
        dims: vec![
            dim("latitude", "degrees_north", line(ROWS, 81.0, -18.0), false),
            dim("longitude", "degrees_east", line(COLUMNS, 0.0, 22.5), true),
        ],
        variables: names
            .iter()
            .zip(UNITS)
            .map(|(name, unit)| DataVariable { unit: Some(unit.into()), ..DataVariable::scalar(*name) })
            .collect(),
        parameters: Vec::new(),
        storage: Storage::default(),
    };
    let mut file = writer(None, path).unwrap().create(path, &content).unwrap();
    for (channel, name) in names.iter().enumerate() {
        let wave = |frame: usize, at: usize| {
            let (row, column) = (at / COLUMNS, at % COLUMNS);
            let angle = std::f64::consts::TAU * column as f64 / COLUMNS as f64;
            (angle * (1 + channel) as f64 - 0.3 * frame as f64).sin() * (1.0 + row as f64)
        };
        let values: Vec<f64> =
            frames.clone().flat_map(|frame| (0..ROWS * COLUMNS).map(move |at| wave(frame, at))).collect();
        let shape = [frames.len() as i64, 1, ROWS as i64, COLUMNS as i64];
        let values = Tensor::from_slice(&values).view(shape).to_kind(Kind::Float).to_device(Device::Cpu);
        if holes && channel == 1 {
            let _ = values.narrow(2, 0, 3).narrow(3, 2, 4).fill_(f64::NAN);
        }
        file.write(name, 0, 0, &values).unwrap();
    }
    file.finish().unwrap();
}

/// Arguments of a short run in double precision: 18 training samples in batches of 4. A store of Zarr has a configuration of its own.
fn arguments(data: &str, output: &Path, sets: &[&str]) -> Vec<String> {
    let path_is_zarr = data.ends_with(".zarr");
    let (data, output) = (format!("data.path={data}"), format!("run.output={}", output.display()));
    let common = [
        &*data,
        &output,
        "run.name=run",
        "data.train_times=[\"2000-01-01\", 38]",
        "data.validation_times=[38, 70]",
        "model.latent_channels=4",
        "model.num_fno_layers=2",
        "model.num_fno_modes=3",
        "model.padding=2",
        "train.epochs=100",
        "train.validate_every=2",
        "train.precision=float64",
        "metrics.every_steps=1",
        "checkpoint.every_epochs=0",
        "checkpoint.every_steps=3",
        "schedule.warmup_epochs=0",
        "distributed.timeout_s=200",
    ];
    let sets = common.iter().chain(sets).flat_map(|set| ["--set".to_owned(), (*set).to_owned()]);
    let config = match path_is_zarr {
        true => "configs/shallow_water_zarr.toml",
        false => "configs/shallow_water.toml",
    };
    ["train", config].map(str::to_owned).into_iter().chain(sets).collect()
}

fn launch(ranks: usize, args: &[String]) -> Launch {
    let launch = Launch::plain(ranks, ISOBAR).current_dir(workspace());
    launch.deadline(Duration::from_secs(300)).args(args)
}

const TWO: [&str; 1] = ["distributed.mesh.names=[\"domain\"]"];
const FOUR: [&str; 2] =
    ["distributed.mesh.names=[\"domain\", \"domain_y\"]", "distributed.mesh.shape=[2, 2]"];

#[test]
fn the_configuration_trains_on_data_of_the_command() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("data/flow.nc").display().to_string();
    let solve = |truncation: &str| {
        let size = ["--truncation", truncation, "--latitudes", "10", "--days", "3"];
        Launch::plain(1, ISOBAR).args(["data", "shallow_water", "--out", &path]).args(size).run().unwrap()
    };
    let failed = solve("5").expect_code(2);
    assert!(failed.ranks[0].stderr.contains("the truncation is 5, expected 21 to 255"), "{failed}");
    let solved = solve("21").expect_success();
    assert!(solved.ranks[0].stdout.contains("36 frames of 10 x 20 points"), "{solved}");
    let arguments = arguments(&path, folder.path(), &["train.max_steps=2"]);
    let _ = launch(1, &arguments).run().unwrap().expect_success();
}

/// All that a run of two epochs reports.
fn reported(run: &Path) -> Vec<Vec<f64>> {
    let names = [
        "loss",
        "validation_error",
        "rollout_error",
        "validation/acc/u",
        "rollout/step_10/acc/h",
        "rollout/step_10/rmse/v",
    ];
    let all: Vec<Vec<f64>> = names.iter().map(|name| metric(run, name)).collect();
    assert!(all.iter().all(|values| !values.is_empty() && values.iter().all(|value| value.is_finite())));
    all
}

/// Sharded runs have the numbers of one rank: of one file, of several, with a mask, and from Zarr.
#[rstest]
#[case::one_file("nc", &[0..36], false)]
#[case::files_and_a_mask("nc", &[0..7, 7..20, 20..36], true)]
#[case::zarr("zarr", &[0..36], false)]
fn sharded_runs_are_those_of_one_rank(
    #[case] extension: &str,
    #[case] files: &[std::ops::Range<usize>],
    #[case] holes: bool,
) {
    let folder = tempdir().unwrap();
    let data = folder.path().join("data");
    fs::create_dir(&data).unwrap();
    for (number, frames) in files.iter().enumerate() {
        write(&data.join(format!("waves_{number}.{extension}")), frames.clone(), holes);
    }
    let first = data.join(format!("waves_0.{extension}"));
    let path = if holes { data.display().to_string() } else { first.display().to_string() };
    let run = |name: &str, ranks: usize, mesh: &[&str]| {
        let own =
            if holes { &["data.missing=mask", "data.open_files=1", "data.cache=none"][..] } else { &[] };
        let sets = [mesh, own, &["train.max_steps=10"]].concat();
        let output = folder.path().join(name);
        let _ = launch(ranks, &arguments(&path, &output, &sets)).run().unwrap().expect_success();
        reported(&output.join("run"))
    };
    let one = run("one", 1, &[]);
    for (name, ranks, mesh) in [("two", 2, &TWO[..]), ("four", 4, &FOUR)] {
        for (split, one) in run(name, ranks, mesh).iter().zip(&one) {
            assert_same_run(split, one);
        }
    }
}

/// Killed within an epoch on one rank, resumed on four, whose losses are those of two that were not killed.
#[rstest]
fn a_killed_run_resumes_on_other_ranks(#[values("nc", "zarr")] extension: &str) {
    let folder = tempdir().unwrap();
    let data = folder.path().join(format!("waves.{extension}"));
    write(&data, 0..36, false);
    let data = data.display().to_string();
    let output = |name: &str| -> PathBuf { folder.path().join(name) };
    let steps = "train.max_steps=40";
    let _ = launch(2, &arguments(&data, &output("whole"), &[&TWO[..], &[steps]].concat()))
        .run()
        .unwrap()
        .expect_success();
    let mut child = Command::new(ISOBAR);
    child.current_dir(workspace()).args(arguments(&data, &output("killed"), &[steps]));
    let mut child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // Epochs have five steps: the checkpoints of steps 3, 6 and 9 are within one.
    let saved = output("killed").join("run/checkpoints/step_00000006");
    let began = Instant::now();
    while !saved.exists() && began.elapsed() < Duration::from_secs(120) {
        thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let args = arguments(&data, &output("killed"), &[&FOUR[..], &[steps]].concat());
    let resumed = launch(4, &args).arg("--resume=must").run().unwrap().expect_success();
    assert!(resumed.ranks[0].stderr.contains("resumed from"), "{resumed}");
    assert!(
        resumed.ranks[0].stderr.contains("statistics of the training samples are those of the last start"),
        "{resumed}"
    );
    assert_same_run(&losses(&output("killed").join("run")), &losses(&output("whole").join("run")));
}

/// A data set of the three variables, whose values may be missing.
fn opened(path: &Path, format: &str) -> Box<dyn Dataset> {
    let config = DataConfig {
        path: path.into(),
        format: format.into(),
        fields: ["u", "v", "h"].map(str::to_owned).to_vec(),
        missing: Missing::Mask,
        ..DataConfig::default()
    };
    config.open().unwrap()
}

/// All that a data set holds: metadata, and the bits of its values.
fn content(path: &Path, format: &str) -> (String, Vec<u32>) {
    let data = opened(path, format);
    let (names, times) = (data.variables(), data.times().unwrap());
    let about = format!("{:?} {names:?} {times:?} {:?}", data.dims(), data.time_unit());
    let window = Window { frames: 0..times.len(), points: vec![0..ROWS, 0..COLUMNS] };
    let values = data.read(&window, &[0], &["u", "v", "h"]).unwrap().flatten(0, -1);
    (about, Vec::<f32>::try_from(values).unwrap().into_iter().map(f32::to_bits).collect())
}

/// Prints what xarray makes of data sets: names, units, times in hours since 2000, coordinates and values.
const XARRAY: &str = r#"
import json, sys
import numpy, xarray

def numbers(array):
    return [None if numpy.isnan(number) else float(number) for number in array.values.ravel()]

def look(path):
    data = xarray.open_zarr(path) if path.endswith(".zarr") else xarray.open_dataset(path)
    assert data.time.dtype.kind == "M", "times are dates"
    hours = (data.time.values - numpy.datetime64("2000-01-01")) / numpy.timedelta64(1, "h")
    array = lambda array: [list(array.dims), str(array.dtype), array.attrs.get("units"), numbers(array)]
    return {
        "times": hours.tolist(),
        "coordinates": {name: array(data[name]) for name in ["latitude", "longitude"]},
        "variables": {name: array(data[name]) for name in data.data_vars},
    }

json.dump([look(path) for path in sys.argv[1:]], sys.stdout)
"#;

/// Checks that xarray, which the set-up of `cargo xtask test` installs, opens predictions of any format.
fn assert_xarray_opens(paths: &[PathBuf; 2]) {
    let packages = workspace().join(".tools/xarray");
    if !packages.join("isobar-stamp").exists() {
        assert!(std::env::var_os("CI").is_none(), "the set-up has not installed xarray");
        return skip("no xarray: cargo xtask test installs it");
    }
    let mut python = Command::new("python3");
    let output = python.env("PYTHONPATH", packages).args(["-c", XARRAY]).args(paths).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: [Value; 2] = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found[0], found[1], "NetCDF and Zarr");
    let data = opened(&paths[0], "netcdf");
    let times = data.times().unwrap();
    assert_eq!(found[0]["times"], json!(times));
    for (dim, unit) in data.dims().iter().zip(["degrees_north", "degrees_east"]) {
        let [dims, dtype, own] = [json!([dim.name]), json!("float64"), json!(dim.coordinates)];
        assert_eq!(found[0]["coordinates"][&dim.name], json!([dims, dtype, unit, own]));
    }
    let window = Window { frames: 0..times.len(), points: vec![0..ROWS, 0..COLUMNS] };
    assert_eq!(found[0]["variables"].as_object().unwrap().len(), 3);
    for (name, unit) in ["u", "v", "h"].into_iter().zip(UNITS) {
        let values = data.read(&window, &[0], &[name]).unwrap().to_kind(Kind::Double).flatten(0, -1);
        let values: Vec<Option<f64>> = Vec::<f64>::try_from(values)
            .unwrap()
            .into_iter()
            .map(|value| (!value.is_nan()).then_some(value))
            .collect();
        let dims = ["sample", "time", "latitude", "longitude"];
        assert_eq!(found[0]["variables"][name], json!([dims, "float32", unit, values]), "{name}");
    }
}

/// `predict` writes the same bits in Zarr, each rank its own chunks, as in NetCDF; xarray opens both.
#[rstest]
#[case::all_there(false)]
#[case::masked(true)]
fn predictions_in_zarr_are_those_in_netcdf(#[case] holes: bool) {
    let folder = tempdir().unwrap();
    let data = folder.path().join("waves.nc");
    write(&data, 0..36, holes);
    let data = data.display().to_string();
    let missing = if holes { "data.missing=mask" } else { "data.missing=error" };
    let arguments =
        |mesh: &[&str]| arguments(&data, folder.path(), &[mesh, &["train.max_steps=3", missing]].concat());
    let _ = launch(1, &arguments(&[])).run().unwrap().expect_success();
    for (ranks, mesh) in [(1, &[][..]), (2, &TWO), (4, &FOUR)] {
        let paths =
            ["nc", "zarr"].map(|extension| folder.path().join(format!("predicted_{ranks}.{extension}")));
        let predicted = paths.each_ref().map(|out| {
            let mut args = arguments(mesh);
            args[0] = "predict".to_owned();
            let _ =
                launch(ranks, &args).args(["--steps", "4", "--out"]).arg(out).run().unwrap().expect_success();
            content(out, if out.extension().is_some_and(|end| end == "nc") { "netcdf" } else { "zarr" })
        });
        assert_eq!(predicted[0], predicted[1], "on {ranks} ranks");
        assert!(
            predicted[0].0.contains("hours since 2000-01-01") && predicted[0].0.contains("degrees_north")
        );
        if ranks == 4 {
            assert_xarray_opens(&paths);
        }
        let missing = predicted[0].1.iter().filter(|bits| f32::from_bits(**bits).is_nan()).count();
        assert_eq!(missing, if holes { 5 * 3 * 4 } else { 0 });
    }
    let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with('.')).collect();
    assert!(left.is_empty(), "{left:?}");
}
