//! Available memory, and the check that the needs of all ranks fit into it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use isobar_collectives::Group;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use serde::{Deserialize, Serialize};

use super::Finding;
use crate::{Result, format_bytes};

/// Memory available to a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Bytes available on the host, swap included.
    pub host: Option<u64>,
    /// Control group with the tightest limit, as SLURM and containers set them, and the bytes left in it.
    pub limit: Option<(String, u64)>,
    /// Bytes left in the limit of the process's address space (`ulimit -v`), if there is one.
    pub address_space: Option<u64>,
}

impl Memory {
    /// Returns the memory available to this process. Does not communicate.
    #[must_use]
    pub fn of_process() -> Self {
        let host = available().map(|(free, swap)| free.saturating_add(swap));
        Self { host, limit: limit(), address_space: address_space() }
    }
}

/// The host's free memory and free swap, in bytes.
pub(super) fn available() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    Some((bytes_in(&text, "MemAvailable")?, bytes_in(&text, "SwapFree").unwrap_or(0)))
}

/// Returns the bytes that a line such as `VmSize:    1024 kB` gives.
fn bytes_in(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib.saturating_mul(1024))
}

/// Bytes that this process may still map.
fn address_space() -> Option<u64> {
    let (most, _) = getrlimit(Resource::RLIMIT_AS).ok().filter(|(most, _)| *most != RLIM_INFINITY)?;
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some(most.saturating_sub(bytes_in(&status, "VmSize")?))
}

/// The tightest limit of this process's control groups.
fn limit() -> Option<(String, u64)> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    groups
        .lines()
        .flat_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
            match controllers {
                "" => limits(
                    Path::new("/sys/fs/cgroup"),
                    path,
                    ["memory.max", "memory.current", "inactive_file"],
                ),
                _ if controllers.split(',').any(|name| name == "memory") => {
                    let files = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"];
                    limits(Path::new("/sys/fs/cgroup/memory"), path, files)
                }
                _ => Vec::new(),
            }
        })
        .min_by_key(|(_, left)| *left)
}

/// Returns the bytes left in a control group and in each of its ancestors. The page cache counts as free.
fn limits(root: &Path, path: &str, [most, used, cache]: [&str; 3]) -> Vec<(String, u64)> {
    let path = PathBuf::from(path.trim_start_matches('/'));
    let left = |group: &Path| {
        let folder = root.join(group);
        let number = |file: &str| std::fs::read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok();
        let statistics = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let cached = statistics.lines().find_map(|line| line.strip_prefix(cache)?.trim().parse().ok());
        // Without a limit, `memory.max` is the word `max`.
        let most = number(most)?;
        let used = number(used)?.saturating_sub(cached.unwrap_or(0));
        Some((group.display().to_string(), most.saturating_sub(used)))
    };
    path.ancestors().filter_map(left).collect()
}

/// Memory that a rank needs, as sent to the other ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Need {
    host: String,
    bytes: u64,
    memory: Memory,
}

/// Compares the memory that all ranks need (`bytes` on this rank) with that of their machines; all ranks get
/// the same finding. Its message begins with `what` and ends with `mend`.
///
/// All ranks call.
///
/// # Errors
///
/// A failed exchange.
pub fn memory(world: &Group, bytes: u64, what: &str, mend: &str) -> Result<Option<Finding>> {
    let host = crate::address::host().trim().to_owned();
    let own = Need { host, bytes, memory: Memory::of_process() };
    let told = world.all_gather_bytes(&serde_json::to_vec(&own).unwrap_or_default())?;
    let needs: Vec<Need> =
        told.iter().map(|bytes| serde_json::from_slice(bytes).unwrap_or_default()).collect();
    Ok(lacking(&needs).map(|lack| Finding::error(format!("{what} {lack}; {mend}"))))
}

