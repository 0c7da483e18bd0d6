//! Outcomes of the ranks, the root cause among them, and the report.

use std::time::Duration;

use isobar_manager::flight;
use nix::sys::signal::Signal;

use super::hosts::Place;
use super::out_of_memory::OomKill;
use isobar_command::exit::{self, Exit};

/// Outcome of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExitReason {
    /// It ended with this code.
    Code(u8),
    /// This signal ended it.
    Signal(i32),
    /// Its host could not be reached, or the connection was lost: ssh ended with 255.
    Unreachable,
    /// It was killed, and has not ended.
    Never,
}

/// The end of one rank.
#[derive(Debug, Clone)]
pub(super) struct End {
    pub(super) place: Place,
    /// Its process, where it is one of this machine.
    pub(super) pid: Option<u32>,
    pub(super) how: ExitReason,
    /// After the start of all.
    pub(super) after: Duration,
    pub(super) request: EndRequest,
    /// Evidence that the kernel killed it because memory was used up.
    pub(super) oom: Option<OomKill>,
}

/// Requests of this launcher to a rank to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndRequest {
    No,
    /// By a signal that it was sent itself, and passed on.
    PassedOn,
    /// Since another rank had failed.
    Pressed,
    /// Since it was stopped, and others had ended: well, or because they had lost a rank.
    Stopped,
}

impl EndRequest {
    fn words(self) -> &'static str {
        if self == Self::No { "" } else { ", told so by the launcher" }
    }
}

impl ExitReason {
    /// Converts a shell's (or ssh's) exit code of a command.
    pub(super) fn of_shell(code: u8) -> Self {
        match code {
            255 => Self::Unreachable,
            code if code > SIGNALS => Self::Signal(i32::from(code - SIGNALS)),
            code => Self::Code(code),
        }
    }

    /// Returns whether it ended well: finished, or saved after a request to stop.
    pub(super) fn is_good(self) -> bool {
        matches!(self, Self::Code(code) if code == Exit::Good as u8 || code == Exit::Stopped as u8)
    }

    /// Returns whether it was killed by SIGKILL, itself or inside a shell.
    pub(super) fn is_kill(self) -> bool {
        let kill = Signal::SIGKILL as i32;
        match self {
            Self::Signal(signal) => signal == kill,
            Self::Code(code) => i32::from(code) == i32::from(SIGNALS) + kill,
            Self::Unreachable | Self::Never => false,
        }
    }

    /// Returns whether another attempt may succeed.
    pub(super) fn may_pass(self) -> bool {
        let lasting = [Exit::Usage, Exit::Data, Exit::Mismatch].map(|exit| exit as u8);
        match self {
            // Not found, and no program, as a shell says it.
            Self::Code(126 | 127) => false,
            Self::Code(code) => !self.is_good() && !lasting.contains(&code),
            Self::Signal(_) | Self::Unreachable | Self::Never => true,
        }
    }

    /// The code with which the launcher ends for its sake.
    pub(super) fn code(self) -> u8 {
        match self {
            Self::Code(code) => code,
            Self::Signal(signal) => SIGNALS + signal as u8,
            Self::Unreachable | Self::Never => Exit::Lost as u8,
        }
    }

    /// Of several that ended badly, those of the lowest number are the causes of the others.
    fn order(self) -> u8 {
        match self {
            // A pipe breaks where another has ended.
            Self::Signal(signal) if signal == Signal::SIGPIPE as i32 => 2,
            // By abort a program ends itself, perhaps since it has lost another.
            Self::Signal(signal) if signal != Signal::SIGABRT as i32 => 0,
            Self::Code(code) if code == Exit::Lost as u8 => 2,
            _ => 1,
        }
    }
}

/// Offset that a shell adds to a signal's number.
const SIGNALS: u8 = 128;

