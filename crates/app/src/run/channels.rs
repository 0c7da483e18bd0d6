//! Names, units and row direction of a network's channels. Checkpoints store them, since data of the same shape may have other levels,
//! or the same levels in another order.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, bail};
use isobar_command::exit::{Because, Exit};
use isobar_data::{DataVariable, Dataset, Dim, Levels};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::roles::{channel_names, chosen};
use super::source::Source;

/// Channel names by the role of their variables, with units, levels and the direction of latitudes.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Channels {
    inputs: Vec<String>,
    targets: Vec<String>,
    forcings: Vec<String>,
    statics: Vec<String>,
    /// Units of variables that have one.
    units: BTreeMap<String, String>,
    /// Levels of variables that have some: a variable at a single level has no other name at another one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    levels: BTreeMap<String, Levels>,
    /// True if rows go from north to south; `None` without latitudes.
    from_north: Option<bool>,
}

impl Channels {
    /// Key of a run's identity.
    pub(crate) const KEY: &'static str = "channels";

    /// Returns the channels of the training data.
    pub(crate) fn of_training(source: &Source) -> Result<Self> {
        let train = &source.parts.train;
        Self::of((&*train.data, &**train.targets()), source)
    }

    /// Returns the channels of the data that are predicted.
    fn of_predicted(source: &Source) -> Result<Self> {
        Self::of((&*source.data, &**source.targets()), source)
    }

    fn of((data, targets): (&dyn Dataset, &dyn Dataset), source: &Source) -> Result<Self> {
        let names =
            |data, variables: &[String]| Ok::<_, anyhow::Error>(channel_names(data, variables)?.concat());
        let units = |variables: &[DataVariable]| -> Vec<_> {
            let own = |variable: &DataVariable| Some((variable.name.clone(), variable.unit.clone()?));
            variables.iter().filter_map(own).collect()
        };
        let levels = |variables: Vec<DataVariable>| {
            variables.into_iter().filter_map(|variable| Some((variable.name, variable.levels?)))
        };
        let of_data = [&source.inputs[..], &source.names.forcings, &source.names.statics].concat();
        let (of_data, of_targets) = (chosen(data, &of_data)?, chosen(targets, &source.targets)?);
        let rows = data.dims().iter().find(|dim| dim.is_latitude());
        Ok(Self {
            units: [units(&of_data), units(&of_targets)].concat().into_iter().collect(),
            levels: levels(of_data).chain(levels(of_targets)).collect(),
            from_north: rows.map(Dim::descends),
            inputs: names(data, &source.inputs)?,
            targets: names(targets, &source.targets)?,
            forcings: names(data, &source.names.forcings)?,
            statics: names(data, &source.names.statics)?,
        })
    }

    /// Returns the channels recorded in a checkpoint's identity; `None` for checkpoints of earlier versions.
    pub(crate) fn recorded(identity: &Value) -> Option<Self> {
        serde_json::from_value(identity.get(Self::KEY)?.clone()).ok()
    }

    /// Rejects data with other channels than those that the checkpoint at `path` was trained on.
    pub(crate) fn check(&self, path: &Path, source: &Source) -> Result<()> {
        match self.difference(&Self::of_predicted(source)?, &source.path().to_string()) {
            None => Ok(()),
            Some(difference) => {
                bail!(Exit::Usage.because(format!("{} was trained with {difference}", path.display())))
            }
        }
    }

    /// Returns the first difference between `data` and the training data, and how to fix it.
    fn difference(&self, now: &Self, data: &str) -> Option<String> {
        self.other_names(now, data).or_else(|| self.other_meaning(now, data))
    }

    fn other_meaning(&self, now: &Self, data: &str) -> Option<String> {
        let differs = |(name, unit): (&String, &String)| {
            let own = now.units.get(name).filter(|own| *own != unit)?;
            Some(format!("`{name}` in {unit:?}, and {data} has it in {own:?}; convert it"))
        };
        let rows = |from_north: bool| if from_north { "north to south" } else { "south to north" };
        let turned = match (self.from_north, now.from_north) {
            (Some(trained), Some(own)) if trained != own => {
                let (trained, own) = (rows(trained), rows(own));
                Some(format!("rows from {trained}, and those of {data} go from {own}; reverse its latitudes"))
            }
            _ => None,
        };
        let elsewhere = |(name, trained): (&String, &Levels)| {
            let own = now.levels.get(name)?;
            let differ = !own.is_at(trained);
            differ.then(|| {
                format!(
                    "`{name}` at {trained}, and {data} has it at {own}; give data at the levels of training"
                )
            })
        };
        let levels = || self.levels.iter().find_map(elsewhere);
        self.units.iter().find_map(differs).or_else(levels).or(turned)
    }

