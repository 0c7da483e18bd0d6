//! Solves samples on several threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;

use tch::{Kind, Tensor};

use super::make::Plan;
use super::solver::Solver;
use crate::{Error, Result};

impl Plan {
    /// Solves all samples on some threads, and hands each frame `[channel, x, …]` of each sample to `consume` on this one.
    pub(super) fn solve(
        &self,
        threads: usize,
        mut consume: impl FnMut(usize, usize, Tensor) -> Result<()>,
    ) -> Result<()> {
        let batches = (self.samples as u64).div_ceil(self.together as u64);
        let next = AtomicU64::new(0);
        // Bounded, so that the threads do not run far ahead of a slow disk.
        let (sender, receiver) = mpsc::sync_channel(threads);
        std::thread::scope(|scope| {
            for _ in 0..threads.min(batches as usize) {
                let (sender, next) = (sender.clone(), &next);
                scope.spawn(move || {
                    // Nobody listens any more once consuming has failed.
                    let gone = || Error::Invalid("no more frames are taken".to_owned());
                    let solver = match self.solver() {
                        Ok(solver) => solver,
                        Err(error) => {
                            let _ = sender.send(Err(error));
                            return;
                        }
                    };
                    loop {
                        let batch = next.fetch_add(1, Ordering::Relaxed);
                        if batch >= batches {
                            break;
                        }
                        let send = |frame| sender.send(Ok(frame)).map_err(|_| gone());
                        if let Err(error) = self.solve_batch(&solver, batch as usize, send) {
                            let _ = sender.send(Err(error));
                            break;
                        }
                    }
                });
            }
            drop(sender);
            for frame in receiver {
                let (first, frame, states): (usize, usize, Tensor) = frame?;
                for (at, sample) in (first..self.samples.min(first + self.together)).enumerate() {
                    consume(sample, frame, states.f_select(0, at as i64)?)?;
                }
            }
            Ok(())
        })
    }

    /// Solves samples together; also the last ones are as many as the others, of which some are not taken.
    fn solve_batch(
        &self,
        solver: &Solver,
        batch: usize,
        send: impl Fn((usize, usize, Tensor)) -> Result<()>,
    ) -> Result<()> {
        let first = batch * self.together;
        let draws = self.system.draws(self.domain.dims);
        let start = |sample: usize| -> Result<Tensor> {
            self.system.start(self.initial.draw(&self.domain, draws, self.seed, sample as u64)?)
        };
        let states = (first..first + self.together).map(start).collect::<Result<Vec<_>>>()?;
        let spectrum = solver.spectrum();
        let mut hat = spectrum.forward(&Tensor::f_stack(&states, 0)?)?;
        for frame in 0..self.warm_up + self.frames {
            if frame > 0 {
                for _ in 0..self.substeps {
                    hat = solver.step(&hat)?;
                }
            }
            let states = spectrum.inverse(&hat)?.f_to_kind(Kind::Float)?;
            self.check_finite(&states, first, frame)?;
            if let Some(stored) = frame.checked_sub(self.warm_up) {
                send((first, stored, states))?;
            }
        }
        Ok(())
    }

    fn check_finite(&self, states: &Tensor, first: usize, frame: usize) -> Result<()> {
        let finite = states.f_isfinite()?.f_flatten(1, -1)?.f_all_dim(1, false)?;
        let finite = Vec::<bool>::try_from(&finite)?;
        match finite.iter().position(|finite| !finite).map(|at| first + at).filter(|&at| at < self.samples) {
            None => Ok(()),
            Some(sample) => Err(Error::Invalid(format!(
                "the solution of sample {sample} is not finite at time {} after its initial state ({} time steps of {}): the time \
                 step is too long for these settings; --set substeps={}",
                frame as f64 * self.dt,
                frame * self.substeps,
                self.dt / self.substeps as f64,
                self.substeps.saturating_mul(4)
            ))),
        }
    }

    fn solver(&self) -> Result<Solver> {
        Solver::new(&self.system, self.domain, self.dt / self.substeps as f64, self.order)
    }
}
