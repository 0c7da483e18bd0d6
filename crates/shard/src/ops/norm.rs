//! Normalisation: to mean 0 and variance 1 over some dims, then scaled and shifted.

use isobar_array::kernel::full;
use isobar_array::{Elementwise, RunningStats};
use isobar_torch::guard::NoGrad;
use tch::{Kind, TchError, Tensor};

use super::standard::standardize;
use super::{grouped, in_full, operator, refuse, torch};
use crate::dense::named;
use crate::error::Result;
use crate::promote::{Operand, operand, promote_optional};
use crate::rules::{Call, Footprint};
use crate::tensor::{ShardTensor, same_mesh};

impl ShardTensor {
    /// (x − mean) / √(variance + `eps`) over the trailing dims, whose extents are `normalized`, times `weight` plus `bias` of that
    /// shape. Over split dims the statistics are merged by Welford's formula from one small exchange.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; the errors of the exchange.
    pub fn layer_norm(
        &self,
        normalized: &[i64],
        weight: Option<&dyn Operand>,
        bias: Option<&dyn Operand>,
        eps: f64,
    ) -> Result<Self> {
        const OP: &str = "layer_norm";
        let (weight, bias) = (promote_optional(OP, self, weight)?, promote_optional(OP, self, bias)?);
        let (weight, bias) = (weight.as_deref(), bias.as_deref());
        operator(
            OP,
            &inputs(self, weight, bias),
            args!("has_weight": weight.is_some(), "has_bias": bias.is_some(), "normalized_shape": normalized, "eps": eps),
            || {
                let first = self.ndim().checked_sub(normalized.len());
                let Some(first) =
                    first.filter(|&first| &self.shape()[first..] == normalized && !normalized.is_empty())
                else {
                    let shape = self.shape();
                    return refuse(
                        OP,
                        format!("normalized_shape is {normalized:?}; expected the last extents of {shape:?}"),
                    );
                };
                same_mesh(OP, &inputs(self, weight, bias))?;
                let x = in_full(OP, &self.resolved()?)?;
                let split = (first..x.ndim()).any(|dim| x.layout().is_sharded(dim));
                let whole = |w: Option<&Self>| {
                    w.is_none_or(|w| w.layout().is_replicated() && w.shape() == normalized)
                };
                if !split
                    && whole(weight)
                    && whole(bias)
                    && x.device_mesh() == weight.map_or(x.device_mesh(), |w| w.device_mesh())
                {
                    let axes = x.layout().sharding_axes();
                    let local =
                        |w: Option<&Self>| w.map(|w| torch(OP, full(&w.mark_varying(&axes)?))).transpose();
                    let (weight, bias) = (local(weight)?, local(bias)?);
                    let y = x.local().f_layer_norm(normalized, weight.as_ref(), bias.as_ref(), eps, false);
                    return Ok(Self::new(named(OP, &[x.local()], y)?, x.layout().clone()));
                }
                let dims: Vec<usize> = (first..x.ndim()).collect();
                let standard = standardize(OP, &x, &dims, eps)?.y;
                affine(standard, weight, bias)
            },
        )
    }

    /// Normalises each of `groups` groups of channels (dim 1) with all their elements; `weight` and `bias` are `[channel]`.
    ///
    /// # Errors
    ///
    /// Channels that do not divide; the errors of the exchange.
    pub fn group_norm(
        &self,
        groups: i64,
        weight: Option<&dyn Operand>,
        bias: Option<&dyn Operand>,
        eps: f64,
    ) -> Result<Self> {
        const OP: &str = "group_norm";
        let (weight, bias) = (promote_optional(OP, self, weight)?, promote_optional(OP, self, bias)?);
        let (weight, bias) = (weight.as_deref(), bias.as_deref());
        operator(
            OP,
            &inputs(self, weight, bias),
            args!("has_weight": weight.is_some(), "has_bias": bias.is_some(), "num_groups": groups, "eps": eps),
            || {
                if self.ndim() < 2 || groups < 1 || self.shape()[1] % groups != 0 {
                    let reason =
                        "expected [batch, channel, …] and a number of groups that divides the channels";
                    return refuse(OP, format!("{groups} groups of {:?}; {reason}", self.shape()));
                }
                let x = in_full(OP, &self.resolved()?)?;
                let shape = x.shape().to_vec();
                let split = (1..x.ndim()).any(|dim| x.layout().is_sharded(dim));
                let fused = match split {
                    true => grouped::group_norm(&x, groups, weight, bias, eps)?,
                    false => local_group_norm(OP, &x, groups, weight, bias, eps)?,
                };
                if let Some(y) = fused {
                    return Ok(y);
                }
                let standard = if !split && x.local().numel() > 0 {
                    let y = x.local().f_group_norm(groups, None::<&Tensor>, None::<&Tensor>, eps, false);
                    Self::new(named(OP, &[x.local()], y)?, x.layout().clone())
                } else {
                    let grouped = [&[shape[0], groups, shape[1] / groups], &shape[2..]].concat();
                    let grouped = x.reshape(&grouped)?;
                    let dims: Vec<usize> = (2..grouped.ndim()).collect();
                    standardize(OP, &grouped, &dims, eps)?.y.reshape(&shape)?.to_layout(x.layout())?
                };
                affine(
                    standard,
                    along_channels(OP, weight, &x)?.as_ref(),
                    along_channels(OP, bias, &x)?.as_ref(),
                )
            },
        )
    }

