//! `isobar verify` passes the public golden cases on every backend.

use std::{process::Command, time::Duration};

use isobar_harness::{THREADS, output_within, threads, workspace};
use isobar_tests::{full, golden, has_mpi};
use rstest::rstest;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");
const OPS: &str =
    "all_gather_v,gather_v,scatter_v,indexed_all_to_all_v,fully_connected,afno,distributed_afno";

/// Transforms, and models that are made of them.
const SPECTRAL: &str = "rfft2,irfft2,rfftn,mod_afno,fno";

const SHARDED: &[&str] = &[
    "adaptive_avg_pool2d",
    "add",
    "argmax",
    "avg_pool2d",
    "avg_pool3d",
    "batch_norm",
    "cat",
    "cdist",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cumsum",
    "flip",
    "gather",
    "group_norm",
    "index_add",
    "index_select",
    "interpolate",
    "knn",
    "layer_norm",
    "linear",
    "matmul",
    "max_pool2d",
    "mean",
    "mul",
    "pad",
    "permute",
    "amax",
    "amin",
    "logsumexp",
    "norm",
    "prod",
    "std",
    "sum",
    "var",
    "roll",
    "scaled_dot_product_attention",
    "select",
    "slice",
    "softmax",
    "sort",
    "split",
    "stack",
    "topk",
    "transpose",
    "exp",
    "gelu",
    "relu",
    "sigmoid",
    "silu",
    "softplus",
    "tanh",
    "unbind",
    "view",
    "where",
    "unet",
    "sr_res_net",
    "pix2pix",
    "cnext_unet",
];

/// Models whose layers are covered by the operators above: a few meshes are enough.
const MODELS: &str = "dit,dlwp,edm_preconditioner,edm_sampler,flare,geo_transolver,healpix_unet,pangu,song_unet,swin_rnn,\
                      transolver";

/// Models that take long, of the layers of others.
const LONG: &str = "edm_loss,fengwu";

#[rstest]
fn public_cases_pass(#[values("threads", "mpi", "gloo")] backend: &str) {
    if backend == "mpi" && !has_mpi() {
        return;
    }
    let mut verify = Command::new(ISOBAR);
    verify.args(["verify", "--backend", backend, "--ops", OPS]).arg(golden()).env(THREADS, threads());
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

/// The operators of sharded tensors, and models that are made of them, every case on every layout; over MPI on 2 and 4
/// ranks.
#[rstest]
fn sharded_operators_pass(#[values("threads", "mpi")] backend: &str) {
    if backend == "mpi" && !has_mpi() {
        return;
    }
    let mut verify = Command::new(ISOBAR);
    verify.args(["verify", "--backend", backend, "--ops", &SHARDED.join(",")]).arg(golden());
    verify.args(["--ranks", if backend == "mpi" { "2,4" } else { "1,2,3,4,2x2" }]).env(THREADS, threads());
    let output = output_within(&mut verify, Duration::from_secs(900)).unwrap().expect("did not end");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{complained}");
    assert!(!said.contains("unsupported"), "{said}");
}

/// Arguments that the public cases lack.
#[test]
fn own_cases_pass() {
    let mut verify = Command::new(ISOBAR);
    verify.args(["verify", "--ranks", "1,2,3,4,2x2"]).arg(workspace().join("tests/golden_own"));
    let output = output_within(verify.env(THREADS, threads()), Duration::from_secs(600))
        .unwrap()
        .expect("did not end");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !said.contains("unsupported"), "{said}");
}

/// Every layout of some meshes; with `--full`, of all, and of models that take long.
#[rstest]
fn models_pass(#[values("threads", "mpi")] backend: &str) {
    if backend == "mpi" && !has_mpi() {
        return;
    }
    let ranks = match (backend, full()) {
        ("mpi", false) => "2",
        ("mpi", true) => "2,4",
        (_, false) => "3,2x2",
        (_, true) => "1,2,3,4,2x2",
    };
    let ops = if full() { format!("{MODELS},{LONG}") } else { MODELS.to_owned() };
    let mut verify = Command::new(ISOBAR);
    verify.args(["verify", "--backend", backend, "--ops", &ops, "--ranks", ranks]).arg(golden());
    let output = output_within(verify.env(THREADS, threads()), Duration::from_secs(900)).unwrap();
    let output = output.expect("did not end");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{complained}");
    assert!(!said.contains("unsupported"), "{said}");
}

/// Every case on every layout of some meshes; of all with `--full`.
#[rstest]
fn spectral_operators_pass(#[values("threads", "mpi")] backend: &str) {
    if backend == "mpi" && !has_mpi() {
        return;
    }
    let ranks = match (backend, full()) {
        ("mpi", false) => "2",
        ("mpi", true) => "2,4",
        (_, false) => "3,2x2",
        (_, true) => "1,2,3,4,2x2",
    };
    let mut verify = Command::new(ISOBAR);
    verify.args(["verify", "--backend", backend, "--ops", SPECTRAL, "--ranks", ranks]).arg(golden());
    verify.env(THREADS, threads());
    let output = output_within(&mut verify, Duration::from_secs(900)).unwrap().expect("did not end");
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{complained}");
    assert!(!said.contains("unsupported"), "{said}");
    // Every operator asked for was found.
    for op in SPECTRAL.split(',') {
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

#[test]
fn a_case_is_not_replaced_by_its_report() {
    let folder = tempfile::tempdir().unwrap();
    let case = folder.path().join("case.safetensors");
    std::fs::copy(golden().join("argmax.safetensors"), &case).unwrap();
    let before = std::fs::read(&case).unwrap();
    let mut verify = Command::new(ISOBAR);
    verify.arg("verify").arg(&case).args(["--ranks", "1", "--json"]).arg(&case);
    let output = output_within(&mut verify, Duration::from_secs(60)).unwrap().expect("did not end");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("is an input of this command"), "{output:?}");
    assert!(std::fs::read(&case).unwrap() == before);
}
