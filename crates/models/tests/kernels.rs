//! Even kernels, strides and paddings of convolutional models.

use isobar_array::{Generator, Window};
use isobar_models::{
    Activation, Architecture, FieldSpec, Mode, ModelConfig, Normalization, PaddingMode, PerDim, Split,
    SrResNet, SrResNetConfig, SrResNetPadding, UNet, UNetConfig, UNetPadding, Upsampling,
};
use isobar_shard::ParamStore;
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common::received;
use crate::common::twin::{Axis, Twin, split};

fn images() -> UNetConfig {
    UNetConfig {
        dimension: 2,
        model_depth: 2,
        feature_map_channels: vec![3, 4, 5, 5],
        padding: UNetPadding::SAME,
        ..UNetConfig::new(2, 1)
    }
}

/// A single level, of one convolution and the last one.
fn flat(kernel: Vec<usize>, stride: Vec<usize>, padding: Vec<usize>) -> UNetConfig {
    UNetConfig {
        model_depth: 1,
        num_conv_blocks: 1,
        feature_map_channels: vec![3],
        kernel_size: PerDim::Each(kernel),
        stride: PerDim::Each(stride),
        padding: PerDim::Each(padding).into(),
        normalization: Normalization::None,
        conv_activation: Activation::Identity,
        ..images()
    }
}

fn twin(config: ModelConfig, input: Vec<i64>, target: Vec<i64>) -> Twin {
    Twin::new(config, &[("fields", input)], &[("fields", target)])
}

#[rstest]
#[case::even(UNetConfig { kernel_size: PerDim::All(4), ..images() })]
#[case::mixed_periodic(UNetConfig {
    kernel_size: PerDim::Each(vec![2, 5]),
    padding_mode: PaddingMode::Circular,
    ..images()
})]
#[case::reflected(UNetConfig { kernel_size: PerDim::All(4), padding_mode: PaddingMode::Reflect, ..images() })]
#[case::interpolated(UNetConfig {
    kernel_size: PerDim::All(2),
    padding_mode: PaddingMode::Replicate,
    upsampling: Upsampling::Nearest,
    ..images()
})]
fn unet_with_even_kernels_is_the_dense_one_split(
    #[case] config: UNetConfig,
    #[values(split(&[(2, 2)]), split(&[(3, 3)]), split(&[(4, 2)]), split(&[(2, 2), (2, 3)]))] axes: Vec<Axis>,
) {
    twin(ModelConfig::new(config), vec![2, 2, 12, 8], vec![2, 1, 12, 8]).check(&axes);
}

#[rstest]
#[case::halved_twice(flat(vec![4, 4], vec![2, 2], vec![1, 1]), [4, 2])]
#[case::uneven(flat(vec![3, 2], vec![3, 1], vec![2, 0]), [3, 6])]
#[case::growing(flat(vec![2, 1], vec![1, 1], vec![2, 1]), [22, 12])]
fn unet_with_strides_is_the_dense_one_split(
    #[case] config: UNetConfig,
    #[case] target: [i64; 2],
    #[values(split(&[(2, 2)]), split(&[(3, 3)]), split(&[(4, 2)]), split(&[(2, 2), (2, 3)]))] axes: Vec<Axis>,
) {
    twin(ModelConfig::new(config), vec![2, 2, 16, 8], [&[2, 1], &target[..]].concat()).check(&axes);
}

/// Strides of several levels, and extents that no pooling divides: upsampling brings each level back to its skip connection.
#[rstest]
#[case::strided(UNetConfig { stride: PerDim::All(2), upsampling: Upsampling::Linear, ..images() }, [21, 18])]
#[case::even_reflected(UNetConfig {
    kernel_size: PerDim::Each(vec![4, 2]),
    stride: PerDim::Each(vec![1, 3]),
    padding_mode: PaddingMode::Reflect,
    upsampling: Upsampling::Nearest,
    num_conv_blocks: 1,
    feature_map_channels: vec![3, 4],
    ..images()
}, [13, 19])]
#[case::three_levels(UNetConfig {
    model_depth: 3,
    feature_map_channels: vec![3, 3, 4, 4, 5, 5],
    upsampling: Upsampling::Linear,
    use_attn_gate: true,
    attn_intermediate_channels: Some(2),
    ..images()
}, [13, 11])]
fn unet_that_upsamples_to_its_skips_is_the_dense_one_split(
    #[case] config: UNetConfig,
    #[case] extents: [i64; 2],
    #[values(split(&[(2, 2)]), split(&[(3, 3)]), split(&[(4, 2)]), split(&[(2, 2), (2, 3)]))] axes: Vec<Axis>,
) {
    twin(ModelConfig::new(config), [&[2, 2], &extents[..]].concat(), [&[2, 1], &extents[..]].concat())
        .check(&axes);
}

