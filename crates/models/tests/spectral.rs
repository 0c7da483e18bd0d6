//! The modulated AFNO and the FNO: configurations, errors, starting values, and what the golden cases do not reach.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::{Generator, Window};
use isobar_models::{
    Activation, EmbedMethod, Factorization, Fno, FnoConfig, ModAfno, ModAfnoConfig, ModEmbedConfig, Mode,
    PaddingType, PerDim, ScaleShiftMode,
};
use isobar_shard::{ParamStore, StateDict};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

fn store() -> ParamStore {
    ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu)
}

fn random(shape: &[i64]) -> Tensor {
    Generator::new(3).normal(&Window::whole(shape), 0.0, 1.0, (Kind::Double, Device::Cpu)).unwrap()
}

fn max_error(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    if a.numel() == 0 { 0.0 } else { (a - b).abs().max().double_value(&[]) }
}

fn modulated() -> ModAfnoConfig {
    ModAfnoConfig {
        in_channels: 2,
        out_channels: 3,
        embed_model: ModEmbedConfig { dim: 6, max_time: 6.0, ..Default::default() },
        patch_size: [4, 2],
        embed_dim: 12,
        mod_dim: 6,
        depth: 2,
        num_blocks: 3,
        ..ModAfnoConfig::new([16, 12])
    }
}

fn fourier() -> FnoConfig {
    FnoConfig {
        latent_channels: 4,
        decoder_layer_size: 5,
        num_fno_layers: 2,
        num_fno_modes: PerDim::All(3),
        padding: PerDim::All(2),
        ..FnoConfig::new(2, 3)
    }
}

#[rstest]
#[case(ModAfnoConfig { mod_dim: 8, ..modulated() }, "dim 6 of embed_model differs from mod_dim 8")]
#[case(
    ModAfnoConfig { mod_dim: 5, embed_model: ModEmbedConfig { dim: 5, ..Default::default() }, ..modulated() },
    "dim 5 of embed_model is odd: cosines and sines come in pairs"
)]
#[case(
    ModAfnoConfig { embed_model: ModEmbedConfig { max_time: 0.0, ..modulated().embed_model }, ..modulated() },
    "max_time of embed_model is 0, expected a finite number other than 0"
)]
#[case(ModAfnoConfig { num_blocks: 5, ..modulated() }, "embed_dim 12 is not divisible by num_blocks 5")]
fn mod_afno_refuses(#[case] config: ModAfnoConfig, #[case] reason: &str) {
    let error = ModAfno::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("mod_afno: {reason}"));
}

#[rstest]
#[case(FnoConfig { dimension: 5, ..fourier() }, "dimension is 5, expected 1 to 4")]
#[case(FnoConfig { latent_channels: 1, ..fourier() }, "latent_channels is 1, expected 2 or more")]
#[case(
    FnoConfig { num_fno_modes: PerDim::Each(vec![3]), ..fourier() },
    "num_fno_modes is [3], expected 1 or more along each of 2 dims (model.dimension); --set 'model.num_fno_modes=[3, 1]'"
)]
#[case(
    FnoConfig { num_fno_modes: PerDim::Each(vec![3, 0]), ..fourier() },
    "num_fno_modes is [3, 0], expected 1 or more along each of 2 dims (model.dimension); --set 'model.num_fno_modes=[3, 1]'"
)]
#[case(FnoConfig { num_fno_modes: PerDim::Each(vec![]), ..fourier() }, "num_fno_modes is [], expected 1 or more along each of 2 dims (model.dimension); --set 'model.num_fno_modes=[1, 1]'")]
#[case(FnoConfig { num_fno_layers: 0, ..fourier() }, "num_fno_layers is 0, expected 1 to 2147483647")]
#[case(FnoConfig { rank: 0.0, ..fourier() }, "rank is 0, expected above 0, at most 1")]
#[case(
    FnoConfig { activation_fn: Activation::Stan, ..fourier() },
    "activation_fn stan works on one feature, between layers are more"
)]
fn fno_refuses(#[case] config: FnoConfig, #[case] reason: &str) {
    let error = Fno::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("fno: {reason}"));
}

