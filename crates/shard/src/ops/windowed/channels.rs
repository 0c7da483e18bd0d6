//! Channels of a convolution: how those of its input, weight, bias and result are split together.

use isobar_collectives::ReduceOp;
use tch::Tensor;

use crate::dense::named;
use crate::error::Result;
use crate::layout::{Dim, Placement};
use crate::ops::contract::graph_zeros;
use crate::tensor::{ShardTensor, same_mesh};

/// Input, weight and bias as their channels go together.
pub(super) struct ConvOperands {
    pub(super) x: ShardTensor,
    pub(super) weight: Tensor,
    pub(super) bias: Option<Tensor>,
    /// Groups of this rank.
    pub(super) groups: i64,
    out: Dim,
    /// Axes along which the result is a partial sum.
    summed: Vec<usize>,
}

impl ConvOperands {
    pub(super) fn new(
        x: &ShardTensor,
        weight: &ShardTensor,
        bias: Option<&ShardTensor>,
        groups: i64,
        transposed: bool,
    ) -> Result<Self> {
        let tensors: Vec<&ShardTensor> = [x, weight].into_iter().chain(bias).collect();
        same_mesh("conv", &tensors)?;
        let (input, output) = if transposed { (0, 1) } else { (1, 0) };
        if groups > 1 {
            return Self::in_groups(x, weight, bias, groups, transposed);
        }
        // Kernels are small: they are whole on every rank.
        let weight = weight.resolved()?.replicate_where(|dim| dim > 1)?;
        let busy: Vec<usize> = x.layout().sharding_axes();
        let free = |dim: &Dim| !dim.axes.iter().any(|axis| busy.contains(axis));
        let of_weight = weight.layout().dims();
        let mut inner = x.layout().dims()[1].clone();
        if !inner.is_split() && of_weight[input].is_split() && free(&of_weight[input]) {
            inner = of_weight[input].clone();
        }
        let mut out = Dim::whole(of_weight[output].extent());
        let taken = |dim: &Dim| dim.axes.iter().any(|axis| inner.axes.contains(axis));
        if of_weight[output].is_split() && free(&of_weight[output]) && !taken(&of_weight[output]) {
            out = of_weight[output].clone();
        }
        let x = x.to_layout(&x.layout().with_dim(1, inner.clone()))?;
        let mut used = x.layout().sharding_axes();
        used.extend(&out.axes);
        // Ranks with other channels of the result use the whole input each for itself.
        let x = ShardTensor::new(x.mark_varying(&out.axes)?, x.layout().clone());
        let mut dims = of_weight.to_vec();
        dims[input] = inner.clone();
        dims[output] = out.clone();
        let weight = used_along(&used, &weight.to_layout(&weight.layout().with_dims(dims))?)?;
        let summed = inner.axes.clone();
        let bias = match bias {
            None => None,
            Some(bias) => {
                let local = bias_of(bias, &out, &used)?;
                let at = x.layout().coordinates().unwrap_or_default();
                // Of a partial sum, the first rank adds it.
                let first = summed.iter().all(|&axis| at[axis] == 0);
                Some(if first { local } else { named("conv", &[&local], graph_zeros(&local))? })
            }
        };
        Ok(Self { x, weight, bias, groups, out, summed })
    }

    /// Of several groups, each rank convolves whole ones. Split channels move to the next boundary between groups; where that
    /// leaves a rank without a group, another dim is split in their place.
    fn in_groups(
        x: &ShardTensor,
        weight: &ShardTensor,
        bias: Option<&ShardTensor>,
        groups: i64,
        transposed: bool,
    ) -> Result<Self> {
        let channels = x.shape()[1];
        let mut counts = x.layout().dims()[1].scaled(groups);
        let mut layout = x.layout().clone();
        if counts.sizes().contains(&0) {
            let others = (0..x.ndim()).filter(|&dim| dim != 1);
            let widest = others.max_by_key(|&dim| (x.shape()[dim], !layout.is_sharded(dim))).unwrap_or(0);
            (counts, layout) = (Dim::whole(groups), layout.all_to_all(1, widest));
        }
        let split = |extent: i64| {
            let sizes: Vec<i64> = counts.sizes().iter().map(|count| count * (extent / groups)).collect();
            Dim::consecutive(counts.axes.clone(), &sizes)
        };
        let x = x.to_layout(&layout.with_dim(1, split(channels)))?;
        let (rows, of_group) = (weight.shape()[0], weight.shape()[1]);
        let out = split(if transposed { of_group * groups } else { rows });
        let used = x.layout().sharding_axes();
        let weight = weight.resolved()?.replicate_where(|_| true)?;
        let weight = used_along(&used, &weight.to_layout(&weight.layout().with_dim(0, split(rows)))?)?;
        let bias = bias.map(|bias| bias_of(bias, &out, &used)).transpose()?;
        let groups = super::part_of(&counts, x.layout()).len.max(1);
        Ok(Self { x, weight, bias, groups, out, summed: Vec::new() })
    }

    /// The result with these spatial dims.
    pub(super) fn result(&self, local: Tensor, spatial: Vec<Dim>) -> ShardTensor {
        let layout = self.x.layout();
        let mut dims = vec![layout.dims()[0].clone(), self.out.clone()];
        dims.extend(spatial);
        let split = layout.with_dims(dims);
        let mut placements = split.placements().to_vec();
        for &axis in &self.summed {
            placements[axis] = Placement::Partial(ReduceOp::Sum);
        }
        let dims = split.dims().to_vec();
        ShardTensor::new(local, split.with_placements(placements, dims))
    }
}

/// The rank's part of a parameter, which ranks along these axes use each for itself.
fn used_along(used: &[usize], parameter: &ShardTensor) -> Result<Tensor> {
    let own = parameter.layout().sharding_axes();
    let others: Vec<usize> = used.iter().copied().filter(|axis| !own.contains(axis)).collect();
    parameter.mark_varying(&others)
}

/// The rank's part of a bias, split as the channels of the result.
fn bias_of(bias: &ShardTensor, out: &Dim, used: &[usize]) -> Result<Tensor> {
    let bias = bias.resolved()?;
    used_along(used, &bias.to_layout(&bias.layout().with_dims(vec![out.clone()]))?)
}
