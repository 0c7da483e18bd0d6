//! `[data]`: which samples a run reads.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::PathBuf;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::dataset::Dataset;
use crate::registry::{DataSource, find, registered};
use crate::{Augment, Result};

/// `[data]`: which samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(deny_unknown_fields)]
pub struct DataConfig {
    /// The file or folder, relative to the working folder.
    pub path: PathBuf,
    /// Format of the data.
    pub format: FormatName,
    /// Of trajectories: the variables that the network maps from frame to frame, by name; their components are its channels.
    pub fields: Vec<String>,
    /// Of samples without time: the variables that the network maps from, by name. By default those of the format, if it
    /// has some.
    pub inputs: Vec<String>,
    /// Of samples without time: the variables that the network maps to, by name.
    pub targets: Vec<String>,
    /// Number of the last samples (or trajectories) kept for validation.
    pub validation_samples: usize,
    /// Number of the first samples (trajectories) to train on; by default all that are not kept for validation.
    pub train_samples: Option<usize>,
    /// Of trajectories: the output of the network.
    pub predict: Predict,
    /// Of trajectories: steps of a training sample. Each output is the next input, and the loss is the mean over the steps.
    #[schemars(range(min = 1))]
    pub train_steps: usize,
    /// Of trajectories: steps of the rollouts that are validated besides single steps; 1 for none.
    #[schemars(range(min = 1))]
    pub validation_steps: usize,
    /// True if the network is told where points are, in channels behind those of the input: for each dim the sine and cosine of
    /// the way round where its ends meet, else one number from -1 to 1.
    pub positions: bool,
    /// Random augmentation of training samples.
    pub augment: AugmentConfig,
    /// Tables of formats, by name.
    #[serde(flatten)]
    pub own: FormatTables,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            path: "data/darcy.h5".into(),
            format: FormatName::default(),
            fields: Vec::new(),
            inputs: Vec::new(),
            targets: Vec::new(),
            validation_samples: 32,
            train_samples: None,
            predict: Predict::Frame,
            train_steps: 1,
            validation_steps: 1,
            positions: false,
            augment: AugmentConfig::default(),
            own: FormatTables::default(),
        }
    }
}

impl DataConfig {
    /// Opens the data set with the registered format of the name.
    ///
    /// # Errors
    /// An unknown format, or what the format rejects.
    pub fn open(&self) -> Result<Box<dyn Dataset>> {
        let name = self.format.as_str();
        let needs_time = (self.train_steps, self.validation_steps, self.predict) != (1, 1, Predict::Frame);
        let variables = [&self.fields[..], &self.inputs, &self.targets].concat();
        let source = DataSource::new(&self.path).with_variables(&variables).with_time(needs_time);
        find(name)?.open(&source, self.own.0.get(name))
    }
}

/// Name of a registered data format.
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

impl Default for FormatName {
    fn default() -> Self {
        Self("darcy".to_owned())
    }
}

impl JsonSchema for FormatName {
    fn schema_name() -> Cow<'static, str> {
        "FormatName".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let one = |name: &str, about: &str| serde_json::json!({ "type": "string", "const": name, "description": about });
        let all: Vec<Value> =
            registered().iter().map(|format| one(format.name(), format.summary())).collect();
        json_schema!({ "oneOf": all })
    }
}

/// The tables `[data.<format>]` of formats that have options.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
#[serde(transparent)]
pub struct FormatTables(BTreeMap<String, Value>);

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
