//! A process that is asked to end.
//!
//! SIGTERM has two meanings. When a rank has died, launchers send it to those that are left: then the watchdog writes its
//! record and ends the process. When all ranks are alive, somebody outside wants the job to end, for instance SLURM at its
//! time limit: then there is time to save.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::SIGTERM;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::watchdog::Watchdog;
use crate::{Error, Result};

/// For so long a lost rank may show after the signal.
const SHOWS: Duration = Duration::from_millis(300);

/// Signals that come so soon after the first are the same request: a service manager tells all processes of a job, and their
/// launcher passes it on.
const SAME: Duration = Duration::from_secs(2);

/// By then the watchdog has ended the process.
const ENDS: Duration = Duration::from_secs(4);

static INSTALLED: Mutex<bool> = Mutex::new(false);
static WATCHDOG: Mutex<Option<Watchdog>> = Mutex::new(None);
static INTERESTED: AtomicUsize = AtomicUsize::new(0);
static REQUESTED: AtomicBool = AtomicBool::new(false);
static FIRST: OnceLock<Instant> = OnceLock::new();

/// Asks to be told, instead of ended, when this process is to end while all ranks are alive: while it lives, SIGTERM sets
/// [`requested`](Self::requested). Another SIGTERM, two seconds later or more, ends the process.
///
/// What the signal reaches is one process: ranks that want to end together agree on it, for instance by the largest of what
/// each was asked.
///
/// ```
/// use isobar_manager::Termination;
///
/// let termination = Termination::watch()?;
/// for step in 0..3 {
///     if termination.requested() {
///         break; // save, and end
///     }
/// }
/// # Ok::<(), isobar_manager::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the signal ends the process once this is dropped"]
pub struct Termination(());

impl Termination {
    /// Begins to watch.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn watch() -> Result<Self> {
        install(None)?;
        INTERESTED.fetch_add(1, Ordering::SeqCst);
        Ok(Self(()))
    }

    /// Whether this process was asked to end while all ranks were alive.
    #[must_use]
    pub fn requested(&self) -> bool {
        REQUESTED.load(Ordering::Relaxed)
    }
}

impl Drop for Termination {
    fn drop(&mut self) {
        INTERESTED.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Listens for the signal from now on, beside this watchdog if there is one. After an error nothing is changed.
pub(crate) fn install(watchdog: Option<Watchdog>) -> Result<()> {
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if !*installed {
        let listening = Signals::new([SIGTERM]).and_then(|mut signals| {
            let thread = thread::Builder::new().name("isobar-signals".to_owned());
            thread.spawn(move || signals.forever().for_each(|_| asked()))
        });
        listening.map_err(|error| Error::Signals { problem: error.to_string() })?;
        *installed = true;
    }
    if watchdog.is_some() {
        *WATCHDOG.lock().unwrap_or_else(PoisonError::into_inner) = watchdog;
    }
    Ok(())
}

/// The watchdog has ended its watch.
pub(crate) fn forget_watchdog() {
    *WATCHDOG.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

fn asked() {
    let again = REQUESTED.load(Ordering::SeqCst);
    let same = FIRST.get().is_some_and(|first| first.elapsed() < SAME);
    let watchdog = WATCHDOG.lock().unwrap_or_else(PoisonError::into_inner).clone();
    if let Some(watchdog) = watchdog {
        watchdog.set_asked(true);
        let begun = Instant::now();
        while begun.elapsed() < SHOWS && watchdog.peers_alive() {
            thread::sleep(Duration::from_millis(10));
        }
        if !watchdog.peers_alive() {
            thread::sleep(ENDS);
            end();
        }
        watchdog.set_asked(false);
    }
    if INTERESTED.load(Ordering::SeqCst) == 0 || (again && !same) {
        end();
    }
    if again {
        return;
    }
    let _ = FIRST.set(Instant::now());
    REQUESTED.store(true, Ordering::SeqCst);
    tracing::warn!("asked to end (SIGTERM): the run is saved at the next step, and ends");
}

fn end() {
    // What the signal does to a program that knows nothing of it.
    let _ = emulate_default_handler(SIGTERM);
}
