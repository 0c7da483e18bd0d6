//! Finding, checking and reading.

use std::path::{Path, PathBuf};

use isobar_collectives::Group;
use tch::Tensor;

use super::{
    Contents, FORMAT, FileRecord, LATEST, METADATA, MODEL, Metadata, OPTIMIZER, RunState, VERSION, tensors,
};
use crate::error::{Context, Error, IoContext, Result};
use crate::optim::{OptimizerState, StateTensor};
use crate::params::{ParamPlacement, Parameters, wrap_dim};

/// What a checkpoint says of the run, without its tensors. `path` is a checkpoint's folder, or one with `latest` in it.
///
/// # Errors
///
/// [`Error::NoCheckpoint`] where there is none, [`Error::Checkpoint`] where the metadata is torn or foreign.
pub fn read_run_state(path: &Path) -> Result<RunState> {
    Ok(metadata(&resolve(path)?)?.state)
}

/// Puts a checkpoint's state dict into parameters and buffers, without an optimizer: for prediction. No communication:
/// every rank reads for itself. `path` is a checkpoint's folder, or one with `latest` in it.
///
/// # Errors
///
/// As [`super::Checkpoints::load`]; nothing is changed then.
pub fn load_state_dict(path: &Path, params: &Parameters, buffers: &[(String, Tensor)]) -> Result<RunState> {
    let folder = resolve(path)?;
    let metadata = metadata(&folder)?;
    let found = StateDict::read(&folder, &metadata, params, buffers)?;
    found.apply(params, buffers)?;
    Ok(metadata.state)
}

pub(super) fn load(path: &Path, contents: &mut Contents<'_>) -> Result<RunState> {
    let folder = resolve(path)?;
    let metadata = metadata(&folder)?;
    let found = StateDict::read(&folder, &metadata, contents.params, contents.buffers)?;
    let optimizer = read_optimizer(&folder, &metadata, contents.params)?;
    // The optimizer checks everything before it changes anything.
    contents.optimizer.load_state(&optimizer)?;
    found.apply(contents.params, contents.buffers)?;
    Ok(metadata.state)
}

/// The folder that `latest` or `best` in `folder` names.
pub(super) fn pointed_to(folder: &Path, pointer: &str) -> Result<PathBuf> {
    let file = folder.join(pointer);
    if !file.exists() {
        return Err(Error::NoCheckpoint { path: folder.to_owned() });
    }
    let name = std::fs::read_to_string(&file).at("read", &file)?;
    let target = folder.join(name.trim());
    if !target.join(METADATA).is_file() {
        return Err(Error::checkpoint(&file, format!("it names {:?}, which is not there", name.trim())));
    }
    Ok(target)
}

fn resolve(path: &Path) -> Result<PathBuf> {
    if path.join(METADATA).is_file() { Ok(path.to_owned()) } else { pointed_to(path, LATEST) }
}

fn metadata(folder: &Path) -> Result<Metadata> {
    let path = folder.join(METADATA);
    let bytes = std::fs::read(&path).at("read", &path)?;
    let refused = |reason: String| Error::checkpoint(&path, reason);
    let value: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|e| refused(format!("torn or foreign: {e}")))?;
    let format = value.get("format").and_then(|f| f.as_str());
    if format != Some(FORMAT) {
        return Err(refused(format!("foreign: its format is {format:?}, expected {FORMAT:?}")));
    }
    let version = value.get("version").and_then(serde_json::Value::as_u64);
    if version != Some(VERSION) {
        let found = version.map_or("missing".to_owned(), |v| v.to_string());
        return Err(refused(format!("its version is {found}, this program reads {VERSION}")));
    }
    serde_json::from_value(value).map_err(|e| refused(format!("torn or foreign: {e}")))
}

/// The bytes of a file, found to be those that were written.
fn checked(path: &Path, expected: &FileRecord) -> Result<Vec<u8>> {
    let bytes = std::fs::read(path).at("read", path)?;
    if bytes.len() as u64 != expected.bytes {
        let reason = format!("torn: it has {} bytes, {} were written", bytes.len(), expected.bytes);
        return Err(Error::checkpoint(path, reason));
    }
    if FileRecord::of(&bytes) != *expected {
        return Err(Error::checkpoint(path, "damaged: its CRC-32C is not that of what was written"));
    }
    Ok(bytes)
}

