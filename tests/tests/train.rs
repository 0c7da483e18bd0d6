//! Results, files and checkpoints of real runs; and `isobar data` and `isobar bench` as programs.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::LazyLock,
    time::Duration,
};

use isobar_data::DarcyFile;
use isobar_harness::{
    Launch, Outcome,
    curve::{assert_same_run, losses},
    output_within, workspace,
};
use isobar_train::checkpoint::list;
use rstest::rstest;
use serde_json::Value;
use tch::Kind;
use tempfile::tempdir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");
const SAMPLES: usize = 16;
const VALIDATION: usize = 4;

/// A small data set, which the program makes.
static DATA: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("train_tests.h5");
    let output = data(&["--size", "16", "--seed", "3", "--samples", &SAMPLES.to_string()], &path);
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("16 samples of 16 x 16 cells; u has mean 0.0"), "{said}");
    path
});

fn data(args: &[&str], out: &Path) -> Output {
    let mut command = Command::new(ISOBAR);
    command.args(["data", "darcy", "--out"]).arg(out).args(args);
    output_within(&mut command, Duration::from_secs(300)).unwrap().expect("did not end")
}

/// A configuration of the project, of a size for tests; its run is in `output`/run.
fn small(launch: Launch, config: &str, patch_size: &str, output: &Path) -> Launch {
    let data = format!("data.path={}", DATA.display());
    let folder = format!("run.output={}", output.display());
    let patch_size = format!("model.patch_size={patch_size}");
    let sets =
        [&data, &folder, &patch_size, "run.name=run", "model.inp_shape=[16, 16]", "model.embed_dim=16"];
    let more = ["model.depth=1", "model.num_blocks=2", "train.epochs=2", "train.batch_size=4"];
    let last = ["data.validation_samples=4", "metrics.every_steps=1", "distributed.timeout_s=200"];
    let sets = sets.into_iter().chain(more).chain(last);
    launch.current_dir(workspace()).args(["train", config]).args(sets.flat_map(|set| ["--set", set]))
}

fn afno(ranks: usize, output: &Path) -> Launch {
    small(Launch::plain(ranks, ISOBAR), "configs/darcy_afno.toml", "[4, 4]", output)
}

/// The error of predicting, for every validation sample, the mean of the training samples.
fn mean_field_error() -> f64 {
    let file = DarcyFile::open(&*DATA).unwrap();
    let all: Vec<usize> = (0..SAMPLES).collect();
    let u = file.read(&all, 0..16, 0..16).unwrap().u.to_kind(Kind::Double);
    let train = (SAMPLES - VALIDATION) as i64;
    let mean = u.narrow(0, 0, train).mean_dim(0, false, None);
    let errors = (0..VALIDATION as i64).map(|sample| {
        let truth = u.select(0, train + sample);
        ((&mean - &truth).square().sum(None).sqrt() / truth.square().sum(None).sqrt()).double_value(&[])
    });
    errors.sum::<f64>() / VALIDATION as f64
}

/// A run prints its results at its end, and again if it is started when finished.
#[test]
fn a_run_shows_its_results() {
    let folder = tempdir().unwrap();
    let outcome = afno(2, folder.path()).run().unwrap().expect_success();
    let results = results(&outcome, folder.path());
    assert!(
        results[0].ends_with(&format!("the mean field gives {:.2} %", mean_field_error() * 100.0)),
        "{results:?}"
    );
    assert!(outcome.ranks[0].stdout.starts_with("6 steps in "), "{outcome}");
    assert_eq!(outcome.ranks[1].stdout, "", "rank 0 speaks for all");
    // Without a terminal the progress is a line an epoch.
    for epoch in ["epoch 1/2  loss ", "epoch 2/2  loss ", "validation error ", " samples/s"] {
        assert!(outcome.ranks[0].stderr.contains(epoch), "no {epoch:?} in {outcome}");
    }

    let run = folder.path().join("run");
    let picture = fs::read(run.join("validation.png")).unwrap();
    assert_eq!(&picture[..8], b"\x89PNG\r\n\x1a\n");
    let side = |at: usize| u32::from_be_bytes(picture[at..at + 4].try_into().unwrap());
    assert!(side(16) > side(20) && side(20) > 100, "{} x {}", side(16), side(20));
    let csv = fs::read_to_string(run.join("metrics.csv")).unwrap();
    assert_eq!(csv.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_digit())).count(), 8, "{csv}");
    let events = fs::read_dir(run.join("tensorboard")).unwrap().next().unwrap().unwrap();
    let events = fs::read(events.path()).unwrap();
    for tag in ["loss", "validation_error", "samples_per_second"] {
        assert!(events.windows(tag.len()).any(|part| part == tag.as_bytes()), "no {tag} for TensorBoard");
    }
    assert!(fs::read_to_string(run.join("config.toml")).unwrap().contains("--set"));

    let again = afno(2, folder.path()).arg("--resume=auto").run().unwrap().expect_success();
    assert_eq!(self::results(&again, folder.path()), results);
    assert_eq!(losses(&folder.path().join("run")).len(), 6, "no step was taken twice");
}

