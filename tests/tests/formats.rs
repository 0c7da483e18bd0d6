//! Runs on data of formats of named arrays, which TOML describes.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use isobar_data::{
    Content, DataConfig, DataVariable, Dim, PredictionMeta, Storage, TimeUnit, Window, writer,
};
use isobar_harness::{
    Exit, Launch, Outcome,
    curve::{assert_same_run, losses},
    workspace,
};
use isobar_tests::has_mpi;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rstest::rstest;
use serde_json::Value;
use tch::Tensor;
use tempfile::tempdir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");

fn fixture(name: &str) -> PathBuf {
    workspace().join("tests/data/formats").join(name)
}

/// Settings of a small network on the fixtures of `make.py`.
fn launch(launch: Launch, command: &str, output: &Path, data: &Path, sets: &[&str]) -> Launch {
    let (data, output) =
        (format!("data.path={}", data.display()), format!("run.output={}", output.display()));
    let common = [
        "run.name=run",
        "data.fields=[\"u\"]",
        "data.predict=frame",
        "data.validation_samples=1",
        "data.validation_steps=1",
        "model.latent_channels=4",
        "model.num_fno_layers=2",
        "model.num_fno_modes=2",
        "train.epochs=1",
        "train.batch_size=2",
        "train.precision=float64",
        "metrics.every_steps=1",
        "schedule.warmup_epochs=0",
        "distributed.timeout_s=200",
        &data,
        &output,
    ];
    let all = common.iter().chain(sets).flat_map(|set| ["--set", set]);
    launch
        .current_dir(workspace())
        .deadline(Duration::from_secs(300))
        .args([command, "configs/navier_stokes_fno.toml"])
        .args(all)
}

fn good(launch: Launch) -> Outcome {
    launch.run().unwrap().expect_success()
}

/// Trajectories in five formats train equal networks, those with latitudes and those without, on one rank and on split fields; and what
/// is predicted is
/// read by its own description.
#[test]
fn formats_train_alike_and_predictions_are_data() {
    let own = |format: &str| {
        let sets = ["axes=[\"sample\", \"time\", \"lat\", \"lon\"]", "periodic=[\"lon\"]"];
        sets.map(|set| format!("data.{format}.{set}")).to_vec()
    };
    let folder = tempdir().unwrap();
    let run = |name: &str, file: &str, format: &str, sets: &[String], ranks: usize| {
        let output = folder.path().join(name);
        let sets: Vec<String> = sets.iter().cloned().chain([format!("data.format={format}")]).collect();
        let mut sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        if ranks > 1 {
            sets.extend(["distributed.mesh.shape=[2]", "distributed.mesh.names=[\"domain\"]"]);
        }
        let ranks = if ranks == 1 { Launch::plain(1, ISOBAR) } else { Launch::mpirun(ranks, ISOBAR) };
        let _ = good(launch(ranks, "train", &output, &fixture(file), &sets));
        losses(&output.join("run"))
    };
    let first = run("netcdf", "netcdf4.nc", "netcdf", &[], 1);
    let mut plain = own("hdf5");
    plain.push("data.hdf5.variables={ u = \"run/u\" }".to_owned());
    // Without coordinates, rows have no area.
    let numbered = run("npy", "deflated.npz", "npy", &own("npy"), 1);
    assert_same_run(
        &numbered,
        &run("safetensors", "arrays.safetensors", "safetensors", &own("safetensors"), 1),
    );
    assert_same_run(&numbered, &run("hdf5", "plain.h5", "hdf5", &plain, 1));
    assert_ne!(numbered, first);
    let mut others = vec![run("classic", "classic.nc", "netcdf", &[], 1)];
    if has_mpi() {
        others.push(run("split", "classic.nc", "netcdf", &[], 2));
    }
    others.iter().for_each(|other| assert_same_run(&first, other));
    let output = folder.path().join("netcdf");
    let prediction = output.join("run/prediction.h5");
    let _ = good(launch(
        Launch::plain(1, ISOBAR),
        "predict",
        &output,
        &fixture("netcdf4.nc"),
        &["data.format=netcdf"],
    ));
    // One trajectory of its own, cut in two for training and validation.
    let sets = ["data.format=hdf5", "data.hdf5.cut=2"];
    let _ = good(launch(Launch::plain(1, ISOBAR), "train", &folder.path().join("again"), &prediction, &sets));
}

