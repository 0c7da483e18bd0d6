//! Transolver, FLARE and GeoTransolver: points split over ranks against one rank, what ranks exchange, and what is refused.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use isobar_array::{Generator, Window};
use isobar_models::{
    Activation, Architecture, Batch, FieldSpec, Flare, FlareConfig, GeoAttention, GeoTransolver,
    GeoTransolverConfig, Mode, ModelConfig, StateMixing, Streams, Transolver, TransolverConfig,
};
use isobar_shard::{ParamCount, ParamStore};
use isobar_torch::guard::Autocast;
use rstest::rstest;
use tch::{Device, Kind, Tensor};

use crate::common::received;
use crate::common::twin::{Axis, Twin, split};

fn transolver(functional_dim: usize, out_dim: usize) -> TransolverConfig {
    TransolverConfig {
        n_layers: 2,
        n_hidden: 8,
        n_head: 2,
        mlp_ratio: 2,
        slice_num: 4,
        ..TransolverConfig::new(functional_dim, out_dim)
    }
}

fn flare(functional_dim: usize, out_dim: usize) -> FlareConfig {
    FlareConfig {
        n_layers: 2,
        n_hidden: 8,
        n_head: 2,
        mlp_ratio: 2,
        slice_num: 4,
        ..FlareConfig::new(functional_dim, out_dim)
    }
}

fn geo(functional_dim: usize, out_dim: usize) -> GeoTransolverConfig {
    GeoTransolverConfig {
        geometry_dim: Some(3),
        global_dim: Some(2),
        n_layers: 2,
        n_hidden: 8,
        n_head: 2,
        mlp_ratio: 2,
        slice_num: 4,
        ..GeoTransolverConfig::new(functional_dim, out_dim)
    }
}

