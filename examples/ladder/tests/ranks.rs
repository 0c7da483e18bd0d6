//! The programs give the same on 1, 2 and 4 ranks.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_harness::Launch;
use rstest::rstest;
use tempfile::tempdir;

/// Last line of rank 0, and the other lines of all ranks.
fn run(program: &str, ranks: usize, args: &[&str]) -> (String, Vec<String>) {
    let folder = tempdir().unwrap();
    let launch = Launch::plain(ranks, program).current_dir(folder.path()).deadline(Duration::from_secs(120));
    let outcome = launch.args(args).run().unwrap().expect_success();
    let mut lines: Vec<String> =
        outcome.ranks.iter().flat_map(|rank| rank.stdout.lines().map(str::to_owned)).collect();
    let last = outcome.ranks[0].stdout.lines().last().unwrap().to_owned();
    lines.retain(|line| *line != last);
    (last, lines)
}

#[rstest]
#[case::vector_sum(env!("CARGO_BIN_EXE_vector-sum"), "total 1501500", [1, 2, 4])]
#[case::dot_product(env!("CARGO_BIN_EXE_dot-product"), "gradient differs from b by 0.0", [0, 0, 0])]
#[case::halo_convolution(env!("CARGO_BIN_EXE_halo-convolution"), "mean square", [1, 2, 4])]
#[case::ring_attention(env!("CARGO_BIN_EXE_ring-attention"), "norm of the keys' gradient", [1, 2, 4])]
fn one_answer_on_any_number_of_ranks(#[case] program: &str, #[case] ends: &str, #[case] lines: [usize; 3]) {
    let (alone, _) = run(program, 1, &[]);
    assert!(alone.contains(ends), "{alone}");
    for (ranks, lines) in [1, 2, 4].into_iter().zip(lines) {
        let (last, others) = run(program, ranks, &[]);
        assert_eq!(last, alone, "{ranks} ranks");
        assert_eq!(others.len(), lines, "{others:?}");
    }
}

#[test]
fn the_network_trains_alike_on_every_mesh() {
    let program = env!("CARGO_BIN_EXE_residual-network");
    let (alone, _) = run(program, 1, &[]);
    let error: f64 = alone.strip_prefix("relative error ").unwrap().parse().unwrap();
    assert!(error < 0.9, "{alone}");
    for (ranks, sharing) in [(2, "1"), (2, "2"), (4, "2"), (4, "4")] {
        assert_eq!(run(program, ranks, &[sharing]).0, alone, "{ranks} ranks, {sharing} a field");
    }
}
