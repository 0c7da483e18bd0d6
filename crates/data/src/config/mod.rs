//! `[data]`: which samples a run reads.

mod check;
mod detect;
mod target;

use std::borrow::Cow;
use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::adapt::Computed;
use crate::calendar::TimePoint;
use crate::dataset::Dataset;
use crate::grid::DataVariable;
use crate::joined::{self, DataPath, Join, Opener};
use crate::memory::{Cache, HostMemory};
use crate::registry::{find, registered};
use crate::steps::TrainSteps;
use crate::{Augment, Error, Result};

pub use self::target::TargetConfig;

/// `[data]`: which samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct DataConfig {
    /// The file or folder, relative to the working folder. Several files of one data set are a folder of them, a pattern such as
    /// `"era5_*.nc"`, or a list of files and patterns.
    pub path: DataPath,
    /// Format of the data. "auto" detects it: by the extension of `path`, of HDF5 files by their layout, and a store of Zarr by its
    /// metadata.
    pub format: FormatName,
    /// With several files: how they follow each other, along times ("time") or samples ("sample"). By default along times where
    /// those of the files differ, otherwise along samples.
    pub join: Option<Join>,
    /// With several files: number of files that stay open.
    #[schemars(range(min = 1))]
    pub open_files: usize,
    /// Of trajectories: the variables that the network maps from frame to frame, by name; their components are its channels.
    pub fields: Vec<String>,
    /// Of trajectories: variables that are inputs at each step, but no outputs. Names of the data, and computed ones:
    /// `day_of_year`, `time_of_day`, `toa_radiation`, `latitude` and `longitude`.
    pub forcings: Vec<String>,
    /// Variables that are the same at all times and in all samples, such as a land-sea mask: inputs only. `latitude` and
    /// `longitude` are computed.
    pub statics: Vec<String>,
    /// Variables without spatial dims, such as the viscosity of a sample: inputs with one value at all points.
    pub scalars: Vec<String>,
    /// Form in which the network is given `scalars`.
    pub scalars_as: ScalarsAs,
    /// Of trajectories: variables that are outputs, but no inputs.
    pub diagnostics: Vec<String>,
    /// Of trajectories: number of frames that the network maps from, the newest one last.
    #[schemars(range(min = 1))]
    pub history: usize,
    /// Levels of variables with several, in this order and in the unit of the file, such as [500, 850]; by default all. The
    /// axis of channels is that of levels: `[data.<format>] channel = "level"`.
    pub levels: Vec<f64>,
    /// Treatment of missing values: fill values and NaN.
    pub missing: Missing,
    /// With missing = "fill" or "mask": the number that replaces missing values, after normalisation. 0 is the variable's mean over the
    /// training samples, 1 is one standard deviation above it.
    pub fill: f64,
    /// Of samples without time: the variables that the network maps from, by name. By default those of the format, if it
    /// has some.
    pub inputs: Vec<String>,
    /// Of samples without time: the variables that the network maps to, by name.
    pub targets: Vec<String>,
    /// Data set of the targets, if they are on another grid than the inputs, or in other files.
    pub target: Option<TargetConfig>,
    /// A file or folder with validation samples only, of the same format; by default validation is on a part of `data.path`.
    pub validation_path: Option<DataPath>,
    /// A file or folder with test samples, which `isobar predict` predicts instead of the validation samples.
    pub test_path: Option<DataPath>,
    /// Of trajectories: first and last time to use at all, as dates such as ["1980", "2015-12-31"] (both included) or numbers in
    /// the unit of the file.
    pub times: Option<[TimePoint; 2]>,
    /// Of trajectories: first and last time of training frames.
    pub train_times: Option<[TimePoint; 2]>,
    /// Of trajectories: first and last time of validation frames.
    pub validation_times: Option<[TimePoint; 2]>,
    /// Of trajectories: first and last time of test frames.
    pub test_times: Option<[TimePoint; 2]>,
    /// Number of the last samples (or trajectories) kept for validation, without `validation_path` and `validation_times`.
    pub validation_samples: usize,
    /// Number of the first samples (trajectories) to train on; by default all that are not kept for validation.
    pub train_samples: Option<usize>,
    /// Of trajectories: the output of the network.
    pub predict: Predict,
    /// Of trajectories: steps of a training sample. Each output is the next input, and the loss is the mean over the steps. A
    /// list gives later epochs other steps: `[{ epoch = 0, steps = 1 }, { epoch = 5, steps = 4 }]`.
    pub train_steps: TrainSteps,
    /// Of trajectories: steps of the rollouts that are validated besides single steps; 1 for none.
    #[schemars(range(min = 1))]
    pub validation_steps: usize,
    /// Appends the coordinates of the points as input channels: sine and cosine of the angle for a periodic dim, one number from -1
    /// to 1 for any other dim.
    pub positions: bool,
    /// Of point clouds: the variable of `inputs` with the coordinates of the points, one channel for each of two or three. Pictures show
    /// the points where they are.
    pub points: Option<String>,
    /// Random augmentation of training samples.
    pub augment: AugmentConfig,
    /// Samples that a rank keeps in memory. Results do not depend on it.
    pub cache: Cache,
    /// With `cache = "none"` or `"window"`: most host memory of a rank for batches that are read ahead and samples that are kept,
    /// as in `"512MiB"` or `"2GiB"`.
    pub host_memory: HostMemory,
    /// With `cache = "none"` or `"window"`: threads of a rank that read ahead; 0 to read batches when they are needed.
    #[schemars(range(min = 0, max = 64))]
    pub workers: usize,
    /// Tables of formats, by name.
    #[serde(flatten)]
    pub own: FormatTables,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            path: "data/darcy.h5".into(),
            format: FormatName::default(),
            join: None,
            open_files: 32,
            fields: Vec::new(),
            forcings: Vec::new(),
            statics: Vec::new(),
            scalars: Vec::new(),
            scalars_as: ScalarsAs::default(),
            diagnostics: Vec::new(),
            history: 1,
            levels: Vec::new(),
            missing: Missing::Error,
            fill: 0.0,
            inputs: Vec::new(),
            targets: Vec::new(),
            target: None,
            validation_path: None,
            test_path: None,
            times: None,
            train_times: None,
            validation_times: None,
            test_times: None,
            validation_samples: 32,
            train_samples: None,
            predict: Predict::Frame,
            train_steps: TrainSteps::default(),
            validation_steps: 1,
            positions: false,
            points: None,
            augment: AugmentConfig::default(),
            cache: Cache::default(),
            host_memory: HostMemory::default(),
            workers: 2,
            own: FormatTables::default(),
        }
    }
}

