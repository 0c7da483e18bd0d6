//! The collectives on plain processes over libtorch's gloo.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_harness::{Exit, Launch, Outcome};
use rstest::rstest;

const SUITE: &str = env!("CARGO_BIN_EXE_suite");

#[rstest]
fn whole_suite(#[values(2, 4)] ranks: usize) {
    let outcome = run(ranks, "all").expect_success();
    assert!(outcome.ranks.iter().all(|rank| rank.stdout.starts_with("ok")), "{outcome}");
}

#[rstest]
fn endings(
    #[values(
        "mismatch",
        "other-operation",
        "other-kind",
        "other-shape",
        "other-arguments",
        "pair-mismatch",
        "compared",
        "absent",
        "dropped"
    )]
    name: &str,
) {
    let outcome = run(3, name);
    assert_ne!(outcome.exit, Exit::Deadline, "{outcome}");
    assert_eq!(outcome.ranks.len(), 3, "{outcome}");
    assert!(outcome.ranks.iter().all(|rank| rank.stdout.starts_with("ok")), "{outcome}");
}

fn run(ranks: usize, what: &str) -> Outcome {
    Launch::plain(ranks, SUITE).args(["gloo", what]).deadline(Duration::from_secs(300)).run().unwrap()
}
