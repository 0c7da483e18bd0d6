//! DiT on fields of three spatial dims.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_collectives::threads;
use isobar_mesh::DeviceMesh;
use isobar_models::{
    AttentionBackend, DetokenizerKind, Dit, DitAttention, DitConfig, DitDetokenizer, Mode, ModelConfig,
    PerDim,
};
use isobar_shard::{CommTrace, MeshParams, ParamStore, Placement, ShardTensor, forbid_hidden_communication};
use rstest::rstest;
use tch::{Kind, Tensor};

use crate::common::perturb;
use crate::common::twin::{Axis, Twin, split};
use crate::transformers::{DOUBLE, batch_and, dit, random, store};

/// 5 × 6 × 4 tokens.
fn deep(attention_backend: AttentionBackend) -> DitConfig {
    let windows = attention_backend == AttentionBackend::Natten3d;
    let attn_kernel = windows.then(|| PerDim::Each(vec![3, 5, 3]));
    DitConfig {
        input_size: PerDim::Each(vec![5, 12, 8]),
        patch_size: PerDim::Each(vec![1, 2, 2]),
        attention_backend,
        attn_kwargs: DitAttention { attn_kernel, ..DitAttention::default() },
        detokenizer: DetokenizerKind::ProjReshape2dConv,
        detokenizer_kwargs: DitDetokenizer { conv_hidden: Some(4), ..DitDetokenizer::default() },
        ..dit()
    }
}

/// With mask tokens, and a mask of points of a few tokens.
fn deep_masked_twin() -> Twin {
    let config = DitConfig { use_nan_mask_tokens: true, ..deep(AttentionBackend::Natten3d) };
    let points = (0..2 * 480).map(|at| f64::from(u8::from(at % 37 == 0)));
    let inputs =
        [("fields", vec![2, 2, 5, 12, 8]), ("time", vec![2, 1]), ("invalid_mask", vec![2, 5, 12, 8])];
    Twin::new(ModelConfig::new(config), &inputs, &[("fields", vec![2, 1, 5, 12, 8])])
        .with_values("invalid_mask", points.collect(), Kind::Int64)
        .perturbed(5)
}

#[rstest]
#[case::rows(3, 3)]
#[case::columns(2, 4)]
fn masked_dit_of_three_dims(#[case] ranks: i64, #[case] dim: usize) {
    deep_masked_twin().check(&[(ranks, vec![("fields", dim), ("invalid_mask", dim - 1)])]);
}

fn deep_twin(config: &DitConfig) -> Twin {
    let inputs = [("fields", vec![2, 2, 5, 12, 8]), ("time", vec![2, 1])];
    Twin::new(ModelConfig::new(config.clone()), &inputs, &[("fields", vec![2, 1, 5, 12, 8])]).perturbed(5)
}

#[rstest]
#[case::levels(split(&[(2, 2)]))]
#[case::rows(split(&[(3, 3)]))]
#[case::columns(split(&[(4, 4)]))]
#[case::levels_and_rows(split(&[(2, 2), (2, 3)]))]
#[case::rows_and_columns(split(&[(2, 3), (2, 4)]))]
#[case::batch_and_columns(batch_and(4))]
fn dit_of_three_dims(
    #[values(AttentionBackend::Timm, AttentionBackend::Natten3d)] backend: AttentionBackend,
    #[case] axes: Vec<Axis>,
) {
    deep_twin(&deep(backend)).check(&axes);
}

#[test]
fn dit_of_three_dims_with_empty_shards() {
    deep_twin(&deep(AttentionBackend::Natten3d)).with_empty_shards().check(&split(&[(3, 3)]));
}

/// Output of a model in evaluation, with the parameters of another one, in other shapes, if there is one.
fn deep_output(config: &DitConfig, x: &Tensor, of: Option<&ParamStore>) -> (Tensor, ParamStore) {
    let mut params = store();
    let model = Dit::new(config, &mut params).unwrap();
    perturb(&params, 3);
    for (own, other) in params.trainable().zip(of.iter().flat_map(|of| of.trainable())) {
        own.tensor.detach().copy_(&other.tensor.reshape(&own.shape));
    }
    (model.forward(x, &Tensor::zeros([1], DOUBLE), None, Mode::Eval).unwrap(), params)
}

