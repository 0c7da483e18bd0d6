//! Checks that the parameters, ranks and fields of a run fit each other.

use std::collections::{BTreeMap, BTreeSet};

use isobar_manager::DeviceMesh;
use isobar_shard::ParameterWatch;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::fields::MODEL_AXIS;
use crate::gradients::{RankSet, WATCHED, classes, reduced_twice};
use crate::params::Parameters;
use crate::ranks::Ranks;

/// Rejects a run whose gradients would not be those of its loss. Compares the gradient sources of the
/// parameters, the ranks that share samples, the ranks over which gradients are summed, and the task's mesh,
/// if it has one. All ranks of the run call, and all get the same error.
pub(crate) fn check_run(params: &Parameters, ranks: &Ranks, fields: Option<&DeviceMesh>) -> Result<()> {
    let world = &ranks.world;
    let own = Record::new(params, ranks, fields);
    let told = own.as_ref().map_err(ToString::to_string);
    let all: Vec<Result<Record, String>> = gather(world, &told)?;
    let mut records = BTreeMap::new();
    for record in all {
        match record {
            Ok(record) => drop(records.insert(record.me, record)),
            Err(problem) => return Err(Error::WrongGradients { problem, call: MESH_OF_ALL.to_owned() }),
        }
    }
    let problem = match own?.check(&records) {
        Ok(()) => None,
        Err(Error::WrongGradients { problem, call }) => Some((problem, call)),
        Err(other) => Some((other.to_string(), MESH_OF_ALL.to_owned())),
    };
    let problems: Vec<Option<(String, String)>> = gather(world, &problem)?;
    match problems.into_iter().flatten().next() {
        Some((problem, call)) => Err(Error::WrongGradients { problem, call }),
        None => Ok(()),
    }
}

fn gather<T: Serialize + serde::de::DeserializeOwned>(
    world: &isobar_collectives::Group,
    own: &impl Serialize,
) -> Result<Vec<T>> {
    let failed =
        |error: serde_json::Error| Error::invalid("what a rank says of its gradients", error, "JSON");
    let all = world.all_gather_bytes(&serde_json::to_vec(own).map_err(failed)?)?;
    all.iter().map(|bytes| serde_json::from_slice(bytes).map_err(failed)).collect()
}

const MESH_OF_ALL: &str =
    "make the mesh of all ranks of the run, and give `fit` their group as `Ranks::world`";

/// Arrangement of one rank.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    me: usize,
    world: RankSet,
    /// The ranks that share the samples, and this one's place among them.
    data: RankSet,
    place: usize,
    /// The ranks over which gradients are summed.
    gradients: RankSet,
    fully_sharded: bool,
    /// The mesh of the fields, and its ranks.
    fields: Option<(String, RankSet)>,
    classes: Vec<GradientClass>,
}

/// Parameters with the same gradient source.
#[derive(Debug, Serialize, Deserialize)]
struct GradientClass {
    /// The first of them.
    name: String,
    source: String,
    mesh: Option<String>,
    pending: bool,
    /// True if the mesh has a model axis along which no parameter is split.
    idle_model_axis: bool,
    /// The ranks that compute a loss together.
    together: RankSet,
    /// The ranks with which this one sums contributions.
    summands: RankSet,
    /// True if a declaration splits the parameters over axes of the mesh.
    split: bool,
    /// True if the parameters are watched, as fully sharded training needs.
    watched: bool,
    /// True if the fields are on the same mesh.
    with_fields: bool,
}