    fn other_names(&self, now: &Self, data: &str) -> Option<String> {
        let pairs = [
            ("inputs", &self.inputs, &now.inputs),
            ("targets", &self.targets, &now.targets),
            ("forcings", &self.forcings, &now.forcings),
            ("statics", &self.statics, &now.statics),
        ];
        let (role, trained, now) = pairs.into_iter().find(|(_, trained, now)| trained != now)?;
        let sorted = |names: &[String]| {
            let mut names = names.to_vec();
            names.sort();
            names
        };
        let help = match sorted(trained) == sorted(now) {
            true => "name them in the order of training, levels by --set 'data.levels=[…]'",
            false => "give data with the channels of training",
        };
        Some(format!("the channels {trained:?} of its {role}, and those of {data} are {now:?}; {help}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channels(inputs: &[&str]) -> Channels {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Channels { inputs: names(inputs), targets: names(&["t2m"]), ..Channels::default() }
    }

    #[test]
    fn other_channels_are_named_with_a_way_out() {
        let trained = channels(&["z_500", "z_850"]);
        assert_eq!(trained.difference(&channels(&["z_500", "z_850"]), "new.nc"), None);
        let turned = trained.difference(&channels(&["z_850", "z_500"]), "new.nc").unwrap();
        assert_eq!(
            turned,
            "the channels [\"z_500\", \"z_850\"] of its inputs, and those of new.nc are [\"z_850\", \"z_500\"]; name them in the order of \
             training, levels by --set 'data.levels=[…]'"
        );
        let other = trained.difference(&channels(&["z_500", "z_700"]), "new.nc").unwrap();
        assert!(other.ends_with("give data with the channels of training"), "{other}");
    }

    #[test]
    fn other_units_and_rows_are_refused() {
        let own = |unit: Option<&str>, from_north: Option<bool>| {
            let units = unit.map(|unit| ("t2m".to_owned(), unit.to_owned())).into_iter().collect();
            Channels { units, from_north, ..channels(&["t2m"]) }
        };
        let trained = own(Some("K"), Some(true));
        for same in [own(Some("K"), Some(true)), own(None, None)] {
            assert_eq!(trained.difference(&same, "new.nc"), None);
        }
        let celsius = trained.difference(&own(Some("degC"), Some(true)), "new.nc").unwrap();
        assert_eq!(celsius, "`t2m` in \"K\", and new.nc has it in \"degC\"; convert it");
        let turned = trained.difference(&own(None, Some(false)), "new.nc").unwrap();
        assert!(
            turned.starts_with("rows from north to south, and those of new.nc go from south"),
            "{turned}"
        );
    }

    #[test]
    fn other_levels_are_refused() {
        let at = |level: Option<f64>, unit: Option<&str>| {
            let own = |level| Levels {
                name: "level".to_owned(),
                unit: unit.map(str::to_owned),
                values: vec![level],
            };
            let levels = level.map(|level| ("t".to_owned(), own(level))).into_iter().collect();
            Channels { levels, ..channels(&["t"]) }
        };
        let trained = at(Some(500.0), Some("hPa"));
        for same in [at(Some(500.0), Some("hPa")), at(Some(500.0), None), at(None, None)] {
            assert_eq!(trained.difference(&same, "new.nc"), None);
            assert_eq!(same.difference(&trained, "new.nc"), None);
        }
        assert_eq!(
            trained.difference(&at(Some(850.0), Some("hPa")), "new.nc").unwrap(),
            "`t` at level [500.0] hPa, and new.nc has it at level [850.0] hPa; give data at the levels of training"
        );
        assert!(trained.difference(&at(Some(500.0), Some("Pa")), "new.nc").is_some());
        // Checkpoints of earlier versions have none.
        let mut earlier = serde_json::to_value(&trained).unwrap();
        let _ = earlier.as_object_mut().unwrap().remove("levels");
        let earlier = Channels::recorded(&serde_json::json!({ Channels::KEY: earlier })).unwrap();
        assert_eq!(earlier.difference(&at(Some(850.0), None), "new.nc"), None);
    }

    #[test]
    fn checkpoints_of_earlier_versions_name_no_channels() {
        assert!(Channels::recorded(&serde_json::json!({ "data": {} })).is_none());
        let identity = serde_json::json!({ Channels::KEY: channels(&["u"]) });
        assert_eq!(Channels::recorded(&identity).unwrap().inputs, ["u"]);
    }
}