/// Axes that split the points of these arrays.
fn points(ranks: i64, arrays: &[&'static str]) -> Axis {
    (ranks, arrays.iter().map(|name| (*name, 1)).collect())
}

/// Axes that split the samples of these arrays.
fn samples(ranks: i64, arrays: &[&'static str]) -> Axis {
    (ranks, arrays.iter().map(|name| (*name, 0)).collect())
}

const STREAMS: [&str; 7] = [
    "local_embedding.0",
    "local_embedding.1",
    "local_positions.0",
    "local_positions.1",
    "geometry",
    "fields.0",
    "fields.1",
];

const LISTED: [&str; 3] = ["fx", "embedding", "fields"];

/// PhysicsNeMo's slice attention on a grid has no trained probability of dropout.
#[rstest]
#[case(GeoAttention::Gale, Some(vec![5, 6]), false)]
#[case(GeoAttention::Gale, None, true)]
#[case(GeoAttention::GaleFa, Some(vec![5, 6]), true)]
fn trained_dropouts_are_those_of_the_source(
    #[case] attention_type: GeoAttention,
    #[case] structured_shape: Option<Vec<usize>>,
    #[case] of_output: bool,
) {
    let config = GeoTransolverConfig {
        attention_type,
        structured_shape,
        concrete_dropout: true,
        geometry_dim: Some(2),
        global_dim: None,
        ..geo(2, 1)
    };
    let mut store = ParamStore::new(Generator::new(1));
    GeoTransolver::new(&config, &mut store).unwrap();
    let has = |name: &str| store.get(&format!("blocks.0.{name}.p_logit")).is_some();
    assert_eq!([has("Attn.out_dropout"), has("attn_dropout"), has("ffn_dropout")], [of_output, true, true]);
}

/// Times near 1000 differ by less than bfloat16 resolves.
#[test]
fn times_keep_their_precision_in_mixed_precision() {
    let config = TransolverConfig { embedding_dim: Some(2), time_input: true, ..transolver(3, 2) };
    let model = Transolver::new(&config, &mut ParamStore::new(Generator::new(1))).unwrap();
    let ones = |shape: &[i64]| Tensor::ones(shape, (Kind::Float, Device::Cpu));
    let of = |time: f32| {
        let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16).unwrap();
        let batch = Batch::default().with("fx", ones(&[1, 7, 3])).with("embedding", ones(&[1, 7, 2]));
        let batch = batch.with("time", Tensor::from_slice(&[time]));
        model.forward(&batch, Mode::Eval).unwrap().get("fields").unwrap().shallow_clone()
    };
    assert_ne!(of(1000.0), of(1001.0));
}

/// Lists of points with an embedding and a time.
fn listed(config: ModelConfig) -> Twin {
    let arrays = [("fx", vec![2, 23, 3]), ("embedding", vec![2, 23, 2]), ("time", vec![2])];
    Twin::new(config, &arrays, &[("fields", vec![2, 23, 2])]).perturbed(5)
}

#[rstest]
#[case::two(vec![points(2, &LISTED)])]
#[case::three(vec![points(3, &LISTED)])]
#[case::four(vec![points(4, &LISTED)])]
#[case::batch(vec![samples(2, &["fx", "embedding", "time", "fields"]), points(2, &LISTED)])]
fn lists_of_points_are_those_of_one_rank(
    #[values(0, 1, 2, 3)] model: usize,
    #[values(1, 3)] tiles: usize,
    #[case] axes: Vec<Axis>,
) {
    let config = match model {
        0 => ModelConfig::new(TransolverConfig {
            embedding_dim: Some(2),
            time_input: true,
            tiles,
            ..transolver(3, 2)
        }),
        // More slices than features: points are projected, not slices.
        1 => ModelConfig::new(TransolverConfig {
            embedding_dim: Some(2),
            slice_num: 9,
            act: Activation::Prelu,
            gradient_checkpointing: true,
            tiles,
            ..transolver(3, 2)
        }),
        // The noise of training is that of the points, whatever the mesh and the tiles.
        2 => ModelConfig::new(TransolverConfig {
            embedding_dim: Some(2),
            plus: true,
            gradient_checkpointing: tiles > 1,
            tiles,
            ..transolver(3, 2)
        }),
        _ => ModelConfig::new(FlareConfig {
            embedding_dim: Some(2),
            time_input: true,
            gradient_checkpointing: tiles > 1,
            tiles,
            ..flare(3, 2)
        }),
    };
    listed(config).check(&axes);
}

/// Models on a grid of two or three dims.
fn grid(model: &str, tiles: usize, dims: usize) -> Twin {
    let shape = [9, 7, 5][..dims].to_vec();
    let structured_shape = Some(shape.clone());
    let config = match model {
        "transolver" | "plus" => ModelConfig::new(TransolverConfig {
            embedding_dim: Some(dims),
            plus: model == "plus",
            structured_shape,
            tiles,
            ..transolver(2, 1)
        }),
        "unified" => {
            let unified_pos = dims == 2;
            ModelConfig::new(TransolverConfig {
                unified_pos,
                reference: 3,
                structured_shape,
                tiles,
                ..transolver(2, 1)
            })
        }
        "flare" => ModelConfig::new(FlareConfig {
            embedding_dim: Some(dims),
            structured_shape,
            tiles,
            ..flare(2, 1)
        }),
        _ => ModelConfig::new(GeoTransolverConfig {
            geometry_dim: Some(dims),
            global_dim: None,
            structured_shape,
            concrete_dropout: model == "concrete",
            tiles,
            ..geo(2, 1)
        }),
    };
    let fields =
        |channels: i64| [&[2, channels], &shape.iter().map(|&n| n as i64).collect::<Vec<_>>()[..]].concat();
    Twin::new(config, &[("fields", fields(2))], &[("fields", fields(1))]).perturbed(6)
}

#[rstest]
#[case::rows(split(&[(3, 2)]), 2)]
#[case::columns(split(&[(2, 3)]), 2)]
#[case::four(split(&[(4, 2)]), 2)]
#[case::both(split(&[(2, 2), (2, 3)]), 2)]
#[case::batch(split(&[(2, 0), (2, 3)]), 2)]
#[case::deep(split(&[(2, 2), (2, 4)]), 3)]
fn grids_are_those_of_one_rank(
    #[values("transolver", "plus", "unified", "flare", "geo", "concrete")] model: &str,
    #[values(1, 2)] tiles: usize,
    #[case] axes: Vec<Axis>,
    #[case] dims: usize,
) {
    grid(model, tiles, dims).check(&axes);
}

/// The last of three ranks holds all rows but one, and the first holds none.
#[rstest]
fn ranks_may_hold_nothing(#[values("transolver", "flare", "geo")] model: &str) {
    let config = match model {
        "transolver" => {
            ModelConfig::new(TransolverConfig { structured_shape: Some(vec![5, 6]), ..transolver(2, 1) })
        }
        "flare" => ModelConfig::new(FlareConfig { tiles: 2, ..flare(2, 1) }),
        _ => ModelConfig::new(GeoTransolverConfig {
            geometry_dim: Some(2),
            global_dim: None,
            attention_type: GeoAttention::GaleFa,
            structured_shape: Some(vec![5, 6]),
            ..geo(2, 1)
        }),
    };
    let twin = Twin::new(config, &[("fields", vec![2, 2, 5, 6])], &[("fields", vec![2, 1, 5, 6])]);
    twin.perturbed(6).with_empty_shards().check(&split(&[(3, 2)]));
}

#[rstest]
#[case::two(vec![points(2, &["local_embedding", "geometry", "fields"])])]
#[case::points_alone(vec![points(3, &["local_embedding", "fields"])])]
#[case::four(vec![points(4, &["local_embedding", "geometry", "fields"])])]
#[case::geometry_alone(vec![points(2, &["geometry"])])]
#[case::both(vec![samples(2, &["local_embedding", "geometry", "global_embedding", "fields"]),
                  points(2, &["local_embedding", "geometry", "fields"])])]
