//! Arguments of GeoTransolver.

use isobar_array::Array;
use isobar_nn::Activation;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{GeoAttention, GeoTransolver, MODEL, StateMixing, Streams};
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::model::{Architecture, LargestArray, Model};
use crate::point_attention::{
    AttentionKind, AttentionSpec, Grid, MixingMode, Start, check_unsupported, largest,
};
use crate::signature::Signature;
use crate::size::{built, extrapolate};
use crate::traffic::{Split, Traffic};

/// Arguments of [`GeoTransolver`](crate::GeoTransolver), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GeoTransolverConfig {
    /// Features of a point: channels of the fields. PhysicsNeMo's lists of several streams are not possible.
    pub functional_dim: Streams,
    /// Features of a point of the output.
    pub out_dim: Streams,
    /// Features of a point of the geometry; none where not given. For fields, and for points of a grid without a geometry of their own,
    /// the number of spatial dims: the geometry then is the coordinates in [0, 1].
    #[serde(default)]
    pub geometry_dim: Option<usize>,
    /// Features of the global embedding; none where not given.
    #[serde(default)]
    pub global_dim: Option<usize>,
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
    /// Number of slices, or with `GALE_FA` of trained queries, of each head.
    #[serde(default = "slice_num")]
    pub slice_num: usize,
    /// NVIDIA's Transformer Engine: only `false` is possible. PhysicsNeMo's default is `true`.
    #[serde(default)]
    pub use_te: bool,
    /// Only `false` is possible: the model reads no time.
    #[serde(default)]
    pub time_input: bool,
    /// Transolver++: only `false` is possible.
    #[serde(default)]
    pub plus: bool,
    /// Features of the neighbours of a point: only `false` is possible.
    #[serde(default)]
    pub include_local_features: bool,
    /// Radii of neighbours; without `include_local_features` of no effect.
    #[serde(default)]
    pub radii: Option<Vec<f64>>,
    /// Numbers of neighbours; without `include_local_features` of no effect.
    #[serde(default)]
    pub neighbors_in_radius: Option<Vec<usize>>,
    /// Features of neighbours; without `include_local_features` of no effect.
    #[serde(default = "n_hidden_local")]
    pub n_hidden_local: usize,
    /// Extents of the 2-D or 3-D grid of the points, on which projections to heads are convolutions. Where not given,
    /// projections are linear layers, and the input is a list of points or fields of one to three dims.
    #[serde(default)]
    pub structured_shape: Option<Vec<usize>>,
    /// Attention within the points.
    #[serde(default)]
    pub attention_type: GeoAttention,
    /// Dropout with a trained probability: only `false` is possible.
    #[serde(default)]
    pub concrete_dropout: bool,
    /// Joining of the attention within the points and the attention to the context.
    #[serde(default)]
    pub state_mixing_mode: StateMixing,
    /// Number of tiles into which each rank cuts its points for attention. With more than one, memory holds the
    /// attention weights of one tile at a time, and backward recomputes them; results are equal up to rounding.
    #[serde(default = "tiles")]
    pub tiles: usize,
    /// Recompute the activations of the blocks in backward: less memory, about a third more time, the same numbers.
    #[serde(default)]
    pub gradient_checkpointing: bool,
}

impl GeoTransolverConfig {
    /// The defaults for points with the given numbers of features, without a context.
    pub fn new(functional_dim: usize, out_dim: usize) -> Self {
        Self {
            functional_dim: Streams::One(functional_dim),
            out_dim: Streams::One(out_dim),
            geometry_dim: None,
            global_dim: None,
            n_layers: n_layers(),
            n_hidden: n_hidden(),
            dropout: 0.0,
            n_head: n_head(),
            act: act(),
            mlp_ratio: mlp_ratio(),
            slice_num: slice_num(),
            use_te: false,
            time_input: false,
            plus: false,
            include_local_features: false,
            radii: None,
            neighbors_in_radius: None,
            n_hidden_local: n_hidden_local(),
            structured_shape: None,
            attention_type: GeoAttention::default(),
            concrete_dropout: false,
            state_mixing_mode: StateMixing::default(),
            tiles: tiles(),
            gradient_checkpointing: false,
        }
    }

