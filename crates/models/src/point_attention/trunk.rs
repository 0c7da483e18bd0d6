//! The network of Transolver and FLARE.

use isobar_array::Array;
use isobar_nn::{Activation, Mode};
use isobar_shard::Params;
use tch::Tensor;

use super::block::{Block, Head};
use super::distances::Distances;
use super::mlp::PointMlp;
use super::points::{Form, Grid, coordinates};
use super::spec::AttentionSpec;
use super::time::TimeEmbedding;
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::fields::FieldSpec;
use crate::layers::Recompute;

/// Arguments of a [`Trunk`].
#[derive(Debug, Clone)]
pub(crate) struct TrunkSpec {
    pub(crate) model: &'static str,
    pub(crate) functional_dim: usize,
    pub(crate) out_dim: usize,
    pub(crate) embedding_dim: Option<usize>,
    /// The reference grid's extent, with `unified_pos`.
    pub(crate) reference: Option<usize>,
    pub(crate) structured_shape: Option<Vec<usize>>,
    pub(crate) layers: usize,
    pub(crate) ratio: usize,
    pub(crate) activation: Activation,
    pub(crate) time_input: bool,
    pub(crate) recomputes: bool,
    pub(crate) attention: AttentionSpec,
}

/// Positions that come before the features of a point.
#[derive(Debug)]
enum Positions {
    /// None, or so many features of the array `embedding`.
    Given(i64),
    /// Distances from the points of a reference grid.
    Unified(Distances),
}

/// Preprocessing, blocks and the head of the last block.
#[derive(Debug)]
pub(crate) struct Trunk<A> {
    model: &'static str,
    grid: Grid,
    features: i64,
    positions: Positions,
    preprocess: PointMlp<A>,
    time: Option<TimeEmbedding<A>>,
    blocks: Vec<Recompute<Block<A>>>,
    head: Head<A>,
}

impl TrunkSpec {
    /// Compares the arguments with the fields of a data set.
    pub(crate) fn check_fields(&self, fields: &FieldSpec) -> Result<()> {
        let shape = self.structured_shape.as_deref();
        Grid::new(self.model, shape)?.check(shape, fields)?;
        let (dims, given) = (fields.extents.len(), self.embedding_dim.unwrap_or(0));
        let made = self.reference.is_some() || given == 0 || given == dims;
        Checker(self.model).ensure(made, || {
            format!(
                "model.embedding_dim is {given}, but the model makes an embedding of {dims} coordinates for the fields of {}; --set \
                 model.embedding_dim={dims}",
                fields.source
            )
        })?;
        if self.time_input {
            fields.check_array(self.model, Batch::<Tensor>::TIME)?;
        }
        let inputs = ("functional_dim", self.functional_dim);
        fields.check_channels(self.model, inputs, ("out_dim", self.out_dim))
    }

    /// Number of features of the positions.
    fn embedding(&self, grid: &Grid) -> Result<i64> {
        let check = Checker(self.model);
        let Some(reference) = self.reference else {
            return match self.embedding_dim {
                None | Some(0) => Ok(0),
                Some(features) => check.extent("embedding_dim", features),
            };
        };
        let reference = check.extent("ref", reference)?;
        let extents = grid.extents().filter(|extents| extents.len() == 2);
        let Some(extents) = extents else {
            let given = &self.structured_shape;
            return Err(Error::Config {
                model: self.model,
                reason: format!("unified_pos needs a structured_shape of two extents, given {given:?}"),
            });
        };
        let numbers = [extents, &[reference; 2]].concat();
        let count = numbers.iter().try_fold(1i64, |count, &n| count.checked_mul(n));
        check.ensure(count.is_some_and(|count| count <= i64::from(i32::MAX)), || {
            format!("unified_pos needs {extents:?} times {reference}² distances, more than {}", i32::MAX)
        })?;
        Ok(reference * reference)
    }
}