/// A rank receives halos only: within the model's bound, and as much with twice the rows.
#[test]
fn strided_levels_exchange_halos() {
    let config = UNetConfig { stride: PerDim::All(2), upsampling: Upsampling::Linear, ..images() };
    let exchanged =
        |rows: i64| received(&ModelConfig::new(config.clone()), &[("fields", vec![1, 2, rows, 18])], 2);
    assert_eq!(exchanged(1024), exchanged(2048));
    for rows in [509, 1024] {
        let split = Split::new(4, &[(1, 1, 1), (rows, (rows + 3) / 4, 4), (18, 18, 1)], 0);
        let bound = config.traffic(&split).unwrap().forward * 4.0;
        for (forward, _, both) in exchanged(rows) {
            assert!(forward as f64 <= bound && both as f64 <= 3.0 * bound, "{forward} {both} {bound}");
        }
    }
}

/// ⌈n / stride⌉ after each convolution of the encoder, and the result against PyTorch's operators.
#[test]
fn strided_levels_are_pytorchs_operators() {
    let config = UNetConfig {
        kernel_size: PerDim::Each(vec![4, 3]),
        stride: PerDim::All(2),
        upsampling: Upsampling::Linear,
        num_conv_blocks: 1,
        feature_map_channels: vec![3, 4],
        normalization: Normalization::None,
        conv_activation: Activation::Identity,
        ..images()
    };
    let mut params = ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu);
    let model = UNet::new(&config, &mut params).unwrap();
    let double = (Kind::Double, Device::Cpu);
    let x = Generator::new(3).normal(&Window::whole(&[2, 2, 15, 18]), 0.0, 1.0, double).unwrap();
    let value = |name: &str| &params.get(name).unwrap().tensor;
    let convolve = |x: &Tensor, layer: &str, stride: i64| {
        let [weight, bias] = ["weight", "bias"].map(|name| value(&format!("{layer}.conv2d.{name}")));
        x.pad([1, 1, 1, 2], "constant", None).conv2d(weight, Some(bias), [stride; 2], [0, 0], [1, 1], 1)
    };
    let resize = |x: &Tensor, size: [i64; 2]| x.upsample_bilinear2d(size, false, None, None);
    let skip = convolve(&x, "encoder.layers.0", 2);
    assert_eq!(skip.size(), [2, 3, 8, 9]);
    let below = convolve(&skip.max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false), "encoder.layers.2", 2);
    assert_eq!(below.size(), [2, 4, 2, 2]);
    let up = convolve(&resize(&below, [8, 9]), "decoder.layers.0", 1);
    let y = convolve(&Tensor::cat(&[up, skip], 1), "decoder.layers.1", 1);
    let want = convolve(&resize(&y, [15, 18]), "decoder.layers.2", 1);
    let got = model.forward(&x, Mode::Eval).unwrap();
    assert!((got - want).abs().max().double_value(&[]) < 1e-12);
}

#[rstest]
fn super_resolution_with_even_kernels_is_the_dense_one_split(
    #[values(split(&[(2, 2)]), split(&[(3, 3)]), split(&[(4, 4)]), split(&[(2, 2), (2, 4)]))] axes: Vec<Axis>,
) {
    let config = SrResNetConfig {
        large_kernel_size: 4,
        small_kernel_size: 2,
        padding: SrResNetPadding::Same,
        conv_layer_size: 3,
        n_resid_blocks: 1,
        scaling_factor: 2,
        ..SrResNetConfig::new(2, 1)
    };
    twin(ModelConfig::new(config), vec![2, 2, 5, 4, 4], vec![2, 1, 10, 8, 8]).check(&axes);
}

#[test]
fn strides_and_paddings_are_pytorchs() {
    let mut params = ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu);
    let model = UNet::new(&flat(vec![4, 3], vec![2, 3], vec![1, 2]), &mut params).unwrap();
    let x = Generator::new(3)
        .normal(&Window::whole(&[2, 2, 15, 14]), 0.0, 1.0, (Kind::Double, Device::Cpu))
        .unwrap();
    let value = |name: &str| &params.get(name).unwrap().tensor;
    let convolve = |x: &Tensor, layer: &str| {
        let bias = value(&format!("{layer}.conv2d.bias"));
        x.conv2d(value(&format!("{layer}.conv2d.weight")), Some(bias), [2, 3], [1, 2], [1, 1], 1)
    };
    let want = convolve(&convolve(&x, "encoder.layers.0"), "decoder.layers.0");
    let got = model.forward(&x, Mode::Eval).unwrap();
    assert!((got - want).abs().max().double_value(&[]) < 1e-12);
}

