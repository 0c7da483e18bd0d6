//! Initial values, against the bounds of PyTorch's and, where tch has the layer, its names.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::{Conv, Generator};
use isobar_nn::{
    BatchNorm, Conv2d, ConvTranspose2d, Embedding, LayerNorm, Linear, Mlp, MlpOptions, MultiheadAttention,
    MultiheadAttentionOptions, PatchEmbed, PositionEmbedding, Result, SpectralConv, SpectralOptions,
};
use isobar_shard::{ParamStore, Params};
use rstest::rstest;
use tch::Tensor;

fn made<L>(make: impl FnOnce(&mut ParamStore) -> Result<L>) -> ParamStore {
    let mut params = ParamStore::new(Generator::new(1));
    let _ = make(&mut params).unwrap();
    params
}

/// Values spread over the whole of ±`bound`.
#[track_caller]
fn assert_uniform(params: &ParamStore, name: &str, bound: f64) {
    let values = &params.get(name).unwrap().tensor;
    let (low, high) = (values.min().double_value(&[]), values.max().double_value(&[]));
    assert!(-bound <= low && low < -0.9 * bound, "{name}: {low} for a bound of {bound}");
    assert!(0.9 * bound < high && high <= bound, "{name}: {high} for a bound of {bound}");
}

#[track_caller]
fn assert_constant(params: &ParamStore, name: &str, value: f64) {
    let values = &params.get(name).unwrap().tensor;
    assert_eq!(values, &Tensor::full_like(values, value), "{name}");
}

#[test]
fn linear_and_convolutions_are_uniform() {
    let linear = made(|params| Linear::new(100, 200, params));
    ["weight", "bias"].iter().for_each(|name| assert_uniform(&linear, name, 0.1));

    let groups = Conv { groups: 2, ..Conv::default() };
    let conv = made(|params| Conv2d::new(8, 200, [5, 5], groups.clone(), params));
    assert_eq!(conv.get("weight").unwrap().tensor.size(), [200, 4, 5, 5]);
    ["weight", "bias"].iter().for_each(|name| assert_uniform(&conv, name, 0.1));

    // PyTorch takes the fan from the second dim of the weight, here that of the outputs.
    let transposed = made(|params| ConvTranspose2d::new(8, 200, [1, 1], groups, &[0], params));
    assert_eq!(transposed.get("weight").unwrap().tensor.size(), [8, 100, 1, 1]);
    ["weight", "bias"].iter().for_each(|name| assert_uniform(&transposed, name, 0.1));

    let patches = made(|params| PatchEmbed::new([5, 5], 4, 200, params));
    ["proj.weight", "proj.bias"].iter().for_each(|name| assert_uniform(&patches, name, 0.1));
}

#[test]
fn others_start_as_pytorch_says() {
    let norm = made(|params| LayerNorm::new(&[4, 5], params));
    assert_constant(&norm, "weight", 1.0);
    assert_constant(&norm, "bias", 0.0);

    let norm = made(|params| BatchNorm::new(6, params));
    for (name, value) in [("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)] {
        assert_constant(&norm, name, value);
    }

    let attention =
        made(|params| MultiheadAttention::new(64, 4, MultiheadAttentionOptions::default(), params));
    assert_uniform(&attention, "in_proj_weight", (6.0 / 256.0f64).sqrt());
    assert_uniform(&attention, "out_proj.weight", 1.0 / 8.0);
    assert_constant(&attention, "in_proj_bias", 0.0);
    assert_constant(&attention, "out_proj.bias", 0.0);

    let table = made(|params| Embedding::new(100, 100, params));
    let values = &table.get("weight").unwrap().tensor;
    let (mean, std) = (values.mean(tch::Kind::Float).double_value(&[]), values.std(true).double_value(&[]));
    // Five standard deviations of 10⁴ draws.
    assert!(mean.abs() < 0.05 && (std - 1.0).abs() < 0.036, "mean {mean}, standard deviation {std}");

    let positions = made(|params| PositionEmbedding::new("pos_embed", 100, 100, params));
    let std = positions.get("pos_embed").unwrap().tensor.std(true).double_value(&[]);
    assert!((std - 0.02).abs() < 0.001, "{std}");

    let spectral = made(|params| SpectralConv::new(10, 10, &[4, 4], SpectralOptions::default(), params));
    let values = &spectral.get("weights1").unwrap().tensor;
    let (low, high) = (values.min().double_value(&[]), values.max().double_value(&[]));
    assert!((0.0..0.001).contains(&low) && (0.009..=0.01).contains(&high), "{low} to {high}");

    let mlp = made(|params| Mlp::new([100, 50, 8], MlpOptions::default(), params));
    assert_uniform(&mlp, "fc1.weight", 0.1);
}

/// The names and shapes of layers that tch has too.
#[rstest]
fn state_dicts_have_the_names_of_pytorch() {
    let store = tch::nn::VarStore::new(tch::Device::Cpu);
    let root = store.root();
    let _ = tch::nn::linear(&root / "linear", 3, 5, Default::default());
    let _ = tch::nn::conv2d(&root / "conv", 4, 6, 3, Default::default());
    let _ = tch::nn::conv_transpose2d(&root / "up", 4, 6, 3, Default::default());
    let _ = tch::nn::layer_norm(&root / "norm", vec![7], Default::default());
    let _ = tch::nn::batch_norm2d(&root / "batch", 6, Default::default());
    let _ = tch::nn::embedding(&root / "table", 10, 4, Default::default());

    let params = made(|params| {
        Linear::new(3, 5, &mut params.scope("linear"))?;
        Conv2d::new(4, 6, [3, 3], Conv::default(), &mut params.scope("conv"))?;
        ConvTranspose2d::new(4, 6, [3, 3], Conv::default(), &[0], &mut params.scope("up"))?;
        LayerNorm::new(&[7], &mut params.scope("norm"))?;
        BatchNorm::new(6, &mut params.scope("batch"))?;
        Embedding::new(10, 4, &mut params.scope("table"))
    });
    let own: std::collections::BTreeMap<_, _> =
        params.parameters().iter().map(|p| (p.name.clone(), p.tensor.size())).collect();
    let theirs: std::collections::BTreeMap<_, _> =
        store.variables().into_iter().map(|(name, tensor)| (name, tensor.size())).collect();
    assert_eq!(own, theirs);
}
