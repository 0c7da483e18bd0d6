//! Blocks of convolutions.

use isobar_array::{Array, Conv};
use isobar_nn::ConvNd;
use isobar_shard::Params;

use super::activation::SharedActivation;
use super::shape::{BlockPlan, Kind};
use crate::error::Result;
use crate::faces::Sphere;

/// A convolution of faces `[face · batch, channel, n, n]` that keeps their extents.
#[derive(Debug)]
pub(super) struct FaceConv<A> {
    conv: ConvNd<A>,
    padding: i64,
}

impl<A: Array> FaceConv<A> {
    pub(super) fn new(
        name: &str,
        channels: [i64; 2],
        (kernel, dilation): (i64, i64),
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        // With a padding, that is the first of the layers.
        let params = &mut params.scope(&format!("{name}.layers.{}", i64::from(kernel > 1)));
        let conv = Conv { dilation: vec![dilation], ..Conv::default() };
        let conv = ConvNd::new(channels, &[kernel; 2], conv, params)?;
        Ok(Self { conv, padding: (kernel - 1) / 2 * dilation })
    }

    pub(super) fn forward(&self, x: &A) -> Result<A> {
        Ok(self.conv.forward(&Sphere::Healpix.pad(x, self.padding)?)?)
    }
}

/// Convolutions, an activation behind some of them, and a path around them in ConvNeXt blocks.
#[derive(Debug)]
pub(super) struct Block<A> {
    convs: Vec<FaceConv<A>>,
    activation: Option<SharedActivation<A>>,
    /// Number of convolutions that are activated: the first ones.
    activated: usize,
    skip: Skip<A>,
}

#[derive(Debug)]
enum Skip<A> {
    Nothing,
    Identity,
    Conv(FaceConv<A>),
}

impl<A: Array> Block<A> {
    pub(super) fn new(plan: &BlockPlan, params: &mut impl Params<Array = A>) -> Result<Self> {
        let BlockPlan { kind, inputs, outputs, latent, .. } = *plan;
        let skip = match kind {
            Kind::Basic => Skip::Nothing,
            Kind::ConvNeXt if inputs == outputs => Skip::Identity,
            Kind::Symmetric if inputs == latent => Skip::Identity,
            _ => Skip::Conv(FaceConv::new("skip_module", [inputs, outputs], (1, 1), params)?),
        };
        let shapes = shapes(plan);
        let activated = if kind == Kind::ConvNeXt { shapes.len() - 1 } else { shapes.len() };
        let mut convs = Vec::with_capacity(shapes.len());
        let mut activation: Option<SharedActivation<A>> = None;
        let mut number = 0;
        for (index, (channels, kernel)) in shapes.into_iter().enumerate() {
            let name = format!("convblock.{number}");
            convs.push(FaceConv::new(&name, channels, (kernel, plan.dilation), params)?);
            number += 1;
            let (Some(function), true) = (plan.activation, index < activated) else { continue };
            let name = format!("convblock.{number}");
            number += 1;
            match &activation {
                Some(shared) => shared.tie(&name, params)?,
                None => activation = Some(SharedActivation::new(function, name, params)?),
            }
        }
        Ok(Self { convs, activation, activated, skip })
    }

    pub(super) fn forward(&self, x: &A) -> Result<A> {
        let mut y = x.shallow_clone();
        for (index, conv) in self.convs.iter().enumerate() {
            y = conv.forward(&y)?;
            if let (Some(activation), true) = (&self.activation, index < self.activated) {
                y = activation.forward(&y)?;
            }
        }
        Ok(match &self.skip {
            Skip::Nothing => y,
            Skip::Identity => y.add(x)?,
            Skip::Conv(conv) => y.add(&conv.forward(x)?)?,
        })
    }
}

/// Channels and kernel of each convolution.
fn shapes(plan: &BlockPlan) -> Vec<([i64; 2], i64)> {
    let BlockPlan { inputs, latent, outputs, kernel, wide, layers, .. } = *plan;
    match plan.kind {
        Kind::Basic => (0..layers)
            .map(|layer| {
                let before = if layer == 0 { inputs } else { latent };
                let after = if layer + 1 == layers { outputs } else { latent };
                ([before, after], kernel)
            })
            .collect(),
        Kind::ConvNeXt => vec![([inputs, wide], kernel), ([wide, wide], kernel), ([wide, outputs], 1)],
        Kind::Symmetric => vec![
            ([inputs, latent], kernel),
            ([latent, wide], 1),
            ([wide, latent], 1),
            ([latent, outputs], kernel),
        ],
    }
}
