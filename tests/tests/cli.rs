//! Output and exit codes of `isobar`: help, errors.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    process::{Command, Output},
    time::Duration,
};

use isobar_harness::{output_within, workspace};

/// `isobar` in the root of the workspace.
fn isobar(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_isobar-app"));
    command.current_dir(workspace()).args(args).env("NO_COLOR", "1").env_remove("RUST_LOG");
    // Keys of the configuration, if the caller has any.
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("ISOBAR_")) {
        command.env_remove(name);
    }
    output_within(&mut command, Duration::from_secs(300)).unwrap().expect("did not end")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn ends(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{}\n{}", stdout(output), stderr(output));
    assert!(!stderr(output).contains("panicked"), "{}", stderr(output));
}

#[test]
fn version() {
    let output = isobar(&["--version"]);
    ends(&output, 0);
    assert_eq!(stdout(&output), format!("isobar {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn usage_errors_end_with_2() {
    for args in
        [&["no-such-command"][..], &[], &["train"], &["train", "a.toml", "--no-such-option"], &["verify"]]
    {
        ends(&isobar(args), 2);
    }
}

#[test]
fn configuration_errors_end_with_2() {
    let missing = isobar(&["train", "no/such.toml"]);
    ends(&missing, 2);
    assert!(stderr(&missing).contains("no/such.toml"), "{}", stderr(&missing));

    let unknown = isobar(&["train", "configs/darcy_afno.toml", "--set", "train.epoch=3"]);
    ends(&unknown, 2);
    assert!(stderr(&unknown).contains("epochs"), "names the nearest key: {}", stderr(&unknown));

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.toml");
    fs::write(&file, "[train]\nepochs = \"many\"\n").unwrap();
    let wrong = isobar(&["config", "show", &file.to_string_lossy()]);
    ends(&wrong, 2);
    let said = stderr(&wrong);
    assert!(said.contains("run.toml") && said.contains('2') && said.contains('^'), "{said}");
}

/// Output that is lost is no success: on a full disk, and beyond the limit of file sizes.
#[test]
fn files_that_cannot_be_written_end_with_3() {
    let folder = tempfile::tempdir().unwrap();
    let shell = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", env!("CARGO_BIN_EXE_isobar-app")]);
        command.arg(folder.path().join("made.h5")).env("NO_COLOR", "1").env_remove("RUST_LOG");
        output_within(&mut command, Duration::from_secs(300)).unwrap().expect("did not end")
    };
    let output = shell("\"$1\" config reference > /dev/full");
    ends(&output, 3);
    assert!(stderr(&output).contains("standard output is incomplete: No space left"), "{}", stderr(&output));
    let output = shell("ulimit -f 8; \"$1\" data make burgers --out \"$2\" --set samples=2 --set frames=40");
    ends(&output, 3);
    let said = stderr(&output);
    assert!(said.contains("made.h5") && said.contains("File too large"), "{said}");
    assert!(!said.contains("errno"), "the text of the HDF5 library: {said}");
    // Nobody reads on.
    let output = shell("{ \"$1\" config reference; echo code $? >&2; } | head -1");
    assert!(stderr(&output).contains("code 0"), "{}", stderr(&output));
}

/// Keys that are given as options, or with one underscore, are answered with how they are set.
#[test]
fn keys_in_other_clothes_are_recognised() {
    let config = "configs/darcy_afno.toml";
    for (option, tip) in [
        (&["--epochs", "3"][..], "--set train.epochs=3"),
        (&["--epochs=3"], "--set train.epochs=3"),
        (&["--batch-size", "8"], "--set train.batch_size=8"),
        (&["--optimizer.lr"], "--set optimizer.lr=VALUE"),
    ] {
        let output = isobar(&[&["train", config], option].concat());
        ends(&output, 2);
        let said = stderr(&output);
        assert!(said.contains(tip) && !said.contains("-- --"), "no {tip} in {said}");
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_isobar-app"));
    command.current_dir(workspace()).args(["config", "show", config]).env("ISOBAR_TRAIN_EPOCHS", "3");
    let output = output_within(&mut command, Duration::from_secs(120)).unwrap().expect("did not end");
    ends(&output, 2);
    assert!(stderr(&output).contains("did you mean ISOBAR_TRAIN__EPOCHS?"), "{}", stderr(&output));
}

/// Commands take the folder of a run, wherever it lies, and say what a folder lacks in their own words.
#[test]
fn commands_take_the_folder_of_a_run() {
    let runs = tempfile::tempdir().unwrap();
    let run = runs.path().join("first");
    fs::create_dir(&run).unwrap();
    fs::write(
        run.join("config.toml"),
        "[run]\nname = \"elsewhere\"\nseed = 7\n[data]\npath = \"tests/data/darcy_excerpt.h5\"\n",
    )
    .unwrap();
    let (runs, run) = (runs.path().to_string_lossy().into_owned(), run.to_string_lossy().into_owned());

    let shown = isobar(&["config", "show", &run]);
    ends(&shown, 0);
    let said = stdout(&shown);
    assert!(said.contains("seed = 7") && said.contains("name = \"first\""), "{said}");
    let named = stdout(&isobar(&["config", "show", &run, "--set", "run.name=second"]));
    assert!(named.contains("name = \"second\""), "{named}");

    let refused = |args: &[&str], code: i32, words: &[&str]| {
        let output = isobar(args);
        ends(&output, code);
        let said = stderr(&output);
        words.iter().for_each(|word| assert!(said.contains(word), "no {word:?} in {said}"));
    };
    refused(&["config", "show", &runs], 2, &["is a folder without a config.toml", "such as", "first"]);
    refused(&["predict", &run], 3, &["no checkpoint in ", &run]);
    refused(
        &["checkpoint", "ls", &runs],
        3,
        &["holds runs, not checkpoints; give the folder of one: ", &run],
    );
    refused(&["checkpoint", "ls", &run], 3, &["has left no checkpoint so far"]);
    refused(&["checkpoint", "export", &runs, "out.safetensors"], 3, &["holds runs, not checkpoints"]);
    // What is left of a file that was being written is no record.
    fs::write(format!("{run}/flight_rank_00000.json.partial"), "").unwrap();
    for folder in [run.clone(), format!("{run}/flight")] {
        let why = isobar(&["trace", "why", &folder]);
        ends(&why, 0);
        assert_eq!(stdout(&why), "no rank was lost in this run: it has left no records\n");
    }
    refused(&["trace", "why", &format!("{runs}/none")], 3, &["none"]);
    let trace = format!("{runs}/trace.json");
    refused(&["trace", "export", &run, &trace], 3, &["no rank was lost in this run", &run]);
    refused(&["trace", "export", &runs, &trace], 3, &["holds no flight record"]);
    assert!(!std::path::Path::new(&trace).exists());
}

#[test]
fn data_errors_end_with_3() {
    let file = tempfile::Builder::new().suffix(".h5").tempfile().unwrap();
    fs::write(file.path(), "not HDF5").unwrap();
    for path in [file.path().to_string_lossy().into_owned(), "no/such.h5".to_owned()] {
        let folder = tempfile::tempdir().unwrap();
        let output = isobar(&[
            "train",
            "configs/darcy_afno.toml",
            "--set",
            &format!("data.path={path}"),
            "--set",
            &format!("run.output={}", folder.path().display()),
        ]);
        ends(&output, 3);
        assert!(stderr(&output).contains(&path), "{}", stderr(&output));
    }
}

#[test]
fn reference_is_the_file() {
    let output = isobar(&["config", "reference"]);
    ends(&output, 0);
    assert_eq!(stdout(&output), fs::read_to_string(workspace().join("configs/reference.toml")).unwrap());
}

#[test]
fn origins_are_shown() {
    let output = isobar(&["config", "show", "configs/darcy_afno.toml", "--set", "train.epochs=3"]);
    ends(&output, 0);
    let said = stdout(&output);
    let line = |key: &str| {
        said.lines().find(|line| line.trim_start().starts_with(key)).unwrap_or_default().to_owned()
    };
    assert!(line("epochs = 3").contains("--set"), "{said}");
    assert!(line("batch_size").contains("darcy_afno.toml"), "{said}");
}

#[test]
fn documentation_names_every_command() {
    let page = |name: &str| fs::read_to_string(workspace().join(name)).unwrap();
    let help = stdout(&isobar(&["--help"]));
    let commands =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let commands: Vec<_> = commands.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.contains(&"train"), "{help}");
    let documented = [
        "README.md",
        "docs/getting-started.md",
        "docs/configuration.md",
        "docs/launching.md",
        "docs/training.md",
    ];
    let text: String = documented.map(page).concat();
    for command in commands.iter().filter(|command| **command != "help") {
        assert!(text.contains(&format!("isobar {command}")), "no page names `isobar {command}`");
    }
}

/// The page shows what the command prints.
#[test]
fn the_plan_of_the_docs() {
    let page = fs::read_to_string(workspace().join("docs/training.md")).unwrap();
    let (_, shown) = page.split_once("$ isobar plan ").unwrap();
    let (line, shown) = shown.split_once('\n').unwrap();
    let (want, _) = shown.split_once("\n```").unwrap();
    let line = line.replace('\'', "");
    let args: Vec<&str> = std::iter::once("plan").chain(line.split(' ')).collect();
    let output = isobar(&args);
    ends(&output, 0);
    assert_eq!(stdout(&output).trim_end(), want);
}

/// A step without values takes the memory of one with values. Not for models with many convolutions, whose workspaces depend on the
/// processor.
#[test]
fn planned_memory_is_that_of_a_computed_step() {
    for config in ["shallow_water_pangu", "darcy_transolver", "darcy_fno"] {
        let peak = |more: &[&str]| {
            let file = format!("configs/{config}.toml");
            let output = isobar(&[&["plan", &file, "--json", "--set", "train.batch_size=2"], more].concat());
            ends(&output, 0);
            let ranks: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            ranks[0]["peak"].as_f64().unwrap()
        };
        let ratio = peak(&[]) / peak(&["--compute"]);
        assert!((0.9..1.1).contains(&ratio), "{config}: {ratio}");
    }
}

#[test]
fn plans_that_do_not_fit() {
    let args = ["plan", "configs/darcy_fno.toml", "--memory"];
    ends(&isobar(&[&args[..], &["1GiB"]].concat()), 0);
    let output = isobar(&[&args[..], &["16MiB"]].concat());
    ends(&output, 1);
    assert!(
        stderr(&output).contains("more than the 16MiB of --memory; use more ranks"),
        "{}",
        stderr(&output)
    );
    ends(&isobar(&[&args[..], &["much"]].concat()), 2);
}
