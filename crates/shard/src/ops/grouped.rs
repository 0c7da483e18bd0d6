//! Group norm of a tensor whose spatial dims are split, each pass over a rank's part done by one dense operator.
//!
//! With the statistics known, the norm is that of a batch with running statistics, each channel of each sample a channel
//! there. Its gradients with respect to scale and shift are the two sums that the statistics' own gradient needs.

use std::sync::{Mutex, PoisonError};

use isobar_collectives::reduce_from_parallel_region;
use isobar_collectives::trace::Label;
use isobar_torch::autograd::{self, BackwardOptions, Function};
use isobar_torch::guard::{EnableGrad, NoGrad, is_grad_enabled};
use tch::{Kind, TchError, Tensor};

use super::reduce::{Over, welford};
use super::standard::standardize;
use super::{refuse, torch};
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::tensor::ShardTensor;

const OP: &str = "group_norm";

/// Error of a backward pass.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The norm of a tensor that is not partial, where no part is empty, channels are whole, and weight and bias are replicated
/// and of its dtype; nothing else. The same answer on all ranks.
pub(super) fn group_norm(
    x: &ShardTensor,
    groups: i64,
    weight: Option<&ShardTensor>,
    bias: Option<&ShardTensor>,
    eps: f64,
) -> Result<Option<ShardTensor>> {
    let layout = x.layout();
    let (shape, dims) = (x.shape(), layout.dims());
    let plain = |vector: &&ShardTensor| {
        vector.layout().is_replicated()
            && vector.kind() == x.kind()
            && vector.shape() == &shape[1..2]
            && vector.device_mesh() == x.device_mesh()
    };
    let fits = matches!(x.kind(), Kind::Float | Kind::Double)
        && !dims[1].is_split()
        && dims.iter().all(|dim| dim.is_consecutive() && dim.sizes().iter().all(|&size| size > 0))
        && [weight, bias].iter().flatten().all(plain);
    if !fits {
        return Ok(None);
    }
    let axes = layout.sharding_axes();
    let local = |vector: Option<&ShardTensor>| vector.map(|vector| vector.mark_varying(&axes)).transpose();
    let (weight, bias) = (local(weight)?, local(bias)?);
    let norm = Norm { groups, eps, layout: layout.clone(), moments: Moments::of(x, groups)? };
    norm.apply(x, weight, bias).map(|y| Some(ShardTensor::new(y, layout.clone())))
}

/// Mean and variance of each group of each sample, `[batch · groups, 1]`.
struct Moments {
    mean: Tensor,
    var: Tensor,
    /// Elements of a group, on all ranks.
    count: f64,
    /// Axes that split these.
    axes: Vec<usize>,
}

impl Moments {
    fn of(x: &ShardTensor, groups: i64) -> Result<Self> {
        let _guard = NoGrad::new();
        let grouped = grouped(&x.detach(), groups)?;
        let dims: Vec<i64> = (2..grouped.ndim() as i64).collect();
        let over = Over::new(OP, &grouped, &dims, true)?;
        let count = grouped.shape()[2..].iter().product::<i64>() as f64;
        let own = || {
            let mean = grouped.local().f_mean_dim(dims.as_slice(), true, None)?;
            let squares = grouped.local().f_sub(&mean)?.f_square_()?;
            Ok((mean, squares.f_sum_dim_intlist(dims.as_slice(), true, None)?))
        };
        let (mean, squares) = welford::merged(OP, torch(OP, own())?, &grouped, &over)?;
        let flat = |x: &Tensor| torch(OP, x.f_reshape([-1, 1]));
        let var = torch(OP, flat(&squares)?.f_div_scalar(count))?;
        Ok(Self { mean: flat(&mean)?, var, count, axes: over.axes.clone() })
    }
}

struct Norm {
    groups: i64,
    eps: f64,
    layout: Layout,
    moments: Moments,
}

/// The dense norm of a part, a graph of its own.
struct Inner {
    /// Part, and scale and shift for each channel of each sample.
    leaves: [Tensor; 3],
    /// Of its shape, without its elements.
    y: Tensor,
}