    /// Features of a point, and of a point of the output.
    pub(super) fn channels(&self) -> Result<[usize; 2]> {
        let one = |name: &str, streams: &Streams| match streams {
            Streams::One(features) => Ok(*features),
            Streams::Each(list) if list.len() == 1 => Ok(list[0]),
            Streams::Each(list) => {
                let reason =
                    format!("{name} is {list:?}, but several streams are not supported; expected one number");
                Err(crate::error::Error::Config { model: MODEL, reason })
            }
        };
        Ok([one("functional_dim", &self.functional_dim)?, one("out_dim", &self.out_dim)?])
    }

    /// Checks the arguments and returns the sizes of the attention of the blocks.
    pub(super) fn attention(&self) -> Result<AttentionSpec> {
        check_unsupported(MODEL, self.use_te, self.plus)?;
        let check = Checker(MODEL);
        for (name, given, why) in [
            ("time_input", self.time_input, "the model reads no time"),
            (
                "include_local_features",
                self.include_local_features,
                "features of neighbours are not supported",
            ),
            ("concrete_dropout", self.concrete_dropout, "trained probabilities of dropout are not supported"),
        ] {
            check.ensure(!given, || {
                format!("{name} is true, but {why}; expected false: --set model.{name}=false")
            })?;
        }
        let sizes = [self.n_hidden, self.n_head, self.slice_num, self.tiles];
        let [width, heads, slices] = AttentionSpec::check(MODEL, sizes, self.dropout)?;
        let sources = [self.geometry_dim, self.global_dim].iter().flatten().count() as i64;
        let mode = match self.state_mixing_mode {
            StateMixing::Weighted => MixingMode::Weighted,
            StateMixing::ConcatProject => MixingMode::ConcatProject,
        };
        let (kind, grid) = match self.attention_type {
            GeoAttention::Gale => (AttentionKind::Slices, self.structured_shape.as_ref().map(Vec::len)),
            GeoAttention::GaleFa => (AttentionKind::Flare, None),
        };
        Ok(AttentionSpec {
            kind,
            width,
            heads,
            slices,
            grid,
            dropout: self.dropout,
            tiles: self.tiles,
            start: Start::Default,
            orthogonal: true,
            context: Some((sources * (width / heads), mode)),
        })
    }
}

impl Architecture for GeoTransolverConfig {
    const NAME: &'static str = MODEL;
    const SUMMARY: Option<&'static str> =
        Some("GeoTransolver: Transolver whose slices also attend to the geometry and to global features.");

    fn traffic(&self, split: &Split) -> Option<Traffic> {
        super::traffic::of(self, split)
    }

    fn build<A: Array>(&self, params: &mut Scope<'_, A>) -> Result<Box<dyn Model<A>>> {
        Ok(Box::new(GeoTransolver::new(self, params)?))
    }

    fn signature(&self) -> Signature {
        Signature::FEATURES_LAST
    }

    fn check(&self, fields: &FieldSpec) -> Result<()> {
        self.attention()?;
        let shape = self.structured_shape.as_deref();
        Grid::new(MODEL, shape)?.check(shape, fields)?;
        let (check, dims) = (Checker(MODEL), fields.extents.len());
        check.ensure(self.geometry_dim.is_none_or(|features| features == dims), || {
            format!(
                "model.geometry_dim is {}, but the model makes a geometry of {dims} coordinates for the fields of {}; --set \
                 model.geometry_dim={dims}",
                self.geometry_dim.unwrap_or(0),
                fields.source
            )
        })?;
        if self.global_dim.is_some() {
            fields.check_array(MODEL, "global_embedding")?;
        }
        let [inputs, outputs] = self.channels()?;
        fields.check_channels(MODEL, ("functional_dim", inputs), ("out_dim", outputs))
    }

    fn count(&self, count: &dyn Fn() -> ParamCount) -> Result<ModelSize> {
        extrapolate(self.n_layers, 1, |n_layers| {
            built(count, |params| GeoTransolver::new(&Self { n_layers, ..self.clone() }, params))
        })
    }

    fn largest_array(&self, fields: &FieldSpec) -> Option<LargestArray> {
        let heads = [self.n_head, self.slice_num, self.tiles];
        Some(largest(&fields.extents, [self.n_hidden, self.mlp_ratio], heads))
    }
}

crate::register!(GeoTransolverConfig);

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

fn n_hidden_local() -> usize {
    32
}

fn tiles() -> usize {
    1
}
