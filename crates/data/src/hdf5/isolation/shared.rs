//! Verdicts that processes of one user share on a host: of its ranks, one reads a file first, and later runs read only files that
//! have changed.
//!
//! The caller reads the file; this module only stores verdicts.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use nix::fcntl::OFlag;

use super::{Program, Stamp, Verdict, seconds};
use crate::Result;

/// Minimum age at which a stamp identifies the content of a file: file systems store times in steps of up to 2 s.
const SETTLED: Duration = Duration::from_secs(3);

/// Age at which a verdict ends: some file systems keep no time of change, and use device numbers again.
const EXPIRED: Duration = Duration::from_secs(24 * 3600);

/// Interval between looks at an entry that another process has locked.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// First byte of an entry: the file is good.
const GOOD: u8 = b'+';
/// First byte of an entry: the file was rejected, for the reason that follows. Only those who waited for this verdict take it.
const REJECTED: u8 = b'-';

/// A folder with one entry for each file that was read. The process that reads a file locks the entry.
#[derive(Debug)]
pub(super) struct SharedVerdicts {
    folder: PathBuf,
    settled: Duration,
}

impl SharedVerdicts {
    /// The folder of this user in the directory for temporary files.
    pub(super) fn of_user() -> Self {
        let user = nix::unistd::geteuid();
        Self { folder: std::env::temp_dir().join(format!("isobar-hdf5-verdicts-{user}")), settled: SETTLED }
    }

    /// Returns the verdict of another process on a file, if there is one or one comes; else calls `read`, and stores its verdict.
    /// `length` is that of the file in bytes.
    pub(super) fn verdict(
        &self,
        path: &Path,
        stamp: &Stamp,
        length: u64,
        program: &Program,
        read: impl FnOnce() -> Result<Verdict>,
    ) -> Result<Verdict> {
        let settled = stamp.is_older_than(self.settled);
        let Some(mut entry) = settled.then(|| self.entry(stamp, program)).flatten() else { return read() };
        let end = Instant::now() + Duration::from_secs(2 + seconds(length));
        let mut waited = false;
        loop {
            if entry.content().first() == Some(&GOOD) {
                return Ok(Verdict::Good);
            }
            match entry.file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if Instant::now() < end => thread::sleep(LOOK_EVERY),
                Err(_) => return read(),
            }
            waited = true;
        }
        // The process that held the lock may have written a verdict since the last look.
        match entry.content().split_first() {
            Some((&GOOD, _)) => return Ok(Verdict::Good),
            Some((&REJECTED, reason)) if waited => {
                return Ok(Verdict::Rejected(String::from_utf8_lossy(reason).into_owned()));
            }
            None if waited => {
                // That process came to no verdict, or could not store it: those who wait read at the same time.
                let _ = entry.file.unlock();
                return read();
            }
            _ => {}
        }
        if entry.store(&[]).is_err() {
            return read();
        }
        let verdict = read()?;
        // If the path names another file by now, the verdict may be of that one.
        if Stamp::of(path).is_ok_and(|now| now == *stamp) {
            // Without an entry, another process reads the file again.
            let _ = match &verdict {
                Verdict::Good => entry.store(&[GOOD]),
                Verdict::Rejected(reason) => entry.store(&[&[REJECTED], reason.as_bytes()].concat()),
                Verdict::Unknown(_) => Ok(()),
            };
        }
        Ok(verdict)
    }

    /// Opens the entry of a file. `None` if it cannot be made, or if others may write to the folder: it may have been replaced
    /// since the last look.
    fn entry(&self, stamp: &Stamp, program: &Program) -> Option<Entry> {
        // It may exist already.
        let _ = DirBuilder::new().mode(0o700).create(&self.folder);
        let found = std::fs::symlink_metadata(&self.folder).ok()?;
        let own = found.uid() == nix::unistd::geteuid().as_raw() && found.mode() & 0o077 == 0;
        if !(self.folder.is_absolute() && found.is_dir() && own) {
            return None;
        }
        static SWEPT: Once = Once::new();
        SWEPT.call_once(|| self.remove_expired());
        let numbers: Vec<String> = stamp.0.iter().map(|number| format!("{number:x}")).collect();
        let name = format!("{}-{:x}", numbers.join("."), reader(program)?);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(OFlag::O_NOFOLLOW.bits()).open(self.folder.join(name)).ok()?;
        Some(Entry { file })
    }

    fn remove_expired(&self) {
        for entry in std::fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            if entry.metadata().is_ok_and(|metadata| is_expired(&metadata)) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// Returns a hash of what decides on a file beside its content: the program that reads it and its arguments, the HDF5 library,
/// and its environment variables. `None` if the program or the library cannot be found.
fn reader(program: &Program) -> Option<u64> {
    let mut hash = DefaultHasher::new();
    (Stamp::of(&program.path).ok()?.0, &program.args).hash(&mut hash);
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let libraries = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let mut libraries: Vec<&str> = libraries.filter(|path| path.contains("libhdf5")).collect();
    libraries.dedup();
    for path in libraries {
        (path, Stamp::of(Path::new(path)).ok()?.0).hash(&mut hash);
    }
    let decides = |name: &str| name.starts_with("HDF5_") || name.starts_with("LD_");
    let mut variables: Vec<_> =
        std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(decides)).collect();
    variables.sort();
    variables.hash(&mut hash);
    Some(hash.finish())
}

