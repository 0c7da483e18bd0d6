//! The configurations of docs/applications, cut to the size of a test: losses and errors on four ranks that share each field are those
//! of one.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use isobar_data::{Content, DataVariable, Dim, PredictionMeta, Storage, writer};
use isobar_harness::{
    Exit, Launch,
    curve::{assert_same_run, losses, metric},
    output_within, workspace,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};
use tempfile::tempdir;

use crate::{domain, shallow_water};

const ISOBAR: &str = env!("CARGO_BIN_EXE_isobar-app");

/// Points of a surface, which four ranks do not divide evenly.
const POINTS: i64 = 30;

/// A wave on a square.
static FLOW: LazyLock<PathBuf> = LazyLock::new(|| domain::wave("application_flow", &[16, 16]));

/// A data set of an application, made in a folder.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Data {
    Weather,
    Darcy,
    Cars,
    Flow,
    Pairs,
}

impl Data {
    /// Makes the files, and returns `data.path`.
    fn make(self, folder: &Path) -> PathBuf {
        match self {
            Self::Darcy => workspace().join("tests/data/darcy_excerpt.h5"),
            Self::Weather => {
                let path = folder.join("waves.nc");
                shallow_water::write(&path, 0..36, false);
                path
            }
            Self::Cars => {
                (0..3).for_each(|car| write_surface(&folder.join(format!("car_{car}.h5")), car));
                folder.join("car_*.h5")
            }
            Self::Flow => FLOW.clone(),
            Self::Pairs => {
                let path = folder.join("pairs.h5");
                let mut command = Command::new(ISOBAR);
                command.args(["data", "coarsen"]).arg(&*FLOW).arg(&path);
                let made = output_within(&mut command, Duration::from_secs(60)).unwrap().unwrap();
                assert!(made.status.success(), "{made:?}");
                path
            }
        }
    }

    /// Settings of all configurations with these data.
    fn sets(self) -> &'static [&'static str] {
        match self {
            Self::Weather => &["data.train_times=[\"2000-01-01\", 38]", "data.validation_times=[38, 70]"],
            Self::Darcy => &["data.validation_samples=2"],
            Self::Cars => &[],
            Self::Flow => &["data.fields=[\"height\"]", "data.history=2", "data.validation_samples=1"],
            Self::Pairs => &[
                "data.inputs=[\"height_coarse\"]",
                "data.targets=[\"height_detail\"]",
                "data.validation_samples=2",
            ],
        }
    }

    /// A mesh of four ranks.
    fn mesh(self) -> [&'static str; 2] {
        match self {
            Self::Cars => ["distributed.mesh.shape=[4]", "distributed.mesh.names=[\"domain\"]"],
            _ => ["distributed.mesh.shape=[2, 2]", "distributed.mesh.names=[\"domain\", \"domain_y\"]"],
        }
    }
}

/// Writes a surface of points: places, normals and pressures.
fn write_surface(path: &Path, car: usize) {
    let vector = |name: &str| DataVariable {
        channels: ["x", "y", "z"].map(|axis| format!("{name}_{axis}")).to_vec(),
        ..DataVariable::scalar(name)
    };
    let variables = vec![vector("vertices"), vector("normals"), DataVariable::scalar("pressure")];
    let content = Content {
        meta: PredictionMeta {
            name: "cars".into(),
            variables: variables.iter().map(|variable| variable.name.clone()).collect(),
            samples: 1,
            times: Vec::new(),
            sample_times: Vec::new(),
            sample_numbers: Vec::new(),
            attributes: Vec::new(),
            missing: false,
            left_out: Vec::new(),
        },
        time_unit: None,
        dims: vec![Dim {
            name: "point".into(),
            unit: None,
            coordinates: (0..POINTS).map(|point| point as f64).collect(),
            periodic: false,
        }],
        variables,
        parameters: Vec::new(),
        storage: Storage::default(),
    };
    let line = |step: f64| {
        (Tensor::arange(POINTS, (Kind::Float, Device::Cpu)) * step + car as f64 * 0.3).sin().view([1, 1, -1])
    };
    let three = |step: f64| Tensor::cat(&[line(step), line(2.0 * step), line(3.0 * step)], 1);
    let mut file = writer(None, path).unwrap().create(path, &content).unwrap();
    file.write("vertices", 0, 0, &three(0.2)).unwrap();
    file.write("normals", 0, 0, &three(0.31)).unwrap();
    file.write("pressure", 0, 0, &(line(0.2) * line(0.31))).unwrap();
    file.finish().unwrap();
}

/// Trains one epoch in double precision, and returns what the run reports.
pub(crate) fn train(config: &str, data: &Path, output: &Path, ranks: usize, sets: &[&str]) -> Vec<f64> {
    start(config, data, output, ranks, sets);
    let run = output.join("run");
    assert!(run.join("validation.png").exists(), "{config}");
    // A run that ended within an epoch before has a validation there, too.
    let last = |name: &str| metric(&run, name).last().copied().into_iter().collect::<Vec<f64>>();
    let errors = last("validation_error");
    assert_eq!(errors.len(), 1, "{config}");
    let reported = [losses(&run), errors, last("rollout_error")].concat();
    assert!(reported.iter().all(|number| number.is_finite()), "{config}: {reported:?}");
    reported
}

