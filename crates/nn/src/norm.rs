//! Normalizations of each sample: layer, root mean square, group and instance norm.

use isobar_array::{Array, Reduction, Unary};
use isobar_shard::{Init, Params, Placement, Result};
use tch::Kind;

use crate::check::{divisible, extent, refuse};
use crate::layer::layers_without_mode;

/// Added to variances by default.
pub(crate) const EPS: f64 = 1e-5;

/// A weight and a bias that start with 1 and 0.
pub(crate) fn affine<A: Array>(shape: &[i64], params: &mut impl Params<Array = A>) -> Result<(A, A)> {
    let weight = params.param("weight", shape, Init::Constant(1.0), Placement::Replicate)?;
    let bias = params.param("bias", shape, Init::Constant(0.0), Placement::Replicate)?;
    Ok((weight, bias))
}

/// y = (x − mean) / √(variance + eps) · weight + bias, over the trailing dims (`torch.nn.LayerNorm`).
///
/// Shapes: input and output `[…, normalized_shape…]`. State dict: `weight` and `bias`, of the normalized shape, 1 and 0 at
/// first.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::LayerNorm;
/// use isobar_shard::ParamStore;
/// use tch::Tensor;
///
/// let norm = LayerNorm::new(&[2], &mut ParamStore::new(Generator::new(1)))?;
/// let y = norm.forward(&Tensor::from_slice2(&[[1.0f32, 3.0], [5.0, 5.0]]))?;
/// assert!((y - Tensor::from_slice2(&[[-1.0f32, 1.0], [0.0, 0.0]])).abs().max().double_value(&[]) < 1e-4);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct LayerNorm<A> {
    shape: Vec<i64>,
    weight: Option<A>,
    bias: Option<A>,
    eps: f64,
}

impl<A: Array> LayerNorm<A> {
    /// Makes a layer norm with weight and bias and `eps` = 10⁻⁵.
    ///
    /// # Errors
    ///
    /// An extent below 1, or a parameter that `params` refuses.
    pub fn new(normalized_shape: &[i64], params: &mut impl Params<Array = A>) -> Result<Self> {
        Self::with_eps(normalized_shape, EPS, params)
    }

    /// Makes a layer norm with weight and bias.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub fn with_eps(normalized_shape: &[i64], eps: f64, params: &mut impl Params<Array = A>) -> Result<Self> {
        check_shape("LayerNorm", normalized_shape)?;
        let (weight, bias) = affine(normalized_shape, params)?;
        Ok(Self { shape: normalized_shape.to_vec(), weight: Some(weight), bias: Some(bias), eps })
    }

    /// Makes a layer norm without parameters (`elementwise_affine=False`).
    ///
    /// # Errors
    ///
    /// An extent below 1.
    pub fn without_affine(normalized_shape: &[i64], eps: f64) -> Result<Self> {
        check_shape("LayerNorm", normalized_shape)?;
        Ok(Self { shape: normalized_shape.to_vec(), weight: None, bias: None, eps })
    }

    /// Normalizes the trailing dims of `x` `[…, normalized_shape…]`; the result has its shape.
    ///
    /// # Errors
    ///
    /// Trailing dims other than the normalized shape, or an exchange that fails.
    pub fn forward(&self, x: &A) -> Result<A> {
        Ok(x.layer_norm(&self.shape, self.weight.as_ref(), self.bias.as_ref(), self.eps)?)
    }

    /// Normalizes the channels of `[batch, channel, extents…]` at each point; the normalized shape is the number of channels.
    ///
    /// # Errors
    ///
    /// See [`forward`](Self::forward).
    ///
    /// ```
    /// use isobar_nn::LayerNorm;
    /// use tch::Tensor;
    ///
    /// // Two channels at two points: [batch, channel, extent].
    /// let x = Tensor::from_slice(&[1.0, 10.0, 3.0, 30.0]).view([1, 2, 2]);
    /// let y = LayerNorm::without_affine(&[2], 0.0)?.forward_channels_first(&x)?;
    /// let want = Tensor::from_slice(&[-1.0, -1.0, 1.0, 1.0]).view([1, 2, 2]);
    /// assert!(y.allclose(&want, 1e-9, 1e-9, false));
    /// # Ok::<(), isobar_nn::Error>(())
    /// ```
    pub fn forward_channels_first(&self, x: &A) -> Result<A> {
        let dims = x.shape().len() as i64;
        let last: Vec<i64> = [0].into_iter().chain(2..dims).chain([1]).collect();
        let back: Vec<i64> = [0, dims - 1].into_iter().chain(1..dims - 1).collect();
        Ok(self.forward(&x.permute(&last)?)?.permute(&back)?)
    }
}

