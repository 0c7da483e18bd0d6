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
    let limit = plan(soft, hard, open, connections(rank, ranks)).map_err(|needed| Error::OpenFiles {
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

/// Number of a rank's connections: one to each other rank by gloo; on rank 0, also those of the store and of the watchdog. Another
/// rank takes over the watchdog if rank 0 is lost.
fn connections(rank: usize, ranks: usize) -> u64 {
    let of_each = if rank == 0 { 3 } else { 2 };
    of_each * ranks.saturating_sub(1) as u64
}

/// Returns the new soft limit, if it must be raised; or, if the hard limit is too low, the number of descriptors that are needed.
/// The program keeps the descriptors that it had before.
fn plan(soft: rlim_t, hard: rlim_t, open: u64, connections: u64) -> Result<Option<rlim_t>, u64> {
    let needed = open + connections + OTHERS;
    if needed > hard {
        return Err(needed);
    }
    let raised = soft.saturating_add(connections).min(hard);
    Ok((raised > soft).then_some(raised))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_leave_room_for_the_connections() {
        assert_eq!((connections(0, 400), connections(7, 400)), (1197, 798));
        assert_eq!(plan(1024, 524_288, 10, 1197), Ok(Some(2221)));
        assert_eq!(plan(1024, 2048, 10, 1197), Ok(Some(2048)));
        assert_eq!(plan(1024, 1024, 10, 15), Ok(None));
        assert_eq!(plan(16, 16, 4, 15), Err(35));
        assert_eq!(plan(u64::MAX, u64::MAX, 4, 15), Ok(None));
    }
}
