//! Energy spectra of a prediction, as CSV and as pictures.

use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use anyhow::Result;
use isobar_files::NewFile;
use isobar_train::Variable;
use isobar_train::metric::EnergySpectra;

use super::files::Files;
use super::outcome::quoted;
use crate::run::chart::{self, COLOURS, Chart, Curve, GREY, lead_time};
use crate::run::raster::number;
use isobar_command::exit::{Because, Exit};

/// Decades that are drawn below the largest energy. Smaller energies are rounding errors of single precision.
const DECADES: f64 = 12.0;

/// Writes all spectra as CSV, and draws those of the first and the last step. Returns a line for each file; none without spectra.
/// `times` has the time of the start and of each step; it is empty for samples without frames.
pub(super) fn write(
    files: &Files,
    all: &[EnergySpectra],
    variables: &[Variable],
    times: &[f64],
) -> Result<Vec<String>> {
    let Files { spectra, spectrum_curves, .. } = files;
    if all.is_empty() {
        return Ok(Vec::new());
    }
    write_csv(spectra, all, variables, times)
        .map_err(|error| Exit::Data.because(format!("cannot write {}: {error}", spectra.display())))?;
    let is_finite = |own: &&EnergySpectra| own.forecast.iter().all(|energy| energy.is_finite());
    let finite = || all.iter().filter(is_finite).map(|own| own.step);
    let ends = [finite().min(), finite().max()];
    let shown = all.iter().filter(|own| ends.contains(&Some(own.step)));
    let charts: Vec<Chart> = shown.map(|own| chart(own, &variables[own.variable], times)).collect();
    if charts.is_empty() {
        return Ok(vec![format!("spectra     {}", spectra.display())]);
    }
    chart::save(&charts, spectrum_curves)?;
    Ok(vec![
        format!("spectra     {}", spectra.display()),
        format!("curves      {}", spectrum_curves.display()),
    ])
}

/// Writes the spectra as CSV, with a line for each lead time, variable and wave number.
fn write_csv(path: &Path, all: &[EnergySpectra], variables: &[Variable], times: &[f64]) -> io::Result<()> {
    let mut new = NewFile::create(path)?;
    let mut file = BufWriter::new(new.file());
    writeln!(file, "step,time,variable,unit,wave_number,forecast,truth")?;
    for EnergySpectra { step, variable, forecast, truth } in all {
        let time = times.get(*step).map(f64::to_string).unwrap_or_default();
        let Variable { name, unit, .. } = &variables[*variable];
        let (name, unit) = (quoted(name), quoted(unit.as_deref().unwrap_or_default()));
        for (wave_number, (forecast, truth)) in forecast.iter().zip(truth).enumerate() {
            writeln!(file, "{step},{time},{name},{unit},{wave_number},{forecast},{truth}")?;
        }
    }
    file.flush()?;
    drop(file);
    new.finish()
}

/// Plots log10 E(k) against log10 k, from k = 1.
fn chart(spectra: &EnergySpectra, variable: &Variable, times: &[f64]) -> Chart {
    let EnergySpectra { step, forecast, truth, .. } = spectra;
    let largest = truth.iter().chain(forecast).copied().filter(|energy| energy.is_finite());
    let least = largest.fold(0.0, f64::max) / 10_f64.powf(DECADES);
    let curve = |name: &str, colour, energies: &[f64]| Curve {
        name: name.to_owned(),
        colour,
        values: energies[1..].iter().map(|&energy| (energy > least).then(|| energy.log10())).collect(),
    };
    let after = match times.is_empty() {
        true => String::new(),
        false => format!(" after {}", number(lead_time(times, *step))),
    };
    Chart {
        title: format!("{}{after}: log10 E(k)", variable.name),
        axis: "log10 k".to_owned(),
        places: (1..truth.len()).map(|wave_number| (wave_number as f64).log10()).collect(),
        curves: vec![curve("forecast", COLOURS[0], forecast), curve("truth", GREY, truth)],
        include_zero: false,
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
        assert_eq!(chart.title, "u after 12.000: log10 E(k)");
        assert_eq!(chart.places.len(), 3);
        assert_eq!(chart.curves[0].values, [Some(0.0), None, None]);
        assert_eq!(chart.curves[1].values, [Some(1.0), Some(-1.0), None]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("prediction.spectra.csv");
        write_csv(&path, &[spectra], &[variable], &[6.0, 12.0, 18.0]).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        assert_eq!(text.lines().nth(2), Some("2,18,u,m s-1,1,1,10"));
        assert_eq!(text.lines().count(), 5);
    }
}
