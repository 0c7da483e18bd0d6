//! Traces in the Trace Event Format, which Chrome's viewer and Perfetto show.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

/// Slice of a Chrome trace: an operation of one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct ChromeSlice<'a> {
    /// The rank in the world, a process of the viewer.
    pub rank: usize,
    /// The row of that process, such as the name of a group.
    pub row: &'a str,
    /// Text of the slice; slices of one name have one colour.
    pub name: String,
    /// Category, by which a viewer filters.
    pub category: &'a str,
    /// Time at which it began, in nanoseconds since 1970.
    pub begin_ns: u64,
    /// Time at which it ended, in nanoseconds since 1970.
    pub end_ns: u64,
    /// Details that the viewer shows of a selected slice: a JSON object.
    pub args: Value,
}

/// Makes a Chrome trace. It has a process for each rank, named `process(rank)`, and in it a row for each [`ChromeSlice::row`], or
/// several where slices overlap. The slices of a row must come in the order in which they begin. Times are in microseconds since
/// the first slice began.
///
/// ```
/// use isobar_collectives::trace::{ChromeSlice, chrome_trace};
/// use serde_json::json;
///
/// let name = "barrier".to_owned();
/// let slice = ChromeSlice {
///     rank: 2, row: "world", name, category: "forward", begin_ns: 7_000, end_ns: 9_000, args: json!({}),
/// };
/// let trace = chrome_trace(&[slice], |rank| format!("rank {rank}"));
/// let event = &trace["traceEvents"][2];
/// assert_eq!((&event["name"], &event["ts"], &event["dur"]), (&json!("barrier"), &json!(0.0), &json!(2.0)));
/// ```
pub fn chrome_trace(slices: &[ChromeSlice<'_>], process: impl Fn(usize) -> String) -> Value {
    let start = slices.iter().map(|slice| slice.begin_ns).min().unwrap_or_default();
    let us = |ns: u64| ns as f64 / 1e3;
    let mut lanes = Lanes::default();
    let events: Vec<Value> = slices
        .iter()
        .map(|slice| {
            json!({
                "name": slice.name,
                "cat": slice.category,
                "ph": "X",
                "pid": slice.rank,
                "tid": lanes.of(slice),
                "ts": us(slice.begin_ns.saturating_sub(start)),
                "dur": us(slice.end_ns.saturating_sub(slice.begin_ns)),
                "args": slice.args,
            })
        })
        .collect();
    let events: Vec<Value> = lanes.names(process).into_iter().chain(events).collect();
    json!({ "displayTimeUnit": "ms", "traceEvents": events })
}

/// Rows of the viewer. Each holds slices of one rank and row that do not overlap, since slices in a row of the viewer must nest.
#[derive(Default)]
struct Lanes<'a> {
    /// Rank, row, and number within the row.
    lanes: Vec<(usize, &'a str, usize)>,
    /// Lanes of a rank and row, with the end of the last slice in each.
    of_row: BTreeMap<(usize, &'a str), Vec<(usize, u64)>>,
}

impl<'a> Lanes<'a> {
    fn of(&mut self, slice: &ChromeSlice<'a>) -> usize {
        let lanes = self.of_row.entry((slice.rank, slice.row)).or_default();
        if let Some((lane, end_ns)) = lanes.iter_mut().find(|(_, end_ns)| *end_ns <= slice.begin_ns) {
            *end_ns = slice.end_ns;
            return *lane;
        }
        self.lanes.push((slice.rank, slice.row, lanes.len()));
        lanes.push((self.lanes.len() - 1, slice.end_ns));
        self.lanes.len() - 1
    }

    fn names(&self, process: impl Fn(usize) -> String) -> Vec<Value> {
        let mut named = BTreeSet::new();
        let mut events = Vec::new();
        for (tid, &(rank, row, number)) in self.lanes.iter().enumerate() {
            let meta = |name: &str, label: String| json!({ "name": name, "ph": "M", "pid": rank, "tid": tid, "args": { "name": label } });
            if named.insert(rank) {
                events.push(meta("process_name", process(rank)));
            }
            let label = if number == 0 { row.to_owned() } else { format!("{row} ({})", number + 1) };
            events.push(meta("thread_name", label));
        }
        events
    }
}
