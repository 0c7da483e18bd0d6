//! Parameters: what a model asks for by name, and who supplies them.
//!
//! Suppliers depend on no operator and no model.

mod computed;
mod count;
mod init;
mod layouts;
mod mesh;
mod scope;
mod source;
mod state;
mod store;

pub use computed::{BufferValues, ComputedBuffer};
pub use count::{ModelSize, ParamCount};
pub use init::Init;
pub use layouts::{ParameterLayouts, Source};
pub use mesh::MeshParams;
pub use scope::Scope;
pub use source::{GradientSource, GradientState};
pub use state::{StateDict, read_safetensors};
pub use store::{MeshShard, ParamStore, Parameter};

use isobar_array::Array;

use crate::error::Result;
pub use crate::layout::Placement;
use crate::region::ParallelRegion;
pub use crate::tensor::ParameterWatch;

/// The supplier of a model's parameters. Models ask for them once, while they are made, in a fixed order.
pub trait Params {
    /// Type of the parameters.
    type Array: Array;

    /// The trained parameter `name` of the global shape `shape`.
    ///
    /// # Errors
    ///
    /// The name is taken, or `init` or `placement` does not fit `shape`.
    fn param(
        &mut self,
        name: &str,
        shape: &[i64],
        init: Init<Self::Array>,
        placement: Placement,
    ) -> Result<Self::Array>;

    /// Like [`param`](Self::param), for a tensor that belongs to the state dict and is not trained.
    ///
    /// # Errors
    ///
    /// See [`param`](Self::param).
    fn buffer(
        &mut self,
        name: &str,
        shape: &[i64],
        init: Init<Self::Array>,
        placement: Placement,
    ) -> Result<Self::Array>;

    /// Adds a buffer whose values `values` computes, and that nothing stores: see [`ComputedBuffer`].
    ///
    /// # Errors
    ///
    /// The name is taken.
    fn computed_buffer(&mut self, name: &str, shape: &[i64], values: BufferValues) -> Result<()>;

    /// Returns the initial value of a parameter with this name, without creating one.
    ///
    /// # Errors
    ///
    /// `init` or `placement` does not fit `shape`.
    ///
    /// ```
    /// use isobar_array::Generator;
    /// use isobar_shard::{Init, ParamStore, Params, Placement};
    ///
    /// let mut store = ParamStore::new(Generator::new(1));
    /// let drawn = store.draw("weight", &[4, 3], &Init::XavierUniform, Placement::Replicate)?;
    /// assert!(store.get("weight").is_none());
    /// // The initial value depends on the seed and the name only.
    /// assert_eq!(store.param("weight", &[4, 3], Init::XavierUniform, Placement::Replicate)?, drawn);
    /// # Ok::<(), isobar_shard::Error>(())
    /// ```
    fn draw(
        &self,
        name: &str,
        shape: &[i64],
        init: &Init<Self::Array>,
        placement: Placement,
    ) -> Result<Self::Array>;

    /// Makes `alias` a further state-dict name of the parameter `name`.
    ///
    /// # Errors
    ///
    /// `alias` is taken, or there is no `name`.
    fn tie(&mut self, alias: &str, name: &str) -> Result<()>;

    /// The ranks of the `model_parallel` axis.
    fn region(&self) -> &ParallelRegion;

    /// Returns this supplier with names prefixed by `prefix` and a dot.
    ///
    /// ```
    /// use isobar_array::Generator;
    /// use isobar_shard::{Init, ParamStore, Params, Placement};
    ///
    /// let mut store = ParamStore::new(Generator::new(1));
    /// let mut block = store.scope("blocks.0");
    /// block.param("weight", &[4, 3], Init::XavierUniform, Placement::Replicate)?;
    /// assert!(store.get("blocks.0.weight").is_some());
    /// # Ok::<(), isobar_shard::Error>(())
    /// ```
    fn scope(&mut self, prefix: &str) -> Scope<'_, Self::Array>
    where
        Self: Sized,
    {
        Scope::new(self, prefix)
    }
}
