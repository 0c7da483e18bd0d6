//! Diagnosis of records, and their files.

use serde_json::{Value, json};

use super::*;

/// A record of a rank of three on one machine, in a group of all and in one of the first two.
fn record(rank: usize, begun: [u64; 2], entries: &[Value]) -> FlightRecord {
    let groups = json!([
        { "context": 0, "name": "world", "ranks": [0, 1, 2], "begun": begun[0] },
        { "context": 1, "name": "pair", "ranks": [0, 1], "begun": begun[1] },
    ]);
    serde_json::from_value(json!({
        "version": 1, "job": "1a2b", "rank": rank, "ranks": 3, "host": "node7", "pid": 100 + rank,
        "phase": "backward", "step": 17, "reason": "", "time_ns": 5, "peers": [], "groups": groups,
        "entries": entries,
    }))
    .unwrap()
}

fn entry(operation: &str, group: u32, sequence: u64, state: &str, shape: &[i64]) -> Value {
    let name = if group == 0 { "world" } else { "pair" };
    json!({
        "number": sequence, "operation": operation, "group": name, "context": group, "sequence": sequence,
        "kind": "Float", "shape": shape, "state": state, "phase": "backward", "step": 17, "begin_ns": 1,
    })
}

fn peer(rank: usize, outcome: RankOutcome) -> Peer {
    let last = serde_json::from_value(entry("all_reduce", 0, 40, "finished", &[8])).ok();
    Peer {
        rank,
        host: "node7".into(),
        pid: 100 + rank as u32,
        phase: Phase::Forward,
        step: 17,
        last,
        outcome,
    }
}

fn text(records: &[FlightRecord]) -> String {
    diagnose(records).to_string()
}