/// Verdict on a file, which processes may read at any time, and write if they hold its lock.
struct Entry {
    file: File,
}

impl Entry {
    /// Returns the content; nothing if it has expired or cannot be read.
    fn content(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let expired = self.file.metadata().map_or(true, |metadata| is_expired(&metadata));
        let read = self.file.rewind().and_then(|()| self.file.read_to_end(&mut bytes));
        if expired || read.is_err() { Vec::new() } else { bytes }
    }

    fn store(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(bytes)
    }
}

fn is_expired(entry: &std::fs::Metadata) -> bool {
    entry.modified().ok().and_then(|at| at.elapsed().ok()).is_some_and(|age| age > EXPIRED)
}

impl Stamp {
    /// Returns whether the file last changed before this time.
    fn is_older_than(&self, age: Duration) -> bool {
        let [_, _, _, modified, _, changed, _] = self.0;
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        modified.max(changed).unsigned_abs() <= now.saturating_sub(age).as_secs()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    /// A file, the folder of verdicts on it, and how often it was read.
    struct Trial {
        place: tempfile::TempDir,
        file: PathBuf,
        read: AtomicUsize,
    }

    impl Trial {
        fn new() -> Self {
            let place = tempfile::tempdir().unwrap();
            let file = place.path().join("file");
            std::fs::write(&file, "one").unwrap();
            Self { place, file, read: AtomicUsize::new(0) }
        }

        fn folder(&self) -> PathBuf {
            self.place.path().join("verdicts")
        }

        /// Asks as a process of its own. Returns how often the file has been read so far.
        fn ask(&self, settled: Duration, arg: &str, read: impl FnOnce() -> Verdict) -> (Verdict, usize) {
            let verdicts = SharedVerdicts { folder: self.folder(), settled };
            let program = Program { path: "/bin/sh".into(), args: vec![arg.into()] };
            let stamp = Stamp::of(&self.file).unwrap();
            let counted = || {
                self.read.fetch_add(1, Ordering::Relaxed);
                Ok(read())
            };
            let verdict = verdicts.verdict(&self.file, &stamp, 3, &program, counted).unwrap();
            (verdict, self.read.load(Ordering::Relaxed))
        }

        fn good(&self, arg: &str) -> usize {
            let (verdict, read) = self.ask(Duration::ZERO, arg, || Verdict::Good);
            assert!(matches!(verdict, Verdict::Good));
            read
        }

        /// Returns the verdict of one who comes while another comes to `first`.
        fn beside(&self, first: Verdict) -> Verdict {
            let (entered, enters) = mpsc::channel();
            thread::scope(|scope| {
                scope.spawn(|| {
                    self.ask(Duration::ZERO, "", || {
                        entered.send(()).unwrap();
                        // Long enough for the other to find the entry locked, on any machine that is not stopped.
                        thread::sleep(Duration::from_millis(700));
                        first
                    })
                });
                enters.recv().unwrap();
                self.ask(Duration::ZERO, "", || Verdict::Good).0
            })
        }
    }

    fn rejected() -> Verdict {
        Verdict::Rejected("damaged".to_owned())
    }

    #[test]
    fn a_good_file_is_read_once_until_it_or_its_reader_changes() {
        let trial = Trial::new();
        assert_eq!([trial.good(""), trial.good(""), trial.good("other"), trial.good("")], [1, 1, 2, 2]);
        std::fs::write(&trial.file, "three").unwrap();
        assert_eq!([trial.good(""), trial.good("")], [3, 3]);
    }

    #[test]
    fn those_who_wait_take_the_verdict() {
        let trial = Trial::new();
        assert!(matches!(trial.beside(rejected()), Verdict::Rejected(reason) if reason == "damaged"));
        assert_eq!(trial.read.load(Ordering::Relaxed), 1);
        // A later process reads a rejected file again.
        assert_eq!([trial.good(""), trial.good("")], [2, 2]);
    }

    #[test]
    fn without_a_verdict_those_who_wait_read_and_an_earlier_rejection_does_not_count() {
        let trial = Trial::new();
        assert!(matches!(trial.ask(Duration::ZERO, "", rejected).0, Verdict::Rejected(_)));
        assert!(matches!(trial.beside(Verdict::Unknown("no process".to_owned())), Verdict::Good));
    }

    #[test]
    fn a_file_that_changed_a_moment_ago_or_meanwhile_is_read_by_each() {
        let trial = Trial::new();
        for expected in [1, 2] {
            assert_eq!(trial.ask(SETTLED, "", || Verdict::Good).1, expected);
        }
        let change = || {
            std::fs::write(&trial.file, "three").unwrap();
            Verdict::Good
        };
        trial.ask(Duration::ZERO, "", change);
        std::fs::write(&trial.file, "one").unwrap();
        assert_eq!(trial.good(""), 4);
    }

    #[test]
    fn a_verdict_expires() {
        let trial = Trial::new();
        assert_eq!(trial.good(""), 1);
        let entry = std::fs::read_dir(trial.folder()).unwrap().next().unwrap().unwrap().path();
        let long_ago = SystemTime::now() - 2 * EXPIRED;
        File::options().write(true).open(&entry).unwrap().set_modified(long_ago).unwrap();
        assert_eq!([trial.good(""), trial.good("")], [2, 2]);
        File::options().write(true).open(&entry).unwrap().set_modified(long_ago).unwrap();
        SharedVerdicts { folder: trial.folder(), settled: SETTLED }.remove_expired();
        assert!(!entry.exists());
    }

    /// Whatever another user puts in its place: a folder that all may write to, a link to a folder, a link as entry.
    #[test]
    fn a_folder_that_others_may_write_to_is_not_used() {
        let trial = Trial::new();
        assert_eq!([trial.good(""), trial.good("")], [1, 1]);
        std::fs::set_permissions(trial.folder(), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!([trial.good(""), trial.good("")], [2, 3]);
        std::fs::set_permissions(trial.folder(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let entry = std::fs::read_dir(trial.folder()).unwrap().next().unwrap().unwrap().path();
        std::fs::remove_file(&entry).unwrap();
        std::os::unix::fs::symlink(&trial.file, &entry).unwrap();
        assert_eq!(trial.good(""), 4);
        assert_eq!(std::fs::read_to_string(&trial.file).unwrap(), "one");
        std::fs::rename(trial.folder(), trial.place.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink(trial.place.path().join("elsewhere"), trial.folder()).unwrap();
        assert_eq!(trial.good(""), 5);
    }
}
