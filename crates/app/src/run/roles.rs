//! Roles of variables: what a network maps from and to.

use std::ops::Range;

use anyhow::{Result, bail};
use isobar_data::{Computed, DataVariable, Dataset, Normalizer, choose};
use isobar_models::FieldSpec;
use isobar_train::config::{DataConfig, ScalarsAs};
use isobar_train::{Conditions, Roles};

use isobar_command::exit::{Because, Exit};

/// Names of variables by their role.
#[derive(Debug, Default)]
pub(crate) struct Variables {
    /// Of the input: prognostic ones, of which frames are mapped to the next, or inputs and scalars of samples without time.
    pub(crate) inputs: Vec<String>,
    /// Of the output: prognostic and diagnostic ones, or targets of samples without time.
    pub(crate) targets: Vec<String>,
    /// Forcings that the data have; of trajectories also scalars.
    pub(crate) forcings: Vec<String>,
    /// Forcings that are computed.
    pub(crate) computed: Vec<String>,
    /// Static fields that the data have.
    pub(crate) statics: Vec<String>,
    /// Static fields that are computed.
    pub(crate) places: Vec<String>,
}

impl Variables {
    /// Sorts the variables of a configuration by their roles, and checks that each has one. Variables of the output are those of
    /// `others`, the data set of the targets.
    pub(crate) fn new(data: &dyn Dataset, others: &dyn Dataset, config: &DataConfig) -> Result<Self> {
        let (inputs, targets) = match data.times() {
            Some(_) => steps(data, config)?,
            None => pair(data, others, config)?,
        };
        let split = |names: &[String]| -> (Vec<String>, Vec<String>) {
            names.iter().cloned().partition(|name| !Computed::is_name(name))
        };
        let ((forcings, computed), (statics, places)) = (split(&config.forcings), split(&config.statics));
        if let Some(name) = places.iter().find(|name| Computed::needs_time(name)) {
            bail!(Exit::Usage.because(format!(
                "data.statics names {name:?}, which changes in time; name it in data.forcings"
            )));
        }
        let mut variables = Self { inputs, targets, forcings, computed, statics, places };
        let has_steps = data.times().is_some();
        let keys =
            [("forcings", &config.forcings), ("statics", &config.statics), ("scalars", &config.scalars)];
        for (key, names) in keys {
            check_unique(key, "variable", names)?;
            let outputs = if has_steps { &variables.targets } else { &variables.inputs };
            if let Some(name) = names.iter().find(|name| outputs.contains(name)) {
                let other = if has_steps { "data.fields or data.diagnostics" } else { "data.inputs" };
                bail!(Exit::Usage.because(format!("{other} and data.{key} both name {name:?}; leave one")));
            }
        }
        if let Some(name) = config.scalars.iter().find(|name| variables.targets.contains(name)) {
            bail!(
                Exit::Usage.because(format!("data.targets and data.scalars both name {name:?}; leave one"))
            );
        }
        for (at, (key, names)) in keys.iter().enumerate() {
            for (other, others) in &keys[at + 1..] {
                if let Some(name) = names.iter().find(|name| others.contains(name)) {
                    bail!(
                        Exit::Usage
                            .because(format!("data.{key} and data.{other} both name {name:?}; leave one"))
                    );
                }
            }
        }
        check_scalars(data, &config.scalars, if has_steps { "data.forcings" } else { "data.inputs" })?;
        match has_steps {
            true => variables.forcings.extend(config.scalars.iter().cloned()),
            false => variables.inputs.extend(config.scalars.iter().cloned()),
        }
        Ok(variables)
    }

