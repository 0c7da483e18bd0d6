//! Every launcher starts ranks that find each other; launches that contradict themselves say so.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeSet, time::Duration};

use isobar_harness::{Exit, Launch, Outcome, skip};
use isobar_tests::{has_mpi, has_slurm, json_of_ranks};
use rstest::rstest;
use serde_json::Value;

const WHOAMI: &str = env!("CARGO_BIN_EXE_whoami");

/// Checks ranks, sums over all ranks, and method and backend.
#[track_caller]
fn check(launch: &Launch, ranks: usize, method: &str, backend: &str) {
    let answers = json_of_ranks(launch);
    assert_eq!(answers.len(), ranks);
    let sum: usize = (1..=ranks).sum();
    for (rank, answer) in answers.iter().enumerate() {
        let expected = [
            ("rank", Value::from(rank)),
            ("world_size", Value::from(ranks)),
            ("local_rank", Value::from(rank)),
            ("method", Value::from(method)),
            ("backend", Value::from(backend)),
            ("sum", Value::from(sum)),
        ];
        for (key, value) in expected {
            assert_eq!(answer[key], value, "{key} of rank {rank} in {answers:?}");
        }
    }
}

#[rstest]
fn mpirun(#[values(1, 2, 4)] ranks: usize) {
    if has_mpi() {
        check(&Launch::mpirun(ranks, WHOAMI), ranks, "OPENMPI", "mpi");
    }
}

#[test]
fn srun_with_pmix_is_mpi() {
    if has_mpi() && has_slurm() {
        check(&Launch::srun(2, "pmix", WHOAMI), 2, "SLURM", "mpi");
    }
}

#[test]
fn srun_without_pmix_runs_over_gloo_where_asked_to() {
    if has_slurm() {
        check(&Launch::srun(2, "none", WHOAMI).arg("gloo"), 2, "SLURM", "gloo");
    }
}

#[rstest]
fn srun_without_pmix_says_the_mend(#[values("auto", "mpi")] backend: &str) {
    if has_mpi() && has_slurm() {
        let outcome = failed(&Launch::srun(2, "none", WHOAMI).arg(backend));
        for rank in &outcome.ranks {
            assert!(rank.stderr.contains("srun started no PMIx server"), "{outcome}");
            assert!(rank.stderr.contains("srun --mpi=pmix"), "{outcome}");
        }
    }
}

#[rstest]
fn plain(#[values(1, 2, 4)] ranks: usize) {
    let backend = if ranks == 1 { "single" } else { "gloo" };
    check(&Launch::plain(ranks, WHOAMI), ranks, "ENV", backend);
}

#[test]
fn gloo_under_mpirun() {
    if has_mpi() {
        check(&Launch::mpirun(2, WHOAMI).arg("gloo"), 2, "OPENMPI", "gloo");
    }
}

#[test]
fn half_set_variables_are_an_error() {
    let launch = Launch::plain(1, "sh").args(["-c", "unset WORLD_SIZE; exec \"$0\"", WHOAMI]);
    let outcome = failed(&launch);
    assert!(outcome.ranks[0].stderr.contains("RANK is set but WORLD_SIZE is not"), "{outcome}");
}

#[test]
fn model_parallel_groups_come_from_the_environment() {
    let launch = |size: &str| {
        let script = format!("MODEL_PARALLEL_SIZE={size} exec \"$0\"");
        Launch::plain(4, "sh").args(["-c", &script, WHOAMI])
    };
    for answer in json_of_ranks(&launch("2")) {
        assert_eq!(answer["model_parallel"], 2, "{answer}");
    }
    for (size, needle) in
        [("three", "a number of ranks"), ("3", "4"), ("$((RANK / 2 + 1))", "MODEL_PARALLEL_SIZE 1")]
    {
        for rank in failed(&launch(size)).ranks {
            assert!(rank.stderr.contains(needle), "size {size}: {}", rank.stderr);
        }
    }
}

#[test]
fn ranks_that_never_come_are_an_error() {
    // The world is said to be larger than it is.
    let launch = Launch::plain(1, "sh").args(["-c", "WORLD_SIZE=2 exec \"$0\" gloo 5", WHOAMI]);
    let outcome = failed(&launch);
    let said = &outcome.ranks[0].stderr;
    assert!(!said.contains("panicked"), "{outcome}");
    assert!(said.contains("waited 5 s in vain for ranks [1]"), "{outcome}");
}