    /// Normalises each channel of each sample; `weight` and `bias` are `[channel]`.
    ///
    /// # Errors
    ///
    /// Fewer than two dims; the errors of the exchange.
    pub fn instance_norm(
        &self,
        weight: Option<&dyn Operand>,
        bias: Option<&dyn Operand>,
        eps: f64,
    ) -> Result<Self> {
        const OP: &str = "instance_norm";
        let (weight, bias) = (promote_optional(OP, self, weight)?, promote_optional(OP, self, bias)?);
        let (weight, bias) = (weight.as_deref(), bias.as_deref());
        operator(
            OP,
            &inputs(self, weight, bias),
            args!("has_weight": weight.is_some(), "has_bias": bias.is_some(), "eps": eps),
            || {
                if self.ndim() < 3 {
                    return refuse(OP, format!("{:?} is not [batch, channel, extent…]", self.shape()));
                }
                let x = in_full(OP, &self.resolved()?)?;
                // A group of one channel each.
                if let Some(y) = local_group_norm(OP, &x, x.shape()[1], weight, bias, eps)? {
                    return Ok(y);
                }
                let dims: Vec<usize> = (2..x.ndim()).collect();
                let standard = standardize(OP, &x, &dims, eps)?.y;
                affine(
                    standard,
                    along_channels(OP, weight, &x)?.as_ref(),
                    along_channels(OP, bias, &x)?.as_ref(),
                )
            },
        )
    }

    /// Normalises each channel over the full batch in training, otherwise with the `running` statistics. Training updates
    /// these from the batch, the same on all ranks.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; no running statistics outside of training; the errors of the exchange.
    pub fn batch_norm(
        &self,
        weight: Option<&dyn Operand>,
        bias: Option<&dyn Operand>,
        running: Option<RunningStats<'_, Self>>,
        training: bool,
        eps: f64,
    ) -> Result<Self> {
        const OP: &str = "batch_norm";
        let (weight, bias) = (promote_optional(OP, self, weight)?, promote_optional(OP, self, bias)?);
        let (weight, bias) = (weight.as_deref(), bias.as_deref());
        let stats = |running: &RunningStats<'_, Self>| [running.mean, running.var].map(Self::shallow_clone);
        let (stats, momentum) =
            (running.as_ref().map(stats), running.as_ref().map(|running| running.momentum));
        let inputs: Vec<&Self> =
            inputs(self, weight, bias).into_iter().chain(stats.iter().flatten()).collect();
        operator(
            OP,
            &inputs,
            args!("has_weight": weight.is_some(), "has_bias": bias.is_some(), "training": training, "momentum": momentum, "eps": eps),
            || {
                if self.ndim() < 2 {
                    return refuse(OP, format!("{:?} is not [batch, channel, …]", self.shape()));
                }
                let x = in_full(OP, &self.resolved()?)?;
                if let (false, Some(running)) = (training, &running)
                    && let Some(y) = by_running_statistics(OP, &x, weight, bias, running, eps)?
                {
                    return Ok(y);
                }
                let (weight, bias) = (along_channels(OP, weight, &x)?, along_channels(OP, bias, &x)?);
                if !training {
                    let Some(running) = running else {
                        return refuse(OP, "running statistics are needed outside of training");
                    };
                    let [mean, var] =
                        [running.mean, running.var].map(|stat| along_channels(OP, Some(stat), &x));
                    let (Some(mean), Some(var)) = (mean?, var?) else { return refuse(OP, "no statistics") };
                    let scale =
                        var.unary(isobar_array::Unary::AddScalar(eps))?.unary(isobar_array::Unary::Rsqrt)?;
                    let y = affine(x.sub(&mean)?.mul(&scale)?, weight.as_ref(), bias.as_ref())?;
                    return y.to_kind(x.kind());
                }
                let dims: Vec<usize> = (0..x.ndim()).filter(|&dim| dim != 1).collect();
                let standard = standardize(OP, &x, &dims, eps)?;
                if let Some(running) = running {
                    let _guard = NoGrad::new();
                    let unbiased = standard.count as f64 / (standard.count - 1).max(1) as f64;
                    let var = torch(OP, standard.var.f_mul_scalar(unbiased))?;
                    for (stat, new) in [(running.mean, &standard.mean), (running.var, &var)] {
                        // The batch's statistics are laid out as its channels; the running ones are whole.
                        let like = standard.y.layout();
                        let channels = vec![like.dims()[1].clone()];
                        let flat = torch(OP, new.f_reshape([-1]))?;
                        let new = Self::new(flat, like.with_dims(channels)).to_layout(stat.layout())?;
                        let kind = stat.kind();
                        let mut local = stat.local().detach();
                        let step = torch(OP, new.local().f_to_kind(kind))?;
                        let _ = torch(OP, local.f_lerp_(&step, running.momentum))?;
                    }
                }
                affine(standard.y, weight.as_ref(), bias.as_ref())
            },
        )
    }
}