fn geometries_are_those_of_one_rank(
    #[values(GeoAttention::Gale, GeoAttention::GaleFa)] attention_type: GeoAttention,
    #[values(StateMixing::Weighted, StateMixing::ConcatProject)] state_mixing_mode: StateMixing,
    #[values(1, 3)] tiles: usize,
    #[case] axes: Vec<Axis>,
) {
    let gradient_checkpointing = tiles > 1;
    let config =
        GeoTransolverConfig { attention_type, state_mixing_mode, tiles, gradient_checkpointing, ..geo(3, 2) };
    let arrays = [
        ("local_embedding", vec![2, 17, 3]),
        ("geometry", vec![2, 11, 3]),
        ("global_embedding", vec![2, 2, 2]),
    ];
    let twin = Twin::new(ModelConfig::new(config), &arrays, &[("fields", vec![2, 17, 2])]);
    twin.perturbed(4).check(&axes);
}

/// Two streams with features of their neighbours, whose points and geometry are split.
#[rstest]
#[case::two(vec![points(2, &STREAMS)])]
#[case::three(vec![points(3, &STREAMS)])]
#[case::four(vec![points(4, &STREAMS)])]
#[case::one_stream(vec![points(3, &["local_embedding.0", "local_positions.0", "fields.0"])])]
#[case::both(vec![samples(2, &[&STREAMS[..], &["global_embedding"]].concat()), points(2, &STREAMS)])]
fn streams_are_those_of_one_rank(#[values(false, true)] plus: bool, #[case] axes: Vec<Axis>) {
    let config = GeoTransolverConfig {
        functional_dim: Streams::Each(vec![3, 2]),
        out_dim: Streams::Each(vec![1, 2]),
        include_local_features: true,
        radii: Some(vec![0.5, 1.5]),
        neighbors_in_radius: Some(vec![2, 5]),
        n_hidden_local: 4,
        plus,
        tiles: 1 + usize::from(plus),
        ..geo(3, 2)
    };
    let arrays = [
        ("local_embedding.0", vec![2, 17, 3]),
        ("local_embedding.1", vec![2, 9, 2]),
        ("local_positions.0", vec![2, 17, 3]),
        ("local_positions.1", vec![2, 9, 3]),
        ("geometry", vec![2, 11, 3]),
        ("global_embedding", vec![2, 2, 2]),
    ];
    let outputs = [("fields.0", vec![2, 17, 1]), ("fields.1", vec![2, 9, 2])];
    Twin::new(ModelConfig::new(config), &arrays, &outputs).perturbed(4).check(&axes);
}

