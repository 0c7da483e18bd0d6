//! SongUNet with positions and lead times, and denoisers around it: against golden cases, and on shards against one rank.

use std::time::Duration;

use isobar_array::Generator;
use isobar_collectives::threads;
use isobar_mesh::DeviceMesh;
use isobar_models::{
    Architecture, Batch, EdmPrecondConfig, EdmPrecondSuperResolutionConfig, EdmPreconditionerConfig,
    EmbeddingType, FieldSpec, GridPositions, GridType, LeadTimes, Mode, ModelConfig, PerDim, SongUNetConfig,
    SongUNetPosEmbd, SongUNetPosEmbdConfig, SongUNetPosLtEmbd, SongUNetPosLtEmbdConfig,
};
use isobar_shard::{MeshParams, ParamStore, Placement, ShardTensor};
use rstest::rstest;
use serde_json::json;
use tch::{Device, Kind, Tensor};

use crate::common::twin::{Axis, Twin, split, with_conditions};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn small(extents: [usize; 2], in_channels: usize) -> SongUNetConfig {
    SongUNetConfig {
        model_channels: 4,
        channel_mult: vec![1, 1],
        channel_mult_emb: 1,
        num_blocks: 1,
        attn_resolutions: Vec::new(),
        bottleneck_attention: false,
        dropout: 0.0,
        ..SongUNetConfig::new(extents, in_channels, 1)
    }
}

fn positions(gridtype: GridType, n_grid_channels: usize, extents: [usize; 2]) -> SongUNetPosEmbdConfig {
    let network = small(extents, 2 + n_grid_channels);
    SongUNetPosEmbdConfig { positions: GridPositions { gridtype, n_grid_channels }, network }
}

/// Fields on all of the grid.
fn whole(gridtype: GridType, channels: usize) -> Twin {
    let config = positions(gridtype, channels, [10, 12]);
    let inputs = [("fields", vec![2, 2, 10, 12]), ("noise_labels", vec![2])];
    Twin::new(ModelConfig::new(config), &inputs, &[("fields", vec![2, 1, 10, 12])]).perturbed(5)
}

/// Rows and columns of points of patches of 8 x 6 points from these corners.
fn corners(corners: &[[i64; 2]]) -> Vec<f64> {
    let points = corners.iter().flat_map(|corner| [(corner[0], true), (corner[1], false)]);
    let plane = |(start, rows): (i64, bool)| {
        (0..8).flat_map(move |row| (0..6).map(move |column| start + if rows { row } else { column }))
    };
    points.flat_map(plane).map(|place| place as f64).collect()
}

/// Two patches of each of two samples.
fn patches(gridtype: GridType, channels: usize) -> Twin {
    let config = positions(gridtype, channels, [10, 12]);
    let inputs =
        [("fields", vec![4, 2, 8, 6]), ("noise_labels", vec![1]), ("global_index", vec![2, 2, 8, 6])];
    Twin::new(ModelConfig::new(config), &inputs, &[("fields", vec![4, 1, 8, 6])])
        .with_values("global_index", corners(&[[2, 0], [1, 6]]), Kind::Int64)
        .perturbed(5)
}

#[rstest]
#[case(split(&[(2, 2)]))]
#[case(split(&[(3, 3)]))]
#[case(split(&[(4, 2)]))]
#[case(split(&[(2, 2), (2, 3)]))]
#[case(vec![(2, vec![("fields", 0), ("noise_labels", 0)]), (2, vec![("fields", 2)])])]
fn positions_are_the_same_on_shards(
    #[values(whole(GridType::Sinusoidal, 8), whole(GridType::Learnable, 3))] twin: Twin,
    #[case] axes: Vec<Axis>,
) {
    twin.check(&axes);
}

#[rstest]
#[case(split(&[(2, 3), (2, 2)]))]
fn positions_work_with_empty_shards(
    #[values(whole(GridType::Sinusoidal, 4), whole(GridType::Learnable, 3))] twin: Twin,
    #[case] axes: Vec<Axis>,
) {
    twin.with_empty_shards().check(&axes);
}

