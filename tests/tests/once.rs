//! An error that all ranks share is printed once under every launcher; an error of a single rank is not lost.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::time::Duration;

use isobar_harness::{Launch, Outcome, workspace};
use isobar_tests::has_mpi;
use rstest::rstest;
use tempfile::tempdir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");

/// Launcher of the ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
enum By {
    Plain,
    Mpirun,
    Isobar,
}

impl By {
    /// Two ranks of `isobar`, each behind `script`, which sees the program and its arguments as `"$@"` and the rank as `$rank`.
    fn launch(self, script: &str) -> Launch {
        let script = format!("rank=${{RANK:-$OMPI_COMM_WORLD_RANK}}; {script}; echo code $?");
        let launch = match self {
            Self::Plain => Launch::plain(2, "sh"),
            Self::Mpirun => Launch::mpirun(2, "sh"),
            Self::Isobar => Launch::plain(1, ISOBAR).args(["launch", "-n", "2", "--", "sh"]),
        };
        let launch = launch.current_dir(workspace()).deadline(Duration::from_secs(100));
        launch.args(["-c", &script, "sh", ISOBAR])
    }
}

fn said(outcome: &Outcome) -> String {
    outcome.ranks.iter().map(|rank| format!("{}{}", rank.stdout, rank.stderr)).collect()
}

#[track_caller]
fn once(outcome: &Outcome, words: &str, code: i32) {
    let said = said(outcome);
    // `isobar launch` repeats what a rank said last, which is indented then.
    let lines = said.lines().filter(|line| line.contains(words) && !line.starts_with("    "));
    assert_eq!(lines.count(), 1, "{words}: {outcome}");
    assert_eq!(said.matches(&format!("code {code}\n")).count(), 2, "{outcome}");
    assert!(!said.contains("panicked"), "{outcome}");
}

fn sets(output: &Path) -> [String; 3] {
    ["data.path=tests/data/darcy_excerpt.h5", "data.validation_samples=0"]
        .map(str::to_owned)
        .into_iter()
        .chain([format!("run.output={}", output.display())])
        .collect::<Vec<_>>()
        .try_into()
        .unwrap()
}

#[rstest]
#[case::command_line(&["train", "configs/darcy_afno.toml", "--no-such-option"], "unexpected argument '--no-such-option'", 2)]
#[case::no_file(&["train", "no/such.toml"], "configuration file no/such.toml does not exist", 2)]
#[case::key(&["train", "configs/darcy_afno.toml", "--set", "train.epoch=3"], "unknown key `train.epoch`", 2)]
#[case::mesh(&["train", "configs/darcy_afno.toml", "--set", "distributed.mesh.shape=[4]"], "its extents multiply to 4, not the 2 ranks", 2)]
#[case::axis(&["train", "configs/darcy_afno.toml", "--set", "distributed.mesh.names=[\"dat\"]"], "distributed.mesh has an axis \"dat\"", 2)]
#[case::rate(&["train", "configs/darcy_afno.toml", "--set", "optimizer.lr=-1.0"], "optimizer.lr is -1", 2)]
#[case::data(&["train", "configs/darcy_afno.toml", "--set", "data.path=no/such.h5"], "no/such.h5", 3)]
#[case::model(&["train", "configs/darcy_afno.toml", "--set", "model.patch_size=[5, 5]"], "is not divisible by", 2)]
#[case::predict(&["predict", "no/such.toml"], "configuration file no/such.toml does not exist", 2)]
fn an_error_of_all_ranks_is_printed_once(
    #[case] args: &[&str],
    #[case] words: &str,
    #[case] code: i32,
    #[values(By::Plain, By::Mpirun, By::Isobar)] by: By,
) {
    if by == By::Mpirun && !has_mpi() {
        return;
    }
    let output = tempdir().unwrap();
    // Of its own: a run locks its folder, and other cases run at the same time.
    let folder = format!("run.output={}", output.path().display());
    let launch = by.launch("\"$@\"").args(args.to_vec()).args(["--set", &folder]);
    once(&launch.run().unwrap(), words, code);
}

/// Variables that contradict each other: the process that they call rank 0 says so.
#[rstest]
#[case::no_size(By::Plain, "unset WORLD_SIZE", "RANK is set but WORLD_SIZE is not")]
#[case::no_number(By::Plain, "WORLD_SIZE=two", "WORLD_SIZE=two is not a number")]
#[case::another_launcher(By::Mpirun, "export RANK=0 WORLD_SIZE=1", "two launchers disagree")]
#[case::ranks(By::Mpirun, "export RANK=0 WORLD_SIZE=2", "two launchers disagree")]
fn an_error_of_the_launch_is_printed_once(#[case] by: By, #[case] script: &str, #[case] words: &str) {
    if by == By::Mpirun && !has_mpi() {
        return;
    }
    let script = format!("{script}; \"$@\"");
    let output = tempdir().unwrap();
    let sets = sets(output.path());
    let launch = by.launch(&script).args(["train", "configs/darcy_afno.toml"]);
    let outcome = launch.args(sets.iter().flat_map(|set| ["--set", set])).run().unwrap();
    let said = said(&outcome);
    assert_eq!(said.matches(words).count(), 1, "{outcome}");
    assert!(said.contains("code 2\n") && !said.contains("panicked"), "{outcome}");
}

/// A checkpoint of something else: found by all ranks together, in the library.
#[test]
fn an_error_of_training_is_printed_once() {
    let output = tempdir().unwrap();
    let launch = By::Plain.launch("\"$@\"").args(["train", "configs/darcy_afno.toml", "--resume=must"]);
    let sets = sets(output.path());
    let launch = launch.args(sets.iter().flat_map(|set| ["--set", set]));
    once(&launch.run().unwrap(), "no checkpoint in ", 3);
}

/// The file is there on rank 0 alone.
#[rstest]
fn an_error_of_one_rank_is_not_lost(#[values(By::Plain, By::Mpirun, By::Isobar)] by: By) {
    if by == By::Mpirun && !has_mpi() {
        return;
    }
    let output = tempdir().unwrap();
    let script = r#"if [ $rank = 1 ]; then "$1" train no/such.toml; else "$@"; fi"#;
    let sets = sets(output.path());
    let launch = by.launch(script).args(["train", "configs/darcy_afno.toml"]);
    let launch = launch.env("ISOBAR_DISTRIBUTED__FLIGHT_DIR", output.path().join("flight"));
    let outcome = launch.args(sets.iter().flat_map(|set| ["--set", set])).run().unwrap();
    let said = said(&outcome);
    let own = said.lines().filter(|line| line.starts_with("rank 1 (") || line.contains("rank 1 ("));
    assert!(own.clone().any(|line| line.contains("no/such.toml does not exist")), "{outcome}");
    // The other learns of it without waiting for a deadline.
    assert!(said.contains("code 2\n") && said.contains("code 4\n"), "{outcome}");
    assert!(said.matches("no/such.toml does not exist").count() <= 5, "{outcome}");
}
