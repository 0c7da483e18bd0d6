//! Lines for standard output and standard error.

use std::io::Write;

/// Writes a line to standard output. Nobody reads on after `| head`: that is no error.
pub(crate) fn line(text: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

/// Writes a line to standard error.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
