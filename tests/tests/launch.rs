//! `isobar launch`: ranks here and by ssh, what becomes of them when one fails, restarts, signals; and `isobar check`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use isobar_harness::{Exit, Launch, Outcome, workspace};
use isobar_tests::{has_mpi, has_slurm};
use rstest::rstest;
use serde_json::Value;
use tempfile::{TempDir, tempdir};

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");
const FAULTY: &str = env!("CARGO_BIN_EXE_faulty");
const WHOAMI: &str = env!("CARGO_BIN_EXE_whoami");

/// `isobar launch` with these options and this command.
fn launch(options: &[&str], command: &[&str]) -> Launch {
    let launch = Launch::plain(1, ISOBAR).current_dir(workspace()).arg("launch");
    launch.args(options).arg("--").args(command)
}

/// A run of 40 steps on the excerpt of the data set, in `output`/run.
fn train(program: &str, output: &Path, sets: &[&str]) -> Vec<String> {
    let folder = format!("run.output={}", output.display());
    let data =
        ["data.path=tests/data/darcy_excerpt.h5", "data.validation_samples=0", "run.name=run", &folder];
    let more =
        ["train.epochs=20", "train.batch_size=4", "metrics.every_steps=1", "distributed.timeout_s=200"];
    let model = ["model.embed_dim=16", "model.depth=1", "model.num_blocks=2", "model.patch_size=[8, 8]"];
    let sets = data.iter().chain(&more).chain(&model).chain(sets).flat_map(|set| ["--set", set]);
    [program, "train", "configs/darcy_afno.toml"].into_iter().chain(sets).map(str::to_owned).collect()
}

fn losses(output: &Path) -> Vec<f64> {
    let text = fs::read_to_string(output.join("run/metrics.jsonl")).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.filter_map(|record| record["loss"].as_f64()).collect()
}

/// `script` in a shell, which sees the words of `command` as `"$@"`.
fn behind<'a>(script: &'a str, command: &'a [String]) -> Vec<&'a str> {
    ["sh", "-c", script, "sh"].into_iter().chain(command.iter().map(String::as_str)).collect()
}

#[track_caller]
fn ended(launch: &Launch, code: i32, words: &[&str]) -> Outcome {
    let outcome = launch.run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(code), "{outcome}");
    for word in words {
        let said = &outcome.ranks[0];
        assert!(said.stderr.contains(word) || said.stdout.contains(word), "no {word:?} in {outcome}");
    }
    assert!(!outcome.ranks[0].stderr.contains("panicked at"), "{outcome}");
    outcome
}

