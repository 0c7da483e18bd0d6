//! Saves two checkpoints: `saver FOLDER`, the second under the eyes of the process that started it, or, as a rank of several,
//! `saver FOLDER sync|async`.
//!
//! Alone it stops itself before and after the second save, traced, so that the tracer can end it between any two system calls.
//! Ends with 77 where it may not be traced.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use isobar_collectives::Group;
use isobar_manager::DistributedManager;
use isobar_manager::config::DistributedConfig;
use isobar_train::Parameter;
use isobar_train::Parameters;
use isobar_train::checkpoint::{Checkpoints, Contents, Keep, RunState};
use isobar_train::optim::{Optimizer, Sgd, SgdConfig};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, raise};
use tch::{Device, Kind, Tensor};

fn main() -> Result<ExitCode> {
    let folder = PathBuf::from(std::env::args().nth(1).context("usage: saver FOLDER [MODE]")?);
    let keep = Keep { newest: 1, best: 0 };
    if let Some(mode) = std::env::args().nth(2) {
        let config = DistributedConfig { timeout_s: 60.0, ..Default::default() };
        let world = DistributedManager::initialize_with(&config)?.group(None)?;
        let mut checkpoints = Checkpoints::new(&folder, keep, &world);
        save(&mut checkpoints, 1, false)?;
        save(&mut checkpoints, 2, mode == "async")?;
        checkpoints.finish()?;
        DistributedManager::cleanup(true)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut checkpoints = Checkpoints::new(&folder, keep, &Group::single());
    save(&mut checkpoints, 1, false)?;
    if ptrace::traceme().is_err() {
        return Ok(ExitCode::from(77));
    }
    raise(Signal::SIGSTOP)?;
    save(&mut checkpoints, 2, false)?;
    raise(Signal::SIGSTOP)?;
    Ok(ExitCode::SUCCESS)
}

/// A checkpoint whose values are all the number of its step.
fn save(checkpoints: &mut Checkpoints, step: u64, background: bool) -> Result<()> {
    let options = (Kind::Float, Device::Cpu);
    let weight = Tensor::f_full([300, 500], step as f64, options)?.f_set_requires_grad(true)?;
    let bias = Tensor::f_full([7], step as f64, options)?.f_set_requires_grad(true)?;
    let params = Parameters::new(vec![
        Parameter::replicated("weight", &weight),
        Parameter::replicated("bias", &bias),
    ])?;
    let mut sgd = Sgd::new(&params, &SgdConfig { momentum: 0.9, ..Default::default() })?;
    let mut state = sgd.state();
    for tensor in &mut state.tensors {
        tensor.tensor = tensor.tensor.f_full_like(step as f64)?;
    }
    state.steps.values_mut().for_each(|taken| *taken = step);
    sgd.load_state(&state)?;
    let contents = Contents { params: &params, buffers: &[], optimizer: Some(&mut sgd) };
    let state = RunState { step, ..Default::default() };
    match background {
        true => checkpoints.save_in_background(&contents, &state)?,
        false => checkpoints.save(&contents, &state)?,
    };
    Ok(())
}
