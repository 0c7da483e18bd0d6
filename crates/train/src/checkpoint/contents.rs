//! Contents of a checkpoint: parameters, buffers and optimizer state, as boxes of global tensors.

use std::collections::BTreeMap;
use std::ops::Range;

use isobar_array::Window;
use isobar_shard::ComputedBuffer;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::manifest::Manifest;
use super::read::{CheckpointIndex, ReadRequest, SavedShards};
use super::tensor_shard::{Region, TensorShard, placed};
use crate::error::{Context, Error, Result};
use crate::optim::{
    AverageRule, AverageState, Optimizer, OptimizerState, StateTensor, average_slot, continued,
};
use crate::params::{ParamPlacement, Parameters};

/// State that a checkpoint saves and restores: boxes of global tensors, and facts.
///
/// [`Contents`] is that of a run of [`fit`](crate::fit). A program whose tensors are laid out in another way implements it
/// itself: a rank may hold any number of boxes of a tensor, and several ranks the same ones, as long as all together hold
/// every element. Which boxes a rank wants of a checkpoint has nothing to do with those that were saved.
pub trait Checkpointed {
    /// The boxes that this rank holds. Boxes of one tensor may not overlap unless they are the same.
    ///
    /// # Errors
    ///
    /// A tensor that cannot be read.
    fn shards(&self) -> Result<Vec<TensorShard>>;

    /// Returns other state, the same on all ranks.
    ///
    /// # Errors
    ///
    /// The state has no form in JSON.
    fn facts(&self) -> Result<serde_json::Value>;

    /// The boxes that this rank wants of a checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::CheckpointUnfit`] for a checkpoint of something else.
    fn wanted(&self, saved: &CheckpointIndex) -> Result<Vec<ReadRequest>>;

    /// Restores the state from the wanted boxes, which `saved` reads on request. All ranks have verified the bytes of theirs before.
    ///
    /// # Errors
    ///
    /// [`Error::CheckpointUnfit`] or [`Error::OptimizerState`] if `facts` do not fit this state, which is then unchanged. A file
    /// that can no longer be read: the state is then neither the old nor the saved one.
    fn restore(&mut self, facts: Option<&serde_json::Value>, saved: &SavedShards<'_>) -> Result<()>;
}

/// State that a run saves and restores: the run's own objects. A file of weights must hold the parameters and buffers and
/// nothing else, except the counts `num_batches_tracked` of PyTorch's batch norms, which are ignored. Without an optimizer,
/// weights are converted between single and double precision.
pub struct Contents<'a> {
    /// The parameters.
    pub params: &'a Parameters,
    /// Tensors that are no parameters but belong to the state dict (running statistics), by name; the same on all ranks.
    pub buffers: &'a [(String, Tensor)],
    /// The optimizer; without it parameters and buffers alone are restored, as for a prediction: the averages of parameters
    /// where there are any.
    pub optimizer: Option<&'a mut dyn Optimizer>,
}

pub(super) const MODEL: &str = "model.";
const BUFFER: &str = "buffer.";
pub(super) const OPTIMIZER: &str = "optimizer.";

/// Name of a counter in PyTorch's batch norms, which no forward pass here uses.
const BATCHES: &str = "num_batches_tracked";

/// Facts saved with the tensors.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Facts {
    optimizer: Option<OptimizerFacts>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OptimizerFacts {
    kind: String,
    steps: BTreeMap<String, u64>,
    /// Steps of the only average, of decay, in files written before there were several.
    #[serde(default, skip_serializing)]
    averaged: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    averages: Vec<AverageState>,
}

impl OptimizerFacts {
    fn averages(&self) -> Vec<AverageState> {
        let only =
            self.averaged.map(|steps| AverageState { rule: AverageRule::Decay(0.0), steps, origin: None });
        self.averages.iter().copied().chain(only).collect()
    }
}

