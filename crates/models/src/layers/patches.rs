//! Fields cut into patches, and put together again.

use isobar_array::Array;
use isobar_shard::{ParameterLayouts, Placement};

use crate::error::{Checker, Result};
use crate::layers::PerDim;
use crate::sharding::Sharding;

/// Names of spatial dims; a grid with fewer dims has the last names.
const SIDES: [&str; 3] = ["depth", "height", "width"];

/// Checks the extents of fields (two to `most` dims) and of patches, each with its argument's name, and returns both.
pub(crate) fn patch_grid(
    check: &Checker,
    most: usize,
    (fields_name, fields): (&str, &PerDim),
    (patch_name, patch): (&str, &PerDim),
) -> Result<[Vec<i64>; 2]> {
    let dims = fields.list(2).len().clamp(2, most);
    let sides = &SIDES[SIDES.len() - dims..];
    let read = |name: &str, given: &PerDim| -> Result<Vec<i64>> {
        let list = given.list(dims);
        check.ensure(list.len() == dims, || {
            let all = sides.join(", ").replace(", width", " and width");
            format!("{name} has {} numbers, expected {dims}: {all}", list.len())
        })?;
        list.iter()
            .zip(sides)
            .map(|(&extent, side)| check.extent(&format!("{side} of {name}"), extent))
            .collect()
    };
    let (fields, patch) = (read(fields_name, fields)?, read(patch_name, patch)?);
    for ((side, &extent), &patch) in sides.iter().zip(&fields).zip(&patch) {
        check.divisible(
            (&format!("{side} of {fields_name}"), extent),
            (&format!("that of {patch_name}"), patch),
        )?;
    }
    Ok([fields, patch])
}

/// Assembles the fields `[batch, channels, extents…]` from patches `[grid…, batch, patch extents · channels]`, channels fastest.
pub(crate) fn unpatched<A: Array>(patches: &A, patch: &[i64]) -> Result<A> {
    let (shape, dims) = (patches.shape(), patch.len());
    let (grid, batch) = (&shape[..dims], shape[dims]);
    let channels = shape[dims + 1] / patch.iter().product::<i64>();
    let patches = patches.reshape(&[grid, &[batch], patch, &[channels]].concat())?;
    let mut order = vec![dims as i64, 2 * dims as i64 + 1];
    order.extend((0..dims as i64).flat_map(|dim| [dim, dims as i64 + 1 + dim]));
    let extents = grid.iter().zip(patch).map(|(tokens, patch)| tokens * patch);
    let fields: Vec<i64> = [batch, channels].into_iter().chain(extents).collect();
    Ok(patches.permute(&order)?.reshape(&fields)?)
}

/// Splits the trained positions of that name as the tokens are: in rows over the axis `domain`.
pub(crate) fn split_positions(name: Option<&str>, fields: &[usize], patch: &[usize]) -> Sharding {
    let tokens: Vec<usize> =
        fields.iter().zip(patch).map(|(&extent, &patch)| extent / patch.max(1)).collect();
    let sharding = Sharding::new().tokens(&tokens);
    let (Some(name), Some(others)) = (name, tokens.get(1..)) else { return sharding };
    let rows = [("domain", Placement::Shard(1))];
    let in_row = others.iter().map(|&extent| extent.max(1) as i64).product();
    sharding.parameters(ParameterLayouts::new().with_blocks(name, &rows, in_row))
}
