//! Transformers on fields: what they compute, what they refuse, and over split fields against themselves on one rank.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use isobar_array::{Generator, Window};
use isobar_collectives::threads;
use isobar_mesh::DeviceMesh;
use isobar_models::{
    Architecture, AttentionBackend, Batch, DetokenizerKind, Dit, DitAttention, DitBlockOptions,
    DitConditioning, DitConfig, DitDetokenizer, DitEmbedder, DitPositions, DitTokenizer, EmbedFn, FieldSpec,
    Mode, ModelConfig, PerDim, QkNorm, Vit, VitConfig, VitPositions,
};
use isobar_shard::{CommTrace, MeshParams, ParamStore, Placement, ShardTensor, forbid_hidden_communication};
use isobar_torch::guard::Autocast;
use rstest::rstest;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::common::perturb;
use crate::common::twin::{Axis, Twin, split};

pub(crate) const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

pub(crate) fn random(seed: u64, shape: &[i64]) -> Tensor {
    Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, DOUBLE).unwrap()
}

pub(crate) fn store() -> ParamStore {
    ParamStore::new(Generator::new(1)).with_options(DOUBLE.0, DOUBLE.1)
}

/// 6 × 4 tokens.
pub(crate) fn dit() -> DitConfig {
    DitConfig {
        patch_size: PerDim::Each(vec![2, 3]),
        out_channels: Some(1),
        hidden_size: 8,
        depth: 2,
        num_heads: 2,
        mlp_ratio: 2.0,
        ..DitConfig::new([12, 12], 2)
    }
}

fn vit() -> VitConfig {
    VitConfig {
        patch_size: PerDim::Each(vec![2, 3]),
        embed_dim: 8,
        depth: 2,
        num_heads: 2,
        mlp_ratio: 2.0,
        ..VitConfig::new([12, 12], 2, 1)
    }
}

fn edm() -> DitConfig {
    DitConfig {
        condition_dim: Some(3),
        conditioning_embedder: DitEmbedder::Edm,
        conditioning_embedder_kwargs: DitConditioning {
            emb_channels: Some(8),
            noise_channels: Some(6),
            condition_dropout: Some(0.3),
            ..DitConditioning::default()
        },
        attn_kwargs: DitAttention { qk_norm_type: Some(QkNorm::LayerNorm), ..DitAttention::default() },
        detokenizer: DetokenizerKind::ProjReshape2dConv,
        detokenizer_kwargs: DitDetokenizer { conv_hidden: Some(4), ..DitDetokenizer::default() },
        ..dit()
    }
}

/// With every dropout there is, and blocks computed again.
fn dropping(gradient_checkpointing: bool) -> DitConfig {
    DitConfig {
        drop_path_rates: Some(vec![0.1, 0.5]),
        block_kwargs: DitBlockOptions {
            attn_drop_rate: 0.2,
            proj_drop_rate: 0.2,
            mlp_drop_rate: 0.2,
            ..DitBlockOptions::default()
        },
        gradient_checkpointing,
        ..dit()
    }
}

fn causal() -> DitConfig {
    let rms = DitAttention { qk_norm_type: Some(QkNorm::RmsNorm), ..DitAttention::default() };
    DitConfig { attn_kwargs: DitAttention { is_causal: Some(true), ..rms }, ..dit() }
}

pub(crate) fn windows(attention_backend: AttentionBackend) -> DitConfig {
    let attn_kwargs = DitAttention { qk_norm: Some(true), ..DitAttention::default() };
    DitConfig { attention_backend, attn_kwargs, ..dit() }
}

/// With mask tokens.
pub(crate) fn masked(attention_backend: AttentionBackend) -> DitConfig {
    DitConfig { use_nan_mask_tokens: true, ..windows(attention_backend) }
}

fn zero() -> DitConfig {
    DitConfig { conditioning_embedder: DitEmbedder::Zero, ..dit() }
}

