//! Tools that tests of several models share.
#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

pub(crate) mod twin;

use std::time::Duration;

use isobar_array::{Generator, Window};
use isobar_collectives::threads;
use isobar_collectives::trace::CommTrace;
use isobar_mesh::DeviceMesh;
use isobar_models::{Batch, Mode, ModelConfig};
use isobar_shard::{MeshParams, ParamStore, Placement, ShardTensor};
use tch::{Device, Kind, Tensor};

/// Moves every parameter up or down by one unit in the last place.
pub(crate) fn nudge(store: &ParamStore, seed: u64) {
    let generator = Generator::new(seed);
    for parameter in store.trainable() {
        let mut tensor = parameter.tensor.detach();
        let far = generator.normal(&Window::whole(&tensor.size()), 0.0, 1e30, (Kind::Float, Device::Cpu));
        let moved = tensor.nextafter(&far.unwrap());
        tensor.copy_(&moved);
    }
}

/// Adds noise of a standard deviation of 0.1 to every parameter. A parameter's noise follows from its place in the store.
pub(crate) fn perturb(store: &ParamStore, seed: u64) {
    tch::no_grad(|| {
        for (at, parameter) in store.trainable().enumerate() {
            let generator = Generator::new(seed + at as u64);
            let mut tensor = parameter.tensor.shallow_clone();
            let whole = Window::whole(&parameter.shape);
            let noise = generator.normal(&whole, 0.0, 0.1, (Kind::Double, Device::Cpu)).unwrap();
            let start = parameter.shard.as_ref().map_or(&[][..], |shard| &shard.start);
            let noise = cut(&noise, start, &tensor.size());
            let _ = tensor.f_add_(&noise.to_kind(tensor.kind())).unwrap();
        }
    });
}

/// Returns the box of these extents whose first indices are `start`; all of the tensor where that is empty.
pub(crate) fn cut(whole: &Tensor, start: &[i64], extents: &[i64]) -> Tensor {
    let dims = start.iter().zip(extents).enumerate();
    dims.fold(whole.shallow_clone(), |x, (dim, (&start, &extent))| x.narrow(dim as i64, start, extent))
}

/// Bytes that a rank of four receives in forward, the exchanges in it, and bytes in forward and backward, with gradients of parameters left
/// pending.
pub(crate) fn received(
    config: &ModelConfig,
    arrays: &[(&'static str, Vec<i64>)],
    dim: usize,
) -> Vec<(u64, usize, u64)> {
    let (config, arrays) = (config.clone(), arrays.to_vec());
    threads::run(4, Duration::from_secs(120), move |group| {
        let mesh = DeviceMesh::new(&group, &[4], &["domain"]).unwrap();
        let mut store = ParamStore::new(Generator::new(1));
        let model = config.build(&mut MeshParams::new(&mut store, &mesh).pending()).unwrap();
        let mut batch = Batch::default();
        for (name, shape) in &arrays {
            let values =
                Generator::new(2).normal(&Window::whole(shape), 0.0, 1.0, (Kind::Float, Device::Cpu));
            let array = ShardTensor::distribute(&values.unwrap(), &mesh, &[Placement::Shard(dim)]).unwrap();
            batch = batch.with(name, array);
        }
        let trace = CommTrace::start(&group);
        let y = model.forward(&batch, Mode::Eval).unwrap().take("fields").unwrap();
        let (forward, events) = (trace.received(), trace.record().len());
        y.sum().unwrap().backward().unwrap();
        trace.stop();
        (forward, events, trace.received())
    })
}
