//! Jobs on two hosts: they find each other, let nobody else in, and end soon, with a report, when the network between them is
//! cut or one of them is gone.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use isobar_harness::{Exit, Hosts, Launch, Outcome, output_within, skip, wait_within, workspace};
use isobar_tests::{has_mpi, has_slurm, json_of_ranks};
use isobar_train::checkpoint::{list, verify};
use rstest::rstest;
use serde_json::Value;
use tempfile::tempdir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");
const FAULTY: &str = env!("CARGO_BIN_EXE_faulty");
const WHOAMI: &str = env!("CARGO_BIN_EXE_whoami");

/// Deadline of the runs in seconds, which no run reaches: lost hosts are noticed by other means.
const DEADLINE: f64 = 1000.0;

/// Seconds without a sign of life after which a rank is lost.
const SILENCE: f64 = 4.0;

/// Seconds until a host that is stopped is gone for good: its processes belong to no launcher that would end them.
const STOPPED: f64 = 15.0;

/// One job at a time: the ranks of several would keep each other from the processor.
static MACHINE: Mutex<()> = Mutex::new(());

/// Two hosts, for one test at a time; notes the calling test as skipped where there can be none.
fn hosts() -> Option<(Hosts, MutexGuard<'static, ()>)> {
    let machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    match Hosts::new() {
        Ok(hosts) => Some((hosts, machine)),
        Err(reason) => {
            skip(&format!("no network namespaces: {reason:#}"));
            None
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Launcher {
    Mpirun,
    /// Over MPI.
    Srun,
    /// Over gloo.
    SrunGloo,
    Plain,
}

impl Launcher {
    /// Returns whether this machine has it; reports the calling test as skipped otherwise.
    fn is_there(self) -> bool {
        match self {
            Self::Mpirun => has_mpi(),
            Self::Srun => has_mpi() && has_slurm(),
            Self::SrunGloo => has_slurm(),
            Self::Plain => true,
        }
    }

    fn launch(self, ranks: usize, program: &str, hosts: &Hosts) -> Launch {
        match self {
            Self::Mpirun => Launch::mpirun(ranks, program).on(hosts),
            Self::Srun => Launch::srun(ranks, "pmix", program).on(hosts),
            Self::SrunGloo => {
                Launch::srun(ranks, "none", program).on(hosts).env("ISOBAR_DISTRIBUTED__BACKEND", "gloo")
            }
            Self::Plain => Launch::plain(ranks, program).on(hosts),
        }
    }
}

/// Fault of the network, or of a host.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Trouble {
    /// Its cable is pulled; its processes go on.
    Cut,
    /// All of its processes stop, and nothing answers for them: a machine that hangs.
    Halt,
    /// All of its processes are killed.
    Kill,
}

impl Trouble {
    /// It, as a line for a shell.
    fn line(self, hosts: &Hosts, host: usize) -> String {
        match self {
            Self::Cut => hosts.cut(host),
            Self::Halt => format!(
                "{}; {}; sleep {STOPPED}; {}",
                hosts.cut(host),
                hosts.signal(host, "STOP"),
                hosts.signal(host, "KILL")
            ),
            Self::Kill => hosts.signal(host, "KILL"),
        }
    }

    /// Returns the word of a report for it.
    fn word(self) -> &'static str {
        match self {
            Self::Cut | Self::Halt => "has not been heard of",
            Self::Kill => "was lost",
        }
    }
}

/// The ranks of a host.
fn ranks_of(host: usize, ranks: usize) -> std::ops::Range<usize> {
    if host == 0 { 0..ranks / 2 } else { ranks / 2..ranks }
}

#[rstest]
#[case::gloo_cut(Launcher::Plain, 4, Trouble::Cut, 1, "backward")]
#[case::gloo_halt(Launcher::Plain, 2, Trouble::Halt, 1, "forward")]
#[case::gloo_halt_of_the_first(Launcher::Plain, 4, Trouble::Halt, 0, "optimizer")]
#[case::gloo_kill(Launcher::Plain, 4, Trouble::Kill, 1, "backward")]
#[case::mpi_cut(Launcher::Mpirun, 2, Trouble::Cut, 1, "backward")]
#[case::mpi_halt(Launcher::Mpirun, 4, Trouble::Halt, 1, "forward")]
#[case::mpi_kill(Launcher::Mpirun, 2, Trouble::Kill, 1, "optimizer")]
#[case::srun_cut(Launcher::Srun, 4, Trouble::Cut, 1, "forward")]
#[case::srun_halt(Launcher::SrunGloo, 4, Trouble::Halt, 1, "backward")]
#[case::srun_kill(Launcher::Srun, 2, Trouble::Kill, 1, "backward")]
fn a_lost_host_is_named_and_its_run_goes_on_elsewhere(
    #[case] launcher: Launcher,
    #[case] ranks: usize,
    #[case] trouble: Trouble,
    #[case] host: usize,
    #[case] phase: &str,
) {
    if !launcher.is_there() {
        return;
    }
    let Some((hosts, _machine)) = hosts() else { return };
    let output = tempdir().unwrap();
    let mark = output.path().join("mark");
    let victim = ranks_of(host, ranks).start;
    let outcome = train(launcher.launch(ranks, FAULTY, &hosts), output.path())
        .env("FAULT", format!("{victim} {phase} 6 command {}", mark.display()))
        .env("FAULT_COMMAND", trouble.line(&hosts, host))
        .args(["--set", "train.epochs=100000", "--set", "checkpoint.every_steps=2"])
        .args(["--set", &format!("distributed.timeout_s={DEADLINE}")])
        .args(["--set", &format!("distributed.heartbeat_timeout_s={SILENCE}")])
        .run()
        .unwrap();
    assert!(mark.exists(), "the rank comes to its fault\n{outcome}");
    assert!(!matches!(outcome.exit, Exit::Code(0) | Exit::Deadline), "{outcome}");

    // The lowest rank of those that hear each other reports on the others.
    let sides: &[usize] = if trouble == Trouble::Cut { &[0, 1] } else { &[1 - host] };
    for (rank, said) in outcome.ranks.iter().enumerate() {
        let reports = said.stderr.matches("isobar: the job ends").count();
        let reporter = sides.iter().any(|&side| ranks_of(side, ranks).start == rank);
        assert_eq!(reports, usize::from(reporter), "reports of rank {rank}\n{outcome}");
    }
    for &side in sides {
        let reporter = ranks_of(side, ranks).start;
        // The rank that takes over knows of the previous watching rank, and of those of its own host.
        let named = if side == 0 { ranks_of(1, ranks) } else { 0..1 };
        for lost in named {
            let begins = format!("  rank {lost} ({}, process ", hosts.name(1 - side));
            let found = outcome.ranks[reporter].stderr.lines().any(|line| {
                line.starts_with(&begins) && line.contains(trouble.word()) && line.contains(" of step ")
            });
            assert!(found, "rank {reporter} does not name rank {lost}\n{outcome}");
        }
    }
    goes_on(output.path(), &outcome);
}

/// The last checkpoint is whole, and the run goes on from it, on one rank.
fn goes_on(output: &Path, outcome: &Outcome) {
    let found = list(&output.join("darcy_afno")).unwrap();
    let newest = found.iter().filter_map(|one| Some((one.found.as_ref().ok()?.step, &one.path))).max();
    let (step, path) = newest.unwrap_or_else(|| panic!("no checkpoint\n{outcome}"));
    assert!(step >= 4, "the newest is of step {step}\n{outcome}");
    verify(path).unwrap();
    let _ = train(Launch::plain(1, ISOBAR), output)
        .args(["--set", "train.epochs=100000", "--set", &format!("train.max_steps={}", step + 1)])
        .arg("--resume=must")
        .run()
        .unwrap()
        .expect_success();
}

/// A rank that is stopped on another host than the launcher's is the cause in the launcher's first line, at work and at its
/// exit.
#[rstest]
#[case::at_work("1 forward 3")]
#[case::at_its_exit("1 end 0")]
fn a_rank_stopped_on_another_host_is_named(#[case] fault: &str) {
    const WHAT: &str = " failed first: it has not been heard of for ";
    let Some((hosts, _machine)) = hosts() else { return };
    let output = tempdir().unwrap();
    let (mark, agent) = (output.path().join("mark"), hosts.agent());
    // One launcher, which is on the second host; its ranks are on the first.
    let launcher = Launch::plain(1, ISOBAR).on(&hosts).args(["launch", "-n", "2", "--grace", "1"]);
    let launcher = launcher.arg("--ssh").arg(agent).args(["--hosts", &format!("{}:2", hosts.name(0))]);
    let outcome = train(launcher.args(["--env", "FAULT", "--", FAULTY]), output.path())
        .env("FAULT", format!("{fault} stop {}", mark.display()))
        .args(["--set", "train.max_steps=4", "--set", &format!("distributed.timeout_s={DEADLINE}")])
        .args(["--set", &format!("distributed.heartbeat_timeout_s={SILENCE}")])
        .run()
        .unwrap();
    assert!(mark.exists(), "{outcome}");
    assert_eq!(outcome.exit, Exit::Code(4), "{outcome}");
    let begins = format!("isobar launch: rank 1 ({}", hosts.name(0));
    let said = &outcome.ranks[0].stderr;
    assert!(said.lines().any(|line| line.starts_with(&begins) && line.contains(WHAT)), "{outcome}");
}

fn train(launch: Launch, output: &Path) -> Launch {
    launch
        .current_dir(workspace())
        .deadline(Duration::from_secs(240))
        .args(["train", "configs/darcy_afno.toml", "--set", "data.path=tests/data/darcy_excerpt.h5"])
        .args(["--set", "data.validation_samples=0", "--set", "train.batch_size=4"])
        .args(["--set", &format!("run.output={}", output.display())])
}

/// A run on two hosts comes to its end, and nothing of it listens where another network could reach it.
#[test]
fn ranks_listen_on_the_address_of_rank_zero_only() {
    let Some((hosts, _machine)) = hosts() else { return };
    for (variable, value) in
        [("ISOBAR_DISTRIBUTED__INTERFACE", hosts.interface()), ("MASTER_ADDR", hosts.address(0))]
    {
        let output = tempdir().unwrap();
        let sockets = output.path().join("sockets");
        let mark = output.path().join("mark");
        let outcome = train(Launch::plain(4, FAULTY).on(&hosts), output.path())
            .env("FAULT", format!("0 forward 2 command {}", mark.display()))
            .env("FAULT_COMMAND", format!("cat /proc/net/tcp /proc/net/tcp6 >{}", sockets.display()))
            .env(variable, value)
            .env("ISOBAR_DISTRIBUTED_TOKEN", "0123456789abcdef0123456789abcdef")
            .args(["--set", "train.epochs=100", "--set", "train.max_steps=4"])
            .run()
            .unwrap()
            .expect_success();
        let table = fs::read_to_string(&sockets).unwrap();
        let listening: Vec<&str> = table
            .lines()
            .filter_map(|line| {
                let mut words = line.split_whitespace().skip(1);
                let (local, state) = (words.next()?, words.nth(1)?);
                (state == "0A").then(|| local.split_once(':').map_or(local, |(address, _)| address))
            })
            .collect();
        // The store, gloo of two ranks, and the watchdog of two.
        assert!(listening.len() >= 5, "{table}\n{outcome}");
        // 10.211.0.1, as the system writes it.
        assert!(listening.iter().all(|address| *address == "0100D30A"), "{variable}: {listening:?}");
    }
}

/// Whatever rank 0 is called, also where its host knows the name as its own by a loopback address.
#[test]
fn ranks_on_two_hosts_find_each_other() {
    let Some((hosts, _machine)) = hosts() else { return };
    for addr in [hosts.address(0), hosts.name(0), hosts.name_of_first()] {
        for seen in json_of_ranks(&Launch::plain(2, WHOAMI).on(&hosts).env("MASTER_ADDR", addr)) {
            assert_eq!((&seen["sum"], &seen["local_rank"]), (&Value::from(3), &Value::from(0)), "{addr}");
        }
    }
    for launcher in [Launcher::Mpirun, Launcher::Srun, Launcher::SrunGloo] {
        if launcher.is_there() {
            let launch = launcher.launch(4, WHOAMI, &hosts);
            let gloo = launcher == Launcher::SrunGloo;
            let seen = json_of_ranks(&if gloo { launch.args(["gloo", "60"]) } else { launch });
            let local: Vec<&Value> = seen.iter().map(|rank| &rank["local_rank"]).collect();
            assert_eq!(local, [0, 1, 0, 1], "{launcher:?}");
        }
    }
}

/// A rank with another token than its job's, or with none, is turned away at once; the job says that it lacks a rank.
#[rstest]
#[case::another(Some("fedcba9876543210"))]
#[case::none(None)]
fn who_does_not_know_the_token_stays_out(#[case] token: Option<&str>) {
    let Some((hosts, _machine)) = hosts() else { return };
    let start = |host: usize, seconds: &str, token: Option<&str>| -> Child {
        let mut command = hosts.command(host, WHOAMI);
        command.args(["gloo", seconds]).envs([("RANK", host.to_string()), ("LOCAL_RANK", "0".to_owned())]);
        command.envs([("WORLD_SIZE", "2"), ("MASTER_ADDR", hosts.address(0)), ("MASTER_PORT", "29555")]);
        command.env_remove("ISOBAR_DISTRIBUTED_TOKEN");
        command.envs(token.map(|token| ("ISOBAR_DISTRIBUTED_TOKEN", token)));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let first = start(0, "20", Some("0123456789abcdef"));
    // It would wait far longer than this test if it were not turned away.
    let stranger = said(start(1, "3600", token));
    assert!(stranger.contains("does not know this rank's token"), "{stranger}");
    let first = said(first);
    assert!(first.contains("waiting for ranks [1]"), "{first}");
    for said in [&first, &stranger] {
        assert!(!said.contains("456789"), "a token is shown: {said}");
    }
}

/// The errors of a process that must fail.
fn said(mut child: Child) -> String {
    let status = wait_within(&mut child, Duration::from_secs(90)).unwrap();
    assert!(status.is_some_and(|status| !status.success()), "{status:?}");
    String::from_utf8_lossy(&child.wait_with_output().unwrap().stderr).into_owned()
}

/// Processes on another host cannot reach a store that listens for this host only.
#[test]
fn a_store_of_one_host_is_not_seen_from_another() {
    let Some((hosts, _machine)) = hosts() else { return };
    let mut command = hosts.command(0, WHOAMI);
    command.args(["gloo", "120"]).envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]);
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29555")]).stdin(Stdio::null());
    let mut rank = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let reached = |host: usize, address: &str| {
        let line = format!("exec 3<>/dev/tcp/{address}/29555");
        let output = output_within(hosts.command(host, "bash").args(["-c", &line]), Duration::from_secs(20));
        output.unwrap().is_some_and(|output| output.status.success())
    };
    let end = Instant::now() + Duration::from_secs(60);
    while !reached(0, "127.0.0.1") && Instant::now() < end {}
    assert!(reached(0, "127.0.0.1"));
    assert!(!reached(1, hosts.address(0)) && !reached(0, hosts.address(0)));
    isobar_harness::end_tree(&mut rank).unwrap();
}

/// The hosts of a test are gone when it is over, with all that ran on them.
#[test]
fn hosts_leave_nothing_behind() {
    let Some((hosts, _machine)) = hosts() else { return };
    let mut sleeper = hosts.command(1, "sleep").arg("600").spawn().unwrap();
    let [before, after] = [Some(hosts), None].map(|hosts| {
        let listed = Command::new("ip").args(["netns", "list"]).output().unwrap();
        drop(hosts);
        let own = format!("isobar-{}-", std::process::id());
        String::from_utf8_lossy(&listed.stdout).matches(&own).count()
    });
    assert_eq!((before, after), (3, 0));
    assert!(wait_within(&mut sleeper, Duration::from_secs(60)).unwrap().is_some());
}