/// Error, picture and checkpoint, as printed.
#[track_caller]
fn results(outcome: &Outcome, folder: &Path) -> Vec<String> {
    let lines: Vec<String> = outcome.ranks[0].stdout.lines().skip(1).map(str::to_owned).collect();
    assert!(lines[0].starts_with("validation relative L2 error "), "{outcome}");
    let run = folder.join("run");
    assert_eq!(lines[1], format!("picture     {}", run.join("validation.png").display()));
    assert_eq!(lines[2], format!("checkpoint  {}", run.join("checkpoints/step_00000006").display()));
    lines
}

#[test]
fn a_model_split_over_ranks_trains_as_a_whole_one() {
    let train = |ranks: usize| {
        let folder = tempdir().unwrap();
        let config = "configs/darcy_distributed_afno.toml";
        let launch = small(Launch::plain(ranks, ISOBAR), config, "4", folder.path());
        let mesh = format!("distributed.mesh.shape=[-1, {ranks}]");
        let sets = ["--set", &mesh, "--set", "train.precision=float64"];
        let outcome = launch.args(sets).run().unwrap().expect_success();
        assert!(outcome.ranks[0].stdout.contains("validation relative L2 error"), "{outcome}");
        losses(&folder.path().join("run"))
    };
    let (whole, split) = (train(1), train(2));
    assert_eq!(whole.len(), 6);
    assert_same_run(&split, &whole);
}

#[test]
fn a_checkpoint_that_cannot_be_used_ends_with_3() {
    let folder = tempdir().unwrap();
    let must = || afno(1, folder.path()).arg("--resume=must");
    let refused = |launch: Launch, words: &str| {
        let outcome = launch.run().unwrap();
        assert_eq!(outcome.exit, isobar_harness::Exit::Code(3), "{outcome}");
        assert!(outcome.ranks[0].stderr.contains(words), "{outcome}");
    };
    refused(must(), "no checkpoint in ");
    let _ = afno(1, folder.path()).run().unwrap().expect_success();
    refused(must().args(["--set", "train.batch_size=3"]), "trained with train.batch_size 4, this run has 3");
    refused(must().args(["--set", "model.depth=2"]), "it is of another model");
    for step in fs::read_dir(folder.path().join("run/checkpoints")).unwrap() {
        let file = step.unwrap().path().join("rank_00000.safetensors");
        let bytes = fs::read(&file).unwrap();
        fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    }
    refused(must(), "rank_00000.safetensors is refused: torn: it has ");
}

