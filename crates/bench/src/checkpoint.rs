//! For how long a checkpoint keeps training waiting: one that is written before training goes on, and one in the background.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use isobar_collectives::{Group, balanced};
use isobar_train::checkpoint::{CheckpointSelector, Checkpoints, Contents, Keep, RunState};
use isobar_train::optim::{AdamW, AdamWConfig};
use isobar_train::{Parameter, Parameters};
use tch::{Device, Kind, Tensor};

use super::{Prepared, Timed};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
const TENSORS: i64 = 16;
/// 16 tensors of 4 MiB, and AdamW's two of each: 192 MiB.
const SHAPE: [i64; 2] = [1024, 1024];

/// Mode of writing: synchronous, or in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Sync,
    Async,
}

/// Saves a model that is split over all ranks, with its optimizer, into a folder for temporary files.
pub(crate) fn save(group: &Group, mode: Mode) -> Result<Prepared> {
    let sizes = balanced(SHAPE[0], group.size());
    let start: i64 = sizes[..group.rank()].iter().sum();
    tch::manual_seed(0);
    let parameter = |index: i64| -> Result<Parameter> {
        let part = Tensor::f_randn(SHAPE, FLOAT)?.f_narrow(0, start, sizes[group.rank()])?;
        let part = part.f_detach_copy()?.f_set_requires_grad(true)?;
        Ok(Parameter::sharded(format!("weight.{index}"), &part, 0, sizes.clone()))
    };
    let params = Parameters::over((0..TENSORS).map(parameter).collect::<Result<_>>()?, group)?;
    let mut optimizer = AdamW::new(&params, &AdamWConfig::default())?;

    let own = tempfile::tempdir()?;
    let path = group.broadcast_bytes(own.path().as_os_str().as_encoded_bytes(), 0)?;
    let folder = PathBuf::from(String::from_utf8(path)?);
    let mut checkpoints = Checkpoints::new(&folder, Keep { newest: 1, best: 0 }, group);
    let mut step = 0;
    let mut measure = move || {
        // The folder lives as long as what is measured.
        let _ = own.path();
        step += 1;
        let contents = Contents { params: &params, buffers: &[], optimizer: Some(&mut optimizer) };
        let state = RunState { step, ..Default::default() };
        let began = Instant::now();
        match mode {
            Mode::Sync => checkpoints.save(&contents, &state)?,
            Mode::Async => checkpoints.save_in_background(&contents, &state)?,
        };
        let seconds = began.elapsed().as_secs_f64();
        checkpoints.finish()?;
        if step == 1 {
            check(&checkpoints, &params)?;
        }
        Ok(seconds)
    };
    measure()?;
    Ok(Prepared { timed: Timed::Measured(Box::new(measure)), output: None })
}

/// Checks that the loaded values are the saved ones.
fn check(checkpoints: &Checkpoints, params: &Parameters) -> Result<()> {
    let saved: Vec<Tensor> =
        params.iter().map(|p| p.tensor.f_detach_copy()).collect::<Result<_, tch::TchError>>()?;
    let mut contents = Contents { params, buffers: &[], optimizer: None };
    {
        let _guard = isobar_torch::guard::NoGrad::new();
        for param in params {
            let _ = param.tensor.shallow_clone().f_zero_()?;
        }
    }
    checkpoints.load(&CheckpointSelector::Newest, &mut contents)?;
    let same = params.iter().zip(&saved).all(|(param, saved)| param.tensor == *saved);
    ensure!(same, "a checkpoint gave back other values than were saved");
    Ok(())
}
