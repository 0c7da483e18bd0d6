//! Operators by name with the forms of arguments that PyTorch takes, against dense ones on every layout.

use isobar_array::{Array, Attrs, Statistic};
use isobar_shard::{Placement, ShardTensor, args};
use rstest::rstest;
use tch::{Kind, Tensor};

use crate::common::{Dice, MESHES, Split, difference, numbers, on_mesh, same};

const ROUNDS: usize = 12;
const NEAR: f64 = 1e-9;

/// The first result of an operator by name.
fn call(name: &str, inputs: &[ShardTensor], attrs: Attrs) -> isobar_shard::Result<ShardTensor> {
    Ok(ShardTensor::op(name, &inputs.iter().collect::<Vec<_>>(), &attrs)?.remove(0))
}

/// The error of an operator on dense tensors.
fn refused(name: &str, inputs: &[&Tensor], attrs: Attrs) -> String {
    Tensor::op(name, inputs, &attrs).expect_err("a refusal").to_string()
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

#[rstest]
fn activations_take_their_parameters(#[values(1, 2, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(11);
        for round in 0..ROUNDS {
            let shape = [dice.roll(1, 6), dice.roll(1, 6)];
            // Zeros, at which functions have corners.
            let x = numbers(&shape, round as i64).f_round().unwrap();
            let x = if dice.chance(2) { x } else { numbers(&shape, 3) };
            let layout = dice.layout(mesh, &shape, &[0, 1]);
            let with = [(&x, &layout)];
            let (alpha, beta) = (*dice.pick(&[0.3, 2.5, -1.0]), *dice.pick(&[0.5, 3.0, -2.0]));
            // libtorch's own gradients: those of its backward kernels.
            let elu = |x: &Tensor, rate: f64| {
                let low = (x.clamp_max(0.0) * rate).expm1() * alpha;
                x.f_where_self(&x.gt(0.0), &low)
            };
            let attrs = || args!("alpha": alpha, "inplace": false)();
            same("elu", &with, NEAR, |t| call("elu", t, attrs()), |t| elu(&t[0], 1.0));
            same("celu", &with, NEAR, |t| call("celu", t, attrs()), |t| elu(&t[0], 1.0 / alpha));
            let attrs = || args!("beta": beta, "threshold": 1.0)();
            same(
                "softplus",
                &with,
                NEAR,
                |t| call("softplus", t, attrs()),
                |t| t[0].f_where_self(&(&t[0] * beta).gt(1.0), &((&t[0] * beta).exp().log1p() / beta)),
            );
        }
    });
}

/// Values and gradients against PyTorch 2.11.
#[test]
fn activations_with_parameters_are_those_of_pytorch() {
    let check = |name: &str, attrs: Attrs, values: &[f64], slopes: &[f64]| {
        let x = Tensor::from_slice(&[-1.5, -0.25, 0.0, 0.5, 2.0]).set_requires_grad(true);
        let y = Tensor::op(name, &[&x], &attrs).unwrap().remove(0);
        y.sum(Kind::Double).backward();
        for (got, want) in [(&y, values), (&x.grad(), slopes)] {
            assert!(difference(got, &Tensor::from_slice(want)) < 1e-12, "{name}: {got:?} is not {want:?}");
        }
    };
    check(
        "elu",
        args!("alpha": 0.5)(),
        &[-0.3884349199257851, -0.11059960846429756, 0.0, 0.5, 2.0],
        &[0.11156508007421491, 0.38940039153570244, 0.5, 1.0, 1.0],
    );
    check(
        "elu",
        args!("alpha": -2.0)(),
        &[1.5537396797031404, 0.44239843385719024, 0.0, 0.5, 2.0],
        &[-0.44626032029685964, -1.5576015661428098, -2.0, 1.0, 1.0],
    );
    check(
        "celu",
        args!("alpha": 0.5)(),
        &[-0.475106465816068, -0.1967346701436833, 0.0, 0.5, 2.0],
        &[0.049787068367863944, 0.6065306597126334, 1.0, 1.0, 1.0],
    );
    check(
        "celu",
        args!("alpha": -2.0)(),
        &[-2.2340000332253496, -0.26629690613365264, 0.0, 0.5, 2.0],
        &[2.117000016612675, 1.1331484530668263, 1.0, 1.0, 1.0],
    );
    check(
        "softplus",
        args!("beta": 2.0)(),
        &[
            0.02429367578687103,
            0.23703849209005334,
            0.34657359027997264,
            0.6566308437591114,
            2.0090749639589047,
        ],
        &[0.04742587317756679, 0.37754066879814546, 0.5, 0.7310585786300049, 0.9820137900379085],
    );
    check(
        "softplus",
        args!("beta": 3.0, "threshold": 1.5)(),
        &[0.003682581616197939, 0.1289570020383, 0.23104906018664842, 0.5671377593275841, 2.0],
        &[0.01098694263059318, 0.32082130082460697, 0.5, 0.8175744761936437, 1.0],
    );
}

