//! All tests, several times, while every core is kept busy: what passes only on an idle machine fails here.

use std::{
    hint::spin_loop,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::Result;

use super::{Session, suites::Suites};

/// Runs all tests `rounds` times, each for at most `limit`.
pub(super) fn run(session: &mut Session<'_>, suites: &Suites, rounds: u32, limit: Duration) -> Result<()> {
    let mut lines = Vec::new();
    for round in 1..=rounds {
        let (failed, named) = (session.summary.failed, session.summary.failures.len());
        session.end = Instant::now() + limit;
        {
            let _busy = Busy::start(thread::available_parallelism().map_or(2, usize::from));
            session.test_all(false, suites)?;
        }
        let summary = &mut session.summary;
        lines.push(format!("round {round} of {rounds}: {} failed", summary.failed - failed));
        for failure in &mut summary.failures[named..] {
            failure.name = format!("round {round}: {}", failure.name);
        }
    }
    lines.iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// Threads that spin, at normal priority, until this is dropped.
struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    fn start(count: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let spin = |stop: Arc<AtomicBool>| {
            move || {
                while !stop.load(Ordering::Relaxed) {
                    spin_loop();
                }
            }
        };
        let threads = (0..count).map(|_| thread::spawn(spin(stop.clone()))).collect();
        Self { stop, threads }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap_or(()));
    }
}