#[test]
fn a_lost_rank_is_the_cause_whatever_the_others_say() {
    let waiting = entry("all_reduce", 0, 41, "waiting", &[8]);
    let mut records = [0, 1].map(|rank| record(rank, [42, 3], std::slice::from_ref(&waiting)));
    records[0].peers =
        vec![peer(1, RankOutcome::GaveUp("not finished".into())), peer(2, RankOutcome::Closed)];
    insta::assert_snapshot!(report(&diagnose(&records), std::path::Path::new("runs/x/flight")), @r#"
    isobar: the job ends
      rank 2 (node7, process 102) was lost: its connection closed without a word, as when a process is killed or crashes; it was in forward of step 17, its last operation all_reduce of Float [8] (number 40 of group "world")
      ranks 0, 1 wait in all_reduce of Float [8] (number 41 of group "world"), in backward of step 17
    flight records: runs/x/flight (isobar trace why runs/x/flight)
    "#);
}

#[test]
fn a_transport_that_does_not_return_is_the_cause_where_nothing_better_is_known() {
    let waiting = |rank: usize, entry: &Value| record(rank, [42, 3], std::slice::from_ref(entry));
    let all_reduce = entry("all_reduce", 0, 41, "waiting", &[8]);
    let found = |records: &[FlightRecord]| -> Vec<usize> {
        diagnose(records).findings.iter().flat_map(Finding::ranks).collect()
    };
    let mut records = [0, 1, 2].map(|rank| waiting(rank, &all_reduce));
    records[0].peers = vec![
        peer(0, RankOutcome::GaveUp("not finished".into())),
        peer(1, RankOutcome::Blocked("all_reduce".into())),
    ];
    assert_eq!(found(&records), [1]);
    // It may wait for a rank that was lost, or that made another call.
    records[2].peers =
        vec![peer(2, RankOutcome::Silent(3.1)), peer(1, RankOutcome::GaveUp("not finished".into()))];
    assert_eq!(found(&records), [2]);
    records[2] = waiting(2, &entry("barrier", 0, 41, "waiting", &[]));
    assert_eq!(found(&records), [0, 1, 2]);
}

/// It closed its connections before it had one to the watchdog: the others' operations fail.
#[test]
fn a_rank_that_never_connected_is_the_cause_where_nothing_better_is_known() {
    let failed = entry("all_gather_bytes", 0, 6, "failed", &[]);
    let mut records = [0, 2].map(|rank| record(rank, [7, 0], std::slice::from_ref(&failed)));
    let gave_up = |rank| peer(rank, RankOutcome::GaveUp("gloo failed".into()));
    records[0].peers = vec![gave_up(0), gave_up(2), peer(1, RankOutcome::Absent)];
    insta::assert_snapshot!(text(&records), @r#"
      rank 1 (node7, process 101) has not connected to the watchdog: it was lost before it could, or cannot reach the others
      ranks 0, 2 wait in all_gather_bytes of Float [] (number 6 of group "world"), in backward of step 17
    "#);
    // One that ends with an error of its own ends the others before they connect.
    records[0].peers.push(peer(2, RankOutcome::Failed("no such file".into())));
    let findings = diagnose(&records).findings;
    assert_eq!(findings.iter().flat_map(Finding::ranks).collect::<Vec<_>>(), [2]);
}

#[test]
fn each_outcome_has_its_words() {
    let outcomes = [
        RankOutcome::Silent(3.04),
        RankOutcome::Panicked("panicked at src/main.rs:3:5: no\u{1b}[31m".into()),
        RankOutcome::Failed("no/such.h5: no such file".into()),
        RankOutcome::Blocked("barrier".into()),
        RankOutcome::GaveUp("not finished after 3 s".into()),
        RankOutcome::Absent,
        RankOutcome::Ended,
    ];
    let lines: Vec<String> =
        outcomes.into_iter().map(|outcome| plain(&peer(1, outcome).to_string())).map(|line| line.replace("; it was in forward of step 17, its last operation all_reduce of Float [8] (number 40 of group \"world\")", " …")).collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    rank 1 (node7, process 101) has not been heard of for 3.0 s: it is stopped, or its machine cannot be reached …
    rank 1 (node7, process 101) panicked at src/main.rs:3:5: no [31m …
    rank 1 (node7, process 101) ended with an error: no/such.h5: no such file …
    rank 1 (node7, process 101) is over its deadline in barrier, from which the transport does not return …
    rank 1 (node7, process 101) gave up: not finished after 3 s …
    rank 1 (node7, process 101) has not connected to the watchdog: it was lost before it could, or cannot reach the others
    rank 1 (node7, process 101) has ended in good order
    ");
}

#[test]
fn a_chrome_trace_has_a_process_a_rank_and_a_row_a_group() {
    let timed = |mut entry: Value, begin_ns: u64, end_ns: u64| {
        (entry["begin_ns"], entry["end_ns"]) = (json!(begin_ns), json!(end_ns));
        entry
    };
    let mut send = timed(entry("send", 1, 4, "failed", &[8]), 4_000, 6_500);
    (send["peer"], send["problem"]) = (json!(0), json!("connection lost"));
    let mut records = [
        record(0, [42, 5], &[timed(entry("all_reduce", 0, 41, "finished", &[8]), 3_000, 5_000)]),
        record(1, [42, 5], &[timed(entry("all_reduce", 0, 41, "waiting", &[8]), 3_500, 0), send]),
        record(2, [0, 0], &[]),
    ];
    // Its last operation did not end before the record was written.
    records[1].time_ns = 9_000;
    let trace = chrome_trace(&records);
    let lines: Vec<String> = trace["traceEvents"].as_array().unwrap().iter().map(Value::to_string).collect();
    insta::assert_snapshot!(lines.join("\n"), @r#"
    {"name":"process_name","ph":"M","pid":0,"tid":0,"args":{"name":"rank 0 (node7, process 100)"}}
    {"name":"thread_name","ph":"M","pid":0,"tid":0,"args":{"name":"world"}}
    {"name":"process_name","ph":"M","pid":1,"tid":1,"args":{"name":"rank 1 (node7, process 101)"}}
    {"name":"thread_name","ph":"M","pid":1,"tid":1,"args":{"name":"world"}}
    {"name":"thread_name","ph":"M","pid":1,"tid":2,"args":{"name":"pair"}}
    {"name":"all_reduce","cat":"backward","ph":"X","pid":0,"tid":0,"ts":0.0,"dur":2.0,"args":{"call":"all_reduce of Float [8]","group":"world","sequence":41,"module":"","pass":"forward","step":17,"state":"finished"}}
    {"name":"all_reduce (waiting)","cat":"backward","ph":"X","pid":1,"tid":1,"ts":0.5,"dur":5.5,"args":{"call":"all_reduce of Float [8]","group":"world","sequence":41,"module":"","pass":"forward","step":17,"state":"waiting"}}
    {"name":"send (failed)","cat":"backward","ph":"X","pid":1,"tid":2,"ts":1.0,"dur":2.5,"args":{"call":"send of Float [8]","group":"pair","sequence":4,"module":"","pass":"forward","step":17,"state":"failed","peer":0,"problem":"connection lost"}}
    "#);
}

#[test]
fn different_calls_are_named_with_both_sides() {
    let reduce = |shape: &[i64]| entry("all_reduce", 0, 41, "failed", shape);
    let records = [
        record(0, [42, 0], &[reduce(&[8])]),
        record(1, [42, 0], &[reduce(&[9])]),
        record(2, [42, 0], &[entry("broadcast", 0, 41, "waiting", &[8])]),
    ];
    insta::assert_snapshot!(text(&records), @r#"  ranks make different calls as number 41 of group "world": rank 0 calls all_reduce of Float [8], rank 1 calls all_reduce of Float [9], rank 2 calls broadcast of Float [8]"#);
}

#[test]
fn parts_may_differ_along_the_dim_that_is_joined() {
    let gather = |rank: usize, extent: i64, sizes: &[i64], others: i64| {
        let mut gather = entry("all_gather_v", 0, 41, "waiting", &[extent, others]);
        gather["dim"] = json!(0);
        gather["sizes"] = json!(sizes);
        record(rank, [42, 0], &[gather])
    };
    let same = |records: [FlightRecord; 2]| {
        !diagnose(&records).findings.iter().any(|finding| matches!(finding, Finding::Mismatch { .. }))
    };
    assert!(same([gather(0, 1, &[1, 2], 4), gather(1, 2, &[1, 2], 4)]));
    assert!(!same([gather(0, 1, &[1, 2], 4), gather(1, 3, &[1, 3], 4)]));
    assert!(!same([gather(0, 1, &[1, 2], 4), gather(1, 2, &[1, 2], 5)]));
    assert!(!same([gather(0, 1, &[], 4), gather(1, 2, &[], 4)]));
}

#[test]
fn who_waits_for_nobody_is_at_fault() {
    // Rank 2 waits for rank 0, which waits for rank 1, which does something else.
    let records = [
        record(0, [41, 4], &[entry("all_gather_v", 1, 3, "waiting", &[2])]),
        record(1, [41, 3], &[entry("all_reduce", 0, 40, "finished", &[8])]),
        record(2, [42, 0], &[entry("all_reduce", 0, 41, "waiting", &[8])]),
    ];
    insta::assert_snapshot!(text(&records), @r#"
      rank 1 (node7, process 101) has not come to all_gather_v of Float [2] (number 3 of group "pair"); it is in backward of step 17, and began all_reduce of Float [8] (number 40 of group "world") last
      rank 0 waits in all_gather_v of Float [2] (number 3 of group "pair"), in backward of step 17
      rank 2 waits in all_reduce of Float [8] (number 41 of group "world"), in backward of step 17
    "#);
}

#[test]
fn groups_in_another_order_are_a_ring() {
    let records = [
        record(0, [42, 3], &[entry("all_reduce", 0, 41, "waiting", &[8])]),
        record(1, [41, 4], &[entry("all_reduce", 1, 3, "waiting", &[8])]),
    ];
    insta::assert_snapshot!(text(&records), @r#"  ranks wait for each other, since they make their calls in another order: rank 0 in all_reduce of Float [8] (number 41 of group "world"), rank 1 in all_reduce of Float [8] (number 3 of group "pair")"#);
}

#[test]
fn a_rank_that_ended_in_good_order_is_named_where_others_wait_for_it() {
    let mut records = [record(0, [42, 0], &[entry("all_reduce", 0, 41, "failed", &[8])])];
    records[0].peers = vec![peer(1, RankOutcome::Ended), peer(2, RankOutcome::Ended)];
    assert!(
        text(&records).contains("rank 1 (node7, process 101) has ended in good order"),
        "{}",
        text(&records)
    );
}

#[test]
fn the_first_failure_counts_and_not_what_it_brings_with_it() {
    let failed = |operation: &str, number: u64| entry(operation, 0, number, "failed", &[8]);
    let entries = [
        failed("scatter_v", 39),
        entry("all_reduce", 0, 40, "finished", &[8]),
        failed("broadcast", 41),
        failed("barrier", 42),
    ];
    let record = record(0, [43, 0], &entries);
    assert_eq!(record.stuck().map(|entry| entry.operation.as_str()), Some("broadcast"));
    assert_eq!(record.finished().map(|entry| entry.sequence), Some(40));
}

#[test]
fn nothing_is_made_of_nothing() {
    assert_eq!(diagnose(&[]), Diagnosis::default());
    assert_eq!(text(&[record(0, [0, 0], &[])]), "  no rank was lost, and none waits for another");
}

#[test]
fn files_give_back_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let flight = folder.path().join("runs/flight");
    let mut older = record(1, [1, 1], &[]);
    (older.job, older.time_ns) = ("0000".to_owned(), 4);
    write(&flight, &older).unwrap();
    let new = record(2, [42, 0], &[entry("all_reduce", 0, 41, "waiting", &[8])]);
    write(&flight, &new).unwrap();
    std::fs::write(flight.join("notes.txt"), "not a record").unwrap();
    std::fs::write(flight.join("flight_rank_00003.json.partial"), "not whole").unwrap();
    let expected = Records { records: vec![new], older: 1, unreadable: Vec::new() };
    assert_eq!(read(&flight).unwrap(), expected);
    let mut found = record_files(&flight).unwrap();
    found.sort();
    assert_eq!(found, [1, 2].map(|rank| flight.join(format!("flight_rank_0000{rank}.json"))));
    // One that was cut off keeps nobody from the others.
    let torn = flight.join("flight_rank_00000.json");
    std::fs::write(&torn, "{\"version\": 1, \"job").unwrap();
    let found = read(&flight).unwrap();
    assert_eq!((&found.records, &found.unreadable[0].0), (&expected.records, &torn));
    let names: Vec<_> = std::fs::read_dir(&flight)
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(names.iter().all(|name| !name.starts_with('.')), "{names:?}");
}

#[test]
fn what_is_no_record_is_an_error_that_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("flight_rank_00000.json");
    let refused = || read(folder.path()).unwrap_err().to_string();
    assert!(refused().contains("holds no flight record"), "{}", refused());
    for (text, word) in [
        ("{", "not a flight record"),
        ("{\"version\": 1}", "not a flight record"),
        ("{\"version\": 2}", "version 2, expected 1"),
    ] {
        std::fs::write(&path, text).unwrap();
        assert!(refused().contains("flight_rank_00000.json") && refused().contains(word), "{}", refused());
    }
    let mut large = serde_json::to_value(record(0, [0, 0], &[])).unwrap();
    let group = json!({ "context": 0, "name": "", "ranks": [[0, 1, 1 << 20]], "begun": 0 });
    large["groups"] = vec![group; 5].into();
    std::fs::write(&path, large.to_string()).unwrap();
    assert!(refused().contains("more than 4194304 ranks together"), "{}", refused());
    let mut other = serde_json::to_value(record(0, [0, 0], &[])).unwrap();
    other["version"] = json!(2);
    std::fs::write(&path, other.to_string()).unwrap();
    assert!(refused().contains("version 2, expected 1"), "{}", refused());
    // A folder in the place of the file: the disk's refusal is an error, too.
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(write(folder.path(), &record(0, [0, 0], &[])).is_err());
}

/// Beside a good record, of which all the same is said.
#[test]
fn records_that_are_no_regular_files_are_left_aside() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &record(0, [42, 0], &[])).unwrap();
    let path = |rank: usize| folder.path().join(format!("flight_rank_{rank:05}.json"));
    nix::unistd::mkfifo(&path(1), nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    std::os::unix::fs::symlink("/dev/zero", path(2)).unwrap();
    std::fs::File::create(path(3)).unwrap().set_len(1 << 40).unwrap();
    let found = read(folder.path()).unwrap();
    assert_eq!(found.records.len(), 1);
    let problems: Vec<&str> = found.unreadable.iter().map(|(_, problem)| problem.as_str()).collect();
    let long = "it has 1099511627776 bytes, expected at most 16777216";
    assert_eq!(
        problems,
        ["it is a FIFO, expected a regular file", "it is a device, expected a regular file", long]
    );
}
