//! The collectives: as asynchronous operations ([`start`]), as linear maps with their adjoints, and as differentiable
//! functions; and helpers composed of them. They are the same over all backends, except that all-reduce uses NCCL's own.

pub(crate) mod helpers;
pub(crate) mod linear;
mod maps;
pub(crate) mod ops;
pub(crate) mod regions;
pub(crate) mod shared;
pub mod start;
pub mod trace;
pub mod windows;
