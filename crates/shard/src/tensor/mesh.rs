//! Check that operands share a mesh.

use super::ShardTensor;
use crate::error::Result;

/// Rejects operands on different meshes.
pub(crate) fn same_mesh(op: &'static str, operands: &[&ShardTensor]) -> Result<()> {
    match operands.iter().find(|operand| operand.device_mesh() != operands[0].device_mesh()) {
        None => Ok(()),
        Some(other) => Err(crate::dense::argument(
            op,
            format!(
                "the tensors are on different meshes, {} and {}; redistribute one",
                operands[0].device_mesh(),
                other.device_mesh()
            ),
        )),
    }
}
