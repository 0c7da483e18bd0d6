//! Data sets that are solved here, for machines without any.
//!
//! A solver computes on one rank; files are written by the formats.

mod darcy;
pub mod etdrk;
mod field;
mod solver;

pub use darcy::{DarcyOptions, darcy};
pub use solver::DarcySolver;
