//! Declaration of how a model is split over named axes of the mesh.

use isobar_shard::ParameterLayouts;

/// Split of a model's parameters and inputs over named axes of the mesh. A model's own code says nothing of ranks; this
/// stands beside it, in the `sharding.rs` of its folder, or next to its configuration if it depends on that.
///
/// Axes that a mesh lacks are ignored, and parameters without a declaration are replicated.
///
/// ```
/// use isobar_models::Sharding;
/// use isobar_shard::{ParameterLayouts, Placement};
///
/// // One position for each of 8 x 4 tokens, in rows of 4.
/// let positions = ParameterLayouts::new().with_blocks("pos_embed", &[("domain", Placement::Shard(1))], 4);
/// let sharding = Sharding::new().parameters(positions).tokens(&[8, 4]);
/// assert_eq!(sharding.grid(), [8, 4]);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Sharding {
    parameters: ParameterLayouts,
    tokens: Vec<usize>,
    whole_fields: bool,
}

impl Sharding {
    /// Declares replicated parameters, and fields that may be split along any spatial dim.
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares layouts of parameters.
    #[must_use]
    pub fn parameters(self, parameters: ParameterLayouts) -> Self {
        Self { parameters, ..self }
    }

    /// Declares the extents of the model's own grid along the first spatial dims, where that is coarser than the fields'.
    /// Ranks without a row of it compute nothing, and training warns of them.
    #[must_use]
    pub fn tokens(self, extents: &[usize]) -> Self {
        Self { tokens: extents.to_vec(), ..self }
    }

    /// Declares a model whose fields cannot be split: a mesh with a domain axis is then an error.
    #[must_use]
    pub fn whole_fields(self) -> Self {
        Self { whole_fields: true, ..self }
    }

    /// The layouts of parameters.
    pub fn parameter_layouts(&self) -> &ParameterLayouts {
        &self.parameters
    }

    /// The extents of the model's own grid; empty if it is that of the fields.
    pub fn grid(&self) -> &[usize] {
        &self.tokens
    }

    /// Returns whether fields may be split along spatial dims.
    pub fn splits_fields(&self) -> bool {
        !self.whole_fields
    }
}
