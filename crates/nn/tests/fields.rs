//! Normalizations.

use isobar_nn::{BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RmsNorm};
use tch::{Device, Kind, Tensor};

use crate::case::{layer_test, normal};

layer_test!(layer_norm, inputs: [normal(1, &[4, 6, 8])], splits: &[&[0], &[1], &[2]], training: false,
    make: |params| LayerNorm::new(&[8], params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].layer_norm([8], Some(p.get("weight")), Some(p.get("bias")), 1e-5, false));

layer_test!(layer_norm_of_two_dims, inputs: [normal(1, &[4, 6, 8])], splits: &[&[0], &[1]], training: false,
    make: |params| LayerNorm::with_eps(&[6, 8], 1e-2, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].layer_norm([6, 8], Some(p.get("weight")), Some(p.get("bias")), 1e-2, false));

layer_test!(layer_norm_of_channels, inputs: [normal(1, &[2, 6, 4, 5])], splits: &[&[0], &[2]], training: false,
make: |params| LayerNorm::new(&[6], params),
run: |layer, x, _mode| layer.forward_channels_first(&x[0]),
torch: |p, t| {
    let last = t[0].permute([0, 2, 3, 1]);
    last.layer_norm([6], Some(p.get("weight")), Some(p.get("bias")), 1e-5, false).permute([0, 3, 1, 2])
});

layer_test!(rms_norm, inputs: [normal(1, &[4, 6, 8])], splits: &[&[0], &[1], &[2]], training: false,
    make: |params| RmsNorm::new(&[8], Some(1e-3), params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].rms_norm([8], Some(p.get("weight")), 1e-3));

layer_test!(rms_norm_with_the_default_eps, inputs: [normal(1, &[4, 6]) * 1e-8], splits: &[&[0]], training: false,
    make: |params| RmsNorm::new(&[6], None, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].rms_norm([6], Some(p.get("weight")), None));

layer_test!(rms_norm_without_parameters, inputs: [normal(1, &[4, 6])], splits: &[&[0], &[1]], training: false,
    make: |_params| RmsNorm::without_affine(&[6], Some(1e-3)),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |_p, t| t[0].rms_norm([6], None::<Tensor>, 1e-3));

layer_test!(group_norm, inputs: [normal(1, &[2, 6, 4, 5])], splits: &[&[0], &[2], &[3]], training: false,
    make: |params| GroupNorm::new(3, 6, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].group_norm(3, Some(p.get("weight")), Some(p.get("bias")), 1e-5, false));

layer_test!(group_norm_without_parameters, inputs: [normal(1, &[2, 6, 4])], splits: &[&[2]], training: false,
    make: |_params| GroupNorm::without_affine(2, 6, 1e-3),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |_p, t| t[0].group_norm(2, None::<Tensor>, None::<Tensor>, 1e-3, false));

layer_test!(instance_norm, inputs: [normal(1, &[2, 3, 4, 5])], splits: &[&[0], &[2]], training: false,
make: |_params| InstanceNorm::new(3),
run: |layer, x, _mode| layer.forward(&x[0]),
torch: |_p, t| {
    let none = || None::<Tensor>;
    t[0].instance_norm(none(), none(), none(), none(), true, 0.1, 1e-5, false)
});

layer_test!(instance_norm_with_parameters, inputs: [normal(1, &[2, 3, 6])], splits: &[&[2]], training: false,
make: |params| InstanceNorm::with_affine(3, 1e-5, params),
run: |layer, x, _mode| layer.forward(&x[0]),
torch: |p, t| {
    let none = || None::<Tensor>;
    t[0].instance_norm(Some(p.get("weight")), Some(p.get("bias")), none(), none(), true, 0.1, 1e-5, false)
});

layer_test!(batch_norm_in_training, inputs: [normal(1, &[4, 3, 4, 5])], splits: &[&[0], &[2]], training: true,
    make: |params| BatchNorm::new(3, params),
    run: |layer, x, mode| layer.forward(&x[0], mode),
    // The running statistics are updated in place and compared too.
    torch: |p, t| t[0].batch_norm(Some(p.get("weight")), Some(p.get("bias")), Some(p.get("running_mean")),
        Some(p.get("running_var")), true, 0.1, 1e-5, false));

layer_test!(batch_norm_in_evaluation, inputs: [normal(1, &[4, 3, 6])], splits: &[&[0], &[2]], training: false,
    make: |params| BatchNorm::new(3, params),
    run: |layer, x, mode| layer.forward(&x[0], mode),
    torch: |p, t| t[0].batch_norm(Some(p.get("weight")), Some(p.get("bias")), Some(p.get("running_mean")),
        Some(p.get("running_var")), false, 0.1, 1e-5, false).to_kind(Kind::Double));

/// As `torch.nn.functional.rms_norm` computes 16 bits in single precision, with its machine epsilon.
#[test]
fn rms_norm_of_16_bits_has_the_epsilon_of_single_precision() {
    let norm = RmsNorm::<Tensor>::without_affine(&[4], None).unwrap();
    let x = Tensor::full([1, 4], 0.05, (Kind::BFloat16, Device::Cpu));
    let y = norm.forward(&x).unwrap();
    assert!((y.double_value(&[0, 0]) - 1.0).abs() < 0.01, "{y:?}");
}
