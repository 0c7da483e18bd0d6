//! Counts of a run of the tests: passed, failed, skipped.

use std::{fmt, fs, path::Path};

/// Counts of a run of the tests and checks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Summary {
    pub(super) passed: usize,
    pub(super) failed: usize,
    /// Tests and checks that failed.
    pub(super) failures: Vec<Failure>,
    /// Output of the first failed test, cut.
    pub(super) first: FirstOutput,
    /// `test: reason`, one a skipped test.
    pub(super) skips: Vec<String>,
}

/// A test or check that failed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) name: String,
    /// The command that runs it again; empty where none does.
    repeat: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.repeat.is_empty() { Ok(()) } else { write!(f, "\n       {}", self.repeat) }
    }
}

/// Output of one failed test, so that the end of a log tells a cause.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FirstOutput {
    pub(super) lines: Vec<String>,
    complete: bool,
}

impl FirstOutput {
    const MOST_LINES: usize = 24;

    /// Takes a line of the output of failed tests; those after the first failed test are left out.
    pub(super) fn read_line(&mut self, line: &str) {
        let next = line.starts_with("---- ") && !self.lines.is_empty();
        self.complete |= next || self.lines.len() == Self::MOST_LINES;
        if !self.complete && !line.is_empty() {
            self.lines.push(line.to_owned());
        }
    }
}

impl Summary {
    /// Adds the counts of a test program's result, `ok. 5 passed; 0 failed; …`; returns how many failed.
    pub(super) fn count(&mut self, counts: &str) -> usize {
        let failed = number(counts, "failed");
        self.passed += number(counts, "passed");
        self.failed += failed;
        failed
    }

    /// Names a test whose failure is counted already.
    pub(super) fn name_failure(&mut self, name: &str, repeat: &str) {
        self.failures.push(Failure { name: name.to_owned(), repeat: repeat.to_owned() });
    }

    /// Counts a check that is not a test.
    pub(super) fn check(&mut self, name: &str, repeat: &str, passed: bool) {
        if passed {
            self.passed += 1;
        } else {
            self.failed += 1;
            self.name_failure(name, repeat);
        }
    }

    /// Takes the tests that noted themselves as skipped in `file`; to cargo they passed.
    pub(super) fn read_skips(&mut self, file: &Path) {
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

    /// Turns skips for other reasons than a missing GPU, namespaces or control groups into failures.
    pub(super) fn forbid_skips(&mut self) {
        const ALLOWED: [&str; 4] = ["GPU", "network namespace", "mount namespace", "control group"];
        let may_skip = |skip: &String| ALLOWED.iter().any(|reason| skip.contains(reason));
        let (allowed, forbidden) = std::mem::take(&mut self.skips).into_iter().partition(may_skip);
        self.skips = allowed;
        for skip in forbidden {
            self.check(&format!("{skip} (skipped, which CI does not allow)"), "", false);
        }
    }

    /// The last line: counts and nothing else.
    pub(super) fn line(&self) -> String {
        let tests = self.skips.iter().filter_map(|skip| skip.split_once(": ")).map(|(test, _)| test);
        let mut skipped: Vec<_> = tests.collect();
        skipped.sort_unstable();
        skipped.dedup();
        format!("{} passed, {} failed, {} skipped", self.passed, self.failed, skipped.len())
    }
}

/// The number before `what` in `ok. 5 passed; 0 failed; …`.
fn number(counts: &str, what: &str) -> usize {
    let words: Vec<_> = counts.split_whitespace().collect();
    let place = words.iter().position(|word| word.trim_end_matches(';') == what);
    place.and_then(|place| words.get(place.checked_sub(1)?)?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_counted() {
        let mut summary = Summary::default();
        assert_eq!(summary.count("FAILED. 12 passed; 3 failed; 1 ignored; finished in 1.20s"), 3);
        assert_eq!(summary.count("ok. 5 passed; 0 failed; 0 ignored"), 0);
        summary.check("format", "cargo fmt", true);
        summary.check("lints", "cargo clippy", false);
        assert_eq!(summary.line(), "18 passed, 4 failed, 0 skipped");
        assert_eq!(summary.failures[0].to_string(), "lints\n       cargo clippy");
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
        assert_eq!(summary.failures[0].to_string(), "srun: no SLURM (skipped, which CI does not allow)");
    }
}