/// Pairs of fields that are named in TOML: coefficient and solution of Darcy flow, as any HDF5 file.
#[test]
fn pairs_are_named_in_toml() {
    let folder = tempdir().unwrap();
    let sets = [
        "data.format=hdf5",
        "data.fields=[]",
        "data.inputs=[\"a\"]",
        "data.targets=[\"u\"]",
        "data.hdf5.axes=[\"sample\", \"x-coordinate\", \"y-coordinate\"]",
        "data.hdf5.variables={ a = \"nu\", u = { path = \"tensor\", axes = [\"sample\", \"channel\", \"x-coordinate\", \
         \"y-coordinate\"] } }",
    ];
    let data = workspace().join("tests/data/darcy_excerpt.h5");
    let train = good(launch(Launch::plain(1, ISOBAR), "train", folder.path(), &data, &sets));
    assert!(train.ranks[0].stdout.contains("predicting the mean field"), "{train}");
    let _ = good(launch(Launch::plain(1, ISOBAR), "predict", folder.path(), &data, &sets));
    let swapped = sets.map(|set| {
        set.replace("inputs=[\"a\"]", "inputs=[\"u\"]").replace("targets=[\"u\"]", "targets=[\"a\"]")
    });
    let swapped = swapped.each_ref().map(String::as_str);
    let outcome = launch(Launch::plain(1, ISOBAR), "predict", folder.path(), &data, &swapped).run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(2), "{outcome}");
    assert!(outcome.ranks[0].stderr.contains("was trained with data.inputs = [\"a\"]"), "{outcome}");
}

#[rstest]
#[case(&["data.format=netcfd"], 2, "did you mean \"netcdf\"?")]
#[case(&["data.format=netcdf", "data.netcdf.axis=[]"], 2, "unknown key `data.netcdf.axis`")]
#[case(&["data.format=netcdf", "data.fields=[]"], 2, "names no field")]
#[case(&["data.format=netcdf", "data.inputs=[\"u\"]"], 2, "add the table [data.target]")]
#[case(&["data.format=netcdf", "data.fields=[\"wind\"]"], 3, "there is no field `wind`")]
#[case(&["data.format=netcdf", "data.netcdf.variables={ u = { path = \"u\", axis = [] } }"], 2, "axis")]
#[case(&["data.format=netcdf", "data.netcdf.time=\"frame\"", "data.inputs=[\"u\"]"], 2, "--set 'data.fields=[]'")]
#[case(&["data.format=netcdf", "data.netcdf.time=\"frame\"", "data.fields=[]", "data.inputs=[\"u\"]"], 2, "data.targets names no variable")]
#[case(&["data.format=npy"], 3, "neither a .npy nor a .npz file")]
fn what_does_not_fit_is_one_clear_error(#[case] sets: &[&str], #[case] code: i32, #[case] words: &str) {
    let folder = tempdir().unwrap();
    let launch = launch(Launch::plain(1, ISOBAR), "train", folder.path(), &fixture("classic.nc"), sets);
    let outcome = launch.run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(code), "{outcome}");
    assert!(outcome.ranks[0].stderr.contains(words), "{outcome}");
}

fn data(args: &[&str]) -> Outcome {
    Launch::plain(1, ISOBAR)
        .current_dir(workspace())
        .deadline(Duration::from_secs(60))
        .arg("data")
        .args(args)
        .run()
        .unwrap()
}

