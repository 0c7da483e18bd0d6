//! A program's own model, named in its TOML and trained on one rank and on two.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::time::Duration;

use isobar_harness::curve::{assert_same_run, losses};
use isobar_harness::{Exit, Launch, workspace};
use tempfile::tempdir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_own-model");

const CONFIG: &str = r#"
[run]
name = "run"
[data]
path = "tests/data/darcy_excerpt.h5"
validation_samples = 2
[model]
type = "local_mix"
channels = 1
[train]
epochs = 2
batch_size = 3
precision = "float64"
[metrics]
every_steps = 1
[schedule]
warmup_epochs = 0.0
"#;

fn train(folder: &Path, ranks: usize, sets: &[&str]) -> Launch {
    let config = folder.join("own.toml");
    fs::write(&config, CONFIG).unwrap();
    let output = format!("run.output={}", folder.display());
    let sets = [&output as &str].into_iter().chain(sets.iter().copied()).flat_map(|set| ["--set", set]);
    let launch = Launch::plain(ranks, PROGRAM).current_dir(workspace()).deadline(Duration::from_secs(120));
    launch.args(["train", config.to_str().unwrap()]).args(sets)
}

#[test]
fn a_programs_own_model_trains_by_its_name() {
    let [one, two] = [tempdir().unwrap(), tempdir().unwrap()];
    let _ = train(one.path(), 1, &[]).run().unwrap().expect_success();
    let domain = ["distributed.mesh.shape=[2]", "distributed.mesh.names=[\"domain\"]"];
    let _ = train(two.path(), 2, &domain).run().unwrap().expect_success();
    let (whole, split) = (losses(&one.path().join("run")), losses(&two.path().join("run")));
    assert!(whole.len() >= 4, "{whole:?}");
    assert_same_run(&split, &whole);
}

#[test]
fn a_wrong_name_lists_the_programs_models() {
    let folder = tempdir().unwrap();
    let outcome = train(folder.path(), 1, &["model.type=local_mxi"]).run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(2), "{outcome}");
    let said = &outcome.ranks[0].stderr;
    assert!(said.contains("did you mean \"local_mix\"?") && said.contains("\"sr_res_net\""), "{outcome}");
}
