//! Backends, which carry bytes between ranks: implementations of [`Backend`](crate::wire::Backend), and NCCL's communicators.
//! They depend on no group or call.

#[cfg(feature = "mpi")]
pub(crate) mod mpi;

pub(crate) mod gloo;
#[cfg_attr(not(feature = "nccl"), path = "no_nccl.rs")]
pub(crate) mod nccl;
pub(crate) mod single;
pub(crate) mod threads;