    /// Roles of the channels of stored frames; `None` if one frame of the outputs is the input. `forcing` normalises stored
    /// forcings.
    pub(crate) fn roles(
        &self,
        data: &dyn Dataset,
        config: &DataConfig,
        window: &[Range<usize>],
        forcing: Option<Normalizer>,
    ) -> Result<Option<Roles>> {
        let has_forcings = !self.forcings.is_empty() || !self.computed.is_empty();
        let is_plain = config.history == 1 && self.inputs.len() == self.targets.len() && !has_forcings;
        if data.times().is_none() || is_plain {
            return Ok(None);
        }
        let (prognostic, outputs) = (channels(data, &self.inputs)?, channels(data, &self.targets)?);
        let computed = match self.computed.is_empty() {
            true => None,
            false => Some(Computed::new(&self.computed, data, window)?),
        };
        Ok(Some(Roles {
            history: config.history,
            prognostic,
            diagnostic: outputs - prognostic,
            forcing,
            computed,
        }))
    }

    /// Number of channels of the input of a network, and of static fields behind them.
    pub(crate) fn input_channels(&self, data: &dyn Dataset, config: &DataConfig) -> Result<[usize; 2]> {
        let forcings = channels(data, &self.forcings)? + Computed::channels(&self.computed).len();
        let statics = channels(data, &self.statics)? + Computed::channels(&self.places).len();
        Ok([channels(data, &self.inputs)? * config.history + forcings, statics])
    }

    /// The input channels that a network is given as one vector for each sample; `None` if there are none.
    pub(crate) fn conditions(
        &self,
        data: &dyn Dataset,
        config: &DataConfig,
        spec: &FieldSpec,
    ) -> Result<Option<Conditions>> {
        if config.scalars_as == ScalarsAs::Channels {
            return Ok(None);
        }
        let count = channels(data, &config.scalars)?;
        if count == 0 {
            bail!(Exit::Usage.because(
                "data.scalars_as is \"conditions\", but data.scalars names no variable; name some, or leave data.scalars_as out"
            ));
        }
        // Scalars are the last of the inputs of samples without time, or of the stored forcings.
        let before = channels(data, &self.inputs)? * config.history;
        let end = before + if data.times().is_some() { channels(data, &self.forcings)? } else { 0 };
        Ok(Some(Conditions { count, behind: spec.in_channels + spec.position_channels - end }))
    }

    /// Variables of stored frames of trajectories, in the order of [`isobar_train::Roles`].
    pub(crate) fn stored(&self) -> Vec<String> {
        [&self.targets[..], &self.forcings].concat()
    }
}

/// Number of channels of variables.
pub(crate) fn channels(data: &dyn Dataset, names: &[String]) -> Result<usize> {
    Ok(chosen(data, names)?.iter().map(|variable| variable.channels.len()).sum())
}

/// Names of the channels of each variable.
pub(super) fn channel_names(data: &dyn Dataset, names: &[String]) -> Result<Vec<Vec<String>>> {
    Ok(chosen(data, names)?.into_iter().map(|variable| variable.channels).collect())
}

/// Variables by their names; none where no name is given.
pub(super) fn chosen(data: &dyn Dataset, names: &[String]) -> Result<Vec<DataVariable>> {
    match names.is_empty() {
        true => Ok(Vec::new()),
        false => Ok(choose(data, &as_str(names))?),
    }
}

