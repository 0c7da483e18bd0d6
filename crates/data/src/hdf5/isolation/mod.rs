//! Reads an HDF5 file in a helper process before this process opens it.
//!
//! Some damaged files crash the HDF5 library, which is in C, send it into an endless loop, or make it take all memory. With a
//! helper, only that process is lost, and the caller gets an error that names the file. The helper is the program itself,
//! started again with an environment variable that [`serve`](super::serve) looks for before `main`.
//!
//! A file is rejected if it crashes the HDF5 library, or if the library needs more than 5 s of processor time (more for files from
//! 4 MiB on) or 1 GiB of memory to read it. The helper reads a file again only if its size, times or inode changed. It starts when
//! a file is opened, without the environment variables of launchers such as mpirun, and ends after 5 s without a file. On each
//! host, one process of a user checks a file that has not changed for 3 s; others take its verdict. That a file is good is taken
//! for a day. If no helper can work (no process can be started, a library is missing, or the system kills it), one warning says
//! so, and files are opened directly.

mod helper;
mod shared;

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{LazyLock, Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::Duration;

use self::helper::{Answer, Helper};
pub(super) use self::helper::{GOOD, HELPER, OUT_OF_MEMORY, UNLISTED, is_readable, next_path};
use self::shared::SharedVerdicts;
use crate::{Error, Result};

/// Address space that the library may take in a helper, in bytes.
pub(super) const MEMORY: u64 = 1 << 30;

/// Returns the limit of processor time for a file of `length` bytes, in seconds. 4 MiB may hold thousands of datasets.
pub(super) fn seconds(length: u64) -> u64 {
    5 + (length >> 22).min(115)
}

/// Program that serves as helper.
#[derive(Debug)]
struct Program {
    path: PathBuf,
    args: Vec<OsString>,
}

/// This program. `/proc/self/exe` finds it even if its file was replaced meanwhile.
static OWN: LazyLock<Program> = LazyLock::new(|| Program { path: "/proc/self/exe".into(), args: Vec::new() });
static CHECKS: LazyLock<Checks> =
    LazyLock::new(|| Checks { shared: Some(SharedVerdicts::of_user()), ..Checks::default() });

/// Rejects a file that a helper process cannot read.
pub(crate) fn check(path: &Path, length: u64) -> Result<()> {
    static IS_PROGRAM: LazyLock<bool> = LazyLock::new(is_program);
    if !*IS_PROGRAM {
        warn_once("Isobar is in a shared library of another program, which can't serve as one");
        return Ok(());
    }
    CHECKS.check(&OWN, path, length)
}

/// Returns whether this code is part of the program, and not of a library that another program loaded.
fn is_program() -> bool {
    let address = is_program as *const () as usize;
    let within = |range: &str| {
        let (start, end) = range.split_once('-')?;
        let [start, end] = [start, end].map(|number| usize::from_str_radix(number, 16));
        Some((start.ok()?..end.ok()?).contains(&address))
    };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let own = maps.lines().find(|line| line.split(' ').next().and_then(within).unwrap_or(false));
    let (own, program) =
        (own.and_then(|line| line.find('/').map(|at| &line[at..])), std::fs::read_link("/proc/self/exe"));
    own.zip(program.ok()).is_some_and(|(own, program)| Path::new(own) == program)
}

/// Values that differ between versions of a file: device, inode, length, time of modification and of change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp([i64; 7]);

impl Stamp {
    fn of(path: &Path) -> Result<Self> {
        let of = std::fs::metadata(path).map_err(|error| Error::io(path, "look at it", error))?;
        let place = [of.dev() as i64, of.ino() as i64, of.len() as i64];
        let [device, inode, length] = place;
        Ok(Self([device, inode, length, of.mtime(), of.mtime_nsec(), of.ctime(), of.ctime_nsec()]))
    }
}

/// Pauses between attempts to start a helper: where threads and processes are limited, some may end meanwhile.
const PAUSES: [Duration; 3] = [Duration::from_millis(50), Duration::from_millis(300), Duration::from_secs(1)];

/// The running helper, and the problem of each file that was checked: `None` for a good file.
#[derive(Debug, Default)]
struct Checks {
    shared: Option<SharedVerdicts>,
    helper: Mutex<Option<Helper>>,
    known: Mutex<HashMap<PathBuf, (Stamp, Option<String>)>>,
}

/// A verdict on a file.
enum Verdict {
    Good,
    /// The file is rejected, for this reason.
    Rejected(String),
    /// The helper could not do its work, for this reason, which says nothing of the file.
    Unknown(String),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Checks {
    fn check(&self, program: &Program, path: &Path, length: u64) -> Result<()> {
        let stamp = Stamp::of(path)?;
        let known = lock(&self.known).get(path).filter(|(known, _)| *known == stamp).cloned();
        let problem = match known {
            Some((_, problem)) => problem,
            None => {
                let read = || self.ask(program, path, length);
                let verdict = match &self.shared {
                    Some(shared) => shared.verdict(path, &stamp, length, program, read)?,
                    None => read()?,
                };
                let problem = match verdict {
                    Verdict::Good => None,
                    Verdict::Rejected(problem) => Some(problem),
                    Verdict::Unknown(reason) => {
                        warn_once(&reason);
                        return Ok(());
                    }
                };
                lock(&self.known).insert(path.to_owned(), (stamp, problem.clone()));
                problem
            }
        };
        match problem {
            Some(problem) => Err(Error::Rejected { path: path.to_owned(), problem }),
            None => Ok(()),
        }
    }

    /// Lets a helper read a file and returns its verdict. Rejects a file only if a fresh helper fails on it: an earlier
    /// damaged file may have corrupted the library's memory.
    fn ask(&self, program: &Program, path: &Path, length: u64) -> Result<Verdict> {
        let failed = |why: &str| {
            Err(Error::io(path, "let another process read it first", std::io::Error::other(why.to_owned())))
        };
        let mut kept = lock(&self.helper);
        if let Some(mut helper) = kept.take()
            && matches!(helper.read(path), Answer::Good)
        {
            *kept = Some(helper).filter(|helper| helper.served() < MOST_FILES);
            return Ok(Verdict::Good);
        }
        let mut helper = match start(program) {
            Ok(helper) => helper,
            Err(error) => return Ok(Verdict::Unknown(format!("it does not start: {error}"))),
        };
        Ok(match helper.read(path) {
            Answer::Good => {
                *kept = Some(helper);
                Verdict::Good
            }
            Answer::OutOfMemory => Verdict::Rejected(format!(
                "the HDF5 library needs more than {} MiB of memory to read it",
                MEMORY >> 20
            )),
            Answer::Unlisted => Verdict::Rejected("the HDF5 library cannot list its attributes".to_owned()),
            Answer::Ended(status) => verdict(status, length),
            Answer::Late => {
                let seconds = helper::DEADLINE.as_secs();
                return failed(&format!("no answer within {seconds} s; its file system may hang"));
            }
            Answer::Foreign => {
                return failed("the program writes to standard output before its `main`");
            }
        })
    }
}

/// Starts a helper, at most after some pauses.
fn start(program: &Program) -> std::io::Result<Helper> {
    for pause in PAUSES {
        if let Ok(helper) = Helper::start(program) {
            return Ok(helper);
        }
        thread::sleep(pause);
    }
    Helper::start(program)
}

/// Warns that files are opened directly, once in a process.
fn warn_once(reason: &str) {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!(
            "the process that reads HDF5 files first cannot work ({reason}): files are opened without it, and a damaged one may \
             crash this rank"
        );
    });
}