/// A state dict that fits the model, cut to this rank's parts.
struct StateDict {
    params: Vec<Tensor>,
    buffers: Vec<Tensor>,
}

impl StateDict {
    fn read(
        folder: &Path,
        metadata: &Metadata,
        params: &Parameters,
        buffers: &[(String, Tensor)],
    ) -> Result<Self> {
        let path = folder.join(MODEL);
        let found = tensors::decode(&path, &checked(&path, &metadata.model)?)?;
        let mut problems = Vec::new();
        let mut take = |name: &str, shape: Vec<i64>, kind| match find(&found, name) {
            None => {
                problems.push(format!("{name:?} is missing"));
                None
            }
            Some(tensor) if tensor.size() != shape || tensor.kind() != kind => {
                let (got, size) = (tensor.kind(), tensor.size());
                problems.push(format!("{name:?} is {got:?} {size:?}, the model has {kind:?} {shape:?}"));
                None
            }
            Some(tensor) => Some(tensor),
        };
        let whole: Vec<_> = params.iter().map(|p| take(&p.name, p.global_shape(), p.tensor.kind())).collect();
        let kept: Vec<_> = buffers.iter().map(|(name, t)| take(name, t.size(), t.kind())).collect();
        for (name, _) in &found {
            if params.get(name).is_none() && !buffers.iter().any(|(buffer, _)| buffer == name) {
                problems.push(format!("{name:?} is not of this model"));
            }
        }
        if !problems.is_empty() {
            return Err(Error::checkpoint(&path, format!("it is of another model: {}", list(&problems))));
        }
        let group = params.model_group();
        let cut = params.iter().zip(whole.into_iter().flatten());
        Ok(Self {
            params: cut.map(|(p, whole)| own_part(whole, &p.placement, group)).collect::<Result<_>>()?,
            buffers: kept.into_iter().flatten().map(Tensor::shallow_clone).collect(),
        })
    }

    fn apply(&self, params: &Parameters, buffers: &[(String, Tensor)]) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let targets = params.iter().map(|p| (&p.name, &p.tensor)).zip(&self.params);
        let buffers = buffers.iter().map(|(name, tensor)| (name, tensor)).zip(&self.buffers);
        for ((name, target), source) in targets.chain(buffers) {
            target.shallow_clone().f_copy_(source).context(|| format!("loading {name:?}"))?;
        }
        Ok(())
    }
}

fn read_optimizer(folder: &Path, metadata: &Metadata, params: &Parameters) -> Result<OptimizerState> {
    let path = folder.join(OPTIMIZER);
    let found = tensors::decode(&path, &checked(&path, &metadata.optimizer)?)?;
    let mut state = OptimizerState::new(&metadata.optimizer_kind);
    state.steps.clone_from(&metadata.optimizer_steps);
    for (name, tensor) in found {
        let param = name.split_once('.').and_then(|(slot, param)| Some((slot, params.get(param)?)));
        let Some((slot, param)) = param else {
            return Err(Error::checkpoint(
                &path,
                format!("tensor {name:?} belongs to no parameter of this model"),
            ));
        };
        if tensor.size() != param.global_shape() {
            let (found, expected) = (tensor.size(), param.global_shape());
            return Err(Error::checkpoint(
                &path,
                format!("tensor {name:?} is {found:?}, expected {expected:?}"),
            ));
        }
        state.tensors.push(StateTensor {
            slot: slot.to_owned(),
            param: param.name.clone(),
            tensor: own_part(&tensor, &param.placement, params.model_group())?,
            placement: param.placement.clone(),
        });
    }
    Ok(state)
}

fn own_part(whole: &Tensor, placement: &ParamPlacement, group: &Group) -> Result<Tensor> {
    let ParamPlacement::Shard { dim, sizes } = placement else { return Ok(whole.shallow_clone()) };
    let dim = wrap_dim(*dim, whole.dim()) as i64;
    let start: i64 = sizes[..group.rank()].iter().sum();
    whole.f_narrow(dim, start, sizes[group.rank()]).context(|| "cutting a parameter".to_owned())
}

fn find<'a>(tensors: &'a [(String, Tensor)], name: &str) -> Option<&'a Tensor> {
    let at = tensors.binary_search_by(|(n, _)| n.as_str().cmp(name)).ok()?;
    Some(&tensors[at].1)
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
