//! How the ranks of a world find each other: one module a backend, each of which makes the group of all ranks (that of NCCL
//! gives a group its communicator).

pub mod gloo;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod nccl;
pub mod threads;
