//! Models on spheres of square faces: golden cases, sharded against dense, and what they refuse.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::{Generator, Window};
use isobar_models::{
    Activation, Architecture, Batch, Dlwp, DlwpConfig, FieldSpec, HealpixUNet, HealpixUNetConfig, Mode,
    Model, ModelConfig,
};
use isobar_shard::{ParamCount, ParamStore};
use rstest::rstest;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::common::twin::{Axis, Twin, split};

fn store() -> ParamStore {
    ParamStore::new(Generator::new(1))
}

fn random(shape: &[i64]) -> Tensor {
    Generator::new(3).normal(&Window::whole(shape), 0.0, 1.0, (Kind::Float, Device::Cpu)).unwrap()
}

fn dlwp() -> DlwpConfig {
    DlwpConfig { nr_initial_channels: 2, depth: 1, ..DlwpConfig::new(2, 1) }
}

/// Arguments of a small U-Net of two grids.
fn healpix(block: &str) -> Value {
    let activation = json!({ "_target_": "physicsnemo.nn.CappedGELU", "cap_value": 0.8 });
    let block = json!({ "_target_": block, "kernel_size": 3, "upscale_factor": 2, "activation": activation, "_recursive_": true });
    json!({
        "encoder": {
            "_target_": "physicsnemo.models.dlwp_healpix.layers.UNetEncoder",
            "conv_block": block,
            "down_sampling_block": { "_target_": "physicsnemo.nn.HEALPixAvgPool", "pooling": 2 },
            "n_channels": [2, 2], "n_layers": [1, 2], "dilations": [2, 1]
        },
        "decoder": {
            "conv_block": block,
            "up_sampling_block": { "_target_": "TransposedConvUpsample", "activation": activation },
            "output_layer": { "_target_": "BasicConvBlock", "kernel_size": 1 },
            "n_channels": [2, 2], "n_layers": [2, 1], "recurrent_block": null
        },
        "input_channels": 2, "output_channels": 2, "n_constants": 0, "decoder_input_channels": 0,
        "input_time_dim": 1, "output_time_dim": 1
    })
}

/// Arguments with other values, by their paths.
fn with(mut config: Value, changes: &[(&str, Value)]) -> Value {
    for (path, value) in changes {
        *config.pointer_mut(path).unwrap_or_else(|| panic!("{path}")) = value.clone();
    }
    config
}

fn parsed(config: Value) -> HealpixUNetConfig {
    serde_json::from_value(config).unwrap()
}

fn cube_twin(config: DlwpConfig, n: i64) -> Twin {
    let shape = |channels: usize| vec![2, channels as i64, 6, n, n];
    let (input, target) = (shape(config.nr_input_channels), shape(config.nr_output_channels));
    Twin::new(ModelConfig::new(config), &[("fields", input)], &[("fields", target)])
}

fn healpix_twin(config: Value, n: i64) -> Twin {
    let config = parsed(config);
    let times = |channels: usize, times: usize| vec![2, (channels * times) as i64, 12, n, n];
    let input = times(config.input_channels, config.input_time_dim);
    let target = times(config.output_channels, config.output_time_dim);
    Twin::new(ModelConfig::new(config), &[("fields", input)], &[("fields", target)])
}

#[rstest]
fn dlwp_is_the_dense_one_split(
    #[values(&[(2, 2)], &[(4, 2)], &[(3, 3)], &[(2, 4)], &[(2, 2), (2, 3)], &[(2, 0), (2, 2)])] axes: &[(
        i64,
        usize,
    )],
    #[values(false, true)] empty: bool,
) {
    let twin = cube_twin(dlwp(), 4);
    let twin = if empty { twin.with_empty_shards() } else { twin };
    twin.check(&split(axes));
}

#[rstest]
#[case::deep(DlwpConfig { depth: 2, ..dlwp() })]
#[case::open(DlwpConfig { clamp_activation: [f64::NEG_INFINITY, f64::INFINITY], ..dlwp() })]
#[case::bounded(DlwpConfig { clamp_activation: [-0.1, 0.5], ..dlwp() })]
#[case::trained(DlwpConfig { activation_fn: Activation::Prelu, ..dlwp() })]
#[case::recomputed(DlwpConfig { gradient_checkpointing: true, ..dlwp() })]
fn arguments_of_dlwp(#[case] config: DlwpConfig) {
    let twin = cube_twin(config, 4);
    twin.check(&split(&[(2, 2), (2, 4)]));
    twin.check_losses(&split(&[(3, 2)]));
}

