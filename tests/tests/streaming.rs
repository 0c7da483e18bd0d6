//! Runs that read their samples while they train: the losses of a run in memory, killed and resumed, and data that turn out bad.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use isobar_harness::{
    Exit, Launch,
    curve::{assert_same_run, losses, metric},
    workspace,
};
use rstest::rstest;
use tempfile::tempdir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");

/// Arguments of a small run on Darcy flow in double precision, of six samples, each a step of its own.
fn darcy(output: &Path, sets: &[&str]) -> Vec<String> {
    let output = format!("run.output={}", output.display());
    let small =
        ["data.path=tests/data/darcy_excerpt.h5", "data.validation_samples=2", "run.name=run", &output];
    let more =
        ["train.epochs=100", "train.batch_size=1", "metrics.every_steps=1", "distributed.timeout_s=200"];
    let model = ["model.embed_dim=16", "model.depth=1", "model.num_blocks=2", "model.patch_size=[8, 8]"];
    let rest = ["train.precision=float64", "checkpoint.every_epochs=0", "checkpoint.every_steps=4"];
    let all = small.iter().chain(&more).chain(&model).chain(&rest).chain(sets);
    let sets = all.flat_map(|set| ["--set".to_owned(), (*set).to_owned()]);
    ["train", "configs/darcy_afno.toml"].map(str::to_owned).into_iter().chain(sets).collect()
}

fn launch(ranks: usize, args: &[String]) -> Launch {
    let launch = Launch::plain(ranks, ISOBAR).current_dir(workspace());
    launch.deadline(Duration::from_secs(300)).args(args)
}

/// A run that is killed within an epoch goes on with the losses that it would have had, in memory and on another layout.
#[test]
fn a_killed_run_resumes_within_an_epoch() {
    let (whole, killed) = (tempdir().unwrap(), tempdir().unwrap());
    let steps = "train.max_steps=22";
    let _ = launch(1, &darcy(whole.path(), &[steps])).run().unwrap().expect_success();
    let mut child = Command::new(ISOBAR);
    child.current_dir(workspace()).args(darcy(killed.path(), &["data.cache=none", steps]));
    let mut child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // The one before is complete then; both are within an epoch of six steps.
    let saved = killed.path().join("run/checkpoints/step_00000008");
    let began = Instant::now();
    while !saved.exists() && began.elapsed() < Duration::from_secs(120) {
        thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let sets = ["data.cache=window", "data.host_memory=200KiB", steps, "distributed.mesh.names=[\"domain\"]"];
    let args = darcy(killed.path(), &sets);
    let resumed = launch(2, &args).arg("--resume=must").run().unwrap().expect_success();
    assert!(resumed.ranks[0].stderr.contains("resumed from"), "{resumed}");
    assert!(resumed.ranks[0].stderr.contains("of data were read while they were needed"), "{resumed}");
    assert_same_run(&losses(&killed.path().join("run")), &losses(&whole.path().join("run")));
}

/// Trajectories, with more steps in the second epoch and rollouts: to the last bit as in memory.
#[test]
fn streamed_trajectories_train_alike() {
    let folder = tempdir().unwrap();
    let run = |name: &str, ranks: usize, sets: &[&str]| {
        let output = format!("run.output={}", folder.path().join(name).display());
        let common = [
            "data.path=tests/data/formats/classic.nc",
            "data.format=netcdf",
            "data.fields=[\"u\"]",
            "data.predict=change",
            "data.train_steps=[{ epoch = 0, steps = 1 }, { epoch = 1, steps = 2 }]",
            "data.validation_samples=1",
            "data.validation_steps=2",
            "model.latent_channels=4",
            "model.num_fno_layers=2",
            "model.num_fno_modes=2",
            "train.epochs=2",
            "train.batch_size=2",
            "train.accumulate=2",
            "metrics.every_steps=1",
            "schedule.warmup_epochs=0",
            "distributed.timeout_s=200",
            "run.name=run",
            &output,
        ];
        let args = common.iter().chain(sets).flat_map(|set| ["--set", set]);
        let args: Vec<String> =
            ["train", "configs/navier_stokes_fno.toml"].into_iter().chain(args).map(str::to_owned).collect();
        let _ = launch(ranks, &args).run().unwrap().expect_success();
        let run = folder.path().join(name).join("run");
        ["loss", "validation_error", "rollout_error", "spectrum_error"].map(|name| metric(&run, name))
    };
    let domain = "distributed.mesh.names=[\"domain\"]";
    assert_eq!(run("memory", 1, &[]), run("stream", 1, &["data.cache=none", "data.workers=3"]));
    assert_eq!(run("memory_2", 2, &[domain]), run("stream_2", 2, &[domain, "data.cache=window"]));
}

/// Writes trajectories `[sample, time, x, y]` of which a value of the last one is not a number.
fn holed(folder: &Path) -> PathBuf {
    let shape = [4_usize, 3, 16, 16];
    let count: usize = shape.iter().product();
    let mut values: Vec<f32> = (0..count).map(|at| (at as f32 * 0.37).sin()).collect();
    // Trajectory 3, frame 2, row 12, column 5: in the second half of the rows.
    values[((3 * 3 + 2) * 16 + 12) * 16 + 5] = f32::NAN;
    let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape:?}, }}");
    let header = header.replace('[', "(").replace(']', ")");
    let header = format!("{header:<117}\n");
    let path = folder.join("holed.npy");
    let mut file = fs::File::create(&path).unwrap();
    file.write_all(b"\x93NUMPY\x01\x00").unwrap();
    file.write_all(&u16::try_from(header.len()).unwrap().to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    values.iter().for_each(|value| file.write_all(&value.to_le_bytes()).unwrap());
    path
}

