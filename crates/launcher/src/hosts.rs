//! Placement of ranks on hosts.

use std::path::Path;

use anyhow::{Context, Result, bail};

use isobar_command::exit::{Because, Ended, Exit};

/// A host, and how many ranks it takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Host {
    /// As ssh takes it, perhaps with a user's name: `ada@node7`.
    name: String,
    ranks: usize,
}

/// Host and local rank of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) rank: usize,
    /// Its number among the ranks of its host.
    pub(super) local_rank: usize,
    /// Number of ranks on its host.
    pub(super) local_size: usize,
    pub(super) host: String,
    /// True if that is this machine.
    pub(super) here: bool,
}

/// The hosts of `a:2,b:2`; without a number a host takes one rank.
pub(super) fn of_list(text: &str) -> Result<Vec<Host>> {
    let hosts: Result<Vec<Host>> = text.split(',').map(|word| host(word.trim())).collect();
    Ok(merged(hosts.map_err(|error| Exit::Usage.because(format!("--hosts {text}: {error}")))?))
}

/// The hosts of a file: one a line, as `a:2`, `a slots=2` or `a`; what follows `#` is not read.
pub(super) fn of_file(path: &Path) -> Result<Vec<Host>> {
    let wrong = |what: String| Exit::Usage.because(format!("{}: {what}", path.display()));
    let text = isobar_files::read_to_string(path, LONGEST).map_err(|error| wrong(error.to_string()))?;
    let mut hosts = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if !line.is_empty() {
            let line = line.split_whitespace().collect::<Vec<_>>().join(" ").replace(" slots=", ":");
            hosts.push(host(&line).map_err(|error| wrong(format!("line {}: {error}", number + 1)))?);
        }
    }
    if hosts.is_empty() {
        bail!(wrong("no host in it".to_owned()));
    }
    Ok(merged(hosts))
}

/// `ranks` ranks on these hosts, which are filled in order; as many as they take where the number is not given. Without hosts all
/// are on this one.
pub(super) fn places(hosts: &[Host], ranks: Option<usize>) -> Result<Vec<Place>, Ended> {
    let room: usize = hosts.iter().map(|host| host.ranks).sum();
    let ranks = match (ranks, hosts) {
        (None, []) => return Err(Exit::Usage.because("how many ranks? give -n RANKS, or hosts with --hosts")),
        (None, _) => room,
        (Some(ranks), _) => ranks,
    };
    let alone = [Host { name: "localhost".to_owned(), ranks }];
    let hosts = if hosts.is_empty() { &alone[..] } else { hosts };
    if ranks > hosts.iter().map(|host| host.ranks).sum() {
        return Err(Exit::Usage.because(format!(
            "{ranks} ranks are asked for, and the hosts take {room}; name more hosts, or more ranks for each: host:RANKS"
        )));
    }
    let mut places = Vec::with_capacity(ranks);
    for host in hosts {
        let local_size = host.ranks.min(ranks - places.len());
        for local_rank in 0..local_size {
            let (rank, name) = (places.len(), host.name.clone());
            places.push(Place { rank, local_rank, local_size, here: is_here(&name), host: name });
        }
    }
    Ok(places)
}

/// The address by which all ranks reach the first.
pub(super) fn master(places: &[Place]) -> String {
    let first = places.first().map_or("localhost", |place| place.host.as_str());
    if places.iter().all(|place| place.here) {
        "127.0.0.1".to_owned()
    } else if is_here(first) {
        own_name()
    } else {
        without_user(first).to_owned()
    }
}

fn host(word: &str) -> Result<Host> {
    let bracketed = word.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    let (name, ranks) = match (bracketed, word.split_once(':')) {
        (Some((name, "")), _) => (name, None),
        (Some((name, rest)), _) => (name, Some(rest.strip_prefix(':').unwrap_or(rest))),
        // An IPv6 address has more colons, and no number here.
        (None, Some((_, rest))) if rest.contains(':') => (word, None),
        (None, Some((name, ranks))) => (name, Some(ranks)),
        (None, None) => (word, None),
    };
    let odd = |letter: char| letter.is_whitespace() || letter.is_control();
    if name.is_empty() || name.starts_with('-') || name.contains(odd) {
        bail!("\"{word}\" is no host; expected host or host:RANKS");
    }
    let ranks = match ranks {
        None => 1,
        Some(text) => text
            .parse()
            .ok()
            .filter(|ranks| (1..=MOST).contains(ranks))
            .with_context(|| format!("\"{word}\": \"{text}\" is no number of ranks from 1 to {MOST}"))?,
    };
    Ok(Host { name: name.to_owned(), ranks })
}

