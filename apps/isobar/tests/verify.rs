//! `isobar verify` must find what is wrong: its verdicts, exit codes, report and dump.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use isobar_harness::{THREADS, output_within, threads, workspace};
use rstest::rstest;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};

fn golden(case: &str) -> PathBuf {
    workspace().join("tests/golden").join(case).with_extension("safetensors")
}

fn verify(args: &[&str], paths: &[&Path]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_isobar"));
    command.arg("verify").args(args).args(paths).env(THREADS, threads());
    output_within(&mut command, Duration::from_secs(300)).unwrap().expect("did not end")
}

#[track_caller]
fn ends(output: &Output, code: i32) -> String {
    let said =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat();
    assert_eq!(output.status.code(), Some(code), "{said}");
    said
}

/// A tensor of a case.
struct Entry {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

/// A case like a golden one, with another header and other tensors.
fn rewritten(case: &str, to: &Path, edit: impl FnOnce(&mut Value, &mut Vec<Entry>)) -> PathBuf {
    let bytes = std::fs::read(golden(case)).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let mut description: Value =
        serde_json::from_str(&metadata.metadata().as_ref().unwrap()["case"]).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let entry = |(name, view): (&str, TensorView<'_>)| Entry {
        name: name.to_owned(),
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        data: view.data().to_vec(),
    };
    let mut entries: Vec<Entry> = file.iter().map(entry).collect();
    edit(&mut description, &mut entries);
    let views =
        entries.iter().map(|e| (&e.name, TensorView::new(e.dtype, e.shape.clone(), &e.data).unwrap()));
    let path = to.join("altered.safetensors");
    let metadata = HashMap::from([("case".to_owned(), description.to_string())]);
    serialize_to_file(views, Some(metadata), &path).unwrap();
    path
}

/// A case like a golden one, with other values in one tensor and another header.
fn altered(case: &str, to: &Path, tensor: &str, alter: fn(&mut [u8]), header: fn(&mut Value)) -> PathBuf {
    rewritten(case, to, |description, entries| {
        header(description);
        entries.iter_mut().filter(|entry| entry.name == tensor).for_each(|entry| alter(&mut entry.data));
    })
}

/// The layouts of the only case of a run with `--json`, which must pass.
fn passing_layouts(folder: &Path, args: &[&str], case: &Path) -> Vec<Value> {
    let report = folder.join("report.json");
    let args = [args, &["--json", report.to_str().unwrap()]].concat();
    ends(&verify(&args, &[case]), 0);
    let report: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    report["cases"][0]["layouts"].as_array().unwrap().clone()
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

#[test]
fn what_is_asked_for_and_not_computed_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let extra = |from: &'static str, to: &'static str| {
        let copied = |_: &mut Value, entries: &mut Vec<Entry>| {
            let Entry { dtype, shape, data, .. } = entries.iter().find(|entry| entry.name == from).unwrap();
            let (dtype, shape, data) = (*dtype, shape.clone(), data.clone());
            entries.push(Entry { name: to.to_owned(), dtype, shape, data });
        };
        let path = rewritten("model_fully_connected_skip", folder.path(), copied);
        ends(&verify(&["--ranks", "2"], &[&path]), 1)
    };
    let said = extra("grad.layers.1.linear.weight", "grad.layers.9.linear.weight");
    assert!(said.contains("grad.layers.9.linear.weight was not computed"), "{said}");
    let said = extra("output", "output.1");
    assert!(said.contains("output.1 was not computed"), "{said}");
    let path = altered(
        "model_fully_connected_skip",
        folder.path(),
        "",
        |_| (),
        |case| {
            case["outputs"] = json!(["output", "other"]);
        },
    );
    assert!(ends(&verify(&["--ranks", "2"], &[&path]), 1).contains("other was not computed"));
}

#[test]
fn parameters_are_sharded_where_a_case_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let weight = "layers.1.linear.weight";
    let shard =
        |case: &mut Value| case["shard_dims"] = json!({"input": [0], "layers.1.linear.weight": [0, 1]});
    let path = altered("model_fully_connected_skip", folder.path(), "", |_| (), shard);
    let layouts = passing_layouts(folder.path(), &["--ranks", "2,3,2x2"], &path);
    // Three dims alone and one shared by both, by four rules; on the mesh, pairs: one, four, and one.
    assert_eq!(layouts.len(), 2 * (1 + 4 * 4) + 1 + 6 * 4);
    let both = "2-14 (input Shard(0), layers.1.linear.weight Shard(0), balanced)";
    let both = layouts.iter().find(|layout| layout["title"] == both).unwrap();
    assert_eq!(both["shapes"][weight], json!([[6, 12], [6, 12]]));
    assert_eq!(both["placements"][weight], json!(["Shard(0)"]));
    let wrong = |bytes: &mut [u8]| bytes.iter_mut().for_each(|byte| *byte ^= 0x41);
    let shard = |case: &mut Value| case["shard_dims"] = json!({"layers.1.linear.weight": [1]});
    let gradient = "grad.layers.1.linear.weight";
    let path = altered("model_fully_connected_skip", folder.path(), gradient, wrong, shard);
    let said = ends(&verify(&["--ranks", "2"], &[&path]), 1);
    assert!(
        said.contains("(layers.1.linear.weight Shard(1), chunk): grad.layers.1.linear.weight on rank 0 is"),
        "{said}"
    );
}

