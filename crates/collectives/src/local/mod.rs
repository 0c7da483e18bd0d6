//! Operations of a rank on its own tensors: memory, reductions of received parts, rows, and rules that split an extent.
//! They depend on no group and do not communicate.

pub(crate) mod memory;
pub(crate) mod reduce;
pub(crate) mod rows;
pub(crate) mod sizes;
