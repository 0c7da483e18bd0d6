//! Lines for standard output and standard error.

use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::OnceLock;

use isobar_manager::printable;

/// The first error of standard output.
static FAILURE: OnceLock<String> = OnceLock::new();

/// Writes a line to standard output. Nobody reads on after `| head`: that is no error; other errors are kept for [`failure`].
pub fn line(text: &str) {
    match writeln!(std::io::stdout().lock(), "{}", printable(text)) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => drop(FAILURE.set(error.to_string())),
        _ => (),
    }
}

/// Returns the first error of writing a [`line()`], such as that of a full disk.
pub fn failure() -> Option<&'static str> {
    FAILURE.get().map(String::as_str)
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