impl<A: Array> Trunk<A> {
    pub(crate) fn new(spec: &TrunkSpec, params: &mut impl Params<Array = A>) -> Result<Self> {
        let check = Checker(spec.model);
        let features = check.extent("functional_dim", spec.functional_dim)?;
        let outputs = check.extent("out_dim", spec.out_dim)?;
        check.extent("n_layers", spec.layers)?;
        let ratio = check.extent("mlp_ratio", spec.ratio)?;
        check.ensure(spec.activation != Activation::Stan, || {
            "act is stan, which is for single features".into()
        })?;
        let grid = Grid::new(spec.model, spec.structured_shape.as_deref())?;
        let embedding = spec.embedding(&grid)?;
        let AttentionSpec { width, start, .. } = spec.attention;
        check.ensure(!spec.time_input || width % 2 == 0, || {
            format!("n_hidden {width} is odd, but time_input needs pairs of cosines and sines")
        })?;

        let positions = match (spec.reference, grid.extents()) {
            (Some(reference), Some(&[rows, columns])) => {
                Positions::Unified(Distances::new([rows, columns], reference as i64, params)?)
            }
            _ => Positions::Given(embedding),
        };
        let sizes = [embedding + features, 2 * width, width];
        let preprocess = PointMlp::new(sizes, spec.activation, start, &mut params.scope("preprocess"))?;
        let time = if spec.time_input { Some(TimeEmbedding::new(width, start, params)?) } else { None };
        let mut blocks = Vec::new();
        for i in 0..spec.layers {
            let name = format!("blocks.{i}");
            let block = Block::new(&name, &spec.attention, (spec.activation, ratio), params)?;
            blocks.push(Recompute::new(&name, block, spec.recomputes));
        }
        let last = format!("blocks.{}.ln_mlp2", spec.layers - 1);
        let head = Head::new([width, outputs], start, &mut params.scope(&last))?;
        Ok(Self { model: spec.model, grid, features, positions, preprocess, time, blocks, head })
    }

    /// Computes the outputs from the arrays `fx` or `fields`, `embedding` and `time`.
    pub(crate) fn forward(&self, batch: &Batch<A>, mode: Mode<'_>) -> Result<Batch<A>> {
        let (x, form) = match batch.get("fx") {
            Some(fx) => self.grid.points(fx, self.features)?,
            None => {
                let fields = batch.require(self.model, Batch::<A>::FIELDS)?;
                self.grid.fields(fields, self.features)?
            }
        };
        let mut x = match self.embedding(batch, &x, form)? {
            Some(embedding) => A::cat(&[&embedding, &x], -1)?,
            None => x,
        };
        x = self.preprocess.forward(&x)?;
        if let Some(time) = &self.time {
            x = time.add(&x, self.time(batch, &x)?)?;
        }
        for block in &self.blocks {
            x = block.forward(&[&x], mode, |block, inputs, mode| block.forward(&inputs[0], None, mode))?;
        }
        Ok(Batch::of_fields(self.grid.output(&self.head.forward(&x)?, form)?))
    }

    /// The embedding of points `x` `[batch, points…, features]`, if there is one.
    fn embedding(&self, batch: &Batch<A>, x: &A, form: Form) -> Result<Option<A>> {
        let shape = x.shape();
        let features = match &self.positions {
            Positions::Given(0) => {
                return match batch.get("embedding") {
                    None => Ok(None),
                    Some(given) => {
                        let want = "no embedding, since embedding_dim is 0 or absent".to_owned();
                        Err(Error::Input { model: self.model, got: given.shape(), want })
                    }
                };
            }
            Positions::Given(features) => *features,
            Positions::Unified(distances) => return Ok(Some(distances.beside(x)?)),
        };
        if let Some(given) = batch.get("embedding") {
            let (embedding, _) = self.grid.points(given, features)?;
            let own = embedding.shape();
            if own[..own.len() - 1] != shape[..shape.len() - 1] {
                let want = format!("an embedding of the points {:?}", &shape[..shape.len() - 1]);
                return Err(Error::Input { model: self.model, got: given.shape(), want });
            }
            return Ok(Some(embedding));
        }
        // A list of points has no coordinates of its own.
        let known = form != Form::Points || self.grid.dims().is_some();
        if known && features == shape.len() as i64 - 2 {
            return Ok(Some(coordinates(x)?));
        }
        batch.require(self.model, "embedding").map(|embedding| Some(embedding.shallow_clone()))
    }

    fn time<'a>(&self, batch: &'a Batch<A>, x: &A) -> Result<&'a A> {
        let time = batch.require(self.model, Batch::<A>::TIME)?;
        let (samples, shape) = (x.extent(0)?, time.shape());
        if shape != [samples] && shape != [samples, 1] {
            let want = format!("a time for each of {samples} samples, [batch] or [batch, 1]");
            return Err(Error::Input { model: self.model, got: shape, want });
        }
        Ok(time)
    }
}
