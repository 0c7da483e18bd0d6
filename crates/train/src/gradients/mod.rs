//! State of gradients: their content after backward, and whether they have been summed over ranks since.

mod checks;
mod run;
mod set;

use isobar_shard::{GradientSource, GradientState};

pub(crate) use self::checks::{check_fully_sharded, check_group, classes};
pub(crate) use self::run::check_run;
use crate::error::{Error, Result};
use crate::params::Parameter;

/// State of a parameter's gradient, shared by all handles to the parameter.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gradient {
    source: GradientSource,
    state: GradientState,
}

/// The gradient is not summed over ranks.
const FREE: u8 = 0;
/// A `DataParallel` sums the gradient over ranks, and has summed everything accumulated so far.
const SUMMED: u8 = 1;
/// A `DataParallel` sums the gradient over ranks, and more has been accumulated since its last sum.
const UNSUMMED: u8 = 2;
/// A `FullySharded` owns shards of the parameter and of its gradient.
const PARTED: u8 = 3;

impl Gradient {
    pub(crate) fn new(source: GradientSource, state: GradientState) -> Self {
        Self { source, state }
    }

    pub(crate) fn with_source(&self, source: GradientSource) -> Self {
        Self { source, state: self.state.clone() }
    }

    pub(crate) fn source(&self) -> &GradientSource {
        &self.source
    }

    /// Registers a `DataParallel` that sums the gradient.
    pub(crate) fn take(&self) {
        self.state.set(SUMMED);
    }

    /// Records that its `DataParallel` was dropped.
    pub(crate) fn release(&self) {
        self.state.set(FREE);
    }

    /// Records that this rank accumulated a gradient.
    pub(crate) fn arrived(&self) {
        self.state.set(UNSUMMED);
    }

    /// Records that the gradient has been summed over ranks, or is zero.
    pub(crate) fn summed(&self) {
        self.state.change(UNSUMMED, SUMMED);
    }

    /// Records that a `FullySharded` owns shards of the parameter.
    pub(crate) fn part(&self) {
        self.state.set(PARTED);
    }
}

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
    let source = &param.gradient.source;
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
