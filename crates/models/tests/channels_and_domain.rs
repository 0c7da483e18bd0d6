//! Channels split along one axis of a mesh and fields along others, at once, against the same model on one rank.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{Generator, Reduce, Window};
use isobar_collectives::{Group, ReduceOp, start};
use isobar_harness::Memo;
use isobar_mesh::DeviceMesh;
use isobar_models::{DistributedAfno, DistributedAfnoConfig, Mode};
use isobar_shard::{
    MeshParams, ParallelRegion, ParamStore, Placement, ShardTensor, forbid_hidden_communication,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
const SHAPE: [i64; 4] = [2, 2, 12, 8];
const STEPS: usize = 20;
const RATE: f64 = 0.05;

fn config() -> DistributedAfnoConfig {
    DistributedAfnoConfig {
        patch_size: 2,
        embed_dim: 8,
        depth: 2,
        num_blocks: 4,
        ..DistributedAfnoConfig::new([12, 8], 2)
    }
}

fn random(seed: u64) -> Tensor {
    Generator::new(seed).normal(&Window::whole(&SHAPE), 0.0, 1.0, DOUBLE).unwrap()
}

fn store() -> ParamStore {
    ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu)
}

/// A mesh, and how the fields lie on it.
fn mesh(group: &Group, shape: &[i64], names: &[&str]) -> (DeviceMesh, Vec<Placement>) {
    let place = |name: &&str| match *name {
        "data" => Placement::Shard(0),
        "domain" => Placement::Shard(2),
        "domain_y" => Placement::Shard(3),
        _ => Placement::Replicate,
    };
    (DeviceMesh::new(group, shape, names).unwrap(), names.iter().map(place).collect())
}

/// The output and the gradients of the first step on one rank, and the loss of each.
type Dense = (Tensor, Vec<Tensor>, Vec<f64>);

static DENSE: Memo<Dense> = Memo::new();

/// Trains by gradient descent on one rank.
fn dense() -> Dense {
    let store = &mut store();
    let model = DistributedAfno::new(&config(), store).unwrap();
    let mut first = None;
    let losses = (0..STEPS).map(|_| {
        store.zero_grad().unwrap();
        let output = model.forward(&random(1), Mode::Eval).unwrap();
        let loss = output.mse_loss(&random(2), tch::Reduction::Mean);
        loss.backward();
        first.get_or_insert_with(|| {
            let grads = store.trainable().map(|p| p.tensor.grad().copy()).collect();
            (output.detach(), grads)
        });
        store.trainable().for_each(|p| descend(&p.tensor, &p.tensor.grad()));
        loss.double_value(&[])
    });
    let losses = losses.collect();
    let (output, grads) = first.unwrap();
    (output, grads, losses)
}

fn descend(parameter: &Tensor, grad: &Tensor) {
    tch::no_grad(|| {
        let _ = parameter.shallow_clone().g_sub_(&(grad * RATE));
    });
}

#[rstest]
#[case(&[1, 2], &["domain", "model"])]
#[case(&[2, 1], &["domain", "model"])]
#[case(&[2, 2], &["domain", "model"])]
#[case(&[3, 2], &["domain", "model"])]
#[case(&[2, 2], &["model", "domain"])]
#[case(&[2, 4], &["domain", "model"])]
#[case(&[2, 2, 2], &["data", "domain", "model"])]
#[case(&[2, 2, 2], &["domain", "domain_y", "model"])]
fn the_same_as_on_one_rank(
    #[case] shape: &[i64],
    #[case] names: &[&str],
    #[values(false, true)] pending: bool,
) {
    check(config(), (shape, names), pending);
}

#[test]
fn what_is_computed_again_is_the_same() {
    let config = DistributedAfnoConfig { gradient_checkpointing: true, ..config() };
    check(config, (&[2, 2], &["domain", "model"]), true);
}

fn check(config: DistributedAfnoConfig, (shape, names): (&[i64], &[&str]), pending: bool) {
    let ranks = shape.iter().product::<i64>() as usize;
    isobar_collectives::threads::run(ranks, Duration::from_secs(120), |group| {
        let (output, grads, losses) = DENSE.with(String::new(), dense, |(output, grads, losses)| {
            let grads: Vec<Tensor> = grads.iter().map(Tensor::copy).collect();
            (output.copy(), grads, losses.clone())
        });
        let (mesh, places) = mesh(&group, shape, names);
        let along = mesh.group("model").unwrap();
        let mut store = store().with_region(ParallelRegion::new(along.clone()));
        let params = MeshParams::new(&mut store, &mesh).along("model").unwrap();
        let model =
            DistributedAfno::new(&config, &mut if pending { params.pending() } else { params }).unwrap();
        let x = ShardTensor::distribute(&random(1), &mesh, &places).unwrap();
        let target = ShardTensor::distribute(&random(2), &mesh, &places).unwrap();
        let others: Vec<usize> = (0..names.len()).filter(|&axis| names[axis] != "model").collect();
        let others = mesh.group_along(&others).unwrap();
        for (step, want_loss) in losses.iter().enumerate() {
            store.zero_grad().unwrap();
            let got = {
                let _guard = forbid_hidden_communication();
                let got = model.forward(&x, Mode::Eval).unwrap();
                let loss = got.mse_loss(&target).unwrap();
                loss.backward().unwrap();
                let loss = loss.full_tensor(None).unwrap().double_value(&[]);
                assert!((loss / want_loss - 1.0).abs() < 1e-10, "step {step}: {loss}, expected {want_loss}");
                got
            };
            if step == 0 {
                assert_close("the output", &got.full_tensor(None).unwrap(), &output);
            }
            for (own, want) in store.trainable().zip(&grads) {
                let mut grad = own.tensor.grad();
                if pending {
                    grad = start::all_reduce(&grad, ReduceOp::Sum, &others).unwrap().wait().unwrap();
                }
                descend(&own.tensor, &grad);
                if step == 0 {
                    if let Placement::Shard(dim) = own.placement {
                        let whole = start::all_gather_v(&grad, None, dim as i64, &along);
                        grad = whole.unwrap().wait().unwrap();
                    }
                    assert_close(&own.name, &grad, want);
                }
            }
        }
    });
}

fn assert_close(what: &str, got: &Tensor, want: &Tensor) {
    let scale = want.abs().max().double_value(&[]).max(1e-3);
    let error = (got - want).abs().max().double_value(&[]) / scale;
    assert!(error < 1e-10, "{what} differs by {error}");
}