impl std::fmt::Display for ExitReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(0) => f.write_str("ended well"),
            Self::Code(code @ (126 | 127)) => {
                let what = if *code == 126 { "cannot be run" } else { "was not found" };
                write!(f, "ended with code {code} (the command {what})")
            }
            Self::Code(101) => f.write_str("ended with code 101 (it panicked)"),
            Self::Code(code) if *code > SIGNALS => {
                let signal = name(i32::from(code - SIGNALS));
                write!(f, "ended with code {code} (as a shell does after {signal})")
            }
            Self::Code(code) => match exit::description(*code) {
                Some(description) => write!(f, "ended with code {code} ({description})"),
                None => write!(f, "ended with code {code}"),
            },
            Self::Signal(signal) => write!(f, "was killed by signal {signal} ({})", name(*signal)),
            Self::Unreachable => {
                f.write_str("was not reached, or its connection was lost (ssh ended with 255)")
            }
            Self::Never => f.write_str("was killed, and has not ended"),
        }
    }
}

fn name(signal: i32) -> &'static str {
    Signal::try_from(signal).map_or("of no name", Signal::as_str)
}

impl End {
    /// Returns whether this may be the cause of a failure, and was not done by the launcher itself.
    fn is_own(&self) -> bool {
        matches!(self.request, EndRequest::No | EndRequest::Stopped) && !self.how.is_good()
    }

    fn order(&self) -> (u8, Duration) {
        let how = match self.how {
            // A shell around the program says so of its signal.
            ExitReason::Code(code) if code > SIGNALS && code < 255 => ExitReason::of_shell(code).order(),
            how => how.order(),
        };
        (how, self.after)
    }
}

/// The rank that failed first: one that was killed by a signal before one that had an error, that before one that has lost
/// another; among equals by time. None where all ended well, or as this launcher told them.
///
/// If all ranks only lost another, the first line of their report, `finding`, names the one at fault.
pub(super) fn root<'a>(ends: &'a [End], finding: Option<&'a str>) -> Option<Root<'a>> {
    let end = first(ends)?;
    let finding = finding
        .filter(|_| end.how == ExitReason::Code(Exit::Lost as u8) || end.request == EndRequest::Stopped);
    let named = finding.and_then(|finding| {
        let (rank, what) = finding.strip_prefix("rank ")?.split_once(") ")?;
        let rank: usize = rank.split(' ').next()?.parse().ok()?;
        Some(Root { end: ends.iter().find(|end| end.place.rank == rank)?, finding: Some(what) })
    });
    Some(named.unwrap_or(Root { end, finding: None }))
}

/// The cause of a failure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Root<'a> {
    /// The end of the rank at fault.
    pub(super) end: &'a End,
    /// Report of the other ranks about it.
    finding: Option<&'a str>,
}

fn first(ends: &[End]) -> Option<&End> {
    let stopped = ends.iter().any(|end| end.request == EndRequest::PassedOn);
    // Ranks that have lost one which was told to end are no failure.
    let follows = |end: &End| stopped && end.how == ExitReason::Code(Exit::Lost as u8);
    ends.iter().filter(|end| end.is_own() && !follows(end)).min_by_key(|end| end.order())
}

/// The code with which the launcher ends.
pub(super) fn code(ends: &[End]) -> u8 {
    let saved = ends.iter().any(|end| end.how == ExitReason::Code(Exit::Stopped as u8));
    let request = ends.iter().find(|end| end.request == EndRequest::PassedOn && !end.how.is_good());
    match (first(ends), request) {
        (Some(End { request: EndRequest::Stopped, .. }), _) => Exit::Lost as u8,
        (Some(end), _) => end.how.code(),
        (None, _) if saved => Exit::Stopped as u8,
        (None, Some(end)) => end.how.code(),
        (None, None) => ends.iter().map(|end| end.how.code()).max().unwrap_or_default(),
    }
}

