//! Progress of a run: a bar on a terminal, lines of the log elsewhere.
//!
//! It shows values that the trainer gives, and does not communicate.

mod bar;
mod meter;
mod pace;
mod record;
mod watch;

use std::time::Instant;

use indicatif::HumanDuration;
use isobar_collectives::flight::Phase;
use isobar_manager::launch::draws_progress;

pub use self::bar::Bar;
use self::meter::Meter;
use self::pace::LONGEST;
pub use self::record::ProgressRecord;
use self::record::{Records, write};
use self::watch::Watch;
use crate::variables::significant;

/// Display of a run's progress by rank 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ProgressMode {
    /// A bar where standard error is a terminal or `isobar launch` draws it, else lines.
    #[default]
    Auto,
    /// A bar, also where standard error is no terminal: for launchers that pass on what a terminal needs.
    Bar,
    /// Lines of the log: after every tenth of an epoch, two seconds apart at least, and every 30 seconds, also during a step
    /// that takes longer.
    Lines,
    /// A line of the log at the end of each epoch.
    Off,
}

/// Number of steps of a run.
#[derive(Debug, Clone, Copy)]
pub struct ProgressPlan {
    /// Passes over the samples.
    pub epochs: u64,
    /// Steps of one of them.
    pub steps_per_epoch: u64,
    /// Steps of the whole run, where it ends before its last epoch does.
    pub max_steps: Option<u64>,
    /// Steps that an earlier run has taken.
    pub done: u64,
}

impl ProgressPlan {
    fn total(&self) -> u64 {
        let all = self.epochs.saturating_mul(self.steps_per_epoch);
        self.max_steps.map_or(all, |most| most.min(all)).max(self.done)
    }
}

/// Shows on rank 0 how far a run has come: epoch, step, loss, learning rate, samples a second and time left.
///
/// ```
/// use isobar_train::{Progress, ProgressMode, ProgressPlan};
///
/// let plan = ProgressPlan { epochs: 2, steps_per_epoch: 5, max_steps: None, done: 0 };
/// let mut progress = Progress::new(ProgressMode::Auto, 0, plan);
/// progress.step(0, 0.25, 1e-3, 32);
/// progress.epoch_end(0, "loss 0.25");
/// progress.finish();
/// ```
#[derive(Debug)]
pub struct Progress {
    shown: Shown,
    rank: usize,
    plan: ProgressPlan,
    done: u64,
    meter: Meter,
    began: Instant,
}

/// Target of the display.
#[derive(Debug)]
enum Shown {
    Bar(Bar),
    /// Records for the launcher, which draws them.
    Records(Records),
    Lines(Watch),
    Epochs,
}

impl Progress {
    /// Progress of a run, which rank 0 shows.
    pub fn new(mode: ProgressMode, rank: usize, plan: ProgressPlan) -> Self {
        let lines = || Shown::Lines(Watch::start(plan, LONGEST));
        let shown = match mode {
            _ if rank != 0 => Shown::Epochs,
            ProgressMode::Off => Shown::Epochs,
            ProgressMode::Lines => lines(),
            _ if draws_progress() => Shown::Records(Records::default()),
            ProgressMode::Auto => Bar::on_terminal().map_or_else(lines, Shown::Bar),
            ProgressMode::Bar => Bar::on_terminal().or_else(Bar::forced).map_or_else(lines, Shown::Bar),
        };
        Self { shown, rank, plan, done: plan.done, meter: Meter::new(), began: Instant::now() }
    }

    /// Records a step in `epoch`, from 0, of `samples` samples over all ranks.
    pub fn step(&mut self, epoch: u64, loss: f64, lr: f64, samples: u64) {
        self.meter.add(samples);
        self.done += 1;
        let (done, total) = (self.done, self.plan.total());
        let text = || {
            let left = self.meter.left(total.saturating_sub(done));
            let rate = self.meter.rate();
            format!("loss {}  lr {lr:.1e}  {rate:.0} samples/s  {left} left", significant(loss))
        };
        let epoch = format!("epoch {}/{}", epoch + 1, self.plan.epochs);
        match &mut self.shown {
            Shown::Bar(bar) => bar.set(done, total, format!("{epoch}  {}", text())),
            Shown::Records(records) => records.set(done, total, || format!("{epoch}  {}", text())),
            Shown::Lines(watch) => {
                if watch.stepped(done) {
                    tracing::info!("{epoch}  step {done}/{total}  {}", text());
                }
            }
            Shown::Epochs => {}
        }
    }

