//! Training and prediction with sharded fields agree with dense ones: to nine digits in double precision, up
//! to rounding in single precision.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    path::{Path, PathBuf},
    sync::LazyLock,
    time::Duration,
};

use isobar_data::{DataConfig, Missing, WellDim, WellFile, WellMeta, WellWriter, Window};
use isobar_harness::{Exit, Launch, Memo, Outcome, curve::assert_same_run, workspace};
use isobar_tests::{has_mpi, has_slurm, runs::single_run};
use rstest::rstest;
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");
const FRAMES: usize = 6;
const POINTS: usize = 16;

/// Two waves that travel across a periodic square. They have no symmetry: where points are equal, which of them max pooling
/// takes, and with it the gradient, would hang on the last bit.
static WAVES: LazyLock<PathBuf> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("waves.h5");
    let points: Vec<f64> = (0..POINTS).map(|i| i as f64 / POINTS as f64).collect();
    let dim = |name: &str| WellDim { name: name.to_owned(), coordinates: points.clone(), periodic: true };
    let meta = WellMeta {
        name: "waves".to_owned(),
        trajectories: 5,
        times: (0..FRAMES).map(|frame| frame as f64 * 0.5).collect(),
        dims: vec![dim("x"), dim("y")],
        fields: vec![("height".to_owned(), 0), ("slope".to_owned(), 1)],
        ..WellMeta::default()
    };
    let line =
        Tensor::arange(POINTS as i64, (Kind::Double, Device::Cpu)) * (std::f64::consts::TAU / POINTS as f64);
    let mut writer = WellWriter::create(&path, &meta).unwrap();
    for trajectory in 0..meta.trajectories {
        for frame in 0..FRAMES {
            let (x, y) = (line.view([-1, 1]), line.view([1, -1]));
            let phase = &x + &y * 2.0 + (trajectory as f64 + 0.3 * frame as f64);
            let height =
                phase.sin() + (x * 3.0 - y + (1.3 * trajectory as f64 + 0.2 * frame as f64)).sin() * 0.7;
            let shape = [1, 1, POINTS as i64, POINTS as i64];
            let slope = phase.cos().view(shape);
            writer.write("height", trajectory, frame, &height.view(shape)).unwrap();
            writer.write("slope", trajectory, frame, &Tensor::cat(&[&slope, &(&slope * 2.0)], 1)).unwrap();
        }
    }
    writer.finish().unwrap();
    path
});

/// A wave in a box that is closed at its ends.
static VOLUMES: LazyLock<PathBuf> = LazyLock::new(|| wave("volumes", &[8, 6, 5]));

/// A wave along a line.
static LINES: LazyLock<PathBuf> = LazyLock::new(|| wave("lines", &[16]));

/// A wave in a box whose sides can be halved.
static BOXES: LazyLock<PathBuf> = LazyLock::new(|| wave("boxes", &[8, 4, 4]));

/// Writes four trajectories of a wave, each of three frames.
pub(crate) fn wave(name: &str, extents: &[i64]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.h5"));
    let dim = |(name, &extent): (&str, &i64)| {
        let coordinates = (0..extent).map(|point| point as f64).collect();
        WellDim { name: name.to_owned(), coordinates, periodic: false }
    };
    let meta = WellMeta {
        name: name.to_owned(),
        trajectories: 4,
        times: vec![0.0, 1.0, 2.0],
        dims: ["x", "y", "z"].into_iter().zip(extents).map(dim).collect(),
        fields: vec![("height".to_owned(), 0)],
        ..WellMeta::default()
    };
    let count = extents.iter().product::<i64>();
    let shape = [&[1, 1], extents].concat();
    let line = Tensor::arange(count, (Kind::Double, Device::Cpu)).view(&shape[..]);
    let mut writer = WellWriter::create(&path, &meta).unwrap();
    for trajectory in 0..meta.trajectories {
        for frame in 0..3 {
            let height = (&line * 0.05 + (trajectory as f64 + 0.2 * frame as f64)).sin();
            writer.write("height", trajectory, frame, &height).unwrap();
        }
    }
    writer.finish().unwrap();
    path
}

