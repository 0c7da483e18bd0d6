//! The configuration of the manager, and the check that all ranks have the same one.
//!
//! [`isobar_config`], re-exported here, loads any configuration from files, environment and command line.
//!
//! It depends on no section of a program's own configuration.

mod agree;
mod distributed;
#[cfg(test)]
mod tests;

pub use agree::agree;
pub use distributed::{
    CheckChoice, DistributedConfig, FingerprintChoice, LogConfig, MeshConfig, MethodChoice,
};
pub use isobar_config::*;
pub use isobar_launch::BackendChoice;
