//! Layers of the network.

use isobar_array::{Array, Conv, Unary};
use isobar_nn::{ActivationLayer, ConvNd};
use isobar_shard::Params;

use crate::error::Result;
use crate::faces::Sphere;

/// Number of faces around the equator.
const EQUATOR: i64 = 4;

/// A convolution of all faces `[face · batch, channel, n, n]`, with one kernel for the equator and one for the poles. At the pole of
/// the last face the kernel is mirrored: that face is seen from the other side.
#[derive(Debug)]
pub(super) struct FaceConv<A> {
    equator: ConvNd<A>,
    pole: ConvNd<A>,
    /// Elements that the kernel reaches beyond a face.
    reach: i64,
}

impl<A: Array> FaceConv<A> {
    /// Makes the convolution `name`, without the prefix for its region, with square kernels of the odd extent `kernel`.
    pub(super) fn new(
        name: &str,
        channels: [i64; 2],
        kernel: i64,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let mut conv = |region: &str| {
            let params = &mut params.scope(&format!("{region}_{name}"));
            ConvNd::new(channels, &[kernel; 2], Conv::default(), params)
        };
        Ok(Self { equator: conv("equatorial")?, pole: conv("polar")?, reach: kernel / 2 })
    }

    pub(super) fn forward(&self, x: &A) -> Result<A> {
        let x = Sphere::Cube.pad(x, self.reach)?;
        let batch = x.extent(0)? / Sphere::Cube.faces();
        // One split: in backward, three slices would each fill a full field with zeros.
        let faces = x.split(&[EQUATOR * batch, batch, batch], 0)?;
        let equator = self.equator.forward(&faces[0])?;
        let first = self.pole.forward(&faces[1])?;
        let second = self.pole.forward_mirrored(&faces[2], &[-1])?;
        Ok(A::cat(&[&equator, &first, &second], 0)?)
    }
}

/// An activation with bounds.
#[derive(Debug)]
pub(super) struct Bounded<A> {
    pub(super) activation: ActivationLayer<A>,
    pub(super) bounds: [f64; 2],
}

impl<A: Array> Bounded<A> {
    pub(super) fn shallow_clone(&self) -> Self {
        Self { activation: self.activation.shallow_clone(), bounds: self.bounds }
    }

    fn forward(&self, x: &A) -> Result<A> {
        let y = self.activation.forward(x)?;
        let [min, max] = self.bounds;
        match min.is_infinite() && max.is_infinite() {
            true => Ok(y),
            false => Ok(y.unary(Unary::Clamp { min, max })?),
        }
    }
}

/// Two convolutions, each with its activation.
#[derive(Debug)]
pub(super) struct Pair<A> {
    convs: [FaceConv<A>; 2],
    activation: Bounded<A>,
}

impl<A: Array> Pair<A> {
    /// Makes the convolutions `first` and `first + 1` of a list, between these numbers of channels.
    pub(super) fn new(
        (list, first): (&str, usize),
        [inputs, between, outputs]: [i64; 3],
        activation: &Bounded<A>,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        let mut conv =
            |number: usize, channels| FaceConv::new(&format!("{list}.{number}"), channels, 3, params);
        let convs = [conv(first, [inputs, between])?, conv(first + 1, [between, outputs])?];
        Ok(Self { convs, activation: activation.shallow_clone() })
    }

    pub(super) fn forward(&self, x: &A) -> Result<A> {
        let [first, second] = &self.convs;
        let x = self.activation.forward(&first.forward(x)?)?;
        self.activation.forward(&second.forward(&x)?)
    }
}