/// All that a data set of trajectories holds: metadata, and the bits of its values.
fn content(path: &Path, format: &str) -> (String, Vec<u32>) {
    let config = DataConfig { path: path.into(), format: format.into(), ..DataConfig::default() };
    let data = config.open_all().unwrap();
    let times = data.times().unwrap();
    let about = format!("{:?} {times:?} {:?} {:?}", data.dims(), data.time_unit(), data.variables());
    let points = data.dims().iter().map(|dim| 0..dim.coordinates.len()).collect();
    let window = Window { frames: 0..times.len(), points };
    let samples: Vec<usize> = (0..data.samples()).collect();
    let mut all = Vec::new();
    for variable in data.variables() {
        let values = data.read(&window, &samples, &[&variable.name]).unwrap().flatten(0, -1);
        all.extend(Vec::<f32>::try_from(values).unwrap().into_iter().map(f32::to_bits));
    }
    (about, all)
}

const HISTORY: &str = "2020-01-01 made\n2021-01-01 cut";

/// Adds attributes of CF to a store and its variable `u`.
fn describe(store: &Path) {
    let path = store.join("zarr.json");
    let mut root: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let mut put = |pointer: &str, all: &[(&str, &str)]| {
        let attributes = root.pointer_mut(pointer).unwrap();
        all.iter().for_each(|(name, text)| attributes[*name] = (*text).into());
    };
    put("/attributes", &[("title", "Waves"), ("institution", "A lake"), ("history", HISTORY)]);
    put(
        "/consolidated_metadata/metadata/u/attributes",
        &[("standard_name", "sea_surface_height"), ("long_name", "Height"), ("cell_methods", "time: mean")],
    );
    fs::write(&path, root.to_string()).unwrap();
}

fn check_attributes(path: &Path, format: &str, expected: &[(&str, &str)]) {
    let config = DataConfig { path: path.into(), format: format.into(), ..DataConfig::default() };
    let found = config.open_all().unwrap().attributes();
    for (name, text) in expected {
        assert_eq!(found.get(name), Some(*text), "{name} of {}", path.display());
    }
}

/// Samples without frames keep their times through every format that has a place for them.
#[test]
fn times_of_samples_are_converted() {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let content = Content {
        meta: PredictionMeta {
            name: "days".to_owned(),
            variables: vec!["u".to_owned()],
            samples: 2,
            times: Vec::new(),
            sample_times: vec![48.0, 24.0],
            sample_numbers: Vec::new(),
            attributes: Vec::new(),
            missing: false,
            left_out: Vec::new(),
        },
        time_unit: Some(TimeUnit { unit: "hours since 2000-01-01".to_owned(), calendar: None }),
        dims: vec![Dim { name: "x".to_owned(), unit: None, coordinates: vec![0.5, 1.5], periodic: false }],
        variables: vec![DataVariable::scalar("u")],
        parameters: Vec::new(),
        storage: Storage::default(),
    };
    let mut file = writer(None, &path("a.nc")).unwrap().create(&path("a.nc"), &content).unwrap();
    let values = Tensor::from_slice(&[1_f32, 2.0]).view([1, 1, 2]);
    (0..2).for_each(|sample| file.write("u", sample, 0, &values).unwrap());
    file.finish().unwrap();
    for pair in ["a.nc", "b.zarr", "c.h5", "d.safetensors", "e.nc"].windows(2) {
        let [from, to] = [pair[0], pair[1]].map(|name| path(name).display().to_string());
        let _ = data(&["convert", &from, &to]).expect_success();
        let config = DataConfig { path: path(pair[1]).into(), ..DataConfig::default() };
        let data = config.open_all().unwrap();
        assert_eq!(data.sample_times(), Some(vec![48.0, 24.0]), "{to}");
        assert_eq!(data.time_unit(), content.time_unit.as_ref(), "{to}");
    }
}

