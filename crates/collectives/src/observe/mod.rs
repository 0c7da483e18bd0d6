//! Records of a world's operations: the flight recorder, traces, and the labels of modules. They depend on no group.

pub mod flight;
pub(crate) mod label;
pub(crate) mod trace;