/// With two points and five neighbours asked for, the rest are zeros; beyond the radius, too.
#[test]
fn neighbours_beyond_the_radius_are_zeros() {
    let config = GeoTransolverConfig {
        include_local_features: true,
        radii: Some(vec![0.25]),
        neighbors_in_radius: Some(vec![5]),
        n_hidden_local: 4,
        global_dim: None,
        ..geo(1, 1)
    };
    let model = GeoTransolver::new(&config, &mut double()).unwrap();
    let run = |far: f64| {
        let positions =
            Tensor::from_slice(&[0.0f64, 0.0, 0.0, 0.2, 0.0, 0.0, far, 0.0, 0.0]).reshape([1, 3, 3]);
        let batch = Batch::default()
            .with("local_embedding", dense(1, &[1, 3, 1]))
            .with("geometry", dense(2, &[1, 3, 3]) * 0.0);
        let y = model
            .forward(&batch.with("local_positions", positions), Mode::Eval)
            .unwrap()
            .take("fields")
            .unwrap();
        y.narrow(1, 0, 2)
    };
    assert!(run(5.0).allclose(&run(9.0), 1e-12, 1e-12, false));
    assert!(!run(5.0).allclose(&run(0.1), 1e-6, 1e-6, false));
}

/// Noise is of training alone, and differs from step to step.
#[test]
fn noise_of_transolver_plus_is_of_training() {
    let model = Transolver::new(&TransolverConfig { plus: true, ..transolver(3, 2) }, &mut double()).unwrap();
    let generator = Generator::new(5);
    let run = |mode: Mode<'_>| {
        let batch = Batch::default().with("fx", dense(1, &[2, 9, 3]));
        model.forward(&batch, mode).unwrap().take("fields").unwrap()
    };
    assert_eq!(run(Mode::Eval), run(Mode::Eval));
    assert_ne!(run(Mode::train(&generator)), run(Mode::train(&generator)));
    assert_eq!(run(Mode::train(&Generator::new(5))), run(Mode::train(&Generator::new(5))));
}

#[test]
fn losses_in_single_precision() {
    let config =
        TransolverConfig { structured_shape: Some(vec![9, 7]), embedding_dim: Some(2), ..transolver(2, 1) };
    let twin =
        Twin::new(ModelConfig::new(config), &[("fields", vec![2, 2, 9, 7])], &[("fields", vec![2, 1, 9, 7])]);
    twin.check_losses(&split(&[(3, 2)]));
}

#[rstest]
fn first_steps_in_single_precision(#[values("transolver", "flare", "geo")] model: &str) {
    grid(model, 2, 2).check_single(&split(&[(2, 2), (2, 3)]));
}

/// Bytes of sums of so many elements that each rank receives from three others, in each of two blocks.
fn reduced(elements: u64) -> u64 {
    2 * 3 * 4 * elements
}

#[rstest]
fn the_exchange_does_not_grow_with_the_number_of_points(
    #[values("transolver", "flare", "geo")] model: &str,
    #[values(1, 2)] tiles: usize,
) {
    let (config, name) = match model {
        "transolver" => (ModelConfig::new(TransolverConfig { tiles, ..transolver(3, 1) }), "fx"),
        "flare" => (ModelConfig::new(FlareConfig { tiles, ..flare(3, 1) }), "fx"),
        _ => {
            let config = GeoTransolverConfig { geometry_dim: None, global_dim: None, tiles, ..geo(3, 1) };
            (ModelConfig::new(config), "local_embedding")
        }
    };
    let few = received(&config, &[(name, vec![2, 64, 3])], 1);
    assert_eq!(few, received(&config, &[(name, vec![2, 4096, 3])], 1));
    // One sum of [batch, heads, slices, features + 1]; FLARE: a maximum of [batch, heads, slices] for each tile, too.
    let maxima = if model == "flare" { tiles } else { 0 };
    let want = (reduced(2 * 2 * 4 * 5 + maxima as u64 * 2 * 2 * 4), 2 * (1 + maxima));
    assert!(few.iter().all(|(bytes, events, _)| (*bytes, *events) == want), "{few:?}, expected {want:?}");
}

