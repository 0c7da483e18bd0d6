//! From tokens on latent levels to fields.

use isobar_array::Array;
use isobar_nn::Linear;
use isobar_shard::Params;

use super::expansion::{self, LEVEL};
use super::geometry::Geometry;
use super::perceiver::{Perceiver, PerceiverOptions, linear};
use crate::error::Result;
use crate::layers::constant;

/// Decoder: a perceiver from latent to pressure levels, and a linear layer for each variable.
#[derive(Debug)]
pub(super) struct Decoder<A> {
    geometry: Geometry,
    level_decoder: Perceiver<A>,
    atmos_levels_embed: Linear<A>,
    surf_heads: Vec<Linear<A>>,
    atmos_heads: Vec<Linear<A>>,
}

impl<A: Array> Decoder<A> {
    pub(super) fn new(
        geometry: &Geometry,
        [surface, upper]: [&[String]; 2],
        (depth, hidden): (usize, i64),
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let width = 2 * geometry.width;
        let options = PerceiverOptions { width, heads: geometry.heads, hidden, depth };
        let level_decoder = Perceiver::new(options, &mut params.scope("level_decoder"))?;
        let atmos_levels_embed = linear([width; 2], true, &mut params.scope("atmos_levels_embed"))?;
        let patch = geometry.patch * geometry.patch;
        let mut heads = |kind: &str, names: &[String]| -> Result<Vec<_>> {
            let head =
                |name: &String| linear([width, patch], true, &mut params.scope(&format!("{kind}.{name}")));
            names.iter().map(head).collect()
        };
        let surf_heads = heads("surf_heads", surface)?;
        let atmos_heads = heads("atmos_heads", upper)?;
        Ok(Self { geometry: geometry.clone(), level_decoder, atmos_levels_embed, surf_heads, atmos_heads })
    }

    /// Computes the surface and the upper air, `[batch, channel, row, column]` each, from tokens `[batch, level, row, column, width]`.
    pub(super) fn forward(&self, x: &A) -> Result<[A; 2]> {
        let count = self.geometry.levels.len() as i64;
        let width = 2 * self.geometry.width;
        let surface = self.fields(&x.narrow(1, 0, 1)?.permute(&[0, 2, 3, 1, 4])?, &self.surf_heads)?;
        let latents = x.narrow(1, 1, self.geometry.latent_levels - 1)?.permute(&[0, 2, 3, 1, 4])?;
        let levels = expansion::of_numbers(&self.geometry.levels, LEVEL, width);
        let levels = self.atmos_levels_embed.forward(&constant(&levels, &[count, width], x)?)?;
        let upper = self.level_decoder.forward(&levels, &latents)?;
        Ok([surface, self.fields(&upper, &self.atmos_heads)?])
    }

    /// Fields `[batch, variable · level, row, column]` of tokens `[batch, row, column, level, width]`.
    fn fields(&self, x: &A, heads: &[Linear<A>]) -> Result<A> {
        let patches = heads.iter().map(|head| Ok(head.forward(x)?)).collect::<Result<Vec<A>>>()?;
        let patches = A::cat(&patches.iter().collect::<Vec<_>>(), -1)?;
        let (shape, patch, variables) = (x.shape(), self.geometry.patch, heads.len() as i64);
        let [batch, rows, columns, levels] = [0, 1, 2, 3].map(|dim: usize| shape[dim]);
        let patches = patches.reshape(&[batch, rows, columns, levels, variables, patch, patch])?;
        let fields = patches.permute(&[0, 4, 3, 1, 5, 2, 6])?;
        Ok(fields.reshape(&[batch, variables * levels, rows * patch, columns * patch])?)
    }
}
