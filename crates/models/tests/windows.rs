//! Transformers of shifted windows over sharded fields against themselves on one rank, and their arguments.

use isobar_array::Generator;
use isobar_models::{
    Architecture, Aurora, AuroraConfig, Batch, Fengwu, FengwuConfig, FieldSpec, Mode, ModelConfig, Pangu,
    PanguConfig, SwinRnn, SwinRnnConfig,
};
use isobar_shard::{ParamCount, ParamStore};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common::twin::{Axis, Twin, split};

fn pangu() -> PanguConfig {
    PanguConfig {
        img_size: [11, 16],
        patch_size: [2, 3, 2],
        embed_dim: 8,
        num_heads: [1, 2, 1, 2],
        window_size: [2, 2, 4],
        ..PanguConfig::default()
    }
}

fn pangu_twin(config: PanguConfig) -> Twin {
    let [rows, columns] = config.img_size.map(|extent| extent as i64);
    let fields = |channels: usize| ("fields", vec![2, channels as i64, rows, columns]);
    let outputs = config.surface_variables + config.upper_air_variables * config.pressure_levels;
    let inputs = outputs + config.surface_masks;
    Twin::new(ModelConfig::new(config), &[fields(inputs)], &[fields(outputs)])
}

/// Fields at the surface only: two variables, and three channels that are inputs only.
fn pangu_of_one_layer() -> PanguConfig {
    PanguConfig {
        img_size: [12, 16],
        window_size: [1, 2, 4],
        surface_variables: 2,
        surface_masks: 3,
        upper_air_variables: 0,
        pressure_levels: 0,
        ..pangu()
    }
}

fn fengwu() -> FengwuConfig {
    FengwuConfig {
        img_size: [9, 16],
        pressure_level: 1,
        embed_dim: 8,
        patch_size: [2, 2],
        num_heads: [1, 2, 1, 1],
        window_size: [2, 3, 4],
        ..FengwuConfig::default()
    }
}

fn fengwu_twin(config: FengwuConfig) -> Twin {
    let [rows, columns] = config.img_size.map(|extent| extent as i64);
    let fields = ("fields", vec![2, config.channels() as i64, rows, columns]);
    Twin::new(ModelConfig::new(config), std::slice::from_ref(&fields), std::slice::from_ref(&fields))
}

fn swin_rnn(times: usize) -> SwinRnnConfig {
    SwinRnnConfig {
        embed_dim: 4,
        num_groups: 2,
        num_heads: 2,
        window_size: 3,
        ..SwinRnnConfig::new(times, [16, 24], 2)
    }
}

fn swin_rnn_twin(config: SwinRnnConfig) -> Twin {
    let [times, rows, columns] = config.img_size.map(|extent| extent as i64);
    let input = if times == 1 { vec![2, 2, rows, columns] } else { vec![2, 2, times, rows, columns] };
    Twin::new(ModelConfig::new(config), &[("fields", input)], &[("fields", vec![2, 2, rows, columns])])
}

/// Three grids, the first of which the windows do not divide.
fn aurora() -> AuroraConfig {
    let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    AuroraConfig {
        img_size: [12, 20],
        latitudes: [82.5, -82.5],
        longitudes: [0.0, 342.0],
        surf_vars: names(&["t", "p"]),
        static_vars: names(&["mask"]),
        atmos_vars: names(&["z"]),
        atmos_levels: vec![250.0, 700.0, 925.0],
        patch_size: 2,
        embed_dim: 4,
        num_heads: 2,
        window_size: [2, 2, 4],
        encoder_depths: vec![2, 1, 2],
        encoder_num_heads: vec![1, 2, 4],
        decoder_depths: vec![1, 2, 2],
        decoder_num_heads: vec![4, 2, 1],
        ..AuroraConfig::default()
    }
}

/// Initial values are those of the source: truncated normal weights, zero biases, zero output of the modulated norms.
#[test]
fn linear_layers_of_aurora_start_small() {
    let mut store = ParamStore::new(Generator::new(1));
    Aurora::new(&AuroraConfig { embed_dim: 64, ..aurora() }, &mut store).unwrap();
    let of_backbone = |name: &str| name.starts_with("backbone") && !name.contains("norm");
    let mut seen = 0;
    for parameter in store.trainable().filter(|parameter| of_backbone(&parameter.name)) {
        let (name, tensor) = (&parameter.name, &parameter.tensor);
        if name.ends_with(".bias") {
            assert_eq!(tensor, &tensor.zeros_like(), "{name}");
        } else if tensor.numel() > 8000 && !name.contains("time_mlp") {
            let deviation = tensor.std(true).double_value(&[]);
            assert!((deviation - 0.02).abs() < 0.001, "{name}: {deviation}");
            seen += 1;
        }
    }
    assert!(seen > 10, "{seen}");
}

