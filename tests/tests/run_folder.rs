//! The folder of a run belongs to one run: results stay, a second start is refused, names stay inside `run.output`, and a folder
//! that disappears or a disk that is full is said to be so on all ranks.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use isobar_harness::{Exit, Launch, Outcome, workspace};
use isobar_tests::has_mpi;
use isobar_train::checkpoint::list;
use rstest::rstest;
use tempfile::tempdir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");

/// Returns the command line of a run of 6 steps on the excerpt of the data set, in `output`/run.
fn words(output: &Path, sets: &[&str]) -> Vec<String> {
    let folder = format!("run.output={}", output.display());
    let data =
        ["data.path=tests/data/darcy_excerpt.h5", "data.validation_samples=0", "run.name=run", &folder];
    let more = ["train.epochs=3", "train.batch_size=4", "metrics.every_steps=1", "distributed.timeout_s=200"];
    let model = ["model.embed_dim=16", "model.depth=1", "model.num_blocks=2", "model.patch_size=[8, 8]"];
    let sets = data.iter().chain(&more).chain(&model).chain(sets).flat_map(|set| ["--set", set]);
    ["train", "configs/darcy_afno.toml"].into_iter().chain(sets).map(str::to_owned).collect()
}

fn train(launch: Launch, output: &Path, sets: &[&str]) -> Launch {
    launch.current_dir(workspace()).deadline(Duration::from_secs(120)).args(words(output, sets))
}

fn plain(output: &Path, sets: &[&str]) -> Launch {
    train(Launch::plain(1, ISOBAR), output, sets)
}

fn launcher(mpi: bool, program: &str) -> Launch {
    if mpi { Launch::mpirun(2, program) } else { Launch::plain(2, program) }
}

#[track_caller]
fn ends(outcome: &Outcome, code: i32, words: &[&str]) {
    assert_eq!(outcome.exit, Exit::Code(code), "{outcome}");
    for word in words {
        assert!(outcome.ranks.iter().any(|rank| rank.stderr.contains(word)), "no {word:?} in {outcome}");
    }
    assert!(!outcome.ranks.iter().any(|rank| rank.stderr.contains("panicked")), "{outcome}");
}

/// The checkpoints and metrics of a run, as bytes.
fn results(run: &Path) -> Vec<Vec<u8>> {
    let mut files = vec![run.join("metrics.jsonl"), run.join("metrics.csv"), run.join("config.toml")];
    files.extend(list(run).unwrap().into_iter().map(|one| one.path.join("manifest.json")));
    files.iter().map(|file| fs::read(file).unwrap()).collect()
}

fn steps(run: &Path) -> usize {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().filter(|line| line.contains("\"loss\"")).count()
}

#[rstest]
fn a_second_run_needs_a_word(#[values(false, true)] mpi: bool) {
    if mpi && !has_mpi() {
        return;
    }
    let folder = tempdir().unwrap();
    let run = folder.path().join("run");
    let start = |sets: &[&str]| train(launcher(mpi, ISOBAR), folder.path(), sets);
    let _ = start(&[]).run().unwrap().expect_success();
    let before = results(&run);
    // As given by the file, by the command line, and with a mistake besides.
    for launch in [start(&[]), start(&[]).arg("--resume=never"), start(&["model.depth=2"])] {
        let outcome = launch.run().unwrap();
        let words =
            ["holds checkpoints and metrics of an earlier run", "--resume", "run.name", "--overwrite"];
        ends(&outcome, 2, &words);
        assert!(results(&run) == before);
    }
    let _ = start(&["run.name=other"]).run().unwrap().expect_success();
    assert!(results(&run) == before);
    let _ = start(&["train.epochs=4"]).arg("--resume").run().unwrap().expect_success();
    assert_eq!(steps(&run), 8);
    let _ = start(&["train.epochs=1"]).arg("--overwrite").run().unwrap().expect_success();
    assert_eq!(steps(&run), 2);
    assert_eq!(list(&run).unwrap().len(), 1);
    assert!(!run.join("earlier").exists());
}

