//! Two balanced mid-latitude jets, and bumps in the depth that make them unstable.

use std::f64::consts::PI;

use tch::Tensor;

use super::model::{DEPTH, Model};
use crate::Result;

/// Mean depth of the fluid in m.
pub(super) const MEAN_DEPTH: f64 = 1e4;
/// Largest wind of the northern and the southern jet in m/s.
const SPEEDS: [f64; 2] = [80.0, 60.0];
/// Distance of the edges of a jet from the equator, in radians.
const EDGES: [f64; 2] = [PI / 7.0, PI / 2.0 - PI / 7.0];
/// Extents of a bump along longitude and latitude, in radians.
const EXTENTS: [f64; 2] = [1.0 / 3.0, 1.0 / 15.0];

/// A bump of the depth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Bump {
    /// Latitude of the centre in radians.
    pub(super) latitude: f64,
    /// Longitude of the centre in radians.
    pub(super) longitude: f64,
    /// Height above the balanced depth in m, before multiplication by the cosine of the latitude.
    pub(super) height: f64,
}

/// Returns the state with the two jets, the depth in balance with them, and bumps.
///
/// The jets are those of Galewsky, Scott and Polvani, "An initial-value problem for testing numerical models of the global shallow-water
/// equations", Tellus A 56 (2004), in both hemispheres, and so is the shape of the bumps.
pub(super) fn start(model: &Model, bumps: &[Bump]) -> Result<Tensor> {
    let sphere = model.sphere();
    let latitudes: Vec<f64> = sphere.sines().iter().map(|sine| sine.asin()).collect();
    let wind: Vec<f64> = latitudes.iter().map(|&latitude| jet(latitude) * latitude.cos()).collect();
    let wind = Tensor::f_from_slice(&wind)?.f_unsqueeze(1)?.f_repeat([1, sphere.longitudes() as i64])?;
    let vorticity = model.vorticity(&Tensor::f_stack(&[&wind, &wind.f_zeros_like()?], 0)?)?;
    let rises: Vec<f64> = latitudes
        .iter()
        .flat_map(|&latitude| {
            (0..sphere.longitudes()).map(move |at| {
                let longitude = 2.0 * PI * at as f64 / sphere.longitudes() as f64;
                bumps.iter().map(|bump| bump.at(latitude, longitude)).sum::<f64>()
            })
        })
        .collect();
    let rises = Tensor::f_from_slice(&rises)?.f_view([1, latitudes.len() as i64, -1])?;
    let depth = sphere.coefficients(&rises)?.f_get(0)?.f_add(&model.balanced_depth(&vorticity)?)?;
    let state = Tensor::f_stack(&[&vorticity, &vorticity.f_zeros_like()?, &depth], 0)?;
    // P(0, 0) is 1 / √2 everywhere.
    let _ = state.f_get(DEPTH)?.f_get(0)?.f_get(0)?.f_fill_(MEAN_DEPTH * std::f64::consts::SQRT_2)?;
    Ok(state)
}

/// Eastward wind of the jets at a latitude, in m/s.
pub(super) fn jet(latitude: f64) -> f64 {
    let [near, far] = EDGES;
    let distance = latitude.abs();
    if distance <= near || distance >= far {
        return 0.0;
    }
    let speed = SPEEDS[usize::from(latitude < 0.0)];
    speed * (1.0 / ((distance - near) * (distance - far)) + 4.0 / (far - near).powi(2)).exp()
}

impl Bump {
    fn at(&self, latitude: f64, longitude: f64) -> f64 {
        let east = (longitude - self.longitude + PI).rem_euclid(2.0 * PI) - PI;
        let north = latitude - self.latitude;
        let away = (east / EXTENTS[0]).powi(2) + (north / EXTENTS[1]).powi(2);
        self.height * latitude.cos() * (-away).exp()
    }
}