/// `command` with a configuration of the project, cut to the size of a test and in double precision.
fn isobar(launch: Launch, command: &str, config: &str, output: &Path, sets: &[&str]) -> Launch {
    let data = format!("data.path={}", WAVES.display());
    let output = format!("run.output={}", output.display());
    let model: &[&str] = match config {
        "navier_stokes_fno" => {
            &["model.latent_channels=8", "model.num_fno_layers=2", "model.num_fno_modes=4"]
        }
        "darcy_afno" | "darcy_distributed_afno" => {
            &["model.embed_dim=16", "model.depth=2", "data.validation_steps=1"]
        }
        "navier_stokes_mod_afno" => &[
            "model.inp_shape=[16, 16]",
            "model.embed_dim=8",
            "model.embed_model.dim=4",
            "model.mod_dim=4",
            "model.depth=2",
            "model.num_blocks=2",
        ],
        "boxes_sr_res_net" => {
            &["model.conv_layer_size=4", "model.n_resid_blocks=1", "model.large_kernel_size=3"]
        }
        "darcy_pix2pix" => &[
            "model.conv_layer_size=4",
            "model.n_downsampling=2",
            "model.n_upsampling=2",
            "model.n_blocks=1",
            "data.validation_steps=1",
        ],
        "navier_stokes_cnext_unet" => {
            &["model.stages=2", "model.init_features=4", "model.spatial_resolution=[16, 16]"]
        }
        "navier_stokes_swin_rnn" => {
            &["model.img_size=[1, 16, 16]", "model.embed_dim=4", "model.num_groups=2", "model.window_size=4"]
        }
        "navier_stokes_song_unet" => &[
            "model.model_channels=4",
            "model.channel_mult=[1, 2]",
            "model.img_resolution=16",
            "model.attn_resolutions=[8]",
        ],
        "navier_stokes_diffusion" => &[
            "model.model.model_channels=4",
            "model.model.channel_mult=[1, 2]",
            "model.model.img_resolution=16",
            "model.model.attn_resolutions=[8]",
            "task.sampler.num_steps=2",
        ],
        "navier_stokes_dit" => {
            &["model.input_size=[16, 16]", "model.hidden_size=8", "model.depth=2", "model.num_heads=2"]
        }
        _ => &["model.model_depth=2", "model.feature_map_channels=[4, 4, 8, 8]"],
    };
    let small = ["run.name=run", "data.validation_samples=2", "data.validation_steps=3", "train.epochs=2"];
    let more = [
        "train.precision=float64",
        "train.batch_size=3",
        "metrics.every_steps=1",
        "distributed.timeout_s=200",
        &data,
        &output,
    ];
    let all = small.iter().chain(&more).chain(model).chain(sets).flat_map(|set| ["--set", set]);
    let file = format!("configs/{config}.toml");
    launch.current_dir(workspace()).deadline(Duration::from_secs(300)).args([command, &file]).args(all)
}

/// Returns the settings of a mesh.
fn mesh(shape: &str, names: &str) -> [String; 2] {
    [format!("distributed.mesh.shape={shape}"), format!("distributed.mesh.names={names}")]
}

/// The records of a run: losses, and the errors of validations.
fn records(output: &Path) -> Vec<(String, f64)> {
    let text = fs::read_to_string(output.join("run/metrics.jsonl")).unwrap();
    let mut found = Vec::new();
    for line in text.lines() {
        let record: Value = serde_json::from_str(line).unwrap();
        for key in ["loss", "grad_norm", "validation_error", "rollout_error", "spectrum_error"] {
            found.extend(record[key].as_f64().map(|number| (key.to_owned(), number)));
        }
    }
    found
}

/// The numbers of two runs, of the same keys one after the other.
#[track_caller]
fn assert_same_losses(got: &[(String, f64)], want: &[(String, f64)]) {
    let keys = |records: &[(String, f64)]| records.iter().map(|(key, _)| key.clone()).collect::<Vec<_>>();
    assert_eq!(keys(got), keys(want));
    assert_same_run(&numbers(got), &numbers(want));
}

fn numbers(records: &[(String, f64)]) -> Vec<f64> {
    records.iter().map(|(_, number)| *number).collect()
}

fn train(launch: Launch, config: &str, sets: &[&str]) -> Vec<(String, f64)> {
    let folder = tempdir().unwrap();
    let _ = isobar(launch, "train", config, folder.path(), sets).run().unwrap().expect_success();
    records(folder.path())
}

/// Trains on one rank; each run is taken once, and compared with those on many layouts.
fn on_one_rank(config: &str, sets: &[&str]) -> Vec<(String, f64)> {
    static RUNS: Memo<Vec<(String, f64)>> = Memo::new();
    let run = || train(Launch::plain(1, ISOBAR), config, sets);
    RUNS.with(format!("{config} {sets:?}"), run, Clone::clone)
}

