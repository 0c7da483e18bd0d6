//! Layers of features and tokens.

use isobar_array::Generator;
use isobar_nn::{
    Activation, ActivationLayer, AxialRotaryEmbedding, DropPath, Dropout, Embedding, Layer, Linear,
    LinearOptions, Mlp, MlpOptions, Mode, PositionEmbedding, RotaryEmbedding, Sequential,
    SinusoidalEmbedding, WeightForm,
};
use tch::{Device, Kind, Tensor};

use crate::case::{layer_test, normal};

layer_test!(linear, inputs: [normal(1, &[4, 6, 8])], splits: &[&[0], &[1], &[2]], training: false,
    make: |params| Linear::new(8, 5, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].linear(&p.get("weight"), Some(p.get("bias"))));

layer_test!(linear_without_bias, inputs: [normal(1, &[4, 8])], splits: &[&[0]], training: false,
    make: |params| Linear::with_options(8, 5, LinearOptions { bias: false, ..LinearOptions::default() }, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].linear(&p.get("weight"), None::<Tensor>));

layer_test!(linear_of_normalized_weight, inputs: [normal(1, &[4, 8])], splits: &[&[0]], training: false,
make: |params| Linear::with_options(8, 5, LinearOptions { form: WeightForm::Normalized, ..LinearOptions::default() }, params),
run: |layer, x, _mode| layer.forward(&x[0]),
torch: |p, t| {
    let (v, g) = (p.get("weight"), p.get("weight_g"));
    let length = v.square().sum_dim_intlist([1i64].as_slice(), true, Kind::Double).sqrt();
    t[0].linear(&(v * g / length), Some(p.get("bias")))
});

layer_test!(linear_of_factorized_weight, inputs: [normal(1, &[4, 8])], splits: &[&[0]], training: false,
    make: |params| Linear::with_options(8, 5, LinearOptions { form: WeightForm::Factorized, ..LinearOptions::default() }, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].linear(&(p.get("v") * p.get("g")), Some(p.get("bias"))));

layer_test!(linear_with_the_weight_of_a_convolution, inputs: [normal(1, &[4, 3, 8])], splits: &[&[0], &[1]], training: false,
make: |params| Linear::with_options(8, 5, LinearOptions { kernel_dims: 2, ..LinearOptions::default() }, params),
run: |layer, x, _mode| layer.forward(&x[0]),
torch: |p, t| {
    let field = t[0].permute([0, 2, 1]).unsqueeze(3);
    let y = field.conv2d(&p.get("weight"), Some(p.get("bias")), [1, 1], [0, 0], [1, 1], 1);
    y.squeeze_dim(3).permute([0, 2, 1])
});

layer_test!(mlp, inputs: [normal(1, &[4, 6, 8])], splits: &[&[0], &[1]], training: false,
    make: |params| Mlp::new([8, 12, 5], MlpOptions::default(), params),
    run: |layer, x, mode| layer.forward(&x[0], mode),
    torch: |p, t| t[0].linear(&p.get("fc1.weight"), Some(p.get("fc1.bias"))).gelu("none")
        .linear(&p.get("fc2.weight"), Some(p.get("fc2.bias"))));

layer_test!(mlp_with_dropout, inputs: [normal(1, &[4, 6, 8])], splits: &[&[0], &[1]], training: true,
make: |params| Mlp::new([8, 12, 5], MlpOptions { drop: 0.3, ..MlpOptions::default() }, params),
run: |layer, x, mode| layer.forward(&x[0], mode),
torch: |p, t| {
    let generator = Generator::new(5);
    let mask = |shape: &[i64]| {
        generator.dropout_mask(&isobar_array::Window::whole(shape), 0.3, (Kind::Double, Device::Cpu)).unwrap()
    };
    let hidden = t[0].linear(&p.get("fc1.weight"), Some(p.get("fc1.bias"))).gelu("none");
    let hidden = hidden * mask(&[4, 6, 12]);
    hidden.linear(&p.get("fc2.weight"), Some(p.get("fc2.bias"))) * mask(&[4, 6, 5])
});