#[rstest]
#[case(split(&[(2, 2)]))]
#[case(vec![(3, vec![("fields", 3), ("global_index", 3)])])]
#[case(vec![(2, vec![("fields", 2), ("global_index", 2)]), (2, vec![("fields", 3), ("global_index", 3)])])]
fn patches_are_the_same_on_shards(
    #[values(patches(GridType::Sinusoidal, 4), patches(GridType::Learnable, 3))] twin: Twin,
    #[case] axes: Vec<Axis>,
) {
    twin.check(&axes);
}

fn lead_times() -> SongUNetPosLtEmbdConfig {
    let network = SongUNetConfig { out_channels: 3, ..small([10, 12], 6) };
    let config = SongUNetPosLtEmbdConfig::new(2, network);
    let lead_times = LeadTimes { lead_time_steps: 3, prob_channels: vec![2, 0], ..config.lead_times };
    let positions = GridPositions { gridtype: GridType::Linear, n_grid_channels: 2 };
    SongUNetPosLtEmbdConfig { lead_times, positions, ..config }
}

fn lead_times_of_the_grid() -> Twin {
    let inputs = [("fields", vec![2, 2, 10, 12]), ("noise_labels", vec![2]), ("lead_time_label", vec![2])];
    Twin::new(ModelConfig::new(lead_times()), &inputs, &[("fields", vec![2, 3, 10, 12])])
        .with_values("lead_time_label", vec![2.0, 0.0], Kind::Int64)
        .perturbed(5)
}

/// Two patches of each of two samples.
fn lead_times_of_patches() -> Twin {
    let inputs = [
        ("fields", vec![4, 2, 8, 6]),
        ("noise_labels", vec![1]),
        ("global_index", vec![2, 2, 8, 6]),
        ("lead_time_label", vec![2]),
    ];
    Twin::new(ModelConfig::new(lead_times()), &inputs, &[("fields", vec![4, 3, 8, 6])])
        .with_values("global_index", corners(&[[2, 0], [1, 6]]), Kind::Int64)
        .with_values("lead_time_label", vec![2.0, 0.0], Kind::Int64)
        .perturbed(5)
}

#[rstest]
#[case(split(&[(4, 2)]))]
#[case(split(&[(3, 3)]))]
#[case(split(&[(2, 2), (2, 3)]))]
#[case(vec![(2, vec![("fields", 0), ("noise_labels", 0), ("lead_time_label", 0)]), (2, vec![("fields", 3)])])]
fn lead_times_are_the_same_on_shards(#[case] axes: Vec<Axis>) {
    lead_times_of_the_grid().check(&axes);
}

#[rstest]
#[case(split(&[(2, 2)]))]
#[case(vec![(2, vec![("fields", 2), ("global_index", 2)]), (2, vec![("fields", 3), ("global_index", 3)])])]
fn lead_times_of_patches_are_the_same_on_shards(#[case] axes: Vec<Axis>) {
    lead_times_of_patches().check(&axes);
}

#[rstest]
#[case(LeadTimes::new(0), "lead_time_channels is 0")]
#[case(LeadTimes { lead_time_steps: 0, ..LeadTimes::new(2) }, "lead_time_steps is 0")]
#[case(LeadTimes { prob_channels: vec![3], ..LeadTimes::new(2) }, "prob_channels is [3], expected different channels")]
#[case(LeadTimes { prob_channels: vec![1, 1], ..LeadTimes::new(2) }, "prob_channels is [1, 1]")]
#[case(LeadTimes { lead_time_mode: false, ..LeadTimes::new(2) }, "the model is song_unet_pos_embd")]
#[case(LeadTimes::new(4), "in_channels is 6, expected more than 6")]
fn lead_times_refuse(#[case] given: LeadTimes, #[case] reason: &str) {
    let config = SongUNetPosLtEmbdConfig { lead_times: given, ..lead_times() };
    let error = SongUNetPosLtEmbd::new(&config, &mut ParamStore::new(Generator::new(1))).unwrap_err();
    let error = error.to_string();
    assert!(error.starts_with("song_unet_pos_lt_embd: ") && error.contains(reason), "{error}");
}

