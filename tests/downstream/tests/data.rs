//! A program's own data format, named in its TOML and read on one rank and on two.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use isobar_harness::curve::{assert_same_run, losses};
use isobar_harness::{Exit, Launch};
use tempfile::tempdir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_own-data");

const CONFIG: &str = r#"
[run]
name = "run"
[data]
path = "waves.f32"
format = "raw"
fields = ["value"]
validation_samples = 1
[data.raw]
shape = [4, 5, 8, 6]
axes = ["sample", "time", "x", "y"]
[model]
type = "fno"
in_channels = 1
out_channels = 1
latent_channels = 4
num_fno_layers = 2
num_fno_modes = 2
padding = 0
[train]
epochs = 2
batch_size = 3
precision = "float64"
[metrics]
every_steps = 1
[schedule]
warmup_epochs = 0.0
"#;

/// Writes the data and the configuration.
fn prepare(folder: &Path) {
    let wave = |at: u32| (f64::from(at) * 0.37).sin() as f32;
    let bytes: Vec<u8> = (0..4 * 5 * 8 * 6).flat_map(|at| wave(at).to_le_bytes()).collect();
    fs::write(folder.join("waves.f32"), bytes).unwrap();
    fs::write(folder.join("own.toml"), CONFIG).unwrap();
}

fn train(folder: &Path, ranks: usize, sets: &[&str]) -> Launch {
    let output = format!("run.output={}", folder.join(format!("of{ranks}")).display());
    let sets = [&output as &str].into_iter().chain(sets.iter().copied()).flat_map(|set| ["--set", set]);
    let launch = Launch::plain(ranks, PROGRAM).current_dir(folder).deadline(Duration::from_secs(120));
    launch.args(["train", "own.toml"]).args(sets)
}

#[test]
fn a_programs_own_format_is_read_by_its_name() {
    let folder = tempdir().unwrap();
    prepare(folder.path());
    let _ = train(folder.path(), 1, &[]).run().unwrap().expect_success();
    let domain = ["distributed.mesh.shape=[2]", "distributed.mesh.names=[\"domain\"]"];
    let _ = train(folder.path(), 2, &domain).run().unwrap().expect_success();
    let (whole, split) = (losses(&folder.path().join("of1/run")), losses(&folder.path().join("of2/run")));
    assert!(whole.len() >= 8, "{whole:?}");
    assert_same_run(&split, &whole);
}

#[test]
fn what_does_not_fit_is_one_error() {
    let folder = tempdir().unwrap();
    prepare(folder.path());
    let cases = [
        ("data.format=rwa", 2, "did you mean \"raw\"?"),
        ("data.raw.sahpe=[1]", 2, "unknown key `data.raw.sahpe`"),
        ("data.raw.shape=[4, 5, 8, 7]", 3, "waves.f32: `value` is of 3840 bytes, expected float32 numbers"),
        ("data.raw.axes=[\"x\"]", 2, "data.raw.axes names 1 axes, expected 4"),
        // The format has no option `sample` that could say so.
        (
            "data.raw.axes=[\"w\", \"x\", \"y\", \"z\"]",
            2,
            "name the axes of samples, times and channels \"sample\", \"time\" and \"channel\"",
        ),
        ("data.format=hdf5", 3, "--set data.format=raw"),
    ];
    for (set, code, words) in cases {
        let outcome = train(folder.path(), 1, &[set]).run().unwrap();
        assert_eq!(outcome.exit, Exit::Code(code), "{outcome}");
        assert!(outcome.ranks[0].stderr.contains(words), "{outcome}");
    }
}

#[test]
fn the_reference_has_the_programs_format() {
    let output = Command::new(PROGRAM).args(["config", "reference"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("# [data.raw]\n") && text.contains("# Extent of each axis.\n"), "{text}");
    assert!(text.contains("\"raw\": Little-endian float32 numbers"), "{text}");
}
