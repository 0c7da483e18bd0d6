//! Steps of a program's own loop: `DataParallel`, `FullySharded` and optimizers by hand.

use std::time::Duration;

use isobar_collectives::{Group, threads};
use isobar_data::part;
use isobar_manager::DeviceMesh;
use isobar_shard::{GradientSource, ShardTensor};
use isobar_train::optim::{AdamWConfig, LionConfig, MuonConfig, OptimizerKind, SgdConfig};
use isobar_train::{
    DataParallel, DataParallelConfig, Error, FullySharded, Parameter, Parameters, ShardedParameters,
    clip_grad_norm, grad_norm,
};
use rstest::rstest;
use tch::{Kind, Tensor};

use super::arrangement::{Arrangement, PLANS, Plan};
use super::model::{Net, OPTIONS, SAMPLES, SEED, Supplier, dense, fields};

const DEADLINE: Duration = Duration::from_secs(240);

/// Over which ranks gradients are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    World,
    Mesh,
    /// The ranks of the mesh but along `model`.
    Copies,
    Data,
    Nobody,
}

const OVER: [Over; 5] = [Over::World, Over::Mesh, Over::Copies, Over::Data, Over::Nobody];

impl Over {
    fn group(self, on: &Arrangement) -> Group {
        match self {
            Self::World => on.world.clone(),
            Self::Mesh => on.copies(false),
            Self::Copies => on.copies(true),
            Self::Data => on.data.clone(),
            Self::Nobody => Group::single(),
        }
    }

    fn ranks(self, plan: &Plan) -> usize {
        match self {
            Self::World => plan.ranks(),
            Self::Mesh => plan.mesh_ranks(),
            Self::Copies => plan.mesh_ranks() / plan.extent("model"),
            Self::Data if plan.names.contains(&"data") => plan.shape[0] as usize,
            Self::Data | Self::Nobody => 1,
        }
    }
}

/// Which ranks have samples of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Samples {
    All,
    /// Ranks share those of a batch.
    OfWorld,
    /// Ranks along `data` do.
    OfData,
}

/// The loss of these samples, on the graph.
fn loss_of(on: &Arrangement, net: &Model, samples: &[usize]) -> Tensor {
    let (x, y) = fields();
    let index = Tensor::from_slice(&samples.iter().map(|&sample| sample as i64).collect::<Vec<_>>());
    let (x, y) = (x.index_select(0, &index), y.index_select(0, &index));
    match net {
        Model::Plain(net) => (net.forward(&x).unwrap() - y).square().mean(Kind::Double),
        Model::OnMesh(net) => {
            let x = ShardTensor::distribute(&x, &on.mesh, &on.placements()).unwrap();
            let found = net.forward(&x).unwrap().full_tensor(None).unwrap();
            (found - y).square().mean(Kind::Double)
        }
    }
}

#[expect(clippy::large_enum_variant, reason = "one at a time")]
enum Model {
    Plain(Net<Tensor>),
    OnMesh(Net<ShardTensor>),
}

fn made(supplier: Supplier, on: &Arrangement, sharded: &ShardedParameters) -> (Model, Parameters) {
    let mut store = supplier.store(on, SEED);
    let model = match supplier {
        Supplier::Store => Model::Plain(Net::new(&mut store)),
        _ => Model::OnMesh(Net::new(&mut supplier.on_mesh(&mut store, on, sharded))),
    };
    (model, Parameters::of(&store).unwrap().0)
}

/// The gradients of one backward pass: by name, those of this rank's parts.
fn gradients(
    on: &Arrangement,
    (supplier, over, samples): (Supplier, Over, Samples),
) -> Result<Vec<(String, Vec<f64>)>, Error> {
    let (model, params) = made(supplier, on, &ShardedParameters::default());
    let parallel = DataParallel::new(&params, &[], &over.group(on), &DataParallelConfig::default())?;
    let all: Vec<usize> = (0..SAMPLES).collect();
    let sharing = match samples {
        Samples::All => Group::single(),
        Samples::OfWorld => on.world.clone(),
        Samples::OfData => on.data.clone(),
    };
    // Ranks of a mesh with other numbers of samples would make other calls: they have one each then.
    let in_mesh = sharing.size() > 1
        && on.mesh.ranks().iter().filter(|rank| sharing.ranks().contains(rank)).count() > 1;
    let (own, total) = match in_mesh && supplier != Supplier::Store {
        true => (&all[sharing.rank()..=sharing.rank()], sharing.size()),
        false => (part(&all, sharing.rank(), sharing.size()), SAMPLES),
    };
    parallel.zero_grad()?;
    let loss = loss_of(on, &model, own);
    parallel.backward(Some(&loss), own.len() as u64, total as u64)?;
    clip_grad_norm(&params, 1e9)?;
    let numbers = |param: &Parameter| Vec::try_from(param.grad().unwrap().flatten(0, -1)).unwrap();
    Ok(params.iter().map(|param| (param.name.clone(), numbers(param))).collect())
}

