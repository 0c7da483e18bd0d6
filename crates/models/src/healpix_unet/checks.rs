//! Checks of the arguments' numbers and names.

use super::MODEL;
use crate::error::{Checker, Result};

/// Greatest number of convolutions of a basic block, and of steps in time.
pub(super) const MOST: usize = 1024;

pub(super) const CHECK: Checker = Checker(MODEL);

/// A product that must not be too large.
pub(super) fn whole(name: &str, value: impl FnOnce() -> Option<i64>) -> Result<i64> {
    let value = value().and_then(|value| usize::try_from(value).ok()).unwrap_or(usize::MAX);
    CHECK.extent(name, value)
}

/// The name of a class without its module, if it is a known one.
pub(super) fn class<'a>(name: &str, target: &'a str, known: &[&str]) -> Result<&'a str> {
    let class = target.rsplit('.').next().unwrap_or(target);
    CHECK.ensure(known.contains(&class), || {
        format!("{name}._target_ is {target:?}, expected {}", known.join(", "))
    })?;
    Ok(class)
}
