//! Convolutional models over sharded fields against themselves on one rank: outputs, gradients and training in double precision,
//! losses in single precision as far as rounding lets them.

use isobar_models::{
    Activation, CNextUNetConfig, ConvNetConfig, ModelConfig, Normalization, NormalizationArgs, PaddingMode,
    PerDim, Pix2PixConfig, Pix2PixPadding, Pooling, SrResNetConfig, UNetConfig, Upsampling,
};
use rstest::rstest;

use crate::common::twin::{Axis, Twin, split};

fn twin(config: ModelConfig, input: Vec<i64>, target: Vec<i64>) -> Twin {
    Twin::new(config, &[("fields", input)], &[("fields", target)])
}

fn unet(config: UNetConfig, extents: &[i64]) -> Twin {
    let shape = |channels: usize| [&[2, channels as i64], extents].concat();
    let (input, target) = (shape(config.in_channels), shape(config.out_channels));
    twin(ModelConfig::new(config), input, target)
}

fn volumes() -> UNetConfig {
    UNetConfig { model_depth: 3, feature_map_channels: vec![3, 4, 4, 5, 6, 6], ..UNetConfig::new(2, 3) }
}

fn images() -> UNetConfig {
    UNetConfig { dimension: 2, ..volumes() }
}

fn super_resolution(scaling_factor: usize) -> Twin {
    let config = SrResNetConfig {
        large_kernel_size: 5,
        conv_layer_size: 3,
        n_resid_blocks: 2,
        scaling_factor,
        ..SrResNetConfig::new(2, 1)
    };
    let target = [&[2, 1], &[5, 4, 3].map(|extent| extent * scaling_factor as i64)[..]].concat();
    twin(ModelConfig::new(config), vec![2, 2, 5, 4, 3], target)
}

fn pix2pix(config: Pix2PixConfig, extents: &[i64]) -> Twin {
    let finer = 1 << config.n_upsampling.saturating_sub(config.n_downsampling);
    let fine: Vec<i64> = extents.iter().map(|extent| extent * finer).collect();
    let input = [&[2, config.in_channels as i64], extents].concat();
    let target = [&[2, config.out_channels as i64], &fine[..]].concat();
    twin(ModelConfig::new(config), input, target)
}

fn translation(dimension: usize) -> Pix2PixConfig {
    Pix2PixConfig {
        conv_layer_size: 3,
        n_downsampling: 1,
        n_upsampling: 1,
        n_blocks: 2,
        ..Pix2PixConfig::new(2, 1, dimension)
    }
}

#[rstest]
#[case::group_norm(volumes())]
#[case::gates_layer_norm_circular(UNetConfig {
    model_depth: 2,
    feature_map_channels: vec![3, 4],
    num_conv_blocks: 1,
    conv_activation: Activation::Silu,
    conv_transpose_activation: Activation::Tanh,
    pooling_type: Pooling::Avg,
    padding_mode: PaddingMode::Circular,
    normalization: Normalization::LayerNorm,
    use_attn_gate: true,
    attn_intermediate_channels: Some(2),
    ..volumes()
})]
#[case::flat_kernels_plain_groups_reflect(UNetConfig {
    model_depth: 2,
    feature_map_channels: vec![4, 4, 6, 6],
    kernel_size: PerDim::Each(vec![3, 1, 5]),
    padding: PerDim::Each(vec![1, 0, 2]).into(),
    padding_mode: PaddingMode::Reflect,
    conv_activation: Activation::Mish,
    conv_transpose_activation: Activation::Hardswish,
    normalization_args: Some(NormalizationArgs { num_groups: 2, affine: false, ..Default::default() }),
    ..volumes()
})]
fn unet_of_volumes(
    #[case] config: UNetConfig,
    #[values(split(&[(2, 2)]), split(&[(3, 2)]), split(&[(4, 2)]), split(&[(2, 3)]), split(&[(2, 2), (2, 3)]), split(&[(2, 0), (2, 4)]))]
    axes: Vec<Axis>,
) {
    unet(config, &[16, 12, 8]).check(&axes);
}

