//! Energy spectra of a prediction, as CSV and as pictures.

use anyhow::Result;
use isobar_train::Variable;
use isobar_train::metric::EnergySpectra;

use super::files::Files;
use super::outcome::quoted;
use crate::run::chart::{self, COLOURS, Chart, Curve, GREY, lead_time};
use isobar_command::exit::{Because, Exit};

/// Decades below the largest energy that are drawn; in single precision, energies below are rounding.
const DECADES: f64 = 12.0;

/// Writes all spectra as CSV, and draws those after the first and the last step. Returns a line for each file; none without spectra.
/// `times` are those of the start and of each step, for trajectories.
pub(super) fn write(
    files: &Files,
    all: &[EnergySpectra],
    variables: &[Variable],
    times: &[f64],
) -> Result<Vec<String>> {
    let Files { spectra, spectrum_curves, .. } = files;
    let Some([first, last]) = all.first().zip(all.last()).map(|ends| <[_; 2]>::from(ends).map(|of| of.step))
    else {
        return Ok(Vec::new());
    };
    isobar_files::write(spectra, csv(all, variables, times))
        .map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", spectra.display())))?;
    let ends = all.iter().filter(|own| [first, last].contains(&own.step));
    let charts: Vec<Chart> = ends.map(|own| chart(own, &variables[own.variable], times)).collect();
    chart::save(&charts, spectrum_curves)?;
    Ok(vec![
        format!("spectra     {}", spectra.display()),
        format!("curves      {}", spectrum_curves.display()),
    ])
}

/// A line for each lead time, variable and wave number.
fn csv(all: &[EnergySpectra], variables: &[Variable], times: &[f64]) -> String {
    let mut text = "step,time,variable,unit,wave_number,forecast,truth\n".to_owned();
    for EnergySpectra { step, variable, forecast, truth } in all {
        let time = times.get(*step).map(f64::to_string).unwrap_or_default();
        let Variable { name, unit, .. } = &variables[*variable];
        let (name, unit) = (quoted(name), quoted(unit.as_deref().unwrap_or_default()));
        for (wave_number, (forecast, truth)) in forecast.iter().zip(truth).enumerate() {
            text += &format!("{step},{time},{name},{unit},{wave_number},{forecast},{truth}\n");
        }
    }
    text
}

/// Decimal logarithms of energies against those of wave numbers, from 1.
fn chart(spectra: &EnergySpectra, variable: &Variable, times: &[f64]) -> Chart {
    let EnergySpectra { step, forecast, truth, .. } = spectra;
    let largest = truth.iter().chain(forecast).copied().filter(|energy| energy.is_finite());
    let least = largest.fold(0.0, f64::max) / 10_f64.powf(DECADES);
    let curve = |name: &str, colour, energies: &[f64]| Curve {
        name: name.to_owned(),
        colour,
        values: energies[1..].iter().map(|&energy| (energy > least).then(|| energy.log10())).collect(),
    };
    let after =
        if times.is_empty() { String::new() } else { format!(", lead time {}", lead_time(times, *step)) };
    Chart {
        title: format!("{}: log10 of the energy{after}", variable.name),
        axis: "log10 k".to_owned(),
        places: (1..truth.len()).map(|wave_number| (wave_number as f64).log10()).collect(),
        curves: vec![curve("forecast", COLOURS[0], forecast), curve("truth", GREY, truth)],
        from_zero: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spectra_are_drawn_down_to_rounding() {
        let spectra = EnergySpectra {
            step: 2,
            variable: 0,
            forecast: vec![5.0, 1.0, f64::NAN, 0.0],
            truth: vec![5.0, 10.0, 0.1, 1e-13],
        };
        let variable = Variable { unit: Some("m s-1".into()), ..Variable::new("u") };
        let chart = chart(&spectra, &variable, &[6.0, 12.0, 18.0]);
        assert_eq!(chart.title, "u: log10 of the energy, lead time 12");
        assert_eq!(chart.places.len(), 3);
        assert_eq!(chart.curves[0].values, [Some(0.0), None, None]);
        assert_eq!(chart.curves[1].values, [Some(1.0), Some(-1.0), None]);
        let text = csv(&[spectra], &[variable], &[6.0, 12.0, 18.0]);
        assert_eq!(text.lines().nth(2), Some("2,18,u,m s-1,1,1,10"));
        assert_eq!(text.lines().count(), 5);
    }
}
