//! Arguments of GeoTransolver.

use isobar_array::Array;
use isobar_nn::Activation;
use isobar_shard::{ModelSize, ParamCount, Scope};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{GeoAttention, GeoTransolver, MODEL, StateMixing, Streams};
use crate::error::{Checker, Result};
use crate::fields::FieldSpec;
use crate::layers::Start;
use crate::model::{Architecture, LargestArray, Model};
use crate::point_attention::{
    AttentionKind, AttentionSpec, Grid, MixingMode, PointDropout, check_engine, largest,
};
use crate::signature::Signature;
use crate::size::{built, extrapolate};
use crate::traffic::{Split, Traffic};

/// Least probability with which trained probabilities of dropout start.
const LEAST_DROPOUT: f64 = 0.05;

/// Arguments of [`GeoTransolver`](crate::GeoTransolver), by PhysicsNeMo's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GeoTransolverConfig {
    /// Features of a point: channels of the fields. A list for several streams of points, each with its own projections and
    /// outputs, which share blocks and context.
    pub functional_dim: Streams,
    /// Features of a point of the output, or a list with those of each stream.
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
    /// Keeps the layers `time_fc` of PhysicsNeMo's model, which nothing uses, in the state dict.
    #[serde(default)]
    pub time_input: bool,
    /// Transolver++ in the attention of `GALE` and in the context, as in `transolver`.
    #[serde(default)]
    pub plus: bool,
    /// Appends the coordinates of the points of the geometry near each point, and adds those of the stream's points near each
    /// point of the geometry to the context. Needs a `geometry_dim` of 3, and no `structured_shape`.
    #[serde(default)]
    pub include_local_features: bool,
    /// Radii of neighbours with `include_local_features`; 0.05 and 0.25 where not given.
    #[serde(default)]
    pub radii: Option<Vec<f64>>,
    /// Numbers of nearest neighbours of each radius; 8 and 32 where not given.
    #[serde(default)]
    pub neighbors_in_radius: Option<Vec<usize>>,
    /// Features that the neighbours within each radius become.
    #[serde(default = "n_hidden_local")]
    pub n_hidden_local: usize,
    /// Extents of the 2-D or 3-D grid of the points, on which projections to heads are convolutions. Where not given,
    /// projections are linear layers, and the input is a list of points or fields of one to three dims.
    #[serde(default)]
    pub structured_shape: Option<Vec<usize>>,
    /// Attention within the points.
    #[serde(default)]
    pub attention_type: GeoAttention,
    /// Concrete dropout: trains the dropout probabilities of the attention output, of both residual sums of a block, and of the
    /// context's slices. They start at `dropout`, but at least at 0.05. With `structured_shape` and `GALE`, the attention output keeps
    /// the fixed `dropout`, as in PhysicsNeMo. Their entropy term is added to the loss with the weight
    /// `train.weights.regularization`.
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

    /// Returns the features of a point and of an output point, for each stream.
    pub(super) fn channels(&self) -> Result<Vec<[usize; 2]>> {
        let [inputs, outputs] = [self.functional_dim.each(), self.out_dim.each()];
        Checker(MODEL).ensure(!inputs.is_empty() && inputs.len() == outputs.len(), || {
            format!(
                "functional_dim has {} streams and out_dim {}, expected one or more, and as many outputs",
                inputs.len(),
                outputs.len()
            )
        })?;
        Ok(inputs.iter().zip(outputs).map(|(&inputs, &outputs)| [inputs, outputs]).collect())
    }

    /// Returns the radii and numbers of neighbours of the local features; empty without local features.
    pub(super) fn scales(&self) -> Result<Vec<(f64, i64)>> {
        if !self.include_local_features {
            return Ok(Vec::new());
        }
        let check = Checker(MODEL);
        check.ensure(self.structured_shape.is_none() && self.geometry_dim == Some(3), || {
            "include_local_features needs points with 3 coordinates (geometry_dim = 3) and no structured_shape; for fields, \
             --set model.include_local_features=false"
                .into()
        })?;
        let radii = self.radii.as_deref().unwrap_or(&[0.05, 0.25]);
        let counts = self.neighbors_in_radius.as_deref().unwrap_or(&[8, 32]);
        check.ensure(radii.len() == counts.len(), || {
            format!(
                "radii has {} numbers and neighbors_in_radius {}, expected as many",
                radii.len(),
                counts.len()
            )
        })?;
        check.ensure(radii.iter().all(|radius| radius.is_finite() && *radius > 0.0), || {
            format!("radii is {radii:?}, expected finite numbers above 0")
        })?;
        check.extent("n_hidden_local", self.n_hidden_local / 2)?;
        let counts = counts.iter().map(|&count| check.extent("a number of neighbors_in_radius", count));
        radii.iter().zip(counts).map(|(&radius, count)| Ok((radius, count?))).collect()
    }

    /// Checks the arguments and returns the specifications of the blocks' attention and of the context's.
    pub(super) fn attention(&self) -> Result<[AttentionSpec; 2]> {
        check_engine(MODEL, self.use_te)?;
        let check = Checker(MODEL);
        let sizes = [self.n_hidden, self.n_head, self.slice_num, self.tiles];
        let [width, heads, slices] = AttentionSpec::check(MODEL, sizes, self.dropout)?;
        let radii = self.scales()?.len() as i64;
        let local = radii * self.n_hidden_local as i64;
        let streams = self.channels()?.len() as i64;
        let sources = [self.geometry_dim, self.global_dim].iter().flatten().count() as i64 + radii * streams;
        check.divisible(("n_hidden with the features of neighbours", width + local), ("n_head", heads))?;
        let mode = match self.state_mixing_mode {
            StateMixing::Weighted => MixingMode::Weighted,
            StateMixing::ConcatProject => MixingMode::ConcatProject,
        };
        let (kind, grid) = match self.attention_type {
            GeoAttention::Gale => (AttentionKind::Slices, self.structured_shape.as_ref().map(Vec::len)),
            GeoAttention::GaleFa => (AttentionKind::Flare, None),
        };
        let dropout = match self.concrete_dropout {
            true => PointDropout::Trained { start: self.dropout.max(LEAST_DROPOUT), given: self.dropout },
            false => PointDropout::Fixed(self.dropout),
        };
        let context = AttentionSpec {
            kind,
            width,
            heads,
            slices,
            grid: None,
            dropout,
            tiles: self.tiles,
            start: Start::Torch,
            orthogonal: false,
            plus: self.plus,
            context: None,
        };
        let blocks = AttentionSpec {
            width: width + local,
            grid,
            orthogonal: true,
            context: Some((sources * (width / heads), mode)),
            ..context
        };
        Ok([blocks, context])
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

    /// Several streams have an output each.
    fn signature(&self) -> Signature {
        const STREAMS: [&str; 8] =
            ["fields.0", "fields.1", "fields.2", "fields.3", "fields.4", "fields.5", "fields.6", "fields.7"];
        let streams = self.out_dim.each().len().min(STREAMS.len());
        let outputs = if streams > 1 { &STREAMS[..streams] } else { Signature::FIELDS.outputs };
        Signature { outputs, ..Signature::FEATURES_LAST }
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
        check.ensure(!self.include_local_features, || {
            "include_local_features needs points with positions, which fields do not have; expected false: --set \
             model.include_local_features=false"
                .into()
        })?;
        match self.channels()?[..] {
            [[inputs, outputs]] => {
                fields.check_channels(MODEL, ("functional_dim", inputs), ("out_dim", outputs))
            }
            ref streams => check.ensure(false, || {
                format!("functional_dim has {} streams, but fields are one; expected a number", streams.len())
            }),
        }
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