/// Parameters, gradients and the optimizer's state in parts, beside samples and fields; resumed besides.
#[rstest]
#[case(2, "[2]", "[\"shard\"]")]
#[case(4, "[2, 2]", "[\"data\", \"shard\"]")]
#[case(4, "[2, 2]", "[\"shard\", \"domain\"]")]
fn parameters_are_split(#[case] ranks: usize, #[case] shape: &str, #[case] names: &str) {
    let config = "navier_stokes_fno";
    let sets = ["data.fields=[\"height\"]", "data_parallel.bucket_mb=0.01"];
    let whole = on_one_rank(config, &sets);
    let [shape, names] = mesh(shape, names);
    let all = [&sets[..], &[&shape, &names]].concat();
    assert_same_losses(&train(Launch::plain(ranks, ISOBAR), config, &all), &whole);

    let folder = tempdir().unwrap();
    let part = |more: &[&str]| {
        let launch = Launch::plain(ranks, ISOBAR);
        let sets = [&all[..], more].concat();
        let _ = isobar(launch, "train", config, folder.path(), &sets).run().unwrap().expect_success();
    };
    part(&["train.max_steps=2"]);
    part(&["checkpoint.resume=must"]);
    let resumed: Vec<_> = records(folder.path()).into_iter().filter(|(key, _)| key == "loss").collect();
    let straight: Vec<_> = whole.into_iter().filter(|(key, _)| key == "loss").collect();
    assert_same_losses(&resumed, &straight);
}

/// A network's channels along one axis of the mesh, its fields along others.
#[rstest]
#[case("[2, 2]", "[\"domain\", \"model\"]")]
#[case("[2, 1, 2]", "[\"data\", \"domain_y\", \"model\"]")]
#[case("[2, 2]", "[\"model\", \"shard\"]")]
#[case("[1, 2, 2]", "[\"domain\", \"shard\", \"model\"]")]
fn channels_and_fields_are_split_at_once(#[case] shape: &str, #[case] names: &str) {
    let config = "darcy_distributed_afno";
    let sets = ["data.path=tests/data/darcy_excerpt.h5", "train.max_steps=4"];
    let [one, data] = mesh("[1]", "[\"data\"]");
    let whole = on_one_rank(config, &[&sets[..], &[&one, &data]].concat());
    let [shape, names] = mesh(shape, names);
    let split = train(Launch::plain(4, ISOBAR), config, &[&sets[..], &[&shape, &names]].concat());
    assert_same_losses(&split, &whole);
}

/// Dropout draws for the samples of a step, whichever of them, and of their fields, a rank has at a time.
#[rstest]
#[case::rows("darcy_afno", 2, "[2]", "[\"domain\"]")]
#[case::samples_and_columns("darcy_afno", 4, "[2, 2]", "[\"data\", \"domain_y\"]")]
#[case::rows_of_the_other("darcy_distributed_afno", 2, "[2]", "[\"domain\"]")]
fn parts_of_a_step_drop_what_the_step_drops(
    #[case] config: &str,
    #[case] ranks: usize,
    #[case] shape: &str,
    #[case] names: &str,
) {
    let run = |ranks: usize, mesh: [String; 2], more: &[&str]| {
        let sets = ["data.path=tests/data/darcy_excerpt.h5", "train.max_steps=4", "train.batch_size=5"];
        let sets = [&sets[..], &mesh.each_ref().map(String::as_str), more].concat();
        if ranks == 1 {
            return on_one_rank(config, &sets);
        }
        train(Launch::plain(ranks, ISOBAR), config, &sets)
    };
    let one = || mesh("[1]", "[\"data\"]");
    let whole = run(1, one(), &["model.drop_rate=0.1"]);
    assert_ne!(whole, run(1, one(), &[]));
    let parts = ["model.drop_rate=0.1", "train.accumulate=2"];
    assert_same_losses(&run(ranks, mesh(shape, names), &parts), &whole);
}

