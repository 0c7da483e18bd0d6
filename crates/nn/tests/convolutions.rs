//! Convolutions and transposed convolutions.

use isobar_array::{Conv, PadMode, Padding};
use isobar_nn::{
    Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, PatchEmbed, SpectralConv,
    SpectralOptions,
};
use tch::{Kind, Tensor};

use crate::case::{layer_test, normal};

layer_test!(conv1d, inputs: [normal(1, &[2, 4, 12])], splits: &[&[0], &[2]], training: false,
    make: |params| Conv1d::new(4, 6, [3], Conv { padding: Padding::Each(vec![2]), dilation: vec![2], groups: 2, ..Conv::default() }, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].conv1d(&p.get("weight"), Some(p.get("bias")), 1, 2, 2, 2));

layer_test!(conv2d, inputs: [normal(1, &[2, 3, 10, 8])], splits: &[&[0], &[2], &[3]], training: false,
    make: |params| Conv2d::new(3, 5, [3, 3], Conv { padding: Padding::Each(vec![1]), stride: vec![2], ..Conv::default() }, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].conv2d(&p.get("weight"), Some(p.get("bias")), [2, 2], [1, 1], [1, 1], 1));

layer_test!(conv2d_periodic_without_bias, inputs: [normal(1, &[2, 3, 10, 8])], splits: &[&[2], &[3]], training: false,
    make: |params| Conv2d::without_bias(3, 5, [3, 3], Conv { padding: Padding::Each(vec![1]), padding_mode: PadMode::Circular, ..Conv::default() }, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].pad([1, 1, 1, 1], "circular", None).conv2d(&p.get("weight"), None::<Tensor>, [1, 1], [0, 0], [1, 1], 1));

layer_test!(conv3d, inputs: [normal(1, &[2, 2, 6, 4, 5])], splits: &[&[2], &[3]], training: false,
    make: |params| Conv3d::new(2, 3, [3, 3, 3], Conv { padding: Padding::Same, ..Conv::default() }, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].conv3d(&p.get("weight"), Some(p.get("bias")), [1, 1, 1], [1, 1, 1], [1, 1, 1], 1));

layer_test!(conv_transpose1d, inputs: [normal(1, &[2, 4, 6])], splits: &[&[0], &[2]], training: false,
    make: |params| ConvTranspose1d::new(4, 6, [3], Conv { padding: Padding::Each(vec![1]), stride: vec![2], groups: 2, ..Conv::default() }, &[1], params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].conv_transpose1d(&p.get("weight"), Some(p.get("bias")), 2, 1, 1, 2, 1));

layer_test!(conv_transpose2d, inputs: [normal(1, &[2, 3, 4, 6])], splits: &[&[2], &[3]], training: false,
    make: |params| ConvTranspose2d::new(3, 5, [2, 2], Conv { stride: vec![2], ..Conv::default() }, &[0], params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].conv_transpose2d(&p.get("weight"), Some(p.get("bias")), [2, 2], [0, 0], [0, 0], 1, [1, 1]));

layer_test!(conv_transpose3d, inputs: [normal(1, &[1, 2, 4, 2, 3])], splits: &[&[2]], training: false,
    make: |params| ConvTranspose3d::without_bias(2, 3, [3, 3, 3], Conv { padding: Padding::Each(vec![1]), stride: vec![2], ..Conv::default() }, &[1], params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].conv_transpose3d(&p.get("weight"), None::<Tensor>, [2, 2, 2], [1, 1, 1], [1, 1, 1], 1, [1, 1, 1]));

layer_test!(patch_embed, inputs: [normal(1, &[2, 3, 8, 6])], splits: &[&[0], &[2]], training: false,
    make: |params| PatchEmbed::new([4, 2], 3, 5, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].conv2d(&p.get("proj.weight"), Some(p.get("proj.bias")), [4, 2], [0, 0], [1, 1], 1).flatten(2, 3).transpose(1, 2));

layer_test!(spectral_conv, inputs: [normal(1, &[2, 3, 12, 10])], splits: &[&[0], &[2], &[3]], training: false,
make: |params| SpectralConv::new(3, 4, &[4, 3], SpectralOptions::default(), params),
run: |layer, x, _mode| layer.forward(&x[0]),
torch: |p, t| {
    let spectrum = t[0].fft_rfft2(None::<&[i64]>, [2, 3], "backward");
    let corner = |name: &str, start: i64| {
        let modes = spectrum.narrow(2, start, 4).narrow(3, 0, 3);
        Tensor::einsum("bixy,ioxy->boxy", &[modes, p.get(name).view_as_complex()], None::<&[i64]>)
    };
    let gap = Tensor::zeros([2, 4, 4, 3], (Kind::ComplexDouble, tch::Device::Cpu));
    let modes = Tensor::cat(&[corner("weights1", 0), gap, corner("weights2", 8)], 2);
    let modes = Tensor::cat(&[modes, Tensor::zeros([2, 4, 12, 3], (Kind::ComplexDouble, tch::Device::Cpu))], 3);
    modes.fft_irfft2([12i64, 10].as_slice(), [2, 3], "backward")
});

layer_test!(spectral_conv_of_equal_channels, inputs: [normal(1, &[2, 3, 12, 10])], splits: &[&[0], &[2], &[3]], training: false,
make: |params| SpectralConv::new(3, 3, &[4, 3], SpectralOptions::default(), params),
run: |layer, x, _mode| layer.forward(&x[0]),
torch: |p, t| {
    let spectrum = t[0].fft_rfft2(None::<&[i64]>, [2, 3], "backward");
    let corner = |name: &str, start: i64| {
        let modes = spectrum.narrow(2, start, 4).narrow(3, 0, 3);
        Tensor::einsum("bixy,ioxy->boxy", &[modes, p.get(name).view_as_complex()], None::<&[i64]>)
    };
    let gap = Tensor::zeros([2, 3, 4, 3], (Kind::ComplexDouble, tch::Device::Cpu));
    let modes = Tensor::cat(&[corner("weights1", 0), gap, corner("weights2", 8)], 2);
    let modes = Tensor::cat(&[modes, Tensor::zeros([2, 3, 12, 3], (Kind::ComplexDouble, tch::Device::Cpu))], 3);
    modes.fft_irfft2([12i64, 10].as_slice(), [2, 3], "backward")
});
