//! Convolutions and transposed convolutions.

use isobar_array::{Array, Conv};
use isobar_shard::{Init, Params, Placement, Result};

use crate::check::{divisible, extent, refuse};
use crate::layer::layers_without_mode;

/// A convolution over the number of spatial dims of its kernel: [`Conv1d`], [`Conv2d`], [`Conv3d`] where the number is known at
/// run time only.
#[derive(Debug)]
pub struct ConvNd<A> {
    weight: A,
    bias: Option<A>,
    conv: Conv,
}

impl<A: Array> ConvNd<A> {
    /// Makes a convolution with a bias, from `[in_channels, out_channels]` and the kernel's extents. `conv` has the stride,
    /// padding, dilation, groups and padding mode; its default is PyTorch's.
    ///
    /// # Errors
    ///
    /// A size below 1, channels that are not divisible by the groups, other than 1 to 3 spatial dims, or a parameter that
    /// `params` refuses.
    pub fn new(
        channels: [i64; 2],
        kernel: &[i64],
        conv: Conv,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        Self::make("Conv", channels, kernel, (conv, true), params)
    }

    /// Makes a convolution without a bias.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub fn without_bias(
        channels: [i64; 2],
        kernel: &[i64],
        conv: Conv,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        Self::make("Conv", channels, kernel, (conv, false), params)
    }

    fn make(
        layer: &'static str,
        channels: [i64; 2],
        kernel: &[i64],
        (conv, bias): (Conv, bool),
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        check(layer, channels, kernel, conv.groups)?;
        let [inputs, outputs] = [channels[0] / conv.groups, channels[1]];
        let shape = [&[outputs, inputs], kernel].concat();
        let (weight, bias) = parameters(&shape, outputs, bias, params)?;
        Ok(Self { weight, bias, conv })
    }

    /// Computes `[batch, out_channels, extents…]` from `x` `[batch, in_channels, extents…]`.
    ///
    /// # Errors
    ///
    /// Another number of channels or dims, extents smaller than the kernel, or an exchange that fails.
    pub fn forward(&self, x: &A) -> Result<A> {
        Ok(x.conv(&self.weight, self.bias.as_ref(), &self.conv)?)
    }

    /// Convolves with the kernel mirrored along these dims of the weight: the result for a mirrored `x`, mirrored back.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward); a dim that does not exist.
    pub fn forward_mirrored(&self, x: &A, dims: &[i64]) -> Result<A> {
        Ok(x.conv(&self.weight.flip(dims)?, self.bias.as_ref(), &self.conv)?)
    }
}

/// A transposed convolution over the number of spatial dims of its kernel: [`ConvTranspose1d`], [`ConvTranspose2d`],
/// [`ConvTranspose3d`] where the number is known at run time only.
#[derive(Debug)]
pub struct ConvTransposeNd<A> {
    weight: A,
    bias: Option<A>,
    conv: Conv,
    output_padding: Vec<i64>,
}

impl<A: Array> ConvTransposeNd<A> {
    /// Makes a transposed convolution with a bias, from `[in_channels, out_channels]` and the kernel's extents.
    /// `output_padding` is one number for all spatial dims, or one for each.
    ///
    /// # Errors
    ///
    /// A size below 1, channels that are not divisible by the groups, other than 1 to 3 spatial dims, or a parameter that
    /// `params` refuses.
    pub fn new(
        channels: [i64; 2],
        kernel: &[i64],
        conv: Conv,
        output_padding: &[i64],
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        Self::make("ConvTranspose", channels, kernel, (conv, output_padding, true), params)
    }

    /// Makes a transposed convolution without a bias.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub fn without_bias(
        channels: [i64; 2],
        kernel: &[i64],
        conv: Conv,
        output_padding: &[i64],
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        Self::make("ConvTranspose", channels, kernel, (conv, output_padding, false), params)
    }

    fn make(
        layer: &'static str,
        channels: [i64; 2],
        kernel: &[i64],
        (conv, output_padding, bias): (Conv, &[i64], bool),
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        check(layer, channels, kernel, conv.groups)?;
        let shape = [&[channels[0], channels[1] / conv.groups], kernel].concat();
        let (weight, bias) = parameters(&shape, channels[1], bias, params)?;
        Ok(Self { weight, bias, conv, output_padding: output_padding.to_vec() })
    }

    /// Computes `[batch, out_channels, extents…]` from `x` `[batch, in_channels, extents…]`.
    ///
    /// # Errors
    ///
    /// Another number of channels or dims, or an exchange that fails.
    pub fn forward(&self, x: &A) -> Result<A> {
        Ok(x.conv_transpose(&self.weight, self.bias.as_ref(), &self.conv, &self.output_padding)?)
    }
}

