//! Thread that writes a checkpoint while training continues.

use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Instant;

use super::news::{News, Parts};
use super::write::Job;
use crate::error::{IoContext, Result};

/// At most one write at a time.
#[derive(Default)]
pub(super) struct Background {
    thread: Option<JoinHandle<Result<()>>>,
    /// Reports the result of this rank's own part of the write.
    part: Option<mpsc::Receiver<std::result::Result<(), String>>>,
    /// Reason why the last write failed, until it is reported.
    failed: Option<String>,
    news: News,
}

impl Background {
    /// Starts to write; the write before must have ended.
    pub(super) fn start(&mut self, job: Job) -> Result<()> {
        let folder = job.folder.clone();
        let (ended, part) = mpsc::channel();
        self.news = job.lead.as_ref().map(|lead| lead.news.clone()).unwrap_or_default();
        // Messages of the thread go where those of the caller go, which may be shown for its thread alone.
        let messages = tracing::dispatcher::get_default(Clone::clone);
        let write = move || {
            tracing::dispatcher::with_default(&messages, || {
                let written = job.write_part();
                // The receiver is gone if the run has ended with an error.
                let _ = ended.send(written.as_ref().copied().map_err(ToString::to_string));
                written.and_then(|()| job.commit())
            })
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_owned()).spawn(write);
        self.thread = Some(thread.at("start a thread to write", &folder)?);
        self.part = Some(part);
        Ok(())
    }

    /// Warns of a write that has failed. Does not wait; whether one is under way.
    pub(super) fn poll(&mut self) -> bool {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.join();
        }
        self.thread.is_some()
    }

    /// Waits until this rank's own part is written, and returns its error, if any. On rank 0 the write
    /// continues.
    pub(super) fn part(&mut self) -> Option<String> {
        match self.part.take()?.recv() {
            Ok(Ok(())) => None,
            Ok(Err(reason)) => Some(reason),
            Err(mpsc::RecvError) => Some("the thread that writes it panicked".to_owned()),
        }
    }

    /// Sends the ranks' reports about their parts to the thread of rank 0.
    pub(super) fn tell(&self, parts: Parts) {
        self.news.tell(parts);
    }

    /// Waits for the write under way; why it, or one before, failed.
    pub(super) fn wait(&mut self) -> Option<String> {
        self.join();
        self.failed.take()
    }

    fn join(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let ended = thread.join().map_err(|_| "the thread that writes it panicked".to_owned());
        if let Err(reason) = ended.and_then(|written| written.map_err(|error| error.to_string())) {
            tracing::warn!("a checkpoint could not be written: {reason}");
            self.failed = Some(reason);
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.news.tell(Parts::Abandoned(Instant::now()));
        self.join();
    }
}
