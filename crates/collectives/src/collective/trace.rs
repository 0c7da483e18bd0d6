//! Traces of communication: every collective and message that a rank begins while a trace is attached.
//!
//! A [`CommTrace`] is attached to a group's world, and records the operations of all groups of that world; a [`module`]
//! label says for which part of a model they were. Where none is attached, an operation pays one atomic load.
//!
//! ```
//! use isobar_collectives::{Group, ReduceOp, all_reduce, trace};
//! use tch::Tensor;
//!
//! let group = Group::single();
//! let trace = trace::CommTrace::start(&group);
//! {
//!     let _label = trace::module("head");
//!     all_reduce(&Tensor::from_slice(&[1.0]), ReduceOp::Sum, &group)?;
//! }
//! trace.stop();
//! let record = trace.record();
//! assert_eq!(record.count("all_reduce"), 1);
//! assert_eq!(record.of_module("head").received(), 0); // from nobody
//! # Ok::<(), isobar_collectives::Error>(())
//! ```

use std::sync::Arc;

use tch::Tensor;

use crate::collective::gather;
use crate::engine::group::Group;
use crate::error::Result;
use crate::observe::trace::Recorder;

pub use crate::observe::label::{Label, LabelGuard, module};
pub use crate::observe::trace::{ChromeSlice, CommEvent, CommRecord, chrome_trace};

/// Records what this rank communicates until it is stopped or dropped.
///
/// Every rank that wants a record starts its own; this does not communicate. Several may be attached at once, and each
/// records everything.
#[must_use = "operations are recorded while the trace lives"]
pub struct CommTrace {
    recorder: Arc<Recorder>,
    group: Group,
}

impl CommTrace {
    /// Attaches a trace to the world of `group`: it records the operations of all groups of the world that this rank begins
    /// from now on.
    pub fn start(group: &Group) -> Self {
        let recorder = Arc::new(Recorder::new(group.world_rank()));
        group.traces().attach(recorder.clone());
        Self { recorder, group: group.clone() }
    }

    /// Records no more. What was recorded stays; a second call changes nothing.
    pub fn stop(&self) {
        self.group.traces().detach(&self.recorder);
    }

    /// Returns the record so far.
    pub fn record(&self) -> CommRecord {
        self.recorder.record()
    }

    /// Returns the number of operations with this name.
    pub fn count(&self, operation: &str) -> usize {
        self.record().count(operation)
    }

    /// Bytes that this rank has sent to others.
    pub fn sent(&self) -> u64 {
        self.record().sent()
    }

    /// Bytes that this rank has received from others.
    pub fn received(&self) -> u64 {
        self.record().received()
    }
}

impl Drop for CommTrace {
    fn drop(&mut self) {
        self.stop();
    }
}

impl std::fmt::Debug for CommTrace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.record())
    }
}

impl CommRecord {
    /// The records of all ranks of the group, at its rank 0; `None` elsewhere.
    ///
    /// All ranks of the group call. Times are those of each rank's own clock, which ranks of one machine share.
    ///
    /// # Errors
    ///
    /// A failed exchange.
    pub fn gather(&self, group: &Group) -> Result<Option<Self>> {
        let bytes = serde_json::to_vec(self).unwrap_or_default();
        let lengths = group.all_gather_bytes(&(bytes.len() as i64).to_le_bytes())?;
        let sizes: Vec<i64> =
            lengths.iter().map(|length| length.as_slice().try_into().map_or(0, i64::from_le_bytes)).collect();
        let own = Tensor::f_from_slice(&bytes)?;
        let all = gather::start(&own, Some(&sizes), 0, 0, group)?.wait()?;
        if group.rank() != 0 {
            return Ok(None);
        }
        let mut text = vec![0_u8; all.numel()];
        all.f_copy_data_u8(&mut text, all.numel())?;
        let mut rest = &text[..];
        let read = |&size: &i64| {
            let (own, others) = rest.split_at((size.max(0) as usize).min(rest.len()));
            rest = others;
            // An unreadable record comes from another version of this program, and is left out.
            serde_json::from_slice(own).unwrap_or_default()
        };
        Ok(Some(Self::merge(sizes.iter().map(read).collect::<Vec<Self>>())))
    }
}

#[cfg(test)]
mod tests;