    /// Records that `done` of `total` samples of this rank are validated.
    pub fn validation(&mut self, done: usize, total: usize) {
        if let Shown::Lines(watch) = &mut self.shown
            && watch.validated()
        {
            tracing::info!("validation: {done} of {total} samples");
        }
    }

    /// Records the phase that a run enters, which is named if it takes long.
    pub fn phase(&self, phase: Phase) {
        if let Shown::Lines(watch) = &self.shown {
            watch.entered(phase);
        }
    }

    /// Samples a second over about the last ten seconds.
    pub fn rate(&self) -> f64 {
        self.meter.rate()
    }

    /// Records the end of an epoch, from 0; `summary` is printed above the bar, or logged.
    pub fn epoch_end(&mut self, epoch: u64, summary: &str) {
        if self.rank != 0 {
            return;
        }
        let rate = self.meter.rate();
        let line = format!("epoch {}/{}  {summary}  {rate:.0} samples/s", epoch + 1, self.plan.epochs);
        match &mut self.shown {
            Shown::Bar(bar) => bar.println(&line),
            Shown::Records(_) => write(&format!("{line}\n")),
            Shown::Lines(watch) => {
                watch.spoken();
                tracing::info!("{line}");
            }
            Shown::Epochs => tracing::info!("{line}"),
        }
        // Work between epochs (validation, a checkpoint) does not count towards the speed.
        self.meter.pause();
    }

    /// Removes the bar.
    pub fn finish(&mut self) {
        match std::mem::replace(&mut self.shown, Shown::Epochs) {
            Shown::Bar(bar) => drop(bar.clear()),
            Shown::Records(records) => records.finish(),
            Shown::Lines(_) | Shown::Epochs => return,
        }
        tracing::info!("trained for {}", HumanDuration(self.began.elapsed()));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use indicatif::{ProgressDrawTarget, TermLike};

    use super::*;

    /// A terminal that keeps what is written to it.
    #[derive(Debug, Clone, Default)]
    struct Paper(Arc<Mutex<String>>);

    impl Paper {
        fn text(&self) -> String {
            self.0.lock().unwrap().clone()
        }
    }

    impl TermLike for Paper {
        fn width(&self) -> u16 {
            120
        }

        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }

        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_terminal_sees_steps_loss_speed_and_time_left() {
        let paper = Paper::default();
        let target = ProgressDrawTarget::term_like(Box::new(paper.clone()));
        let plan = ProgressPlan { epochs: 2, steps_per_epoch: 5, max_steps: None, done: 5 };
        let mut progress = Progress::new(ProgressMode::Off, 0, plan);
        progress.shown = Shown::Bar(Bar::on(target).unwrap());
        std::thread::sleep(Duration::from_millis(5));
        progress.step(1, 0.25, 2.1e-3, 32);
        assert!(progress.rate() > 0.0 && progress.rate() < 32.0 / 0.005, "{}", progress.rate());
        progress.epoch_end(1, "loss 0.2500");
        let text = paper.text();
        for part in ["6/10", "epoch 2/2  loss 0.2500  lr 2.1e-3  ", " samples/s", " left"] {
            assert!(text.contains(part), "no {part:?} in {text:?}");
        }
    }

    #[test]
    fn a_run_that_ends_early_has_fewer_steps() {
        let plan = ProgressPlan { epochs: 2, steps_per_epoch: 5, max_steps: Some(7), done: 0 };
        assert_eq!(plan.total(), 7);
        assert_eq!(ProgressPlan { done: 10, ..plan }.total(), 10);
    }
}
