//! Stub of NCCL's communicators for builds without the feature `nccl`.

use tch::{Kind, Tensor};

use crate::local::reduce::ReduceOp;
use crate::wire::{Failure, Request};

/// Returns whether NCCL and a GPU are available in this process.
pub fn is_available() -> bool {
    false
}

/// Communicator of a group: an empty type, as none can exist.
#[derive(Debug)]
pub(crate) enum DeviceCommunicator {}

pub(crate) fn unique_id() -> Option<Vec<u8>> {
    None
}

impl DeviceCommunicator {
    pub(crate) fn connect(_: &[u8], _: usize, _: usize, _: usize) -> Result<Self, String> {
        Err("this program was built without the feature `nccl`".to_owned())
    }

    pub(crate) fn device(&self) -> usize {
        match *self {}
    }

    pub(crate) fn reduces(&self, _: Kind, _: ReduceOp) -> bool {
        match *self {}
    }

    pub(crate) fn all_reduce(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: ReduceOp,
    ) -> Result<Box<dyn Request>, Failure> {
        match *self {}
    }

    pub(crate) fn start(
        &self,
        _: Vec<(usize, Tensor)>,
        _: Vec<(usize, Tensor)>,
    ) -> Result<Box<dyn Request>, Failure> {
        match *self {}
    }
}
