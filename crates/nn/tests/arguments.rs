//! Arguments and inputs that layers refuse.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::{Conv, Generator};
use isobar_nn::{
    AxialRotaryEmbedding, BatchNorm, Conv2d, Dropout, Embedding, GroupNorm, InstanceNorm, LayerNorm, Linear,
    LinearOptions, Mode, MultiheadAttention, MultiheadAttentionOptions, PatchEmbed, Result, RmsNorm,
    RotaryEmbedding, SpectralConv, SpectralOptions, WeightForm,
};
use isobar_shard::ParamStore;
use tch::{Device, Kind, Tensor};

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: Result<T>, says: &str) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains(says), "{error:?} lacks {says:?}");
}

fn params() -> ParamStore {
    ParamStore::new(Generator::new(1))
}

fn ones(shape: &[i64]) -> Tensor {
    Tensor::ones(shape, (Kind::Float, Device::Cpu))
}

#[test]
fn arguments_that_a_layer_cannot_have() {
    let p = &mut params();
    assert_refused(Linear::new(0, 3, p), "Linear: in_features is 0, expected 1 or more");
    let both = LinearOptions { form: WeightForm::Normalized, kernel_dims: 1, ..LinearOptions::default() };
    assert_refused(Linear::with_options(2, 3, both, p), "expected a plain weight");
    let groups = Conv { groups: 2, ..Conv::default() };
    assert_refused(Conv2d::new(3, 4, [3, 3], groups, p), "in_channels 3 is not divisible by groups 2");
    assert_refused(Conv2d::new(3, 4, [3, 0], Conv::default(), p), "kernel_size is 0");
    assert_refused(GroupNorm::new(4, 6, p), "num_channels 6 is not divisible by num_groups 4");
    assert_refused(LayerNorm::new(&[], p), "normalized shape is empty");
    assert_refused(RmsNorm::new(&[0], None, p), "expected 1 or more");
    assert_refused(Dropout::new(1.0), "p is 1, expected 0 or more and below 1");
    assert_refused(RotaryEmbedding::new(5), "expected an even number");
    assert_refused(AxialRotaryEmbedding::new(6), "dim is 6, expected a multiple of 4");
    assert_refused(AxialRotaryEmbedding::with_base(4, 0.0), "base is 0, expected a finite number above 0");
    assert_refused(Embedding::new(3, -1, p), "embedding_dim is -1");
    let options = MultiheadAttentionOptions::default();
    assert_refused(
        MultiheadAttention::new(10, 4, options, p),
        "embed_dim 10 is not divisible by num_heads 4",
    );
    let factored = SpectralOptions { rank: 0.0, ..SpectralOptions::default() };
    assert_refused(SpectralConv::new(2, 2, &[3], factored, p), "rank is 0");
    assert_refused(SpectralConv::new(2, 2, &[1; 5], SpectralOptions::default(), p), "1 to 4 spatial dims");
    assert!(p.parameters().is_empty(), "a refused layer has made parameters");
}

#[test]
fn inputs_that_a_layer_cannot_take() {
    let p = &mut params();
    let patches = PatchEmbed::new([4, 4], 3, 8, p).unwrap();
    assert_refused(patches.forward(&ones(&[1, 2, 8, 8])), "expected [batch, 3, height, width]");
    assert_refused(patches.forward(&ones(&[1, 3, 8, 6])), "width 6 is not divisible by that of the patch 4");
    let spectral = SpectralConv::new(2, 2, &[4], SpectralOptions::default(), &mut params()).unwrap();
    assert_refused(spectral.forward(&ones(&[1, 2, 5])), "extents with the modes [4]");
    let norm = InstanceNorm::new(3).unwrap();
    assert_refused(norm.forward(&ones(&[1, 2, 5])), "expected [batch, 3, …]");
    let norm = BatchNorm::new(3, &mut params()).unwrap();
    let lone = norm.forward(&ones(&[1, 3, 1, 1]), Mode::train(&Generator::new(1)));
    assert_refused(lone, "BatchNorm: [1, 3, 1, 1] has one value for each channel, expected more in training");
    let _ = norm.forward(&ones(&[1, 3, 1, 1]), Mode::Eval).unwrap();
    let norm = RmsNorm::new(&[3], None, &mut params()).unwrap();
    assert_refused(norm.forward(&ones(&[1, 2])), "does not end in [3]");
    assert_refused(RotaryEmbedding::new(4).unwrap().forward(&ones(&[1, 2])), "expected […, tokens, 4]");
    let rotary = AxialRotaryEmbedding::new(4).unwrap();
    let angles = rotary.angles(&ones(&[2, 3])).unwrap();
    assert_refused(rotary.forward(&ones(&[2, 3, 6]), &angles), "expected [h, w, …, 4]");

    let options = MultiheadAttentionOptions { window: Some(3), batch_first: true, ..Default::default() };
    let attention = MultiheadAttention::new(8, 2, options, &mut params()).unwrap();
    let x = ones(&[1, 4, 8]);
    let mask = ones(&[4, 4]);
    assert_refused(
        attention.forward(&x, &x, &x, None, false, Mode::Eval),
        "tokens 4 is not divisible by the window 3",
    );
    assert_refused(
        attention.forward(&x, &x, &x, Some(&mask), false, Mode::Eval),
        "a mask together with windows",
    );
    assert_refused(
        attention.forward(&ones(&[1, 4, 6]), &x, &x, None, false, Mode::Eval),
        "expected [batch, tokens, 8]",
    );
}
