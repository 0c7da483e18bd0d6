//! A convolution's arguments, checked against shapes, and the dense operator that goes by them.

use std::sync::LazyLock;

use isobar_torch::guard::is_grad_enabled;
use tch::{Device, Kind, TchError, Tensor};

use super::conv::{Conv, Padding};
use super::pad::PadMode;
use super::{WindowGeometry, each};
use crate::error::{Result, refuse};
use crate::precision::lowered;

/// Shapes of the input, the weight, and the bias if there is one.
pub type Shapes<'a> = (&'a [i64], &'a [i64], Option<&'a [i64]>);

/// Arguments of libtorch's convolution, one value for each spatial dim.
#[derive(Debug, Clone)]
pub struct ConvParams {
    /// Step between outputs.
    pub stride: Vec<i64>,
    /// Zeros before and after.
    pub padding: Vec<i64>,
    /// Step between the kernel's elements.
    pub dilation: Vec<i64>,
    /// Number of elements added at the end of a transposed convolution's result.
    pub extra: Vec<i64>,
}

impl Conv {
    /// Returns the geometry along each spatial dim, for an input `[batch, in, extent…]`.
    ///
    /// # Errors
    ///
    /// Shapes or options that do not fit.
    ///
    /// ```
    /// use isobar_array::{Conv, Padding};
    ///
    /// let same = Conv { padding: Padding::Same, ..Conv::default() };
    /// let geometry = same.geometry(&[1, 3, 8, 16], &[6, 3, 4, 3], None)?;
    /// assert_eq!((geometry[0].result, geometry[1].result), (8, 16));
    /// // A kernel of 4 needs 3 more elements: the extra one goes at the end.
    /// assert_eq!((geometry[0].before, geometry[0].after), (1, 2));
    /// # Ok::<(), isobar_array::Error>(())
    /// ```
    pub fn geometry(&self, x: &[i64], weight: &[i64], bias: Option<&[i64]>) -> Result<Vec<WindowGeometry>> {
        const OP: &str = "conv";
        let (channels, per_group) = (x[1], weight[1]);
        if self.groups < 1 || per_group * self.groups != channels || weight[0] % self.groups != 0 {
            let groups = self.groups;
            return refuse(
                OP,
                format!("weight {weight:?} in {groups} groups does not fit {channels} channels"),
            );
        }
        check_bias(OP, bias, weight[0])?;
        let kernels = &weight[2..];
        let stride = each(OP, "stride", &self.stride, kernels.len())?;
        let dilation = each(OP, "dilation", &self.dilation, kernels.len())?;
        if stride.iter().chain(&dilation).any(|&step| step < 1) {
            return refuse(OP, "stride and dilation must be at least 1");
        }
        let padding = self.paddings(kernels, &stride, &dilation)?;
        let mut geometries = Vec::with_capacity(kernels.len());
        for (index, &kernel) in kernels.iter().enumerate() {
            let extent = x[index + 2];
            let (before, after) = padding[index];
            let (stride, dilation) = (stride[index], dilation[index]);
            let room = extent + before + after - dilation * (kernel - 1) - 1;
            if room < 0 || kernel < 1 {
                return refuse(
                    OP,
                    format!("a kernel of {kernel} does not fit {extent} elements with padding"),
                );
            }
            self.padding_mode.check(OP, extent, before, after)?;
            let result = room / stride + 1;
            geometries.push(WindowGeometry {
                dim: index + 2,
                extent,
                result,
                kernel,
                stride,
                dilation,
                before,
                after,
            });
        }
        Ok(geometries)
    }