#[rstest]
#[case::transposed_groups(UNetConfig {
    feature_map_channels: vec![4, 4, 6, 6, 8, 8],
    normalization_args: Some(NormalizationArgs { num_groups: 2, eps: 1e-3, ..Default::default() }),
    ..images()
})]
#[case::nearest_batch_norm_circular(UNetConfig {
    upsampling: Upsampling::Nearest,
    normalization: Normalization::BatchNorm,
    padding_mode: PaddingMode::Circular,
    ..images()
})]
#[case::linear_no_norm_reflect(UNetConfig {
    model_depth: 2,
    feature_map_channels: vec![3, 4, 5, 5],
    pool_size: 3,
    upsampling: Upsampling::Linear,
    normalization: Normalization::None,
    padding_mode: PaddingMode::Reflect,
    ..images()
})]
#[case::wide_kernel_replicate(UNetConfig {
    model_depth: 2,
    feature_map_channels: vec![3, 4, 5, 5],
    kernel_size: PerDim::All(5),
    padding: PerDim::All(2).into(),
    padding_mode: PaddingMode::Replicate,
    ..images()
})]
#[case::gates_of_two_convolutions(UNetConfig {
    use_attn_gate: true,
    attn_intermediate_channels: Some(3),
    ..images()
})]
fn unet_of_images(
    #[case] config: UNetConfig,
    #[values(split(&[(2, 2)]), split(&[(3, 3)]), split(&[(4, 2)]), split(&[(2, 2), (2, 3)]))] axes: Vec<Axis>,
) {
    unet(config, &[24, 12]).check(&axes);
}

#[rstest]
fn sr_res_net(
    #[values(split(&[(2, 2)]), split(&[(3, 2)]), split(&[(4, 3)]), split(&[(2, 2), (2, 3)]), split(&[(2, 0), (2, 2)]))]
    axes: Vec<Axis>,
) {
    super_resolution(4).check(&axes);
}

#[rstest]
#[case::images(&[16, 12], false)]
#[case::recomputed_volumes(&[8, 12, 4], true)]
fn cnext_unet_is_the_same_on_shards(
    #[case] extents: &[usize],
    #[case] gradient_checkpointing: bool,
    #[values(split(&[(2, 2)]), split(&[(3, 2)]), split(&[(4, 2)]), split(&[(2, 0), (2, 2)]), split(&[(2, 2), (2, 3)]))]
    axes: Vec<Axis>,
) {
    cnext_unet(extents, gradient_checkpointing).check(&axes);
}

fn conv_net(config: ConvNetConfig, extents: &[i64]) -> Twin {
    let shape = |channels: usize| [&[2, channels as i64], extents].concat();
    let (input, target) = (shape(config.in_channels), shape(config.out_channels));
    twin(ModelConfig::new(config), input, target)
}

fn convolutions(dimension: usize) -> ConvNetConfig {
    ConvNetConfig {
        hidden_channels: 3,
        depth: 3,
        activation_fn: Activation::Gelu,
        padding_mode: PaddingMode::Circular,
        ..ConvNetConfig::new(2, 1, dimension)
    }
}

#[rstest]
#[case::periodic(convolutions(2), &[9, 7])]
#[case::zeros_wide(ConvNetConfig { kernel_size: 5, padding_mode: PaddingMode::Zeros, ..convolutions(2) }, &[9, 7])]
#[case::recomputed_volumes(ConvNetConfig { gradient_checkpointing: true, ..convolutions(3) }, &[8, 6, 4])]
fn conv_net_is_the_same_on_shards(
    #[case] config: ConvNetConfig,
    #[case] extents: &[i64],
    #[values(split(&[(2, 2)]), split(&[(3, 2)]), split(&[(4, 2)]), split(&[(2, 0), (2, 2)]), split(&[(2, 2), (2, 3)]))]
    axes: Vec<Axis>,
) {
    conv_net(config, extents).check(&axes);
}

