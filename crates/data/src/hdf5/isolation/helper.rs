//! The helper process as its parent sees it: it receives a path and answers with a byte.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::Program;

/// Longest wait for one file, for file systems that hang. The limit of processor time ends endless loops earlier.
pub(super) const DEADLINE: Duration = Duration::from_secs(300);

/// Settings of glibc's allocator. Its debugging library, if installed, detects writes beyond a block. The allocator fills memory
/// with a pattern on allocation and release, so that invalid reads yield pointers that crash.
const MALLOC: [(&str, &str); 2] = [("MALLOC_CHECK_", "3"), ("MALLOC_PERTURB_", "165")];
const MALLOC_LIBRARY: &str = "libc_malloc_debug.so.0";

/// Environment variable that makes a program a helper.
pub(in crate::hdf5) const HELPER: &str = "ISOBAR_HDF5_HELPER";

/// Longest wait for the end of a process that was killed: one that waits for a file system that hangs does not end.
const END: Duration = Duration::from_secs(1);

/// Answer of a helper that read a file: ACK, a control character that other programs do not print as text.
pub(in crate::hdf5) const GOOD: u8 = 0x06;
/// Answer of a helper that ran out of memory: NAK.
pub(in crate::hdf5) const OUT_OF_MEMORY: u8 = 0x15;
/// Answer of a helper that could not list attributes: CAN.
pub(in crate::hdf5) const UNLISTED: u8 = 0x18;

/// Outcome of an attempt to read a file.
#[derive(Debug)]
pub(super) enum Answer {
    /// The file can be opened. Its reader may still reject the contents.
    Good,
    /// The library asked for more memory than the helper may take.
    OutOfMemory,
    /// The attributes of an object cannot be listed.
    Unlisted,
    /// A byte that is no answer: the program is not a helper.
    Foreign,
    /// No answer before the deadline.
    Late,
    /// The helper ended.
    Ended(ExitStatus),
}

/// A helper process.
#[derive(Debug)]
pub(super) struct Helper {
    child: Child,
    /// Standard input of the helper; `None` tells it to end.
    paths: Option<ChildStdin>,
    answers: ChildStdout,
    served: usize,
}

impl Helper {
    /// Starts a helper. It inherits only the environment variables of the dynamic linker and of HDF5: with a launcher's
    /// variables, it could take itself for a rank.
    pub(super) fn start(program: &Program) -> std::io::Result<Self> {
        let kept = |name: &str| name == "LD_LIBRARY_PATH" || name.starts_with("HDF5_");
        let variables = std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(kept));
        let mut command = Command::new(&program.path);
        command.args(&program.args).env_clear().envs(variables).envs(MALLOC).env(HELPER, "1");
        // What the user preloads may be needed to start at all.
        let preloaded = std::env::var("LD_PRELOAD").unwrap_or_default();
        command.env("LD_PRELOAD", format!("{MALLOC_LIBRARY} {preloaded}"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let (paths, answers) = (child.stdin.take(), child.stdout.take());
        let answers = answers.ok_or_else(|| std::io::Error::other("it has no output"))?;
        Ok(Self { child, paths, answers, served: 0 })
    }

    /// Returns the number of files that the helper has read.
    pub(super) fn served(&self) -> usize {
        self.served
    }

    /// Lets the helper read a file.
    pub(super) fn read(&mut self, path: &Path) -> Answer {
        self.served += 1;
        let request = [path.as_os_str().as_bytes(), &[0]].concat();
        if let Some(paths) = &mut self.paths {
            // If the helper has ended, its exit status tells the cause.
            let _ = paths.write_all(&request);
        }
        match self.answer() {
            Some(Some(GOOD)) => Answer::Good,
            Some(Some(OUT_OF_MEMORY)) => Answer::OutOfMemory,
            Some(Some(UNLISTED)) => Answer::Unlisted,
            Some(Some(_)) => Answer::Foreign,
            Some(None) => self.end(DEADLINE).map_or(Answer::Late, Answer::Ended),
            None => Answer::Late,
        }
    }

    /// Waits for the answer: `Some(None)` if the helper ended, `None` after the deadline.
    fn answer(&mut self) -> Option<Option<u8>> {
        let end = Instant::now() + DEADLINE;
        while !is_readable(&self.answers, end.saturating_duration_since(Instant::now())) {
            if Instant::now() >= end {
                return None;
            }
        }
        let mut answer = [0];
        Some(self.answers.read_exact(&mut answer).ok().map(|()| answer[0]))
    }

    /// Closes its input and waits for its end; none if it does not come in time.
    fn end(&mut self, longest: Duration) -> Option<ExitStatus> {
        self.paths = None;
        let end = Instant::now() + longest;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(2)),
                _ => return None,
            }
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        // The helper has nothing to finish, and may have ended already.
        let _ = self.child.kill();
        let _ = self.end(END);
    }
}

/// Waits until `file` is readable or its other end is closed; returns false on timeout.
pub(in crate::hdf5) fn is_readable(file: &impl AsFd, time: Duration) -> bool {
    let time = PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX);
    // An interrupted wait counts as a timeout; the caller checks the clock.
    poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLIN)], time).is_ok_and(|ready| ready > 0)
}

/// Reads a path up to its zero byte; `None` at the end of the input.
pub(in crate::hdf5) fn next_path(requests: &mut File) -> Option<Vec<u8>> {
    let mut path = Vec::new();
    let mut byte = [0];
    loop {
        requests.read_exact(&mut byte).ok()?;
        match byte[0] {
            0 => return Some(path),
            other => path.push(other),
        }
    }
}
