//! Checks of the values that are written to files.

use std::ops::Range;
use std::path::Path;

use crate::boxes::index_in_array;
use crate::{Error, Result};

/// Refuses a window's values if one is not finite, with its index in the dataset.
pub(crate) fn check_finite(path: &Path, name: &str, window: &[Range<usize>], values: &[f32]) -> Result<()> {
    check_values(path, name, window, values, false)
}

/// Refuses a window's values if one is infinite, or NaN where that does not mark a `missing` value, with its index in the
/// dataset.
pub(crate) fn check_values(
    path: &Path,
    name: &str,
    window: &[Range<usize>],
    values: &[f32],
    missing: bool,
) -> Result<()> {
    let Some(at) = values.iter().position(|value| !(value.is_finite() || missing && value.is_nan())) else {
        return Ok(());
    };
    let (index, value) = (index_in_array(window, at), f64::from(values[at]));
    Err(Error::NotFinite { path: path.to_owned(), dataset: name.to_owned(), index, value })
}