fn aurora_twin(config: AuroraConfig) -> Twin {
    let [rows, columns] = config.img_size.map(|extent| extent as i64);
    let fields = |channels: usize| ("fields", vec![2, channels as i64, rows, columns]);
    let inputs = [fields(config.in_channels()), ("time", vec![2, 1])];
    let outputs = [fields(config.out_channels())];
    Twin::new(ModelConfig::new(config), &inputs, &outputs).perturbed(5)
}

#[rstest]
#[case::rows_of_2(split(&[(2, 2)]))]
#[case::columns_of_3(split(&[(3, 3)]))]
#[case::rows_of_4(split(&[(4, 2)]))]
#[case::rows_and_columns(split(&[(2, 2), (2, 3)]))]
#[case::samples_and_rows(vec![(2, vec![("fields", 0), ("time", 0)]), (2, vec![("fields", 2)])])]
fn aurora_is_the_same_on_shards(#[case] axes: Vec<Axis>) {
    aurora_twin(aurora()).check(&axes);
}

#[rstest]
#[case::rows_of_2(split(&[(2, 2)]))]
#[case::columns_of_3(split(&[(3, 3)]))]
#[case::rows_and_columns(split(&[(2, 2), (2, 3)]))]
fn aurora_is_the_same_where_blocks_are_computed_again_and_dropped(#[case] axes: Vec<Axis>) {
    let config = AuroraConfig { gradient_checkpointing: true, drop_path: 0.3, ..aurora() };
    aurora_twin(config).check(&axes);
}

#[rstest]
#[case::patch(AuroraConfig { patch_size: 1, ..aurora() }, "patch_size is 1, expected 2 or more: a patch has an area")]
#[case::levels(
    AuroraConfig { latent_levels: 3, ..aurora() },
    "latent_levels 3 is not divisible by the levels of window_size 2"
)]
#[case::depths(
    AuroraConfig { decoder_depths: vec![1, 2], ..aurora() },
    "decoder_depths has 2 numbers, expected 3, as encoder_depths has"
)]
#[case::blocks(
    AuroraConfig { encoder_depths: vec![usize::MAX, 1, 1], decoder_depths: vec![1, 1, usize::MAX], ..aurora() },
    "encoder_depths[0] is 18446744073709551615, expected a number from 1 to 10000"
)]
#[case::longitude(
    AuroraConfig { longitudes: [-180.0, 162.0], ..aurora() },
    "an end of longitudes is -180, expected a number from 0 to 360"
)]
#[case::names(
    AuroraConfig { static_vars: vec!["t".to_owned()], ..aurora() },
    "surf_vars and static_vars have \"t\", expected names that differ and have no dot: parameters are named by them"
)]
fn aurora_refuses(#[case] config: AuroraConfig, #[case] reason: &str) {
    let error = Aurora::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("aurora: {reason}"));
}

#[rstest]
#[case::rows_of_2(split(&[(2, 2)]))]
#[case::columns_of_3(split(&[(3, 3)]))]
#[case::rows_of_4(split(&[(4, 2)]))]
#[case::rows_and_columns(split(&[(2, 2), (2, 3)]))]
#[case::samples_and_rows(split(&[(2, 0), (2, 2)]))]
fn pangu_is_the_same_on_shards(#[case] axes: Vec<Axis>) {
    pangu_twin(pangu()).check(&axes);
}

/// An even number of rows, windows that do not divide the levels, and blocks that are computed again.
#[rstest]
#[case::rows_of_3(split(&[(3, 2)]))]
#[case::rows_and_columns(split(&[(2, 2), (2, 3)]))]
fn pangu_with_other_windows_is_the_same_on_shards(#[case] axes: Vec<Axis>) {
    let config =
        PanguConfig { img_size: [12, 10], window_size: [3, 3, 4], gradient_checkpointing: true, ..pangu() };
    pangu_twin(config).check(&axes);
}

