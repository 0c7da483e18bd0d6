//! Parameters laid out by a declaration, and plain tensors that meet sharded ones.

use isobar_array::{Conv, Generator, Padding};
use isobar_collectives::{ReduceOp, all_reduce};
use isobar_shard::{
    Init, MeshParams, ParamStore, ParameterLayouts, Params, Placement, Promotion, PromotionGuard,
    ShardTensor, Source, StateDict,
};
use tch::{Kind, Tensor};

use crate::common::{difference, numbers, on_mesh};

const R: Placement = Placement::Replicate;

fn s(dim: usize) -> Placement {
    Placement::Shard(dim)
}

fn state(seed: i64) -> StateDict {
    let tensors =
        [("blocks.0.fc.weight", vec![7, 4]), ("blocks.0.fc.bias", vec![7]), ("head.weight", vec![3, 7])];
    let make = |(index, (name, shape)): (usize, (&str, Vec<i64>))| {
        (name.to_owned(), numbers(&shape, seed + index as i64).set_requires_grad(index != 1))
    };
    tensors.into_iter().enumerate().map(make).collect()
}

fn declared() -> ParameterLayouts {
    ParameterLayouts::new()
        .with("head.*", &[("b", s(1))])
        .with("blocks.*.weight", &[("b", s(0)), ("a", s(1))])
}

