//! Flight records as a trace for Chrome's viewer and Perfetto.

use std::collections::BTreeMap;

use isobar_collectives::flight::{FlightEntry, FlightState};
use isobar_collectives::trace::{self, ChromeSlice};
use serde_json::{Value, json};

use super::FlightRecord;

/// Makes a Chrome trace of the records of a job, one a rank. It has a process for each rank that began an operation, named with
/// its host and process, and in it a row for each group, or several where operations overlap. The category of an operation is the
/// phase in which it began. An operation that did not finish has its state in its name, and ends when the record was written.
///
/// Times are those of each host's clock: operations of ranks on different hosts are shifted by the difference of their clocks.
///
/// ```
/// use isobar_manager::flight::{FlightRecord, chrome_trace};
///
/// let record: FlightRecord = serde_json::from_value(serde_json::json!({
///     "version": 1, "job": "1a2b", "rank": 3, "ranks": 4, "host": "node7", "pid": 42, "phase": "forward", "step": 1,
///     "reason": "", "time_ns": 9_000, "peers": [], "groups": [],
///     "entries": [{
///         "number": 0, "operation": "barrier", "group": "world", "context": 0, "sequence": 0, "state": "waiting",
///         "phase": "forward", "step": 1, "begin_ns": 5_000,
///     }],
/// }))?;
/// let events = &chrome_trace(&[record])["traceEvents"];
/// assert_eq!(events[0]["args"]["name"], "rank 3 (node7, process 42)");
/// assert_eq!((&events[2]["name"], &events[2]["dur"]), (&"barrier (waiting)".into(), &4.0.into()));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[must_use]
pub fn chrome_trace(records: &[FlightRecord]) -> Value {
    let slices: Vec<ChromeSlice<'_>> =
        records.iter().flat_map(|record| record.entries.iter().map(|entry| slice(record, entry))).collect();
    let names: BTreeMap<usize, String> = records
        .iter()
        .map(|record| {
            let FlightRecord { rank, host, pid, .. } = record;
            (*rank, format!("rank {rank} ({host}, process {pid})"))
        })
        .collect();
    trace::chrome_trace(&slices, |rank| names.get(&rank).cloned().unwrap_or_default())
}

fn slice<'a>(record: &FlightRecord, entry: &'a FlightEntry) -> ChromeSlice<'a> {
    let state = entry.state.name();
    let name = match entry.state {
        FlightState::Finished => entry.operation.clone(),
        _ => format!("{} ({state})", entry.operation),
    };
    let mut args = json!({
        "call": entry.call(),
        "group": entry.group,
        "sequence": entry.sequence,
        "module": entry.module,
        "pass": if entry.backward { "backward" } else { "forward" },
        "step": entry.step,
        "state": state,
    });
    if let Some(peer) = entry.peer {
        args["peer"] = json!(peer);
    }
    if let Some(problem) = &entry.problem {
        args["problem"] = json!(problem);
    }
    ChromeSlice {
        rank: record.rank,
        row: &entry.group,
        name,
        category: entry.phase.name(),
        begin_ns: entry.begin_ns,
        end_ns: if entry.is_open() { record.time_ns } else { entry.end_ns },
        args,
    }
}