/// Names as `data` takes them.
pub(crate) fn as_str(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

/// Lists the variables that `key` may name, with a setting that works.
fn known(data: &dyn Dataset, key: &str) -> String {
    let names: Vec<&str> = data.variables().iter().map(|variable| variable.name.as_str()).collect();
    format!("{} has {names:?}; --set 'data.{key}={names:?}'", data.path().display())
}

/// Rejects a list that names a variable twice.
fn check_unique(key: &str, what: &str, names: &[String]) -> Result<()> {
    let mut unique: Vec<&str> = Vec::new();
    for name in as_str(names) {
        if !unique.contains(&name) {
            unique.push(name);
        }
    }
    if unique.len() < names.len() {
        bail!(
            Exit::Usage.because(format!(
                "data.{key} names a {what} twice: {names:?}; --set 'data.{key}={unique:?}'"
            ))
        );
    }
    Ok(())
}

/// Rejects a scalar that varies in space; `other` is the key for such variables.
fn check_scalars(data: &dyn Dataset, names: &[String], other: &str) -> Result<()> {
    if let Some(variable) = chosen(data, names)?.into_iter().find(|variable| !variable.uniform) {
        bail!(Exit::Usage.because(format!(
            "data.scalars names {:?}, which has spatial dims in {}; name it in {other}",
            variable.name,
            data.path().display()
        )));
    }
    Ok(())
}

/// The variables that a network maps from frame to frame.
fn steps(data: &dyn Dataset, config: &DataConfig) -> Result<(Vec<String>, Vec<String>)> {
    for (key, names) in [("inputs", &config.inputs), ("targets", &config.targets)] {
        if !names.is_empty() {
            bail!(Exit::Usage.because(format!(
                "data.{key} is for samples without time, but {} holds trajectories; name the variables that are mapped from \
                 frame to frame in data.fields: --set 'data.{key}=[]' --set 'data.fields={names:?}'; to map inputs to targets of the \
                 same time instead, add the table [data.target] (without keys, for targets in the same data)",
                data.path().display()
            )));
        }
    }
    if config.fields.is_empty() {
        bail!(Exit::Usage.because(format!("data.fields names no field; {}", known(data, "fields"))));
    }
    let outputs = [&config.fields[..], &config.diagnostics].concat();
    check_unique("fields", "field", &config.fields)?;
    check_unique("diagnostics", "variable", &config.diagnostics)?;
    if let Some(name) = config.diagnostics.iter().find(|name| config.fields.contains(name)) {
        bail!(Exit::Usage.because(format!(
            "data.fields and data.diagnostics both name {name:?}: fields are inputs and outputs, diagnostics outputs only; \
             leave one"
        )));
    }
    Ok((config.fields.clone(), outputs))
}

/// The variables that a network maps from and to.
fn pair(data: &dyn Dataset, others: &dyn Dataset, config: &DataConfig) -> Result<(Vec<String>, Vec<String>)> {
    if config.needs_time() {
        bail!(Exit::Usage.because(format!(
            "data.train_steps is {} and data.validation_steps {}, but samples of {} have no steps; --set data.train_steps=1 \
             --set data.validation_steps=1 --set data.predict=frame",
            config.train_steps.most(),
            config.validation_steps,
            data.path().display()
        )));
    }
    let timed = [
        ("forcings", !config.forcings.is_empty(), "[]; name such variables in data.inputs"),
        ("diagnostics", !config.diagnostics.is_empty(), "[]; name such variables in data.targets"),
        ("history", config.history != 1, "1"),
    ];
    if let Some((key, _, mend)) = timed.into_iter().find(|(_, set, _)| *set) {
        bail!(Exit::Usage.because(format!(
            "data.{key} is for trajectories, but samples of {} have no times; --set data.{key}={mend}",
            data.path().display()
        )));
    }
    let names_pairs = !config.inputs.is_empty() || !config.targets.is_empty();
    if names_pairs && !config.fields.is_empty() {
        bail!(Exit::Usage.because(format!(
            "data.fields is for trajectories, but samples of {} have no times and data.inputs and data.targets name what is \
             mapped; --set 'data.fields=[]'",
            data.path().display()
        )));
    }
    let default = |data: &dyn Dataset| {
        data.default_pair().map(|pair| pair.map(|name| vec![name.to_owned()])).unwrap_or_default()
    };
    let ([from, _], [_, to]) = (default(data), default(others));
    let or = |own: &[String], default: Vec<String>| if own.is_empty() { default } else { own.to_vec() };
    let (inputs, targets) = (or(&config.inputs, from), or(&config.targets, to));
    for (key, names, data) in [("inputs", &inputs, data), ("targets", &targets, others)] {
        if names.is_empty() {
            bail!(Exit::Usage.because(format!("data.{key} names no variable; {}", known(data, key))));
        }
        check_unique(key, "variable", names)?;
    }
    Ok((inputs, targets))
}