/// y = x / √(mean of x² + eps) · weight, over the trailing dims (`torch.nn.RMSNorm`): Zhang and Sennrich, arXiv:1910.07467.
///
/// Shapes: input and output `[…, normalized_shape…]`. State dict: `weight` of the normalized shape, 1 at first.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::RmsNorm;
/// use isobar_shard::ParamStore;
/// use tch::Tensor;
///
/// let norm = RmsNorm::new(&[2], None, &mut ParamStore::new(Generator::new(1)))?;
/// let y = norm.forward(&Tensor::from_slice2(&[[3.0f32, -3.0]]))?;
/// assert!((y - Tensor::from_slice2(&[[1.0f32, -1.0]])).abs().max().double_value(&[]) < 1e-6);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct RmsNorm<A> {
    shape: Vec<i64>,
    weight: Option<A>,
    eps: Option<f64>,
}

impl<A: Array> RmsNorm<A> {
    /// Makes the norm. `eps` is the dtype's machine epsilon where not given, as in PyTorch.
    ///
    /// # Errors
    ///
    /// An extent below 1, or a parameter that `params` refuses.
    pub fn new(
        normalized_shape: &[i64],
        eps: Option<f64>,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        check_shape("RmsNorm", normalized_shape)?;
        let weight = params.param("weight", normalized_shape, Init::Constant(1.0), Placement::Replicate)?;
        Ok(Self { shape: normalized_shape.to_vec(), weight: Some(weight), eps })
    }

    /// Makes the norm without a weight (`elementwise_affine=False`).
    ///
    /// # Errors
    ///
    /// An extent below 1.
    pub fn without_affine(normalized_shape: &[i64], eps: Option<f64>) -> Result<Self> {
        check_shape("RmsNorm", normalized_shape)?;
        Ok(Self { shape: normalized_shape.to_vec(), weight: None, eps })
    }

    /// Normalizes the trailing dims of `x` `[…, normalized_shape…]`; the result has its shape. Half dtypes are computed in single
    /// precision.
    ///
    /// # Errors
    ///
    /// Trailing dims other than the normalized shape, or an exchange that fails.
    pub fn forward(&self, x: &A) -> Result<A> {
        let shape = x.shape();
        if !shape.ends_with(&self.shape) {
            return refuse("RmsNorm", format!("the input {shape:?} does not end in {:?}", self.shape));
        }
        let kind = x.kind();
        let (wide, epsilon) = match kind {
            Kind::Double => (Kind::Double, f64::EPSILON),
            _ => (Kind::Float, f64::from(f32::EPSILON)),
        };
        let eps = self.eps.unwrap_or(epsilon);
        let dims: Vec<i64> = (1..=self.shape.len() as i64).map(|dim| -dim).collect();
        let x = x.to_kind(wide)?;
        let square = x.unary(Unary::Square)?.reduce(Reduction::Mean, &dims, true)?;
        let y = x.mul(&square.add_scalar(eps)?.unary(Unary::Rsqrt)?)?.to_kind(kind)?;
        match &self.weight {
            Some(weight) => Ok(y.mul(weight)?),
            None => Ok(y),
        }
    }
}

/// Group norm over the channels of a group and all points of a sample (`torch.nn.GroupNorm`): Wu and He, arXiv:1803.08494.
///
/// Shapes: input and output `[batch, num_channels, extents…]`. State dict: `weight` and `bias` `[num_channels]`, 1 and 0 at
/// first.
///
/// ```
/// use isobar_array::Generator;
/// use isobar_nn::GroupNorm;
/// use isobar_shard::ParamStore;
/// use tch::{Device, Kind, Tensor};
///
/// let norm = GroupNorm::new(2, 6, &mut ParamStore::new(Generator::new(1)))?;
/// let y = norm.forward(&Tensor::rand([2, 6, 5, 4], (Kind::Float, Device::Cpu)))?;
/// assert!(y.mean(Kind::Float).double_value(&[]).abs() < 1e-5);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct GroupNorm<A> {
    groups: i64,
    weight: Option<A>,
    bias: Option<A>,
    eps: f64,
}

impl<A: Array> GroupNorm<A> {
    /// Makes a group norm with weight and bias and `eps` = 10⁻⁵.
    ///
    /// # Errors
    ///
    /// Channels that are not divisible by the groups, or a parameter that `params` refuses.
    pub fn new(num_groups: i64, num_channels: i64, params: &mut impl Params<Array = A>) -> Result<Self> {
        Self::with_eps(num_groups, num_channels, EPS, params)
    }