/// Makes the weight of that shape and the bias, which start uniform in ±1/√fan. As in PyTorch, the fan is the product of all
/// extents of the weight but the first.
fn parameters<A: Array>(
    shape: &[i64],
    outputs: i64,
    bias: bool,
    params: &mut impl Params<Array = A>,
) -> Result<(A, Option<A>)> {
    // Saturates: weights that large are refused for their memory.
    let fan = shape[1..].iter().fold(1i64, |fan, &extent| fan.saturating_mul(extent));
    let weight = params.param("weight", shape, Init::FanIn(fan), Placement::Replicate)?;
    let bias = match bias {
        true => Some(params.param("bias", &[outputs], Init::FanIn(fan), Placement::Replicate)?),
        false => None,
    };
    Ok((weight, bias))
}

fn check(layer: &'static str, [inputs, outputs]: [i64; 2], kernel: &[i64], groups: i64) -> Result<()> {
    extent(layer, "in_channels", inputs)?;
    extent(layer, "out_channels", outputs)?;
    let groups = ("groups", extent(layer, "groups", groups)?);
    divisible(layer, ("in_channels", inputs), groups)?;
    divisible(layer, ("out_channels", outputs), groups)?;
    if !(1..=3).contains(&kernel.len()) {
        return refuse(
            layer,
            format!("kernel {kernel:?}: expected one extent for each of 1 to 3 spatial dims"),
        );
    }
    kernel.iter().try_for_each(|&elements| extent(layer, "kernel_size", elements).map(|_| ()))
}

layers_without_mode!(ConvNd, ConvTransposeNd);