/// Number of files that one helper reads; each may leak memory.
const MOST_FILES: usize = 1000;

/// Exit status of a Rust program that panicked.
const PANICKED: i32 = 101;

/// The meaning of the end of a helper: a crash is of the file. A process that ends by itself or is killed from outside, such as for
/// the memory of all, could not do its work.
fn verdict(status: ExitStatus, length: u64) -> Verdict {
    use nix::sys::signal::Signal;
    use std::os::unix::process::ExitStatusExt;
    let Some(number) = status.signal() else {
        return match status.code() {
            Some(PANICKED) => Verdict::Rejected("the process that reads it first panicked".to_owned()),
            _ => Verdict::Unknown(format!("it ended with {status}")),
        };
    };
    match Signal::try_from(number) {
        Ok(Signal::SIGXCPU) => Verdict::Rejected(format!(
            "the HDF5 library has not read it within {} s of processor time",
            seconds(length)
        )),
        Ok(Signal::SIGKILL | Signal::SIGTERM | Signal::SIGINT | Signal::SIGHUP) => {
            Verdict::Unknown(format!("it ended with {status}"))
        }
        Ok(signal) => Verdict::Rejected(format!("the HDF5 library crashed on it ({})", signal.as_str())),
        Err(_) => Verdict::Rejected("the HDF5 library crashed on it".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Program {
        Program { path: "/bin/sh".into(), args: vec!["-c".into(), script.into()] }
    }

    #[rstest::rstest]
    #[case("kill -SEGV $$", "the HDF5 library crashed on it (SIGSEGV); the file seems damaged")]
    #[case("kill -XCPU $$", "the HDF5 library has not read it within 5 s of processor time")]
    #[case("exit 101", "the process that reads it first panicked")]
    #[case("printf '\\025'; cat", "the HDF5 library needs more than 1024 MiB of memory")]
    #[case("printf '\\030'; cat", "the HDF5 library cannot list its attributes")]
    #[case("echo hello; cat", "the program writes to standard output before its `main`")]
    fn the_end_of_the_helper_is_the_error_of_the_file(#[case] script: &str, #[case] words: &str) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = Checks::default().check(&shell(script), file.path(), 0).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains(file.path().to_str().unwrap()), "{error}");
    }

    /// They say nothing of the file, which is opened directly, and asked for again.
    #[rstest::rstest]
    #[case(shell("exit 127"))]
    #[case(shell("exit 1"))]
    #[case(shell("kill -KILL $$"))]
    #[case(Program { path: "/nowhere/program".into(), args: Vec::new() })]
    fn a_helper_that_cannot_work_rejects_no_file(#[case] program: Program) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let checks = Checks::default();
        checks.check(&program, file.path(), 0).unwrap();
        let error = checks.check(&shell("kill -SEGV $$"), file.path(), 0).unwrap_err();
        assert!(matches!(error, Error::Rejected { .. }), "{error}");
    }

    #[test]
    fn a_file_is_read_once_until_it_changes() {
        let folder = tempfile::tempdir().unwrap();
        let [file, log] = ["file", "log"].map(|name| folder.path().join(name));
        // Ends after one file, as a helper without work does.
        let program = shell(&format!("printf x >> {log:?}; printf '\\006'"));
        let checks = Checks::default();
        for (content, expected) in [("one", "x"), ("one", "x"), ("three", "xx")] {
            if !file.exists() || std::fs::read_to_string(&file).unwrap() != content {
                std::fs::write(&file, content).unwrap();
            }
            checks.check(&program, &file, 0).unwrap();
            assert_eq!(std::fs::read_to_string(&log).unwrap(), expected);
        }
    }

    #[test]
    fn a_helper_that_another_file_has_broken_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
        // The first file is good, at the second the process crashes, and the next process is sound again.
        let program = shell("printf '\\006'; head -c 9 > /dev/null; kill -SEGV $$");
        let checks = Checks::default();
        for file in [&first, &second] {
            std::fs::write(file, "").unwrap();
            checks.check(&program, file, 0).unwrap();
        }
    }

    #[test]
    fn a_helper_knows_no_launcher() {
        let folder = tempfile::tempdir().unwrap();
        let [file, log] = ["file", "log"].map(|name| folder.path().join(name));
        std::fs::write(&file, "").unwrap();
        let program = shell(&format!("/usr/bin/env > {log:?}; printf '\\006'"));
        Checks::default().check(&program, &file, 0).unwrap();
        let variables = std::fs::read_to_string(&log).unwrap();
        let own = |line: &&str| {
            !["LD_", "HDF5_", "MALLOC_", HELPER, "PWD=", "_=", "SHLVL="].iter().any(|of| line.starts_with(of))
        };
        assert_eq!(variables.lines().filter(own).count(), 0, "{variables}");
        assert!(std::env::vars_os().count() > 5);
    }
}
