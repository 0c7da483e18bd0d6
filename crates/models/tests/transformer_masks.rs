//! DiT with masks of invalid points.
use isobar_models::{Architecture, AttentionBackend, Dit, DitConfig, Mode, ModelConfig, Split};
use rstest::rstest;
use tch::{Kind, Tensor};

use crate::common::twin::{Axis, Twin, split};
use crate::common::{perturb, received};
use crate::transformers::{DOUBLE, masked, random, store, windows};

/// The first sample lacks points of two tokens, the second a corner.
fn masked_twin(config: &DitConfig) -> Twin {
    let invalid = |sample: i64, row: i64, column: i64| match sample {
        0 => row == 5 && (2..=3).contains(&column),
        _ => row >= 7 && column >= 8,
    };
    let points = (0..2 * 144).map(|at| f64::from(u8::from(invalid(at / 144, at / 12 % 12, at % 12))));
    let inputs = [("fields", vec![2, 2, 12, 12]), ("time", vec![2, 1]), ("invalid_mask", vec![2, 1, 12, 12])];
    Twin::new(ModelConfig::new(config.clone()), &inputs, &[("fields", vec![2, 1, 12, 12])])
        .with_values("invalid_mask", points.collect(), Kind::Bool)
        .perturbed(5)
}

/// An axis that splits the mask, too.
fn fields_and_mask(ranks: i64, dim: usize) -> Axis {
    (ranks, vec![("fields", dim), ("invalid_mask", dim)])
}

#[rstest]
#[case::rows(vec![fields_and_mask(2, 2)])]
#[case::columns(vec![fields_and_mask(3, 3)])]
#[case::four(vec![fields_and_mask(4, 2)])]
#[case::fields_alone(split(&[(3, 2)]))]
#[case::rows_and_columns(vec![fields_and_mask(2, 2), fields_and_mask(2, 3)])]
#[case::across(vec![(2, vec![("fields", 2), ("invalid_mask", 3)])])]
#[case::batch_and_rows(vec![(2, vec![("fields", 0), ("time", 0), ("invalid_mask", 0)]), fields_and_mask(2, 2)])]
fn masked_dit_on_meshes(
    #[values(AttentionBackend::Natten2d, AttentionBackend::Natten2dRope)] backend: AttentionBackend,
    #[case] axes: Vec<Axis>,
) {
    masked_twin(&DitConfig { gradient_checkpointing: true, ..masked(backend) }).check(&axes);
}

#[test]
fn masked_dit_with_empty_shards() {
    masked_twin(&masked(AttentionBackend::Natten2d)).with_empty_shards().check(&[fields_and_mask(3, 2)]);
}

/// Attention sees nothing of invalid points; tokens next to them are mixed with the trained token instead.
#[test]
fn masked_dit_does_not_attend_to_invalid_points() {
    let config = DitConfig { depth: 1, ..masked(AttentionBackend::Natten2d) };
    let mut params = store();
    let model = Dit::new(&config, &mut params).unwrap();
    perturb(&params, 3);
    let (x, t) = (random(1, &[1, 2, 12, 12]), Tensor::zeros([1], DOUBLE));
    let invalid = Tensor::zeros([1, 12, 12], DOUBLE);
    let forward = |x: &Tensor, mask| model.forward_masked(x, &t, None, mask, Mode::Eval).unwrap();
    let differ = |a: &Tensor, b: &Tensor| (a - b).abs().max().double_value(&[]) > 1e-9;
    assert_eq!(forward(&x, Some(&invalid)), forward(&x, None));
    // A point of the token at rows 4 and 5, columns 3 to 5, and the token below it.
    let _ = invalid.narrow(1, 5, 1).narrow(2, 3, 1).f_fill_(0.5).unwrap();
    let changed = x.copy();
    let _ = changed.narrow(2, 4, 1).narrow(3, 5, 1).f_add_scalar_(1.0).unwrap();
    let below = |y: Tensor| y.narrow(2, 6, 2).narrow(3, 3, 3);
    assert!(differ(&below(forward(&x, None)), &below(forward(&changed, None))));
    let masked = below(forward(&x, Some(&invalid)));
    assert!(differ(&masked, &below(forward(&x, None))));
    assert!(!differ(&masked, &below(forward(&changed, Some(&invalid)))));
}

/// A mask that is split like the fields adds a few of its own points and of the tokens', within the model's bound.
#[rstest]
fn masks_stay_where_the_fields_are(#[values(2, 3)] dim: usize) {
    let config = masked(AttentionBackend::Natten2d);
    let (fields, mask) = (("fields", vec![1, 2, 12, 12]), ("invalid_mask", vec![1, 1, 12, 12]));
    let exchanged =
        |arrays: &[(&'static str, Vec<i64>)]| received(&ModelConfig::new(config.clone()), arrays, dim);
    let mut dims = [(1, 1, 1), (12, 12, 1), (12, 12, 1)];
    dims[dim - 1] = (12, 3, 4);
    let bound = |config: &DitConfig| config.traffic(&Split::new(4, &dims, 0)).unwrap().forward * 4.0;
    let of_mask = bound(&config) - bound(&windows(AttentionBackend::Natten2d));
    let without = exchanged(std::slice::from_ref(&fields));
    for ((with, _, both), (without, ..)) in exchanged(&[fields, mask]).into_iter().zip(without) {
        assert!(with - without <= 144 && (with - without) as f64 <= of_mask, "{with} {without} {of_mask}");
        assert!(both as f64 <= 3.0 * bound(&config), "{both} {}", bound(&config));
    }
}

#[test]
fn dit_refuses_masks_that_do_not_fit() {
    let (x, t) = (random(1, &[2, 2, 12, 12]), random(2, &[2]));
    let run = |config: &DitConfig, mask: &[i64]| {
        let model = Dit::new(config, &mut store()).unwrap();
        let result = model.forward_masked(&x, &t, None, Some(&random(3, mask)), Mode::Eval);
        result.map_err(|error| error.to_string())
    };
    let config = masked(AttentionBackend::Natten2d);
    let _ = run(&config, &[2, 12, 12]).unwrap();
    let _ = run(&config, &[2, 1, 12, 12]).unwrap();
    for shape in [&[12, 12][..], &[1, 12, 12], &[2, 2, 12, 12], &[2, 4, 6]] {
        let error = run(&config, shape).unwrap_err();
        assert!(error.contains("[2, 1, 12, 12] for the invalid_mask"), "{error}");
    }
    let error = run(&windows(AttentionBackend::Natten2d), &[2, 12, 12]).unwrap_err();
    assert!(error.contains("the model has no mask tokens; set use_nan_mask_tokens"), "{error}");
}