#[rstest]
fn healpix_unet_is_the_dense_one_split(
    #[values(&[(2, 2)], &[(4, 2)], &[(3, 3)], &[(2, 4)], &[(2, 2), (2, 3)], &[(2, 0), (2, 2)])] axes: &[(
        i64,
        usize,
    )],
    #[values(false, true)] empty: bool,
) {
    let twin = healpix_twin(healpix("ConvNeXtBlock"), 4);
    let twin = if empty { twin.with_empty_shards() } else { twin };
    twin.check(&split(axes));
}

#[rstest]
#[case::symmetric(healpix("SymmetricConvNeXtBlock"))]
#[case::double(healpix("DoubleConvNeXtBlock"))]
#[case::multiple(with(healpix("Multi_SymmetricConvNeXtBlock"), &[
    ("/encoder/n_layers", json!([1, 2])),
    ("/decoder/n_layers", json!([2, 1])),
]))]
#[case::recurrent(with(healpix("ConvNeXtBlock"), &[
    ("/decoder/recurrent_block", json!({ "_target_": "ConvGRUBlock", "kernel_size": 3 })),
    ("/output_time_dim", json!(3)),
]))]
#[case::basic(with(healpix("BasicConvBlock"), &[("/encoder/conv_block/kernel_size", json!(5))]))]
#[case::maxima(with(healpix("ConvNeXtBlock"), &[("/encoder/down_sampling_block/_target_", json!("HEALPixMaxPool"))]))]
#[case::steps(with(healpix("ConvNeXtBlock"), &[("/input_time_dim", json!(2)), ("/output_time_dim", json!(4))]))]
#[case::diagnostic(with(healpix("ConvNeXtBlock"), &[("/input_time_dim", json!(2)), ("/output_channels", json!(3))]))]
#[case::trained(with(healpix("ConvNeXtBlock"), &[("/encoder/conv_block/activation", json!({ "_target_": "torch.nn.PReLU" }))]))]
#[case::wide_output(with(healpix("ConvNeXtBlock"), &[
    ("/decoder/output_layer", json!({ "_target_": "BasicConvBlock", "n_layers": 2, "latent_channels": 3 }))
]))]
fn arguments_of_healpix_unet(#[case] mut config: Value, #[values(false, true)] recomputes: bool) {
    config["gradient_checkpointing"] = json!(recomputes);
    let twin = healpix_twin(config, 4);
    twin.check(&split(&[(2, 2), (2, 4)]));
    if !recomputes {
        twin.check_losses(&split(&[(3, 3)]));
    }
}

