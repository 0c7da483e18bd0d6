//! Runs of one step by `fit`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use isobar_collectives::{Group, threads};
use isobar_data::{Augment, InMemory, Normalizer};
use isobar_shard::{ShardTensor, StateDict, read_safetensors};
use isobar_train::checkpoint::export;
use isobar_train::config::{OptimizerKind, TrainConfig};
use isobar_train::optim::SgdConfig;
use isobar_train::schedule::Constant;
use isobar_train::{
    BoxError, DenseFields, Error, FieldLayout, FieldModel, FieldTask, FitConfig, Parameters, Ranks,
    ShardedFields, ShardedParameters, Step, fit, loss::Mse,
};
use rstest::rstest;
use tch::{Tensor, no_grad};

use super::arrangement::{Arrangement, PLANS, Plan};
use super::model::{EXTENTS, Net, SAMPLES, SEED, Supplier, dense, fields};

const DEADLINE: Duration = Duration::from_secs(240);

/// Which ranks share samples, and over which gradients are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    DataParallel,
    Sharded,
    /// Of the other mesh.
    ShardedElsewhere,
    FullySharded,
    /// By hand: every rank has all samples, and nothing is summed.
    Apart,
    /// By hand: all share the samples, and nothing is summed.
    SamplesOnly,
    /// By hand: every rank has all samples, and gradients of all are summed.
    GradientsOnly,
    /// By hand: the ranks along `data` share samples, and their gradients are summed.
    Data,
    /// By hand: the ranks along `data` share samples, and the gradients of all ranks are summed.
    DataAndAll,
}

const SHARINGS: [Sharing; 9] = [
    Sharing::DataParallel,
    Sharing::Sharded,
    Sharing::ShardedElsewhere,
    Sharing::FullySharded,
    Sharing::Apart,
    Sharing::SamplesOnly,
    Sharing::GradientsOnly,
    Sharing::Data,
    Sharing::DataAndAll,
];

impl Sharing {
    fn ranks(self, on: &Arrangement, sharded: &ShardedParameters) -> Ranks {
        let world = &on.world;
        let by_hand = |data: &Group, gradients: &Group| Ranks {
            world: world.clone(),
            data: data.clone(),
            gradients: gradients.clone(),
            shards: None,
        };
        let single = Group::single();
        match self {
            Self::DataParallel => Ranks::data_parallel(world),
            Self::Sharded => Ranks::sharded(world, &on.mesh).unwrap(),
            Self::ShardedElsewhere => Ranks::sharded(world, &on.other).unwrap(),
            Self::FullySharded => Ranks::fully_sharded(world, &on.mesh, sharded).unwrap(),
            Self::Apart => by_hand(&single, &single),
            Self::SamplesOnly => by_hand(world, &single),
            Self::GradientsOnly => by_hand(&single, world),
            Self::Data => by_hand(&on.data, &on.data),
            Self::DataAndAll => by_hand(&on.data, world),
        }
    }
}

/// Layout of the fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fields {
    Dense,
    Sharded,
    /// On the other mesh.
    ShardedElsewhere,
}

const FIELDS: [Fields; 3] = [Fields::Dense, Fields::Sharded, Fields::ShardedElsewhere];

