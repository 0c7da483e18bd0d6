//! Requests to stop this process, by SIGTERM or SIGINT (Ctrl-C).
//!
//! SIGTERM has two meanings. When a rank has died, launchers send it to those that are left: then the watchdog writes its
//! record and ends the process. When all ranks are alive, somebody outside wants the job to end, for instance SLURM at its
//! time limit: then there is time to save.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::{emulate_default_handler, signal_name};

use crate::watchdog::Watchdog;
use crate::{Error, Result};

/// For so long a lost rank may show after the signal.
const SHOWS: Duration = Duration::from_millis(300);

/// Signals within this time of the first are the same request: a service manager signals all processes of a
/// job, and their launcher forwards its own signal.
const SAME: Duration = Duration::from_secs(2);

/// By then the watchdog has ended the process.
const ENDS: Duration = Duration::from_secs(4);

/// Adds signals to those that the thread listens for.
static LISTENER: Mutex<Option<Handle>> = Mutex::new(None);
static WATCHDOG: Mutex<Option<Watchdog>> = Mutex::new(None);
static INTERESTED: AtomicUsize = AtomicUsize::new(0);
static REQUESTED: AtomicBool = AtomicBool::new(false);
static FIRST: OnceLock<Instant> = OnceLock::new();

/// Makes a write beyond the limit of file sizes (`ulimit -f`) an error that names the file. By default SIGXFSZ ends the process without
/// a message. For the start of a program; other processes that it starts are not affected.
pub fn make_file_limit_an_error() {
    // With any handler the write returns an error. Without one the default stays.
    let _ = flag::register(SIGXFSZ, Arc::default());
}

/// Handler for SIGTERM and SIGINT (Ctrl-C) while all ranks are alive. While this value lives, these signals
/// set [`requested`](Self::requested) instead of ending the process. A second signal, at least two seconds
/// later, ends it.
///
/// SIGINT is handled even if it was ignored before, since shells make background commands ignore it.
///
/// A signal reaches one process: ranks that should end together must agree, for instance by an all-reduce (max) of their
/// requests.
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
#[must_use = "the signals end the process once this is dropped"]
pub struct Termination(());

impl Termination {
    /// Begins to watch.
    ///
    /// # Errors
    ///
    /// An error of the system.
    pub fn watch() -> Result<Self> {
        install(None)?;
        listen_for_interrupts()?;
        INTERESTED.fetch_add(1, Ordering::SeqCst);
        Ok(Self(()))
    }

    /// Returns whether this process was asked to end while all ranks were alive.
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

/// Makes SIGTERM and SIGINT (Ctrl-C) remove the partial outputs of this process ([`isobar_files::remove_partial`]) before they
/// end it. An ignored SIGINT stays ignored, as in background commands of shells.
///
/// # Errors
///
/// An error of the system.
pub fn remove_partial_outputs() -> Result<()> {
    install(None)?;
    if !is_ignored(SIGINT) {
        listen_for_interrupts()?;
    }
    Ok(())
}

/// Listens for SIGTERM from now on, beside this watchdog if there is one. After an error nothing is changed.
pub(crate) fn install(watchdog: Option<Watchdog>) -> Result<()> {
    let mut listener = LISTENER.lock().unwrap_or_else(PoisonError::into_inner);
    if listener.is_none() {
        let listening = Signals::new([SIGTERM]).and_then(|mut signals| {
            let handle = signals.handle();
            let thread = thread::Builder::new().name("isobar-signals".to_owned());
            thread.spawn(move || signals.forever().for_each(asked)).map(|_| handle)
        });
        *listener = Some(listening.map_err(refused)?);
    }
    drop(listener);
    if watchdog.is_some() {
        *WATCHDOG.lock().unwrap_or_else(PoisonError::into_inner) = watchdog;
    }
    Ok(())
}

/// Adds SIGINT to the signals of the listener, which must be there.
fn listen_for_interrupts() -> Result<()> {
    match LISTENER.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
        Some(listener) => listener.add_signal(SIGINT).map_err(refused),
        None => Ok(()),
    }
}

/// Returns whether this process ignores a signal.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (signal - 1) != 0)
}

/// The watchdog has ended its watch.
pub(crate) fn forget_watchdog() {
    *WATCHDOG.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

#[expect(clippy::needless_pass_by_value, reason = "the shape that map_err takes")]
fn refused(error: std::io::Error) -> Error {
    Error::Signals { problem: error.to_string() }
}

fn asked(signal: i32) {
    // Ctrl-C ends a program that does not watch, as usual.
    if signal == SIGINT && INTERESTED.load(Ordering::SeqCst) == 0 {
        end(signal);
    }
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
            end(signal);
        }
        watchdog.set_asked(false);
    }
    if INTERESTED.load(Ordering::SeqCst) == 0 {
        end(signal);
    }
    let name = signal_name(signal).unwrap_or("a signal");
    if again && !same {
        tracing::warn!("asked to end once more ({name}): ends at once, without a checkpoint");
        crate::logging::flush();
        end(signal);
    }
    if again {
        return;
    }
    let _ = FIRST.set(Instant::now());
    REQUESTED.store(true, Ordering::SeqCst);
    tracing::warn!(
        "asked to end ({name}): the run is saved after the step under way, and ends (without a checkpoint before the first step); once more \
         ends it at once"
    );
}

fn end(signal: i32) {
    isobar_files::remove_partial();
    // Default action of the signal.
    let _ = emulate_default_handler(signal);
}
