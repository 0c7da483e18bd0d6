//! Every registered loss of sharded fields is that of the whole fields, with its gradients.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_collectives::threads;
use isobar_manager::DeviceMesh;
use isobar_shard::{Placement, ShardTensor, forbid_hidden_communication};
use isobar_train::loss::{LossKind, registered};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

fn fields() -> [Tensor; 2] {
    let at = Tensor::arange(4 * 2 * 7 * 2, (Kind::Double, Device::Cpu)).view([4, 2, 7, 2]);
    [1.3, 2.1].map(|rate| (&at * rate).sin() * rate)
}

/// The loss of dense fields, and its gradient.
fn dense(loss: &LossKind) -> [Tensor; 2] {
    let [prediction, target] = fields();
    let prediction = prediction.set_requires_grad(true);
    let value = loss.of(&prediction, &target).unwrap();
    value.backward();
    [value.detach(), prediction.grad()]
}

fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    (a - b).abs().sum(Kind::Double).double_value(&[])
}

#[rstest]
#[case::samples(2, 0)]
#[case::rows(2, 2)]
#[case::uneven_rows(3, 2)]
#[case::an_empty_shard(3, 3)]
fn losses_are_the_same_on_shards(#[case] ranks: usize, #[case] dim: usize) {
    assert!(registered().len() >= 5);
    for name in registered() {
        let checked = threads::run(ranks, Duration::from_secs(240), |world| {
            let loss: LossKind = serde_json::from_value(name.into()).unwrap();
            let [want, gradient] = dense(&loss);
            let mesh = DeviceMesh::new(&world, &[-1], &["domain"]).unwrap();
            let places = [Placement::Shard(dim)];
            let [prediction, target] = fields();
            let _guard = forbid_hidden_communication();
            let leaf = ShardTensor::distribute(&prediction, &mesh, &places).unwrap();
            let part = leaf.local().detach().set_requires_grad(true);
            let prediction = ShardTensor::from_parts(&part, leaf.layout()).unwrap();
            let target = ShardTensor::distribute(&target, &mesh, &places).unwrap();
            let got = loss.of(&prediction, &target).unwrap().full_tensor(None).unwrap();
            assert!(difference(&got, &want) < 1e-12, "{name}: {got:?} {want:?}");
            got.backward();
            let gradient = ShardTensor::distribute(&gradient, &mesh, &places).unwrap();
            assert!(difference(&part.grad(), gradient.local()) < 1e-12, "{name}");
        });
        assert_eq!(checked.len(), ranks);
    }
}