/// From NetCDF to Zarr and back nothing changes; the store needs no name of its format to train from.
#[test]
fn zarr_is_converted_to_and_from() {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).display().to_string();
    let source = fixture("netcdf4.nc");
    let first = source.display().to_string();
    let convert = |args: &[&str]| data(&[&["convert"], args].concat());
    let _ = convert(&[&first, &text("a.zarr")]).expect_success();
    assert_eq!(content(&path("a.zarr"), "zarr"), content(&source, "netcdf"));
    describe(&path("a.zarr"));
    let _ = convert(&[&text("a.zarr"), &text("b.nc")]).expect_success();
    let _ = convert(&[
        &text("b.nc"),
        &text("store"),
        "--format",
        "zarr",
        "--chunk",
        "time=2,lat=2",
        "--deflate",
        "1",
    ])
    .expect_success();
    let want = content(&path("a.zarr"), "zarr");
    assert!(want.0.contains("sea_surface_height"), "{}", want.0);
    for (name, format) in [("b.nc", "netcdf"), ("store", "zarr")] {
        assert_eq!(content(&path(name), format), want, "{name}");
    }
    let line = format!("isobar {} ", env!("CARGO_PKG_VERSION"));
    let convert_line = format!("\n{line}data convert");
    let history = format!("{HISTORY}{}", convert_line.repeat(2));
    check_attributes(
        &path("store"),
        "zarr",
        &[("title", "Waves"), ("institution", "A lake"), ("history", &history)],
    );
    let error = launch(Launch::plain(1, ISOBAR), "train", &path("run"), &path("store"), &[]).run().unwrap();
    assert!(error.ranks[0].stderr.contains("--set data.format=zarr"), "{error}");
    let config = fs::read_to_string(workspace().join("configs/navier_stokes_fno.toml")).unwrap();
    let own = format!("[data]\npath = {:?}\n", path("store"));
    let lines = config.lines().filter(|line| !line.starts_with("format =") && !line.starts_with("path ="));
    let config: String = lines.map(|line| format!("{line}\n")).collect();
    fs::write(path("run.toml"), config.replace("[data]\n", &own)).unwrap();
    let sets =
        ["data.fields=[\"u\"]", "data.predict=frame", "data.validation_samples=1", "data.validation_steps=1"];
    let model =
        ["model.latent_channels=4", "model.num_fno_layers=2", "model.num_fno_modes=2", "train.max_steps=1"];
    let output = format!("run.output={}", path("run").display());
    let sets = [&sets[..], &model, &[&output]].concat();
    let args = sets.iter().flat_map(|set| ["--set", set]);
    let run = |command: &str| {
        let launch = Launch::plain(1, ISOBAR).current_dir(workspace()).deadline(Duration::from_secs(300));
        launch.arg(command).arg(path("run.toml")).args(args.clone())
    };
    let _ = good(run("train"));
    let predict = |out: &str| run("predict").args(["--out", out]);
    let _ = good(predict(&text("run/prediction.nc")));
    let history = format!("{history}\n{line}predict");
    let prediction = path("run/prediction.nc");
    let source = "prediction by a neural network";
    check_attributes(
        &prediction,
        "netcdf",
        &[("institution", "A lake"), ("source", source), ("history", &history)],
    );
    let about = content(&prediction, "netcdf").0;
    assert!(about.contains("sea_surface_height") && about.contains("time: mean"), "{about}");
    let refused = predict("s3://bucket/prediction.zarr").run().unwrap();
    assert_eq!(refused.exit, Exit::Code(2), "{refused}");
    assert!(refused.ranks[0].stderr.contains("object stores are only read"), "{refused}");
    for (args, code, words) in [
        (vec![first.clone(), text("store")], 2, "its extension names no format"),
        (vec![first.clone(), "s3://bucket/new.zarr".into()], 2, "object stores are only read"),
        (
            vec![first.clone(), text("a.zarr")],
            2,
            "a.zarr exists, but a data set in a folder requires a new target",
        ),
        (
            vec![text("a.zarr"), text("a.zarr/zarr.json"), "--format".into(), "netcdf".into()],
            2,
            "is an input of this command",
        ),
        (vec![text("a.zarr"), text("a.zarr/new.nc")], 2, "is an input of this command"),
        (
            vec![text("a.zarr"), text("c.zarr"), "--chunk".into(), "depth=2".into()],
            2,
            "--chunk names \"depth\"",
        ),
        (vec![text("none.zarr"), text("c.nc")], 3, "none.zarr"),
        (vec![fixture("missing.nc").display().to_string(), text("c.zarr")], 3, "missing"),
    ] {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let outcome = convert(&args);
        assert_eq!(outcome.exit, Exit::Code(code), "{args:?}: {outcome}");
        let told = &outcome.ranks[0].stderr;
        assert!(told.contains(words), "{args:?}: {outcome}");
        assert_eq!(told.contains("the same command resumes"), words == "missing", "{args:?}: {outcome}");
    }
    let mut names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    // The last conversion failed at a value, and can be resumed.
    assert_eq!(names, [".c.zarr.partial", "a.zarr", "b.nc", "run", "run.toml", "store"]);
}

