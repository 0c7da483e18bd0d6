//! Diagnosis: finds the ranks at fault from the flight records.

use std::collections::BTreeMap;

use isobar_collectives::flight::{FlightEntry, FlightState, Phase};

use super::{FlightRecord, Peer, RankOutcome};

/// Diagnosis of a set of records.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct Diagnosis {
    /// Findings, causes first.
    pub findings: Vec<Finding>,
    /// Operations that the other ranks wait in.
    pub waits: Vec<Wait>,
}

/// Something that went wrong.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Finding {
    /// A rank was lost or ended.
    Rank(Box<Peer>),
    /// Ranks made different calls where all must make the same.
    Mismatch {
        /// The group.
        group: String,
        /// The operation's number in it.
        sequence: u64,
        /// Calls, with the ranks that made them.
        calls: Vec<(String, Vec<usize>)>,
    },
    /// Ranks wait for each other, each in another operation.
    Ring {
        /// Rank, and what it waits in.
        ranks: Vec<(usize, String)>,
    },
    /// A rank has not come to an operation in which others wait.
    Behind {
        /// The rank.
        rank: usize,
        /// Machine and process.
        host: String,
        /// Its process.
        pid: u32,
        /// Current phase.
        phase: Phase,
        /// Number of its step.
        step: u64,
        /// The operation that it has not come to.
        missing: String,
        /// The last operation that it began.
        last: Option<String>,
    },
    /// A rank has begun the operation in which others wait, and is busy with something else.
    Busy {
        /// The rank.
        rank: usize,
        /// Machine.
        host: String,
        /// Its process.
        pid: u32,
        /// Current phase.
        phase: Phase,
        /// Number of its step.
        step: u64,
    },
}

impl Finding {
    /// The ranks at fault.
    #[must_use]
    pub fn ranks(&self) -> Vec<usize> {
        match self {
            Self::Rank(peer) => vec![peer.rank],
            Self::Behind { rank, .. } | Self::Busy { rank, .. } => vec![*rank],
            Self::Mismatch { calls, .. } => {
                let mut ranks: Vec<usize> = calls.iter().flat_map(|(_, ranks)| ranks.clone()).collect();
                ranks.sort_unstable();
                ranks
            }
            Self::Ring { ranks } => ranks.iter().map(|(rank, _)| *rank).collect(),
        }
    }
}

/// Operation that some ranks wait in.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Wait {
    /// The ranks.
    pub ranks: Vec<usize>,
    /// The operation.
    pub operation: String,
    /// Their phase.
    pub phase: Phase,
    /// Number of its step.
    pub step: u64,
}

/// Finds who was at fault: ranks that were lost or failed; else calls that differ; else ranks that the transport does not
/// return to; else ranks that wait for each other; else those that have not come to the operation in which the others wait.
#[must_use]
pub fn diagnose(records: &[FlightRecord]) -> Diagnosis {
    let peers = peers(records);
    let of = |wanted: fn(&RankOutcome) -> bool| -> Vec<Finding> {
        let peers = peers.values().filter(|peer| wanted(&peer.outcome)).cloned();
        peers.map(Box::new).map(Finding::Rank).collect()
    };
    let mut findings = of(RankOutcome::is_cause);
    if findings.is_empty() {
        findings = mismatches(records);
    }
    if findings.is_empty() {
        findings = of(|outcome| matches!(outcome, RankOutcome::Blocked(_)));
    }
    if findings.is_empty() {
        findings = absent(records, &peers);
    }
    if findings.is_empty() {
        // Nothing better is known than who gave up.
        findings = of(|_| true);
    }
    let culprits: Vec<usize> = findings.iter().flat_map(Finding::ranks).collect();
    let of_rank = matches!(findings.first(), Some(Finding::Mismatch { .. } | Finding::Ring { .. }));
    let mut waits: Vec<Wait> = Vec::new();
    for record in records.iter().filter(|record| of_rank || !culprits.contains(&record.rank)) {
        let Some(entry) = record.stuck() else { continue };
        let operation = place(entry);
        match waits.iter_mut().find(|wait| (&wait.operation, wait.step) == (&operation, entry.step)) {
            Some(wait) => wait.ranks.push(record.rank),
            None => {
                waits.push(Wait { ranks: vec![record.rank], operation, phase: entry.phase, step: entry.step })
            }
        }
    }
    if of_rank {
        waits.clear();
    }
    Diagnosis { findings, waits }
}

/// The ranks that somebody says are not well.
fn peers(records: &[FlightRecord]) -> BTreeMap<usize, Peer> {
    let mut all: BTreeMap<usize, Peer> = BTreeMap::new();
    for peer in records.iter().flat_map(|record| &record.peers) {
        match all.get(&peer.rank) {
            Some(known) if known.outcome.weight() >= peer.outcome.weight() => {}
            _ => drop(all.insert(peer.rank, peer.clone())),
        }
    }
    all
}

/// Describes an operation: `all_reduce of Float [3] (number 41 of group "data")`.
pub(super) fn place(entry: &FlightEntry) -> String {
    match entry.peer {
        Some(peer) => format!("{} (message {} with rank {peer})", entry.call(), entry.sequence),
        None => format!("{} (number {} of group \"{}\")", entry.call(), entry.sequence, entry.group),
    }
}

