//! Checkpoints of real runs: exact resumption, a writer that is killed at any moment, signals, and `isobar checkpoint`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use isobar_collectives::Group;
use isobar_harness::curve::losses;
use isobar_harness::{
    Exit, Launch, Memo, Slurm, THREADS, curve::assert_same_run, output_within, skip, threads, workspace,
};
use isobar_tests::{full, has_mpi, has_slurm};
use isobar_train::{
    LossScale, Parameter, Parameters,
    checkpoint::{CheckpointSelector, Checkpoints, Contents, Keep, list, read_run_state, verify},
    optim::{Optimizer, Sgd, SgdConfig},
};
use nix::{
    sys::{
        ptrace,
        signal::{Signal, kill},
        wait::{WaitStatus, waitpid},
    },
    unistd::Pid,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");
const SAVER: &str = env!("CARGO_BIN_EXE_saver");

/// A run of 40 steps on the excerpt of the data set.
fn train(launch: Launch, output: &Path, sets: &[&str]) -> Launch {
    let folder = format!("run.output={}", output.display());
    let small =
        ["data.path=tests/data/darcy_excerpt.h5", "data.validation_samples=2", "run.name=run", &folder];
    let more =
        ["train.epochs=20", "train.batch_size=3", "metrics.every_steps=1", "distributed.timeout_s=200"];
    let model = ["model.embed_dim=16", "model.depth=1", "model.num_blocks=2", "model.patch_size=[8, 8]"];
    let sets = small.iter().chain(&more).chain(&model).chain(sets).flat_map(|set| ["--set", set]);
    let launch = launch.current_dir(workspace()).deadline(Duration::from_secs(300));
    launch.args(["train", "configs/darcy_afno.toml"]).args(sets)
}

/// Losses and last loss scale of runs that were not interrupted, by ranks, layout and precision.
static WHOLE: Memo<(Vec<f64>, Option<LossScale>)> = Memo::new();

/// Twenty steps, and twenty more by another start, are forty: to the last bit on the same ranks, in double precision to nine digits
/// on others.
#[rstest]
#[case::one_rank(1, &[], 1, &[])]
#[case::data_parallel(2, &[], 2, &[])]
#[case::domain(2, &["distributed.mesh.names=[\"domain\"]"], 2, &["distributed.mesh.names=[\"domain\"]"])]
#[case::fully_sharded(2, &["distributed.mesh.names=[\"shard\"]"], 2, &["distributed.mesh.names=[\"shard\"]"])]
#[case::from_fully_sharded(3, &["distributed.mesh.names=[\"shard\"]"], 2, &[])]
#[case::fully_sharded_on_more(2, &["distributed.mesh.names=[\"shard\"]"], 3, &["distributed.mesh.names=[\"shard\"]"])]
#[case::domain_on_more(2, &["distributed.mesh.names=[\"domain\"]"], 3, &["distributed.mesh.names=[\"domain\"]"])]
#[case::loss_scale(2, &["distributed.mesh.names=[\"shard\"]", "train.precision=fp16-mixed"], 2, &["distributed.mesh.names=[\"shard\"]", "train.precision=fp16-mixed"])]
#[case::other_number(2, &[], 3, &[])]
#[case::other_layout(2, &["distributed.mesh.names=[\"domain\"]"], 4, &["distributed.mesh.names=[\"data\", \"domain\"]", "distributed.mesh.shape=[2, 2]"])]
fn forty_steps_are_twenty_and_twenty(
    #[case] ranks: usize,
    #[case] layout: &[&str],
    #[case] later: usize,
    #[case] other: &[&str],
    #[values("sync", "async")] mode: &str,
) {
    let mode = format!("checkpoint.mode={mode}");
    let same_ranks = (ranks, layout) == (later, other);
    let precision = if same_ranks { "train.precision=float32" } else { "train.precision=float64" };
    let halves = tempdir().unwrap();
    let run = |ranks: usize, folder: &Path, steps: &str, layout: &[&str], how: &str| {
        let steps = format!("train.max_steps={steps}");
        let sets = [&[steps.as_str(), &mode, precision, "checkpoint.every_steps=7"], layout].concat();
        let launch = train(Launch::plain(ranks, ISOBAR), folder, &sets).arg(how);
        let _ = launch.run().unwrap().expect_success();
    };
    let scale = |folder: &Path| read_run_state(&folder.join("run")).unwrap().loss_scale;
    // Its checkpoints change nothing: one run serves both modes, and all cases that begin alike.
    let name = format!("{ranks} {layout:?} {precision}");
    let uninterrupted = || {
        let folder = tempdir().unwrap();
        run(ranks, folder.path(), "40", layout, "--resume=never");
        (losses(&folder.path().join("run")), scale(folder.path()))
    };
    let (want, want_scale) = WHOLE.with(name, uninterrupted, Clone::clone);
    run(ranks, halves.path(), "20", layout, "--resume=never");
    run(later, halves.path(), "40", other, "--resume=must");
    let got = losses(&halves.path().join("run"));
    assert_eq!((want.len(), got.len()), (40, 40));
    assert_eq!(scale(halves.path()), want_scale);
    match same_ranks {
        true => assert_eq!(got, want),
        false => assert_same_run(&got, &want),
    }
}

/// Outcome of a writer.
#[derive(Debug, PartialEq)]
enum Ended {
    /// It was killed before its so-manieth system call.
    Killed,
    /// It came to its end in so many calls.
    Done(usize),
    /// It may not be traced here.
    Refused,
}

/// Lets the writer save a first checkpoint, and kills it before system call `at` of the second.
fn killed_before(at: usize, folder: &Path) -> Ended {
    let mut child = Command::new(SAVER).arg(folder).env(THREADS, threads()).spawn().unwrap();
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
    // Every test has a deadline: a writer that hangs is killed, and with it the wait below ends.
    let (done, waits) = mpsc::channel::<()>();
    let guard = thread::spawn(move || {
        if waits.recv_timeout(Duration::from_secs(60)) == Err(mpsc::RecvTimeoutError::Timeout) {
            kill(pid, Signal::SIGKILL).unwrap();
        }
    });
    let mut calls = 0;
    let mut inside = false;
    let ended = loop {
        match waitpid(pid, None).unwrap() {
            WaitStatus::Exited(_, 77) => break Ended::Refused,
            WaitStatus::Stopped(_, Signal::SIGSTOP) if calls == 0 => {
                ptrace::setoptions(pid, ptrace::Options::PTRACE_O_TRACESYSGOOD).unwrap();
            }
            // Its second stop: the save is over.
            WaitStatus::Stopped(_, Signal::SIGSTOP) => break Ended::Done(calls),
            WaitStatus::PtraceSyscall(_) => {
                inside = !inside;
                if inside {
                    calls += 1;
                    if calls == at {
                        break Ended::Killed;
                    }
                }
            }
            WaitStatus::Stopped(..) => {}
            other => panic!("{other:?} after {calls} calls"),
        }
        ptrace::syscall(pid, None).unwrap();
    };
    let traced = ended != Ended::Refused;
    if traced {
        kill(pid, Signal::SIGKILL).unwrap();
    }
    let waited = child.wait();
    assert!(waited.is_ok() || !traced, "{waited:?}");
    done.send(()).unwrap();
    guard.join().unwrap();
    ended
}

/// The step of the newest whole checkpoint of the writer, whose values are all that step.
fn step_of(folder: &Path) -> u64 {
    let tensor = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let (weight, bias) = (tensor(&[300, 500]), tensor(&[7]));
    let entries = vec![Parameter::replicated("weight", &weight), Parameter::replicated("bias", &bias)];
    let params = Parameters::new(entries).unwrap();
    let mut sgd = Sgd::new(&params, &SgdConfig { momentum: 0.9, ..Default::default() }).unwrap();
    let mut contents = Contents { params: &params, buffers: &[], optimizer: Some(&mut sgd) };
    let checkpoints = Checkpoints::new(folder, Keep::ALL, &Group::single());
    let loaded = checkpoints.load(&CheckpointSelector::Newest, &mut contents).unwrap();
    verify(&loaded.path).unwrap();
    let step = loaded.state.step;
    let state = sgd.state();
    assert!(state.steps.values().all(|taken| *taken == step));
    for tensor in params.iter().map(|p| &p.tensor).chain(state.tensors.iter().map(|t| &t.tensor)) {
        assert!(bool::try_from(tensor.eq(step as f64).all()).unwrap(), "a value that is not {step}");
    }
    step
}

#[test]
fn a_writer_killed_between_any_two_system_calls_leaves_a_whole_checkpoint() {
    let folder = tempdir().unwrap();
    let calls = match killed_before(usize::MAX, folder.path()) {
        Ended::Done(calls) => calls,
        Ended::Refused => return skip("this machine allows no ptrace"),
        Ended::Killed => unreachable!("it has no so many calls"),
    };
    assert_eq!(step_of(folder.path()), 2);
    assert!(calls > 20, "{calls} calls");
    let points: Vec<usize> = match full() {
        true => (1..=calls).collect(),
        false => (1..=20).map(|point| point * calls / 20).collect(),
    };
    let mut steps = Vec::new();
    for at in points {
        let folder = tempdir().unwrap();
        match killed_before(at, folder.path()) {
            Ended::Killed => steps.push(step_of(folder.path())),
            // The number of calls may vary by a few.
            ended => assert!(at + 10 > calls, "{ended:?} before call {at} of {calls}"),
        }
    }
    assert!(steps.contains(&1) && steps.contains(&2), "{steps:?}");
}

/// A library that ends a rank before a call that changes the second checkpoint's folder, or in the middle of one that writes:
/// `KILL` is the rank and the number of the call, whichever thread makes it. Other ranks say how many there were.
const KILLING_CALLS: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
#define NEXT(name) __typeof__(name) *next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
static atomic_int begun, calls;
static int dies(const char *path) {
    int rank, at;
    const char *folder = getenv("KILL_FOLDER"), *own = getenv("RANK"), *kill = getenv("KILL");
    if (!folder || !own || strncmp(path, folder, strlen(folder))) return 0;
    if (strstr(path, "step_00000002")) begun = 1;
    if (!begun || !kill || sscanf(kill, "%d %d", &rank, &at) != 2) return 0;
    return ++calls == at && rank == atoi(own);
}
static int dies_at(int fd) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return readlink(link, path, sizeof path - 1) > 0 && dies(path);
}
static void ends(int dies) { if (dies) kill(getpid(), SIGKILL); }
__attribute__((destructor)) static void says(void) { if (calls) fprintf(stderr, "calls %d\n", calls); }
ssize_t write(int fd, const void *bytes, size_t count) {
    NEXT(write);
    int half = dies_at(fd);
    if (half) next(fd, bytes, count / 2);
    ends(half);
    return next(fd, bytes, count);
}
int fsync(int fd) { NEXT(fsync); ends(dies_at(fd)); return next(fd); }
int fdatasync(int fd) { NEXT(fdatasync); ends(dies_at(fd)); return next(fd); }
int mkdir(const char *path, mode_t mode) {
    int (*next)(const char *, mode_t) = dlsym(RTLD_NEXT, "mkdir");
    ends(dies(path));
    return next(path, mode);
}
int unlink(const char *path) { NEXT(unlink); ends(dies(path)); return next(path); }
int rename(const char *from, const char *to) { NEXT(rename); ends(dies(to)); return next(from, to); }
int unlinkat(int fd, const char *path, int flags) {
    NEXT(unlinkat);
    ends(path[0] == '/' ? dies(path) : dies_at(fd));
    return next(fd, path, flags);
}
int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    NEXT(open64);
    ends((flags & O_CREAT) && dies(path));
    return next(path, flags, mode);
}
"#;

