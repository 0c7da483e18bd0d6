//! Printing of sharded tensors.

use std::fmt;

use super::ShardTensor;

impl fmt::Display for ShardTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}", self.kind(), self.layout())
    }
}

impl fmt::Debug for ShardTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}; this rank has {:?}", self.local_shape())?;
        // (The values of watched parameters may not be there.)
        if (1..=64).contains(&self.local.numel()) && self.watched.is_none() {
            let values = self.local.detach().to_string(80).unwrap_or_default();
            write!(f, ":\n{values}")?;
        }
        Ok(())
    }
}