#[rstest]
fn sums_take_a_factor(#[values(1, 2, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(13);
        for round in 0..ROUNDS {
            let shape = [dice.roll(1, 5), dice.roll(1, 5), dice.roll(1, 5)];
            let beside: Vec<i64> = shape[dice.roll(0, 2) as usize..].to_vec();
            let (x, y) = (numbers(&shape, round as i64), numbers(&beside, 50));
            let (lx, ly) = (
                dice.layout(mesh, &shape, &[0, 1, 2]),
                dice.layout(mesh, &beside, &(0..beside.len()).collect::<Vec<_>>()),
            );
            let alpha = *dice.pick(&[2.0, -0.5, 0.0]);
            let attrs = || args!("alpha": alpha)();
            for whole in [&y, &(&y * 3.0).to_kind(Kind::Int64)] {
                let both = [(&x, &lx), (whole, &ly)];
                same("add", &both, NEAR, |t| call("add", t, attrs()), |t| t[0].f_add(&(&t[1] * alpha)));
                same("sub", &both, NEAR, |t| call("sub", t, attrs()), |t| t[0].f_sub(&(&t[1] * alpha)));
            }
            let attrs = || args!("alpha": alpha, "other": 3.0)();
            same("add", &[(&x, &lx)], NEAR, |t| call("add", t, attrs()), |t| t[0].f_add_scalar(3.0 * alpha));
            let count = dice.roll(0, 6);
            let picks: Vec<i64> = (0..count).map(|_| dice.roll(0, shape[1] - 1)).collect();
            let (index, source) = (Tensor::from_slice(&picks), numbers(&[shape[0], count, shape[2]], 4));
            let (li, ls) = (dice.layout(mesh, &[count], &[0]), dice.layout(mesh, &source.size(), &[0, 1, 2]));
            same(
                "index_add",
                &[(&x, &lx), (&index, &li), (&source, &ls)],
                NEAR,
                |t| call("index_add", t, args!("dim": 1, "alpha": alpha)()),
                |t| t[0].f_index_add(1, &t[1], &(&t[2] * alpha)),
            );
        }
    });
}

/// Between, 16 bits are computed in single precision: e¹⁶ is not finite in `Half`.
#[test]
fn softplus_of_16_bits_is_finite() {
    let x = Tensor::from_slice(&[8.0_f32]).to_kind(Kind::Half);
    let y = Tensor::op("softplus", &[&x], &args!("beta": 2.0)()).unwrap().remove(0);
    assert_eq!((y.kind(), y), (Kind::Half, x));
}

