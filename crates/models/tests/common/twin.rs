//! A model over sharded arrays against itself on one rank: outputs, gradients and steps of training.

use std::iter;
use std::time::Duration;

use isobar_array::{Generator, Window};
use isobar_collectives::threads;
use isobar_harness::{Memo, curve::SingleRun};
use isobar_mesh::DeviceMesh;
use isobar_models::{Batch, Mode, ModelArray, ModelConfig};
use isobar_shard::{
    Layout, MeshParams, ParamStore, Parameter, Placement, ShardTensor, Sizes, forbid_hidden_communication,
};
use tch::{Device, Kind, Tensor};

use super::{cut, nudge, perturb};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Largest differences of a run from that on one rank, relative to the largest value of a tensor, or to `floor` if that is larger.
struct Tolerances {
    outputs: f64,
    /// Of gradients, losses, and parameters after training.
    others: f64,
    floor: f64,
}

/// The floor is for values that are zero but for rounding, such as gradients of biases before a norm, and for those that are small since
/// they began at zero: SwinRNN's biases are off by 10⁻¹³ after 20 steps.
const OF_DOUBLE: Tolerances = Tolerances { outputs: 1e-11, others: 1e-10, floor: 1e-2 };
const OF_SINGLE: Tolerances = Tolerances { outputs: 1e-4, others: 1e-4, floor: 1.0 };

/// Returns the number of training steps on a mesh: 20 on one axis of four ranks, which is among the meshes of each model, and on
/// every mesh with `cargo xtask test --full`; [`FEW`] on others.
pub(crate) fn steps_on(mesh: &[i64]) -> usize {
    if mesh == [4] || std::env::var_os("XTASK_FULL").is_some() { 20 } else { FEW }
}

const FEW: usize = 4;

