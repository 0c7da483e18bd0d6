//! A rank that is killed, is stopped or panics in any phase ends the job before the deadline, with one report
//! that names it; the newest checkpoint is complete.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use isobar_harness::{Exit, Launch, Outcome, output_within, workspace};
use isobar_tests::{full, has_mpi, has_slurm};
use isobar_train::checkpoint::{list, verify};
use rstest::rstest;
use tempfile::tempdir;

/// Deadline of the runs that end by it, in seconds: ranks on a loaded machine come to their collectives within it.
const DEADLINE: f64 = 10.0;

/// Seconds without a sign of life after which a stopped rank is lost.
const SILENCE: f64 = 4.0;

/// Deadline that no job reaches, in seconds: a job that ends earlier noticed the fault by other means.
const NEVER: f64 = 1000.0;

/// Time after which a job counts as hanging, in all.
const LONGEST: Duration = Duration::from_secs(240);

const FAULTS: [&str; 3] = ["kill", "stop", "panic"];
const PHASES: [&str; 5] = ["start", "forward", "backward", "optimizer", "checkpoint"];

/// Numbers of ranks, and which of them fails.
const PLACES: [(usize, usize); 5] = [(2, 0), (2, 1), (4, 0), (4, 1), (4, 3)];

#[derive(Debug, Clone, Copy)]
enum Launcher {
    Mpirun,
    Srun,
    Plain,
}

const LAUNCHERS: [Launcher; 3] = [Launcher::Mpirun, Launcher::Srun, Launcher::Plain];

#[derive(Debug, Clone, Copy)]
struct Fault {
    how: &'static str,
    phase: &'static str,
    ranks: usize,
    victim: usize,
    launcher: Launcher,
    /// Axis of a mesh of 2 x 2 beside `data`; without it all ranks are along `data`.
    axis: Option<&'static str>,
}

/// Every pair of two properties at least once; with all, every combination.
fn faults(all: bool) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (i, phase) in PHASES.into_iter().enumerate() {
        for (j, (ranks, victim)) in PLACES.into_iter().enumerate() {
            for (k, how) in FAULTS.into_iter().enumerate() {
                for (l, launcher) in LAUNCHERS.into_iter().enumerate() {
                    if all || (k == (i + j) % 3 && l == (i + 2 * j) % 3) {
                        faults.push(Fault { how, phase, ranks, victim, launcher, axis: None });
                    }
                }
            }
        }
    }
    faults
}

/// One job at a time: the ranks of several would keep each other from the processor.
static MACHINE: Mutex<()> = Mutex::new(());

#[rstest]
#[case::mpirun(0)]
#[case::srun(1)]
#[case::plain(2)]
fn a_lost_rank_is_named(#[case] launcher: usize) {
    let there = match LAUNCHERS[launcher] {
        Launcher::Mpirun => has_mpi(),
        Launcher::Srun => has_mpi() && has_slurm(),
        Launcher::Plain => true,
    };
    if !there {
        return;
    }
    let own = faults(full()).into_iter().filter(|fault| fault.launcher as usize == launcher);
    let problems: Vec<String> = own.filter_map(|fault| check(fault).err()).collect();
    assert!(problems.is_empty(), "{} failures\n{}", problems.len(), problems.join("\n\n"));
}

#[test]
fn the_sample_has_every_pair() {
    let sample = faults(false);
    let has = |wanted: &dyn Fn(&Fault) -> bool| assert!(sample.iter().any(wanted));
    for phase in PHASES {
        for how in FAULTS {
            has(&|fault| (fault.phase, fault.how) == (phase, how));
        }
        for launcher in 0..3 {
            has(&|fault| (fault.phase, fault.launcher as usize) == (phase, launcher));
        }
        for place in PLACES {
            has(&|fault| (fault.phase, (fault.ranks, fault.victim)) == (phase, place));
        }
    }
    for launcher in 0..3 {
        for how in FAULTS {
            has(&|fault| (fault.launcher as usize, fault.how) == (launcher, how));
        }
        for place in PLACES {
            has(&|fault| (fault.launcher as usize, (fault.ranks, fault.victim)) == (launcher, place));
        }
    }
    for how in FAULTS {
        for place in PLACES {
            has(&|fault| (fault.how, (fault.ranks, fault.victim)) == (how, place));
        }
    }
    assert_eq!((sample.len(), faults(true).len()), (25, 225));
}

/// Ranks that share fields, parameters or channels, besides samples.
#[rstest]
#[case::domain("domain", 1, "backward", false)]
#[case::shard("shard", 3, "optimizer", true)]
#[case::model("model", 2, "forward", false)]
fn a_killed_rank_of_a_mesh_is_named(
    #[case] axis: &'static str,
    #[case] victim: usize,
    #[case] phase: &'static str,
    #[case] mpi: bool,
) {
    if mpi && !has_mpi() {
        return;
    }
    let launcher = if mpi { Launcher::Mpirun } else { Launcher::Plain };
    check(Fault { how: "kill", phase, ranks: 4, victim, launcher, axis: Some(axis) }).unwrap();
}

