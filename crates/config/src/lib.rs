//! Layered configuration: defaults < TOML files < `ISOBAR_*` environment < command line.
//!
//! Any type that derives `Serialize`, `Deserialize`, `JsonSchema` and `Default` can be loaded. Every layer is checked
//! against the type's schema while the place of each key is still known, so that an unknown key or a wrong type is an
//! error that shows the line and names the nearest key. [figment] then merges the layers.
//!
//! - A file may hold `include = ["other.toml"]`, relative to itself; what it includes ranks below it, later entries
//!   above earlier ones.
//! - `ISOBAR_TRAIN__EPOCHS=3` sets `train.epochs`: two underscores a level.
//! - `--set train.epochs=3`: the value is TOML, and a bare word is a string.
//! - Numbers are finite: `inf` and `nan` are errors.
//! - Tables merge key by key; lists replace each other whole. Where a layer chooses another variant of a tagged enum
//!   (`[model] type = "fno"`), what lower layers said of the old variant is dropped.
//! - A table `[NAME]` of earlier versions may have become the table `[KEY]` with `type = "NAME"`: with
//!   `#[schemars(extend("x-former-table" = "NAME"))]` on the field `KEY`, the former spelling is still read.
//!
//! ```
//! use isobar_config::{self as config, Sources};
//! use schemars::JsonSchema;
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize, JsonSchema)]
//! #[serde(default)]
//! struct Train {
//!     /// Passes over the data.
//!     epochs: u32,
//! }
//! impl Default for Train {
//!     fn default() -> Self {
//!         Self { epochs: 10 }
//!     }
//! }
//!
//! let sources = Sources::default().set("epochs=3");
//! let resolved = config::load::<Train>(&sources)?;
//! assert_eq!(resolved.value.epochs, 3);
//! assert_eq!(resolved.origin("epochs").to_string(), "--set epochs");
//! # Ok::<(), isobar_config::ConfigError>(())
//! ```

mod check;
mod document;
mod error;
#[cfg(test)]
mod fuzz;
mod layer;
mod markdown;
mod place;
mod render;
mod schema;
mod shorten;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use figment::Figment;
use figment::value::Value as FigmentValue;
use isobar_launch::{Environment, LAUNCH_ATTEMPT, LAUNCH_ID, LAUNCH_PROGRESS, TOKEN};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use error::{ConfigError, Problem};
pub use markdown::reference_markdown;
pub use place::Origin;
pub use render::reference_toml;

use layer::Layer;
use place::Place;
use schema::Schema;

/// Environment variables with the prefix `ISOBAR_` that are not keys of the configuration.
pub const RESERVED_VARIABLES: [&str; 5] =
    ["ISOBAR_DISTRIBUTED_INITIALIZATION_METHOD", TOKEN, LAUNCH_ID, LAUNCH_ATTEMPT, LAUNCH_PROGRESS];

/// Sources of a configuration, in rising order of priority.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    files: Vec<PathBuf>,
    environment: Environment,
    sets: Vec<String>,
}

impl Sources {
    /// Sources with this process's environment variables.
    #[must_use]
    pub fn from_process() -> Self {
        Self { environment: Environment::from_process(), ..Self::default() }
    }

    /// Adds a TOML file; later files rank above earlier ones.
    #[must_use]
    pub fn file(mut self, path: impl AsRef<Path>) -> Self {
        self.files.push(path.as_ref().to_owned());
        self
    }

    /// Takes these environment variables in place of the present ones.
    #[must_use]
    pub fn environment(mut self, environment: Environment) -> Self {
        self.environment = environment;
        self
    }

    /// Adds the text of one `--set` option, `a.b=value`.
    #[must_use]
    pub fn set(mut self, assignment: impl Into<String>) -> Self {
        self.sets.push(assignment.into());
        self
    }
}

/// A configuration together with where each of its values came from.
#[derive(Clone, Debug)]
pub struct Resolved<T> {
    /// The configuration.
    pub value: T,
    layers: Vec<Layer>,
}

impl<T: Serialize + JsonSchema> Resolved<T> {
    /// Returns the origin of a key's value, such as `train.epochs`; [`Origin::Default`] if no layer set it.
    #[must_use]
    pub fn origin(&self, key: &str) -> Origin {
        let path: Vec<&str> = key.split('.').collect();
        self.layers.iter().rev().find_map(|layer| layer.place(&path)).map_or(Origin::Default, Place::origin)
    }

    /// Returns all keys that are set with their values as TOML, except the keys and tables in `without`.
    ///
    /// ```
    /// use isobar_config::{Sources, load};
    /// use schemars::JsonSchema;
    /// use serde::{Deserialize, Serialize};
    ///
    /// #[derive(Default, Serialize, Deserialize, JsonSchema)]
    /// #[serde(default)]
    /// struct Run {
    ///     seed: u64,
    ///     name: String,
    /// }
    ///
    /// let values = load::<Run>(&Sources::default().set("seed=3"))?.values(&["name"])?;
    /// assert_eq!(values, [("seed".to_owned(), "3".to_owned())].into());
    /// # Ok::<(), isobar_config::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The type does not serialise to a table of TOML values.
    pub fn values(&self, without: &[&str]) -> Result<BTreeMap<String, String>, ConfigError> {
        let mut values = BTreeMap::new();
        flatten("", &to_value(&self.value)?, without, &mut values);
        Ok(values)
    }

