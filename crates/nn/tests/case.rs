//! A layer, computed three times in double precision: by libtorch's functions, densely, and split over two ranks.
#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use std::collections::BTreeMap;
use std::time::Duration;

use isobar_array::{Array, Generator, Window};
use isobar_mesh::DeviceMesh;
use isobar_nn::{Mode, Result};
use isobar_shard::{MeshParams, ParamStore, Placement, Scope, ShardTensor};
use tch::{Device, Kind, Tensor};

pub(crate) const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
const NEAR: f64 = 1e-9;
const SEED: u64 = 5;

/// A layer's pass over its inputs.
pub(crate) type Pass<A> = Box<dyn Fn(&[A], Mode<'_>) -> Result<A>>;

/// A layer, made for any array.
pub(crate) trait Case: Copy + Send + Sync + 'static {
    fn make<A: Array>(self, params: &mut Scope<'_, A>) -> Result<Pass<A>>;
}

/// The parameters of a layer by name, as libtorch's functions get them.
pub(crate) struct Named(BTreeMap<String, Tensor>);

impl Named {
    pub(crate) fn get(&self, name: &str) -> Tensor {
        self.0.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", self.0.keys())).shallow_clone()
    }
}

pub(crate) fn normal(seed: u64, shape: &[i64]) -> Tensor {
    Generator::new(seed).normal(&Window::whole(shape), 0.0, 1.0, DOUBLE).unwrap()
}

fn store() -> ParamStore {
    ParamStore::new(Generator::new(7)).with_options(Kind::Double, Device::Cpu)
}

/// Moves all trained parameters away from their initial values, which may be 0 or 1.
fn perturb(store: &ParamStore) {
    for (seed, parameter) in store.trainable().enumerate() {
        let noise = normal(100 + seed as u64, &parameter.tensor.size()) * 0.3;
        let _ = parameter.tensor.detach().f_add_(&noise).unwrap();
    }
}

/// The result of a pass and a backward pass.
struct Run {
    output: Tensor,
    /// Gradients of the inputs and of the trained parameters, and buffers after the pass.
    values: Vec<(String, Tensor)>,
}

/// Differentiates Σ output · c with a fixed random c.
fn run(output: &Tensor, inputs: &[Tensor], store: &ParamStore) -> Run {
    (output * normal(9, &output.size())).sum(Kind::Double).backward();
    let of_inputs = inputs.iter().enumerate().filter(|(_, input)| input.requires_grad());
    let mut values: Vec<_> = of_inputs.map(|(i, input)| (format!("input {i}"), input.grad())).collect();
    for parameter in store.parameters() {
        let value = if parameter.trainable { parameter.tensor.grad() } else { parameter.tensor.detach() };
        values.push((parameter.name.clone(), value.copy()));
    }
    Run { output: output.detach(), values }
}

fn leaves(inputs: &[Tensor]) -> Vec<Tensor> {
    let leaf = |input: &Tensor| input.copy().set_requires_grad(input.is_floating_point());
    inputs.iter().map(leaf).collect()
}

#[track_caller]
fn assert_close(what: &str, got: &Tensor, want: &Tensor) {
    assert_eq!(got.size(), want.size(), "{what}");
    let scale = want.abs().max().double_value(&[]).max(1.0);
    let error = (got - want).abs().max().double_value(&[]);
    assert!(error <= NEAR * scale, "{what} differs by {error}");
}

/// Compares the dense layer with `reference`, and the layer with each of `splits`, the dims along which the inputs are split
/// over two ranks, with the dense one.
pub(crate) fn check(
    case: impl Case,
    inputs: &[Tensor],
    splits: &[&[usize]],
    training: bool,
    reference: impl Fn(&Named, &[Tensor]) -> Tensor,
) {
    let mut params = store();
    let layer = case.make(&mut Scope::new(&mut params, "")).unwrap();
    perturb(&params);
    let named = params.parameters().iter().map(|parameter| {
        let copy = parameter.tensor.detach().copy();
        (parameter.name.clone(), copy.set_requires_grad(parameter.trainable))
    });
    let named = Named(named.collect());

    let generator = Generator::new(SEED);
    let mode = if training { Mode::train(&generator) } else { Mode::Eval };
    let dense_inputs = leaves(inputs);
    let dense = run(&layer(&dense_inputs, mode).unwrap(), &dense_inputs, &params);

    let torch_inputs = leaves(inputs);
    let output = reference(&named, &torch_inputs);
    assert_close("output", &dense.output, &output);
    (&output * normal(9, &output.size())).sum(Kind::Double).backward();
    for (name, got) in &dense.values {
        let want = match name.strip_prefix("input ") {
            Some(index) => torch_inputs[index.parse::<usize>().unwrap()].grad(),
            None if named.get(name).requires_grad() => named.get(name).grad(),
            None => named.get(name),
        };
        assert_close(&format!("{name}, against libtorch"), got, &want);
    }

    for &split in splits {
        let (all, split): (Vec<Tensor>, Vec<usize>) =
            (inputs.iter().map(Tensor::copy).collect(), split.to_vec());
        let all = std::sync::Mutex::new(all);
        let runs = isobar_collectives::threads::run(2, Duration::from_secs(120), |group| {
            let all = leaves(&all.lock().unwrap());
            let mesh = DeviceMesh::new(&group, &[2], &["domain"]).unwrap();
            sharded(case, &all, &split, &mesh, training)
        });
        for run in runs {
            assert_close(&format!("output, split {split:?}"), &run.output, &dense.output);
            for ((name, got), (_, want)) in run.values.iter().zip(&dense.values) {
                assert_close(&format!("{name}, split {split:?}"), got, want);
            }
        }
    }
}

fn sharded(case: impl Case, inputs: &[Tensor], split: &[usize], mesh: &DeviceMesh, training: bool) -> Run {
    let mut params = store();
    let layer = {
        let mut on_mesh = MeshParams::new(&mut params, mesh);
        case.make(&mut Scope::new(&mut on_mesh, "")).unwrap()
    };
    perturb(&params);
    let distribute = |(input, &dim): (&Tensor, &usize)| {
        ShardTensor::distribute(input, mesh, &[Placement::Shard(dim)]).unwrap()
    };
    let arrays: Vec<ShardTensor> = inputs.iter().zip(split).map(distribute).collect();
    let generator = Generator::new(SEED);
    let mode = if training { Mode::train(&generator) } else { Mode::Eval };
    let output = layer(&arrays, mode).unwrap();
    run(&output.full_tensor(None).unwrap(), inputs, &params)
}

/// Defines a test of one layer: how it is made, run, and computed by libtorch.
macro_rules! layer_test {
    (
        $name:ident, inputs: $inputs:expr, splits: $splits:expr, training: $training:expr,
        make: |$params:ident| $make:expr,
        run: |$layer:ident, $x:ident, $mode:ident| $run:expr,
        torch: |$p:ident, $t:ident| $torch:expr $(,)?
    ) => {
        #[test]
        fn $name() {
            #[derive(Clone, Copy)]
            struct This;
            impl $crate::case::Case for This {
                fn make<A: isobar_array::Array>(
                    self,
                    $params: &mut isobar_shard::Scope<'_, A>,
                ) -> isobar_nn::Result<$crate::case::Pass<A>> {
                    let $layer = $make?;
                    Ok(Box::new(move |$x, $mode| $run))
                }
            }
            $crate::case::check(This, &$inputs, $splits, $training, |$p, $t| $torch);
        }
    };
}
pub(crate) use layer_test;