/// Two samples with times, and conditions if the model takes some; the fresh model's gradients would be zero.
fn dit_twin(config: &DitConfig) -> Twin {
    let mut inputs = vec![("fields", vec![2, 2, 12, 12]), ("time", vec![2, 1])];
    if let Some(features) = config.condition_dim {
        inputs.push(("conditions", vec![2, features as i64]));
    }
    let outputs = [("fields", vec![2, 1, 12, 12])];
    Twin::new(ModelConfig::new(config.clone()), &inputs, &outputs).perturbed(5)
}

fn vit_twin(config: VitConfig) -> Twin {
    Twin::new(ModelConfig::new(config), &[("fields", vec![2, 2, 12, 12])], &[("fields", vec![2, 1, 12, 12])])
}

/// Batch and fields at once.
pub(crate) fn batch_and(dim: usize) -> Vec<Axis> {
    let samples = vec![("fields", 0), ("time", 0), ("conditions", 0)];
    vec![(2, samples), (2, vec![("fields", dim)])]
}

#[rstest]
fn dit_along_one_axis(
    #[values(dit(), edm(), causal(), zero(), windows(AttentionBackend::Natten2dRope))] config: DitConfig,
    #[values((2, 2), (3, 2), (4, 3))] axis: (i64, usize),
) {
    dit_twin(&config).check(&split(&[axis]));
}

#[rstest]
#[case::of_fields(split(&[(2, 2), (2, 3)]))]
#[case::batch_and_rows(batch_and(2))]
#[case::batch_and_columns(batch_and(3))]
fn dit_along_two_axes(
    #[values(dit(), edm(), windows(AttentionBackend::Natten2d))] config: DitConfig,
    #[case] axes: Vec<Axis>,
) {
    dit_twin(&config).check(&axes);
}

#[rstest]
fn dit_drops_the_same_on_every_mesh(#[values(false, true)] recompute: bool) {
    let twin = dit_twin(&dropping(recompute));
    twin.check(&split(&[(2, 2)]));
    twin.check(&split(&[(3, 3)]));
}

#[rstest]
fn with_empty_shards(#[values((2, 2), (3, 2), (3, 3))] axis: (i64, usize)) {
    dit_twin(&edm()).with_empty_shards().check(&split(&[axis]));
    dit_twin(&windows(AttentionBackend::Natten2dRope)).with_empty_shards().check(&split(&[axis]));
    vit_twin(vit()).with_empty_shards().check(&split(&[axis]));
}

#[rstest]
fn vit_on_meshes(
    #[values(VitPositions::Learned, VitPositions::Rotary)] pos_embed: VitPositions,
    #[values(split(&[(2, 2)]), split(&[(3, 3)]), split(&[(4, 2)]), split(&[(2, 2), (2, 3)]), batch_and(2))]
    axes: Vec<Axis>,
) {
    let qk_norm = (pos_embed == VitPositions::Learned).then_some(QkNorm::RmsNorm);
    let dropping = VitConfig { drop_rate: 0.1, drop_path_rate: 0.4, gradient_checkpointing: true, ..vit() };
    // Global attention with learned positions, windows with rotary ones.
    let attn_kernel = (pos_embed == VitPositions::Rotary).then_some(PerDim::All(3));
    vit_twin(VitConfig { pos_embed, qk_norm, attn_kernel, ..dropping }).check(&axes);
}

#[test]
fn in_single_precision() {
    dit_twin(&dit()).check_losses(&split(&[(2, 2)]));
    vit_twin(VitConfig { pos_embed: VitPositions::Rotary, ..vit() }).check_losses(&split(&[(2, 3)]));
}

#[rstest]
#[case::dit(dit_twin(&dit()))]
#[case::dit_of_windows(dit_twin(&windows(AttentionBackend::Natten2dRope)))]
#[case::vit(vit_twin(vit()))]
fn first_steps_in_single_precision(#[case] twin: Twin) {
    twin.check_single(&split(&[(2, 2), (2, 3)]));
}