#[test]
fn inputs_of_another_shape_are_refused() {
    let model = ModAfno::new(&modulated(), &mut store()).unwrap();
    let x = random(&[2, 2, 16, 12]);
    for shape in [&[3][..], &[2, 2], &[2, 1, 1]] {
        let error = model.forward(&x, &random(shape), Mode::Eval).unwrap_err().to_string();
        let want = format!("mod_afno: input has shape {shape:?}, expected [2, 1] for the modulation");
        assert_eq!(error, want);
    }
    let one = model.forward(&x, &random(&[2]), Mode::Eval).unwrap();
    assert_eq!(one, model.forward(&x, &random(&[2, 1]), Mode::Eval).unwrap());

    let refused = |config: &FnoConfig, shape: &[i64]| {
        let model = Fno::new(config, &mut store()).unwrap();
        let error = model.forward(&random(shape)).unwrap_err().to_string();
        let (start, want) = error.split_once(", expected ").unwrap();
        assert_eq!(start, format!("fno: input has shape {shape:?}"));
        want.to_owned()
    };
    assert_eq!(refused(&fourier(), &[1, 3, 9, 9]), "[batch, 2, and 2 extents]");
    assert_eq!(refused(&fourier(), &[1, 2, 9]), "[batch, 2, and 2 extents]");
    let wide = FnoConfig { num_fno_modes: PerDim::All(9), ..fourier() };
    assert_eq!(refused(&wide, &[1, 2, 6, 20]), "spatial extent 0 to be 7 or more, for 9 modes");
    assert_eq!(refused(&wide, &[1, 2, 7, 13]), "spatial extent 1 to be 14 or more, for 9 modes");
    let mirrored = FnoConfig { padding_type: PaddingType::Reflect, padding: PerDim::All(8), ..fourier() };
    assert_eq!(refused(&mirrored, &[1, 2, 9, 8]), "spatial extent 1 to be wide enough for a padding of 8");
}

#[test]
fn configurations_are_read_by_physicsnemos_names() {
    let config: ModAfnoConfig = toml::from_str(
        "inp_shape = [16, 12]\nscale_shift_mode = \"real\"\nembed_model = { method = \"onehot\", max_time = 3.0 }",
    )
    .unwrap();
    let want = ModAfnoConfig {
        scale_shift_mode: ScaleShiftMode::Real,
        embed_model: ModEmbedConfig { method: EmbedMethod::OneHot, max_time: 3.0, ..Default::default() },
        ..ModAfnoConfig::new([16, 12])
    };
    assert_eq!(config, want);
    assert_eq!(toml::from_str::<ModAfnoConfig>(&toml::to_string(&want).unwrap()).unwrap(), want);
    let config: FnoConfig = toml::from_str(
        "in_channels = 1\nout_channels = 1\nnum_fno_modes = [4, 5]\npadding = 3\npadding_type = \"reflect\"",
    )
    .unwrap();
    let want = FnoConfig {
        num_fno_modes: PerDim::Each(vec![4, 5]),
        padding: PerDim::All(3),
        padding_type: PaddingType::Reflect,
        ..FnoConfig::new(1, 1)
    };
    assert_eq!(config, want);
    assert_eq!(toml::from_str::<FnoConfig>(&toml::to_string(&want).unwrap()).unwrap(), want);
    let error = toml::from_str::<FnoConfig>("in_channels = 1\nout_channels = 1\npadding = \"many\"");
    assert!(error.unwrap_err().to_string().contains("expected a number, or a list of one for each dim"));
}