/// On a grid, convolutions add a halo of one point on each side: the exchange grows with the border, not with the points behind it.
#[test]
fn a_grid_exchanges_its_halo_too() {
    let at = |rows: usize| {
        let config = TransolverConfig { structured_shape: Some(vec![rows, 6]), ..transolver(3, 1) };
        received(&ModelConfig::new(config), &[("fields", vec![2, 3, rows as i64, 6])], 2)
    };
    let few = at(16);
    assert_eq!(few, at(64));
    // A row of [batch, width, 6] from each neighbour, for two convolutions in each of two blocks.
    let row = 2 * 2 * (2 * 8 * 6) * 4;
    for ((bytes, ..), neighbours) in few.iter().zip([1, 2, 2, 1]) {
        assert_eq!(*bytes, neighbours * row + reduced(2 * 2 * 4 * 5));
    }
}

fn dense(seed: u64, shape: &[i64]) -> Tensor {
    Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, (Kind::Double, Device::Cpu)).unwrap()
}

fn double() -> ParamStore {
    ParamStore::new(Generator::new(1)).with_options(Kind::Double, Device::Cpu)
}

/// Flattened, gridded and as fields.
#[test]
fn forms_of_the_input_agree() {
    let config =
        TransolverConfig { embedding_dim: Some(2), structured_shape: Some(vec![4, 5]), ..transolver(3, 2) };
    let model = Transolver::new(&config, &mut double()).unwrap();
    let run = |batch: Batch<Tensor>| model.forward(&batch, Mode::Eval).unwrap().take("fields").unwrap();
    let x = dense(1, &[2, 4, 5, 3]);
    let grid = run(Batch::default().with("fx", x.shallow_clone()));
    assert_eq!(grid.size(), [2, 4, 5, 2]);
    let flat = run(Batch::default().with("fx", x.reshape([2, 20, 3])));
    assert_eq!(flat, grid.reshape([2, 20, 2]));
    let fields = run(Batch::of_fields(x.permute([0, 3, 1, 2])));
    assert!(fields.allclose(&grid.permute([0, 3, 1, 2]), 1e-12, 1e-12, false));
    let line = |count: i64| Tensor::linspace(0.0, 1.0, count, (Kind::Double, Device::Cpu));
    let coordinates = Tensor::stack(&Tensor::meshgrid_indexing(&[line(4), line(5)], "ij"), -1);
    let embedding = coordinates.expand([2, 4, 5, 2], false);
    let given = run(Batch::default().with("fx", x).with("embedding", embedding.reshape([2, 20, 2])));
    assert!(given.allclose(&grid, 1e-12, 1e-12, false));
}

/// A context of neither source is none; one of two is an error.
#[test]
fn a_context_is_complete_or_absent() {
    let model = GeoTransolver::new(&geo(3, 1), &mut double()).unwrap();
    let batch = || Batch::default().with("local_embedding", dense(1, &[2, 9, 3]));
    model.forward(&batch(), Mode::Eval).unwrap();
    let half = batch().with("geometry", dense(2, &[2, 5, 3]));
    let error = model.forward(&half, Mode::Eval).unwrap_err().to_string();
    assert!(error.contains("global_embedding"), "{error}");
}

/// The projection to slices of GeoTransolver's blocks starts orthogonal.
#[test]
fn slices_start_orthogonal() {
    let mut store = double();
    GeoTransolver::new(&GeoTransolverConfig { slice_num: 3, ..geo(2, 1) }, &mut store).unwrap();
    let name = "blocks.0.Attn.in_project_slice.weight";
    let weight = &store.parameters().iter().find(|p| p.name == name).unwrap().tensor;
    let product = weight.matmul(&weight.transpose(0, 1));
    assert!(product.allclose(&Tensor::eye(3, (Kind::Double, Device::Cpu)), 1e-12, 1e-12, false));
}

