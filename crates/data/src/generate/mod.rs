//! Data sets that are solved here, for machines without any.

mod darcy;
mod field;
mod solver;

pub use darcy::{DarcyOptions, darcy};
pub use solver::DarcySolver;
