//! A program of one's own outside of the repository: one dependency, one line of configuration, a model named in a TOML.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::time::Duration;

use isobar_harness::curve::{assert_same_run, losses};
use isobar_harness::{Launch, cargo, output_within, workspace};
use tempfile::tempdir;

const PROGRAM: &str = include_str!("../downstream/src/bin/own-model.rs");

const CONFIG: &str = r#"
[run]
name = "run"
[data]
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

/// Makes the project as its user does, and builds it in a target folder that is not its own.
fn build(folder: &Path, target: &Path) {
    let root = workspace();
    fs::create_dir_all(folder.join("src")).unwrap();
    fs::create_dir(folder.join(".cargo")).unwrap();
    let isobar = root.join("crates/isobar");
    let manifest = format!(
        "[package]\nname = \"newcomer\"\nedition = \"2024\"\n\n[dependencies]\nisobar = {{ path = {isobar:?} }}\n"
    );
    fs::write(folder.join("Cargo.toml"), manifest).unwrap();
    fs::write(folder.join("src/main.rs"), PROGRAM).unwrap();
    let include = format!("include = [{:?}]\n", root.join(".cargo/program.toml"));
    fs::write(folder.join(".cargo/config.toml"), include).unwrap();
    // The versions of the repository, since a test has no network.
    fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).unwrap();
    let mut cargo = cargo();
    let _ = cargo.current_dir(folder).args(["build", "--offline"]).env("CARGO_TARGET_DIR", target);
    // Cargo compiles the crates of the repository again, since they belong to another workspace: without optimization, in a fraction
    // of the time.
    for entry in fs::read_dir(root.join("crates")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let package = if name == "isobar" { name } else { format!("isobar-{name}") };
        let _ = cargo.args(["--config", &format!("profile.dev.package.{package}.opt-level=0")]);
    }
    // The settings of the build that the test is part of.
    for name in ["LD_LIBRARY_PATH", "RUSTC_WORKSPACE_WRAPPER", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
        let _ = cargo.env_remove(name);
    }
    if root.join(".libtorch/torch").is_dir() {
        let _ = cargo.env_remove("LIBTORCH");
    }
    // The profile of the repository, so that what it has compiled of others is not compiled again.
    let _ = cargo.env("CARGO_PROFILE_DEV_OPT_LEVEL", "1");
    if std::env::var_os("CARGO_PROFILE_DEV_DEBUG").is_none() {
        let _ = cargo.env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");
    }
    let output = output_within(&mut cargo, Duration::from_secs(2400)).unwrap().expect("the build ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn one_dependency_and_one_line_make_a_program_with_a_model_of_its_own() {
    let project = tempdir().unwrap();
    let target = workspace().join("target");
    build(project.path(), &target);
    let program = target.join("debug/newcomer");
    let config = project.path().join("own.toml");
    fs::write(&config, CONFIG).unwrap();
    let data = format!("data.path={}", workspace().join("tests/data/darcy_excerpt.h5").display());
    let train = |ranks: usize, sets: &[&str]| {
        let run = tempdir().unwrap();
        let sets = [&data as &str].into_iter().chain(sets.iter().copied()).flat_map(|set| ["--set", set]);
        let launch =
            Launch::plain(ranks, &program).current_dir(run.path()).deadline(Duration::from_secs(120));
        let _ = launch.args(["train", config.to_str().unwrap()]).args(sets).run().unwrap().expect_success();
        losses(&run.path().join("runs/run"))
    };
    let whole = train(1, &[]);
    let split = train(2, &["distributed.mesh.shape=[2]", "distributed.mesh.names=[\"domain\"]"]);
    assert!(whole.len() >= 4, "{whole:?}");
    assert_same_run(&split, &whole);
}
