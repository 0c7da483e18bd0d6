//! The thread that writes a checkpoint while training goes on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use super::write::Job;
use crate::error::{IoContext, Result};

/// At most one write at a time.
#[derive(Default)]
pub(super) struct Background {
    thread: Option<JoinHandle<Result<()>>>,
    /// Why the last write failed, until somebody is told.
    failed: Option<String>,
    /// Tells rank 0's thread that the other ranks' parts come soon or never.
    hurry: Arc<AtomicBool>,
}

impl Background {
    pub(super) fn hurry(&self) -> Arc<AtomicBool> {
        self.hurry.clone()
    }

    /// Starts to write; the write before must have ended.
    pub(super) fn start(&mut self, job: Job) -> Result<()> {
        let folder = job.folder.clone();
        let write = move || job.write_part().and_then(|()| job.commit());
        let thread = std::thread::Builder::new().name("checkpoint".to_owned()).spawn(write);
        self.thread = Some(thread.at("start a thread to write", &folder)?);
        Ok(())
    }

    /// Warns of a write that has failed. Does not wait; whether one is under way.
    pub(super) fn poll(&mut self) -> bool {
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            self.join();
        }
        self.thread.is_some()
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
        self.hurry.store(true, Ordering::Relaxed);
        self.join();
    }
}
