//! The configuration of the manager, and the check that all ranks have the same one.
//!
//! How any configuration is loaded from files, environment and command line is in [`isobar_config`], whose items are here, too.

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
