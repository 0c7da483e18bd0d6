//! Random initial fields.

use std::f64::consts::TAU;

use isobar_array::{Generator, Window};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::spectrum::Domain;
use crate::{Error, Result};

/// Kind of random initial fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InitialKind {
    /// Waves up to `cutoff` with independent uniform coefficients and mean 0, scaled so that the largest value is `amplitude`.
    Fourier,
    /// A Gaussian random field of mean 0 and standard deviation `amplitude`: waves up to `cutoff` whose coefficients have the deviation
    /// (corner² + |m|²)^(−decay / 2), m being the numbers of waves in the box.
    GaussianField,
    /// A sum of `blobs` Gaussians of height `amplitude` and width `width` times the box.
    Blobs,
}

/// Random initial fields, which are the same functions of place at every number of points.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Initial {
    /// Their kind.
    pub kind: InitialKind,
    /// Largest number of waves along each dim.
    pub cutoff: usize,
    /// Number of waves from which on the spectrum of a Gaussian random field decays.
    pub corner: f64,
    /// Exponent of its decay.
    pub decay: f64,
    /// Number of blobs.
    pub blobs: usize,
    /// Standard deviation of a blob, as a fraction of the box.
    pub width: f64,
    /// Size of the values.
    pub amplitude: f64,
}

impl Default for Initial {
    /// Five waves along each dim, values from −1 to 1.
    fn default() -> Self {
        Self {
            kind: InitialKind::Fourier,
            cutoff: 5,
            corner: 2.0,
            decay: 4.0,
            blobs: 4,
            width: 0.05,
            amplitude: 1.0,
        }
    }
}

/// `[initial]`: keys of the initial fields; those that are not set are the system's.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct InitialConfig {
    /// Kind of random fields.
    pub kind: Option<InitialKind>,
    /// Of `fourier` and `gaussian_field`: largest number of waves along each dim.
    pub cutoff: Option<usize>,
    /// Of `gaussian_field`: number of waves from which on the spectrum decays.
    pub corner: Option<f64>,
    /// Of `gaussian_field`: exponent of the decay.
    pub decay: Option<f64>,
    /// Of `blobs`: their number.
    pub blobs: Option<usize>,
    /// Of `blobs`: standard deviation of each, as a fraction of the box.
    pub width: Option<f64>,
    /// Size of the values: largest value, standard deviation or height of a blob.
    pub amplitude: Option<f64>,
}

impl InitialConfig {
    /// The settings over those of a system, checked.
    ///
    /// # Errors
    /// A setting out of its range, or waves that the grid does not have.
    pub fn over(&self, base: Initial, domain: &Domain) -> Result<Initial> {
        let most = (domain.points - 1) / 2;
        let merged = Initial {
            kind: self.kind.unwrap_or(base.kind),
            cutoff: self.cutoff.unwrap_or_else(|| base.cutoff.min(most)),
            corner: self.corner.unwrap_or(base.corner),
            decay: self.decay.unwrap_or(base.decay),
            blobs: self.blobs.unwrap_or(base.blobs),
            width: self.width.unwrap_or(base.width),
            amplitude: self.amplitude.unwrap_or(base.amplitude),
        };
        let invalid = |key: &str, value: String, expected: String, mend: &str| {
            Err(Error::Invalid(format!(
                "initial.{key} is {value}, expected {expected}; --set initial.{key}={mend}"
            )))
        };
        if !(1..=most.min(MOST_WAVES)).contains(&merged.cutoff) {
            let expected = format!("1 to {}, for {} points", most.min(MOST_WAVES), domain.points);
            return invalid("cutoff", merged.cutoff.to_string(), expected, &most.min(5).to_string());
        }
        if !(1..=MOST_BLOBS).contains(&merged.blobs) {
            return invalid("blobs", merged.blobs.to_string(), format!("1 to {MOST_BLOBS}"), "4");
        }
        let sizes = [
            ("corner", merged.corner, "2.0"),
            ("width", merged.width, "0.05"),
            ("amplitude", merged.amplitude, "1.0"),
        ];
        for (key, value, mend) in sizes {
            if !(value.is_finite() && value > 0.0) {
                return invalid(key, value.to_string(), "a finite number above 0".to_owned(), mend);
            }
        }
        if !(0.0..=64.0).contains(&merged.decay) {
            return invalid("decay", merged.decay.to_string(), "0 to 64".to_owned(), "4.0");
        }
        Ok(merged)
    }
}

