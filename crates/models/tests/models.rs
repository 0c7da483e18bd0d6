//! Configurations, errors, dropout, kinds and starting values.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::{Generator, Window};
use isobar_models::{
    Activation, Afno, AfnoConfig, Architecture, CNextUNet, CNextUNetConfig, DistributedAfno,
    DistributedAfnoConfig, FieldSpec, FullyConnected, FullyConnectedConfig, Mode, Normalization,
    NormalizationArgs, PaddingMode, PerDim, Pix2Pix, Pix2PixConfig, Pix2PixPadding, Pooling, SrResNet,
    SrResNetConfig, UNet, UNetConfig, UNetPadding, Upsampling,
};
use isobar_shard::ParamStore;
use rstest::rstest;
use tch::{Device, Kind, Tensor};

fn store() -> ParamStore {
    ParamStore::new(Generator::new(1))
}

fn random(shape: &[i64], kind: Kind) -> Tensor {
    Generator::new(3).normal(&Window::whole(shape), 0.0, 1.0, (kind, Device::Cpu)).unwrap()
}

fn small() -> AfnoConfig {
    AfnoConfig {
        patch_size: [4, 2],
        embed_dim: 12,
        depth: 2,
        num_blocks: 3,
        ..AfnoConfig::new([16, 12], 2, 3)
    }
}

#[rstest]
#[case(AfnoConfig { inp_shape: [15, 12], ..small() }, "height of inp_shape 15 is not divisible by that of patch_size 4")]
#[case(AfnoConfig { inp_shape: [16, 13], ..small() }, "width of inp_shape 13 is not divisible by that of patch_size 2")]
#[case(AfnoConfig { num_blocks: 5, ..small() }, "embed_dim 12 is not divisible by num_blocks 5")]
#[case(AfnoConfig { patch_size: [0, 2], ..small() }, "height of patch_size is 0, expected 1 to 2147483647")]
#[case(AfnoConfig { in_channels: 0, ..small() }, "in_channels is 0, expected 1 to 2147483647")]
#[case(AfnoConfig { drop_rate: 1.0, ..small() }, "drop_rate is 1, expected 0 or more and below 1")]
#[case(AfnoConfig { mlp_ratio: 0.01, ..small() }, "mlp_ratio 0.01 leaves no hidden layer of a possible width")]
#[case(AfnoConfig { sparsity_threshold: -1.0, ..small() }, "sparsity_threshold is -1, expected 0 or more")]
#[case(
    AfnoConfig { hard_thresholding_fraction: 1.5, ..small() },
    "hard_thresholding_fraction is 1.5, expected 0 to 1"
)]
fn afno_refuses(#[case] config: AfnoConfig, #[case] reason: &str) {
    let error = Afno::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("afno: {reason}"));
}

#[rstest]
#[case(DistributedAfnoConfig { num_blocks: 3, ..DistributedAfnoConfig::new([32, 32], 2) }, "embed_dim 256 is not divisible by num_blocks 3")]
#[case(DistributedAfnoConfig::new([40, 32], 2), "height of inp_shape 40 is not divisible by patch_size 16")]
#[case(DistributedAfnoConfig { drop_path_rate: -0.1, ..DistributedAfnoConfig::new([32, 32], 2) }, "drop_path_rate is -0.1, expected 0 or more and below 1")]
fn distributed_afno_refuses(#[case] config: DistributedAfnoConfig, #[case] reason: &str) {
    let error = DistributedAfno::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("distributed_afno: {reason}"));
}

#[rstest]
#[case(
    FullyConnectedConfig { weight_norm: true, weight_fact: true, ..Default::default() },
    "weight_norm and weight_fact are both set; choose one"
)]
#[case(FullyConnectedConfig { activation_fn: vec![], ..Default::default() }, "activation_fn is empty; name one or more")]
#[case(FullyConnectedConfig { num_layers: 0, ..Default::default() }, "num_layers is 0, expected 1 to 2147483647")]
#[case(
    FullyConnectedConfig { activation_fn: vec![Activation::Stan], ..Default::default() },
    "stan needs layer_size 1, not 512"
)]
fn fully_connected_refuses(#[case] config: FullyConnectedConfig, #[case] reason: &str) {
    let error = FullyConnected::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("fully_connected: {reason}"));
}

fn unet() -> UNetConfig {
    UNetConfig { model_depth: 2, feature_map_channels: vec![4, 4, 6, 6], ..UNetConfig::new(2, 3) }
}

fn group_norm(args: NormalizationArgs) -> UNetConfig {
    UNetConfig { normalization_args: Some(args), ..unet() }
}

