//! Calls by name of provided methods.

use super::{Array, Attrs, argument};
use crate::error::Result;

/// Calls an operator that gives `N` arrays.
pub(super) fn call<A: Array, const N: usize>(
    name: &'static str,
    inputs: &[&A],
    attrs: impl FnOnce() -> Attrs,
) -> Result<[A; N]> {
    let outputs = A::op(name, inputs, &attrs())?;
    let count = outputs.len();
    outputs.try_into().map_err(|_| argument(name, format!("it gave {count} arrays, expected {N}")))
}

/// Calls an operator that gives one array.
pub(super) fn one<A: Array>(name: &'static str, inputs: &[&A], attrs: impl FnOnce() -> Attrs) -> Result<A> {
    call(name, inputs, attrs).map(|[output]| output)
}

/// Calls an operator that gives two arrays.
pub(super) fn two<A: Array>(
    name: &'static str,
    inputs: &[&A],
    attrs: impl FnOnce() -> Attrs,
) -> Result<(A, A)> {
    call(name, inputs, attrs).map(|[first, second]| (first, second))
}

/// Returns an array and the optional ones after it.
pub(super) fn with<'a, A>(first: &[&'a A], others: &[Option<&'a A>]) -> Vec<&'a A> {
    first.iter().copied().chain(others.iter().copied().flatten()).collect()
}
