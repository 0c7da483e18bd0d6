//! The collectives, asynchronous and without gradients: each begins the operation and gives its [`Work`](crate::Work).
//!
//! The functions of the same names in the crate's root wait, and are differentiable; the meaning of the arguments is
//! told there. Every rank of the group calls, in the same order.
//!
//! Inputs are read until the work is done: change them in place only after [`wait`](crate::Work::wait). A change before that may
//! or may not reach the result, on this rank or on others.
//!
//! ```
//! use isobar_collectives::{Group, ReduceOp, start};
//! use tch::Tensor;
//!
//! let group = Group::single();
//! let x = Tensor::from_slice(&[1.0, 2.0]);
//! let work = start::all_reduce(&x, ReduceOp::Sum, &group)?;
//! // compute something else here, and leave x unchanged
//! let sum = work.wait()?;
//! assert_eq!(sum.size(), [2]);
//! # Ok::<(), isobar_collectives::Error>(())
//! ```

pub use super::all_gather::{start as all_gather_v, start_reduce_scatter as reduce_scatter_v};
pub use super::all_reduce::start as all_reduce;
pub use super::all_to_all::{start as all_to_all_v, start_transpose as transpose};
pub use super::broadcast::{start as broadcast, start_reduce as reduce};
pub use super::fused::start as fused_all_reduce;
pub use super::gather::{start as gather_v, start_scatter as scatter_v};
pub use super::indexed::{start as indexed_all_to_all_v, start_scatter_add as indexed_scatter_add_v};
pub use super::send_recv::{recv, send};
