//! Models that compute their products in bfloat16: beside single precision, and sharded beside dense.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{Array, Generator, Window};
use isobar_mesh::DeviceMesh;
use isobar_models::{
    Afno, AfnoConfig, Fno, FnoConfig, Mode, Normalization, PerDim, Result, UNet, UNetConfig, Upsampling,
};
use isobar_shard::{
    Layout, MeshParams, ParamStore, Params, Placement, ShardTensor, Sizes, forbid_hidden_communication,
};
use isobar_torch::guard::Autocast;
use rstest::rstest;
use tch::{Device, Kind, Tensor};

const STEPS: usize = 5;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Subject {
    Afno,
    Fno,
    UNet,
    BatchNormUNet,
    CheckpointedUNet,
}

type Forward<A> = Box<dyn Fn(&A) -> Result<A>>;

impl Subject {
    fn make<A: Array>(self, params: &mut impl Params<Array = A>) -> Forward<A> {
        match self {
            Self::Afno => {
                let config = AfnoConfig {
                    patch_size: [2, 2],
                    embed_dim: 8,
                    depth: 2,
                    num_blocks: 2,
                    ..AfnoConfig::new([16, 12], 2, 2)
                };
                let model = Afno::new(&config, params).unwrap();
                Box::new(move |x| model.forward(x, Mode::Eval))
            }
            Self::Fno => {
                let config = FnoConfig {
                    latent_channels: 8,
                    decoder_layer_size: 8,
                    num_fno_layers: 2,
                    num_fno_modes: PerDim::All(4),
                    padding: PerDim::Each(vec![2]),
                    ..FnoConfig::new(2, 2)
                };
                let model = Fno::new(&config, params).unwrap();
                Box::new(move |x| model.forward(x))
            }
            Self::UNet | Self::BatchNormUNet | Self::CheckpointedUNet => {
                let batch_norm = self == Self::BatchNormUNet;
                let config = UNetConfig {
                    dimension: 2,
                    model_depth: 3,
                    feature_map_channels: vec![4, 4, 6, 6, 8, 8],
                    normalization: if batch_norm {
                        Normalization::BatchNorm
                    } else {
                        Normalization::GroupNorm
                    },
                    upsampling: if batch_norm { Upsampling::Linear } else { Upsampling::default() },
                    gradient_checkpointing: self == Self::CheckpointedUNet,
                    ..UNetConfig::new(2, 2)
                };
                let model = UNet::new(&config, params).unwrap();
                let generator = Generator::new(3);
                Box::new(move |x| model.forward(x, Mode::train(&generator)))
            }
        }
    }
}

fn fields() -> [Tensor; 2] {
    [1, 2].map(|seed| {
        let options = (Kind::Float, Device::Cpu);
        Generator::new(seed).normal(&Window::whole(&[2, 2, 16, 12]), 0.0, 1.0, options).unwrap()
    })
}

fn mixed(on: bool) -> Option<Autocast> {
    on.then(|| Autocast::new(Device::Cpu, Kind::BFloat16).unwrap())
}

/// The losses of a training, and the gradients of its first step.
fn train(store: &ParamStore, mut step: impl FnMut() -> f64) -> (Vec<f64>, Vec<Tensor>) {
    let (mut losses, mut first) = (Vec::new(), Vec::new());
    for _ in 0..STEPS {
        store.zero_grad().unwrap();
        losses.push(step());
        for parameter in store.trainable() {
            let (tensor, grad) = (&parameter.tensor, parameter.tensor.grad());
            assert_eq!([tensor.kind(), grad.kind()], [Kind::Float; 2], "{}", parameter.name);
            if losses.len() == 1 {
                first.push(grad.copy());
            }
            tch::no_grad(|| {
                let _ = tensor.shallow_clone().f_sub_(&(grad * 0.02)).unwrap();
            });
        }
    }
    (losses, first)
}

fn dense(subject: Subject, bf16: bool) -> (Vec<f64>, Vec<Tensor>) {
    let mut store = ParamStore::new(Generator::new(7));
    let model = subject.make(&mut store);
    let [x, target] = fields();
    train(&store, || {
        let precision = mixed(bf16);
        let y = model(&x).unwrap();
        assert!(!bf16 || y.kind() == Kind::BFloat16);
        let loss = y.to_kind(Kind::Float).mse_loss(&target, tch::Reduction::Mean);
        drop(precision);
        loss.backward();
        loss.double_value(&[])
    })
}

