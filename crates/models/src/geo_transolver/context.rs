//! The context: slices of the geometry and of the global embedding.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;

use super::{GeoTransolverConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::point_attention::{AttentionSpec, Form, Grid, Tokenizer, coordinates};

/// Tokenizers of the sources that the configuration names, with their numbers of features.
#[derive(Debug)]
pub(super) struct Context<A> {
    geometry: Option<(Tokenizer<A>, i64)>,
    global: Option<(Tokenizer<A>, i64)>,
}

impl<A: Array> Context<A> {
    pub(super) fn new(
        config: &GeoTransolverConfig,
        spec: &AttentionSpec,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let check = Checker(MODEL);
        // Also where the points' projections are linear, those of a grid's geometry are convolutions.
        let grid = config.structured_shape.as_ref().map(Vec::len);
        let mut source = |name: &str, features: Option<usize>, grid: Option<usize>| {
            let Some(features) = features else { return Ok(None) };
            let argument = if name == "geometry_tokenizer" { "geometry_dim" } else { "global_dim" };
            let features = check.extent(argument, features)?;
            let name = format!("context_builder.{name}");
            let spec = AttentionSpec { grid, orthogonal: false, ..*spec };
            let tokenizer = Tokenizer::new(&name, features, &spec, &mut params.scope(&name))?;
            Ok::<_, Error>(Some((tokenizer, features)))
        };
        Ok(Self {
            geometry: source("geometry_tokenizer", config.geometry_dim, grid)?,
            global: source("global_tokenizer", config.global_dim, None)?,
        })
    }

    /// Computes the slices `[batch, heads, slices, features · sources]` of the context of points `x`; none where the batch has none.
    pub(super) fn forward(
        &self,
        batch: &Batch<A>,
        (x, form): (&A, Form),
        grid: &Grid,
        mode: Mode<'_>,
    ) -> Result<Option<A>> {
        let mut slices = Vec::with_capacity(2);
        if let Some((tokenizer, features)) = &self.geometry {
            let known = form != Form::Points || grid.dims().is_some();
            let points = match batch.get("geometry") {
                Some(geometry) => Some(grid.points(geometry, *features)?.0),
                None if known && *features == x.shape().len() as i64 - 2 => Some(coordinates(x)?),
                None => None,
            };
            let tokens = |points: &A| tokenizer.forward(points, mode);
            slices.push(("geometry", points.as_ref().map(tokens).transpose()?));
        }
        if let Some((tokenizer, features)) = &self.global {
            let tokens = |points: &A| match points.shape()[..] {
                [_, _, own] if own == *features => tokenizer.forward(points, mode),
                _ => {
                    let want = format!("a global embedding [batch, tokens, {features}]");
                    Err(Error::Input { model: MODEL, got: points.shape(), want })
                }
            };
            slices.push(("global_embedding", batch.get("global_embedding").map(tokens).transpose()?));
        }
        if slices.iter().all(|(_, tokens)| tokens.is_none()) {
            return Ok(None);
        }
        for (name, tokens) in &slices {
            if tokens.is_none() {
                // With one of two, the context has other features than the blocks read.
                batch.require(MODEL, name)?;
            }
        }
        let given: Vec<&A> = slices.iter().filter_map(|(_, tokens)| tokens.as_ref()).collect();
        Ok(Some(A::cat(&given, -1)?))
    }
}