/// A mistake in the new run costs nothing, whenever it shows.
#[test]
fn an_overwrite_that_comes_to_nothing_leaves_the_results() {
    let folder = tempdir().unwrap();
    let run = folder.path().join("run");
    let _ = plain(folder.path(), &[]).run().unwrap().expect_success();
    let before = results(&run);
    for (mistake, code) in [
        ("data.path=no/such.h5", 3),
        ("model.num_blocks=3", 2),
        ("optimizer.lr=1e300", 1),
        ("train.epochs=x", 2),
    ] {
        let outcome = plain(folder.path(), &[mistake]).arg("--overwrite").run().unwrap();
        ends(&outcome, code, &[]);
        assert!(results(&run) == before, "{mistake}: {outcome}");
    }
    // Killed before its first checkpoint: the results are readable at once, and back after the next start.
    let script = format!(
        r#""$@" & while [ ! -s {0}/metrics.jsonl ] || [ ! -e {0}/earlier ]; do kill -0 $! || exit 1; sleep 0.02; done
        kill -KILL $!; wait $!; echo code $?"#,
        run.display()
    );
    let killed = train(
        Launch::plain(1, "sh").args(["-c", &script, "sh", ISOBAR]),
        folder.path(),
        &["train.epochs=100000"],
    );
    let outcome = killed.args(["--overwrite", "--set", "checkpoint.every_epochs=0"]).run().unwrap();
    assert!(outcome.ranks[0].stdout.contains("code 137"), "{outcome}");
    let newest = list(&run).unwrap().remove(0);
    assert_eq!(newest.found.unwrap().step, 6);
    let outcome = plain(folder.path(), &[]).run().unwrap();
    ends(&outcome, 2, &["--overwrite"]);
    assert!(results(&run) == before);
}

/// A second start while the first trains: at once, on all ranks, with the holder's name.
#[rstest]
fn two_runs_at_once(#[values(false, true)] mpi: bool) {
    if mpi && !has_mpi() {
        return;
    }
    let folder = tempdir().unwrap();
    let run = folder.path().join("run");
    // The first start begins the second, and ends by itself once that has ended.
    let mut second = vec![ISOBAR.to_owned()];
    second.extend(words(folder.path(), &[]));
    let second = second.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ");
    let script = format!(
        r#"rank=${{RANK:-$OMPI_COMM_WORLD_RANK}}
        if [ "$rank" = 0 ]; then
            "$@" & pid=$!
            while [ ! -s {run}/metrics.jsonl ]; do kill -0 $pid || exit 1; sleep 0.05; done
            for variable in $(env | sed -n 's/^\(OMPI[^=]*\|PMIX[^=]*\|ORTE[^=]*\)=.*/\1/p'); do unset $variable; done
            for other in 0 1; do
                (RANK=$other WORLD_SIZE=2 LOCAL_RANK=$other MASTER_ADDR=127.0.0.1 MASTER_PORT={port} {second} --overwrite
                 echo "second $other ended with $?, process $pid") >{folder}/second.$other 2>&1 &
                eval "second_$other=\$!"
            done
            wait $second_0 $second_1
            kill -TERM $pid; wait $pid; echo code $?
        else
            "$@"; echo code $?
        fi"#,
        run = run.display(),
        folder = folder.path().display(),
        port = if mpi { 28917 } else { 28918 },
    );
    let first = launcher(mpi, "sh").args(["-c", &script, "sh", ISOBAR]);
    let outcome = train(first, folder.path(), &["train.epochs=1000000"]).run().unwrap();
    for rank in &outcome.ranks {
        assert!(rank.stdout.contains("code 6\n"), "{outcome}");
    }
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    for rank in 0..2 {
        let said = fs::read_to_string(folder.path().join(format!("second.{rank}"))).unwrap();
        let line = said.lines().last().unwrap();
        let process = line
            .strip_prefix(&format!("second {rank} ended with 2, process "))
            .unwrap_or_else(|| panic!("{said}"));
        if rank == 0 || said.contains("is in use by") {
            let words = format!("is in use by process {process} on host {} since 2", host.trim());
            assert!(said.contains(&words), "no {words:?} in {said}");
        }
    }
    assert_eq!(
        list(&run).unwrap()[0].found.as_ref().unwrap().step as usize,
        steps(&run),
        "the first is whole"
    );
}

