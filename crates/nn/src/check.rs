//! Checks of the arguments of layers.

use isobar_array::kernel;
use isobar_shard::{Error, Result};

/// Returns the error of an argument that a layer cannot take.
pub(crate) fn refuse<T>(layer: &'static str, reason: String) -> Result<T> {
    Err(Error::from(kernel::argument(layer, reason)))
}

/// Returns a size that is at least 1.
pub(crate) fn extent(layer: &'static str, name: &str, value: i64) -> Result<i64> {
    match value {
        1.. => Ok(value),
        _ => refuse(layer, format!("{name} is {value}, expected 1 or more")),
    }
}

/// Checks that a size is a multiple of another one.
pub(crate) fn divisible(
    layer: &'static str,
    (name, value): (&str, i64),
    (by, divisor): (&str, i64),
) -> Result<()> {
    match value % divisor {
        0 => Ok(()),
        _ => refuse(layer, format!("{name} {value} is not divisible by {by} {divisor}")),
    }
}

/// Checks a probability: at least 0 and below 1.
pub(crate) fn probability(layer: &'static str, name: &str, value: f64) -> Result<f64> {
    match (0.0..1.0).contains(&value) {
        true => Ok(value),
        false => refuse(layer, format!("{name} is {value}, expected 0 or more and below 1")),
    }
}