#[rstest]
#[case::rows_of_4(split(&[(4, 2)]))]
#[case::rows_and_columns(split(&[(2, 2), (2, 3)]))]
fn pangu_of_one_layer_is_the_same_on_shards(#[case] axes: Vec<Axis>) {
    pangu_twin(pangu_of_one_layer()).check(&axes);
}

#[rstest]
#[case::small_windows_rows_of_2(fengwu(), split(&[(2, 2)]))]
#[case::small_windows_columns_of_3(fengwu(), split(&[(3, 3)]))]
#[case::small_windows_rows_of_4(fengwu(), split(&[(4, 2)]))]
#[case::small_windows_rows_and_columns(fengwu(), split(&[(2, 2), (2, 3)]))]
#[case::recomputed_samples_and_columns(FengwuConfig {
    patch_size: [3, 2],
    window_size: [4, 2, 3],
    gradient_checkpointing: true,
    ..fengwu()
}, split(&[(2, 0), (2, 3)]))]
fn fengwu_is_the_same_on_shards(#[case] config: FengwuConfig, #[case] axes: Vec<Axis>) {
    fengwu_twin(config).check(&axes);
}

#[rstest]
#[case::one_time_rows_of_2(swin_rnn(1), split(&[(2, 2)]))]
#[case::one_time_columns_of_3(swin_rnn(1), split(&[(3, 3)]))]
#[case::one_time_rows_of_4(swin_rnn(1), split(&[(4, 2)]))]
#[case::one_time_rows_and_columns(swin_rnn(1), split(&[(2, 2), (2, 3)]))]
#[case::single_windows_recomputed_rows_of_3(SwinRnnConfig {
    window_size: 8,
    gradient_checkpointing: true,
    ..swin_rnn(1)
}, split(&[(3, 2)]))]
#[case::two_times_samples_and_rows(swin_rnn(2), vec![(2, vec![("fields", 0)]), (2, vec![("fields", 3)])])]
fn swin_rnn_is_the_same_on_shards(#[case] config: SwinRnnConfig, #[case] axes: Vec<Axis>) {
    swin_rnn_twin(config).check(&axes);
}

#[rstest]
#[case::pangu(pangu_twin(pangu()).perturbed(3))]
#[case::swin_rnn(swin_rnn_twin(swin_rnn(1)))]
fn empty_shards(#[case] twin: Twin) {
    twin.with_empty_shards().check(&split(&[(3, 2)]));
}

#[test]
fn losses_in_single_precision() {
    pangu_twin(pangu()).check_losses(&split(&[(2, 2), (2, 3)]));
}

#[rstest]
#[case::pangu_rows_of_4(pangu_twin(pangu()), split(&[(4, 2)]))]
#[case::fengwu(fengwu_twin(fengwu()), split(&[(2, 2), (2, 3)]))]
#[case::swin_rnn(swin_rnn_twin(swin_rnn(1)), split(&[(2, 2), (2, 3)]))]
#[case::aurora(aurora_twin(aurora()), split(&[(2, 2), (2, 3)]))]
fn first_steps_in_single_precision(#[case] twin: Twin, #[case] axes: Vec<Axis>) {
    twin.check_single(&axes);
}

fn store() -> ParamStore {
    ParamStore::new(Generator::new(1))
}

#[test]
fn outputs_are_named() {
    let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let model = ModelConfig::new(pangu()).build::<Tensor>(&mut store()).unwrap();
    let batch = model.forward(&Batch::of_fields(zeros(&[1, 72, 11, 16])), Mode::Eval).unwrap();
    assert_eq!(batch.names().collect::<Vec<_>>(), ["fields", "surface", "upper_air"]);
    let fields = batch.get("fields").unwrap();
    assert_eq!(fields.narrow(1, 0, 4), *batch.get("surface").unwrap());
    // Variable by variable, as in the input.
    let upper_air = batch.get("upper_air").unwrap();
    assert_eq!(fields.narrow(1, 4 + 13, 13), upper_air.select(1, 1));

    let model = ModelConfig::new(pangu_of_one_layer()).build::<Tensor>(&mut store()).unwrap();
    let batch = model.forward(&Batch::of_fields(zeros(&[1, 5, 12, 16])), Mode::Eval).unwrap();
    assert_eq!(batch.names().collect::<Vec<_>>(), ["fields", "surface"]);
    assert_eq!(batch.get("fields").unwrap().size(), [1, 2, 12, 16]);

    let model = ModelConfig::new(fengwu()).build::<Tensor>(&mut store()).unwrap();
    let batch = model.forward(&Batch::of_fields(zeros(&[1, 9, 9, 16])), Mode::Eval).unwrap();
    assert_eq!(batch.names().collect::<Vec<_>>(), ["fields", "r", "surface", "t", "u", "v", "z"]);
    assert_eq!(batch.get("fields").unwrap().narrow(1, 8, 1), *batch.get("t").unwrap());
}

