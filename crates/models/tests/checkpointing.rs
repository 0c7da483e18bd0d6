//! Models that compute their blocks again in backward against themselves that keep everything: outputs, losses, gradients and
//! running statistics, on one rank and sharded.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{Array, Generator, Reduce, Window};
use isobar_mesh::DeviceMesh;
use isobar_models::{
    Afno, AfnoConfig, Fno, FnoConfig, ModAfno, ModAfnoConfig, ModEmbedConfig, Mode, Normalization, PerDim,
    Result, SrResNet, SrResNetConfig, UNet, UNetConfig,
};
use isobar_shard::{MeshParams, ParamStore, Params, Placement, ShardTensor, forbid_hidden_communication};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
const STEPS: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Subject {
    Afno,
    ModAfno,
    Fno,
    UNet,
    BatchNormUNet,
    SrResNet,
}

type Forward<A> = Box<dyn Fn(&A, &A, Mode<'_>) -> Result<A>>;

impl Subject {
    fn make<A: Array>(self, gradient_checkpointing: bool, params: &mut impl Params<Array = A>) -> Forward<A> {
        match self {
            Self::Afno => {
                let config = AfnoConfig {
                    patch_size: [2, 3],
                    embed_dim: 6,
                    depth: 2,
                    num_blocks: 2,
                    drop_rate: 0.3,
                    gradient_checkpointing,
                    ..AfnoConfig::new([12, 18], 2, 2)
                };
                let model = Afno::new(&config, params).unwrap();
                Box::new(move |x, _, mode| model.forward(x, mode))
            }
            Self::ModAfno => {
                let config = ModAfnoConfig {
                    in_channels: 2,
                    out_channels: 2,
                    embed_model: ModEmbedConfig { dim: 4, ..Default::default() },
                    mod_dim: 4,
                    patch_size: [2, 3],
                    embed_dim: 6,
                    depth: 2,
                    num_blocks: 2,
                    drop_rate: 0.3,
                    gradient_checkpointing,
                    ..ModAfnoConfig::new([12, 18])
                };
                let model = ModAfno::new(&config, params).unwrap();
                Box::new(move |x, modulation, mode| model.forward(x, modulation, mode))
            }
            Self::Fno => {
                let config = FnoConfig {
                    latent_channels: 4,
                    decoder_layer_size: 4,
                    num_fno_layers: 3,
                    num_fno_modes: PerDim::All(4),
                    padding: PerDim::Each(vec![2]),
                    gradient_checkpointing,
                    ..FnoConfig::new(2, 2)
                };
                let model = Fno::new(&config, params).unwrap();
                Box::new(move |x, _, _| model.forward(x))
            }
            Self::UNet | Self::BatchNormUNet => {
                let normalization = match self {
                    Self::UNet => Normalization::GroupNorm,
                    _ => Normalization::BatchNorm,
                };
                let config = UNetConfig {
                    dimension: 2,
                    model_depth: 2,
                    feature_map_channels: vec![3, 4, 5, 5],
                    normalization,
                    gradient_checkpointing,
                    ..UNetConfig::new(2, 2)
                };
                let model = UNet::new(&config, params).unwrap();
                Box::new(move |x, _, mode| model.forward(x, mode))
            }
            Self::SrResNet => {
                let config = SrResNetConfig {
                    large_kernel_size: 5,
                    conv_layer_size: 3,
                    n_resid_blocks: 2,
                    scaling_factor: 2,
                    gradient_checkpointing,
                    ..SrResNetConfig::new(2, 2)
                };
                let model = SrResNet::new(&config, params).unwrap();
                Box::new(move |x, _, mode| model.forward(x, mode))
            }
        }
    }

    fn field(self) -> Tensor {
        let shape: &[i64] = match self {
            Self::SrResNet => &[2, 2, 5, 4, 3],
            _ => &[2, 2, 12, 18],
        };
        Generator::new(1).normal(&Window::whole(shape), 0.0, 1.0, DOUBLE).unwrap()
    }
}

/// Results of a training run, as global tensors.
struct Run {
    losses: Vec<f64>,
    /// The gradient of the field, then those of the parameters, of the last step.
    grads: Vec<(String, Tensor)>,
    /// Parameters and buffers in the end.
    state: Vec<(String, Tensor)>,
}

/// Trains; `step` runs forward and backward, and returns the loss and the field's gradient.
fn train(store: &ParamStore, mut step: impl FnMut(&Generator) -> (f64, Tensor)) -> Run {
    let generator = Generator::new(3);
    let (mut losses, mut grads) = (Vec::new(), Vec::new());
    for _ in 0..STEPS {
        store.zero_grad().unwrap();
        let (loss, of_field) = step(&generator);
        losses.push(loss);
        // Numbers drawn in between are not drawn again.
        generator.next_u64();
        grads = vec![("field".into(), of_field)];
        grads.extend(store.trainable().map(|p| (p.name.clone(), p.tensor.grad().copy())));
        tch::no_grad(|| {
            for parameter in store.trainable() {
                let _ = parameter.tensor.shallow_clone().f_sub_(&(parameter.tensor.grad() * 0.02)).unwrap();
            }
        });
    }
    let state = store.parameters().iter().map(|p| (p.name.clone(), p.tensor.detach().copy())).collect();
    Run { losses, grads, state }
}

fn store() -> ParamStore {
    ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu)
}