/// Formats the report, root cause first. `left_out` were not started; `tail` returns a rank's last lines, `file` the path of the
/// rest.
pub(super) fn report(
    root: &Root<'_>,
    ends: &[End],
    left_out: &[usize],
    tail: impl Fn(usize) -> Vec<String>,
    file: Option<&str>,
    records: Option<&str>,
) -> String {
    let Root { end: root, finding } = root;
    let (who_failed, after, how) = (who(root), root.after.as_secs_f64(), root.how);
    let mut text = match finding {
        // When it failed is not when it ended.
        Some(finding) => {
            let request = root.request.words();
            format!(
                "isobar launch: {who_failed} failed first: it {finding}\n  it {how}{request}, after {after:.1} s"
            )
        }
        None => {
            let stopped = if root.request == EndRequest::Stopped {
                "was stopped while others had ended, and "
            } else {
                ""
            };
            let oom = root.oom.as_ref().map(OomKill::words).unwrap_or_default();
            format!("isobar launch: {who_failed} failed first, after {after:.1} s: it {stopped}{how}{oom}")
        }
    };
    if root.oom.is_some() {
        text += &format!("\n  {}", OomKill::MEND);
    }
    let lines = tail(root.place.rank);
    // An error that all ranks have is printed by one of them.
    let alike = ends.iter().filter(|end| end.is_own() && end.how == root.how);
    let mut alike =
        alike.map(|end| (end.place.rank, tail(end.place.rank))).filter(|(_, lines)| !lines.is_empty());
    if !lines.is_empty() {
        let all = file.map_or_else(String::new, |file| format!(" (all of it: {file})"));
        text += &format!("\n  its last lines on standard error{all}:");
        lines.iter().for_each(|line| text += &format!("\n    | {line}"));
    } else if let Some((rank, lines)) = alike.next() {
        text += &format!("\n  the last lines of rank {rank}, which ended alike, on standard error:");
        lines.iter().for_each(|line| text += &format!("\n    | {line}"));
    } else {
        text += "\n  it wrote nothing to standard error";
    }
    for end in ends.iter().filter(|end| end.place.rank != root.place.rank) {
        let request = end.request.words();
        let oom = end.oom.as_ref().map(OomKill::words).unwrap_or_default();
        text +=
            &format!("\n  {} {}{oom}{request}, after {:.1} s", who(end), end.how, end.after.as_secs_f64());
    }
    if !left_out.is_empty() {
        let (ranks, were) = flight::ranks(left_out, "was", "were");
        text += &format!("\n  {ranks} {were} not started");
    }
    if let Some(records) = records {
        text += &format!("\nflight records: {records}");
    }
    text
}

