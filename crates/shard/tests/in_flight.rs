//! Halos that are in flight while a convolution computes its interior.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::{Split, leaf, numbers, on_mesh};
use isobar_array::{Conv, PadMode, Padding};
use isobar_collectives::trace::CommTrace;
use isobar_mesh::DeviceMesh;
use isobar_shard::{Placement, ShardTensor};
use isobar_torch::autograd::BackwardOptions;
use isobar_torch::guard::Autocast;
use isobar_torch::observe::first_non_finite;
use rstest::rstest;
use tch::{Device, Kind, Tensor};

/// Given once by rank 0, and waited for by the others.
#[derive(Clone, Default)]
struct Signal(Arc<AtomicBool>);

impl Signal {
    fn give(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Waits for it; returns whether it came in time.
    fn wait(&self) -> bool {
        let start = Instant::now();
        while !self.0.load(Ordering::SeqCst) {
            if start.elapsed() > Duration::from_secs(10) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }
}

/// Runs `pass` on all ranks, on rank 0 with values of which only the convolution of its interior makes infinities. The others
/// start only then, and by then rank 0 must have begun its exchange: the halo is in flight while it computes its interior.
fn in_flight(mesh: &DeviceMesh, inside: &Signal, pass: impl FnOnce()) {
    if mesh.coordinates().unwrap().iter().all(|&at| at == 0) {
        let axes: Vec<usize> = (0..mesh.ndim()).collect();
        let trace = CommTrace::start(&mesh.group_along(&axes).unwrap());
        let stop = || {
            inside.give();
            trace.record().len().to_string()
        };
        let (_, found) = first_non_finite(&[], stop, pass).unwrap();
        let begun: usize = found[0].label.parse().unwrap();
        assert!(begun > 0, "the exchange begins after the interior");
    } else {
        let began = inside.wait();
        pass();
        assert!(began, "rank 0 waits for its halo before it computes its interior");
    }
}

/// Values of the global tensor with one that overflows in the interior of rank 0.
fn overflowing(shape: &[i64], kind: Kind) -> Tensor {
    let x = numbers(shape, 1).to_kind(kind);
    let large = if kind == Kind::Double { 1e308 } else { 3e38 };
    let _ = x.get(0).get(0).get(4).get(4).fill_(large);
    x
}

#[rstest]
fn the_halo_is_in_flight_while_the_interior_is_computed(
    #[values((&[2][..], &[3][..]), (&[2, 2][..], &[2, 3][..]))] (shape, dims): (
        &'static [i64],
        &'static [usize],
    ),
    #[values((1, 1), (2, 1), (1, 2))] (stride, dilation): (i64, i64),
    #[values(PadMode::Constant, PadMode::Circular, PadMode::Replicate)] mode: PadMode,
    #[values(Kind::Double, Kind::BFloat16)] kind: Kind,
) {
    // Watches of libtorch's operators are of the process.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (forward, backward) = (Signal::default(), Signal::default());
    on_mesh(shape, move |mesh| {
        let placements: Vec<Placement> = dims.iter().map(|&dim| Placement::Shard(dim)).collect();
        let shape = [1, 3, 32, 34];
        let layout = Split::Balanced.layout(mesh, &placements, &shape);
        let conv = Conv {
            padding: Padding::Each(vec![dilation]),
            stride: vec![stride],
            dilation: vec![dilation],
            padding_mode: mode,
            ..Conv::default()
        };
        let mixed = kind == Kind::BFloat16;
        let kind = if mixed { Kind::Float } else { kind };
        let _bf16 = mixed.then(|| Autocast::new(Device::Cpu, Kind::BFloat16).unwrap());
        let kernel = [4, 3, 3, 3];
        let weight = Tensor::full(kernel, 20.0, (kind, Device::Cpu));
        let replicate = vec![Placement::Replicate; mesh.ndim()];
        let layout_of_weight = Split::Balanced.layout(mesh, &replicate, &kernel);
        let w = ShardTensor::distribute_as(&weight, &layout_of_weight).unwrap();
        let x = leaf(&overflowing(&shape, kind), &layout);
        in_flight(mesh, &forward, || drop(x.conv(&w, None, &conv).unwrap()));
        let x = leaf(&numbers(&shape, 1).to_kind(kind), &layout);
        let y = x.conv(&w, None, &conv).unwrap();
        let g = overflowing(y.shape(), kind).to_kind(y.kind());
        let g = ShardTensor::distribute_as(&g, &y.layout().without_partial()).unwrap();
        in_flight(mesh, &backward, || y.backward_from(Some(&g), BackwardOptions::default()).unwrap());
    });
}