fn modulation() -> Tensor {
    Tensor::from_slice(&[0.3, -0.6]).view([2, 1])
}

fn dense(subject: Subject, checkpointing: bool, field_has_gradient: bool) -> Run {
    let mut store = store();
    let model = subject.make(checkpointing, &mut store);
    let x = subject.field();
    let modulation = modulation();
    train(&store, |generator| {
        let x = x.copy().set_requires_grad(field_has_gradient);
        let loss = model(&x, &modulation, Mode::train(generator)).unwrap().square().mean(Kind::Double);
        loss.backward();
        (loss.double_value(&[]), x.grad())
    })
}

fn sharded(subject: Subject, mesh: &DeviceMesh, placements: &[Placement]) -> Run {
    let mut store = store();
    let model = subject.make(true, &mut MeshParams::new(&mut store, mesh));
    let whole = ShardTensor::distribute(&subject.field(), mesh, placements).unwrap();
    let of_batch: Vec<Placement> = placements
        .iter()
        .map(|placement| if *placement == Placement::Shard(0) { *placement } else { Placement::Replicate })
        .collect();
    let modulation = ShardTensor::distribute(&modulation(), mesh, &of_batch).unwrap();
    train(&store, |generator| {
        let _forbidden = forbid_hidden_communication();
        let x = whole.detach().set_requires_grad(true).unwrap();
        let y = model(&x, &modulation, Mode::train(generator)).unwrap();
        let loss = Reduce::mean(&y.mul(&y).unwrap()).unwrap();
        loss.backward().unwrap();
        let grad = x.grad().unwrap();
        assert_eq!(grad.layout(), x.layout());
        let loss = loss.full_tensor(None).unwrap().double_value(&[]);
        (loss, grad.full_tensor(None).unwrap())
    })
}

fn assert_same(got: &Run, want: &Run, tolerance: f64) {
    for (got, want) in got.losses.iter().zip(&want.losses) {
        assert!((got - want).abs() <= tolerance * want.abs(), "losses {got}, {want}");
    }
    for (what, [got, want]) in [("gradient", [&got.grads, &want.grads]), ("state", [&got.state, &want.state])]
    {
        assert_eq!(got.len(), want.len());
        for ((name, got), (_, want)) in got.iter().zip(want) {
            let scale = want.abs().max().double_value(&[]).max(1e-3);
            let error = (got - want).abs().max().double_value(&[]) / scale;
            assert!(error <= tolerance, "{what} of {name} differs by {error}");
        }
    }
}

#[rstest]
fn dense_models(
    #[values(
        Subject::Afno,
        Subject::ModAfno,
        Subject::Fno,
        Subject::UNet,
        Subject::BatchNormUNet,
        Subject::SrResNet
    )]
    subject: Subject,
) {
    assert_same(&dense(subject, true, true), &dense(subject, false, true), 1e-12);
    // The first block's input may want none.
    let [mut got, mut want] = [true, false].map(|on| dense(subject, on, false));
    for run in [&mut got, &mut want] {
        run.grads.drain(..1);
    }
    assert_same(&got, &want, 1e-12);
}

#[rstest]
fn sharded_models(
    #[values(
        Subject::Afno,
        Subject::ModAfno,
        Subject::Fno,
        Subject::UNet,
        Subject::BatchNormUNet,
        Subject::SrResNet
    )]
    subject: Subject,
    #[values(&[(2, 2)], &[(3, 2)], &[(4, 3)], &[(2, 2), (2, 3)], &[(2, 0), (2, 2)])] axes: &[(i64, usize)],
) {
    let want = dense(subject, false, true);
    let (mesh_shape, placements): (Vec<i64>, Vec<Placement>) =
        axes.iter().map(|&(ranks, dim)| (ranks, Placement::Shard(dim))).unzip();
    let ranks = mesh_shape.iter().product::<i64>() as usize;
    let runs = isobar_collectives::threads::run(ranks, Duration::from_secs(120), move |group| {
        let mesh = DeviceMesh::new(&group, &mesh_shape, &["a", "b"][..mesh_shape.len()]).unwrap();
        sharded(subject, &mesh, &placements)
    });
    for got in runs {
        assert_same(&got, &want, 1e-10);
    }
}