/// A sum keeps PyTorch's dtype.
#[test]
fn a_factor_is_of_the_dtype_of_the_sum() {
    let add = |x: &Tensor, y: &Tensor, alpha: f64| Tensor::op("add", &[x, y], &args!("alpha": alpha)());
    let (whole, half) = (Tensor::from_slice(&[1_i32, 2]), Tensor::from_slice(&[0.5_f32, 1.0]));
    let sum = add(&whole, &whole, 3.0).unwrap().remove(0);
    assert_eq!((sum.kind(), sum), (Kind::Int, Tensor::from_slice(&[4_i32, 8])));
    let sum = add(&half.to_kind(Kind::Half), &whole, 0.5).unwrap().remove(0);
    assert_eq!((sum.kind(), sum), (Kind::Half, Tensor::from_slice(&[1.0_f32, 2.0]).to_kind(Kind::Half)));
    let text = add(&whole, &whole, 0.5).unwrap_err().to_string();
    assert!(text.contains("\"alpha\" is 0.5 for a result of dtype Int; expected an integer"), "{text}");
    let truth = Tensor::from_slice(&[true, false]);
    assert!(add(&truth, &truth, 2.0).is_err());
    assert_eq!(add(&truth, &whole, 2.0).unwrap().remove(0), Tensor::from_slice(&[3_i32, 4]));
}

#[rstest]
fn equations_take_an_ellipsis(#[values(1, 2, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(19);
        for round in 0..ROUNDS {
            let (n, m, i, k) = (dice.roll(1, 4), dice.roll(2, 5), dice.roll(1, 5), dice.roll(1, 5));
            let (a, b) = ([n, m, i, k], [*dice.pick(&[1, m]), k, i]);
            let (x, y) = (numbers(&a, round as i64), numbers(&b, 8));
            let (lx, ly) = (dice.layout(mesh, &a, &[0, 1, 2, 3]), dice.layout(mesh, &b, &[0, 1, 2]));
            let both = [(&x, &lx), (&y, &ly)];
            for (equation, count) in [
                ("...ik,...ki->...i", 2),
                ("...ik, ...kj -> ji...", 2),
                ("...ik,...kj", 2),
                ("...ik,...kj->ij", 2),
                ("a...->...", 1),
                ("...ab->...ba", 1),
                ("abcd,...->...a", 2),
            ] {
                same(
                    equation,
                    &both[..count],
                    NEAR,
                    |t| ShardTensor::einsum(equation, &t.iter().collect::<Vec<_>>()),
                    |t| Tensor::f_einsum(equation, t, None::<i64>),
                );
            }
        }
    });
    let x = numbers(&[2, 3], 1);
    let text = refused("einsum", &[&x], args!("equation": "...a...->a")());
    assert!(text.contains("has several \"...\"; expected one"), "{text}");
    let text = refused("einsum", &[&x], args!("equation": "abc...->a")());
    assert!(text.contains("names more than the 2 dims of its tensor"), "{text}");
}

#[rstest]
fn orders_and_splits_have_the_defaults_of_pytorch(#[values(1, 2, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(23);
        for round in 0..ROUNDS {
            let shape = [dice.roll(2, 7), dice.roll(1, 3)];
            let layout = dice.layout(mesh, &shape, &[0, 1]);
            let x = numbers(&shape, round as i64);
            let with = [(&x, &layout)];
            same(
                "sort",
                &with,
                NEAR,
                |t| call("sort", t, args!("stable": true)()),
                |t| Ok(t[0].f_sort(-1, false)?.0),
            );
            same("unbind", &with, NEAR, |t| call("unbind", t, Attrs::new()), |t| t[0].f_select(0, 0));
            same("split", &with, NEAR, |t| call("split", t, args!("sizes": 2)()), |t| t[0].f_narrow(0, 0, 2));
            same(
                "layer_norm",
                &with,
                NEAR,
                |t| call("layer_norm", t, args!("normalized_shape": shape[1])()),
                |t| t[0].f_layer_norm([shape[1]], None::<&Tensor>, None::<&Tensor>, 1e-5, false),
            );
            // One row of few distinct numbers: the order of equal ones shows.
            let row = (numbers(&[17], round as i64) * 1.2).round();
            let split = dice.layout(mesh, &[17], &[0]);
            for descending in [false, true] {
                let attrs = || args!("stable": true, "descending": descending)();
                let order = |t: &[ShardTensor]| {
                    Ok(ShardTensor::op("sort", &t.iter().collect::<Vec<_>>(), &attrs())?.remove(1))
                };
                same("stable", &[(&row, &split)], NEAR, order, |t| {
                    Ok(t[0].f_sort_stable(true, 0, descending)?.1)
                });
            }
        }
    });
    let x = numbers(&[5, 2], 1);
    let parts = Tensor::op("split", &[&x], &args!("split_size_or_sections": 2)()).unwrap();
    assert_eq!(parts.iter().map(|part| part.size()[0]).collect::<Vec<_>>(), [2, 2, 1]);
    let text = refused("split", &[&x], args!("sizes": 0)());
    assert!(text.contains("\"sizes\" is 0; expected at least 1, or a list of extents"), "{text}");
}