/// Recomputation changes no number.
#[test]
fn recomputed_blocks_give_the_same_gradients() {
    let run = |gradient_checkpointing| {
        let mut params = store();
        let model = Dit::new(&dropping(gradient_checkpointing), &mut params).unwrap();
        perturb(&params, 3);
        let generator = Generator::new(4);
        let (x, t) = (random(1, &[2, 2, 12, 12]), random(2, &[2]));
        let y = model.forward(&x, &t, None, Mode::train(&generator)).unwrap();
        y.square().sum(DOUBLE.0).backward();
        params.trainable().map(|p| (p.name.clone(), p.tensor.grad())).collect::<Vec<_>>()
    };
    for ((name, got), (_, want)) in run(true).iter().zip(run(false)) {
        assert!((got - &want).abs().max().double_value(&[]) < 1e-12, "{name}");
    }
}

#[rstest]
fn a_fresh_dit_gives_zero(
    #[values(dit(), edm(), zero(), windows(AttentionBackend::Natten2d))] config: DitConfig,
) {
    let y = |config: &DitConfig| {
        let model = Dit::new(config, &mut store()).unwrap();
        let condition = config.condition_dim.map(|features| random(3, &[2, features as i64]));
        let (x, t) = (random(1, &[2, 2, 12, 12]), random(2, &[2]));
        model.forward(&x, &t, condition.as_ref(), Mode::Eval).unwrap()
    };
    assert_eq!(y(&config), Tensor::zeros([2, 1, 12, 12], DOUBLE));
    let torch = y(&DitConfig { dit_initialization: false, ..config });
    assert!(torch.abs().max().double_value(&[]) > 1e-3);
}

/// Without a time in the batch it is 0.
#[test]
fn a_time_that_is_not_there_is_zero() {
    let mut params = store();
    let config = ModelConfig::new(dit());
    let model = config.build::<Tensor>(&mut params).unwrap();
    perturb(&params, 3);
    let x = random(1, &[2, 2, 12, 12]);
    let output = |batch: Batch<Tensor>| model.forward(&batch, Mode::Eval).unwrap().take("fields").unwrap();
    let fields = || Batch::of_fields(x.shallow_clone());
    let without = output(fields());
    assert_eq!(without, output(fields().with("time", Tensor::zeros([2, 1], DOUBLE))));
    assert_ne!(without, output(fields().with("time", Tensor::ones([2], DOUBLE))));
}

/// Windows see no farther than they reach, and at borders are moved inside.
#[test]
fn windows_see_their_neighbours() {
    let attn_kwargs = DitAttention { attn_kernel: Some(PerDim::All(3)), ..DitAttention::default() };
    let config = DitConfig {
        input_size: PerDim::All(7),
        patch_size: PerDim::All(1),
        depth: 1,
        attention_backend: AttentionBackend::Natten2d,
        attn_kwargs,
        ..dit()
    };
    let mut params = store();
    let model = Dit::new(&config, &mut params).unwrap();
    perturb(&params, 3);
    let output = |x: &Tensor| model.forward(x, &Tensor::zeros([1], DOUBLE), None, Mode::Eval).unwrap();
    let x = random(1, &[1, 2, 7, 7]);
    let before = output(&x);
    for (row, column) in [(0, 0), (3, 4), (6, 5)] {
        let changed = x.copy();
        let _ = changed.narrow(2, row, 1).narrow(3, column, 1).f_add_scalar_(1.0).unwrap();
        let moved = (output(&changed) - &before).abs().gt(1e-9);
        let sees = |at: i64, key: i64| {
            let start = (at - 1).clamp(0, 4);
            (start..start + 3).contains(&key)
        };
        for (i, j) in (0..7).flat_map(|i| (0..7).map(move |j| (i, j))) {
            let got = moved.int64_value(&[0, 0, i, j]) == 1;
            assert_eq!(got, sees(i, row) && sees(j, column), "{i}, {j} of {row}, {column}");
        }
    }
}

