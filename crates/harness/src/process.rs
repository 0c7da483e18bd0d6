//! Processes that are waited for only so long, and ended with everything that they started.

use std::{
    collections::HashMap,
    env, fs,
    io::{self, Read},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

const POLL: Duration = Duration::from_millis(10);
/// Time for a process to end after a request, before it is killed.
const GRACE: Duration = Duration::from_secs(5);

/// Waits for `child`; at the deadline ends it and all that it started, and returns `None`.
///
/// # Errors
///
/// If the process can't be waited for.
pub fn wait_within(child: &mut Child, deadline: Duration) -> io::Result<Option<ExitStatus>> {
    let end = Instant::now() + deadline;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            end_tree(child)?;
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

/// Runs `command`, without input, to its end and takes what it prints; `None` if it was ended at the deadline.
///
/// # Errors
///
/// If the program can't be started, or its output can't be read.
pub fn output_within(command: &mut Command, deadline: Duration) -> io::Result<Option<Output>> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (stdout, stderr) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let status = wait_within(&mut child, deadline)?;
    let (stdout, stderr) = (collect(stdout)?, collect(stderr)?);
    Ok(status.map(|status| Output { status, stdout, stderr }))
}

/// Ends `child` and every process below it: asks first, which lets a launcher take its ranks down, then kills.
///
/// Process groups are not used: launchers give each rank a group of its own, and a group of its own would keep an
/// interrupt at the terminal from the child.
///
/// # Errors
///
/// If the child can't be waited for.
pub fn end_tree(child: &mut Child) -> io::Result<()> {
    let below = descendants(child.id());
    let signal = |signal| {
        for &(pid, started) in &below {
            if start_time(pid) == Some(started) {
                kill(Pid::from_raw(pid.cast_signed()), signal).unwrap_or(());
            }
        }
    };
    let own = Pid::from_raw(child.id().cast_signed());
    kill(own, Signal::SIGTERM).unwrap_or(());
    signal(Signal::SIGTERM);
    let end = Instant::now() + GRACE;
    while Instant::now() < end && child.try_wait()?.is_none() {
        thread::sleep(POLL);
    }
    signal(Signal::SIGKILL);
    child.kill()?;
    child.wait()?;
    Ok(())
}

/// The processes that `pid` started, directly or through others, each with its start time in clock ticks.
pub fn descendants(pid: u32) -> Vec<(u32, u64)> {
    let mut children: HashMap<u32, Vec<(u32, u64)>> = HashMap::new();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) {
        if let Some((parent, started)) = parent_and_start(pid) {
            children.entry(parent).or_default().push((pid, started));
        }
    }
    let mut found = Vec::new();
    let mut left = vec![pid];
    while let Some(pid) = left.pop() {
        for &(child, started) in children.get(&pid).into_iter().flatten() {
            found.push((child, started));
            left.push(child);
        }
    }
    found
}

/// Finds the program `name` on the `PATH`.
pub fn on_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    // Daemons live in sbin, which is not on the path of every user.
    let folders = env::split_paths(&path).chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")]);
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

fn start_time(pid: u32) -> Option<u64> {
    Some(parent_and_start(pid)?.1)
}

/// Fields 4 and 22 of `/proc/PID/stat`; the name, field 2, may hold spaces and ends with the last parenthesis.
fn parent_and_start(pid: u32) -> Option<(u32, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.nth(1)?.parse().ok()?, fields.nth(17)?.parse().ok()?))
}

type Drained = Option<thread::JoinHandle<io::Result<Vec<u8>>>>;

fn drain(pipe: Option<impl Read + Send + 'static>) -> Drained {
    pipe.map(|mut pipe| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes)?;
            Ok(bytes)
        })
    })
}

fn collect(drained: Drained) -> io::Result<Vec<u8>> {
    match drained.map(thread::JoinHandle::join) {
        Some(Ok(bytes)) => bytes,
        Some(Err(_)) | None => Err(io::Error::other("failed to read the output of a process")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadline_ends_grandchildren() {
        let mut child =
            Command::new("sh").args(["-c", "sh -c 'trap \"\" TERM; sleep 300' & wait"]).spawn().unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        let names = |pid: u32| fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        // The inner shell ignores SIGTERM once it has started its own process.
        while !descendants(child.id()).iter().any(|&(pid, _)| names(pid).starts_with("sleep")) {
            assert!(Instant::now() < end, "the shells start nothing");
            thread::sleep(POLL);
        }
        let below = descendants(child.id());
        assert_eq!(wait_within(&mut child, Duration::from_millis(10)).unwrap(), None);
        let end = Instant::now() + Duration::from_secs(60);
        // A killed orphan is a zombie until init takes it.
        let gone = |pid: u32| {
            fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
        };
        while !below.iter().all(|&(pid, _)| gone(pid)) {
            assert!(Instant::now() < end, "processes left over: {below:?}");
            thread::sleep(POLL);
        }
    }

    #[test]
    fn output_is_whole() {
        let output = output_within(
            Command::new("sh").args(["-c", "seq 100000; echo no >&2; exit 3"]),
            Duration::from_secs(60),
        )
        .unwrap()
        .unwrap();
        assert_eq!(output.status.code(), Some(3));
        assert_eq!(output.stdout.iter().filter(|&&byte| byte == b'\n').count(), 100_000);
        assert_eq!(output.stderr, b"no\n");
    }
}