/// Integers by an integer stay integers; by a floating number they become `Float`, as in PyTorch.
#[rstest]
fn integers_stay_integers(#[values(1, 2, 4)] mesh: usize) {
    on_mesh(MESHES[mesh], |mesh| {
        let mut dice = Dice(29);
        for kind in [Kind::Int64, Kind::Int, Kind::Uint8] {
            let x = (numbers(&[7, 3], 4) * 5.0).abs().to_kind(kind);
            let layout = dice.layout(mesh, &[7, 3], &[0, 1]);
            let check = |name: &str, attrs: Attrs, want: Tensor| {
                let x = [ShardTensor::distribute_as(&x, &layout).unwrap()];
                let y = call(name, &x, attrs).unwrap().full_tensor(None).unwrap();
                assert_eq!((name, y.kind(), difference(&y, &want)), (name, want.kind(), 0.0));
            };
            check("mul", args!("other": 3)(), x.f_mul_scalar(3).unwrap());
            check("mul", args!("other": 3.0)(), x.f_mul_scalar(3.0).unwrap());
            check("add", args!("other": 3, "alpha": 2)(), x.f_add_scalar(6).unwrap());
            check("add", args!("other": 3.0)(), x.f_add_scalar(3.0).unwrap());
            check("sub", args!("other": 3)(), x.f_sub_scalar(3).unwrap());
            check("pow", args!("exponent": 2)(), x.f_pow_tensor_scalar(2).unwrap());
            check("clamp", args!("min": 2, "max": 5)(), x.f_clamp(2, 5).unwrap());
            check("clamp", args!("max": 5)(), x.f_clamp_max(5).unwrap());
            check("clamp", args!("min": 2)(), x.f_clamp_min(2).unwrap());
            check("clamp", args!("min": 2, "max": 5.5)(), x.f_clamp(2.0, 5.5).unwrap());
        }
    });
    // A partial sum of integers stays one.
    on_mesh(MESHES[mesh], |mesh| {
        let x = Tensor::from_slice(&[1_i64, 2, 3, 4, 5, 6, 7]);
        let layout = Split::Chunk.layout(mesh, &vec![Placement::Shard(0); mesh.shape().len()], &[7]);
        let sum =
            ShardTensor::distribute_as(&x, &layout).unwrap().statistic(Statistic::Sum, &[0], false).unwrap();
        let y = call("mul", std::slice::from_ref(&sum), args!("other": 3)()).unwrap();
        assert!(sum.placements().iter().any(|placement| placement.is_partial()), "{sum}");
        assert_eq!(y.placements(), sum.placements());
        assert_eq!(y.full_tensor(None).unwrap(), Tensor::from(84_i64));
    });
    let big = Tensor::from_slice(&[(1_i64 << 53) + 1]);
    let y = Tensor::op("mul", &[&big], &args!("other": 3)()).unwrap().remove(0);
    assert_eq!(y, Tensor::from_slice(&[3 * ((1_i64 << 53) + 1)]));
    let bits = Tensor::from_slice(&[true, false]);
    let y = Tensor::op("mul", &[&bits], &args!("other": 3)()).unwrap().remove(0);
    assert_eq!(y, Tensor::from_slice(&[3_i64, 0]));
    let text = refused("pow", &[&big], args!("exponent": -1)());
    assert!(text.contains("\"exponent\" is -1 for integers; expected 0 or more"), "{text}");
    let text = refused("clamp", &[&big.to_kind(Kind::Uint8)], args!("max": 300)());
    assert!(text.contains("the value 300 is outside the range of Uint8"), "{text}");
}
