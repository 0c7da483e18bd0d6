//! Groups and their operations: numbers, deadlines, errors of other ranks, exchanges of blocks, and works in flight. It
//! depends on backends only through [`wire`](crate::wire), except for `Single` and NCCL's communicators, and on no collective.

mod awaited;
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
