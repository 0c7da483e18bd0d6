//! Overhead of sharded tensors over local ones, and cost of redistributions.

use std::time::Instant;

use anyhow::{Result, ensure};
use isobar_collectives::Group;
use isobar_manager::DeviceMesh;
use isobar_shard::{Layout, Placement, ShardTensor, Sizes};
use isobar_torch::guard::NoGrad;
use tch::{Device, Kind, Tensor};

use super::clock::median;
use super::{Prepared, Timed};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
/// Calls of a batch.
const CALLS: u32 = 100;
const BATCHES: u32 = 20;
/// Less is not told apart from the noise of the two times whose difference it is.
const LEAST_OVERHEAD: f64 = 0.05e-6;
const MIB: i64 = 1 << 20;

/// A [64, 64] part on each rank, and a [64, 64] weight on all.
struct Operands {
    part: Tensor,
    sharded: ShardTensor,
    weight: Tensor,
    replicated: ShardTensor,
}

impl Operands {
    fn new(group: &Group) -> Result<Self> {
        let mesh = mesh(group)?;
        tch::manual_seed(group.rank() as i64);
        let part = Tensor::f_randn([64, 64], FLOAT)?;
        let shape = [64 * group.size() as i64, 64];
        let layout = Layout::new(&mesh, &[Placement::Shard(0)], &shape, &Sizes::Chunk)?;
        tch::manual_seed(1_000);
        let weight = Tensor::f_randn([64, 64], FLOAT)?;
        Ok(Self {
            sharded: ShardTensor::from_parts(&part, &layout)?,
            replicated: ShardTensor::distribute(&weight, &mesh, &[Placement::Replicate])?,
            part,
            weight,
        })
    }
}

pub(crate) fn mul(group: &Group) -> Result<Prepared> {
    let Operands { part, sharded, .. } = Operands::new(group)?;
    ensure!(*sharded.mul(&sharded)?.local() == part.f_mul(&part)?, "mul gave a wrong result");
    overhead(move || Ok(sharded.mul(&sharded)?), move || Ok(part.f_mul(&part)?))
}

pub(crate) fn linear(group: &Group) -> Result<Prepared> {
    let Operands { part, sharded, weight, replicated } = Operands::new(group)?;
    let want = part.f_linear(&weight, None::<Tensor>)?;
    ensure!(*sharded.linear(&replicated, None)?.local() == want, "linear gave a wrong result");
    overhead(
        move || Ok(sharded.linear(&replicated, None)?),
        move || Ok(part.f_linear(&weight, None::<Tensor>)?),
    )
}

pub(crate) fn from_local(group: &Group) -> Result<Prepared> {
    let Operands { part, sharded, .. } = Operands::new(group)?;
    let layout = sharded.layout().clone();
    ensure!(*ShardTensor::from_parts(&part, &layout)?.local() == part, "from_parts gave a wrong result");
    overhead(move || Ok(ShardTensor::from_parts(&part, &layout)?), || Ok(()))
}

pub(crate) fn reshape(group: &Group) -> Result<Prepared> {
    let Operands { part, sharded, .. } = Operands::new(group)?;
    let want = part.f_reshape([-1, 8, 64])?;
    ensure!(*sharded.reshape(&[-1, 8, 64])?.local() == want, "reshape gave a wrong result");
    overhead(move || Ok(sharded.reshape(&[-1, 8, 64])?), move || Ok(part.f_reshape([-1, 8, 64])?))
}

/// A `[1024, n]` tensor of so many MiB.
pub(crate) fn redistribute(
    group: &Group,
    source: Placement,
    target: Placement,
    mib: i64,
) -> Result<Prepared> {
    let mesh = mesh(group)?;
    tch::manual_seed(0);
    let whole = Tensor::f_randn([1024, mib * MIB / 4 / 1024], FLOAT)?;
    let x = ShardTensor::distribute(&whole, &mesh, &[source])?;
    // Memory of its own, as a rank has it that does not know the whole.
    let x = ShardTensor::from_parts(&x.local().f_contiguous()?.f_detach_copy()?, x.layout())?;
    let want = ShardTensor::distribute(&whole, &mesh, &[target])?;
    let run = move || -> Result<ShardTensor> { Ok(x.redistribute(None, &[target])?) };
    let got = run()?;
    ensure!(
        got.layout() == want.layout() && got.local() == want.local(),
        "redistribute from {source} to {target} gave a wrong result"
    );
    Ok(Prepared { timed: Timed::Step(Box::new(move || run().map(drop))), output: None })
}

fn mesh(group: &Group) -> Result<DeviceMesh> {
    Ok(DeviceMesh::new(group, &[group.size() as i64], &["domain"])?)
}

/// Measures how many seconds a call of `sharded` takes longer than one of `plain`. Batches of both take turns, and the median of
/// their differences counts, since the difference is small compared with the calls and easily lost in the machine's noise.
fn overhead<S, P>(
    sharded: impl Fn() -> Result<S> + 'static,
    plain: impl Fn() -> Result<P> + 'static,
) -> Result<Prepared> {
    let measure = move || {
        let _guard = NoGrad::new();
        let difference = |_| Ok(per_call(&sharded)? - per_call(&plain)?);
        let mut differences = (0..BATCHES).map(difference).collect::<Result<Vec<f64>>>()?;
        Ok(median(&mut differences).max(LEAST_OVERHEAD))
    };
    Ok(Prepared { timed: Timed::Measured(Box::new(measure)), output: None })
}

fn per_call<T>(call: impl Fn() -> Result<T>) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..CALLS {
        std::hint::black_box(call()?);
    }
    Ok(start.elapsed().as_secs_f64() / f64::from(CALLS))
}
