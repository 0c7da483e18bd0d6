//! `isobar verify` must find what is wrong: its verdicts, exit codes, report and dump.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use isobar_harness::{output_within, workspace};
use rstest::rstest;
use safetensors::SafeTensors;
use safetensors::tensor::{TensorView, serialize_to_file};
use serde_json::Value;

fn golden(case: &str) -> PathBuf {
    workspace().join("tests/golden").join(case).with_extension("safetensors")
}

fn verify(args: &[&str], paths: &[&Path]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_isobar"));
    command.arg("verify").args(args).args(paths).env("OMP_NUM_THREADS", "1");
    output_within(&mut command, Duration::from_secs(120)).unwrap().expect("did not end")
}

#[track_caller]
fn ends(output: &Output, code: i32) -> String {
    let said =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat();
    assert_eq!(output.status.code(), Some(code), "{said}");
    said
}

/// A case like a golden one, with other values in one tensor and another header.
fn altered(case: &str, to: &Path, tensor: &str, alter: fn(&mut [u8]), header: fn(&mut Value)) -> PathBuf {
    let bytes = std::fs::read(golden(case)).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let mut description: Value =
        serde_json::from_str(&metadata.metadata().as_ref().unwrap()["case"]).unwrap();
    header(&mut description);
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut data: Vec<(String, _, _, Vec<u8>)> = file
        .iter()
        .map(|(name, view)| (name.to_owned(), view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        .collect();
    data.iter_mut().filter(|entry| entry.0 == tensor).for_each(|entry| alter(&mut entry.3));
    let views = data
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    let path = to.join("altered.safetensors");
    let metadata = HashMap::from([("case".to_owned(), description.to_string())]);
    serialize_to_file(views, Some(metadata), &path).unwrap();
    path
}

/// Turns the sign of the first element, which is 4 or 8 bytes long with the sign in the last.
fn negate_first(bytes: &mut [u8]) {
    let width = if bytes.len().is_multiple_of(8) && bytes.len() < 1000 { 8 } else { 4 };
    bytes[width - 1] ^= 0x80;
}

#[rstest]
#[case("all_gather_v_w2", "output.1")]
#[case("scatter_v_w3_empty", "grad.input.2")]
#[case("indexed_all_to_all_v_w4", "grad.input.0")]
#[case("model_fully_connected_skip", "grad.input")]
#[case("model_fully_connected_skip", "grad.layers.1.linear.weight")]
#[case("afno_small", "output")]
#[case("distributed_afno_small", "grad._impl.blocks.0.mlp.w2")]
fn a_wrong_value_is_found(#[case] case: &str, #[case] tensor: &str) {
    let folder = tempfile::tempdir().unwrap();
    let wrong = |bytes: &mut [u8]| bytes.iter_mut().for_each(|byte| *byte ^= 0x41);
    let path = altered(case, folder.path(), tensor, wrong, |_| ());
    let said = ends(&verify(&["--ranks", "2"], &[&path]), 1);
    assert!(said.contains("FAIL") && said.contains(tensor), "{said}");
}

#[test]
fn one_wrong_element_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = altered("gather_v_w2", folder.path(), "output.0", negate_first, |_| ());
    let said = ends(&verify(&[], &[&path]), 1);
    assert!(said.contains("output.0 on rank 0 is off by"), "{said}");
}

#[test]
fn an_operator_that_is_not_there_is_unsupported() {
    let folder = tempfile::tempdir().unwrap();
    let path =
        altered("all_gather_v_w2", folder.path(), "", |_| (), |case| case["op"] = "not_an_operator".into());
    let said = ends(&verify(&[], &[&path]), 1);
    assert!(said.contains("unsupported") && said.contains("of which 1 unsupported"), "{said}");
}

#[rstest]
#[case("threads")]
#[case("gloo")]
fn an_error_of_the_ranks_fails_its_case_and_the_rest_goes_on(#[case] backend: &str) {
    let folder = tempfile::tempdir().unwrap();
    let sizes = |case: &mut Value| case["attrs"]["sizes"] = serde_json::json!([4, 4]);
    let path = altered("all_gather_v_w2", folder.path(), "", |_| (), sizes);
    let output = verify(&["--backend", backend, "--timeout", "20"], &[&path, &golden("gather_v_w2")]);
    let said = ends(&output, 1);
    assert!(said.contains("1 of 2 cases passed"), "{said}");
}

#[test]
fn what_cannot_be_read_is_an_error_of_data() {
    let folder = tempfile::tempdir().unwrap();
    ends(&verify(&[], &[&folder.path().join("none.safetensors")]), 3);
    ends(&verify(&[], &[folder.path()]), 3);
    let torn = folder.path().join("torn.safetensors");
    std::fs::write(&torn, &std::fs::read(golden("gather_v_w2")).unwrap()[..100]).unwrap();
    ends(&verify(&[], &[&torn]), 3);
}

#[test]
fn report_and_dump() {
    let folder = tempfile::tempdir().unwrap();
    let (report, dump) = (folder.path().join("report.json"), folder.path().join("dump"));
    let args = ["--ranks", "2,2x2", "--json", report.to_str().unwrap(), "--dump", dump.to_str().unwrap()];
    let case = "model_fully_connected_fact_adaptive";
    ends(&verify(&args, &[&golden(case)]), 0);

    let report: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    let layouts = report["cases"][0]["layouts"].as_array().unwrap();
    // Two dims by four rules, and four pairs of dims by four rules; with all replicated one more of each.
    assert_eq!(layouts.len(), 9 + 17);
    let uneven = layouts.iter().find(|layout| layout["title"] == "2-3 (input Shard(0), uneven)").unwrap();
    assert_eq!(uneven["shapes"]["input"], serde_json::json!([[0, 11, 4], [2, 11, 4]]));
    assert_eq!(uneven["placements"]["input"], serde_json::json!(["Shard(0)"]));
    assert!(layouts[0]["bytes"] == serde_json::json!([0, 0]) && uneven["bytes"][0].as_u64().unwrap() > 0);

    let want = std::fs::read(golden(case)).unwrap();
    let want = SafeTensors::deserialize(&want).unwrap();
    for layout in layouts {
        let file = format!("{}-{}.safetensors", layout["ranks"].as_str().unwrap(), layout["n"]);
        let got = std::fs::read(dump.join(case).join(file)).unwrap();
        let got = SafeTensors::deserialize(&got).unwrap();
        assert_eq!(got.len(), 1 + want.names().iter().filter(|name| name.starts_with("grad.")).count() - 1);
        for (name, view) in got.iter() {
            assert_eq!(view.shape(), want.tensor(name).unwrap().shape(), "{name}");
        }
    }
}
