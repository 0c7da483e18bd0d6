//! Every launcher starts ranks that find each other; launches that contradict themselves say so.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::io::Write;
use std::net::TcpListener;
use std::time::Duration;

use isobar_harness::{Exit, Launch, Outcome};
use isobar_tests::{has_mpi, has_slurm, json_of_ranks};
use nix::sys::signal::Signal;
use rstest::rstest;
use serde_json::Value;

const WHOAMI: &str = env!("CARGO_BIN_EXE_whoami");

/// Checks ranks, sums over all ranks, and method and backend.
#[track_caller]
fn check(launch: &Launch, ranks: usize, method: &str, backend: &str) {
    let answers = json_of_ranks(launch);
    assert_eq!(answers.len(), ranks);
    let sum: usize = (1..=ranks).sum();
    for (rank, answer) in answers.iter().enumerate() {
        let expected = [
            ("rank", Value::from(rank)),
            ("world_size", Value::from(ranks)),
            ("local_rank", Value::from(rank)),
            ("method", Value::from(method)),
            ("backend", Value::from(backend)),
            ("sum", Value::from(sum)),
        ];
        for (key, value) in expected {
            assert_eq!(answer[key], value, "{key} of rank {rank} in {answers:?}");
        }
    }
}

#[rstest]
fn mpirun(#[values(1, 2, 4)] ranks: usize) {
    if has_mpi() {
        check(&Launch::mpirun(ranks, WHOAMI), ranks, "OPENMPI", "mpi");
    }
}

#[test]
fn srun_with_pmix_is_mpi() {
    if has_mpi() && has_slurm() {
        check(&Launch::srun(2, "pmix", WHOAMI), 2, "SLURM", "mpi");
    }
}

#[test]
fn srun_without_pmix_runs_over_gloo_where_asked_to() {
    if has_slurm() {
        check(&Launch::srun(2, "none", WHOAMI).arg("gloo"), 2, "SLURM", "gloo");
    }
}

#[rstest]
fn srun_without_pmix_says_the_mend(#[values("auto", "mpi")] backend: &str) {
    if has_mpi() && has_slurm() {
        let outcome = failed(&Launch::srun(2, "none", WHOAMI).arg(backend));
        // The first rank that fails says it; srun may end the other before it does.
        let says = |words: &str| outcome.ranks.iter().any(|rank| rank.stderr.contains(words));
        assert!(says("srun started no PMIx server") && says("srun --mpi=pmix"), "{outcome}");
    }
}

#[rstest]
fn plain(#[values(1, 2, 4)] ranks: usize) {
    let backend = if ranks == 1 { "single" } else { "gloo" };
    check(&Launch::plain(ranks, WHOAMI), ranks, "ENV", backend);
}

/// Ctrl-C ends a program that does not watch for signals.
#[test]
fn ctrl_c_is_left_to_programs_that_do_not_ask() {
    for answer in json_of_ranks(&Launch::plain(2, WHOAMI)) {
        let caught = answer["caught_signals"].as_u64().unwrap();
        let has = |signal: Signal| caught & (1 << (signal as u32 - 1)) != 0;
        assert!(has(Signal::SIGTERM) && !has(Signal::SIGINT), "{caught:x}");
    }
}

#[test]
fn gloo_under_mpirun() {
    if has_mpi() {
        check(&Launch::mpirun(2, WHOAMI).arg("gloo"), 2, "OPENMPI", "gloo");
    }
}

#[test]
fn half_set_variables_are_an_error() {
    let launch = Launch::plain(1, "sh").args(["-c", "unset WORLD_SIZE; exec \"$0\"", WHOAMI]);
    let outcome = failed(&launch);
    assert!(outcome.ranks[0].stderr.contains("RANK is set but WORLD_SIZE is not"), "{outcome}");
}

#[test]
fn model_parallel_groups_come_from_the_environment() {
    let launch = |size: &str| {
        let script = format!("MODEL_PARALLEL_SIZE={size} exec \"$0\"");
        Launch::plain(4, "sh").args(["-c", &script, WHOAMI])
    };
    for answer in json_of_ranks(&launch("2")) {
        assert_eq!(answer["model_parallel"], 2, "{answer}");
    }
    for (size, needle) in
        [("three", "a number of ranks"), ("3", "4"), ("$((RANK / 2 + 1))", "MODEL_PARALLEL_SIZE 1")]
    {
        let outcome = failed(&launch(size));
        assert!(outcome.ranks.iter().any(|rank| rank.stderr.contains(needle)), "size {size}: {outcome}");
    }
}

#[test]
fn ranks_that_never_come_are_an_error() {
    // The world is said to be larger than it is.
    let launch = Launch::plain(1, "sh").args(["-c", "WORLD_SIZE=2 exec \"$0\" gloo 5", WHOAMI]);
    let outcome = failed(&launch);
    let said = &outcome.ranks[0].stderr;
    assert!(!said.contains("panicked"), "{outcome}");
    assert!(said.contains("timed out after 5 s waiting for ranks [1]"), "{outcome}");
}

/// Another program keeps the port: rank 0 ends at once, and the other rank long before its timeout.
#[rstest]
#[case::accepts_and_says_nothing(true, b"")]
#[case::sends_garbage(true, b"HTTP/1.1 400 Bad Request\r\n\r\n")]
#[case::accepts_nothing(false, b"")]
fn a_port_of_another_program_is_an_error(#[case] accepts: bool, #[case] answer: &'static [u8]) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let _kept = (!accepts).then(|| listener.try_clone().unwrap());
    if accepts {
        std::thread::spawn(move || {
            let mut connections = Vec::new();
            while let Ok((mut stream, _)) = listener.accept() {
                let _ = stream.write_all(answer);
                connections.push(stream);
            }
        });
    }
    let script = format!("MASTER_PORT={port} exec \"$0\" gloo 3600; ");
    let launch = Launch::plain(2, "sh").args(["-c", &script, WHOAMI]).deadline(Duration::from_secs(180));
    let outcome = failed(&launch);
    let [zero, one] = &outcome.ranks[..] else { panic!("{outcome}") };
    assert!(zero.stderr.contains("Address already in use"), "{outcome}");
    assert!(one.stderr.contains("another program seems to use this port"), "{outcome}");
    for rank in &outcome.ranks {
        let errors = rank.stderr.lines().filter(|line| line.contains(&format!("127.0.0.1:{port}")));
        assert_eq!(errors.count(), 1, "{outcome}");
    }
}

#[test]
fn launchers_do_not_share_a_port() {
    // Jobs at the same time, as on a busy node.
    let jobs: Vec<_> =
        (0..3).map(|_| std::thread::spawn(|| json_of_ranks(&Launch::plain(2, WHOAMI)))).collect();
    let worlds: BTreeSet<_> =
        jobs.into_iter().map(|job| job.join().unwrap()[0]["world_size"].to_string()).collect();
    assert_eq!(worlds.into_iter().collect::<Vec<_>>(), ["2"]);
}

/// The outcome of a launch that must fail by itself.
#[track_caller]
fn failed(launch: &Launch) -> Outcome {
    let outcome = launch.run().unwrap();
    assert!(matches!(outcome.exit, Exit::Code(code) if code != 0), "{outcome}");
    outcome
}
