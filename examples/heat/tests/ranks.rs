//! The program gives the same on any number of ranks.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_harness::Launch;

const HEAT: &str = env!("CARGO_BIN_EXE_isobar-heat");

/// What it prints, in a folder of its own.
fn says(launch: Launch, sharing_samples: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let outcome = launch.current_dir(folder.path()).arg(sharing_samples).run().unwrap().expect_success();
    outcome.ranks[0].stdout.clone()
}

#[test]
fn one_answer_on_every_mesh() {
    let alone = says(Launch::plain(1, HEAT), "1");
    let error: f64 = alone.split_whitespace().nth(2).unwrap().parse().unwrap();
    assert!(error < 10.0, "{alone}");
    for (ranks, sharing_samples) in [(2, "1"), (3, "1"), (4, "2")] {
        assert_eq!(
            says(Launch::plain(ranks, HEAT), sharing_samples),
            alone,
            "{ranks} ranks, {sharing_samples}"
        );
    }
}
