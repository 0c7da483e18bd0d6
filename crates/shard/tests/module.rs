//! Parameters laid out by a declaration, and plain tensors that meet sharded ones.

mod common;

use common::{numbers, on_mesh};
use isobar_shard::{
    Elementwise, ParameterLayouts, Placement, Promotion, PromotionGuard, ShardTensor, Source, StateDict,
};

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
            let y = x.mul(&x.meet(&plain).unwrap()).unwrap();
            assert_eq!(y.full_tensor(None).unwrap(), &whole * &plain);
        }
        let _off = PromotionGuard::new(Promotion::Off);
        assert_eq!(x.mul(&x.meet(&number).unwrap()).unwrap().full_tensor(None).unwrap(), &whole * &number);
        let error = x.meet(&plain).unwrap_err();
        insta::allow_duplicates! {
            insta::assert_snapshot!(error, @"promotion: a plain tensor of shape [4] meets [4] on mesh (a=2): a Shard(0) of [2, 2]; distribute it, or allow promotion");
        }
    });
}