#[test]
fn small_fields_fit_strides_in_several_levels() {
    let config = UNetConfig { padding: PerDim::All(1).into(), stride: PerDim::All(2), ..images() };
    let config = UNetConfig { num_conv_blocks: 1, feature_map_channels: vec![3, 4], ..config };
    config.check_extents(&[4, 3]).unwrap();
    let model = UNet::new(&config, &mut ParamStore::new(Generator::new(1))).unwrap();
    let y = model.forward(&Tensor::zeros([1, 2, 4, 3], (Kind::Float, Device::Cpu)), Mode::Eval);
    assert_eq!(y.unwrap().size(), [1, 1, 1, 1]);
}

#[test]
fn extents_that_do_not_fit_are_refused() {
    let config = UNetConfig { kernel_size: PerDim::All(4), padding: PerDim::All(1).into(), ..images() };
    let error = config.check_extents(&[12, 8]).unwrap_err().to_string();
    assert_eq!(
        error,
        "unet: fields of [12, 8] do not fit kernel_size [4, 4], stride [1, 1] and padding [1, 1]: 6 points after \
         upsampling to level 0, expected 10 along dim 0; --set 'model.padding=\"same\"' --set model.stride=1"
    );
    let model = UNet::new(&config, &mut ParamStore::new(Generator::new(1))).unwrap();
    let x = Tensor::zeros([1, 2, 12, 8], (Kind::Float, Device::Cpu));
    let error = model.forward(&x, Mode::Eval).unwrap_err().to_string();
    assert!(
        error.contains("which kernel_size [4, 4], stride [1, 1] and padding [1, 1] fit: 6 points"),
        "{error}"
    );
    let error = model.forward(&x.get(0), Mode::Eval).unwrap_err().to_string();
    assert!(error.ends_with("expected [batch, 2, height, width]"), "{error}");
    UNetConfig { padding: UNetPadding::SAME, ..config }.check_extents(&[12, 8]).unwrap();

    let strided = UNetConfig { stride: PerDim::All(2), ..images() };
    let error = strided.check_extents(&[16, 8]).unwrap_err().to_string();
    assert!(error.contains("transposed convolutions need 1; --set 'model.upsampling=\"linear\"'"), "{error}");
    let strided = UNetConfig { upsampling: Upsampling::Linear, ..strided };
    strided.check_extents(&[5, 7]).unwrap();
    let error = strided.check_extents(&[4, 7]).unwrap_err().to_string();
    assert!(error.contains("extents of at least 5; --set"), "{error}");
    let fine = UNetConfig { stride: PerDim::All(1), ..strided };
    fine.check_extents(&[3, 2]).unwrap();
    assert!(fine.check_extents(&[1, 2]).unwrap_err().to_string().contains("extents of at least 2"));

    let fields = FieldSpec {
        source: "f.h5".into(),
        extents: vec![16, 8],
        in_channels: 2,
        out_channels: 1,
        ..FieldSpec::default()
    };
    let error = flat(vec![4, 4], vec![2, 2], vec![1, 1]).check(&fields).unwrap_err().to_string();
    assert!(error.contains("for inputs of [16, 8] points the model's outputs have [4, 2]"), "{error}");
    let coarse = FieldSpec { target_extents: Some(vec![4, 2]), ..fields };
    flat(vec![4, 4], vec![2, 2], vec![1, 1]).check(&coarse).unwrap();
    let error = flat(vec![4, 9], vec![2, 1], vec![1, 0]).check_extents(&[16, 8]).unwrap_err().to_string();
    assert!(error.contains("8 points remain along dim 1 for a kernel of 9"), "{error}");
}

#[test]
fn paddings_are_words_or_numbers() {
    let of = |padding: &str| -> UNetConfig {
        toml::from_str(&format!("in_channels = 1\nout_channels = 1\n{padding}")).unwrap()
    };
    assert_eq!(of("padding = \"same\"").padding, UNetPadding::SAME);
    assert_eq!(of("padding = 2").padding, PerDim::All(2).into());
    let config = of("padding = \"same\"");
    assert_eq!(toml::from_str::<UNetConfig>(&toml::to_string(&config).unwrap()).unwrap(), config);
    let error = toml::from_str::<UNetConfig>("in_channels = 1\nout_channels = 1\npadding = \"valid\"");
    assert!(error.unwrap_err().to_string().contains("expected \"same\", a number, or a list"));

    let even = SrResNetConfig { small_kernel_size: 6, ..SrResNetConfig::new(1, 1) };
    let error = SrResNet::new(&even, &mut ParamStore::new(Generator::new(1))).unwrap_err().to_string();
    assert!(error.ends_with("expected an odd number; --set model.padding=same takes even ones"), "{error}");
}
