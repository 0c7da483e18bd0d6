//! The launcher's terminal: lines of all ranks, and below them the bar of rank 0.

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use isobar_train::{Bar, ProgressRecord};

/// Standard stream of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    Out,
    Err,
}

/// The terminal, where standard error is one.
#[derive(Debug, Clone, Default)]
pub(super) struct Screen(Option<Arc<Mutex<Option<Bar>>>>);

impl Screen {
    pub(super) fn new() -> Self {
        Self(std::io::stderr().is_terminal().then(Arc::default))
    }

    /// Returns whether there is a terminal to draw a bar on.
    pub(super) fn draws(&self) -> bool {
        self.0.is_some()
    }

    /// Draws the bar, or removes it at the end of a run.
    pub(super) fn record(&self, record: ProgressRecord) {
        let Some(mut bar) = self.bar() else { return };
        if record.total == 0 {
            bar.take().map(Bar::clear);
            return;
        }
        if bar.is_none() {
            *bar = Bar::on_terminal();
        }
        if let Some(bar) = &*bar {
            bar.set(record.done, record.total, record.text);
        }
    }

    /// Removes the bar.
    pub(super) fn clear(&self) {
        self.bar().and_then(|mut bar| bar.take()).map(Bar::clear);
    }

    /// Writes full lines above the bar. Output that cannot be written is dropped, so that no reader of the
    /// output blocks the ranks.
    pub(super) fn write(&self, stream: Stream, lines: &[u8]) {
        let write = || {
            let _ = match stream {
                Stream::Out => {
                    let mut out = std::io::stdout().lock();
                    out.write_all(lines).and_then(|()| out.flush())
                }
                Stream::Err => std::io::stderr().lock().write_all(lines),
            };
        };
        match self.bar().as_deref() {
            Some(Some(bar)) => bar.suspend(write),
            _ => write(),
        }
    }

    fn bar(&self) -> Option<MutexGuard<'_, Option<Bar>>> {
        Some(self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
