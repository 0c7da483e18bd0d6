//! Comparison of the metadata of two data sets.

use crate::dataset::Dataset;
use crate::grid::Dim;
use crate::{Error, Result};

/// Rejects a data set with another grid or other variables than the first one; `key` is the setting that names it.
///
/// # Errors
/// The first difference.
pub(crate) fn check(whole: &dyn Dataset, other: &dyn Dataset, key: &str) -> Result<()> {
    if other.times().is_some() != whole.times().is_some() {
        let word =
            |data: &dyn Dataset| if data.times().is_some() { "trajectories" } else { "samples without time" };
        let (path, first) = (other.path().display(), whole.path().display());
        let (found, expected) = (word(other), word(whole));
        return Err(Error::Config(format!("{key}: {path} has {found}, expected {expected} as {first}")));
    }
    let dims =
        |data: &dyn Dataset| data.dims().iter().map(|dim| dim.name.clone()).collect::<Vec<_>>().join(", ");
    if dims(other) != dims(whole) {
        let (path, first) = (other.path().display(), whole.path().display());
        let (found, expected) = (dims(other), dims(whole));
        return Err(Error::Config(format!(
            "{key}: {path} has the dims {found}, expected {expected} as {first}"
        )));
    }
    let names: Vec<&str> = whole.variables().iter().map(|variable| variable.name.as_str()).collect();
    check_alike(whole, other, &names, key)
}

/// Rejects a data set with another grid than the first one (names of dims do not count), or with other channels or units of the named variables; `key` is the
/// setting that names it.
///
/// # Errors
/// The first difference.
pub fn check_alike(whole: &dyn Dataset, other: &dyn Dataset, variables: &[&str], key: &str) -> Result<()> {
    let misfit = |found: String, expected: String| {
        let (path, first) = (other.path().display(), whole.path().display());
        Err(Error::Config(format!("{key}: {path} has {found}, expected {expected} as {first}")))
    };
    let (dims, known) = (other.dims(), whole.dims());
    let extents = |dims: &[Dim]| dims.iter().map(|dim| dim.coordinates.len()).collect::<Vec<_>>();
    if extents(dims) != extents(known) {
        let text = |dims: &[Dim]| -> Vec<String> {
            dims.iter().map(|dim| format!("{} = {}", dim.name, dim.coordinates.len())).collect()
        };
        return misfit(format!("the dims {}", text(dims).join(", ")), text(known).join(", "));
    }
    // Data without coordinates have numbers of points.
    let with_coordinates = |(own, known): &(&Dim, &Dim)| !own.is_numbered() && !known.is_numbered();
    for (own, known) in dims.iter().zip(known).filter(with_coordinates) {
        let step =
            known.coordinates.windows(2).map(|pair| (pair[1] - pair[0]).abs()).fold(f64::INFINITY, f64::min);
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-3 * step.min(1e3);
        if let Some(at) = own.coordinates.iter().zip(&known.coordinates).position(|pair| !near(pair)) {
            let name = &own.name;
            let (found, expected) = (own.coordinates[at], known.coordinates[at]);
            return misfit(format!("{name} = {found} at index {at}"), format!("{name} = {expected}"));
        }
    }
    for variable in whole.variables().iter().filter(|variable| variables.contains(&variable.name.as_str())) {
        let own = other.variables().iter().find(|own| own.name == variable.name);
        let name = &variable.name;
        match own {
            None => return misfit(format!("no variable `{name}`"), format!("`{name}`")),
            Some(own) if own.channels != variable.channels => {
                let (found, expected) = (&own.channels, &variable.channels);
                return misfit(format!("the channels {found:?} of `{name}`"), format!("{expected:?}"));
            }
            Some(own) if own.uniform != variable.uniform => {
                let kind = |uniform: bool| if uniform { "without spatial dims" } else { "with spatial dims" };
                return misfit(format!("`{name}` {}", kind(own.uniform)), kind(variable.uniform).to_owned());
            }
            Some(own) if own.unit.is_some() && variable.unit.is_some() && own.unit != variable.unit => {
                let [found, expected] =
                    [own, variable].map(|variable| variable.unit.as_deref().unwrap_or_default());
                return misfit(format!("`{name}` in {found:?}"), format!("{expected:?}"));
            }
            Some(_) => (),
        }
    }
    Ok(())
}