/// Two ranks write, and one of them is killed in some call: between its file, its note and the manifest, in the midst of each,
/// and while rank 0 removes the checkpoint before.
#[rstest]
fn a_rank_killed_while_two_write_leaves_a_whole_checkpoint(
    #[values(0, 1)] rank: usize,
    #[values("sync", "async")] mode: &str,
) {
    let tools = tempdir().unwrap();
    let [source, library] = ["calls.c", "calls.so"].map(|name| tools.path().join(name));
    fs::write(&source, KILLING_CALLS).unwrap();
    let mut compile = Command::new("cc");
    let built = compile.args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap();
    assert!(built.success());
    let save = |at: usize, folder: &Path| {
        let launch = Launch::plain(2, SAVER).args([&folder.display().to_string(), mode]);
        let launch = launch.env("LD_PRELOAD", &library).env("KILL", format!("{rank} {at}"));
        launch.env("KILL_FOLDER", folder).deadline(Duration::from_secs(180)).run().unwrap()
    };
    let folder = tempdir().unwrap();
    let outcome = save(usize::MAX >> 40, folder.path()).expect_success();
    assert_eq!(step_of(folder.path()), 2);
    let said = outcome.ranks[rank].stderr.lines().find_map(|line| line.strip_prefix("calls "));
    let calls: usize = said.unwrap().parse().unwrap();
    assert!(calls > 5, "{outcome}");
    let points: Vec<usize> = match full() {
        true => (1..=calls).collect(),
        false => (1..=8).map(|point| point * calls / 8).collect(),
    };
    let killed = &|at: usize| {
        let folder = tempdir().unwrap();
        let outcome = save(at, folder.path());
        assert!(!matches!(outcome.exit, Exit::Code(0) | Exit::Deadline), "call {at} of {calls}: {outcome}");
        println!("call {at} of {calls}: {outcome}"); // shown where the test fails
        step_of(folder.path())
    };
    // The ranks that are left do little but wait.
    let several = |points: &[usize]| -> Vec<u64> {
        thread::scope(|scope| {
            let jobs: Vec<_> = points.iter().map(|&at| scope.spawn(move || killed(at))).collect();
            jobs.into_iter().map(|job| job.join().unwrap()).collect()
        })
    };
    let steps: Vec<u64> = points.chunks(4).flat_map(several).collect();
    assert!(steps.contains(&1), "{steps:?}");
    // Only rank 0 acts after the manifest.
    assert!(rank != 0 || steps.contains(&2), "{steps:?}");
}