impl Checkpointed for Contents<'_> {
    fn shards(&self) -> Result<Vec<TensorShard>> {
        let group = self.params.model_group();
        let named = |prefix: &str, name: &str| format!("{prefix}{name}");
        let mut shards: Vec<TensorShard> = self
            .params
            .iter()
            .map(|p| TensorShard::placed(named(MODEL, &p.name), &p.tensor, &p.placement, group))
            .collect();
        shards.extend(self.buffers.iter().map(|(name, t)| TensorShard::whole(named(BUFFER, name), t)));
        for (buffer, part) in self.params.computed() {
            shards.push(TensorShard {
                name: named(BUFFER, buffer.name()),
                shape: buffer.shape().to_vec(),
                region: region_of(part),
                tensor: buffer.values(part)?,
            });
        }
        if let Some(optimizer) = &self.optimizer {
            shards.extend(optimizer.state().tensors.iter().map(|t| {
                let name = format!("{OPTIMIZER}{}.{}", t.slot, t.param);
                TensorShard::placed(name, &t.tensor, &t.placement, group)
            }));
        }
        Ok(shards)
    }

    fn facts(&self) -> Result<serde_json::Value> {
        let optimizer = self.optimizer.as_ref().map(|optimizer| {
            let state = optimizer.state();
            OptimizerFacts { kind: state.kind, steps: state.steps, averaged: None, averages: state.averages }
        });
        serde_json::to_value(Facts { optimizer })
            .map_err(|error| Error::invalid("the optimizer's state", error, "what JSON can say"))
    }

    fn wanted(&self, saved: &CheckpointIndex) -> Result<Vec<ReadRequest>> {
        let mut wanted = Vec::new();
        let mut problems = Vec::new();
        let group = self.params.model_group();
        let weights_only = saved.facts.is_none();
        let prefix = |prefix| if weights_only { "" } else { prefix };
        // Weights alone are converted between single and double precision; a run that resumes must keep its own.
        let mut other_precision = None;
        let mut want = |full: String, name: &str, tensor: &Tensor, placement: &ParamPlacement| {
            let (shape, region) = placed(&tensor.size(), placement, group);
            match saved.tensor(&full) {
                None => problems.push(format!("{name:?} is missing")),
                Some(found) if found.shape == shape && convertible(found.kind, tensor.kind()) => {
                    other_precision = other_precision.or(Some((found.kind, tensor.kind())));
                    wanted.push(ReadRequest { name: full, region });
                }
                Some(found) if found.shape != shape || found.kind != tensor.kind() => problems.push(format!(
                    "{name:?} is {:?} {:?}, the model has {:?} {shape:?}",
                    found.kind,
                    found.shape,
                    tensor.kind()
                )),
                Some(_) => wanted.push(ReadRequest { name: full, region }),
            }
        };
        for p in self.params {
            let average = average_of(&p.name);
            let full = match self.optimizer.is_none() && saved.tensor(&average).is_some() {
                true => average,
                false => format!("{}{}", prefix(MODEL), p.name),
            };
            want(full, &p.name, &p.tensor, &p.placement);
        }
        for (name, tensor) in self.buffers {
            want(format!("{}{name}", prefix(BUFFER)), name, tensor, &ParamPlacement::Replicate);
        }
        let is_buffer = |name: &str| {
            self.buffers.iter().any(|(buffer, _)| buffer == name) || self.computed(name).is_some()
        };
        for tensor in &saved.tensors {
            let name = tensor.name.as_str();
            let known = if weights_only {
                self.params.get(name).is_some() || is_buffer(name) || name.rsplit('.').next() == Some(BATCHES)
            } else if let Some(slot) = name.strip_prefix(OPTIMIZER) {
                if self.optimizer.is_none() {
                    continue;
                }
                let param = slot.split_once('.').and_then(|(_, param)| self.params.get(param));
                match param {
                    Some(param) if tensor.shape == param.global_shape() => {
                        let (_, region) = placed(&param.tensor.size(), &param.placement, group);
                        wanted.push(ReadRequest { name: name.to_owned(), region });
                        true
                    }
                    _ => false,
                }
            } else {
                name.strip_prefix(MODEL).is_some_and(|name| self.params.get(name).is_some())
                    || name.strip_prefix(BUFFER).is_some_and(is_buffer)
            };
            if !known {
                let short =
                    [MODEL, BUFFER].iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
                problems.push(format!("{short:?} is not of this model"));
            }
        }
        // They are compared, not taken: checkpoints may lack them.
        for (buffer, part) in self.params.computed() {
            let full = format!("{}{}", prefix(BUFFER), buffer.name());
            match saved.tensor(&full) {
                None => {}
                Some(found) if found.shape == buffer.shape() => {
                    wanted.push(ReadRequest { name: full, region: region_of(part) });
                }
                Some(found) => problems.push(format!(
                    "{:?} is {:?}, the model has {:?}",
                    buffer.name(),
                    found.shape,
                    buffer.shape()
                )),
            }
        }
        let reason = match (problems.is_empty(), other_precision.filter(|_| self.optimizer.is_some())) {
            (true, None) => return Ok(wanted),
            (true, Some((saved, own))) => {
                let precision = match saved {
                    Kind::Double => "float64",
                    _ => "float32",
                };
                format!(
                    "its parameters are {saved:?}, those of this run {own:?}; resume in the same precision (--set \
                     train.precision={precision}), or start a new run from these weights (--set run.name=NAME --set \
                     checkpoint.init=CHECKPOINT)"
                )
            }
            (false, _) => format!("it is of another model: {}", list(&problems)),
        };
        Err(Error::CheckpointUnfit { path: saved.path.clone(), reason })
    }

    fn restore(&mut self, facts: Option<&serde_json::Value>, saved: &SavedShards<'_>) -> Result<()> {
        // In the order in which they are wanted: the model's tensors, the optimizer's, computed buffers.
        let model = self.params.len() + self.buffers.len();
        let all = saved.wanted();
        let computed = all.iter().position(|want| self.computed(&want.name).is_some()).unwrap_or(all.len());
        saved.read(computed..all.len(), |_, shard| self.compare(&shard))?;
        if let Some(facts) = facts {
            self.restore_optimizer(facts, saved, model..computed)?;
        }
        let params = self.params.iter().map(|p| &p.tensor);
        let targets: Vec<&Tensor> = params.chain(self.buffers.iter().map(|(_, tensor)| tensor)).collect();
        saved.read(0..model, |number, shard| overwrite(targets[number], &shard))
    }
}

