//! Reads what `cargo test` prints: which tests failed in which program, and how long each program ran.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use super::{
    suites::{Suite, Suites},
    summary::Summary,
};

/// The program of all integration tests of a package, whose modules are timed one by one.
const MODULES: &str = "--test main";

/// State while the lines of one `cargo test` are read.
pub(super) struct Reader<'a> {
    suites: &'a Suites,
    /// `cargo test` with what it needs on this machine.
    cargo: &'a str,
    label: &'a str,
    current: Option<Current>,
    times: Vec<(String, Duration)>,
}

/// The program that runs.
struct Current {
    suite: Suite,
    /// Time of each of its parts: its modules, or the program alone.
    times: Vec<(String, Duration)>,
    /// Time at which the last test ended, or the program began.
    last: Instant,
    failed: BTreeSet<String>,
    /// Tests that failed by the counts of its results.
    counted: usize,
    /// True if it printed a result.
    ended: bool,
    section: Section,
}

/// Part of what a test program prints.
#[derive(PartialEq, Eq)]
enum Section {
    /// A line for each test.
    Tests,
    /// Output of the failed tests.
    Captured,
    /// The names of the failed tests.
    Names,
}

impl<'a> Reader<'a> {
    pub(super) fn new(suites: &'a Suites, cargo: &'a str, label: &'a str) -> Self {
        Self { suites, cargo, label, current: None, times: Vec::new() }
    }

    /// Reads one line that came at `now`.
    pub(super) fn read_line(&mut self, line: &str, now: Instant, summary: &mut Summary) {
        let line = line.trim_end();
        if let Some(suite) = self.suites.started(line) {
            self.end_current(now, summary);
            let (failed, section) = (BTreeSet::new(), Section::Tests);
            let times = Vec::new();
            self.current =
                Some(Current { suite, times, last: now, failed, counted: 0, ended: false, section });
            return;
        }
        let Some(current) = &mut self.current else { return };
        match (&current.section, line) {
            (Section::Tests, "failures:") => current.section = Section::Captured,
            (Section::Captured, "failures:") => current.section = Section::Names,
            (Section::Captured, line) => summary.first.read_line(line),
            (Section::Names, name) if name.starts_with("    ") => {
                current.failed.insert(name.trim().to_owned());
            }
            (_, line) => {
                if let Some(counts) = line.strip_prefix("test result: ") {
                    current.counted += summary.count(counts);
                    (current.ended, current.section) = (true, Section::Tests);
                } else if let Some(test) = line.strip_prefix("test ") {
                    current.took(test, now);
                    if let Some(name) = test.strip_suffix(" ... FAILED") {
                        current.failed.insert(plain_name(name).to_owned());
                    } else if let Some((name, _)) = test.split_once(" ... ignored") {
                        summary.skips.push(format!("{name}: ignored"));
                    }
                }
            }
        }
    }

    /// Ends reading; returns how long each program ran.
    pub(super) fn finish(mut self, now: Instant, summary: &mut Summary) -> Vec<(String, Duration)> {
        self.end_current(now, summary);
        self.times
    }

    fn end_current(&mut self, now: Instant, summary: &mut Summary) {
        let Some(mut current) = self.current.take() else { return };
        current.ended_at(now);
        let title = format!("{}{}", self.label, current.suite.title());
        let command = format!("{} -p {} {}", self.cargo, current.suite.package, current.suite.chosen);
        let named = current.failed.len();
        for name in current.failed {
            let repeat = format!("{command} -- {}", filter(&current.suite, &name));
            summary.name_failure(&format!("{title}: {name}"), &repeat);
        }
        if !current.ended {
            // It crashed, or was ended at the deadline.
            summary.failed += named;
            summary.check(&format!("{title}: ended without a result"), &command, false);
        } else if named < current.counted {
            summary.name_failure(&format!("{title}: {} more", current.counted - named), &command);
        }
        let named = |part: String| if part.is_empty() { title.clone() } else { format!("{title} {part}") };
        self.times.extend(current.times.into_iter().map(|(part, took)| (named(part), took)));
    }
}