    /// The resolved configuration as TOML, with the origin of each value as a comment behind it.
    ///
    /// The text loads again to the same value.
    ///
    /// # Errors
    ///
    /// The type does not serialise to a table of TOML values.
    pub fn to_toml_with_origins(&self) -> Result<String, ConfigError> {
        render::resolved_toml(&self.value, &|key| self.origin(key))
    }
}

/// Loads a configuration from its sources.
///
/// # Errors
///
/// A file that is missing, unreadable, or includes itself; all syntax errors, unknown keys, wrong types and values out
/// of range, each with its place; a key without default that no layer sets.
pub fn load<T>(sources: &Sources) -> Result<Resolved<T>, ConfigError>
where
    T: Serialize + DeserializeOwned + JsonSchema + Default,
{
    let schema = Schema::of::<T>();
    let mut layers = vec![Layer::defaults(&T::default())?];
    let mut problems = Vec::new();
    for file in &sources.files {
        layers.append(&mut document::read(file)?);
    }
    layers.push(layer::environment(&sources.environment, &mut problems));
    layers.push(layer::command_line(&sources.sets, &mut problems));

    for (former, present) in schema.former_tables() {
        let mut chosen: Option<String> = None;
        for layer in &mut layers[1..] {
            problems.extend(layer.rename_table((former, present), chosen.as_deref()).err());
            chosen = layer.type_of(present).map(str::to_owned).or(chosen);
        }
    }
    for index in 1..layers.len() {
        let (below, rest) = layers.split_at_mut(index);
        let found = check::layer(&schema, below, &mut rest[0]);
        problems.extend(found.problems);
        for path in found.switched {
            below.iter_mut().for_each(|lower| lower.prune(&path));
        }
    }
    if !problems.is_empty() {
        return Err(ConfigError::Invalid { problems: error::Problems::sorted(problems) });
    }

    let figment = layers.iter().fold(Figment::new(), |figment, layer| figment.merge(layer));
    match figment.extract::<T>() {
        Ok(value) => Ok(Resolved { value, layers }),
        Err(errors) => Err(extraction_error(errors, &layers)),
    }
}

/// Returns the configuration key that a word probably means: a full name, the last part of one, or a similar
/// spelling. For error messages about options that are keys.
///
/// ```
/// use isobar_config::meant_key;
/// use schemars::JsonSchema;
///
/// #[derive(JsonSchema)]
/// struct Train {
///     batch_size: u32,
/// }
///
/// assert_eq!(meant_key::<Train>("batch-size").as_deref(), Some("batch_size"));
/// assert_eq!(meant_key::<Train>("learning-rate"), None);
/// ```
#[must_use]
pub fn meant_key<T: JsonSchema>(word: &str) -> Option<String> {
    check::meant(&Schema::of::<T>(), word)
}

/// Converts an error that the schema cannot detect, such as a missing key or a value that the type itself rejects.
fn extraction_error(errors: figment::Error, layers: &[Layer]) -> ConfigError {
    let problems = errors.into_iter().map(|error| {
        let mut path: Vec<&str> = error.path.iter().map(String::as_str).collect();
        let key = path.join(".");
        let place = loop {
            if let Some(place) = layers.iter().rev().find_map(|layer| layer.place(&path)) {
                break place.clone();
            }
            if path.pop().is_none() {
                break Place::Default;
            }
        };
        let (message, help) = match missing_field(&error.kind) {
            Some(field) => {
                let key = if key.is_empty() { field.to_owned() } else { format!("{key}.{field}") };
                (format!("key `{key}` is missing"), Some(format!("set it, as in --set {key}=VALUE")))
            }
            None => (format!("`{key}`: {}", error.kind), None),
        };
        Problem { message, place, help }
    });
    ConfigError::Invalid { problems: error::Problems::sorted(problems.collect()) }
}

/// The key that a type misses; a table with a `type` reports it as serde's text.
fn missing_field(kind: &figment::error::Kind) -> Option<&str> {
    match kind {
        figment::error::Kind::MissingField(field) => Some(field),
        figment::error::Kind::Message(text) => text.strip_prefix("missing field `")?.strip_suffix('`'),
        _ => None,
    }
}

/// Adds all keys below `path`, with their values as text.
fn flatten(path: &str, value: &FigmentValue, without: &[&str], values: &mut BTreeMap<String, String>) {
    if without.contains(&path) {
        return;
    }
    match value {
        FigmentValue::Dict(_, dict) => {
            for (key, value) in dict {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(&path, value, without, values);
            }
        }
        value => {
            values.extend(render::inline(value).map(|text| (path.to_owned(), text)));
        }
    }
}

/// The value of `T` as figment sees it: a table of TOML-like values.
fn to_value<T: Serialize>(value: &T) -> Result<FigmentValue, ConfigError> {
    FigmentValue::serialize(value).map_err(|error| ConfigError::Serialize { message: error.to_string() })
}