/// Bytes of the longest file of hosts.
const LONGEST: u64 = 4 << 20;

/// More ranks than this on a host are a mistake.
const MOST: usize = 4096;

/// A host that is named twice takes the ranks of both, so that local ranks count on.
fn merged(hosts: Vec<Host>) -> Vec<Host> {
    let mut merged: Vec<Host> = Vec::new();
    for host in hosts {
        match merged.iter_mut().find(|known| known.name == host.name) {
            Some(known) => known.ranks += host.ranks,
            None => merged.push(host),
        }
    }
    merged
}

fn is_here(name: &str) -> bool {
    let own = own_name();
    let short = own.split('.').next().unwrap_or_default();
    ["localhost", "127.0.0.1", "::1"].contains(&name) || (!own.is_empty() && (name == own || name == short))
}

fn own_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

fn without_user(host: &str) -> &str {
    host.rsplit_once('@').map_or(host, |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn shape(text: &str, ranks: Option<usize>) -> Result<Vec<(String, usize, usize)>> {
        let places = places(&of_list(text)?, ranks)?;
        assert!(places.iter().enumerate().all(|(rank, place)| place.rank == rank));
        Ok(places.into_iter().map(|place| (place.host, place.local_rank, place.local_size)).collect())
    }

    fn rows(rows: &[(&str, usize, usize)]) -> Vec<(String, usize, usize)> {
        rows.iter().map(|&(host, rank, size)| (host.to_owned(), rank, size)).collect()
    }

    #[rstest]
    #[case("a:2,b:2", None, &[("a", 0, 2), ("a", 1, 2), ("b", 0, 2), ("b", 1, 2)])]
    #[case("a:2,b:2", Some(3), &[("a", 0, 2), ("a", 1, 2), ("b", 0, 1)])]
    #[case("a, ada@b", None, &[("a", 0, 1), ("ada@b", 0, 1)])]
    #[case("a,b,a", None, &[("a", 0, 2), ("a", 1, 2), ("b", 0, 1)])]
    #[case("[fe80::1]:2,fe80::2", None, &[("fe80::1", 0, 2), ("fe80::1", 1, 2), ("fe80::2", 0, 1)])]
    fn ranks_fill_hosts_in_order(
        #[case] hosts: &str,
        #[case] ranks: Option<usize>,
        #[case] expected: &[(&str, usize, usize)],
    ) {
        assert_eq!(shape(hosts, ranks).unwrap(), rows(expected));
    }

    #[rstest]
    #[case("a:2", Some(3), "3 ranks are asked for, and the hosts take 2")]
    #[case("a:0", None, "\"0\" is no number of ranks")]
    #[case("a:two", None, "\"two\" is no number of ranks")]
    #[case("a,,b", None, "\"\" is no host")]
    #[case("-oProxyCommand=x", None, "is no host")]
    #[case("a b", None, "is no host")]
    fn what_cannot_be_is_refused(#[case] hosts: &str, #[case] ranks: Option<usize>, #[case] words: &str) {
        let error = shape(hosts, ranks).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(isobar_command::exit::of(&error), Exit::Usage);
    }

    #[test]
    fn files_are_read_as_other_launchers_write_them() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("hosts");
        std::fs::write(&file, "# two nodes\na slots=2  # the first\n\n b:3\nc\n").unwrap();
        let hosts: Vec<(String, usize)> =
            of_file(&file).unwrap().into_iter().map(|host| (host.name, host.ranks)).collect();
        assert_eq!(hosts, [("a".to_owned(), 2), ("b".to_owned(), 3), ("c".to_owned(), 1)]);
        std::fs::write(&file, "a\nb slots=x\n").unwrap();
        assert!(of_file(&file).unwrap_err().to_string().contains("line 2"));
        std::fs::write(&file, "# none\n").unwrap();
        assert!(of_file(&file).is_err() && of_file(&folder.path().join("none")).is_err());
    }

    #[test]
    fn ranks_reach_the_first_host_by_its_name() {
        let of = |text: &str| master(&places(&of_list(text).unwrap(), None).unwrap());
        assert_eq!(of("localhost:2"), "127.0.0.1");
        assert_eq!(of("ada@node-of-no-name,localhost"), "node-of-no-name");
        assert_eq!(of("localhost,node-of-no-name"), own_name());
    }
}