/// Asks a run for a checkpoint, or to stop, by a signal to one of its ranks once it takes steps.
fn signalled(signal: &str, launch: Launch, output: &Path, sets: &[&str]) -> isobar_harness::Outcome {
    let script = format!(
        r#"metrics={}/run/metrics.jsonl
        if [ "${{RANK:-0}}" = 0 ]; then
            "$@" & while [ ! -s "$metrics" ] && kill -0 $!; do sleep 0.05; done; kill -{signal} $!; wait $!; echo code $?
        else
            "$@"; echo code $?
        fi"#,
        output.display()
    );
    train(launch.args(["-c", &script, "sh", ISOBAR]), output, sets).run().unwrap()
}

/// SIGINT is what Ctrl-C sends.
#[rstest]
fn a_run_that_is_told_to_end_leaves_a_checkpoint_and_ends_with_6(#[values("TERM", "INT")] signal: &str) {
    let folder = tempdir().unwrap();
    // As when all processes of a job are told, and their launcher tells its ranks too.
    let twice = format!("{signal} $!; sleep 0.1; kill -{signal}");
    let outcome = signalled(&twice, Launch::plain(2, "sh"), folder.path(), &["train.epochs=100000"]);
    for rank in &outcome.ranks {
        assert!(rank.stdout.contains("code 6\n"), "{outcome}");
    }
    assert!(outcome.ranks[0].stdout.contains("told to stop; `--resume` goes on"), "{outcome}");
    let words = format!("asked to end (SIG{signal})");
    assert!(outcome.ranks[0].stderr.contains(&words), "{outcome}");
    let steps = losses(&folder.path().join("run")).len();
    let listed = list(&folder.path().join("run")).unwrap();
    assert_eq!(listed[0].found.as_ref().unwrap().step as usize, steps);
    let more = format!("train.max_steps={}", steps + 2);
    let rest = train(Launch::plain(2, ISOBAR), folder.path(), &["train.epochs=100000", &more]);
    let _ = rest.arg("--resume=must").run().unwrap().expect_success();
    assert_eq!(losses(&folder.path().join("run")).len(), steps + 2);
}