/// Operations of one number and group that are not the same on all ranks.
fn mismatches(records: &[FlightRecord]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (record, stuck) in records.iter().filter_map(|record| Some((record, record.stuck()?))) {
        if stuck.peer.is_some() {
            continue;
        }
        let Some(members) = members(record, stuck.context) else { continue };
        let mut calls: Vec<(String, Vec<usize>, &FlightEntry)> = Vec::new();
        for other in records.iter().filter(|other| members.contains(&other.rank)) {
            let same = |entry: &&FlightEntry| {
                entry.peer.is_none()
                    && entry.context == stuck.context
                    && entry.sequence == stuck.sequence
                    && entry.group == stuck.group
            };
            let Some(entry) = other.entries.iter().find(same) else { continue };
            match calls.iter_mut().find(|(_, _, known)| known.agrees_with(entry)) {
                Some((_, ranks, _)) => ranks.push(other.rank),
                None => calls.push((entry.call(), vec![other.rank], entry)),
            }
        }
        if calls.len() > 1 {
            let calls = calls.into_iter().map(|(call, ranks, _)| (call, ranks)).collect();
            let finding = Finding::Mismatch { group: stuck.group.clone(), sequence: stuck.sequence, calls };
            if !findings.contains(&finding) {
                findings.push(finding);
            }
        }
    }
    findings
}

fn members(record: &FlightRecord, context: u32) -> Option<&[usize]> {
    record.groups.iter().find(|group| group.context == context).map(|group| &group.ranks[..])
}

fn begun(record: &FlightRecord, context: u32) -> Option<u64> {
    record.groups.iter().find(|group| group.context == context).map(|group| group.begun)
}

/// The ranks that have not come to what others wait in, and wait for nobody themselves; or those that wait in a ring.
fn absent(records: &[FlightRecord], peers: &BTreeMap<usize, Peer>) -> Vec<Finding> {
    let by_rank: BTreeMap<usize, &FlightRecord> =
        records.iter().map(|record| (record.rank, record)).collect();
    let mut findings = Vec::new();
    for record in records {
        let mut path = vec![record];
        let mut missing = None;
        // From who waits to whom it waits for, as far as that goes.
        while let Some(current) = path.last().copied() {
            let Some(stuck) = current.stuck() else { break };
            let blockers = blockers(current, stuck, &by_rank);
            let Some(&next) = blockers.first() else { break };
            missing = Some((next, stuck));
            let Some(&next) = by_rank.get(&next) else { break };
            if let Some(from) = path.iter().position(|seen| seen.rank == next.rank) {
                let ring = path[from..].iter().filter_map(|r| Some((r.rank, place(r.stuck()?)))).collect();
                return vec![Finding::Ring { ranks: ring }];
            }
            path.push(next);
        }
        let Some((rank, operation)) = missing else { continue };
        let finding = match (by_rank.get(&rank), peers.get(&rank)) {
            (_, Some(peer)) if peer.outcome == RankOutcome::Ended => Finding::Rank(Box::new(peer.clone())),
            (Some(record), _) => Finding::Behind {
                rank,
                host: record.host.clone(),
                pid: record.pid,
                phase: record.phase,
                step: record.step,
                missing: place(operation),
                last: record.entries.last().map(place),
            },
            (None, Some(peer)) => Finding::Rank(Box::new(peer.clone())),
            (None, None) => continue,
        };
        if !findings.iter().any(|known: &Finding| known.ranks() == finding.ranks()) {
            findings.push(finding);
        }
    }
    if findings.is_empty() && records.iter().any(|record| record.stuck().is_some()) {
        let idle =
            |record: &&FlightRecord| record.stuck().is_none_or(|entry| entry.state == FlightState::Started);
        findings.extend(records.iter().filter(idle).map(|record| Finding::Busy {
            rank: record.rank,
            host: record.host.clone(),
            pid: record.pid,
            phase: record.phase,
            step: record.step,
        }));
    }
    findings
}

/// The ranks that have not begun an operation of another's.
fn blockers(
    record: &FlightRecord,
    stuck: &FlightEntry,
    by_rank: &BTreeMap<usize, &FlightRecord>,
) -> Vec<usize> {
    if let Some(peer) = stuck.peer {
        let sends = |record: &FlightRecord| {
            record.entries.iter().any(|entry| {
                entry.context == stuck.context
                    && entry.peer.is_some()
                    && entry.sequence == stuck.sequence
                    && entry.operation != stuck.operation
            })
        };
        return match by_rank.get(&peer) {
            Some(record) if sends(record) => Vec::new(),
            _ => vec![peer],
        };
    }
    let behind = |rank: &usize| match by_rank.get(rank) {
        Some(other) => begun(other, stuck.context).is_none_or(|begun| begun <= stuck.sequence),
        None => true,
    };
    let members = members(record, stuck.context).unwrap_or_default();
    members.iter().copied().filter(|&rank| rank != record.rank).filter(behind).collect()
}
