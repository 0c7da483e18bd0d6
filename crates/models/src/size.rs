//! Sizes of models, counted from their configurations alone.
//!
//! A model is built from a [`ParamCount`] at most twice for each kind of layer, with few layers; each further
//! layer adds the same amount. A configuration of 10⁹ layers is thus counted as fast as one of two, and
//! nothing is allocated.

use isobar_shard::{ModelSize, ParamCount};

use crate::error::Result;

/// Most times that a network may halve or double its grid.
pub(crate) const MOST_HALVINGS: usize = 16;

/// Size of a model of `layers` equal layers. Layers beyond the first `same` are alike.
pub(crate) fn extrapolate(
    layers: usize,
    same: usize,
    size: impl Fn(usize) -> Result<ModelSize>,
) -> Result<ModelSize> {
    if layers <= same + 1 {
        return size(layers);
    }
    let (few, more) = (size(same)?, size(same + 1)?);
    Ok(few + (more - few) * (layers - same) as u128)
}

/// Builds with a fresh counter and returns what it counted.
pub(crate) fn built<T>(
    count: &dyn Fn() -> ParamCount,
    build: impl FnOnce(&mut ParamCount) -> Result<T>,
) -> Result<ModelSize> {
    let mut count = count();
    build(&mut count)?;
    Ok(count.size())
}