    /// Returns the arguments of the transposed convolution of an input `[batch, in, extent…]`, and the result's extents.
    ///
    /// # Errors
    ///
    /// Shapes or options that do not fit.
    pub fn transposed(
        &self,
        (x, weight, bias): Shapes<'_>,
        output_padding: &[i64],
    ) -> Result<(ConvParams, Vec<i64>)> {
        const OP: &str = "conv_transpose";
        let Padding::Each(padding) = &self.padding else { return refuse(OP, "it has no padding `same`") };
        if self.padding_mode != PadMode::Constant {
            return refuse(OP, "it pads with zeros only");
        }
        if self.groups < 1 || weight[0] != x[1] || weight[0] % self.groups != 0 {
            return refuse(OP, format!("weight {weight:?} does not fit {} channels", x[1]));
        }
        check_bias(OP, bias, weight[1] * self.groups)?;
        let kernels = &weight[2..];
        let stride = each(OP, "stride", &self.stride, kernels.len())?;
        let dilation = each(OP, "dilation", &self.dilation, kernels.len())?;
        let padding = each(OP, "padding", padding, kernels.len())?;
        let extra = each(OP, "output_padding", output_padding, kernels.len())?;
        if stride.iter().chain(&dilation).any(|&step| step < 1)
            || padding.iter().chain(&extra).any(|&p| p < 0)
        {
            return refuse(OP, "stride and dilation must be at least 1, paddings at least 0");
        }
        let mut results = Vec::with_capacity(kernels.len());
        for (index, &kernel) in kernels.iter().enumerate() {
            let (extent, stride, extra) = (x[index + 2], stride[index], extra[index]);
            if extra >= stride.max(dilation[index]) {
                return refuse(
                    OP,
                    format!("output_padding {extra} must be below stride {stride} or dilation"),
                );
            }
            let reach = dilation[index] * (kernel - 1);
            let result = (extent - 1) * stride - 2 * padding[index] + reach + extra + 1;
            if result < 1 || extent < 1 {
                return refuse(OP, format!("{extent} elements give a result of extent {result}"));
            }
            results.push(result);
        }
        Ok((ConvParams { stride, padding, dilation, extra }, results))
    }

    /// Elements before and after along each dim.
    fn paddings(&self, kernels: &[i64], stride: &[i64], dilation: &[i64]) -> Result<Vec<(i64, i64)>> {
        match &self.padding {
            Padding::Each(padding) => {
                let padding = each("conv", "padding", padding, kernels.len())?;
                if padding.iter().any(|&p| p < 0) {
                    return refuse("conv", format!("padding {padding:?} is negative"));
                }
                Ok(padding.into_iter().map(|p| (p, p)).collect())
            }
            Padding::Same if stride.iter().any(|&s| s != 1) => {
                refuse("conv", "padding `same` is for stride 1")
            }
            Padding::Same => {
                let of = |(kernel, dilation): (&i64, &i64)| {
                    let total = dilation * (kernel - 1);
                    (total / 2, total - total / 2)
                };
                Ok(kernels.iter().zip(dilation).map(of).collect())
            }
        }
    }
}

impl ConvParams {
    /// Takes the arguments from geometries. Pads only dims whose border the dense operator handles (`native`).
    pub fn within(geometries: &[WindowGeometry], native: &[bool]) -> Self {
        let values = |f: fn(&WindowGeometry) -> i64| geometries.iter().map(f).collect();
        let padding = geometries.iter().zip(native);
        Self {
            stride: values(|geometry| geometry.stride),
            padding: padding.map(|(geometry, native)| if *native { geometry.before } else { 0 }).collect(),
            dilation: values(|geometry| geometry.dilation),
            extra: vec![0; geometries.len()],
        }
    }

    /// Convolves. libtorch refuses tensors without channels: an input gets one of zeros, and a result one that is cut off
    /// again.
    ///
    /// # Errors
    ///
    /// libtorch refuses the shapes or dtypes.
    pub fn convolve(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        groups: i64,
        transposed: bool,
    ) -> Result<Tensor, TchError> {
        // oneDNN's fast kernel for the gradient of a volume's weight refuses padding of the first dim where vectors have 8 floats.
        static PADS: LazyLock<bool> = LazyLock::new(|| isobar_torch::cpu_capability() == "AVX2");
        self.convolve_with(x, weight, bias, (groups, transposed), *PADS)
    }