impl Norm {
    fn apply(self, x: &ShardTensor, weight: Option<Tensor>, bias: Option<Tensor>) -> Result<Tensor> {
        let x = x.local();
        let given = [weight.is_some(), bias.is_some()];
        let inputs: Vec<&Tensor> = [x].into_iter().chain(&weight).chain(&bias).collect();
        let records = is_grad_enabled() && inputs.iter().any(|input| input.requires_grad());
        let (inner, y) = torch(OP, self.inner(x, weight.as_ref(), bias.as_ref(), records))?;
        if !records {
            return Ok(y);
        }
        let label = Label::current();
        let inner = Mutex::new(Some(inner));
        let outputs = Function::new(OP).save(&inputs).apply(&inputs, vec![y], move |context, grads| {
            let _label = label.backward();
            let gradient = context.grad_or_zeros(grads, 0)?;
            let saved: Vec<Tensor> = (0..1 + given.iter().filter(|given| **given).count())
                .map(|i| context.saved(i))
                .collect::<Result<_, _>>()?;
            let weight = given[0].then(|| &saved[1]);
            let bias = given[1].then(|| &saved[saved.len() - 1]);
            let inner = inner.lock().unwrap_or_else(PoisonError::into_inner).take();
            if is_grad_enabled() {
                return self.differentiable_gradients(&saved[0], weight, bias, &gradient);
            }
            let inner = match inner {
                Some(inner) => inner,
                None => self.inner(&saved[0], weight, bias, true)?.0,
            };
            let [of_x, of_weight, of_bias] = self.gradients(&inner, &gradient)?;
            let vectors = [of_weight, of_bias].into_iter().zip(given).filter(|(_, given)| *given);
            Ok([of_x].into_iter().chain(vectors.map(|(gradient, _)| gradient)).map(Some).collect())
        })?;
        outputs.into_iter().next().map_or_else(|| refuse(OP, "a function lost its output"), Ok)
    }

    /// A number for each channel of each sample.
    fn each(&self, vector: Option<&Tensor>, otherwise: f64, x: &Tensor) -> Result<Tensor, TchError> {
        let shape = x.size();
        match vector {
            Some(vector) => vector.detach().f_repeat([shape[0]]),
            None => Tensor::f_full([shape[0] * shape[1]], otherwise, (x.kind(), x.device())),
        }
    }

    /// A number for each group as one for each of its channels.
    fn spread(&self, of_groups: &Tensor, x: &Tensor) -> Result<Tensor, TchError> {
        let spread = of_groups.f_reshape([-1, 1])?.f_expand([-1, x.size()[1] / self.groups], false)?;
        // The backward pass of libtorch's batch norm reads statistics of stride 0 beyond their end.
        spread.f_reshape([-1])?.f_contiguous()
    }

    /// The graph, and the values.
    fn inner(
        &self,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        records: bool,
    ) -> Result<(Inner, Tensor), TchError> {
        let channels = x.size()[0] * x.size()[1];
        let flat = x.detach().f_contiguous()?.f_view([1, channels, -1])?;
        let leaves = [flat, self.each(weight, 1.0, x)?, self.each(bias, 0.0, x)?]
            .map(|leaf| leaf.set_requires_grad(records));
        let [mean, var] = [&self.moments.mean, &self.moments.var].map(|of_groups| self.spread(of_groups, x));
        let (mean, var) = (mean?, var?);
        let mut y = {
            let _grad = records.then(EnableGrad::new);
            let [x, scale, shift] = &leaves;
            x.f_batch_norm(Some(scale), Some(shift), Some(&mean), Some(&var), false, 0.0, self.eps, false)?
        };
        let values = y.detach().f_view(x.size().as_slice())?;
        // The graph needs its place only.
        y.f_set_data(
            &values.f_new_zeros([1, 1, 1], (values.kind(), values.device()))?.f_expand(y.size(), false)?,
        )?;
        Ok((Inner { leaves, y }, values))
    }

