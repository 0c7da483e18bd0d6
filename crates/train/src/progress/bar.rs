//! The bar on a terminal.

use std::io::{self, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

/// A progress bar at the bottom of this process's standard error, with other lines above it.
#[derive(Debug)]
pub struct Bar(ProgressBar);

impl Bar {
    /// Makes a bar on standard error; `None` if that is no terminal.
    pub fn on_terminal() -> Option<Self> {
        Self::on(ProgressDrawTarget::stderr_with_hz(4))
    }

    /// Makes a bar on standard error even if that is no terminal: for launchers that forward escape sequences
    /// to one.
    pub(super) fn forced() -> Option<Self> {
        Self::on(ProgressDrawTarget::term_like_with_hz(Box::new(Escapes), 4))
    }

    pub(super) fn on(target: ProgressDrawTarget) -> Option<Self> {
        let bar = ProgressBar::with_draw_target(None, target);
        if bar.is_hidden() {
            return None;
        }
        let style = ProgressStyle::with_template("{bar:10} {pos}/{len}  {wide_msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Some(Self(bar))
    }

    /// Draws the bar at `done` of `total`, with a text behind it.
    pub fn set(&self, done: u64, total: u64, text: String) {
        if self.0.length() != Some(total) {
            self.0.set_length(total);
        }
        self.0.set_message(text);
        self.0.set_position(done);
        if done >= total {
            // Drawing is limited to a few times a second, but the end is to be seen.
            self.0.force_draw();
        }
    }

    /// Writes a line above the bar.
    pub fn println(&self, line: &str) {
        self.0.println(line);
    }

    /// Runs `write`, which may write whole lines to the terminal, with the bar out of its way.
    pub fn suspend<T>(&self, write: impl FnOnce() -> T) -> T {
        self.0.suspend(write)
    }

    /// Removes the bar, and returns how long it was there.
    pub fn clear(self) -> Duration {
        self.0.finish_and_clear();
        self.0.elapsed()
    }
}

/// Standard error as a terminal of 80 columns that knows ANSI's escape sequences.
#[derive(Debug)]
struct Escapes;

impl Escapes {
    fn write(text: &str) -> io::Result<()> {
        io::stderr().lock().write_all(text.as_bytes())
    }

    /// Moves the cursor by `count` cells.
    fn move_by(count: usize, letter: char) -> io::Result<()> {
        if count == 0 { Ok(()) } else { Self::write(&format!("\x1b[{count}{letter}")) }
    }
}

impl TermLike for Escapes {
    fn width(&self) -> u16 {
        80
    }

    fn move_cursor_up(&self, count: usize) -> io::Result<()> {
        Self::move_by(count, 'A')
    }

    fn move_cursor_down(&self, count: usize) -> io::Result<()> {
        Self::move_by(count, 'B')
    }

    fn move_cursor_right(&self, count: usize) -> io::Result<()> {
        Self::move_by(count, 'C')
    }

    fn move_cursor_left(&self, count: usize) -> io::Result<()> {
        Self::move_by(count, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        Self::write(&format!("{text}\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        Self::write(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        Self::write("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        io::stderr().flush()
    }
}