fn sharded(
    subject: Subject,
    mesh: &DeviceMesh,
    placements: &[Placement],
    sizes: &Sizes,
) -> (Vec<f64>, Vec<Tensor>) {
    let mut store = ParamStore::new(Generator::new(7));
    let model = subject.make(&mut MeshParams::new(&mut store, mesh));
    let [x, target] = fields().map(|field| {
        let layout = Layout::new(mesh, placements, &field.size(), sizes).unwrap();
        ShardTensor::distribute_as(&field, &layout).unwrap()
    });
    train(&store, || {
        let _forbidden = forbid_hidden_communication();
        let precision = mixed(true);
        let y = model(&x).unwrap();
        assert_eq!(y.kind(), Kind::BFloat16);
        let loss = isobar_array::Reduce::mse_loss(&y.to_kind(Kind::Float).unwrap(), &target).unwrap();
        assert_eq!(loss.kind(), Kind::Float);
        drop(precision);
        loss.backward().unwrap();
        loss.full_tensor(None).unwrap().double_value(&[])
    })
}

fn distance(got: &[Tensor], want: &[Tensor]) -> f64 {
    let squares = |tensors: &mut dyn Iterator<Item = Tensor>| -> f64 {
        tensors.map(|t| t.square().sum(Kind::Double).double_value(&[])).sum()
    };
    let apart = squares(&mut got.iter().zip(want).map(|(got, want)| got - want));
    (apart / squares(&mut want.iter().map(Tensor::shallow_clone))).sqrt()
}

#[rstest]
fn near_single_precision(
    #[values(Subject::Afno, Subject::Fno, Subject::UNet, Subject::BatchNormUNet, Subject::CheckpointedUNet)]
    subject: Subject,
) {
    let [(got, got_grads), (want, want_grads)] = [true, false].map(|bf16| dense(subject, bf16));
    assert_ne!(got, want);
    for (got, want) in got.iter().zip(&want) {
        assert!((got - want).abs() < 1e-2 * want, "{got}, in single precision {want}");
    }
    // The lowest level has 24 values of a channel: by their variance batch norm divides what was rounded.
    let limit = if subject == Subject::BatchNormUNet { 0.2 } else { 0.05 };
    let apart = distance(&got_grads, &want_grads);
    assert!(apart < limit, "gradients differ by {apart}");
}

/// Ranks along each axis with the dim that it splits.
type Axes = &'static [(i64, usize)];

/// With the parts of the rows, where they are not of a size.
const SPLITS: [(Axes, &[i64]); 4] =
    [(&[(2, 2)], &[]), (&[(4, 3)], &[]), (&[(2, 0), (2, 2)], &[]), (&[(3, 2)], &[10, 0, 6])];

/// Allowed distance between two runs in mixed precision, in units of their distance from one in single precision.
const FACTOR: f64 = 3.0;

#[rstest]
fn sharded_as_dense(
    #[values(Subject::Afno, Subject::Fno, Subject::UNet, Subject::BatchNormUNet, Subject::CheckpointedUNet)]
    subject: Subject,
    #[values(0, 1, 2, 3)] split: usize,
) {
    let (want, want_grads) = dense(subject, true);
    // Effect of rounding to bfloat16 on these numbers on this processor.
    let (single, single_grads) = dense(subject, false);
    let off = want.iter().zip(&single).map(|(mixed, single)| (mixed - single).abs() / single);
    let off = off.fold(0.0, f64::max);
    let grads_off = distance(&want_grads, &single_grads);
    let (axes, parts) = SPLITS[split];
    let (mesh_shape, placements): (Vec<i64>, Vec<Placement>) =
        axes.iter().map(|&(ranks, dim)| (ranks, Placement::Shard(dim))).unzip();
    let sizes = if parts.is_empty() { Sizes::Chunk } else { Sizes::Explicit(vec![(2, parts.to_vec())]) };
    let ranks = mesh_shape.iter().product::<i64>() as usize;
    let runs = isobar_collectives::threads::run(ranks, Duration::from_secs(60), move |group| {
        let mesh = DeviceMesh::new(&group, &mesh_shape, &["a", "b"][..mesh_shape.len()]).unwrap();
        sharded(subject, &mesh, &placements, &sizes)
    });
    for (got, got_grads) in runs {
        for (got, want) in got.iter().zip(&want) {
            assert!(
                (got - want).abs() < FACTOR * off * want,
                "{got}, dense {want}, mixed precision is off by {off}"
            );
        }
        let apart = distance(&got_grads, &want_grads);
        assert!(
            apart < FACTOR * grads_off,
            "gradients differ by {apart}, mixed precision is off by {grads_off}"
        );
    }
}
