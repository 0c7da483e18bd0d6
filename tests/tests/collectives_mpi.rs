//! The collectives on processes that `mpirun` has started.
#![cfg(feature = "mpi")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_harness::{Exit, Launch, Outcome};
use isobar_tests::has_mpi;
use rstest::rstest;

const SUITE: &str = env!("CARGO_BIN_EXE_suite");

#[rstest]
fn whole_suite(#[values(1, 2, 3, 4)] ranks: usize) {
    if has_mpi() {
        let outcome = run(ranks, &["mpi", "all"]).expect_success();
        assert!(outcome.ranks.iter().all(|rank| rank.stdout.starts_with("ok")), "{outcome}");
    }
}

/// A sharded step on four ranks needs at most three tenths of the dense one's memory, of models four tenths.
#[rstest]
fn memory_of_a_sharded_step(
    #[values("convolutions", "afno", "mod_afno", "fno", "unet", "unet2d", "sr_res_net")] model: &str,
) {
    if has_mpi() {
        let outcome = run(4, &["mpi", &format!("memory-{model}")]).expect_success();
        assert!(outcome.ranks.iter().all(|rank| rank.stdout.starts_with("ok")), "{outcome}");
    }
}

/// Fully sharded AdamW on four ranks needs at most three tenths of what data parallelism does.
#[test]
fn memory_of_fully_sharded_training() {
    if has_mpi() {
        let outcome = run(4, &["mpi", "memory-training"]).expect_success();
        assert!(outcome.ranks.iter().all(|rank| rank.stdout.starts_with("ok")), "{outcome}");
    }
}

/// Every message cut, and every row of more than eight elements sent from where it lies: the way of large tensors.
#[test]
fn large_messages() {
    if has_mpi() {
        let outcome = run(3, &["mpi", "all", "1000", "64"]).expect_success();
        assert!(outcome.ranks.iter().all(|rank| rank.stdout.starts_with("ok")), "{outcome}");
    }
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
    if has_mpi() {
        let outcome = run(3, &["mpi", name]);
        // A job whose group has failed is ended by an abort, with the code that the launcher makes of it.
        assert!(outcome.success() || (name != "dropped" && outcome.exit != Exit::Deadline), "{outcome}");
        assert_eq!(outcome.ranks.len(), 3, "{outcome}");
        assert!(outcome.ranks.iter().all(|rank| rank.stdout.starts_with("ok")), "{outcome}");
    }
}

fn run(ranks: usize, args: &[&str]) -> Outcome {
    Launch::mpirun(ranks, SUITE).args(args).deadline(Duration::from_secs(300)).run().unwrap()
}
