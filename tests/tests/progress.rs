//! Progress of runs of several ranks: lines where there is no terminal, a bar where `isobar launch` has one.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    path::{Path, PathBuf},
    sync::LazyLock,
    time::Duration,
};

use isobar_data::{WellDim, WellMeta, WellWriter};
use isobar_harness::{Exit, Launch, Outcome, workspace};
use isobar_tests::has_mpi;
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");

/// So many pairs of frames that an epoch of one sample a step takes long on any machine.
static LONG: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("long.h5");
    let x = WellDim { name: "x".to_owned(), coordinates: (0..4).map(f64::from).collect(), periodic: true };
    let frames = 20_000;
    let meta = WellMeta {
        name: "long".to_owned(),
        trajectories: 2,
        times: (0..frames).map(f64::from).collect(),
        dims: vec![x],
        fields: vec![("u".to_owned(), 0)],
        ..WellMeta::default()
    };
    let mut writer = WellWriter::create(&path, &meta).unwrap();
    let values = Tensor::arange(i64::from(frames) * 4, (Kind::Float, Device::Cpu)).view([-1, 1, 4]).sin();
    for trajectory in 0..2 {
        writer.write("u", trajectory, 0, &values).unwrap();
    }
    writer.finish().unwrap();
    path
});

/// The words of a training run of two epochs, each of tens of thousands of steps.
fn words(output: &Path, more: &[&str]) -> Vec<String> {
    let data = format!("data.path={}", LONG.display());
    let output = format!("run.output={}", output.display());
    let model = ["model.type=fno", "model.dimension=1", "model.in_channels=1", "model.out_channels=1"];
    let sizes = ["model.latent_channels=2", "model.num_fno_layers=1", "model.num_fno_modes=1"];
    let sets = [
        "data.format=the_well",
        "data.fields=[\"u\"]",
        "data.validation_samples=0",
        "run.name=run",
        "data.augment=none",
    ];
    let rest = ["train.batch_size=2", "train.epochs=2", "metrics.every_steps=0", "distributed.timeout_s=200"];
    let sets = model.iter().chain(&sizes).chain(&sets).chain(&rest).chain(more).copied();
    let sets = sets.chain([&*data, &*output]).flat_map(|set| ["--set", set]);
    ["train", "configs/darcy_fno.toml"].into_iter().chain(sets).map(str::to_owned).collect()
}

/// Runs `command` until its standard error has `pattern`, asks it to end, and returns what it has written.
fn until(pattern: &str, command: &[String]) -> Outcome {
    let folder = tempdir().unwrap();
    let log = folder.path().join("log");
    let script = format!(
        r#"log={}; unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT; "$@" 2> "$log" &
        until grep -qE '{pattern}' "$log" || ! kill -0 $! 2>/dev/null; do sleep 0.2; done
        kill -TERM $!; wait $!; echo code $?; cat "$log" >&2"#,
        log.display()
    );
    let launch = Launch::plain(1, "sh").current_dir(workspace()).deadline(Duration::from_secs(240));
    launch.args(["-c", &script, "sh"]).args(command).env("NO_COLOR", "1").run().unwrap()
}

/// Rank 0's lines of steps.
fn steps(outcome: &Outcome) -> Vec<&str> {
    outcome.ranks[0].stderr.lines().filter(|line| line.contains("  step ")).collect()
}

#[track_caller]
fn has_steps(outcome: &Outcome) {
    let lines = steps(outcome);
    assert!(!lines.is_empty(), "{outcome}");
    for line in lines {
        let (_, line) = line.split_once("epoch ").unwrap();
        let fields: Vec<&str> = line.split("  ").collect();
        assert!(fields[1].starts_with("step ") && fields[1].contains('/'), "{line}");
        for (field, part) in fields[2..].iter().zip(["loss ", "lr ", " samples/s", " left"]) {
            assert!(field.contains(part), "no {part:?} in {line}");
        }
    }
    assert!(!outcome.ranks[0].stderr.contains('\u{1e}'), "{outcome}");
}

/// Without a terminal a long epoch is no silence.
#[test]
fn ranks_without_a_terminal_write_lines() {
    let folder = tempdir().unwrap();
    let train = words(folder.path(), &[]);
    let launched = ["isobar", "launch", "-n", "2", "--", ISOBAR].map(str::to_owned);
    let launched: Vec<String> = launched.into_iter().chain(train.iter().cloned()).skip(1).collect();
    has_steps(&until("  step ", &[&[ISOBAR.to_owned()][..], &launched].concat()));
    if has_mpi() {
        let mpirun =
            ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", ISOBAR].map(str::to_owned);
        let train = words(folder.path().join("mpi").as_path(), &[]);
        has_steps(&until("  step ", &[&mpirun[..], &train].concat()));
    }
}

/// On a terminal `isobar launch` draws the bar, and lines of ranks come out whole above it.
#[test]
fn launch_draws_the_bar_on_its_terminal() {
    let folder = tempdir().unwrap();
    let sets = ["train.max_steps=300"];
    let train = words(folder.path(), &sets);
    let typescript = |options: &[&str], train: &[String]| {
        let words = [ISOBAR, "launch", "-n", "2"].iter().chain(options).map(|word| (*word).to_owned());
        let words = words.chain(["--".to_owned(), ISOBAR.to_owned()]).chain(train.iter().cloned());
        let line = words.map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
        // `script` gives a command a terminal of its own.
        let launch = Launch::plain(1, "script").current_dir(workspace()).deadline(Duration::from_secs(240));
        let launch = launch.args(["-qec", &line, "/dev/null"]).env("NO_COLOR", "1").env("TERM", "xterm");
        let outcome = launch.run().unwrap();
        assert_eq!(outcome.exit, Exit::Code(0), "{outcome}");
        outcome.ranks[0].stdout.replace('\r', "\n")
    };
    let seen = typescript(&[], &train);
    for part in
        ["█", "300/300  epoch ", "  loss ", "  lr ", " samples/s  ", " left", "[rank 0] 300 steps in "]
    {
        assert!(seen.contains(part), "no {part:?} in {seen}");
    }
    assert!(!seen.contains('\u{1e}') && !seen.contains("\"done\""), "{seen}");
    // Records are not for files, nor for those who asked for lines.
    let logs = folder.path().join("logs");
    let _ = typescript(&["--log-dir", logs.to_str().unwrap()], &words(&folder.path().join("b"), &sets));
    let log = std::fs::read_to_string(logs.join("rank_0.err")).unwrap();
    assert!(!log.contains('\u{1e}'), "{log}");
    let lines = words(&folder.path().join("c"), &sets);
    let seen = typescript(&[], &[&lines[..], &["--progress".to_owned(), "lines".to_owned()]].concat());
    assert!(!seen.contains('█') && seen.contains("[rank 0] 300 steps in "), "{seen}");
}

/// A bar where it is asked for, for launchers that pass on what a terminal needs; none where it is not wanted.
#[test]
fn progress_is_as_it_was_asked_for() {
    let folder = tempdir().unwrap();
    let run = |name: &str, how: &str| {
        let sets = ["train.max_steps=40"];
        let launch = Launch::plain(1, ISOBAR).current_dir(workspace()).deadline(Duration::from_secs(240));
        let launch = launch.args(words(&folder.path().join(name), &sets)).args(["--progress", how]);
        launch.run().unwrap().expect_success().ranks[0].stderr.clone()
    };
    let bar = run("bar", "bar");
    assert!(bar.contains("40/40") && bar.contains('█'), "{bar}");
    let off = run("off", "off");
    assert!(!off.contains("  step ") && !off.contains('█'), "{off}");
}