layer_test!(prelu, inputs: [normal(1, &[4, 6])], splits: &[&[0], &[1]], training: false,
    make: |params| ActivationLayer::new(Activation::Prelu, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| t[0].prelu(&p.get("weight")));

layer_test!(embedding, inputs: [Tensor::from_slice(&[3i64, 0, 9, 3, 1, 7, 7, 2]).reshape([4, 2])], splits: &[&[0], &[1]],
    training: false,
    make: |params| Embedding::new(10, 6, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| Tensor::embedding(&p.get("weight"), &t[0], -1, false, false));

layer_test!(position_embedding, inputs: [normal(1, &[2, 6, 8])], splits: &[&[0], &[1]], training: false,
    make: |params| PositionEmbedding::new("pos_embed", 6, 8, params),
    run: |layer, x, _mode| layer.forward(&x[0]),
    torch: |p, t| &t[0] + p.get("pos_embed"));

/// Angles of positions, `[tokens, dim / 2]`.
fn angles(tokens: i64, dim: i64) -> Tensor {
    let options = (Kind::Double, Device::Cpu);
    let exponents = Tensor::arange(dim / 2, options) * (-2.0 / dim as f64);
    let frequencies = (exponents * 10_000f64.ln()).exp();
    Tensor::arange(tokens, options).unsqueeze(1) * frequencies.unsqueeze(0)
}

layer_test!(sinusoidal_embedding, inputs: [normal(1, &[2, 7, 8])], splits: &[&[0], &[1]], training: false,
make: |_params| SinusoidalEmbedding::new(8),
run: |layer, x, _mode| layer.forward(&x[0]),
torch: |_p, t| {
    let table = t[0].zeros_like().get(0);
    table.slice(1, 0, None, 2).copy_(&angles(7, 8).sin());
    table.slice(1, 1, None, 2).copy_(&angles(7, 8).cos());
    &t[0] + table
});

layer_test!(rotary_embedding, inputs: [normal(1, &[2, 4, 7, 8])], splits: &[&[0], &[1], &[2]], training: false,
make: |_params| RotaryEmbedding::new(8),
run: |layer, x, _mode| layer.forward(&x[0]),
torch: |_p, t| {
    let turn = angles(7, 8);
    let number = Tensor::complex(&t[0].narrow(3, 0, 4), &t[0].narrow(3, 4, 4));
    let turned = number * Tensor::polar(&turn.ones_like(), &turn);
    Tensor::cat(&[turned.real(), turned.imag()], 3)
});

layer_test!(axial_rotary_embedding, inputs: [normal(1, &[5, 3, 2, 8])], splits: &[&[0], &[1], &[2]], training: false,
make: |_params| AxialRotaryEmbedding::new(8),
run: |layer, x, _mode| layer.forward(&x[0], &layer.angles(&x[0])?),
torch: |_p, t| {
    let frequencies = Tensor::from_slice(&[1.0, 0.01]);
    let places = |extent: i64| Tensor::arange(extent, (Kind::Double, Device::Cpu)).unsqueeze(1) * &frequencies;
    let rows = places(5).unsqueeze(1).expand([5, 3, 2], false);
    let columns = places(3).unsqueeze(0).expand([5, 3, 2], false);
    let turn = Tensor::cat(&[rows, columns], 2).unsqueeze(2);
    let pairs = t[0].reshape([5, 3, 2, 4, 2]).view_as_complex();
    (pairs * Tensor::polar(&turn.ones_like(), &turn)).view_as_real().reshape([5, 3, 2, 8])
});

layer_test!(sequential, inputs: [normal(1, &[4, 6])], splits: &[&[0]], training: false,
    make: |params| network(params),
    run: |layer, x, mode| layer.apply(&x[0], mode),
    torch: |p, t| t[0].linear(&p.get("0.weight"), Some(p.get("0.bias"))).tanh()
        .linear(&p.get("3.weight"), Some(p.get("3.bias"))));

fn network<A: isobar_array::Array>(
    params: &mut isobar_shard::Scope<'_, A>,
) -> isobar_nn::Result<Sequential<A>> {
    let mut net = Sequential::new();
    net.add(params, |params| Linear::new(6, 5, params))?;
    net.add(params, |params| ActivationLayer::new(Activation::Tanh, params))?;
    net.add(params, |_| Dropout::new(0.5))?;
    net.add(params, |params| Linear::new(5, 3, params))?;
    Ok(net)
}

layer_test!(drop_path, inputs: [normal(1, &[8, 6])], splits: &[&[0], &[1]], training: true,
make: |_params| DropPath::new(0.5),
run: |layer, x, mode| layer.forward(&x[0], mode),
torch: |_p, t| {
    let window = isobar_array::Window::whole(&[8, 1]);
    &t[0] * Generator::new(5).dropout_mask(&window, 0.5, (Kind::Double, Device::Cpu)).unwrap()
});

#[test]
fn dropout_has_the_rate_and_keeps_the_mean() {
    let x = Tensor::ones([100, 1000], (Kind::Double, Device::Cpu));
    let generator = Generator::new(3);
    let y = Dropout::new(0.3).unwrap().forward(&x, Mode::train(&generator)).unwrap();
    let zeros = y.eq(0.0).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
    // Five standard deviations of 10⁵ draws.
    assert!((zeros - 0.3).abs() < 0.0075, "{zeros}");
    assert!((y.max().double_value(&[]) - 1.0 / 0.7).abs() < 1e-12);
    assert_eq!(Dropout::new(0.3).unwrap().forward(&x, Mode::Eval).unwrap(), x);
}
