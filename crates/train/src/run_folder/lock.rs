//! Lock of a run's folder: held by one process, and released by the system when that process ends.

use std::fmt;
use std::fs::{File, Metadata, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::error::{Error, IoContext, Result};
use crate::files;

/// Name of the lock file. It stays when the run ends; what counts is the lock on it.
pub(super) const FILE: &str = "run.lock";

/// Pause between two attempts to take a lock that another process holds.
const PAUSE: Duration = Duration::from_millis(50);

/// Time that a holder has to write its name after it has taken the lock.
const NAMING: Duration = Duration::from_secs(1);

/// A held lock.
#[derive(Debug)]
pub(super) struct Lock {
    path: PathBuf,
    file: File,
    /// True if this process has the lock.
    held: bool,
    /// Error of a file system without locks.
    unsupported: Option<String>,
}

/// Process that holds a lock, as recorded in the lock file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Holder {
    host: String,
    process: u32,
    /// Time of the lock, in UTC.
    since: String,
    /// Start of the process in clock ticks since boot, and the boot's identifier: process numbers are used again.
    started: String,
    boot: String,
}

impl Lock {
    /// Locks a folder, and creates it if it is missing; waits at most `wait` for another holder.
    pub(super) fn take(folder: &Path, wait: Duration) -> Result<Self> {
        std::fs::create_dir_all(folder).at("make the folder", folder)?;
        let path = folder.join(FILE);
        let began = Instant::now();
        loop {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false);
            let file = files::no_follow(&mut options).open(&path).at("open", &path)?;
            let mut lock = Self { path: path.clone(), file, held: false, unsupported: None };
            match lock.try_lock()? {
                // If the file was removed while it was opened, no other process would see this lock.
                true if lock.in_place()? => {
                    lock.held = true;
                    lock.sign()?;
                    return Ok(lock);
                }
                true => {}
                false if began.elapsed() >= wait => {
                    return Err(Error::RunLocked { path: folder.to_owned(), holder: lock.holder() });
                }
                false => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Tries to take the lock, and returns whether this process has it now.
    fn try_lock(&mut self) -> Result<bool> {
        match self.file.try_lock() {
            Ok(()) => Ok(true),
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) if has_no_locks(&error) => {
                let lives = Holder::read(&mut self.file).is_some_and(|holder| holder.lives_here());
                self.unsupported = Some(error.to_string());
                Ok(!lives)
            }
            Err(TryLockError::Error(error)) => Err(error).at("lock", &self.path),
        }
    }

    /// Returns whether the lock file is still at its path.
    pub(super) fn in_place(&self) -> Result<bool> {
        let identity = |about: &Metadata| (about.dev(), about.ino());
        let own = self.file.metadata().at("look at", &self.path)?;
        match std::fs::symlink_metadata(&self.path) {
            Ok(found) => Ok(identity(&found) == identity(&own)),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
            Err(error) => Err(error).at("look at", &self.path),
        }
    }

    /// Returns the error of a file system without locks, on which only processes of this host are noticed.
    pub(super) fn unsupported(&self) -> Option<&str> {
        self.unsupported.as_deref()
    }

    /// Writes this process's name into the file, and waits until other hosts can read it.
    fn sign(&mut self) -> Result<()> {
        let text = Holder::this_process().to_string();
        let written = self.file.rewind().and_then(|()| self.file.set_len(0));
        let written = written.and_then(|()| self.file.write_all(text.as_bytes()));
        written.and_then(|()| self.file.sync_data()).at("write", &self.path)
    }

    /// The holder of a lock that another process has. A holder before it that was killed has left its name, until the new
    /// one has written its own.
    fn holder(&mut self) -> String {
        let began = Instant::now();
        loop {
            match Holder::read(&mut self.file).filter(|holder| !holder.has_ended()) {
                Some(Holder { host, process, since, .. }) => {
                    return format!("process {process} on host {host} since {since}");
                }
                None if began.elapsed() < NAMING => std::thread::sleep(PAUSE),
                None => return "a process that has not named itself".to_owned(),
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if self.held {
            // The next holder must not be taken for this one while it writes its name. It does so itself where this fails.
            let _ = self.file.set_len(0);
        }
        // Not by closing the file alone: a child that is being started has it open until it runs its own program.
        let _ = self.file.unlock();
    }
}

/// Returns whether an error means that the file system has no locks.
fn has_no_locks(error: &std::io::Error) -> bool {
    use nix::errno::Errno;
    let code = error.raw_os_error().map(Errno::from_raw);
    matches!(code, Some(Errno::ENOSYS | Errno::EOPNOTSUPP | Errno::ENOLCK))
}

impl Holder {
    fn this_process() -> Self {
        let process = std::process::id();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            host: host(),
            process,
            since: utc(now.as_secs()),
            started: started(process).unwrap_or_default(),
            boot: boot(),
        }
    }

    fn read(file: &mut File) -> Option<Self> {
        let mut text = String::new();
        file.rewind().ok()?;
        file.take(4096).read_to_string(&mut text).ok()?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Option<Self> {
        let value = |key: &str| {
            let found = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
            found.map(|value| value.trim().to_owned())
        };
        Some(Self {
            host: value("host")?,
            process: value("process")?.parse().ok()?,
            since: value("since")?,
            started: value("started").unwrap_or_default(),
            boot: value("boot").unwrap_or_default(),
        })
    }

    /// Returns whether the holder is another process of this host that still runs.
    fn lives_here(&self) -> bool {
        self.process != std::process::id() && self.host == host() && self.boot == boot() && self.runs()
    }

    /// Returns whether the holder was a process of this host that has ended.
    fn has_ended(&self) -> bool {
        self.host == host() && !self.boot.is_empty() && (self.boot != boot() || !self.runs())
    }

    /// Returns whether this host has a process with the holder's number and start.
    fn runs(&self) -> bool {
        started(self.process).is_some_and(|started| started == self.started)
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, process, since, started, boot } = self;
        write!(f, "host {host}\nprocess {process}\nsince {since}\nstarted {started}\nboot {boot}\n")
    }
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

fn boot() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Start of a process in clock ticks since boot.
fn started(process: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name in parentheses may contain anything; the start is the 20th field after it.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19).map(str::to_owned)
}

/// Date and time in UTC of a number of seconds since 1970.
fn utc(seconds: u64) -> String {
    let (days, rest) = ((seconds / 86400) as i64, seconds % 86400);
    // Howard Hinnant's civil_from_days: years that begin in March, in eras of 400 years.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn refused(folder: &Path, wait: Duration) -> String {
        match Lock::take(folder, wait) {
            Err(error @ Error::RunLocked { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_holder_at_a_time_who_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let lock = Lock::take(&run, Duration::ZERO).unwrap();
        let said = refused(&run, Duration::ZERO);
        let words = format!("process {} on host {} since 2", std::process::id(), host());
        assert!(said.contains(&words), "{said}");
        drop(lock);
        assert!(Lock::take(&run, Duration::ZERO).is_ok());
    }

    /// A process that was killed leaves no lock, whatever the file says.
    #[test]
    fn a_lock_ends_with_its_process() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        let mut holder = Command::new("flock");
        let holder = holder.arg(&file).args(["sh", "-c", "echo; exec sleep 300"]).stdout(Stdio::piped());
        let mut holder = holder.spawn().unwrap();
        holder.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        std::fs::write(&file, "host node7\nprocess 12\nsince yesterday\n").unwrap();
        let said = refused(folder.path(), Duration::from_millis(1));
        assert!(said.contains("process 12 on host node7 since yesterday"), "{said}");
        // flock itself stays beside its command, which has the lock too.
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", holder.id())).unwrap();
        let all = children.split_whitespace().map(str::to_owned).chain([holder.id().to_string()]);
        assert!(Command::new("kill").arg("-KILL").args(all).status().unwrap().success());
        holder.wait().unwrap();
        Lock::take(folder.path(), Duration::from_secs(60)).unwrap();
    }

    /// Between the lock and the name of its new holder the file does not name the holder before.
    #[test]
    fn a_holder_that_has_ended_is_not_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        drop(Lock::take(folder.path(), Duration::ZERO).unwrap());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "");
        let mut child = Command::new("sleep").arg("300").spawn().unwrap();
        let of_child =
            Holder { process: child.id(), started: started(child.id()).unwrap(), ..Holder::this_process() };
        // Another process has locked the file, and has not written its name yet.
        let locked = File::options().create(true).append(true).open(&file).unwrap();
        locked.lock().unwrap();
        std::fs::write(&file, of_child.to_string()).unwrap();
        let said = refused(folder.path(), Duration::ZERO);
        assert!(said.contains(&format!("process {} on host", child.id())), "{said}");
        child.kill().unwrap();
        child.wait().unwrap();
        let said = refused(folder.path(), Duration::ZERO);
        assert!(said.contains("a process that has not named itself"), "{said}");
    }

    #[test]
    fn a_file_that_was_removed_or_replaced_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let lock = Lock::take(folder.path(), Duration::ZERO).unwrap();
        assert!(lock.in_place().unwrap());
        std::fs::remove_file(folder.path().join(FILE)).unwrap();
        assert!(!lock.in_place().unwrap());
        let _other = Lock::take(folder.path(), Duration::ZERO).unwrap();
        assert!(!lock.in_place().unwrap());
    }

