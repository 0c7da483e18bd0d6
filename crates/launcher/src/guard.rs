//! The end of the ranks where the launcher itself is killed.
#![expect(
    unsafe_code,
    reason = "a rank names itself to the guard between fork and exec; the block says why it is sound"
)]

use std::fs::File;
use std::io::{self, Cursor, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigHandler, Signal, signal};

/// A shell that ends the ranks of this machine if the launcher is killed. Its input ends then; the words in it are their process
/// groups, and `none` once they have ended.
const GUARD: &str = r#"trap "" TERM INT HUP USR1
groups=
while read -r word; do
    case $word in none) groups= ;; *) groups="$groups $word" ;; esac
done
[ "$groups" ] || exit 0
each() { for group in $groups; do kill -s "$1" -- "-$group" && left=1; done 2>/dev/null; }
each TERM
grace=$1 left=1
while [ "$left" ] && [ "$grace" -gt 0 ]; do sleep 1; grace=$((grace - 1)) left=; each 0; done
each KILL"#;

/// Sees to it that no rank of this machine outlives the launcher, however that ends.
pub(super) struct Guard {
    child: Child,
    tell: Option<ChildStdin>,
}

impl Guard {
    pub(super) fn start(grace: Duration) -> io::Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", GUARD, "isobar-launch"]).arg((grace.as_secs_f64().ceil() as u64).to_string());
        // Not of the terminal's group, whose interrupt is the launcher's to pass on; and nobody's output is held open by it.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn()?;
        let tell = child.stdin.take();
        Ok(Self { child, tell })
    }

    /// Lets the process of the command, which leads a process group, name itself to the guard before its program runs: the
    /// launcher may be killed at any time after that.
    pub(super) fn watch(&self, command: &mut Command) -> io::Result<()> {
        let Some(tell) = &self.tell else { return Ok(()) };
        let mut tell = File::from(tell.as_fd().try_clone_to_owned()?);
        let name = move || {
            let mut line = Cursor::new([0; 16]);
            writeln!(line, "{}", std::process::id())?;
            let length = line.position() as usize;
            // SAFETY: these are the handlers of a process that has one thread and runs no code of its own yet.
            unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn)? };
            // Ranks do not need the guard while the launcher lives.
            let _ = tell.write_all(&line.get_ref()[..length]);
            // SAFETY: as above.
            unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl)? };
            Ok(())
        };
        // SAFETY: between fork and exec `name` makes system calls only; it takes no memory and no lock.
        unsafe { command.pre_exec(name) };
        Ok(())
    }

    /// No rank is left.
    pub(super) fn none(&mut self) {
        if let Some(tell) = &mut self.tell {
            // As above.
            let _ = tell.write_all(b"none\n");
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.tell.take());
        let end = Instant::now() + Duration::from_secs(1);
        while Instant::now() < end && matches!(self.child.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(2));
        }
    }
}
