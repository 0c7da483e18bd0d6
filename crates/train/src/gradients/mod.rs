//! Checks of gradients: each is summed once, over the right ranks, before it is used.
//!
//! They depend on layouts and groups, and on no optimizer.

mod checks;
mod repeats;
mod set;

pub(crate) use self::checks::{WATCHED, check_group, classes, reduced_twice};
pub(crate) use self::repeats::Repeats;
pub(crate) use self::set::RankSet;
use crate::error::{Error, Result};
use crate::gradient::{FREE, PARTED, SUMMED, UNSUMMED};
use crate::params::Parameter;

/// Rejects parameters whose gradients another wrapper sums over ranks.
pub(crate) fn refuse_taken<'a>(params: impl IntoIterator<Item = &'a Parameter>) -> Result<()> {
    for param in params {
        match param.gradient.state.get() {
            FREE => {}
            PARTED => return Err(parted(param)),
            _ => {
                return Err(Error::WrongGradients {
                    problem: format!(
                        "another DataParallel sums the gradient of parameter {:?} over ranks",
                        param.name
                    ),
                    call: "drop it before you make one more".to_owned(),
                });
            }
        }
    }
    Ok(())
}

/// Checks that gradients have been summed over the ranks, before an optimizer or a norm uses them.
///
/// # Errors
///
/// [`Error::WrongGradients`] with the call that sums them.
pub fn refuse_unsummed<'a>(params: impl IntoIterator<Item = &'a Parameter>) -> Result<()> {
    params.into_iter().try_for_each(|param| match param.gradient.state.get() {
        SUMMED => Ok(()),
        UNSUMMED => Err(Error::WrongGradients {
            problem: format!("the gradient of parameter {:?} has not been summed over the ranks", param.name),
            call: "call `DataParallel::backward` in the last pass of a step, instead of `backward_no_sync` or a tensor's \
                   own `backward`"
                .to_owned(),
        }),
        PARTED => Err(parted(param)),
        _ => refuse_pending(param),
    })
}

fn refuse_pending(param: &Parameter) -> Result<()> {
    let source = param.gradient.source();
    let several = |group: &isobar_collectives::Group| group.size() > 1;
    if !source.is_pending() || !source.copies()?.as_ref().is_some_and(several) {
        return Ok(());
    }
    Err(Error::WrongGradients {
        problem: format!("the gradient of parameter {:?} is {source}, and nobody sums it over the ranks", param.name),
        call: "train with `fit` and `Ranks::sharded(&world, &mesh)`, or keep a `DataParallel::new(&params, &buffers, &group, \
               &config)` over the group of the mesh's ranks and call its `backward(Some(&loss), 1, 1)`"
            .to_owned(),
    })
}

fn parted(param: &Parameter) -> Error {
    Error::WrongGradients {
        problem: format!("a FullySharded keeps parts of parameter {:?} and of its gradient", param.name),
        call: "give `FullySharded::parameters()` to the optimizer, the clipping and the checkpoints"
            .to_owned(),
    }
}
