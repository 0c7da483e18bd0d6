//! What a rank does with its own tensors: memory, reductions of parts that have arrived, rows, and rules that split an
//! extent. Nothing here knows groups or communicates.

pub(crate) mod memory;
pub(crate) mod reduce;
pub(crate) mod rows;
pub(crate) mod sizes;