#[rstest]
#[case::real(ModAfnoConfig { scale_shift_mode: ScaleShiftMode::Real, ..modulated() }, 1)]
#[case::filter_only(ModAfnoConfig { modulate_mlp: false, ..modulated() }, 1)]
#[case::mlp_only(ModAfnoConfig { modulate_filter: false, ..modulated() }, 1)]
#[case::neither(ModAfnoConfig { modulate_filter: false, modulate_mlp: false, ..modulated() }, 6)]
#[case::one_group(ModAfnoConfig { num_blocks: 1, ..modulated() }, 1)]
#[case::one_hot(
    ModAfnoConfig {
        embed_model: ModEmbedConfig { dim: 6, depth: 2, method: EmbedMethod::OneHot, ..Default::default() },
        ..modulated()
    },
    1
)]
fn samples_are_modulated_one_by_one(#[case] config: ModAfnoConfig, #[case] features: i64) {
    let model = ModAfno::new(&config, &mut store()).unwrap();
    let (x, modulation) = (random(&[3, 2, 16, 12]), random(&[3, features]));
    let whole = model.forward(&x, &modulation, Mode::Eval).unwrap();
    for sample in 0..3 {
        let one = |tensor: &Tensor| tensor.narrow(0, sample, 1);
        let part = model.forward(&one(&x), &one(&modulation), Mode::Eval).unwrap();
        assert!(max_error(&part, &one(&whole)) < 1e-12);
    }
    let other = model.forward(&x, &(&modulation + 0.3), Mode::Eval).unwrap();
    assert!(max_error(&other, &whole) > 1e-6);
    let none = model.forward(&x.narrow(0, 0, 0), &modulation.narrow(0, 0, 0), Mode::Eval).unwrap();
    assert_eq!(none.size(), [0, 3, 16, 12]);
}

#[rstest]
#[case(1, &[11], &["spec_encoder.lift_network.0.conv.weight", "spec_encoder.conv_layers.1.bias"])]
#[case(
    4,
    &[5, 6, 4, 7],
    &["spec_encoder.lift_network.2.conv.conv.bias", "spec_encoder.conv_layers.0.conv.weight"]
)]
fn fno_in_other_dimensions(#[case] dimension: usize, #[case] extents: &[i64], #[case] names: &[&str]) {
    let config = FnoConfig { dimension, padding: PerDim::Each(vec![1]), ..fourier() };
    let mut params = store();
    let model = Fno::new(&config, &mut params).unwrap();
    for name in names {
        assert!(params.get(name).unwrap().trainable);
    }
    let weights = params.parameters().iter().filter(|p| p.name.starts_with("spec_encoder.spconv_layers.0."));
    assert_eq!(weights.count(), 1 << (dimension - 1));
    let x = random(&[&[2, 2], extents].concat());
    let y = model.forward(&x).unwrap();
    assert_eq!(y.size(), [&[2, 3], extents].concat());
    y.square().sum(Kind::Double).backward();
    assert!(params.trainable().all(|p| p.tensor.grad().defined()));
    assert_eq!(model.forward(&x.narrow(0, 0, 0)).unwrap().size(), [&[0, 3], extents].concat());
}

