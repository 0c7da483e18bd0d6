//! Lines of progress without a terminal, also during a step that takes long.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use isobar_collectives::flight::Phase;

use super::ProgressPlan;
use super::pace::Pace;

/// Decides when lines are due, and writes them itself while a step, a validation or a checkpoint takes long. Its thread sends
/// messages to where those of the thread that made it go.
#[derive(Debug)]
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    plan: ProgressPlan,
}

#[derive(Debug)]
struct State {
    pace: Pace,
    done: u64,
    phase: Phase,
    /// Begin of the step, validation or checkpoint under way.
    since: Instant,
    ended: bool,
}

impl Watch {
    /// Starts to watch a run. A line is due after `longest` in any case.
    pub(super) fn start(plan: ProgressPlan, longest: Duration) -> Self {
        let now = Instant::now();
        let pace = Pace::new(now, longest);
        let state = State { pace, done: plan.done, phase: Phase::Start, since: now, ended: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new(), plan });
        let messages = tracing::dispatcher::get_default(Clone::clone);
        let watching = shared.clone();
        let thread = std::thread::Builder::new().name("isobar-progress".to_owned());
        let thread = thread
            .spawn(move || tracing::dispatcher::with_default(&messages, || watching.watch()))
            .inspect_err(|error| tracing::warn!("no progress is shown during long steps: {error}"))
            .ok();
        Self { shared, thread }
    }

    /// Records the end of a step, and returns whether a line about it is due.
    pub(super) fn stepped(&self, done: u64) -> bool {
        let (mut state, now) = (self.shared.state(), Instant::now());
        (state.done, state.since) = (done, now);
        state.pace.due(now, done, self.shared.plan.steps_per_epoch)
    }

    /// Records that a part of a validation is done, and returns whether a line about it is due.
    pub(super) fn validated(&self) -> bool {
        self.shared.state().pace.late(Instant::now())
    }

    /// Records that another line was written.
    pub(super) fn spoken(&self) {
        let (mut state, now) = (self.shared.state(), Instant::now());
        state.since = now;
        state.pace.spoken(now);
    }

    /// Records the phase that a run enters.
    pub(super) fn entered(&self, phase: Phase) {
        let mut state = self.shared.state();
        if is_step(phase) != is_step(state.phase) || !is_step(phase) && phase != state.phase {
            state.since = Instant::now();
        }
        state.phase = phase;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.state().ended = true;
        self.shared.changed.notify_all();
        // It runs no code that can panic.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Returns whether a phase is a part of a step.
fn is_step(phase: Phase) -> bool {
    !matches!(phase, Phase::Start | Phase::Validation | Phase::Checkpoint)
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self) {
        let mut state = self.state();
        while !state.ended {
            let now = Instant::now();
            let left = state.pace.next().saturating_duration_since(now);
            if left.is_zero() {
                state.pace.spoken(now);
                let line = self.line(&state, now);
                // Steps need not wait for whoever reads the line.
                drop(state);
                tracing::info!("{line}");
                state = self.state();
                continue;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn line(&self, state: &State, now: Instant) -> String {
        let steps = self.plan.steps_per_epoch.max(1);
        let step = if is_step(state.phase) { state.done + 1 } else { state.done };
        let epoch = (step.saturating_sub(1) / steps + 1).min(self.plan.epochs.max(1));
        let (what, total) = (state.phase, self.plan.total());
        let seconds = (now - state.since).as_secs_f64().round();
        let at = format!("epoch {epoch}/{}  step {step}/{total}", self.plan.epochs);
        match is_step(what) {
            true => format!("{at} has taken {seconds} s so far ({what})"),
            false => format!("{at}: {what} has taken {seconds} s so far"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// Keeps what is written to it.
    #[derive(Debug, Clone, Default)]
    struct Paper(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Paper {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Paper {
        /// Waits for a line that contains `words`.
        fn expect(&self, words: &str) {
            let began = Instant::now();
            loop {
                let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
                if text.contains(words) {
                    return;
                }
                assert!(began.elapsed() < Duration::from_secs(60), "no {words:?} in {text}");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// Lines are written while nothing ends, to where this thread alone sends its messages.
    #[test]
    fn a_step_that_takes_long_has_lines() {
        let paper = Paper::default();
        let writer = paper.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
        let _messages = tracing::subscriber::set_default(subscriber);
        let plan = ProgressPlan { epochs: 2, steps_per_epoch: 5, max_steps: None, done: 0 };
        let watch = Watch::start(plan, Duration::from_millis(20));
        paper.expect("epoch 1/2  step 0/10: start has taken ");
        watch.entered(Phase::Data);
        watch.entered(Phase::Forward);
        paper.expect("epoch 1/2  step 1/10 has taken ");
        watch.stepped(5);
        watch.entered(Phase::Validation);
        paper.expect("epoch 1/2  step 5/10: validation has taken ");
        watch.entered(Phase::Backward);
        paper.expect("epoch 2/2  step 6/10 has taken ");
        drop(watch);
    }
}
