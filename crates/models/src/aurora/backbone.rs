//! The U-Net of stages over latent levels, rows and columns.

use isobar_array::{Array, Unary};
use isobar_nn::{Linear, Mode};
use isobar_shard::Params;

use super::expansion::{self, LEAD_TIME};
use super::geometry::Geometry;
use super::perceiver::linear;
use super::stage::Stage;
use crate::error::Result;
use crate::layers::{Start, constant};
use crate::windows::{Downsample, Upsample};

/// Stages on growing, then on shrinking grids.
#[derive(Debug)]
pub(super) struct Backbone<A> {
    width: i64,
    lead_time: f64,
    time_mlp: [Linear<A>; 2],
    /// From the finest grid to the coarsest, each with the way to the next.
    encoder: Vec<(Stage<A>, Option<Downsample<A>>)>,
    /// From the coarsest grid to the finest.
    decoder: Vec<(Stage<A>, Option<Upsample<A>>)>,
}

impl<A: Array> Backbone<A> {
    pub(super) fn new(
        geometry: &Geometry,
        recomputes: bool,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let width = geometry.width;
        let mut layer = |name: &str| linear([width; 2], true, &mut params.scope(name));
        let time_mlp = [layer("time_mlp.0")?, layer("time_mlp.2")?];
        let (mut encoder, mut decoder) = (Vec::new(), Vec::new());
        let count = geometry.stages();
        for level in 0..count {
            let name = format!("encoder_layers.{level}");
            let options = geometry.encoder_stage(level, recomputes);
            let stage = Stage::new(&name, &options, params)?;
            let down = (level + 1 < count).then(|| {
                let params = &mut params.scope(&format!("{name}.downsample"));
                Downsample::new(options.width, "reduction", Start::Small, params)
            });
            encoder.push((stage, down.transpose()?));
        }
        for i in 0..count {
            let level = count - 1 - i;
            let name = format!("decoder_layers.{i}");
            let options = geometry.decoder_stage(i, recomputes);
            let stage = Stage::new(&name, &options, params)?;
            let up = level.checked_sub(1).map(|finer| {
                let [_, rows, columns] = geometry.grid(finer);
                let params = &mut params.scope(&format!("{name}.upsample"));
                Upsample::new(options.width / 2, [rows, columns], ["lin1", "lin2"], Start::Small, params)
            });
            decoder.push((stage, up.transpose()?));
        }
        Ok(Self { width, lead_time: geometry.lead_time, time_mlp, encoder, decoder })
    }

    /// Computes `[batch, level, row, column, 2 · width]` from `[batch, level, row, column, width]`.
    pub(super) fn forward(&self, x: &A, mode: Mode<'_>) -> Result<A> {
        let lead = expansion::of_numbers(&[self.lead_time], LEAD_TIME, self.width);
        let lead = constant(&lead, &[1, self.width], x)?;
        let context = self.time_mlp[1].forward(&self.time_mlp[0].forward(&lead)?.unary(Unary::Silu)?)?;
        let mut x = x.shallow_clone();
        let mut skips = Vec::with_capacity(self.encoder.len());
        for (stage, down) in &self.encoder {
            x = stage.forward(&x, &context, mode)?;
            if let Some(down) = down {
                let skip = x;
                x = down.forward(&skip)?;
                skips.push(skip);
            }
        }
        let last = self.decoder.len() - 1;
        for (i, (stage, up)) in self.decoder.iter().enumerate() {
            x = stage.forward(&x, &context, mode)?;
            if let Some(up) = up {
                x = up.forward(&x)?;
            }
            // The stage before the last adds the skip that the last one joins; that of the coarsest grid but one is not used.
            let level = last - i;
            match (i, level.checked_sub(1).and_then(|finer| skips.get(finer)), skips.first()) {
                (i, Some(skip), _) if i > 0 => x = x.add(skip)?,
                (i, None, Some(skip)) if i == last => x = A::cat(&[&x, skip], -1)?,
                _ => {}
            }
        }
        Ok(x)
    }
}
