//! A program's own task, loss, metric, optimizer and schedule, named in its TOML: one rank and two, and a run that resumes.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::time::Duration;

use isobar_harness::curve::{assert_same_run, losses};
use isobar_harness::{Exit, Launch, workspace};
use tempfile::tempdir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_own-training");

const CONFIG: &str = r#"
[run]
name = "run"
[data]
path = "tests/data/darcy_excerpt.h5"
validation_samples = 2
[model]
type = "fno"
in_channels = 1
out_channels = 1
dimension = 2
num_fno_modes = 4
latent_channels = 4
num_fno_layers = 1
decoder_layer_size = 8
[task]
type = "poisson_residual"
weight = 0.2
[train]
epochs = 2
batch_size = 3
precision = "float64"
loss = ["latitude_mse", { type = "spectral", weight = 1e-3 }]
best = "peak_error"
[optimizer]
type = "signum"
lr = 1e-3
[metrics]
every_steps = 1
report = ["peak_error", "vrmse"]
[schedule]
type = "inverse_sqrt"
warmup_epochs = 0.5
"#;

fn train(folder: &Path, ranks: usize, args: &[&str]) -> Vec<f64> {
    let config = folder.join("own.toml");
    fs::write(&config, CONFIG).unwrap();
    let output = format!("run.output={}", folder.display());
    let launch = Launch::plain(ranks, PROGRAM).current_dir(workspace()).deadline(Duration::from_secs(120));
    let launch =
        launch.args(["train", config.to_str().unwrap(), "--set", &output]).args(args.iter().copied());
    let _ = launch.run().unwrap().expect_success();
    losses(&folder.join("run"))
}

/// The last values of the program's metric, and of a built-in one.
fn scores(run: &Path) -> [f64; 2] {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    ["peak_error", "vrmse"].map(|name| {
        let prefix = format!("validation/{name}");
        let found = last.as_object().unwrap().iter().find(|(key, _)| key.starts_with(&prefix));
        found.and_then(|(_, value)| value.as_f64()).unwrap()
    })
}

#[test]
fn a_programs_own_task_loss_optimizer_and_schedule_train_by_their_names() {
    let [one, two, split, resumed] = std::array::from_fn(|_| tempdir().unwrap());
    let alone = train(one.path(), 1, &[]);
    let shared = train(two.path(), 2, &[]);
    let names = r#"distributed.mesh.names=["domain"]"#;
    let split_folder = split.path().join("run");
    let split = train(split.path(), 2, &["--set", names]);
    let _ = train(resumed.path(), 1, &["--set", "train.max_steps=3"]);
    let resumed = train(resumed.path(), 2, &["--resume"]);
    assert!(alone.len() > 3, "{alone:?}");
    assert_same_run(&shared, &alone);
    assert_same_run(&split, &alone);
    assert_same_run(&resumed, &alone);
    let [alone, split] = [scores(&one.path().join("run")), scores(&split_folder)];
    for (alone, split) in alone.iter().zip(split) {
        assert!(*alone > 0.0 && (alone - split).abs() < 1e-8 * alone, "{alone} {split}");
    }
}

#[test]
fn a_programs_own_task_has_settings_and_a_place_among_the_registered_ones() {
    let folder = tempdir().unwrap();
    let first = |weight: &str| {
        let sets = ["train.max_steps=1", "checkpoint.resume=never", "checkpoint.overwrite=true", weight];
        train(folder.path(), 1, &sets.iter().flat_map(|set| ["--set", *set]).collect::<Vec<_>>())[0]
    };
    let [without, with] = [first("task.weight=0.0"), first("task.weight=0.2")];
    assert!(with > without && without > 0.0, "{with} {without}");

    let run = |args: &[&str]| {
        let launch = Launch::plain(1, PROGRAM).current_dir(workspace()).deadline(Duration::from_secs(60));
        launch.args(args.iter().copied()).run().unwrap()
    };
    let config = folder.path().join("own.toml");
    let wrong = run(&["train", config.to_str().unwrap(), "--set", "task.weight=-1.0"]);
    assert_eq!(wrong.exit, Exit::Code(2), "{wrong}");
    assert!(wrong.ranks[0].stderr.contains("--set task.weight=0.1"), "{wrong}");
    let wrong = run(&["config", "show", config.to_str().unwrap(), "--set", "task.type=poison_residual"]);
    assert_eq!(wrong.exit, Exit::Code(2), "{wrong}");
    let words = "poisson_residual";
    assert!(wrong.ranks[0].stderr.contains(words) && wrong.ranks[0].stderr.contains("regression"), "{wrong}");
    let reference = run(&["config", "reference"]).expect_success();
    assert!(reference.ranks[0].stdout.contains("Regression with the residual of Poisson's equation."));
}
