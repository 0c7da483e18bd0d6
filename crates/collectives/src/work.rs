//! Operations under way.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use crate::error::Result;
use crate::group::Call;

/// A collective that has begun: its result is there once it has been waited for.
///
/// The buffers are held until then. Backends move when they are polled: polling works that are under way from time to
/// time lets communication overlap with computation. Dropped unfinished, the result is lost, and so is the memory that
/// the backend may still write to.
#[must_use = "a collective ends when it is waited for"]
pub struct Work<T> {
    call: Call,
    state: State<T>,
}

enum State<T> {
    Running(Pin<Box<dyn Future<Output = Result<T>> + Send>>),
    Done(Result<T>),
}

impl<T> Work<T> {
    /// Begins: runs `future` up to its first wait.
    pub(crate) fn start(call: Call, future: impl Future<Output = Result<T>> + Send + 'static) -> Self {
        let state = match call.check_alive() {
            Ok(()) => State::Running(Box::pin(future)),
            Err(error) => State::Done(Err(error)),
        };
        let mut work = Self { call, state };
        work.advance();
        work
    }

    /// Whether it is done; moves it on. Does not wait.
    ///
    /// # Errors
    ///
    /// Where it has failed; [`Work::wait`] gives the same error.
    pub fn poll(&mut self) -> Result<bool> {
        if !self.advance() {
            self.look_around(Instant::now());
        }
        match &self.state {
            State::Running(_) => Ok(false),
            State::Done(Ok(_)) => Ok(true),
            State::Done(Err(error)) => Err(error.clone()),
        }
    }

    /// Waits for the result.
    ///
    /// # Errors
    ///
    /// A rank that refused its part, a transport that failed, or the deadline.
    pub fn wait(mut self) -> Result<T> {
        let span = tracing::trace_span!(
            "collective",
            operation = self.call.operation,
            group = self.call.group().name(),
            sequence = self.call.site().sequence
        );
        let _entered = span.enter();
        // The deadline bounds a wait; what a caller does between start and wait is its own affair.
        let since = Instant::now();
        let mut polls = 0_u32;
        while !self.advance() {
            polls = polls.wrapping_add(1);
            if polls % 16 == 0 {
                self.look_around(since);
            }
            self.call.backend().idle();
        }
        match self.state {
            State::Done(result) => result,
            State::Running(_) => Err(self.call.broken("the operation stopped before its end".into())),
        }
    }

    /// The same work, its result put through `f`.
    pub(crate) fn map<U>(self, f: impl FnOnce(T) -> Result<U> + Send + 'static) -> Work<U>
    where
        T: Send + 'static,
        U: 'static,
    {
        let Self { call, state } = self;
        Work::start(call, async move {
            let result = match state {
                State::Running(future) => future.await,
                State::Done(result) => result,
            };
            f(result?)
        })
    }

    /// The same, ending only when `first` has ended too.
    pub(crate) fn after(self, first: impl Future<Output = Result<()>> + Send + 'static) -> Self
    where
        T: Send + 'static,
    {
        let Self { call, state } = self;
        Self::start(call, async move {
            first.await?;
            match state {
                State::Running(future) => future.await,
                State::Done(result) => result,
            }
        })
    }

    /// Moves on; says whether it is done.
    fn advance(&mut self) -> bool {
        if let State::Running(future) = &mut self.state {
            match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(result) => self.state = State::Done(result),
                Poll::Pending => return false,
            }
        }
        true
    }

    /// Ends the wait where another rank has refused or the deadline has passed.
    fn look_around(&mut self, since: Instant) {
        let State::Running(_) = self.state else { return };
        let waited = since.elapsed();
        if let Some(error) = self.call.notice() {
            self.state = State::Done(Err(error));
        } else if waited > self.call.group().deadline() {
            self.state = State::Done(Err(self.call.late(waited)));
        }
    }
}

impl<T> std::fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = match self.state {
            State::Running(_) => "under way",
            State::Done(_) => "done",
        };
        write!(f, "{} ({state})", self.call.site())
    }
}