#[rstest]
fn healpix_unet_takes_a_list_of_inputs(
    #[values((0, 0), (2, 0), (0, 1), (2, 1))] (prescribed, constants): (usize, usize),
) {
    let config = with(
        healpix("ConvNeXtBlock"),
        &[
            ("/input_time_dim", json!(2)),
            ("/output_time_dim", json!(4)),
            ("/decoder_input_channels", json!(prescribed)),
            ("/n_constants", json!(constants)),
        ],
    );
    let mut inputs = vec![("inputs.0", vec![1, 12, 2, 2, 4, 4])];
    let mut axis: Vec<(&'static str, usize)> = vec![("fields", 1), ("inputs.0", 1)];
    if prescribed > 0 {
        axis.push(("inputs.1", 1));
        inputs.push(("inputs.1", vec![1, 12, 5, 2, 4, 4]));
    }
    if constants > 0 {
        let name = if prescribed > 0 { "inputs.2" } else { "inputs.1" };
        axis.push((name, 0));
        inputs.push((name, vec![12, 1, 4, 4]));
    }
    let twin = Twin::new(ModelConfig::new(parsed(config)), &inputs, &[("fields", vec![1, 12, 4, 2, 4, 4])]);
    let rows: Axis = (2, vec![("inputs.0", 4)]);
    twin.check(&[(2, axis), rows]);
}

#[test]
fn fields_are_the_list_of_one() {
    let config =
        with(healpix("ConvNeXtBlock"), &[("/input_time_dim", json!(2)), ("/output_time_dim", json!(4))]);
    let model = HealpixUNet::new(&parsed(config), &mut store()).unwrap();
    let list = random(&[2, 12, 2, 2, 4, 4]);
    let want = model.forward(&list, None, None, None, Mode::Eval).unwrap();
    let fields = list.permute([0, 2, 3, 1, 4, 5]).reshape([2, 4, 12, 4, 4]);
    let got = model.forward_fields(&fields, Mode::Eval).unwrap();
    assert_eq!(got, want.permute([0, 2, 3, 1, 4, 5]).reshape([2, 8, 12, 4, 4]));
}

#[test]
fn names_are_those_of_the_state_dict() {
    let mut params = store();
    HealpixUNet::new(&parsed(healpix("SymmetricConvNeXtBlock")), &mut params).unwrap();
    let names: Vec<&str> = params.parameters().iter().map(|p| p.name.as_str()).collect();
    for name in [
        "encoder.encoder.0.0.convblock.0.layers.1.weight",
        "encoder.encoder.0.0.convblock.1.cap",
        "encoder.encoder.0.0.convblock.2.layers.0.weight",
        "encoder.encoder.1.1.convblock.6.layers.1.bias",
        "decoder.decoder.1.upsamp.upsampler.0.layers.0.weight",
        "decoder.decoder.1.upsamp.upsampler.1.cap",
        "decoder.decoder.1.conv.skip_module.layers.0.weight",
        "decoder.output_layer.convblock.0.layers.0.weight",
    ] {
        assert!(names.contains(&name), "{name} is not among {names:?}");
    }
    // One activation stands behind all four convolutions.
    assert_eq!(params.tied()["encoder.encoder.0.0.convblock.7.cap"], "encoder.encoder.0.0.convblock.1.cap");

    let mut params = store();
    Dlwp::new(&DlwpConfig { activation_fn: Activation::Prelu, ..dlwp() }, &mut params).unwrap();
    assert!(params.parameters().iter().any(|p| p.name == "activation_fn.weight"));
}

/// Caps are part of the state dict: PhysicsNeMo computes with those that it loads.
#[test]
fn loaded_caps_replace_those_of_the_configuration() {
    let x = random(&[2, 12, 1, 2, 4, 4]);
    let output = |cap_value: f64, loaded: Option<f64>| {
        let config = with(
            healpix("ConvNeXtBlock"),
            &["/encoder/conv_block", "/decoder/conv_block", "/decoder/up_sampling_block"]
                .map(|block| format!("{block}/activation/cap_value"))
                .each_ref()
                .map(|path| (path.as_str(), json!(cap_value))),
        );
        let mut params = store();
        let model = HealpixUNet::new(&parsed(config), &mut params).unwrap();
        for cap in params.parameters().iter().filter(|own| own.name.ends_with(".cap")) {
            loaded.iter().for_each(|&value| drop(cap.tensor.shallow_clone().fill_(value)));
        }
        model.forward(&x, None, None, None, Mode::Eval).unwrap()
    };
    let want = output(0.05, None);
    assert_ne!(output(0.8, None), want);
    assert_eq!(output(0.8, Some(0.05)), want);
}

#[test]
fn open_bounds_are_null_or_infinite() {
    let of = |bounds: Value| -> DlwpConfig {
        serde_json::from_value(
            json!({ "nr_input_channels": 1, "nr_output_channels": 1, "clamp_activation": bounds }),
        )
        .unwrap()
    };
    assert_eq!(of(json!([null, 3])).clamp_activation, [f64::NEG_INFINITY, 3.0]);
    assert_eq!(of(json!([0.5, null])).clamp_activation, [0.5, f64::INFINITY]);
    assert_eq!(of(json!(["none", "none"])).clamp_activation, [f64::NEG_INFINITY, f64::INFINITY]);
    assert_eq!(serde_json::to_value(of(json!([null, 3]))).unwrap()["clamp_activation"], json!(["none", 3.0]));
    let text = "nr_input_channels = 1\nnr_output_channels = 1\nclamp_activation = [-inf, 2]";
    assert_eq!(toml::from_str::<DlwpConfig>(text).unwrap().clamp_activation, [f64::NEG_INFINITY, 2.0]);
    let config = of(json!([null, 3]));
    let through_json: DlwpConfig = serde_json::from_value(serde_json::to_value(&config).unwrap()).unwrap();
    let through_toml: DlwpConfig = toml::from_str(&toml::to_string(&config).unwrap()).unwrap();
    assert_eq!([&through_json, &through_toml], [&config; 2]);
}

#[rstest]
#[case(DlwpConfig { depth: 0, ..dlwp() }, "depth is 0, expected 1 to 16; --set model.depth=2")]
#[case(DlwpConfig { depth: usize::MAX, ..dlwp() }, "depth is 18446744073709551615, expected 1 to 16; --set model.depth=2")]
#[case(
    DlwpConfig { clamp_activation: [2.0, 1.0], ..dlwp() },
    "clamp_activation is [2, 1], expected [min, max] with min ≤ max"
)]
#[case(DlwpConfig { nr_initial_channels: usize::MAX, ..dlwp() }, "nr_initial_channels is 18446744073709551615, expected 1 to 2147483647")]
#[case(
    DlwpConfig { activation_fn: Activation::Stan, ..dlwp() },
    "activation_fn is stan, which is for single features; choose another one"
)]
fn dlwp_refuses(#[case] config: DlwpConfig, #[case] reason: &str) {
    let error = Dlwp::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("dlwp: {reason}"));
    assert_eq!(config.count(&ParamCount::default).unwrap_err().to_string(), error);
}

