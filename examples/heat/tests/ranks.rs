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
    assert!(refused[0].contains("log filter") && refused[0].contains("epoch 8/8"), "{refused:?}");
}
