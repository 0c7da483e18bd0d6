//! The backends, which carry bytes between ranks. They know what [`wire`](crate::wire) says, and never groups or operations.

#[cfg(feature = "mpi")]
pub(crate) mod mpi;

pub(crate) mod gloo;
pub(crate) mod nccl;
pub(crate) mod single;
pub(crate) mod threads;
