//! The command where a FIFO or a device stands in the place of a file: an error that names it, never a wait, and never a file
//! in its stead.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    os::unix::fs::{FileTypeExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Output},
    time::Duration,
};

use isobar_harness::{output_within, workspace};
use nix::sys::stat::Mode;
use rstest::rstest;
use serde_json::json;
use tempfile::tempdir;

/// `isobar` in the root of the workspace; a wait for a FIFO would last until the deadline.
fn isobar(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_isobar-app"));
    command.current_dir(workspace()).args(args).env("NO_COLOR", "1");
    output_within(&mut command, Duration::from_secs(240)).unwrap().expect("did not end")
}

#[track_caller]
fn ends(output: &Output, code: i32, words: &[&str]) {
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert_eq!(output.status.code(), Some(code), "{said}");
    for words in words {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
    assert!(!said.contains("panicked"), "{said}");
}

fn fifo(path: &Path) {
    nix::unistd::mkfifo(path, Mode::from_bits_truncate(0o600)).unwrap();
}

fn device(path: &Path) {
    symlink("/dev/zero", path).unwrap();
}

/// Settings of a small run into a folder.
fn settings(folder: &Path) -> Vec<String> {
    let settings = [
        &format!("run.output={}", folder.display()),
        "run.name=run",
        "data.path=tests/data/darcy_excerpt.h5",
        "data.validation_samples=2",
        "train.batch_size=3",
        "train.epochs=2",
        "model.embed_dim=16",
        "model.depth=1",
        "model.num_blocks=2",
        "model.patch_size=[8, 8]",
    ];
    settings.iter().flat_map(|set| ["--set".to_owned(), (*set).to_owned()]).collect()
}

fn run(folder: &Path, command: &str, more: &[&str]) -> Output {
    let settings = settings(folder);
    let mut args = vec![command, "configs/darcy_afno.toml"];
    args.extend(settings.iter().map(String::as_str));
    args.extend(more);
    isobar(&args)
}

#[rstest]
#[case::fifo(fifo, "a FIFO")]
#[case::device(device, "a device")]
fn special_files_are_not_read(#[case] make: fn(&Path), #[case] kind: &str) {
    let folder = tempdir().unwrap();
    let special = folder.path().join("special.h5");
    make(&special);
    let path = special.display().to_string();
    let words = format!("it is {kind}, expected a regular file");

    ends(&isobar(&["config", "show", &path]), 2, &[&path, &words]);
    let including = folder.path().join("run.toml");
    fs::write(&including, "include = [\"special.h5\"]\n").unwrap();
    ends(&isobar(&["config", "show", &including.to_string_lossy()]), 2, &["special.h5", &words]);
    ends(&isobar(&["launch", "--hostfile", &path, "--", "true"]), 2, &[&path, &words]);
    ends(&isobar(&["verify", &path]), 3, &[&path, &words]);
    ends(&run(folder.path(), "train", &["--set", &format!("data.path={path}")]), 3, &[&path, &words]);
    let init = format!("checkpoint.init={path}");
    ends(&run(folder.path(), "train", &["--set", &init]), 3, &[&path]);
    ends(&run(folder.path(), "predict", &["--checkpoint", &path]), 3, &[&path]);

    let records = folder.path().join("records");
    fs::create_dir(&records).unwrap();
    make(&records.join("flight_rank_00000.json"));
    ends(&isobar(&["trace", "why", &records.to_string_lossy()]), 3, &["flight_rank_00000.json", &words]);
}

/// A run with one checkpoint.
fn trained(folder: &Path) -> PathBuf {
    ends(&run(folder, "train", &[]), 0, &[]);
    folder.join("run/checkpoints/step_00000004")
}

#[test]
fn special_files_are_not_replaced() {
    let folder = tempdir().unwrap();
    let checkpoint = trained(folder.path());
    let checkpoint = checkpoint.to_string_lossy();
    let special = folder.path().join("out.h5");
    fifo(&special);
    let out = special.to_string_lossy();
    let words = "it is a FIFO, expected a regular file";
    ends(&isobar(&["checkpoint", "export", &checkpoint, &out]), 3, &[words]);
    ends(&run(folder.path(), "predict", &["--out", &out]), 3, &[words]);
    ends(&isobar(&["data", "darcy", "--samples", "2", "--size", "8", "--out", &out]), 3, &[words]);
    let case = "tests/golden/gather_v_w2.safetensors";
    ends(&isobar(&["verify", case, "--ranks", "2", "--json", &out]), 1, &[words]);
    assert!(fs::symlink_metadata(&special).unwrap().file_type().is_fifo());
}

/// Writes a manifest anew with other counts and a digest that is right.
fn with_counts(manifest: &Path, change: &[(&str, u64)]) {
    let mut value: serde_json::Value = serde_json::from_slice(&fs::read(manifest).unwrap()).unwrap();
    for (key, count) in change {
        value["state"][key] = json!(count);
    }
    value["blake3"] = json!("0".repeat(64));
    let zeros = serde_json::to_string(&value).unwrap();
    let digest = blake3::hash(zeros.as_bytes()).to_hex();
    fs::write(manifest, zeros.replacen(&"0".repeat(64), digest.as_str(), 1)).unwrap();
}

#[rstest]
#[case::batch("batch", u64::MAX, "but an epoch has 2 batches")]
#[case::epoch("epoch", 1 << 40, "with 2 batches an epoch")]
#[case::losses("loss_samples", 5, "losses of 5 samples, but 0 samples")]
fn counts_that_no_run_has_are_refused(#[case] key: &str, #[case] count: u64, #[case] words: &str) {
    let folder = tempdir().unwrap();
    let checkpoint = trained(folder.path());
    with_counts(&checkpoint.join("manifest.json"), &[(key, count)]);
    let output = run(folder.path(), "train", &["--resume=must", "--set", "train.epochs=9"]);
    ends(&output, 3, &["it contradicts itself", words]);
}

/// Text of a record is shown, but moves no cursor and rings no bell.
#[test]
fn records_leave_the_terminal_alone() {
    let folder = tempdir().unwrap();
    let evil = "all_reduce\u{1b}[2J\u{7}\u{202e}\n  forged";
    let entry = json!({
        "number": 1, "operation": evil, "group": evil, "context": 0, "sequence": 1, "shape": [], "state": "waiting",
        "phase": "forward", "step": 1, "begin_ns": 1, "stack": [evil], "module": evil,
    });
    let record = json!({
        "version": 1, "job": evil, "rank": 0, "ranks": 2, "host": evil, "pid": 7, "phase": "forward", "step": 1,
        "reason": evil, "time_ns": 5, "peers": [], "entries": [entry],
        "groups": [{ "context": 0, "name": evil, "ranks": [0, 1], "begun": 1 }],
    });
    fs::write(folder.path().join("flight_rank_00000.json"), record.to_string()).unwrap();
    let unreadable = folder.path().join("flight_rank_\u{1b}[31m.json");
    fs::write(unreadable, "\u{1b}]0;title\u{7}").unwrap();
    let output = isobar(&["trace", "why", &folder.path().to_string_lossy()]);
    ends(&output, 0, &["all_reduce"]);
    let said = String::from_utf8([&output.stdout[..], &output.stderr].concat()).unwrap();
    let acts = |letter: char| (letter.is_control() && letter != '\n') || letter == '\u{202e}';
    assert!(!said.contains(acts), "{said:?}");
    assert!(!said.lines().any(|line| line.trim() == "forged"), "{said}");
}