impl Record {
    fn new(params: &Parameters, ranks: &Ranks, fields: Option<&DeviceMesh>) -> Result<Self> {
        let me = ranks.world.ranks()[ranks.world.rank()];
        let gradients = match &ranks.shards {
            None => ranks.gradients.clone(),
            Some((_, mesh)) => Ranks::sharded(&ranks.world, mesh)?.gradients,
        };
        let fully = ranks.shards.as_ref().and_then(|(sharded, _)| sharded.identity());
        let mut told = Vec::new();
        for class in classes(params)? {
            let source = class.source;
            let mesh = source.mesh();
            let split = source.along_name() == Some(MODEL_AXIS);
            let summands = class
                .summands
                .as_ref()
                .map_or_else(|| RankSet::of(&[], me), |own| RankSet::of_group(own, me));
            told.push(GradientClass {
                name: class.name().to_owned(),
                source: source.to_string(),
                mesh: mesh.map(ToString::to_string),
                pending: source.is_pending(),
                idle_model_axis: !split && mesh.is_some_and(|mesh| mesh.names().contains(&MODEL_AXIS)),
                together: RankSet::of(&source.together(), me),
                summands,
                split: source.is_split(),
                watched: fully.is_some() && source.watch().and_then(|watch| watch.identity()) == fully,
                with_fields: mesh == fields,
            });
        }
        Ok(Self {
            me,
            world: RankSet::of_group(&ranks.world, me),
            data: RankSet::of_group(&ranks.data, me),
            place: ranks.data.rank(),
            gradients: RankSet::of_group(&gradients, me),
            fully_sharded: ranks.shards.is_some(),
            fields: fields.map(|mesh| (mesh.to_string(), RankSet::of(&mesh.ranks(), me))),
            classes: told,
        })
    }

    fn check(&self, all: &BTreeMap<usize, Self>) -> Result<()> {
        let world = self.world.ranks();
        for (what, set) in [("data", &self.data), ("gradients", &self.gradients)] {
            if !set.ranks().is_subset(&world) {
                return refuse(
                    format!("`Ranks::{what}` has the {set}, and the run has the {}", self.world),
                    MESH_OF_ALL,
                );
            }
        }
        (0..self.classes.len()).try_for_each(|index| self.check_class(index, all))
    }

    fn check_class(&self, index: usize, all: &BTreeMap<usize, Self>) -> Result<()> {
        let class = &self.classes[index];
        let together = class.together.ranks();
        if !together.is_subset(&self.world.ranks()) {
            let (name, of, world) = (&class.name, &class.together, &self.world);
            return refuse(
                format!(
                    "the {of} compute the loss together, with parameter {name:?}, and the run has the {world}"
                ),
                MESH_OF_ALL,
            );
        }
        self.fits_fields(class)?;
        self.shares_no_sample(class, all)?;
        match self.fully_sharded {
            true => self.is_summed_in_parts(class),
            false => self.is_summed_once(index, all),
        }
    }

    /// Fields that are split need parameters on their mesh.
    fn fits_fields(&self, class: &GradientClass) -> Result<()> {
        let Some((fields, on)) = &self.fields else { return Ok(()) };
        if class.with_fields || (class.mesh.is_none() && on.len() == 1) {
            return Ok(());
        }
        let (name, source) = (&class.name, &class.source);
        let found =
            format!("the fields are split over {fields}, and the gradient of parameter {name:?} is {source}");
        match &class.mesh {
            None => refuse(found, format!("{PENDING}, and train with `Ranks::sharded(&world, &mesh)`")),
            Some(_) => {
                let ranks = match class.together == *on {
                    true => String::new(),
                    false => format!("; those are the {on}, these the {}", class.together),
                };
                refuse(
                    found + &ranks,
                    "give one mesh to `ShardedFields::new`, `MeshParams::new` and `Ranks::sharded`",
                )
            }
        }
    }

    /// Ranks that compute a loss together have the same samples.
    fn shares_no_sample(&self, class: &GradientClass, all: &BTreeMap<usize, Self>) -> Result<()> {
        let together = class.together.ranks();
        let shared = self.data.ranks().intersection(&together).count() > 1;
        let other = together.iter().filter_map(|rank| all.get(rank));
        let elsewhere =
            other.clone().any(|other| (other.place, other.data.len()) != (self.place, self.data.len()));
        if shared || elsewhere {
            let (name, of, data) = (&class.name, &class.together, &self.data);
            let found = format!(
                "the {of} compute the loss of each sample together, with parameter {name:?}, but do not have the same samples: \
                 those of a batch are shared by the {data}"
            );
            return match &class.mesh {
                None => refuse(
                    found,
                    format!("let ranks with the same part of the model share the samples: {BY_HAND}"),
                ),
                Some(_) if class.pending => refuse(found, "train with `Ranks::sharded(&world, &mesh)`"),
                Some(_) => {
                    refuse(found, format!("{PENDING}, and train with `Ranks::sharded(&world, &mesh)`"))
                }
            };
        }
        let alike = |other: &Self| {
            let sources = |of: &Self| of.classes.iter().map(|class| class.source.clone()).collect::<Vec<_>>();
            sources(other) == sources(self)
        };
        match other.clone().find(|other| !alike(other)) {
            None => Ok(()),
            Some(other) => refuse(
                format!("the gradients of rank {} do not come about as those of rank {}", other.me, self.me),
                "make the same model with the same supplier on every rank",
            ),
        }
    }