/// Trains at most one epoch in double precision.
pub(crate) fn start(config: &str, data: &Path, output: &Path, ranks: usize, sets: &[&str]) {
    let (path, output_set) =
        (format!("data.path={}", data.display()), format!("run.output={}", output.display()));
    let common = [
        &*path,
        &output_set,
        "run.name=run",
        "train.epochs=1",
        "train.validate_every=1",
        "train.batch_size=3",
        "train.precision=float64",
        "metrics.every_steps=1",
        "schedule.warmup_epochs=0",
        "distributed.timeout_s=200",
    ];
    let launch = Launch::plain(ranks, ISOBAR).current_dir(workspace()).deadline(Duration::from_secs(300));
    let sets = common.iter().chain(sets).flat_map(|set| ["--set", set]);
    let _ =
        launch.args(["train", &format!("configs/{config}.toml")]).args(sets).run().unwrap().expect_success();
}

#[rstest]
#[case::pangu("shallow_water_pangu", Data::Weather, &[
    "model.img_size=[10, 16]", "model.window_size=[1, 2, 2]", "model.embed_dim=4", "model.num_heads=[1, 2, 2, 1]",
])]
#[case::dit("shallow_water_dit", Data::Weather, &[
    "model.input_size=[10, 16]", "model.patch_size=[2, 2]", "model.hidden_size=8", "model.depth=2", "model.num_heads=2",
])]
#[case::darcy_points("darcy_transolver_points", Data::Darcy, &[
    "model.n_layers=1", "model.n_hidden=8", "model.n_head=2", "model.slice_num=4",
])]
#[case::cars("car_transolver", Data::Cars, &[
    "model.n_layers=1", "model.n_hidden=8", "model.n_head=2", "model.slice_num=4",
])]
#[case::cnext_unet("well_cnext_unet", Data::Flow, &[
    "model.stages=2", "model.init_features=4", "model.dim_in=2", "model.spatial_resolution=[16, 16]",
])]
#[case::unet("well_unet", Data::Flow, &[
    "model.model_depth=2", "model.feature_map_channels=[4, 4, 8, 8]", "model.in_channels=2",
])]
#[case::super_resolution("super_resolution_unet", Data::Pairs, &[
    "model.model_channels=4", "model.channel_mult=[1, 2]", "model.img_resolution=16",
])]
#[case::super_resolution_by_diffusion("super_resolution_diffusion", Data::Pairs, &[
    "model.model.model_channels=4", "model.model.channel_mult=[1, 2]", "model.model.img_resolution=16",
    "task.sampler.num_steps=2", "task.members=2",
])]
fn four_ranks_train_as_one(#[case] config: &str, #[case] data: Data, #[case] small: &[&str]) {
    let folder = tempdir().unwrap();
    let path = data.make(folder.path());
    let run = |name: &str, ranks: usize, mesh: &[&str]| {
        let sets = [data.sets(), small, mesh].concat();
        train(config, &path, &folder.path().join(name), ranks, &sets)
    };
    assert_same_run(&run("four", 4, &data.mesh()), &run("one", 1, &[]));
}

/// The coordinates of points are an input of two or three channels; anything else is an error before data are read.
#[rstest]
#[case("pressure", "expected one of data.inputs (vertices, normals)")]
#[case("speed", "expected one of data.inputs (vertices, normals)")]
fn points_that_are_no_coordinates_are_refused(#[case] points: &str, #[case] error: &str) {
    let folder = tempdir().unwrap();
    let path = Data::Cars.make(folder.path());
    let sets = [
        format!("data.path={}", path.display()),
        format!("data.points={points}"),
        format!("run.output={}", folder.path().join("out").display()),
    ];
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let launch = Launch::plain(1, ISOBAR).current_dir(workspace());
    let outcome = launch.args(["train", "configs/car_transolver.toml"]).args(sets).run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(2), "{outcome}");
    assert!(outcome.ranks[0].stderr.contains(error), "{outcome}");
}