impl Current {
    /// Counts the time since the last test ended as that of the module of `test`, a line of a test's result. Where tests run
    /// side by side each module has its share, and all together have the time of the program.
    fn took(&mut self, test: &str, now: Instant) {
        let module = test.split(" ... ").next().unwrap_or(test).split_once("::");
        let part = match module {
            Some((module, _)) if self.suite.chosen == MODULES => module,
            _ => "",
        };
        self.add(part.to_owned(), now);
    }

    /// Counts the time since the last test with what came last.
    fn ended_at(&mut self, now: Instant) {
        let part = self.times.last().map(|(part, _)| part.clone()).unwrap_or_default();
        self.add(part, now);
    }

    fn add(&mut self, part: String, now: Instant) {
        let took = now.duration_since(self.last);
        self.last = now;
        match self.times.iter_mut().find(|(known, _)| *known == part) {
            Some((_, total)) => *total += took,
            None => self.times.push((part, took)),
        }
    }
}

/// The name of a test without what libtest writes behind it.
fn plain_name(name: &str) -> &str {
    [" - should panic", " - compile fail", " - compile"]
        .iter()
        .find_map(|mode| name.strip_suffix(mode))
        .unwrap_or(name)
}

/// The arguments for a test program that choose one test.
fn filter(suite: &Suite, name: &str) -> String {
    if suite.chosen != "--doc" {
        return format!("--exact {}", quoted(name));
    }
    // `src/lib.rs - item (line 3)`, of which rustdoc takes single words only: every word is a filter of its own.
    let item = name.split_once(" - ").map_or(name, |(_, item)| item);
    quoted(match item.rsplit_once(" (line ") {
        Some((item, _)) if !item.is_empty() && !item.contains(' ') => item,
        Some((_, number)) => number,
        None => item.trim_start_matches("(line "),
    })
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "_-./:=,+@".contains(letter);
    if word.chars().all(plain) { word.to_owned() } else { format!("'{word}'") }
}

#[cfg(test)]
mod tests {
    use super::{super::suites::tests::example, *};

    const SHARD: &str = "     Running unittests src/lib.rs (target/debug/deps/isobar_shard-1a)\n";
    const FAULTS: &str = "     Running tests/faults.rs (target/debug/deps/faults-2b)\n";

    fn read(lines: &str) -> (Summary, Vec<String>) {
        let (suites, mut summary, now) = (example(), Summary::default(), Instant::now());
        let mut reader = Reader::new(&suites, "A=1 cargo test", "");
        lines.lines().for_each(|line| reader.read_line(line, now, &mut summary));
        let times = reader.finish(now + Duration::from_secs(2), &mut summary);
        (summary, times.into_iter().map(|(name, took)| format!("{name} {}", took.as_secs())).collect())
    }

