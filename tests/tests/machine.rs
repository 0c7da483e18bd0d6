//! Runs on machines that misbehave: memory is used up, disks are full or become read-only, clocks jump.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use isobar_harness::{
    Exit, Launch, Mounts, Outcome,
    curve::{losses, metric},
    skip, workspace,
};
use isobar_tests::has_mpi;
use isobar_train::checkpoint::{list, verify};
use rstest::rstest;
use tempfile::tempdir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");
const FAULTY: &str = env!("CARGO_BIN_EXE_faulty");

/// Time after which a run counts as hanging.
const LONGEST: Duration = Duration::from_secs(200);

/// Settings of a run of two steps an epoch on the excerpt of the data set, in `output`/run. Its deadline is one that no run
/// reaches: whatever happens is noticed by other means.
fn settings(output: &Path, sets: &[&str]) -> Vec<String> {
    let folder = format!("run.output={}", output.display());
    let data =
        ["data.path=tests/data/darcy_excerpt.h5", "data.validation_samples=0", "run.name=run", &folder];
    let more =
        ["train.epochs=100000", "train.batch_size=4", "metrics.every_steps=1", "distributed.timeout_s=1000"];
    let model = ["model.embed_dim=16", "model.depth=1", "model.num_blocks=2", "model.patch_size=[8, 8]"];
    let sets = data.iter().chain(&more).chain(&model).chain(sets).flat_map(|set| ["--set", set]);
    ["train", "configs/darcy_afno.toml"].into_iter().chain(sets).map(str::to_owned).collect()
}

#[track_caller]
fn contains(outcome: &Outcome, rank: usize, words: &[&str]) {
    let said = &outcome.ranks[rank];
    for word in words {
        assert!(said.stderr.contains(word) || said.stdout.contains(word), "no {word:?} in {outcome}");
    }
    assert!(!said.stderr.contains("panicked at"), "{outcome}");
}

#[track_caller]
fn each_ends_with(outcome: &Outcome, code: i32) {
    assert_ne!(outcome.exit, Exit::Deadline, "{outcome}");
    for rank in 0..outcome.ranks.len() {
        contains(outcome, rank, &[&format!("code {code}\n")]);
    }
}

