//! Rendezvous of the ranks of a world: one module for each backend, which makes the group of all ranks (that of NCCL gives
//! a group its communicator).
//!
//! Nothing here runs after the group is created.

pub mod gloo;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod nccl;
pub mod threads;