#[rstest]
#[case("/encoder/_target_", json!("a.b.Encoder"), "encoder._target_ is \"a.b.Encoder\", expected UNetEncoder")]
#[case(
    "/encoder/conv_block/_target_",
    json!("x.ConvGRUBlock"),
    "encoder.conv_block._target_ is \"x.ConvGRUBlock\", expected BasicConvBlock, ConvNeXtBlock, DoubleConvNeXtBlock, SymmetricConvNeXtBlock, Multi_SymmetricConvNeXtBlock"
)]
#[case("/decoder/n_channels", json!([2, 3]), "decoder.n_channels is [2, 3], expected [2, 2]: encoder.n_channels, reversed")]
#[case("/encoder/n_layers", json!([1]), "encoder.n_layers has 1 entries, expected 2, as encoder.n_channels")]
#[case("/encoder/dilations", json!([1, 0]), "encoder.dilations is 0, expected 1 to 2147483647")]
#[case("/output_time_dim", json!(0), "output_time_dim is 0, expected 1 or a multiple of input_time_dim 1")]
#[case("/output_time_dim", json!(1_000_000_000), "output_time_dim is 1000000000, 1000000000 times input_time_dim, expected at most 1024 times")]
#[case("/input_channels", json!(0), "input_channels is 0, expected 1 to 2147483647")]
#[case("/input_channels", json!(1_u64 << 63), "input_channels is 9223372036854775808, expected 1 to 2147483647")]
#[case(
    "/decoder/up_sampling_block/activation",
    json!({ "_target_": "torch.nn.ReLU", "cap_value": 1.0 }),
    "decoder.up_sampling_block.activation: ReLU takes no cap_value; remove it"
)]
fn healpix_unet_refuses(#[case] path: &str, #[case] value: Value, #[case] reason: &str) {
    let config = parsed(with(healpix("ConvNeXtBlock"), &[(path, value)]));
    let error = HealpixUNet::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("healpix_unet: {reason}"));
    assert_eq!(config.count(&ParamCount::default).unwrap_err().to_string(), error);
}

#[test]
fn further_arguments_that_healpix_unet_refuses() {
    let error = |config: Value| HealpixUNet::new(&parsed(config), &mut store()).unwrap_err().to_string();
    let mut even = healpix("ConvNeXtBlock");
    even["encoder"]["conv_block"]["kernel_size"] = json!(4);
    assert!(error(even).contains("kernel_size is 4, expected an odd number"));
    let mut fed_back = healpix("ConvNeXtBlock");
    (fed_back["output_time_dim"], fed_back["output_channels"]) = (json!(2), json!(3));
    assert!(error(fed_back).contains("2 steps feed the output back as an input of 2 channels"));
    let mut uneven = healpix("SymmetricConvNeXtBlock");
    (uneven["encoder"]["n_channels"], uneven["decoder"]["n_channels"]) = (json!([2, 4]), json!([4, 2]));
    assert!(error(uneven).contains("adds its 4 input channels, as many as n_channels, to 2 output channels"));
    let mut deep = healpix("BasicConvBlock");
    deep["encoder"]["n_layers"] = json!([1, 1_000_000_000]);
    assert!(error(deep).contains("a basic block of 1000000000 convolutions, expected 1 to 1024"));
    let mut wide = healpix("ConvNeXtBlock");
    wide["encoder"]["conv_block"]["upscale_factor"] = json!(i32::MAX);
    assert!(error(wide).contains("upscale_factor · channels is 4294967294, expected 1 to 2147483647"));
    let mut coupled = healpix("ConvNeXtBlock");
    coupled["couplings"] = json!([{ "params": { "variables": ["sst"], "input_times": ["0h"] } }]);
    assert!(error(coupled).contains("couplings need constants and decoder inputs, but n_constants is 0"));
    let mut recurrent = healpix("ConvNeXtBlock");
    recurrent["decoder"]["recurrent_block"] = json!({ "_target_": "ConvGRUBlock", "kernel_size": 2 });
    assert!(error(recurrent.clone()).contains("recurrent_block.kernel_size is 2, expected an odd number"));
    recurrent["decoder"]["recurrent_block"] = Value::Null;
    HealpixUNet::new(&parsed(recurrent), &mut store()).unwrap();
}

