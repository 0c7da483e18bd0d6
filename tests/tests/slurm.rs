//! Runs in jobs of a real SLURM: `scancel`, time limits, Ctrl-C at srun, and nodes that fail.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use isobar_harness::curve::losses;
use isobar_harness::{Hosts, Launch, Slurm, THREADS, output_within, skip, threads, wait_within, workspace};
use isobar_tests::{has_mpi, has_slurm};
use isobar_train::checkpoint::{list, verify};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rstest::rstest;
use tempfile::{TempDir, tempdir};

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");
const FAULTY: &str = env!("CARGO_BIN_EXE_faulty");

/// Deadline of each wait, which only catches hangs.
const LONGEST: Duration = Duration::from_secs(240);

/// One job at a time: the ranks of several would keep each other from the processor.
static MACHINE: Mutex<()> = Mutex::new(());

/// A SLURM that ends with its test.
struct Cluster {
    slurm: Slurm,
    folder: TempDir,
    /// Dropped last: SLURM runs on them.
    hosts: Option<Hosts>,
    _machine: MutexGuard<'static, ()>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.slurm.cancel("job");
        if self.hosts.is_none() {
            let _ = self.slurm.stop();
        }
    }
}

impl Cluster {
    /// A SLURM of this machine; notes the calling test as skipped where there can be none.
    fn new() -> Option<Self> {
        let machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
        if !has_mpi() || !has_slurm() {
            return None;
        }
        let folder = tempdir().unwrap();
        let slurm = Slurm::in_folder(folder.path().join("slurm"));
        Some(Self::start(slurm, folder, None, machine))
    }

    /// A SLURM of two hosts.
    fn of_hosts() -> Option<Self> {
        let machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
        if !has_mpi() || !has_slurm() {
            return None;
        }
        match Hosts::new() {
            Ok(hosts) => Some(Self::start(Slurm::of_hosts(&hosts), tempdir().unwrap(), Some(hosts), machine)),
            Err(reason) => {
                skip(&format!("no network namespaces: {reason:#}"));
                None
            }
        }
    }

