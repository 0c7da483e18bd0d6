//! Code that the commands of `isobar` share: exit codes, terminal output, and joining a launch.
//!
//! It depends on no command.

pub mod exit;
pub mod start;
pub mod terminal;