/// An axis of a mesh: its number of ranks, and the dim that it splits of each array. Arrays without an entry are replicated.
pub(crate) type Axis = (i64, Vec<(&'static str, usize)>);

/// Axes of a mesh, from numbers of ranks and the dim of the fields that each splits.
pub(crate) fn split(axes: &[(i64, usize)]) -> Vec<Axis> {
    split_arrays(&[Batch::<Tensor>::FIELDS], axes)
}

/// Axes of a mesh, from numbers of ranks and the dim of these arrays that each splits.
pub(crate) fn split_arrays(names: &[&'static str], axes: &[(i64, usize)]) -> Vec<Axis> {
    let dims = |dim: usize| names.iter().map(|&name| (name, dim)).collect();
    axes.iter().map(|&(ranks, dim)| (ranks, dims(dim))).collect()
}

/// Axes of a mesh, from numbers of ranks and the dim along which each splits fields and conditions.
pub(crate) fn with_conditions(axes: &[(i64, usize)]) -> Vec<Axis> {
    split_arrays(&[Batch::<Tensor>::FIELDS, "conditions"], axes)
}

/// Names of arrays of a batch with their shapes.
type Shapes = Vec<(String, Vec<i64>)>;

/// A model with the arrays that it takes and gives.
#[derive(Debug, Clone)]
pub(crate) struct Twin {
    config: ModelConfig,
    kind: Kind,
    inputs: Shapes,
    outputs: Shapes,
    /// Values of arrays that are not random.
    given: Vec<(String, Vec<f64>, Kind)>,
    perturbed: Option<u64>,
    empty: bool,
    /// True if parameters are split as the model declares.
    laid_out: bool,
    /// Number of training steps, set by the check.
    steps: usize,
}

/// Runs on one rank.
static DENSE: Memo<Run> = Memo::new();

/// Results of a run.
struct Run {
    outputs: Vec<Tensor>,
    /// Gradients of the first step.
    grads: Vec<Part>,
    losses: Vec<f64>,
    /// Parameters and buffers in the end.
    state: Vec<Part>,
}

/// Values or gradient of a rank's box of a parameter.
struct Part {
    name: String,
    /// The first index of the box along each dim; empty for all of the parameter.
    start: Vec<i64>,
    tensor: Tensor,
}

impl Part {
    fn of(parameter: &Parameter, tensor: Tensor) -> Self {
        let start = parameter.shard.as_ref().map_or_else(Vec::new, |shard| shard.start.clone());
        Self { name: parameter.name.clone(), start, tensor }
    }

    #[track_caller]
    fn assert_close(&self, what: &str, whole: &Self, tolerances: &Tolerances) {
        let want = cut(&whole.tensor, &self.start, &self.tensor.size());
        let what = format!("{what}{}", self.name);
        assert_close(&what, &self.tensor, &want, (tolerances.others, tolerances.floor));
    }
}

impl Twin {
    /// A model in double precision, the shapes of its inputs and those of its outputs, by their names in a batch.
    pub(crate) fn new(
        config: ModelConfig,
        inputs: &[(&str, Vec<i64>)],
        outputs: &[(&str, Vec<i64>)],
    ) -> Self {
        let owned = |arrays: &[(&str, Vec<i64>)]| -> Shapes {
            arrays.iter().map(|(name, shape)| ((*name).to_owned(), shape.clone())).collect()
        };
        Self {
            config,
            kind: Kind::Double,
            inputs: owned(inputs),
            outputs: owned(outputs),
            given: Vec::new(),
            perturbed: None,
            empty: false,
            laid_out: false,
            steps: 0,
        }
    }

    /// Returns the twin with the number of steps for this mesh.
    fn training_on(&self, axes: &[Axis]) -> Self {
        let shape: Vec<i64> = axes.iter().map(|(ranks, _)| *ranks).collect();
        Self { steps: steps_on(&shape), ..self.clone() }
    }

    /// Gives an array these values of a dtype; of floating point, those in the model's precision.
    pub(crate) fn with_values(mut self, name: &str, values: Vec<f64>, kind: Kind) -> Self {
        self.given.push((name.to_owned(), values, kind));
        self
    }

    /// Computes in single precision.
    pub(crate) fn single(self) -> Self {
        Self { kind: Kind::Float, ..self }
    }

    /// Adds noise to all parameters first, for models some of whose gradients are zero at the start.
    pub(crate) fn perturbed(self, seed: u64) -> Self {
        Self { perturbed: Some(seed), ..self }
    }

    /// Leaves the first rank of each axis without a part.
    pub(crate) fn with_empty_shards(self) -> Self {
        Self { empty: true, ..self }
    }

    /// Splits parameters as the model declares, the first axis of the mesh being "domain".
    pub(crate) fn laid_out(self) -> Self {
        Self { laid_out: true, ..self }
    }

    /// Asserts that a mesh, whose axes split the arrays into parts that grow by the rank, gives what one rank does.
    #[track_caller]
    pub(crate) fn check(&self, axes: &[Axis]) {
        self.training_on(axes).compare(axes, &OF_DOUBLE);
    }

    /// Asserts the same of a few steps in single precision, before rounding differences grow.
    #[track_caller]
    pub(crate) fn check_single(&self, axes: &[Axis]) {
        Self { steps: FEW, ..self.clone() }.single().compare(axes, &OF_SINGLE);
    }

    #[track_caller]
    fn compare(&self, axes: &[Axis], tolerances: &Tolerances) {
        let runs = self.on_mesh(axes);
        self.dense(None, |want| {
            assert_learns(want);
            for run in runs {
                for (got, want) in run.outputs.iter().zip(&want.outputs) {
                    assert_close("output", got, want, (tolerances.outputs, tolerances.floor));
                }
                for (got, want) in run.grads.iter().zip(&want.grads) {
                    got.assert_close("grad.", want, tolerances);
                }
                for (step, (got, want)) in run.losses.iter().zip(&want.losses).enumerate() {
                    let near = (got - want).abs() <= tolerances.others * want.abs();
                    assert!(near, "step {step}: {got}, dense {want}");
                }
                for (got, want) in run.state.iter().zip(&want.state) {
                    got.assert_close("", want, tolerances);
                }
            }
        });
    }

    /// Asserts that the losses in single precision are those of one rank, as far as rounding lets them.
    #[track_caller]
    pub(crate) fn check_losses(&self, axes: &[Axis]) {
        let twin = self.training_on(axes).single();
        let want = twin.dense(None, |want| {
            assert_learns(want);
            want.losses.clone()
        });
        // Runs from nudged parameters measure how rounding differences grow; a few steps are held to a fixed tolerance.
        let seeds: &[u64] = if twin.steps > FEW { &[1, 2] } else { &[] };
        let nudged = seeds.iter().map(|seed| twin.dense(Some(*seed), |run| run.losses.clone()));
        let near: Vec<_> = iter::once(want.clone()).chain(nudged).collect();
        let want = SingleRun::new(want, &near);
        for run in twin.on_mesh(axes) {
            want.assert_same(&run.losses);
        }
    }

    /// Gives `read` the run on one rank, from parameters that are nudged where there is a seed.
    fn dense<R>(&self, nudged: Option<u64>, read: impl FnOnce(&Run) -> R) -> R {
        let dense = Self { empty: false, laid_out: false, ..self.clone() };
        DENSE.with(format!("{dense:?} {nudged:?}"), || dense.run_dense(nudged), read)
    }

    fn run_dense(&self, nudged: Option<u64>) -> Run {
        let whole = |at: usize, name: &str, shape: &[i64]| (name.to_owned(), self.values(at, name, shape));
        self.train(
            |params| self.config.build::<Tensor>(params).unwrap(),
            whole,
            |store| nudged.iter().for_each(|seed| nudge(store, *seed)),
            |loss| loss.backward(),
            Tensor::shallow_clone,
        )
    }

    fn on_mesh(&self, axes: &[Axis]) -> Vec<Run> {
        let shape: Vec<i64> = axes.iter().map(|(ranks, _)| *ranks).collect();
        let count = shape.iter().product::<i64>() as usize;
        let (twin, axes) = (self.clone(), axes.to_vec());
        threads::run(count, Duration::from_secs(120), move |group| {
            let first = if twin.laid_out { "domain" } else { "a" };
            let mesh = DeviceMesh::new(&group, &shape, &[first, "b"][..shape.len()]).unwrap();
            let sharding = twin.config.sharding();
            twin.train(
                |params| {
                    let mut params = MeshParams::new(params, &mesh).laid_out(sharding.parameter_layouts());
                    twin.config.build(&mut params).unwrap()
                },
                |at, name, shape| {
                    let layout = twin.layout(&mesh, &axes, name, shape);
                    let whole = twin.values(at, name, shape);
                    (name.to_owned(), ShardTensor::distribute_as(&whole, &layout).unwrap())
                },
                |store| {
                    let split = store.parameters().iter().any(|parameter| parameter.shard.is_some());
                    assert_eq!(split, twin.laid_out);
                },
                |loss| loss.backward().unwrap(),
                |array| array.full_tensor(None).unwrap(),
            )
        })
    }

    /// Trains by plain gradient descent. `array` makes the array of that number, name and shape, `whole` a tensor of all of it.
    fn train<A: ModelArray>(
        &self,
        build: impl FnOnce(&mut ParamStore) -> Box<dyn isobar_models::Model<A>>,
        array: impl Fn(usize, &str, &[i64]) -> (String, A),
        prepare: impl FnOnce(&ParamStore),
        backward: impl Fn(&A),
        whole: impl Fn(&A) -> Tensor,
    ) -> Run {
        let mut store = ParamStore::new(Generator::new(7)).with_options(self.kind, Device::Cpu);
        let model = build(&mut store);
        self.perturbed.iter().for_each(|seed| perturb(&store, *seed));
        prepare(&store);
        let inputs = self.inputs.iter().enumerate().map(|(at, (name, shape))| array(at, name, shape));
        let inputs: Vec<(String, A)> = inputs.collect();
        let targets = self.outputs.iter().enumerate().map(|(at, (name, shape))| array(100 + at, name, shape));
        let targets: Vec<(String, A)> = targets.collect();
        let (mut first, mut losses, generator) = (None, Vec::new(), Generator::new(3));
        for _ in 0..self.steps {
            let _guard = forbid_hidden_communication();
            let batch = inputs
                .iter()
                .fold(Batch::default(), |batch, (name, input)| batch.with(name, input.shallow_clone()));
            let mut result = model.forward(&batch, Mode::train(&generator)).unwrap();
            let outputs: Vec<A> = targets.iter().map(|(name, _)| result.take(name).unwrap()).collect();
            let parts = outputs.iter().zip(&targets).map(|(got, (_, want))| got.mse_loss(want).unwrap());
            let loss = parts.reduce(|sum, part| sum.add(&part).unwrap()).unwrap();
            backward(&loss);
            losses.push(whole(&loss).double_value(&[]));
            let grads = || store.trainable().map(|p| Part::of(p, grad(&p.tensor))).collect();
            first.get_or_insert_with(|| (outputs.iter().map(|y| whole(y).detach()).collect(), grads()));
            tch::no_grad(|| {
                for parameter in store.trainable() {
                    let step = grad(&parameter.tensor) * 0.02;
                    let _ = parameter.tensor.shallow_clone().f_sub_(&step).unwrap();
                }
            });
            store.zero_grad().unwrap();
        }
        let (outputs, grads) = first.unwrap();
        let state = store.parameters().iter().map(|p| Part::of(p, p.tensor.detach().copy())).collect();
        Run { outputs, grads, losses, state }
    }

    /// The values of an array: the same on all ranks and meshes.
    fn values(&self, at: usize, name: &str, shape: &[i64]) -> Tensor {
        if let Some((_, values, kind)) = self.given.iter().find(|(given, ..)| given == name) {
            let kind = if *kind == DOUBLE.0 { self.kind } else { *kind };
            return Tensor::from_slice(values).reshape(shape).to_kind(kind);
        }
        let generator = Generator::new(1 + at as u64);
        generator.normal(&Window::whole(shape), 0.0, 1.0, DOUBLE).unwrap().to_kind(self.kind)
    }

    /// Each axis splits at most one dim of an array, into parts that grow by the rank.
    fn layout(&self, mesh: &DeviceMesh, axes: &[Axis], name: &str, shape: &[i64]) -> Layout {
        let dim_of =
            |dims: &[(&str, usize)]| dims.iter().find(|(array, _)| *array == name).map(|(_, dim)| *dim);
        let mut sizes = Vec::new();
        let mut placements = Vec::new();
        for (ranks, dims) in axes {
            let Some(dim) = dim_of(dims) else {
                placements.push(Placement::Replicate);
                continue;
            };
            placements.push(Placement::Shard(dim));
            // With empty shards, the first rank's part is the one that would have been nobody's.
            let (skip, parts) = if self.empty { (1, ranks - 1) } else { (0, *ranks) };
            let weights = parts * (parts + 1) / 2;
            let boundary = |rank: i64| match rank.max(skip) - skip {
                rank if weights == 0 => shape[dim] * rank,
                rank => shape[dim] * (rank * (rank + 1) / 2) / weights,
            };
            sizes.push((dim, (0..*ranks).map(|rank| boundary(rank + 1) - boundary(rank)).collect()));
        }
        Layout::new(mesh, &placements, shape, &Sizes::Explicit(sizes)).unwrap()
    }
}

/// The gradient of a parameter; zeros where there is none.
fn grad(parameter: &Tensor) -> Tensor {
    let grad = parameter.grad();
    if grad.defined() { grad.copy() } else { parameter.zeros_like() }
}

/// Asserts that training lowers the loss. After [`FEW`] steps the last loss may be above the first.
fn assert_learns(run: &Run) {
    let losses = if run.losses.len() < 20 { &run.losses[..] } else { &run.losses[19..] };
    assert!(losses.iter().any(|loss| *loss < run.losses[0]), "{:?}", run.losses);
}

#[track_caller]
fn assert_close(what: &str, got: &Tensor, want: &Tensor, (tolerance, floor): (f64, f64)) {
    assert_eq!(got.size(), want.size(), "{what}");
    if want.numel() == 0 {
        return;
    }
    let scale = want.abs().max().double_value(&[]).max(floor);
    let error = (got - want).abs().max().double_value(&[]);
    assert!(error <= tolerance * scale, "{what} differs by {error}");
}
