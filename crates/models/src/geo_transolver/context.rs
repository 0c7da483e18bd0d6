//! The context: slices of the geometry, of the global embedding, and of the points near those of the geometry.

use isobar_array::Array;
use isobar_nn::Mode;
use isobar_shard::Params;

use super::local::LocalFeatures;
use super::streams::Stream;
use super::{GeoTransolverConfig, MODEL};
use crate::batch::Batch;
use crate::error::{Checker, Error, Result};
use crate::point_attention::{AttentionSpec, Form, Grid, Tokenizer, coordinates};

/// Tokenizers of the sources that the configuration names, with their numbers of features.
#[derive(Debug)]
pub(super) struct Context<A> {
    /// Local features of each stream; empty without `include_local_features`.
    local: Vec<LocalFeatures<A>>,
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
        let streams = if config.include_local_features { config.channels()?.len() } else { 0 };
        let local = (0..streams).map(|stream| LocalFeatures::new(config, stream, spec, params));
        let local = local.collect::<Result<_>>()?;
        // Also where the points' projections are linear, those of a grid's geometry are convolutions.
        let grid = config.structured_shape.as_ref().map(Vec::len);
        let mut source = |name: &str, features: Option<usize>, grid: Option<usize>| {
            let Some(features) = features else { return Ok(None) };
            let argument = if name == "geometry_tokenizer" { "geometry_dim" } else { "global_dim" };
            let features = check.extent(argument, features)?;
            let name = format!("context_builder.{name}");
            let spec = AttentionSpec { grid, ..*spec };
            let tokenizer = Tokenizer::new(&name, features, &spec, &mut params.scope(&name))?;
            Ok::<_, Error>(Some((tokenizer, features)))
        };
        Ok(Self {
            local,
            geometry: source("geometry_tokenizer", config.geometry_dim, grid)?,
            global: source("global_tokenizer", config.global_dim, None)?,
        })
    }

    /// Computes the slices of the context, `[batch, heads, slices, features · sources]`; `None` if the batch has no source. Sets the
    /// local features of the streams.
    pub(super) fn forward(
        &self,
        batch: &Batch<A>,
        streams: &mut [Stream<A>],
        grid: &Grid,
        mode: Mode<'_>,
    ) -> Result<Option<A>> {
        let geometry = self.geometry_of(batch, &streams[0], grid)?;
        let mut slices = self.local(batch, streams, geometry.as_ref(), mode)?;
        let mut sources = Vec::with_capacity(2);
        if let Some((tokenizer, _)) = &self.geometry {
            let tokens = geometry.map(|points| tokenizer.forward(&points, mode)).transpose()?;
            sources.push(("geometry", tokens));
        }
        if let Some((tokenizer, features)) = &self.global {
            let tokens = |points: &A| match points.shape()[..] {
                [_, _, own] if own == *features => tokenizer.forward(points, mode),
                _ => {
                    let want = format!("a global embedding [batch, tokens, {features}]");
                    Err(Error::Input { model: MODEL, got: points.shape(), want })
                }
            };
            sources.push(("global_embedding", batch.get("global_embedding").map(tokens).transpose()?));
        }
        if sources.iter().all(|(_, tokens)| tokens.is_none()) {
            return Ok(None);
        }
        for (name, tokens) in sources {
            match tokens {
                Some(tokens) => slices.push(tokens),
                // With one of two, the context has other features than the blocks read.
                None => drop(batch.require(MODEL, name)?),
            }
        }
        Ok(Some(A::cat(&slices.iter().collect::<Vec<_>>(), -1)?))
    }

    /// Computes what trained probabilities of dropout add to the loss.
    pub(super) fn regularization(&self) -> Result<Vec<A>> {
        let sources = [&self.geometry, &self.global].into_iter().flatten().map(|(tokenizer, _)| tokenizer);
        let local = self.local.iter().flat_map(LocalFeatures::tokenizers);
        local.chain(sources).filter_map(|tokenizer| tokenizer.regularization().transpose()).collect()
    }

    /// Returns the points of the geometry: those of the batch, or the coordinates of points on a grid.
    fn geometry_of(&self, batch: &Batch<A>, stream: &Stream<A>, grid: &Grid) -> Result<Option<A>> {
        let Some((_, features)) = &self.geometry else { return Ok(None) };
        let known = stream.form != Form::Points || grid.dims().is_some();
        match batch.get("geometry") {
            Some(geometry) => Ok(Some(grid.points(geometry, *features)?.0)),
            None if known && *features == stream.x.shape().len() as i64 - 2 => {
                Ok(Some(coordinates(&stream.x)?))
            }
            None => Ok(None),
        }
    }

    /// Computes slices of the geometry from the points of each stream near it, and sets the local features of the streams.
    fn local(
        &self,
        batch: &Batch<A>,
        streams: &mut [Stream<A>],
        geometry: Option<&A>,
        mode: Mode<'_>,
    ) -> Result<Vec<A>> {
        let mut slices = Vec::new();
        for (local, stream) in self.local.iter().zip(streams) {
            let Some(geometry) = geometry else {
                batch.require(MODEL, "geometry")?;
                break;
            };
            let positions = stream.positions(batch)?;
            slices.extend(local.context(positions, geometry, mode)?);
            stream.local = Some(local.features(positions, geometry)?);
        }
        Ok(slices)
    }
}