/// A run that cannot finish its step ends at the second signal.
#[test]
fn a_second_interrupt_ends_a_run_at_once() {
    let folder = tempdir().unwrap();
    // Rank 1 is stopped, so that rank 0 waits for it.
    let script = format!(
        r#"folder={}; ready() {{ while [ ! -e "$1" ]; do sleep 0.05; done; }}
        if [ "$RANK" = 1 ]; then
            "$@" & ready $folder/run/metrics.jsonl; kill -STOP $!; : >$folder/stopped; ready $folder/ended; kill -KILL $!
        else
            "$@" & ready $folder/stopped; sleep 0.5; kill -INT $!; sleep 2.5; kill -INT $!; wait $!; echo code $?; : >$folder/ended
        fi"#,
        folder.path().display()
    );
    let launch = Launch::plain(2, "sh").args(["-c", &script, "sh", ISOBAR]);
    let sets = ["train.epochs=100000", "distributed.watchdog=false"];
    let outcome = train(launch, folder.path(), &sets).run().unwrap();
    assert!(outcome.ranks[0].stdout.contains("code 130\n"), "{outcome}");
    assert!(outcome.ranks[0].stderr.contains("asked to end once more (SIGINT)"), "{outcome}");
}

/// A scheduler, or Ctrl-C, signals mpirun, which sends SIGTERM to its ranks.
#[rstest]
fn a_job_whose_mpirun_is_told_to_end_leaves_a_checkpoint(#[values("TERM", "INT")] signal: &str) {
    if !has_mpi() {
        return;
    }
    let folder = tempdir().unwrap();
    let script = format!(
        r#"if [ $OMPI_COMM_WORLD_RANK = 0 ]; then
            (while [ ! -s {}/run/metrics.jsonl ]; do sleep 0.05; done; kill -{signal} $PPID) &
        fi
        exec "$@""#,
        folder.path().display()
    );
    let launch = Launch::mpirun(2, "sh").args(["-c", &script, "sh", ISOBAR]);
    let outcome = train(launch, folder.path(), &["train.epochs=100000"]).run().unwrap();
    // mpirun itself ends with a code of its own.
    assert!(!matches!(outcome.exit, Exit::Code(0) | Exit::Deadline), "{outcome}");
    for rank in &outcome.ranks {
        assert!(!rank.stderr.contains("isobar: the job ends"), "{outcome}");
    }
    assert!(outcome.ranks[0].stdout.contains("told to stop; `--resume` goes on"), "{outcome}");
    let listed = list(&folder.path().join("run")).unwrap();
    assert_eq!(listed[0].found.as_ref().unwrap().step as usize, losses(&folder.path().join("run")).len());
}