fn who(end: &End) -> String {
    let Place { rank, host, .. } = &end.place;
    match end.pid {
        Some(pid) => format!("rank {rank} ({host}, process {pid})"),
        None => format!("rank {rank} ({host})"),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// `how@seconds` of each rank; `!` behind what the launcher told it, `?` behind what it passed on.
    fn ends(text: &str) -> Vec<End> {
        let end = |(rank, word): (usize, &str)| {
            let (how, after) = word.split_once('@').unwrap();
            let request = match how.chars().last() {
                Some('!') => EndRequest::Pressed,
                Some('?') => EndRequest::PassedOn,
                _ => EndRequest::No,
            };
            let how = match how.trim_end_matches(['!', '?']).split_at(1) {
                ("s", signal) => ExitReason::Signal(signal.parse().unwrap()),
                ("c", code) => ExitReason::Code(code.parse().unwrap()),
                _ => ExitReason::Unreachable,
            };
            let host = "node7".to_owned();
            let place = Place { rank, local_rank: rank, local_size: 4, host, here: true };
            let after = Duration::from_secs_f64(after.parse().unwrap());
            End { place, pid: Some(42), how, after, request, oom: None }
        };
        text.split_whitespace().enumerate().map(end).collect()
    }

    #[rstest]
    #[case::good("c0@1 c0@2", None, 0)]
    #[case::stopped("c6@1 c6@1", None, 6)]
    #[case::one_done_one_stopped("c0@1 c6@1", None, 6)]
    #[case::killed("c4@3.5 s9@3.1 c4@3.4", Some(1), 137)]
    #[case::seen_late("c4@3.0 s9@3.1 c4@3.4", Some(1), 137)]
    #[case::panic("c4@2 c101@3", Some(1), 101)]
    #[case::the_first_of_equals("c1@3 c101@2", Some(1), 101)]
    #[case::signal_above_error("c1@2 s11@3", Some(1), 139)]
    #[case::abort_is_an_error("c1@2 s6@3", Some(0), 1)]
    #[case::by_a_shell("c4@1 c137@2", Some(1), 137)]
    #[case::only_consequences("c4@2 c4@1", Some(1), 4)]
    #[case::lost_host("c4@1 u@20", Some(1), 4)]
    #[case::ours("s15!@12 c3@2 s9!@22", Some(1), 3)]
    #[case::told_to_end("s15?@2 s15?@2", None, 143)]
    #[case::interrupted("c4@2 s2?@2 c4!@2", None, 130)]
    #[case::fails_while_it_stops("c6@2 s11@2", Some(1), 139)]
    #[case::hangs("c4@2 s15!@12", Some(0), 4)]
    fn the_root_cause_comes_first(#[case] text: &str, #[case] rank: Option<usize>, #[case] exit: u8) {
        let ends = ends(text);
        assert_eq!(root(&ends, None).map(|root| root.end.place.rank), rank);
        assert_eq!(code(&ends), exit);
    }

    #[rstest]
    #[case("c0", false)]
    #[case("c1", true)]
    #[case("c2", false)]
    #[case("c3", false)]
    #[case("c4", true)]
    #[case("c5", false)]
    #[case("c6", false)]
    #[case("c101", true)]
    #[case("c127", false)]
    #[case("s9", true)]
    #[case("u", true)]
    fn what_may_pass_is_tried_again(#[case] how: &str, #[case] again: bool) {
        assert_eq!(ends(&format!("{how}@1"))[0].how.may_pass(), again);
    }

    #[test]
    fn reports_tell_all() {
        let ends = ends("c4@3.5 s9@3.1 s15!@13.5 c0@1");
        let report = report(
            &root(&ends, None).unwrap(),
            &ends,
            &[4, 5, 6, 9],
            |rank| if rank == 1 { vec!["out of memory".to_owned()] } else { Vec::new() },
            Some("logs/rank_1.err"),
            Some("runs/x/flight (isobar trace why runs/x/flight)"),
        );
        insta::assert_snapshot!(report, @r"
        isobar launch: rank 1 (node7, process 42) failed first, after 3.1 s: it was killed by signal 9 (SIGKILL)
          its last lines on standard error (all of it: logs/rank_1.err):
            | out of memory
          rank 0 (node7, process 42) ended with code 4 (a rank was lost or timed out), after 3.5 s
          rank 2 (node7, process 42) was killed by signal 15 (SIGTERM), told so by the launcher, after 13.5 s
          rank 3 (node7, process 42) ended well, after 1.0 s
          ranks 4 to 6, 9 were not started
        flight records: runs/x/flight (isobar trace why runs/x/flight)
        ");
    }

    const SILENT: &str = "rank 1 (node7, process 42) has not been heard of for 8.0 s: it is stopped";

    /// Ranks that end because of another know which; not those that have an error of their own, and nobody named who is not there.
    #[rstest]
    #[case("c4@8 s9!@28 c4@8", SILENT, 1, 4)]
    #[case("c4@8 c4@9", SILENT, 1, 4)]
    #[case("c3@8 s9!@28 c4@8", SILENT, 0, 3)]
    #[case("c4@8", SILENT, 0, 4)]
    #[case("c4@8 s9!@28", "ranks wait for each other: rank 0 in all_reduce", 0, 4)]
    #[case("c4@8 s9!@28", "rank ", 0, 4)]
    fn the_report_names_the_cause(
        #[case] text: &str,
        #[case] finding: &str,
        #[case] rank: usize,
        #[case] exit: u8,
    ) {
        let ends = ends(text);
        assert_eq!(root(&ends, Some(finding)).unwrap().end.place.rank, rank);
        assert_eq!(code(&ends), exit);
    }

    #[test]
    fn a_stopped_rank_is_named_by_what_others_say() {
        let ends = ends("c4@8.5 s9!@28.1");
        let root = root(&ends, Some(SILENT)).unwrap();
        insta::assert_snapshot!(report(&root, &ends, &[], |_| Vec::new(), None, None), @r"
        isobar launch: rank 1 (node7, process 42) failed first: it has not been heard of for 8.0 s: it is stopped
          it was killed by signal 9 (SIGKILL), told so by the launcher, after 28.1 s
          it wrote nothing to standard error
          rank 0 (node7, process 42) ended with code 4 (a rank was lost or timed out), after 8.5 s
        ");
    }

    #[test]
    fn a_rank_that_was_stopped_when_others_had_ended_is_a_failure() {
        let mut ends = ends("c0@8 s9!@28");
        ends[1].request = EndRequest::Stopped;
        let root = root(&ends, None).unwrap();
        assert_eq!((root.end.place.rank, code(&ends)), (1, 4));
        let report = report(&root, &ends, &[], |_| Vec::new(), None, None);
        let headline = "rank 1 (node7, process 42) failed first, after 28.0 s: it was stopped while others had ended, and was \
                        killed by signal 9 (SIGKILL)";
        assert!(report.contains(headline), "{report}");
    }

    /// A rank that was stopped before the others could watch it is named by no report.
    #[rstest]
    #[case("c4@8 c4@9 s9!@28", None, 2, 4)]
    #[case("c4@8 c4@9 s15!@18", None, 2, 4)]
    #[case("c4@8 c4@9 s9!@28", Some(SILENT), 1, 4)]
    fn a_stopped_rank_is_the_cause_where_others_lost_one(
        #[case] text: &str,
        #[case] finding: Option<&str>,
        #[case] rank: usize,
        #[case] exit: u8,
    ) {
        let mut ends = ends(text);
        ends[2].request = EndRequest::Stopped;
        assert_eq!(root(&ends, finding).unwrap().end.place.rank, rank);
        assert_eq!(code(&ends), exit);
    }

    #[test]
    fn an_out_of_memory_kill_is_named() {
        let mut ends = ends("c4@3.5 s9@3.1 c137@3.2");
        for (rank, kill) in [(1, OomKill::Group("/job".to_owned())), (2, OomKill::Machine)] {
            assert!(ends[rank].how.is_kill());
            ends[rank].oom = Some(kill);
        }
        let root = root(&ends, None).unwrap();
        insta::assert_snapshot!(report(&root, &ends, &[], |_| Vec::new(), None, None), @r"
        isobar launch: rank 1 (node7, process 42) failed first, after 3.1 s: it was killed by signal 9 (SIGKILL), by the kernel's out-of-memory killer: the memory limit of control group /job was reached
          raise the memory limit of the job or container, start fewer ranks on this host, or lower train.batch_size or raise train.accumulate (smaller micro-batches)
          it wrote nothing to standard error
          rank 0 (node7, process 42) ended with code 4 (a rank was lost or timed out), after 3.5 s
          rank 2 (node7, process 42) ended with code 137 (as a shell does after SIGKILL), by the kernel's out-of-memory killer (this machine counts a new kill), after 3.2 s
        ");
    }

    #[test]
    fn of_ranks_that_end_alike_the_one_that_says_why_is_shown() {
        let tail = |rank| if rank == 0 { vec!["error: unknown key".to_owned()] } else { Vec::new() };
        let ends = ends("c2@1.1 c2@1.0");
        let report = report(&root(&ends, None).unwrap(), &ends, &[], tail, None, None);
        let lines =
            "the last lines of rank 0, which ended alike, on standard error:\n    | error: unknown key";
        assert!(report.starts_with("isobar launch: rank 1 ") && report.contains(lines), "{report}");
    }

    #[test]
    fn what_ssh_says_is_read() {
        assert_eq!(ExitReason::of_shell(255), ExitReason::Unreachable);
        assert_eq!(ExitReason::of_shell(137), ExitReason::Signal(9));
        assert_eq!(ExitReason::of_shell(4), ExitReason::Code(4));
    }
}
