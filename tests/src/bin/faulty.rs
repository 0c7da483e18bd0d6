//! The command `isobar`, of which one rank fails where it is told to. `FAULT` is `RANK PHASE STEP HOW MARK`: from which step
//! on in which phase (`end`: when the command has done its work, and its process has not ended), how (`kill`, `stop`, `panic`, `hang`, `extra`, `eat`: takes memory until it is killed, or `command`: by what a shell makes of `FAULT_COMMAND`), and
//! the file that is made just before.
#![expect(clippy::print_stderr, reason = "a program of tests, read by them")]

use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{fs, thread};

use isobar_collectives::flight;
use isobar_manager::DistributedManager;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn main() -> ExitCode {
    let fault = std::env::var("FAULT").unwrap_or_default();
    let words: Vec<String> = fault.split_whitespace().map(str::to_owned).collect();
    if let [rank, phase, step, how, mark] = &words[..] {
        let [rank, phase, how, mark] = [rank, phase, how, mark].map(Clone::clone);
        let from: u64 = step.parse().unwrap_or_default();
        let failed = AtomicBool::new(false);
        flight::on_phase(move |now, step| {
            let own = DistributedManager::get().map(|manager| manager.rank().to_string());
            if now.name() == phase
                && step >= from
                && own.is_ok_and(|own| own == rank)
                && !failed.swap(true, Ordering::Relaxed)
            {
                fail(&how, &mark);
            }
        });
    }
    let code = isobar_app::App::new().main();
    if let [rank, "end", _, how, mark] = &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        let own =
            ["RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"].iter().find_map(|name| std::env::var(name).ok());
        if own.as_deref() == Some(*rank) {
            fail(how, mark);
        }
    }
    code
}

fn fail(how: &str, mark: &str) {
    let own = Pid::this();
    // Long enough for the others to hear of the phase; many short pauses take longer on a loaded machine.
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(50));
    }
    let _ = fs::write(mark, own.to_string());
    match how {
        "kill" => {
            let _ = kill(own, Signal::SIGKILL);
        }
        "stop" => {
            // No launcher of plain processes ends one that is stopped.
            let later = format!("sleep {}; kill -KILL {own}", STOPPED.as_secs_f64());
            let _ = Command::new("sh").args(["-c", &later]).spawn();
            let _ = kill(own, Signal::SIGSTOP);
        }
        "command" => {
            let line = std::env::var("FAULT_COMMAND").unwrap_or_default();
            let _ = Command::new("sh").args(["-c", &line]).status();
        }
        "panic" => panic!("as it was told"),
        // A collective that the others do not make: they come to no end together.
        "extra" => {
            let world = DistributedManager::get().and_then(|manager| manager.group(None));
            if let Ok(Err(error)) = world.map(|world| world.barrier()) {
                eprintln!("error: {error}");
            }
            // Further calls would be of a rank that knows already that the others have gone.
            thread::sleep(Duration::from_secs(3600));
        }
        "eat" => eat(),
        "hang" => thread::sleep(Duration::from_secs(3600)),
        _ => {}
    }
}

/// Takes memory until the process is killed, or has so much that no limit holds it.
fn eat() {
    let mut taken = Vec::new();
    while taken.len() < MOST_PIECES {
        let mut piece = vec![0_u8; 16 << 20];
        // The system gives a page once something is written to it.
        piece.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        taken.push(piece);
    }
    eprintln!("took {} pieces of memory, and lives", taken.len());
}

/// 4 GiB in pieces of 16 MiB.
const MOST_PIECES: usize = 256;

/// Time that a process stays stopped: longer than the silence by which the tests notice it, with room for a loaded machine.
const STOPPED: Duration = Duration::from_secs(15);
