//! Checks that a wrapper sums gradients over the right group of ranks.

use isobar_collectives::Group;
use isobar_shard::GradientSource;

use super::refuse_taken;
use super::set::RankSet;
use crate::agree::agree;
use crate::error::{Error, Result};
use crate::params::{Parameter, Parameters};

/// Parameters with the same gradient source.
#[derive(Debug)]
pub(crate) struct Class<'a> {
    pub(crate) source: &'a GradientSource,
    pub(crate) params: Vec<&'a Parameter>,
    /// The ranks with which this one sums contributions; `None` where nothing is left to be summed.
    pub(crate) summands: Option<Group>,
}

impl Class<'_> {
    pub(crate) fn name(&self) -> &str {
        self.params.first().map_or("", |param| &param.name)
    }
}

/// Groups the parameters by gradient source, in order of first occurrence.
pub(crate) fn classes(params: &Parameters) -> Result<Vec<Class<'_>>> {
    let mut classes: Vec<(String, Class<'_>)> = Vec::new();
    for param in params {
        let source = param.gradient.source();
        let key = format!("{source:?} {:?}", source.watch().map(|watch| watch.identity()));
        match classes.iter_mut().find(|(other, _)| *other == key) {
            Some((_, class)) => class.params.push(param),
            None => {
                let summands = if source.is_pending() { source.copies()? } else { None };
                let summands = summands.filter(|group| group.size() > 1);
                classes.push((key, Class { source, params: vec![param], summands }));
            }
        }
    }
    Ok(classes.into_iter().map(|(_, class)| class).collect())
}

/// Refuses parameters whose gradients are wrong once a `DataParallel` has summed them over `group`. All ranks of the group call.
/// With how many ranks each contributes to one loss.
pub(crate) fn check_group(params: &Parameters, group: &Group) -> Result<usize> {
    agree(group, refuse_taken(params).and_then(|()| summands(params, group)))
}

fn summands(params: &Parameters, group: &Group) -> Result<usize> {
    let me = group.ranks()[group.rank()];
    let gradients = RankSet::of_group(group, me);
    let mut first: Option<(&str, &GradientSource, RankSet)> = None;
    // Ranks that compute one loss together.
    let mut computing = 1;
    let classes = classes(params)?;
    for class in &classes {
        let (name, source) = (class.name(), class.source);
        let own =
            class.summands.as_ref().map_or_else(|| RankSet::of(&[], me), |own| RankSet::of_group(own, me));
        let (all, owned) = (gradients.ranks(), own.ranks());
        let together = RankSet::of(&source.together(), me).ranks();
        let among = all.intersection(&together).count();
        // Of a split parameter each part is summed over the ranks that hold it.
        if source.is_pending() && source.is_split() && owned.is_subset(&all) {
            computing = computing.max(among);
            continue;
        }
        if !owned.is_subset(&all) || (source.is_pending() && among > owned.len()) {
            return Err(Error::WrongGradients {
                problem: format!(
                    "the gradient of parameter {name:?} is {source}, a sum over the {own}, and DataParallel sums over the \
                     {gradients}"
                ),
                call: format!("give `DataParallel::new` the group of the {own}: `mesh.group_along(…)`"),
            });
        }
        if !source.is_pending() && among > 1 {
            return Err(match source.mesh() {
                Some(mesh) => reduced_twice(name, &mesh.to_string(), &gradients),
                None => Error::WrongGradients {
                    problem: format!(
                        "ranks that hold parts of one model, of parameter {name:?} too, are among the {gradients} over which \
                         DataParallel sums gradients"
                    ),
                    call: "give `DataParallel::new` the group of the ranks that hold the same part"
                        .to_owned(),
                },
            });
        }
        match &first {
            Some((other, source, summands)) if *summands != own => {
                return Err(Error::WrongGradients {
                    problem: format!(
                        "the gradient of parameter {other:?} is {source}, that of {name:?} is {}",
                        class.source
                    ),
                    call: "make all parameters with one supplier: `MeshParams::new(&mut store, &mesh).pending()`".to_owned(),
                });
            }
            Some(_) => {}
            None => first = Some((name, source, own)),
        }
    }
    Ok(first.map_or(computing, |(_, _, own)| own.len()))
}

/// Of a gradient that backward has summed over a mesh, and that is summed over some of its ranks again.
pub(crate) fn reduced_twice(name: &str, mesh: &str, again: &RankSet) -> Error {
    Error::WrongGradients {
        problem: format!(
            "backward has summed the gradient of parameter {name:?} over {mesh} already, and it is summed again over the {again}"
        ),
        call: "make the model with `MeshParams::new(&mut store, &mesh).pending()`".to_owned(),
    }
}

/// Call that makes a model for fully sharded training.
pub(crate) const WATCHED: &str = "make the model with `MeshParams::new(&mut store, &mesh).pending().watched(sharded.watch())`, or with \
                                  `distribute_over_domain_for_fsdp(&mut store, &mesh)`";
