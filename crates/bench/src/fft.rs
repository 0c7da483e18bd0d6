//! A real transform over two dims of a `[1, 32, 720, 1440]` field, and back.

use anyhow::{Result, ensure};
use isobar_array::{FftNorm, Spectral};
use isobar_collectives::{Group, balanced};
use isobar_manager::DeviceMesh;
use isobar_shard::{DistributedIrfft2, DistributedRfft2, Placement, ShardTensor, TransformPieces};
use tch::{Device, Kind, Tensor};

use super::{Prepared, Timed};

const SHAPE: [i64; 4] = [1, 32, 720, 1440];
const SIZE: [i64; 2] = [720, 1440];
const DIMS: [i64; 2] = [2, 3];

/// As operators of a sharded tensor that is split along its height; the spectrum is left split along its columns. What
/// travels is cut into so many pieces.
pub(crate) fn of_shards(group: &Group, pieces: usize) -> Result<Prepared> {
    let mesh = DeviceMesh::new(group, &[group.size() as i64], &["domain"])?;
    let split = ShardTensor::distribute(&field()?, &mesh, &[Placement::Shard(2)])?;
    let x = ShardTensor::from_parts(&split.local().f_contiguous()?.f_detach_copy()?, split.layout())?;
    let run = move || {
        let _pieces = TransformPieces::new(pieces);
        let spectrum = x.rfft2(DIMS, FftNorm::Ortho)?;
        spectrum.irfft2(SIZE, DIMS, FftNorm::Ortho).map(|back| (spectrum, back))
    };
    let (spectrum, back) = run()?;
    let wanted = field()?.f_fft_rfft2(None::<&[i64]>, DIMS, "ortho")?;
    let wanted = ShardTensor::distribute_as(&wanted, spectrum.layout())?;
    check("the spectrum", spectrum.local(), wanted.local())?;
    check("the field", back.local(), ShardTensor::distribute_as(&field()?, back.layout())?.local())?;
    let step = move || {
        run()?;
        Ok(())
    };
    Ok(Prepared { timed: Timed::Step(Box::new(step)), output: None })
}

/// As functions of the ranks' own tensors, in PhysicsNeMo's split: along the width before, along the height after.
pub(crate) fn split_last(group: &Group) -> Result<Prepared> {
    let part = |whole: &Tensor, dim: i64, extent: i64| -> Result<Tensor> {
        let sizes = balanced(extent, group.size());
        let start = sizes[..group.rank()].iter().sum();
        Ok(whole.f_narrow(dim, start, sizes[group.rank()])?.f_contiguous()?)
    };
    let x = part(&field()?, 3, SIZE[1])?;
    let forward = DistributedRfft2 { dims: DIMS, ..DistributedRfft2::default() };
    let inverse = DistributedIrfft2 { s: Some(SIZE), dims: DIMS, norm: FftNorm::Ortho };
    let spectrum = forward.apply(&x, group)?;
    check(
        "the spectrum",
        &spectrum,
        &part(&field()?.f_fft_rfft2(None::<&[i64]>, DIMS, "ortho")?, 2, SIZE[0])?,
    )?;
    check("the field", &inverse.apply(&spectrum, group)?, &x)?;
    drop(spectrum);
    let group = group.clone();
    let step = move || {
        let _back = inverse.apply(&forward.apply(&x, &group)?, &group)?;
        Ok(())
    };
    Ok(Prepared { timed: Timed::Step(Box::new(step)), output: None })
}

fn field() -> Result<Tensor> {
    tch::manual_seed(0);
    Ok(Tensor::f_randn(SHAPE, (Kind::Float, Device::Cpu))?)
}

fn check(what: &str, got: &Tensor, want: &Tensor) -> Result<()> {
    let off = got.f_sub(want)?.f_abs()?.f_max()?.f_double_value(&[])?;
    ensure!(off < 1e-4, "{what} is {off} away from what it must be");
    Ok(())
}