/// Defines the convolutions of a fixed number of spatial dims.
macro_rules! fixed {
    ($conv:ident, $transposed:ident, $dims:literal, $extents:literal, $example:literal, $grown:literal) => {
        #[doc = concat!("A convolution over ", stringify!($dims), " spatial dims (`torch.nn.", stringify!($conv), "`).")]
        #[doc = ""]
        #[doc = concat!("Shapes: input `[batch, in_channels, ", $extents, "]`, output `[batch, out_channels, …]`. State dict: \
            `weight` `[out_channels, in_channels / groups, kernel…]`, `bias` `[out_channels]`, both uniform in ±1/√fan at \
            first, with the fan in_channels / groups · ∏ kernel.")]
        #[doc = ""]
        #[doc = "```"]
        #[doc = "use isobar_array::{Conv, Generator, Padding};"]
        #[doc = concat!("use isobar_nn::", stringify!($conv), ";")]
        #[doc = "use isobar_shard::ParamStore;"]
        #[doc = "use tch::{Device, Kind, Tensor};"]
        #[doc = ""]
        #[doc = "let mut params = ParamStore::new(Generator::new(1));"]
        #[doc = "let options = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };"]
        #[doc = concat!("let conv = ", stringify!($conv), "::new(2, 4, [3; ", stringify!($dims), "], options, &mut params)?;")]
        #[doc = concat!("let y = conv.forward(&Tensor::ones(", $example, ", (Kind::Float, Device::Cpu)))?;")]
        #[doc = concat!("assert_eq!(y.size()[2..], ", $example, "[2..]);")]
        #[doc = "# Ok::<(), isobar_nn::Error>(())"]
        #[doc = "```"]
        #[derive(Debug)]
        pub struct $conv<A>(ConvNd<A>);

        impl<A: Array> $conv<A> {
            /// Makes a convolution with a bias. `conv` has the stride, padding, dilation, groups and padding mode; its default is
            /// PyTorch's.
            ///
            /// # Errors
            ///
            /// A size below 1, channels that are not divisible by the groups, or a parameter that `params` refuses.
            pub fn new(
                in_channels: i64,
                out_channels: i64,
                kernel_size: [i64; $dims],
                conv: Conv,
                params: &mut impl Params<Array = A>,
            ) -> Result<Self> {
                let channels = [in_channels, out_channels];
                Ok(Self(ConvNd::make(stringify!($conv), channels, &kernel_size, (conv, true), params)?))
            }

            /// Makes a convolution without a bias.
            ///
            /// # Errors
            ///
            /// See [`new`](Self::new).
            pub fn without_bias(
                in_channels: i64,
                out_channels: i64,
                kernel_size: [i64; $dims],
                conv: Conv,
                params: &mut impl Params<Array = A>,
            ) -> Result<Self> {
                let channels = [in_channels, out_channels];
                Ok(Self(ConvNd::make(stringify!($conv), channels, &kernel_size, (conv, false), params)?))
            }

            #[doc = concat!("Computes `[batch, out_channels, …]` from `x` `[batch, in_channels, ", $extents, "]`.")]
            ///
            /// # Errors
            ///
            /// Another number of channels or dims, extents smaller than the kernel, or an exchange that fails.
            pub fn forward(&self, x: &A) -> Result<A> {
                self.0.forward(x)
            }
        }

        #[doc = concat!("A transposed convolution over ", stringify!($dims), " spatial dims (`torch.nn.",
            stringify!($transposed), "`).")]
        #[doc = ""]
        #[doc = concat!("Shapes: input `[batch, in_channels, ", $extents, "]`, output `[batch, out_channels, …]` with extents \
            (n − 1) · stride − 2 · padding + dilation · (kernel − 1) + output_padding + 1. State dict: `weight` \
            `[in_channels, out_channels / groups, kernel…]`, `bias` `[out_channels]`, both uniform in ±1/√fan at first, with \
            the fan out_channels / groups · ∏ kernel.")]
        #[doc = ""]
        #[doc = "```"]
        #[doc = "use isobar_array::{Conv, Generator};"]
        #[doc = concat!("use isobar_nn::", stringify!($transposed), ";")]
        #[doc = "use isobar_shard::ParamStore;"]
        #[doc = "use tch::{Device, Kind, Tensor};"]
        #[doc = ""]
        #[doc = "let mut params = ParamStore::new(Generator::new(1));"]
        #[doc = "let options = Conv { stride: vec![2], ..Conv::default() };"]
        #[doc = concat!("let up = ", stringify!($transposed), "::new(2, 4, [2; ", stringify!($dims), "], options, &[0], &mut params)?;")]
        #[doc = concat!("let y = up.forward(&Tensor::ones(", $example, ", (Kind::Float, Device::Cpu)))?;")]
        #[doc = concat!("assert_eq!(y.size(), ", $grown, ");")]
        #[doc = "# Ok::<(), isobar_nn::Error>(())"]
        #[doc = "```"]
        #[derive(Debug)]
        pub struct $transposed<A>(ConvTransposeNd<A>);

        impl<A: Array> $transposed<A> {
            /// Makes a transposed convolution with a bias. `output_padding` is one number for all spatial dims, or one for each.
            ///
            /// # Errors
            ///
            /// A size below 1, channels that are not divisible by the groups, or a parameter that `params` refuses.
            pub fn new(
                in_channels: i64,
                out_channels: i64,
                kernel_size: [i64; $dims],
                conv: Conv,
                output_padding: &[i64],
                params: &mut impl Params<Array = A>,
            ) -> Result<Self> {
                let channels = [in_channels, out_channels];
                let options = (conv, output_padding, true);
                Ok(Self(ConvTransposeNd::make(stringify!($transposed), channels, &kernel_size, options, params)?))
            }

            /// Makes a transposed convolution without a bias.
            ///
            /// # Errors
            ///
            /// See [`new`](Self::new).
            pub fn without_bias(
                in_channels: i64,
                out_channels: i64,
                kernel_size: [i64; $dims],
                conv: Conv,
                output_padding: &[i64],
                params: &mut impl Params<Array = A>,
            ) -> Result<Self> {
                let channels = [in_channels, out_channels];
                let options = (conv, output_padding, false);
                Ok(Self(ConvTransposeNd::make(stringify!($transposed), channels, &kernel_size, options, params)?))
            }

            #[doc = concat!("Computes `[batch, out_channels, …]` from `x` `[batch, in_channels, ", $extents, "]`.")]
            ///
            /// # Errors
            ///
            /// Another number of channels or dims, or an exchange that fails.
            pub fn forward(&self, x: &A) -> Result<A> {
                self.0.forward(x)
            }
        }

        layers_without_mode!($conv, $transposed);
    };
}

fixed!(Conv1d, ConvTranspose1d, 1, "width", "[1, 2, 6]", "[1, 4, 12]");
fixed!(Conv2d, ConvTranspose2d, 2, "height, width", "[1, 2, 6, 4]", "[1, 4, 12, 8]");
fixed!(Conv3d, ConvTranspose3d, 3, "depth, height, width", "[1, 2, 6, 4, 4]", "[1, 4, 12, 8, 8]");