impl DataConfig {
    /// Returns whether the run is about several time steps, or changes between them.
    pub fn needs_time(&self) -> bool {
        (self.train_steps.most(), self.validation_steps, self.predict) != (1, 1, Predict::Frame)
    }

    /// Returns whether missing values are no errors.
    pub fn allows_missing(&self) -> bool {
        self.missing != Missing::Error
    }

    /// Returns the fill of inputs if missing values of outputs are masked.
    pub fn masks(&self) -> Option<f64> {
        (self.missing == Missing::Mask).then_some(self.fill)
    }

    /// Opens the data set with the registered format of the name. If it is a folder with the folders `train`, `valid` and `test`,
    /// that is the one of training.
    ///
    /// # Errors
    /// An unknown format, or what the format rejects; files that do not fit together.
    pub fn open(&self) -> Result<Box<dyn Dataset>> {
        self.open_at(&self.with_folders()?.path)
    }

    /// Resolves a folder with the folders `train`, `valid` and `test`: the paths of the sets that no key names.
    pub(crate) fn with_folders(&self) -> Result<Cow<'_, Self>> {
        let Some([train, valid, test]) = self.path.split(&find(self.format_name())?) else {
            return Ok(Cow::Borrowed(self));
        };
        let mut own = self.clone();
        own.path = train.unwrap_or(own.path);
        if own.validation_times.is_none() {
            own.validation_path = own.validation_path.or(valid);
        }
        if own.test_times.is_none() {
            own.test_path = own.test_path.or(test);
        }
        Ok(Cow::Owned(own))
    }

    /// Opens another data set of the same kind.
    pub(crate) fn open_at(&self, path: &DataPath) -> Result<Box<dyn Dataset>> {
        self.train_steps.check()?;
        self.open_with(path, Opener { needs_time: self.needs_time(), takes_all: false, ..self.opener()? })
    }

    /// Opens a data set with the variables and levels of the configuration.
    fn open_with(&self, path: &DataPath, opener: Opener) -> Result<Box<dyn Dataset>> {
        let name = opener.format.name();
        let data = joined::open(path, opener, (self.join, self.open_files))?;
        let has_levels = |variable: &DataVariable| {
            variable.levels.is_some() || variable.channels.len() == self.levels.len()
        };
        if !self.levels.is_empty() && !data.variables().iter().any(has_levels) {
            return Err(Error::Config(format!(
                "data.levels is {:?}, but no variable of {path} has levels; name their axis with --set data.{name}.channel=LEVEL, \
                 or --set 'data.levels=[]'",
                self.levels,
            )));
        }
        Ok(data)
    }

    /// Opens the data set as [`DataConfig::open`] does, but with all variables if the configuration names none, and also if its data
    /// have too few steps for it.
    ///
    /// # Errors
    /// Those of [`DataConfig::open`].
    pub fn open_all(&self) -> Result<Box<dyn Dataset>> {
        self.open_with(&self.with_folders()?.path, self.opener()?)
    }

    /// Opens the data set of `[data.target]`, if there is one, as [`DataConfig::open_all`] does.
    ///
    /// # Errors
    /// Those of [`DataConfig::open`].
    pub fn open_all_targets(&self) -> Result<Option<Box<dyn Dataset>>> {
        self.of_targets()?.map(|targets| targets.open_all()).transpose()
    }

    /// Opens another data set with the variables of the targets, as `data.path` or `data.target.path` is opened.
    ///
    /// # Errors
    /// Those of [`DataConfig::open`].
    pub fn open_like_targets(&self, path: DataPath) -> Result<Box<dyn Dataset>> {
        let own = self.of_targets()?.unwrap_or_else(|| self.clone());
        // Of trajectories, targets are the fields and diagnostic variables.
        let [inputs, forcings, statics, scalars] = [(); 4].map(|()| Vec::new());
        Self { path, inputs, forcings, statics, scalars, ..own }.open()
    }

    /// Targets that are in the data set of the inputs.
    fn own_targets(&self) -> &[String] {
        if self.target.is_some() { &[] } else { &self.targets }
    }

    /// Returns the names of all variables of the data set that the configuration names.
    pub fn stored_variables(&self) -> Vec<String> {
        let all = [&self.fields[..], &self.inputs, self.own_targets(), &self.diagnostics].concat();
        let stored = self.forcings.iter().chain(&self.statics).filter(|name| !Computed::is_name(name));
        all.iter().chain(stored).chain(&self.scalars).cloned().collect()
    }

    /// Opener of files, with all variables where none is named.
    fn opener(&self) -> Result<Opener> {
        let format = self.found_format()?;
        Ok(Opener {
            format,
            table: self.own.0.get(format.name()).cloned(),
            variables: self.stored_variables(),
            levels: self.levels.clone(),
            needs_time: false,
            keeps_missing: self.allows_missing(),
            takes_all: true,
        })
    }
}

