//! Checks of the parameters that a `FullySharded` takes.

use isobar_collectives::Group;
use isobar_shard::ParameterWatch;

use super::ShardedParameters;
use crate::agree::agree;
use crate::error::{Error, Result};
use crate::gradients::{RankSet, WATCHED, classes, refuse_taken};
use crate::params::Parameters;

/// Refuses parameters whose gradients are wrong once a `FullySharded` has summed them over the ranks of `all`. All of them call.
pub(super) fn check_fully_sharded(
    params: &Parameters,
    sharded: &ShardedParameters,
    all: &Group,
) -> Result<()> {
    agree(all, refuse_taken(params).and_then(|()| watched(params, sharded, all)))
}

fn watched(params: &Parameters, sharded: &ShardedParameters, all: &Group) -> Result<()> {
    let me = all.ranks()[all.rank()];
    for class in classes(params)? {
        let (name, source) = (class.name(), class.source);
        let problem = |what: String| Error::WrongGradients { problem: what, call: WATCHED.to_owned() };
        let by = source.watch().and_then(|watch| watch.identity());
        if by.is_none() || by != sharded.identity() {
            return Err(problem(format!(
                "parameter {name:?} is not watched by the ShardedParameters that FullySharded is given"
            )));
        }
        let own =
            class.summands.as_ref().map_or_else(|| RankSet::of(&[], me), |own| RankSet::of_group(own, me));
        let all = RankSet::of_group(all, me);
        if own != all {
            return Err(problem(format!(
                "the gradient of parameter {name:?} is {source}, and FullySharded sums over the {all}"
            )));
        }
    }
    Ok(())
}
