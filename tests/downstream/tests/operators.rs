//! The added operators compute what they do on one rank, and are told apart from built-in ones.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar::array::{Attrs, Elementwise, Unary, args};
use isobar::collectives::{Group, threads};
use isobar::mesh::DeviceMesh;
use isobar::shard::rules::operators;
use isobar::shard::{Placement, ShardTensor, forbid_hidden_communication, grad};
use isobar::tch::{Device, Kind, Tensor};
use isobar::torch::autograd::BackwardOptions;

fn on_ranks(ranks: usize, f: impl Fn(&DeviceMesh) + Send + Sync + 'static) {
    isobar_downstream::register();
    threads::run(ranks, Duration::from_secs(60), move |group: Group| {
        let mesh = DeviceMesh::new(&group, &[ranks as i64], &["domain"]).unwrap();
        let _guard = forbid_hidden_communication();
        f(&mesh);
    });
}

fn numbers(shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    Tensor::arange(count, (Kind::Double, Device::Cpu)).sin().reshape(shape)
}

fn close(a: &Tensor, b: &Tensor) -> bool {
    a.kind() == b.kind() && a.allclose(b, 1e-12, 1e-12, false)
}

/// Runs the operator on every placement of x and checks its value and the gradient of x against the dense function.
fn check(name: &'static str, with_bias: bool, dense: fn(&Tensor, &Tensor) -> Tensor) {
    for ranks in 1..=3 {
        on_ranks(ranks, move |mesh| {
            let (whole, whole_bias) = (numbers(&[5, 4]), numbers(&[4]));
            let leaf = whole.copy().set_requires_grad(true);
            let want = dense(&leaf, &whole_bias);
            (&want * &want).sum(Kind::Double).backward();
            for placement in [Placement::Replicate, Placement::Shard(0), Placement::Shard(1)] {
                let x = ShardTensor::distribute(&whole, mesh, &[placement]).unwrap().detach();
                let x = x.set_requires_grad(true).unwrap();
                let bias = ShardTensor::distribute(&whole_bias, mesh, &[Placement::Replicate]).unwrap();
                let inputs = if with_bias { vec![&x, &bias] } else { vec![&x] };
                let y = ShardTensor::op(name, &inputs, &Attrs::default()).unwrap().remove(0);
                let y = y.redistribute(None, &[Placement::Replicate]).unwrap();
                assert!(close(&y.local().detach(), &want.detach()), "{name} of {}", x.layout());
                let twice =
                    ShardTensor::distribute(&(want.detach() * 2.0), mesh, &[Placement::Replicate]).unwrap();
                let gradient = grad(&[&y], &[&x], &[Some(&twice)], BackwardOptions::default())
                    .unwrap()
                    .remove(0)
                    .unwrap();
                assert!(
                    close(&gradient.full_tensor(None).unwrap(), &leaf.grad()),
                    "{name} of {}",
                    x.layout()
                );
            }
        });
    }
}

#[test]
fn an_operator_registered_as_the_built_in_ones() {
    check("row_energy", false, |x, _| x.square().sum_dim_intlist(1, false, None));
}

#[test]
fn an_operator_whose_sharding_is_declared() {
    check("biased_gelu", true, |x, bias| (x + bias).gelu("none"));
}

#[test]
fn a_built_in_operator_that_is_replaced() {
    check("softmax", false, |x, _| x.softmax(-1, Kind::Double));
    // The replacement computes in double precision; the built-in operator keeps the kind.
    on_ranks(2, |mesh| {
        let x = numbers(&[5, 4]).to_kind(Kind::Float);
        let x = ShardTensor::distribute(&x, mesh, &[Placement::Shard(0)]).unwrap();
        let y = ShardTensor::op("softmax", &[&x], &Attrs::default()).unwrap().remove(0);
        assert_eq!(y.kind(), Kind::Double);
        assert_eq!(x.softmax(-1).unwrap().kind(), Kind::Double);
    });
}

#[test]
fn a_built_in_operator_that_is_replaced_at_link_time() {
    check("softsign", false, |x, _| x / (x.abs() + 1.0));
    on_ranks(2, |mesh| {
        let x = numbers(&[5, 4]).to_kind(Kind::Float);
        let x = ShardTensor::distribute(&x, mesh, &[Placement::Shard(0)]).unwrap();
        let y = ShardTensor::op("softsign", &[&x], &Attrs::default()).unwrap().remove(0);
        assert_eq!(y.kind(), Kind::Double);
        assert_eq!(x.unary(Unary::Softsign).unwrap().kind(), Kind::Double);
    });
}

#[test]
fn an_operator_is_called_with_arguments() {
    on_ranks(2, |mesh| {
        let x = ShardTensor::distribute(&numbers(&[5, 4]), mesh, &[Placement::Shard(0)]).unwrap();
        let scaled = |attrs: &Attrs| ShardTensor::op("row_energy", &[&x], attrs).unwrap().remove(0);
        let [plain, tripled] = [&args!()(), &args!("factor": 3.0)()].map(scaled);
        let want = (numbers(&[5, 4]) * 3.0).square().sum_dim_intlist(1, false, None);
        assert!(close(&tripled.full_tensor(None).unwrap(), &want));
        assert!(!close(&plain.full_tensor(None).unwrap(), &want));
    });
}

#[test]
fn all_operators_are_listed_once() {
    let operators = operators();
    let of = |name: &str| operators.iter().filter(|operator| operator.name() == name).collect::<Vec<_>>();
    assert!(of("row_energy").iter().all(|operator| !operator.is_built_in()));
    let [softsign] = of("softsign")[..] else { panic!("softsign is listed {} times", of("softsign").len()) };
    assert!(!softsign.is_built_in());
    assert_eq!(softsign.summary(), "x / (1 + |x|) in double precision, whatever comes in.");
    assert!(of("conv2d").iter().all(|operator| operator.tensors() == ["input", "weight", "bias"]));
}

#[test]
fn a_wrong_call_by_name_is_refused_with_what_is_wrong() {
    on_ranks(2, |mesh| {
        let x = ShardTensor::distribute(&numbers(&[5, 4]), mesh, &[Placement::Shard(0)]).unwrap();
        let refused =
            |name: &str, attrs: &Attrs| ShardTensor::op(name, &[&x], attrs).unwrap_err().to_string();
        let text = refused("cumsum", &Attrs::default());
        assert!(text.contains("cumsum") && text.contains("\"dim\" is missing"), "{text}");
        let text = refused("matmul", &Attrs::default());
        assert!(text.contains("matmul") && text.contains("expected at least"), "{text}");
    });
}