#[test]
fn launchers_do_not_share_a_port() {
    // Jobs at the same time, as on a busy node.
    let jobs: Vec<_> =
        (0..3).map(|_| std::thread::spawn(|| json_of_ranks(&Launch::plain(2, WHOAMI)))).collect();
    let worlds: BTreeSet<_> =
        jobs.into_iter().map(|job| job.join().unwrap()[0]["world_size"].to_string()).collect();
    assert_eq!(worlds.into_iter().collect::<Vec<_>>(), ["2"]);
}

/// The outcome of a launch that must fail by itself.
#[track_caller]
fn failed(launch: &Launch) -> Outcome {
    let outcome = launch.run().unwrap();
    assert!(matches!(outcome.exit, Exit::Code(code) if code != 0), "{outcome}");
    outcome
}

#[test]
fn torchrun_like_launch_on_two_hosts() {
    // Two network namespaces joined by a veth pair stand for two hosts.
    match namespaces::Pair::new() {
        Ok(pair) => {
            pair.check(WHOAMI, "192.168.77.1");
            // As Debian has it, the host knows its own name by a loopback address.
            pair.check(WHOAMI, "isobar-host");
        }
        Err(reason) => skip(&format!("no network namespaces: {reason}")),
    }
}

mod namespaces {
    //! Two hosts on one machine.

    use std::fs;
    use std::path::{Path, PathBuf};
    use std::process::{Child, Command, Stdio};

    use isobar_harness::{output_within, wait_within};

    use super::{Duration, Value};

    const STEP: Duration = Duration::from_secs(20);

    /// Two network namespaces with an address each, removed at the end.
    pub(super) struct Pair {
        names: [String; 2],
    }

    impl Pair {
        pub(super) fn new() -> Result<Self, String> {
            let id = std::process::id();
            let pair = Self { names: [format!("isobar-a-{id}"), format!("isobar-b-{id}")] };
            let [a, b] = &pair.names;
            for (name, address) in [(a, "127.0.1.1"), (b, "192.168.77.1")] {
                let hosts = || -> std::io::Result<()> {
                    fs::create_dir_all(Self::etc(name))?;
                    fs::write(
                        Self::etc(name).join("hosts"),
                        format!("127.0.0.1 localhost\n{address} isobar-host\n"),
                    )
                };
                hosts().map_err(|error| error.to_string())?;
            }
            let (va, vb) = (format!("iva{id}"), format!("ivb{id}"));
            ip(&["netns", "add", a])?;
            ip(&["netns", "add", b])?;
            ip(&["link", "add", &va, "netns", a, "type", "veth", "peer", "name", &vb, "netns", b])?;
            for (name, link, address) in [(a, &va, "192.168.77.1/24"), (b, &vb, "192.168.77.2/24")] {
                ip(&["-n", name, "addr", "add", address, "dev", link])?;
                ip(&["-n", name, "link", "set", link, "up"])?;
                ip(&["-n", name, "link", "set", "lo", "up"])?;
            }
            Ok(pair)
        }

        /// The files that `ip netns exec` puts in the place of those of `/etc`.
        fn etc(name: &str) -> PathBuf {
            Path::new("/etc/netns").join(name)
        }

        pub(super) fn check(&self, program: &str, addr: &str) {
            let ranks: Vec<Child> = self
                .names
                .iter()
                .enumerate()
                .map(|(rank, name)| {
                    Command::new("ip")
                        .args(["netns", "exec", name, program])
                        .env("RANK", rank.to_string())
                        .env("LOCAL_RANK", "0")
                        .env("WORLD_SIZE", "2")
                        .env("MASTER_ADDR", addr)
                        .env("MASTER_PORT", "29555")
                        .stdin(Stdio::null())
                        .stdout(Stdio::piped())
                        .stderr(Stdio::piped())
                        .spawn()
                        .unwrap()
                })
                .collect();
            for (rank, mut child) in ranks.into_iter().enumerate() {
                let ended = wait_within(&mut child, Duration::from_secs(90)).unwrap();
                let output = child.wait_with_output().unwrap();
                let said = String::from_utf8_lossy(&output.stderr);
                assert!(ended.is_some_and(|status| status.success()), "rank {rank}: {said}");
                let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
                assert_eq!((&answer["rank"], &answer["sum"]), (&Value::from(rank), &Value::from(3)));
            }
        }
    }

    impl Drop for Pair {
        fn drop(&mut self) {
            for name in &self.names {
                ip(&["netns", "delete", name]).unwrap_or(());
                fs::remove_dir_all(Self::etc(name)).unwrap_or(());
            }
        }
    }

    fn ip(args: &[&str]) -> Result<(), String> {
        match output_within(Command::new("ip").args(args), STEP) {
            Ok(Some(output)) if output.status.success() => Ok(()),
            Ok(Some(output)) => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Ok(None) => Err("ip did not end".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }
}
