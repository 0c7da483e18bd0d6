//! Calls of operators by name, for provided methods.

use super::{Array, Attrs, argument};
use crate::error::Result;

/// Calls an operator that returns `N` arrays.
pub(super) fn call<A: Array, const N: usize>(
    name: &'static str,
    inputs: &[&A],
    attrs: impl FnOnce() -> Attrs,
) -> Result<[A; N]> {
    let outputs = A::op(name, inputs, &attrs())?;
    let count = outputs.len();
    outputs.try_into().map_err(|_| argument(name, format!("it gave {count} arrays, expected {N}")))
}

/// Calls an operator that returns one array.
pub(super) fn one<A: Array>(name: &'static str, inputs: &[&A], attrs: impl FnOnce() -> Attrs) -> Result<A> {
    call(name, inputs, attrs).map(|[output]| output)
}

/// Calls an operator that returns two arrays.
pub(super) fn two<A: Array>(
    name: &'static str,
    inputs: &[&A],
    attrs: impl FnOnce() -> Attrs,
) -> Result<(A, A)> {
    call(name, inputs, attrs).map(|[first, second]| (first, second))
}

/// Returns the arrays `first`, followed by those of `others` that are given.
pub(super) fn with<'a, A>(first: &[&'a A], others: &[Option<&'a A>]) -> Vec<&'a A> {
    first.iter().copied().chain(others.iter().copied().flatten()).collect()
}