/// The layers in plain operators of libtorch: corners written one by one, as PhysicsNeMo does.
#[rstest]
fn fno_4d_corners_stand_where_physicsnemos_do() {
    let config = FnoConfig {
        dimension: 4,
        num_fno_layers: 1,
        num_fno_modes: PerDim::Each(vec![2, 3, 2, 3]),
        padding: PerDim::All(0),
        ..fourier()
    };
    let mut params = store();
    let model = Fno::new(&config, &mut params).unwrap();
    let x = random(&[2, 2, 4, 5, 4, 6]);
    let value = |name: &str| params.get(name).unwrap().tensor.detach();
    let linear = |x: &Tensor, name: &str| {
        x.linear(&value(&format!("{name}.weight")).flatten(1, -1), Some(&value(&format!("{name}.bias"))))
    };
    let mut coordinates = vec![x.movedim_int(1, -1)];
    for dim in 2..6 {
        let n = x.size()[dim];
        let mut line = vec![1; 6];
        line[dim - 1] = n;
        let values = Tensor::linspace(0.0, 1.0, n, (Kind::Double, Device::Cpu)).reshape(line);
        coordinates.push(values.expand([2, 4, 5, 4, 6, 1], false));
    }
    let lifted = linear(&Tensor::cat(&coordinates, -1), "spec_encoder.lift_network.0.conv.conv").gelu("none");
    let lifted = linear(&lifted, "spec_encoder.lift_network.2.conv.conv");
    let dims = [1, 2, 3, 4];
    let spectrum = lifted.fft_rfftn(None::<&[i64]>, &dims[..], "backward");
    let mixed = spectrum.zeros_like();
    let corners = ["lll", "hll", "lhl", "llh", "hhl", "hlh", "lhh", "hhh"];
    for (index, corner) in corners.iter().enumerate() {
        let weight = value(&format!("spec_encoder.spconv_layers.0.weights{}", index + 1)).view_as_complex();
        let part = |whole: &Tensor| {
            let mut part = whole.shallow_clone();
            for (dim, (end, (m, n))) in corner.chars().zip([(2, 4), (3, 5), (2, 4)]).enumerate() {
                part = part.narrow(dim as i64 + 1, if end == 'h' { n - m } else { 0 }, m);
            }
            part.narrow(4, 0, 3)
        };
        let product = Tensor::einsum("bxyztj,jkxyzt->bxyztk", &[part(&spectrum), weight], None::<i64>);
        let _ = part(&mixed).g_add_(&product);
    }
    let back = mixed.fft_irfftn(&[4, 5, 4, 6][..], &dims[..], "backward");
    let encoded = linear(&lifted, "spec_encoder.conv_layers.0.conv") + back;
    let hidden = linear(&encoded, "decoder_net.layers.0.linear").silu();
    let want = linear(&hidden, "decoder_net.final_layer.linear").movedim_int(-1, 1);
    assert!(max_error(&model.forward(&x).unwrap(), &want) < 1e-10);
}

#[rstest]
fn fields_are_padded_behind_their_end(
    #[values(PaddingType::Constant, PaddingType::Reflect, PaddingType::Replicate, PaddingType::Circular)]
    padding_type: PaddingType,
) {
    // All but zeros commute with the lift, so that padding the input is the same; zeros too where the lift's biases are zero.
    let config = |padding, in_channels| FnoConfig {
        padding: PerDim::Each(padding),
        padding_type,
        in_channels,
        coord_features: false,
        ..fourier()
    };
    let x = random(&[2, 2, 9, 8]);
    let got = Fno::new(&config(vec![2, 3], 2), &mut store()).unwrap().forward(&x).unwrap();
    let mode = match padding_type {
        PaddingType::Constant => "constant",
        PaddingType::Reflect => "reflect",
        PaddingType::Replicate => "replicate",
        PaddingType::Circular => "circular",
    };
    let padded = x.f_pad([0, 3, 0, 2], mode, None).unwrap();
    let model = Fno::new(&config(vec![0, 0], 2), &mut store()).unwrap();
    assert!(max_error(&model.forward(&padded).unwrap().narrow(2, 0, 9).narrow(3, 0, 8), &got) < 1e-12);
}

#[rstest]
fn factored_weights(
    #[values(Factorization::Tucker, Factorization::Cp)] factorization: Factorization,
    #[values(0.1, 1.0)] rank: f64,
) {
    let config = FnoConfig { factorization, rank, num_fno_layers: 1, ..fourier() };
    let mut params = store();
    let model = Fno::new(&config, &mut params).unwrap();
    let x = random(&[2, 2, 7, 9]);
    let got = model.forward(&x).unwrap();
    got.square().sum(Kind::Double).backward();
    assert!(params.trainable().all(|p| p.tensor.grad().abs().max().double_value(&[]) > 0.0));

    // Compares with the full weights, multiplied out from the factors.
    let mut whole_params = store();
    let whole =
        Fno::new(&FnoConfig { factorization: Factorization::None, ..config }, &mut whole_params).unwrap();
    let of = |name: String| params.get(&name).unwrap().tensor.detach().view_as_complex();
    for n in 1..=2 {
        let name = format!("spec_encoder.spconv_layers.0.weights{n}");
        let core = of(format!("{name}.core"));
        let factors = (0..4).map(|i| of(format!("{name}.factors.{i}")));
        let inputs: Vec<Tensor> = [core].into_iter().chain(factors).collect();
        let formula = match factorization {
            Factorization::Cp => "r,ar,br,cr,dr->abcd",
            _ => "ijkl,ai,bj,ck,dl->abcd",
        };
        let weight = Tensor::einsum(formula, &inputs, None::<i64>).view_as_real();
        let numel: usize = inputs.iter().map(Tensor::numel).sum();
        assert!(numel as f64 <= (rank * (weight.numel() / 2) as f64).max(20.0), "{numel}");
        tch::no_grad(|| whole_params.get(&name).unwrap().tensor.shallow_clone().copy_(&weight));
    }
    assert!(max_error(&whole.forward(&x).unwrap(), &got) < 1e-11);
}