#[rstest]
#[case::empty("")]
#[case::above("../x")]
#[case::dots("..")]
#[case::dot(".")]
#[case::absolute("/tmp/x")]
#[case::nested("a/b")]
#[case::newline("a\nb")]
#[case::long(&"x".repeat(256))]
fn a_name_is_no_path(#[case] name: &str) {
    let folder = tempdir().unwrap();
    let output = folder.path().join("runs");
    let name = format!("run.name={}", toml_string(name));
    for command in ["train", "predict"] {
        let launch =
            Launch::plain(1, ISOBAR).current_dir(workspace()).args([command, "configs/darcy_afno.toml"]);
        let launch = launch.args(["--set", &format!("run.output={}", output.display()), "--set", &name]);
        ends(&launch.run().unwrap(), 2, &["run.name", "--set run.name="]);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is written anywhere");
}

fn toml_string(text: &str) -> String {
    format!("\"{}\"", text.replace('\n', "\\n"))
}

/// Its results are lost, so the run must not end with 0.
#[rstest]
fn a_folder_that_is_removed_ends_the_run_with_3(
    #[values(1, 2)] ranks: usize,
    #[values("sync", "async")] mode: &str,
) {
    let folder = tempdir().unwrap();
    let script = format!(
        r#"run={}/run
        if [ "${{RANK:-0}}" = 0 ]; then
            "$@" & while [ ! -s $run/metrics.jsonl ]; do kill -0 $! || exit 1; sleep 0.02; done
            while [ -e $run ]; do rm -rf $run 2>/dev/null; done; wait $!; echo code $?
        else
            "$@"; echo code $?
        fi"#,
        folder.path().display()
    );
    let launch = Launch::plain(ranks, "sh").args(["-c", &script, "sh", ISOBAR]);
    let mode = format!("checkpoint.mode={mode}");
    // So long that the folder is gone before the end.
    let sets = ["train.epochs=200", &mode, "checkpoint.every_epochs=0", "checkpoint.keep_best=0"];
    let outcome = train(launch, folder.path(), &sets).run().unwrap();
    for rank in &outcome.ranks {
        assert!(rank.stdout.contains("code 3\n"), "{outcome}");
    }
    assert!(outcome.ranks[0].stderr.contains("was removed or replaced while the run used it"), "{outcome}");
}

/// A library that has no space left for what is written in a folder, on some ranks, once a file of that name is there.
const FULL_DISK: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
static int full(const char *path) {
    const char *folder = getenv("FULL_FOLDER"), *own = getenv("RANK"), *rank = getenv("FULL_RANK");
    return folder && rank && !strncmp(path, folder, strlen(folder)) && !strcmp(own ? own : "0", rank);
}
ssize_t write(int fd, const void *bytes, size_t count) {
    ssize_t (*next)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) > 0 && full(path)) { errno = ENOSPC; return -1; }
    return next(fd, bytes, count);
}
"#;

