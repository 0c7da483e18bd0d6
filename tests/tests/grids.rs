//! Runs from one grid to another, whose inputs and targets are two files.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use isobar_data::{DataConfig, Dataset, Window};
use isobar_harness::{
    Exit, Launch,
    curve::{assert_same_run, losses},
    output_within, workspace,
};
use rstest::rstest;
use tempfile::tempdir;

use crate::applications::{start, train};
use crate::domain::wave;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");

/// A wave on a square of 16 by 16 points: four trajectories of three frames.
static FINE: LazyLock<PathBuf> = LazyLock::new(|| wave("grids_fine", &[16, 16]));

fn isobar(args: &[&str]) -> String {
    let mut command = Command::new(ISOBAR);
    let made = output_within(command.args(args), Duration::from_secs(60)).unwrap().unwrap();
    assert!(made.status.success(), "{made:?}");
    String::from_utf8(made.stdout).unwrap()
}

/// Writes the means of the wave, on 8 by 8 points.
fn coarse(folder: &Path) -> PathBuf {
    let path = folder.join("coarse.h5");
    let (fine, coarse) = (FINE.display().to_string(), path.display().to_string());
    let _ = isobar(&["data", "coarsen", &fine, &coarse, "--factor", "2", "--means"]);
    path
}

/// Settings of a small run.
fn sets(own: &[&str]) -> Vec<String> {
    let small = [
        "data.inputs=[\"height\"]",
        "data.targets=[\"height\"]",
        "data.validation_samples=3",
        "model.n_upsampling=2",
        "model.conv_layer_size=4",
        "model.n_blocks=1",
    ];
    let target = format!("data.target.path={}", FINE.display());
    small.iter().chain(own).map(|set| (*set).to_owned()).chain([target]).collect()
}

fn run(coarse: &Path, output: &Path, ranks: usize, own: &[&str]) -> Vec<f64> {
    let sets = sets(own);
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    train("super_resolution_grids", coarse, output, ranks, &sets)
}

const MESH: [&str; 2] =
    ["distributed.mesh.shape=[2, 2]", "distributed.mesh.names=[\"domain\", \"domain_y\"]"];

fn prediction(path: &Path) -> Box<dyn Dataset> {
    let config = DataConfig {
        path: path.into(),
        format: "hdf5".into(),
        inputs: vec!["height".to_owned()],
        targets: vec!["height".to_owned()],
        scalars: vec!["time".to_owned()],
        ..DataConfig::default()
    };
    config.open().unwrap()
}

/// In memory on one rank, streamed on four; predictions are on the grid of the targets.
#[test]
fn four_ranks_map_grids_as_one() {
    let folder = tempdir().unwrap();
    let coarse = coarse(folder.path());
    let [one, four] = ["one", "four"].map(|name| folder.path().join(name));
    let want = run(&coarse, &one, 1, &[]);
    let streamed = [&MESH[..], &["data.cache=none", "data.host_memory=200KiB"]].concat();
    assert_same_run(&run(&coarse, &four, 4, &streamed), &want);

    for (output, ranks) in [(&one, 1), (&four, 4)] {
        let launch = Launch::plain(ranks, ISOBAR).current_dir(workspace());
        let _ = launch
            .deadline(Duration::from_secs(100))
            .args(["predict", &output.join("run").display().to_string(), "--samples", "9,11"])
            .run()
            .unwrap()
            .expect_success();
    }
    let [first, second] = [one, four].map(|output| prediction(&output.join("run/prediction.h5")));
    let extents: Vec<usize> = first.dims().iter().map(|dim| dim.coordinates.len()).collect();
    assert_eq!((extents, first.samples(), first.times()), (vec![16, 16], 2, None));
    assert_eq!(first.dims()[0].coordinates, (0..16).map(f64::from).collect::<Vec<_>>());
    let read = |data: &dyn Dataset| data.read(&Window::still(&[0..16, 0..16]), &[0, 1], &["height"]).unwrap();
    assert!(read(&*first).allclose(&read(&*second), 1e-5, 1e-5, false));

    // Samples 9 and 11 are the first and the last frame of a trajectory.
    let written = |data: &dyn Dataset| data.read(&Window::still(&[0..1, 0..1]), &[0, 1], &["time"]).unwrap();
    for data in [&first, &second] {
        assert_eq!(Vec::<f32>::try_from(written(&**data).flatten(0, -1)).unwrap(), [0.0, 2.0]);
    }

    let run = folder.path().join("one/run");
    let shown = isobar(&["data", "stats", &run.display().to_string()]);
    assert!(shown.starts_with("inputs\n") && shown.contains("\ntargets\n"), "{shown}");
    let stats: serde_json::Value =
        serde_json::from_slice(&std::fs::read(run.join("stats.json")).unwrap()).unwrap();
    let count = |set: &serde_json::Value| set["channels"][0]["values"]["count"].as_u64();
    assert_eq!(stats["samples"], serde_json::json!([0, 9]));
    assert_eq!((count(&stats), count(&stats["targets"])), (Some(9 * 64), Some(9 * 256)));

    let shown = isobar(&["data", "inspect", &folder.path().join("one/run").display().to_string()]);
    assert!(shown.contains("of 8 x 8 points") && shown.contains("targets\n"), "{shown}");
    assert!(shown.contains("of 16 x 16 points") && shown.contains("samples of 1 frames"), "{shown}");
}

/// A run that stops within an epoch resumes on four ranks.
#[test]
fn runs_between_grids_resume() {
    let folder = tempdir().unwrap();
    let coarse = coarse(folder.path());
    let output = |name: &str| folder.path().join(name);
    let _ = run(&coarse, &output("all"), 1, &[]);
    let first = ["train.max_steps=1", "checkpoint.every_steps=1", "checkpoint.every_epochs=0"];
    let first = sets(&first);
    let first: Vec<&str> = first.iter().map(String::as_str).collect();
    start("super_resolution_grids", &coarse, &output("cut"), 1, &first);
    let rest = [&MESH[..], &["data.cache=window", "checkpoint.resume=must"]].concat();
    let _ = run(&coarse, &output("cut"), 4, &rest);
    assert_same_run(&losses(&output("cut/run")), &losses(&output("all/run")));
}

/// Before data are read, on all ranks.
#[rstest]
#[case("super_resolution_grids", &["model.n_upsampling=4"], "--set model.n_upsampling=2")]
#[case("super_resolution_grids", &["data.history=2"], "--set data.history=1")]
#[case("super_resolution_grids", &["data.targets=[\"depth\"]"], "depth")]
#[case("super_resolution_diffusion", &["data.target.format=the_well"], "task.type = \"diffusion\" needs inputs and targets on one grid")]
fn grids_that_do_not_fit_are_refused(#[case] config: &str, #[case] own: &[&str], #[case] words: &str) {
    let folder = tempdir().unwrap();
    let path = format!("data.path={}", coarse(folder.path()).display());
    let output = format!("run.output={}", folder.path().display());
    let all = sets(own);
    // The last of a key counts.
    let all = all.iter().filter(|set| config == "super_resolution_grids" || !set.starts_with("model."));
    let all = all.map(String::as_str).chain([&*path, &*output]);
    let outcome = Launch::plain(2, ISOBAR)
        .current_dir(workspace())
        .deadline(Duration::from_secs(60))
        .args(["train", &format!("configs/{config}.toml")])
        .args(all.flat_map(|set| ["--set", set]))
        .run()
        .unwrap();
    assert_ne!(outcome.exit, Exit::Code(0), "{outcome}");
    assert!(outcome.ranks.iter().any(|rank| rank.stderr.contains(words)), "{outcome}");
}