#[rstest]
#[case(UNetConfig { dimension: 1, ..unet() }, "dimension is 1, expected 2 or 3")]
#[case(UNetConfig { kernel_size: PerDim::All(0), ..unet() }, "kernel_size is 0, expected 1 to 2147483647")]
#[case(UNetConfig { kernel_size: PerDim::Each(vec![3, 3]), ..unet() }, "kernel_size has 2 entries, dimension is 3")]
#[case(UNetConfig { padding: PerDim::Each(vec![1; 4]).into(), ..unet() }, "padding has 4 entries, dimension is 3")]
#[case(UNetConfig { stride: PerDim::All(0), ..unet() }, "stride is 0, expected 1 to 2147483647")]
#[case(
    UNetConfig { stride: PerDim::Each(vec![1, 3, 1]), padding: UNetPadding::SAME, ..unet() },
    "stride is [1, 3, 1], but with padding = \"same\" transposed convolutions need 1; --set \
     'model.upsampling=\"linear\"' or --set model.stride=1"
)]
#[case(UNetConfig { num_conv_blocks: 3, ..unet() }, "num_conv_blocks is 3, expected 1 or 2")]
#[case(UNetConfig { pool_size: 3, ..unet() }, "pool_size is 3, transposed convolutions need 2")]
#[case(UNetConfig { model_depth: 40, ..unet() }, "model_depth is 40, too many for pool_size 2")]
#[case(
    UNetConfig { model_depth: 3, ..unet() },
    "feature_map_channels has 4 entries, expected model_depth · num_conv_blocks = 6"
)]
#[case(
    UNetConfig { feature_map_channels: vec![4, 4, 6, 8], ..unet() },
    "feature_map_channels ends in 6, 8; with two convolutions in a level these are equal"
)]
#[case(
    UNetConfig { conv_activation: Activation::Squareplus, ..unet() },
    "conv_activation is Squareplus, which torch.nn.functional does not have, or not without arguments"
)]
#[case(
    UNetConfig { conv_transpose_activation: Activation::Prelu, ..unet() },
    "conv_transpose_activation is Prelu, which torch.nn.functional does not have, or not without arguments"
)]
#[case(
    group_norm(NormalizationArgs { num_groups: 4, ..Default::default() }),
    "an entry of feature_map_channels, 6 is not divisible by num_groups 4"
)]
#[case(
    group_norm(NormalizationArgs { num_channels: Some(4), ..Default::default() }),
    "num_channels is 4, feature_map_channels are not all 4"
)]
#[case(
    group_norm(NormalizationArgs { others: ["momentum".into()].into(), ..Default::default() }),
    "normalization_args has {\"momentum\"}, which groupnorm does not take here"
)]
#[case(UNetConfig { use_attn_gate: true, ..unet() }, "use_attn_gate needs attn_intermediate_channels")]
#[case(
    UNetConfig { use_attn_gate: true, attn_feature_map_channels: Some(vec![6]), ..unet() },
    "attn_feature_map_channels is Some([6]), by feature_map_channels it is [4]"
)]
fn unet_refuses(#[case] config: UNetConfig, #[case] reason: &str) {
    let error = UNet::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("unet: {reason}"));
}

