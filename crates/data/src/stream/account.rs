//! The memory of what is read ahead and kept, and the requests that wait for it.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use super::source::{Item, Row, Rows, Source};
use crate::samples::Request;
use crate::{Error, HostMemory, Result};

/// Copies of a batch that a format holds while it reads: what it read, and the tensor made of it.
pub(super) const READING: u64 = 2;

/// Numbers about a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Account {
    /// Bytes of values that were read from the data set so far: windows times variables times frames.
    pub read: u64,
    /// Bytes of batches that are read ahead or being read.
    pub queued: u64,
    /// Bytes that are kept for later epochs.
    pub cached: u64,
    /// The most bytes of both together so far.
    pub peak: u64,
}

/// Limits of a reader.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) budget: u64,
    /// Requests that are read ahead at most.
    pub(super) depth: usize,
    pub(super) workers: usize,
    pub(super) cache: bool,
}

/// A request that was announced, or is waited for.
#[derive(Debug)]
pub(super) struct Job {
    id: u64,
    source: Arc<Source>,
    request: Request,
    pub(super) status: Status,
    /// Bytes that it holds in the account.
    held: u64,
}

#[derive(Debug)]
pub(super) enum Status {
    Waiting,
    Reading,
    Done(Result<Rows>),
}

/// Items that a thread reads for a job.
pub(super) struct Claim {
    id: u64,
    pub(super) source: Arc<Source>,
    /// Rows that were kept.
    kept: Rows,
    pub(super) missing: BTreeSet<Item>,
    held: u64,
}

/// A kept row: the number of its source, and its item.
type Key = (u64, Item);

/// Jobs in their order, kept rows, and the bytes of both.
#[derive(Debug)]
pub(super) struct State {
    limits: Limits,
    pub(super) jobs: VecDeque<Job>,
    next: u64,
    kept: HashMap<Key, Row>,
    pub(super) account: Account,
    /// Bytes that reading the largest request takes.
    largest: u64,
    pub(super) closing: bool,
}

/// Returns the bytes that reading some items takes.
pub(super) fn reading_bytes(source: &Source, items: usize) -> u64 {
    source.item_bytes().saturating_mul(items as u64).saturating_mul(READING)
}

