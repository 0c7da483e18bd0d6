//! File descriptors for the connections between ranks.

use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};

use crate::{Error, Result};

/// Descriptors that a start needs beside those of connections: listeners, files, and what libraries open.
const OTHERS: u64 = 16;

/// Raises this process's soft limit of open files by as many as the connections of a rank need, towards the hard limit. The
/// usual soft limit of 1024 is too low for rank 0 of some hundreds of ranks over gloo, and libtorch ends the process when it
/// cannot accept a connection.
///
/// # Errors
///
/// A hard limit that is too low.
pub(crate) fn reserve(rank: usize, ranks: usize) -> Result<()> {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return Ok(()) };
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |open| open.count() as u64);
    let [needed, wanted] = connections(rank, ranks);
    let limit = plan(soft, hard, open, [needed, wanted]).map_err(|needed| Error::OpenFiles {
        limit: hard,
        needed,
        ranks,
    })?;
    if let Some(limit) = limit
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, limit, hard)
    {
        tracing::warn!("the limit of open files (ulimit -n) stays at {soft}: {error}");
    }
    Ok(())
}

/// Numbers of connections that a rank needs, and that it may have: one to each other rank by gloo, and on rank 0 one of the store; those
/// of the watchdog, which another rank takes over if rank 0 is lost, may come besides.
fn connections(rank: usize, ranks: usize) -> [u64; 2] {
    let others = ranks.saturating_sub(1) as u64;
    let certain = if rank == 0 { 2 } else { 1 };
    [certain * others, (certain + 1) * others]
}

/// Returns the new soft limit, if it must be raised; or, if the hard limit is too low, the number of descriptors that are needed.
/// The program keeps the descriptors that it had before.
fn plan(soft: rlim_t, hard: rlim_t, open: u64, [certain, wanted]: [u64; 2]) -> Result<Option<rlim_t>, u64> {
    let needed = open + certain + OTHERS;
    if needed > hard {
        return Err(needed);
    }
    let raised = soft.saturating_add(wanted).min(hard);
    Ok((raised > soft).then_some(raised))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_leave_room_for_the_connections() {
        assert_eq!((connections(0, 400), connections(7, 400)), ([798, 1197], [399, 798]));
        assert_eq!(plan(1024, 524_288, 10, [798, 1197]), Ok(Some(2221)));
        assert_eq!(plan(1024, 2048, 10, [798, 1197]), Ok(Some(2048)));
        assert_eq!(plan(1024, 1024, 10, [798, 1197]), Ok(None));
        assert_eq!(plan(16, 16, 4, [10, 15]), Err(30));
        assert_eq!(plan(u64::MAX, u64::MAX, 4, [10, 15]), Ok(None));
    }
}