/// A rank that goes on living, and never comes to what the others wait in.
#[test]
fn a_rank_that_hangs_is_named() {
    for launcher in [Launcher::Plain, Launcher::Mpirun] {
        if matches!(launcher, Launcher::Mpirun) && !has_mpi() {
            continue;
        }
        check(Fault { how: "hang", phase: "forward", ranks: 2, victim: 1, launcher, axis: None }).unwrap();
    }
}

/// A rank that makes a call of its own: the ranks wait for each other in two groups, each for what the other does not call.
#[test]
fn calls_in_another_order_are_named() {
    for launcher in [Launcher::Plain, Launcher::Mpirun] {
        if matches!(launcher, Launcher::Mpirun) && !has_mpi() {
            continue;
        }
        check(Fault { how: "extra", phase: "forward", ranks: 2, victim: 1, launcher, axis: None }).unwrap();
    }
}

/// Another call of the others in a group is an error on all ranks, if all calls are compared.
#[test]
fn another_call_is_an_error_of_all_ranks_where_all_are_compared() {
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let output = tempdir().unwrap();
    let fault = Fault {
        how: "extra",
        phase: "optimizer",
        ranks: 2,
        victim: 1,
        launcher: Launcher::Plain,
        axis: None,
    };
    let outcome = run_with(fault, output.path(), &output.path().join("mark"), |launch| {
        launch.env("ISOBAR_DISTRIBUTED__FINGERPRINTS", "always")
    });
    assert_eq!(outcome.exit, Exit::Code(5), "{outcome}");
    for rank in &outcome.ranks {
        let error = rank.stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
        let both = ["the ranks make different calls: rank 0 ", ", rank 1 barrier"];
        assert!(both.iter().all(|side| error.contains(side)), "{outcome}");
    }
}

/// All ranks are inside of MPI, which returns to none of them: nobody is lost, and nobody can look at a deadline.
#[test]
fn mpi_that_does_not_return_ends_the_job() {
    if !has_mpi() {
        return;
    }
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let output = tempdir().unwrap();
    let (library, mark) = (compiled(HANGING_MPI, output.path()), output.path().join("mark"));
    let fault = Fault {
        how: "nothing",
        phase: "forward",
        ranks: 2,
        victim: 1,
        launcher: Launcher::Mpirun,
        axis: None,
    };
    let with = |launch: Launch| launch.env("LD_PRELOAD", &library).env("HANG_MARK", &mark);
    let outcome = run_with(fault, output.path(), &mark, with);
    assert!(mark.exists(), "{outcome}");
    assert!(!matches!(outcome.exit, Exit::Code(0) | Exit::Deadline), "{outcome}");
    let report = &outcome.ranks[0].stderr;
    assert!(report.contains("isobar: the job ends"), "{outcome}");
    assert!(report.contains(", from which the transport does not return; it was in "), "{outcome}");
}

/// A rank that is stopped when all have done their work, and its process has not ended.
#[rstest]
fn a_rank_that_is_stopped_at_its_very_end_is_named(#[values(false, true)] mpi: bool) {
    if mpi && !has_mpi() {
        return;
    }
    let launcher = if mpi { Launcher::Mpirun } else { Launcher::Plain };
    let fault = Fault { how: "stop", phase: "end", ranks: 3, victim: 1, launcher, axis: None };
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let output = tempdir().unwrap();
    let mark = output.path().join("mark");
    let outcome = run_with(fault, output.path(), &mark, |launch| launch.env("ISOBAR_TRAIN__MAX_STEPS", "2"));
    assert!(mark.exists(), "{outcome}");
    // Rank 0 comes first.
    assert_eq!(outcome.exit, Exit::Code(4), "{outcome}");
    let report = &outcome.ranks[0].stderr;
    assert!(report.contains("isobar: the job ends\n  rank 1 ("), "{outcome}");
    assert!(report.contains("has not been heard of for"), "{outcome}");
}

/// The end of MPI waits for all ranks, and has no deadline.
#[test]
fn an_end_of_mpi_that_does_not_return_ends_the_job() {
    if !has_mpi() {
        return;
    }
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let output = tempdir().unwrap();
    let library = compiled(HANGING_END, output.path());
    let fault =
        Fault { how: "nothing", phase: "none", ranks: 2, victim: 1, launcher: Launcher::Mpirun, axis: None };
    let outcome = run_with(fault, output.path(), &output.path().join("mark"), |launch| {
        launch.env("LD_PRELOAD", &library).env("ISOBAR_TRAIN__MAX_STEPS", "2")
    });
    assert!(!matches!(outcome.exit, Exit::Code(0) | Exit::Deadline), "{outcome}");
    let report = &outcome.ranks[0].stderr;
    assert!(report.contains("isobar: the job ends"), "{outcome}");
    assert!(report.contains(", from which the transport does not return; it was in "), "{outcome}");
}

