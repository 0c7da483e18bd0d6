//! What a person sees while a run goes on.

use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar on rank 0's terminal with loss, samples a second and time left. Where there is no terminal it draws nothing,
/// and the end of an epoch is a line of the log.
///
/// ```
/// let mut progress = isobar_train::Progress::new(0, 2, 5, 0);
/// progress.step(0, 0.25, 32);
/// progress.epoch_end(0, "loss 0.25");
/// progress.finish();
/// ```
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    rank: usize,
    epochs: u64,
    meter: Meter,
}

impl Progress {
    /// Progress of a run of `epochs` epochs of `steps_per_epoch` steps, of which `done` steps were taken before.
    pub fn new(rank: usize, epochs: u64, steps_per_epoch: u64, done: u64) -> Self {
        let target = match rank {
            0 => ProgressDrawTarget::stderr_with_hz(4),
            _ => ProgressDrawTarget::hidden(),
        };
        Self::on(target, rank, epochs, steps_per_epoch, done)
    }

    fn on(target: ProgressDrawTarget, rank: usize, epochs: u64, steps_per_epoch: u64, done: u64) -> Self {
        let mut progress = Self { bar: None, rank, epochs, meter: Meter::new() };
        let bar = ProgressBar::with_draw_target(Some(epochs * steps_per_epoch), target);
        if !bar.is_hidden() {
            bar.set_style(style());
            bar.set_position(done);
            // Steps that an earlier run took say nothing of this one's speed.
            bar.reset_eta();
            progress.bar = Some(bar);
        }
        progress
    }

    /// After a step in `epoch`, from 0, of `samples` samples over all ranks.
    pub fn step(&mut self, epoch: u64, loss: f64, samples: u64) {
        self.meter.add(samples);
        if let Some(bar) = &self.bar {
            let rate = self.meter.rate();
            bar.set_message(format!(
                "epoch {}/{}  loss {loss:.4e}  {rate:.0} samples/s",
                epoch + 1,
                self.epochs
            ));
            bar.inc(1);
        }
    }

    /// Samples a second over about the last ten seconds.
    pub fn rate(&self) -> f64 {
        self.meter.rate()
    }

    /// After an epoch, from 0: `summary` is a line above the bar, or of the log.
    pub fn epoch_end(&mut self, epoch: u64, summary: &str) {
        if self.rank != 0 {
            return;
        }
        let rate = self.meter.rate();
        let epochs = self.epochs;
        match &self.bar {
            Some(bar) => bar.println(format!("epoch {}/{epochs}  {summary}  {rate:.0} samples/s", epoch + 1)),
            None => tracing::info!("epoch {}/{epochs}  {summary}  {rate:.0} samples/s", epoch + 1),
        }
        // What comes between epochs (validation, a checkpoint) is no part of the speed.
        self.meter.pause();
    }

    /// Removes the bar.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
            tracing::info!("trained for {}", HumanDuration(bar.elapsed()));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Samples a second, older ones counting less.
#[derive(Debug)]
struct Meter {
    last: Option<Instant>,
    samples: f64,
    seconds: f64,
}

impl Meter {
    fn new() -> Self {
        Self { last: Some(Instant::now()), samples: 0.0, seconds: 0.0 }
    }

    fn add(&mut self, samples: u64) {
        let now = Instant::now();
        let seconds = self.last.map_or(Duration::ZERO, |last| now - last).as_secs_f64();
        if self.last.replace(now).is_none() {
            return; // the time of the first step after a pause is not known
        }
        let keep = (-seconds / 10.0).exp();
        self.samples = self.samples * keep + samples as f64;
        self.seconds = self.seconds * keep + seconds;
    }

    fn rate(&self) -> f64 {
        if self.seconds > 0.0 { self.samples / self.seconds } else { 0.0 }
    }

    fn pause(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use indicatif::TermLike;

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
        let mut progress = Progress::on(target, 0, 2, 5, 5);
        std::thread::sleep(Duration::from_millis(5));
        progress.step(1, 0.25, 32);
        assert!(progress.rate() > 0.0 && progress.rate() < 32.0 / 0.005, "{}", progress.rate());
        progress.epoch_end(1, "loss 2.5000e-1");
        let text = paper.text();
        for part in ["6/10", "epoch 2/2  loss 2.5000e-1", " samples/s", " left"] {
            assert!(text.contains(part), "no {part:?} in {text:?}");
        }
    }

    #[test]
    fn the_time_between_epochs_does_not_count() {
        let mut meter = Meter::new();
        std::thread::sleep(Duration::from_millis(5));
        meter.add(8);
        let rate = meter.rate();
        meter.pause();
        std::thread::sleep(Duration::from_millis(50));
        meter.add(8);
        assert_eq!(meter.rate(), rate);
    }
}
