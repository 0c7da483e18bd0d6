//! Data sets that are solved here, for machines without any.

mod darcy;
pub mod etdrk;
mod field;
mod solver;

pub use darcy::{DarcyOptions, darcy};
pub use solver::DarcySolver;
