//! Text of a diagnosis for the terminal.

use std::fmt::{self, Display};
use std::path::Path;

use super::{Diagnosis, Finding, Peer, RankOutcome};

/// The report of a job that ends: one for all ranks.
pub(crate) fn report(diagnosis: &Diagnosis, folder: &Path) -> String {
    let folder = folder.display();
    format!("isobar: the job ends\n{diagnosis}\nflight records: {folder} (isobar trace why {folder})\n")
}

impl Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let findings = self.findings.iter().map(ToString::to_string);
        let waits = self.waits.iter().map(|wait| {
            let (who, verb) = ranks(&wait.ranks, "waits", "wait");
            format!("{who} {verb} in {}, in {} of step {}", wait.operation, wait.phase, wait.step)
        });
        let lines: Vec<String> = findings.chain(waits).map(|line| format!("  {}", plain(&line))).collect();
        match lines.is_empty() {
            true => f.write_str("  no rank was lost, and none waits for another"),
            false => f.write_str(&lines.join("\n")),
        }
    }
}

impl Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rank(peer) => peer.fmt(f),
            Self::Mismatch { group, sequence, calls } => {
                write!(f, "ranks make different calls as number {sequence} of group \"{group}\"")?;
                for (index, (call, of)) in calls.iter().enumerate() {
                    let (who, verb) = ranks(of, "calls", "call");
                    write!(f, "{} {who} {verb} {call}", if index == 0 { ":" } else { "," })?;
                }
                Ok(())
            }
            Self::Ring { ranks } => {
                f.write_str("ranks wait for each other, since they make their calls in another order")?;
                for (index, (rank, operation)) in ranks.iter().enumerate() {
                    write!(f, "{} rank {rank} in {operation}", if index == 0 { ":" } else { "," })?;
                }
                Ok(())
            }
            Self::Behind { rank, host, pid, phase, step, missing, last } => {
                write!(f, "rank {rank} ({host}, process {pid}) has not come to {missing}")?;
                write!(f, "; it is in {phase} of step {step}")?;
                match last {
                    Some(last) => write!(f, ", and began {last} last"),
                    None => f.write_str(", and has begun no operation"),
                }
            }
            Self::Busy { rank, host, pid, phase, step } => write!(
                f,
                "rank {rank} ({host}, process {pid}) has begun all that the others wait for, and does something else, in \
                 {phase} of step {step}"
            ),
        }
    }
}

impl Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, host, pid, phase, step, last, outcome } = self;
        write!(f, "rank {rank} ({host}, process {pid}) ")?;
        let alive = match outcome {
            RankOutcome::Closed => {
                f.write_str(
                    "was lost: its connection closed without a word, as when a process is killed or crashes",
                )?;
                true
            }
            RankOutcome::Silent(seconds) => {
                write!(
                    f,
                    "has not been heard of for {seconds:.1} s: it is stopped, or its machine cannot be reached"
                )?;
                true
            }
            RankOutcome::Panicked(why) => {
                f.write_str(why)?;
                true
            }
            RankOutcome::Failed(why) => {
                write!(f, "ended with an error: {why}")?;
                true
            }
            RankOutcome::Blocked(operation) => {
                write!(f, "is over its deadline in {operation}, from which the transport does not return")?;
                true
            }
            RankOutcome::GaveUp(why) => {
                write!(f, "gave up: {why}")?;
                true
            }
            RankOutcome::Absent => {
                f.write_str(
                    "has not connected to the watchdog: it was lost before it could, or cannot reach the others",
                )?;
                false
            }
            RankOutcome::Ended => {
                f.write_str("has ended in good order")?;
                false
            }
        };
        if alive {
            write!(f, "; it was in {phase} of step {step}")?;
            if let Some(last) = last {
                write!(f, ", its last operation {}", super::diagnosis::place(last))?;
            }
        }
        Ok(())
    }
}

/// Ranks, in ascending order, in words: `rank 3` or `ranks 0 to 2, 5`, with the verb that goes with it.
///
/// ```
/// use isobar_manager::flight::ranks;
///
/// assert_eq!(ranks(&[3], "waits", "wait"), ("rank 3".to_owned(), "waits"));
/// assert_eq!(ranks(&[0, 1, 2, 5], "waits", "wait"), ("ranks 0 to 2, 5".to_owned(), "wait"));
/// ```
pub fn ranks<'a>(ranks: &[usize], one: &'a str, several: &'a str) -> (String, &'a str) {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let words: Vec<String> = runs
        .into_iter()
        .flat_map(|(first, last)| match last - first {
            0 => vec![first.to_string()],
            1 => vec![first.to_string(), last.to_string()],
            _ => vec![format!("{first} to {last}")],
        })
        .collect();
    match ranks.len() {
        1 => (format!("rank {}", words.join(", ")), one),
        _ => (format!("ranks {}", words.join(", ")), several),
    }
}

/// The longest line of a report: what other processes say is not trusted to be short.
const LONGEST: usize = 2000;

/// A line that does nothing to a terminal.
pub(crate) fn plain(text: &str) -> String {
    let mut plain: String =
        text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).take(LONGEST).collect();
    if text.chars().count() > LONGEST {
        plain.push('…');
    }
    plain
}