    #[test]
    fn a_link_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        std::fs::write(&victim, "mine").unwrap();
        std::os::unix::fs::symlink(&victim, folder.path().join(FILE)).unwrap();
        assert!(matches!(Lock::take(folder.path(), Duration::ZERO), Err(Error::Io { .. })));
        assert_eq!(std::fs::read_to_string(victim).unwrap(), "mine");
    }

    /// Without locks of the file system the process itself is looked for.
    #[test]
    fn a_holder_lives_while_its_process_does() {
        let own = Holder::this_process();
        assert_eq!(Holder::parse(&own.to_string()), Some(own.clone()));
        assert!(!own.lives_here(), "not another one");
        let mut child = Command::new("sleep").arg("300").spawn().unwrap();
        let holder = Holder { process: child.id(), started: started(child.id()).unwrap(), ..own };
        assert!(holder.lives_here());
        assert!(!Holder { host: "elsewhere".into(), ..holder.clone() }.lives_here());
        assert!(!Holder { started: "0".into(), ..holder.clone() }.lives_here());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!holder.lives_here());
    }

    #[test]
    fn times_are_readable() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_827_696), "2000-02-29 12:34:56 UTC");
        assert_eq!(utc(1_795_416_260), "2026-11-23 06:44:20 UTC");
    }
}