/// A value that only one rank reads, when it is needed: the error names the file and the variable, and no rank hangs.
#[rstest]
#[case::in_memory("all")]
#[case::streamed("none")]
fn bad_values_end_all_ranks(#[case] cache: &str) {
    let folder = tempdir().unwrap();
    let path = format!("data.path={}", holed(folder.path()).display());
    let output = format!("run.output={}", folder.path().display());
    let cache = format!("data.cache={cache}");
    let sets = [
        &path,
        &output,
        &cache,
        "data.format=npy",
        "data.npy.axes=[\"sample\", \"time\", \"x\", \"y\"]",
        "data.fields=[\"u\"]",
        "data.npy.variables={ u = \"holed\" }",
        "data.predict=frame",
        "data.validation_samples=1",
        "data.validation_steps=1",
        "model.latent_channels=4",
        "model.num_fno_layers=1",
        "model.num_fno_modes=2",
        "distributed.timeout_s=40",
        "distributed.mesh.names=[\"domain\"]",
    ];
    let outcome = Launch::plain(2, "sh")
        .current_dir(workspace())
        .deadline(Duration::from_secs(120))
        .args(["-c", "\"$@\"; echo code $?", "sh", ISOBAR, "train", "configs/navier_stokes_fno.toml"])
        .args(sets.iter().flat_map(|set| ["--set", set]))
        .run()
        .unwrap();
    assert_ne!(outcome.exit, Exit::Deadline, "{outcome}");
    let said = &outcome.ranks[1];
    assert!(said.stdout.contains("code 3\n"), "{outcome}");
    for words in ["holed.npy", "a missing value (NaN)", "[3, 2, 12, 5]"] {
        assert!(said.stderr.contains(words), "{words}: {outcome}");
    }
    assert!(outcome.ranks[0].stdout.contains("code 4\n"), "{outcome}");
}

#[rstest]
#[case::memory(&["data.cache=none", "data.host_memory=1KiB"], "takes 1MiB; --set data.host_memory=1MiB")]
#[case::size(&["data.host_memory=lots"], "a number of bytes such as \"512MiB\"")]
#[case::cache(&["data.cache=disk"], "data.cache")]
#[case::workers(&["data.cache=none", "data.workers=100000"], "expected an integer from 0 to 64")]
#[case::steps(&["data.train_steps=[{ epoch = 3, steps = 1 }]"], "data.train_steps begins with epoch 3")]
#[case::no_steps(&["data.train_steps=many"], "expected an integer of at least 1 or a list")]
#[case::long(&["data.train_steps=[{ epoch = 0, steps = 1 }, { epoch = 1, steps = 2 }]"], "Darcy flow has no steps")]
fn settings_that_cannot_work_are_one_clear_error(#[case] sets: &[&str], #[case] words: &str) {
    let folder = tempdir().unwrap();
    let outcome = launch(1, &darcy(folder.path(), sets)).run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(2), "{outcome}");
    assert!(outcome.ranks[0].stderr.contains(words), "{words}: {outcome}");
}
