//! Tools that tests of several models share.
#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking, as the tests do")]

use isobar_array::{Generator, Window};
use isobar_shard::ParamStore;
use tch::{Device, Kind};

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