#[test]
fn unet_names_its_layers() {
    let names = |config: UNetConfig| {
        let mut params = store();
        UNet::new(&config, &mut params).unwrap();
        params.parameters().iter().map(|p| p.name.clone()).collect::<Vec<_>>()
    };
    let gated = names(UNetConfig {
        dimension: 2,
        num_conv_blocks: 1,
        feature_map_channels: vec![4, 6],
        upsampling: Upsampling::Nearest,
        normalization: Normalization::BatchNorm,
        use_attn_gate: true,
        attn_decoder_feature_maps: Some(vec![6]),
        attn_feature_map_channels: Some(vec![4]),
        attn_intermediate_channels: Some(2),
        ..unet()
    });
    let block = |name: &str| {
        ["conv2d.weight", "conv2d.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
            .map(|part| format!("{name}.{part}"))
            .to_vec()
    };
    let plain = |name: &str| ["weight", "bias"].map(|part| format!("{name}.{part}")).to_vec();
    let gate = ["W_g.0", "W_g.1", "W_x.0", "W_x.1", "psi.0", "psi.1"];
    let want = [
        block("encoder.layers.0"),
        block("encoder.layers.2"),
        plain("decoder.layers.0.conv2d"),
        block("decoder.layers.1"),
        plain("decoder.layers.2.conv2d"),
        gate.iter().flat_map(|part| plain(&format!("attention_blocks.0.{part}"))).collect(),
    ];
    assert_eq!(gated, want.concat());
    let transposed = names(UNetConfig { dimension: 2, normalization: Normalization::None, ..unet() });
    let names = ["encoder.layers.0.conv2d", "encoder.layers.1.conv2d", "encoder.layers.3.conv2d"];
    let more = ["encoder.layers.4.conv2d", "decoder.layers.0.conv2d_transpose", "decoder.layers.1.conv2d"];
    let last = ["decoder.layers.2.conv2d", "decoder.layers.3.conv2d"];
    let want = [&names[..], &more, &last].concat();
    assert_eq!(transposed, want.into_iter().flat_map(plain).collect::<Vec<_>>());
}

/// Function of torch.nn.functional with the activation's name.
type Function = fn(&Tensor) -> Tensor;

/// A U-Net of one level, its layers in plain operators of libtorch.
#[rstest]
#[case(Activation::Relu, Tensor::relu)]
#[case(Activation::LeakyRelu, Tensor::leaky_relu)]
#[case(Activation::Rrelu, |x: &Tensor| x.clamp_min(0.0) + x.clamp_max(0.0) * ((1.0 / 8.0 + 1.0 / 3.0) / 2.0))]
#[case(Activation::Relu6, Tensor::relu6)]
#[case(Activation::Elu, Tensor::elu)]
#[case(Activation::Celu, Tensor::celu)]
#[case(Activation::Selu, Tensor::selu)]
#[case(Activation::Silu, Tensor::silu)]
#[case(Activation::Gelu, |x: &Tensor| x.gelu("none"))]
#[case(Activation::Mish, Tensor::mish)]
#[case(Activation::Sigmoid, Tensor::sigmoid)]
#[case(Activation::LogSigmoid, Tensor::log_sigmoid)]
#[case(Activation::Hardsigmoid, Tensor::hardsigmoid)]
#[case(Activation::Hardswish, Tensor::hardswish)]
#[case(Activation::Hardtanh, Tensor::hardtanh)]
#[case(Activation::Hardshrink, Tensor::hardshrink)]
#[case(Activation::Softshrink, Tensor::softshrink)]
#[case(Activation::Softplus, Tensor::softplus)]
#[case(Activation::Softsign, |x: &Tensor| x / (x.abs() + 1.0))]
#[case(Activation::Tanh, Tensor::tanh)]
#[case(Activation::Tanhshrink, |x: &Tensor| x - x.tanh())]
#[case(Activation::Identity, Tensor::shallow_clone)]
fn unet_of_one_level(
    #[case] conv_activation: Activation,
    #[case] function: Function,
    #[values(true, false)] affine: bool,
) {
    let config = UNetConfig {
        model_depth: 1,
        num_conv_blocks: 1,
        feature_map_channels: vec![4],
        kernel_size: PerDim::Each(vec![3, 5, 1]),
        padding: PerDim::Each(vec![1, 2, 0]).into(),
        stride: PerDim::Each(vec![1; 3]),
        conv_activation,
        normalization_args: Some(NormalizationArgs {
            num_groups: 2,
            eps: 1e-3,
            affine,
            num_channels: Some(4),
            ..Default::default()
        }),
        ..unet()
    };
    let mut params = store().with_options(Kind::Double, Device::Cpu);
    let model = UNet::new(&config, &mut params).unwrap();
    let names: Vec<&str> = params.parameters().iter().map(|parameter| parameter.name.as_str()).collect();
    let norm = ["encoder.layers.0.norm.weight", "encoder.layers.0.norm.bias"];
    let conv = ["encoder.layers.0.conv3d.weight", "encoder.layers.0.conv3d.bias"];
    let last = ["decoder.layers.0.conv3d.weight", "decoder.layers.0.conv3d.bias"];
    assert_eq!(names, [&conv[..], if affine { &norm } else { &[] }, &last].concat());

    // Parameters of no special values, and inputs that reach all branches of the activation.
    let value = |name: &str| params.get(name).map(|parameter| &parameter.tensor);
    tch::no_grad(|| {
        for tensor in norm.into_iter().filter_map(value) {
            tensor.shallow_clone().copy_(&(random(&[4], Kind::Double) * 3.0));
        }
    });
    let x = (random(&[2, 2, 4, 6, 3], Kind::Double) * 2.0).set_requires_grad(true);
    let convolve = |x: &Tensor, [weight, bias]: [&str; 2]| {
        x.conv3d(value(weight).unwrap(), value(bias), [1, 1, 1], [1, 2, 0], [1, 1, 1], 1)
    };
    let normed = convolve(&x, conv).group_norm(2, value(norm[0]), value(norm[1]), 1e-3, false);
    let want = convolve(&function(&normed), last);
    let got = model.forward(&x, Mode::Eval).unwrap();
    assert!(max_error(&got, &want) < 1e-12);
    let grad = |y: &Tensor| Tensor::run_backward(&[y.square().sum(Kind::Double)], &[&x], false, false);
    // libtorch takes the sixth of hardsigmoid in single precision.
    assert!(max_error(&grad(&got)[0], &grad(&want)[0]) < 1e-7);
}

/// Kernels of one extent for each dim, down and up.
#[rstest]
#[case(PaddingMode::Zeros, "constant")]
#[case(PaddingMode::Circular, "circular")]
#[case(PaddingMode::Reflect, "reflect")]
#[case(PaddingMode::Replicate, "replicate")]
fn unet_of_two_levels_with_flat_kernels(#[case] padding_mode: PaddingMode, #[case] mode: &str) {
    let config = UNetConfig {
        num_conv_blocks: 1,
        feature_map_channels: vec![4, 6],
        kernel_size: PerDim::Each(vec![3, 3, 1]),
        padding: PerDim::Each(vec![1, 1, 0]).into(),
        padding_mode,
        conv_activation: Activation::Mish,
        conv_transpose_activation: Activation::Hardswish,
        normalization: Normalization::None,
        ..unet()
    };
    let mut params = store().with_options(Kind::Double, Device::Cpu);
    let model = UNet::new(&config, &mut params).unwrap();
    let value = |layer: &str, part: &str| &params.get(&format!("{layer}.{part}")).unwrap().tensor;
    let convolve = |x: &Tensor, layer: &str| {
        let layer = format!("{layer}.conv3d");
        let padded = x.f_pad([0, 0, 1, 1, 1, 1], mode, None).unwrap();
        let (weight, bias) = (value(&layer, "weight"), value(&layer, "bias"));
        padded.conv3d(weight, Some(bias), [1, 1, 1], [0, 0, 0], [1, 1, 1], 1)
    };
    let x = random(&[2, 2, 4, 6, 2], Kind::Double);
    let skip = convolve(&x, "encoder.layers.0").mish();
    let below = skip.max_pool3d([2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], false);
    let below = convolve(&below, "encoder.layers.2").mish();
    let up = "decoder.layers.0.conv3d_transpose";
    let (weight, bias) = (value(up, "weight"), value(up, "bias"));
    let one = [1, 1, 1];
    let up = below.conv_transpose3d(weight, Some(bias), [2, 2, 2], one, one, 1, one).hardswish();
    let joined = convolve(&Tensor::cat(&[up, skip], 1), "decoder.layers.1").mish();
    let want = convolve(&joined, "decoder.layers.2");
    assert!(max_error(&model.forward(&x, Mode::Eval).unwrap(), &want) < 1e-12);
}

/// PhysicsNeMo gives them to the group norm alone.
#[rstest]
fn other_norms_ignore_normalization_args(#[values("batchnorm", "layernorm")] normalization: &str) {
    let read = |args: &str| -> UNetConfig {
        let text = format!(
            r#"{{"in_channels": 2, "out_channels": 3, "model_depth": 2, "feature_map_channels": [4, 4, 6, 6],
                "normalization": "{normalization}"{args}}}"#
        );
        serde_json::from_str(&text).unwrap()
    };
    let args = r#", "normalization_args": {"num_groups": 5, "eps": -1, "affine": false, "momentum": 0.5}"#;
    let (plain, given) = (read(""), read(args));
    let all = given.normalization_args.as_ref().unwrap();
    assert_eq!((all.num_groups, all.affine, all.others.len()), (5, false, 1));
    let x = random(&[2, 2, 4, 4, 4], Kind::Float);
    let forward = |config: &UNetConfig| {
        UNet::new(config, &mut store()).unwrap().forward(&x, Mode::train(&Generator::new(1))).unwrap()
    };
    assert_eq!(forward(&given), forward(&plain));
}

