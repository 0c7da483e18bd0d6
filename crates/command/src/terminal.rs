//! Lines for standard output and standard error.

use std::io::{IsTerminal, Write};

use isobar_manager::printable;

/// Writes a line to standard output. Nobody reads on after `| head`: that is no error.
pub fn line(text: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{}", printable(text));
}

/// Writes a line to standard error, colours included: what comes from files is made [`printable`] before.
pub fn complain(text: &str) {
    // One write, so that lines of several processes do not mix.
    let _ = std::io::stderr().lock().write_all(format!("{text}\n").as_bytes());
}

/// Returns whether standard error takes colours.
pub fn colours() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}