/// Writes a NumPy array of sines.
fn sines(path: &Path, shape: &[usize]) -> Vec<f32> {
    let values: Vec<f32> = (0..shape.iter().product()).map(|at: usize| (at as f32).sin()).collect();
    let extents: String = shape.iter().map(|extent| format!("{extent}, ")).collect();
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({extents}), }}");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend(u16::try_from(header.len()).unwrap().to_le_bytes());
    bytes.extend(header.bytes());
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    fs::write(path, bytes).unwrap();
    values
}

/// A conversion that was killed goes on where it was, unless it is another one: each chunk of Zarr is written once, and other formats are
/// written from the log of the values.
#[rstest]
#[case::zarr("u.zarr", &["--chunk", "time=1"], &["--chunk", "time=1"], true)]
#[case::another_zarr("u.zarr", &["--chunk", "time=1"], &["--chunk", "time=2"], false)]
#[case::hdf5("u.h5", &[], &[], true)]
#[case::another_hdf5("u.h5", &[], &["--deflate", "1"], false)]
#[case::netcdf("u.nc", &["--chunk", "time=2", "--deflate", "1"], &["--chunk", "time=2", "--deflate", "1"], true)]
#[case::npy("u", &["--format", "npy"], &["--format", "npy"], true)]
#[case::the_well("u.hdf5", &["--format", "the_well"], &["--format", "the_well"], true)]
fn a_killed_conversion_goes_on(
    #[case] name: &str,
    #[case] once: &[&str],
    #[case] again: &[&str],
    #[case] resumes: bool,
) {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    // Each sample is a block of the log; a chunk of Zarr takes longer.
    let shape = [if name == "u.zarr" { 2000 } else { 20_000 }, 3, 6];
    let values = sines(&path("u.npy"), &shape);
    let (source, target) = (path("u.npy").display().to_string(), path(name).display().to_string());
    let arguments = |own: &[&str]| -> Vec<String> {
        let axes = "data.npy.axes=[\"sample\", \"time\", \"x\"]";
        let common = ["data", "convert", &source, &target, "--set", axes];
        common.iter().chain(own).map(|&word| word.to_owned()).collect()
    };
    let mut child = Command::new(ISOBAR);
    let _ = child.args(arguments(once)).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = child.spawn().unwrap();
    let (chunk, log) = (path(".u.zarr.partial/u/c/9/0/0"), path(&format!(".{name}.partial/values")));
    let has_begun = || chunk.exists() || fs::metadata(&log).is_ok_and(|log| log.len() > 1000);
    let began = Instant::now();
    while !has_begun() {
        assert!(began.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none());
        thread::sleep(Duration::from_micros(200));
    }
    child.kill().unwrap();
    let _ = child.wait().unwrap();
    assert!(!path(name).exists());
    let outcome = Launch::plain(1, ISOBAR).current_dir(workspace()).args(arguments(again)).run().unwrap();
    let outcome = outcome.expect_success();
    assert_eq!(
        outcome.ranks[0].stdout.contains("from a conversion that was interrupted"),
        resumes,
        "{outcome}"
    );
    let mut names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    let mut expected = [name, "u.npy"];
    expected.sort_unstable();
    assert_eq!(names, expected);
    assert!(!path(name).join("isobar-plan").exists());
    if name == "u" {
        let written = fs::read(path("u/u.npy")).unwrap();
        let expected: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert!(written.ends_with(&expected));
        return;
    }
    let format = match name {
        "u.zarr" => "zarr",
        "u.nc" => "netcdf",
        "u.hdf5" => "the_well",
        _ => "hdf5",
    };
    let fields = vec!["u".to_owned()];
    let config =
        DataConfig { path: path(name).into(), format: format.into(), fields, ..DataConfig::default() };
    let data = config.open_all().unwrap();
    let window = Window { frames: 0..shape[1], points: std::iter::once(0..shape[2]).collect() };
    let samples: Vec<usize> = (0..shape[0]).collect();
    let read = data.read(&window, &samples, &["u"]).unwrap().flatten(0, -1);
    assert_eq!(Vec::<f32>::try_from(read).unwrap(), values);
}

