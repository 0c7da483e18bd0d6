//! Ranks that do not make the same calls learn of it, and of both sides: before the data moves where the configuration says so,
//! else by the deadline and from the flight records.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use isobar_harness::{Exit, Launch, Outcome, output_within};
use isobar_tests::has_mpi;
use rstest::rstest;
use serde_json::Value;
use tempfile::tempdir;

/// The deadline of the runs, in seconds.
const DEADLINE: u64 = 2;

/// Time after which a job counts as hanging.
const HANG: Duration = Duration::from_secs(120);

fn launch(mpi: bool, ranks: usize) -> Launch {
    const PROGRAM: &str = env!("CARGO_BIN_EXE_caller");
    if mpi { Launch::mpirun(ranks, PROGRAM) } else { Launch::plain(ranks, PROGRAM) }
}

/// The ranks of a job, of which the last calls otherwise than the others.
fn run(launch: Launch, what: &str, records: &Path) -> Outcome {
    let outcome = launch
        .deadline(HANG)
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
    let outcome = run(launch, "shape,kind,reduction,count,operation", records.path()).expect_success();
    let calls = [
        ("shape", "ranks [0, 1] all_reduce of Float [8] with Sum, rank 2 all_reduce of Float [9] with Sum"),
        ("kind", "ranks [0, 1] all_reduce of Float [8] with Sum, rank 2 all_reduce of Int [8] with Sum"),
        (
            "reduction",
            "ranks [0, 1] all_reduce of Float [8] with Sum, rank 2 all_reduce of Float [8] with Max",
        ),
        (
            "count",
            "ranks [0, 1] all_gather_v of Float [2] along dim 0 by sizes [2, 2, 2], rank 2 all_gather_v of Float [3] along \
             dim 0 by sizes [2, 2, 3]",
        ),
        (
            "operation",
            "ranks [0, 1] all_reduce of Float [8] with Sum, rank 2 broadcast of Float [8] at rank 2 of the group",
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
    assert_ne!(outcome.exit, Exit::Code(0), "{outcome}");
    for (rank, said) in outcome.ranks.iter().enumerate().filter(|(rank, _)| (what, *rank) != ("absent", 2)) {
        let line = said.stderr.lines().find(|line| line.starts_with("error: "));
        assert!(line.is_some_and(|line| names_the_missing(line, rank)), "rank {rank}: {outcome}");
    }
}

/// Returns whether the error of a rank names the missing one of three ranks, the last of which calls otherwise: from its own wait, or
/// from that of another rank, whose deadline has passed first.
fn names_the_missing(line: &str, rank: usize) -> bool {
    let of_others = "rank 2 of the world has not come to it";
    let of_last = "ranks [0, 1] of the world have not come to it";
    let told = line.contains("of the world could not take part: ");
    match rank {
        2 => line.contains(of_last) || (told && line.contains(of_others)),
        _ => line.contains(of_others) || (told && line.contains(of_last)),
    }
}

/// Two ranks that make different calls, the deadline of one of which passes long before the other's: each ends with the code
/// of a lost rank, the one that gives up first and the one that learns of it.
#[rstest]
fn both_ranks_end_with_4_whoever_is_first(
    #[values("order", "operation", "shape")] what: &str,
    #[values(0, 1)] first: usize,
    #[values("sample", "always")] fingerprints: &str,
    #[values(false, true)] mpi: bool,
) {
    // If all calls are compared, other calls are an error that ends nothing.
    if (mpi && !has_mpi()) || (fingerprints == "always" && what != "order") {
        return;
    }
    let records = tempdir().unwrap();
    // mpirun does not end the remaining ranks here: each must end by itself.
    let script = format!(
        r#"rank=${{RANK:-$OMPI_COMM_WORLD_RANK}}; trap : TERM
        if [ $rank = {first} ]; then set -- "$@" distributed.timeout_s={DEADLINE}; fi
        "$@"; echo code $?"#
    );
    let launch = if mpi { Launch::mpirun(2, "sh") } else { Launch::plain(2, "sh") };
    let outcome = launch
        .deadline(HANG)
        .env("ISOBAR_DISTRIBUTED__FINGERPRINTS", fingerprints)
        .env("OMPI_MCA_orte_allowed_exit_without_sync", "1")
        .args(["-c", &script, "sh", env!("CARGO_BIN_EXE_caller"), what, "distributed.timeout_s=60"])
        .arg(format!("distributed.flight_dir={}", records.path().display()))
        .run()
        .unwrap();
    assert_ne!(outcome.exit, Exit::Deadline, "{outcome}");
    for (rank, said) in outcome.ranks.iter().enumerate() {
        assert!(said.stdout.contains("code 4\n"), "rank {rank}: {outcome}");
    }
}

#[rstest]
fn a_call_that_was_not_compared_is_named_by_the_records(
    #[values("shape", "kind", "reduction", "count", "operation", "order")] what: &str,
    #[values(false, true)] mpi: bool,
) {
    if mpi && !has_mpi() {
        return;
    }
    let records = tempdir().unwrap();
    let outcome = run(launch(mpi, 2), what, records.path());
    assert_ne!(outcome.exit, Exit::Code(0), "{outcome}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_isobar-app"));
    let why = output_within(command.args(["trace", "why"]).arg(records.path()), Duration::from_secs(60));
    let why = why.unwrap().unwrap();
    let text = String::from_utf8_lossy(&why.stdout);
    let both = match what {
        "shape" => ["rank 0 calls all_reduce of Float [8]", "rank 1 calls all_reduce of Float [9]"],
        "kind" => ["rank 0 calls all_reduce of Float [8]", "rank 1 calls all_reduce of Int [8]"],
        "reduction" => {
            ["rank 0 calls all_reduce of Float [8] with Sum", "rank 1 calls all_reduce of Float [8] with Max"]
        }
        "count" => ["by sizes [2, 2]", "by sizes [2, 3]"],
        "operation" => ["rank 0 calls all_reduce of Float [8]", "rank 1 calls broadcast of Float [8]"],
        _ => [
            "rank 0 in all_reduce of Float [8] with Sum (number ",
            "rank 1 in all_reduce of Float [8] with Sum (number ",
        ],
    };
    assert!(why.status.success() && both.iter().all(|side| text.contains(side)), "{text}\n{outcome}");
    let report = outcome.ranks.iter().any(|rank| both.iter().all(|side| rank.stderr.contains(side)));
    assert!(report, "no report names both sides\n{outcome}");
}

#[test]
fn the_records_of_all_ranks_make_one_chrome_trace() {
    let folder = tempdir().unwrap();
    let records = folder.path().join("flight");
    run(launch(false, 2), "operation", &records);
    let export = |out: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_isobar-app"));
        let output =
            output_within(command.args(["trace", "export"]).args([&records, out]), Duration::from_secs(60));
        let output = output.unwrap().unwrap();
        (output.status.code(), String::from_utf8([&output.stdout[..], &output.stderr].concat()).unwrap())
    };
    let out = folder.path().join("new/trace.json");
    for _ in 0..2 {
        let (code, said) = export(&out);
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("2 of 2 ranks have left a record") && said.contains("trace.json"), "{said}");
    }
    let trace: Value = serde_json::from_slice(&fs::read(&out).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for (rank, call) in [(0, "all_reduce"), (1, "broadcast")] {
        let of_rank: Vec<&Value> = events.iter().filter(|event| event["pid"] == rank).collect();
        let named = of_rank.iter().find(|event| event["name"] == "process_name").unwrap();
        assert!(named["args"]["name"].as_str().unwrap().starts_with(&format!("rank {rank} (")), "{named}");
        let group = of_rank.iter().find(|event| event["args"]["name"] == "world").unwrap();
        assert_eq!(group["name"], "thread_name");
        let stuck = |event: &Value| {
            event["ph"] == "X"
                && event["name"].as_str().is_some_and(|name| name.starts_with(&format!("{call} (")))
                && event["dur"].as_f64().is_some_and(|dur| dur > 0.0)
        };
        assert!(of_rank.iter().any(|event| stuck(event)), "{of_rank:?}");
    }
    for (name, words) in [
        ("flight/flight_rank_00000.json", "is an input of this command"),
        ("notes.txt", "exists without the extension .json"),
    ] {
        let path = folder.path().join(name);
        let before = fs::read(&path).unwrap_or_else(|_| b"mine".to_vec());
        fs::write(&path, &before).unwrap();
        let (code, said) = export(&path);
        assert!(code == Some(2) && said.contains(words), "{said}");
        assert_eq!(fs::read(&path).unwrap(), before);
    }
    for name in ["flight/flight_rank_all.json", "other/flight_rank_all.json"] {
        let path = folder.path().join(name);
        let (code, said) = export(&path);
        assert!(code == Some(2) && said.contains("has the name of a flight record"), "{said}");
        assert!(!path.exists());
    }
}