#[rstest]
#[case::fno("navier_stokes_fno", &["data.fields=[\"height\"]", "data.train_steps=2"])]
#[case::unet("navier_stokes_unet", &["data.fields=[\"height\", \"slope\"]", "model.in_channels=7", "model.out_channels=3"])]
fn split_fields_train_as_whole_ones(#[case] config: &str, #[case] sets: &[&str]) {
    let whole = on_one_rank(config, sets);
    assert_eq!(whole.iter().filter(|(key, _)| key == "rollout_error").count(), 1, "{whole:?}");
    let layouts = [
        (2, mesh("[2]", "[\"domain\"]")),
        (3, mesh("[3]", "[\"domain_y\"]")),
        (4, mesh("[2, 2]", "[\"data\", \"domain\"]")),
        (4, mesh("[2, 2]", "[\"domain\", \"domain_y\"]")),
    ];
    for (ranks, mesh) in layouts {
        let sets = sets.iter().copied().chain(mesh.iter().map(String::as_str)).collect::<Vec<_>>();
        assert_same_losses(&train(Launch::plain(ranks, ISOBAR), config, &sets), &whole);
    }
    let [shape, names] = &mesh("[-1]", "[\"domain\"]");
    let sets = sets.iter().copied().chain([shape.as_str(), names]).collect::<Vec<_>>();
    if has_mpi() {
        assert_same_losses(&train(Launch::mpirun(2, ISOBAR), config, &sets), &whole);
    }
    if has_mpi() && has_slurm() {
        assert_same_losses(&train(Launch::srun(2, "pmix", ISOBAR), config, &sets), &whole);
    }
}

/// Runs differ by rounding only, whose growth is measured.
#[rstest]
#[case::fno("navier_stokes_fno", &["data.fields=[\"height\"]", "data.train_steps=2"], "[2, 2]", "[\"domain\", \"shard\"]")]
#[case::unet(
    "navier_stokes_unet",
    &["data.fields=[\"height\", \"slope\"]", "model.in_channels=7", "model.out_channels=3"],
    "[2, 2]",
    "[\"data\", \"domain\"]"
)]
#[case::distributed_afno(
    "darcy_distributed_afno",
    &["data.path=tests/data/darcy_excerpt.h5", "train.max_steps=12", "train.epochs=20"],
    "[2, 2]",
    "[\"domain\", \"model\"]"
)]
fn in_single_precision(
    #[case] config: &str,
    #[case] sets: &[&str],
    #[case] shape: &str,
    #[case] names: &str,
) {
    let single = [&["train.precision=float32"], sets].concat();
    let on = |ranks: usize, [shape, names]: [String; 2], output: &Path, more: &[&str]| {
        let sets = [&single[..], &[shape.as_str(), &names], more].concat();
        let _ = isobar(Launch::plain(ranks, ISOBAR), "train", config, output, &sets)
            .run()
            .unwrap()
            .expect_success();
    };
    let alone = |output: &Path, more: &[&str]| on(1, mesh("[1]", "[\"data\"]"), output, more);
    let whole = single_run(ISOBAR, "run", alone, |output| numbers(&records(output)));
    let folder = tempdir().unwrap();
    on(4, mesh(shape, names), folder.path(), &[]);
    whole.assert_same(&numbers(&records(folder.path())));
}

/// Convolutions and attention over the rows, the columns and the samples of other ranks.
#[rstest]
#[case::dit("navier_stokes_dit", &["data.fields=[\"height\"]"])]
#[case::cnext_unet("navier_stokes_cnext_unet", &["data.fields=[\"height\"]"])]
#[case::pix2pix("darcy_pix2pix", &["data.path=tests/data/darcy_excerpt.h5"])]
#[case::song_unet("navier_stokes_song_unet", &["data.fields=[\"height\"]"])]
#[case::diffusion("navier_stokes_diffusion", &["data.fields=[\"height\"]"])]
fn convolutions_and_attention_train_alike(#[case] config: &str, #[case] sets: &[&str]) {
    let run = |ranks: usize, [shape, names]: [String; 2]| {
        train(Launch::plain(ranks, ISOBAR), config, &[sets, &["train.max_steps=4", &shape, &names]].concat())
    };
    let whole = run(1, mesh("[1]", "[\"data\"]"));
    assert_same_losses(&run(3, mesh("[3]", "[\"domain\"]")), &whole);
    assert_same_losses(&run(4, mesh("[2, 2]", "[\"data\", \"domain_y\"]")), &whole);
}