    fn failures(summary: &Summary) -> Vec<String> {
        summary.failures.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn counts_are_added_up_and_failures_can_be_repeated() {
        let (summary, times) = read(&format!(
            "   Compiling isobar-shard v0.1.0\n{SHARD}\n\
             running 4 tests\n\
             test a::b ... ok\n\
             test a::c::case_1_\"x\" ... FAILED\n\
             test a::p - should panic ... FAILED\n\
             test d ... ignored, slow\n\n\
             failures:\n\n\
             ---- a::c stdout ----\n\
             test printed ... FAILED\n\
             test result: FAILED. 1 passed; 9 failed;\n\n\
             ---- a::p stdout ----\n\
             note: test did not panic as expected\n\n\
             failures:\n    a::c::case_1_\"x\"\n    a::p\n\n\
             test result: FAILED. 1 passed; 2 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.33s\n\
             error: test failed, to rerun pass `-p isobar-shard --lib`\n\
             {FAULTS}\n\
             running 7 tests\n\
             test result: ok. 7 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.33s\n"
        ));
        assert_eq!(
            failures(&summary),
            [
                "isobar-shard --lib: a::c::case_1_\"x\"\n       \
                 A=1 cargo test -p isobar-shard --lib -- --exact 'a::c::case_1_\"x\"'",
                "isobar-shard --lib: a::p\n       A=1 cargo test -p isobar-shard --lib -- --exact a::p",
            ]
        );
        let printed =
            ["---- a::c stdout ----", "test printed ... FAILED", "test result: FAILED. 1 passed; 9 failed;"];
        assert_eq!(summary.first.lines, printed);
        assert_eq!(summary.skips, ["d: ignored"]);
        assert_eq!(summary.line(), "8 passed, 2 failed, 1 skipped");
        assert_eq!(times, ["isobar-shard --lib 0", "isobar-tests --test faults 2"]);
    }

    #[test]
    fn modules_have_their_times() {
        let (suites, mut summary, begun) = (example(), Summary::default(), Instant::now());
        let mut reader = Reader::new(&suites, "cargo test", "");
        let lines = [
            ("     Running tests/main.rs (target/debug/deps/main-4d)", 0),
            ("test cli::a ... ok", 1),
            ("test faults::a ... ok", 3),
            ("test cli::b::c ... FAILED", 6),
            ("test faults::b ... ok", 10),
            (SHARD.trim_end(), 15),
            ("test a::b ... ok", 17),
        ];
        let at = |seconds| begun + Duration::from_secs(seconds);
        lines.iter().for_each(|(line, seconds)| reader.read_line(line, at(*seconds), &mut summary));
        let times = reader.finish(at(20), &mut summary);
        let times: Vec<_> =
            times.into_iter().map(|(name, took)| format!("{name} {}", took.as_secs())).collect();
        let main = "isobar-tests --test main";
        assert_eq!(
            times,
            [format!("{main} cli 4"), format!("{main} faults 11"), "isobar-shard --lib 5".into()]
        );
    }

    /// A line of a process that a test started can break that of the test; the list at the end has its name.
    #[test]
    fn failures_are_read_from_the_list_too() {
        let (summary, _) = read(&format!(
            "{FAULTS}test cut_off ... a rank says something\nFAILED\n\nfailures:\n\nfailures:\n    cut_off\n\n\
             test result: FAILED. 0 passed; 1 failed; 0 ignored"
        ));
        assert_eq!(
            failures(&summary),
            ["isobar-tests --test faults: cut_off\n       \
              A=1 cargo test -p isobar-tests --test faults -- --exact cut_off"]
        );
        assert_eq!(summary.line(), "0 passed, 1 failed, 0 skipped");
    }

    #[test]
    fn a_crash_is_a_failure() {
        let (summary, _) =
            read(&format!("{FAULTS}\nrunning 7 tests\ntest a ... ok\ntest b ... FAILED\n{SHARD}"));
        assert_eq!(summary.line(), "0 passed, 3 failed, 0 skipped");
        assert_eq!(
            failures(&summary)[1],
            "isobar-tests --test faults: ended without a result\n       A=1 cargo test -p isobar-tests --test faults"
        );
    }

    #[test]
    fn documentation_tests_are_chosen_by_a_word() {
        let (summary, _) = read(
            "   Doc-tests isobar_shard\n\
             running 3 tests\n\
             test crates/shard/src/ops.rs - ops::cat (line 31) ... FAILED\n\
             test crates/shard/src/ops.rs - Array<T>::get (line 7) - compile fail ... FAILED\n\
             test crates/shard/src/lib.rs - (line 12) ... FAILED\n\
             test result: FAILED. 0 passed; 3 failed; 0 ignored\n",
        );
        let words: Vec<_> =
            failures(&summary).iter().map(|it| it.rsplit_once(" -- ").unwrap().1.to_owned()).collect();
        // In the order of their names.
        assert_eq!(words, ["'12)'", "'Array<T>::get'", "ops::cat"]);
    }
}
