//! Code that the commands of `isobar` share: exit codes, terminal output, the check of output files, and joining a launch.
//!
//! It depends on no command.

pub mod exit;
pub mod outputs;
pub mod start;
pub mod terminal;