/// No report of the ranks names one that is stopped before the others can watch it; the launcher sees it.
#[rstest]
fn a_rank_that_is_stopped_before_it_joins_the_others_is_named(#[values(0, 2)] victim: usize) {
    let output = tempdir().unwrap();
    let command = train(ISOBAR, output.path(), &["distributed.timeout_s=5"]);
    let script = format!(r#"[ $RANK != {victim} ] || kill -STOP $$; exec "$@""#);
    let headline = format!("isobar launch: rank {victim} (");
    let words = [headline.as_str(), "it was stopped while others had ended"];
    ended(&launch(&["-n", "3", "--grace", "1"], &behind(&script, &command)), 4, &words);
}

/// A program in the place of ssh: it notes the host and the command, which it hands to a shell, as sshd does.
fn ssh(folder: &Path) -> String {
    let [script, hosts, commands] = ["ssh", "hosts", "commands"].map(|name| folder.join(name));
    let text = format!(
        "#!/bin/sh\necho \"$1\" >>'{}'\necho \"$*\" >>'{}'\nshift\nexec sh -c \"$*\"\n",
        hosts.display(),
        commands.display()
    );
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    script.display().to_string()
}

fn sorted_lines(path: &Path) -> Vec<String> {
    let mut lines: Vec<String> = fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// The processes whose numbers files in a folder hold; all must end soon.
#[track_caller]
fn all_gone(folder: &Path, count: usize) {
    let files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let pids: Vec<String> = files
        .iter()
        .filter(|file| file.extension().is_some_and(|ending| ending == "pid"))
        .map(|file| fs::read_to_string(file).unwrap().trim().to_owned())
        .collect();
    assert_eq!(pids.len(), count, "{pids:?}");
    // A killed orphan is a zombie until init takes it.
    let gone = |pid: &String| {
        fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
    };
    let end = Instant::now() + Duration::from_secs(60);
    while !pids.iter().all(gone) {
        assert!(Instant::now() < end, "processes are left: {pids:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A rank that is stopped is at fault, and not those that end because of it; nor is there a wait for one that is stopped when
/// the others have ended well.
#[rstest]
#[case::at_work("1 forward 2", "isobar launch: rank 1 (", " failed first: it has not been heard of for ")]
#[case::at_its_end("1 end 0", "isobar launch: rank 1 (", " failed first: it has not been heard of for ")]
#[case::rank_0_at_its_end(
    "0 end 0",
    "isobar launch: rank 0 (",
    "it was stopped while others had ended, and was killed by signal 9"
)]
fn a_stopped_rank_is_named_and_ended(#[case] fault: &str, #[case] who: &str, #[case] what: &str) {
    let folder = tempdir().unwrap();
    let command = train(FAULTY, folder.path(), &["distributed.timeout_s=3", "train.max_steps=4"]);
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    let launch = launch(&["-n", "2", "--grace", "1"], &command);
    let fault = format!("{fault} stop {}", folder.path().join("mark").display());
    ended(&launch.env("FAULT", fault), 4, &[who, what]);
}

#[test]
fn four_ranks_train() {
    let folder = tempdir().unwrap();
    let command = train(ISOBAR, folder.path(), &["train.max_steps=4"]);
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    let outcome =
        ended(&launch(&["-n", "4"], &command), 0, &["[rank 0] 4 steps in ", "over gloo, started by ENV"]);
    assert_eq!(losses(folder.path()).len(), 4, "{outcome}");
    let said = &outcome.ranks[0].stdout;
    assert!(said.lines().all(|line| line.starts_with("[rank 0] ")), "rank 0 speaks for all: {outcome}");
}

/// Killed in the midst of its steps, a run that is started again ends as one that was left alone.
#[test]
fn a_killed_run_goes_on_from_its_checkpoint() {
    let [whole, halves] = [(); 2].map(|()| tempdir().unwrap());
    let sets = ["checkpoint.every_steps=7"];
    let command = train(FAULTY, whole.path(), &sets);
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    ended(&launch(&["-n", "4"], &command), 0, &[]);

    let command = train(FAULTY, halves.path(), &sets);
    let script = format!(
        r#"if [ "$ISOBAR_LAUNCH_ATTEMPT" = 1 ]; then export FAULT="1 backward 20 kill {}/mark"; fi; exec "$@""#,
        halves.path().display()
    );
    let words = [
        "isobar launch: rank 1 (localhost, process ",
        " failed first, after ",
        ": it was killed by signal 9 (SIGKILL)",
        " ended with code 4 (a rank was lost or timed out), after ",
        "flight records: ",
        "(isobar trace why ",
        "isobar launch: all ranks start again in 1 s (restart 1 of 1)",
        "resumed from ",
    ];
    ended(&launch(&["-n", "4", "--max-restarts", "1"], &behind(&script, &command)), 0, &words);
    assert!(halves.path().join("mark").exists());
    let (want, got) = (losses(whole.path()), losses(halves.path()));
    assert_eq!(want.len(), 40);
    assert_eq!(got, want, "to the last bit");
}

/// A restart does not resume an earlier run's checkpoints, even if its first start failed.
#[test]
fn a_restart_does_not_go_on_from_an_earlier_run() {
    let folder = tempdir().unwrap();
    let run = |seed: &str, script: &str, code: i32, words: &[&str]| {
        let command = train(ISOBAR, folder.path(), &["train.max_steps=6", &format!("run.seed={seed}")]);
        ended(&launch(&["-n", "2", "--max-restarts", "1"], &behind(script, &command)), code, words);
        losses(folder.path())
    };
    let earlier = run("1", r#"exec "$@""#, 0, &[]);
    let script = r#"if [ "$ISOBAR_LAUNCH_ATTEMPT" = 1 ]; then exit 1; fi; exec "$@""#;
    let refused = ["(restart 1 of 1)", "holds checkpoints and metrics of an earlier run"];
    assert_eq!(run("1", script, 2, &refused), earlier);
    let overwriting = r#"if [ "$ISOBAR_LAUNCH_ATTEMPT" = 1 ]; then exit 1; fi; exec "$@" --overwrite"#;
    let replaced = "are removed then";
    assert_eq!(run("1", overwriting, 0, &["(restart 1 of 1)", replaced]), earlier);
    // Another seed would be refused, were it taken for the same run.
    run("2", overwriting, 0, &[replaced]);
}

#[rstest]
#[case::good("exit 0", 0, 1)]
#[case::failed("exit 1", 1, 3)]
#[case::usage("exit 2", 2, 1)]
#[case::data("exit 3", 3, 1)]
#[case::lost("exit 4", 4, 3)]
#[case::mismatch("exit 5", 5, 1)]
#[case::stopped("exit 6", 6, 1)]
#[case::panic("exit 101", 101, 3)]
#[case::signal("kill -KILL $$", 137, 3)]
#[case::no_command("exec /no/such/command", 127, 1)]
#[case::mended(r#"[ "$ISOBAR_LAUNCH_ATTEMPT" = 2 ] || exit 1"#, 0, 2)]
fn exit_codes_and_restarts(#[case] script: &str, #[case] code: i32, #[case] starts: usize) {
    let folder = tempdir().unwrap();
    let count = folder.path().join("count");
    let script = format!("echo x >>{}; [ $RANK = 1 ] || exit 0; {script}", count.display());
    let options = ["-n", "2", "--max-restarts", "2"];
    ended(&launch(&options, &["sh", "-c", &script]), code, &[]);
    assert_eq!(fs::read_to_string(count).unwrap().lines().count(), 2 * starts);
}

#[test]
fn ranks_of_hosts_find_each_other() {
    let folder = tempdir().unwrap();
    let ssh = ssh(folder.path());
    let file = folder.path().join("hostfile");
    fs::write(&file, "# two\na slots=2\nb:2\n").unwrap();
    for hosts in [["--hosts", "a:2,b:2"], ["--hostfile", &file.display().to_string()]] {
        let options = [&hosts[..], &["--ssh", &ssh, "--master-addr", "127.0.0.1"]].concat();
        let outcome = ended(&launch(&options, &[WHOAMI]), 0, &[]);
        let lines =
            outcome.ranks[0].stdout.lines().filter_map(|line| line.strip_prefix("[rank ")?.split_once("] "));
        let answers: BTreeMap<&str, Value> =
            lines.map(|(rank, text)| (rank, serde_json::from_str(text).unwrap())).collect();
        assert_eq!(answers.len(), 4, "{outcome}");
        for (rank, answer) in &answers {
            let rank: usize = rank.parse().unwrap();
            assert_eq!(
                (&answer["rank"], &answer["local_rank"]),
                (&rank.into(), &(rank % 2).into()),
                "{outcome}"
            );
            assert_eq!((&answer["world_size"], &answer["sum"]), (&4.into(), &10.into()), "{outcome}");
        }
        let hosts = folder.path().join("hosts");
        assert_eq!(sorted_lines(&hosts), ["a", "a", "b", "b"]);
        fs::remove_file(hosts).unwrap();
    }
}

/// An sshd takes ten connections at once whose users it does not know yet, and of more it drops some. Hosts do not wait for each
/// other.
#[test]
fn many_ranks_of_a_host_are_connected_a_few_at_a_time() {
    let folder = tempdir().unwrap();
    let [script, strangers] = ["ssh", "strangers"].map(|name| folder.path().join(name));
    fs::create_dir(&strangers).unwrap();
    let text = format!(
        "#!/bin/sh\ncd '{}' && echo $1 >> order && mkdir -p $1 && cd $1 && touch $$\n\
         [ $(ls | wc -l) -le 10 ] || exit 255\nsleep 0.2\nrm $$\nshift\nprintf 'motd> '\nexec sh -c \"$*\"\n",
        strangers.display()
    );
    fs::write(&script, text).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let options = ["--hosts", "a:15,b:15", "--ssh", &script.display().to_string()];
    let outcome = ended(&launch(&options, &["sh", "-c", "echo $RANK"]), 0, &[]);
    let ranks: BTreeMap<&str, &str> = outcome.ranks[0]
        .stdout
        .lines()
        .filter_map(|line| line.strip_prefix("[rank ")?.split_once("] "))
        .filter(|(_, said)| *said != "motd> ")
        .collect();
    assert_eq!(ranks.len(), 30, "{outcome}");
    assert!(ranks.iter().all(|(rank, said)| rank == said), "{outcome}");
    let order = fs::read_to_string(strangers.join("order")).unwrap();
    assert!(order.find('b') < order.rfind('a'), "{order}");
}

/// Words with all that shells take for their own, through ssh and not.
#[rstest]
fn words_and_variables_arrive_as_they_were(#[values(false, true)] by_ssh: bool) {
    let folder = tempdir().unwrap();
    let ssh = ssh(folder.path());
    let odd = ["two words", "it's", r#""$HOME" `id` \ $(id)"#, "", "*", "--flag=a b", "-n", "ä;|&<>"];
    let mut options = vec!["-n", "1", "--env", "ODD=it's \"so\" $x", "--env", "EMPTY="];
    if by_ssh {
        options.extend(["--hosts", "a:1", "--ssh", &ssh]);
    }
    let script =
        r#"for word; do printf '<%s>\n' "$word"; done; echo "$ODD ${EMPTY-unset} $PWD $RANK of $WORLD_SIZE""#;
    let command: Vec<&str> = ["sh", "-c", script, "sh"].into_iter().chain(odd).collect();
    let outcome = ended(&launch(&options, &command), 0, &[]);
    let mut expected: Vec<String> = odd.iter().map(|word| format!("<{word}>")).collect();
    expected.push(format!("it's \"so\" $x  {} 0 of 1", workspace().display()));
    assert_eq!(
        outcome.ranks[0].stdout.lines().collect::<Vec<_>>(),
        expected,
        "a single rank needs no prefix"
    );
}

/// The ranks of a job have one secret, which is part of no command line: that which is given, or one that no other job has.
#[rstest]
fn ranks_share_a_secret(#[values(false, true)] by_ssh: bool) {
    let folder = tempdir().unwrap();
    let ssh = ssh(folder.path());
    let mut options = vec!["-n", "2", "--no-prefix"];
    if by_ssh {
        options.extend(["--hosts", "a:1,b:1", "--ssh", &ssh]);
    }
    let secret = |given: Option<&str>| {
        let launch = launch(&options, &["sh", "-c", "echo $ISOBAR_DISTRIBUTED_TOKEN"]);
        let launch = given.map_or(launch.clone(), |given| launch.env("ISOBAR_DISTRIBUTED_TOKEN", given));
        let outcome = ended(&launch, 0, &[]);
        let said: Vec<&str> = outcome.ranks[0].stdout.lines().collect();
        assert!(said.len() == 2 && said[0] == said[1], "{outcome}");
        said[0].to_owned()
    };
    let secrets = [None, None, Some(" "), Some("of-twenty-characters\n")].map(secret);
    assert!(secrets[..3].iter().all(|secret| secret.len() == 64), "{secrets:?}");
    assert!(secrets[0] != secrets[1] && secrets[1] != secrets[2], "{secrets:?}");
    assert_eq!(secrets[3], "of-twenty-characters");
    if by_ssh {
        let commands = fs::read_to_string(folder.path().join("commands")).unwrap();
        assert!(commands.contains("LOCAL_WORLD_SIZE=1"), "{commands}");
        assert!(!secrets.iter().any(|secret| commands.contains(secret)), "{commands}");
    }
}

#[rstest]
fn threads_share_the_cores(#[values(false, true)] by_ssh: bool) {
    let folder = tempdir().unwrap();
    let ssh = ssh(folder.path());
    let command = ["sh", "-c", "echo $OMP_NUM_THREADS"];
    let options = match by_ssh {
        true => vec!["--hosts", "a:64", "--ssh", &ssh],
        false => vec!["-n", "64"],
    };
    let run = |environment: &str| {
        let inner = [&[ISOBAR, "launch"][..], &options[..], &["--no-prefix", "--"], &command[..]].concat();
        let script = format!("{environment}; exec \"$@\"");
        let launch = Launch::plain(1, "sh").args(["-c", &script, "sh"]).args(inner);
        ended(&launch, 0, &[]).ranks[0].stdout.clone()
    };
    assert_eq!(run("export OMP_NUM_THREADS=3"), "3\n".repeat(64));
    let cores = thread::available_parallelism().unwrap().get();
    assert_eq!(run("unset OMP_NUM_THREADS"), format!("{}\n", (cores / 64).max(1)).repeat(64));
}

#[rstest]
fn a_rank_that_fails_ends_the_others_and_all_that_they_started(#[values(false, true)] by_ssh: bool) {
    let folder = tempdir().unwrap();
    let ssh = ssh(folder.path());
    // Deaf to SIGTERM, with a child of its own.
    let script = format!(
        r#"echo $$ >{0}/$RANK.pid
        if [ $RANK = 1 ]; then
            while [ ! -s {0}/child0.pid ] || [ ! -s {0}/child2.pid ]; do sleep 0.05; done
            seq 30 >&2; sleep 300 & echo $! >{0}/child1.pid; exit 7
        fi
        trap "" TERM; sleep 300 & echo $! >{0}/child$RANK.pid; wait"#,
        folder.path().display()
    );
    let mut options = vec!["-n", "3", "--grace", "1"];
    if by_ssh {
        options.extend(["--hosts", "a:2,b:1", "--ssh", &ssh]);
    }
    let words = [
        "failed first, after ",
        ": it ended with code 7",
        "    | 30\n",
        "was killed by signal 9 (SIGKILL), told so by the launcher",
    ];
    let outcome = ended(&launch(&options, &["sh", "-c", &script]), 7, &words);
    assert!(outcome.ranks[0].stderr.contains("isobar launch: rank 1 ("), "{outcome}");
    assert!(!outcome.ranks[0].stderr.contains("    | 18\n"), "only the last lines: {outcome}");
    all_gone(folder.path(), 6);
}

/// Even the launcher's own death leaves nothing behind.
#[rstest]
fn a_killed_launcher_leaves_no_rank(#[values(false, true)] by_ssh: bool) {
    let folder = tempdir().unwrap();
    let ssh = ssh(folder.path());
    let rank = format!(
        r#"echo $$ >{0}/$RANK.pid; trap "" TERM; sleep 300 & echo $! >{0}/child$RANK.pid; wait"#,
        folder.path().display()
    );
    let mut options = vec!["-n", "2", "--grace", "1"];
    if by_ssh {
        options.extend(["--hosts", "a:1,b:1", "--ssh", &ssh]);
    }
    let script = format!(
        r#""$@" & pid=$!
        while [ ! -s {0}/child0.pid ] || [ ! -s {0}/child1.pid ]; do kill -0 $pid || exit 1; sleep 0.05; done
        kill -KILL $pid; wait $pid; echo code $?"#,
        folder.path().display()
    );
    let inner = [&[ISOBAR, "launch"][..], &options[..], &["--", "sh", "-c", &rank]].concat();
    let outcome = Launch::plain(1, "sh").args(["-c", &script, "sh"]).args(inner).run().unwrap();
    assert!(outcome.ranks[0].stdout.contains("code 137"), "{outcome}");
    all_gone(folder.path(), 4);
}

/// Even if a rank kills it at once.
#[test]
fn a_launcher_that_is_killed_by_a_new_rank_leaves_none() {
    for _ in 0..10 {
        let folder = tempdir().unwrap();
        let rank = format!("echo $$ >{}/0.pid; kill -KILL $PPID; exec sleep 300", folder.path().display());
        let script = r#""$@"; echo code $?"#;
        let inner = [ISOBAR, "launch", "-n", "1", "--grace", "0", "--", "sh", "-c", &rank];
        let outcome = Launch::plain(1, "sh").args(["-c", script, "sh"]).args(inner).run().unwrap();
        assert!(outcome.ranks[0].stdout.contains("code 137"), "{outcome}");
        all_gone(folder.path(), 1);
    }
}

/// The launcher of an endless run, which gets a signal once the run takes steps.
fn signalled(signal: &str, folder: &TempDir, options: &[&str]) -> Outcome {
    let command = train(ISOBAR, folder.path(), &["train.epochs=100000"]);
    let rank = format!(r#"echo $$ >{}/$RANK.pid; exec "$@""#, folder.path().display());
    let script = format!(
        r#"metrics={}/run/metrics.jsonl
        "$@" & pid=$!; while [ ! -s "$metrics" ] && kill -0 $pid; do sleep 0.05; done
        kill -{signal} $pid; wait $pid; echo code $?"#,
        folder.path().display()
    );
    let inner = [&[ISOBAR, "launch", "-n", "2"][..], options, &["--"], &behind(&rank, &command)[..]].concat();
    let launch = Launch::plain(1, "sh").current_dir(workspace()).args(["-c", &script, "sh"]);
    launch.args(inner).run().unwrap()
}

#[rstest]
#[case::term("TERM")]
// In the background a shell lets its commands ignore interrupts: the launcher and its ranks ask for them nevertheless.
#[case::interrupt("INT")]
// As where the launcher's ranks are told, too.
#[case::twice("INT $pid; sleep 0.1; kill -INT")]
fn a_run_that_is_told_to_end_saves_and_ends_with_6(#[case] signal: &str) {
    let folder = tempdir().unwrap();
    let outcome = signalled(signal, &folder, &["--max-restarts", "3"]);
    let said = &outcome.ranks[0];
    assert!(said.stdout.contains("told to stop; `--resume` goes on"), "{outcome}");
    assert!(said.stdout.ends_with("code 6\n"), "{outcome}");
    assert!(!said.stderr.contains("isobar launch:"), "no failure, no restart: {outcome}");
    assert!(fs::read_dir(folder.path().join("run/checkpoints")).unwrap().count() > 0);
    all_gone(folder.path(), 2);
}

/// Programs that ask for nothing are ended by it, and the launcher says so.
#[test]
fn an_interrupt_ends_other_programs() {
    let folder = tempdir().unwrap();
    let script = format!(
        r#""$@" & pid=$!
        while [ ! -e {0}/0.pid ] || [ ! -e {0}/1.pid ]; do kill -0 $pid || exit 1; sleep 0.05; done
        kill -INT $pid; wait $pid; echo code $?"#,
        folder.path().display()
    );
    // Does not ignore SIGINT, unlike commands that a shell starts in the background.
    let rank = format!(
        "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); \
         open('{}/' + os.environ['RANK'] + '.pid', 'w').write(str(os.getpid())); time.sleep(300)",
        folder.path().display()
    );
    let inner = [ISOBAR, "launch", "-n", "2", "--max-restarts", "3", "--", "python3", "-c", &rank];
    let outcome = Launch::plain(1, "sh").args(["-c", &script, "sh"]).args(inner).run().unwrap();
    assert!(outcome.ranks[0].stdout.ends_with("code 130\n"), "{outcome}");
    assert!(outcome.ranks[0].stderr.contains("isobar launch: SIGINT was passed on"), "{outcome}");
    all_gone(folder.path(), 2);
}

#[rstest]
fn sigusr1_is_passed_on(#[values(false, true)] by_ssh: bool) {
    let folder = tempdir().unwrap();
    let ssh = ssh(folder.path());
    let rank = format!(
        r#"trap 'echo told; exit 0' USR1; : >{}/ready$RANK; while :; do sleep 0.05; done"#,
        folder.path().display()
    );
    let mut options = vec!["-n", "2"];
    if by_ssh {
        options.extend(["--hosts", "a:1,b:1", "--ssh", &ssh]);
    }
    let script = format!(
        r#""$@" & pid=$!
        while [ ! -e {0}/ready0 ] || [ ! -e {0}/ready1 ]; do kill -0 $pid || exit 1; sleep 0.05; done
        kill -USR1 $pid; wait $pid; echo code $?"#,
        folder.path().display()
    );
    let inner = [&[ISOBAR, "launch"][..], &options[..], &["--", "sh", "-c", &rank]].concat();
    let outcome = Launch::plain(1, "sh").args(["-c", &script, "sh"]).args(inner).run().unwrap();
    let said = &outcome.ranks[0].stdout;
    assert!(said.contains("[rank 0] told\n") && said.contains("[rank 1] told\n"), "{outcome}");
    assert!(said.ends_with("code 0\n"), "{outcome}");
}

#[test]
fn output_goes_to_files() {
    let folder = tempdir().unwrap();
    let logs = folder.path().join("logs");
    let path = logs.display().to_string();
    let script = "echo out $RANK; echo err $RANK >&2; [ $RANK = 0 ] || exit 3";
    let options = ["-n", "2", "--log-dir", &path];
    let words = ["isobar launch: rank 1 (", "/rank_1.err):\n    | err 1"];
    let outcome = ended(&launch(&options, &["sh", "-c", script]), 3, &words);
    assert_eq!(outcome.ranks[0].stdout, "out 0\n", "rank 0's alone, without prefix");
    assert!(outcome.ranks[0].stderr.contains("err 0\n"), "{outcome}");
    for rank in 0..2 {
        for stream in ["out", "err"] {
            let text = fs::read_to_string(logs.join(format!("rank_{rank}.{stream}"))).unwrap();
            assert_eq!(text, format!("{stream} {rank}\n"));
        }
    }
}

#[rstest]
#[case::nothing(&[], &[], "required")]
#[case::no_command(&["-n", "2"], &[], "required")]
#[case::no_number(&[], &["true"], "give -n RANKS")]
#[case::no_rank(&["-n", "0"], &["true"], "0 is not in 1..=65536")]
#[case::too_many(&["-n", "3", "--hosts", "a:2"], &["true"], "3 ranks are asked for, and the hosts take 2")]
#[case::no_host(&["--hosts", "a:x"], &["true"], "\"x\" is no number of ranks")]
#[case::an_option_for_ssh(&["--hosts=-oProxyCommand=x"], &["true"], "no host")]
#[case::two_lists(&["--hosts", "a", "--hostfile", "b"], &["true"], "cannot be used with")]
#[case::no_hostfile(&["--hostfile", "no/such"], &["true"], "no/such")]
#[case::no_program(&["-n", "2"], &["/no/such/program"], "cannot start /no/such/program")]
#[case::no_grace(&["-n", "1", "--grace", "long"], &["true"], "a number of seconds")]
#[case::no_variable(&["-n", "1", "--env", "NO_SUCH_VARIABLE"], &["true"], "is not set here")]
#[case::no_name(&["-n", "1", "--env", "a b=c"], &["true"], "is no name of a variable")]
#[case::no_folder(&["-n", "1", "--log-dir", "/dev/null/x"], &["true"], "--log-dir")]
fn wrong_command_lines_end_with_2(#[case] options: &[&str], #[case] command: &[&str], #[case] words: &str) {
    ended(&launch(options, command), 2, &[words]);
}

#[test]
fn one_of_several_ranks_launches_nothing() {
    let outcome = Launch::plain(2, ISOBAR).args(["launch", "-n", "2", "--", "true"]).run().unwrap();
    for rank in &outcome.ranks {
        assert!(rank.stderr.contains("was itself started as one of several ranks"), "{outcome}");
    }
    assert_eq!(outcome.exit, Exit::Code(2), "{outcome}");
}

#[test]
fn a_check_shows_ranks_and_findings() {
    let folder = tempdir().unwrap();
    let output = format!("run.output={}", folder.path().display());
    let command = [ISOBAR, "check", "configs/darcy_afno.toml", "--set", &output];
    let outcome = ended(&launch(&["-n", "2", "--no-prefix"], &command), 0, &["threads", "PMIx    not there"]);
    let lines: Vec<&str> = outcome.ranks[0].stdout.lines().collect();
    assert!(lines[0].starts_with("rank  host"), "{outcome}");
    assert!(
        lines[1].starts_with("0 ") && lines[2].starts_with("1 ") && lines[2].contains(" ENV "),
        "{outcome}"
    );
    assert!(lines.iter().any(|line| line.starts_with("torch   libtorch 2.")), "{outcome}");
    let cores = thread::available_parallelism().unwrap().get();
    let (threads, all) =
        (format!("OMP_NUM_THREADS={cores}"), format!("2 ranks compute with {} threads in all", 2 * cores));
    let options = ["-n", "2", "--no-prefix", "--env", &threads];
    let crowded = ended(&launch(&options, &[ISOBAR, "check"]), 0, &["warning: on ", &all]);
    assert_eq!(crowded.ranks[0].stdout.matches("warning: on ").count(), 1, "told once: {crowded}");
}

/// Each of mpirun's ranks was told to be alone.
#[test]
fn ranks_that_take_themselves_for_alone_are_found() {
    if !has_mpi() {
        return;
    }
    let launch =
        Launch::mpirun(2, ISOBAR).env("ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD", "SINGLE").arg("check");
    let outcome = launch.run().unwrap().expect_success();
    for rank in &outcome.ranks {
        let words = "warning: mpirun started 2 processes (OMPI_COMM_WORLD_SIZE), and each takes itself for the only rank";
        assert!(rank.stdout.contains(words), "{outcome}");
    }
}

#[test]
fn srun_without_pmix_is_found() {
    if !has_mpi() || !has_slurm() {
        return;
    }
    let outcome = Launch::srun(2, "none", ISOBAR).arg("check").run().unwrap();
    assert_ne!(outcome.exit, Exit::Code(0), "{outcome}");
    // The task that ends first has srun end the other, perhaps before it has said so, too.
    let words = "srun started no PMIx server";
    assert!(outcome.ranks.iter().any(|rank| rank.stderr.contains(words)), "{outcome}");
    let alone = Launch::srun(2, "none", ISOBAR).env("ISOBAR_DISTRIBUTED__METHOD", "single").arg("check");
    for rank in &alone.run().unwrap().expect_success().ranks {
        let words = "warning: srun started 2 processes (SLURM_STEP_NUM_TASKS), and each takes itself for the only rank";
        assert!(rank.stdout.contains(words), "{}", rank.stdout);
    }
}

/// srun starts two mpiruns, which know nothing of each other.
#[test]
fn mpirun_in_each_task_of_srun_is_found() {
    if !has_mpi() || !has_slurm() {
        return;
    }
    // Of two jobs that share a folder, one fails to make its session in it.
    let folder = tempdir().unwrap();
    ["0", "1"].iter().for_each(|task| fs::create_dir(folder.path().join(task)).unwrap());
    // Each rank's output is its own; that of the inner ones is mpirun's.
    let script = format!(
        "OMPI_MCA_orte_tmpdir_base={}/$SLURM_PROCID mpirun --oversubscribe --bind-to none -n 2 {ISOBAR} check",
        folder.path().display()
    );
    let launch = Launch::srun(2, "none", "sh").args(["-c", &script]);
    let launch = launch.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let outcome = launch.run().unwrap();
    assert_ne!(outcome.exit, Exit::Code(0), "{outcome}");
    // The task that ends first has srun end the other, perhaps before it has said so, too.
    let words = "error: srun started 2 processes, and mpirun in each a job of its own of 2 ranks";
    assert!(outcome.ranks.iter().any(|task| task.stdout.contains(words)), "{outcome}");
}

/// Problems that would lose results end a run before it starts, on all ranks.
#[test]
fn a_run_whose_folder_cannot_be_used_does_not_start() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let command = train(ISOBAR, &file, &[]);
    let outcome = ended(&launch(&["-n", "2"], &behind(r#"exec "$@""#, &command)), 2, &[]);
    assert_eq!(outcome.ranks[0].stderr.matches("] error: rank 0 (").count(), 1, "printed once: {outcome}");
    assert!(outcome.ranks[0].stderr.contains(" cannot write to "), "{outcome}");

    let apart = train(ISOBAR, folder.path(), &[]);
    let script = format!(r#"exec "$@" --set run.output={}/of_$RANK"#, folder.path().display());
    let words = ["error: rank 1 (", "does not see in ", "into a folder that they share"];
    ended(&launch(&["-n", "2"], &behind(&script, &apart)), 2, &words);
}