/// The norm over one channel leaves a gate nothing but a constant: half of the skip at first.
#[test]
fn gates_are_constant() {
    let config = UNetConfig {
        use_attn_gate: true,
        attn_intermediate_channels: Some(2),
        normalization: Normalization::None,
        ..unet()
    };
    let x = random(&[1, 2, 4, 4, 4], Kind::Double);
    let mut params = store().with_options(Kind::Double, Device::Cpu);
    let model = UNet::new(&config, &mut params).unwrap();
    let before = model.forward(&x, Mode::Eval).unwrap();
    tch::no_grad(|| {
        for parameter in params.parameters().iter().filter(|p| p.name.contains(".W_")) {
            let _ = parameter.tensor.shallow_clone().fill_(3.0);
        }
    });
    assert!(max_error(&model.forward(&x, Mode::Eval).unwrap(), &before) < 1e-12);
    let plain = UNetConfig { use_attn_gate: false, ..config };
    let plain = UNet::new(&plain, &mut store().with_options(Kind::Double, Device::Cpu)).unwrap();
    assert!(max_error(&plain.forward(&x, Mode::Eval).unwrap(), &before) > 1e-6);
}

#[rstest]
#[case(
    SrResNetConfig { scaling_factor: 3, ..SrResNetConfig::new(1, 1) },
    "scaling_factor is 3, expected 2, 4 or 8"
)]
#[case(
    SrResNetConfig { small_kernel_size: 4, ..SrResNetConfig::new(1, 1) },
    "small_kernel_size is 4, expected an odd number; --set model.padding=same takes even ones"
)]
#[case(
    SrResNetConfig { activation_fn: Activation::Stan, ..SrResNetConfig::new(1, 1) },
    "activation_fn is stan, which is for single features"
)]
fn sr_res_net_refuses(#[case] config: SrResNetConfig, #[case] reason: &str) {
    let error = SrResNet::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("sr_res_net: {reason}"));
}