/// Before ranks can watch each other: a rank that is stopped before it comes to MPI keeps the others in its start.
#[test]
fn a_start_of_mpi_that_does_not_return_ends_the_job() {
    if !has_mpi() {
        return;
    }
    let output = tempdir().unwrap();
    let script = r#"if [ $OMPI_COMM_WORLD_RANK = 1 ]; then kill -STOP $$; fi; exec "$@""#;
    let outcome = Launch::mpirun(2, "sh")
        .current_dir(workspace())
        .deadline(Duration::from_secs(60))
        .args(["-c", script, "sh", env!("CARGO_BIN_EXE_isobar-app"), "train", "configs/darcy_afno.toml"])
        .args(["--set", "data.path=tests/data/darcy_excerpt.h5"])
        .args(["--set", &format!("run.output={}", output.path().display())])
        .args(["--set", &format!("distributed.timeout_s={DEADLINE}")])
        .run()
        .unwrap();
    assert_eq!(outcome.exit, Exit::Code(4), "{outcome}");
    let words = "waits in the start of MPI, which has not returned for 20 s";
    assert!(outcome.ranks[0].stderr.contains(words), "{outcome}");
}

/// A process that has come to its limit of processes gets no further thread, and needs none to end its job.
#[test]
fn a_rank_that_gets_no_thread_ends_its_job_all_the_same() {
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let output = tempdir().unwrap();
    // Limits are not those of root, who becomes another user for this.
    fs::set_permissions(output.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let folder = output.path().display();
    let script = format!(
        r#"if [ $(id -u) = 0 ]; then set -- setpriv --reuid 65534 --regid 65534 --clear-groups "$@"; fi
        echo $$ >{folder}/pid.$RANK; exec "$@""#
    );
    let limit =
        format!("prlimit --nproc=1:1 --pid $(cat {folder}/pid.0) && kill -KILL $(cat {folder}/pid.1)");
    let outcome = Launch::plain(2, "sh")
        .current_dir(workspace())
        .deadline(Duration::from_secs(60))
        .env("FAULT", format!("1 forward 2 command {folder}/mark"))
        .env("FAULT_COMMAND", limit)
        .args(["-c", &script, "sh", env!("CARGO_BIN_EXE_faulty"), "train", "configs/darcy_afno.toml"])
        .args(["--set", "data.path=tests/data/darcy_excerpt.h5", "--set", "data.validation_samples=0"])
        .args(["--set", &format!("run.output={folder}"), "--set", "train.epochs=100000"])
        .args(["--set", "train.batch_size=4", "--set", "distributed.timeout_s=20"])
        .run()
        .unwrap();
    assert!(output.path().join("mark").exists(), "{outcome}");
    assert_eq!(outcome.exit, Exit::Code(4), "{outcome}");
    let said = &outcome.ranks[0].stderr;
    assert!(said.contains("isobar: the job ends\n  rank 1 (") && !said.contains("panicked"), "{outcome}");
}

/// A library of this C code.
fn compiled(code: &str, folder: &Path) -> PathBuf {
    let [source, library] = ["hang.c", "hang.so"].map(|name| folder.join(name));
    fs::write(&source, code).unwrap();
    let mut compile = Command::new("mpicc");
    let built = compile.args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status().unwrap();
    assert!(built.success());
    library
}

/// An MPI whose end does not come.
const HANGING_END: &str = "
#include <unistd.h>
int MPI_Finalize(void) {
    while (1) pause();
}
";

/// An MPI that hangs once a file is there.
const HANGING_MPI: &str = "
#include <mpi.h>
#include <stdlib.h>
#include <unistd.h>
int MPI_Test(MPI_Request *request, int *flag, MPI_Status *status) {
    while (access(getenv(\"HANG_MARK\"), F_OK) == 0) pause();
    return PMPI_Test(request, flag, status);
}
";

/// Checks the end of a run with this fault.
fn check(fault: Fault) -> Result<(), String> {
    let _machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let output = tempdir().unwrap();
    let mark = output.path().join("mark");
    let outcome = run(fault, output.path(), &mark);
    let wrong = |what: &str| Err(format!("{fault:?}: {what}\n{outcome}"));
    if !mark.exists() {
        return wrong("the rank did not come to its fault");
    }
    if matches!(outcome.exit, Exit::Code(0) | Exit::Deadline) {
        return wrong("the job ended as if all were well, or not at all");
    }
    let reporter = usize::from(fault.victim == 0);
    for (rank, said) in outcome.ranks.iter().enumerate() {
        let reports = said.stderr.matches("isobar: the job ends").count();
        let expected = usize::from(rank == reporter && (fault.how != "panic" || fault.victim != 0))
            + usize::from(fault.how == "panic" && fault.victim == 0 && rank == 0);
        if reports != expected {
            return wrong(&format!("{reports} reports of rank {rank}, expected {expected}"));
        }
    }
    let reporter = if fault.how == "panic" { 0 } else { reporter };
    let word = match fault.how {
        "kill" => "was lost",
        "stop" => "has not been heard of",
        "panic" => "panicked at",
        _ => "has not come to",
    };
    let named = |text: &str| {
        if fault.how == "extra" {
            let both = ["rank 0 in all_reduce of Float", "rank 1 in barrier (number "];
            return text.contains("  ranks wait for each other")
                && both.iter().all(|word| text.contains(word));
        }
        text.lines().any(|line| {
            line.starts_with(&format!("  rank {} (", fault.victim))
                && line.contains(word)
                && line.contains(&format!("in {} of step", fault.phase))
        })
    };
    if !named(&outcome.ranks[reporter].stderr) {
        return wrong("the report does not name the rank, what befell it, and where it was");
    }
    let listed = list(&output.path().join("darcy_afno"));
    match listed.as_deref().map(|listed| &listed[0]) {
        Err(_) if fault.phase == "start" => {}
        Err(error) => return wrong(&error.to_string()),
        Ok(newest) => {
            if let Err(error) = verify(&newest.path) {
                return wrong(&format!("the newest checkpoint is not whole: {error}"));
            }
        }
    }
    let records = output.path().join("darcy_afno/flight");
    // Whatever the launcher sends to the ranks that are left, each writes its record before it ends.
    let count = fs::read_dir(&records).map_or(0, |files| {
        files.flatten().filter(|file| file.file_name().to_string_lossy().starts_with("flight_rank_")).count()
    });
    if count < fault.ranks - 1 {
        return wrong(&format!("{count} flight records"));
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_isobar-app"));
    let why = output_within(command.args(["trace", "why"]).arg(&records), Duration::from_secs(60));
    let why = why.unwrap().unwrap();
    let text = String::from_utf8_lossy(&why.stdout).into_owned();
    if !why.status.success() || !named(&text) {
        return wrong(&format!("`isobar trace why` says\n{text}{}", String::from_utf8_lossy(&why.stderr)));
    }
    Ok(())
}

fn run(fault: Fault, output: &Path, mark: &Path) -> Outcome {
    run_with(fault, output, mark, |launch| launch)
}

fn run_with(fault: Fault, output: &Path, mark: &Path, with: impl FnOnce(Launch) -> Launch) -> Outcome {
    const PROGRAM: &str = env!("CARGO_BIN_EXE_faulty");
    let launch = match fault.launcher {
        Launcher::Mpirun => Launch::mpirun(fault.ranks, PROGRAM),
        Launcher::Srun => Launch::srun(fault.ranks, "pmix", PROGRAM),
        Launcher::Plain => Launch::plain(fault.ranks, PROGRAM),
    };
    // So late that a checkpoint is whole: those of two steps later do not begin before.
    let from = if fault.phase == "start" { 0 } else { 6 };
    let Fault { victim, phase, how, .. } = fault;
    // Of the ways to notice a fault, the one that is tried here.
    let (timeout, silence) = match how {
        "kill" | "panic" => (NEVER, NEVER),
        "stop" => (NEVER, SILENCE),
        _ => (DEADLINE, NEVER),
    };
    let config = if fault.axis == Some("model") { "darcy_distributed_afno" } else { "darcy_afno" };
    let (shape, names) = match fault.axis {
        Some(axis) => ("[2, 2]", format!("[\"data\", \"{axis}\"]")),
        None => ("[-1]", "[\"data\"]".to_owned()),
    };
    with(launch)
        .current_dir(workspace())
        .deadline(LONGEST)
        .env("FAULT", format!("{victim} {phase} {from} {how} {}", mark.display()))
        .args(["train", &format!("configs/{config}.toml"), "--set", "run.name=darcy_afno"])
        .args(["--set", "data.path=tests/data/darcy_excerpt.h5"])
        .args(["--set", &format!("distributed.mesh.shape={shape}")])
        .args(["--set", &format!("distributed.mesh.names={names}")])
        .args(["--set", "data.validation_samples=0", "--set", "checkpoint.every_steps=2"])
        .args(["--set", &format!("run.output={}", output.display())])
        .args(["--set", "train.epochs=100000", "--set", "train.batch_size=4"])
        .args(["--set", &format!("distributed.timeout_s={timeout}")])
        .args(["--set", &format!("distributed.heartbeat_timeout_s={silence}")])
        .run()
        .unwrap()
}