/// Largest cutoff: each dim costs points × cutoff factors.
const MOST_WAVES: usize = 64;
const MOST_BLOBS: usize = 4096;

impl Initial {
    /// Draws fields, `[field, x, …]` in float64: a function of the seed and the sample number.
    ///
    /// # Errors
    /// Memory that cannot be allocated.
    pub fn draw(&self, domain: &Domain, fields: usize, seed: u64, sample: u64) -> Result<Tensor> {
        let generator = Generator::resume(Generator::new(seed).fork("initial").seed(), sample);
        match self.kind {
            InitialKind::Blobs => self.blobs(domain, fields, &generator),
            InitialKind::Fourier | InitialKind::GaussianField => self.waves(domain, fields, &generator),
        }
    }

    fn waves(&self, domain: &Domain, fields: usize, generator: &Generator) -> Result<Tensor> {
        let dims = domain.dims;
        let modes: Vec<f64> = (0..=2 * self.cutoff).map(|at| at as f64 - self.cutoff as f64).collect();
        let count = modes.len() as i64;
        let line = Tensor::f_from_slice(&modes)?;
        let mut squares = Tensor::from(0.0).f_to_kind(Kind::Double)?;
        for dim in 0..dims {
            let mut view = vec![1; dims];
            view[dim] = count;
            squares = squares.f_add(&line.f_square()?.f_view(&view[..])?)?;
        }
        // Without the mean.
        let others = squares.f_ne(0.0)?.f_to_kind(Kind::Double)?;
        let mut shape = vec![2, fields as i64];
        shape.extend(vec![count; dims]);
        let (all, options) = (Window::whole(&shape), (Kind::Double, Device::Cpu));
        let is_field = self.kind == InitialKind::GaussianField;
        let (random, scale) = if is_field {
            let scale =
                squares.f_add_scalar(self.corner * self.corner)?.f_pow_tensor_scalar(-self.decay / 2.0)?;
            let scale = scale.f_mul(&others)?;
            // Each wave has the variance of its two normal numbers, and half of it at each place.
            let variance = scale.f_square()?.f_sum(None)?.f_double_value(&[])?;
            (
                generator.normal(&all, 0.0, 1.0, options)?,
                scale.f_mul_scalar(self.amplitude / variance.sqrt())?,
            )
        } else {
            (generator.uniform(&all, -1.0, 1.0, options)?, others)
        };
        let coefficients = random.f_mul(&scale)?;
        let coefficients = Tensor::f_complex(&coefficients.f_select(0, 0)?, &coefficients.f_select(0, 1)?)?;
        let values = synthesis(domain, &modes, coefficients, fields)?;
        if is_field {
            return Ok(values);
        }
        let space: Vec<i64> = (1..=dims as i64).collect();
        let largest = values.f_abs()?.f_amax(&space[..], true)?.f_clamp_min(f64::MIN_POSITIVE)?;
        Ok(values.f_mul_scalar(self.amplitude)?.f_div(&largest)?)
    }

    fn blobs(&self, domain: &Domain, fields: usize, generator: &Generator) -> Result<Tensor> {
        let line = Tensor::f_from_slice(&domain.coordinates())?.f_div_scalar(domain.length)?;
        let mut all = Vec::new();
        for _ in 0..fields {
            let mut sum: Option<Tensor> = None;
            for _ in 0..self.blobs {
                let mut blob = Tensor::from(self.amplitude).f_to_kind(Kind::Double)?;
                for dim in 0..domain.dims {
                    // The shorter way around the box.
                    let away = line.f_sub_scalar(generator.next_f64())?;
                    let away = away.f_sub(&away.f_round()?)?.f_div_scalar(self.width)?;
                    let mut view = vec![1; domain.dims];
                    view[dim] = domain.points as i64;
                    blob = blob.f_mul(&away.f_square()?.f_mul_scalar(-0.5)?.f_exp()?.f_view(&view[..])?)?;
                }
                sum = Some(match sum {
                    Some(sum) => sum.f_add(&blob)?,
                    None => blob,
                });
            }
            all.extend(sum);
        }
        Ok(Tensor::f_stack(&all, 0)?)
    }
}