/// Replaces a tensor's values by those of a box of the checkpoint.
fn overwrite(target: &Tensor, shard: &TensorShard) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let copied = target.shallow_clone().f_copy_(&shard.tensor);
    copied.context(|| format!("loading {:?}", shard.name))
}

impl Contents<'_> {
    /// Restores the optimizer's state from the wanted boxes with these numbers. They are read into the optimizer's own tensors, so
    /// that its state is in memory once. Averages that it does not continue are not read.
    fn restore_optimizer(
        &mut self,
        facts: &serde_json::Value,
        saved: &SavedShards<'_>,
        numbers: Range<usize>,
    ) -> Result<()> {
        let Some(optimizer) = &mut self.optimizer else { return Ok(()) };
        let refused = |reason: String| Error::OptimizerState { reason };
        let facts: Facts =
            serde_json::from_value(facts.clone()).map_err(|error| refused(error.to_string()))?;
        let facts = facts.optimizer.ok_or_else(|| refused("the checkpoint has none".to_owned()))?;
        let mut state = OptimizerState::new(&facts.kind);
        state.averages = facts.averages();
        state.steps = facts.steps;
        for want in &saved.wanted()[numbers.clone()] {
            state.tensors.push(state_tensor(self.params, want, saved.kind(want))?);
        }
        // The optimizer checks everything before it changes anything. Averages that it continues are in its state from here on.
        optimizer.load_state(&state)?;
        let own = optimizer.state();
        let mut continued = Vec::with_capacity(state.tensors.len());
        for tensor in &mut state.tensors {
            let slot = continuing_slot(&tensor.slot, &state.averages, &own.averages);
            continued.push(slot.is_some());
            let Some(slot) = slot else { continue };
            tensor.tensor = match own.tensors.iter().find(|own| own.slot == slot && own.takes(tensor)) {
                Some(own) => own.tensor.shallow_clone(),
                None => tensor.tensor.f_contiguous().context(|| format!("loading {:?}", tensor.slot))?,
            };
        }
        let mut next = numbers.start;
        for alike in continued.chunk_by(PartialEq::eq) {
            let run = next..next + alike.len();
            next = run.end;
            if alike[0] {
                saved.read(run, |number, shard| {
                    overwrite(&state.tensors[number - numbers.start].tensor, &shard)
                })?;
            }
        }
        // For tensors that are not the optimizer's own.
        optimizer.load_state(&state)
    }

    /// The computed buffer that has this name in a checkpoint or in a file of weights, and this rank's box.
    fn computed(&self, name: &str) -> Option<&(ComputedBuffer, Window)> {
        let name = name.strip_prefix(BUFFER).unwrap_or(name);
        self.params.computed().iter().find(|(buffer, _)| buffer.name() == name)
    }

    /// Refuses a saved buffer that differs from the computed one.
    fn compare(&self, shard: &TensorShard) -> Result<()> {
        let Some((buffer, part)) = self.computed(&shard.name) else { return Ok(()) };
        match buffer.agrees(part, &shard.tensor)? {
            true => Ok(()),
            false => Err(Error::invalid(
                format!("buffer {:?} of the checkpoint", buffer.name()),
                "different from the model's",
                "the values computed from the model's configuration; use the configuration of the checkpoint",
            )),
        }
    }
}

