//! Operations under way.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::engine::call::Call;
use crate::engine::outstanding::{Advance, lock};
use crate::error::Result;

/// Length of a wait after which a rank polls seldom, and leaves its processor to others.
const LONG: Duration = Duration::from_millis(50);

/// A collective that has begun: its result is there once it has been waited for.
///
/// The buffers are held until then. Backends move when they are polled: polling works that are under way from time to
/// time lets communication overlap with computation. A wait moves all works of the process that are under way, so that
/// ranks may wait for theirs in different orders. Of a work that is dropped unfinished only the result is lost: it goes
/// on for the sake of the other ranks when works are waited for.
#[must_use = "a collective ends when it is waited for"]
pub struct Work<T> {
    call: Call,
    state: Arc<Mutex<State<T>>>,
    /// A second handle of the state, which completes it if the work is dropped.
    _rest: Rest,
}

enum State<T> {
    Running(Pin<Box<dyn Future<Output = Result<T>> + Send>>),
    Done(Result<T>),
    Taken,
}

struct Rest {
    call: Call,
    work: Arc<Mutex<dyn Advance>>,
}

impl Drop for Rest {
    fn drop(&mut self) {
        if !lock(&self.work).is_done() && self.call.check_alive().is_ok() {
            let (call, work) = (self.call.clone(), self.work.clone());
            // Work that the others have not joined does not end.
            self.call.outstanding().adopt(Box::new(move || {
                lock(&work).advance() || call.check_alive().is_err() || call.notice().is_some()
            }));
        }
    }
}

impl<T: Send + 'static> Work<T> {
    /// Begins: runs `future` up to its first wait.
    pub(crate) fn start(call: Call, future: impl Future<Output = Result<T>> + Send + 'static) -> Self {
        let mut state = match call.check_alive() {
            Ok(()) => {
                let call = call.clone();
                call.recorded.started();
                State::Running(Box::pin(async move {
                    let result = future.await;
                    call.ended(result.as_ref().err());
                    result
                }))
            }
            Err(error) => State::Done(Err(error)),
        };
        let done = state.advance();
        let state = Arc::new(Mutex::new(state));
        let work: Arc<Mutex<dyn Advance>> = state.clone();
        if !done {
            call.outstanding().add(&work);
        }
        Self { call: call.clone(), state, _rest: Rest { call, work } }
    }

    /// Makes progress and returns whether the work is done. Does not wait.
    ///
    /// # Errors
    ///
    /// The work has failed; [`Work::wait`] returns the same error.
    pub fn poll(&mut self) -> Result<bool> {
        if !lock(&self.state).advance() {
            self.look_around(Instant::now());
        }
        match &*lock(&self.state) {
            State::Running(_) => Ok(false),
            State::Done(Err(error)) => Err(error.clone()),
            State::Done(Ok(_)) | State::Taken => Ok(true),
        }
    }

    /// Waits for the result.
    ///
    /// # Errors
    ///
    /// A rank that refused its part, a transport that failed, or the deadline.
    pub fn wait(self) -> Result<T> {
        let span = tracing::debug_span!(
            "collective",
            operation = self.call.operation,
            group = self.call.group().name(),
            sequence = self.call.site().sequence
        );
        let _entered = span.enter();
        // The deadline bounds a wait; what a caller does between start and wait is its own affair.
        let since = Instant::now();
        let mut round = 0_u32;
        let mut waited = Duration::ZERO;
        let mut recorded = false;
        loop {
            if let Poll::Ready(result) = self.take() {
                self.call.group().flight().has_waited(since.elapsed());
                return result;
            }
            round = round.wrapping_add(1);
            if round.is_multiple_of(16) {
                self.look_around(since);
                waited = since.elapsed();
                recorded = recorded || self.call.recorded.waiting(waited);
            }
            self.call.outstanding().advance();
            match pause(waited) {
                Some(pause) => thread::sleep(pause),
                None => self.call.backend().idle(round),
            }
        }
    }

    /// Applies `f` to the result of the work.
    pub(crate) fn map<U: Send + 'static>(self, f: impl FnOnce(T) -> Result<U> + Send + 'static) -> Work<U> {
        Work::start(self.call.clone(), async move { f(self.result().await?) })
    }

    /// Returns the work, ending only when `first` has ended too.
    pub(crate) fn after(self, first: impl Future<Output = Result<()>> + Send + 'static) -> Self {
        Self::start(self.call.clone(), async move {
            first.await?;
            self.result().await
        })
    }

    async fn result(self) -> Result<T> {
        poll_fn(|_| self.take()).await
    }

    /// Moves on, and gives the result where there is one.
    fn take(&self) -> Poll<Result<T>> {
        let mut state = lock(&self.state);
        if !state.advance() {
            return Poll::Pending;
        }
        match std::mem::replace(&mut *state, State::Taken) {
            State::Done(result) => Poll::Ready(result),
            State::Running(_) | State::Taken => {
                Poll::Ready(Err(self.call.broken("the operation stopped before its end".into())))
            }
        }
    }

    /// Ends the wait where another rank has refused or the deadline has passed.
    fn look_around(&self, since: Instant) {
        let mut state = lock(&self.state);
        let State::Running(_) = *state else { return };
        let waited = since.elapsed();
        if let Some(error) = self.call.notice() {
            *state = State::Done(Err(error));
        } else if waited > self.call.group().deadline() {
            // At this last poll, requests under way add the ranks that they wait for.
            self.call.awaited.ask();
            if !state.advance() {
                *state = State::Done(Err(self.call.late(waited)));
            }
        }
    }
}

impl<T: Send> Advance for State<T> {
    fn advance(&mut self) -> bool {
        if let State::Running(future) = self {
            match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(result) => *self = State::Done(result),
                Poll::Pending => return false,
            }
        }
        true
    }

    fn is_done(&self) -> bool {
        !matches!(self, State::Running(_))
    }
}

impl<T> std::fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = match *lock(&self.state) {
            State::Running(_) => "under way",
            State::Done(_) | State::Taken => "done",
        };
        write!(f, "{} ({state})", self.call.site())
    }
}

/// Returns the pause before the next poll of a wait that has lasted for `waited`; none while it is short, where every
/// microsecond counts. A pause, and the delay that it adds, is a small fraction of the wait.
fn pause(waited: Duration) -> Option<Duration> {
    (waited >= LONG).then(|| (waited / 256).min(Duration::from_millis(1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ReduceOp, all_reduce, threads};

    #[test]
    fn pauses_are_a_small_share_of_long_waits() {
        assert_eq!(pause(LONG - Duration::from_nanos(1)), None);
        for waited in [LONG, 2 * LONG, Duration::from_secs(3)] {
            let pause = pause(waited).unwrap();
            assert!(pause > Duration::ZERO && 200 * pause <= waited && pause <= Duration::from_millis(1));
        }
    }

    /// Time that this thread has had a processor.
    fn busy() -> Duration {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
    }

    #[test]
    fn a_rank_that_waits_for_long_leaves_the_processor() {
        let shares = threads::run(2, Duration::from_secs(60), |group| {
            let x = tch::Tensor::from_slice(&[1.0]);
            if group.rank() == 1 {
                thread::sleep(Duration::from_secs(1));
            }
            let (begun, before) = (Instant::now(), busy());
            let _ = all_reduce(&x, ReduceOp::Sum, &group).unwrap();
            (busy() - before).as_secs_f64() / begun.elapsed().as_secs_f64()
        });
        assert!(shares[0] < 0.5, "{shares:?}");
    }
}