/// A control group whose memory is limited; it is removed when this is dropped.
struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// Makes one; notes the calling test as skipped where there can be none.
    fn new(bytes: u64) -> Option<Self> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("isobar-test-{}-{number}", std::process::id());
        // Version 1, then 2.
        for (root, limits) in [
            ("/sys/fs/cgroup/memory", ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]),
            ("/sys/fs/cgroup", ["memory.max", "memory.swap.max"]),
        ] {
            let group = Path::new(root).join(&name);
            if !Path::new(root).join("cgroup.procs").exists() || fs::create_dir(&group).is_err() {
                continue;
            }
            let group = Self(group);
            let most = [bytes, if limits[0] == "memory.max" { 0 } else { bytes }];
            let limit = |at: usize| fs::write(group.0.join(limits[at]), most[at].to_string());
            // Machines without swap may lack the second.
            if limit(0).is_ok() {
                let _ = limit(1);
                return Some(group);
            }
        }
        skip("no control group with a memory limit can be made");
        None
    }

    /// A line for a shell that puts the shell into the group.
    fn join(&self) -> String {
        format!("echo $$ >{}", self.0.join("cgroup.procs").display())
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // Killed processes may take a moment to leave it.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// More than two ranks need, and less than the failing rank takes.
const MEMORY: u64 = 448 << 20;

/// The kernel kills a rank whose control group has no memory left: the other is told which it was.
#[rstest]
fn survivors_name_a_rank_that_ran_out_of_memory(
    #[values(false, true)] mpi: bool,
    #[values("1", "[01]")] limited: &str,
) {
    if mpi && !has_mpi() {
        return;
    }
    let Some(group) = MemoryGroup::new(MEMORY) else { return };
    let output = tempdir().unwrap();
    let script = format!(
        r#"case ${{RANK:-$OMPI_COMM_WORLD_RANK}} in {limited}) {};; esac || exit 99; "$@"; echo code $?"#,
        group.join()
    );
    let launch = if mpi { Launch::mpirun(2, "sh") } else { Launch::plain(2, "sh") };
    let outcome = launch
        .current_dir(workspace())
        .deadline(LONGEST)
        .env("FAULT", format!("1 forward 3 eat {}", output.path().join("mark").display()))
        .args(["-c", &script, "sh", FAULTY])
        .args(settings(output.path(), &["checkpoint.every_steps=2"]))
        .run()
        .unwrap();
    assert_ne!(outcome.exit, Exit::Deadline, "{outcome}");
    contains(&outcome, 1, &["code 137\n"]);
    contains(
        &outcome,
        0,
        &["code 4\n", "isobar: the job ends", "rank 1 (", "was lost: its connection closed"],
    );
    verify(&list(&output.path().join("run")).unwrap()[0].path).unwrap();
}

/// The launcher also says who killed it, and what to do. A new start resumes.
#[rstest]
#[case::one_rank(false, "(this machine counts a new kill)")]
#[case::all(true, "the memory limit of control group ")]
fn the_launcher_names_the_out_of_memory_killer(#[case] all: bool, #[case] evidence: &str) {
    let Some(group) = MemoryGroup::new(MEMORY) else { return };
    let output = tempdir().unwrap();
    let join = group.join();
    let [around, inside] = if all { [join.as_str(), "true"] } else { ["true", join.as_str()] };
    let rank = format!(r#"[ $RANK = 0 ] || {inside} || exit 99; exec "$@""#);
    let script = format!(r#"{around} || exit 99; "$@"; echo code $?"#);
    let outcome = Launch::plain(1, "sh")
        .current_dir(workspace())
        .deadline(LONGEST)
        .env("FAULT", format!("1 forward 3 eat {}", output.path().join("mark").display()))
        .args(["-c", &script, "sh", ISOBAR, "launch", "-n", "2", "--", "sh", "-c", &rank, "sh", FAULTY])
        .args(settings(output.path(), &["checkpoint.every_steps=2"]))
        .run()
        .unwrap();
    let killed = "killed by signal 9 (SIGKILL), by the kernel's out-of-memory killer";
    contains(&outcome, 0, &["code 137\n", "isobar launch: rank 1 (", killed, evidence]);
    contains(&outcome, 0, &["raise the memory limit of the job or container", "train.batch_size"]);
    contains(&outcome, 0, &["ended with code 4 (a rank was lost or timed out)"]);
}

/// File systems of a namespace of their own; notes the calling test as skipped where there can be none.
fn mounts(script: &str) -> Option<Mounts> {
    Mounts::new(script).inspect_err(|reason| skip(&format!("no mount namespace: {reason:#}"))).ok()
}

/// Ranks in a mount namespace, each behind `script`, which sees the program and its arguments as `"$@"`, the folder of the run
/// as `$run` and the rank as `$rank`.
fn train_in(mounts: &Mounts, launch: impl Fn(&str) -> Launch, script: &str, sets: &[&str]) -> Launch {
    let run = mounts.folder().join("run");
    let script = format!(
        "rank=${{RANK:-${{OMPI_COMM_WORLD_RANK:-0}}}}; run={}; {script}; echo code $?",
        run.display()
    );
    let words = mounts.words(&workspace());
    let launch = launch(&words[0]).deadline(LONGEST).args(&words[1..]);
    launch.args(["sh", "-c", &script, "sh", ISOBAR]).args(settings(&mounts.folder(), sets))
}

/// A shell waits until the run in the background, `$!`, has so many checkpoints.
fn until_saved(count: usize) -> String {
    format!(
        "pid=$!; while [ $(ls $run/checkpoints/*/manifest.json 2>/dev/null | wc -l) -lt {count} ]; do kill -0 $pid || exit 98; sleep 0.05; done"
    )
}

/// An ext4 that stops writing after an error, as after one of the disk.
const EXT4: &str = "truncate -s 64M \"$2/image\" && mkfs.ext4 -q -F \"$2/image\" &&
    mount -o loop,errors=remount-ro \"$2/image\" \"$1\" && [ -e /sys/fs/ext4/$(basename $(findmnt -n -o SOURCE \"$1\"))/trigger_fs_error ]";
const EXT4_STOPS: &str = "echo 1 >/sys/fs/ext4/$(basename $(findmnt -n -o SOURCE $run/..))/trigger_fs_error";

/// A tmpfs that becomes read-only for all files that are not open.
const TMPFS: &str = "mount -t tmpfs -o size=64m none \"$1\"";
const TMPFS_STOPS: &str = "top=$(realpath $run/..) && mkdir $top/../ro && mount --bind $top $top/../ro &&
    mount -o remount,bind,ro $top/../ro && mount --move $top/../ro $top";

/// A file system that becomes read-only: the truth on every rank, and earlier checkpoints stay good.
#[rstest]
#[case::ext4(EXT4, EXT4_STOPS)]
#[case::tmpfs(TMPFS, TMPFS_STOPS)]
fn a_file_system_that_becomes_read_only_ends_all_ranks_with_3(
    #[case] make: &str,
    #[case] stop: &str,
    #[values((1, false), (2, false), (2, true))] launched: (usize, bool),
    #[values("sync", "async")] mode: &str,
) {
    let (ranks, mpi) = launched;
    if mpi && !has_mpi() {
        return;
    }
    let Some(mounts) = mounts(make) else { return };
    let script = format!(
        r#"if [ $rank = 0 ]; then "$@" & {}; {stop} || exit 97; wait $pid; else "$@"; fi"#,
        until_saved(2)
    );
    let sets = ["checkpoint.every_steps=2", &format!("checkpoint.mode={mode}")];
    let launch =
        |program: &str| if mpi { Launch::mpirun(ranks, program) } else { Launch::plain(ranks, program) };
    let outcome = train_in(&mounts, launch, &script, &sets).run().unwrap();
    each_ends_with(&outcome, 3);
    let path = mounts.folder().join("run").display().to_string();
    let told = |rank: &isobar_harness::RankOutput| {
        // A write that is under way when the journal is aborted is an error of input and output.
        let said = rank.stderr.to_lowercase();
        rank.stderr.contains(&path)
            && (said.contains("read-only file system") || said.contains("input/output error"))
    };
    assert!(outcome.ranks.iter().any(told), "{outcome}");
    for rank in &outcome.ranks {
        assert!(
            !rank.stderr.contains("that all ranks share") && !rank.stderr.contains("was lost"),
            "{outcome}"
        );
    }
    resumes(&mounts, &mounts.folder().join("run"));
}

/// The newest checkpoint of a run is good, and a run elsewhere continues from it.
#[track_caller]
fn resumes(mounts: &Mounts, run: &Path) {
    let seen = mounts.seen().join(run.strip_prefix(mounts.folder()).unwrap());
    let found = list(&seen).unwrap();
    let newest = found.iter().find(|one| one.found.is_ok()).unwrap();
    assert!(verify(&newest.path).is_ok(), "{newest:?}");
    let step = newest.found.as_ref().unwrap().step;
    let folder = tempdir().unwrap();
    let copy = folder.path().join("run");
    let copied = Command::new("cp").arg("-r").args([&seen, &copy]).status().unwrap();
    assert!(copied.success());
    let last = format!("train.max_steps={}", step + 2);
    let launch = Launch::plain(1, ISOBAR).current_dir(workspace()).deadline(LONGEST);
    let outcome =
        launch.args(settings(folder.path(), &[&last])).arg("--resume=must").run().unwrap().expect_success();
    assert_eq!(losses(&copy).len() as u64, step + 2, "{outcome}");
}

/// A disk that is really full: of the run's own checkpoints, or of another program's files. A checkpoint takes about 0.1 MB.
#[rstest]
#[case::by_checkpoints("size=1m", "true", 1)]
#[case::by_another_program("size=64m", "dd if=/dev/zero of=$run/../other bs=64k 2>/dev/null; true", 2)]
fn a_full_disk_ends_all_ranks_with_3(
    #[case] size: &str,
    #[case] fill: &str,
    #[case] saved: usize,
    #[values(1, 2)] ranks: usize,
    #[values("sync", "async")] mode: &str,
) {
    let make = format!("mount -t tmpfs -o {size} none \"$1\"");
    let Some(mounts) = mounts(&make) else { return };
    let script =
        format!(r#"if [ $rank = 0 ]; then "$@" & {}; {fill}; wait $pid; else "$@"; fi"#, until_saved(saved));
    let keep = ["checkpoint.keep=0", "checkpoint.every_steps=2"];
    let sets = [keep[0], keep[1], &format!("checkpoint.mode={mode}")];
    let launch = |program: &str| Launch::plain(ranks, program);
    let outcome = train_in(&mounts, launch, &script, &sets).run().unwrap();
    each_ends_with(&outcome, 3);
    let path = mounts.folder().join("run").display().to_string();
    let told = |rank: &isobar_harness::RankOutput| {
        rank.stderr.contains(&path) && rank.stderr.contains("No space left on device")
    };
    assert!(outcome.ranks.iter().any(told), "{outcome}");
    for rank in &outcome.ranks {
        assert!(
            !rank.stderr.contains("that all ranks share") && !rank.stderr.contains("was lost"),
            "{outcome}"
        );
    }
    assert!(mounts.run("rm -f \"$1/other\"").unwrap().status.success());
    resumes(&mounts, &mounts.folder().join("run"));
}

/// A library that moves the clock of the day: by so many seconds, once a file is there. Waits that end at a time of that clock
/// end as they do where the kernel's clock is set.
const CLOCK: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static int real(clockid_t clock, struct timespec *at) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    return next(clock, at);
}
static long jump(void) {
    static volatile int jumped;
    const char *file = getenv("CLOCK_FILE"), *seconds = getenv("CLOCK_SECONDS");
    if (!jumped && file && access(file, F_OK) == 0) jumped = 1;
    return jumped && seconds ? atol(seconds) : 0;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    int result = real(clock, at);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += jump();
    return result;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next) next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec now, slice;
    clock_gettime(CLOCK_REALTIME, &now);
    if (now.tv_sec > until->tv_sec || (now.tv_sec == until->tv_sec && now.tv_nsec >= until->tv_nsec)) return ETIMEDOUT;
    real(CLOCK_REALTIME, &slice);
    slice.tv_nsec += 20000000;
    if (slice.tv_nsec >= 1000000000) { slice.tv_sec++; slice.tv_nsec -= 1000000000; }
    int result = next(cond, mutex, &slice);
    // A spurious wake-up: the caller looks at what it waits for. It may have come just after the slice, and told nobody.
    return result == ETIMEDOUT ? 0 : result;
}
"#;

/// Compiles a library to be preloaded.
fn library(folder: &Path, text: &str) -> PathBuf {
    let [source, library] = ["library.c", "library.so"].map(|name| folder.join(name));
    fs::write(&source, text).unwrap();
    let mut compile = Command::new("cc");
    let built = compile.args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]).status().unwrap();
    assert!(built.success());
    library
}

