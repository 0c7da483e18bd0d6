//! Tools that tests of several models share.
#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

pub(crate) mod twin;

use isobar_array::{Generator, Window};
use isobar_shard::ParamStore;
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
