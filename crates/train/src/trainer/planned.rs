//! Memory and traffic of a training step, from steps on tensors with or without values.

use isobar_collectives::flight::Phase;
use isobar_collectives::{Group, Traffic};
use isobar_data::Sampler;
use isobar_torch::{memory, meta};
use tch::{Device, Tensor};

use super::FitConfig;
use super::passes::Passes;
use crate::clip::unscale_and_clip;
use crate::error::{Error, Result};
use crate::optim::{Averaged, Optimizer};
use crate::parallel::Parallel;
use crate::params::Parameters;
use crate::ranks::Ranks;
use crate::task::Task;

/// Memory and traffic of a training step on this rank, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Samples of the step, over all ranks.
    pub batch: usize,
    /// Parameters and buffers.
    pub parameters: u64,
    /// Samples that are kept in memory, and everything else that was there before.
    pub samples: u64,
    /// Gradients.
    pub gradients: u64,
    /// State of the optimizer, and averages of parameters.
    pub optimizer: u64,
    /// Peak memory during the forward pass, everything included.
    pub forward: u64,
    /// Peak memory during the backward pass, everything included.
    pub backward: u64,
    /// Peak memory during the optimizer step, everything included.
    pub update: u64,
    /// Collectives and messages of a step, and the bytes that this rank sends and receives.
    pub traffic: Traffic,
}

impl StepPlan {
    /// Returns the peak memory.
    pub fn peak(&self) -> u64 {
        self.forward.max(self.backward).max(self.update)
    }

    /// The peak of `phase`, if it has one of its own.
    fn peak_of(&mut self, phase: Phase) -> Option<&mut u64> {
        match phase {
            Phase::Forward => Some(&mut self.forward),
            Phase::Backward => Some(&mut self.backward),
            Phase::Optimizer => Some(&mut self.update),
            _ => None,
        }
    }
}

/// Runs two training steps on the first batch as [`fit`](crate::fit) does, and returns the peak memory over both, and the traffic
/// of the second. It writes nothing, validates nothing, and leaves out what `fit` tells the other ranks about a step (its loss,
/// requests for checkpoints).
///
/// With parameters and samples on the [meta device](meta), nothing is computed or sent, and memory is that of this thread's meta
/// tensors; workspaces of kernels and communication libraries are not counted. On the CPU it is what the
/// [caching allocator](memory::install_caching_allocator) counts for the whole process. All ranks call.
///
/// # Errors
///
/// Those of [`fit`](crate::fit) before its first step, on the meta device an operator that needs the values of its inputs, and
/// parameters on another device, whose memory nobody counts.
pub fn plan_step(
    task: &impl Task,
    params: &Parameters,
    buffers: &[(String, Tensor)],
    ranks: &Ranks,
    config: &FitConfig,
) -> Result<StepPlan> {
    let planned = steps(task, params, buffers, ranks, config);
    if let Err(error) = &planned
        && !error.is_shared()
    {
        ranks.world.leave(&error.to_string());
    }
    planned
}

fn steps(
    task: &impl Task,
    params: &Parameters,
    buffers: &[(String, Tensor)],
    ranks: &Ranks,
    config: &FitConfig,
) -> Result<StepPlan> {
    config.check()?;
    let train = &config.train;
    let meter = Meter::of(params)?;
    let size = |tensor: &Tensor| memory::nbytes(tensor) as u64;
    let buffer_bytes: u64 = buffers.iter().map(|(_, buffer)| size(buffer)).sum();
    let bytes =
        |params: &Parameters| params.iter().map(|param| size(&param.tensor)).sum::<u64>() + buffer_bytes;
    let mut plan = StepPlan { samples: (meter.live)().saturating_sub(bytes(params)), ..StepPlan::default() };
    let parallel = Parallel::new(params, buffers, (ranks, task.mesh()), &config.data_parallel)?;
    let params = parallel.parameters().clone();
    plan.parameters = bytes(&params);
    let before = (meter.live)();
    let mut optimizer = Averaged::new(config.optimizer.build(&params)?, &params, &train.averages())?;
    plan.optimizer = (meter.live)().saturating_sub(before);
    let sampler = Sampler::new(task.train_samples(), train.batch_size, config.seed, true);
    let sampler = sampler
        .map_err(|source| Error::Task { context: "preparing the order of samples", source: source.into() })?;
    let batch = sampler.epoch(0).into_iter().next().unwrap_or_default();
    plan.batch = batch.len();
    let device = params.iter().next().map_or(Device::Cpu, |param| param.tensor.device());
    let precision = || match device == meta::DEVICE {
        true => Ok(None),
        false => Ok(train.precision.enter(device)?),
    };
    for step in 0..2 {
        let before = ranks.world.traffic();
        let mut peaks = Peaks { plan: &mut plan, meter, phase: Phase::Start };
        let passes = Passes { task, ranks, train, parallel: &parallel, seed: config.seed, step };
        drop(passes.run((0, &batch), 1.0, precision, |phase| peaks.enter(phase))?);
        peaks.enter(Phase::Optimizer);
        unscale_and_clip(&params, 1.0, train.clip_norm)?;
        optimizer.set_run_step(step);
        optimizer.step(config.optimizer.lr())?;
        peaks.enter(Phase::Start);
        plan.traffic = since(&ranks.world, before);
    }
    plan.gradients = params.iter().filter_map(|param| param.grad()).map(|grad| size(&grad)).sum();
    Ok(plan)
}

/// Memory of the tensors of a device, in bytes.
#[derive(Clone, Copy)]
struct Meter {
    live: fn() -> u64,
    peak: fn() -> u64,
    reset_peak: fn(),
}

impl Meter {
    /// The meter of the device of the parameters.
    fn of(params: &Parameters) -> Result<Self> {
        match params.iter().next().map_or(Device::Cpu, |param| param.tensor.device()) {
            Device::Cpu => Ok(Self {
                live: memory::live_bytes,
                peak: memory::peak_bytes,
                reset_peak: memory::reset_peak,
            }),
            meta::DEVICE => {
                Ok(Self { live: meta::live_bytes, peak: meta::peak_bytes, reset_peak: meta::reset_peak })
            }
            other => Err(Error::invalid(
                "the device of the parameters of a planned step",
                format!("{other:?}"),
                "the CPU or the meta device (`isobar_torch::meta::DEVICE`)",
            )),
        }
    }
}

/// Measures the memory of each phase.
struct Peaks<'a> {
    plan: &'a mut StepPlan,
    meter: Meter,
    phase: Phase,
}

impl Peaks<'_> {
    fn enter(&mut self, phase: Phase) {
        if let Some(peak) = self.plan.peak_of(self.phase) {
            *peak = (self.meter.peak)().max(*peak);
        }
        (self.meter.reset_peak)();
        self.phase = phase;
    }
}

/// Returns the traffic of this rank since `before`.
fn since(world: &Group, before: Traffic) -> Traffic {
    let Traffic { operations, sent, received } = world.traffic();
    Traffic {
        operations: operations - before.operations,
        sent: sent - before.sent,
        received: received - before.received,
    }
}
