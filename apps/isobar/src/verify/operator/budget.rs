//! How many bytes a rank may receive in an operator and its gradient, from the shapes alone.

use anyhow::Result;

use super::bytes;
use crate::verify::case::Case;
use crate::verify::layout::Layout;

/// The budget of an operator of sharded tensors on `rank`, forward and backward together.
pub(super) fn received(
    op: &str,
    names: &[String],
    case: &Case,
    layout: &Layout,
    _rank: usize,
) -> Result<u64> {
    let ranks = layout.mesh.ranks() as u64;
    let others = ranks - 1;
    let sizes = names.iter().map(|name| Ok(bytes(case.tensor(name)?))).collect::<Result<Vec<u64>>>()?;
    let outputs: u64 = case.header.outputs.iter().filter_map(|name| case.get(name)).map(bytes).sum();
    let all: u64 = sizes.iter().sum();
    // Gradients of what is whole on all ranks are added up over them.
    let added: u64 = others * sizes.iter().skip(1).sum::<u64>();
    let _ = op;
    Ok(4 * ranks * (all + outputs) + added)
}
