//! Fourier expansions of coordinates and times: sines and cosines of wavelengths that grow geometrically.

use std::f64::consts::PI;

use isobar_array::{Array, Unary};
use tch::{Kind, TchError, Tensor};

use crate::error::Result;
use crate::layers::constant;

/// Wavelengths from the first to the second number.
pub(super) type Range = [f64; 2];

/// Latitudes and longitudes in degrees.
pub(super) const POSITION: Range = [0.01, 720.0];
/// Lead times in hours.
pub(super) const LEAD_TIME: Range = [1.0 / 60.0, 24.0 * 7.0 * 3.0];
/// Pressure levels in hPa.
pub(super) const LEVEL: Range = [0.01, 1e5];
/// Hours since the start of 1970.
const TIME: Range = [1.0, 24.0 * 365.25];

/// Square roots of areas in km, by wavelengths from the area of 0.01° at a pole to that of the earth, in km².
pub(super) const SIZE: Range = [0.000_108_140_852_630_580_73, 511_207_893.395_810_96];

/// Expansions `[values, features]` of numbers: sines, then cosines.
pub(super) fn of_numbers(values: &[f64], range: Range, features: i64) -> Vec<f64> {
    let factors = factors(range, features / 2);
    let expand = |&value: &f64| {
        let (sines, cosines): (Vec<f64>, Vec<f64>) = factors.iter().map(|f| (f * value).sin_cos()).unzip();
        [sines, cosines].concat()
    };
    values.iter().flat_map(expand).collect()
}

/// Expansions `[…, features]` of a tensor in double precision.
pub(super) fn of_tensor(values: &Tensor, range: Range, features: i64) -> Result<Tensor, TchError> {
    let factors = Tensor::f_from_slice(&factors(range, features / 2))?.f_to(values.device())?;
    let angles = values.f_unsqueeze(-1)?.f_mul(&factors)?;
    Tensor::f_cat(&[angles.f_sin()?, angles.f_cos()?], -1)
}

/// Expansions `[batch, features]` of times `[batch, 1]` in hours.
pub(super) fn of_times<A: Array>(times: &A, features: i64) -> Result<A> {
    // Float32 has no room for an hour of half a million and its fraction.
    let times = times.to_kind(Kind::Double)?;
    let angles = times.mul(&constant(&factors(TIME, features / 2), &[1, features / 2], &times)?)?;
    Ok(A::cat(&[&angles.unary(Unary::Sin)?, &angles.unary(Unary::Cos)?], -1)?)
}

/// Mean latitudes or longitudes of patches of `patch` points of a grid of `extent` points evenly spaced from `first` to `last`,
/// with the distances between the first and the last point of a patch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Coordinate {
    first: f64,
    step: f64,
    patch: f64,
}

impl Coordinate {
    pub(super) fn new([first, last]: Range, extent: i64, patch: i64) -> Self {
        Self { first, step: (last - first) / (extent - 1).max(1) as f64, patch: patch as f64 }
    }

    /// Half of the distance between the first and the last point of a patch.
    fn reach(&self) -> f64 {
        self.step.abs() * (self.patch - 1.0) / 2.0
    }

    /// The middles of patches with these indices.
    pub(super) fn middles(&self, patches: &Tensor) -> Result<Tensor, TchError> {
        let points = patches.f_to_kind(Kind::Double)?.f_mul_scalar(self.patch)?;
        let points = points.f_add_scalar((self.patch - 1.0) / 2.0)?;
        points.f_mul_scalar(self.step)?.f_add_scalar(self.first)
    }
}

/// Square roots `[rows]` of the areas of patches in km, by the formula of Aurora: R² π Δ(sin φ) Δλ.
pub(super) fn root_areas(
    rows: &Tensor,
    latitude: &Coordinate,
    longitude: &Coordinate,
) -> Result<Tensor, TchError> {
    const RADIUS: f64 = 6371.0;
    let width = (2.0 * longitude.reach()).to_radians();
    // Wavelengths are as short as 1e-4 km: a root is rounded the same on all ranks, whatever else is in the rank's shard.
    let root = |middle: &f64| {
        let [low, high] = [-1.0, 1.0].map(|side| (middle + side * latitude.reach()).to_radians().sin());
        (RADIUS * RADIUS * PI * (high - low) * width).sqrt()
    };
    let middles: Vec<f64> = latitude.middles(rows)?.try_into()?;
    Tensor::f_from_slice(&middles.iter().map(root).collect::<Vec<_>>())?.f_to(rows.device())
}

/// Returns the factors 2π/λ of `count` wavelengths.
fn factors([low, high]: Range, count: i64) -> Vec<f64> {
    let step = (high / low).ln() / (count - 1).max(1) as f64;
    (0..count).map(|i| 2.0 * PI / (low * (step * i as f64).exp())).collect()
}
