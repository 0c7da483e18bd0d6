//! Gradients that are left pending, once summed over the ranks, against those that backward sums by itself.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{Generator, Reduce, Window};
use isobar_collectives::{Group, ReduceOp, start};
use isobar_mesh::DeviceMesh;
use isobar_models::{Afno, AfnoConfig, Fno, FnoConfig, Mode, PerDim, UNet, UNetConfig};
use isobar_shard::{MeshParams, ParamStore, Placement, ShardTensor};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

#[derive(Debug, Clone, Copy)]
enum Subject {
    Afno,
    Fno,
    TuckerFno,
    UNet,
}

type Model = Box<dyn Fn(&ShardTensor) -> isobar_models::Result<ShardTensor>>;

impl Subject {
    /// Its fields, which come out as they go in; the third dim is split.
    fn shape(self) -> &'static [i64] {
        match self {
            Self::UNet => &[2, 2, 8, 6, 4],
            _ => &[2, 2, 12, 8],
        }
    }

    fn make(self, params: &mut MeshParams<'_>) -> Model {
        let fno = |params, factorization: &str| -> Model {
            let mut config = FnoConfig {
                latent_channels: 6,
                decoder_layer_size: 5,
                num_fno_layers: 2,
                num_fno_modes: PerDim::All(3),
                rank: 0.5,
                ..FnoConfig::new(2, 2)
            };
            config.factorization = serde_json::from_value(factorization.into()).unwrap();
            let model = Fno::new(&config, params).unwrap();
            Box::new(move |x| model.forward(x))
        };
        match self {
            Self::Afno => {
                let sizes = AfnoConfig::new([12, 8], 2, 2);
                let config =
                    AfnoConfig { patch_size: [2, 2], embed_dim: 8, depth: 2, num_blocks: 2, ..sizes };
                let model = Afno::new(&config, params).unwrap();
                Box::new(move |x| model.forward(x, Mode::Eval))
            }
            Self::Fno => fno(params, "none"),
            Self::TuckerFno => fno(params, "tucker"),
            Self::UNet => {
                let channels = vec![3, 4, 4, 4];
                let config =
                    UNetConfig { model_depth: 2, feature_map_channels: channels, ..UNetConfig::new(2, 2) };
                let model = UNet::new(&config, params).unwrap();
                Box::new(move |x| model.forward(x, Mode::Eval))
            }
        }
    }
}

/// The gradients of a step, by name.
fn gradients(
    subject: Subject,
    group: &Group,
    mesh: &DeviceMesh,
    placements: &[Placement],
    pending: bool,
) -> Vec<(String, Tensor)> {
    let whole = Generator::new(1).normal(&Window::whole(subject.shape()), 0.0, 1.0, DOUBLE).unwrap();
    let x = ShardTensor::distribute(&whole, mesh, placements).unwrap();
    let mut store = ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu);
    let params = MeshParams::new(&mut store, mesh);
    let model = subject.make(&mut if pending { params.pending() } else { params });
    // Twice: what is pending is so in every step.
    for _ in 0..2 {
        store.zero_grad().unwrap();
        model(&x).unwrap().mse_loss(&x).unwrap().backward().unwrap();
    }
    let summed = |gradient: Tensor| match pending {
        true => start::all_reduce(&gradient, ReduceOp::Sum, group).unwrap().wait().unwrap(),
        false => gradient.copy(),
    };
    store.trainable().map(|p| (p.name.clone(), summed(p.tensor.grad()))).collect()
}

#[rstest]
#[case(&[2], &[Placement::Shard(2)])]
#[case(&[3], &[Placement::Shard(2)])]
#[case(&[4], &[Placement::Shard(2)])]
#[case(&[2, 2], &[Placement::Shard(0), Placement::Shard(2)])]
#[case(&[2, 2], &[Placement::Replicate, Placement::Shard(2)])]
fn sums_are_those_of_backward(
    #[values(Subject::Afno, Subject::Fno, Subject::TuckerFno, Subject::UNet)] subject: Subject,
    #[case] mesh: &[i64],
    #[case] placements: &[Placement],
) {
    let (mesh, placements) = (mesh.to_vec(), placements.to_vec());
    let ranks = mesh.iter().product::<i64>() as usize;
    isobar_collectives::threads::run(ranks, Duration::from_secs(120), move |group| {
        let mesh = DeviceMesh::new(&group, &mesh, &["data", "domain"][2 - mesh.len()..]).unwrap();
        let want = gradients(subject, &group, &mesh, &placements, false);
        let got = gradients(subject, &group, &mesh, &placements, true);
        for ((name, got), (_, want)) in got.iter().zip(&want) {
            let scale = want.abs().max().double_value(&[]).max(1e-3);
            let error = (got - want).abs().max().double_value(&[]) / scale;
            assert!(error < 1e-12, "the gradient of {name} differs by {error}");
        }
        assert_eq!(got.len(), want.len());
    });
}

/// Whatever a parameter meets: every rank's gradient is what it contributes.
#[test]
fn used_as_a_whole_and_in_parts() {
    isobar_collectives::threads::run(2, Duration::from_secs(60), |group| {
        let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
        let weight = |pending: bool| {
            use isobar_shard::{Init, Params};
            let mut store = ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu);
            let params = MeshParams::new(&mut store, &mesh);
            let mut params = if pending { params.pending() } else { params };
            let weight = params.param("w", &[3, 3], Init::XavierUniform, Placement::Replicate).unwrap();
            let whole = weight.matmul(&weight).unwrap();
            let split = weight.redistribute(None, &[Placement::Shard(0)]).unwrap();
            let again = split.mul(&split).unwrap().redistribute(None, &[Placement::Replicate]).unwrap();
            let gathered = split.redistribute(None, &[Placement::Replicate]).unwrap();
            let turned = weight.transpose(0, 1).unwrap();
            let joined = ShardTensor::cat(&[&turned, &gathered], 1).unwrap().narrow(1, 1, 3).unwrap();
            let loss = whole.add(&again).unwrap().mul(&joined).unwrap().matmul(&split).unwrap();
            loss.sum().unwrap().backward().unwrap();
            let grad = weight.grad().unwrap();
            assert_eq!(grad.layout().is_partial(), pending);
            grad.full_tensor(None).unwrap()
        };
        assert!(weight(true).allclose(&weight(false), 1e-12, 1e-12, false));
    });
}