#[test]
fn a_run_that_gets_sigusr1_leaves_a_checkpoint_and_goes_on() {
    let folder = tempdir().unwrap();
    let sets =
        ["train.max_steps=400", "train.epochs=100000", "checkpoint.every_epochs=0", "checkpoint.keep=0"];
    let last = ["checkpoint.keep_best=0", "train.validate_every=100000"];
    let outcome = signalled("USR1", Launch::plain(2, "sh"), folder.path(), &[&sets[..], &last].concat());
    for rank in &outcome.ranks {
        assert!(rank.stdout.contains("code 0\n"), "{outcome}");
    }
    let listed = list(&folder.path().join("run")).unwrap();
    let steps: Vec<u64> = listed.iter().map(|one| one.found.as_ref().unwrap().step).collect();
    assert!(steps.len() == 2 && steps[0] == 400 && steps[1] < 400, "{steps:?}");
}

/// With `checkpoint.requeue`, a job of SLURM that gets SIGUSR1 asks to be queued again.
#[test]
fn a_job_is_queued_again() {
    let folder = tempdir().unwrap();
    let tools = folder.path().join("tools");
    fs::create_dir(&tools).unwrap();
    // SLURM itself has nothing to do with it: what matters is what it is told, by whom, and when.
    let told = folder.path().join("told");
    let script = format!("#!/bin/sh\necho \"$@\" >> {}\n", told.display());
    let scontrol = tools.join("scontrol");
    fs::write(&scontrol, script).unwrap();
    fs::set_permissions(&scontrol, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap());
    let launch = Launch::plain(2, "env").args([&format!("PATH={path}"), "SLURM_JOB_ID=4711", "sh"]);
    let sets = ["train.epochs=100000", "checkpoint.requeue=true", "checkpoint.resume=auto"];
    let outcome = signalled("USR1", launch, folder.path(), &sets);
    for rank in &outcome.ranks {
        assert!(rank.stdout.contains("code 6\n"), "{outcome}");
    }
    assert_eq!(fs::read_to_string(told).unwrap(), "requeue 4711\n");
    assert!(list(&folder.path().join("run")).unwrap()[0].found.is_ok());
}

/// A SLURM that ends with its test, and its job with it.
struct OwnSlurm(Slurm);

impl Drop for OwnSlurm {
    fn drop(&mut self) {
        let _ = self.0.cancel("job");
        let _ = self.0.stop();
    }
}

