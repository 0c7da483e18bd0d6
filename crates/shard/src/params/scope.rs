//! Names under a prefix.

use isobar_array::Array;

use super::{BufferValues, Init, Params, Placement};
use crate::error::Result;
use crate::region::ParallelRegion;

/// A supplier that puts a prefix and a dot before every name.
pub struct Scope<'a, A> {
    params: &'a mut dyn Params<Array = A>,
    prefix: String,
}

impl<'a, A: Array> Scope<'a, A> {
    /// Names under `prefix`; an empty one adds nothing.
    pub fn new(params: &'a mut dyn Params<Array = A>, prefix: &str) -> Self {
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}.") };
        Self { params, prefix }
    }

    fn full(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

impl<A: Array> Params for Scope<'_, A> {
    type Array = A;

    fn param(&mut self, name: &str, shape: &[i64], init: Init<A>, placement: Placement) -> Result<A> {
        self.params.param(&self.full(name), shape, init, placement)
    }

    fn buffer(&mut self, name: &str, shape: &[i64], init: Init<A>, placement: Placement) -> Result<A> {
        self.params.buffer(&self.full(name), shape, init, placement)
    }

    fn computed_buffer(&mut self, name: &str, shape: &[i64], values: BufferValues) -> Result<()> {
        self.params.computed_buffer(&self.full(name), shape, values)
    }

    fn draw(&self, name: &str, shape: &[i64], init: &Init<A>, placement: Placement) -> Result<A> {
        self.params.draw(&self.full(name), shape, init, placement)
    }

    fn tie(&mut self, alias: &str, name: &str) -> Result<()> {
        self.params.tie(&self.full(alias), &self.full(name))
    }

    fn region(&self) -> &ParallelRegion {
        self.params.region()
    }
}