#[test]
fn inputs_of_other_shapes_are_refused() {
    let model = Dlwp::new(&dlwp(), &mut store()).unwrap();
    let text = |shape: &[i64]| model.forward(&random(shape), Mode::Eval).unwrap_err().to_string();
    for shape in [&[1, 2, 5, 4, 4][..], &[1, 2, 6, 4, 2], &[1, 2, 6, 3, 3], &[1, 3, 6, 4, 4], &[2, 6, 4, 4]] {
        assert!(
            text(shape).ends_with("expected [batch, 2, 6, n, n] with n a multiple of 2"),
            "{}",
            text(shape)
        );
    }
    let config = with(healpix("ConvNeXtBlock"), &[("/n_constants", json!(1))]);
    let model = HealpixUNet::new(&parsed(config), &mut store()).unwrap();
    let (fields, constants) = (random(&[1, 12, 1, 2, 4, 4]), random(&[12, 1, 4, 4]));
    let text = |x: &Tensor, d: Option<&Tensor>, c: Option<&Tensor>| {
        model.forward(x, d, c, None, Mode::Eval).unwrap_err().to_string()
    };
    assert!(text(&fields, None, None).ends_with("expected constants [12, 1, 4, 4]"));
    assert!(text(&fields, Some(&fields), Some(&constants)).contains("no decoder inputs"));
    let odd = random(&[1, 12, 1, 2, 5, 5]);
    assert!(text(&odd, None, Some(&constants)).contains("n a multiple of 2"));
    let batch = Batch::default().with("inputs.0", fields);
    let error = Model::forward(&model, &batch, Mode::Eval).unwrap_err().to_string();
    assert!(error.contains("the batch has no array \"inputs.1\""), "{error}");
}

#[test]
fn data_are_compared_with_the_configuration() {
    let fields = |extents: &[usize], in_channels, out_channels| FieldSpec {
        source: "sphere.h5".into(),
        extents: extents.to_vec(),
        in_channels,
        out_channels,
        ..FieldSpec::default()
    };
    dlwp().check(&fields(&[6, 8, 8], 2, 1)).unwrap();
    let error = |config: &DlwpConfig, extents: &[usize]| {
        config.check(&fields(extents, 2, 1)).unwrap_err().to_string()
    };
    assert!(error(&dlwp(), &[64, 64]).ends_with("choose data on a cubed sphere, or another model.type"));
    assert!(error(&dlwp(), &[12, 8, 8]).contains("six square faces with n a multiple of 2"));
    let deep = DlwpConfig { depth: 4, ..dlwp() };
    assert!(error(&deep, &[6, 24, 24]).ends_with("--set model.depth=3"));
    assert!(
        dlwp()
            .check(&fields(&[6, 8, 8], 3, 1))
            .unwrap_err()
            .to_string()
            .ends_with("--set model.nr_input_channels=3")
    );

    let config = parsed(healpix("ConvNeXtBlock"));
    config.check(&fields(&[12, 8, 8], 2, 2)).unwrap();
    let error = |spec: FieldSpec| config.check(&spec).unwrap_err().to_string();
    assert!(error(fields(&[6, 8, 8], 2, 2)).contains("twelve square faces with n a multiple of 2"));
    assert!(error(fields(&[12, 8, 8], 4, 2)).contains("the inputs of sphere.h5 have 4 channels"));
    let constants = parsed(with(healpix("ConvNeXtBlock"), &[("/n_constants", json!(1))]));
    let error = constants.check(&fields(&[12, 8, 8], 2, 2)).unwrap_err().to_string();
    assert!(error.contains("--set model.n_constants=0"), "{error}");
}
