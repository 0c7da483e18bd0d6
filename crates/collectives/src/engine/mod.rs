//! Groups and their operations: numbers, deadlines, errors of other ranks, exchanges of blocks, and works under way. It knows
//! backends by [`wire`](crate::wire) alone (and NCCL's communicators), and never which collectives there are.

pub(crate) mod call;
mod check;
pub(crate) mod comparison;
pub(crate) mod exchange;
mod fingerprint;
pub(crate) mod group;
mod members;
mod metadata;
mod outstanding;
pub(crate) mod work;