/// Blocks are dropped for each sample, and in training only.
#[test]
fn blocks_are_dropped_in_training() {
    let mut store = store().with_options(Kind::Double, Device::Cpu);
    let model = Pangu::new(&pangu(), &mut store).unwrap();
    let whole = isobar_array::Window::whole(&[1, 72, 11, 16]);
    let x = Generator::new(1).normal(&whole, 0.0, 1.0, (Kind::Double, Device::Cpu)).unwrap();
    let two = Tensor::cat(&[&x, &x], 0);
    let differ = |mode: Mode<'_>| {
        let (surface, _) = model.forward(&two, mode).unwrap();
        (surface.get(0) - surface.get(1)).abs().max().double_value(&[])
    };
    assert!(differ(Mode::Eval) < 1e-12);
    assert!(differ(Mode::train(&Generator::new(2))) > 1e-6);
}

#[rstest]
#[case(PanguConfig { patch_size: [4, 4, 4], ..pangu() }, "patch_size is [4, 4, 4], expected patches of 2 levels: [2, 4, 4]")]
#[case(PanguConfig { img_size: [10, 16], ..pangu() }, "img_size has 10 latitudes, expected an odd number or a multiple of the patch's 3")]
#[case(PanguConfig { num_heads: [1, 3, 1, 1], ..pangu() }, "the number of features 16 is not divisible by num_heads[1] 3")]
#[case(PanguConfig { window_size: [2, 0, 4], ..pangu() }, "window_size[1] is 0, expected 1 to 2147483647")]
#[case(PanguConfig { surface_variables: 0, ..pangu() }, "surface_variables is 0, expected 1 to 2147483647")]
fn pangu_refuses(#[case] config: PanguConfig, #[case] reason: &str) {
    let error = Pangu::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("pangu: {reason}"));
}

#[rstest]
#[case(FengwuConfig { num_heads: [2, 3, 1, 1], ..fengwu() }, "the number of features 16 is not divisible by num_heads[1] 3")]
#[case(FengwuConfig { pressure_level: 0, ..fengwu() }, "pressure_level is 0, expected 1 to 2147483647")]
fn fengwu_refuses(#[case] config: FengwuConfig, #[case] reason: &str) {
    let error = Fengwu::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("fengwu: {reason}"));
}

#[rstest]
#[case(SwinRnnConfig { patch_size: [2, 4, 4], ..swin_rnn(2) }, "patch_size is [2, 4, 4], expected all times and single points: [2, 1, 1]")]
#[case(SwinRnnConfig { img_size: [2, 16, 20], ..swin_rnn(2) }, "img_size is [2, 16, 20], expected rows and columns that are multiples of 8")]
#[case(SwinRnnConfig { out_chans: 1, ..swin_rnn(2) }, "in_chans is 2 and out_chans is 1, expected equal numbers: the output is added to the last state")]
#[case(SwinRnnConfig { num_groups: 3, ..swin_rnn(2) }, "embed_dim 4 is not divisible by num_groups 3")]
#[case(SwinRnnConfig { num_heads: 3, ..swin_rnn(2) }, "embed_dim 4 is not divisible by num_heads 3")]
fn swin_rnn_refuses(#[case] config: SwinRnnConfig, #[case] reason: &str) {
    let error = SwinRnn::new(&config, &mut store()).unwrap_err().to_string();
    assert_eq!(error, format!("swin_rnn: {reason}"));
}

