//! Operators by name with the forms of arguments that PyTorch takes, against dense ones on every layout.

use isobar_array::{Array, Attrs};
use isobar_shard::ShardTensor;
use isobar_shard::args;
use rstest::rstest;
use tch::Tensor;

use crate::common::{Dice, MESHES, numbers, on_mesh, same};

const ROUNDS: usize = 12;
const NEAR: f64 = 1e-9;

/// The first result of an operator by name.
fn call(name: &str, inputs: &[ShardTensor], attrs: Attrs) -> isobar_shard::Result<ShardTensor> {
    Ok(ShardTensor::op(name, &inputs.iter().collect::<Vec<_>>(), &attrs)?.remove(0))
}

/// The error of an operator on dense tensors.
fn refused(name: &str, inputs: &[&Tensor], attrs: Attrs) -> String {
    Tensor::op(name, inputs, &attrs).unwrap_err().to_string()
}

#[rstest]
fn norms_and_distances_take_infinite_orders(#[values(1, 2, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(7);
        for round in 0..ROUNDS {
            let (a, b) = ([dice.roll(1, 7), 3], [dice.roll(1, 7), 3]);
            let (la, lb) = (dice.layout(mesh, &a, &[0, 1]), dice.layout(mesh, &b, &[0, 1]));
            let (x, y) = (numbers(&a, round as i64), numbers(&b, 9));
            let both = [(&x, &la), (&y, &lb)];
            same(
                "cdist",
                &both,
                NEAR,
                |t| call("cdist", t, args!("p": "inf")()),
                |t| Tensor::f_cdist(&t[0], &t[1], f64::INFINITY, None),
            );
            for (name, p) in [("p", f64::INFINITY), ("ord", f64::NEG_INFINITY)] {
                let word = if p > 0.0 { "inf" } else { "-inf" };
                let attrs =
                    || Attrs::from_iter([(name.to_owned(), word.into()), ("dim".to_owned(), 0.into())]);
                same(
                    word,
                    &both[..1],
                    NEAR,
                    |t| call("norm", t, attrs()),
                    |t| t[0].f_norm_scalaropt_dim(p, [0].as_slice(), false),
                );
            }
            same(
                "fro",
                &both[..1],
                NEAR,
                |t| call("norm", t, args!("p": "fro", "keepdim": true)()),
                |t| t[0].f_norm_scalaropt_dim(2.0, [0, 1].as_slice(), true),
            );
        }
    });
}

#[test]
fn orders_without_a_norm_are_refused() {
    let x = numbers(&[0, 2], 1);
    let text = refused("norm", &[&x], args!("p": "inf", "dim": 0)());
    assert!(text.contains("p is inf for no elements; expected a finite order of 0 or more"), "{text}");
    let text = refused("norm", &[&x], args!("p": "nan")());
    assert!(text.contains("expected a number, \"inf\" or \"-inf\""), "{text}");
    let text = refused("norm", &[&x], args!("p": 1, "ord": 1)());
    assert!(text.contains("both \"p\" and \"ord\" are given"), "{text}");
    let text = refused("cdist", &[&x, &x], args!("p": "infinity")());
    assert!(text.contains("the argument \"p\" is \"infinity\""), "{text}");
}
