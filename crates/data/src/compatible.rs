//! Comparison of the metadata of two data sets.

use crate::dataset::Dataset;
use crate::grid::Dim;
use crate::{Error, Result};

/// Rejects a data set with another grid or other variables than the first one; `key` is the setting that names it.
///
/// # Errors
/// The first difference.
pub(crate) fn check(whole: &dyn Dataset, other: &dyn Dataset, key: &str) -> Result<()> {
    let names =
        |data: &dyn Dataset| data.dims().iter().map(|dim| dim.name.clone()).collect::<Vec<_>>().join(", ");
    if names(other) != names(whole) {
        return misfit((whole, other, key), format!("the dims {}", names(other)), names(whole));
    }
    let word =
        |data: &dyn Dataset| if data.times().is_some() { "trajectories" } else { "samples without time" };
    if word(other) != word(whole) {
        return misfit((whole, other, key), word(other).to_owned(), word(whole).to_owned());
    }
    check_grid((whole, other, key), |_, _| true)?;
    let names: Vec<&str> = whole.variables().iter().map(|variable| variable.name.as_str()).collect();
    check_variables((whole, other, key), &names)
}

/// Rejects a data set with another grid than the first one, or with other channels or units of the named variables; `key` is the
/// setting that names it. Names of dims do not count, and coordinates only where both data sets have some.
///
/// # Errors
/// The first difference.
pub fn check_alike(whole: &dyn Dataset, other: &dyn Dataset, variables: &[&str], key: &str) -> Result<()> {
    // Data without coordinates have numbers of points.
    check_grid((whole, other, key), |own, known| !own.is_numbered() && !known.is_numbered())?;
    check_variables((whole, other, key), variables)
}

/// The first data set, the one that is compared with it, and the setting that names it.
type Compared<'a> = (&'a dyn Dataset, &'a dyn Dataset, &'a str);

fn misfit((whole, other, key): Compared<'_>, found: String, expected: String) -> Result<()> {
    let (path, first) = (other.path().display(), whole.path().display());
    Err(Error::Config(format!("{key}: {path} has {found}, expected {expected} as {first}")))
}

/// Compares extents, and coordinates of the dims that `have_coordinates`.
fn check_grid(of: Compared<'_>, have_coordinates: impl Fn(&Dim, &Dim) -> bool) -> Result<()> {
    let (known, dims) = (of.0.dims(), of.1.dims());
    let extents = |dims: &[Dim]| dims.iter().map(|dim| dim.coordinates.len()).collect::<Vec<_>>();
    if extents(dims) != extents(known) {
        let text = |dims: &[Dim]| -> String {
            let texts = dims.iter().map(|dim| format!("{} = {}", dim.name, dim.coordinates.len()));
            texts.collect::<Vec<_>>().join(", ")
        };
        return misfit(of, format!("the dims {}", text(dims)), text(known));
    }
    for (own, known) in dims.iter().zip(known).filter(|(own, known)| have_coordinates(own, known)) {
        let step =
            known.coordinates.windows(2).map(|pair| (pair[1] - pair[0]).abs()).fold(f64::INFINITY, f64::min);
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-3 * step.min(1e3);
        if let Some(at) = own.coordinates.iter().zip(&known.coordinates).position(|pair| !near(pair)) {
            let name = &own.name;
            let (found, expected) = (own.coordinates[at], known.coordinates[at]);
            return misfit(of, format!("{name} = {found} at index {at}"), format!("{name} = {expected}"));
        }
    }
    Ok(())
}

/// Compares channels, levels and units of the named variables.
fn check_variables(of: Compared<'_>, variables: &[&str]) -> Result<()> {
    let (whole, other, _) = of;
    for variable in whole.variables().iter().filter(|variable| variables.contains(&variable.name.as_str())) {
        let own = other.variables().iter().find(|own| own.name == variable.name);
        let name = &variable.name;
        match own {
            None => return misfit(of, format!("no variable `{name}`"), format!("`{name}`")),
            Some(own) if own.channels != variable.channels => {
                let (found, expected) = (&own.channels, &variable.channels);
                return misfit(of, format!("the channels {found:?} of `{name}`"), format!("{expected:?}"));
            }
            Some(own) if own.uniform != variable.uniform => {
                let kind = |uniform: bool| if uniform { "without spatial dims" } else { "with spatial dims" };
                return misfit(
                    of,
                    format!("`{name}` {}", kind(own.uniform)),
                    kind(variable.uniform).to_owned(),
                );
            }
            Some(own) if own.unit.is_some() && variable.unit.is_some() && own.unit != variable.unit => {
                let [found, expected] =
                    [own, variable].map(|variable| variable.unit.as_deref().unwrap_or_default());
                return misfit(of, format!("`{name}` in {found:?}"), format!("{expected:?}"));
            }
            Some(own) => {
                if let (Some(found), Some(expected)) = (&own.levels, &variable.levels)
                    && !found.is_at(expected)
                {
                    return misfit(of, format!("`{name}` at {found}"), expected.to_string());
                }
            }
        }
    }
    Ok(())
}