/// Killed while it writes, a run goes on from the checkpoint before.
#[test]
fn a_write_that_is_killed_leaves_the_checkpoint_before() {
    let folder = tempdir().unwrap();
    let checkpoints = folder.path().join("run/checkpoints");
    let endless = ["train.epochs=100000", "checkpoint.every_steps=1", "model.depth=4", "model.embed_dim=128"];
    let endless = endless.iter().flat_map(|set| ["--set", set]).collect::<Vec<_>>();
    // A folder of a step without a manifest is one that is being written.
    let script = format!(
        r#"
        dir={}
        writing() {{ for step in "$dir"/step_*; do [ -d "$step" ] && [ ! -e "$step/manifest.json" ] && return 0; done; return 1; }}
        whole() {{ for file in "$dir"/step_*/manifest.json; do [ -e "$file" ]; return; done; }}
        for step in "$dir"/step_*; do [ -e "$step/manifest.json" ] || rm -rf "$step"; done
        "$@" & until whole && writing || ! kill -0 $!; do :; done; kill -KILL $!; wait $!; echo code $?"#,
        checkpoints.display()
    );
    for _ in 0..3 {
        let killed = Launch::plain(1, "sh").args(["-c", &script, "sh", ISOBAR]);
        let killed = small(killed, "configs/darcy_afno.toml", "[4, 4]", folder.path()).args(&endless);
        let outcome = killed.arg("--resume=auto").run().unwrap();
        assert!(outcome.ranks[0].stdout.contains("code 137"), "{outcome}");
        let newest = list(&checkpoints).unwrap().remove(0).path;
        let loaded =
            afno(1, folder.path()).args(&endless).args(["--set", "train.max_steps=1", "--resume=must"]);
        let outcome = loaded.run().unwrap().expect_success();
        assert!(outcome.ranks[0].stdout.contains(&newest.display().to_string()), "{outcome}");
    }
}

#[rstest]
#[case(&["--samples", "0"], "at least one sample")]
#[case(&["--size", "1"], "at least 2 x 2 cells")]
fn impossible_data_sets_end_with_2(#[case] args: &[&str], #[case] words: &str) {
    let folder = tempdir().unwrap();
    let output = data(args, &folder.path().join("none.h5"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(words), "{said}");
}

/// The model is AFNO, whose positions are split over the ranks.
#[test]
fn bench_times_a_step_of_a_model_with_split_parameters() {
    let launch = Launch::plain(2, ISOBAR).current_dir(workspace());
    let case = "overhead/step_a_collective";
    let outcome = launch.args(["bench", "--cases", case, "--repeats", "1", "--json"]).run().unwrap();
    let report: Value = serde_json::from_str(&outcome.expect_success().ranks[0].stdout).unwrap();
    assert!(report["cases"][case]["median_s"].as_f64().unwrap() > 0.0, "{report}");
}

/// Attention by tiles of points: the rank of four with the most memory holds about a quarter of what one rank holds in a step.
#[test]
fn four_ranks_take_a_quarter_of_the_memory_for_points() {
    let case = "models/transolver_tiles";
    let peak = |ranks: usize| {
        let launch = Launch::plain(ranks, ISOBAR).current_dir(workspace()).deadline(Duration::from_secs(300));
        let outcome = launch.args(["bench", "--cases", case, "--repeats", "1", "--json"]).run().unwrap();
        let report: Value = serde_json::from_str(&outcome.expect_success().ranks[0].stdout).unwrap();
        report["cases"][case]["peak_bytes"].as_f64().unwrap()
    };
    let (one, four) = (peak(1), peak(4));
    assert!(four <= 0.3 * one, "{four} bytes on each of four ranks, {one} on one");
}

#[test]
fn bench_prints_json_alone() {
    let launch = Launch::plain(2, ISOBAR).current_dir(workspace());
    let cases = "all_gather_v/dim0,indexed_all_to_all_v/fwd_bwd";
    let launch = launch.args(["bench", "--cases", cases, "--repeats", "1", "--json"]);
    let outcome = launch.run().unwrap().expect_success();
    let report: Value = serde_json::from_str(&outcome.ranks[0].stdout).unwrap();
    assert_eq!(outcome.ranks[1].stdout, "");
    assert_eq!(report["world"], 2);
    let names: Vec<&String> = report["cases"].as_object().unwrap().keys().collect();
    assert_eq!(
        names.iter().map(|name| name.as_str()).collect::<Vec<_>>(),
        cases.split(',').collect::<Vec<_>>()
    );
    for case in report["cases"].as_object().unwrap().values() {
        assert!(
            case["median_s"].as_f64().unwrap() > 0.0 && case["memcpy_ratio"].as_f64().unwrap() > 0.0,
            "{report}"
        );
    }
}