#[rstest]
#[case(Pix2PixConfig { n_upsampling: 17, ..Pix2PixConfig::new(1, 1, 2) }, "n_upsampling is 17, expected at most 16; --set model.n_upsampling=3")]
#[case(Pix2PixConfig::new(1, 1, 4), "dimension is 4, expected 1 to 3")]
fn pix2pix_refuses(#[case] config: Pix2PixConfig, #[case] reason: &str) {
    let error = Pix2Pix::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("pix2pix: {reason}"));
}

/// An error proposes settings that fit the same fields.
#[rstest]
#[case(Pix2PixConfig::new(1, 1, 2), &[24, 20], Some("--set model.n_downsampling=2 --set model.n_upsampling=2"))]
#[case(Pix2PixConfig { n_upsampling: 4, ..Pix2PixConfig::new(1, 1, 2) }, &[24, 24], Some("--set model.n_downsampling=2 --set model.n_upsampling=3"))]
#[case(Pix2PixConfig::new(1, 1, 2), &[85, 421], Some("--set model.n_downsampling=0 --set model.n_upsampling=0"))]
#[case(Pix2PixConfig::new(1, 1, 2), &[3, 8], Some("fields of other extents are needed"))]
#[case(Pix2PixConfig::new(1, 1, 2), &[8, 16], Some("--set model.n_downsampling=2 --set model.n_upsampling=2"))]
#[case(Pix2PixConfig { padding_type: Pix2PixPadding::Zero, ..Pix2PixConfig::new(1, 1, 2) }, &[8, 16], None)]
fn pix2pix_fits_its_fields(
    #[case] config: Pix2PixConfig,
    #[case] extents: &[usize],
    #[case] mend: Option<&str>,
) {
    let fields = FieldSpec {
        source: "waves.h5".to_owned(),
        extents: extents.to_vec(),
        in_channels: 1,
        out_channels: 1,
        ..FieldSpec::default()
    };
    match (config.check(&fields), mend) {
        (Ok(()), None) => {}
        (Err(error), Some(mend)) => assert!(error.to_string().ends_with(mend), "{error}"),
        (got, want) => panic!("{got:?}, expected {want:?}"),
    }
}

#[rstest]
#[case(CNextUNetConfig::new(1, 1, &[24, 16]), "spatial_resolution is [24, 16], expected 2 multiples of 16 for 4 stages")]
#[case(CNextUNetConfig { stages: 0, ..CNextUNetConfig::new(1, 1, &[16]) }, "stages is 0, expected 1 to 16")]
#[case(CNextUNetConfig { n_spatial_dims: 4, ..CNextUNetConfig::new(1, 1, &[16]) }, "n_spatial_dims is 4, expected 1 to 3")]
fn cnext_unet_refuses(#[case] config: CNextUNetConfig, #[case] reason: &str) {
    let error = CNextUNet::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("cnext_unet: {reason}"));
}

#[test]
fn odd_extents_are_rounded_up_on_the_way_down() {
    let config =
        Pix2PixConfig { conv_layer_size: 2, n_downsampling: 2, n_blocks: 1, ..Pix2PixConfig::new(1, 1, 2) };
    let model = Pix2Pix::new(&Pix2PixConfig { n_upsampling: 0, ..config }, &mut store()).unwrap();
    assert_eq!(model.forward(&random(&[1, 1, 5, 8], Kind::Float), Mode::Eval).unwrap().size(), [1, 1, 8, 8]);
    let error = model.forward(&random(&[1, 1, 3, 8], Kind::Float), Mode::Eval).unwrap_err().to_string();
    assert!(error.contains("extents of at least 4"), "{error}");
}

#[test]
fn batch_norm_trains_its_statistics() {
    let config = SrResNetConfig {
        conv_layer_size: 2,
        n_resid_blocks: 1,
        scaling_factor: 2,
        ..SrResNetConfig::new(1, 1)
    };
    let mut params = store();
    let model = SrResNet::new(&config, &mut params).unwrap();
    let x = random(&[2, 1, 3, 4, 5], Kind::Float);
    let eval = || model.forward(&x, Mode::Eval).unwrap();
    let first = eval();
    assert_eq!(eval(), first);
    let name = "conv_block2.conv_block.1.running_mean";
    assert_eq!(Vec::<f32>::try_from(&params.get(name).unwrap().tensor).unwrap(), [0.0, 0.0]);
    let _ = model.forward(&x, Mode::train(&Generator::new(1))).unwrap();
    assert!(params.get(name).unwrap().tensor.abs().min().double_value(&[]) > 0.0);
    assert!(max_error(&eval(), &first) > 1e-6);
}