/// Rotated queries and keys know distances only: on a grid where all is shifted, so is the output.
#[test]
fn rotary_positions_are_relative() {
    let config = DitConfig {
        patch_size: PerDim::All(1),
        attention_backend: AttentionBackend::Natten2dRope,
        ..DitConfig { input_size: PerDim::All(9), ..dit() }
    };
    let mut params = store();
    let model = Dit::new(&DitConfig { depth: 1, ..config }, &mut params).unwrap();
    perturb(&params, 3);
    let x = random(1, &[1, 2, 9, 9]);
    let output = |x: &Tensor| model.forward(x, &Tensor::zeros([1], DOUBLE), None, Mode::Eval).unwrap();
    let (y, rolled) = (output(&x), output(&x.roll([1, 2], [2, 3])));
    // Far enough from the borders.
    let inner = |y: &Tensor, row: i64, column: i64| y.narrow(2, row, 4).narrow(3, column, 4);
    let far = (inner(&y, 2, 2) - inner(&rolled, 3, 4)).abs().max().double_value(&[]);
    assert!(far < 1e-12, "{far}");
}

/// A rank receives less than the queries, keys and values that the others hold: the keys and values once around, or heads.
#[rstest]
fn attention_gathers_nothing(#[values(2, 3, 4)] ranks: i64, #[values(2, 3)] dim: usize) {
    threads::run(ranks as usize, Duration::from_secs(60), move |group| {
        let config = DitConfig { patch_size: PerDim::All(1), depth: 1, ..dit() };
        let mesh = DeviceMesh::new(&group, &[ranks], &["domain"]).unwrap();
        let mut store = store();
        let model = Dit::new(&config, &mut MeshParams::new(&mut store, &mesh)).unwrap();
        perturb(&store, 3);
        let x =
            ShardTensor::distribute(&random(1, &[1, 2, 12, 12]), &mesh, &[Placement::Shard(dim)]).unwrap();
        let t = ShardTensor::distribute(&random(2, &[1]), &mesh, &[Placement::Replicate]).unwrap();
        let _guard = forbid_hidden_communication();
        let trace = CommTrace::start(&group);
        let _ = model.forward(&x, &t, None, Mode::Eval).unwrap();
        // Others' tokens, of 8 numbers of 8 bytes.
        let tokens = (144 - 144 / ranks as u64) * 8 * 8;
        let received = trace.record().of_module("blocks.0").received();
        assert_eq!(received, trace.received(), "{}", trace.record());
        assert!(received > 0 && received <= 2 * tokens, "{received} of {tokens}: {}", trace.record());
    });
}

/// A window needs one row of keys and values from each neighbour.
#[test]
fn windows_receive_borders() {
    threads::run(3, Duration::from_secs(60), |group| {
        let config =
            DitConfig { patch_size: PerDim::All(1), depth: 1, ..windows(AttentionBackend::Natten2d) };
        let mesh = DeviceMesh::new(&group, &[3], &["domain"]).unwrap();
        let model = Dit::new(&config, &mut MeshParams::new(&mut store(), &mesh)).unwrap();
        let x = ShardTensor::distribute(&random(1, &[1, 2, 12, 12]), &mesh, &[Placement::Shard(2)]).unwrap();
        let t = ShardTensor::distribute(&random(2, &[1]), &mesh, &[Placement::Replicate]).unwrap();
        let trace = CommTrace::start(&group);
        let _ = model.forward(&x, &t, None, Mode::Eval).unwrap();
        // Two rows of 12 tokens, of 8 numbers of 8 bytes, of keys and of values; and the numbers of the rows.
        let rows = 2 * 2 * 12 * 8 * 8;
        assert!(trace.received() <= rows + 1000, "{} of {rows}: {}", trace.received(), trace.record());
    });
}