/// A clock that jumps by an hour changes nothing but what is recorded of the time: no wait ends early or late, checkpoints
/// follow each other, the folder stays locked, and no duration is negative.
#[rstest]
#[case::alone(1, false, "0")]
#[case::of_one_rank(2, false, "0")]
#[case::of_all_ranks(2, false, "all")]
#[case::under_mpirun(2, true, "all")]
fn a_clock_that_jumps_changes_nothing(
    #[case] ranks: usize,
    #[case] mpi: bool,
    #[case] whose: &str,
    #[values(3600, -3600)] seconds: i64,
) {
    if mpi && !has_mpi() {
        return;
    }
    let folder = tempdir().unwrap();
    let library = library(folder.path(), CLOCK);
    let launch =
        |program: &str| if mpi { Launch::mpirun(ranks, program) } else { Launch::plain(ranks, program) };
    let start = |output: &Path, script: &str, sets: &[&str]| {
        let all = ["train.max_steps=24", "checkpoint.every_steps=4", "checkpoint.keep=0"];
        let all: Vec<&str> = all
            .into_iter()
            .chain(["distributed.heartbeat_timeout_s=8"])
            .chain(sets.iter().copied())
            .collect();
        let script = format!(
            "rank=${{RANK:-${{OMPI_COMM_WORLD_RANK:-0}}}}; run={}/run; {script}; echo code $?",
            output.display()
        );
        let launch = launch("sh").current_dir(workspace()).deadline(LONGEST);
        launch.args(["-c", &script, "sh", ISOBAR]).args(settings(output, &all)).run().unwrap()
    };
    let [calm, jumped] = ["calm", "jumped"].map(|name| folder.path().join(name));
    each_ends_with(&start(&calm, r#""$@""#, &[]), 0);
    let mark = folder.path().join("mark");
    let preload = format!(
        "export LD_PRELOAD={} CLOCK_FILE={} CLOCK_SECONDS={seconds}",
        library.display(),
        mark.display()
    );
    let preload = if whose == "all" { preload } else { format!("[ $rank = {whose} ] && {preload}") };
    // Jumps after the second checkpoint; a second start finds the folder locked.
    let script = format!(
        r#"if [ $rank = 0 ]; then ({preload}; exec "$@") & {}; touch {}; wait $pid; else {preload}; "$@"; fi"#,
        until_saved(2),
        mark.display()
    );
    let outcome = start(&jumped, &script, &[]);
    each_ends_with(&outcome, 0);
    assert_eq!(losses(&jumped.join("run")), losses(&calm.join("run")), "{outcome}");
    for rank in &outcome.ranks {
        for word in ["time out", "timed out", "has not been heard", "the job ends"] {
            assert!(!rank.stderr.contains(word), "{word:?} in {outcome}");
        }
    }
    let steps: Vec<u64> =
        list(&jumped.join("run")).unwrap().into_iter().map(|one| one.found.unwrap().step).collect();
    assert_eq!(steps, [24, 20, 16, 12, 8, 4], "newest first");
    rates_are_sound(&jumped.join("run"));
    let summary = outcome.ranks.iter().find_map(|rank| rank.stdout.split_once("24 steps in ")).unwrap().1;
    let seconds: u64 = summary.split(' ').next().unwrap().parse().unwrap();
    assert!(seconds < LONGEST.as_secs(), "{outcome}");
}

/// The rates in the metrics are those of a run that lasts no longer than the test.
#[track_caller]
fn rates_are_sound(run: &Path) {
    let rates = metric(run, "samples_per_second");
    // A step has four samples.
    let smallest = 4.0 / LONGEST.as_secs_f64();
    assert!(!rates.is_empty() && rates.iter().all(|rate| (smallest..1e6).contains(rate)), "{rates:?}");
}

/// A folder is locked whatever its clock says: of the holder, or of the second start.
#[rstest]
fn a_lock_does_not_depend_on_the_clock(#[values(3600, -3600)] seconds: i64) {
    let folder = tempdir().unwrap();
    let library = library(folder.path(), CLOCK);
    let second: Vec<String> = settings(folder.path(), &[]).iter().map(|word| format!("'{word}'")).collect();
    let script = format!(
        r#"run={}/run; export LD_PRELOAD={} CLOCK_FILE={} CLOCK_SECONDS={seconds}; "$@" & {}
        touch $CLOCK_FILE; '{ISOBAR}' {} --overwrite; echo second $?; kill -TERM $pid; wait $pid; echo code $?"#,
        folder.path().display(),
        library.display(),
        folder.path().join("mark").display(),
        until_saved(2),
        second.join(" "),
    );
    let launch = Launch::plain(1, "sh").current_dir(workspace()).deadline(LONGEST);
    let sets = ["checkpoint.every_steps=2"];
    let launch = launch.args(["-c", &script, "sh", ISOBAR]).args(settings(folder.path(), &sets));
    let outcome = launch.run().unwrap();
    contains(&outcome, 0, &["second 2\n", "is in use by process ", "code 6\n"]);
    let newest = &list(&folder.path().join("run")).unwrap()[0];
    assert_eq!(newest.found.as_ref().unwrap().step as usize, losses(&folder.path().join("run")).len());
}
