//! The collectives, and helpers composed of them. Each collective has a file with its adjoint: the differentiable function, the
//! asynchronous one ([`start`]) and the linear map. All backends share them, except that all-reduce uses NCCL's own.
//!
//! Maps are adjoint in one of two pairings (design decision 1). Collectives pair what each rank holds, ⟨x, y⟩ summed over ranks:
//! there the adjoint of `all_gather_v` is `reduce_scatter_v`. The four mappings of [`regions`] pair global tensors, in which a
//! replicated value counts once: there the adjoint of a gather takes the rank's own slice.
//!
//! Nothing here knows how a backend moves bytes, or what a tensor is a shard of.
//!
//! They depend on shapes and ranks, not on layouts of tensors.

pub(crate) mod all_gather;
pub(crate) mod all_reduce;
pub(crate) mod all_to_all;
mod arguments;
pub(crate) mod broadcast;
pub(crate) mod fused;
pub(crate) mod gather;
pub(crate) mod helpers;
pub(crate) mod indexed;
pub(crate) mod linear;
mod parts;
pub(crate) mod regions;
pub(crate) mod send_recv;
pub(crate) mod shared;
pub mod start;
pub mod trace;
pub mod windows;