#[rstest]
#[case(json!({ "patch_size": 5 }), "height of input_size 12 is not divisible by that of patch_size 5")]
#[case(json!({ "patch_size": [2, 3, 4] }), "patch_size has 3 numbers, expected 2: height and width")]
#[case(json!({ "num_heads": 3 }), "hidden_size 8 is not divisible by num_heads 3")]
#[case(json!({ "hidden_size": 9, "num_heads": 3 }), "hidden_size is 9, expected an even number, at least 2")]
#[case(json!({ "mlp_ratio": 0.0 }), "mlp_ratio 0 leaves no hidden layer of a possible width")]
#[case(json!({ "attention_backend": "transformer_engine" }), "expected \"timm\", which computes the same attention")]
#[case(json!({ "attn_kwargs": { "attn_kernel": 3 } }), "the attention_backend \"timm\" has no attn_kernel in attn_kwargs")]
#[case(json!({ "attention_backend": "natten2d", "attn_kwargs": { "attn_kernel": 5 } }), "attn_kernel of attn_kwargs is 5, expected an odd number of at most 4")]
#[case(json!({ "attention_backend": "natten3d" }), "the attention_backend \"natten3d\" is for 3 dims, but input_size has 2 numbers")]
#[case(json!({ "attention_backend": "natten2d", "attn_kwargs": { "attn_kernel": [3, 3, 3] } }), "attn_kernel of attn_kwargs has 3 numbers, expected 2")]
#[case(json!({ "input_size": [4, 12, 12] }), "patch_size has 2 numbers, expected 3: depth, height and width")]
#[case(json!({ "attention_backend": "natten2d", "attn_kwargs": { "is_causal": true } }), "has no is_causal in attn_kwargs")]
#[case(json!({ "attention_backend": "natten2d_rope", "num_heads": 4 }), "a head has 2 features, expected a multiple of 4")]
#[case(json!({ "conditioning_embedder": "edm" }), "emb_channels of conditioning_embedder_kwargs is not given")]
#[case(json!({ "conditioning_embedder": "edm", "conditioning_embedder_kwargs": { "emb_channels": 6, "noise_channels": 6 } }), "is 6, expected hidden_size, 8")]
#[case(json!({ "conditioning_embedder_kwargs": { "noise_channels": 6 } }), "the conditioning_embedder \"dit\" has no noise_channels")]
#[case(json!({ "conditioning_embedder": "zero", "condition_dim": 2 }), "\"zero\" takes no condition")]
#[case(json!({ "detokenizer_kwargs": { "conv_layers": 2 } }), "are those of the detokenizer \"proj_reshape_2d_conv\"")]
#[case(json!({ "detokenizer": "proj_reshape_2d_conv", "detokenizer_kwargs": { "conv_kernel": 4 } }), "conv_kernel of detokenizer_kwargs is 4, expected an odd number")]
#[case(json!({ "drop_path_rates": [0.1] }), "drop_path_rates has 1 numbers, expected depth = 2")]
#[case(json!({ "use_nan_mask_tokens": true }), "use_nan_mask_tokens is for attention in windows; set attention_backend")]
#[case(json!({ "attention_backend": "natten2d", "attn_kwargs": { "proj_bias": false } }), "has no proj_bias in attn_kwargs")]
#[case(json!({ "attn_kwargs": { "norm_layer": "torch" } }), "has no norm_layer in attn_kwargs")]
fn dit_refuses(#[case] change: serde_json::Value, #[case] words: &str) {
    let mut table = serde_json::to_value(dit()).unwrap();
    table.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    let config: DitConfig = serde_json::from_value(table).unwrap();
    let error = Dit::new(&config, &mut store()).unwrap_err().to_string();
    assert!(error.starts_with("dit: ") && error.contains(words), "{error}");
    assert_eq!(config.count(&Default::default).unwrap_err().to_string(), error);
}

/// Without blocks and conditions, tokenizer and detokenizer are the whole model.
#[test]
fn dit_computes_tokens_in_single_precision_where_asked() {
    let run = |force_tokenization_fp32: bool, mixed: bool| {
        let config = DitConfig {
            depth: 0,
            conditioning_embedder: DitEmbedder::Zero,
            dit_initialization: false,
            force_tokenization_fp32,
            ..dit()
        };
        let model = Dit::new(&config, &mut ParamStore::new(Generator::new(1))).unwrap();
        let [x, t] = [random(1, &[2, 2, 12, 12]), random(2, &[2])].map(|input| input.to_kind(Kind::Float));
        let _mixed = mixed.then(|| Autocast::new(Device::Cpu, Kind::BFloat16).unwrap());
        model.forward(&x, &t, None, Mode::Eval).unwrap()
    };
    let full = run(false, false);
    assert_eq!(run(true, true), full);
    assert_ne!(run(false, true), full);
}

