//! Levels of the network, and how they are made.

use isobar_array::Array;
use isobar_shard::Params;

use super::block::{Block, BlockSize};
use super::layers::{Convolution, Kernel, Norm, Resample, Role};
use super::plan::{Plan, Style};
use super::{DecoderType, EncoderType, SongUNetConfig};
use crate::error::Result;
use crate::layers::Recompute;

/// A level on the way down.
#[derive(Debug)]
pub(super) struct Down<A> {
    pub(super) entry: Entry<A>,
    pub(super) aux: Aux<A>,
    pub(super) blocks: Vec<Recompute<Block<A>>>,
}

/// First layer of a level.
#[derive(Debug)]
pub(super) enum Entry<A> {
    Convolution(Convolution<A>),
    Block(Recompute<Block<A>>),
}

/// Path from the input to a level past the level above.
#[derive(Debug)]
pub(super) enum Aux<A> {
    None,
    Skip { down: Convolution<A>, map: Convolution<A> },
    Residual(Convolution<A>),
}

/// A level on the way up.
#[derive(Debug)]
pub(super) struct Up<A> {
    pub(super) entry: Vec<Recompute<Block<A>>>,
    pub(super) blocks: Vec<Recompute<Block<A>>>,
    pub(super) aux_up: Option<Convolution<A>>,
    pub(super) output: Option<(Norm<A>, Convolution<A>)>,
}

/// Makes the levels in order.
pub(super) struct Builder<'a, P> {
    config: &'a SongUNetConfig,
    plan: &'a Plan,
    params: &'a mut P,
    /// Channels at this point of the network.
    channels: i64,
    /// Channels of what reaches the next level past this one.
    aux: i64,
    /// Channels of what is kept for the way up.
    skips: Vec<i64>,
}

impl<'a, A: Array, P: Params<Array = A>> Builder<'a, P> {
    pub(super) fn new(config: &'a SongUNetConfig, plan: &'a Plan, params: &'a mut P) -> Self {
        Self { config, plan, params, channels: plan.first(), aux: plan.inputs, skips: Vec::new() }
    }

    pub(super) fn down(&mut self, level: usize) -> Result<Down<A>> {
        let name = format!("enc.{0}x{0}", self.plan.level(level));
        let entry = match level {
            0 => {
                let kernel = self.kernel([self.plan.inputs, self.channels], 3);
                Entry::Convolution(self.convolution(&format!("{name}_conv"), kernel, Resample::Keep)?)
            }
            _ => {
                let channels = [self.channels; 2];
                Entry::Block(self.block(&format!("{name}_down"), level, channels, (Resample::Down, false))?)
            }
        };
        let aux = if level == 0 { Aux::None } else { self.past(&name)? };
        self.skips.push(self.channels);
        let attention = self.attends(level);
        let mut blocks = Vec::new();
        for i in 0..self.config.num_blocks {
            let channels = [self.channels, self.plan.widths[level]];
            let name = format!("{name}_block{i}");
            blocks.push(self.block(&name, level, channels, (Resample::Keep, attention))?);
            self.channels = channels[1];
            self.skips.push(self.channels);
        }
        Ok(Down { entry, aux, blocks })
    }

    fn past(&mut self, name: &str) -> Result<Aux<A>> {
        let inputs = self.plan.inputs;
        match self.config.encoder_type {
            EncoderType::Standard => Ok(Aux::None),
            EncoderType::Skip => {
                let kernel = self.kernel([inputs; 2], 0);
                let down = self.convolution(&format!("{name}_aux_down"), kernel, Resample::Down)?;
                let kernel = self.kernel([inputs, self.channels], 1);
                let map = self.convolution(&format!("{name}_aux_skip"), kernel, Resample::Keep)?;
                Ok(Aux::Skip { down, map })
            }
            EncoderType::Residual => {
                let kernel = self.kernel([self.aux, self.channels], 3);
                self.aux = self.channels;
                let name = format!("{name}_aux_residual");
                Ok(Aux::Residual(self.convolution(&name, kernel, Resample::DownAfter)?))
            }
        }
    }

    pub(super) fn up(&mut self, level: usize) -> Result<Up<A>> {
        let name = format!("dec.{0}x{0}", self.plan.level(level));
        let coarsest = level + 1 == self.plan.widths.len();
        let both = [self.channels; 2];
        let entry = match coarsest {
            true => vec![
                self.block(
                    &format!("{name}_in0"),
                    level,
                    both,
                    (Resample::Keep, self.config.bottleneck_attention),
                )?,
                self.block(&format!("{name}_in1"), level, both, (Resample::Keep, false))?,
            ],
            false => vec![self.block(&format!("{name}_up"), level, both, (Resample::Up, false))?],
        };
        let mut blocks = Vec::new();
        for i in 0..=self.config.num_blocks {
            let channels = [self.channels + self.skips.pop().unwrap_or(0), self.plan.widths[level]];
            let all = self.plan.style == Style::Adm;
            let attention = (all || i == self.config.num_blocks) && self.attends(level);
            let name = format!("{name}_block{i}");
            blocks.push(self.block(&name, level, channels, (Resample::Keep, attention))?);
            self.channels = channels[1];
        }
        let outputs = self.plan.outputs;
        let all = self.config.decoder_type == DecoderType::Skip;
        let aux_up = match all && !coarsest {
            true => {
                let kernel = self.kernel([outputs; 2], 0);
                Some(self.convolution(&format!("{name}_aux_up"), kernel, Resample::Up)?)
            }
            false => None,
        };
        let output = match all || level == 0 {
            true => {
                let prefix = match self.plan.style {
                    Style::Song => format!("{name}_aux"),
                    Style::Adm => "out".to_owned(),
                };
                let scope = &mut self.params.scope(&format!("{prefix}_norm"));
                let norm = Norm::new(self.channels, self.plan.style, scope)?;
                let kernel = self.kernel([self.channels, outputs], 3).of_role(Role::Last);
                Some((norm, self.convolution(&format!("{prefix}_conv"), kernel, Resample::Keep)?))
            }
            false => None,
        };
        Ok(Up { entry, blocks, aux_up, output })
    }

    fn attends(&self, level: usize) -> bool {
        self.plan.attends(self.config, level)
    }

    fn kernel(&self, channels: [i64; 2], extent: i64) -> Kernel {
        Kernel::new(self.plan.style, channels, extent)
    }

    fn convolution(&mut self, name: &str, kernel: Kernel, resample: Resample) -> Result<Convolution<A>> {
        Convolution::new(kernel, (resample, &self.plan.filter), &mut self.params.scope(name))
    }

    fn block(
        &mut self,
        name: &str,
        level: usize,
        channels: [i64; 2],
        (resample, attention): (Resample, bool),
    ) -> Result<Recompute<Block<A>>> {
        let size = BlockSize { channels, resample, attention, dropout: self.config.dropout };
        let block = Block::new(size, self.plan, &mut self.params.scope(name))?;
        Ok(Recompute::new(name, block, level < self.config.checkpoint_level))
    }
}