#[test]
fn parameters_are_leaves_in_their_layouts() {
    for source in [Source::Same, Source::Rank(2)] {
        on_mesh(&[2, 2], move |mesh| {
            let place = mesh.coordinates().unwrap();
            // With a source, the others' values are not looked at, or not there.
            let given = match (source, &place[..]) {
                (Source::Same, _) | (_, [1, 0]) => state(1),
                (_, [0, 0]) => StateDict::new(),
                _ => state(99),
            };
            let parameters = declared().distribute(&given, mesh, source).unwrap();
            let want = state(1);
            assert_eq!(parameters.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
            for (name, parameter) in &parameters {
                assert!(parameter.is_leaf());
                assert_eq!(parameter.requires_grad(), want[name].requires_grad(), "{name}");
                assert_eq!(parameter.full_tensor(None).unwrap(), want[name], "{name}");
            }
            assert_eq!(parameters["head.weight"].placements(), [R, s(1)]);
            assert_eq!(parameters["blocks.0.fc.weight"].placements(), [s(1), s(0)]);
            assert_eq!(parameters["blocks.0.fc.bias"].placements(), [R, R]);
        });
    }
}

/// Blocks stay together from every source.
#[test]
fn sources_keep_blocks_together() {
    on_mesh(&[2, 2], |mesh| {
        let state = StateDict::from([("positions".to_owned(), numbers(&[26, 3], 1))]);
        for axes in [&[("a", s(0))][..], &[("a", s(0)), ("b", s(0))], &[("b", s(1)), ("a", s(0))]] {
            let layouts = ParameterLayouts::new().with_blocks("positions", axes, 8);
            let same = layouts.distribute(&state, mesh, Source::Same).unwrap();
            let sent = layouts.distribute(&state, mesh, Source::Rank(1)).unwrap();
            let (same, sent) = (&same["positions"], &sent["positions"]);
            assert_eq!(sent.layout(), same.layout());
            assert_eq!(sent.local(), same.local());
        }
        let strided = Placement::StridedShard { dim: 0, split_factor: 2 };
        let layouts = ParameterLayouts::new().with("positions", &[("a", strided), ("b", s(0))]);
        let sent = layouts.distribute(&state, mesh, Source::Rank(1)).unwrap();
        assert_eq!(sent["positions"].full_tensor(None).unwrap(), state["positions"]);
    });
}

#[test]
fn declarations_that_do_not_fit_are_errors() {
    on_mesh(&[1], |mesh| {
        let error = |layouts: ParameterLayouts, source| {
            layouts.distribute(&state(1), mesh, source).unwrap_err().to_string()
        };
        let with = |pattern: &str, row: &[(&str, Placement)]| ParameterLayouts::new().with(pattern, row);
        let same = Source::Same;
        insta::assert_snapshot!(error(with("block.*", &[("a", s(0))]), same), @r#"parameter "block.*": this pattern matches no name; the names are blocks.0.fc.bias, blocks.0.fc.weight, head.weight"#);
        insta::assert_snapshot!(error(with("head.*", &[("model", s(0))]), same), @r#"parameter "head.*": mesh (a=1) has no axis "model""#);
        insta::assert_snapshot!(error(with("head.*", &[("a", s(0)), ("a", s(1))]), same), @r#"parameter "head.*": the axis "a" is named twice"#);
        insta::assert_snapshot!(error(with("*.bias", &[("a", s(1))]), same), @r#"parameter "blocks.0.fc.bias": layout [Shard(1)] of shape [7] on mesh (a=1): there is no dim 1"#);
        let sum = Placement::Partial(isobar_collectives::ReduceOp::Sum);
        insta::assert_snapshot!(error(with("*.bias", &[("a", sum)]), same), @r#"parameter "*.bias": Partial(sum) along "a"; parameters are whole or sharded"#);
        insta::assert_snapshot!(error(ParameterLayouts::new(), Source::Rank(1)), @"distribute: the source 1 is not a rank of mesh (a=1)");
    });
}

#[test]
fn plain_tensors_are_promoted_as_far_as_they_may() {
    on_mesh(&[2], |mesh| {
        let whole = numbers(&[4], 1);
        let x = ShardTensor::distribute(&whole, mesh, &[s(0)]).unwrap();
        let (plain, number) = (numbers(&[4], 2), numbers(&[], 3));
        for mode in [Promotion::Silent, Promotion::Warn] {
            let _mode = PromotionGuard::new(mode);
            assert_eq!(x.mul(&plain).unwrap().full_tensor(None).unwrap(), &whole * &plain);
            let both = ShardTensor::cat(&[&x, &x.meet(&plain).unwrap()], 0).unwrap();
            assert_eq!(both.full_tensor(None).unwrap(), Tensor::cat(&[&whole, &plain], 0));
        }
        let _off = PromotionGuard::new(Promotion::Off);
        assert_eq!(x.mul(&number).unwrap().full_tensor(None).unwrap(), &whole * &number);
        let error = x.mul(&plain).unwrap_err();
        insta::allow_duplicates! {
            insta::assert_snapshot!(error, @"promotion: mul: a plain tensor of shape [4] meets [4] on mesh (a=2): a Shard(0) of [2, 2]; distribute it, or allow promotion");
        }
    });
}

/// A plain weight has the gradient of the whole, the same on all ranks, whatever operator it goes into.
#[test]
fn promoted_leaves_have_whole_gradients() {
    on_mesh(&[3], |mesh| {
        let whole = numbers(&[2, 4, 7], 1);
        let x = ShardTensor::distribute(&whole, mesh, &[s(2)]).unwrap();
        let plain = |shape: &[i64], seed: i64| numbers(shape, seed).set_requires_grad(true);
        let check = |what: &str, leaves: &[Tensor], y: ShardTensor, dense: &dyn Fn(&[Tensor]) -> Tensor| {
            let copies: Vec<Tensor> =
                leaves.iter().map(|leaf| leaf.detach().copy().set_requires_grad(true)).collect();
            let want = dense(&copies);
            assert!(difference(&y.full_tensor(None).unwrap().detach(), &want.detach()) < 1e-12, "{what}");
            y.mul(&y).unwrap().sum().unwrap().backward().unwrap();
            want.square().sum(None).backward();
            for (leaf, copy) in leaves.iter().zip(&copies) {
                assert!(difference(&leaf.grad(), &copy.grad()) < 1e-9, "{what}");
            }
        };
        let (weight, bias) = (plain(&[5, 4, 3], 2), plain(&[5], 3));
        let conv = Conv { padding: Padding::Each(vec![1]), ..Conv::default() };
        let y = x.conv(&weight, Some(&bias), &conv).unwrap();
        check("conv", &[weight, bias], y, &|w| whole.conv1d(&w[0], Some(&w[1]), 1, 1, 1, 1));
        let (weight, bias) = (plain(&[5, 7], 4), plain(&[5], 5));
        let y = x.linear(&weight, Some(&bias)).unwrap();
        check("linear", &[weight, bias], y, &|w| whole.linear(&w[0], Some(&w[1])));
        let other = plain(&[2, 7, 3], 6);
        let y = x.matmul(&other).unwrap();
        check("matmul", &[other], y, &|w| whole.matmul(&w[0]));
        let (weight, bias) = (plain(&[4], 7), plain(&[4], 8));
        let y = x.group_norm(2, Some(&weight), Some(&bias), 1e-5).unwrap();
        check("group_norm", &[weight, bias], y, &|w| {
            whole.group_norm(2, Some(&w[0]), Some(&w[1]), 1e-5, false)
        });
        let (key, value) = (plain(&[2, 3, 7], 9), plain(&[2, 3, 7], 10));
        let y = ShardTensor::scaled_dot_product_attention(&x, &key, &value, &Default::default()).unwrap();
        check("attention", &[key, value], y, &|w| {
            (whole.matmul(&w[0].transpose(1, 2)) / 7f64.sqrt()).softmax(-1, Kind::Double).matmul(&w[1])
        });
    });
}

/// Contributions of the ranks to a pending gradient add up to that of a dense parameter, whatever part of it a rank uses.
#[test]
fn pending_gradients_add_up() {
    type Sharded = fn(&[ShardTensor]) -> isobar_shard::Result<ShardTensor>;
    type Dense = fn(&[Tensor]) -> Tensor;
    let uses: [(&str, &'static [i64], usize, Sharded, Dense); 5] = [
        ("index_add", &[5, 8], 1, |t| t[0].index_add(0, &t[1], &t[3]), |t| t[0].index_add(0, &t[1], &t[3])),
        ("gather", &[5, 8], 1, |t| t[0].gather(0, &t[2]), |t| t[0].gather(0, &t[2], false)),
        ("mul", &[40, 1, 1], 1, |t| t[3].mul(&t[0]), |t| &t[3] * &t[0]),
        (
            "group_norm",
            &[8],
            0,
            |t| t[3].group_norm(2, Some(&t[0]), None, 1e-5),
            |t| t[3].group_norm(2, Some(&t[0]), None::<&Tensor>, 1e-5, false),
        ),
        (
            "instance_norm",
            &[8],
            0,
            |t| t[3].reshape(&[7, 8, 1])?.instance_norm(Some(&t[0]), None, 1.0),
            |t| t[3].view([7, 8, 1]).group_norm(8, Some(&t[0]), None::<&Tensor>, 1.0, false),
        ),
    ];
    on_mesh(&[2], move |mesh| {
        let index = Tensor::from_slice(&[0_i64, 4, 4, 2, 1, 0, 3]);
        let each = index.unsqueeze(1).expand([7, 8], false).contiguous();
        for (what, shape, dim, sharded, dense) in uses {
            let mut store = ParamStore::new(Generator::new(1)).with_options(Kind::Double, tch::Device::Cpu);
            let weight = MeshParams::new(&mut store, mesh).pending().param(
                "weight",
                shape,
                Init::Normal { mean: 0.0, std: 1.0 },
                R,
            );
            let given =
                |whole: &Tensor, placement| ShardTensor::distribute(whole, mesh, &[placement]).unwrap();
            let x = numbers(&[7, 8], 1);
            let each_split = if dim == 1 { s(1) } else { R };
            let inputs = [weight.unwrap(), given(&index, R), given(&each, each_split), given(&x, s(dim))];
            let y = sharded(&inputs).unwrap();
            y.mul(&y).unwrap().sum().unwrap().backward().unwrap();
            let leaf = &store.parameters()[0].tensor;
            let got = all_reduce(&leaf.grad(), ReduceOp::Sum, &mesh.group("a").unwrap()).unwrap();
            let copy = leaf.detach().copy().set_requires_grad(true);
            let y = dense(&[copy.shallow_clone(), index.shallow_clone(), each.shallow_clone(), x]);
            y.square().sum(None).backward();
            let off = difference(&got, &copy.grad());
            assert!(off < 1e-9, "{what} is off by {off}");
        }
    });
}