#[test]
fn inputs_of_other_shapes_are_errors() {
    let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
    let error = Pangu::new(&pangu(), &mut store()).unwrap().forward(&zeros(&[1, 72, 12, 16]), Mode::Eval);
    let want = "pangu: input has shape [1, 72, 12, 16], expected [batch, 72, 11, 16]";
    assert_eq!(error.unwrap_err().to_string(), want);
    let error = Fengwu::new(&fengwu(), &mut store()).unwrap().forward(&zeros(&[1, 9, 9]), Mode::Eval);
    assert!(error.unwrap_err().to_string().ends_with("expected [batch, 9, 9, 16]"));
    let error =
        SwinRnn::new(&swin_rnn(2), &mut store()).unwrap().forward(&zeros(&[1, 2, 1, 16, 24]), Mode::Eval);
    assert!(error.unwrap_err().to_string().ends_with("expected [batch, 2, 2, 16, 24]"));
}

#[test]
fn configurations_are_compared_with_the_data() {
    let fields = |extents: &[usize], [in_channels, out_channels]: [usize; 2]| FieldSpec {
        source: "data.h5".to_owned(),
        extents: extents.to_vec(),
        in_channels,
        out_channels,
        ..FieldSpec::default()
    };
    pangu().check(&fields(&[11, 16], [72, 69])).unwrap();
    let error = pangu().check(&fields(&[11, 16], [1, 1])).unwrap_err().to_string();
    assert!(error.starts_with("pangu: the model takes 72 channels and gives 69, but"), "{error}");
    assert!(error.contains("set model.surface_variables and model.surface_masks"), "{error}");
    pangu_of_one_layer().check(&fields(&[12, 16], [5, 2])).unwrap();
    let error = pangu().check(&fields(&[13, 16], [72, 69])).unwrap_err().to_string();
    assert!(error.ends_with("--set 'model.img_size=[13, 16]'"), "{error}");
    fengwu().check(&fields(&[9, 16], [9, 9])).unwrap();
    assert!(fengwu().check(&fields(&[9, 16], [9, 8])).is_err());
    swin_rnn(1).check(&fields(&[16, 24], [2, 2])).unwrap();
    let error = swin_rnn(2).check(&fields(&[32, 24], [2, 2])).unwrap_err().to_string();
    let mend = "--set 'model.img_size=[1, 32, 24]' --set 'model.patch_size=[1, 1, 1]'";
    assert!(error.ends_with(mend), "{error}");
    let error = swin_rnn(1).check(&fields(&[16, 20], [2, 2])).unwrap_err().to_string();
    assert!(error.contains("multiples of 8"), "{error}");
}

#[test]
fn absurd_sizes_are_counted_or_refused() {
    const HUGE: usize = i32::MAX as usize;
    let count = |config: &dyn Fn() -> isobar_models::Result<isobar_shard::ModelSize>| config().unwrap();
    let wide = PanguConfig { embed_dim: 1 << 30, num_heads: [1; 4], ..PanguConfig::default() };
    assert!(count(&|| wide.count(&ParamCount::default)).trained > 1 << 64);
    let large = PanguConfig { img_size: [HUGE, HUGE], ..PanguConfig::default() };
    let size = count(&|| large.count(&ParamCount::default));
    assert!(size.trained > 1 << 35 && size.buffers == 0, "masks are not stored: {size:?}");
    let windows = PanguConfig { window_size: [HUGE; 3], ..PanguConfig::default() };
    let error = windows.count(&ParamCount::default).unwrap_err().to_string();
    assert!(error.contains("window_size is too large"), "{error}");
    let levels = FengwuConfig { pressure_level: HUGE, ..FengwuConfig::default() };
    assert!(count(&|| levels.count(&ParamCount::default)).trained > 1 << 35);
    let fields =
        AuroraConfig { img_size: [HUGE / 4 * 4; 2], latent_levels: HUGE - 1, ..AuroraConfig::default() };
    let error = fields.count(&ParamCount::default).unwrap_err().to_string();
    assert!(error.contains("img_size is too large"), "{error}");
    let windows = SwinRnnConfig { window_size: 1 << 30, ..SwinRnnConfig::new(1, [8, 8], 1) };
    assert!(count(&|| windows.count(&ParamCount::default)).trained > 1 << 64);
    let windows = SwinRnnConfig { window_size: usize::MAX, ..SwinRnnConfig::new(1, [8, 8], 1) };
    assert!(windows.count(&ParamCount::default).is_err());
}