    /// Makes a group norm with weight and bias.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub fn with_eps(
        num_groups: i64,
        num_channels: i64,
        eps: f64,
        params: &mut impl Params<Array = A>,
    ) -> Result<Self> {
        check_groups(num_groups, num_channels)?;
        let (weight, bias) = affine(&[num_channels], params)?;
        Ok(Self { groups: num_groups, weight: Some(weight), bias: Some(bias), eps })
    }

    /// Makes a group norm without parameters (`affine=False`).
    ///
    /// # Errors
    ///
    /// Channels that are not divisible by the groups.
    pub fn without_affine(num_groups: i64, num_channels: i64, eps: f64) -> Result<Self> {
        check_groups(num_groups, num_channels)?;
        Ok(Self { groups: num_groups, weight: None, bias: None, eps })
    }

    /// Normalizes `[batch, num_channels, extents…]`.
    ///
    /// # Errors
    ///
    /// Another number of channels, or an exchange that fails.
    pub fn forward(&self, x: &A) -> Result<A> {
        Ok(x.group_norm(self.groups, self.weight.as_ref(), self.bias.as_ref(), self.eps)?)
    }
}

/// Instance norm: each channel over the points of a sample (`torch.nn.InstanceNorm1d` to `3d`, without running statistics).
///
/// Shapes: input and output `[batch, num_features, extents…]`. Without parameters unless it is made
/// [with them](Self::with_affine): state dict `weight` and `bias` `[num_features]`, 1 and 0 at first.
///
/// ```
/// use isobar_nn::InstanceNorm;
/// use tch::{Device, Kind, Tensor};
///
/// let norm = InstanceNorm::<Tensor>::new(3)?;
/// let y = norm.forward(&Tensor::rand([2, 3, 5, 4], (Kind::Float, Device::Cpu)))?;
/// assert!(y.mean_dim([2i64, 3].as_slice(), false, Kind::Float).abs().max().double_value(&[]) < 1e-5);
/// # Ok::<(), isobar_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct InstanceNorm<A> {
    features: i64,
    weight: Option<A>,
    bias: Option<A>,
    eps: f64,
}

impl<A: Array> InstanceNorm<A> {
    /// Makes an instance norm without parameters and `eps` = 10⁻⁵: PyTorch's default.
    ///
    /// # Errors
    ///
    /// `num_features` is below 1.
    pub fn new(num_features: i64) -> Result<Self> {
        let features = extent("InstanceNorm", "num_features", num_features)?;
        Ok(Self { features, weight: None, bias: None, eps: EPS })
    }

    /// Makes an instance norm with weight and bias (`affine=True`).
    ///
    /// # Errors
    ///
    /// `num_features` is below 1, or a parameter that `params` refuses.
    pub fn with_affine(num_features: i64, eps: f64, params: &mut impl Params<Array = A>) -> Result<Self> {
        let features = extent("InstanceNorm", "num_features", num_features)?;
        let (weight, bias) = affine(&[features], params)?;
        Ok(Self { features, weight: Some(weight), bias: Some(bias), eps })
    }

    /// Normalizes `[batch, num_features, extents…]`.
    ///
    /// # Errors
    ///
    /// Another number of channels, or an exchange that fails.
    pub fn forward(&self, x: &A) -> Result<A> {
        let shape = x.shape();
        if shape.get(1) != Some(&self.features) {
            let want = self.features;
            return refuse("InstanceNorm", format!("input of shape {shape:?}, expected [batch, {want}, …]"));
        }
        Ok(x.instance_norm(self.weight.as_ref(), self.bias.as_ref(), self.eps)?)
    }
}

fn check_shape(layer: &'static str, shape: &[i64]) -> Result<()> {
    if shape.is_empty() {
        return refuse(layer, "the normalized shape is empty; expected one dim or more".to_owned());
    }
    shape.iter().try_for_each(|&size| extent(layer, "an extent of the normalized shape", size).map(|_| ()))
}

fn check_groups(groups: i64, channels: i64) -> Result<()> {
    const OP: &str = "GroupNorm";
    let groups = extent(OP, "num_groups", groups)?;
    let channels = extent(OP, "num_channels", channels)?;
    divisible(OP, ("num_channels", channels), ("num_groups", groups))
}

layers_without_mode!(LayerNorm, RmsNorm, GroupNorm, InstanceNorm);