#[test]
fn channels_are_parallel_where_a_case_says_so() {
    let folder = tempfile::tempdir().unwrap();
    // A fourth channel of zeros with weights of zeros, so that ranks divide the channels.
    let widen = |case: &mut Value, entries: &mut Vec<Entry>| {
        for key in ["channel_parallel_inputs", "channel_parallel_outputs"] {
            case["attrs"][key] = true.into();
        }
        case["attrs"]["in_channels"] = 4.into();
        for entry in entries {
            let name = entry.name.trim_start_matches("grad.");
            if name == "input" || name == "_impl.patch_embed.proj.weight" {
                let channel = 4 * entry.shape[2] * entry.shape[3];
                let samples = entry.data.chunks(3 * channel);
                entry.data = samples.flat_map(|sample| [sample, &vec![0; channel]].concat()).collect();
                entry.shape[1] = 4;
            }
        }
    };
    let path = rewritten("distributed_afno_small", folder.path(), widen);
    let layouts = passing_layouts(folder.path(), &["--ranks", "1,2,3,4,2x2"], &path);
    let refused = layouts.iter().map(|layout| layout["refused"].is_string()).collect::<Vec<_>>();
    // Three ranks divide neither, four not the two channels of the output.
    assert_eq!(refused, [false, false, true, true, false]);
    assert_eq!(layouts[1]["shapes"]["input"], json!([[2, 2, 24, 32], [2, 2, 24, 32]]));
    assert_eq!(layouts[4]["placements"]["input"], json!(["Replicate", "Shard(1)"]));
    assert_eq!(layouts[1]["placements"]["_impl.pos_embed"], json!(["Shard(1)"]));
    assert_eq!(layouts[1]["sizes"], "balanced");
}

#[rstest]
#[case(Dtype::I64, 8)]
#[case(Dtype::BOOL, 1)]
fn kinds_without_gradients(
    #[case] dtype: Dtype,
    #[case] width: usize,
    #[values("all_gather_v_w3_empty", "scatter_v_w2", "indexed_all_to_all_v_w4")] case: &str,
) {
    let folder = tempfile::tempdir().unwrap();
    let convert = |case: &mut Value, entries: &mut Vec<Entry>| {
        (case["rtol"], case["atol"]) = (json!(0.0), json!(0.0));
        entries.retain(|entry| !entry.name.starts_with("grad."));
        for entry in entries.iter_mut().filter(|entry| !entry.name.starts_with("indices")) {
            // The low bits of a double are as good as any.
            let element = |double: &[u8]| double[..width].iter().map(|byte| byte & 1).collect::<Vec<_>>();
            entry.data = entry.data.chunks(8).flat_map(element).collect();
            entry.dtype = dtype;
        }
    };
    let path = rewritten(case, folder.path(), convert);
    passing_layouts(folder.path(), &[], &path);
    // No difference is small enough then.
    let path = rewritten(case, folder.path(), |case, entries| {
        convert(case, entries);
        entries.iter_mut().find(|entry| entry.name == "output.1").unwrap().data[0] ^= 1;
    });
    assert!(ends(&verify(&[], &[&path]), 1).contains("output.1 on rank 1 is off by inf times"));
}

#[test]
fn the_report_has_the_sizes_of_v_collectives() {
    let folder = tempfile::tempdir().unwrap();
    let layouts = passing_layouts(folder.path(), &[], &golden("all_gather_v_w2"));
    assert_eq!(layouts.len(), 1);
    let columns = layouts[0]["shapes"]["input"][0][1].clone();
    assert_eq!(layouts[0]["sizes"], json!([3, 5]));
    assert_eq!(layouts[0]["placements"], json!({"input": ["Shard(0)"]}));
    assert_eq!(layouts[0]["shapes"]["input"], json!([[3, columns], [5, columns]]));
    assert_eq!(layouts[0]["shapes"]["output"], json!([[8, columns], [8, columns]]));
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
