//! Gathering and writing.

use std::collections::BTreeMap;
use std::path::Path;

use isobar_collectives::{Group, start};
use tch::Tensor;

use super::{Contents, FORMAT, FileRecord, METADATA, MODEL, Metadata, OPTIMIZER, RunState, VERSION, tensors};
use crate::error::{Context, IoContext, Result};
use crate::files;
use crate::params::ParamPlacement;

/// Whole tensors, on the rank that writes.
pub(super) struct Gathered {
    model: Vec<(String, Tensor)>,
    optimizer: Vec<(String, Tensor)>,
    optimizer_kind: String,
    optimizer_steps: BTreeMap<String, u64>,
    model_parallel_size: usize,
}

/// Brings all parts of the model to the world's rank 0; `None` on the others.
///
/// Only the model-parallel group that rank 0 belongs to moves data: the others hold copies of the same model.
pub(super) fn gather(contents: &mut Contents<'_>, world: &Group) -> Result<Option<Gathered>> {
    let group = contents.params.model_group();
    let writes = world.rank() == 0;
    let Some(root) = root(group, world) else { return Ok(None) };
    let state = contents.optimizer.state();
    let params = contents.params.iter().map(|p| (p.name.clone(), &p.tensor, &p.placement));
    let slots = state.tensors.iter().map(|t| (format!("{}.{}", t.slot, t.param), &t.tensor, &t.placement));
    let mut model = whole(params, root, group)?;
    let optimizer = whole(slots, root, group)?;
    for (name, tensor) in contents.buffers {
        model.push((name.clone(), tensor.shallow_clone()));
    }
    Ok(writes.then(|| Gathered {
        model,
        optimizer,
        optimizer_kind: state.kind,
        optimizer_steps: state.steps,
        model_parallel_size: group.size(),
    }))
}

/// Writes a checkpoint's folder aside and renames it to `path`, replacing one of the same step.
pub(super) fn write_folder(
    path: &Path,
    gathered: &Gathered,
    state: &RunState,
    world_size: usize,
) -> Result<()> {
    let aside = files::aside(path);
    if aside.exists() {
        std::fs::remove_dir_all(&aside).at("remove", &aside)?;
    }
    std::fs::create_dir(&aside).at("make the folder", &aside)?;
    let model = write_tensors(&aside.join(MODEL), &gathered.model)?;
    let optimizer = write_tensors(&aside.join(OPTIMIZER), &gathered.optimizer)?;
    let metadata = Metadata {
        format: FORMAT.to_owned(),
        version: VERSION,
        isobar: env!("CARGO_PKG_VERSION").to_owned(),
        world_size,
        model_parallel_size: gathered.model_parallel_size,
        model,
        optimizer,
        optimizer_kind: gathered.optimizer_kind.clone(),
        optimizer_steps: gathered.optimizer_steps.clone(),
        state: state.clone(),
    };
    let json = serde_json::to_vec_pretty(&metadata).map_err(std::io::Error::from);
    files::write_synced(&aside.join(METADATA), &json.at("encode", &aside.join(METADATA))?)?;
    files::sync_folder(&aside)?;
    if path.exists() {
        std::fs::remove_dir_all(path).at("replace", path)?;
    }
    std::fs::rename(&aside, path).at("rename a new checkpoint to", path)?;
    files::sync_folder(path.parent().unwrap_or(Path::new(".")))
}

/// The rank of the model-parallel group that writes; `None` on ranks whose group has nothing to write.
fn root(group: &Group, world: &Group) -> Option<usize> {
    if group.size() == 1 {
        return (world.rank() == 0).then_some(0);
    }
    let first = world.ranks().first()?;
    group.ranks().iter().position(|rank| rank == first)
}

fn whole<'a>(
    tensors: impl Iterator<Item = (String, &'a Tensor, &'a ParamPlacement)>,
    root: usize,
    group: &Group,
) -> Result<Vec<(String, Tensor)>> {
    let mut gathered = Vec::new();
    for (name, tensor, placement) in tensors {
        let tensor = tensor.f_detach().context(|| format!("reading {name:?}"))?;
        let tensor = match placement {
            ParamPlacement::Replicate => tensor,
            ParamPlacement::Shard { dim, sizes } => {
                start::gather_v(&tensor, Some(sizes), *dim, root, group)?.wait()?
            }
        };
        gathered.push((name, tensor));
    }
    Ok(gathered)
}

fn write_tensors(path: &Path, tensors: &[(String, Tensor)]) -> Result<FileRecord> {
    let bytes = tensors::encode(tensors)?;
    files::write_synced(path, &bytes)?;
    Ok(FileRecord::of(&bytes))
}