#[test]
fn inputs_of_another_shape_are_refused() {
    let model = Afno::new(&small(), &mut store()).unwrap();
    for shape in [&[2, 2, 16, 13][..], &[2, 3, 16, 12], &[2, 16, 12]] {
        let error = model.forward(&random(shape, Kind::Float), Mode::Eval).unwrap_err().to_string();
        assert_eq!(error, format!("afno: input has shape {shape:?}, expected [batch, 2, 16, 12]"));
    }
    let model = UNet::new(&unet(), &mut store()).unwrap();
    let error = model.forward(&random(&[1, 2, 4, 3, 4], Kind::Float), Mode::Eval).unwrap_err().to_string();
    let want = "expected [batch, 2, depth, height, width] with extents divisible by 2";
    assert_eq!(error, format!("unet: input has shape [1, 2, 4, 3, 4], {want}"));
    let config = FullyConnectedConfig { in_features: 3, ..Default::default() };
    let model = FullyConnected::new(&config, &mut store()).unwrap();
    let error = model.forward(&random(&[2, 4], Kind::Float)).unwrap_err().to_string();
    assert_eq!(error, "fully_connected: input has shape [2, 4], expected […, 3]");
    let config = DistributedAfnoConfig::new([32, 32], 2);
    let model = DistributedAfno::new(&config, &mut store()).unwrap();
    assert!(model.forward(&random(&[1, 3, 32, 32], Kind::Float), Mode::Eval).is_err());
}

#[test]
fn configurations_are_read_strictly() {
    let config: AfnoConfig =
        toml::from_str("inp_shape = [64, 64]\nin_channels = 1\nout_channels = 1").unwrap();
    assert_eq!(config, AfnoConfig::new([64, 64], 1, 1));
    let error = toml::from_str::<AfnoConfig>("inp_shape = [64, 64]\nin_chanels = 1").unwrap_err().to_string();
    assert!(error.contains("unknown field `in_chanels`"), "{error}");
    let error = toml::from_str::<AfnoConfig>("in_channels = 1\nout_channels = 1").unwrap_err().to_string();
    assert!(error.contains("missing field `inp_shape`"), "{error}");
    let one: FullyConnectedConfig = toml::from_str("activation_fn = \"leaky_relu\"").unwrap();
    assert_eq!(one.activation_fn, [Activation::LeakyRelu]);
    let many: FullyConnectedConfig = toml::from_str("activation_fn = [\"tanh\", \"logsigmoid\"]").unwrap();
    assert_eq!(many.activation_fn, [Activation::Tanh, Activation::LogSigmoid]);
    for unknown in ["activation_fn = \"swish\"", "activation_fn = [\"swish\"]"] {
        let error = toml::from_str::<FullyConnectedConfig>(unknown).unwrap_err().to_string();
        assert!(error.contains("unknown variant `swish`, expected one of "), "{error}");
        assert!(error.contains("`leaky_relu`"), "{error}");
    }
    let none = r#"{"in_channels": 1, "out_channels": 1, "normalization": null, "conv_activation": null}"#;
    let config: UNetConfig = serde_json::from_str(none).unwrap();
    let want = UNetConfig { conv_activation: Activation::Identity, ..UNetConfig::new(1, 1) };
    assert_eq!(config, UNetConfig { normalization: Normalization::None, ..want });
    let config: UNetConfig = toml::from_str(
        "in_channels = 1\nout_channels = 1\npooling_type = \"AvgPool2d\"\nnormalization = \"batchnorm\"",
    )
    .unwrap();
    assert_eq!((config.pooling_type, config.normalization), (Pooling::Avg, Normalization::BatchNorm));
    assert_eq!(toml::from_str::<UNetConfig>(&toml::to_string(&config).unwrap()).unwrap(), config);
    let config: UNetConfig = toml::from_str(
        "in_channels = 1\nout_channels = 1\nkernel_size = [3, 3, 1]\npadding = [1, 1, 0]\nstride = 1\n\
         conv_activation = \"mish\"\nconv_transpose_activation = \"hardsigmoid\"\n\
         normalization_args = { affine = false, num_groups = 4 }",
    )
    .unwrap();
    let want = UNetConfig {
        kernel_size: PerDim::Each(vec![3, 3, 1]),
        padding: PerDim::Each(vec![1, 1, 0]).into(),
        conv_activation: Activation::Mish,
        conv_transpose_activation: Activation::Hardsigmoid,
        normalization_args: Some(NormalizationArgs { num_groups: 4, affine: false, ..Default::default() }),
        ..UNetConfig::new(1, 1)
    };
    assert_eq!(config, want);
    assert_eq!(toml::from_str::<UNetConfig>(&toml::to_string(&config).unwrap()).unwrap(), config);
    let written = toml::to_string(&small()).unwrap();
    assert_eq!(toml::from_str::<AfnoConfig>(&written).unwrap(), small());
}

