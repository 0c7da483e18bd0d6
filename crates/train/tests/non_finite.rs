//! Values that are not finite, where fields or parameters are in parts: all ranks name the rank, operator, module, parameter and
//! step that they come from.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::time::Duration;

use isobar_array::{Generator, Reduce, Window};
use isobar_collectives::{Group, threads, trace};
use isobar_manager::DeviceMesh;
use isobar_models::{Afno, AfnoConfig, Mode};
use isobar_shard::{MeshParams, ParamStore, Placement, ShardTensor};
use isobar_train::config::TrainConfig;
use isobar_train::{
    BoxError, Error, FitConfig, Parameters, Ranks, ShardedParameters, Step, Task, VariableError, fit,
};
use rstest::rstest;
use tch::{Device, Kind, Tensor};

const DEADLINE: Duration = Duration::from_secs(240);
const SHAPE: [i64; 4] = [4, 2, 12, 8];

/// In this step, on this rank, a module of this name makes NaN.
const STEP: usize = 1;
const RANK: usize = 1;
const MODULE: &str = "head.norm";

/// Fields that a model is to give back, split over a mesh.
struct Fields {
    model: Afno<ShardTensor>,
    x: ShardTensor,
    rank: usize,
    /// True if the values are produced in the backward pass.
    backward: bool,
}

impl Task for Fields {
    fn train_samples(&self) -> usize {
        SHAPE[0] as usize
    }

    fn validation_samples(&self) -> usize {
        0
    }

    fn loss(&self, step: Step<'_>, _: &[usize]) -> Result<Tensor, BoxError> {
        let y = self.model.forward(&self.x, Mode::Eval)?;
        let (_module, own) = (trace::module(MODULE), y.local());
        let part = match (step.epoch as usize == STEP && self.rank == RANK, self.backward) {
            (false, _) => own.f_mul_scalar(1.0)?,
            (true, false) => own.f_square()?.f_neg()?.f_sub_scalar(1.0)?.f_sqrt()?,
            // Of a root at zero the derivative is infinite; times zero it is NaN.
            (true, true) => own.f_sub(&own.f_detach()?)?.f_sqrt()?.f_mul_scalar(0.0)?.f_add(own)?,
        };
        // All ranks make it, as all make the same calls.
        let y = ShardTensor::from_parts(&part, y.layout())?;
        Ok(y.mse_loss(&self.x)?.full_tensor(None)?)
    }

    fn errors(&self, _: &[usize]) -> Result<Vec<Vec<VariableError>>, BoxError> {
        Ok(Vec::new())
    }
}

fn run(world: &Group, names: &[&str], shape: &[i64], backward: bool, folder: &Path) -> Error {
    let mesh = DeviceMesh::new(world, shape, names).unwrap();
    let sharded = ShardedParameters::default();
    let splits = names.contains(&"shard");
    let mut store = ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu);
    let params = MeshParams::new(&mut store, &mesh).pending();
    let sizes = AfnoConfig::new([12, 8], 2, 2);
    let config = AfnoConfig { patch_size: [2, 2], embed_dim: 8, depth: 2, num_blocks: 2, ..sizes };
    let model =
        Afno::new(&config, &mut if splits { params.watched(sharded.watch()) } else { params }).unwrap();
    let ranks = match splits {
        true => Ranks::fully_sharded(world, &mesh, &sharded).unwrap(),
        false => Ranks::sharded(world, &mesh).unwrap(),
    };
    let place = |name: &&str| Placement::Shard(if *name == "domain" { 2 } else { 0 });
    let places: Vec<Placement> = names.iter().map(place).collect();
    let options = (Kind::Double, Device::Cpu);
    let whole = Generator::new(1).normal(&Window::whole(&SHAPE), 0.0, 1.0, options).unwrap();
    let x = ShardTensor::distribute(&whole, &mesh, &places).unwrap();
    let (params, _) = Parameters::from_store(&store, &Group::single()).unwrap();
    let config = FitConfig {
        folder: folder.to_owned(),
        // An epoch is a step.
        train: TrainConfig { epochs: 3, batch_size: SHAPE[0] as usize, ..Default::default() },
        ..Default::default()
    };
    let task = Fields { model, x, rank: world.rank(), backward };
    fit(&task, &params, &[], &ranks, &config).unwrap_err()
}

#[rstest]
#[case::domain(&["domain"], &[3])]
#[case::shard(&["shard"], &[3])]
#[case::both(&["shard", "domain"], &[2, 2])]
fn where_they_come_from_is_named(
    #[case] names: &[&str],
    #[case] shape: &[i64],
    #[values(false, true)] backward: bool,
) {
    let folder = tempfile::tempdir().unwrap();
    let ranks = shape.iter().product::<i64>() as usize;
    let errors = threads::run(ranks, DEADLINE, |world| run(&world, names, shape, backward, folder.path()));
    // In backward libtorch's own operators know no module: the parameter that was used last tells where.
    let found = match backward {
        true => "aten::div (backward".to_owned(),
        false => format!("aten::sqrt (forward, in {MODULE}"),
    };
    for error in errors {
        let Error::NonFinite { step, origin, .. } = &error else { panic!("{error}") };
        assert_eq!(*step, STEP as u64, "{error}");
        let start =
            format!("rank {RANK}: {found}, at parameter \"head.weight\") made NaN of finite values: ");
        assert!(origin.starts_with(&start), "{origin}");
        let others = (0..ranks).filter(|&rank| rank != RANK);
        assert!(others.map(|rank| format!("rank {rank}:")).all(|other| !origin.contains(&other)), "{origin}");
    }
}
