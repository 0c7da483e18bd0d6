//! Backends, which carry bytes between ranks: implementations of [`Backend`](crate::wire::Backend), and NCCL's communicators.
//! They depend on no group or call.

#[cfg(feature = "mpi")]
pub(crate) mod mpi;

pub(crate) mod gloo;
pub(crate) mod nccl;
pub(crate) mod single;
pub(crate) mod threads;