impl State {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            jobs: VecDeque::new(),
            next: 0,
            kept: HashMap::new(),
            account: Account::default(),
            largest: 0,
            closing: false,
        }
    }

    /// Makes a job, which has not begun.
    pub(super) fn job(&mut self, source: &Arc<Source>, request: Request) -> Job {
        let items = request.samples.len().saturating_mul(request.steps.saturating_add(1));
        self.largest = self.largest.max(reading_bytes(source, items));
        self.next += 1;
        Job { id: self.next, source: source.clone(), request, status: Status::Waiting, held: 0 }
    }

    /// Replaces the announced requests of a source at their position in the queue, or appends them. Requests that are announced again
    /// keep their finished or running reads.
    pub(super) fn announce(&mut self, source: &Arc<Source>, coming: Vec<Request>) {
        let is_own = |job: &Job| Arc::ptr_eq(&job.source, source);
        let place = self.jobs.iter().position(is_own).unwrap_or(self.jobs.len());
        let (own, mut others): (VecDeque<Job>, VecDeque<Job>) =
            std::mem::take(&mut self.jobs).into_iter().partition(is_own);
        let (mut begun, waiting): (Vec<Job>, Vec<Job>) =
            own.into_iter().partition(|job| matches!(job.status, Status::Reading | Status::Done(Ok(_))));
        let mut jobs = VecDeque::with_capacity(others.len() + coming.len());
        let rest = others.split_off(place);
        jobs.extend(others);
        for request in coming {
            let known = begun.iter().position(|job| job.request == request);
            jobs.push_back(match known {
                Some(at) => begun.remove(at),
                None => self.job(source, request),
            });
        }
        jobs.extend(rest);
        self.jobs = jobs;
        begun.iter().chain(&waiting).for_each(|job| self.release(job));
    }

    /// Announces more requests of a source, after all others.
    pub(super) fn announce_after(&mut self, source: &Arc<Source>, coming: Vec<Request>) {
        for request in coming {
            let job = self.job(source, request);
            self.jobs.push_back(job);
        }
    }

    /// Gives back the bytes of a job that is not in the queue any more; those of a job that is being read are given back by
    /// its thread.
    pub(super) fn release(&mut self, job: &Job) {
        if !matches!(job.status, Status::Reading) {
            self.account.queued = self.account.queued.saturating_sub(job.held);
        }
    }

    /// Puts the job of a request first, and drops those of its source before it. One that was not announced is put before all others.
    pub(super) fn bring_first(&mut self, source: &Arc<Source>, request: &Request) {
        let is_own = |job: &Job| Arc::ptr_eq(&job.source, source);
        let announced = self.jobs.iter().position(|job| is_own(job) && job.request == *request);
        let job = announced.and_then(|at| self.jobs.remove(at));
        let job = job.unwrap_or_else(|| self.job(source, request.clone()));
        let (passed, others): (Vec<Job>, Vec<Job>) =
            self.jobs.drain(..announced.unwrap_or(0)).partition(is_own);
        passed.iter().for_each(|job| self.release(job));
        others.into_iter().rev().for_each(|other| self.jobs.push_front(other));
        self.jobs.push_front(job);
    }

    /// Returns the next job for a background thread, if there is room for it.
    pub(super) fn next_claim(&mut self) -> Option<Claim> {
        let waiting = |job: &Job| matches!(job.status, Status::Waiting);
        let at = self.jobs.iter().take(self.limits.depth).position(waiting)?;
        self.claim(at)
    }

    /// Takes a job that waits for reading, if there is room for it.
    pub(super) fn claim(&mut self, at: usize) -> Option<Claim> {
        let job = self.jobs.get_mut(at)?;
        let items = match job.source.items(&job.request) {
            Ok(items) => items,
            Err(error) => {
                job.status = Status::Done(Err(error));
                return None;
            }
        };
        let (mut kept, mut missing) = (Rows::new(), BTreeSet::new());
        for item in items {
            match self.kept.get(&(job.source.id(), item)) {
                Some(row) => drop(kept.insert(item, row.share())),
                None => drop(missing.insert(item)),
            }
        }
        let held = reading_bytes(&job.source, missing.len());
        let used = self.account.queued.saturating_add(self.account.cached);
        if used.saturating_add(held) > self.limits.budget {
            return None;
        }
        (job.status, job.held) = (Status::Reading, held);
        self.account.queued += held;
        self.account.peak = self.account.peak.max(used + held);
        Some(Claim { id: job.id, source: job.source.clone(), kept, missing, held })
    }

    /// Stores what was read for a job; nothing if the job was dropped meanwhile. Rows are kept if the others can still be read.
    pub(super) fn finish(&mut self, claim: Claim, read: Result<Rows>) {
        let Claim { id, source, kept, missing, held } = claim;
        self.account.queued = self.account.queued.saturating_sub(held);
        let bytes = source.item_bytes().saturating_mul(missing.len() as u64);
        let mut own = 0;
        let done = read.map(|mut rows| {
            self.account.read = self.account.read.saturating_add(bytes);
            if self.may_keep(bytes) {
                self.account.cached += bytes;
                let shared = rows.iter().map(|(item, row)| ((source.id(), *item), row.share()));
                self.kept.extend(shared);
            } else {
                own = bytes;
            }
            rows.extend(kept);
            rows
        });
        if let Some(job) = self.jobs.iter_mut().find(|job| job.id == id) {
            job.held = if done.is_ok() { own } else { 0 };
            self.account.queued += job.held;
            job.status = Status::Done(done);
        }
    }

    fn may_keep(&self, bytes: u64) -> bool {
        let reserved = self.largest.saturating_mul(self.limits.workers.max(1) as u64);
        let used = self.account.queued.saturating_add(self.account.cached).saturating_add(bytes);
        self.limits.cache && used.saturating_add(reserved) <= self.limits.budget
    }

    /// Makes room for the first job: the last one that was read ahead waits again, or else nothing is kept any more. Returns
    /// whether that gave any.
    pub(super) fn make_room(&mut self) -> bool {
        let ahead = |job: &&mut Job| job.held > 0 && matches!(job.status, Status::Done(_));
        if let Some(job) = self.jobs.iter_mut().skip(1).rev().find(ahead) {
            job.status = Status::Waiting;
            self.account.queued = self.account.queued.saturating_sub(std::mem::take(&mut job.held));
            return true;
        }
        if self.account.queued > 0 || self.account.cached == 0 {
            return false;
        }
        // Rows that were read ahead share memory with those that are kept.
        self.jobs
            .iter_mut()
            .filter(|job| matches!(job.status, Status::Done(Ok(_))))
            .for_each(|job| job.status = Status::Waiting);
        self.kept.clear();
        self.account.cached = 0;
        true
    }

    /// Returns whether a job of the queue is done.
    pub(super) fn is_done(&self, at: usize) -> bool {
        self.jobs.get(at).is_some_and(|job| matches!(job.status, Status::Done(_)))
    }

    /// Returns whether any thread reads, if no job that is read ahead holds memory.
    pub(super) fn is_reading(&self) -> bool {
        self.account.queued > 0
    }

    /// Error for a request that never fits.
    pub(super) fn too_large(&self, job: &Job) -> Error {
        let items = job.source.items(&job.request).map_or(0, |items| items.len());
        let needed = HostMemory::new(reading_bytes(&job.source, items)).rounded_up();
        Error::Config(format!(
            "reading {} samples of {} steps takes {needed} of host memory on this rank, but data.host_memory is {}; \
             --set data.host_memory={needed}, or read fewer at a time (train.batch_size)",
            job.request.samples.len(),
            job.request.steps,
            HostMemory::new(self.limits.budget)
        ))
    }
}