#[rstest]
fn models_of_lines(
    #[values(
        cnext_unet(&[20], false),
        pix2pix(translation(1), &[20]),
        conv_net(ConvNetConfig { depth: 10, ..convolutions(1) }, &[40])
    )]
    model: Twin,
    #[values(split(&[(2, 2)]), split(&[(3, 2)]), split(&[(4, 2)]), split(&[(2, 0), (2, 2)]))] axes: Vec<Axis>,
) {
    model.check(&axes);
}

fn cnext_unet(extents: &[usize], gradient_checkpointing: bool) -> Twin {
    let config = CNextUNetConfig {
        stages: 2,
        init_features: 3,
        blocks_per_stage: 2,
        gradient_checkpointing,
        ..CNextUNetConfig::new(2, 1, extents)
    };
    let shape = |channels: i64| [2, channels].into_iter().chain(extents.iter().map(|&n| n as i64)).collect();
    // The blocks' factors begin at 1e-6: without noise they hardly count.
    twin(ModelConfig::new(config), shape(2), shape(1)).perturbed(5)
}

#[rstest]
#[case::images_batch_norm_prelu(Pix2PixConfig {
    n_downsampling: 2,
    n_upsampling: 2,
    batch_norm: true,
    activation_fn: Activation::Prelu,
    ..translation(2)
}, &[16, 12])]
#[case::images_replicate(Pix2PixConfig { padding_type: Pix2PixPadding::Replicate, ..translation(2) }, &[16, 12])]
#[case::images_on_a_finer_grid(Pix2PixConfig { n_upsampling: 2, padding_type: Pix2PixPadding::Zero, ..translation(2) }, &[16, 12])]
#[case::recomputed_volumes(Pix2PixConfig { gradient_checkpointing: true, ..translation(3) }, &[8, 6, 4])]
fn pix2pix_is_the_same_on_shards(
    #[case] config: Pix2PixConfig,
    #[case] extents: &[i64],
    #[values(split(&[(2, 2)]), split(&[(3, 2)]), split(&[(4, 2)]), split(&[(2, 0), (2, 2)]), split(&[(2, 2), (2, 3)]))]
    axes: Vec<Axis>,
) {
    pix2pix(config, extents).check(&axes);
}

#[rstest]
#[case::unet_of_volumes(unet(volumes(), &[8, 4, 4]))]
#[case::pix2pix(pix2pix(translation(2), &[16, 12]))]
#[case::unet_of_images(unet(images(), &[12, 8]))]
#[case::sr_res_net(super_resolution(2))]
fn losses_in_single_precision(
    #[case] model: Twin,
    #[values(split(&[(2, 2)]), split(&[(3, 2)]), split(&[(4, 2)]), split(&[(2, 2), (2, 3)]), split(&[(2, 0), (2, 2)]))]
    axes: Vec<Axis>,
) {
    model.check_losses(&axes);
}

#[rstest]
#[case::cnext_unet(cnext_unet(&[16, 12], false))]
#[case::conv_net(conv_net(convolutions(2), &[9, 7]))]
fn first_steps_in_single_precision(#[case] model: Twin) {
    model.check_single(&split(&[(2, 2), (2, 3)]));
}

#[rstest]
#[case::pix2pix(pix2pix(translation(2), &[16, 12]))]
#[case::cnext_unet(cnext_unet(&[16, 12], false))]
#[case::conv_net(conv_net(convolutions(2), &[9, 7]))]
#[case::sr_res_net(super_resolution(2))]
fn first_ranks_without_a_part(
    #[case] model: Twin,
    #[values(split(&[(2, 2)]), split(&[(3, 3)]), split(&[(2, 2), (2, 3)]))] axes: Vec<Axis>,
) {
    model.with_empty_shards().check(&axes);
}