#[rstest]
#[case(Activation::LeakyRelu, |x: f64| if x > 0.0 { x } else { 0.1 * x })]
#[case(Activation::Prelu, |x: f64| if x > 0.0 { x } else { 0.25 * x })]
#[case(Activation::Relu6, |x: f64| x.clamp(0.0, 6.0))]
#[case(Activation::Hardtanh, |x: f64| x.clamp(-1.0, 1.0))]
#[case(Activation::Threshold, |x: f64| x.max(1.0))]
#[case(Activation::Squareplus, |x: f64| (x + (x * x + 4.0).sqrt()) / 2.0)]
#[case(Activation::Stan, |x: f64| x.tanh() * (1.0 + x))]
#[case(Activation::CappekLeakyRelu, |x: f64| if x > 0.0 { x.min(1.0) } else { 0.01 * x })]
#[case(Activation::Identity, |x: f64| x)]
#[case(Activation::Sin, f64::sin)]
#[case(Activation::Tanhshrink, |x: f64| x - x.tanh())]
#[case(Activation::Mish, |x: f64| x * x.exp().ln_1p().tanh())]
#[case(Activation::Hardswish, |x: f64| x * (x / 6.0 + 0.5).clamp(0.0, 1.0))]
#[case(Activation::Hardshrink, |x: f64| if x.abs() > 0.5 { x } else { 0.0 })]
#[case(Activation::Softshrink, |x: f64| x.signum() * (x.abs() - 0.5).max(0.0))]
fn activations(#[case] activation: Activation, #[case] function: fn(f64) -> f64) {
    // One feature, one hidden layer, unit weights: the network is the activation.
    let config = FullyConnectedConfig {
        in_features: 1,
        layer_size: 1,
        out_features: 1,
        num_layers: 1,
        activation_fn: vec![activation],
        ..Default::default()
    };
    let mut params = store().with_options(Kind::Double, Device::Cpu);
    let model = FullyConnected::new(&config, &mut params).unwrap();
    tch::no_grad(|| {
        for parameter in params.parameters().iter().filter(|p| p.name.ends_with("linear.weight")) {
            let _ = parameter.tensor.shallow_clone().fill_(1.0);
        }
    });
    let x = random(&[50, 1], Kind::Double) * 3.0;
    let values = Vec::<f64>::try_from(x.reshape([-1])).unwrap();
    let want: Vec<f64> = values.into_iter().map(function).collect();
    let got = model.forward(&x).unwrap().reshape([-1]);
    assert!(max_error(&got, &Tensor::from_slice(&want)) < 1e-12);
}

#[test]
fn activations_bring_their_state() {
    let names = |activation| {
        let config =
            FullyConnectedConfig { num_layers: 2, activation_fn: vec![activation], ..Default::default() };
        let mut params = store();
        FullyConnected::new(&config, &mut params).unwrap();
        let all = params.parameters().iter().map(|p| (p.name.clone(), p.trainable));
        all.filter(|(name, _)| name.contains("activation_fn")).collect::<Vec<_>>()
    };
    let two = |name: &str, trainable| {
        [0, 1].map(|i| (format!("layers.{i}.activation_fn.{name}"), trainable)).to_vec()
    };
    assert_eq!(names(Activation::Prelu), two("weight", true));
    assert_eq!(names(Activation::CappedGelu), two("cap", false));
    assert_eq!(names(Activation::Silu), []);
}

#[test]
fn weight_norm_and_weight_fact_start_as_plain_weights() {
    let x = random(&[5, 8], Kind::Float);
    let output = |weight_norm, weight_fact| {
        let config = FullyConnectedConfig {
            in_features: 8,
            layer_size: 8,
            out_features: 8,
            num_layers: 2,
            weight_norm,
            weight_fact,
            ..Default::default()
        };
        let mut params = store();
        let model = FullyConnected::new(&config, &mut params).unwrap();
        (model.forward(&x).unwrap(), params)
    };
    let (plain, _) = output(false, false);
    let (fact, params) = output(false, true);
    assert!(max_error(&plain, &fact) < 1e-5);
    let g = &params.get("layers.0.linear.g").unwrap().tensor;
    assert!((g.log().mean(Kind::Double).double_value(&[]) - 1.0).abs() < 0.2);
    let (_, params) = output(true, false);
    assert_eq!(
        params.get("layers.1.linear.weight_g").unwrap().tensor.detach(),
        Tensor::ones([8, 1], (Kind::Float, Device::Cpu))
    );
}