/// The combinations that are right.
fn is_right(plan: &Plan, supplier: Supplier, over: Over, samples: Samples) -> bool {
    let shared_by = match samples {
        Samples::All => 1,
        Samples::OfWorld => plan.ranks(),
        Samples::OfData => Over::Data.ranks(plan),
    };
    let summands = match supplier {
        Supplier::PendingAlong => plan.mesh_ranks() / plan.extent("model"),
        supplier if supplier.is_pending() => plan.mesh_ranks(),
        _ => 1,
    };
    // Ranks of a mesh have the same samples.
    let apart = supplier == Supplier::Store
        || shared_by == 1
        || (samples == Samples::OfData && plan.extent("data") == 1);
    apart && summands * shared_by == over.ranks(plan) && {
        // As many ranks, but others: along `data`, or in the mesh.
        let along_data = shared_by > 1 && summands == 1;
        let in_mesh = shared_by == 1 && summands > 1;
        match over {
            Over::World | Over::Nobody => true,
            Over::Data => !in_mesh || plan.slice.is_none(),
            Over::Mesh | Over::Copies => !along_data || plan.slice.is_none(),
        }
    }
}

#[rstest]
fn data_parallel_has_the_dense_gradient_or_refuses(
    #[values(0, 1, 2, 3, 5, 7, 9, 10, 12)] plan: usize,
    #[values(Samples::All, Samples::OfWorld, Samples::OfData)] samples: Samples,
) {
    let plan = &PLANS[plan];
    let (gradient, _) = dense();
    for supplier in Supplier::ALL {
        for over in OVER {
            let along = supplier == Supplier::PendingAlong;
            if along && !plan.has("model") {
                continue;
            }
            let what = format!("{plan:?}, {supplier:?}, {over:?}, {samples:?}");
            let ended = threads::run(plan.ranks(), DEADLINE, |world| {
                gradients(&Arrangement::new(&world, plan), (supplier, over, samples))
            });
            if !is_right(plan, supplier, over, samples) {
                let refused = |ended: &_| matches!(ended, Err(Error::WrongGradients { call, .. }) if call.contains('`'));
                assert!(ended.iter().all(refused), "{what}: {ended:?}");
                continue;
            }
            for found in ended {
                for (name, found) in found.unwrap_or_else(|error| panic!("{what}: {error}")) {
                    let want: Vec<f64> = Vec::try_from(gradient[&name].flatten(0, -1)).unwrap();
                    // A part of what is split is somewhere in the whole.
                    let fits = |part: &[f64]| part.iter().zip(&found).all(|(a, b)| (a - b).abs() < 1e-9);
                    assert!(
                        want.windows(found.len()).any(fits),
                        "{what}: {name}: {found:?}, expected {want:?}"
                    );
                }
            }
        }
    }
}

fn optimizers() -> [OptimizerKind; 4] {
    [
        OptimizerKind::from(AdamWConfig::default()),
        OptimizerKind::from(LionConfig::default()),
        OptimizerKind::from(MuonConfig::default()),
        OptimizerKind::from(SgdConfig::default()),
    ]
}

fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    match result {
        Err(error @ Error::WrongGradients { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

/// Gradients that are not yet summed are neither stepped nor clipped.
#[test]
fn contributions_are_not_stepped() {
    let refusals = threads::run(2, DEADLINE, |world| {
        let on = Arrangement::new(&world, &PLANS[2]);
        let (model, params) = made(Supplier::Pending, &on, &ShardedParameters::default());
        let all: Vec<usize> = (0..SAMPLES).collect();
        loss_of(&on, &model, &all).backward();
        let mut texts = vec![refusal(grad_norm(&params)), refusal(clip_grad_norm(&params, 1.0))];
        for kind in optimizers() {
            texts.push(refusal(kind.build(&params).unwrap().step(0.1)));
        }
        // A program that sums them itself says so.
        let own = params.with_source(&GradientSource::summed(&on.mesh));
        for param in &own {
            let grad = param.grad().unwrap();
            let sum =
                isobar_collectives::all_reduce(&grad, isobar_collectives::ReduceOp::Sum, &world).unwrap();
            param.grad().unwrap().copy_(&sum);
        }
        (texts, grad_norm(&own).unwrap())
    });
    let (gradient, _) = dense();
    let squares: f64 = gradient.values().map(|grad| grad.square().sum(Kind::Double).double_value(&[])).sum();
    for (texts, norm) in &refusals {
        assert!(texts.iter().all(|text| *text == refusals[0].0[0]), "{texts:?}");
        assert!((norm - squares.sqrt()).abs() < 1e-9, "{norm}");
    }
    insta::assert_snapshot!(refusals[0].0[0], @r#"gradients would not be those of the loss: the gradient of parameter "conv.weight" is pending on mesh (domain=2), and nobody sums it over the ranks; train with `fit` and `Ranks::sharded(&world, &mesh)`, or keep a `DataParallel::new(&params, &buffers, &group, &config)` over the group of the mesh's ranks and call its `backward(Some(&loss), 1, 1)`"#);
}

/// Passes that end without a sum over the ranks, and sums that are made twice.
#[test]
fn a_loop_that_leaves_out_the_sum_is_refused() {
    let refusals = threads::run(2, DEADLINE, |world| {
        let on = Arrangement::new(&world, &PLANS[2]);
        let (model, params) = made(Supplier::Store, &on, &ShardedParameters::default());
        let parallel = DataParallel::new(&params, &[], &world, &DataParallelConfig::default()).unwrap();
        let mut optimizers: Vec<_> = optimizers().iter().map(|kind| kind.build(&params).unwrap()).collect();
        let own = [world.rank()];
        let pass = |last: bool| {
            let loss = loss_of(&on, &model, &own);
            match last {
                true => parallel.backward(Some(&loss), 1, 2),
                false => parallel.backward_no_sync(Some(&loss), 1, 2),
            }
        };
        let mut texts = Vec::new();
        parallel.zero_grad().unwrap();
        loss_of(&on, &model, &own).backward();
        texts.extend(optimizers.iter_mut().map(|optimizer| refusal(optimizer.step(0.1))));
        parallel.zero_grad().unwrap();
        pass(false).unwrap();
        texts.extend(optimizers.iter_mut().map(|optimizer| refusal(optimizer.step(0.1))));
        parallel.zero_grad().unwrap();
        pass(true).unwrap();
        optimizers.iter_mut().for_each(|optimizer| optimizer.step(0.1).unwrap());
        let twice = refusal(pass(true));
        // By whatever way they become zero.
        params.zero_grad().unwrap();
        pass(true).unwrap();
        params.iter().for_each(|param| param.tensor.shallow_clone().zero_grad());
        pass(true).unwrap();
        grad_norm(&params).unwrap();
        let other =
            refusal(DataParallel::new(&params, &[], &world, &DataParallelConfig::default()).map(drop));
        (texts, twice, other)
    });
    let (texts, twice, other) = &refusals[0];
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    assert!(refusals.iter().all(|found| *found == refusals[0]));
    insta::assert_snapshot!(texts[0], @r#"gradients would not be those of the loss: the gradient of parameter "conv.weight" has not been summed over the ranks; call `DataParallel::backward` in the last pass of a step, instead of `backward_no_sync` or a tensor's own `backward`"#);
    insta::assert_snapshot!(twice, @r#"gradients would not be those of the loss: the gradients of an earlier `DataParallel::backward` would be summed over the ranks again; call `zero_grad` before each step, and `backward_no_sync` for all passes of a step but the last"#);
    insta::assert_snapshot!(other, @r#"gradients would not be those of the loss: another DataParallel sums the gradient of parameter "conv.weight" over ranks; drop it before you make one more"#);
}

/// If one rank alone does not zero its gradients, all ranks get an error in the same call, and can continue.
#[test]
fn a_rank_that_does_not_zero_its_gradients_tells_the_others() {
    let found = threads::run(2, DEADLINE, |world| {
        let weight = Tensor::from_slice(&[2.0]).set_requires_grad(true);
        let params = Parameters::new(vec![Parameter::replicated("w", &weight)]).unwrap();
        let parallel = DataParallel::new(&params, &[], &world, &DataParallelConfig::default()).unwrap();
        let pass = || parallel.backward(Some(&weight.square().sum(OPTIONS.0)), 1, 2);
        parallel.zero_grad().unwrap();
        pass().unwrap();
        if world.rank() == 0 {
            parallel.zero_grad().unwrap();
        }
        let error = pass().unwrap_err();
        parallel.zero_grad().unwrap();
        pass().unwrap();
        (error, weight.grad().double_value(&[0]))
    });
    assert!(matches!(&found[0].0, Error::OtherRank { rank: 1, .. }), "{}", found[0].0);
    assert!(matches!(&found[1].0, Error::WrongGradients { .. }), "{}", found[1].0);
    assert!(found.iter().all(|(_, gradient)| *gradient == 4.0));
}

/// Weights that do not make one batch.
#[test]
fn the_ranks_shares_of_a_batch_make_one() {
    let run = |local: u64, global: u64| {
        let found = threads::run(3, DEADLINE, |world| {
            let weight = Tensor::from_slice(&[2.0]).set_requires_grad(true);
            let params = Parameters::new(vec![Parameter::replicated("w", &weight)]).unwrap();
            let parallel = DataParallel::new(&params, &[], &world, &DataParallelConfig::default()).unwrap();
            parallel.zero_grad().unwrap();
            parallel.backward(Some(&weight.square().sum(OPTIONS.0)), local, global).map_err(|e| e.to_string())
        });
        assert!(found.iter().all(|ended| *ended == found[0]), "{found:?}");
        found.into_iter().next().unwrap()
    };
    assert_eq!(run(2, 6), Ok(()));
    insta::assert_snapshot!(run(2, 2).unwrap_err(), @r#"gradients would not be those of the loss: the samples of this step's passes on 3 ranks make 3.0000 of its batch; call `backward(loss, local, global)` with the number of the rank's own samples and that of the samples of all ranks"#);
}

/// Parameters that were given away, or not made for it.
#[test]
fn fully_sharded_takes_watched_contributions_only() {
    let refusals = threads::run(2, DEADLINE, |world| {
        let on = Arrangement::new(&world, &PLANS[4]);
        let sharded = ShardedParameters::default();
        let config = DataParallelConfig::default();
        let fully = |params: &Parameters, sharded: &ShardedParameters, mesh: &DeviceMesh| {
            FullySharded::new(sharded.clone(), params, &[], mesh, &config)
        };
        let mut texts = Vec::new();
        for supplier in [Supplier::Store, Supplier::Summed, Supplier::Pending, Supplier::WatchedSummed] {
            let (_model, params) = made(supplier, &on, &sharded);
            texts.push(refusal(fully(&params, &sharded, &on.mesh)));
        }
        let (model, params) = made(Supplier::Watched, &on, &sharded);
        texts.push(refusal(fully(&params, &ShardedParameters::default(), &on.mesh)));
        let parallel = fully(&params, &sharded, &on.mesh).unwrap();
        let all: Vec<usize> = (0..SAMPLES).collect();
        parallel.backward(&loss_of(&on, &model, &all)).unwrap();
        let norm = grad_norm(parallel.parameters()).unwrap();
        let stepped = OptimizerKind::default().build(&params).unwrap().step(0.1);
        texts.extend([refusal(stepped), refusal(grad_norm(&params))]);
        (texts, norm)
    });
    let (gradient, _) = dense();
    let squares: f64 = gradient.values().map(|grad| grad.square().sum(Kind::Double).double_value(&[])).sum();
    for (texts, norm) in &refusals {
        assert_eq!(*texts, refusals[0].0);
        assert!((norm - squares.sqrt()).abs() < 1e-9, "{norm}");
    }
    let texts = &refusals[0].0;
    assert!(texts[..5].iter().all(|text| text.contains(".pending().watched(sharded.watch())")), "{texts:?}");
    assert!(texts[5..].iter().all(|text| text.contains("FullySharded::parameters()")), "{texts:?}");
}

/// A program may ask the store for its parameters more than once.
#[test]
fn all_handles_to_a_parameter_know_the_same() {
    threads::run(2, DEADLINE, |world| {
        let on = Arrangement::new(&world, &PLANS[2]);
        let mut store = Supplier::Pending.store(&on, SEED);
        let net = Net::new(&mut Supplier::Pending.on_mesh(&mut store, &on, &ShardedParameters::default()));
        let [reduced, stepped] = [(); 2].map(|()| Parameters::of(&store).unwrap().0);
        let mut optimizer = OptimizerKind::default().build(&stepped).unwrap();
        let parallel = DataParallel::new(&reduced, &[], &world, &DataParallelConfig::default()).unwrap();
        refusal(DataParallel::new(&stepped, &[], &world, &DataParallelConfig::default()));
        let all: Vec<usize> = (0..SAMPLES).collect();
        parallel.zero_grad().unwrap();
        parallel.backward(Some(&loss_of(&on, &Model::OnMesh(net), &all)), 1, 1).unwrap();
        optimizer.step(0.1).unwrap();
        drop(parallel);
        refusal(optimizer.step(0.1));
    });
}