/// Attention in windows that are shifted over the rows, the columns and the samples of other ranks.
#[test]
fn a_transformer_of_windows_trains_alike() {
    let run = |ranks: usize, [shape, names]: [String; 2]| {
        let sets = ["data.fields=[\"height\"]", "train.max_steps=4", &shape, &names];
        train(Launch::plain(ranks, ISOBAR), "navier_stokes_swin_rnn", &sets)
    };
    let whole = run(1, mesh("[1]", "[\"data\"]"));
    assert_same_losses(&run(3, mesh("[3]", "[\"domain\"]")), &whole);
    assert_same_losses(&run(4, mesh("[2, 2]", "[\"data\", \"domain_y\"]")), &whole);
}

/// A network that reads the time of each frame.
#[test]
fn a_network_reads_the_time_of_its_frames() {
    let run = |ranks: usize, mesh: [String; 2], more: &[&str]| {
        let sets =
            ["data.fields=[\"height\"]", "data.train_steps=2", "train.max_steps=4", &mesh[0], &mesh[1]];
        train(Launch::plain(ranks, ISOBAR), "navier_stokes_mod_afno", &[&sets[..], more].concat())
    };
    let whole = run(1, mesh("[1]", "[\"data\"]"), &[]);
    assert_ne!(whole, run(1, mesh("[1]", "[\"data\"]"), &["model.embed_model.max_time=3.0"]));
    assert_same_losses(&run(2, mesh("[2]", "[\"domain\"]"), &[]), &whole);
    assert_same_losses(&run(4, mesh("[2, 2]", "[\"data\", \"domain\"]"), &[]), &whole);
}

/// A network whose outputs are on a finer grid than its inputs.
#[test]
fn a_network_refines_its_fields() {
    let data = format!("data.path={}", BOXES.display());
    let run = |ranks: usize, mesh: [String; 2]| {
        let sets = ["data.fields=[\"height\"]", &data, "data.validation_steps=2", &mesh[0], &mesh[1]];
        train(Launch::plain(ranks, ISOBAR), "boxes_sr_res_net", &sets)
    };
    let whole = run(1, mesh("[1]", "[\"data\"]"));
    assert_same_losses(&run(2, mesh("[2]", "[\"domain\"]")), &whole);
}

/// Three dims, the last of them split, and nothing kept for validation.
#[test]
fn volumes_train_too() {
    let data = format!("data.path={}", VOLUMES.display());
    let run = |ranks: usize, names: &str| {
        let mesh = mesh("[-1]", names);
        let sets = ["data.fields=[\"height\"]", &data, "model.dimension=3", "model.num_fno_modes=2"];
        let more = ["data.validation_samples=0", "data.validation_steps=2", &mesh[0], &mesh[1]];
        train(
            Launch::plain(ranks, ISOBAR),
            "navier_stokes_fno",
            &sets.into_iter().chain(more).collect::<Vec<_>>(),
        )
    };
    let whole = run(1, "[\"data\"]");
    assert!(whole.iter().all(|(key, _)| !key.ends_with("_error")), "{whole:?}");
    assert_same_losses(&run(2, "[\"domain_z\"]"), &whole);
    assert_same_losses(&run(3, "[\"domain_z\"]"), &whole);
}

/// Less memory and fewer bits make no other losses, but for what 16 bits round.
#[test]
fn memory_and_precision_are_chosen_by_keys() {
    let run = |ranks: usize, more: &[&str]| {
        let mesh = mesh("[-1]", "[\"domain\"]");
        let sets: Vec<&str> =
            ["data.fields=[\"height\"]"].iter().copied().chain(more.iter().copied()).collect();
        let sets: Vec<&str> = sets.into_iter().chain(mesh.iter().map(String::as_str)).collect();
        train(Launch::plain(ranks, ISOBAR), "navier_stokes_fno", &sets)
    };
    let plain = run(1, &[]);
    assert_same_losses(&run(2, &["model.gradient_checkpointing=true"]), &plain);
    let mixed = run(2, &["train.precision=bf16-mixed"]);
    assert_ne!(mixed, plain);
    for ((key, got), (_, want)) in mixed.iter().zip(&plain).filter(|((key, _), _)| key == "loss") {
        assert!((got - want).abs() < 0.05 * want, "{key}: {got} instead of {want}");
    }
}