/// A log that cannot be written ends at its last complete block: the conversion continues, and a later one resumes there.
#[test]
fn a_conversion_without_room_for_its_log_resumes_where_the_log_ends() {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let values = sines(&path("u.npy"), &[4000, 3, 6]);
    let (source, target) = (path("u.npy").display().to_string(), path("u").display().to_string());
    let axes = "data.npy.axes=[\"sample\", \"time\", \"x\"]";
    let arguments = ["data", "convert", &source, &target, "--format", "npy", "--set", axes];
    // No file exceeds 256 blocks of 512 bytes. A sample has 112 bytes in the log and 72 in the array.
    let limited = ["-c", r#"trap '' XFSZ; ulimit -f 256; exec "$@""#, "sh", ISOBAR];
    let outcome =
        Launch::plain(1, "sh").current_dir(workspace()).args(limited).args(arguments).run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(3), "{outcome}");
    let told = &outcome.ranks[0].stderr;
    assert!(
        told.contains("no more values are logged") && !told.contains("the same command resumes"),
        "{outcome}"
    );
    let logged = 256 * 512 / 112;
    assert_eq!(fs::metadata(path(".u.partial/values")).unwrap().len(), logged * 112);

    let outcome = Launch::plain(1, ISOBAR).current_dir(workspace()).args(arguments).run().unwrap();
    let outcome = outcome.expect_success();
    let there = format!("{:.1} KiB were there", (logged * 72) as f64 / 1024.0);
    assert!(outcome.ranks[0].stdout.contains(&there), "{outcome}");
    assert!(outcome.ranks[0].stderr.contains("replaying the values"), "{outcome}");
    let expected: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    assert!(fs::read(path("u/u.npy")).unwrap().ends_with(&expected));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing else is left");
}

/// `isobar data stats` of a run takes the samples that it trains on: by times, and all of a file if validation has its own.
#[test]
fn statistics_are_of_the_training_samples() {
    let folder = tempdir().unwrap();
    let file = fixture("netcdf4.nc");
    let config = folder.path().join("run.toml");
    let samples = |more: &str| {
        let text = format!("[data]\npath = {file:?}\nformat = \"netcdf\"\nfields = [\"u\"]\n{more}\n");
        fs::write(&config, text).unwrap();
        let out = folder.path().join("stats.json");
        let _ = data(&["stats", &config.display().to_string(), "--output", &out.display().to_string()])
            .expect_success();
        let told: serde_json::Value = serde_json::from_slice(&fs::read(out).unwrap()).unwrap();
        (told["samples"].clone(), told["channels"][0]["values"]["count"].as_u64().unwrap())
    };
    let (first, count) = samples("validation_samples = 1");
    let (both, all) = samples(&format!("validation_path = {file:?}"));
    assert_eq!((first, both), (serde_json::json!([0, 2]), serde_json::json!([0, 3])));
    assert_eq!(2 * all, 3 * count);
    let (_, few) = samples("times = [0, 1]\nvalidation_samples = 0");
    assert!(few < all, "{few} {all}");
}

