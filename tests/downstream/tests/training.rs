//! A program's own loss, optimizer and schedule, named in its TOML: one rank and two, and a run that resumes.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::time::Duration;

use isobar_harness::curve::{assert_same_run, losses};
use isobar_harness::{Launch, workspace};
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
[train]
epochs = 2
batch_size = 3
precision = "float64"
loss = "latitude_mse"
[optimizer]
type = "signum"
lr = 1e-3
[metrics]
every_steps = 1
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

#[test]
fn a_programs_own_loss_optimizer_and_schedule_train_by_their_names() {
    let [one, two, split, resumed] = std::array::from_fn(|_| tempdir().unwrap());
    let alone = train(one.path(), 1, &[]);
    let shared = train(two.path(), 2, &[]);
    let names = r#"distributed.mesh.names=["domain"]"#;
    let split = train(split.path(), 2, &["--set", names]);
    let _ = train(resumed.path(), 1, &["--set", "train.max_steps=3"]);
    let resumed = train(resumed.path(), 2, &["--resume"]);
    assert!(alone.len() > 3, "{alone:?}");
    assert_same_run(&shared, &alone);
    assert_same_run(&split, &alone);
    assert_same_run(&resumed, &alone);
}