/// A run in double precision resumes as one; its weights serve in single precision too.
#[test]
fn precision_is_kept_and_weights_are_converted() {
    let folder = tempdir().unwrap();
    let run = |command: &str, sets: &[&str]| {
        let sets = [&["data.fields=[\"height\"]"], sets].concat();
        isobar(Launch::plain(1, ISOBAR), command, "navier_stokes_fno", folder.path(), &sets).run().unwrap()
    };
    let single = "train.precision=float32";
    let _ = run("train", &[]).expect_success();
    let refused = run("train", &[single, "checkpoint.resume=must"]);
    assert_eq!(refused.exit, Exit::Code(3), "{refused}");
    let words = "its parameters are Double, those of this run Float; resume in the same precision (--set train.precision=float64)";
    assert!(refused.ranks[0].stderr.contains(words), "{refused}");

    let error = |outcome: Outcome| -> f64 {
        let said = outcome.expect_success().ranks[0].stdout.clone();
        let (_, error) = said.split_once("relative L2 error ").unwrap();
        error.split_once(' ').unwrap().0.parse().unwrap()
    };
    let errors = [error(run("predict", &[])), error(run("predict", &[single]))];
    // In hundredths of a percent, rounded.
    assert!((errors[0] - errors[1]).abs() < 0.02, "{errors:?}");
    let init = format!("checkpoint.init={}", folder.path().join("run").display());
    let _ = run("train", &[single, &init, "run.name=other", "train.max_steps=1"]).expect_success();
}

/// Returns whether the single-precision fields of two files agree up to one rounding.
fn same_in_file(got: &Tensor, want: &Tensor) -> bool {
    let last_place = f64::from(f32::EPSILON);
    got.allclose(want, last_place, last_place * want.abs().max().double_value(&[]), false)
}

/// Predictions give the same error, file and picture on any mesh.
#[test]
fn predictions_are_the_same_on_any_mesh() {
    let folder = tempdir().unwrap();
    let sets = ["data.fields=[\"height\"]"];
    let trained = isobar(Launch::plain(1, ISOBAR), "train", "navier_stokes_fno", folder.path(), &sets);
    let _ = trained.run().unwrap().expect_success();
    let predict = |ranks: usize, mesh: &[String], args: &[&str]| -> (Outcome, Tensor) {
        let out = folder.path().join(format!("out/{ranks}.h5"));
        let sets: Vec<&str> = sets.iter().copied().chain(mesh.iter().map(String::as_str)).collect();
        let launch =
            isobar(Launch::plain(ranks, ISOBAR), "predict", "navier_stokes_fno", folder.path(), &sets);
        let outcome = launch.args(args).arg("--out").arg(&out).run().unwrap().expect_success();
        assert!(out.with_extension("png").exists(), "{outcome}");
        let file = WellFile::open(&out).unwrap();
        let frames = (0..file.trajectories()).map(|trajectory| {
            file.read(&["height"], trajectory, 0..file.frames(), &[0..POINTS, 0..POINTS]).unwrap()
        });
        (outcome, Tensor::stack(&frames.collect::<Vec<_>>(), 0))
    };
    let (outcome, whole) = predict(1, &[], &[]);
    assert_eq!(whole.size(), [2, FRAMES as i64, 1, POINTS as i64, POINTS as i64]);
    let forecast = |outcome: &Outcome| {
        let line = outcome.ranks[0].stdout.lines().find(|line| line.starts_with("forecast ")).unwrap();
        line.to_owned()
    };
    assert!(forecast(&outcome).contains(" % after 5 steps; predicting no change gives "), "{outcome}");
    let truth = WellFile::open(&*WAVES).unwrap();
    let start = truth.read(&["height"], 3, 0..1, &[0..POINTS, 0..POINTS]).unwrap();
    assert_eq!(whole.select(0, 0).narrow(0, 0, 1), start, "the first frame is the data's");

    let (split, frames) = predict(3, &mesh("[3]", "[\"domain\"]"), &[]);
    assert_eq!(forecast(&split), forecast(&outcome));
    assert!(same_in_file(&frames, &whole));
    let (_, frames) = predict(4, &mesh("[2, 2]", "[\"data\", \"domain\"]"), &["--samples", "4,3-3"]);
    assert!(same_in_file(&frames.flip([0]), &whole));

    // Beyond the last frame of the data.
    let (_, frames) =
        predict(2, &mesh("[2]", "[\"domain\"]"), &["--samples", "3", "--start", "4", "--steps", "7"]);
    assert_eq!(frames.size()[..2], [1, 8]);
    let times = WellFile::open(folder.path().join("out/2.h5")).unwrap().times().to_vec();
    assert_eq!((times[0], times[1], times[7]), (2.0, 2.5, 5.5));
}

