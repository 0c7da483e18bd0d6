//! Energy spectra of forecasts and of the truth.

use std::collections::BTreeMap;

use isobar_array::{Reduction, periodic};
use isobar_registry::Registered;

use super::{Forecast, MetricArray, MetricKind, Spectrum};
use crate::error::Result;
use crate::loss::numbers;

/// Collects the energy spectra of forecasts and of the truth, sample by sample, and averages them for each lead time and variable.
/// Samples whose points are all masked are left out.
///
/// ```
/// use isobar_train::metric::{Forecast, Spectra};
/// use tch::{Device, Kind, Tensor};
///
/// // 2 sin 3x has the mean energy 1, all of it in shell 3.
/// let x = Tensor::arange(16, (Kind::Double, Device::Cpu)) * (std::f64::consts::TAU / 16.0);
/// let truth = ((x * 3.0).sin() * 2.0).view([1, 1, 16]);
/// let mut spectra = Spectra::default();
/// spectra.add(1, &Forecast::new(&(&truth * 0.5), &truth)?)?;
/// let all = spectra.means();
/// assert!((all[0].truth[3] - 1.0).abs() < 1e-9 && (all[0].forecast[3] - 0.25).abs() < 1e-9);
/// # Ok::<(), isobar_train::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Spectra {
    /// Sums of each channel, by step.
    steps: BTreeMap<usize, Vec<Sums>>,
}

#[derive(Debug, Clone, Default)]
struct Sums {
    samples: usize,
    forecast: Vec<f64>,
    truth: Vec<f64>,
}

/// Energy spectra of a variable at a lead time: for each wave number, from 0, the energy in its shell
/// ([`periodic::energy_spectrum`]), in the square of the variable's unit.
#[derive(Debug, Clone, PartialEq)]
pub struct EnergySpectra {
    /// Lead time in steps, from 1.
    pub step: usize,
    /// Index of the variable.
    pub variable: usize,
    /// Energy of the forecast; for an ensemble, the mean of its members' spectra.
    pub forecast: Vec<f64>,
    /// Energy of the truth.
    pub truth: Vec<f64>,
}

impl Spectra {
    /// Returns whether `metrics` contain [`Spectrum`].
    pub fn are_reported(metrics: &[MetricKind]) -> bool {
        metrics.iter().any(|metric| metric.name() == Spectrum::NAME)
    }

    /// Adds the samples of a forecast after `step` steps. For sharded fields all ranks of their mesh call.
    ///
    /// # Errors
    ///
    /// An error of libtorch or of the communication.
    pub fn add<A: MetricArray>(&mut self, step: usize, forecast: &Forecast<A>) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let [prediction, truth] = forecast.energy_spectra()?;
        let of_members = forecast.members().map(|members| members_spectrum(forecast, members)).transpose()?;
        let [samples, channels, shells] = [0, 1, 2].map(|dim| truth.shape()[dim] as usize);
        let both = numbers(&A::stack(&[of_members.as_ref().unwrap_or(prediction), truth], 2)?)?;
        let points = forecast.points()?.expand(&[samples as i64, channels as i64])?;
        let sums = self.steps.entry(step).or_default();
        sums.resize_with(channels, Sums::default);
        let of_channel = both.chunks(2 * shells).zip(numbers(&points)?).zip((0..channels).cycle());
        for ((energies, _), channel) in of_channel.filter(|((_, points), _)| *points > 0.0) {
            let Sums { samples, forecast, truth } = &mut sums[channel];
            *samples += 1;
            for (sums, energies) in [forecast, truth].into_iter().zip(energies.chunks(shells)) {
                sums.resize(shells, 0.0);
                sums.iter_mut().zip(energies).for_each(|(sum, energy)| *sum += energy);
            }
        }
        Ok(())
    }

    /// Returns the mean spectra by lead time, then variable, without variables that have no samples.
    pub fn means(&self) -> Vec<EnergySpectra> {
        let of_step = |(&step, sums): (&usize, &Vec<Sums>)| {
            let known = sums.clone().into_iter().enumerate().filter(|(_, sums)| sums.samples > 0);
            known.map(move |(variable, Sums { samples, forecast, truth })| {
                let mean = |sums: Vec<f64>| sums.into_iter().map(|sum| sum / samples as f64).collect();
                EnergySpectra { step, variable, forecast: mean(forecast), truth: mean(truth) }
            })
        };
        self.steps.iter().flat_map(of_step).collect()
    }
}

/// Computes the mean of the spectra of an ensemble's members, `[sample, channel, shell]`.
fn members_spectrum<A: MetricArray>(forecast: &Forecast<A>, members: &A) -> Result<A> {
    let one = |member| -> Result<A> {
        let fields = forecast.fill(&members.narrow(1, member, 1)?.squeeze(&[1])?)?;
        Ok(periodic::energy_spectrum(&fields, &forecast.spatial())?)
    };
    let all = (0..members.extent(1)?).map(one).collect::<Result<Vec<A>>>()?;
    Ok(A::stack(&all.iter().collect::<Vec<_>>(), 0)?.reduce(Reduction::Mean, &[0], false)?)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::loss::Weighting;

    /// Members keep the energy that their mean loses.
    #[test]
    fn spectra_average_members_and_leave_out_masked_samples() {
        let x = Tensor::arange(8, (Kind::Double, Device::Cpu)) * (std::f64::consts::TAU / 8.0);
        let wave = x.sin() * 2.0;
        let member = |sign: f64| Tensor::stack(&[&wave * sign, &wave * sign], 0).unsqueeze(1);
        let members = Tensor::stack(&[member(1.0), member(-1.0)], 1);
        let truth = Tensor::stack(&[wave.shallow_clone(), &wave * 5.0], 0).unsqueeze(1);
        let counts = Tensor::from_slice(&[true, false]).view([2, 1, 1]).expand([2, 1, 8], false);
        let weights = Weighting::default().with_mask(counts);
        let forecast = Forecast::new(&members, &truth).unwrap().weighted(weights).unwrap();
        let mut spectra = Spectra::default();
        spectra.add(2, &forecast).unwrap();
        let all = spectra.means();
        assert_eq!((all.len(), all[0].step, all[0].variable), (1, 2, 0));
        for energies in [&all[0].forecast, &all[0].truth] {
            assert!((energies[1] - 1.0).abs() < 1e-12, "{energies:?}");
            assert!((energies.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{energies:?}");
        }
    }
}
