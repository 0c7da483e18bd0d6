//! Fields cut into patches, and put together again.

use isobar_array::Array;
use isobar_shard::{ParameterLayouts, Placement};

use crate::error::{Checker, Result};
use crate::layers::PerDim;
use crate::sharding::Sharding;

/// Checked extents of fields and patches, each with the name of its argument: the fields', the patches'.
pub(crate) fn patch_grid(
    check: &Checker,
    (fields_name, fields): (&str, &PerDim),
    (patch_name, patch): (&str, &PerDim),
) -> Result<[[i64; 2]; 2]> {
    let pair = |name: &str, given: &PerDim| -> Result<[i64; 2]> {
        let list = given.list(2);
        check.ensure(list.len() == 2, || {
            format!("{name} has {} numbers, expected 2: height and width", list.len())
        })?;
        let extent = |dim: usize, side: &str| check.extent(&format!("{side} of {name}"), list[dim]);
        Ok([extent(0, "height")?, extent(1, "width")?])
    };
    let (fields, patch) = (pair(fields_name, fields)?, pair(patch_name, patch)?);
    for (dim, side) in ["height", "width"].into_iter().enumerate() {
        check.divisible(
            (&format!("{side} of {fields_name}"), fields[dim]),
            (&format!("that of {patch_name}"), patch[dim]),
        )?;
    }
    Ok([fields, patch])
}

/// The fields `[batch, channels, height, width]` of patches `[h, w, batch, p₀ · p₁ · channels]`, channels fastest.
pub(crate) fn unpatched<A: Array>(patches: &A, [p0, p1]: [i64; 2]) -> Result<A> {
    let shape = patches.shape();
    let &[h, w, batch, features] = &shape[..] else { return Ok(patches.shallow_clone()) };
    let channels = features / (p0 * p1);
    let patches = patches.reshape(&[h, w, batch, p0, p1, channels])?;
    Ok(patches.permute(&[2, 5, 0, 3, 1, 4])?.reshape(&[batch, channels, h * p0, w * p1])?)
}

/// Splits the trained positions of that name as the tokens are: in rows over the axis `domain`.
pub(crate) fn split_positions(name: Option<&str>, fields: &[usize], patch: &[usize]) -> Sharding {
    let tokens: Vec<usize> =
        fields.iter().zip(patch).map(|(&extent, &patch)| extent / patch.max(1)).collect();
    let sharding = Sharding::new().tokens(&tokens);
    let (Some(name), Some(&columns)) = (name, tokens.get(1)) else { return sharding };
    let rows = [("domain", Placement::Shard(1))];
    sharding.parameters(ParameterLayouts::new().with_blocks(name, &rows, columns.max(1) as i64))
}
