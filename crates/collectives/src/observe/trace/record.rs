//! Record of a trace.

use serde::{Deserialize, Serialize};

/// A collective or a message that a rank has begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CommEvent {
    /// The rank in the world that recorded it.
    pub rank: usize,
    /// The operation.
    pub operation: String,
    /// The group's name.
    pub group: String,
    /// The operation's number in the group; of messages between two ranks, their number in that direction.
    pub sequence: u64,
    /// The module; empty outside of all.
    pub module: String,
    /// True if it belongs to a backward pass.
    pub backward: bool,
    /// Bytes that this rank has sent to others.
    pub sent: u64,
    /// Bytes that this rank has received from others.
    pub received: u64,
    /// Time at which it began, in nanoseconds since 1970 by the machine's clock.
    pub begin_ns: u64,
    /// Time at which its result was there.
    pub end_ns: u64,
}

/// Recorded operations, in the order in which they began: those of one rank, or, [gathered](Self::gather), of several.
///
/// The `of_` functions narrow a record; what is left is asked for its counts and bytes. Printed, it is a table of counts
/// and bytes, which two runs of one program have in common; [`table`](Self::table) has times too.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommRecord {
    events: Vec<CommEvent>,
    dropped: u64,
}

impl CommRecord {
    pub(crate) fn new(events: Vec<CommEvent>, dropped: u64) -> Self {
        Self { events, dropped }
    }

    /// The operations.
    pub fn events(&self) -> &[CommEvent] {
        &self.events
    }

    /// Returns the number of operations that were dropped because there were too many.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Returns the number of operations with this name.
    pub fn count(&self, operation: &str) -> usize {
        self.events.iter().filter(|event| event.operation == operation).count()
    }

    /// Returns the number of operations.
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Returns whether the record is empty.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Bytes sent to other ranks.
    pub fn sent(&self) -> u64 {
        self.events.iter().map(|event| event.sent).sum()
    }

    /// Bytes received from other ranks.
    pub fn received(&self) -> u64 {
        self.events.iter().map(|event| event.received).sum()
    }

    /// The operations of that name.
    #[must_use]
    pub fn of_operation(&self, operation: &str) -> Self {
        self.only(|event| event.operation == operation)
    }

    /// The operations of the groups of that name.
    #[must_use]
    pub fn of_group(&self, group: &str) -> Self {
        self.only(|event| event.group == group)
    }

    /// The operations of that module, and of those in it: `block.0` has `block.0.attention`, and not `block.01`.
    #[must_use]
    pub fn of_module(&self, module: &str) -> Self {
        let within = |label: &str| {
            label.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.only(|event| within(&event.module))
    }

    /// The operations of that rank of the world.
    #[must_use]
    pub fn of_rank(&self, rank: usize) -> Self {
        self.only(|event| event.rank == rank)
    }

    /// The operations outside of backward passes.
    #[must_use]
    pub fn forward(&self) -> Self {
        self.only(|event| !event.backward)
    }

    /// The operations of backward passes.
    #[must_use]
    pub fn backward(&self) -> Self {
        self.only(|event| event.backward)
    }

    /// The operations of several records, one record after the other.
    #[must_use]
    pub fn merge(records: impl IntoIterator<Item = Self>) -> Self {
        let mut merged = Self::default();
        for mut record in records {
            merged.events.append(&mut record.events);
            merged.dropped += record.dropped;
        }
        merged
    }

    fn only(&self, wanted: impl Fn(&CommEvent) -> bool) -> Self {
        let events = self.events.iter().filter(|event| wanted(event)).cloned().collect();
        Self { events, dropped: self.dropped }
    }
}