    fn start(slurm: Slurm, folder: TempDir, hosts: Option<Hosts>, machine: MutexGuard<'static, ()>) -> Self {
        // Ranks of a loaded machine have time to save; jobs that are queued again wait for the credentials to expire.
        let slurm = slurm.with_kill_wait(60).with_credentials_for(10);
        slurm.start().unwrap();
        Self { slurm, folder, hosts, _machine: machine }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// A command of SLURM, without variables of launchers.
    fn command(&self, program: &str) -> Command {
        let mut command = self.slurm.command(program);
        for (name, _) in std::env::vars() {
            if ["ISOBAR_", "OMPI_", "PMIX_", "SBATCH_", "SLURM_"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
                && name != "SLURM_CONF"
            {
                command.env_remove(name);
            }
        }
        command.env(THREADS, threads()).current_dir(workspace());
        command
    }

    /// Output of a command of SLURM that must succeed.
    #[track_caller]
    fn said(&self, program: &str, args: &[&str]) -> String {
        let end = Instant::now() + LONGEST;
        loop {
            let output = output_within(self.command(program).args(args), Duration::from_secs(60)).unwrap();
            let output = output.expect("did not end");
            if output.status.success() {
                return String::from_utf8(output.stdout).unwrap().trim().to_owned();
            }
            // The controller of a loaded machine may not answer in time, and a command on a host that fails is killed.
            let unanswered = String::from_utf8_lossy(&output.stderr).contains("contact slurm controller")
                || output.status.signal().is_some();
            assert!(
                unanswered && program != "sbatch" && Instant::now() < end,
                "{program} {args:?}: {output:?}\n{}",
                self.read("log")
            );
        }
    }

    /// Starts a job; `body` is its script.
    fn batch(&self, options: &[&str], body: &str) -> String {
        let script = self.path("script");
        fs::write(&script, format!("#!/bin/sh\n{body}\n")).unwrap();
        let log = format!("--output={}", self.path("log").display());
        let fixed = ["--parsable", "--job-name=job", "--open-mode=append", "--overcommit", &log];
        self.said("sbatch", &[&fixed[..], options, &[&script.display().to_string()]].concat())
    }

    #[track_caller]
    fn wait_for(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let end = Instant::now() + LONGEST;
        while !is_so() {
            assert!(Instant::now() < end, "no {what}\n{}", self.read("log"));
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until the run has made a step.
    #[track_caller]
    fn wait_for_step(&self) {
        self.wait_for("step", || self.read("run/metrics.jsonl").contains("loss"));
    }

    #[track_caller]
    fn wait_for_end_of(&self, job: &str) {
        self.wait_for("end of the job", || {
            let state = self.said("scontrol", &["show", "job", job]);
            let ended = ["CANCELLED", "FAILED", "COMPLETED", "TIMEOUT"];
            ended.iter().any(|word| state.contains(&format!("JobState={word}")))
        });
        self.wait_for("end of the processes", || !self.has_processes());
    }

    /// Returns whether a process has this test's folder among its arguments, other than SLURM's daemons.
    fn has_processes(&self) -> bool {
        let folder = format!("run.output={}", self.folder.path().display());
        let processes = fs::read_dir("/proc").unwrap().flatten();
        processes.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok()).any(|words| {
            let words = String::from_utf8_lossy(&words).into_owned();
            words.contains(&folder)
        })
    }

    /// Words that train a small model in this test's folder.
    fn train(&self, sets: &[&str]) -> Vec<String> {
        let folder = format!("run.output={}", self.folder.path().display());
        let small =
            ["data.path=tests/data/darcy_excerpt.h5", "data.validation_samples=0", "run.name=run", &folder];
        let model = ["model.embed_dim=16", "model.depth=1", "model.num_blocks=2", "model.patch_size=[8,8]"];
        let more = ["train.epochs=100000", "train.batch_size=4", "metrics.every_steps=1"];
        let sets = small.iter().chain(&model).chain(&more).chain(sets);
        let sets = sets.flat_map(|set| ["--set", set]);
        ["train", "configs/darcy_afno.toml"].into_iter().chain(sets).map(str::to_owned).collect()
    }

    /// The newest checkpoint is complete, and a run of one rank resumes from it.
    #[track_caller]
    fn resumes(&self) {
        let listed = list(&self.path("run")).unwrap();
        let newest = &listed[0];
        let step = newest.found.as_ref().unwrap().step;
        verify(&newest.path).unwrap();
        let more = format!("train.max_steps={}", step + 1);
        let launch = Launch::plain(1, ISOBAR).current_dir(workspace()).deadline(LONGEST);
        let _ = launch.args(self.train(&[&more])).arg("--resume=must").run().unwrap().expect_success();
        let steps = losses(&self.path("run")).len() as u64;
        assert_eq!(steps, step + 1, "steps are lost or repeated");
    }
}

/// Script of a job: two ranks under srun, each of which leaves its exit code in a file.
fn ranks(cluster: &Cluster, sets: &[&str]) -> String {
    let codes = cluster.folder.path().display();
    format!(
        "srun --overcommit --ntasks=2 --mpi=pmix sh -c 'trap : TERM INT USR1; \"$@\"; echo $? >{codes}/code.$SLURM_PROCID' sh \\
         {ISOBAR} {}",
        cluster.train(sets).join(" ")
    )
}

/// Request to end a job.
#[derive(Debug, Clone, Copy)]
enum End {
    /// `scancel` with these options.
    Cancel(&'static [&'static str]),
    /// The time limit, with or without `sbatch --signal`.
    Limit(Option<&'static str>),
}

#[rstest]
#[case::cancelled(End::Cancel(&[]))]
#[case::sigterm_to_the_ranks(End::Cancel(&["--signal=TERM"]))]
#[case::sigint_to_the_ranks(End::Cancel(&["--signal=INT"]))]
#[case::sigterm_to_the_script(End::Cancel(&["--signal=TERM", "--batch"]))]
#[case::time_limit(End::Limit(None))]
#[case::signal_before_the_time_limit(End::Limit(Some("--signal=TERM@60")))]
fn a_job_that_is_told_to_end_is_saved(#[case] end: End) {
    let Some(cluster) = Cluster::new() else { return };
    let mut options = vec!["--ntasks=2"];
    if let End::Limit(signal) = end {
        options.push("--time=1");
        options.extend(signal);
    }
    let job = cluster.batch(&options, &ranks(&cluster, &["checkpoint.every_epochs=0"]));
    cluster.wait_for_step();
    match end {
        End::Cancel(options) => drop(cluster.said("scancel", &[options, &[&job]].concat())),
        // SLURM counts limits in minutes.
        End::Limit(None) => {
            drop(cluster.said("scontrol", &["update", &format!("JobId={job}"), "EndTime=now+1"]))
        }
        End::Limit(Some(_)) => {}
    }
    cluster.wait_for_end_of(&job);
    for rank in 0..2 {
        assert_eq!(cluster.read(&format!("code.{rank}")), "6\n", "rank {rank}\n{}", cluster.read("log"));
    }
    cluster.resumes();
}

/// srun kills its tasks when it gets SIGTERM itself: the ranks may have no time to save.
#[test]
fn a_job_whose_srun_gets_sigterm_resumes() {
    let Some(cluster) = Cluster::new() else { return };
    let sets = ["checkpoint.every_epochs=0", "checkpoint.every_steps=2", "checkpoint.mode=sync"];
    let job = cluster.batch(&["--ntasks=2"], &ranks(&cluster, &sets));
    cluster.wait_for("checkpoint", || list(&cluster.path("run")).is_ok_and(|listed| listed[0].found.is_ok()));
    cluster.said("scancel", &["--signal=TERM", "--full", &job]);
    cluster.wait_for_end_of(&job);
    cluster.resumes();
}

#[rstest]
#[case::to_the_ranks(&["--signal=USR1"])]
#[case::to_all(&["--signal=USR1", "--full"])]
fn a_job_that_gets_sigusr1_leaves_a_checkpoint_and_goes_on(#[case] options: &[&str]) {
    let Some(cluster) = Cluster::new() else { return };
    let body = format!("trap : USR1\n{}", ranks(&cluster, &["checkpoint.every_epochs=0"]));
    let job = cluster.batch(&["--ntasks=2"], &body);
    cluster.wait_for_step();
    cluster.said("scancel", &[options, &[&job]].concat());
    cluster.wait_for("checkpoint", || list(&cluster.path("run")).is_ok_and(|listed| listed[0].found.is_ok()));
    let steps = losses(&cluster.path("run")).len();
    cluster.wait_for("further steps", || losses(&cluster.path("run")).len() > steps + 1);
    cluster.said("scancel", &[&job]);
    cluster.wait_for_end_of(&job);
    cluster.resumes();
}

/// srun kills its tasks at a second Ctrl-C and at SIGTERM; with `--disable-status` the first is theirs.
#[rstest]
#[case::passed_on(true)]
#[case::status_first(false)]
fn ctrl_c_at_srun(#[case] disable_status: bool) {
    let Some(cluster) = Cluster::new() else { return };
    let mut command = cluster.command("srun");
    command.args(["--overcommit", "--ntasks=2", "--mpi=pmix", "--job-name=job"]);
    command.args(disable_status.then_some("--disable-status")).arg(ISOBAR);
    command.args(cluster.train(&[
        "checkpoint.every_epochs=0",
        "checkpoint.every_steps=2",
        "checkpoint.mode=sync",
    ]));
    let log = fs::File::create(cluster.path("log")).unwrap();
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    let mut srun = command.spawn().unwrap();
    let interrupt = || kill(Pid::from_raw(srun.id().cast_signed()), Signal::SIGINT).unwrap();
    cluster.wait_for("checkpoint", || list(&cluster.path("run")).is_ok_and(|listed| listed[0].found.is_ok()));
    interrupt();
    if disable_status {
        let status = wait_within(&mut srun, LONGEST).unwrap().expect("srun ends");
        assert_eq!(status.code(), Some(6), "{}", cluster.read("log"));
    } else {
        cluster
            .wait_for("warning of srun", || cluster.read("log").contains("one more within 1 sec to abort"));
        let steps = losses(&cluster.path("run")).len();
        cluster.wait_for("further steps", || losses(&cluster.path("run")).len() > steps + 3);
        cluster.wait_for("end of srun", || {
            // A loaded machine may take the second for another first one.
            let ended = srun.try_wait().unwrap();
            if ended.is_none() {
                kill(Pid::from_raw(srun.id().cast_signed()), Signal::SIGINT).unwrap();
                thread::sleep(Duration::from_millis(250));
            }
            ended.is_some_and(|status| !status.success())
        });
    }
    cluster.wait_for("end of the processes", || !cluster.has_processes());
    cluster.resumes();
}

/// Failure of a node, or of a rank on it, while a job runs.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Failure {
    /// All processes of a host are killed; the daemon starts again once SLURM has noticed.
    Host(usize),
    /// The second rank is killed; the script of the job has it queued again.
    Rank,
}

/// The job is queued again, resumes by itself, and computes what a run without failure does.
#[rstest]
#[case::second_host(Failure::Host(1), 2)]
#[case::second_host_to_fewer_ranks(Failure::Host(1), 1)]
#[case::host_of_the_script(Failure::Host(0), 2)]
#[case::rank(Failure::Rank, 2)]
fn a_job_whose_node_fails_resumes(#[case] failure: Failure, #[case] ranks: usize) {
    const STEPS: &str = "train.max_steps=12";
    let Some(cluster) = Cluster::of_hosts() else { return };
    let hosts = cluster.hosts.as_ref().unwrap();
    let mark = cluster.path("mark");
    let (how, line) = match failure {
        Failure::Host(host) => ("command", hosts.fail(host)),
        Failure::Rank => ("kill", String::new()),
    };
    let victim = usize::from(failure != Failure::Host(0));
    let sets =
        [STEPS, "train.precision=float64", "checkpoint.every_steps=2", "distributed.heartbeat_timeout_s=4"];
    let body = format!(
        r#"ranks=2
        if [ "${{SLURM_RESTART_COUNT:-0}}" = 0 ]; then
            export FAULT="{victim} backward 6 {how} {mark}" FAULT_COMMAND='{line}'
        else
            ranks={ranks}
        fi
        export OMPI_MCA_pml=ob1 OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include={interface}
        srun --overcommit --nodes=$ranks --ntasks=$ranks --mpi=pmix {FAULTY} {train}
        code=$?
        echo "start ${{SLURM_RESTART_COUNT:-0}} ended with code $code"
        case $code in 0|2|3|5|6) exit $code;; esac
        # A failed host ends the job itself.
        {again}"#,
        mark = mark.display(),
        interface = hosts.interface(),
        train = cluster.train(&sets).join(" "),
        again = if failure == Failure::Rank { "scontrol requeue $SLURM_JOB_ID" } else { "exit $code" },
    );
    let job = cluster.batch(&["--requeue", "--nodes=2", "--ntasks-per-node=1"], &body);
    cluster.wait_for("fault", || mark.exists());
    if let Failure::Host(host) = failure {
        let down = || cluster.said("sinfo", &["--noheader", "--Node", "--format=%N %T"]);
        cluster.wait_for("failure of the node", || {
            down().lines().any(|line| line.starts_with(&format!("{} down", hosts.name(host))))
        });
        cluster.slurm.start_node(host).unwrap();
    }
    cluster.wait_for("end of the second start", || cluster.read("log").contains("start 1 ended with code"));
    let log = cluster.read("log");
    assert!(log.contains("start 1 ended with code 0"), "{log}");
    assert!(log.contains("this job is started again: the run resumes from its last checkpoint"), "{log}");
    cluster.wait_for_end_of(&job);

    // The losses are those of a run without failure.
    let resumed = losses(&cluster.path("run"));
    fs::rename(cluster.path("run"), cluster.path("resumed")).unwrap();
    let launch = Launch::plain(1, ISOBAR).current_dir(workspace()).deadline(LONGEST);
    let _ = launch.args(cluster.train(&sets)).run().unwrap().expect_success();
    let expected = losses(&cluster.path("run"));
    assert_eq!(resumed.len(), expected.len(), "steps are lost or repeated\n{log}");
    for (step, (resumed, expected)) in resumed.iter().zip(&expected).enumerate() {
        assert!((resumed - expected).abs() <= 1e-9 * expected.abs(), "step {step}: {resumed}, {expected}");
    }
}
