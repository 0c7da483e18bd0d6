//! Exits of `isobar train` if ranks disagree or one is lost: on all ranks, soon, and with the right code.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{path::Path, time::Duration};

use isobar_harness::{Launch, Outcome, workspace};
use isobar_tests::has_mpi;
use rstest::rstest;
use tempfile::tempdir;

/// A function of the shell that waits until the program of another rank has ended, for at most two minutes.
const UNTIL_ENDED: &str =
    "until_ended() { for _ in $(seq 1200); do [ ! -e $ended.$1 ] || return 0; sleep 0.1; done; }";

/// Two ranks of a run on the excerpt of the data set, each behind `script`, which sees the program and its arguments as
/// `"$@"` and the rank as `$rank`, and says in the end with which code the program ended.
fn train(launch: Launch, output: &Path, script: &str) -> Outcome {
    let metrics = output.join("darcy_afno/metrics.jsonl");
    let script = format!(
        "rank=${{RANK:-$OMPI_COMM_WORLD_RANK}}; metrics={}; ended={}; {UNTIL_ENDED}; {script}; echo code $?; touch $ended.$rank",
        metrics.display(),
        output.join("ended").display()
    );
    launch
        .current_dir(workspace())
        .deadline(Duration::from_secs(300))
        .args(["-c", &script, "sh", env!("CARGO_BIN_EXE_isobar-app"), "train", "configs/darcy_afno.toml"])
        .args(["--set", "data.path=tests/data/darcy_excerpt.h5", "--set", "data.validation_samples=0"])
        .args(["--set", &format!("run.output={}", output.display()), "--set", "metrics.every_steps=1"])
        .args(["--set", "train.epochs=100000", "--set", "train.batch_size=8"])
        .args(["--set", "distributed.timeout_s=20"])
        .run()
        .unwrap()
}

#[track_caller]
fn ends_with(outcome: &Outcome, rank: usize, code: i32, words: &[&str]) {
    let said = &outcome.ranks[rank];
    assert!(said.stdout.contains(&format!("code {code}\n")), "{outcome}");
    for word in words {
        assert!(said.stderr.contains(word), "no {word:?} in {outcome}");
    }
    assert!(!said.stderr.contains("panicked"), "{outcome}");
}

fn launch(mpi: bool) -> Launch {
    if mpi { Launch::mpirun(2, "sh") } else { Launch::plain(2, "sh") }
}

