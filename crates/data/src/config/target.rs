//! `[data.target]`: targets in a data set of their own.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DataConfig, FormatName, FormatTables, Predict};
use crate::joined::DataPath;
use crate::{Error, Result};

/// `[data.target]`: the data set of `data.targets`, which may be on another grid than `data.inputs`. Sample i of the inputs is
/// paired with sample i of the targets; data with times are paired time by time.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct TargetConfig {
    /// The file or folder, as `data.path`; by default `data.path`, whose variables may lie on several grids.
    pub path: Option<DataPath>,
    /// Format of the data; by default that of the inputs, or if that is "auto", the detected one.
    pub format: Option<FormatName>,
    /// Levels of target variables that have several, as in `data.levels`.
    pub levels: Vec<f64>,
    /// File or folder of the targets that belong to `data.validation_path`.
    pub validation_path: Option<DataPath>,
    /// File or folder of the targets that belong to `data.test_path`.
    pub test_path: Option<DataPath>,
    /// Tables of formats, by name; by default those of the inputs.
    #[serde(flatten)]
    pub own: FormatTables,
}

impl DataConfig {
    /// The keys with which the targets are opened, if `[data.target]` names a data set of their own.
    pub(crate) fn of_targets(&self) -> Result<Option<Self>> {
        let Some(target) = &self.target else { return Ok(None) };
        let zarr = target.path.as_ref().is_some_and(DataPath::is_zarr);
        let format = match &target.format {
            Some(format) => format.clone(),
            None if zarr => "zarr".into(),
            None if self.format == FormatName::default() => self.format.clone(),
            None => self.format_name().into(),
        };
        let own = Self {
            path: target.path.clone().unwrap_or_else(|| self.path.clone()),
            format,
            levels: target.levels.clone(),
            validation_path: target
                .validation_path
                .clone()
                .or_else(|| self.validation_path.clone().filter(|_| target.path.is_none())),
            test_path: target
                .test_path
                .clone()
                .or_else(|| self.test_path.clone().filter(|_| target.path.is_none())),
            own: self.own.or(&target.own),
            inputs: Vec::new(),
            scalars: Vec::new(),
            statics: Vec::new(),
            target: None,
            ..self.clone()
        };
        Ok(Some(own.with_folders()?.into_owned()))
    }

    /// Rejects keys that inputs and targets of two data sets do not have.
    pub(crate) fn check_target(&self) -> Result<()> {
        if self.target.is_none() {
            return Ok(());
        }
        let steps = (self.train_steps.most(), self.validation_steps);
        let names = |names: &[String]| (!names.is_empty()).then(|| format!("{names:?}"));
        let refused = [
            (
                "fields",
                names(&self.fields),
                "'data.fields=[]', and name variables in data.inputs and data.targets",
            ),
            ("diagnostics", names(&self.diagnostics), "'data.diagnostics=[]', and name them in data.targets"),
            ("forcings", names(&self.forcings), "'data.forcings=[]', and name stored ones in data.inputs"),
            ("history", (self.history != 1).then(|| self.history.to_string()), "data.history=1"),
            ("train_steps", (steps.0 != 1).then(|| steps.0.to_string()), "data.train_steps=1"),
            ("validation_steps", (steps.1 != 1).then(|| steps.1.to_string()), "data.validation_steps=1"),
            (
                "predict",
                (self.predict == Predict::Change).then(|| "\"change\"".to_owned()),
                "data.predict=frame",
            ),
        ];
        match refused.into_iter().find_map(|(key, value, mend)| Some((key, value?, mend))) {
            None => Ok(()),
            Some((key, value, mend)) => Err(Error::Config(format!(
                "data.{key} is {value}, but with [data.target] inputs are mapped to the targets of the same time, without \
                 rollouts: --set {mend}; or take [data.target] away"
            ))),
        }
    }
}