fn inputs<'a>(
    x: &'a ShardTensor,
    weight: Option<&'a ShardTensor>,
    bias: Option<&'a ShardTensor>,
) -> Vec<&'a ShardTensor> {
    [x].into_iter().chain(weight).chain(bias).collect()
}

/// Returns whether a rank can pass these vectors of channels to libtorch's norms as they are: it holds all channels of `x`, and
/// the vectors are replicated and of its dtype.
fn are_plain(x: &ShardTensor, vectors: &[Option<&ShardTensor>]) -> bool {
    let plain = |vector: &&ShardTensor| {
        vector.layout().is_replicated()
            && vector.kind() == x.kind()
            && vector.shape() == &x.shape()[1..2]
            && vector.device_mesh() == x.device_mesh()
    };
    matches!(x.kind(), Kind::Float | Kind::Double)
        && !x.layout().is_sharded(1)
        && vectors.iter().flatten().all(plain)
}

/// Normalises this rank's part by `f`, an operator of libtorch that takes weight and bias.
fn on_own_part(
    op: &'static str,
    x: &ShardTensor,
    [weight, bias]: [Option<&ShardTensor>; 2],
    f: impl FnOnce(&Tensor, Option<&Tensor>, Option<&Tensor>) -> Result<Tensor, TchError>,
) -> Result<ShardTensor> {
    let axes = x.layout().sharding_axes();
    let local = |vector: Option<&ShardTensor>| vector.map(|vector| vector.mark_varying(&axes)).transpose();
    let (weight, bias) = (local(weight)?, local(bias)?);
    let normalise = || {
        if x.local().numel() > 0 {
            return f(x.local(), weight.as_ref(), bias.as_ref());
        }
        // libtorch refuses some parts without elements. The graph is that of the other ranks.
        let mut along = vec![1; x.ndim()];
        along[1] = -1;
        let mut y = x.local().shallow_clone();
        for vector in [&weight, &bias].into_iter().flatten() {
            y = y.f_mul(&vector.f_view(along.as_slice())?)?;
        }
        Ok(y)
    };
    Ok(ShardTensor::new(named(op, &[x.local()], normalise())?, x.layout().clone()))
}

/// Group norm by libtorch's operator; `None` if the statistics are merged over ranks, or it does not take weight or bias.
fn local_group_norm(
    op: &'static str,
    x: &ShardTensor,
    groups: i64,
    weight: Option<&ShardTensor>,
    bias: Option<&ShardTensor>,
    eps: f64,
) -> Result<Option<ShardTensor>> {
    let split = (1..x.ndim()).any(|dim| x.layout().is_sharded(dim));
    let is_empty = x.shape()[1..].contains(&0);
    if split || is_empty || !are_plain(x, &[weight, bias]) {
        return Ok(None);
    }
    let norm = |x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>| {
        x.f_group_norm(groups, weight, bias, eps, false)
    };
    on_own_part(op, x, [weight, bias], norm).map(Some)
}

/// Batch norm with running statistics by libtorch's operator, in one pass; `None` if it does not take the vectors.
fn by_running_statistics(
    op: &'static str,
    x: &ShardTensor,
    weight: Option<&ShardTensor>,
    bias: Option<&ShardTensor>,
    running: &RunningStats<'_, ShardTensor>,
    eps: f64,
) -> Result<Option<ShardTensor>> {
    let (mean, var) = (running.mean, running.var);
    let has_gradient = mean.requires_grad() || var.requires_grad();
    if has_gradient || !are_plain(x, &[weight, bias, Some(mean), Some(var)]) {
        return Ok(None);
    }
    let norm = |x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>| {
        let (mean, var) = (mean.local().f_contiguous()?, var.local().f_contiguous()?);
        x.f_batch_norm(weight, bias, Some(&mean), Some(&var), false, 0.0, eps, false)
    };
    on_own_part(op, x, [weight, bias], norm).map(Some)
}