/// The combinations that are right; all others are to be refused.
fn is_right(plan: &Plan, supplier: Supplier, sharing: Sharing, fields: Fields) -> bool {
    let ranks = plan.ranks();
    let on_mesh = plan.mesh_ranks();
    // Ranks whose contributions make a gradient.
    let summands = match supplier {
        Supplier::PendingAlong => on_mesh / plan.extent("model"),
        supplier if supplier.is_pending() => on_mesh,
        _ => 1,
    };
    let apart = plan.slice.is_some();
    let fits = match (supplier, fields) {
        (_, Fields::Dense) => true,
        (Supplier::Store, Fields::Sharded) => on_mesh == 1,
        (Supplier::Store, Fields::ShardedElsewhere) => ranks == 1,
        (_, Fields::Sharded) => true,
        (_, Fields::ShardedElsewhere) => false,
    };
    // Ranks along `data` that have samples of their own.
    let data_is_apart = supplier == Supplier::Store || apart || plan.extent("data") == 1;
    fits && match sharing {
        Sharing::DataParallel => supplier == Supplier::Store || ranks == 1,
        Sharing::Sharded => summands == on_mesh / plan.extent("model"),
        Sharing::ShardedElsewhere | Sharing::GradientsOnly => summands == ranks,
        Sharing::FullySharded => match supplier {
            Supplier::Watched => plan.extent("model") == 1,
            Supplier::WatchedSummed => on_mesh == 1,
            _ => false,
        },
        Sharing::Apart => summands == 1,
        Sharing::SamplesOnly => ranks == 1,
        Sharing::Data => data_is_apart && summands == 1,
        Sharing::DataAndAll => {
            let sharing_samples = if plan.names.contains(&"data") { plan.shape[0] as usize } else { 1 };
            data_is_apart && summands * sharing_samples == ranks
        }
    }
}

/// Trains one step with a learning rate of 1 and no momentum, and returns the checkpoint.
fn run<L: FieldLayout>(
    layout: L,
    forward: impl Fn(&L::Array, Option<Step<'_>>) -> Result<L::Array, BoxError>,
    params: &Parameters,
    ranks: &Ranks,
    folder: &Path,
) -> Result<PathBuf, Error> {
    let window = layout.window(&EXTENTS)?;
    let part = |field: &Tensor| {
        window.iter().enumerate().fold(field.shallow_clone(), |field, (dim, range)| {
            field.narrow(dim as i64 + 2, range.start as i64, range.len() as i64)
        })
    };
    let (x, y) = fields();
    let data = || InMemory::pairs(part(&x), part(&y)).unwrap();
    let same = Normalizer::new(0.0, 1.0).unwrap();
    let task = FieldTask {
        model: FieldModel {
            forward,
            layout,
            positions: None,
            change: None,
            input: same.clone(),
            target: same,
            variables: vec![isobar_train::Variable::new("field")],
            roles: None,
            missing: None,
        },
        train: data().into(),
        validation: data().into(),
        rollouts: None,
        augment: Augment::None,
        loss: Mse {}.into(),
        weights: isobar_train::Weights::default(),
        report: isobar_train::metric::Report::default(),
        seed: 0,
    };
    let sgd = SgdConfig { lr: 1.0, momentum: 0.0, ..SgdConfig::default() };
    let config = FitConfig {
        folder: folder.to_owned(),
        train: TrainConfig { epochs: 1, batch_size: SAMPLES, clip_norm: None, ..TrainConfig::default() },
        optimizer: OptimizerKind::from(sgd),
        schedule: Constant { warmup_epochs: 0.0 }.into(),
        ..FitConfig::default()
    };
    Ok(fit(&task, params, &[], ranks, &config)?.checkpoint.unwrap())
}

fn combination(
    on: &Arrangement,
    (supplier, sharing, fields): (Supplier, Sharing, Fields),
    seed: u64,
    folder: &Path,
) -> Result<PathBuf, Error> {
    let sharded = ShardedParameters::default();
    let ranks = sharing.ranks(on, &sharded);
    let mut store = supplier.store(on, seed);
    let lay_out = |mesh| ShardedFields::new(mesh, &EXTENTS).unwrap();
    let mesh = if fields == Fields::ShardedElsewhere { &on.other } else { &on.mesh };
    if supplier == Supplier::Store {
        let net = Net::new(&mut store);
        let (params, _) = Parameters::of(&store)?;
        return match fields {
            Fields::Dense => run(DenseFields, |x, _| Ok(net.forward(x)?), &params, &ranks, folder),
            _ => {
                let forward = |x: &ShardTensor, _: Option<Step<'_>>| {
                    let y = net.forward(&x.full_tensor(None)?)?;
                    Ok(ShardTensor::distribute(&y, mesh, x.placements())?)
                };
                run(lay_out(mesh), forward, &params, &ranks, folder)
            }
        };
    }
    let net = Net::new(&mut supplier.on_mesh(&mut store, on, &sharded));
    let (params, _) = Parameters::of(&store)?;
    match fields {
        Fields::Dense => {
            let forward = |x: &Tensor, _: Option<Step<'_>>| {
                let x = ShardTensor::distribute(x, &on.mesh, &on.placements())?;
                Ok(net.forward(&x)?.full_tensor(None)?)
            };
            run(DenseFields, forward, &params, &ranks, folder)
        }
        _ => run(lay_out(mesh), |x: &ShardTensor, _| Ok(net.forward(x)?), &params, &ranks, folder),
    }
}