/// A denoiser of a trained regression's residual, on full fields and on patches, gives the same on four ranks as on one;
/// predictions read the regression.
#[rstest]
#[case("super_resolution_corrdiff", &[])]
#[case("super_resolution_patches", &[
    "task.patches.patch_shape=[8, 8]", "task.patches.overlap_pix=2", "task.patches.boundary_pix=1",
])]
fn two_stages_on_four_ranks_are_those_of_one(#[case] config: &str, #[case] further: &[&str]) {
    let folder = tempdir().unwrap();
    let path = Data::Pairs.make(folder.path());
    let small = ["model_channels=4", "channel_mult=[1, 2]", "img_resolution=16"];
    let first: Vec<String> = small.iter().map(|set| format!("model.{set}")).collect();
    let first: Vec<&str> =
        Data::Pairs.sets().iter().copied().chain(first.iter().map(String::as_str)).collect();
    let _ = train("super_resolution_unet", &path, &folder.path().join("first"), 1, &first);
    let regression = format!("task.regression={}", folder.path().join("first/run").display());
    let second: Vec<String> = small.iter().map(|set| format!("model.model.{set}")).collect();
    let own = [&*regression, "task.sampler.num_steps=2", "task.members=2"];
    let second: Vec<&str> = Data::Pairs
        .sets()
        .iter()
        .copied()
        .chain(second.iter().map(String::as_str))
        .chain(own)
        .chain(further.iter().copied())
        .collect();
    let run = |name: &str, ranks: usize, mesh: &[&str]| {
        let sets = [&second[..], mesh].concat();
        train(config, &path, &folder.path().join(name), ranks, &sets)
    };
    assert_same_run(&run("four", 4, &Data::Pairs.mesh()), &run("one", 1, &[]));

    // Runs of earlier versions have the table `[diffusion]`.
    let kept = folder.path().join("one/run/config.toml");
    let text = std::fs::read_to_string(&kept).unwrap();
    let former: Vec<&str> = text.lines().filter(|line| !line.starts_with("type = \"diffusion\"")).collect();
    assert_eq!(former.len() + 1, text.lines().count(), "{text}");
    std::fs::write(&kept, former.join("\n").replace("[task", "[diffusion")).unwrap();
    let predicted = Launch::plain(1, ISOBAR)
        .current_dir(workspace())
        .args(["predict", &folder.path().join("one/run").display().to_string()])
        .run()
        .unwrap()
        .expect_success();
    assert!(folder.path().join("one/run/prediction.h5").exists(), "{predicted}");
    // Without its regression, a denoiser of residuals predicts nothing.
    std::fs::remove_dir_all(folder.path().join("first/run/checkpoints")).unwrap();
    let args = ["predict", &folder.path().join("one/run").display().to_string()].map(str::to_owned);
    let outcome = Launch::plain(1, ISOBAR).current_dir(workspace()).args(args).run().unwrap();
    assert_ne!(outcome.exit, Exit::Code(0), "{outcome}");
    assert!(outcome.ranks[0].stderr.contains("first/run/checkpoints"), "{outcome}");
}

/// A network that does not read the positions of patches is built for the extents of a patch.
#[rstest]
#[case("[80, 32]", 16, "patch_shape is [80, 32], expected 1 to 16 rows and 1 to 16 columns")]
#[case("[8, 8]", 16, "--set 'model.model.img_resolution=[8, 8]'")]
#[case("[8, 8]", 8, "--set model.model.in_channels=3")]
fn patches_that_do_not_fit_are_refused(#[case] shape: &str, #[case] extent: usize, #[case] words: &str) {
    let folder = tempdir().unwrap();
    let path = Data::Pairs.make(folder.path());
    let own = [
        format!("data.path={}", path.display()),
        format!("run.output={}", folder.path().display()),
        format!("task.patches.patch_shape={shape}"),
        format!("model.model.img_resolution={extent}"),
    ];
    let sets = own.iter().map(String::as_str).chain(Data::Pairs.sets().iter().copied());
    let outcome = Launch::plain(1, ISOBAR)
        .current_dir(workspace())
        .args(["train", "configs/super_resolution_diffusion.toml"])
        .args(sets.flat_map(|set| ["--set", set]))
        .run()
        .unwrap();
    assert_eq!(outcome.exit, Exit::Code(2), "{outcome}");
    assert!(outcome.ranks[0].stderr.contains(words), "{outcome}");
}

#[test]
fn a_first_stage_of_other_data_is_refused() {
    let folder = tempdir().unwrap();
    let config = "[data]\ninputs = [\"other\"]\ntargets = [\"vorticity_detail\"]\n";
    std::fs::write(folder.path().join("config.toml"), config).unwrap();
    let regression = format!("task.regression={}", folder.path().display());
    let output = format!("run.output={}", folder.path().display());
    let args = ["train", "configs/super_resolution_corrdiff.toml", "--set", &regression, "--set", &output];
    let args = args.map(str::to_owned);
    let outcome = Launch::plain(1, ISOBAR).current_dir(workspace()).args(args).run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(2), "{outcome}");
    let words = "trained with data.inputs = [\"other\"], and the denoiser has [\"vorticity_coarse\"]";
    assert!(outcome.ranks[0].stderr.contains(words), "{outcome}");
}

/// An ensemble has one step: its mean is no state to continue from.
#[test]
fn ensembles_of_changes_are_refused() {
    let args = ["train", "configs/navier_stokes_diffusion.toml", "--set", "task.members=2"];
    let outcome = Launch::plain(1, ISOBAR).current_dir(workspace()).args(args).run().unwrap();
    assert_eq!(outcome.exit, Exit::Code(2), "{outcome}");
    let words = "task.members is 2, but data.predict is \"change\"";
    assert!(outcome.ranks[0].stderr.contains(words), "{outcome}");
}