fn affine(x: ShardTensor, weight: Option<&ShardTensor>, bias: Option<&ShardTensor>) -> Result<ShardTensor> {
    let kind = x.kind();
    let scaled = match weight {
        Some(weight) => x.mul(weight)?,
        None => x,
    };
    let y = match bias {
        Some(bias) => scaled.add(bias)?,
        None => scaled,
    };
    // Of 16 bits beside parameters of Float.
    if y.kind() == kind { Ok(y) } else { y.to_kind(kind) }
}

/// A vector of channels as `[1, channel, 1, …]`.
fn along_channels(
    op: &'static str,
    vector: Option<&ShardTensor>,
    x: &ShardTensor,
) -> Result<Option<ShardTensor>> {
    let (dims, channels) = (x.ndim(), x.shape()[1]);
    let Some(vector) = vector else { return Ok(None) };
    if vector.shape() != [channels] {
        let shape = vector.shape();
        return refuse(op, format!("{shape:?} is not one number for each of {channels} channels"));
    }
    let mut shape = vec![1; dims];
    shape[1] = channels;
    vector.resolved()?.reshape(&shape).map(Some)
}

crate::register! {
    /// Each sample to mean 0 and variance 1 over its last dims (`normalized_shape`).
    "layer_norm"(input: Floating, weight: Parameter, bias: Parameter; normalized_shape, eps, has_weight, has_bias) Moments(samples): |call| {
        let (weight, bias) = affine_of(call)?;
        let shape: Vec<i64> = call.list("normalized_shape", Vec::new())?;
        call.tensor(0)?.layer_norm(&shape, operand(weight), operand(bias), call.or("eps", EPS)?)
    };
    /// Each of `num_groups` groups of channels to mean 0 and variance 1.
    "group_norm"(input: Floating, weight: Parameter, bias: Parameter; num_groups, eps, has_weight, has_bias) Moments(groups): |call| {
        let (weight, bias) = affine_of(call)?;
        call.tensor(0)?.group_norm(call.get("num_groups")?, operand(weight), operand(bias), call.or("eps", EPS)?)
    };
    /// Each channel of each sample to mean 0 and variance 1.
    "instance_norm"(input: Floating, weight: Parameter, bias: Parameter; eps, has_weight, has_bias) Moments(|call| Ok(extent(call, 0)? * extent(call, 1)?)): |call| {
        let (weight, bias) = affine_of(call)?;
        call.tensor(0)?.instance_norm(operand(weight), operand(bias), call.or("eps", EPS)?)
    };
    /// Each channel to mean 0 and variance 1 over the batch, or by its running statistics.
    "batch_norm"(input: Floating, weight: Parameter, bias: Parameter, running_mean: Parameter, running_var: Parameter; training, momentum, eps, has_weight, has_bias) Moments(|call| extent(call, 1)):
        |call| batch_norm(call);
}

/// Returns the extent of the input along a dim.
fn extent(call: &Footprint<'_>, dim: usize) -> Result<i64> {
    Ok(call.tensor(0)?.layout.shape().get(dim).copied().unwrap_or(1))
}

/// Returns the number of slices that a layer norm normalises independently.
fn samples(call: &Footprint<'_>) -> Result<i64> {
    let normalized = call.numbers("normalized_shape", 1).len();
    Ok(call.tensor(0)?.layout.shape().iter().rev().skip(normalized).product())
}

/// Returns the number of channel groups over all samples.
fn groups(call: &Footprint<'_>) -> Result<i64> {
    Ok(extent(call, 0)? * call.attr::<i64>("num_groups")?.unwrap_or(1))
}

/// PyTorch's default of `eps`.
const EPS: f64 = 1e-5;

/// The optional weight and bias. A bias may be there without a weight: `has_weight`, which a method gives, says so.
fn affine_of<'a>(call: &Call<'a>) -> Result<(Option<&'a ShardTensor>, Option<&'a ShardTensor>)> {
    let mut rest = call.tensors().iter().copied().skip(1);
    let weight = if call.or("has_weight", true)? { rest.next() } else { None };
    let bias = if call.or("has_bias", true)? { rest.next() } else { None };
    Ok((weight, bias))
}

fn batch_norm(call: &Call<'_>) -> Result<ShardTensor> {
    let (weight, bias) = affine_of(call)?;
    let before = 1 + usize::from(call.or("has_weight", true)?) + usize::from(call.or("has_bias", true)?);
    let momentum = call.or("momentum", 0.1)?;
    let running = match call.tensors().get(before..) {
        Some(&[mean, var]) => Some(RunningStats { mean, var, momentum }),
        _ => None,
    };
    let (training, eps) = (call.or("training", true)?, call.or("eps", EPS)?);
    call.tensor(0)?.batch_norm(operand(weight), operand(bias), running, training, eps)
}