/// Pictures too: of a line over the steps, of a volume its middle.
#[rstest]
#[case::lines(&*LINES, 1)]
#[case::volumes(&*VOLUMES, 3)]
fn lines_and_volumes_are_predicted(#[case] data: &Path, #[case] dims: usize) {
    let folder = tempdir().unwrap();
    let (data, dimension) = (format!("data.path={}", data.display()), format!("model.dimension={dims}"));
    let sets = ["data.fields=[\"height\"]", &data, &dimension, "model.num_fno_modes=2"];
    let sets = [&sets[..], &["data.validation_steps=2"]].concat();
    let run = |ranks: usize, command: &str, mesh: &[String], args: &[&str]| -> Outcome {
        let sets: Vec<&str> = sets.iter().copied().chain(mesh.iter().map(String::as_str)).collect();
        let launch = isobar(Launch::plain(ranks, ISOBAR), command, "navier_stokes_fno", folder.path(), &sets);
        launch.args(args).run().unwrap().expect_success()
    };
    let _ = run(1, "train", &[], &[]);
    assert!(folder.path().join("run/validation.png").exists());
    let predict = |ranks: usize, mesh: &[String]| {
        // Beyond what there is to compare with.
        let out = folder.path().join(format!("{ranks}.h5"));
        let outcome = run(ranks, "predict", mesh, &["--steps", "4", "--out", out.to_str().unwrap()]);
        assert!(out.with_extension("png").exists(), "{outcome}");
        let file = WellFile::open(&out).unwrap();
        let window: Vec<_> = file.grid().iter().map(|&points| 0..points).collect();
        file.read(&["height"], 1, 0..file.frames(), &window).unwrap()
    };
    let whole = predict(1, &[]);
    assert_eq!(whole.size()[0], 5);
    let split = predict(2, &mesh("[2]", "[\"domain\"]"));
    assert!(same_in_file(&split, &whole));
    // From the last frame on, there is no truth to show.
    let out = folder.path().join("beyond.h5");
    let args = ["--start", "2", "--steps", "3", "--out", out.to_str().unwrap()];
    let _ = run(1, "predict", &[], &args);
    assert!(out.with_extension("png").exists());
}

#[rstest]
#[case(&["distributed.mesh.names=[\"field\"]"], 2, "has an axis \"field\"")]
#[case(&["distributed.mesh.names=[\"domain_z\"]"], 2, "\"domain_z\"")]
#[case(&["data.fields=[]"], 2, "data.fields names no field")]
#[case(&["data.fields=[\"heat\"]"], 3, "heat")]
#[case(&["data.fields=[\"slope\"]"], 2, "model.in_channels is 1 and model.out_channels is 1, but the inputs of ")]
#[case(&["data.train_steps=9"], 2, "data.train_steps is 9, expected 1 to 5: trajectories of ")]
#[case(&["data.format=darcy"], 2, "Darcy flow has no steps")]
#[case(&["data.augment=square", "data.fields=[\"slope\"]"], 2, "turns places, not the components of vectors")]
fn what_does_not_fit_is_one_clear_error(#[case] sets: &[&str], #[case] code: i32, #[case] words: &str) {
    let folder = tempdir().unwrap();
    let all: Vec<&str> = ["data.fields=[\"height\"]"].iter().chain(sets).copied().collect();
    let launch = isobar(Launch::plain(1, ISOBAR), "train", "navier_stokes_fno", folder.path(), &all);
    let outcome = launch.run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(code), "{outcome}");
    assert!(outcome.ranks[0].stderr.contains(words), "{outcome}");
}