/// Treatment of missing values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Missing {
    /// An error that names the variable and the index.
    #[default]
    Error,
    /// `data.fill` replaces them.
    Fill,
    /// `data.fill` replaces them in inputs. In outputs they have no part in losses, errors and metrics.
    Mask,
}

/// Name of a registered data format, or `auto`, by default, for the one that is detected.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FormatName(String);

impl FormatName {
    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for FormatName {
    fn from(name: &str) -> Self {
        Self(name.to_owned())
    }
}

/// Name that stands for the detected format.
const AUTO: &str = "auto";

impl Default for FormatName {
    fn default() -> Self {
        Self(AUTO.to_owned())
    }
}

impl JsonSchema for FormatName {
    fn schema_name() -> Cow<'static, str> {
        "FormatName".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let one = |name: &str, about: &str| serde_json::json!({ "type": "string", "const": name, "description": about });
        let known = registered();
        let auto = one(AUTO, "The format that is detected.");
        let all = known.iter().map(|format| one(format.name(), format.summary()));
        json_schema!({ "oneOf": std::iter::once(auto).chain(all).collect::<Vec<Value>>() })
    }
}

/// The tables `[data.<format>]` of formats that have options.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
#[serde(transparent)]
pub struct FormatTables(BTreeMap<String, Value>);

impl FormatTables {
    /// Names of the formats with a table.
    fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// These tables, of which others replace those of the same format.
    pub(crate) fn or(&self, others: &Self) -> Self {
        let mut tables = self.0.clone();
        tables.extend(others.0.clone());
        Self(tables)
    }
}

impl<'de> Deserialize<'de> for FormatTables {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let tables = BTreeMap::<String, Value>::deserialize(deserializer)?;
        let known = registered();
        for (name, table) in &tables {
            let Some(format) = known.iter().find(|format| format.name() == name) else {
                return Err(serde::de::Error::custom(format!(
                    "`{name}` is neither a key of [data] nor a data format"
                )));
            };
            format.check(table).map_err(serde::de::Error::custom)?;
        }
        Ok(Self(tables))
    }
}

impl JsonSchema for FormatTables {
    fn schema_name() -> Cow<'static, str> {
        "FormatTables".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut properties = Map::new();
        for format in registered() {
            if let Some(schema) = format.schema(generator) {
                let about = format!("With format = \"{}\".", format.name());
                let optional =
                    serde_json::json!({ "anyOf": [schema, { "type": "null" }], "description": about });
                properties.insert(format.name().to_owned(), optional);
            }
        }
        json_schema!({ "type": "object", "properties": properties })
    }
}

/// Form in which a network is given variables without spatial dims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScalarsAs {
    /// Input channels with one value at all points.
    #[default]
    Channels,
    /// One vector for each sample, normalised: the array `conditions`, of a denoiser `class_labels`, for models that take one, such as
    /// `dit` with `condition_dim` and `song_unet` with `label_dim`.
    Conditions,
}

/// The output of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Predict {
    /// The next frame.
    #[default]
    Frame,
    /// The change to the next frame, scaled so that the changes of all variables count alike.
    Change,
}

/// Random augmentation of training samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AugmentConfig {
    /// Nothing.
    #[default]
    None,
    /// One of the eight symmetries of the square: flips and transposition.
    Square,
}

impl From<AugmentConfig> for Augment {
    fn from(config: AugmentConfig) -> Self {
        match config {
            AugmentConfig::None => Self::None,
            AugmentConfig::Square => Self::Square,
        }
    }
}