impl StateTensor {
    /// Returns whether the values of the checkpoint's tensor `saved` can be copied into this one: same parameter, dtype and shape,
    /// other memory.
    fn takes(&self, saved: &Self) -> bool {
        let alike = self.param == saved.param;
        let (own, saved) = (&self.tensor, &saved.tensor);
        alike
            && own.kind() == saved.kind()
            && own.size() == saved.size()
            && own.data_ptr() != saved.data_ptr()
    }
}

/// Returns the optimizer's slot that continues a slot of the checkpoint. The slots of averages differ if a run lists
/// them in another order; `None` if no average continues it.
fn continuing_slot(slot: &str, saved: &[AverageState], own: &[AverageState]) -> Option<String> {
    let Some(at) = (0..saved.len()).find(|at| average_slot(*at) == slot) else {
        return Some(slot.to_owned());
    };
    let rules: Vec<AverageRule> = own.iter().map(|own| own.rule).collect();
    continued(&rules, saved).iter().position(|source| *source == Some(at)).map(average_slot)
}

/// Returns a placeholder for a tensor of the checkpoint's optimizer state: its shape and dtype, with zeros in host memory that take
/// next to none of it.
fn state_tensor(params: &Parameters, want: &ReadRequest, kind: Option<Kind>) -> Result<StateTensor> {
    let name = want.name.strip_prefix(OPTIMIZER).and_then(|name| name.split_once('.'));
    let (Some((slot, param)), Some(kind)) = (name, kind) else {
        return Err(Error::OptimizerState {
            reason: format!("{:?} is not a tensor of this optimizer", want.name),
        });
    };
    let found = params.get(param);
    let zeros = Tensor::f_zeros([1], (kind, Device::Cpu)).and_then(|zero| {
        // A tensor without dims has one element.
        zero.f_view([1; 0]).and_then(|zero| zero.f_expand(&want.region.shape, false))
    });
    Ok(StateTensor {
        slot: slot.to_owned(),
        param: param.to_owned(),
        tensor: zeros.context(|| format!("loading {:?}", want.name))?,
        placement: found.map_or(ParamPlacement::Replicate, |param| param.placement.clone()),
    })
}

fn region_of(part: &Window) -> Region {
    Region { start: part.offset().to_vec(), shape: part.shape().to_vec() }
}

/// Returns whether values of one dtype are converted to the other when weights are loaded.
fn convertible(saved: Kind, own: Kind) -> bool {
    matches!((saved, own), (Kind::Float, Kind::Double) | (Kind::Double, Kind::Float))
}

/// The first few of a list of problems.
fn list(problems: &[String]) -> String {
    const SHOWN: usize = 5;
    let mut text = problems[..problems.len().min(SHOWN)].join("; ");
    if problems.len() > SHOWN {
        text.push_str(&format!("; and {} more", problems.len() - SHOWN));
    }
    text
}

/// The name of a parameter's first average.
pub(super) fn average_of(param: &str) -> String {
    format!("{OPTIMIZER}{}.{param}", average_slot(0))
}

/// The averages in a checkpoint, in the order of their slots.
pub(super) fn averages_of(manifest: &Manifest) -> Result<Vec<AverageState>> {
    let facts: Facts = serde_json::from_value(manifest.facts.clone())
        .map_err(|error| Error::OptimizerState { reason: error.to_string() })?;
    Ok(facts.optimizer.map(|optimizer| optimizer.averages()).unwrap_or_default())
}

/// The name that a tensor has in a model's state dict, where it belongs to the model.
pub(super) fn state_dict_name(name: &str) -> Option<&str> {
    name.strip_prefix(MODEL).or_else(|| name.strip_prefix(BUFFER))
}
