//! A region in which sequences are split over ranks.

use crate::error::Result;
use crate::layout::Placement;
use crate::ops::{refuse, resolve, rule};
use crate::tensor::ShardTensor;

/// Runs `f` with the tensors split along their dims `dims` (one for each, negative from the end) over the mesh's axis of that
/// name, and gives its results back in the layout that the first tensor had, where they are of its shape; others stay as `f`
/// leaves them.
///
/// A tensor is replicated or partial along that axis before, or split already; splitting it costs nothing then. All ranks of the
/// mesh call. Differentiable.
///
/// # Errors
///
/// An unknown axis, dims that do not fit; the errors of `f` and of the exchanges.
pub fn context_parallel(
    axis: &str,
    tensors: &[&ShardTensor],
    dims: &[i64],
    f: impl FnOnce(&[ShardTensor]) -> Result<Vec<ShardTensor>>,
) -> Result<Vec<ShardTensor>> {
    const NAME: &str = "context_parallel";
    let Some(first) = tensors.first() else { return refuse(NAME, "no tensors") };
    rule(NAME, tensors, || {
        if tensors.len() != dims.len() {
            let given = format!("{} tensors and {} dims; expected one for each", tensors.len(), dims.len());
            return refuse(NAME, given);
        }
        let place = |tensor: &ShardTensor, dim: i64| {
            let mesh = tensor.device_mesh().clone();
            let Some(along) = mesh.names().iter().position(|name| *name == axis) else {
                return refuse(NAME, format!("{mesh} has no axis \"{axis}\""));
            };
            let dim = resolve(NAME, dim, tensor.ndim())?;
            let mut placements = tensor.layout().without_partial().placements().to_vec();
            if placements[along].dim() != Some(dim) {
                placements[along] = Placement::Shard(dim);
            }
            Ok((mesh, placements))
        };
        // All are looked at before anything moves.
        let wanted: Vec<_> =
            tensors.iter().zip(dims).map(|(tensor, dim)| place(tensor, *dim)).collect::<Result<_>>()?;
        let split = tensors.iter().zip(wanted);
        let split = split.map(|(x, (mesh, placements))| x.resolved()?.redistribute(Some(&mesh), &placements));
        let inside: Vec<ShardTensor> = split.collect::<Result<_>>()?;
        let home = first.layout().without_partial();
        let back = |result: ShardTensor| match result.shape() == home.shape() {
            true => result.to_layout(&home),
            false => Ok(result),
        };
        f(&inside)?.into_iter().map(back).collect()
    })
}