/// Each combination: the gradient of the loss, or an error before training that is the same on all ranks.
#[rstest]
fn a_run_has_the_dense_gradient_or_is_refused(
    #[values(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)] plan: usize,
) {
    let plan = &PLANS[plan];
    let (gradient, start) = dense();
    let (mut right, mut refused) = (0, 0);
    for supplier in Supplier::ALL {
        for sharing in SHARINGS {
            for fields in FIELDS {
                let lacks_axis = (supplier == Supplier::PendingAlong && !plan.has("model"))
                    || (sharing == Sharing::FullySharded && !plan.has("shard"));
                if lacks_axis {
                    continue;
                }
                let folder = tempfile::tempdir().unwrap();
                let ended = threads::run(plan.ranks(), DEADLINE, |world| {
                    let on = Arrangement::new(&world, plan);
                    combination(&on, (supplier, sharing, fields), SEED, folder.path())
                });
                let what = format!("{plan:?}, {supplier:?}, {sharing:?}, {fields:?}");
                match is_right(plan, supplier, sharing, fields) {
                    true => {
                        let checkpoint =
                            ended.into_iter().next().unwrap().unwrap_or_else(|e| panic!("{what}: {e}"));
                        expect_step(&checkpoint, &start, &gradient, &what);
                        right += 1;
                    }
                    false => {
                        let errors = ended.iter().map(|ended| match ended {
                            Err(error @ Error::WrongGradients { call, .. }) => {
                                (error.to_string(), call.contains('`'))
                            }
                            other => panic!("{what}: {other:?}"),
                        });
                        let errors: Vec<(String, bool)> = errors.collect();
                        assert!(
                            errors.iter().all(|error| *error == errors[0] && error.1),
                            "{what}: {errors:?}"
                        );
                        refused += 1;
                    }
                }
            }
        }
    }
    assert!(right >= 10 && (refused > 0), "{right} right, {refused} refused");
}

/// That the parameters have gone down their gradient.
fn expect_step(checkpoint: &Path, start: &StateDict, gradient: &StateDict, what: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("weights.safetensors");
    export(checkpoint, &file).unwrap();
    let end = read_safetensors(&file).unwrap();
    assert_eq!(end.len(), start.len());
    for (name, start) in start {
        let found = no_grad(|| start - &end[name]);
        let off = (&found - &gradient[name]).abs().max().double_value(&[]);
        assert!(off < 1e-9, "{what}: {name} is off by {off}: {found}, expected {}", gradient[name]);
    }
}

/// Ranks with weights of their own have those of the first from the start, or are refused.
#[rstest]
#[case::plain(2, Supplier::Store, Sharing::DataParallel, true)]
#[case::pending(7, Supplier::Pending, Sharing::Sharded, true)]
#[case::in_parts(8, Supplier::Watched, Sharing::FullySharded, true)]
#[case::summed(7, Supplier::Summed, Sharing::Apart, true)]
#[case::each_for_itself(2, Supplier::Store, Sharing::Apart, false)]
#[case::two_meshes(12, Supplier::Pending, Sharing::Sharded, false)]
fn ranks_have_one_models_weights(
    #[case] plan: usize,
    #[case] supplier: Supplier,
    #[case] sharing: Sharing,
    #[case] right: bool,
) {
    let plan = &PLANS[plan];
    let fields = if supplier == Supplier::Store { Fields::Dense } else { Fields::Sharded };
    let folder = tempfile::tempdir().unwrap();
    let ended = threads::run(plan.ranks(), DEADLINE, |world| {
        let on = Arrangement::new(&world, plan);
        combination(&on, (supplier, sharing, fields), SEED + world.rank() as u64, folder.path())
    });
    let (gradient, start) = dense();
    for ended in ended {
        match (ended, right) {
            (Ok(checkpoint), true) => expect_step(&checkpoint, &start, &gradient, "own seeds"),
            (Err(error @ Error::WrongGradients { .. }), false) => {
                assert!(error.to_string().contains("give every rank one seed"), "{error}");
            }
            (other, _) => panic!("{other:?}"),
        }
    }
}

