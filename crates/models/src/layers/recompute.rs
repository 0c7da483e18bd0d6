//! Parts of a model that backward may compute again.

use std::sync::{Arc, Mutex, PoisonError};

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::checkpoint;
use isobar_shard::trace::module;

use crate::error::Result;

/// A part of a model, under whose name its communication and its errors are recorded; with `gradient_checkpointing`, none of what
/// it computes on the way is kept for backward.
#[derive(Debug)]
pub(crate) struct Recompute<T> {
    name: Arc<str>,
    /// Backward, which may run on another thread, has it too.
    part: Arc<Mutex<T>>,
    enabled: bool,
}

impl<T: Send + 'static> Recompute<T> {
    pub(crate) fn new(name: &str, part: T, enabled: bool) -> Self {
        Self { name: name.into(), part: Arc::new(Mutex::new(part)), enabled }
    }

    /// Returns whether activations are computed again.
    pub(crate) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Another handle on the same part.
    pub(crate) fn shallow_clone(&self) -> Self {
        Self { name: self.name.clone(), part: self.part.clone(), enabled: self.enabled }
    }

    /// Applies `f` to the part; what it computes is kept for backward.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&T) -> R) -> R {
        let _module = module(&self.name);
        f(&self.part.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Applies `forward` of the part to `inputs`.
    pub(crate) fn forward<A: Array>(
        &self,
        inputs: &[&A],
        mode: Mode<'_>,
        forward: impl Fn(&T, &[A], Mode<'_>) -> Result<A> + Send + 'static,
    ) -> Result<A> {
        let (name, part) = (self.name.clone(), self.part.clone());
        // A panic leaves the part as it was: nothing changes it.
        let run = move |inputs: &[A], mode: Mode<'_>| {
            let _module = module(&name);
            forward(&part.lock().unwrap_or_else(PoisonError::into_inner), inputs, mode)
        };
        if !self.enabled {
            let inputs: Vec<A> = inputs.iter().map(|input| input.shallow_clone()).collect();
            return run(&inputs, mode);
        }
        match mode {
            Mode::Eval => checkpoint(inputs, None, move |inputs, _| run(inputs, Mode::Eval)),
            Mode::Train { generator, batch } => {
                checkpoint(inputs, Some(generator), move |inputs, generator| match generator {
                    Some(generator) => run(inputs, Mode::Train { generator, batch }),
                    None => run(inputs, Mode::Eval),
                })
            }
        }
    }
}