#[test]
fn dit_has_no_bias_in_its_projections_where_asked() {
    let attn_kwargs = DitAttention { proj_bias: Some(false), ..DitAttention::default() };
    let mut store = store();
    let _ = Dit::new(&DitConfig { attn_kwargs, ..dit() }, &mut store).unwrap();
    assert!(store.get("blocks.1.attention.attn_op.proj.weight").is_some());
    assert!(store.get("blocks.1.attention.attn_op.proj.bias").is_none());
}

#[test]
fn dit_refuses_other_inputs() {
    let model = Dit::new(&DitConfig { condition_dim: Some(3), ..dit() }, &mut store()).unwrap();
    let run = |x: &[i64], t: &[i64], condition: &[i64]| {
        let (x, t, condition) = (random(1, x), random(2, t), random(3, condition));
        model.forward(&x, &t, Some(&condition), Mode::Eval).map_err(|error| error.to_string())
    };
    let _ = run(&[2, 2, 12, 12], &[2], &[2, 3]).unwrap();
    assert!(run(&[2, 2, 12, 18], &[2], &[2, 3]).unwrap_err().contains("expected [batch, 2, 12, 12]"));
    assert!(run(&[2, 2, 12, 12], &[3], &[2, 3]).unwrap_err().contains("expected [2] for the times"));
    assert!(run(&[2, 2, 12, 12], &[2], &[2, 4]).unwrap_err().contains("expected [2, 3] for the conditions"));
    let model = Dit::new(&dit(), &mut store()).unwrap();
    let (x, t) = (random(1, &[2, 2, 12, 12]), random(2, &[2]));
    let error = model.forward(&x, &t, Some(&random(3, &[2, 3])), Mode::Eval).unwrap_err().to_string();
    assert!(error.contains("condition_dim is not given"), "{error}");
}

#[rstest]
#[case(VitConfig { embed_dim: 10, num_heads: 4, ..vit() }, "embed_dim 10 is not divisible by num_heads 4")]
#[case(VitConfig { num_heads: 4, pos_embed: VitPositions::Rotary, ..vit() }, "a head has 2 features, expected a multiple of 4")]
#[case(VitConfig { patch_size: PerDim::All(8), ..vit() }, "height of inp_shape 12 is not divisible by that of patch_size 8")]
#[case(VitConfig { attn_kernel: Some(PerDim::All(4)), ..vit() }, "attn_kernel is 4, expected an odd number of at most 6")]
#[case(VitConfig { attn_kernel: Some(PerDim::Each(vec![3, 5])), ..vit() }, "attn_kernel is 5, expected an odd number of at most 4")]
#[case(VitConfig { attn_drop_rate: 1.0, ..vit() }, "attn_drop_rate is 1, expected 0 or more and below 1")]
#[case(VitConfig { rope_theta: 0.0, pos_embed: VitPositions::Rotary, ..vit() }, "rope_theta is 0, expected a finite number above 0")]
fn vit_refuses(#[case] config: VitConfig, #[case] words: &str) {
    let error = Vit::new(&config, &mut store()).unwrap_err().to_string();
    assert!(error.starts_with("vit: ") && error.contains(words), "{error}");
}

#[test]
fn fields_are_compared_with_the_configuration() {
    let fields = FieldSpec { extents: vec![12, 12], in_channels: 2, out_channels: 1, ..FieldSpec::default() };
    dit().check(&fields).unwrap();
    vit().check(&fields).unwrap();
    let wide = FieldSpec { extents: vec![12, 18], ..fields.clone() };
    let error = masked(AttentionBackend::Natten2d).check(&fields).unwrap_err().to_string();
    assert!(error.contains("reads the array \"invalid_mask\""), "{error}");
    assert!(dit().check(&wide).unwrap_err().to_string().ends_with("--set 'model.input_size=[12, 18]'"));
    assert!(vit().check(&wide).unwrap_err().to_string().ends_with("--set 'model.inp_shape=[12, 18]'"));
    let more = FieldSpec { out_channels: 2, ..fields };
    assert!(dit().check(&more).unwrap_err().to_string().ends_with("--set model.out_channels=2"));
}

