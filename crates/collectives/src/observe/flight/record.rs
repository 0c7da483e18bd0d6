//! Record of a flight recorder, for files and for other ranks.

use std::backtrace::Backtrace;

use serde::{Deserialize, Serialize};

use super::phase::Phase;

/// State of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum FlightState {
    /// Called; nothing was sent yet.
    Called,
    /// Under way.
    Started,
    /// Under way, and the rank does nothing but wait for it.
    Waiting,
    /// Its result is there.
    Finished,
    /// It ended with an error.
    Failed,
}

impl FlightState {
    /// Returns the name of the state in flight records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Called => "called",
            Self::Started => "started",
            Self::Waiting => "waiting",
            Self::Finished => "finished",
            Self::Failed => "failed",
        }
    }
}

/// One of the last operations of a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FlightEntry {
    /// The operation's number among all operations of the rank.
    pub number: u64,
    /// The operation.
    pub operation: String,
    /// The call that an exchange of bytes is part of, where it says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub purpose: Option<String>,
    /// The group's name.
    pub group: String,
    /// The group's number, which its ranks agree on.
    pub context: u32,
    /// The operation's number in the group; of messages between two ranks, their number in that direction.
    pub sequence: u64,
    /// Peer in the world, for a message between two ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<usize>,
    /// The kind of this rank's elements, where there is a tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// The shape of this rank's tensor.
    #[serde(default)]
    pub shape: Vec<i64>,
    /// The dim that is cut or joined, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dim: Option<usize>,
    /// The dim that is joined, where another is cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub concat_dim: Option<usize>,
    /// The reduction of an operation that combines values: `Sum`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduction: Option<String>,
    /// The sizes of the ranks' parts along it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sizes: Vec<i64>,
    /// A digest of the sizes from the 17th on, which are not kept; 0 where there are none.
    #[serde(default, skip_serializing_if = "is_none")]
    pub other_sizes: u64,
    /// Sizes that the other ranks send, for an exchange.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub receives: Vec<i64>,
    /// Root in the group, for a rooted operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<usize>,
    /// The module; empty outside of all.
    #[serde(default)]
    pub module: String,
    /// True if it belongs to a backward pass.
    #[serde(default)]
    pub backward: bool,
    /// State of the operation.
    pub state: FlightState,
    /// The phase in which it began.
    pub phase: Phase,
    /// The step in which it began.
    pub step: u64,
    /// Time at which it began, in nanoseconds since 1970 by the machine's clock.
    pub begin_ns: u64,
    /// Time at which it ended; 0 if it has not.
    #[serde(default)]
    pub end_ns: u64,
    /// Reason of its failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Stack of a long wait, innermost frame first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stack: Vec<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_none(digest: &u64) -> bool {
    *digest == 0
}

impl FlightEntry {
    /// Returns whether it has neither finished nor failed.
    pub fn is_open(&self) -> bool {
        matches!(self.state, FlightState::Called | FlightState::Started | FlightState::Waiting)
    }

    /// The operation with what it is of: `all_reduce of Float [3, 2] with Sum`.
    pub fn call(&self) -> String {
        if let Some(purpose) = &self.purpose {
            return format!("{} for {purpose}", self.operation);
        }
        let Some(kind) = &self.kind else { return self.operation.clone() };
        let mut text = format!("{} of {kind} {:?}", self.operation, self.shape);
        if let Some(dim) = self.dim {
            text += &format!(" along dim {dim}");
        }
        if let Some(dim) = self.concat_dim {
            text += &format!(" and dim {dim}");
        }
        if !self.sizes.is_empty() {
            text += &format!(" by sizes {:?}", self.sizes);
            if self.other_sizes != 0 {
                text += &format!(" and others (digest {:x})", self.other_sizes);
            }
        }
        if !self.receives.is_empty() && self.receives != self.sizes {
            text += &format!(" and {:?}", self.receives);
        }
        if let Some(reduction) = &self.reduction {
            text += &format!(" with {reduction}");
        }
        if let Some(root) = self.root {
            text += &format!(" at rank {root} of the group");
        }
        text
    }

    /// Returns whether two ranks' recorded calls are compatible: shards may differ along the dim that is split or
    /// concatenated.
    pub fn agrees_with(&self, other: &Self) -> bool {
        let arguments = |entry: &Self| (entry.root, entry.dim, entry.concat_dim);
        if (&self.operation, &self.kind, &self.reduction) != (&other.operation, &other.kind, &other.reduction)
            || arguments(self) != arguments(other)
        {
            return false;
        }
        let without = |entry: &Self| -> Vec<i64> {
            let mut shape = entry.shape.clone();
            if let Some(extent) = entry.dim.and_then(|dim| shape.get_mut(dim)) {
                *extent = -1;
            }
            shape
        };
        match self.operation.as_str() {
            "all_reduce" | "reduce" | "broadcast" | "fused_all_reduce" => self.shape == other.shape,
            // Without sizes, all parts are equal.
            "all_gather_v" | "gather_v" => {
                (&self.sizes, self.other_sizes) == (&other.sizes, other.other_sizes)
                    && without(self) == without(other)
                    && (!self.sizes.is_empty() || self.shape == other.shape)
            }
            "reduce_scatter_v" => {
                (&self.shape, &self.sizes, self.other_sizes)
                    == (&other.shape, &other.sizes, other.other_sizes)
            }
            "all_to_all_v" => without(self) == without(other),
            _ => true,
        }
    }

    /// Returns the fields that all ranks must agree on.
    pub(crate) fn signature(&self) -> Self {
        Self {
            number: 0,
            group: String::new(),
            module: String::new(),
            begin_ns: 0,
            end_ns: 0,
            problem: None,
            stack: Vec::new(),
            ..self.clone()
        }
    }
}

/// A group of a rank, and how far the rank has come in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FlightGroup {
    /// The group's number, which its ranks agree on; a rank has one group of a number.
    pub context: u32,
    /// The group's name.
    pub name: String,
    /// The members' ranks in the world, in the group's order. Evenly spaced ones are written as a first rank, a distance and a
    /// count: of thousands of ranks, each group of a mesh is a few bytes.
    #[serde(with = "super::runs")]
    pub ranks: Vec<usize>,
    /// Number of operations that this rank has begun.
    pub begun: u64,
}

/// The most frames of a stack that are kept.
const FRAMES: usize = 40;

/// The frames of a stack, one line each, without those of the recorder itself.
pub(super) fn frames(stack: &Backtrace) -> Vec<String> {
    let text = stack.to_string();
    let mut frames: Vec<String> = Vec::new();
    for line in text.lines().map(str::trim) {
        match (line.strip_prefix("at "), frames.last_mut()) {
            (Some(place), Some(frame)) => *frame = format!("{frame} at {place}"),
            _ => frames.push(line.split_once(": ").map_or(line, |(_, name)| name).to_owned()),
        }
    }
    let own = |frame: &String| {
        ["std::backtrace", "isobar_collectives::flight", "isobar_collectives::group::Call"]
            .iter()
            .any(|name| frame.starts_with(name) || frame.starts_with(&format!("<{name}")))
    };
    frames.into_iter().skip_while(own).take(FRAMES).collect()
}