/// Windows of one level are those of two dims, and windows of all tokens are attention to all.
#[test]
fn windows_of_three_dims_at_their_limits() {
    let small = |input: &[usize], backend, kernel: Option<&[usize]>| DitConfig {
        input_size: PerDim::Each(input.to_vec()),
        patch_size: PerDim::All(1),
        depth: 2,
        attention_backend: backend,
        attn_kwargs: DitAttention {
            attn_kernel: kernel.map(|kernel| PerDim::Each(kernel.to_vec())),
            ..DitAttention::default()
        },
        ..dit()
    };
    let x = random(1, &[1, 2, 1, 6, 7]);
    let flat = small(&[6, 7], AttentionBackend::Natten2d, Some(&[3, 5]));
    let (flat, params) = deep_output(&flat, &x.squeeze_dim(2), None);
    let deep = small(&[1, 6, 7], AttentionBackend::Natten3d, Some(&[1, 3, 5]));
    let (deep, _) = deep_output(&deep, &x, Some(&params));
    assert!((deep.squeeze_dim(2) - flat).abs().max().double_value(&[]) < 1e-12);
    let x = random(1, &[1, 2, 3, 5, 7]);
    let (all, params) = deep_output(&small(&[3, 5, 7], AttentionBackend::Timm, None), &x, None);
    let windows = small(&[3, 5, 7], AttentionBackend::Natten3d, Some(&[3, 5, 7]));
    let (windows, _) = deep_output(&windows, &x, Some(&params));
    assert!((windows - all).abs().max().double_value(&[]) < 1e-12);
}

/// A token sees the 3 × 3 × 5 tokens around it, moved inside at the borders, and no others.
#[test]
fn windows_of_three_dims_see_their_neighbours() {
    let (grid, kernel) = ([4i64, 5, 6], [3i64, 3, 5]);
    let config = DitConfig {
        input_size: PerDim::Each(grid.map(|extent| extent as usize).to_vec()),
        patch_size: PerDim::All(1),
        depth: 1,
        attention_backend: AttentionBackend::Natten3d,
        attn_kwargs: DitAttention {
            attn_kernel: Some(PerDim::Each(kernel.map(|extent| extent as usize).to_vec())),
            ..DitAttention::default()
        },
        ..dit()
    };
    let x = random(1, &[1, 2, 4, 5, 6]);
    let before = deep_output(&config, &x, None).0;
    for changed_at in [[0, 0, 0], [2, 3, 1], [3, 4, 5]] {
        let changed = x.copy();
        let point =
            (0..3).fold(changed.shallow_clone(), |x, dim| x.narrow(2 + dim as i64, changed_at[dim], 1));
        let _ = point.shallow_clone().f_add_scalar_(1.0).unwrap();
        let moved = (deep_output(&config, &changed, None).0 - &before).abs().gt(1e-9);
        let sees = |dim: usize, at: i64| {
            let start = (at - kernel[dim] / 2).clamp(0, grid[dim] - kernel[dim]);
            (start..start + kernel[dim]).contains(&changed_at[dim])
        };
        for place in 0..grid.iter().product() {
            let at = [place / 30, place / 6 % 5, place % 6];
            let got = moved.int64_value(&[0, 0, at[0], at[1], at[2]]) == 1;
            assert_eq!(got, (0..3).all(|dim| sees(dim, at[dim])), "{at:?} of {changed_at:?}");
        }
    }
}

/// Windows of three dims need the halo of their shard only, whatever dims are split.
#[rstest]
fn windows_of_three_dims_receive_borders(#[values(2, 3, 4)] dim: usize) {
    threads::run(3, Duration::from_secs(60), move |group| {
        let config = DitConfig {
            input_size: PerDim::Each(vec![9; 3]),
            patch_size: PerDim::All(1),
            depth: 1,
            attention_backend: AttentionBackend::Natten3d,
            ..dit()
        };
        let mesh = DeviceMesh::new(&group, &[3], &["domain"]).unwrap();
        let model = Dit::new(&config, &mut MeshParams::new(&mut store(), &mesh)).unwrap();
        let x =
            ShardTensor::distribute(&random(1, &[1, 2, 9, 9, 9]), &mesh, &[Placement::Shard(dim)]).unwrap();
        let t = ShardTensor::distribute(&random(2, &[1]), &mesh, &[Placement::Replicate]).unwrap();
        let _guard = forbid_hidden_communication();
        let trace = CommTrace::start(&group);
        let _ = model.forward(&x, &t, None, Mode::Eval).unwrap();
        // Two planes of 9 x 9 tokens, of 8 numbers of 8 bytes, of keys and of values; and the numbers of the planes.
        let planes = 2 * 2 * 81 * 8 * 8;
        assert!(trace.received() <= planes + 2000, "{} of {planes}: {}", trace.received(), trace.record());
    });
}