    fn gradients(&self, inner: &Inner, gradient: &Tensor) -> Result<[Tensor; 3], Failure> {
        let shape = gradient.size();
        let [x, scale, _] = &inner.leaves;
        let leaves: Vec<&Tensor> = inner.leaves.iter().collect();
        let flat = gradient.f_contiguous()?.f_view(x.size().as_slice())?;
        let found = autograd::grad(&[&inner.y], &leaves, &[Some(flat)], BackwardOptions::default())?;
        let [Some(of_x), Some(of_scale), Some(of_shift)] = &found[..] else {
            return Err(Error::from(isobar_array::Error::Argument {
                op: OP,
                reason: "a gradient is missing".into(),
            })
            .into());
        };
        let _guard = NoGrad::new();
        // Gradient through the statistics: the means of the gradient, and of its product with the normalised values.
        let Moments { mean, var, count, axes } = &self.moments;
        let total = |sums: &Tensor| {
            sums.f_mul(&scale.detach())?.f_view([mean.size()[0], -1])?.f_sum_dim_intlist(
                [1].as_slice(),
                true,
                None,
            )
        };
        let mut sums = Tensor::f_stack(&[total(of_shift)?, total(of_scale)?], 0)?;
        if !axes.is_empty() {
            sums = reduce_from_parallel_region(&sums, &self.layout.group_along(axes)?)?;
        }
        let sums = sums.f_div_scalar(*count)?;
        let rstd = var.f_add_scalar(self.eps)?.f_rsqrt()?;
        let slope = sums.f_select(0, 1)?.f_mul(&rstd.f_square()?)?.f_neg()?;
        let offset = sums.f_select(0, 0)?.f_mul(&rstd)?.f_add(&slope.f_mul(mean)?)?.f_neg()?;
        let groups = |x: &Tensor| x.detach().f_view([mean.size()[0], -1]);
        // It is nobody else's yet.
        let _ = groups(of_x)?.f_addcmul_(&groups(x)?, &slope)?.f_add_(&offset)?;
        let over_samples =
            |of: &Tensor| of.f_view([shape[0], -1])?.f_sum_dim_intlist([0].as_slice(), false, None);
        Ok([of_x.f_view(shape.as_slice())?, over_samples(of_scale)?, over_samples(of_shift)?])
    }

    /// Gradients that have gradients.
    fn differentiable_gradients(
        &self,
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        gradient: &Tensor,
    ) -> Result<Vec<Option<Tensor>>, Failure> {
        // Nodes of their own: one input may have been computed from another, and that way is gone through outside.
        let inputs: Vec<Tensor> =
            [x].into_iter().chain(weight).chain(bias).map(Tensor::f_alias).collect::<Result<_, _>>()?;
        let grouped =
            grouped(&ShardTensor::new(inputs[0].shallow_clone(), self.layout.clone()), self.groups)?;
        let dims: Vec<usize> = (2..grouped.ndim()).collect();
        let mut y = standardize(OP, &grouped, &dims, self.eps)?.y.local().f_view(x.size().as_slice())?;
        let mut along = vec![1; x.dim()];
        along[1] = -1;
        if weight.is_some() {
            y = y.f_mul(&inputs[1].f_view(along.as_slice())?)?;
        }
        if bias.is_some() {
            y = y.f_add(&inputs[inputs.len() - 1].f_view(along.as_slice())?)?;
        }
        let wanted: Vec<&Tensor> = inputs.iter().filter(|input| input.requires_grad()).collect();
        let options =
            BackwardOptions { create_graph: true, allow_unused: true, ..BackwardOptions::default() };
        let found = autograd::grad(&[&y], &wanted, &[Some(gradient.shallow_clone())], options)?;
        let mut found = found.into_iter();
        let of = |input: &Tensor| if input.requires_grad() { found.next().flatten() } else { None };
        Ok(inputs.iter().map(of).collect())
    }
}

/// `[batch, groups, channels of a group, extent…]`
fn grouped(x: &ShardTensor, groups: i64) -> Result<ShardTensor> {
    let shape = x.shape();
    x.reshape(&[&[shape[0], groups, shape[1] / groups], &shape[2..]].concat())
}