/// A forecast that diverges is written with NaN from there on, in plain HDF5, since The Well's schema has none. Errors are those of
/// the steps before, and the exit code says that the forecast is not usable.
#[rstest]
#[case(1, &[])]
#[case(2, &["--set", "distributed.mesh.shape=[2]", "--set", "distributed.mesh.names=[\"data\"]"])]
#[case(2, &["--set", "distributed.mesh.shape=[2]", "--set", "distributed.mesh.names=[\"domain\"]"])]
fn a_forecast_that_diverges_is_written(#[case] ranks: usize, #[case] mesh: &[&str]) {
    let folder = tempdir().unwrap();
    let sets =
        ["data.fields=[\"height\"]", "train.max_steps=1", "optimizer.lr=100", "schedule.warmup_epochs=0"];
    let trained = isobar(Launch::plain(1, ISOBAR), "train", "navier_stokes_fno", folder.path(), &sets);
    let _ = trained.run().unwrap().expect_success();
    let out = folder.path().join("out.h5");
    let launch = isobar(Launch::plain(ranks, ISOBAR), "predict", "navier_stokes_fno", folder.path(), &sets);
    let launch =
        launch.args(mesh).args(["--samples", "4,2", "--steps", "12", "--out", out.to_str().unwrap()]);
    let outcome = launch.run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(1), "{outcome}");
    let said = &outcome.ranks[0];
    for words in
        ["the prediction is not finite: `height` of trajectory 2 from step ", "into plain HDF5", "--steps="]
    {
        assert!(said.stderr.contains(words), "{words}: {outcome}");
    }
    assert!(said.stdout.contains("forecast    relative L2 error "), "{outcome}");
    let fields = vec!["height".to_owned()];
    let config = DataConfig { path: out.into(), format: "hdf5".into(), fields, ..DataConfig::default() };
    let data = DataConfig { missing: Missing::Mask, ..config }.open().unwrap();
    let window = Window { frames: 0..13, points: vec![0..POINTS, 0..POINTS] };
    let gaps = data.read(&window, &[0, 1], &["height"]).unwrap().isnan().flatten(2, -1).any_dim(-1, false);
    let gaps = Vec::<bool>::try_from(gaps.flatten(0, -1)).unwrap();
    assert!(gaps.chunks(13).all(|frames| frames[..2] == [false; 2] && frames[12]), "{gaps:?}");
}

/// Neither the prediction nor the files beside it replace what was read, or what the run has.
#[test]
fn a_prediction_replaces_no_file_of_the_run() {
    let folder = tempdir().unwrap();
    let sets = ["data.fields=[\"height\"]", "train.max_steps=1"];
    let of = |command| isobar(Launch::plain(1, ISOBAR), command, "navier_stokes_fno", folder.path(), &sets);
    let _ = of("train").run().unwrap().expect_success();
    let run = folder.path().join("run");
    for (out, replaced) in [
        (run.join("metrics.h5"), "metrics.csv is a file of the run"),
        (run.join("config.toml"), "config.toml is a file of the run"),
        (run.join("checkpoints/step_00000001/manifest.json"), "manifest.json is a file of the run"),
        (WAVES.clone(), "is an input of this command"),
    ] {
        let before = [&out, &run.join("metrics.csv")].map(|path| fs::read(path).ok());
        let outcome = of("predict").args(["--out", out.to_str().unwrap()]).run().unwrap();
        assert_eq!(outcome.exit, Exit::Code(2), "{outcome}");
        assert!(outcome.ranks[0].stderr.contains(replaced), "{outcome}");
        assert!([&out, &run.join("metrics.csv")].map(|path| fs::read(path).ok()) == before, "{outcome}");
    }
}

#[rstest]
#[case(&["--samples", "7"], 2, "sample 7 is asked for; ")]
#[case(&["--samples", "0-3-5"], 2, "or a range such as 0-3")]
#[case(&["--out", "errors.csv"], 2, "errors.csv would be one of these")]
#[case(&["--start", "6"], 2, "has the frames 0 to 5; --start=0")]
#[case(&["--checkpoint", "worst"], 3, "--checkpoint is \"worst\": worst does not exist")]
#[case(&["--set", "data.predict=frame"], 2, "was trained with data.predict = change")]
#[case(&["--set", "model.activation_fn=relu"], 2, "was trained with model.activation_fn = gelu, but the configuration has relu")]
#[case(&["--checkpoint", "best"], 3, "no checkpoint in ")]
fn predictions_of_nothing_are_refused(#[case] args: &[&str], #[case] code: i32, #[case] words: &str) {
    let folder = tempdir().unwrap();
    let sets = ["data.fields=[\"height\"]"];
    if code == 2 {
        let launch = isobar(Launch::plain(1, ISOBAR), "train", "navier_stokes_fno", folder.path(), &sets);
        let _ = launch.args(["--set", "train.max_steps=1"]).run().unwrap().expect_success();
    }
    let launch = isobar(Launch::plain(1, ISOBAR), "predict", "navier_stokes_fno", folder.path(), &sets);
    let outcome = launch.args(args).run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(code), "{outcome}");
    assert!(outcome.ranks[0].stderr.contains(words), "{outcome}");
}
