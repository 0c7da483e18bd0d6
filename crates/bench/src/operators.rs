//! Sharded operators, each beside the same work without the other ranks.

use anyhow::{Result, ensure};
use isobar_array::{Conv, Elementwise, Padding, Statistic};
use isobar_collectives::Group;
use isobar_manager::DeviceMesh;
use isobar_shard::{AttentionOptions, Layout, Placement, ShardTensor, Sizes};
use tch::{Device, Kind, Tensor};

use super::{Prepared, Timed};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Three 3×3 convolutions of 32 channels with GELU between them, on a `[1, 32, 512, 512]` image split along its width: forward
/// and backward. Without exchange, each rank does so with its own part alone.
pub(crate) fn conv2d(group: &Group, exchange: bool) -> Result<Prepared> {
    let mesh = DeviceMesh::new(group, &[group.size() as i64], &["domain"])?;
    tch::manual_seed(0);
    let image = Tensor::f_randn([1, 32, 512, 512], FLOAT)?;
    let weights: Vec<Tensor> = (0..3)
        .map(|_| Ok(Tensor::f_randn([32, 32, 3, 3], FLOAT)?.f_mul_scalar(0.06)?))
        .collect::<Result<_>>()?;
    let biases: Vec<Tensor> = (0..3).map(|_| Ok(Tensor::f_randn([32], FLOAT)?)).collect::<Result<_>>()?;
    let split = ShardTensor::distribute(&image, &mesh, &[Placement::Shard(3)])?;
    let part = split.local().f_contiguous()?.f_detach_copy()?;
    let alone = DeviceMesh::new(&Group::single(), &[1], &["domain"])?;
    let here = if exchange { &mesh } else { &alone };
    let layout = match exchange {
        true => split.layout().clone(),
        false => Layout::new(&alone, &[Placement::Replicate], &part.size(), &Sizes::Chunk)?,
    };
    let whole = |tensor: &Tensor| {
        ShardTensor::distribute(tensor, here, &[Placement::Replicate])?.set_requires_grad(true)
    };
    let params = |list: &[Tensor]| list.iter().map(whole).collect::<isobar_shard::Result<Vec<_>>>();
    let (mut weights_here, mut biases_here) = (params(&weights)?, params(&biases)?);
    let mut x = ShardTensor::from_parts(&part, &layout)?.set_requires_grad(true)?;
    let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
    let net =
        move |x: &ShardTensor, w: &[ShardTensor], b: &[ShardTensor]| -> isobar_shard::Result<ShardTensor> {
            let first = x.conv(&w[0], Some(&b[0]), &conv)?.gelu()?;
            first.conv(&w[1], Some(&b[1]), &conv)?.gelu()?.conv(&w[2], Some(&b[2]), &conv)
        };
    if exchange {
        let dense = |x: &Tensor, index: usize| {
            x.f_conv2d(&weights[index], Some(&biases[index]), [1, 1], [1, 1], [1, 1], 1)
        };
        let want = dense(&dense(&dense(&image, 0)?.f_gelu("none")?, 1)?.f_gelu("none")?, 2)?;
        let got = net(&x, &weights_here, &biases_here)?.detach().full_tensor(None)?;
        ensure!(got.f_allclose(&want, 1e-4, 1e-4, false)?, "conv2d gave a wrong result");
    }
    let step = move || {
        x.zero_grad();
        weights_here.iter_mut().chain(&mut biases_here).for_each(ShardTensor::zero_grad);
        net(&x, &weights_here, &biases_here)?.statistic(Statistic::Sum, &[], false)?.backward()?;
        Ok(())
    };
    Ok(Prepared { timed: Timed::Step(Box::new(step)), output: None })
}

/// Sizes of the tokens, `[1, 8, count, features]` with the features of a head, and the pass to time.
pub(crate) struct Tokens {
    pub(crate) count: i64,
    pub(crate) features: i64,
    /// True to time forward and backward, false for forward alone.
    pub(crate) backward: bool,
}

/// Prepares attention of tokens: sharded along the tokens over all ranks, or with `alone` in full on each rank at the same time.
pub(crate) fn attention(group: &Group, tokens: &Tokens, alone: bool) -> Result<Prepared> {
    let &Tokens { count, features, backward } = tokens;
    let group = if alone { Group::single() } else { group.clone() };
    let mesh = DeviceMesh::new(&group, &[group.size() as i64], &["domain"])?;
    tch::manual_seed(0);
    let wholes: Vec<Tensor> =
        (0..4).map(|_| Ok(Tensor::f_randn([1, 8, count, features], FLOAT)?)).collect::<Result<_>>()?;
    let shard = |whole: &Tensor| -> Result<ShardTensor> {
        let part = ShardTensor::distribute(whole, &mesh, &[Placement::Shard(2)])?;
        let own = part.local().f_contiguous()?.f_detach_copy()?;
        Ok(ShardTensor::from_parts(&own, part.layout())?.set_requires_grad(backward)?)
    };
    let mut parts: Vec<ShardTensor> = wholes.iter().map(shard).collect::<Result<_>>()?;
    let cotangent = parts.remove(3).detach();
    let run = |parts: &[ShardTensor]| {
        ShardTensor::scaled_dot_product_attention(
            &parts[0],
            &parts[1],
            &parts[2],
            &AttentionOptions::default(),
        )
    };
    if count <= 4096 {
        let want = Tensor::f_scaled_dot_product_attention(
            &wholes[0],
            &wholes[1],
            &wholes[2],
            None::<&Tensor>,
            0.0,
            false,
            None,
            false,
        )?;
        let got = run(&parts)?.detach().full_tensor(None)?;
        ensure!(got.f_allclose(&want, 1e-4, 1e-5, false)?, "attention gave a wrong result");
    }
    let step = move || {
        parts.iter_mut().for_each(ShardTensor::zero_grad);
        let y = run(&parts)?;
        match backward {
            true => Ok(y.backward_from(Some(&cotangent), Default::default())?),
            false => Ok(()),
        }
    };
    Ok(Prepared { timed: Timed::Step(Box::new(step)), output: None })
}
