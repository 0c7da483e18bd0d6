//! Views of a record: a table, and a trace for Chrome's viewer and Perfetto.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Value, json};

use super::{ChromeSlice, CommEvent, CommRecord, chrome_trace};

/// Sums of one row of the table.
#[derive(Default)]
struct Sums {
    calls: u64,
    sent: u64,
    received: u64,
    ns: u64,
}

/// Module, whether backward, group, operation.
type Key<'a> = (&'a str, bool, &'a str, &'a str);

impl CommRecord {
    /// A table with a row for each module, pass, group and operation: calls, bytes sent and received, and milliseconds from
    /// beginning to end, in which operations under way at the same time count each for itself.
    pub fn table(&self) -> String {
        self.rows(true)
    }

    /// The record in the Trace Event Format, which `chrome://tracing` and Perfetto show: a process for each rank, a row for
    /// each group, more where its operations overlap. Times are in microseconds since the first operation.
    ///
    /// ```
    /// use isobar_collectives::{Group, trace::CommTrace};
    ///
    /// let group = Group::single();
    /// let trace = CommTrace::start(&group);
    /// group.barrier()?;
    /// let json = trace.record().to_chrome_trace();
    /// assert_eq!(json["traceEvents"][2]["name"], "barrier");
    /// # Ok::<(), isobar_collectives::Error>(())
    /// ```
    pub fn to_chrome_trace(&self) -> Value {
        let slices: Vec<ChromeSlice<'_>> = self.events().iter().map(slice).collect();
        chrome_trace(&slices, |rank| format!("rank {rank}"))
    }

    fn rows(&self, times: bool) -> String {
        let mut rows: BTreeMap<Key<'_>, Sums> = BTreeMap::new();
        for event in self.events() {
            let sums =
                rows.entry((&event.module, event.backward, &event.group, &event.operation)).or_default();
            sums.calls += 1;
            sums.sent += event.sent;
            sums.received += event.received;
            sums.ns += event.end_ns.saturating_sub(event.begin_ns);
        }
        let mut lines = vec![
            ["module", "pass", "group", "operation", "calls", "sent", "received", "ms"].map(str::to_owned),
        ];
        let row = |(module, backward, group, operation): Key<'_>, sums: &Sums| {
            let [calls, sent, received] = [sums.calls, sums.sent, sums.received].map(|n| n.to_string());
            let ms = format!("{:.3}", sums.ns as f64 / 1e6);
            let module = if module.is_empty() { "-" } else { module };
            [module.into(), pass(backward).into(), group.into(), operation.into(), calls, sent, received, ms]
        };
        let mut total = Sums::default();
        for (key, sums) in &rows {
            lines.push(row(*key, sums));
            total.calls += sums.calls;
            total.sent += sums.sent;
            total.received += sums.received;
            total.ns += sums.ns;
        }
        let mut last = row(("", false, "", ""), &total);
        last[0] = "total".into();
        last[1] = String::new();
        lines.push(last);
        let mut table = aligned(&lines, if times { 8 } else { 7 });
        if self.dropped() > 0 {
            table += &format!("\n{} more operations were not kept", self.dropped());
        }
        table
    }
}

impl fmt::Display for CommRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.rows(false))
    }
}

/// The first `columns` columns: names to the left, numbers, from the fifth on, to the right.
fn aligned(lines: &[[String; 8]], columns: usize) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or_default();
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |line: &[String; 8]| {
        let cells = line.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| match column < 4 {
            true => format!("{cell:width$}"),
            false => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    lines.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn slice(event: &CommEvent) -> ChromeSlice<'_> {
    ChromeSlice {
        rank: event.rank,
        row: &event.group,
        name: event.operation.clone(),
        category: pass(event.backward),
        begin_ns: event.begin_ns,
        end_ns: event.end_ns,
        args: json!({
            "group": event.group,
            "sequence": event.sequence,
            "module": event.module,
            "sent": event.sent,
            "received": event.received,
        }),
    }
}

fn pass(backward: bool) -> &'static str {
    if backward { "backward" } else { "forward" }
}
