//! The table of a configuration that names an entry, and its schema.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

/// Key of a table that names the entry.
pub const TYPE: &str = "type";

/// Reads a table: the name of the entry, and the other keys.
///
/// # Errors
///
/// A table without the key `type`, or with another value than a string.
///
/// ```
/// let mut table = serde_json::Deserializer::from_str(r#"{ "type": "adam", "lr": 0.1 }"#);
/// let (name, keys) = isobar_registry::read(&mut table)?;
/// assert_eq!((name.as_str(), keys), ("adam", serde_json::json!({ "lr": 0.1 })));
/// # Ok::<(), serde_json::Error>(())
/// ```
pub fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(String, Value), D::Error> {
    let table = Map::deserialize(deserializer)?;
    name_and_keys(Value::Object(table)).map_err(D::Error::custom)
}

/// Does the work of [`read`] for a table that is a value already.
pub(crate) fn name_and_keys(table: Value) -> serde_json::Result<(String, Value)> {
    let Value::Object(mut table) = table else {
        return Err(serde_json::Error::custom(format!(
            "found {table}, expected a table with the key {TYPE:?}"
        )));
    };
    match table.shift_remove(TYPE) {
        Some(Value::String(name)) => Ok((name, Value::Object(table))),
        Some(other) => Err(serde_json::Error::custom(format!("{TYPE} is {other}, expected a string"))),
        None => Err(serde_json::Error::missing_field(TYPE)),
    }
}

/// Returns the table of an entry: the key `type`, then its own keys.
///
/// # Errors
///
/// Keys that are not a table.
pub fn tagged(name: &str, keys: Value) -> serde_json::Result<Map<String, Value>> {
    let mut table = Map::from_iter([(TYPE.to_owned(), name.into())]);
    match keys {
        Value::Object(keys) => table.extend(keys),
        other => {
            let message = format!("the configuration of {name:?} is {other}, expected a table");
            return Err(<serde_json::Error as serde::ser::Error>::custom(message));
        }
    }
    Ok(table)
}

/// Returns the schema of the table that names an entry: the key `type`, then the keys of `own`. `summary` replaces its description.
pub fn schema_of(
    name: &str,
    summary: Option<&str>,
    own: fn(&mut SchemaGenerator) -> Schema,
    generator: &mut SchemaGenerator,
) -> Value {
    let mut form = own(generator).to_value();
    let Some(table) = form.as_object_mut() else { return form };
    if let Some(summary) = summary {
        table.insert("description".to_owned(), summary.into());
    }
    let mut properties = Map::from_iter([(TYPE.to_owned(), json!({ "const": name }))]);
    if let Some(Value::Object(own)) = table.remove("properties") {
        properties.extend(own);
    }
    let mut required = vec![Value::from(TYPE)];
    if let Some(Value::Array(own)) = table.remove("required") {
        required.extend(own);
    }
    table.insert("type".to_owned(), "object".into());
    table.insert("properties".to_owned(), properties.into());
    table.insert("required".to_owned(), required.into());
    form
}

/// Returns the schema of a table that names one of several entries.
pub fn one_of(description: &str, forms: Vec<Value>) -> Schema {
    json_schema!({ "description": description, "oneOf": forms })
}
