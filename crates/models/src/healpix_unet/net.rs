//! The network of one step: encoder and decoder.

use isobar_array::{Array, Conv, Pool};
use isobar_nn::{ConvTransposeNd, Mode};
use isobar_shard::Params;

use super::activation::SharedActivation;
use super::block::Block;
use super::plan::Plan;
use super::recurrence::Recurrence;
use crate::error::Result;
use crate::layers::Recompute;

/// A U-Net over faces `[face · batch, channel, n, n]`.
#[derive(Debug)]
pub(super) struct Net<A> {
    down: Vec<Recompute<Block<A>>>,
    pool: Pool,
    max_pooling: bool,
    up: Vec<Level<A>>,
    last: Block<A>,
}

/// A grid on the way up.
#[derive(Debug)]
struct Level<A> {
    /// The way from the coarser grid, but on the coarsest one.
    upsample: Option<Upsample<A>>,
    block: Recompute<Block<A>>,
    recurrence: Option<Recurrence<A>>,
}

#[derive(Debug)]
struct Upsample<A> {
    conv: ConvTransposeNd<A>,
    activation: Option<SharedActivation<A>>,
}

impl<A: Array> Upsample<A> {
    fn new(name: &str, channels: i64, plan: &Plan, params: &mut impl Params<Array = A>) -> Result<Self> {
        let conv = Conv { stride: vec![plan.factor], ..Conv::default() };
        let kernel = [plan.factor; 2];
        let scope = &mut params.scope(&format!("{name}.upsampler.0.layers.0"));
        let conv = ConvTransposeNd::new([channels; 2], &kernel, conv, &[0], scope)?;
        let activation = match plan.upsampling {
            Some(function) => Some(SharedActivation::new(function, format!("{name}.upsampler.1"), params)?),
            None => None,
        };
        Ok(Self { conv, activation })
    }

    fn forward(&self, x: &A) -> Result<A> {
        let y = self.conv.forward(x)?;
        match &self.activation {
            Some(activation) => activation.forward(&y),
            None => Ok(y),
        }
    }
}

impl<A: Array> Net<A> {
    pub(super) fn new(plan: &Plan, recomputes: bool, params: &mut impl Params<Array = A>) -> Result<Self> {
        let mut down = Vec::with_capacity(plan.down.len());
        for (level, block) in plan.down.iter().enumerate() {
            // The pooling is a layer too.
            let name = format!("encoder.encoder.{level}.{}", usize::from(level > 0));
            let block = Block::new(block, &mut params.scope(&name))?;
            down.push(Recompute::new(&name, block, recomputes));
        }
        let mut up = Vec::with_capacity(plan.up.len());
        for (level, block) in plan.up.iter().enumerate() {
            let name = format!("decoder.decoder.{level}");
            let upsample = match level {
                0 => None,
                _ => Some(Upsample::new(&format!("{name}.upsamp"), block.latent, plan, params)?),
            };
            let recurrence = match plan.recurrence {
                Some(kernel) => {
                    let scope = &mut params.scope(&format!("{name}.recurrent"));
                    Some(Recurrence::new(block.outputs, kernel, scope)?)
                }
                None => None,
            };
            let name = format!("{name}.conv");
            let block = Block::new(block, &mut params.scope(&name))?;
            up.push(Level { upsample, block: Recompute::new(&name, block, recomputes), recurrence });
        }
        let last = Block::new(&plan.last, &mut params.scope("decoder.output_layer"))?;
        let pool = Pool::new(&[plan.factor]);
        Ok(Self { down, pool, max_pooling: plan.max_pooling, up, last })
    }

    /// The states of the recurrent blocks before the first step.
    pub(super) fn states(&self) -> Vec<Option<A>> {
        self.up.iter().map(|_| None).collect()
    }

    /// One step, which updates the states.
    pub(super) fn forward(&self, x: &A, states: &mut [Option<A>], mode: Mode<'_>) -> Result<A> {
        let through = |block: &Recompute<Block<A>>, x: &A| {
            block.forward(&[x], mode, |block, inputs, _| block.forward(&inputs[0]))
        };
        let mut x = x.shallow_clone();
        let mut skips = Vec::with_capacity(self.down.len());
        for (level, block) in self.down.iter().enumerate() {
            if level > 0 {
                skips.push(x.shallow_clone());
                x = match self.max_pooling {
                    true => x.max_pool(2, &self.pool)?.0,
                    false => x.avg_pool(2, &self.pool)?,
                };
            }
            x = through(block, &x)?;
        }
        for (Level { upsample, block, recurrence }, state) in self.up.iter().zip(states) {
            if let Some(upsample) = upsample
                && let Some(skip) = skips.pop()
            {
                x = A::cat(&[&upsample.forward(&x)?, &skip], 1)?;
            }
            x = through(block, &x)?;
            if let Some(recurrence) = recurrence {
                x = recurrence.forward(&x, state)?;
            }
        }
        self.last.forward(&x)
    }
}
