//! Flight records: what each rank was doing when a job ended because a rank was lost, as files, and what they say together.
//!
//! Records are read and compared here; nothing is sent.
//!
//! The watchdog of a [`DistributedManager`](crate::DistributedManager) writes one file a rank, `flight_rank_00003.json`,
//! where `distributed.flight_dir` says; [`read`] takes them in, and [`diagnose`] finds who was at fault. `isobar trace why`
//! prints it, and `isobar trace export` writes the [`chrome_trace`] of the records.

mod chrome;
mod diagnosis;
mod file;
mod text;

use std::fmt;

use isobar_collectives::flight::{Flight, FlightEntry, FlightGroup, FlightState, Phase};
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

pub use chrome::chrome_trace;
pub use diagnosis::{Diagnosis, Finding, Wait, diagnose};
pub use file::{Records, is_record, read, record_files, write};
pub use text::ranks;
pub(crate) use text::{plain, report};

/// The version of the files' form.
const VERSION: u32 = 1;

/// Flight record of one rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FlightRecord {
    /// The version of this form: 1.
    pub version: u32,
    /// The job: records of other jobs may lie beside it.
    pub job: String,
    /// The rank in the world.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// The name of its machine.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Its phase.
    pub phase: Phase,
    /// Number of its step.
    pub step: u64,
    /// Reason for which the record was written.
    pub reason: String,
    /// Time at which it was written, in nanoseconds since 1970 by the machine's clock.
    pub time_ns: u64,
    /// Known state of the ranks with a problem.
    pub peers: Vec<Peer>,
    /// The groups of the rank.
    #[serde(deserialize_with = "groups")]
    pub groups: Vec<FlightGroup>,
    /// The last operations, in the order in which they began.
    pub entries: Vec<FlightEntry>,
}

/// The most ranks that the groups of a record have together: what a file says may not take more memory than a job could.
const MOST_RANKS: usize = 1 << 22;

fn groups<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<FlightGroup>, D::Error> {
    struct Groups;
    impl<'de> Visitor<'de> for Groups {
        type Value = Vec<FlightGroup>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of groups")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Self::Value, A::Error> {
            let (mut groups, mut ranks) = (Vec::new(), 0);
            while let Some(group) = list.next_element::<FlightGroup>()? {
                ranks += group.ranks.len();
                if ranks > MOST_RANKS {
                    return Err(A::Error::custom(format!("groups of more than {MOST_RANKS} ranks together")));
                }
                groups.push(group);
            }
            Ok(groups)
        }
    }
    deserializer.deserialize_seq(Groups)
}

/// State of a rank as known to the others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Peer {
    /// The rank in the world.
    pub rank: usize,
    /// The name of its machine.
    pub host: String,
    /// Its process.
    pub pid: u32,
    /// Phase in its last message.
    pub phase: Phase,
    /// Number of its step.
    pub step: u64,
    /// Its last operation then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<FlightEntry>,
    /// Its outcome.
    #[serde(alias = "fate")]
    pub outcome: RankOutcome,
}

/// State of a rank: its end, or that it runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RankOutcome {
    /// Its connection closed without a word: it was killed, or crashed.
    Closed,
    /// It has not been heard of for so many seconds: it is stopped, or its machine cannot be reached.
    Silent(f64),
    /// Its main thread panicked, and said so.
    Panicked(String),
    /// It ended with an error of its own.
    Failed(String),
    /// A call of the transport, in this operation, has taken longer than the deadline and does not return to the program.
    #[serde(alias = "held")]
    Blocked(String),
    /// It ended because of other ranks: a deadline, a lost connection.
    GaveUp(String),
    /// It never connected to the watchdog: it was lost before it could, or cannot reach the watchdog's rank.
    Absent,
    /// It ended in good order.
    Ended,
}

impl RankOutcome {
    /// Returns whether a rank with this outcome is a cause, whatever else happened.
    #[must_use]
    pub fn is_cause(&self) -> bool {
        matches!(self, Self::Closed | Self::Silent(_) | Self::Panicked(_) | Self::Failed(_))
    }

    /// Returns the rank's own words.
    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Panicked(text) | Self::Failed(text) | Self::GaveUp(text) => Some(text),
            Self::Closed | Self::Silent(_) | Self::Blocked(_) | Self::Absent | Self::Ended => None,
        }
    }

    /// Returns the weight of this outcome as a cause: a transport that does not return may be waiting for a lost rank.
    pub(crate) fn weight(&self) -> u8 {
        match self {
            outcome if outcome.is_cause() => 2,
            Self::Blocked(_) => 1,
            _ => 0,
        }
    }
}

/// Identity of a record's rank.
#[derive(Debug, Clone)]
pub(crate) struct Own {
    pub(crate) job: String,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) host: String,
    pub(crate) pid: u32,
}

/// A rank's record as of now; at most so many operations, and, with `stacks`, who waits for them.
pub(crate) fn record(
    own: &Own,
    flight: &Flight,
    reason: &str,
    peers: &[Peer],
    most: usize,
    stacks: bool,
) -> FlightRecord {
    let (phase, step) = flight.phase();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    FlightRecord {
        version: VERSION,
        job: own.job.clone(),
        rank: own.rank,
        ranks: own.ranks,
        host: own.host.clone(),
        pid: own.pid,
        phase,
        step,
        reason: reason.to_owned(),
        time_ns: now.as_nanos() as u64,
        peers: peers.to_vec(),
        groups: flight.groups(),
        entries: flight.entries(most, stacks),
    }
}

impl FlightRecord {
    /// The operation that the rank cannot get past: the last one that it waits for, else the first that failed after the last
    /// that finished, else the last under way.
    #[must_use]
    pub fn stuck(&self) -> Option<&FlightEntry> {
        let last = |state: FlightState| self.entries.iter().rev().find(|entry| entry.state == state);
        let finished = self.finished().map(|entry| entry.number);
        // Once one has failed, others fail for its sake.
        let failed = self.entries.iter().find(|entry| {
            entry.state == FlightState::Failed && finished.is_none_or(|finished| entry.number > finished)
        });
        last(FlightState::Waiting).or(failed).or_else(|| last(FlightState::Started))
    }

    /// The last operation that finished.
    #[must_use]
    pub fn finished(&self) -> Option<&FlightEntry> {
        self.entries.iter().rev().find(|entry| entry.state == FlightState::Finished)
    }
}

#[cfg(test)]
mod tests;