/// SLURM itself starts the job again, which goes on, and ends.
#[test]
fn a_job_of_slurm_comes_again() {
    if !has_slurm() {
        return;
    }
    let folder = tempdir().unwrap();
    let slurm = OwnSlurm(Slurm::in_folder(folder.path().join("slurm")).with_credentials_for(10));
    slurm.0.start().unwrap();
    let (script, log) = (folder.path().join("job"), folder.path().join("log"));
    let lines = format!(
        r#"#!/bin/sh
        trap : USR1
        steps=100000; [ -z "$SLURM_RESTART_COUNT" ] || steps=$(($(wc -l <{output}/run/metrics.jsonl) + 5))
        {ISOBAR} train configs/darcy_afno.toml --set data.path=tests/data/darcy_excerpt.h5 \
            --set data.validation_samples=2 --set train.batch_size=3 \
            --set run.output={output} --set run.name=run --set train.epochs=100000 --set train.max_steps=$steps \
            --set metrics.every_steps=1 --set checkpoint.requeue=true --set checkpoint.resume=auto
        echo start "${{SLURM_RESTART_COUNT:-0}}" ended with code $?
        "#,
        output = folder.path().display()
    );
    fs::write(&script, lines).unwrap();
    let said = |command: &mut Command| {
        let output = output_within(command, Duration::from_secs(30)).unwrap().expect("did not end");
        assert!(output.status.success(), "{command:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let mut sbatch = slurm.0.command("sbatch");
    for (name, _) in std::env::vars() {
        if ["ISOBAR_", "OMPI_", "PMIX_", "SBATCH_"].iter().any(|prefix| name.starts_with(prefix)) {
            sbatch.env_remove(name);
        }
    }
    sbatch.args(["--parsable", "--requeue", "--open-mode=append", "--ntasks=1"]).env(THREADS, threads());
    sbatch.arg("--output").arg(&log).arg("--chdir").arg(workspace()).arg(&script);
    let job = said(&mut sbatch);
    let waits = |what: &dyn Fn() -> bool| {
        let end = Instant::now() + Duration::from_secs(90);
        while !what() {
            let text = fs::read_to_string(&log).unwrap_or_default();
            assert!(Instant::now() < end, "job {job}: {text}");
            thread::sleep(Duration::from_millis(50));
        }
    };
    let metrics = folder.path().join("run/metrics.jsonl");
    waits(&|| fs::metadata(&metrics).is_ok_and(|file| file.len() > 0));
    said(slurm.0.command("scancel").args(["--full", "--signal=USR1", &job]));
    waits(&|| fs::read_to_string(&log).is_ok_and(|log| log.contains("start 1 ended with code 0")));
    let listed = list(&folder.path().join("run")).unwrap();
    let newest = listed[0].found.as_ref().unwrap().step as usize;
    assert_eq!(losses(&folder.path().join("run")).len(), newest, "no step twice, and none left out");
}

fn checkpoint(args: &[&str]) -> Output {
    let mut command = Command::new(ISOBAR);
    command.arg("checkpoint").args(args);
    output_within(&mut command, Duration::from_secs(60)).unwrap().expect("did not end")
}

#[track_caller]
fn says(output: &Output, code: i32, words: &[&str]) {
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{said}");
    for word in words {
        assert!(said.contains(word), "no {word:?} in {said}");
    }
}

#[test]
fn the_tools_look_check_cut_and_export() {
    let folder = tempdir().unwrap();
    let run = folder.path().join("run");
    let sets =
        ["train.max_steps=4", "checkpoint.every_steps=2", "checkpoint.keep=0", "train.validate_every=1"];
    let _ = train(Launch::plain(2, ISOBAR), folder.path(), &sets).run().unwrap().expect_success();
    let path = |path: PathBuf| path.to_string_lossy().into_owned();
    let (whole, newest) = (path(run.clone()), path(run.join("checkpoints/step_00000004")));
    says(&checkpoint(&["ls", &whole]), 0, &["validation", "       4  20", "       2  20", " %  whole"]);
    says(&checkpoint(&["verify", &whole]), 0, &["whole", "step_00000002", "step_00000004"]);
    let out = path(folder.path().join("cut"));
    says(&checkpoint(&["reshard", &newest, &out, "--ranks", "3"]), 0, &["cut"]);
    assert_eq!(fs::read_dir(&out).unwrap().count(), 4, "three files and the manifest");
    says(&checkpoint(&["verify", &out]), 0, &["whole"]);
    says(&checkpoint(&["reshard", &newest, &out, "--ranks", "3"]), 2, &["not empty"]);
    says(&checkpoint(&["reshard", &newest, &out, "--ranks", "0"]), 2, &["--ranks"]);

    // All ways give the same weights.
    let [direct, by_way] =
        ["a", "b"].map(|name| path(folder.path().join(name).with_extension("safetensors")));
    says(&checkpoint(&["export", &newest, &direct]), 0, &["tensors"]);
    says(&checkpoint(&["export", &out, &by_way]), 0, &["tensors"]);
    assert!(fs::read(&direct).unwrap() == fs::read(&by_way).unwrap());
    let init = format!("checkpoint.init={direct}");
    let other = tempdir().unwrap();
    let launch = train(Launch::plain(1, ISOBAR), other.path(), &["train.max_steps=0", &init]);
    let outcome = launch.run().unwrap().expect_success();
    let error = |text: &str| text.lines().find(|line| line.contains("relative L2")).unwrap().to_owned();
    let again = train(Launch::plain(1, ISOBAR), folder.path(), &sets).arg("--resume=must");
    let again = again.run().unwrap().expect_success();
    assert_eq!(error(&outcome.ranks[0].stdout), error(&again.ranks[0].stdout));

    let file = PathBuf::from(&newest).join("rank_00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&file, &bytes).unwrap();
    says(
        &checkpoint(&["verify", &whole]),
        3,
        &["not whole", "rank_00001.safetensors", "damaged", "whole       "],
    );
    says(&checkpoint(&["export", &newest, &direct]), 3, &["damaged"]);
    fs::remove_file(&file).unwrap();
    says(&checkpoint(&["ls", &whole]), 0, &["not usable", "is not there"]);
    says(
        &checkpoint(&["ls", &path(folder.path().join("none"))]),
        3,
        &["none does not exist; expected a checkpoint's"],
    );

    // And the run goes on from the one before.
    let rest = train(Launch::plain(1, ISOBAR), folder.path(), &sets).arg("--resume=must");
    let outcome = rest.run().unwrap().expect_success();
    assert_eq!(outcome.exit, Exit::Code(0));
    assert_eq!(losses(&folder.path().join("run")).len(), 4);
    says(&checkpoint(&["verify", &whole]), 0, &["whole"]);
}

/// Weights saved by PhysicsNeMo's models are loaded by name, on any number of ranks, and exported bitwise unchanged.
#[rstest]
#[case::afno("afno", &["model.embed_dim=16", "model.depth=1", "model.num_blocks=2", "model.patch_size=[8, 8]"])]
#[case::fno("fno", &["model.latent_channels=8", "model.num_fno_layers=2", "model.num_fno_modes=4"])]
fn weights_of_pytorch_come_and_go(
    #[case] model: &str,
    #[case] sizes: &[&str],
    #[values("data", "domain", "shard")] axis: &str,
) {
    let file = workspace().join(format!("tests/data/{model}_of_pytorch.safetensors"));
    let folder = tempdir().unwrap();
    let mesh = format!("distributed.mesh.names=[\"{axis}\"]");
    let [init, output] = [("checkpoint.init", &file), ("run.output", &folder.path().to_owned())]
        .map(|(key, path)| format!("{key}={}", path.display()));
    let data = ["data.path=tests/data/darcy_excerpt.h5", "data.validation_samples=2", "train.batch_size=3"];
    let run = ["run.name=run", "train.max_steps=0", &init, &output, &mesh];
    let sets = data.iter().chain(&run).chain(sizes).flat_map(|set| ["--set", set]);
    let launch = Launch::plain(2, ISOBAR).current_dir(workspace()).arg("train");
    let _ = launch.arg(format!("configs/darcy_{model}.toml")).args(sets).run().unwrap().expect_success();
    let out = folder.path().join("out.safetensors");
    let [run, path] = [&folder.path().join("run"), &out].map(|path| path.display().to_string());
    says(&checkpoint(&["export", &run, &path]), 0, &["16 tensors"]);
    let [mut came, mut goes] = [&file, &out].map(|path| Tensor::read_safetensors(path).unwrap());
    came.sort_by(|(a, _), (b, _)| a.cmp(b));
    goes.sort_by(|(a, _), (b, _)| a.cmp(b));
    assert_eq!(came, goes);
}