#[test]
fn lead_times_are_read_from_tables() {
    let config = ModelConfig::new(lead_times());
    let written = serde_json::to_value(&config).unwrap();
    assert_eq!((&written["lead_time_channels"], &written["N_grid_channels"]), (&json!(2), &json!(2)));
    assert_eq!(serde_json::from_value::<ModelConfig>(written).unwrap(), config);
    let fields = FieldSpec { extents: vec![10, 12], in_channels: 2, out_channels: 3, ..FieldSpec::default() };
    let fields = FieldSpec { arrays: vec!["time".into()], ..fields };
    let error = config.check(&fields).unwrap_err().to_string();
    assert!(error.contains("reads the array \"lead_time_label\""), "{error}");
    let arrays = vec!["time".into(), "lead_time_label".into()];
    config.check(&FieldSpec { arrays, ..fields }).unwrap();
}

#[rstest]
#[case(positions(GridType::Sinusoidal, 6, [8, 8]), "N_grid_channels is 6, expected a multiple of 4")]
#[case(positions(GridType::Linear, 4, [8, 8]), "N_grid_channels is 4, expected 2 up to 1024 for gridtype \"linear\"")]
#[case(positions(GridType::Test, 3, [8, 8]), "N_grid_channels is 3")]
#[case(positions(GridType::Learnable, 2000, [8, 8]), "N_grid_channels is 2000")]
#[case(SongUNetPosEmbdConfig::new(small([8, 8], 4)), "in_channels is 4, expected more than 4")]
fn positions_refuse(#[case] config: SongUNetPosEmbdConfig, #[case] reason: &str) {
    let error = SongUNetPosEmbd::new(&config, &mut ParamStore::new(Generator::new(1))).unwrap_err();
    let error = error.to_string();
    assert!(error.starts_with("song_unet_pos_embd: ") && error.contains(reason), "{error}");
}

#[test]
fn positions_refuse_arrays_of_other_shapes() {
    let config = positions(GridType::Linear, 2, [8, 8]);
    let model = SongUNetPosEmbd::new(&config, &mut ParamStore::new(Generator::new(1))).unwrap();
    let error = |x: &[i64], index: Option<&[i64]>| {
        let others = Batch::default().with("noise_labels", Tensor::zeros([1], FLOAT));
        let others = match index {
            Some(shape) => others.with("global_index", Tensor::zeros(shape, (Kind::Int64, Device::Cpu))),
            None => others,
        };
        let y = model.forward(&Tensor::zeros(x, FLOAT), &others, Mode::Eval);
        y.map_err(|error| error.to_string()).err().unwrap_or_default()
    };
    assert_eq!(error(&[3, 2, 8, 8], None), "");
    assert_eq!(error(&[4, 2, 4, 6], Some(&[2, 2, 4, 6])), "");
    assert!(error(&[3, 4, 8, 8], None).contains("[batch, 2, height, width]"));
    assert!(error(&[3, 2, 4, 8], None).contains("fields of 8 × 8 points, or the array \"global_index\""));
    assert!(error(&[3, 2, 4, 6], Some(&[2, 2, 4, 6])).contains("a number of patches that divides 3"));
    assert!(error(&[4, 2, 4, 6], Some(&[2, 2, 6, 4])).contains("[patch, 2, 4, 6] for global_index"));
}

