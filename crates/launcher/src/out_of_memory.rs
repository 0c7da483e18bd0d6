//! Kills by the kernel's out-of-memory killer, found by the counters that the kernel keeps of them.

use std::path::{Path, PathBuf};

/// Counters of the kernel's out-of-memory killer.
#[derive(Debug, Clone, Default)]
pub(super) struct OomCounters {
    /// Root of the file system, another one in tests.
    root: PathBuf,
    /// Kills in the control group of this process, with the group's name.
    group: Option<(String, u64)>,
    /// Kills on this machine.
    machine: Option<u64>,
}

/// Evidence for a kill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OomKill {
    /// In the launcher's control group, which has this name.
    Group(String),
    /// On this machine: in a control group of the rank's own, or since all memory was used up.
    Machine,
}

impl OomCounters {
    /// Reads the counters as they are now. Counters that cannot be read find no kill.
    pub(super) fn read() -> Self {
        Self::under(Path::new("/"))
    }

    fn under(root: &Path) -> Self {
        let machine = counter(&root.join("proc/vmstat"), "oom_kill");
        Self { root: root.to_owned(), group: group(root), machine }
    }

    /// Returns whether there was a kill since these counters were read.
    pub(super) fn kill_since(&self) -> Option<OomKill> {
        let now = Self::under(&self.root);
        match (&self.group, now.group) {
            (Some((name, before)), Some((same, after))) if *name == same && after > *before => {
                Some(OomKill::Group(same))
            }
            _ => (now.machine? > self.machine?).then_some(OomKill::Machine),
        }
    }
}

impl OomKill {
    /// Describes the kill, after "it was killed by signal 9 (SIGKILL)".
    pub(super) fn words(&self) -> String {
        match self {
            Self::Group(name) => {
                format!(
                    ", by the kernel's out-of-memory killer: the memory limit of control group {name} was reached"
                )
            }
            Self::Machine => {
                ", by the kernel's out-of-memory killer (this machine counts a new kill)".to_owned()
            }
        }
    }

    /// Ways to need less memory.
    pub(super) const MEND: &str = "raise the memory limit of the job or container, start fewer ranks on this host, or \
        lower train.batch_size or raise train.accumulate (smaller micro-batches)";
}

/// Kills in this process's memory control group, of version 2 or 1. Version 2 counts those of groups below too.
fn group(root: &Path) -> Option<(String, u64)> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, name) = (fields.next()?, fields.next()?);
        let (folder, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.events"),
            _ if controllers.split(',').any(|one| one == "memory") => {
                ("sys/fs/cgroup/memory", "memory.oom_control")
            }
            _ => return None,
        };
        // Inside a container the name may be that of the host, and the folder that of the container.
        let folder = root.join(folder);
        let inner = folder.join(name.trim_start_matches('/')).join(file);
        let count = counter(&inner, "oom_kill").or_else(|| counter(&folder.join(file), "oom_kill"))?;
        Some((name.to_owned(), count))
    })
}

/// Number behind a word, in a file with one of both a line.
fn counter(path: &Path, word: &str) -> Option<u64> {
    let text = std::fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rstest::rstest;

    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[rstest]
    #[case::version_2("0::/job", "sys/fs/cgroup/job/memory.events", "low 0\noom 3\noom_kill ")]
    #[case::version_1(
        "4:cpu,memory:/job\n0::/",
        "sys/fs/cgroup/memory/job/memory.oom_control",
        "under_oom 0\noom_kill "
    )]
    #[case::container("0::/job", "sys/fs/cgroup/memory.events", "oom_kill ")]
    fn kills_of_the_own_group_are_found(#[case] groups: &str, #[case] file: &str, #[case] head: &str) {
        let root = tempfile::tempdir().unwrap();
        let set = |group: u64, machine: u64| {
            write(root.path(), file, &format!("{head}{group}\n"));
            write(root.path(), "proc/vmstat", &format!("pgfault 7\noom_kill {machine}\n"));
        };
        write(root.path(), "proc/self/cgroup", groups);
        set(2, 5);
        let before = OomCounters::under(root.path());
        assert_eq!(before.kill_since(), None);
        set(2, 6);
        assert_eq!(before.kill_since(), Some(OomKill::Machine));
        set(3, 6);
        assert_eq!(before.kill_since(), Some(OomKill::Group("/job".to_owned())));
    }

    #[test]
    fn without_counters_there_is_no_kill() {
        let root = tempfile::tempdir().unwrap();
        let before = OomCounters::under(root.path());
        write(root.path(), "proc/vmstat", "oom_kill 6\n");
        assert_eq!(before.kill_since(), None);
    }
}