    fn is_summed_in_parts(&self, class: &GradientClass) -> Result<()> {
        let (name, source) = (&class.name, &class.source);
        if !class.watched {
            let found = format!(
                "parameter {name:?} is not watched by the ShardedParameters of `Ranks::fully_sharded`"
            );
            return refuse(found, WATCHED);
        }
        if self.data.len() > 1 || class.summands != self.gradients {
            let found = format!(
                "the gradient of parameter {name:?} is {source}, a sum over the {}, and `Ranks::fully_sharded` sums over the {}",
                class.summands, self.gradients
            );
            return refuse(
                found,
                format!("{WATCHED}, of the mesh of `Ranks::fully_sharded(&world, &mesh, &sharded)`"),
            );
        }
        Ok(())
    }

    /// The contributions of all ranks that share the samples are each summed once.
    fn is_summed_once(&self, index: usize, all: &BTreeMap<usize, Self>) -> Result<()> {
        let class = &self.classes[index];
        let parts = || {
            let members = self.data.ranks().into_iter().filter_map(|rank| all.get(&rank));
            members.filter_map(|member| member.classes.get(index)).map(|class| &class.summands)
        };
        let needed: BTreeSet<usize> = parts().flat_map(RankSet::ranks).collect();
        let apart = parts().map(RankSet::len).sum::<usize>() == needed.len();
        let summed = self.gradients.ranks();
        if apart && (needed == summed || class.split && class.pending && needed.is_subset(&summed)) {
            return Ok(());
        }
        let (name, source, gradients) = (&class.name, &class.source, &self.gradients);
        match &class.mesh {
            Some(mesh) if !class.pending && needed.is_subset(&summed) => {
                Err(reduced_twice(name, mesh, gradients))
            }
            Some(_) if class.pending && class.idle_model_axis => refuse(
                format!(
                    "the gradient of parameter {name:?} is {source}, and gradients are summed over the {gradients}"
                ),
                "split the model along the axis \"model\" (`ParamStore::with_region` of its ranks, `MeshParams::along(\"model\")`), or \
                 use a mesh without it",
            ),
            None => refuse(
                format!(
                    "the gradient of parameter {name:?} is {source}, {}, and gradients are summed over the {gradients}",
                    match self.data.len() {
                        1 => "which has all samples of a batch".to_owned(),
                        _ => format!("of those that share the samples of a batch, the {}", self.data),
                    }
                ),
                format!(
                    "train with `Ranks::data_parallel(&world)`, or, where fields are split over a mesh, {PENDING}"
                ),
            ),
            Some(_) => {
                let needed = RankSet::from(needed);
                let found = format!(
                    "the gradient of parameter {name:?} is {source}, a sum over the {needed}, and gradients are summed over the \
                     {gradients}"
                );
                match class.pending {
                    true => refuse(found, "train with `Ranks::sharded(&world, &mesh)` of the model's mesh"),
                    false => {
                        refuse(found, format!("{PENDING}, and train with `Ranks::sharded(&world, &mesh)`"))
                    }
                }
            }
        }
    }
}

/// Call that makes the parameters of a model over split fields.
const PENDING: &str = "make the model with `MeshParams::new(&mut store, &mesh).pending()`";
const BY_HAND: &str = "`Ranks { data: group.clone(), gradients: group, .. }` with the group of these ranks";

fn refuse(problem: String, call: impl Into<String>) -> Result<()> {
    Err(Error::WrongGradients { problem, call: call.into() })
}
