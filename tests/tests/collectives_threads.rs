//! The collectives on ranks that are threads of one process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::Duration;

use isobar_collectives::{Error, Group, ReduceOp, all_reduce, threads};
use isobar_tests::full;
use isobar_tests::suite::{self, Options, endings};
use rstest::rstest;
use tch::Tensor;

const DEADLINE: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_secs(2);

#[rstest]
fn whole_suite(#[values(1, 2, 3, 4, 5)] ranks: usize) {
    tch::set_num_threads(1);
    let results = threads::run(ranks, DEADLINE, |group| suite::run(&group, &Options::default()));
    all_right(results);
}

#[test]
fn suite_of_one_process() {
    tch::set_num_threads(1);
    let report = suite::run(&Group::single(), &Options::default()).unwrap();
    assert!(report.cases > 40 && report.checks > 1000, "{report:?}");
}

/// The suite holds in a group of some ranks as in a world.
#[test]
fn suite_in_a_subgroup() {
    tch::set_num_threads(1);
    let results = threads::run(4, DEADLINE, |group| {
        let members = group.subgroup("members", &[3, 1, 0]).unwrap();
        members.map_or(Ok(()), |members| suite::run(&members, &Options::default()).map(drop))
    });
    all_right(results);
}

#[rstest]
fn other_data(#[values(2, 3, 4, 7)] ranks: usize) {
    tch::set_num_threads(1);
    for seed in if full() { 7..107 } else { 7..10 } {
        let options = Options { only: Some("adjoint".into()), seed };
        all_right(threads::run(ranks, DEADLINE, |group| suite::run(&group, &options)));
    }
}

#[rstest]
fn mismatch(#[values(2, 3)] ranks: usize) {
    all_right(threads::run(ranks, SHORT, |group| endings::mismatch(&group)));
}

#[rstest]
fn other_calls(
    #[values(endings::other_operation, endings::other_kind, endings::other_shape, endings::other_arguments)]
    ending: endings::Ending,
    #[values(2, 3)] ranks: usize,
) {
    all_right(threads::run(ranks, SHORT, |group| ending(&group)));
}

#[rstest]
fn compared(#[values(2, 3)] ranks: usize) {
    all_right(threads::run(ranks, SHORT, |group| endings::compared(&group)));
}

#[test]
fn pair_mismatch() {
    all_right(threads::run(2, SHORT, |group| endings::pair_mismatch(&group)));
}

#[rstest]
fn absent(#[values(2, 3, 4)] ranks: usize) {
    all_right(threads::run(ranks, SHORT, |group| endings::absent(&group)));
}

#[rstest]
fn dropped(#[values(2, 3, 4)] ranks: usize) {
    all_right(threads::run(ranks, DEADLINE, |group| endings::dropped(&group)));
}

#[test]
fn too_many_groups() {
    all_right(threads::run(2, DEADLINE, |group| endings::too_many_groups(&group)));
}

/// A rank whose thread panics: the others' waits end with an error that says so, and the panic comes out.
#[rstest]
fn panic(#[values(2, 3)] ranks: usize) {
    let seen = Mutex::new(Vec::new());
    let result = catch_unwind(AssertUnwindSafe(|| {
        threads::run(ranks, DEADLINE, |group| {
            assert_ne!(group.rank(), 1, "rank 1 gives up");
            let x = Tensor::from_slice(&[1.0]);
            let first = all_reduce(&x, ReduceOp::Sum, &group).unwrap_err();
            let second = all_reduce(&x, ReduceOp::Sum, &group).unwrap_err();
            seen.lock().unwrap().push((first, second));
        })
    }));
    let text = *result.unwrap_err().downcast::<String>().unwrap();
    assert!(text.contains("rank 1 gives up"), "{text}");
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.len(), ranks - 1);
    for (first, second) in seen {
        assert!(first.to_string().contains("panicked"), "{first}");
        assert!(matches!(&second, Error::Dead { cause, .. } if cause.contains("panicked")), "{second}");
    }
}

fn all_right<T>(results: Vec<Result<T, String>>) {
    let failures: Vec<String> = results.into_iter().filter_map(Result::err).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}
