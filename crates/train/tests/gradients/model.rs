//! A small network over fields, its data, and its gradient where all is on one rank.

use isobar_array::{Array, Conv, Generator, PadMode, Padding};
use isobar_collectives::Group;
use isobar_shard::{Init, MeshParams, ParallelRegion, ParamStore, Params, Placement, StateDict};
use isobar_train::ShardedParameters;
use tch::{Device, Kind, Tensor};

use super::arrangement::Arrangement;

pub(crate) const OPTIONS: (Kind, Device) = (Kind::Double, Device::Cpu);
pub(crate) const EXTENTS: [usize; 2] = [8, 6];
/// As many as 2, 3 and 4 do not divide.
pub(crate) const SAMPLES: usize = 5;
pub(crate) const SEED: u64 = 7;

/// A convolution, then two layers over the channels, which can be split.
pub(crate) struct Net<A> {
    conv: A,
    bias: A,
    up: A,
    down: A,
}

impl<A: Array> Net<A> {
    pub(crate) fn new(params: &mut impl Params<Array = A>) -> Self {
        let mut param =
            |name: &str, shape: &[i64], place| params.param(name, shape, Init::FanIn(4), place).unwrap();
        Self {
            conv: param("conv.weight", &[3, 1, 3, 3], Placement::Replicate),
            bias: param("conv.bias", &[3], Placement::Replicate),
            up: param("up.weight", &[6, 3], Placement::Shard(0)),
            down: param("down.weight", &[1, 6], Placement::Shard(1)),
        }
    }

    pub(crate) fn forward(&self, x: &A) -> isobar_array::Result<A> {
        let conv =
            Conv { padding: Padding::Each(vec![1]), padding_mode: PadMode::Circular, ..Conv::default() };
        let hidden = x.conv(&self.conv, Some(&self.bias), &conv)?.tanh()?.permute(&[0, 2, 3, 1])?;
        hidden.linear(&self.up, None)?.tanh()?.linear(&self.down, None)?.permute(&[0, 3, 1, 2])
    }
}

/// Inputs and targets, whole.
pub(crate) fn fields() -> (Tensor, Tensor) {
    let shape = [SAMPLES as i64, 1, EXTENTS[0] as i64, EXTENTS[1] as i64];
    let base = Tensor::arange(shape.iter().product::<i64>(), OPTIONS).view(shape);
    ((&base * 1.3).sin(), (base * 0.7).cos())
}

/// The gradient on one rank, and what the parameters begin with, by name.
pub(crate) fn dense() -> (StateDict, StateDict) {
    let mut store = ParamStore::new(Generator::new(SEED)).with_options(OPTIONS.0, OPTIONS.1);
    let net = Net::new(&mut store);
    let (x, y) = fields();
    (net.forward(&x).unwrap() - y).square().mean(Kind::Double).backward();
    let by_name = |f: fn(&Tensor) -> Tensor| {
        store.parameters().iter().map(|p| (p.name.clone(), f(&p.tensor))).collect::<StateDict>()
    };
    (by_name(|tensor| tensor.grad().copy()), by_name(|tensor| tensor.detach().copy()))
}

/// Supplier of the parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Supplier {
    /// A store: plain tensors.
    Store,
    /// `MeshParams`, whose gradients backward sums.
    Summed,
    /// `MeshParams::pending`.
    Pending,
    /// The same, split along the axis `model`.
    PendingAlong,
    /// `MeshParams::pending` and `watched`.
    Watched,
    /// `MeshParams::watched` alone.
    WatchedSummed,
}

impl Supplier {
    pub(crate) const ALL: [Self; 6] =
        [Self::Store, Self::Summed, Self::Pending, Self::PendingAlong, Self::Watched, Self::WatchedSummed];

    /// An empty store.
    pub(crate) fn store(self, on: &Arrangement, seed: u64) -> ParamStore {
        let split = self == Self::PendingAlong;
        let region = if split { on.mesh.group("model").unwrap() } else { Group::single() };
        ParamStore::new(Generator::new(seed))
            .with_options(OPTIONS.0, OPTIONS.1)
            .with_region(ParallelRegion::new(region))
    }

    /// Supplier of the parameters on the mesh.
    pub(crate) fn on_mesh<'a>(
        self,
        store: &'a mut ParamStore,
        on: &Arrangement,
        sharded: &ShardedParameters,
    ) -> MeshParams<'a> {
        let params = MeshParams::new(store, &on.mesh);
        match self {
            Self::Store | Self::Summed => params,
            Self::Pending => params.pending(),
            Self::PendingAlong => params.along("model").unwrap().pending(),
            Self::Watched => params.pending().watched(sharded.watch()),
            Self::WatchedSummed => params.watched(sharded.watch()),
        }
    }

    pub(crate) fn is_pending(self) -> bool {
        matches!(self, Self::Pending | Self::PendingAlong | Self::Watched)
    }
}