/// Points beside the grid are not taken for those of the row before or behind.
#[rstest]
#[case([0, 12])]
#[case([1, -1])]
#[case([10, 0])]
#[case([-1, 5])]
fn points_outside_the_grid_are_refused(#[case] point: [i64; 2]) {
    let config = positions(GridType::Learnable, 2, [10, 12]);
    // The first of the points of a patch lies there, the others in the first row and column.
    let arrays = || {
        let index = Tensor::zeros([1, 2, 8, 6], (Kind::Int64, Device::Cpu));
        for (dim, place) in (0..).zip(point) {
            let _ = index.select(1, dim).narrow(1, 0, 1).narrow(2, 0, 1).fill_(place);
        }
        (Tensor::zeros([1, 2, 8, 6], FLOAT), Tensor::zeros([1], FLOAT), index)
    };
    let model = SongUNetPosEmbd::new(&config, &mut ParamStore::new(Generator::new(1))).unwrap();
    let (x, noise, index) = arrays();
    let others = Batch::default().with("noise_labels", noise).with("global_index", index);
    let error = model.forward(&x, &others, Mode::Eval).unwrap_err().to_string();
    assert!(error.contains("index_select"), "{error}");
    let errors = threads::run(2, Duration::from_secs(60), |group| {
        let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
        let mut store = ParamStore::new(Generator::new(1));
        let sharding = config.sharding();
        let mut params = MeshParams::new(&mut store, &mesh).laid_out(sharding.parameter_layouts());
        let model = SongUNetPosEmbd::new(&config, &mut params).unwrap();
        let on_mesh = |x: &Tensor, placement| ShardTensor::distribute(x, &mesh, &[placement]).unwrap();
        let (x, noise, index) = arrays();
        let others = Batch::default()
            .with("noise_labels", on_mesh(&noise, Placement::Replicate))
            .with("global_index", on_mesh(&index, Placement::Shard(2)));
        let y = model.forward(&on_mesh(&x, Placement::Shard(2)), &others, Mode::Eval);
        y.map_err(|error| error.to_string()).err().unwrap_or_default()
    });
    assert!(errors.iter().all(|error| error.contains("out of range")), "{errors:?}");
}

/// A denoiser given coarse fields of one channel.
fn super_resolution(gridtype: GridType, channels: usize) -> Twin {
    let config = EdmPrecondSuperResolutionConfig::new(positions(gridtype, channels, [10, 12]));
    let shape = || vec![2, 1, 10, 12];
    let inputs = [("fields", shape()), ("conditions", shape()), ("sigma", vec![2])];
    let twin = Twin::new(ModelConfig::new(config), &inputs, &[("fields", shape())]);
    twin.with_values("sigma", vec![0.4, 1.7], Kind::Double).perturbed(5)
}

#[rstest]
#[case(with_conditions(&[(2, 2)]))]
#[case(with_conditions(&[(3, 2)]))]
#[case(split(&[(4, 3)]))]
#[case(with_conditions(&[(2, 2), (2, 3)]))]
#[case(vec![(2, vec![("fields", 0), ("conditions", 0), ("sigma", 0)]), (2, vec![("fields", 2), ("conditions", 2)])])]
fn super_resolution_is_the_same_on_shards(
    #[values(super_resolution(GridType::Sinusoidal, 4), super_resolution(GridType::Learnable, 2))] twin: Twin,
    #[case] axes: Vec<Axis>,
) {
    twin.check(&axes);
}

#[rstest]
#[case::positions(whole(GridType::Sinusoidal, 4))]
#[case::trained_positions(whole(GridType::Learnable, 3))]
#[case::lead_times(lead_times_of_the_grid())]
#[case::super_resolution(super_resolution(GridType::Learnable, 2))]
fn first_steps_in_single_precision(#[case] twin: Twin) {
    twin.check_single(&with_conditions(&[(2, 2), (2, 3)]));
}

/// Each rank of the axis "domain" holds rows of the trained positions and lead times only.
#[rstest]
#[case::positions(whole(GridType::Learnable, 3), split(&[(3, 2)]))]
#[case::positions_in_columns(whole(GridType::Learnable, 3), split(&[(2, 3)]))]
#[case::patches(patches(GridType::Learnable, 3), vec![(2, vec![("fields", 2), ("global_index", 2)])])]
#[case::replicated_patches(patches(GridType::Learnable, 3), vec![(3, vec![("fields", 0)])])]
#[case::lead_times(lead_times_of_the_grid(), split(&[(2, 2), (2, 3)]))]
#[case::lead_times_of_patches(lead_times_of_patches(), vec![(3, vec![("fields", 3), ("global_index", 3)])])]
#[case::super_resolution(super_resolution(GridType::Learnable, 2), vec![(2, vec![("fields", 2), ("conditions", 2)])])]
fn split_tables_are_the_same_on_shards(#[case] twin: Twin, #[case] axes: Vec<Axis>) {
    twin.laid_out().check(&axes);
}

