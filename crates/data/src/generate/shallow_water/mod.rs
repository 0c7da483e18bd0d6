//! Shallow water on a rotating sphere, solved with spherical harmonics.

mod jets;
mod legendre;
mod make;
mod model;
#[cfg(test)]
mod tests;
mod transform;

pub use self::make::{ShallowWaterOptions, shallow_water};
