//! Ranks that do not make the same calls learn of it, and of both sides: before the data moves where the configuration says so,
//! else by the deadline and from the flight records.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use isobar_harness::{Exit, Launch, Outcome, output_within};
use isobar_tests::has_mpi;
use rstest::rstest;
use tempfile::tempdir;

/// The deadline of the runs, in seconds.
const DEADLINE: u64 = 2;

/// How much later than the deadline a job may end.
const SLACK: u64 = 5;

fn launch(mpi: bool, ranks: usize) -> Launch {
    const PROGRAM: &str = env!("CARGO_BIN_EXE_caller");
    if mpi { Launch::mpirun(ranks, PROGRAM) } else { Launch::plain(ranks, PROGRAM) }
}

/// The ranks of a job, of which the last calls otherwise than the others.
fn run(launch: Launch, what: &str, records: &Path) -> Outcome {
    let outcome = launch
        .deadline(Duration::from_secs(60))
        .arg(what)
        .arg(format!("distributed.timeout_s={DEADLINE}"))
        .arg(format!("distributed.flight_dir={}", records.display()))
        .run()
        .unwrap();
    assert_ne!(outcome.exit, Exit::Deadline, "{outcome}");
    outcome
}

#[rstest]
fn where_all_calls_are_compared_all_ranks_name_both_sides(#[values(false, true)] mpi: bool) {
    if mpi && !has_mpi() {
        return;
    }
    let records = tempdir().unwrap();
    let launch = launch(mpi, 3).env("ISOBAR_DISTRIBUTED__FINGERPRINTS", "always");
    let outcome = run(launch, "shape,kind,count,operation", records.path()).expect_success();
    let calls = [
        ("shape", "ranks [0, 1] all_reduce of Float [8], rank 2 all_reduce of Float [9]"),
        ("kind", "ranks [0, 1] all_reduce of Float [8], rank 2 all_reduce of Int [8]"),
        (
            "count",
            "ranks [0, 1] all_gather_v of Float [2] along dim 0 by sizes [2, 2, 2], rank 2 all_gather_v of Float [3] along \
             dim 0 by sizes [2, 2, 3]",
        ),
        (
            "operation",
            "ranks [0, 1] all_reduce of Float [8], rank 2 broadcast of Float [8] at rank 2 of the group",
        ),
    ];
    for (rank, said) in outcome.ranks.iter().enumerate() {
        for (what, both) in calls {
            let line = said.stderr.lines().find(|line| line.starts_with(&format!("{what}: ")));
            assert!(line.is_some_and(|line| line.contains(both)), "rank {rank}, {what}: {outcome}");
        }
    }
}

#[rstest]
fn where_all_calls_are_compared_who_does_not_come_is_named(
    #[values("order", "absent")] what: &str,
    #[values(false, true)] mpi: bool,
) {
    if mpi && !has_mpi() {
        return;
    }
    let records = tempdir().unwrap();
    let launch = launch(mpi, 3).env("ISOBAR_DISTRIBUTED__FINGERPRINTS", "always");
    let outcome = run(launch, what, records.path());
    ends_in_time(&outcome);
    for (rank, said) in outcome.ranks.iter().enumerate() {
        let named = match (rank, what) {
            (2, "absent") => continue,
            (2, _) => "ranks [0, 1] of the world have not come to it",
            _ => "rank 2 of the world has not come to it",
        };
        let line = said.stderr.lines().find(|line| line.starts_with("error: "));
        assert!(line.is_some_and(|line| line.contains(named)), "rank {rank}: {outcome}");
    }
}

#[rstest]
fn a_call_that_was_not_compared_is_named_by_the_records(
    #[values("shape", "kind", "count", "operation", "order")] what: &str,
    #[values(false, true)] mpi: bool,
) {
    if mpi && !has_mpi() {
        return;
    }
    let records = tempdir().unwrap();
    let outcome = run(launch(mpi, 2), what, records.path());
    ends_in_time(&outcome);
    let mut command = Command::new(env!("CARGO_BIN_EXE_isobar-app"));
    let why = output_within(command.args(["trace", "why"]).arg(records.path()), Duration::from_secs(60));
    let why = why.unwrap().unwrap();
    let text = String::from_utf8_lossy(&why.stdout);
    let both = match what {
        "shape" => ["rank 0 calls all_reduce of Float [8]", "rank 1 calls all_reduce of Float [9]"],
        "kind" => ["rank 0 calls all_reduce of Float [8]", "rank 1 calls all_reduce of Int [8]"],
        "count" => ["by sizes [2, 2]", "by sizes [2, 3]"],
        "operation" => ["rank 0 calls all_reduce of Float [8]", "rank 1 calls broadcast of Float [8]"],
        _ => ["rank 0 in all_reduce of Float [8] (number ", "rank 1 in all_reduce of Float [8] (number "],
    };
    assert!(why.status.success() && both.iter().all(|side| text.contains(side)), "{text}\n{outcome}");
    let report = outcome.ranks.iter().any(|rank| both.iter().all(|side| rank.stderr.contains(side)));
    assert!(report, "no report names both sides\n{outcome}");
}

#[track_caller]
fn ends_in_time(outcome: &Outcome) {
    assert_ne!(outcome.exit, Exit::Code(0), "{outcome}");
    // The start of the job is in it.
    assert!(outcome.wall < Duration::from_secs(DEADLINE + 2 * SLACK), "{outcome}");
}
