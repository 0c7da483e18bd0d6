//! The program gives the same on any number of ranks.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_harness::Launch;
use isobar_harness::curve::{assert_same_run, metric};

const HEAT: &str = env!("CARGO_BIN_EXE_isobar-heat");

/// Runs the program in a folder of its own; returns its output, and the losses and validation errors that it records.
fn run(launch: Launch, sharing_samples: &str) -> (String, Vec<f64>) {
    let folder = tempfile::tempdir().unwrap();
    let outcome = launch.current_dir(folder.path()).arg(sharing_samples).run().unwrap().expect_success();
    let keys = ["loss", "grad_norm", "epoch_loss", "validation_error"];
    let numbers = keys.iter().flat_map(|key| metric(&folder.path().join("runs/heat"), key)).collect();
    (outcome.ranks[0].stdout.clone(), numbers)
}

#[test]
fn one_answer_on_every_mesh() {
    let (alone, numbers) = run(Launch::plain(1, HEAT), "1");
    let error: f64 = alone.split_whitespace().nth(2).unwrap().parse().unwrap();
    assert!(error < 10.0, "{alone}");
    assert!(numbers.len() >= 16, "{numbers:?}");
    for (ranks, sharing_samples) in [(2, "1"), (3, "1"), (4, "2")] {
        let (said, got) = run(Launch::plain(ranks, HEAT), sharing_samples);
        assert_same_run(&got, &numbers);
        assert_eq!(said, alone, "{ranks} ranks, {sharing_samples}");
    }
}

/// The program sets up no logging: `fit` shows its messages all the same, on rank 0, as `RUST_LOG` says.
#[test]
fn messages_are_shown() {
    let says = |filter: &str| {
        let folder = tempfile::tempdir().unwrap();
        let launch = Launch::plain(2, HEAT).current_dir(folder.path()).arg("1").env("RUST_LOG", filter);
        launch.run().unwrap().expect_success().ranks.into_iter().map(|rank| rank.stderr).collect::<Vec<_>>()
    };
    let shown = says("info");
    assert!(shown[0].contains("epoch 8/8") && !shown[1].contains("epoch"), "{shown:?}");
    let silent = says("off");
    assert!(!silent.concat().contains("epoch"), "{silent:?}");
    let refused = says("isobar=loud");
    assert!(refused[0].contains("RUST_LOG is") && refused[0].contains("epoch 8/8"), "{refused:?}");
}

/// The mesh does not fit the ranks: all of them find it, and one says it, in words.
#[test]
fn an_error_of_all_ranks_is_printed_once() {
    let folder = tempfile::tempdir().unwrap();
    let launch = Launch::plain(2, HEAT).current_dir(folder.path()).arg("3");
    let outcome = launch.run().unwrap();
    assert_eq!(outcome.exit, isobar_harness::Exit::Code(2), "{outcome}");
    let said: String = outcome.ranks.iter().map(|rank| rank.stderr.as_str()).collect();
    assert_eq!(said.matches("error: ").count(), 1, "{outcome}");
    assert!(!said.contains("Error:") && !said.contains("panicked"), "{outcome}");
}
