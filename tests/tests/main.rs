//! Runs across crates and ranks.

mod checkpoint;
mod cli;
mod collectives_gloo;
mod collectives_mpi;
mod collectives_threads;
mod curves;
mod domain;
mod exits;
mod faults;
mod floods;
mod formats;
mod hostile;
mod hosts;
mod launch;
mod launchers;
mod machine;
mod mismatches;
mod mistakes;
mod once;
mod progress;
mod run_folder;
mod special;
mod tidy;
mod train;
mod variables;
mod verify;