#[test]
fn super_resolution_is_read_from_tables() {
    let table = json!({
        "type": "edm_precond_super_resolution", "img_resolution": 8, "img_in_channels": 6, "img_out_channels": 1,
        "model_channels": 4, "channel_mult": [1, 1],
    });
    let config: ModelConfig = serde_json::from_value(table.clone()).unwrap();
    let written = serde_json::to_value(&config).unwrap();
    assert_eq!(written["model_type"], "SongUNetPosEmbd");
    assert_eq!(serde_json::from_value::<ModelConfig>(written).unwrap(), config);
    let fields = FieldSpec { extents: vec![8, 8], in_channels: 1, out_channels: 1, ..FieldSpec::default() };
    let arrays = vec!["sigma".into(), "conditions".into()];
    let fields = FieldSpec { condition_channels: 2, arrays, ..fields };
    config.check(&fields).unwrap();
    let mut of_lead_times = table.clone();
    of_lead_times["model_type"] = json!("SongUNetPosLtEmbd");
    of_lead_times["lead_time_channels"] = json!(2);
    of_lead_times["img_in_channels"] = json!(8);
    let of_lead_times: ModelConfig = serde_json::from_value(of_lead_times).unwrap();
    let error = of_lead_times.check(&fields).unwrap_err().to_string();
    assert!(error.contains("reads the array \"lead_time_label\""), "{error}");
    let on_patches = |patch| FieldSpec { patch_extents: Some(patch), ..fields.clone() };
    config.check(&on_patches(vec![4, 6])).unwrap();
    let error = config.check(&on_patches(vec![4, 5])).unwrap_err().to_string();
    assert!(error.contains("patch_shape is [4, 5], expected multiples of 2"), "{error}");
    assert!(error.ends_with("--set 'task.patches.patch_shape=[4, 6]'"), "{error}");
    let mut of_one_grid = table.clone();
    of_one_grid["additive_pos_embed"] = json!(true);
    let of_one_grid: ModelConfig = serde_json::from_value(of_one_grid).unwrap();
    let error = of_one_grid.check(&on_patches(vec![4, 6])).unwrap_err().to_string();
    assert!(
        error.contains("computes on [8, 8] points only; --set model.additive_pos_embed=false"),
        "{error}"
    );
    let error = config.check(&FieldSpec { condition_channels: 3, ..fields }).unwrap_err().to_string();
    assert!(error.contains("--set model.img_in_channels=7"), "{error}");
    assert!(config.denoises().is_some());
    for (key, value, reason) in [
        ("label_dim", json!(2), "unknown field `label_dim`"),
        ("in_channels", json!(2), "unknown field `in_channels`"),
        ("use_fp16", json!(true), "use_fp16 is not supported"),
        ("width", json!(2), "unknown field `width`"),
    ] {
        let mut wrong = table.clone();
        wrong[key] = value;
        let error = serde_json::from_value::<ModelConfig>(wrong).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    let mut wrong = table;
    wrong["img_in_channels"] = json!(4);
    let config: ModelConfig = serde_json::from_value(wrong).unwrap();
    let error = config.check(&FieldSpec::default()).unwrap_err().to_string();
    assert!(error.contains("img_in_channels is 4, expected 5 or more"), "{error}");
}

/// The schema of a denoiser shows the defaults of its default network, and says which are those of others.
#[test]
fn denoisers_show_the_defaults_of_their_default_network() {
    let denoiser = schemars::schema_for!(EdmPrecondSuperResolutionConfig).to_value();
    for (key, default, of_others) in [
        (
            "channel_mult",
            json!([1, 2, 2, 2, 2]),
            "By default `[1, 2, 2, 2]` with `SongUNet`. By default `[1, 2, 3, 4]` with `DhariwalUNet`.",
        ),
        (
            "attn_resolutions",
            json!([28]),
            "By default `[16]` with `SongUNet`. By default `[32, 16, 8]` with `DhariwalUNet`.",
        ),
        ("dropout", json!(0.13), "By default `0.1` with `SongUNet` and `DhariwalUNet`."),
    ] {
        let shown = &denoiser["properties"][key];
        let description = shown["description"].as_str().unwrap();
        assert!(shown["default"] == default && description.ends_with(of_others), "{shown}");
    }
    let denoiser = schemars::schema_for!(EdmPrecondConfig).to_value();
    let shown = &denoiser["properties"]["dropout"];
    let of_others = "By default `0.13` with `SongUNetPosEmbd` and `SongUNetPosLtEmbd`.";
    assert!(
        shown["default"] == 0.1 && shown["description"].as_str().unwrap().ends_with(of_others),
        "{shown}"
    );
    let shown = &denoiser["properties"]["lead_time_channels"]["description"];
    assert!(shown.as_str().unwrap().ends_with("Needed with `SongUNetPosLtEmbd`."), "{shown}");
    assert_eq!(denoiser["properties"]["lead_time_mode"]["default"], true);
}

/// The keys of the positions stand beside the network's, alone and within a denoiser.
#[test]
fn positions_are_read_from_tables() {
    let table = json!({
        "type": "song_unet_pos_embd", "img_resolution": 8, "in_channels": 3, "out_channels": 1, "gridtype": "linear",
        "N_grid_channels": 2, "model_channels": 4, "channel_mult": [1, 1],
    });
    let network: ModelConfig = serde_json::from_value(table.clone()).unwrap();
    let written = serde_json::to_value(&network).unwrap();
    assert_eq!((&written["gridtype"], &written["dropout"]), (&json!("linear"), &json!(0.13)));
    assert_eq!(serde_json::from_value::<ModelConfig>(written).unwrap(), network);
    let denoiser = json!({ "type": "edm_preconditioner", "model": table });
    let denoiser: ModelConfig = serde_json::from_value(denoiser).unwrap();
    assert_eq!(denoiser, ModelConfig::new(EdmPreconditionerConfig::new(network)));
    let fields = FieldSpec { extents: vec![8, 8], in_channels: 1, out_channels: 1, ..FieldSpec::default() };
    let fields = FieldSpec { arrays: vec!["sigma".into()], ..fields };
    denoiser.check(&fields).unwrap();
    let other = FieldSpec { condition_channels: 2, ..fields };
    let error = denoiser.check(&other).unwrap_err().to_string();
    assert!(error.contains("model adds 2; --set model.model.in_channels=5"), "{error}");
    let mut wrong = serde_json::to_value(&denoiser).unwrap()["model"].clone();
    wrong["width"] = json!(2);
    let error = serde_json::from_value::<ModelConfig>(wrong).unwrap_err().to_string();
    assert!(error.contains("unknown field `width`"), "{error}");
}

/// Lead times are of another model, alone and within a denoiser; so they are in PhysicsNeMo.
#[rstest]
#[case("lead_time_mode", json!(true))]
#[case("lead_time_channels", json!(4))]
#[case("lead_time_steps", json!(9))]
#[case("prob_channels", json!([0]))]
fn positions_alone_refer_to_the_model_with_lead_times(#[case] key: &str, #[case] value: serde_json::Value) {
    for mut table in [
        json!({ "type": "song_unet_pos_embd", "img_resolution": 8, "in_channels": 5, "out_channels": 1 }),
        json!({
            "type": "edm_precond_super_resolution", "img_resolution": 8, "img_in_channels": 6, "img_out_channels": 1,
        }),
    ] {
        let _ = serde_json::from_value::<ModelConfig>(table.clone()).unwrap();
        table[key] = value.clone();
        let error = serde_json::from_value::<ModelConfig>(table).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains("use song_unet_pos_lt_embd"), "{error}");
    }
}

#[test]
fn regression_with_positions_needs_no_time() {
    let config = positions(GridType::Linear, 2, [8, 8]);
    let network = SongUNetConfig {
        embedding_type: EmbeddingType::Zero,
        img_resolution: PerDim::All(8),
        ..config.network.clone()
    };
    let regression = SongUNetPosEmbdConfig { network, ..config.clone() };
    let fields = FieldSpec { extents: vec![8, 8], in_channels: 2, out_channels: 1, ..FieldSpec::default() };
    regression.check(&fields).unwrap();
    assert!(config.check(&fields).unwrap_err().to_string().contains("reads the array \"time\""));
}