/// PhysicsNeMo gives its activation to the encoder, and this to the lift.
#[rstest]
#[case(Activation::Prelu, "weight", true)]
#[case(Activation::CappedGelu, "cap", false)]
fn an_activation_with_state_is_shared(
    #[case] activation_fn: Activation,
    #[case] part: &str,
    #[case] trained: bool,
) {
    let mut params = store();
    let model = Fno::new(&FnoConfig { activation_fn, ..fourier() }, &mut params).unwrap();
    let name = format!("activation_fn.{part}");
    let first = &params.parameters()[0];
    assert_eq!((&first.name, first.trainable), (&name, trained));
    let aliases = ["spec_encoder.activation_fn", "spec_encoder.lift_network.1"];
    let aliases = aliases.map(|alias| format!("{alias}.{part}"));
    assert_eq!(*params.tied(), aliases.clone().map(|alias| (alias, name.clone())).into());

    let x = random(&[2, 2, 9, 8]);
    let before = model.forward(&x).unwrap();
    let value = params.get(&name).unwrap().tensor.detach() * 0.5;
    let whole: StateDict =
        params.state_dict().unwrap().into_iter().map(|(name, tensor)| (name, tensor.copy())).collect();
    for names in [&[name.clone(), aliases[0].clone(), aliases[1].clone()][..], &[name], &aliases[1..]] {
        let mut state: StateDict =
            whole.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
        state.retain(|name, _| !name.ends_with(&format!("activation_fn.{part}")) && !aliases.contains(name));
        state.extend(names.iter().map(|name| (name.clone(), value.shallow_clone())));
        params.load(&whole).unwrap();
        params.load(&state).unwrap();
        assert_eq!(max_error(&model.forward(&x).unwrap(), &before) > 1e-6, trained);
    }
}

#[test]
fn entries_beyond_the_dims_do_not_count() {
    let forward = |num_fno_modes, padding| {
        let config = FnoConfig { num_fno_modes, padding, ..fourier() };
        Fno::new(&config, &mut store()).unwrap().forward(&random(&[2, 2, 9, 8])).unwrap()
    };
    let want = forward(PerDim::Each(vec![3, 2]), PerDim::Each(vec![2, 1]));
    let got = forward(PerDim::Each(vec![3, 2, 0, 9]), PerDim::Each(vec![2, 1, 7]));
    assert_eq!(got, want);
}

#[test]
fn spectral_weights_start_between_zero_and_their_scale() {
    let mut params = store();
    Fno::new(&fourier(), &mut params).unwrap();
    let spectral = &params.get("spec_encoder.spconv_layers.0.weights1").unwrap().tensor;
    assert!(spectral.min().double_value(&[]) >= 0.0 && spectral.max().double_value(&[]) <= 1.0 / 16.0);
}

#[test]
fn half_kinds_compute_the_transform_in_single() {
    let mut params = ParamStore::new(Generator::new(1));
    let model = Fno::new(&fourier(), &mut params).unwrap();
    let x = random(&[2, 2, 9, 8]).to_kind(Kind::Float);
    let single = model.forward(&x).unwrap();
    params.set_kind(Kind::BFloat16).unwrap();
    let half = model.forward(&x.to_kind(Kind::BFloat16)).unwrap();
    assert_eq!(half.kind(), Kind::BFloat16);
    assert!(max_error(&half.to_kind(Kind::Float), &single) < 0.1);
}