#[rstest]
fn ranks_with_other_configurations_end_with_5(#[values(false, true)] mpi: bool) {
    if mpi && !has_mpi() {
        return;
    }
    let output = tempdir().unwrap();
    let outcome = train(launch(mpi), output.path(), r#""$@" --set run.seed=$rank"#);
    // All ranks have found the same, and rank 0 prints it.
    let words = "run.seed is 1 where rank 0 has 0";
    ends_with(&outcome, 0, 5, &[words]);
    ends_with(&outcome, 1, 5, &[]);
    assert!(!outcome.ranks[1].stderr.contains(words), "{outcome}");
}

/// With buckets as small as a layer, most of the communication begins inside the backward pass, and fails there.
#[rstest]
fn a_killed_rank_ends_the_others_with_4(#[values("4.0", "0.01")] bucket_mb: &str) {
    let output = tempdir().unwrap();
    let script = r#"
        if [ $rank = 1 ]; then
            "$@" & while [ ! -s "$metrics" ] && kill -0 $!; do sleep 0.1; done; kill -KILL $!; wait $!
        else
            "$@"
        fi"#;
    let script = script.replace("\"$@\"", &format!("\"$@\" --set data_parallel.bucket_mb={bucket_mb}"));
    let outcome = train(launch(false), output.path(), &script);
    ends_with(&outcome, 1, 137, &[]);
    ends_with(&outcome, 0, 4, &["isobar: the job ends", "rank 1 (", "was lost: its connection closed"]);
}

#[rstest]
fn a_stopped_rank_ends_the_others_with_4(#[values(false, true)] mpi: bool) {
    if mpi && !has_mpi() {
        return;
    }
    let output = tempdir().unwrap();
    let script = r#"
        if [ $rank = 1 ]; then
            "$@" & while [ ! -s "$metrics" ] && kill -0 $!; do sleep 0.1; done; kill -STOP $!
            until_ended 0; kill -KILL $!
        else
            "$@"
        fi"#;
    let outcome = train(launch(mpi), output.path(), script);
    ends_with(&outcome, 0, 4, &["isobar: the job ends", "rank 1 (", "has not been heard of for"]);
}

/// Without the watchdog the deadline is what ends the wait.
#[test]
fn a_stopped_rank_ends_the_others_at_the_deadline() {
    let output = tempdir().unwrap();
    let script = r#"
        if [ $rank = 1 ]; then
            "$@" & while [ ! -s "$metrics" ] && kill -0 $!; do sleep 0.1; done; kill -STOP $!
            until_ended 0; kill -KILL $!
        else
            "$@"
        fi"#;
    let script = script.replace("\"$@\"", "\"$@\" --set distributed.watchdog=false");
    let outcome = train(launch(false), output.path(), &script);
    ends_with(&outcome, 0, 4, &["rank 0", "after 20"]);
}

/// An error that all ranks find by themselves needs no report of a lost rank.
#[test]
fn ranks_that_end_each_with_an_error_of_their_own_make_no_report() {
    let output = tempdir().unwrap();
    let outcome = train(launch(false), output.path(), r#""$@" --set run.seed=$rank"#);
    for rank in &outcome.ranks {
        assert!(!rank.stderr.contains("isobar: the job ends"), "{outcome}");
    }
    assert!(!output.path().join("darcy_afno/flight").exists(), "{outcome}");
}

#[rstest]
fn a_rank_that_cannot_read_its_data_ends_the_others_with_4(#[values(false, true)] mpi: bool) {
    if mpi && !has_mpi() {
        return;
    }
    let output = tempdir().unwrap();
    let script = r#"if [ $rank = 1 ]; then "$@" --set data.path=no/such.h5; else "$@"; fi"#;
    let outcome = train(launch(mpi), output.path(), script);
    ends_with(&outcome, 1, 3, &["no/such.h5"]);
    ends_with(&outcome, 0, 4, &["rank 1 cannot go on: no/such.h5: no such file"]);
}

/// Another file of the same shape: what each rank would learn from makes no sense beside the other's.
#[rstest]
fn ranks_with_other_data_end_with_5(#[values(false, true)] mpi: bool) {
    if mpi && !has_mpi() {
        return;
    }
    let output = tempdir().unwrap();
    let script = r#"
        other="${metrics%/*/*}/other.h5"
        if [ $rank = 1 ]; then
            "$1" data darcy --out "$other" --samples 8 >/dev/null 2>&1; "$@" --set data.path="$other"
        else
            "$@"
        fi"#;
    let outcome = train(launch(mpi), output.path(), script);
    // All ranks have found the same, and rank 0 prints it.
    ends_with(&outcome, 0, 5, &["ranks 0 and 1 read different data: 8 + 0 samples of 64 x 64", "data.path"]);
    ends_with(&outcome, 1, 5, &[]);
    assert!(!outcome.ranks[1].stderr.contains("read different data"), "{outcome}");
}

#[test]
fn a_rank_that_does_not_come_ends_the_others_with_4() {
    let output = tempdir().unwrap();
    let script = r#"if [ $rank = 1 ]; then true; else "$@" --set distributed.timeout_s=2; fi"#;
    let outcome = train(launch(false), output.path(), script);
    ends_with(&outcome, 0, 4, &["timed out after 2 s waiting for ranks [1]"]);
}

/// Fields that are split over ranks are turned at random by exchanges between these: an error of the data that is none.
#[test]
fn a_rank_lost_while_fields_are_augmented_ends_the_others_with_4() {
    let output = tempdir().unwrap();
    let fault = format!("3 data 2 kill {}", output.path().join("mark").display());
    let outcome = Launch::plain(4, "sh")
        .current_dir(workspace())
        .deadline(Duration::from_secs(150))
        .env("FAULT", fault)
        .args(["-c", r#""$@"; echo code $?"#, "sh", env!("CARGO_BIN_EXE_faulty"), "train"])
        .args(["configs/darcy_afno.toml", "--set", "data.path=tests/data/darcy_excerpt.h5"])
        .args(["--set", "data.validation_samples=0", "--set", "data.augment=square"])
        .args([
            "--set",
            "distributed.mesh.shape=[2, 2]",
            "--set",
            "distributed.mesh.names=[\"domain\", \"domain_y\"]",
        ])
        .args(["--set", &format!("run.output={}", output.path().display())])
        .args(["--set", "train.epochs=100000", "--set", "train.batch_size=4"])
        .args(["--set", "distributed.timeout_s=60", "--set", "distributed.watchdog=false"])
        .run()
        .unwrap();
    ends_with(&outcome, 3, 137, &[]);
    for rank in 0..3 {
        ends_with(&outcome, rank, 4, &["error: "]);
    }
}

/// Rank 0 keeps the place where the ranks meet: it never comes, or is killed while others wait there for the last.
#[rstest]
#[case::never_comes("true", "true")]
#[case::is_killed(r#""$@" & sleep 3; kill -KILL $!; wait $!"#, "sleep 6")]
fn a_rank_0_that_is_lost_at_the_start_ends_the_others_with_4(#[case] rank_0: &str, #[case] rank_2: &str) {
    let output = tempdir().unwrap();
    let script =
        format!(r#"case $rank in 0) {rank_0};; 2) {rank_2};; *) "$@" --set distributed.timeout_s=5;; esac"#);
    let outcome = train(Launch::plain(3, "sh"), output.path(), &script);
    ends_with(&outcome, 1, 4, &["gloo could not start: rank 1 of 3 "]);
}