    /// Convolves. If `pads`, the input of a volume that oneDNN trains is padded before, along its first dim. That takes half the time,
    /// and more memory.
    fn convolve_with(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        (groups, transposed): (i64, bool),
        pads: bool,
    ) -> Result<Tensor, TchError> {
        let (input, output) = if transposed { (0, 1) } else { (1, 0) };
        let (mut x, mut weight) = (lowered(x)?, lowered(weight)?);
        let mut bias = bias.map(lowered).transpose()?;
        let none = weight.size()[output] == 0;
        if x.size()[1] == 0 {
            x = with_one(&x, 1)?;
            weight = with_one(&weight, input)?;
        }
        if none {
            weight = with_one(&weight, output)?;
            bias = bias.map(|bias| with_one(&bias, 0)).transpose()?;
        }
        let order = order_for_onednn(&x, &weight, groups);
        let mut padding = self.padding.clone();
        let first = order.map_or(0, |order| order[0]);
        let by_onednn = order.is_some() || takes_onednn(&x, groups);
        if pads && !transposed && padding[first] > 0 && by_onednn && trains_volume(&x, &weight) {
            x = padded(&x, first as i64 + 2, [padding[first]; 2])?;
            padding[first] = 0;
        }
        let (stride, padding) = (self.stride.as_slice(), padding.as_slice());
        let (dilation, extra) = (self.dilation.as_slice(), self.extra.as_slice());
        let y = match order {
            Some(spatial) => {
                let order: Vec<i64> = [0, 1].into_iter().chain(spatial.map(|dim| dim as i64 + 2)).collect();
                let of = |values: &[i64]| spatial.map(|dim| values[dim]);
                let mut back = [0, 1, 0, 0, 0];
                order.iter().enumerate().for_each(|(at, &dim)| back[dim as usize] = at as i64);
                let (x, weight) = (x.f_permute(&order)?, weight.f_permute(&order)?);
                let bias = bias.as_ref();
                let (stride, padding, dilation, extra) = (of(stride), of(padding), of(dilation), of(extra));
                x.f_convolution(&weight, bias, stride, padding, dilation, transposed, extra, groups)?
                    .f_permute(back)?
                    .f_contiguous()?
            }
            None => {
                x.f_convolution(&weight, bias.as_ref(), stride, padding, dilation, transposed, extra, groups)?
            }
        };
        if none { y.f_narrow(1, 0, 0) } else { Ok(y) }
    }
}

/// Most numbers of a sample's first planes for which libtorch takes its own kernel.
const FEW: i64 = 20480;

/// The order of spatial dims in which libtorch takes oneDNN for a volume on CPU, where it does not as they stand: it looks at
/// the first two only, which are small where the first is split, and else writes every kernel's window out, which takes more
/// time and tens of times the input's memory.
fn order_for_onednn(x: &Tensor, weight: &Tensor, groups: i64) -> Option<[usize; 3]> {
    let [1, channels, extents @ ..] = &x.size()[..] else { return None };
    let [_, _, kernel @ ..] = &weight.size()[..] else { return None };
    let (Ok(extents), Ok(kernel)) = (<[i64; 3]>::try_from(extents), <[i64; 3]>::try_from(kernel)) else {
        return None;
    };
    let small = |[first, second, _]: [usize; 3]| channels * extents[first] * extents[second] <= FEW;
    let wide = kernel.iter().any(|&points| points > 3) || kernel.contains(&1);
    if groups > 1 || wide || x.kind() != Kind::Float || x.device() != Device::Cpu || !small([0, 1, 2]) {
        return None;
    }
    [[1, 2, 0], [0, 2, 1]].into_iter().find(|&order| !small(order))
}

/// Returns whether libtorch takes oneDNN for a volume with its dims as they stand.
fn takes_onednn(x: &Tensor, groups: i64) -> bool {
    let [batch, channels, first, second, _] = x.size()[..] else { return false };
    batch > 1 || groups > 1 || channels * first * second > FEW
}

/// Returns whether the gradient of the weight of a volume in single precision will be computed on CPU.
fn trains_volume(x: &Tensor, weight: &Tensor) -> bool {
    let is_volume = x.dim() == 5 && x.kind() == Kind::Float && x.device() == Device::Cpu;
    is_volume && weight.requires_grad() && is_grad_enabled()
}

/// Pads a dim with zeros before and after.
fn padded(x: &Tensor, dim: i64, widths: [i64; 2]) -> Result<Tensor, TchError> {
    let behind = x.dim() as i64 - 1 - dim;
    let pairs: Vec<i64> = std::iter::repeat_n(0, 2 * behind as usize).chain(widths).collect();
    x.f_constant_pad_nd(pairs)
}

/// One element of zeros along a dim that has none.
fn with_one(x: &Tensor, dim: usize) -> Result<Tensor, TchError> {
    padded(x, dim as i64, [0, 1])
}

/// Returns the number of spatial dims of a weight, after checking that the input has as many, with or without a batch.
///
/// # Errors
///
/// Shapes that do not fit each other.
pub fn spatial_dims(op: &'static str, x: &[i64], weight: &[i64]) -> Result<usize> {
    match weight.len().checked_sub(2) {
        Some(spatial @ 1..=3) if x.len() == spatial + 2 || x.len() == spatial + 1 => Ok(spatial),
        _ => refuse(
            op,
            format!(
                "input {x:?} and weight {weight:?}; expected [batch, channel, extent…] and [_, _, kernel…] of \
                 1 to 3 dims"
            ),
        ),
    }
}