/// Σ c_m exp(2πi m · x / L) at the points, its real part.
fn synthesis(domain: &Domain, modes: &[f64], coefficients: Tensor, fields: usize) -> Result<Tensor> {
    let (count, points, fields) = (modes.len() as i64, domain.points as i64, fields as i64);
    let places: Vec<f64> =
        (0..domain.points).map(|point| TAU * point as f64 / domain.points as f64).collect();
    let phase = Tensor::f_from_slice(modes)?.f_unsqueeze(1)?.f_mul(&Tensor::f_from_slice(&places)?)?;
    let waves = Tensor::f_complex(&phase.f_cos()?, &phase.f_sin()?)?;
    let mut values = coefficients;
    for _ in 0..domain.dims {
        // The first dim that is left becomes the last, of points.
        values = values.f_reshape([fields, count, -1])?.f_transpose(1, 2)?.f_matmul(&waves)?;
    }
    let mut shape = vec![fields];
    shape.extend(vec![points; domain.dims]);
    Ok(values.f_reshape(&shape[..])?.f_real()?.f_contiguous()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(initial: Initial, points: usize, sample: u64) -> Tensor {
        initial.draw(&Domain { dims: 2, points, length: 3.0 }, 2, 7, sample).unwrap()
    }

    #[test]
    fn fields_are_the_same_functions_at_every_resolution() {
        for kind in [InitialKind::Fourier, InitialKind::GaussianField, InitialKind::Blobs] {
            let initial = Initial { kind, ..Initial::default() };
            let (coarse, fine) = (draw(initial, 16, 3), draw(initial, 32, 3));
            assert_eq!((coarse.size(), fine.size()), (vec![2, 16, 16], vec![2, 32, 32]));
            let picked = fine.slice(1, 0, 32, 2).slice(2, 0, 32, 2);
            // The largest value of a Fourier series is looked for at the points, so that those of two grids are a factor apart.
            let factor = (&picked * &coarse).sum(Kind::Double) / (&coarse * &coarse).sum(Kind::Double);
            let near = factor.double_value(&[]);
            assert!((0.8..=1.01).contains(&near), "{kind:?} {near}");
            if kind != InitialKind::Fourier {
                assert!(picked.allclose(&coarse, 0.0, 1e-12, false), "{kind:?}");
            }
            assert_ne!(draw(initial, 16, 4), coarse);
            assert_eq!(draw(initial, 16, 3), coarse);
        }
    }

    #[test]
    fn sizes_are_as_asked_for() {
        let largest = draw(Initial { amplitude: 2.5, ..Initial::default() }, 16, 0).abs().amax([1, 2], false);
        assert!(largest.allclose(&Tensor::from_slice(&[2.5, 2.5]), 1e-12, 0.0, false));
        let initial = Initial { kind: InitialKind::GaussianField, amplitude: 3.0, ..Initial::default() };
        let squares: f64 = (0..200)
            .map(|sample| draw(initial, 16, sample).square().mean(Kind::Double).double_value(&[]))
            .sum();
        let deviation = (squares / 200.0).sqrt();
        assert!((deviation / 3.0 - 1.0).abs() < 0.1, "{deviation}");
    }

    #[test]
    fn settings_out_of_range_are_errors_that_mend() {
        let domain = Domain { dims: 1, points: 16, length: 1.0 };
        let error = |config: InitialConfig| config.over(Initial::default(), &domain).unwrap_err().to_string();
        let waves = error(InitialConfig { cutoff: Some(8), ..InitialConfig::default() });
        assert_eq!(waves, "initial.cutoff is 8, expected 1 to 7, for 16 points; --set initial.cutoff=5");
        for config in [
            InitialConfig { cutoff: Some(usize::MAX), ..InitialConfig::default() },
            InitialConfig { blobs: Some(1 << 60), ..InitialConfig::default() },
            InitialConfig { width: Some(f64::NAN), ..InitialConfig::default() },
            InitialConfig { amplitude: Some(0.0), ..InitialConfig::default() },
            InitialConfig { decay: Some(-1.0), ..InitialConfig::default() },
        ] {
            assert!(error(config).contains("--set initial."));
        }
    }
}
