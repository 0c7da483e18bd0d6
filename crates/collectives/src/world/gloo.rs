//! libtorch's gloo, over TCP, for launches without MPI.

use crate::engine::group::Group;
use crate::error::Result;

pub use crate::backend::gloo::Options;

/// The group of all ranks. Every rank calls.
///
/// # Errors
///
/// A port that is taken, ranks with different tokens, a rank that does not come by the deadline, or an interface that there
/// is not.
pub fn world(options: &Options) -> Result<Group> {
    let backend = crate::backend::gloo::connect(options)?;
    Ok(Group::world(Box::new(backend), options.rank, options.size, options.deadline))
}
