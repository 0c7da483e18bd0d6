//! Parameters whose values are not always there.

use std::sync::Arc;

use isobar_torch::autograd::register_hook;
use isobar_torch::guard::is_grad_enabled;
use isobar_torch::memory::shares_storage;

use super::ShardTensor;
use crate::error::{Error, Result};

/// Supplier of parameter values before they are used, which may free them afterwards: fully sharded training. Parameters
/// are numbered by their order among the trained ones of their store.
pub trait ParameterWatch: Send + Sync {
    /// Identity of the watch: handles to the same watch return the same value.
    fn identity(&self) -> Option<usize> {
        None
    }

    /// An operator is about to use these parameters, or views of them; their values stay until [`leave`](Self::leave). Calls
    /// nest. All ranks call in the same order.
    ///
    /// # Errors
    ///
    /// Values that cannot be brought.
    fn enter(&self, parameters: &[usize]) -> Result<()>;

    /// The operator has ended.
    fn leave(&self, parameters: &[usize]);

    /// Backward is about to use what an operator had of these parameters. They stay until all gradients of theirs have come.
    ///
    /// # Errors
    ///
    /// Values that cannot be brought.
    fn recall(&self, parameters: &[usize]) -> Result<()>;
}

/// That a tensor is a view of parameters that somebody watches: of one, but for what joins several.
#[derive(Clone)]
pub(crate) struct Watched {
    pub(crate) by: Arc<dyn ParameterWatch>,
    pub(crate) parameter: usize,
}

/// The watched parameters that an operator uses, which stay while it runs.
pub(crate) struct Use {
    by: Arc<dyn ParameterWatch>,
    parameters: Vec<usize>,
}

impl Use {
    /// Brings those among the inputs; nothing where there are none.
    pub(crate) fn enter(inputs: &[&ShardTensor]) -> Result<Option<Self>> {
        let mut watched = inputs.iter().filter_map(|input| input.watched());
        let Some(first) = watched.next() else { return Ok(None) };
        let mut parameters: Vec<usize> =
            [first].into_iter().chain(watched).map(|watched| watched.parameter).collect();
        parameters.dedup();
        first.by.enter(&parameters)?;
        Ok(Some(Self { by: first.by.clone(), parameters }))
    }

    /// Sees to it that backward has them too, and that what is a view of one is known as such.
    pub(crate) fn mark(&self, inputs: &[&ShardTensor], output: &mut ShardTensor) -> Result<()> {
        let mut is_view = false;
        for input in inputs {
            let Some(watched) = input.watched() else { continue };
            if shares_storage(input.source(), output.local())? {
                output.watch(watched.clone());
                is_view = true;
            }
        }
        // The backward of a view reads no values.
        if is_grad_enabled() && output.local().requires_grad() && !is_view {
            let (by, parameters) = (self.by.clone(), self.parameters.clone());
            let _stays = register_hook(output.local(), move |_| {
                if is_grad_enabled() {
                    return Err(Error::from(isobar_array::Error::Argument {
                        op: "backward",
                        reason: "gradients of gradients go through parameters that are there only while they are used; train \
                                 them without the mesh's axis \"shard\""
                            .into(),
                    })
                    .into());
                }
                by.recall(&parameters)?;
                Ok(None)
            })?;
        }
        Ok(())
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.by.leave(&self.parameters);
    }
}