/// Names of the state dict.
#[test]
fn states_have_the_names_of_physicsnemo_and_timm() {
    let names = |build: &dyn Fn(&mut ParamStore)| {
        let mut params = store();
        build(&mut params);
        params.parameters().iter().map(|p| (p.name.clone(), p.tensor.size())).collect::<Vec<_>>()
    };
    let has = |names: &[(String, Vec<i64>)], name: &str, shape: &[i64]| {
        assert!(
            names.iter().any(|(own, size)| own == name && size == shape),
            "{name} {shape:?} of {names:?}"
        );
    };
    let of_edm = names(&|params| drop(Dit::new(&edm(), params).unwrap()));
    has(&of_edm, "conditioning_embedder.map_noise.freqs", &[3]);
    has(&of_edm, "conditioning_embedder.map_condition.weight", &[6, 3]);
    has(&of_edm, "conditioning_embedder.map_layer1.bias", &[8]);
    has(&of_edm, "blocks.1.attention.attn_op.q_norm.bias", &[4]);
    has(&of_edm, "detokenizer.proj.proj_layer.adaptive_modulation.1.weight", &[16, 8]);
    has(&of_edm, "detokenizer.conv_head.2.weight", &[1, 4, 3, 3]);
    let of_dropping = names(&|params| drop(Dit::new(&dropping(false), params).unwrap()));
    has(&of_dropping, "blocks.0.linear.layers.3.weight", &[8, 16]);
    let of_windows =
        names(&|params| drop(Dit::new(&windows(AttentionBackend::Natten2dRope), params).unwrap()));
    has(&of_windows, "blocks.0.attention.qkv.weight", &[24, 8]);
    assert!(!of_windows.iter().any(|(name, _)| name.contains("pos_embed") || name.contains("q_norm")));
    let of_vit = names(&|params| drop(Vit::new(&vit(), params).unwrap()));
    has(&of_vit, "pos_embed", &[1, 24, 8]);
    has(&of_vit, "patch_embed.proj.weight", &[8, 2, 2, 3]);
    has(&of_vit, "blocks.1.attn.proj.bias", &[8]);
    has(&of_vit, "blocks.1.mlp.fc2.weight", &[8, 16]);
    has(&of_vit, "norm.weight", &[8]);
    has(&of_vit, "head.bias", &[6]);
}

#[test]
fn times_embed_as_asked() {
    let output = |kwargs: DitConditioning| {
        let config = DitConfig { conditioning_embedder_kwargs: kwargs, ..dit() };
        let mut params = store();
        drop(Dit::new(&config, &mut params).unwrap());
        Vec::<f64>::try_from(&params.get("conditioning_embedder.t_embedder.freqs").unwrap().tensor).unwrap()
    };
    let close = |got: Vec<f64>, want: &[f64]| {
        assert!(
            got.len() == want.len() && got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-12),
            "{got:?}"
        );
    };
    close(output(DitConditioning::default()), &[1.0, 0.1, 0.01, 0.001]);
    let ends =
        DitConditioning { endpoint: Some(true), freq_embed_dim: Some(6), ..DitConditioning::default() };
    close(output(ends), &[1.0, 0.01, 0.0001]);
    let few =
        DitConditioning { max_positions: Some(4.0), mlp_hidden_dim: Some(3), ..DitConditioning::default() };
    let few = DitConditioning { embed_fn: Some(EmbedFn::NpSinCos), freq_embed_dim: Some(4), ..few };
    close(output(few), &[1.0, 0.5]);
}

#[test]
fn positions_may_be_left_out() {
    let config =
        DitConfig { tokenizer_kwargs: DitTokenizer { pos_embed: Some(DitPositions::None) }, ..dit() };
    let mut params = store();
    drop(Dit::new(&config, &mut params).unwrap());
    assert!(params.get("tokenizer.pos_embed").is_none());
    assert!(config.sharding().parameter_layouts().patterns().next().is_none());
}