/// Describes the missing memory.
fn lacking(needs: &[Need]) -> Option<String> {
    let mut hosts: BTreeMap<&str, (u64, u64, usize)> = BTreeMap::new();
    let mut limits: BTreeMap<(&str, &str), (u64, u64, usize)> = BTreeMap::new();
    let add = |sum: &mut (u64, u64, usize), bytes: u64, left: u64| {
        *sum = (sum.0.saturating_add(bytes), sum.1.min(left), sum.2 + 1);
    };
    for need in needs {
        if let Some(left) = need.memory.host {
            add(hosts.entry(&need.host).or_insert((0, u64::MAX, 0)), need.bytes, left);
        }
        if let Some((group, left)) = &need.memory.limit {
            add(limits.entry((&need.host, group)).or_insert((0, u64::MAX, 0)), need.bytes, *left);
        }
    }
    let most = needs.iter().map(|need| need.bytes).max().unwrap_or_default();
    let words = |host: &str, (needed, left, ranks): (u64, u64, usize), of: &str| {
        let all = if ranks > 1 {
            format!(" a rank, {} for the {ranks} ranks of {host}", format_bytes(needed))
        } else {
            String::new()
        };
        format!("needs {} of memory{all}, and {host} has {}{of}", format_bytes(most), format_bytes(left))
    };
    let host = hosts.into_iter().find(|(_, (needed, left, _))| needed > left);
    let host = host.map(|(host, sum)| words(host, sum, " free"));
    let group = || {
        let over = limits.into_iter().find(|(_, (needed, left, _))| needed > left);
        over.map(|((host, group), sum)| words(host, sum, &format!(" left in the control group /{group}")))
    };
    host.or_else(group).or_else(|| needs.iter().find_map(beyond_address_space))
}

/// Describes what a rank lacks of its own address space.
fn beyond_address_space(need: &Need) -> Option<String> {
    let left = need.memory.address_space.filter(|left| need.bytes > *left)?;
    let (needed, left) = (format_bytes(need.bytes), format_bytes(left));
    Some(format!(
        "needs {needed} of memory on a rank of {}, whose limit of address space (ulimit -v) leaves {left}",
        need.host
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn need(host: &str, bytes: u64, limit: Option<(&str, u64)>) -> Need {
        let limit = limit.map(|(group, left)| (group.to_owned(), left));
        Need {
            host: host.to_owned(),
            bytes,
            memory: Memory { host: Some(16 * GIB), limit, address_space: None },
        }
    }

    #[test]
    fn ranks_of_a_host_share_its_memory() {
        let [a, b] = ["node7", "node8"];
        assert_eq!(lacking(&[need(a, 10 * GIB, None), need(b, 10 * GIB, None)]), None);
        let text = lacking(&[need(a, 10 * GIB, None), need(b, GIB, None), need(a, 9 * GIB, None)]).unwrap();
        assert_eq!(
            text,
            "needs 10.0 GiB of memory a rank, 19.0 GiB for the 2 ranks of node7, and node7 has 16.0 GiB free"
        );
        // Tasks of SLURM have control groups of their own.
        let own = |name, left| need(a, 3 * GIB, Some((name, left)));
        assert_eq!(lacking(&[own("task_0", 4 * GIB), own("task_1", 4 * GIB)]), None);
        let text = lacking(&[own("step", 4 * GIB), own("step", 4 * GIB)]).unwrap();
        assert!(text.ends_with("and node7 has 4.0 GiB left in the control group /step"), "{text}");
        assert_eq!(lacking(&[Need { bytes: u64::MAX, ..Need::default() }]), None);
        assert!(lacking(&[need(a, u64::MAX, None), need(a, u64::MAX, None)]).is_some());
    }

    #[test]
    fn each_rank_has_its_own_address_space() {
        let limited = |bytes, left| {
            let own = need("node7", bytes, None);
            Need { memory: Memory { address_space: Some(left), ..own.memory }, ..own }
        };
        assert_eq!(lacking(&[limited(4 * GIB, 5 * GIB), limited(5 * GIB, 5 * GIB)]), None);
        let text = lacking(&[limited(4 * GIB, 5 * GIB), limited(6 * GIB, 5 * GIB)]).unwrap();
        assert_eq!(
            text,
            "needs 6.0 GiB of memory on a rank of node7, whose limit of address space (ulimit -v) leaves 5.0 GiB"
        );
    }

    #[test]
    fn limits_of_control_groups_are_read() {
        let root = tempfile::tempdir().unwrap();
        let write = |group: &str, file: &str, text: &str| {
            let folder = root.path().join(group);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(file), text).unwrap();
        };
        write("job", "memory.max", "1000\n");
        write("job", "memory.current", "700\n");
        write("job", "memory.stat", "anon 400\ninactive_file 300\nfile 300\n");
        write("job/step", "memory.max", "max\n");
        write("job/step", "memory.current", "700\n");
        let found = limits(root.path(), "/job/step", ["memory.max", "memory.current", "inactive_file"]);
        assert_eq!(found, [("job".to_owned(), 600)]);
        assert!(Memory::of_process().host.is_some_and(|bytes| bytes > 0));
    }
}