fn check_bias(op: &'static str, bias: Option<&[i64]>, channels: i64) -> Result<()> {
    match bias {
        Some(bias) if bias != [channels] => {
            refuse(op, format!("bias {bias:?} is not one number for each of {channels} channels"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With and without an input that is padded before, results and gradients are those of double precision, but for rounding.
    #[rstest::rstest]
    #[case::one_sample(&[1, 16, 40, 36, 4], 1, [1, 1, 1])]
    #[case::in_another_order(&[1, 16, 4, 40, 36], 1, [1, 2, 1])]
    #[case::batch(&[2, 4, 5, 6, 7], 1, [1, 2, 1])]
    #[case::groups(&[1, 4, 5, 6, 7], 2, [2, 1, 1])]
    #[case::one_plane(&[2, 4, 1, 6, 7], 1, [1, 1, 1])]
    #[case::few(&[1, 4, 5, 6, 7], 1, [1, 1, 1])]
    fn padding_before_changes_nothing(#[case] shape: &[i64], #[case] groups: i64, #[case] stride: [i64; 3]) {
        let leaf = |shape: &[i64], kind: Kind| {
            let x = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
            (x * 0.7).sin().reshape(shape).to_kind(kind).set_requires_grad(true)
        };
        let run = |pads: bool, kind: Kind| {
            let weight = leaf(&[6, shape[1] / groups, 3, 3, 3], kind);
            let (x, bias) = (leaf(shape, kind), leaf(&[6], kind));
            let (padding, dilation) = (vec![2, 2, 1], vec![2, 1, 1]);
            let steps = ConvParams { stride: stride.to_vec(), padding, dilation, extra: vec![0; 3] };
            let y = steps.convolve_with(&x, &weight, Some(&bias), (groups, false), pads).unwrap();
            (&y * y.detach().cos()).sum(kind).backward();
            [y.detach(), x.grad(), weight.grad(), bias.grad()].map(|tensor| tensor.to_kind(Kind::Double))
        };
        let double = run(false, Kind::Double);
        for pads in [false, true] {
            for (single, double) in run(pads, Kind::Float).iter().zip(&double) {
                let largest = double.abs().max().double_value(&[]);
                let worst = (single - double).abs().max().double_value(&[]);
                assert!(worst <= 1e-3 * largest, "{pads}: {worst} of {largest}");
            }
        }
    }

    /// Nothing is padded for a weight that is not trained, another precision, or libtorch's own kernel.
    #[test]
    fn padding_is_for_volumes_that_onednn_trains() {
        let volume = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
        let (x, fixed) = (volume(&[1, 16, 40, 40, 4]), volume(&[16, 16, 3, 3, 3]));
        let trained = fixed.copy().set_requires_grad(true);
        assert!(trains_volume(&x, &trained) && !trains_volume(&x, &fixed));
        assert!(!trains_volume(&x.to_kind(Kind::Double), &trained) && !trains_volume(&x.get(0), &trained));
        tch::no_grad(|| assert!(!trains_volume(&x, &trained)));
        let takes = |shape: &[i64], groups| takes_onednn(&volume(shape), groups);
        assert!(takes(&[1, 16, 40, 40, 4], 1) && takes(&[2, 16, 4, 4, 4], 1) && takes(&[1, 16, 4, 4, 4], 2));
        assert!(!takes(&[1, 16, 4, 4, 4], 1));
    }

    #[test]
    fn the_order_of_dims_changes_nothing() {
        for (extents, order) in [([4, 40, 36], [1, 2, 0]), ([40, 4, 36], [0, 2, 1])] {
            for transposed in [false, true] {
                let shape = [&[1, 16], &extents[..]].concat();
                let x = Tensor::rand(shape, (Kind::Float, Device::Cpu));
                let weight = Tensor::rand([16, 16, 2, 3, 3], (Kind::Float, Device::Cpu));
                assert_eq!(order_for_onednn(&x, &weight, 1), Some(order));
                let extra = if transposed { vec![1, 0, 1] } else { vec![0; 3] };
                let (stride, padding) = (vec![2, 1, 3], vec![0, 1, 2]);
                let steps = ConvParams { stride, padding, dilation: vec![1, 2, 1], extra };
                let y = steps.convolve(&x, &weight, None, 1, transposed).unwrap();
                let wide = Kind::Double;
                let (x, weight) = (x.to_kind(wide), weight.to_kind(wide));
                let want = steps.convolve(&x, &weight, None, 1, transposed).unwrap();
                assert!(y.is_contiguous() && y.to_kind(wide).allclose(&want, 1e-4, 1e-3, false));
            }
        }
    }
}