/// Neither Ctrl-C nor SIGTERM leaves files under temporary names, and both end the command as usual.
#[rstest]
#[case::make(&["data", "make", "burgers", "--set", "frames=100000", "--out"], "u.h5", Signal::SIGINT)]
#[case::darcy(&["data", "darcy", "--samples", "100000", "--out"], "u.h5", Signal::SIGTERM)]
#[case::shallow_water(&["data", "shallow_water", "--days", "365", "--out"], "u.nc", Signal::SIGTERM)]
fn an_interrupted_output_leaves_nothing(#[case] words: &[&str], #[case] name: &str, #[case] signal: Signal) {
    let folder = tempdir().unwrap();
    let entries = || fs::read_dir(folder.path()).unwrap().count();
    // A test in the background ignores SIGINT, which commands inherit.
    let mut command = Command::new("env");
    let _ = command.arg("--default-signal=INT").arg(ISOBAR).args(words).arg(folder.path().join(name));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let began = Instant::now();
    while entries() == 0 {
        assert!(began.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none());
        thread::sleep(Duration::from_millis(1));
    }
    kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
    let ended = child.wait().unwrap();
    assert_eq!(ended.signal(), Some(signal as i32), "{ended}");
    assert_eq!(entries(), 0);
}

/// Commands on data keep missing values, levels and static fields, name what they leave out, and count all frames of a sample.
#[test]
fn data_commands_see_what_a_configuration_means() {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let text = |name: &str| path(name).display().to_string();
    let missing = fixture("missing.nc").display().to_string();
    let failed = data(&["stats", &missing]);
    assert!(failed.ranks[0].stderr.contains("--set data.missing=fill (or mask)"), "{failed}");
    let allow = ["--set", "data.missing=mask"];
    let _ = data(&["stats", &missing, allow[0], allow[1]]).expect_success();
    let _ = data(&["convert", &missing, &text("a.nc"), allow[0], allow[1]]).expect_success();
    let count = |file: &str| {
        let out = text("stats.json");
        let _ = data(&["stats", file, "--output", &out, allow[0], allow[1]]).expect_success();
        let told: serde_json::Value = serde_json::from_slice(&fs::read(out).unwrap()).unwrap();
        told["channels"][0]["values"].clone()
    };
    assert_eq!(count(&text("a.nc")), count(&missing));

    // A run: forcings and static fields are listed and counted; an unrelated folder of the default name is left alone.
    let file = fixture("netcdf4.nc");
    let config = path("some.toml");
    let head =
        format!("[data]\npath = {file:?}\nformat = \"netcdf\"\nfields = [\"u\"]\nvalidation_samples = 1\n");
    fs::write(&config, format!("{head}forcings = [\"v\"]\nstatics = [\"mask\"]\nhistory = 2\n")).unwrap();
    fs::create_dir_all(path("runs/run")).unwrap();
    let here = |args: &[&str]| {
        let launch = Launch::plain(1, ISOBAR).current_dir(folder.path()).deadline(Duration::from_secs(60));
        launch.arg("data").args(args).run().unwrap().expect_success()
    };
    let shown = here(&["inspect", "some.toml", "--set", "train.batch_size=2"]).ranks[0].stdout.clone();
    // 2 samples of 3 frames of 2 variables of 24 points, and the mask.
    assert!(shown.contains("2 samples of 3 frames") && shown.contains("up to 1.1 KiB a rank"), "{shown}");
    assert!(
        shown.contains("static fields, 96 bytes, are read once")
            && shown.contains("mask         [lat 4, lon 6]"),
        "{shown}"
    );
    let shown = here(&["stats", "some.toml", "--all"]).ranks[0].stdout.clone();
    assert!(["u ", "v ", "mask "].iter().all(|name| shown.contains(&format!("\n{name}"))), "{shown}");
    assert!(!path("runs/run/stats.json").exists(), "{shown}");
    let _ = here(&["stats", "some.toml", "--set", "run.name=run"]);
    assert!(path("runs/run/stats.json").exists());
    let _ = here(&["convert", &file.display().to_string(), "mask.nc", "--variables", "mask"]);
    let shown = here(&["inspect", "mask.nc", "--set", "data.fields=[\"mask\"]"]).ranks[0].stdout.clone();
    assert!(
        shown.contains("1 samples without time of 4 x 6 points; mask") || shown.contains("[lat 4, lon 6]"),
        "{shown}"
    );
}
