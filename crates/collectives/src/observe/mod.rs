//! What is kept of a world's operations: the flight record, traces, and the labels of modules. Nothing here knows groups.

pub mod flight;
pub(crate) mod label;
pub(crate) mod trace;
