//! What was run, what failed, what was skipped: read from cargo's output.

use std::{fs, path::Path};

/// Counts of a run of the tests and checks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    /// Names of failed tests and checks.
    pub(crate) failures: Vec<String>,
    /// `test: reason`, one a skipped test.
    pub(crate) skips: Vec<String>,
}

impl Summary {
    /// Counts one line that `cargo test` printed.
    pub(crate) fn read_line(&mut self, line: &str) {
        let line = line.trim_end();
        if let Some(counts) = line.strip_prefix("test result: ") {
            self.passed += count(counts, "passed");
            self.failed += count(counts, "failed");
        } else if let Some(test) = line.strip_prefix("test ") {
            if let Some(name) = test.strip_suffix(" ... FAILED") {
                self.failures.push(name.to_owned());
            } else if let Some((name, _)) = test.split_once(" ... ignored") {
                self.skips.push(format!("{name}: ignored"));
            }
        }
    }

    /// Counts a check that is not a test.
    pub(crate) fn check(&mut self, name: &str, passed: bool) {
        if passed {
            self.passed += 1;
        } else {
            self.failed += 1;
            self.failures.push(name.to_owned());
        }
    }

    /// Takes the tests that noted themselves as skipped in `file`; to cargo they passed.
    pub(crate) fn read_skips(&mut self, file: &Path) {
        let text = fs::read_to_string(file).unwrap_or_default();
        let mut noted: Vec<_> = text.lines().map(str::to_owned).collect();
        noted.sort();
        // A test with several cases that can't run notes several reasons, but is one test.
        let mut tests: Vec<_> =
            noted.iter().filter_map(|line| line.split_once(": ")).map(|(test, _)| test).collect();
        tests.dedup();
        self.passed = self.passed.saturating_sub(tests.len());
        self.skips.extend(noted);
    }

    /// Turns skips for other reasons than a missing GPU or network namespaces into failures.
    pub(crate) fn forbid_skips(&mut self) {
        let may_skip =
            |skip: &String| ["GPU", "network namespace"].iter().any(|reason| skip.contains(reason));
        let (allowed, forbidden) = std::mem::take(&mut self.skips).into_iter().partition(may_skip);
        self.skips = allowed;
        for skip in forbidden {
            self.check(&format!("{skip} (skipped, which CI does not allow)"), false);
        }
    }

    /// The last line: counts and nothing else.
    pub(crate) fn line(&self) -> String {
        let tests = self.skips.iter().filter_map(|skip| skip.split_once(": ")).map(|(test, _)| test);
        let mut skipped: Vec<_> = tests.collect();
        skipped.sort_unstable();
        skipped.dedup();
        format!("{} passed, {} failed, {} skipped", self.passed, self.failed, skipped.len())
    }
}

/// The number before `what` in `ok. 5 passed; 0 failed; …`.
fn count(counts: &str, what: &str) -> usize {
    let words: Vec<_> = counts.split_whitespace().collect();
    let place = words.iter().position(|word| word.trim_end_matches(';') == what);
    place.and_then(|place| words.get(place.checked_sub(1)?)?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &str) -> Summary {
        let mut summary = Summary::default();
        lines.lines().for_each(|line| summary.read_line(line));
        summary
    }

    #[test]
    fn counts_are_added_up() {
        let summary = read(
            "running 2 tests\n\
             test a::b ... ok\n\
             test a::c ... FAILED\n\
             test d ... ignored, slow\n\
             test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.33s\n\
             test result: ok. 7 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.33s\n",
        );
        assert_eq!(summary.failures, ["a::c"]);
        assert_eq!(summary.skips, ["d: ignored"]);
        assert_eq!(summary.line(), "8 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn noted_skips_are_not_passed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "nccl: no GPU\ncut: no network namespaces\nnccl: no GPU\nsrun: no SLURM\n")
            .unwrap();
        let mut summary = Summary { passed: 10, ..Summary::default() };
        summary.read_skips(file.path());
        assert_eq!(summary.line(), "7 passed, 0 failed, 3 skipped");
        summary.forbid_skips();
        assert_eq!(summary.line(), "7 passed, 1 failed, 2 skipped");
        assert_eq!(summary.failures, ["srun: no SLURM (skipped, which CI does not allow)"]);
    }
}
