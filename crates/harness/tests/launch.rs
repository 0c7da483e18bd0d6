//! The launchers, tried on a shell.

use std::time::Duration;

use isobar_harness::{Exit, Launch, Outcome, Slurm, SlurmState, on_path, skip};

const SAY: &str = "echo rank ${OMPI_COMM_WORLD_RANK-}${SLURM_PROCID-}${RANK-}; echo oops >&2";

fn launchers(ranks: usize, script: &str) -> Vec<Launch> {
    let mut all = vec![Launch::plain(ranks, "sh")];
    if on_path("mpirun").is_some() {
        all.push(Launch::mpirun(ranks, "sh"));
    } else {
        skip("no mpirun");
    }
    if on_path("slurmd").is_some() {
        all.push(Launch::srun(ranks, "none", "sh"));
        all.push(Launch::srun(ranks, "pmix", "sh"));
    } else {
        skip("no SLURM");
    }
    all.into_iter().map(|launch| launch.args(["-c", script])).collect()
}

#[test]
fn output_of_each_rank_is_kept_apart() {
    for launch in launchers(3, SAY) {
        let outcome = launch.run().unwrap().expect_success();
        assert_eq!(outcome.ranks.len(), 3, "{outcome}");
        for (rank, output) in outcome.ranks.iter().enumerate() {
            assert!(output.stdout.starts_with(&format!("rank {rank}")), "{outcome}");
            assert_eq!(output.stderr, "oops\n", "{outcome}");
        }
    }
}

#[test]
fn exit_code_is_the_programs() {
    for launch in launchers(2, "exit 5") {
        let _ = launch.run().unwrap().expect_code(5);
    }
}

#[test]
fn deadline_ends_all_ranks() {
    for launch in launchers(2, "echo $$; exec sleep 300") {
        // A loaded machine may need longer than the first deadline to start the ranks.
        let started = |outcome: &Outcome| {
            outcome.ranks.len() == 2 && outcome.ranks.iter().all(|rank| !rank.stdout.is_empty())
        };
        let mut outcome = launch.clone().deadline(Duration::from_secs(4)).run().unwrap();
        if !started(&outcome) {
            outcome = launch.deadline(Duration::from_secs(60)).run().unwrap();
        }
        assert_eq!(outcome.exit, Exit::Deadline, "{outcome}");
        assert!(started(&outcome), "{outcome}");
        for output in &outcome.ranks {
            let pid = output.stdout.trim();
            let end = std::time::Instant::now() + Duration::from_secs(60);
            let sleeps = || {
                std::fs::read_to_string(format!("/proc/{pid}/stat"))
                    .is_ok_and(|stat| stat.contains("(sleep)") && !stat.contains(") Z "))
            };
            while sleeps() {
                assert!(std::time::Instant::now() < end, "rank with pid {pid} left over\n{outcome}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

#[test]
fn slurm_starts_twice_and_stops() {
    if on_path("slurmd").is_none() {
        return skip("no SLURM");
    }
    let folder = tempfile::tempdir().unwrap();
    let slurm = Slurm::in_folder(folder.path().join("slurm"));
    assert!(matches!(slurm.state(), SlurmState::Down(_)));
    slurm.start().unwrap();
    slurm.start().unwrap();
    assert_eq!(slurm.state(), SlurmState::Up);
    let answer = slurm.command("srun").args(["-n", "1", "hostname"]).output().unwrap();
    assert!(answer.status.success(), "{answer:?}");
    slurm.stop().unwrap();
    assert!(matches!(slurm.state(), SlurmState::Down(_)));
}
