//! `isobar verify` passes the public golden cases on every backend.

use std::{process::Command, time::Duration};

use isobar_harness::output_within;
use isobar_tests::{full, golden, has_mpi};
use rstest::rstest;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");
const OPS: &str =
    "all_gather_v,gather_v,scatter_v,indexed_all_to_all_v,fully_connected,afno,distributed_afno";

#[rstest]
fn public_cases_pass(#[values("threads", "mpi", "gloo")] backend: &str) {
    if backend == "mpi" && !has_mpi() {
        return;
    }
    let mut verify = Command::new(ISOBAR);
    verify.args(["verify", "--backend", backend, "--ops", OPS]).arg(golden()).env("OMP_NUM_THREADS", "1");
    if full() && backend == "threads" {
        verify.args(["--ranks", "1,2,3,4,5,6,8,2x2,2x3,3x2,2x2x2"]);
    }
    let output = output_within(&mut verify, Duration::from_secs(900)).unwrap().expect("did not end");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{complained}");
    // Every operator asked for was found.
    for op in OPS.split(',') {
        assert!(said.lines().any(|line| line.contains(op)), "no line for {op}\n{said}");
    }
}

#[test]
fn unknown_operator_fails() {
    let mut verify = Command::new(ISOBAR);
    verify.args(["verify", "--ops", "no_such_operator"]).arg(golden());
    let output = output_within(&mut verify, Duration::from_secs(60)).unwrap().expect("did not end");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}