#[rstest]
fn dropout_is_the_same_on_every_layout(#[values("transolver", "flare")] model: &str) {
    let config = match model {
        "transolver" => ModelConfig::new(TransolverConfig { dropout: 0.3, tiles: 2, ..transolver(3, 2) }),
        _ => ModelConfig::new(FlareConfig { dropout: 0.3, ..flare(3, 2) }),
    };
    let twin = Twin::new(config, &[("fx", vec![2, 23, 3])], &[("fields", vec![2, 23, 2])]).perturbed(5);
    twin.check(&[points(3, &["fx", "fields"])]);
}

#[track_caller]
fn refused<C: Architecture>(config: C, reason: &str) {
    let error = config.count(&ParamCount::default).unwrap_err().to_string();
    assert_eq!(error, format!("{}: {reason}", C::NAME));
}

#[test]
fn configurations_are_refused() {
    let te = "use_te is true, which asks for NVIDIA's Transformer Engine; expected false: --set model.use_te=false";
    refused(TransolverConfig { use_te: true, ..transolver(1, 1) }, te);
    refused(FlareConfig { use_te: true, ..flare(1, 1) }, te);
    refused(TransolverConfig { n_head: 3, ..transolver(1, 1) }, "n_hidden 8 is not divisible by n_head 3");
    refused(TransolverConfig { n_layers: 0, ..transolver(1, 1) }, "n_layers is 0, expected 1 to 2147483647");
    refused(
        TransolverConfig { structured_shape: Some(vec![4]), ..transolver(1, 1) },
        "structured_shape is [4], expected two or three extents",
    );
    refused(
        TransolverConfig { unified_pos: true, ..transolver(1, 1) },
        "unified_pos needs a structured_shape of two extents, given none",
    );
    refused(
        FlareConfig { unified_pos: true, structured_shape: Some(vec![2, 3, 4]), ..flare(1, 1) },
        "unified_pos needs a structured_shape of two extents, given Some([2, 3, 4])",
    );
    refused(
        TransolverConfig { unified_pos: true, structured_shape: Some(vec![1 << 30, 2]), ..transolver(1, 1) },
        "unified_pos needs [1073741824, 2] times 8² distances, more than 2147483647",
    );
    refused(
        TransolverConfig { n_hidden: 9, n_head: 3, time_input: true, ..transolver(1, 1) },
        "n_hidden 9 is odd, but time_input needs pairs of cosines and sines",
    );
    refused(
        TransolverConfig { act: Activation::Stan, ..transolver(1, 1) },
        "act is stan, which is for single features",
    );
    refused(
        GeoTransolverConfig { functional_dim: Streams::Each(vec![2, 3]), ..geo(1, 1) },
        "functional_dim has 2 streams and out_dim 1, expected one or more, and as many outputs",
    );
    refused(
        GeoTransolverConfig { include_local_features: true, geometry_dim: Some(2), ..geo(1, 1) },
        "include_local_features needs points with 3 coordinates (geometry_dim = 3) and no structured_shape; for fields, --set \
         model.include_local_features=false",
    );
    refused(
        GeoTransolverConfig { include_local_features: true, radii: Some(vec![0.1]), ..geo(1, 1) },
        "radii has 1 numbers and neighbors_in_radius 2, expected as many",
    );
    refused(
        GeoTransolverConfig { include_local_features: true, n_hidden_local: 3, n_head: 4, ..geo(1, 1) },
        "n_hidden with the features of neighbours 14 is not divisible by n_head 4",
    );
    let tiny = TransolverConfig { n_layers: 1_000_000_000, ..TransolverConfig::new(1, 1) };
    assert!(tiny.count(&ParamCount::default).unwrap().trained > 1_000_000_000);
    let wide = TransolverConfig { n_hidden: i32::MAX as usize, n_head: 1, ..TransolverConfig::new(1, 1) };
    assert!(wide.count(&ParamCount::default).unwrap().trained > 1 << 60);
}

