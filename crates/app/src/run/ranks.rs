//! The ranks of a run: which share samples, a model, or fields.

use anyhow::{Result, bail};
use isobar_collectives::Group;
use isobar_manager::config::MeshConfig;
use isobar_manager::{DeviceMesh, DistributedManager};
use isobar_train::{DATA_AXIS, DOMAIN_AXES, MODEL_AXIS, Ranks, SHARD_AXIS};

use crate::config::Config;
use isobar_command::exit::{self, Because, Exit};

/// Arrangement of the ranks.
pub(crate) struct Arrangement {
    pub(crate) ranks: Ranks,
    /// Those that share a model's channels.
    pub(crate) model: Group,
    /// Over which samples, fields and parameters are split, where fields or parameters are.
    pub(crate) domain: Option<DeviceMesh>,
}

impl Arrangement {
    /// Makes the mesh. The groups that share samples and those that share a model are its axes `data` and `model`, or the
    /// manager's own where the number of ranks that share a model was given to it; fields are split over the axes `domain`,
    /// `domain_y` and `domain_z`.
    pub(crate) fn new(manager: &DistributedManager, config: &Config) -> Result<Self> {
        let world = manager.group(None)?;
        let mesh = &config.distributed.mesh;
        let own = manager.group(Some("model_parallel")).ok();
        let mut domain = None;
        let (data, model) = if let (Some(model), true) = (&own, *mesh == MeshConfig::default()) {
            (manager.group(Some("data_parallel"))?, model.clone())
        } else {
            let names: Vec<&str> = mesh.names.iter().map(String::as_str).collect();
            let known = |name: &str| {
                [DATA_AXIS, SHARD_AXIS, MODEL_AXIS].contains(&name) || DOMAIN_AXES.contains(&name)
            };
            if let Some(other) = names.iter().find(|name| !known(name)) {
                bail!(Exit::Usage.because(format!(
                    "distributed.mesh has an axis \"{other}\"; training knows the axes \"data\", \"shard\" and \"model\", and {DOMAIN_AXES:?}; \
                     for instance --set 'distributed.mesh.names=[\"data\"]'"
                )));
            }
            let made = manager.initialize_mesh(&mesh.shape, &names).map_err(of_keys)?;
            let sharded = |name: &&str| *name == SHARD_AXIS || DOMAIN_AXES.contains(name);
            if names.iter().any(sharded) {
                domain = Some(made.clone());
            }
            let axis = |name: &str| -> Result<Group> {
                match names.contains(&name) {
                    true => Ok(made.group(name)?),
                    false => Ok(Group::single()),
                }
            };
            let data = if domain.is_none() { axis(DATA_AXIS)? } else { Group::single() };
            (data, axis(MODEL_AXIS)?)
        };
        if let Some(own) = own.filter(|own| own.size().max(model.size()) > 1 && own.ranks() != model.ranks())
        {
            bail!(Exit::Usage.because(format!(
                "distributed.model_parallel_size (or MODEL_PARALLEL_SIZE) lets ranks {:?} share a model, and distributed.mesh \
                 ranks {:?}; set one of them, or both to the same ranks; for the \
                 first alone, --set 'distributed.mesh.names=[\"data\"]' --set 'distributed.mesh.shape=[-1]'",
                own.ranks(),
                model.ranks()
            )));
        }
        if model.size() > 1 && !config.model.model_parallel() {
            let all = isobar_models::registered();
            let others: Vec<String> = all
                .iter()
                .filter(|entry| entry.model_parallel())
                .map(|entry| format!("--set model.type={}", entry.name()))
                .collect();
            bail!(Exit::Usage.because(format!(
                "model parallelism over {} ranks is not supported by model.type = {:?}; {}, or \
                 --set 'distributed.mesh.names=[\"data\"]' --set 'distributed.mesh.shape=[-1]'",
                model.size(),
                config.model.name(),
                others.join(" or ")
            )));
        }
        let split = domain.as_ref().and_then(|mesh| {
            mesh.names()
                .into_iter()
                .zip(mesh.shape())
                .find(|(name, ranks)| *ranks > 1 && DOMAIN_AXES.contains(name))
        });
        if let Some((axis, _)) = split.filter(|_| !config.model.sharding().splits_fields()) {
            bail!(Exit::Usage.because(format!(
                "distributed.mesh splits fields along \"{axis}\", but model.type = {:?} computes with full fields only; use a \
                 mesh with the axes \"data\" or \"shard\"",
                config.model.name()
            )));
        }
        let ranks = match &domain {
            Some(mesh) => Ranks::sharded(&world, mesh)?,
            None => Ranks { world, gradients: data.clone(), data, shards: None },
        };
        Ok(Self { ranks, model, domain })
    }
}

/// Names the keys of a mesh that cannot be made.
fn of_keys(error: isobar_manager::Error) -> anyhow::Error {
    let error = anyhow::Error::from(error);
    match exit::of(&error) {
        Exit::Usage => {
            let works = "--set 'distributed.mesh.names=[\"data\"]' --set 'distributed.mesh.shape=[-1]'";
            Exit::Usage.because(format!("distributed.mesh: {error}; {works}")).into()
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use isobar_collectives::threads;
    use isobar_models::{DistributedAfnoConfig, ModelConfig};
    use rstest::rstest;

    use super::*;

    /// Runs a body on thread ranks, each with its manager.
    fn on_ranks<T: Send>(ranks: usize, body: impl Fn(DistributedManager) -> T + Sync) -> Vec<T> {
        threads::run(ranks, Duration::from_secs(60), |world| {
            let _rank = DistributedManager::bind_thread(&world);
            body(DistributedManager::get().unwrap())
        })
    }

    #[rstest]
    #[case::mesh_not_set(&[-1], &["data"], true)]
    #[case::alike(&[-1, 2], &["data", "model"], true)]
    #[case::other_size(&[1, 4], &["data", "model"], false)]
    #[case::no_model_axis(&[4], &["data"], false)]
    #[case::other_ranks(&[2, 2], &["model", "data"], false)]
    fn mesh_and_model_parallel_size_agree(
        #[case] shape: &[i64],
        #[case] names: &[&str],
        #[case] agree: bool,
    ) {
        let errors = on_ranks(4, |manager| {
            manager.create_process_subgroup("model_parallel", 2, None, false).unwrap();
            manager.create_orthogonal_process_group("data_parallel", "model_parallel", false).unwrap();
            let model = ModelConfig::new(DistributedAfnoConfig::new([64, 64], 1));
            let mut config = Config { model, ..Config::default() };
            config.distributed.mesh.shape = shape.to_vec();
            config.distributed.mesh.names = names.iter().map(|&name| name.to_owned()).collect();
            Arrangement::new(&manager, &config).map(|made| (made.ranks.data.size(), made.model.size()))
        });
        for found in errors {
            match found {
                Ok(sizes) => assert!(agree && sizes == (2, 2), "{sizes:?}"),
                Err(error) => assert!(!agree && error.to_string().contains("set one of them"), "{error}"),
            }
        }
    }
}
