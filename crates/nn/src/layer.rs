//! Layers as values: the trait that all of them have, and a list of them.

use std::fmt::Debug;

use isobar_array::Array;
use isobar_shard::{Params, Result, Scope};

use crate::mode::Mode;

/// A layer with one input and one output.
///
/// Layers that behave the same in training and evaluation also have a `forward` without a [`Mode`].
pub trait Layer<A: Array>: Debug + Send {
    /// Computes the layer's output. With sharded arrays all ranks call.
    ///
    /// # Errors
    ///
    /// An input of the wrong shape or dtype, or an exchange that fails.
    fn apply(&self, x: &A, mode: Mode<'_>) -> Result<A>;
}

/// Layers one after the other (`torch.nn.Sequential`). State-dict names start with the layer's index: `0.weight`, `2.bias`.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::{Activation, ActivationLayer, Dropout, Layer, Linear, Mode, Sequential};
/// use isobar_shard::{ParamStore, StateDict};
/// use tch::{Device, Kind, Tensor};
///
/// let mut params = ParamStore::new(Generator::new(1));
/// let mut net = Sequential::new();
/// net.add(&mut params, |params| Linear::new(8, 32, params))?;
/// net.add(&mut params, |params| ActivationLayer::new(Activation::Gelu, params))?;
/// net.add(&mut params, |_| Dropout::new(0.1))?;
/// net.add(&mut params, |params| Linear::new(32, 2, params))?;
/// let y = net.apply(&Tensor::ones([5, 8], (Kind::Float, Device::Cpu)), Mode::Eval)?;
/// assert_eq!(y.size(), [5, 2]);
/// let names: Vec<String> = params.parameters().iter().map(|parameter| parameter.name.clone()).collect();
/// assert_eq!(names, ["0.weight", "0.bias", "3.weight", "3.bias"]);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Sequential<A> {
    layers: Vec<Box<dyn Layer<A>>>,
}

impl<A: Array> Default for Sequential<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl<A: Array> Sequential<A> {
    /// Makes an empty list, which returns its input.
    pub fn new() -> Self {
        Self { layers: Vec::new() }
    }

    /// Appends the layer that `make` returns. Its parameters are named by the index in the list.
    ///
    /// # Errors
    ///
    /// Those of `make`.
    pub fn add<L: Layer<A> + 'static>(
        &mut self,
        params: &mut impl Params<Array = A>,
        make: impl FnOnce(&mut Scope<'_, A>) -> Result<L>,
    ) -> Result<&mut Self> {
        let layer = make(&mut params.scope(&self.layers.len().to_string()))?;
        self.layers.push(Box::new(layer));
        Ok(self)
    }

    /// Returns the number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Returns whether there are no layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }
}

impl<A: Array> Layer<A> for Sequential<A> {
    fn apply(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        self.layers.iter().try_fold(x.shallow_clone(), |x, layer| layer.apply(&x, mode))
    }
}

/// Implements [`Layer`] for layers whose `forward` takes no mode.
macro_rules! layers_without_mode {
    ($($layer:ident),* $(,)?) => {
        $(impl<A: isobar_array::Array> $crate::Layer<A> for $layer<A> {
            fn apply(&self, x: &A, _mode: $crate::Mode<'_>) -> isobar_shard::Result<A> {
                self.forward(x)
            }
        })*
    };
}
pub(crate) use layers_without_mode;