#[test]
fn dropout_is_the_same_for_parts_of_a_batch() {
    let config = AfnoConfig { drop_rate: 0.3, ..small() };
    let mut params = store();
    let model = Afno::new(&config, &mut params).unwrap();
    let x = random(&[5, 2, 16, 12], Kind::Float);
    let whole = model.forward(&x, Mode::train(&Generator::new(9))).unwrap();
    for (offset, count) in [(0, 2), (2, 3)] {
        let part =
            model.forward(&x.narrow(0, offset, count), Mode::train_part(&Generator::new(9), offset, 5));
        assert!(max_error(&part.unwrap(), &whole.narrow(0, offset, count)) < 1e-5);
    }
    let eval = model.forward(&x, Mode::Eval).unwrap();
    assert!(max_error(&eval, &whole) > 1e-3);
    let again = model.forward(&x, Mode::train(&Generator::new(9))).unwrap();
    assert_eq!(again, whole);
}

/// With every mode kept the corrected window is the whole spectrum, as is PhysicsNeMo's on a square grid; of fewer modes it has
/// the low ones.
#[test]
fn corrected_modes_are_the_low_ones() {
    let base = AfnoConfig { inp_shape: [24, 12], ..small() };
    let x = random(&[2, 2, 24, 12], Kind::Double);
    // 6 x 6 tokens.
    let run = |x: &Tensor, fraction, corrected_modes| {
        let config =
            AfnoConfig { hard_thresholding_fraction: fraction, corrected_modes, depth: 1, ..base.clone() };
        let mut params = store().with_options(Kind::Double, Device::Cpu);
        let model = Afno::new(&config, &mut params).unwrap();
        let output = model.forward(x, Mode::Eval).unwrap();
        output.square().sum(Kind::Double).backward();
        (output, params.trainable().map(|p| p.tensor.grad()).collect::<Vec<_>>())
    };
    let ((whole, whole_grads), (corrected, grads)) = (run(&x, 1.0, false), run(&x, 1.0, true));
    assert!(max_error(&whole, &corrected) < 1e-12);
    for (got, want) in grads.iter().zip(&whole_grads) {
        assert!(max_error(got, want) < 1e-10);
    }
    assert!(max_error(&run(&x, 0.5, false).0, &run(&x, 0.5, true).0) > 1e-9);
}

/// A window that holds no mode leaves the filter's input, as a filter whose weights are zero does.
#[test]
fn no_mode_kept() {
    let x = random(&[2, 2, 16, 12], Kind::Double);
    let run = |fraction, zeros: bool| {
        let config = AfnoConfig { hard_thresholding_fraction: fraction, ..small() };
        let mut params = store().with_options(Kind::Double, Device::Cpu);
        let model = Afno::new(&config, &mut params).unwrap();
        let filter = |name: &str| name.contains(".filter.");
        tch::no_grad(|| {
            for parameter in params.parameters().iter().filter(|p| zeros && filter(&p.name)) {
                let _ = parameter.tensor.shallow_clone().fill_(0.0);
            }
        });
        let output = model.forward(&x, Mode::Eval).unwrap();
        output.sum(Kind::Double).backward();
        let grads: Vec<Tensor> = params.trainable().map(|p| p.tensor.grad()).collect();
        (output, grads)
    };
    // 4 x 6 tokens: a third of 3 modes is the first to be one.
    let ((got, got_grads), (want, want_grads)) = (run(0.3, false), run(1.0, true));
    assert!(max_error(&got, &want) < 1e-12);
    assert!(max_error(&got, &run(0.34, false).0) > 1e-9);
    for (got, want) in got_grads.iter().zip(&want_grads) {
        assert!(max_error(got, want) < 1e-12);
    }
}

#[rstest]
#[case(Kind::Double, 1e-4)]
#[case(Kind::BFloat16, 0.2)]
fn other_kinds(#[case] kind: Kind, #[case] tolerance: f64) {
    let mut params = store();
    let model = Afno::new(&small(), &mut params).unwrap();
    let x = random(&[2, 2, 16, 12], Kind::Float);
    let single = model.forward(&x, Mode::Eval).unwrap();
    params.set_kind(kind).unwrap();
    let other = model.forward(&x.to_kind(kind), Mode::Eval).unwrap();
    assert_eq!(other.kind(), kind);
    assert!(max_error(&other.to_kind(Kind::Float), &single) < tolerance);
    other.sum(Kind::Float).backward();
    assert!(params.trainable().all(|p| p.tensor.grad().kind() == kind));
}

fn max_error(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    if a.numel() == 0 { 0.0 } else { (a - b).abs().max().double_value(&[]) }
}