#[test]
fn inputs_are_refused() {
    let model =
        Transolver::new(&TransolverConfig { embedding_dim: Some(2), ..transolver(3, 1) }, &mut double())
            .unwrap();
    let error = |batch: Batch<Tensor>| model.forward(&batch, Mode::Eval).unwrap_err().to_string();
    let fx = || dense(1, &[2, 9, 3]);
    let missing = error(Batch::default().with("fx", fx()));
    assert!(missing.contains("no array \"embedding\""), "{missing}");
    let other = error(Batch::default().with("fx", fx()).with("embedding", dense(1, &[2, 8, 2])));
    assert!(other.contains("an embedding of the points [2, 9]"), "{other}");
    let wrong = error(Batch::default().with("fx", dense(1, &[2, 9, 4])));
    assert!(wrong.contains("expected [batch, points, 3]"), "{wrong}");
    let gridded = TransolverConfig { structured_shape: Some(vec![3, 4]), ..transolver(3, 1) };
    let model = Transolver::new(&gridded, &mut double()).unwrap();
    let wrong = model.forward(&Batch::default().with("fx", fx()), Mode::Eval).unwrap_err().to_string();
    assert!(wrong.contains("expected [batch, 3, 4 or 12, 3]"), "{wrong}");
}

#[test]
fn fields_are_compared_with_the_configuration() {
    let fields = FieldSpec {
        source: "data.h5".into(),
        extents: vec![9, 7],
        in_channels: 2,
        out_channels: 1,
        ..FieldSpec::default()
    };
    let good =
        TransolverConfig { embedding_dim: Some(2), structured_shape: Some(vec![9, 7]), ..transolver(2, 1) };
    good.check(&fields).unwrap();
    let error = |config: &dyn Fn() -> TransolverConfig| config().check(&fields).unwrap_err().to_string();
    let shape = error(&|| TransolverConfig { structured_shape: Some(vec![7, 9]), ..good.clone() });
    assert!(shape.ends_with("--set 'model.structured_shape=[9, 7]'"), "{shape}");
    let embedding = error(&|| TransolverConfig { embedding_dim: Some(3), ..good.clone() });
    assert!(embedding.ends_with("--set model.embedding_dim=2"), "{embedding}");
    let channels = error(&|| TransolverConfig { functional_dim: 5, ..good.clone() });
    assert!(channels.ends_with("--set model.functional_dim=2"), "{channels}");
    let time = error(&|| TransolverConfig { time_input: true, ..good.clone() });
    assert!(time.contains("\"time\""), "{time}");
    flare(2, 1).check(&fields).unwrap();
    let geo = GeoTransolverConfig { geometry_dim: Some(2), global_dim: None, ..geo(2, 1) };
    geo.check(&fields).unwrap();
    let largest = good.largest_array(&fields).unwrap();
    assert_eq!(
        (largest.elements, largest.keys.as_str()),
        (9 * 7 * 16, "model.n_hidden = 8, model.mlp_ratio = 2")
    );
}

/// Numbers in other than the given tiles differ by rounding alone.
#[test]
fn tiles_change_nothing() {
    let batch = || Batch::default().with("fx", dense(1, &[2, 29, 3]));
    let run = |tiles: usize| {
        let y = Flare::new(&FlareConfig { tiles, ..flare(3, 2) }, &mut double()).unwrap();
        let y = y.forward(&batch(), Mode::Eval).unwrap().take("fields").unwrap();
        let x = Transolver::new(&TransolverConfig { tiles, ..transolver(3, 2) }, &mut double()).unwrap();
        [x.forward(&batch(), Mode::Eval).unwrap().take("fields").unwrap(), y]
    };
    for tiles in [2, 7, 1000] {
        for (got, want) in run(tiles).iter().zip(&run(1)) {
            assert!(got.allclose(want, 1e-12, 1e-13, false));
        }
    }
}