/// A run that leaves out ranks of its mesh.
#[test]
fn a_run_has_all_ranks_of_its_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let ended = threads::run(2, DEADLINE, |world| {
        let on = Arrangement { world: Group::single(), ..Arrangement::new(&world, &PLANS[2]) };
        let folder = folder.path().join(world.rank().to_string());
        combination(&on, (Supplier::Pending, Sharing::DataParallel, Fields::Sharded), SEED, &folder)
    });
    for ended in ended {
        let error = ended.unwrap_err();
        assert!(
            matches!(&error, Error::WrongGradients { call, .. } if call.contains("Ranks::world")),
            "{error}"
        );
    }
}

/// Two likely mistakes, and their error messages.
#[test]
fn the_call_that_is_right_is_named() {
    let said = |sharing, supplier, fields| {
        let folder = tempfile::tempdir().unwrap();
        let ended = threads::run(2, DEADLINE, |world| {
            let on = Arrangement::new(&world, &PLANS[2]);
            combination(&on, (supplier, sharing, fields), SEED, folder.path()).unwrap_err().to_string()
        });
        ended.into_iter().next().unwrap()
    };
    let texts: BTreeMap<&str, String> = [
        ("not pending", said(Sharing::Sharded, Supplier::Summed, Fields::Sharded)),
        ("data parallel", said(Sharing::DataParallel, Supplier::Pending, Fields::Sharded)),
        ("plain parameters", said(Sharing::Sharded, Supplier::Store, Fields::Sharded)),
        ("plain parameters and fields", said(Sharing::Sharded, Supplier::Store, Fields::Dense)),
        ("another mesh", said(Sharing::Sharded, Supplier::Pending, Fields::ShardedElsewhere)),
    ]
    .into();
    insta::assert_snapshot!(texts["not pending"], @r#"gradients would not be those of the loss: backward has summed the gradient of parameter "conv.weight" over mesh (domain=2) already, and it is summed again over the ranks [0, 1]; make the model with `MeshParams::new(&mut store, &mesh).pending()`"#);
    insta::assert_snapshot!(texts["data parallel"], @r#"gradients would not be those of the loss: the ranks [0, 1] compute the loss of each sample together, with parameter "conv.weight", but do not have the same samples: those of a batch are shared by the ranks [0, 1]; train with `Ranks::sharded(&world, &mesh)`"#);
    insta::assert_snapshot!(texts["plain parameters"], @r#"gradients would not be those of the loss: the fields are split over mesh (domain=2), and the gradient of parameter "conv.weight" is local to a rank; make the model with `MeshParams::new(&mut store, &mesh).pending()`, and train with `Ranks::sharded(&world, &mesh)`"#);
    insta::assert_snapshot!(texts["plain parameters and fields"], @r#"gradients would not be those of the loss: the gradient of parameter "conv.weight" is local to a rank, which has all samples of a batch, and gradients are summed over the ranks [0, 1]; train with `Ranks::data_parallel(&world)`, or, where fields are split over a mesh, make the model with `MeshParams::new(&mut store, &mesh).pending()`"#);
    insta::assert_snapshot!(texts["another mesh"], @r#"gradients would not be those of the loss: the fields are split over mesh (data=2), and the gradient of parameter "conv.weight" is pending on mesh (domain=2); give one mesh to `ShardedFields::new`, `MeshParams::new` and `Ranks::sharded`"#);
}
