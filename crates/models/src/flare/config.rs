//! Arguments of FLARE.

use isobar_array::Array;
use isobar_nn::Activation;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Flare, MODEL};
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::layers::Start;
use crate::model::{Architecture, LargestArray, Model};
use crate::point_attention::{AttentionKind, AttentionSpec, PointDropout, TrunkSpec, check_engine, largest};
use crate::signature::Signature;
use crate::size::{built, extrapolate};
use crate::traffic::{Split, Traffic};

/// Arguments of [`Flare`](crate::Flare), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FlareConfig {
    /// Features of a point: channels of the fields.
    pub functional_dim: usize,
    /// Features of a point of the output.
    pub out_dim: usize,
    /// Features of the embedding, concatenated before the features of a point; no embedding where not given. Fields,
    /// and points of a grid whose batch has no `embedding`, use their coordinates in [0, 1]: set the number of
    /// spatial dims. Not used with `unified_pos`.
    #[serde(default)]
    pub embedding_dim: Option<usize>,
    /// Number of blocks.
    #[serde(default = "n_layers")]
    pub n_layers: usize,
    /// Features of a point within the network.
    #[serde(default = "n_hidden")]
    pub n_hidden: usize,
    /// Dropout of what attention adds to a point.
    #[serde(default)]
    pub dropout: f64,
    /// Number of heads; divides `n_hidden`.
    #[serde(default = "n_head")]
    pub n_head: usize,
    /// Activation of the perceptrons; any but `stan`.
    #[serde(default = "act")]
    pub act: Activation,
    /// Hidden features of the perceptrons, in multiples of `n_hidden`.
    #[serde(default = "mlp_ratio")]
    pub mlp_ratio: usize,
    /// Number of trained queries of each head.
    #[serde(default = "slice_num")]
    pub slice_num: usize,
    /// Uses the distances to the points of a reference grid as the embedding. Only for 2-D grids.
    #[serde(default)]
    pub unified_pos: bool,
    /// Number of points of the reference grid along each dim.
    #[serde(default = "reference", rename = "ref")]
    pub reference: usize,
    /// Two or three extents of the grid. Where not given, points are a list; fields of one to three dims are possible too.
    #[serde(default)]
    pub structured_shape: Option<Vec<usize>>,
    /// NVIDIA's Transformer Engine: only `false` is possible.
    #[serde(default)]
    pub use_te: bool,
    /// Adds an embedding of the time to all points.
    #[serde(default)]
    pub time_input: bool,
    /// Number of tiles into which each rank cuts its points for attention. With more than one, memory holds the
    /// attention weights of one tile at a time, and backward recomputes them; results are equal up to rounding.
    #[serde(default = "tiles")]
    pub tiles: usize,
    /// Recompute the activations of the blocks in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl FlareConfig {
    /// The defaults for points with the given numbers of features and no embedding.
    pub fn new(functional_dim: usize, out_dim: usize) -> Self {
        Self {
            functional_dim,
            out_dim,
            embedding_dim: None,
            n_layers: n_layers(),
            n_hidden: n_hidden(),
            dropout: 0.0,
            n_head: n_head(),
            act: act(),
            mlp_ratio: mlp_ratio(),
            slice_num: slice_num(),
            unified_pos: false,
            reference: reference(),
            structured_shape: None,
            use_te: false,
            time_input: false,
            tiles: tiles(),
            gradient_checkpointing: false,
        }
    }

    /// Checks the arguments and returns those of the network.
    pub(super) fn spec(&self) -> Result<TrunkSpec> {
        check_engine(MODEL, self.use_te)?;
        Checker(MODEL).ensure(!self.unified_pos || self.structured_shape.is_some(), || {
            "unified_pos needs a structured_shape of two extents, given none".into()
        })?;
        let sizes = [self.n_hidden, self.n_head, self.slice_num, self.tiles];
        let [width, heads, slices] = AttentionSpec::check(MODEL, sizes, self.dropout)?;
        let attention = AttentionSpec {
            kind: AttentionKind::Flare,
            width,
            heads,
            slices,
            grid: None,
            dropout: PointDropout::Fixed(self.dropout),
            tiles: self.tiles,
            start: Start::Small,
            orthogonal: false,
            plus: false,
            context: None,
        };
        Ok(TrunkSpec {
            model: MODEL,
            functional_dim: self.functional_dim,
            out_dim: self.out_dim,
            embedding_dim: self.embedding_dim,
            reference: self.unified_pos.then_some(self.reference),
            structured_shape: self.structured_shape.clone(),
            layers: self.n_layers,
            ratio: self.mlp_ratio,
            activation: self.act,
            time_input: self.time_input,
            recomputes: self.gradient_checkpointing,
            attention,
        })
    }
}

impl Architecture for FlareConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> =
        Some("FLARE: attention between points of a cloud or field through a few trained queries.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(Flare::new(self, params)?))
    }

    fn signature(&self) -> Signature {
        Signature::FEATURES_LAST
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        self.spec()?.check_fields(fields)
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.n_layers, 1, |n_layers| {
            built(count, |params| Flare::new(&Self { n_layers, ..self.clone() }, params))
        })
    }

    fn largest_array(&self, fields: &FieldSpec) -> Option<LargestArray> {
        let heads = [self.n_head, self.slice_num, self.tiles];
        Some(largest(&fields.extents, [self.n_hidden, self.mlp_ratio], heads))
    }
}

crate::register!(FlareConfig);

fn n_layers() -> usize {
    4
}

fn n_hidden() -> usize {
    256
}

fn n_head() -> usize {
    8
}

fn act() -> Activation {
    Activation::Gelu
}

fn mlp_ratio() -> usize {
    4
}

fn slice_num() -> usize {
    32
}

fn reference() -> usize {
    8
}

fn tiles() -> usize {
    1
}
