//! Data sets that are solved here, for machines without any.
//!
//! A solver computes on one rank; files are written by the formats.

mod darcy;
pub mod etdrk;
mod field;
mod shallow_water;
mod solver;

pub use darcy::{DarcyOptions, darcy};
pub use shallow_water::{ShallowWaterOptions, shallow_water};
pub use solver::DarcySolver;
