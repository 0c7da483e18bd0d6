//! MPI, through rsmpi's raw layer.

use std::sync::Arc;

use crate::backend::mpi::Mpi;
use crate::engine::group::Group;
use crate::error::Result;

pub use crate::backend::mpi::{Options, abort, call_under_way, finalize, is_running, library, takes_cuda};

/// The group of all processes that the launcher started. MPI is initialised where it is not yet.
///
/// Every process calls. A second call in a process gives a new group of the same processes, whose messages never mix with
/// the first's.
///
/// # Errors
///
/// An MPI that does not start, has ended, or cannot be called from more than one thread.
pub fn world(options: Options) -> Result<Group> {
    let mpi = Mpi::start(&options)?;
    let (rank, size) = (mpi.rank, mpi.size);
    Ok(Group::world(Box::new(Arc::new(mpi)), rank, size, options.deadline))
}