/// Disk full: the reason is told on all ranks, long before any deadline, and it is no rank that was lost.
#[rstest]
#[case::alone(1, 0)]
#[case::first_of_two(2, 0)]
#[case::second_of_two(2, 1)]
fn a_full_disk_ends_all_ranks_with_3(
    #[case] ranks: usize,
    #[case] victim: usize,
    #[values("sync", "async")] mode: &str,
) {
    let folder = tempdir().unwrap();
    let [source, library] = ["full.c", "full.so"].map(|name| folder.path().join(name));
    fs::write(&source, FULL_DISK).unwrap();
    let mut compile = Command::new("cc");
    let built = compile.args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap();
    assert!(built.success());
    let run: PathBuf = folder.path().join("run");
    let launch = Launch::plain(ranks, "sh").args(["-c", r#""$@"; echo code $?"#, "sh", ISOBAR]);
    let mode = format!("checkpoint.mode={mode}");
    // Longer than the harness waits: nothing may depend on it.
    let sets = ["checkpoint.every_epochs=1", &mode, "distributed.timeout_s=200"];
    let launch = train(launch, folder.path(), &sets).env("LD_PRELOAD", &library);
    let launch = launch.env("FULL_FOLDER", run.join("checkpoints")).env("FULL_RANK", victim.to_string());
    let outcome = launch.run().unwrap();
    for rank in &outcome.ranks {
        assert!(rank.stdout.contains("code 3\n"), "{outcome}");
        assert!(!rank.stderr.contains("that all ranks share"), "{outcome}");
    }
    let words = format!("rank_{victim:05}");
    let said = |rank: &isobar_harness::RankOutput| {
        rank.stderr.contains("No space left") && rank.stderr.contains(&words)
    };
    assert!(outcome.ranks.iter().any(said), "{outcome}");
}

/// Started again by its launcher, a job that overwrites replaces the earlier run once, and then resumes its own.
#[test]
fn a_job_that_overwrites_is_started_again() {
    let folder = tempdir().unwrap();
    let run = folder.path().join("run");
    let _ = plain(folder.path(), &["run.seed=1"]).run().unwrap().expect_success();
    let start = |script: &str, sets: &[&str]| {
        let mut command =
            vec!["launch", "-n", "2", "--max-restarts", "2", "--", "sh", "-c", script, "sh", ISOBAR];
        let words = words(folder.path(), sets);
        command.extend(words.iter().map(String::as_str));
        command.push("--overwrite");
        let launch = Launch::plain(1, ISOBAR).current_dir(workspace()).deadline(Duration::from_secs(120));
        launch.args(command).run().unwrap().expect_success()
    };
    // Killed before its first checkpoint, and again after it.
    let script = format!(
        r#"waits() {{ while ! {{ $1; }} 2>/dev/null; do kill -0 $pid || exit 1; sleep 0.02; done; }}
        begun() {{ [ -e {0}/earlier ] && [ -s {0}/metrics.jsonl ]; }}
        # The earlier run has six steps.
        saved() {{ [ "$(ls {0}/checkpoints | tail -n 1)" \> step_00000006 ]; }}
        case $ISOBAR_LAUNCH_ATTEMPT in
            1) if [ $RANK = 0 ]; then "$@" --set checkpoint.every_epochs=0 --set checkpoint.keep_best=0 & pid=$!; waits begun; kill -KILL $pid; wait $pid
               else exec "$@" --set checkpoint.every_epochs=0 --set checkpoint.keep_best=0; fi ;;
            2) if [ $RANK = 0 ]; then "$@" & pid=$!; waits saved; kill -KILL $pid; wait $pid; else exec "$@"; fi ;;
            3) exec "$@" --set train.epochs=1 --set train.max_steps=1 ;;
        esac"#,
        run.display()
    );
    let sets = ["run.seed=2", "train.epochs=100000", "checkpoint.every_epochs=1"];
    let outcome = start(&script, &sets);
    let said = &outcome.ranks[0].stderr;
    assert!(said.contains("(restart 2 of 2)") && said.contains("resumed from "), "{outcome}");
    // Another seed would be refused, were the earlier run's checkpoints taken for the job's own.
    assert!(!run.join("earlier").exists() && list(&run).unwrap()[0].found.is_ok(), "{outcome}");
}

/// So is a job that SLURM queues again, with the same command line.
#[test]
fn a_job_that_overwrites_is_queued_again() {
    let folder = tempdir().unwrap();
    let run = folder.path().join("run");
    let _ = plain(folder.path(), &["run.seed=1"]).run().unwrap().expect_success();
    let start = |restarts: &str, steps: &str| {
        let launch = plain(folder.path(), &["run.seed=2", steps]).arg("--overwrite");
        launch
            .env("SLURM_JOB_ID", "4711")
            .env("SLURM_RESTART_COUNT", restarts)
            .run()
            .unwrap()
            .expect_success()
    };
    let _ = start("0", "train.max_steps=2");
    let outcome = start("1", "train.max_steps=4");
    assert!(outcome.ranks[0].stderr.contains("resumed from "), "{outcome}");
    assert_eq!(steps(&run), 4);
    // Another job begins.
    let launch = plain(folder.path(), &["run.seed=3", "train.max_steps=2"]).arg("--overwrite");
    let _ =
        launch.env("SLURM_JOB_ID", "4712").env("SLURM_RESTART_COUNT", "1").run().unwrap().expect_success();
    assert_eq!(steps(&run), 2);
}
