//! Blocks of convolutions.

use isobar_array::{Array, Conv};
use isobar_nn::ConvNd;
use isobar_shard::Params;

use super::activation::SharedActivation;
use super::shape::{BlockPlan, SkipPlan, UnitPlan};
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

/// Units of convolutions, one after another: one of most blocks, two of a double one, `n_layers` of a multiple one.
#[derive(Debug)]
pub(super) struct Block<A> {
    units: Vec<Unit<A>>,
    activation: Option<SharedActivation<A>>,
}

/// Convolutions, an activation behind some of them, and a path around them in ConvNeXt blocks.
#[derive(Debug)]
struct Unit<A> {
    convs: Vec<FaceConv<A>>,
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
        let mut activation: Option<SharedActivation<A>> = None;
        let mut units = Vec::new();
        for UnitPlan { skip_name, convs_name, skip, shapes, activated } in plan.units() {
            let skip = match skip {
                SkipPlan::Nothing => Skip::Nothing,
                SkipPlan::Identity => Skip::Identity,
                SkipPlan::Conv(channels) => Skip::Conv(FaceConv::new(&skip_name, channels, (1, 1), params)?),
            };
            let mut convs = Vec::with_capacity(shapes.len());
            let mut number = 0;
            for (index, (channels, kernel)) in shapes.into_iter().enumerate() {
                let name = format!("{convs_name}.{number}");
                convs.push(FaceConv::new(&name, channels, (kernel, plan.dilation), params)?);
                number += 1;
                let (Some(function), true) = (plan.activation, index < activated) else { continue };
                let name = format!("{convs_name}.{number}");
                number += 1;
                match &activation {
                    Some(shared) => shared.tie(&name, params)?,
                    None => activation = Some(SharedActivation::new(function, name, params)?),
                }
            }
            units.push(Unit { convs, activated, skip });
        }
        Ok(Self { units, activation })
    }

    pub(super) fn forward(&self, x: &A) -> Result<A> {
        let mut x = x.shallow_clone();
        for unit in &self.units {
            x = unit.forward(&x, self.activation.as_ref())?;
        }
        Ok(x)
    }
}

impl<A: Array> Unit<A> {
    fn forward(&self, x: &A, activation: Option<&SharedActivation<A>>) -> Result<A> {
        let mut y = x.shallow_clone();
        for (index, conv) in self.convs.iter().enumerate() {
            y = conv.forward(&y)?;
            if let (Some(activation), true) = (activation, index < self.activated) {
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
