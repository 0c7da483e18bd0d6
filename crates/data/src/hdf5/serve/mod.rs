//! The helper process itself: before `main`, sets its own limits, then reads the files that its parent names.
//!
//! It depends on no format or configuration: it visits everything that a file holds.

mod visit;

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::process::exit;
use std::time::Duration;

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};

use self::visit::{Verdict, visit};
use crate::hdf5::isolation::{
    GOOD, HELPER, MEMORY, OUT_OF_MEMORY, UNLISTED, is_readable, next_path, seconds,
};

/// The helper ends if it gets no file for this long.
const IDLE: Duration = Duration::from_secs(5);

/// Runs before `main` in every program that links this crate. A process that was started as a helper ends here.
#[ctor::ctor(unsafe)]
fn serve_if_started_for_it() {
    if std::env::var_os(HELPER).is_some() {
        isobar_torch::skip_static_destructors();
        exit(serve().is_err().into());
    }
}

/// Reads the files that the parent process names on standard input, until the parent names none for 5 s or ends.
fn serve() -> std::io::Result<()> {
    close_inherited()?;
    // A crash here is an answer, not worth a core file.
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    limit_memory()?;
    fill_heap();
    let mut requests = File::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let mut answers = std::io::stdout();
    while is_readable(&requests, IDLE) {
        let Some(path) = next_path(&mut requests) else { return Ok(()) };
        let path = PathBuf::from(OsString::from_vec(path));
        limit_time(std::fs::metadata(&path).map_or(0, |metadata| metadata.len()))?;
        answers.write_all(&[match visit(&path) {
            Verdict::Good => GOOD,
            Verdict::OutOfMemory => OUT_OF_MEMORY,
            Verdict::Unlisted => UNLISTED,
        }])?;
        answers.flush()?;
    }
    Ok(())
}

/// Closes inherited file descriptors, such as connections of an MPI library: while the helper holds a rank's connection, peers
/// would not notice the loss of that rank.
fn close_inherited() -> std::io::Result<()> {
    let open: Vec<i32> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|number| *number > 2)
        .collect();
    for number in open {
        // The descriptor of the listing itself is closed already.
        let _ = nix::unistd::close(number);
    }
    Ok(())
}

/// Limits the address space to [`MEMORY`] on top of what the program and its libraries already occupy.
fn limit_memory() -> std::io::Result<()> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let taken = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let taken: Option<u64> = taken.and_then(|kib| kib.trim().strip_suffix(" kB")?.parse().ok());
    let taken = taken.ok_or_else(|| std::io::Error::other("no size of memory"))? << 10;
    limit(Resource::RLIMIT_AS, taken + MEMORY)
}

/// Sets a soft limit, below the hard one, which a user may not raise.
fn limit(resource: Resource, most: u64) -> std::io::Result<()> {
    let (_, hard) = getrlimit(resource)?;
    Ok(setrlimit(resource, most.min(hard), hard)?)
}

/// Leaves 128 KiB of free heap memory filled with the allocator's pattern. Memory that was never used holds zeros: invalid reads
/// of it would be harmless here, but perhaps not in another process. With more, a read far beyond a block would end inside the
/// heap here, but outside the heap of another process.
fn fill_heap() {
    let blocks: Vec<Vec<u8>> = (0..32).map(|_| vec![1; 4096]).collect();
    // Without a used block at the end, the allocator would return the memory to the system.
    std::mem::forget(vec![1_u8; 4096]);
    drop(blocks);
}

/// Lets the kernel end the process if the next file takes too long, even if the parent is gone.
fn limit_time(length: u64) -> std::io::Result<()> {
    let used = getrusage(UsageWho::RUSAGE_SELF)?;
    let used = used.user_time().tv_sec() + used.system_time().tv_sec();
    limit(Resource::RLIMIT_CPU, used.unsigned_abs() + 1 + seconds(length))
}
